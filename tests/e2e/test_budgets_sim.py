"""Budgets over two routers: what one has spent is refused at both, and outlives restarts."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.serve import DEFAULT_LIMITS
from lorafleet.keys.key_edits import add_key
from lorafleet.local.tiny_model import make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import ORCHESTRATOR_WAITS, ROUTER_WAITS, patience, until
from tests.serving import client_of, serving

pytestmark = pytest.mark.fleet

ASK = {"model": "tiny-qwen", "prompt": "Which customers paid late?", "max_tokens": 20}


@contextlib.asynccontextmanager
async def another_router(fleet: SmallFleet, key_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A router that has just started."""
    app, services = build_router(
        RouterSettings(
            orchestrator_url=fleet.url,
            token=fleet.keys["load"],
            agent_token=fleet.keys["agent-load"],
            key_files=(key_file,),
            **ROUTER_WAITS,
        )
    )
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        assert await services.discovery.changes.until(services.discovery.is_synced, timeout_s=patience(10))
        yield client


async def test_a_budget_holds_over_routers_and_restarts_and_opens_once_it_is_raised(tmp_path: Path) -> None:
    if datetime.now(UTC).hour == 23 and datetime.now(UTC).minute >= 55:
        pytest.skip("the day would end in the middle of the test")
    (tmp_path / "shelf").mkdir()
    key_file = tmp_path / "fleet" / "keys.yaml"
    async with small_fleet(
        tmp_path / "fleet", make_model(tmp_path / "model"), shelf=tmp_path / "shelf", routers=2
    ) as fleet:
        first, second = fleet.routers
        limits = {"soft_tokens_per_day": 20, "tokens_per_day": 100}
        bearer = {"authorization": f"Bearer {add_key(key_file, 'acme', ['infer'], limits=limits)}"}

        async def ask(router: httpx.AsyncClient) -> httpx.Response:
            return await router.post("/v1/completions", json=ASK, headers=bearer)

        async def is_exhausted(router: httpx.AsyncClient) -> bool:
            answer = await ask(router)
            assert answer.status_code in {200, 401, 429, 503}, answer.text  # the key is read within a second
            if answer.status_code != 429:
                return False
            error = answer.json()["error"]
            assert error["code"] == "budget_exhausted"
            assert "a budget of 100 tokens a day" in error["message"]
            return True

        async def refuses_at_once(router: httpx.AsyncClient) -> None:
            assert await is_exhausted(router)

        assert (await until(lambda: _answered(ask, second))).headers.get("x-lorafleet-budget") is None
        await until(lambda: is_exhausted(first), what="the first router has spent the budget")
        await until(lambda: is_exhausted(second), what="the second router has heard of it")
        for router in (first, second):
            await refuses_at_once(router)
        async with another_router(fleet, key_file) as started:
            await refuses_at_once(started)
        found = (await fleet.http.get("/v1/usage", params={"tenant": "acme"})).json()["data"][0]["usage"]
        assert found["prompt_tokens"] + found["completion_tokens"] >= 100

        await fleet.parts["orchestrator"].aclose()
        for router in (first, second):
            await refuses_at_once(router)
        settings = OrchestratorSettings(
            store=tmp_path / "fleet" / "store.db",
            key_files=(key_file,),
            token=fleet.keys["load"],
            agent_token=fleet.keys["agent"],
            **ORCHESTRATOR_WAITS,
        )
        orchestrator = build_orchestrator(settings)
        listener = listener_for_app(DEFAULT_LIMITS, upload_bytes=orchestrator.upload_bytes)
        async with serving(orchestrator.app, http=listener, port=int(fleet.url.rpartition(":")[2])):
            await until(lambda: _is_leading(fleet))
            async with another_router(fleet, key_file) as started:
                await refuses_at_once(started)
                key_file.write_text(key_file.read_text().replace("tokens_per_day: 100", "tokens_per_day: 100000"))
                for router in (first, second, started):
                    answer = await until(lambda router=router: _answered(ask, router))
                    spent = (
                        answer.headers["x-lorafleet-budget"].removeprefix("tokens_per_day; spent=").partition(",")[0]
                    )
                    assert int(spent) >= 100


async def _answered(ask, router: httpx.AsyncClient) -> httpx.Response | None:
    answer = await ask(router)
    return answer if answer.status_code == 200 else None


async def _is_leading(fleet: SmallFleet) -> bool:
    return (await fleet.http.get("/v1/usage")).status_code == 200
