"""The agent's metrics: a bounded number of series by adapter."""

import asyncio
import os
import signal
from dataclasses import replace

import httpx
import pytest

from tests.patience import patience, within
from tests.workers.running import post
from workers.metrics import MOST_NAMED, WorkerMetrics
from workers.wire import AdapterMemory, WorkerAdapter


def series_lines(metrics: WorkerMetrics, name: str) -> list[str]:
    return [line for line in metrics.page().decode().splitlines() if line.startswith(f"{name}{{")]


def test_only_recently_loaded_adapters_have_a_series():
    metrics = WorkerMetrics("w0")
    for number in range(MOST_NAMED + 20):
        metrics.load_seconds(f"a{number}").observe(1.0)
    metrics.unload_seconds("a30").observe(1.0)
    metrics.load_seconds("new").observe(1.0)
    counts = series_lines(metrics, "lora_load_duration_seconds_count")
    assert len(counts) == MOST_NAMED
    assert not any('lora_id="a20"' in line for line in counts)
    assert 'lora_load_duration_seconds_count{lora_id="a30",worker_id="w0"} 1.0' in counts
    assert len(metrics.page()) < 200_000


def test_failed_loads_are_counted_by_adapter_and_by_code_and_push_out_no_other_series():
    metrics = WorkerMetrics("w0")
    metrics.load_seconds("loaded").observe(1.0)
    for number in range(MOST_NAMED + 20):
        metrics.count_load_failure(f"a{number}", "rank_too_big")
    metrics.count_load_failure("a30", "disk_full")
    counts = series_lines(metrics, "lora_load_failures_total")
    assert len(counts) == MOST_NAMED
    assert 'lora_load_failures_total{lora_id="a30",worker_id="w0"} 2.0' in counts
    codes = series_lines(metrics, "lorafleet_workers_load_failures_total")
    assert f'lorafleet_workers_load_failures_total{{code="rank_too_big"}} {MOST_NAMED + 20.0}' in codes
    assert len(series_lines(metrics, "lora_load_duration_seconds_count")) == 1


def loaded_adapter(lora_id: str, size_bytes: int, requests: int, digest: str = "", *, slot_bytes: int = 0):
    memory = AdapterMemory(slot_bytes=slot_bytes, host_bytes=2 * size_bytes, by="engine") if slot_bytes else None
    return WorkerAdapter(
        lora_id=lora_id,
        digest=digest,
        size_bytes=size_bytes,
        request_count=requests,
        memory=memory,
        location="device",
    )


def test_unloaded_adapter_has_no_size_or_request_series():
    metrics = WorkerMetrics("w0")
    metrics.set_loaded_adapters(
        [loaded_adapter("a", 10, 1), loaded_adapter("b", 20, 2), loaded_adapter("b", 5, 1, digest="other")]
    )
    for name in ("lora_memory_usage_bytes", "lora_file_size_bytes"):
        assert f'{name}{{lora_id="b",worker_id="w0"}} 25.0' in series_lines(metrics, name)
        assert f'{name}{{lora_id="a",worker_id="w0"}} 10.0' in series_lines(metrics, name)
    metrics.set_loaded_adapters([loaded_adapter("a", 10, 4)])
    assert series_lines(metrics, "lora_memory_usage_bytes") == [
        'lora_memory_usage_bytes{lora_id="a",worker_id="w0"} 10.0'
    ]
    assert series_lines(metrics, "lora_request_count") == ['lora_request_count{lora_id="a",worker_id="w0"} 4.0']


@pytest.mark.parametrize(("location", "held"), [("device", 120.0), ("host", 20.0), ("disk", 0.0)])
def test_memory_is_what_the_engine_holds_by_the_adapters_place(location, held):
    metrics = WorkerMetrics("w0")
    metrics.set_loaded_adapters([replace(loaded_adapter("a", 10, 0, slot_bytes=100), location=location)])
    labels = '{lora_id="a",worker_id="w0"}'
    assert series_lines(metrics, "lora_memory_usage_bytes") == [f"lora_memory_usage_bytes{labels} {held}"]
    assert series_lines(metrics, "lora_file_size_bytes") == [f"lora_file_size_bytes{labels} 10.0"]


async def test_loads_fetches_and_hits_are_counted(worker):
    async with worker.together() as client:
        size = (await post(client, "load_lora", lora_id="legal/v2")).json()["size_bytes"]
        digest = (await post(client, "load_lora", lora_id="legal/v2")).json()["digest"]
        await post(client, "unload_lora", lora_id="legal/v2")
        await post(client, "load_lora", lora_id="legal/v2", digest=digest)
        page = (await client.get("/metrics")).text.splitlines()
        labels = '{lora_id="legal/v2",worker_id="worker-0"}'
        assert f"lora_load_duration_seconds_count{labels} 2.0" in page
        assert f"lora_unload_duration_seconds_count{labels} 1.0" in page
        assert f"lora_file_size_bytes{labels} {float(size)}" in page
        (lora,) = (await client.get("/metadata")).json()["lora"]["loaded_loras"]
        # Rank 8, of which a slot of the sim's engine takes two: 16, and the copy in host memory one.
        memory = lora["memory"]
        assert (memory["by"], memory["slot_bytes"]) == ("estimate", 2 * memory["host_bytes"])
        assert lora["memory_mb"] == round(3 * memory["host_bytes"] / 1e6, 3)
        assert f"lora_memory_usage_bytes{labels} {3.0 * memory['host_bytes']}" in page
        fetched = next(line for line in page if line.startswith("lorafleet_workers_fetched_bytes_total "))
        assert float(fetched.split()[1]) % size == 0
        assert 'lorafleet_workers_cache_total{outcome="hit"} 1.0' in page
        assert "lorafleet_workers_ghosts 1.0" in page


async def test_metrics_have_the_cache_limit_and_bytes_in_use(worker):
    async with worker.together("--max-disk-bytes", "100000000", "--cache-grace-s", "1") as client:
        size = (await post(client, "load_lora", lora_id="legal/v2")).json()["size_bytes"]
        async with within(10):
            page: list[str] = []
            while f"lorafleet_workers_disk_held_bytes {float(size)}" not in page:
                page = (await client.get("/metrics")).text.splitlines()
        assert "lorafleet_workers_disk_limit_bytes 1e+08" in page


@pytest.mark.fleet
async def test_metrics_of_a_gone_engine_are_cleared(worker):
    slow = ("--crash-loop-after", "1", "--crash-loop-retry-s", "60")
    async with worker.inside(*slow) as client:
        url = (await client.get("/metadata")).json()["transport"]["engine_url"]
        async with httpx.AsyncClient(timeout=patience(10)) as engine:
            ask = {"model": "tiny-qwen", "prompt": "hello " * 200, "max_tokens": 20}
            assert (await engine.post(f"{url}/v1/completions", json=ask)).is_success
        names = ("kv_blocks", "kv_ledger_bytes", "kv_ledger_whole", "decode_tokens_per_s", "engine_up")
        async with within(20):
            while 0.0 in (await worker_metrics(client, names)).values():
                await asyncio.sleep(0.05)
        os.kill(worker.engine_pid, signal.SIGKILL)
        async with within(20):
            while (await worker_metrics(client, ["engine_up"]))["engine_up"]:
                await asyncio.sleep(0.05)
        assert await worker_metrics(client, names) == dict.fromkeys(names, 0.0)


async def worker_metrics(client, names) -> dict[str, float]:
    lines = [line.split() for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    values = {line[0]: float(line[-1]) for line in lines}
    return {name: values[f"lorafleet_workers_{name}"] for name in names}
