"""One worker behind a router and an orchestrator, all three in the test's process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from router.request.services import Services
from tests.patience import ORCHESTRATOR_WAITS, patience, until
from tests.serving import client_of, serving
from tests.workers.running import RunningWorker


@dataclass(frozen=True, slots=True)
class RoutedWorker:
    """Clients of the three services, and the router's own services."""

    agent: httpx.AsyncClient
    router: httpx.AsyncClient
    orchestrator: httpx.AsyncClient
    services: Services


@asynccontextmanager
async def behind_a_router(
    worker: RunningWorker, folder: Path, *words: str, base_model: str, within_s: float
) -> AsyncIterator[RoutedWorker]:
    """The worker with these flags, once the router lists its base model and loaded adapters and has the tokenizer.

    within_s  seconds that the engine may take to start
    """
    settings = OrchestratorSettings(store=folder / "store.db", settle_s=0.2, **ORCHESTRATOR_WAITS)
    async with (
        serving(build_orchestrator(settings).app) as url,
        client_of(url, timeout=patience(60)) as orchestrator,
        worker.inside("--orchestrator-url", url, *words, until_ready=False) as agent,
    ):
        await worker.ready(agent, within_s=within_s)
        app, services = build_router(RouterSettings(orchestrator_url=url, metadata_poll_s=0.1))
        async with (
            serving(app, http=app.state.http) as router_url,
            client_of(router_url, timeout=patience(60)) as router,
        ):
            loaded = (await agent.get("/metadata")).json()["lora"]["loaded_loras"]

            async def has_adapters() -> bool:
                listed = {item["id"] for item in (await router.get("/v1/models")).json()["data"]}
                return {base_model, *(item["lora_id"] for item in loaded if item["state"] == "ready")} <= listed

            await until(has_adapters, what="the router lists base model and adapters")
            await until(lambda: services.tokenizers.knows(base_model), what="the router has the tokenizer")
            yield RoutedWorker(agent, router, orchestrator, services)
