"""Every route of ours refuses unknown fields of a body, and names them and the known ones; between services none."""

import contextlib
import json

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from lorafleet.service.http.known_fields import WIRE_HEADERS, unknown_fields
from router.app import build
from router.config import RouterSettings
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator

# Bodies of other programs: engines' own calls, and the requests that a router sends on.
OF_OTHERS = {"/v1/route", "/pause_generation"}


@contextlib.asynccontextmanager
async def asking(service, folder):
    """(the service's app, a client of it), in this process."""
    async with service(folder) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield app, client


@contextlib.asynccontextmanager
async def router(_folder, **more):
    yield build(RouterSettings(**more))[0]


def routes_with_bodies(app):
    for route in app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None and route.path not in OF_OTHERS:
            yield min(route.methods), route.path.replace("{", "").replace("}", "").replace(":path", "")


def path_of(path):
    """A path that the route's own rules for names and ids take."""
    return path.replace("upload_id", "0" * 24).replace("digest", "0" * 64)


@pytest.mark.parametrize("service", [orchestrator, agent, router])
async def test_every_route_refuses_a_field_that_it_does_not_know(service, tmp_path):
    tried = 0
    async with asking(service, tmp_path) as (app, client):
        for method, path in routes_with_bodies(app):
            answer = await client.request(method, path_of(path), json={"__zz": 1})
            error = answer.json()["error"]
            found = (answer.status_code, error["code"])
            if found[1] in ("no_router", "not_leading"):
                continue  # asked of another process, whose route is tried itself
            assert found == (400, "invalid_request"), (method, path, answer.text)
            assert error["message"].removeprefix("body: ").startswith("__zz: "), (method, path, answer.text)
            assert "; known: " in error["message"], (method, path, answer.text)
            tried += 1
    assert tried >= (1 if service is router else 10)


async def test_a_drain_with_an_unknown_field_drains_nothing(tmp_path):
    async with asking(agent, tmp_path) as (_, client):
        answer = await client.post("/v1/admin/drain", json={"__zz": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "__zz"
        assert "known: deadline_s" in answer.json()["error"]["message"]
        assert (await client.get("/metadata")).json()["state"] != "draining"


async def test_a_newer_service_may_send_a_field_that_this_version_does_not_know(tmp_path):
    async with asking(orchestrator, tmp_path) as (_, client):
        body = {"router_id": "r", "boot_id": "b", "seq": 1, "revision_seen": 0, "batches": [], "newer": 1}
        assert (await client.post("/v1/usage", json=body)).status_code == 400
        assert (await client.post("/v1/usage", json=body, headers=WIRE_HEADERS)).is_success


class _Inner(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str = ""


class _Outer(BaseModel):
    model_config = ConfigDict(extra="ignore")
    items: tuple[_Inner, ...] = ()
    one: _Inner | None = None


async def _take(_body: _Outer) -> None:
    """A route with a body of models in one another."""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{}, {"nam": 1}]}, "items.1.nam"),
        ({"one": {"name": "x", "id": 2}}, "one.id"),
        ({"two": {}}, "two"),
    ],
)
def test_the_error_names_the_field_by_its_path_and_the_fields_known_there(body, param):
    found = unknown_fields(APIRoute("/x", _take, methods=["POST"]), json.dumps(body).encode())
    assert found is not None
    assert found[0] == param
    known = "items, one" if param == "two" else "name"
    assert found[1] == f"{param}: there is no such field; known: {known}"
