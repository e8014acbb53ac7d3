"""Loads that are cancelled by an unload of the same adapter: nothing is left of them."""

import asyncio
import contextlib

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import patience, until, within
from tests.workers.kills import https_sources
from tests.workers.running import code, loaded, post
from tests.workers.source_servers import FaultyConnection

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
