"""The agent beside engines that hang, die or are restarted, its own and attached ones."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.engines import start_engine
from tests.patience import patience, until, within
from tests.serving import client_of
from tests.workers.broken import BROKEN
from tests.workers.running import RunningWorker, code, group_of, is_running, loaded, metadata_of, post, until_state
from workers.agent.supervisor import status_text
from workers.config import AgentTimers
from workers.engines.launch import LaunchCommand
from workers.engines.process import EngineProcess
from workers.wire import Metadata

# Long enough for a healthy engine on a busy machine.
HASTY = ("--health-timeout-s", str(patience(0.2)), "--hang-after-s", str(patience(0.4)))
HASTY_TIMERS = AgentTimers(watch_s=0.1, attached_s=patience(0.5))
THREE = ("sql-expert/v1", "legal/v2", "python-expert/v1")


@pytest.mark.fleet
async def test_hung_engine_is_restarted_with_its_adapters_and_its_load_fails(worker):
    async with worker.inside(*HASTY, timers=HASTY_TIMERS) as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
        before = await metadata_of(client)
        hung = worker.engine_pid
        os.kill(hung, signal.SIGSTOP)
        swallowed = await post(client, "load_lora", lora_id="legal/v2")
        assert (swallowed.status_code, code(swallowed)) in {(503, "engine_unreachable"), (503, "engine_down")}
        await until(lambda: not is_running(hung))
        await worker.ready_again(client, before)
        assert await loaded(client) == {"sql-expert/v1"}


@pytest.mark.fleet
async def test_engine_that_dies_during_an_eviction_restarts_with_the_victim(worker):
    slow = f"--engine-args=--sim-load-s={patience(0.2)}"
    async with worker.inside(slow, "--preload-loras", THREE[0]) as client:
        for lora_id in THREE[1:]:
            await post(client, "load_lora", lora_id=lora_id)
        evicting = asyncio.create_task(post(client, "load_lora", lora_id="extra/v1", evict="legal/v2"))
        async with within(10):
            while "legal/v2" in await loaded(client):
                await asyncio.sleep(0.02)
        os.kill(worker.engine_pid, signal.SIGKILL)
        assert (await evicting).status_code == 503
        await until(lambda: not (worker.state_dir / "engine.pid").exists())
        # The agent may report ready a moment longer: the PID file is removed first.
        async with within(20):
            while await loaded(client) != set(THREE):
                await asyncio.sleep(0.02)
        await worker.ready(client)


@pytest.mark.fleet
async def test_worker_recovers_when_the_guard_process_dies(worker):
    children = "sleep 1000 & exec " + sys.executable + ' -m lorafleet.sim "$@"'
    # A real process: uvloop reports an exit before all holders of the pipes have ended.
    async with worker.running("--", "sh", "-c", children, "sim") as client:
        before, group = await metadata_of(client), group_of(worker.engine_pid)
        assert len(group) == 3  # guard, sim, and a child that keeps the engine's output open
        guard = os.getpgid(worker.engine_pid)
        os.kill(guard, signal.SIGKILL)
        await until(lambda: not any(is_running(pid) for pid in group))
        await worker.ready_again(client, before)


@pytest.mark.fleet
async def test_slow_adapter_does_not_block_the_restore_of_others(worker):
    async with worker.inside() as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
    slow = ("--engine-args=--sim-load-s=2", "--load-deadline-s", "0.3")
    async with worker.inside(*slow, until_ready=False) as client:
        await worker.ready(client, within_s=15)
        failed = {item.lora_id for item in (await metadata_of(client)).lora.loaded_loras if item.state == "failed"}
        assert failed <= {"sql-expert/v1"}


@pytest.mark.fleet
async def test_hanging_load_makes_the_worker_suspect_until_it_returns_a_token(worker):
    slow = (f"--engine-args=--sim-load-s={patience(0.8)}", "--load-deadline-s", "0.3")
    async with worker.inside(*slow, *HASTY[:2]) as client:
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "engine_timeout"
        metadata = await metadata_of(client)
        assert (metadata.state, metadata.is_suspect) == ("ready", True)
        refused = await post(client, "load_lora", lora_id="legal/v2")
        assert code(refused) == "not_ready"
        assert "sql-expert/v1 hangs" in refused.json()["error"]["message"]
        async with within(10):
            while (await metadata_of(client)).is_suspect:
                await asyncio.sleep(0.05)
        assert (await metadata_of(client)).engine_boot_id == metadata.engine_boot_id


@pytest.mark.fleet
async def test_engine_stuck_in_a_load_is_restarted(worker):
    hanging = ("--engine-args=--sim-load-s=600", "--load-deadline-s", "0.3")
    async with worker.inside(*hanging, *HASTY, timers=HASTY_TIMERS) as client:
        before = await metadata_of(client)
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "engine_timeout"
        async with within(20):
            while (await metadata_of(client)).engine_boot_id in {before.engine_boot_id, ""}:
                await asyncio.sleep(0.05)
        assert (await metadata_of(client)).is_suspect is False


STALLS = ("--suspect-after-s", "0.3", "--heartbeat-s", "0.1")
SHORT = ("--health-timeout-s", "0.3")


@dataclass
class Stall:
    """A load that the engine does not finish, and a request that waits for it.

    asking  the request's task
    files   the folder of the adapter that the engine reads; its configuration is a pipe
    """

    asking: asyncio.Task[httpx.Response]
    files: Path

    def end(self) -> None:
        """Let the engine read the configuration, which it refuses; no-op if no engine waits for it."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.files / "adapter_config.json", os.O_WRONLY | os.O_NONBLOCK))


@contextlib.asynccontextmanager
async def stalled_engine(client, folder):
    """Stall the engine with a request until the stall is ended, while its health route answers; yields the stall.

    The sim stalls during a load, as vLLM does; the agent does not know of this load.
    """
    files = folder / "strange"
    files.mkdir()
    os.mkfifo(files / "adapter_config.json")
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(base_url=url, timeout=None) as engine:
        body = {"model": "tiny-qwen", "prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True}
        stall = Stall(asyncio.create_task(engine.post("/v1/completions", json=body)), files)
        async with within(10):
            while not (await metadata_of(client)).load.running:
                await asyncio.sleep(0.02)
        load = {"lora_name": "strange", "lora_path": str(files)}
        loading = asyncio.create_task(engine.post("/v1/load_lora_adapter", json=load))
        try:
            yield stall
        finally:
            for task in (loading, stall.asking):
                task.cancel()
            await asyncio.gather(loading, stall.asking, return_exceptions=True)
            stall.end()


async def until_suspect(client, *, is_suspect=True) -> Metadata:
    async with within(15):
        while (metadata := await metadata_of(client)).is_suspect is not is_suspect:
            await asyncio.sleep(0.02)
    return metadata


@pytest.mark.fleet
async def test_engine_that_stops_computing_is_suspect_until_it_computes(worker, tmp_path):
    # A full engine returns no token to the agent, but its counters move.
    async with worker.inside("--max-num-seqs", "1", *STALLS, *SHORT, timers=AgentTimers(watch_s=0.1)) as client:
        before = await metadata_of(client)
        async with stalled_engine(client, tmp_path) as stall:
            metadata = await until_suspect(client)
            assert (metadata.state, metadata.engine_boot_id) == ("ready", before.engine_boot_id)
            assert "has requests, and has computed nothing" in metadata.state_reason
            async with client_of() as http:
                assert (await http.get(f"{metadata.transport.engine_url}/health")).status_code == 200
            refused = await post(client, "load_lora", lora_id="sql-expert/v1")
            assert (code(refused), "computed nothing" in refused.text) == ("not_ready", True)
            assert "lorafleet_workers_engine_suspect 1.0" in (await client.get("/metrics")).text
            stall.end()
            metadata = await until_suspect(client, is_suspect=False)
            assert "lorafleet_workers_engine_suspect 0.0" in (await client.get("/metrics")).text
            assert not stall.asking.done()
        assert metadata.engine_boot_id == before.engine_boot_id


@pytest.mark.fleet
async def test_engine_that_never_computes_again_is_restarted(worker, tmp_path):
    async with worker.running(*STALLS, *SHORT, "--stuck-after-s", "0.5") as client:
        before = await metadata_of(client)
        async with stalled_engine(client, tmp_path), within(20):
            while (await metadata_of(client)).engine_boot_id in {before.engine_boot_id, ""}:
                await asyncio.sleep(0.05)
        assert (await metadata_of(client)).is_suspect is False
    assert "has computed nothing for" in (worker.folder / "agent.log").read_text()


@pytest.fixture
def attached(agent_model, agent_adapters, tmp_path):
    """A worker with an attached engine, and that engine."""
    engine = start_engine("sim", agent_model, flags=("--max-cpu-loras", "3"))
    flags = ("--engine-url", engine.url, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
    try:
        yield RunningWorker(agent_model, agent_adapters, tmp_path, *flags), engine
    finally:
        engine.stop()


@pytest.mark.fleet
async def test_shapes_of_a_base_model_from_a_hub_are_checked(agent_model, agent_adapters, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--acme--tiny-qwen"
    shutil.copytree(agent_model, repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    deeper = next(case for case in BROKEN if case.name == "more-layers").write(tmp_path / "deeper")
    engine = start_engine("sim", agent_model, flags=("--max-cpu-loras", "3"))
    flags = ("--engine-url", engine.url, "--max-loras", "2", "--max-lora-rank", "16", "--lora-roots", str(tmp_path))
    worker = RunningWorker(Path("acme/tiny-qwen"), agent_adapters, tmp_path, *flags)
    try:
        async with worker.inside() as client:
            assert code(await client.get("/v1/model/files")) == "model_files_unavailable"
            assert (await post(client, "load_lora", lora_id="deep/v1", source=str(deeper))).status_code == 200
        monkeypatch.setenv("HF_HUB_CACHE", str(repository.parent))
        async with worker.running() as client:
            assert "tokenizer.json" in (await client.get("/v1/model/files")).json()["files"]
            refused = await post(client, "load_lora", lora_id="deep/v2", source=str(deeper))
            assert code(refused) == "module_unknown"
            assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
    finally:
        engine.stop()


@pytest.mark.fleet
async def test_attached_engine_keeps_its_adapters_over_an_agents_restart(attached):
    worker, engine = attached
    async with worker.inside() as client:
        transport = (await metadata_of(client)).transport
        assert transport.engine_url == engine.url
        assert (transport.kv_events, transport.kv_replay) == ((engine.kv_endpoint,), (engine.replay_endpoint,))
        snapshot = await client.get("/v1/kv/snapshot")
        assert (transport.kv_ledger, snapshot.status_code) == (1, 200)
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        first = await metadata_of(client)
    assert engine.process.poll() is None
    async with worker.inside() as client:
        assert await loaded(client) == {"sql-expert/v1"}
        assert (await metadata_of(client)).engine_boot_id == first.engine_boot_id


@pytest.mark.fleet
async def test_restarted_attached_engine_gets_its_adapters_again(attached, agent_model):
    worker, engine = attached
    port = engine.url.rsplit(":", 1)[1]
    async with worker.inside(timers=HASTY_TIMERS) as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
        before = await metadata_of(client)
        await asyncio.to_thread(engine.stop)
        metadata = await until_state(client, "engine_down")
        assert "no sign of health" in metadata.state_reason or "restarted" in metadata.state_reason
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "lorafleet.sim", "--model", str(agent_model), "--served-model-name",
            "tiny-qwen", "--port", port, "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3",
            env={**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        )  # fmt: skip
        try:
            await worker.ready(client)
            assert await loaded(client) == {"sql-expert/v1"}
            assert (await metadata_of(client)).engine_boot_id != before.engine_boot_id
        finally:
            other.terminate()
            await asyncio.wait_for(other.wait(), patience(30))


@pytest.mark.fleet
async def test_stalled_attached_engine_stays_suspect(agent_model, agent_adapters, tmp_path):
    engine = start_engine("sim", agent_model, flags=("--max-cpu-loras", "3"))
    flags = ("--engine-url", engine.url, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
    silent_s = patience(0.5)
    stalls = (*STALLS, "--health-timeout-s", str(patience(0.3)), "--stuck-after-s", "0.5")
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *flags, *stalls)
    timers = AgentTimers(watch_s=0.1, attached_s=silent_s)
    try:
        async with worker.inside(timers=timers) as client, stalled_engine(client, tmp_path) as stall:
            before = metadata = await until_suspect(client)
            async with within(20):
                while metadata.load.still_s < 2 * silent_s:  # longer than `attached_s`
                    assert (metadata.is_suspect, metadata.state) == (True, "ready")
                    await asyncio.sleep(0.05)
                    metadata = await metadata_of(client)
            assert metadata.engine_boot_id == before.engine_boot_id
            assert not stall.asking.done()
    finally:
        engine.stop()


@pytest.mark.fleet
async def test_repeated_waits_for_an_engines_exit_leak_nothing(tmp_path):
    process = await EngineProcess.start(LaunchCommand(("sleep", "60"), {}), state_dir=tmp_path)
    try:
        before = living_futures()
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await process.wait()
        assert living_futures() < before + 10
    finally:
        await process.stop(within_s=5)


def living_futures() -> int:
    gc.collect()
    # By type(): a dead weak proxy raises on isinstance.
    return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())


def test_an_exit_by_a_signal_names_it():
    assert [status_text(code) for code in (0, 1, -9, 137, -11, 255)] == [
        "status 0",
        "status 1",
        "killed by SIGKILL, status -9",
        "killed by SIGKILL, status 137",
        "killed by SIGSEGV, status -11",
        "status 255",
    ]
