"""The agent under faults: hung engines, full disks, taken ports, hostile files."""

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.engines import start_engine
from tests.patience import patience, until, within
from tests.properties import sample
from tests.workers.broken import BROKEN
from tests.workers.running import RunningWorker, code, group_of, is_running, loaded, post
from workers.config import AgentTimers
from workers.engines.launch import LaunchCommand
from workers.engines.process import EngineProcess
from workers.wire import Metadata

# Long enough for a healthy engine on a busy machine.
HASTY = ("--health-timeout-s", str(patience(0.2)), "--hang-after-s", str(patience(0.4)))
HASTY_TIMERS = AgentTimers(watch_s=0.1, attached_s=patience(0.5))
THREE = ("sql-expert/v1", "legal/v2", "python-expert/v1")


async def metadata(client) -> Metadata:
    return Metadata.model_validate((await client.get("/metadata")).json())


async def until_state(client, state: str, *, within_s: float = 20) -> Metadata:
    async with within(within_s):
        while (told := await metadata(client)).state != state:
            await asyncio.sleep(0.02)
    return told


# --- hanging and dying engines --------------------------------------------------------------------------------------


@pytest.mark.fleet
async def test_hung_engine_is_restarted_with_its_adapters_and_its_load_fails(worker):
    async with worker.inside(*HASTY, timers=HASTY_TIMERS) as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
        before = await metadata(client)
        hung = worker.engine_pid
        os.kill(hung, signal.SIGSTOP)
        swallowed = await post(client, "load_lora", lora_id="legal/v2")
        assert (swallowed.status_code, code(swallowed)) in {(503, "engine_unreachable"), (503, "engine_down")}
        await until(lambda: not is_running(hung))
        await worker.ready(client)
        assert (await metadata(client)).engine_boot_id != before.engine_boot_id
        assert await loaded(client) == {"sql-expert/v1"}


@pytest.mark.fleet
async def test_engine_that_dies_during_an_eviction_restarts_with_the_victim(worker):
    async with worker.inside("--engine-args=--sim-load-s=0.5", "--preload-loras", THREE[0]) as client:
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
    children = "sleep 1000 & exec " + sys.executable + ' -m workers.engines.sim "$@"'
    # A real process: uvloop reports an exit before all holders of the pipes have ended.
    async with worker.running("--", "sh", "-c", children, "sim") as client:
        group = group_of(worker.engine_pid)
        assert len(group) == 3  # guard, sim, and a child that keeps the engine's output open
        guard = os.getpgid(worker.engine_pid)
        os.kill(guard, signal.SIGKILL)
        await until(lambda: not any(is_running(pid) for pid in group))
        await worker.ready(client)


@pytest.mark.fleet
async def test_slow_adapter_does_not_block_the_restore_of_others(worker):
    async with worker.inside() as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
    slow = ("--engine-args=--sim-load-s=2", "--load-deadline-s", "0.3")
    async with worker.inside(*slow, until_ready=False) as client:
        await worker.ready(client, within_s=15)
        failed = {item.lora_id for item in (await metadata(client)).lora.loaded_loras if item.state == "failed"}
        assert failed <= {"sql-expert/v1"}


@pytest.mark.fleet
async def test_hanging_load_makes_the_worker_suspect_until_it_returns_a_token(worker):
    async with worker.inside("--engine-args=--sim-load-s=2.5", "--load-deadline-s", "0.3", *HASTY[:2]) as client:
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "engine_timeout"
        told = await metadata(client)
        assert (told.state, told.is_suspect) == ("ready", True)
        refused = await post(client, "load_lora", lora_id="legal/v2")
        assert code(refused) == "not_ready"
        assert "sql-expert/v1 hangs" in refused.json()["error"]["message"]
        async with within(10):
            while (await metadata(client)).is_suspect:
                await asyncio.sleep(0.05)
        assert (await metadata(client)).engine_boot_id == told.engine_boot_id


@pytest.mark.fleet
async def test_engine_stuck_in_a_load_is_restarted(worker):
    hanging = ("--engine-args=--sim-load-s=600", "--load-deadline-s", "0.3")
    async with worker.inside(*hanging, *HASTY, timers=HASTY_TIMERS) as client:
        before = await metadata(client)
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "engine_timeout"
        async with within(20):
            while (await metadata(client)).engine_boot_id in {before.engine_boot_id, ""}:
                await asyncio.sleep(0.05)
        assert (await metadata(client)).is_suspect is False


STALLS = ("--suspect-after-s", "0.3", "--heartbeat-s", "0.1")
SHORT = ("--health-timeout-s", "0.3")


@contextlib.asynccontextmanager
async def stalled_engine(client, adapters):
    """Stall the engine for `--sim-load-s` with a request while it stays healthy; yields the request's task.

    The sim stalls during a load, as vLLM does; the agent does not know of this load.
    """
    path = next(adapters.rglob("adapter_config.json")).parent
    url = (await metadata(client)).transport.engine_url
    async with httpx.AsyncClient(base_url=url, timeout=60) as engine:
        body = {"model": "tiny-qwen", "prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True}
        asking = asyncio.create_task(engine.post("/v1/completions", json=body))
        async with within(10):
            while not (await metadata(client)).load.running:
                await asyncio.sleep(0.02)
        load = {"lora_name": "strange", "lora_path": str(path)}
        loading = asyncio.create_task(engine.post("/v1/load_lora_adapter", json=load))
        try:
            yield asking
        finally:
            for task in (loading, asking):
                task.cancel()
            await asyncio.gather(loading, asking, return_exceptions=True)


async def until_suspect(client, *, is_suspect=True) -> Metadata:
    async with within(15):
        while (told := await metadata(client)).is_suspect is not is_suspect:
            await asyncio.sleep(0.02)
    return told


@pytest.mark.fleet
async def test_engine_that_stops_computing_is_suspect_until_it_computes(worker, agent_adapters):
    # A full engine returns no token to the agent, but its counters move.
    flags = ("--engine-args=--sim-load-s=3", "--max-num-seqs", "1", *STALLS, *SHORT)
    async with worker.inside(*flags, timers=AgentTimers(watch_s=0.1)) as client:
        before = await metadata(client)
        async with stalled_engine(client, agent_adapters) as asking:
            told = await until_suspect(client)
            assert (told.state, told.engine_boot_id) == ("ready", before.engine_boot_id)
            assert "has requests, and has computed nothing" in told.state_reason
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{told.transport.engine_url}/health")).status_code == 200
            refused = await post(client, "load_lora", lora_id="sql-expert/v1")
            assert (code(refused), "computed nothing" in refused.text) == ("not_ready", True)
            assert "lorafleet_workers_engine_suspect 1.0" in (await client.get("/metrics")).text
            told = await until_suspect(client, is_suspect=False)
            assert "lorafleet_workers_engine_suspect 0.0" in (await client.get("/metrics")).text
            assert not asking.done()
        assert told.engine_boot_id == before.engine_boot_id


@pytest.mark.fleet
async def test_engine_that_never_computes_again_is_restarted(worker, agent_adapters):
    flags = ("--engine-args=--sim-load-s=600", *STALLS, *SHORT, "--stuck-after-s", "0.5")
    async with worker.running(*flags) as client:
        before = await metadata(client)
        async with stalled_engine(client, agent_adapters), within(20):
            while (await metadata(client)).engine_boot_id in {before.engine_boot_id, ""}:
                await asyncio.sleep(0.05)
        assert (await metadata(client)).is_suspect is False
    assert "has computed nothing for" in (worker.folder / "agent.log").read_text()


# --- attached engines -----------------------------------------------------------------------------------------------


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
        transport = (await metadata(client)).transport
        assert transport.engine_url == engine.url
        assert (transport.kv_events, transport.kv_replay) == ((engine.kv_endpoint,), (engine.replay_endpoint,))
        snapshot = await client.get("/v1/kv/snapshot")
        assert (transport.kv_ledger, snapshot.status_code) == (1, 200)
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        first = await metadata(client)
    assert engine.process.poll() is None
    async with worker.inside() as client:
        assert await loaded(client) == {"sql-expert/v1"}
        assert (await metadata(client)).engine_boot_id == first.engine_boot_id


@pytest.mark.fleet
async def test_restarted_attached_engine_gets_its_adapters_again(attached, agent_model):
    worker, engine = attached
    port = engine.url.rsplit(":", 1)[1]
    async with worker.inside(timers=HASTY_TIMERS) as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
        before = await metadata(client)
        await asyncio.to_thread(engine.stop)
        told = await until_state(client, "engine_down")
        assert "no sign of health" in told.state_reason or "restarted" in told.state_reason
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "workers.engines.sim", "--model", str(agent_model), "--served-model-name",
            "tiny-qwen", "--port", port, "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3",
            env={**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        )  # fmt: skip
        try:
            await worker.ready(client)
            assert await loaded(client) == {"sql-expert/v1"}
            assert (await metadata(client)).engine_boot_id != before.engine_boot_id
        finally:
            other.terminate()
            await asyncio.wait_for(other.wait(), patience(30))


@pytest.mark.fleet
async def test_stalled_attached_engine_stays_suspect(agent_model, agent_adapters, tmp_path):
    engine = start_engine("sim", agent_model, flags=("--max-cpu-loras", "3", "--sim-load-s", "600"))
    flags = ("--engine-url", engine.url, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
    silent_s = patience(0.5)
    stalls = (*STALLS, "--health-timeout-s", str(patience(0.3)), "--stuck-after-s", "0.5")
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *flags, *stalls)
    timers = AgentTimers(watch_s=0.1, attached_s=silent_s)
    try:
        async with worker.inside(timers=timers) as client, stalled_engine(client, agent_adapters) as asking:
            before = told = await until_suspect(client)
            async with within(20):
                while told.load.still_s < 2 * silent_s:  # longer than `attached_s`
                    assert (told.is_suspect, told.state) == (True, "ready")
                    await asyncio.sleep(0.05)
                    told = await metadata(client)
            assert told.engine_boot_id == before.engine_boot_id
            assert not asking.done()
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


# --- own engine commands --------------------------------------------------------------------------------------------


@pytest.mark.fleet
async def test_own_engine_command_gets_the_flags_that_it_lacks(worker):
    own = ("--", sys.executable, "-P", "-m", "workers.engines.sim", "--block-size", "64")
    async with worker.running(*own) as client:
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        assert (await metadata(client)).model.runtime_config.block_size == 64
    said = (worker.folder / "agent.log").read_text()
    assert "added to the engine's command" in said
    assert "--enable-lora --max-loras 2" in said


@pytest.mark.fleet
async def test_stopping_agent_kills_a_starting_engine_that_ignores_sigterm(worker):
    deaf = f'trap "" TERM; echo starting; sleep 60; exec {sys.executable} -m workers.engines.sim "$@"'
    long = ("--engine-shutdown-s", "50")
    async with worker.running(*long, "--", "sh", "-c", deaf, "sim", until_ready=False):  # it takes 30 s to end
        await until(lambda: "starting" in _text_or_empty(worker.state_dir / "engine.log"))
        group = group_of(worker.engine_pid)
    assert not any(map(is_running, group))
    assert worker.process.returncode == 0


def _text_or_empty(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.fleet
async def test_engine_does_not_start_on_a_port_of_another_process(worker, agent_model):
    stranger = start_engine("sim", agent_model)
    try:
        port = stranger.url.rsplit(":", 1)[1]
        # The engine starts slowly, as vLLM does: an earlier answer on the port is another process's.
        slow = f'sleep 30; exec {sys.executable} -m workers.engines.sim "$@"'
        flags = ("--engine-port", port, "--", "sh", "-c", slow, "sim")
        async with worker.inside(*flags, until_ready=False) as client:
            told = await until_state(client, "engine_down")
            assert f"port {port}" in told.state_reason
    finally:
        stranger.stop()


@pytest.mark.fleet
async def test_picked_port_stays_reserved_for_the_engine_over_restarts(worker):
    go = worker.folder / "go"
    slow = f'echo "with $@"; until [ -e {go} ]; do sleep 0.02; done; exec {sys.executable} -m workers.engines.sim "$@"'
    async with worker.inside("--", "sh", "-c", slow, "sim", until_ready=False) as client:
        await until(lambda: _started_ports(_text_or_empty(worker.state_dir / "engine.log")))
        port = _started_ports(_text_or_empty(worker.state_dir / "engine.log"))[0]
        with pytest.raises(OSError, match="in use"):
            _bind_exclusively(port)
        go.touch()
        await worker.ready(client)
        assert (await metadata(client)).transport.engine_url.endswith(f":{port}")
        go.unlink()
        os.kill(worker.engine_pid, signal.SIGKILL)
        await until(lambda: len(_started_ports(_text_or_empty(worker.state_dir / "engine.log"))) == 2)
        with pytest.raises(OSError, match="in use"):
            _bind_exclusively(port)
        assert _started_ports(_text_or_empty(worker.state_dir / "engine.log")) == [port, port]
        go.touch()
        await worker.ready(client)


def _started_ports(text: str) -> list[int]:
    return [int(port) for port in re.findall(r"^with .*--port (\d+)", text, re.MULTILINE)]


def _bind_exclusively(port: int) -> None:
    """Bind a port exclusively. Raises OSError if it is taken."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))


@pytest.mark.fleet
async def test_unread_stderr_blocks_neither_agent_nor_engine(worker):
    talkative = f'yes "a line of the engine" | head -40000; exec {sys.executable} -m workers.engines.sim "$@"'
    reader, writer = os.pipe()
    try:
        async with worker.running("--", "sh", "-c", talkative, "sim", stderr=writer) as client:
            os.close(writer)
            living_futures = (worker.state_dir / "engine.log").read_text().count("a line of the engine\n")
            said = asyncio.create_task(asyncio.to_thread(_read_whole, reader))
            assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        lines = (await said).splitlines()
    finally:
        os.close(reader)
    told = [json.loads(line) for line in lines if b"of the engine's output were dropped" in line]
    assert living_futures == 40_000
    assert told
    assert lines.count(b"a line of the engine") + sum(line["lines"] for line in told) >= living_futures
    assert any(b'"event": "ready"' in line for line in lines)  # the agent's own lines are not dropped


def _read_whole(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


@pytest.mark.fleet
async def test_agent_without_a_stderr_starts_its_engine(worker):
    log = worker.folder / "agent.log"
    closed = ("sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-P", "-m", "workers", *worker.flags)
    port_file = worker.folder / "port"
    with log.open("ab") as out:
        agent = await asyncio.create_subprocess_exec(*closed, "--port-file", str(port_file), stdout=out)
    try:
        await until(port_file.exists)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_file.read_text()}") as client:
            await worker.ready(client)
    finally:
        agent.terminate()
        await asyncio.wait_for(agent.wait(), patience(30))


# --- state and cache folders ----------------------------------------------------------------------------------------


@pytest.mark.fleet
async def test_unwritable_engine_log_stops_neither_engine_nor_agent(worker):
    worker.state_dir.mkdir()
    (worker.state_dir / "engine.log").symlink_to("/dev/full")
    async with worker.running() as client:
        await until(lambda: "\nINFO:     Application startup complete" in (worker.folder / "agent.log").read_text())
        os.kill(worker.engine_pid, signal.SIGKILL)
        await until(lambda: not (worker.state_dir / "engine.pid").exists())
        await worker.ready(client)


@pytest.mark.fleet
async def test_full_disk_fails_no_unload_lease_engine_or_request(worker):
    async with worker.running("--cache-grace-s", "1", "--engine-args=--sim-decode-tokens-per-s=20") as client:
        digests = {lora_id: (await post(client, "load_lora", lora_id=lora_id)).json()["digest"] for lora_id in THREE}
        simulate_full_disk(worker.process.pid)
        assert (await post(client, "unload_lora", lora_id=THREE[0], epoch=7)).status_code == 200
        again = await post(client, "load_lora", lora_id=THREE[0], digest=digests[THREE[0]], epoch=7)
        assert again.status_code == 200
        assert (await post(client, "unload_lora", lora_id=THREE[1], epoch=7)).status_code == 200
        assert code(await post(client, "unload_lora", lora_id=THREE[1], epoch=6)) == "stale_epoch"

        before = await metadata(client)
        await client.post("/v1/usage", json=usage_report_of(before.lora.loaded_loras[0].engine_name))
        [lease] = (worker.cache_dir / digests[THREE[2]] / ".users").iterdir()
        renewed_at = lease.stat().st_mtime
        await until(lambda: lease.stat().st_mtime > renewed_at)

        os.kill(worker.engine_pid, signal.SIGKILL)
        async with within(30):
            while (await metadata(client)).engine_boot_id in {"", before.engine_boot_id}:
                await asyncio.sleep(0.02)
        await worker.ready(client)
        assert await loaded(client) == {THREE[0], THREE[2]}

        url = (await metadata(client)).transport.engine_url
        ask = {"model": "tiny-qwen", "prompt": "a", "max_tokens": 40, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url, timeout=30) as engine:
            answer = asyncio.create_task(engine.post("/v1/completions", json=ask))
            async with within(10):
                while not (await metadata(client)).load.running:
                    await asyncio.sleep(0.02)
            worker.process.send_signal(signal.SIGTERM)
            assert (await answer).json()["usage"]["completion_tokens"] == 40  # the engine is drained all the same
        assert await asyncio.wait_for(worker.process.wait(), patience(30)) == 0


@pytest.mark.fleet
async def test_failed_writes_are_repeated_when_the_disk_has_space(worker):
    async with worker.running("--cache-grace-s", "1") as client:
        for lora_id in THREE:
            await post(client, "load_lora", lora_id=lora_id)
        simulate_full_disk(worker.process.pid)
        await post(client, "unload_lora", lora_id=THREE[0], epoch=7)
        simulate_full_disk(worker.process.pid, False)
        epoch = worker.state_dir / "epoch.json"
        await until(lambda: epoch.exists() and json.loads(epoch.read_text()) == {"epoch": 7})
        assert await loaded(client) == {THREE[1], THREE[2]}  # it answers after the later writes, too
        worker.process.kill()
        await worker.process.wait()
    async with worker.inside() as client:
        assert await loaded(client) == {THREE[1], THREE[2]}
        assert code(await post(client, "unload_lora", lora_id=THREE[1], epoch=6)) == "stale_epoch"


def simulate_full_disk(pid: int, is_full: bool = True) -> None:
    """Make all file writes of a process and its children fail, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def usage_report_of(engine_name: str) -> dict:
    """A router's usage report of one request."""
    use = {"worker_id": "worker-0", "engine_name": engine_name, "requests": 1}
    return {"router_id": "r", "boot_id": "b", "seq": 1, "uses": [use], "revision_seen": 0}


@pytest.mark.fleet
async def test_second_agent_on_the_same_state_folder_is_refused(worker):
    async with worker.inside():
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, said = await asyncio.wait_for(second.communicate(), patience(10))
        finally:
            if second.returncode is None:
                second.kill()
        assert second.returncode == 2
        assert b"another agent" in said


@pytest.mark.fleet
async def test_damaged_epoch_file_stops_the_start_with_a_remedy(worker):
    worker.state_dir.mkdir()
    (worker.state_dir / "epoch.json").write_text("{")
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(agent.communicate(), patience(20))
    assert agent.returncode == 2
    assert b"epoch.json is damaged" in said
    assert b"Traceback" not in said


@pytest.mark.slow
async def test_hostile_files_in_lora_path_do_not_affect_other_adapters(worker, agent_model, tmp_path):
    folder = tmp_path / "shelf"
    make_adapter(folder, "fine/v1")
    os.mkfifo(make_adapter(folder, "pipe/v1") / "more.safetensors")
    weights = make_adapter(folder, "endless/v1") / "adapter_model.safetensors"
    header = b'{"a.lora_A.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 1e999]}}'
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    other = RunningWorker(agent_model, folder, tmp_path, *worker.flags[14:])
    async with other.together("--lora-path", str(folder)) as client:
        states = {item["lora_id"]: item["state"] for item in (await client.get("/v1/metadata/loras")).json()["data"]}
        assert states == {"fine/v1": "on_disk", "pipe/v1": "failed", "endless/v1": "failed"}
        assert code(await post(client, "load_lora", lora_id="endless/v1")) == "weights_corrupt"
        assert (await post(client, "load_lora", lora_id="fine/v1")).status_code == 200


# --- callers --------------------------------------------------------------------------------------------------------


async def test_full_worker_accepts_a_load_of_a_loaded_adapter(worker):
    async with worker.together() as client:
        for lora_id in THREE:
            await post(client, "load_lora", lora_id=lora_id)
        again = await post(client, "load_lora", lora_id="legal/v2")
        assert (again.status_code, again.json().get("state")) == (200, "ready")


async def test_epoch_needs_admin_scope_and_a_valid_number(worker, tmp_path):
    from lorafleet.service.auth import hash_key

    keys = tmp_path / "keys.yaml"
    rows = [{"sha256": hash_key(scope), "tenant": None, "scopes": [scope]} for scope in ("load", "admin")]
    keys.write_text(json.dumps({"keys": rows}))
    async with worker.together("--key-files", str(keys)) as client:

        async def answer(key: str, epoch: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-lorafleet-epoch": epoch}
            return await client.post("/v1/admin/load_lora", json={"lora_id": "legal/v2"}, headers=headers)

        # Otherwise a router's key could lock out the real leader for good.
        assert (await answer("load", "9")).status_code == 403
        assert (await answer("admin", "9")).status_code == 200
        for too_big in ("9" * 30, "9" * 5000):
            assert code(await answer("admin", too_big)) == "invalid_epoch"


async def test_event_id_with_thousands_of_digits_is_gone(worker):
    async with worker.together() as client:
        gone = await client.get("/v1/events", headers={"last-event-id": "9" * 5000})
        assert (gone.status_code, code(gone)) == (410, "events_gone")


@pytest.mark.fleet
async def test_ready_route_shows_none_of_the_engines_output(worker):
    quiet = ("--no-engine-output",)
    async with worker.running("--engine-args=--hf-token=very-secret", *quiet, until_ready=False) as client:
        await until_state(client, "engine_down")
        said = (await client.get("/ready")).json()["error"]["message"]
        assert said == "engine_down: the engine did not start (status 2)"
        assert "very-secret" not in said
    assert "very-secret" not in (worker.folder / "agent.log").read_text().split("its output ends")[0]


@pytest.mark.fleet
async def test_engine_does_not_inherit_the_agents_own_secrets(worker, monkeypatch):
    monkeypatch.setenv("LORAFLEET_WORKERS_TOKEN", "very-secret")
    async with worker.inside():
        environ = Path("/proc") / str(worker.engine_pid) / "environ"
        assert b"very-secret" not in await asyncio.to_thread(environ.read_bytes)


@pytest.mark.fleet
async def test_usage_report_counts_once_and_only_for_this_worker(worker):
    async with worker.inside() as client:
        item = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()

        async def report(seq: int, **uses: int) -> bool:
            rows = [
                {"worker_id": worker_id, "engine_name": item["engine_name"], "requests": requests}
                for worker_id, requests in uses.items()
            ]
            body = {"router_id": "r", "boot_id": "b", "seq": seq, "revision_seen": 0, "uses": rows}
            return (await client.post("/v1/usage", json=body)).json()["accepted"]

        async def count() -> tuple[int, bool]:
            [one] = (await client.get("/v1/admin/loras")).json()["data"]
            return one["request_count"], one["last_used"] is not None

        worker_id = (await metadata(client)).instance_id
        assert await count() == (0, False)
        assert await report(1, **{worker_id: 3, "elsewhere": 50}) is True
        assert await count() == (3, True)
        assert await report(1, **{worker_id: 9}) is False
        assert await report(0, **{worker_id: 9}) is False
        assert await count() == (3, True)
        assert await report(2, **{worker_id: 5}) is True
        assert await report(3) is True
        assert await report(4, **{worker_id: 6}) is True
        assert await count() == (6, True)
    async with worker.inside() as client:  # the router's cumulative counts are not counted twice
        assert await report(4, **{worker_id: 6}) is False
        assert await report(5, **{worker_id: 8}) is True
        assert await count() == (8, True)


async def test_drain_waits_for_running_requests_until_its_deadline(worker):
    slow = ("--sim-decode-tokens-per-s", "20")
    timers = AgentTimers(quiet_s=0.1)
    async with worker.together(engine=slow, timers=timers) as client, httpx.AsyncClient(timeout=patience(10)) as direct:
        url = (await metadata(client)).transport.engine_url
        body = {"model": "tiny-qwen", "prompt": "a", "max_tokens": 40}
        running = asyncio.create_task(direct.post(f"{url}/v1/completions", json=body))
        async with within(10):
            while (await metadata(client)).load.running == 0:
                await asyncio.sleep(0.02)
        early = (await post(client, "drain", deadline_s=0.2)).json()
        assert (early["is_drained"], early["running"]) == (False, 1)
        assert (await post(client, "drain", deadline_s=20)).json()["is_drained"] is True
        assert (await running).status_code == 200


@pytest.mark.fleet
async def test_drain_waits_for_a_request_in_its_first_step(worker, tmp_path):
    """vLLM counts a request only after its first step: a drain must not miss it."""
    config = make_adapter(tmp_path / "late", "late/v1") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sim": {"delay_s": 0.7}}))
    flags = ("--lora-path", str(tmp_path / "late"), "--preload-loras", "late/v1")
    slow = ("--engine-args=--sim-prefill-tokens-per-s=500", "--max-num-batched-tokens", "500")  # a step takes 1 s
    timers = AgentTimers(quiet_s=0.2)
    async with worker.inside(*flags, *slow, timers=timers) as client, httpx.AsyncClient(timeout=30) as direct:
        told = await metadata(client)
        url = f"{told.transport.engine_url}/v1/completions"
        await direct.post(url, json={"model": "tiny-qwen", "prompt": [7] * 600, "max_tokens": 1})
        async with within(10):
            while not (await metadata(client)).load.prefill_tokens_per_s:
                await asyncio.sleep(0.02)
        body = {"model": told.lora.loaded_loras[0].engine_name, "prompt": "a", "max_tokens": 20}
        asked = asyncio.create_task(direct.post(url, json=body))
        assert (await post(client, "drain", deadline_s=20)).json()["is_drained"] is True
        assert asked.done()
        assert (await asked).status_code == 200


@pytest.mark.slow
async def test_drain_waits_while_uncounted_requests_keep_ending(worker):
    """A beam search in vLLM is one request per token, each finished within its step."""
    quiet_s = patience(0.2)
    async with worker.together(timers=AgentTimers(quiet_s=quiet_s)) as client, httpx.AsyncClient(timeout=30) as direct:
        url = (await metadata(client)).transport.engine_url

        async def search() -> None:
            while True:
                await direct.post(f"{url}/v1/completions", json={"model": "tiny-qwen", "prompt": "a", "max_tokens": 1})

        searching = asyncio.create_task(search())
        assert (await post(client, "drain", deadline_s=2 * quiet_s)).json()["is_drained"] is False
        searching.cancel()
        assert (await post(client, "drain", deadline_s=20)).json()["is_drained"] is True


@pytest.mark.fleet
async def test_drain_of_a_hung_engine_fails_at_its_deadline(worker):
    async with worker.inside("--health-timeout-s", "0.3", "--hang-after-s", "60") as client:
        os.kill(worker.engine_pid, signal.SIGSTOP)
        try:
            answer = await post(client, "drain", deadline_s=0.5)
            assert (answer.status_code, code(answer)) == (504, "engine_timeout")
            assert (await metadata(client)).state == "draining"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.engine_pid, signal.SIGCONT)


@pytest.mark.fleet
@pytest.mark.parametrize("seed", sample([1, 2], 1))
async def test_state_folder_agent_and_engine_agree_after_many_calls_and_kills(worker, seed):
    rng = random.Random(seed)
    names = (*THREE, "extra/v1")

    async def caller(client) -> None:
        for _ in range(12):
            lora_id, victim = rng.sample(names, 2)
            call = rng.choice(("load", "load", "evict", "unload"))
            if call == "unload":
                answer = await post(client, "unload_lora", lora_id=lora_id)
            else:
                more = {"evict": victim} if call == "evict" else {}
                answer = await post(client, "load_lora", lora_id=lora_id, **more)
            assert answer.status_code in {200, 404, 409, 422, 503}, answer.text
            assert answer.is_success or code(answer) in {
                "not_loaded", "no_free_slot", "engine_unreachable", "engine_down", "not_ready", "cancelled"
            }  # fmt: skip
            await asyncio.sleep(rng.uniform(0, 0.1))

    async with worker.inside("--engine-args=--sim-load-s=0.02") as client:
        callers = asyncio.gather(*(caller(client) for _ in range(6)))
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        os.kill(worker.engine_pid, signal.SIGKILL)
        await callers
        await until((worker.state_dir / "engine.pid").exists)
        await worker.ready(client)
        told = await metadata(client)
        async with httpx.AsyncClient(timeout=10) as direct:
            models = (await direct.get(f"{told.transport.engine_url}/v1/models")).json()["data"]
        listed = {item["id"] for item in models if item.get("parent")}
        assert {item.engine_name for item in told.lora.loaded_loras if item.state == "ready"} == listed
        assert len(listed) <= 3
        records = [json.loads(path.read_text()) for path in (worker.state_dir / "adapters").glob("*.json")]
        assert {record["engine_name"] for record in records if record["is_loaded"]} == listed
        assert not list(worker.cache_dir.glob(".partial-*"))


@pytest.mark.fleet
async def test_agent_killed_during_an_eviction_restores_victim_or_new_adapter(worker):
    slow = ("--engine-args=--sim-load-s=0.5",)
    async with worker.running(*slow) as client:
        for lora_id in THREE:
            await post(client, "load_lora", lora_id=lora_id)
        evicting = asyncio.create_task(post(client, "load_lora", lora_id="extra/v1", evict="legal/v2"))
        async with within(10):
            while "legal/v2" in await loaded(client):
                await asyncio.sleep(0.02)
        worker.process.kill()
        with contextlib.suppress(httpx.HTTPError):
            await evicting
    async with worker.inside(*slow) as client:
        assert len(await loaded(client)) == 3
