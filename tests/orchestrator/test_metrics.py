"""Metrics, their bounded labels, and the cost of a pass."""

import math
import re
from random import Random

import pytest

from lorafleet.identity import engine_name
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.metrics import OTHER, BoundedLabels, OrchestratorMetrics
from tests.calls import count_calls
from tests.orchestrator.doubles import FakeAgent, digest_of
from tests.orchestrator.reports import CountingRouter
from tests.registered import registered
from workers.wire import Metadata


def series(text, name):
    """labels -> value, of one metric in Prometheus text."""
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


def test_series_are_bounded_and_the_rest_are_one():
    labels = BoundedLabels(2)
    assert [labels.label(name) for name in "abca"] == ["a", "b", OTHER, "a"]
    assert labels.update({"a": 1.0, "b": 5.0}) == set()
    assert labels.update({"a": 1.0, "b": 5.0, "c": 9.0, "d": 8.0, "e": 7.0}) == {"a"}
    assert labels.label("c") == "c"
    assert labels.label("a") == OTHER


def test_a_busy_adapter_takes_the_series_of_an_idle_one():
    labels = BoundedLabels(3)
    for name in ("a/v1", "b/v1", "c/v1"):
        labels.label(name)
    assert labels.update({"a/v1": 1.0}) == set()
    assert labels.update({"a/v1": 1.0, "a/v2": 5.0}) == {"c/v1"}
    assert [labels.label(name) for name in ("a/v1", "a/v2")] == ["a/v1", "a/v2"]


async def test_the_series_of_a_deleted_adapter_end(service, clock):
    await service.worker()
    await service.register()
    await service.ensure()
    await service.settle()
    for seq, requests in ((1, 0), (2, 7)):
        use = {"worker_id": "w0", "engine_name": "sql/v1@000000000000", "requests": requests}
        await service.usage(1, use, seq=seq)
    assert 'lora_usage_requests_total{lora_id="sql/v1"} 7.0' in (await service.http.get("/metrics")).text
    await service.http.delete("/v1/adapters/sql/v1")
    clock.now += 60
    await service.settle()
    assert "sql/v1" not in (await service.http.get("/metrics")).text


def test_every_request_is_counted_once_and_no_series_ever_falls():
    metrics, totals, rng = OrchestratorMetrics(), {}, Random(3)
    metrics.adapter_labels = BoundedLabels(3)
    metrics.observe_usage(lambda: {name: (total, rng.random()) for name, total in totals.items()})
    before, ended = {}, 0.0
    for _ in range(40):
        name = rng.choice("abcdefgh")
        totals[name] = totals.get(name, 0) + rng.randrange(1, 5)
        now = series(metrics.render().decode(), "lora_usage_requests_total")
        assert len(now) <= 4
        assert all(now[labels] >= before[labels] for labels in now.keys() & before.keys())
        ended += sum(before[labels] for labels in before.keys() - now.keys())
        assert sum(now.values()) + ended == sum(totals.values())
        before = now


async def test_evictions_are_counted_by_reason_and_loads_are_timed(service, clock):
    await service.worker(slots=1)
    await service.http.patch("/v1/policy", json={"min_residency_s": 0})
    for name in ("a/v1", "b/v1"):
        await service.register(name)
        await service.ensure(name)
        await service.settle()
        clock.now += 1
        await service.settle()
    text = (await service.http.get("/metrics")).text
    assert series(text, "lora_evictions_total") == {'lora_id="a/v1",reason="lru"': 1.0}
    assert series(text, "lora_placement_operations_total")['operation="load",outcome="ok"'] == 2.0
    assert "lorafleet_orchestrator_load_seconds_count 2.0" in text
    assert "lorafleet_orchestrator_leading 1.0" in text
    use = {"worker_id": "w0", "engine_name": engine_name("b/v1", digest_of("file:///b/v1")), "in_flight": 0}
    for seq in (1, 2):
        await service.usage(1, use | {"requests": 5 * seq}, seq=seq)
    text = (await service.http.get("/metrics")).text
    assert series(text, "lora_usage_requests_total") == {'lora_id="b/v1"': 5.0}


async def test_every_load_and_unload_is_in_the_history_with_actor_and_result(service, clock):
    agent = await service.worker(slots=1)
    await service.http.patch("/v1/policy", json={"min_residency_s": 0})
    await service.register("a/v1")
    await service.settle()
    agent.refuse["a/v1"] = "engine_down"
    await service.ensure("a/v1")
    await service.settle()
    agent.refuse.clear()
    await service.register("b/v1")
    for name in ("a/v1", "b/v1"):
        clock.now += 2
        await service.ensure(name)
        await service.settle()
        clock.now += 1
        await service.settle()
    await service.http.delete("/v1/adapters/b/v1")
    for _ in range(2):
        clock.now += 1
        await service.settle()
    entries = service.store.history(kinds=("load", "unload"))
    told = [(e.kind, e.subject, e.body["outcome"], e.actor) for e in reversed(entries)]
    assert told == [
        ("load", "a/v1", "failed", "anyone"),
        ("load", "a/v1", "ok", "anyone"),
        ("unload", "a/v1", "ok", "anyone"),
        ("load", "b/v1", "ok", "anyone"),
        ("unload", "b/v1", "ok", "anyone"),
    ]
    assert entries[-1].body["code"] == "engine_down"
    assert all({"worker_id", "reason", "epoch"} <= e.body.keys() for e in entries)


@pytest.fixture
async def large(tmp_path):
    """200 workers with 60 of 10,000 adapters each, and traffic on them; nothing is served."""
    rng, names = Random(1), [f"a{n}/v1" for n in range(10_000)]
    built = build(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0, probe_after_s=1e6))
    built.leadership.lead_until(math.inf)
    it = built.reconciler
    with built.store.together():
        for name in names:
            known = {"base_model": "tiny-qwen", "digest": digest_of(name), "rank": 8, "size_bytes": 1000}
            built.store.put_adapter(registered(name, source=name, **known))
    uses = []
    for number in range(200):
        agent = FakeAgent(f"w{number}", slots=64)
        agent.epoch = built.store.epoch
        for name in rng.sample(names, 60):
            agent.put(name, name)
            uses.append((name, agent.worker_id, rng.randrange(100)))
        it.monitor.record_heartbeat(Metadata.model_validate(agent.metadata()))
    router = CountingRouter()
    for seq in (1, 2):
        for name, worker_id, requests in uses:
            router.count(name, worker_id, sent=seq * requests)
        it.demand.record_report(router.report(1), seq)
    yield it
    await it.stop()
    await built.leadership.release()
    await built.client.aclose()
    built.store.close()


@pytest.mark.slow
async def test_a_pass_makes_some_dozens_of_calls_for_each_adapter_and_copy(large):
    large.run_pass()  # the first one also makes every entry of the catalog
    adapters, copies = 10_000, 200 * 60
    # 46 for each; a loop over all pairs would be thousands.
    assert 10_000 < count_calls(large.run_pass) < 70 * (adapters + copies)
