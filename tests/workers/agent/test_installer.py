"""Restoring adapters after a start, when engine or cache differ from the installed adapters."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest
from aiohttp import web

from lorafleet.local.tiny_model import make_adapter
from tests.engines import start_engine
from tests.patience import until
from tests.serving import client_of
from tests.workers.kills import SlowConnection, https_sources
from tests.workers.running import SIM, RunningWorker, loaded, post
from workers.storage.local_adapters import LocalAdapters
from workers.verification.manifest import AdapterRules
from workers.verification.verify import read_manifest


@pytest.mark.fleet
async def test_lost_files_are_fetched_once_during_a_sweep(worker, tmp_path):
    folder, connection = make_adapter(tmp_path / "far", "far/v1"), SlowConnection()
    size = sum(path.stat().st_size for path in folder.iterdir())
    flags = ("--source-networks", "127.0.0.0/8", "--cache-grace-s", "1")  # a sweep every half second
    async with https_sources({"far/v1": folder}, tmp_path, connection) as sources:
        async with worker.inside(*flags) as client:
            item = (await post(client, "load_lora", lora_id="far/v1", source=sources["far/v1"])).json()
        shutil.rmtree(item["path"])
        connection.carried, connection.pause_s = 0, 0.3
        async with worker.inside(*flags) as client:
            assert await loaded(client) == {"far/v1"}
        assert size < connection.carried < 1.5 * size


async def test_deleted_cache_is_rebuilt_while_the_worker_serves(worker):
    async with worker.together("--cache-grace-s", "1") as client:
        held = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()
        known = (await post(client, "load_lora", lora_id="legal/v2")).json()
        await post(client, "unload_lora", lora_id="legal/v2")
        shutil.rmtree(worker.cache_dir)
        answer = await client.get("/metadata")
        assert answer.status_code == 200
        assert answer.json()["lora"]["capacity"]["disk_room_bytes"] > 0
        assert (await client.get("/metrics")).status_code == 200
        again = await post(client, "load_lora", lora_id="legal/v2", digest=known["digest"])
        assert again.status_code == 200
        weights = Path(held["path"]) / "adapter_model.safetensors"
        await until(weights.exists)


@pytest.mark.fleet
async def test_agent_becomes_ready_after_scanning_a_large_lora_path(agent_model, tmp_path):
    adapters, many = tmp_path / "many", 1000
    [*files] = make_adapter(tmp_path / "one", "a").iterdir()
    for number in range(many):
        folder = adapters / f"a{number}"
        folder.mkdir(parents=True)
        for file in files:
            os.link(file, folder / file.name)
    worker = RunningWorker(agent_model, adapters, tmp_path, *SIM)
    async with worker.inside(until_ready=False) as client:
        metadata = (await client.get("/metadata")).json()
        assert metadata["lora"]["available_count"] < many
        await until((worker.state_dir / "engine.pid").exists)
        assert (await client.get("/metadata")).json()["lora"]["available_count"] < many
        await worker.ready(client)
        assert (await client.get("/metadata")).json()["lora"]["available_count"] == many


async def test_stopping_agent_ends_the_scan_of_lora_path(agent_adapters):
    local_adapters = LocalAdapters(agent_adapters, AdapterRules(64, frozenset(), "off"))
    local_adapters.stop()
    assert await local_adapters.scan() is False
    assert local_adapters.adapters == ()


async def test_adapter_with_unreadable_weights_is_left_out_of_the_scan(tmp_path):
    rules = AdapterRules(64, frozenset(), "off")
    folder = make_adapter(tmp_path, "a/v1")
    weights = folder / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / ("x" * 300))
    local_adapters = LocalAdapters(tmp_path, rules)
    assert await local_adapters.scan() is False
    assert local_adapters.adapters == ()
    with pytest.raises(OSError, match="File name too long"):
        read_manifest(folder, rules)


@pytest.mark.fleet
async def test_adapters_found_in_an_attached_engine_are_wanted_again(agent_model, agent_adapters, tmp_path):
    engine = start_engine("sim", agent_model)
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, "--engine-url", engine.url, "--max-lora-rank", "16")
    try:
        async with worker.inside() as client:
            await post(client, "load_lora", lora_id="sql-expert/v1")
        # As left by an agent that is killed between the engine's load and its own record.
        [path] = (worker.state_dir / "adapters").glob("*.json")
        path.rename(worker.state_dir / "on_disk" / path.name)
        async with worker.inside() as client:
            assert await loaded(client) == {"sql-expert/v1"}
            assert await asyncio.to_thread(path.exists)
            assert list((worker.state_dir / "on_disk").iterdir()) == []
    finally:
        engine.stop()


class CountingProxy:
    """A proxy of an engine that counts concurrent loads and holds each until a third arrives or a timeout."""

    def __init__(self, engine_url: str) -> None:
        self.under_way = self.most = 0
        self._third = asyncio.Event()
        self._engine = client_of(engine_url)

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await self._engine.aclose()

    async def _pass_on(self, request: web.Request) -> web.Response:
        is_load = request.path == "/v1/load_lora_adapter"
        self.under_way += is_load
        self.most = max(self.most, self.under_way)
        if self.under_way > 2:
            self._third.set()
        try:
            if is_load:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._third.wait(), 0.3)
            kind = {"content-type": request.content_type}
            answer = await self._engine.request(
                request.method, request.path, content=await request.read(), headers=kind
            )
            return web.Response(status=answer.status_code, body=answer.content, content_type="application/json")
        finally:
            self.under_way -= is_load


@pytest.mark.fleet
async def test_restore_loads_two_adapters_at_a_time(agent_model, agent_adapters, tmp_path):
    names = {"sql-expert/v1", "legal/v2", "extra/v1"}
    flags = ("--max-cpu-loras", "3", "--max-loras", "2", "--max-lora-rank", "16")
    engine = start_engine("sim", agent_model, flags=flags)
    try:
        worker = RunningWorker(agent_model, agent_adapters, tmp_path, "--engine-url", engine.url, *flags)
        async with worker.inside() as client:
            for name in names:
                assert (await post(client, "load_lora", lora_id=name)).status_code == 200
    finally:
        engine.stop()
    engine = start_engine("sim", agent_model, flags=flags)
    try:
        counted = CountingProxy(engine.url)
        async with counted.serving() as url:
            worker = RunningWorker(agent_model, agent_adapters, tmp_path, "--engine-url", url, *flags)
            async with worker.inside() as client:
                assert await loaded(client) == names
        assert counted.most == 2
    finally:
        engine.stop()
