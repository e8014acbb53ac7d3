"""HEAD for every GET, and trailing slashes, at all three services."""

import httpx
import pytest

from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.http_server.test_listener import served
from tests.router.doubles import CHAT, EngineDouble, error_of, fleet

PROBES = ("/health", "/ready", "/metrics", "/docs", "/openapi.json")
READS = {
    "orchestrator": (*PROBES, "/ui", "/v1/adapters", "/v1/workers", "/v1/catalog", "/v1/policy"),
    "agent": (*PROBES, "/metadata", "/v1/metadata/loras", "/v1/admin/loras"),
}


def asking(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://here")


def heads(answer) -> dict:
    return {
        name: value for name, value in answer.headers.items() if name not in {"date", "content-length", "x-request-id"}
    }


async def same_without_body(client, path) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b""), path
    assert heads(head) == heads(whole), path


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_head_is_answered_as_get_without_a_body(service, tmp_path):
    async with service(tmp_path) as app, asking(app) as client:
        for path in (*READS[service.__name__], "/nowhere"):
            await same_without_body(client, path)
            await same_without_body(client, f"{path}/")
        assert (await client.head("/health")).status_code == 200


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_head_is_405_where_there_is_no_get(service, tmp_path):
    async with service(tmp_path) as app, asking(app) as client:
        path = "/v1/rebalance" if service is orchestrator else "/v1/admin/drain"
        answer = await client.head(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")


@pytest.mark.parametrize("service", [orchestrator, agent])
async def test_head_of_a_stream_without_end_is_answered_at_once(service, tmp_path):
    async with service(tmp_path) as app, asking(app) as client:
        answer = await client.head("/v1/events")
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_head_leaves_the_connection_to_the_next_request():
    async with served() as connect, await connect() as client:
        for method in (b"HEAD", b"GET", b"HEAD"):
            client.send(b"%b /x HTTP/1.1\r\nHost: a\r\n\r\n" % method)
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 1" in head
            if method == b"GET":
                assert await client.reader.readexactly(1) == b"0"


async def test_a_router_answers_head_where_it_answers_get():
    async with fleet(EngineDouble("w0")) as (client, _, _):
        for path in (*PROBES, "/v1/models", "/v1/decisions", "/v1/models/tiny-qwen", "/v1/models/nobody"):
            await same_without_body(client, path)
            await same_without_body(client, f"{path}/")
        assert (await client.head("/v1/models")).status_code == 200
        answer = await client.head("/v1/chat/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_a_trailing_slash_of_a_router_path_is_ignored():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        plain = await client.post("/v1/chat/completions", json=CHAT)
        for path in ("/v1/chat/completions/", "/v1/chat/completions//"):
            answer = await client.post(path, json=CHAT)
            assert (answer.status_code, answer.json()["model"]) == (200, plain.json()["model"])
        assert len(engine.bodies) == 3
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
        assert error_of(await client.get("/v1/chat/completions/")) == (405, "method_not_allowed")
        assert error_of(await client.post("/v1/nowhere/", json=CHAT)) == (404, "not_found")
        refused = await client.post("/v1/messages/", content=b"{", headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["type"]) == (400, "error"), "Anthropic's form"
        assert '"/v1/chat/completions/' not in (await client.get("/metrics")).text, "counted as what it means"


async def test_a_trailing_slash_of_an_orchestrator_path_is_ignored(tmp_path):
    async with orchestrator(tmp_path) as app, asking(app) as client:
        for path in ("/v1/adapters", "/v1/aliases", "/v1/workers", "/v1/policy"):
            with_slash, plain = await client.get(f"{path}/"), await client.get(path)
            assert (with_slash.status_code, with_slash.content) == (plain.status_code, plain.content), path
        answer = await client.get("/v1/adapters/nobody/v1/")
        assert error_of(answer)[0] == 400, "a name with a slash is no other name"
