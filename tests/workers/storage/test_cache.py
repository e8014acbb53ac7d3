"""The agent with full disks, damaged files and hostile folders."""

import asyncio
import json
import os
import resource
import signal
import struct
import sys

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import patience, until, within
from tests.workers.running import RunningWorker, code, loaded, metadata_of, post

THREE = ("sql-expert/v1", "legal/v2", "python-expert/v1")


@pytest.mark.fleet
async def test_unwritable_engine_log_stops_neither_engine_nor_agent(worker):
    worker.state_dir.mkdir()
    (worker.state_dir / "engine.log").symlink_to("/dev/full")
    async with worker.running() as client:
        await until(lambda: "\nINFO:     Application startup complete" in (worker.folder / "agent.log").read_text())
        before = await metadata_of(client)
        os.kill(worker.engine_pid, signal.SIGKILL)
        await worker.ready_again(client, before)


@pytest.mark.fleet
async def test_full_disk_fails_no_unload_lease_engine_or_request(worker):
    slow = f"--engine-args=--sim-decode-tokens-per-s={60 / patience(1)}"
    async with worker.running("--cache-grace-s", "1", slow) as client:
        digests = {lora_id: (await post(client, "load_lora", lora_id=lora_id)).json()["digest"] for lora_id in THREE}
        simulate_full_disk(worker.process.pid)
        assert (await post(client, "unload_lora", lora_id=THREE[0], epoch=7)).status_code == 200
        again = await post(client, "load_lora", lora_id=THREE[0], digest=digests[THREE[0]], epoch=7)
        assert again.status_code == 200
        assert (await post(client, "unload_lora", lora_id=THREE[1], epoch=7)).status_code == 200
        assert code(await post(client, "unload_lora", lora_id=THREE[1], epoch=6)) == "stale_epoch"

        before = await metadata_of(client)
        [lease] = (worker.cache_dir / digests[THREE[2]] / ".users").iterdir()
        renewed_at = lease.stat().st_mtime
        await until(lambda: lease.stat().st_mtime > renewed_at)

        os.kill(worker.engine_pid, signal.SIGKILL)
        await worker.ready_again(client, before)
        assert await loaded(client) == {THREE[0], THREE[2]}

        url = (await metadata_of(client)).transport.engine_url
        ask = {"model": "tiny-qwen", "prompt": "a", "max_tokens": 40, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url, timeout=patience(10)) as engine:
            answer = asyncio.create_task(engine.post("/v1/completions", json=ask))
            async with within(10):
                while not (await metadata_of(client)).load.running:
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


@pytest.mark.fleet
async def test_second_agent_on_the_same_state_folder_is_refused(worker):
    async with worker.inside():
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, message = await asyncio.wait_for(second.communicate(), patience(60))
        finally:
            if second.returncode is None:
                second.kill()
        assert second.returncode == 2
        assert b"another agent" in message


@pytest.mark.fleet
async def test_damaged_epoch_file_stops_the_start_with_a_remedy(worker):
    worker.state_dir.mkdir()
    (worker.state_dir / "epoch.json").write_text("{")
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
    )
    _, message = await asyncio.wait_for(agent.communicate(), patience(20))
    assert agent.returncode == 2
    assert b"epoch.json is damaged" in message
    assert b"Traceback" not in message


@pytest.mark.slow
async def test_hostile_files_in_lora_path_do_not_affect_other_adapters(worker, agent_model, tmp_path):
    folder = tmp_path / "lora_path"
    os.mkfifo(make_adapter(folder, "fine/v1") / "more.safetensors")  # which no engine reads
    pipe = make_adapter(folder, "pipe/v1") / "adapter_model.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    weights = make_adapter(folder, "endless/v1") / "adapter_model.safetensors"
    header = b'{"a.lora_A.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 1e999]}}'
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    other = RunningWorker(agent_model, folder, tmp_path, *worker.flags[14:])
    async with other.together("--lora-path", str(folder)) as client:
        states = {item["lora_id"]: item["state"] for item in (await client.get("/v1/metadata/loras")).json()["data"]}
        assert states == {"fine/v1": "on_disk", "pipe/v1": "failed", "endless/v1": "failed"}
        assert code(await post(client, "load_lora", lora_id="endless/v1")) == "weights_corrupt"
        assert (await post(client, "load_lora", lora_id="fine/v1")).status_code == 200


async def test_file_names_that_are_no_text_break_no_report(worker, agent_model, tmp_path):
    folder = tmp_path / "lora_path"
    for lora_id in ("fine/v1", "half/v1", "cafe/v1"):
        make_adapter(folder, lora_id)
    # Python reads a byte that is no UTF-8, as in Latin-1 names, as half of a surrogate pair.
    (folder / "cafe").rename(folder / "caf\udce9")
    (folder / "half/v1/adapter_model.safetensors").rename(folder / "half/v1/caf\udce9.bin")
    other = RunningWorker(agent_model, folder, tmp_path, *worker.flags[14:])
    async with other.together() as client:
        refused = await post(client, "load_lora", lora_id="half/v1")
        assert "found adapter_config.json, 1 other file" in refused.json()["error"]["message"]
        assert [item.state for item in (await metadata_of(client)).lora.loaded_loras] == ["failed"]
        items = (await client.get("/v1/metadata/loras")).json()["data"]
        states = {item["lora_id"]: item["state"] for item in items}
        assert states == {"caf\\udce9/v1": "failed", "fine/v1": "on_disk", "half/v1": "failed"}
