"""Every answer of every route of all three services has `x-request-id`, and a fault is logged under it."""

import json
import re

import httpx
import pytest
from fastapi.routing import APIRoute
from structlog.testing import capture_logs

from lorafleet.telemetry.request_log import RequestLog, put_request_id
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.http_server.test_listener import SOON, served
from tests.router.doubles import BASE, CHAT, EngineDouble, fleet
from tests.wires import error_of, parsed_head

ID = re.compile(r"[0-9a-f]{32}")
# Streams without an end are asked for by HEAD, and a path without a route is one, too.
ENDLESS = {"/v1/events", "/v1/live", "/v1/kv/stream"}


def asking(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://here")


def calls(app) -> list[tuple[str, str]]:
    """(method, path) of every route, names filled in, and some that there are not."""
    found = [("GET", "/nowhere"), ("PUT", "/health"), ("GET", "/docs"), ("GET", "/openapi.json")]
    for route in app.routes:
        if isinstance(route, APIRoute):
            path = re.sub(r"{[^}]*}", "w0", route.path)
            found += [("HEAD" if path in ENDLESS else method, path) for method in route.methods]
    return found


async def assert_each_is_named(client, wanted) -> None:
    assert len(wanted) > 4
    for method, path in wanted:
        own = await client.request(method, path)
        assert ID.fullmatch(own.headers["x-request-id"]), (method, path)
        named = await client.request(method, path, headers={"x-request-id": "night-7.b_C"})
        assert named.headers.get_list("x-request-id") == ["night-7.b_C"], (method, path)
        odd = await client.request(method, path, headers={"x-request-id": "a b"})
        assert ID.fullmatch(odd.headers["x-request-id"]), (method, path)


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_every_answer_of_a_service_names_its_request(service, tmp_path):
    async with service(tmp_path) as app, asking(app) as client:
        await assert_each_is_named(client, calls(app))
        refused = await client.post("/v1/usage", json={}, headers={"sec-fetch-site": "cross-site"})
        assert (refused.status_code, bool(ID.fullmatch(refused.headers["x-request-id"]))) == (403, True)


@pytest.mark.parametrize("ids", [("a b", "mine"), ("other", "mine"), ("mine", "a b")])
async def test_of_several_ids_of_one_request_the_server_and_its_app_take_the_same(ids, tmp_path):
    """The server names a request before its app does."""
    headers = [(b"x-request-id", name.encode()) for name in ids]
    name = put_request_id(headers)
    async with agent(tmp_path) as app, asking(app) as client:
        answer = await client.get("/health", headers=headers)
    assert answer.headers.get_list("x-request-id") == [name]
    assert (name == "mine") == (ids[-1] == "mine")


async def test_every_answer_of_a_router_names_its_request():
    async with fleet(EngineDouble("w0"), tokenizer="off") as (client, _, _):
        own = ("/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{BASE}", "/v1/decisions", "/docs")
        inference = [(method, "/v1/chat/completions") for method in ("GET", "POST", "PUT")]
        ours = [("GET", path) for path in own]
        await assert_each_is_named(client, [*ours, *inference, ("POST", "/v1/route"), ("GET", "/nowhere")])
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_a_fault_of_ours_is_logged_with_its_traceback_under_the_id_that_the_client_got(service, tmp_path):
    def broken() -> None:
        raise RuntimeError("a defect")

    async with service(tmp_path) as app, asking(app) as client:
        app.add_api_route("/broken", broken)
        with capture_logs() as logs:
            answer = await client.get("/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    (fault,) = [line for line in logs if line["event"] == "unexpected error"]
    assert (fault["request_id"], repr(fault["exc_info"])) == (
        answer.headers["x-request-id"],
        "RuntimeError('a defect')",
    )
    (failed,) = [line for line in logs if line["event"] == "request failed"]
    assert (failed["request_id"], failed["code"], failed["path"]) == (fault["request_id"], "internal_error", "/broken")


@pytest.mark.parametrize(
    ("sent", "refusal"),
    [
        (b"nonsense\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**17 + b"\r\n\r\n", (431, "head_too_large")),
        (b"GET /" + b"x" * 2**17, (431, "head_too_large")),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", (413, "body_too_large")),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", (400, "invalid_http")),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", (505, "http_version_not_supported")),
    ],
)
async def test_broken_http_gets_an_envelope_with_an_id_at_every_service(sent, refusal):
    async with served() as connect, await connect() as client:
        client.send(sent)
        said = await client.rest()
        assert error_of(said) == refusal
        assert ID.fullmatch(parsed_head(said.partition(b"\r\n\r\n")[0])[1][b"x-request-id"].decode())


async def test_a_body_that_never_ends_is_refused_under_the_clients_own_id():
    async with served(SOON) as connect, await connect() as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nContent-Length: 5\r\n\r\nab")
        said = await client.rest()
        assert error_of(said) == (408, "request_timeout")
        assert b"\r\nx-request-id: mine\r\n" in said


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_the_access_log_has_a_json_line_for_each_answer(service, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(
        f"{'orchestrator' if service is orchestrator else 'workers'}.app.RequestLog",
        lambda component, _mode: RequestLog(component, "all", write=lines.append),
    )
    async with service(tmp_path) as app, asking(app) as client:
        await client.get("/health", headers={"x-request-id": "one"})
        await client.get("/nowhere?secret=1", headers={"x-request-id": "two"})
    first, second = (json.loads(line) for line in lines)
    assert (first["event"], first["request_id"], first["path"], first["status"]) == ("request", "one", "/health", 200)
    assert (second["code"], second["status"], second["method"]) == ("not_found", 404, "GET")
    assert b"secret" not in b"".join(lines)
