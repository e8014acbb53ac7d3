"""Loads that an unload cancels leave nothing; adapters that newer rules refuse are unloaded."""

import asyncio
import contextlib
import errno
import json
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.patience import patience, until, within
from tests.workers.changed_adapters import adapter_of_nan
from tests.workers.kills import https_sources
from tests.workers.running import RunningWorker, code, loaded, post, sim_inside
from tests.workers.source_servers import FaultyConnection
from workers.agent.installer import Installer
from workers.verification.manifest import RULES_VERSION

LOOPBACK = ("--source-networks", "127.0.0.0/8")


@pytest.fixture
async def silent_source(tmp_path):
    """An https:// source that falls silent half-way, and its connection."""
    connection = FaultyConnection()
    connection.stall_at = 100_000
    async with https_sources({"far/v1": make_adapter(tmp_path / "far", "far/v1")}, tmp_path, connection) as sources:
        yield sources["far/v1"], connection


async def until_state(client, lora_id: str, state: str) -> None:
    async with within(20):
        while (await client.get(f"/v1/metadata/loras/{lora_id}")).json().get("state") != state:
            await asyncio.sleep(0.01)


def leftovers(worker) -> list[str]:
    return [path.name for path in worker.cache_dir.iterdir() if path.name.startswith((".partial", ".gone"))]


async def test_unload_cancels_a_download_and_deletes_its_files(worker, silent_source):
    source, connection = silent_source
    async with worker.together(*LOOPBACK) as client:
        loading = asyncio.create_task(post(client, "load_lora", lora_id="far/v1", source=source))
        waiting = asyncio.create_task(post(client, "load_lora", lora_id="far/v1", source=source))
        await connection.stalled.wait()
        assert (await post(client, "unload_lora", lora_id="far/v1")).status_code == 200
        assert {code(answer) for answer in await asyncio.gather(loading, waiting)} == {"cancelled"}
        assert leftovers(worker) == []
        assert code(await client.get("/v1/metadata/loras/far/v1")) == "adapter_unknown"
        assert (await post(client, "unload_lora", lora_id="far/v1")).json()["message"] == "far/v1 is not loaded"
        connection.stall_at = 1 << 30
        assert (await post(client, "load_lora", lora_id="far/v1", source=source)).status_code == 200


async def test_unload_of_another_version_cancels_nothing(worker, silent_source):
    source, connection = silent_source
    async with worker.together(*LOOPBACK) as client:
        loading = asyncio.create_task(post(client, "load_lora", lora_id="far/v1", source=source))
        await connection.stalled.wait()
        with contextlib.suppress(httpx.ReadTimeout):  # it waits for the engine's lock
            body = {"lora_id": "far/v1", "digest": "0" * 64}
            await client.post("/v1/admin/unload_lora", json=body, timeout=0.3)
        assert not loading.done()
        loading.cancel()


async def test_unload_cancels_waiting_loads_and_undoes_a_running_one(worker):
    async with worker.together(engine=("--sim-load-s", str(patience(0.3)))) as client:
        first = asyncio.create_task(post(client, "load_lora", lora_id="sql-expert/v1"))
        await until_state(client, "sql-expert/v1", "loading")
        second = asyncio.create_task(post(client, "load_lora", lora_id="legal/v2"))
        await until_state(client, "legal/v2", "loading")
        unloads = [asyncio.create_task(post(client, "unload_lora", lora_id="legal/v2"))]
        assert code(await second) == "cancelled"
        assert not first.done()
        unloads.append(asyncio.create_task(post(client, "unload_lora", lora_id="sql-expert/v1")))
        assert {answer.status_code for answer in await asyncio.gather(first, *unloads)} == {200}
        assert await loaded(client) == set()


@pytest.mark.fleet
async def test_disconnecting_caller_does_not_end_a_download(worker, silent_source):
    source, connection = silent_source
    async with worker.running(*LOOPBACK) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/admin/load_lora", json={"lora_id": "far/v1", "source": source}, timeout=1.0)
        await connection.stalled.wait()
        assert len(leftovers(worker)) == 1
        worker.process.terminate()  # it does not wait for the source, and the partial download is kept
        await asyncio.wait_for(worker.process.wait(), patience(10))
    assert len(leftovers(worker)) == 1
    connection.stall_at, connection.carried = 1 << 30, 0
    async with worker.inside(*LOOPBACK) as client:
        await until(lambda: len(leftovers(worker)) == 1)
        assert (await post(client, "load_lora", lora_id="far/v1", source=source)).status_code == 200
        assert leftovers(worker) == []


def made_by_older_rules(worker: RunningWorker, name: str, *, weights: bytes | None = None) -> None:
    """Change an adapter's record as an agent before the newest rules left it, and its files in place."""
    (record,) = (path for path in worker.state_dir.rglob("*.json") if name in path.name)
    found = json.loads(record.read_text())
    assert found.pop("rules") == RULES_VERSION
    record.write_text(json.dumps(found))
    if weights is not None:
        file = Path(found["lora_path"]) / "adapter_model.safetensors"
        file.chmod(0o644)
        file.write_bytes(weights)


async def test_what_the_engine_took_in_by_older_rules_is_verified_again_and_unloaded_if_refused(tmp_path):
    model, adapters = make_model(tmp_path / "model"), tmp_path / "adapters"
    for name in ("diverged", "healthy"):
        make_adapter(adapters, name)
    spoilt = (adapter_of_nan(adapters / "diverged", tmp_path / "nan") / "adapter_model.safetensors").read_bytes()
    worker = RunningWorker(model, adapters, tmp_path)
    async with sim_inside(model, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16") as url:
        async with worker.inside("--engine-url", url) as client:
            for name in ("diverged", "healthy"):
                (await post(client, "load_lora", lora_id=name)).raise_for_status()
        made_by_older_rules(worker, "diverged", weights=spoilt)
        made_by_older_rules(worker, "healthy")
        async with worker.inside("--engine-url", url) as client:
            await until_state(client, "diverged", "on_disk")
            async with httpx.AsyncClient(base_url=url) as engine:
                served = [row["id"] for row in (await engine.get("/v1/models")).json()["data"]]
            assert [name.partition("@")[0] for name in served] == ["tiny-qwen", "healthy"]
            await until_state(client, "healthy", "ready")
            await until(lambda: worker_rules(worker, "healthy") == RULES_VERSION, what="it is verified again")


async def test_files_that_cannot_be_read_again_are_logged_once_and_tried_until_they_can(tmp_path, monkeypatch):
    model, adapters = make_model(tmp_path / "model"), tmp_path / "adapters"
    make_adapter(adapters, "healthy")
    worker = RunningWorker(model, adapters, tmp_path)
    failing, verify_again = [1, 2, 3], Installer.verify_again

    async def verify_after_failures(self, adapter):
        if failing:
            raise OSError(errno.EIO, f"read {failing.pop()} of a failing disk")
        return await verify_again(self, adapter)

    async with sim_inside(model, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16") as url:
        async with worker.inside("--engine-url", url) as client:
            (await post(client, "load_lora", lora_id="healthy")).raise_for_status()
        made_by_older_rules(worker, "healthy")
        monkeypatch.setattr(Installer, "verify_again", verify_after_failures)
        with capture_logs() as logs:
            async with worker.inside("--engine-url", url):
                await until(lambda: worker_rules(worker, "healthy") == RULES_VERSION, what="it is verified again")
    said = [line["lora_id"] for line in logs if line["event"] == "an adapter cannot be read again"]
    assert (said, failing) == (["healthy"], [])


def worker_rules(worker: RunningWorker, name: str) -> int:
    """The version of the rules in an adapter's record."""
    (record,) = (path for path in worker.state_dir.rglob("*.json") if name in path.name)
    return json.loads(record.read_text()).get("rules", 0)


async def test_files_for_a_load_that_will_come_need_no_slot_and_wait_for_a_load_that_fetches(worker, silent_source):
    source, connection = silent_source
    one_slot = ("--max-loras", "1", "--max-cpu-loras", "1")
    async with worker.together(*LOOPBACK, *one_slot) as client:
        loading = asyncio.create_task(post(client, "load_lora", lora_id="far/v1", source=source))
        await connection.stalled.wait()
        ahead = asyncio.create_task(post(client, "load_lora", lora_id="legal/v2", only_files=True))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ahead), 0.3)
        assert not ahead.done(), "a load fetches"
        loading.cancel()
        await post(client, "unload_lora", lora_id="far/v1")
        assert (await ahead).json()["state"] == "on_disk"
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        answer = await post(client, "load_lora", lora_id="python-expert/v1", only_files=True)
        assert (answer.status_code, answer.json()["state"]) == (200, "on_disk"), answer.text
        assert code(await post(client, "load_lora", lora_id="python-expert/v1")) == "no_free_slot"
        assert await loaded(client) == {"sql-expert/v1"}
