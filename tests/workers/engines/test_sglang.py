"""A real agent with SGLang's stub, started by the agent or attached."""

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.engines import start_engine
from tests.patience import patience, until
from tests.workers.running import RunningWorker, loaded, metadata_of, post
from workers.config import AgentTimers
from workers.wire import Metadata

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[3]
STUB = (sys.executable, "-P", "-m", "tests.sglang_stub")
FLAGS = ("--engine", "sglang", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
SHAPE = ("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "256")


@pytest.fixture(autouse=True)
def stub_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("SGLANG_STUB_HEALTH_S", "0.01")


@pytest.fixture
def worker(agent_model, agent_adapters, tmp_path) -> RunningWorker:
    return RunningWorker(agent_model, agent_adapters, tmp_path, *FLAGS)


async def until_another(client, before: Metadata) -> None:
    """Wait until the agent is ready with another engine boot."""

    async def is_another() -> bool:
        now = await metadata_of(client)
        return now.engine_boot_id != before.engine_boot_id and now.state == "ready"

    await until(is_another)


async def test_killed_sglang_restarts_with_its_adapters_and_another_boot_id(worker):
    async with worker.inside(*SHAPE, "--", *STUB, "--page-size", "64") as client:
        before = await metadata_of(client)
        assert (before.transport.dialect, before.transport.kv_ledger) == ("sglang", 1)
        shape = before.model.runtime_config
        assert (shape.block_size, shape.total_kv_blocks, shape.max_model_len) == (64, 128, 2048)
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        os.kill(worker.engine_pid, 9)
        await until_another(client, before)
        assert await loaded(client) == {"sql-expert/v1"}


@pytest.mark.parametrize("phase", ["SGLANG_STUB_PREFILL_S", "SGLANG_STUB_TOKEN_S"])
async def test_sglang_is_not_drained_during_a_prefill(worker, monkeypatch, phase):
    """SGLang's gauge of running requests is updated every 40 tokens: a drain must not rely on it."""
    monkeypatch.setenv(phase, str(patience(0.7)))
    timers = AgentTimers(quiet_s=0.1)
    async with (
        worker.inside(*SHAPE, "--", *STUB, timers=timers) as client,
        httpx.AsyncClient(timeout=patience(20)) as user,
    ):
        engine = (await metadata_of(client)).transport.engine_url
        body = {"model": "tiny-qwen", "prompt": [7] * 40, "max_tokens": 2}
        requested = asyncio.create_task(user.post(f"{engine}/v1/completions", json=body, timeout=patience(30)))

        async def is_counted() -> bool:
            return 'endpoint="/v1/completions",method="POST"} 1' in (await user.get(f"{engine}/metrics")).text

        await until(is_counted)
        drained = (await client.post("/v1/admin/drain", json={"deadline_s": 0.1})).json()
        assert (drained["is_drained"], drained["running"]) == (False, 1)
        assert (await requested).status_code == 200
        assert (await client.post("/v1/admin/drain", json={"deadline_s": patience(5)})).json()["is_drained"]


async def test_attached_sglang_works_and_its_restart_is_noticed(worker, agent_model):
    first = start_engine("sglang", agent_model)
    try:
        timers = AgentTimers(watch_s=0.1, attached_s=patience(0.5))
        async with worker.inside("--engine-url", first.url, timers=timers) as client:
            before = await metadata_of(client)
            assert (before.transport.dialect, before.transport.engine_url) == ("sglang", first.url)
            assert (before.transport.kv_events, before.transport.kv_ledger) == ((first.kv_endpoint,), 1)
            assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
            first.process.kill()
            await asyncio.to_thread(first.process.wait)
            port = urlsplit(first.url).port
            second = await asyncio.to_thread(start_engine, "sglang", agent_model, port=port)
            try:
                await until_another(client, before)
                assert await loaded(client) == {"sql-expert/v1"}
            finally:
                second.stop()
    finally:
        first.stop()


async def test_engine_of_another_kind_is_refused_with_a_remedy(worker, agent_model):
    engine = start_engine("sim", agent_model)
    try:
        async with worker.running("--engine-url", engine.url, until_ready=False) as client:
            log = worker.folder / "agent.log"
            await until(lambda: "is not SGLang's" in log.read_text())
            assert "say with --engine what runs there" in log.read_text()
            assert (await client.get("/ready")).status_code == 503
    finally:
        engine.stop()


@pytest.mark.parametrize("ignores", ["0", "1"])
async def test_sglang_is_asked_whether_its_answers_change_with_an_adapter(worker, monkeypatch, ignores):
    monkeypatch.setenv("SGLANG_STUB_IGNORES_ADAPTERS", ignores)
    async with worker.inside(*SHAPE, "--", *STUB) as client:
        answer = await post(client, "load_lora", lora_id="sql-expert/v1")
        if ignores == "0":
            assert answer.raise_for_status().json()["effect"] == "seen"
        else:
            assert answer.json()["error"]["code"] == "adapter_no_effect"
            assert await loaded(client) == set()
