"""A key without a route's scope is refused before anything of its body is read, at all three services."""

import contextlib
import json

import pytest
from fastapi import Request
from fastapi.routing import APIRoute

from lorafleet.keys.auth import ScopeCheck
from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import SCOPES, Caller
from lorafleet.service.http import HttpError
from router.app import build
from router.config import RouterSettings
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator


@contextlib.asynccontextmanager
async def router(_folder, **more):
    yield build(RouterSettings(**more))[0]


def scope_checks(route) -> list[ScopeCheck]:
    found, pending = [], list(route.dependant.dependencies)
    while pending:
        each = pending.pop()
        pending += each.dependencies
        found += [each.call] if isinstance(each.call, ScopeCheck) else []
    return found


class BodyRead(Exception):
    """The app has asked for the body."""


async def response_to(app, method, path, key) -> tuple[int, str]:
    """(status, code) of the answer to a request whose body nobody may read."""
    sent = []

    async def receive():
        raise BodyRead

    async def send(message):
        sent.append(message)

    fields = {"content-type": "application/json", "content-length": "16000000", "host": "localhost"}
    headers = [(name.encode(), value.encode()) for name, value in {**fields, "authorization": f"Bearer {key}"}.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "client": None, "server": None}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


@pytest.mark.parametrize("service", [orchestrator, agent, router])
async def test_a_body_of_a_key_without_the_scope_is_never_read(service, tmp_path):
    path = tmp_path / "keys.yaml"
    entries = [
        {"sha256": hash_key(scope), "scopes": [scope]} | ({"tenant": "acme"} if scope == "tenant-admin" else {})
        for scope in SCOPES
    ]
    path.write_text(json.dumps({"keys": entries}))
    tried = 0
    async with service(tmp_path, key_files=(path,)) as app:
        for route in app.routes:
            methods = route.methods & {"POST", "PUT", "PATCH", "DELETE"} if isinstance(route, APIRoute) else set()
            called = route.path.replace("{", "").replace("}", "") if methods else ""
            for check in scope_checks(route) if methods else []:
                for scope in SCOPES:
                    if not any(map(Caller(None, frozenset({scope})).may, check.scopes)):
                        found = await response_to(
                            app, min(methods), route.path.replace("{", "").replace("}", ""), scope
                        )
                        assert found == (403, "scope_missing"), (route.path, scope)
                        tried += 1
                found = await response_to(app, min(methods), called, "nobody's")
                assert found == (401, "invalid_api_key"), route.path
        assert tried > 3
        assert (await response_to(app, "POST", "/v1/nowhere", "admin"))[0] == 404


@pytest.mark.parametrize("service", [orchestrator, agent, router])
async def test_every_route_with_a_key_takes_it_in_either_header(service, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"sha256": hash_key("k"), "scopes": ["admin"]}]}))
    tried = 0
    async with service(tmp_path, key_files=(path,)) as app:
        for route in app.routes:
            for check in scope_checks(route) if isinstance(route, APIRoute) else ():
                tried += 1
                for headers in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
                    assert check.check(_request(headers)).may("admin"), route.path
                for headers in ({"x-api-key": "other"}, {"authorization": "Bearer other", "x-api-key": "k"}, {}):
                    with pytest.raises(HttpError, match="API key"):
                        check.check(_request(headers))
    assert tried > 5


def _request(headers) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})
