"""A worker added under load has its adapters before it is ready, so no request meets a cold one."""

import asyncio
import contextlib
import re
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import ORCHESTRATOR_WAITS, patience, within
from tests.serving import serving
from tests.workers.running import RunningWorker, loaded

pytestmark = pytest.mark.fleet

NAMES = [f"team/a{number}" for number in range(12)]
FLAGS = (
    "--engine", "sim", "--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "16", "--max-model-len", "2048",
    "--engine-args=--sim-load-s=0.05",
)  # fmt: skip


class AdapterTraffic:
    """Requests for all adapters in turn, one a few milliseconds after the other, until stopped."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.answers: list[httpx.Response] = []
        self.news = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(1_000_000):
                tasks.create_task(self._ask(NAMES[number % len(NAMES)], number))
                await asyncio.sleep(0.02)

    async def _ask(self, lora_id: str, number: int) -> None:
        body = {"lora_id": lora_id, "prompt": f"{number} hello", "max_tokens": 2}
        self.answers.append(await self.client.post("/v1/completions", json=body))
        self.news.set()

    async def until(self, holds) -> None:
        async with within(30):
            while not holds(self.answers):
                self.news.clear()
                await self.news.wait()


def adapter_of(answer: httpx.Response) -> str:
    return answer.headers["x-lorafleet-adapter"].partition("@")[0]


async def cold_starts(client: httpx.AsyncClient) -> float:
    page = (await client.get("/metrics")).text
    return sum(
        float(value) for value in re.findall(r"^lorafleet_router_cold_starts_total\S* (\S+)$", page, re.MULTILINE)
    )


async def test_a_worker_that_is_added_under_load_is_warm_before_it_is_ready(tmp_path: Path) -> None:
    model, shelf = make_model(tmp_path / "model"), tmp_path / "adapters"
    for name in NAMES:
        make_adapter(shelf, name)
    orchestrator = build_orchestrator(
        OrchestratorSettings(store=tmp_path / "store.db", settle_s=0.2, **ORCHESTRATOR_WAITS)
    )
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(orchestrator.app))

        def worker(name: str) -> RunningWorker:
            (tmp_path / name).mkdir()
            flags = ("--instance-id", name, "--orchestrator-url", url, "--cache-dir", str(tmp_path / f"cache-{name}"))
            return RunningWorker(model, shelf, tmp_path / name, *FLAGS, *flags)

        await stack.enter_async_context(worker("w0").inside())
        operator = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(10)))
        for name in NAMES:
            spec = {"lora_id": name, "source": f"file://{shelf}/{name}", "base_model": "tiny-qwen"}
            (await operator.post("/v1/adapters", json=spec)).raise_for_status()
        app, parts = build_router(RouterSettings(orchestrator_url=url, metadata_poll_s=0.2, catalog_poll_s=0.2))
        router = await stack.enter_async_context(serving(app, http=app.state.http))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router, timeout=patience(20)))
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(10))

        traffic = AdapterTraffic(client)
        running = asyncio.create_task(traffic.run())
        try:
            await traffic.until(lambda answers: {adapter_of(answer) for answer in answers} == set(NAMES))
            cold = await cold_starts(client)
            agent = await stack.enter_async_context(worker("w1").inside())  # ready when this returns
            share = await loaded(agent)
            assert 2 <= len(share) < len(NAMES)
            await traffic.until(lambda answers: sum(a.headers.get("x-lorafleet-worker") == "w1" for a in answers) > 5)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert {answer.status_code for answer in traffic.answers} == {200}
        assert await cold_starts(client) == cold
