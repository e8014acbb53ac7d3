"""Every route of the three services, by role and tenant: who is let in, who is refused, and for whom nothing is there.

Two tenants, acme and globex, ask about objects of acme and about objects of nobody, which everybody may use. A route
without a row fails a test, and so does a row without a route. A row has a letter for each of ROLES:

    -   401: a key is needed
    x   403: the key may not
    0   404: for this caller nothing is there
    +   let in; the answer may still be 400, 409 or 503

The row of an object's route has two words: for the object of acme, and for that of nobody.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from lorafleet.keys.key_files import hash_key
from router.app import build as build_router
from router.config import RouterSettings
from router.protocols.routes import ROUTES
from router.protocols.sglang_generate import PATH as GENERATE
from tests.lorafleet.http_server.test_cross_site import agent
from tests.orchestrator.conftest import ManualClock, OrchestratorUnderTest
from tests.patience import within
from tests.router.doubles import AgentDouble, EngineDouble, fleet
from tests.serving import client_of, serving

pytestmark = pytest.mark.slow
KEYS: dict[str, dict[str, Any]] = {
    "acme-user": {"tenant": "acme", "scopes": ["infer"]},
    "acme-admin": {"tenant": "acme", "scopes": ["tenant-admin"]},
    "globex-admin": {"tenant": "globex", "scopes": ["tenant-admin"]},
    "operator": {"scopes": ["operate"]},
    "admin": {"scopes": ["admin"]},
    "router": {"scopes": ["load"]},
    "worker": {"scopes": ["worker", "drain"]},
    "orchestrator": {"scopes": ["agent"]},
}
ROLES = ("", *KEYS)
"""The keys of the columns, in their order; the first is none."""
LETTERS = {401: "-", 403: "x", 404: "0"}
_VERBS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")


@dataclass(frozen=True, slots=True)
class Owned:
    """The objects of one owner, by which the parameters and bodies of routes are filled in."""

    adapter: str
    alias: str
    published: str

    def path(self, route: str) -> str:
        """The route's path with this owner's object in it."""
        names = {"/v1/aliases": self.alias, "/v1/published": self.published}
        name = next((name for begin, name in names.items() if route.startswith(begin)), "x")
        known = {"lora_id": self.adapter, "name": name, "model": self.adapter, "worker_id": "w0", "digest": "a" * 64}
        return _PARAMETER.sub(lambda match: known.get(match[1], "x"), route)

    def body(self, call: str) -> Any:
        """A body that is valid where the caller's right depends on it; else an empty object."""
        bodies = {
            "POST /v1/adapters": {"lora_id": f"{self.adapter}-new", "source": "file:///new"},
            "POST /v1/adapters:batch": {"action": "retry", "lora_ids": [self.adapter]},
            "PUT /v1/aliases/{name:path}": {"targets": [{"lora_id": self.adapter}]},
            "POST /v1/aliases/{name:path}/rollout": {"to": self.adapter},
            "PATCH /v1/aliases/{name:path}/rollout": {"paused": True},
            "POST /v1/published/{name:path}": {"source": "/run/step-1"},
        }
        asked = {"model": self.adapter, "lora_id": self.adapter, "messages": [{"role": "user", "content": "x"}]}
        return asked | {"prompt": "x", "input": "x"} if call in _INFERENCE else bodies.get(call, {})


OWNERS = (Owned("acme/a", "acme/prod", "acme/policy"), Owned("open/a", "prod", "policy"))
_INFERENCE = frozenset({f"{method} {path}" for method, path in (*ROUTES, ("POST", GENERATE))})
# Calls that a router passes on with the caller's own key.
_FORWARDED = ("/v1/adapters/", "/v1/uploads/", "/v1/published/")

#                 nobody, acme's user, acme's admin, globex' admin, operator, admin, router, worker, orchestrator
ORCHESTRATOR: dict[str, str] = {
    "GET /docs": "+++++++++",
    "GET /docs/oauth2-redirect": "+++++++++",
    "GET /redoc": "+++++++++",
    "GET /ui/assets/{path:path}": "000000000",
    "GET /ui/{view:path}": "+++++++++",
    "GET /ui": "+++++++++",
    "GET /v1/login": "+++++++++",
    "GET /v1/whoami": "-++++++++",
    "GET /health": "+++++++++",
    "GET /ready": "+++++++++",
    "GET /metrics": "-xxx++xxx",
    "GET /v1/catalog": "-xxx+++xx",
    "GET /v1/events": "-x+++++xx",
    "POST /v1/usage": "-xxxx++xx",
    "GET /v1/usage": "-x++++xxx",
    "POST /v1/adapters/{lora_id:path}/ensure": "-x+0+++xx -x+++++xx",
    "GET /v1/traffic": "-xxx++xxx",
    "GET /v1/traffic/totals": "-x++++xxx",
    "GET /v1/traffic/shares": "-x++++xxx",
    "GET /v1/routers": "-xxx++xxx",
    "GET /v1/live": "-x++++xxx",
    "GET /v1/routers/questions": "-xxxx++xx",
    "POST /v1/routers/answers": "-xxxx++xx",
    "GET /v1/decisions": "-x++++xxx",
    "POST /v1/route": "-x++++xxx",
    "POST /v1/decisions/replay": "-x++++xxx",
    "GET /v1/requests": "-x++++xxx",
    "GET /v1/requests/{request_id}": "-x++++xxx",
    "POST /v1/ask": "-+++x++xx",
    "GET /v1/workers/{worker_id}/report": "-xxx++xxx",
    "GET /v1/workers/{worker_id}/log": "-xxx++xxx",
    "GET /v1/keys": "-x++++xxx",
    "GET /v1/workers": "-x+++++xx",
    "GET /v1/workers/{worker_id}": "-x+++++xx",
    "GET /v1/adapters": "-x++++xxx",
    "GET /v1/adapters/{lora_id:path}": "-x+0++xxx -x++++xxx",
    "POST /v1/adapters/{lora_id:path}/check": "-x+0x+xxx -xxxx+xxx",
    "POST /v1/adapters": "-x+xx+xxx",
    "POST /v1/adapters:batch": "-x++x+xxx",
    "POST /v1/adapters/{lora_id:path}/retry": "-x+0x+xxx -xxxx+xxx",
    "PATCH /v1/adapters/{lora_id:path}": "-x+0x+xxx -xxxx+xxx",
    "DELETE /v1/adapters/{lora_id:path}": "-x+0x+xxx -xxxx+xxx",
    "PUT /v1/adapters/{lora_id:path}": "-x+xx+xxx -xxxx+xxx",
    "GET /v1/uploads/{lora_id:path}": "-x00x0xxx -x00x0xxx",
    "DELETE /v1/uploads/{lora_id:path}": "-x++x+xxx -x++x+xxx",
    "POST /v1/aliases/{name:path}/rollout": "-x+0x+xxx -xxxx+xxx",
    "GET /v1/aliases/{name:path}/rollout": "-x0000xxx -x0000xxx",
    "PATCH /v1/aliases/{name:path}/rollout": "-x00x0xxx -xxxx0xxx",
    "DELETE /v1/aliases/{name:path}/rollout": "-x00x0xxx -xxxx0xxx",
    "GET /v1/aliases/{name:path}/comparison": "-x+0++xxx -x++++xxx",
    "GET /v1/aliases": "-x++++xxx",
    "PUT /v1/aliases/{name:path}": "-x+xx+xxx -xxxx+xxx",
    "GET /v1/aliases/{name:path}/history": "-x+0++xxx -x++++xxx",
    "GET /v1/aliases/{name:path}": "-x+0++xxx -x++++xxx",
    "DELETE /v1/aliases/{name:path}": "-x+0x+xxx -xxxx+xxx",
    "GET /v1/published": "-x++++xxx",
    "POST /v1/published/{name:path}": "-x+xx+xxx -xxxx+xxx",
    "GET /v1/published/{name:path}": "-x+0++xxx -x++++xxx",
    "DELETE /v1/published/{name:path}": "-x+0x+xxx -xxxx+xxx",
    "GET /v1/policy": "-x++++xxx",
    "PUT /v1/policy": "-xxx++xxx",
    "PATCH /v1/policy": "-xxx++xxx",
    "GET /v1/history": "-x++++xxx",
    "GET /v1/backup": "-xxxx+xxx",
    "POST /v1/workers/register": "-xxxx+x+x",
    "GET /v1/workers/{worker_id}/offers": "-xxxx+x+x",
    "POST /v1/workers/{worker_id}/cordon": "-xxx++xxx",
    "POST /v1/workers/{worker_id}/uncordon": "-xxx++xxx",
    "POST /v1/workers/{worker_id}/drain": "-xxx++xxx",
    "DELETE /v1/workers/{worker_id}/adapters/{lora_id:path}": "-xxx++xxx -xxx++xxx",
    "POST /v1/workers/{worker_id}/adapters/{lora_id:path}": "-xxx++xxx -xxx++xxx",
    "GET /v1/export": "-xxxx+xxx",
    "POST /v1/import": "-xxxx+xxx",
    "POST /v1/apply": "-xxxx+xxx",
    "GET /v1/files/{digest}": "-xxxx0x0x",
    "GET /v1/files/{digest}/{name}": "-xxxx0x0x",
    "POST /v1/pauses": "-x++x+xxx",
    "GET /v1/pauses": "-x++++xxx",
    "DELETE /v1/pauses": "-x++++xxx",
    "GET /v1/placements": "-x++++xxx",
    "POST /v1/placements/plan": "-x++++xxx",
    "POST /v1/rebalance": "-xxx++xxx",
    "GET /v1/orphans": "-x++++xxx",
    "POST /v1/orphans/adopt": "-xxxx+xxx",
}

AGENT: dict[str, str] = {
    "GET /docs": "+++++++++",
    "GET /docs/oauth2-redirect": "+++++++++",
    "GET /redoc": "+++++++++",
    "GET /metadata": "-xxx++xx+",
    "GET /v1/metadata/loras": "-xxx++xx+",
    "GET /v1/metadata/loras/{lora_id:path}": "-xxx00xx0 -xxx00xx0",
    "GET /v1/admin/loras": "-xxx++xx+",
    "GET /v1/events": "-xxx++xx+",
    "GET /v1/model/files": "-xxx00xx0",
    "GET /v1/log": "-xxx++xx+",
    "GET /v1/kv/snapshot": "-xxxx+xx+",
    "GET /v1/kv/stream": "-xxxx+xx+",
    "POST /v1/admin/load_lora": "-xxxx+xx+",
    "POST /v1/admin/unload_lora": "-xxxx+xx+",
    "POST /v1/admin/check_lora": "-xxxx+xx+",
    "POST /v1/admin/inspect_lora": "-xxxx+xx+",
    "GET /v1/admin/source": "-xxxx+xx+",
    "POST /v1/admin/claim": "-xxxx+xx+",
    "POST /v1/admin/undrain": "-xxx++xx+",
    "POST /v1/admin/drain": "-xxx++x++",
    "GET /v1/files/{digest}": "-xxxx0x00",
    "GET /v1/files/{digest}/{name}": "-xxxx0x00",
    "POST /v1/admin/mark_files": "-xxxx+xx+",
    "GET /v1/uploads": "-xxxx+xx+",
    "GET /v1/uploads/{upload_id}": "-xxxx+xx+",
    "POST /v1/uploads/{upload_id}/{name}": "-xxxx+xx+",
    "PUT /v1/uploads/{upload_id}/{name}": "-xxxx+xx+",
    "POST /v1/uploads/{upload_id}": "-xxxx+xx+",
    "DELETE /v1/uploads/{upload_id}": "-xxxx+xx+",
    "POST /v1/prove": "+++++++++",
    "GET /health": "+++++++++",
    "GET /ready": "+++++++++",
    "GET /metrics": "-xxx++xxx",
}

ROUTER: dict[str, str] = {
    "GET /docs": "+++++++++",
    "GET /docs/oauth2-redirect": "+++++++++",
    "GET /redoc": "+++++++++",
    "GET /v1/models": "-+++x++xx",
    "GET /v1/models/{model:path}": "-++0x++xx -+++x++xx",
    "POST /v1/route": "-x++++xxx",
    "GET /v1/decisions": "-x++++xxx",
    "GET /v1/kv/tree": "-xxx++xxx",
    "POST /v1/decisions/replay": "-x++++xxx",
    "GET /v1/requests": "-x++++xxx",
    "GET /v1/requests/{request_id}": "-x0000xxx",
    "POST /pause": "-x++x+xxx",
    "POST /resume": "-x++x+xxx",
    "GET /is_paused": "-+++x++xx",
    "POST /pause_generation": "-x++x+xxx",
    "POST /continue_generation": "-x++x+xxx",
    "POST /areal_pause_generation": "-x++x+xxx",
    "POST /areal_continue_generation": "-x++x+xxx",
    "GET /server_info": "-+++x++xx",
    "GET /tokenizer_info": "-000x00xx",
    "GET /get_server_info": "-+++x++xx",
    "GET /get_model_info": "-+++x++xx",
    "GET /model_info": "-+++x++xx",
    "GET /version": "-+++x++xx",
    "POST /reset_prefix_cache": "-+++x++xx",
    "POST /flush_cache": "-+++x++xx",
    "GET /is_sleeping": "-+++x++xx",
    "POST /wake_up": "-+++x++xx",
    "POST /v1/load_lora_adapter": "-x++x+xxx",
    "POST /skyrl/v1/load_lora_adapter": "-x++x+xxx",
    "POST /load_lora_adapter": "-x++x+xxx",
    "POST /v1/unload_lora_adapter": "-x++x+xxx",
    "POST /unload_lora_adapter": "-x++x+xxx",
    "GET /v1/whoami": "-++++++++",
    "GET /health": "+++++++++",
    "GET /ready": "+++++++++",
    "GET /metrics": "-xxx++xxx",
    "GET /v1/responses/{id}": "-000x00xx",
    "POST /classify": "-++0x++xx -+++x++xx",
    "POST /detokenize": "-++0x++xx -+++x++xx",
    "POST /generate": "-+++x++xx -+++x++xx",
    "POST /generative_scoring": "-++0x++xx -+++x++xx",
    "POST /inference/v1/generate": "-++0x++xx -+++x++xx",
    "POST /pooling": "-++0x++xx -+++x++xx",
    "POST /rerank": "-++0x++xx -+++x++xx",
    "POST /score": "-++0x++xx -+++x++xx",
    "POST /tokenize": "-++0x++xx -+++x++xx",
    "POST /v1/chat/completions": "-++0x++xx -+++x++xx",
    "POST /v1/chat/completions/batch": "-++0x++xx -+++x++xx",
    "POST /v1/completions": "-++0x++xx -+++x++xx",
    "POST /v1/decisions": "-++0x++xx -+++x++xx",
    "POST /v1/embeddings": "-++0x++xx -+++x++xx",
    "POST /v1/messages": "-++0x++xx -+++x++xx",
    "POST /v1/messages/count_tokens": "-++0x++xx -+++x++xx",
    "POST /v1/rerank": "-++0x++xx -+++x++xx",
    "POST /v1/responses": "-++0x++xx -+++x++xx",
    "POST /v1/responses/{id}/cancel": "-000x00xx",
    "POST /v1/score": "-++0x++xx -+++x++xx",
    "POST /v1/systemone": "-++0x++xx -+++x++xx",
    "POST /v2/embed": "-++0x++xx -+++x++xx",
    "POST /v2/rerank": "-++0x++xx -+++x++xx",
}


def rows_of(app: FastAPI) -> list[str]:
    """`METHOD path` of each route of an app."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [f"{method} {route.path}" for route in routes for method in sorted(route.methods & _VERBS)]


def difference(found: Mapping[str, str], table: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The rows that are not those of the table: found and expected, empty where there is none."""
    names = [name for name in {**found, **table} if found.get(name) != table.get(name)]
    return {name: (found.get(name, ""), table.get(name, "")) for name in names}


Ask = Callable[[str, str, str, Any], Awaitable[int]]
"""(method, path, key, body) -> status"""


async def row(call: str, ask: Ask) -> str:
    """The row of one route, as the service answers now."""
    method, _, route = call.partition(" ")
    paths = {owned.path(route) for owned in OWNERS}
    words = []
    for owned in OWNERS if len(paths) > 1 or (call in _INFERENCE and "{" not in route) else OWNERS[:1]:
        statuses = [await ask(method, owned.path(route), key, owned.body(call)) for key in ROLES]
        assert 500 not in statuses, call
        words.append("".join(LETTERS.get(status, "+") for status in statuses))
    return " ".join(words)


async def status_of(app: FastAPI, method: str, path: str, key: str, body: Any) -> int:
    """The status of an app's answer; its body, which may be a stream without end, is not waited for."""
    content = b"" if method in {"GET", "DELETE"} else json.dumps(body).encode()
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(content))}
    headers = [(name.encode(), value.encode()) for name, value in (fields | bearer(key)).items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"wait_s=0"}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80), "http_version": "1.1"}
    began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    sent = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive():
        if (message := next(sent, None)) is not None:
            return message
        await asyncio.wait([began])
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start" and not began.done():
            began.set_result(message["status"])

    asking = asyncio.create_task(app(scope, receive, send))
    try:
        async with within(30):
            await asyncio.wait([asking, began], return_when=asyncio.FIRST_COMPLETED)
        return began.result() if began.done() else await asking  # which raises
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def bearer(key):
    return {"authorization": f"Bearer {key}"} if key else {}


def key_file(folder):
    path = folder / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"sha256": hash_key(key)} | entry for key, entry in KEYS.items()]}))
    return path


async def publish(service, key, name):
    call = asyncio.create_task(
        service.http.post(f"/v1/published/{name}", json={"source": "/run/step-1"}, headers=bearer(key))
    )
    while not call.done():
        await service.turn()
        service.clock.now += 0.2
        await asyncio.wait([call], timeout=0.01)
    assert call.result().status_code == 200, call.result().text


@contextlib.asynccontextmanager
async def orchestrator(folder) -> AsyncIterator[OrchestratorUnderTest]:
    """An orchestrator with a worker, and an adapter, an alias and a published name of each owner."""
    folder.mkdir()
    service = OrchestratorUnderTest(folder / "store.db", ManualClock(), key_files=(key_file(folder),))
    service.http.headers.update(bearer("admin"))
    try:
        await service.worker("w0", slots=8)
        for owned, tenants, key in zip(OWNERS, (["acme"], None), ("acme-admin", "admin"), strict=True):
            await service.register(owned.adapter, tenants=tenants)
            targets = {"targets": [{"lora_id": owned.adapter}]}
            assert (await service.http.put(f"/v1/aliases/{owned.alias}", json=targets)).is_success
            await publish(service, key, owned.published)
        yield service
    finally:
        service.built.stop()
        await service.stack.aclose()
        await service.http.aclose()
        await service.built.client.aclose()
        service.store.close()


class FreshOrchestrator:
    """The app of an orchestrator that is made anew once a call has deleted an object."""

    def __init__(self, folder):
        self._folder = folder
        self._stack = contextlib.AsyncExitStack()
        self._making = asyncio.Lock()
        self._count = 0
        self._service: OrchestratorUnderTest | None = None

    async def ready(self) -> FastAPI:
        async with self._making:  # a router calls meanwhile
            if self._service is None:
                await self._stack.aclose()
                self._count += 1
                self._service = await self._stack.enter_async_context(orchestrator(self._folder / f"{self._count}"))
            return self._service.built.app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            await (await self.ready())(scope, receive, send)

    def note(self, method, path, status):
        """A deleted object is to be there for the next call."""
        if method == "DELETE" and status < 400 and path.startswith(("/v1/adapters/", "/v1/aliases/", "/v1/published/")):
            self._service = None

    async def close(self):
        await self._stack.aclose()


@pytest.fixture
async def fresh(tmp_path):
    made = FreshOrchestrator(tmp_path)
    yield made
    await made.close()


async def test_the_orchestrator_lets_in_whom_the_matrix_says(fresh):
    async def ask(method, path, key, body):
        status = await status_of(await fresh.ready(), method, path, key, body)
        fresh.note(method, path, status)
        return status

    found = {call: await row(call, ask) for call in rows_of(await fresh.ready())}
    assert difference(found, ORCHESTRATOR) == {}


async def test_an_agent_lets_in_whom_the_matrix_says(tmp_path):
    async with agent(tmp_path, key_files=(key_file(tmp_path),)) as app:

        async def ask(method, path, key, body):
            return await status_of(app, method, path, key, body)

        found = {call: await row(call, ask) for call in rows_of(app)}
    assert difference(found, AGENT) == {}


def is_forwarded(call: str) -> bool:
    return call.partition(" ")[2].startswith(_FORWARDED)


def asking(client) -> Ask:
    """A call over a connection. What an engine answers is let in, also where the engine has no such route."""

    async def ask(method, path, key, body):
        more = {} if method in {"GET", "DELETE"} else {"json": body}
        async with client.stream(method, path, headers=bearer(key), **more) as answer:
            return 200 if "x-lorafleet-worker" in answer.headers else answer.status_code

    return ask


async def test_a_router_lets_in_whom_the_matrix_says(tmp_path):
    control = AgentDouble()
    for owned, tenants in zip(OWNERS, (("acme",), None), strict=True):
        control.add_adapter(owned.adapter, on=["w0"], tenants=tenants)
    async with fleet(EngineDouble("w0"), control=control, key_files=(key_file(tmp_path),)) as (client, _, _):
        calls = [*rows_of(build_router(RouterSettings())[0]), *sorted(_INFERENCE)]
        found = {call: await row(call, asking(client)) for call in calls if not is_forwarded(call)}
    assert difference(found, ROUTER) == {}


async def test_a_router_that_passes_a_call_on_lets_in_whom_the_orchestrator_does(fresh, tmp_path):
    async with serving(fresh) as url:
        settings = RouterSettings(orchestrator_url=url, key_files=(key_file(tmp_path),), token="router")
        app, _ = build_router(settings)
        calls = [call for call in rows_of(app) if is_forwarded(call)]
        assert len(calls) > 5
        async with serving(app, http=app.state.http) as router, client_of(router) as client:

            async def ask(method, path, key, body):
                await fresh.ready()
                status = await asking(client)(method, path, key, body)
                fresh.note(method, path, status)
                return status

            found = {call: await row(call, ask) for call in calls}
    assert difference(found, {call: ORCHESTRATOR[call] for call in calls}) == {}
