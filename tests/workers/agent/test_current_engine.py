"""The engine beside an agent: its measured rates in the agent's answers, and when it counts as stalled."""

import itertools
from dataclasses import dataclass

import httpx
import pytest

from lorafleet.engine.metrics_page import EngineMetrics
from tests.patience import patience, until
from tests.workers.running import post
from workers import wire
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.metrics import WorkerMetrics


async def reported_load(client) -> wire.Load:
    return wire.Metadata.model_validate((await client.get("/metadata")).json()).load


async def has_measured_decodes(client) -> bool:
    load = await reported_load(client)
    return bool(load.mean_output_tokens and load.decode_tokens_per_s)


@pytest.mark.fleet
async def test_load_time_is_reported_even_after_an_agents_restart(worker):
    slow = "--engine-args=--sim-load-s=0.3"
    async with worker.inside(slow) as client:
        assert (await reported_load(client)).load_seconds == 0.0
        for lora_id in ("sql-expert/v1", "python-expert/v1"):
            assert (await post(client, "load_lora", lora_id=lora_id)).status_code == 200
        assert 0.3 <= (await reported_load(client)).load_seconds < patience(2)
    async with worker.inside(slow) as client:
        assert 0.3 <= (await reported_load(client)).load_seconds < patience(2)


async def test_measured_rates_are_in_metadata_and_metrics(worker):
    speed = ("--sim-prefill-tokens-per-s", "5000", "--sim-decode-tokens-per-s", "100")
    async with worker.together(engine=speed) as client, httpx.AsyncClient(timeout=patience(10)) as direct:
        url = wire.Metadata.model_validate((await client.get("/metadata")).json()).transport.engine_url
        body = {"model": "tiny-qwen", "max_tokens": 30, "ignore_eos": True}
        fresh = itertools.count(7)
        assert (await reported_load(client)).prefill_tokens_per_s == 0.0

        async def is_asked_and_learned() -> bool:
            """Send one more request: on a busy machine a reading may miss that a prefill was alone."""
            prompt = [next(fresh)] * 600  # not cached
            assert (await direct.post(f"{url}/v1/completions", json=body | {"prompt": prompt})).status_code == 200
            await until(lambda: has_measured_decodes(client))
            return (await reported_load(client)).prefill_tokens_per_s > 0

        await until(is_asked_and_learned)
        load = await reported_load(client)
        assert load.mean_output_tokens == 30
        # The sim has the configured speed. On a busy machine it is late, and makes up for that in its next steps.
        assert 0.3 < load.mean_request_s < patience(2)
        assert 5_000 / patience(1) < load.prefill_tokens_per_s < 5_000 * patience(1)
        assert 100 / patience(1) < load.decode_tokens_per_s < 100 * patience(1)
        assert 0.008 < load.inter_token_s < patience(0.02)
        page = (await client.get("/metrics")).text
        assert f"lorafleet_workers_mean_output_tokens {load.mean_output_tokens}" in page
        assert f"lorafleet_workers_prefill_tokens_per_s {load.prefill_tokens_per_s}" in page


# --- stalled engines --------------------------------------------------------------------------------------------------


class StillEngine:
    """An engine whose counters change only when the test sets them."""

    def __init__(self):
        self.now = EngineMetrics()

    async def scrape(self):
        return self.now


@dataclass
class EngineClock:
    now: float = 100.0


@pytest.fixture
def engine():
    clock = EngineClock()
    engine = CurrentEngine(WorkerSettings(model="/models/m"), WorkerMetrics(), clock=lambda: clock.now)
    engine.client = StillEngine()
    return engine, clock


async def stalled_s_after(engine, clock, seconds, *, in_flight=None):
    for _ in range(seconds):
        clock.now += 1.0
        if in_flight is not None:
            engine.set_requests_in_flight(in_flight)
        await engine.scrape()
    return engine.stalled_s()


async def test_engine_stalls_only_while_it_has_requests(engine):
    engine, clock = engine
    assert await stalled_s_after(engine, clock, 60) == 0.0  # idle
    engine.client.now = EngineMetrics(running=1)
    assert await stalled_s_after(engine, clock, 2) <= 2.0
    assert await stalled_s_after(engine, clock, 10) == pytest.approx(10.0, abs=1.0)
    clock.now += 100.0  # without readings of its metrics
    assert engine.stalled_s() == pytest.approx(10.0, abs=1.0)
    engine.client.now = EngineMetrics(running=1, steps=1.0)
    assert await stalled_s_after(engine, clock, 1) == 0.0
    async with engine.lock:  # an adapter is being loaded
        assert await stalled_s_after(engine, clock, 20) == 0.0
    assert await stalled_s_after(engine, clock, 10) == pytest.approx(9.0, abs=1.0)
    engine.client.now = EngineMetrics(steps=1.0)
    assert await stalled_s_after(engine, clock, 3) == 0.0


async def test_stall_limit_allows_for_a_full_step(engine, monkeypatch):
    engine, clock = engine
    await stalled_s_after(engine, clock, 1)
    engine.client.now = EngineMetrics(running=1)
    await stalled_s_after(engine, clock, 9)
    assert not engine.has_stalled
    await stalled_s_after(engine, clock, 4)
    assert engine.has_stalled
    monkeypatch.setattr(engine, "full_step_s", lambda: 20.0)
    await stalled_s_after(engine, clock, 34)
    assert not engine.has_stalled
    await stalled_s_after(engine, clock, 6)
    assert engine.has_stalled


async def test_engine_without_counters_never_stalls(engine):
    engine, clock = engine
    assert await stalled_s_after(engine, clock, 60, in_flight=9) == 0.0


async def test_fresh_reports_of_requests_in_flight_make_an_idle_engine_stall(engine):
    engine, clock = engine
    await stalled_s_after(engine, clock, 1)
    engine.client.now = EngineMetrics(steps=1.0)
    await stalled_s_after(engine, clock, 60, in_flight=0)
    assert await stalled_s_after(engine, clock, 10, in_flight=3) == pytest.approx(9.0, abs=1.0)
    assert await stalled_s_after(engine, clock, 9) > 17.0
    assert await stalled_s_after(engine, clock, 3) == 0.0  # without reports from the orchestrator
