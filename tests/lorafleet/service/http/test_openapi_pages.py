"""`/docs` and `/redoc` of every service work in a place without internet."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from workers.app import build as build_worker
from workers.config import WorkerSettings


def router_app(folder: Path) -> FastAPI:
    app, services = build_router(RouterSettings())
    services.tokenizers.close()
    return app


def orchestrator_app(folder: Path) -> FastAPI:
    return build_orchestrator(OrchestratorSettings(store=folder / "store.db")).app


def worker_app(folder: Path) -> FastAPI:
    return build_worker(WorkerSettings(engine="sim", model="m", state_dir=folder), port=0).app


@pytest.mark.parametrize("build", [router_app, orchestrator_app, worker_app])
@pytest.mark.parametrize("page", ["/docs", "/redoc"])
async def test_a_page_of_the_api_loads_all_it_needs_from_its_own_service(
    tmp_path: Path, build: Callable[[Path], FastAPI], page: str
) -> None:
    async with AsyncClient(transport=ASGITransport(build(tmp_path)), base_url="http://localhost") as client:
        text = (await client.get(page)).text
        assert "://" not in text
        assert ('"validatorUrl": null' in text) is (page == "/docs")
        loaded = re.findall(r'(?:src|href|url|spec-url)(?:=|: )["\'](/[^"\']+)', text)
        assert "/openapi.json" in loaded
        assert len(loaded) >= 3
        for path in loaded:
            assert (await client.get(path)).status_code == 200, path
