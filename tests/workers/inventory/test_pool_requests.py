"""Requests count once, as hits or misses of the adapter pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.vllm_plugin.engine_reports import PoolMissCounter
from workers.core.slots import AdapterSlots
from workers.inventory.pool_requests import PoolRequests
from workers.metrics import WorkerMetrics

SLOTS = AdapterSlots(max_loras=1, max_cpu_loras=2).after_load("c").after_load("b").after_load("a")


def counted(metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    (family,) = [each for each in metrics.registry.collect() if each.name == "lorafleet_workers_pool_requests"]
    samples = (each for each in family.samples if each.name.endswith("_total"))
    return {(each.labels["found"], each.labels["by"]): each.value for each in samples}


def test_without_an_engines_count_the_slots_say_where_the_first_request_found_its_adapter(tmp_path):
    metrics = WorkerMetrics("w0")
    PoolRequests(metrics, tmp_path).count({"a": 3, "b": 2, "c": 1}, SLOTS)
    assert counted(metrics) == {
        ("device", "estimate"): 4.0,
        ("host", "estimate"): 1.0,
        ("disk", "estimate"): 1.0,
    }


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8))
def test_with_an_engines_count_every_reported_request_is_counted_once(rounds):
    with pytest.MonkeyPatch.context() as patch:
        metrics, now = WorkerMetrics("w0"), {}
        patch.setattr("workers.inventory.pool_requests.read_pool_misses", lambda _: dict(now))
        from lorafleet.engine.vllm_plugin.engine_reports import PoolMisses

        pool, misses, requests = PoolRequests(metrics, None), 0, 0
        now["7"] = PoolMisses()
        for missed, reported in rounds:
            misses += missed
            requests += reported
            now["7"] = PoolMisses(host=misses)
            pool.count({"a": reported} if reported else {}, SLOTS)
        found = counted(metrics)
        assert found.get(("host", "engine"), 0.0) == misses
        total = sum(found.values())
        assert max(misses, requests) <= total <= misses + requests


def test_a_restarted_engine_counts_from_zero(tmp_path):
    metrics = WorkerMetrics("w0")
    pool = PoolRequests(metrics, tmp_path)
    for _ in range(2):
        counter = PoolMissCounter(tmp_path)  # of the same process number
        counter.count({1, 2}, on_device=(), in_host={1})
        pool.read_misses()
        counter.count({1}, on_device=(), in_host=())
        pool.count({"a": 4}, SLOTS)
        PoolMissCounter(tmp_path)
        pool.read_misses()
    assert counted(metrics) == {("host", "engine"): 2.0, ("disk", "engine"): 4.0, ("device", "engine"): 2.0}
