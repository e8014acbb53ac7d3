"""Every router lists the same models: by the orchestrator's events, and by its next read where they are lost."""

import asyncio
import contextlib

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import patience, until
from tests.serving import client_of, serving


class SilentEvents:
    """An orchestrator whose event stream stays open and says nothing; all else is passed on."""

    def __init__(self, url: str):
        self.reads = 0
        self.client = client_of(url)
        self.app = FastAPI()
        self.app.add_api_route("/v1/events", self.events)
        self.app.add_api_route("/{path:path}", self.rest, methods=["GET", "POST"])

    async def events(self):
        async def nothing():
            yield ": following\n\n"
            await asyncio.Event().wait()

        return StreamingResponse(nothing(), media_type="text/event-stream")

    async def rest(self, path: str, request: Request):
        self.reads += path == "v1/catalog"
        headers = {name: value for name, value in request.headers.items() if name in {"if-none-match", "content-type"}}
        answer = await self.client.request(
            request.method, f"/{path}", headers=headers, content=await request.body(), params=request.query_params
        )
        kept = {name: answer.headers[name] for name in ("etag", "content-type") if name in answer.headers}
        return Response(answer.content, answer.status_code, headers=kept)


async def names(router: httpx.AsyncClient) -> list[str]:
    return sorted(card["id"] for card in (await router.get("/v1/models")).json()["data"])


async def test_all_routers_list_a_change_and_one_that_hears_no_events_does_after_its_next_read(tmp_path):
    settings = OrchestratorSettings(store=tmp_path / "store.db", settle_s=0)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(build_orchestrator(settings).app))
        silent = SilentEvents(url)
        await stack.enter_async_context(silent.client)
        deaf = await stack.enter_async_context(serving(silent.app))
        routers = []
        for place in (url, url, deaf):
            # There is no worker to wait for.
            app, parts = build_router(RouterSettings(orchestrator_url=place, catalog_poll_s=0.2, first_sync_wait_s=0.1))
            router = await stack.enter_async_context(serving(app, http=app.state.http))
            routers.append(await stack.enter_async_context(client_of(router)))
            assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(10))
        http = await stack.enter_async_context(client_of(url))

        async def all_list(wanted: list[str]) -> None:
            reads = silent.reads

            async def equal() -> bool:
                return await asyncio.gather(*map(names, routers[:2])) == [wanted] * 2

            await until(equal, what=f"the routers that hear events list {wanted}")
            # A read that begins after the change has it, and the next one begins after that is in force.
            await until(lambda: silent.reads >= reads + 3, what="the router without events reads the catalog")
            assert await names(routers[2]) == wanted

        spec = {"lora_id": "sql/v1", "source": "file:///sql", "base_model": "tiny-qwen"}
        assert (await http.post("/v1/adapters", json=spec)).is_success
        await all_list(["sql/v1"])
        assert (await http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})).is_success
        await all_list(["sql", "sql/v1"])
        assert (await http.delete("/v1/aliases/sql")).is_success
        assert (await http.delete("/v1/adapters/sql/v1")).is_success
        await all_list([])
