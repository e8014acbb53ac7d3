"""A name is what its caller wrote: `x/` is not `x`, at no service and in no field."""

import asyncio
import json
import re
from urllib.parse import unquote

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import example, given
from hypothesis import strategies as st

from lorafleet.http_server.guard import trimmed
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.urls import url_path
from orchestrator.model.names import checked_lora_id, checked_published_name
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.http_server.test_guard import asking
from tests.router.doubles import error_of
from tests.serving import client_of, serving

# As they stand in a path; decoded they are other names than `victim`, or none.
WRONG = (
    "victim/",
    "victim//",
    "/victim",
    "a//victim",
    "victim%2F",
    "./victim",
    "%2e%2e/victim",
    "a/../victim",
    "a/%2E/victim",
    "victim%20",
    "%20victim",
    "vic%0Atim",
    "vic%00tim",
    "victim%7F",
    "victim%09",
    "vict%C3%ADm",
    "victim%C2%A0",
)
BODIES = {
    "/v1/aliases/{name:path}": {"targets": [{"lora_id": "victim"}]},
    "/v1/published/{name:path}": {"source": "/run/1"},
}


def calls_with_names(app) -> list[tuple[str, str]]:
    """(method, path) of every route that takes a name with slashes."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and ":path}" in route.path]
    return [(method, route.path) for route in routes for method in route.methods if route.path.startswith("/v1/")]


def at(path: str, name: str) -> str:
    return re.sub(r"\{\w+:path\}", lambda _: name, path)


def body_of(method: str, path: str) -> object:
    """A whole body for the call, or None."""
    if method in {"GET", "DELETE"} or (method == "PUT" and "adapters" in path):
        return None
    if path.endswith("/rollout"):
        return {"paused": True} if method == "PATCH" else {"to": "victim", "steps": [{"weight": 1.0}]}
    return BODIES.get(path, {})


async def sent(app, method: str, path: str, name: str) -> tuple[int, str]:
    """Status and body of the answer to a call whose path has the name as it stands: httpx would take out dots."""
    raw, body = at(path, name).encode(), body_of(method, path)
    content = b"" if body is None else json.dumps(body).encode()
    found: list[dict] = []

    waiting = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message):
        found.append(message)

    headers = {"host": "here", "content-length": str(len(content)), "content-type": "application/json"}
    scope = {"type": "http", "method": method, "path": unquote(raw.decode()), "raw_path": raw, "query_string": b""}
    scope |= {"headers": [(key.encode(), value.encode()) for key, value in headers.items()], "client": None}
    await app({**scope, "server": None, "scheme": "http", "http_version": "1.1", "root_path": ""}, receive, send)
    text = b"".join(message.get("body", b"") for message in found)
    return found[0]["status"], text.decode()


async def with_victim(client) -> None:
    """An adapter and an alias, whose names differ from wrong ones by what those have too much."""
    assert (await client.post("/v1/adapters", json={"lora_id": "victim", "source": "file:///x"})).status_code == 201
    alias = {"targets": [{"lora_id": "victim"}]}
    assert (await client.put("/v1/aliases/a/victim", json=alias)).status_code == 201


async def test_every_route_of_the_orchestrator_refuses_names_of_another_form_and_says_the_right_one(tmp_path):
    async with orchestrator(tmp_path) as app, asking(app) as client:
        await with_victim(client)
        before = (await client.get("/v1/export")).json()
        calls = calls_with_names(app)
        assert len(calls) > 14
        for method, path in calls:
            for name in WRONG:
                status, text = await sent(app, method, path, name)
                assert status == 400, (method, path, name, text)
                form = r"letters, digits|as in '(a/)?victim'|'\.' or '\.\.' part|control character"
                assert re.search(form, text), text
        assert (await client.get("/v1/export")).json() == before


async def test_a_word_behind_a_name_may_have_a_slash_at_its_end(tmp_path):
    async with orchestrator(tmp_path) as app, asking(app) as client:
        await with_victim(client)
        for method, path in (("POST", "/v1/adapters/victim/retry"), ("GET", "/v1/aliases/a/victim/history")):
            answers = [await client.request(method, path + end) for end in ("", "/")]
            assert [answer.status_code for answer in answers] == [200, 200], path


@pytest.mark.parametrize("name", ["victim/", "/victim", "a//b", "a/../victim", "victim ", "vic\ntim", "victim\x00", ""])
async def test_every_field_with_a_name_is_checked_as_a_path_is(tmp_path, name):
    async with orchestrator(tmp_path) as app, asking(app) as client:
        await with_victim(client)
        spec, to = {"lora_id": name, "source": "file:///x"}, {"targets": [{"lora_id": name}]}
        record = {"adapters": [], "names": [{"name": name, "published": {}}]}
        alias = {"name": name, "targets": [{"lora_id": "victim"}]}
        for method, path, body in (
            ("POST", "/v1/adapters", spec),
            ("POST", "/v1/adapters:batch", {"adapters": [spec]}),
            ("PUT", "/v1/aliases/prod", to),
            ("POST", "/v1/aliases/a/victim/rollout", {"to": name, "steps": [{"weight": 1.0}]}),
            ("POST", "/v1/placements/plan", {"demand": {name: {"factor": 2}}}),
            ("POST", "/v1/import", {"record": record}),
            ("POST", "/v1/import", {"record": {"names": [alias]}}),
            ("POST", "/v1/apply", {"file": {"aliases": [alias]}}),
            ("POST", "/v1/apply", {"file": {"published": [{"name": name}]}}),
            ("POST", "/v1/apply", {"file": {"adapters": [spec]}}),
        ):
            answer = await client.request(method, path, json=body)
            assert error_of(answer)[0] == 400, (path, answer.text)


async def test_an_agent_knows_no_adapter_by_its_name_with_a_slash(tmp_path):
    async with agent(tmp_path) as app, asking(app) as client:
        assert (await client.get("/v1/metadata/loras/")).json()["data"] == []
        answer = await client.get("/v1/metadata/loras/victim/")
        assert (answer.status_code, "'victim/'" in answer.text) == (404, True)


@given(st.text(max_size=30) | st.from_regex(r"[a/. @:-]{1,12}", fullmatch=True))
@example("victim/")
@example("a\n")
def test_a_name_that_is_taken_is_the_same_in_a_path_and_behind_any_leniency(name):
    for check in (checked_lora_id, checked_published_name):
        try:
            taken = check(name)
        except ValueError:
            continue
        assert taken == name == name.strip() == trimmed(name)
        assert httpx.URL(f"http://here/{url_path(name)}").path == f"/{name}"


@pytest.mark.parametrize("name", ["victim/", "/victim", "a//b"])
def test_a_command_and_the_client_send_no_name_with_an_empty_part(name):
    with pytest.raises(CommandFailed, match=r"as in (victim|a/b)"):
        url_path(name)


async def test_a_router_passes_no_name_on_as_another(tmp_path):
    from router.app import build
    from router.config import RouterSettings

    async with orchestrator(tmp_path) as behind, serving(behind) as url, client_of(url) as direct:
        await with_victim(direct)
        app, parts = build(RouterSettings(orchestrator_url=url))
        try:
            for method, path in calls_with_names(app):
                for name in () if path.startswith("/v1/models") else WRONG:
                    status, text = await sent(app, method, path, name)
                    assert status == 400, (method, path, name, text)
        finally:
            parts.tokenizers.close()
        assert [item["lora_id"] for item in (await direct.get("/v1/adapters")).json()["data"]] == ["victim"]
