"""CORS: which pages of other origins may send requests and read answers."""

import contextlib

import pytest
from pydantic import ValidationError

from lorafleet.keys.key_files import hash_key
from router.config import RouterSettings
from router.protocols.cors import EXPOSED_HEADERS
from tests.router.doubles import CHAT, EngineDouble, echo, error_of, fleet

PAGE, OTHER = "https://app.example", "https://evil.example"
# One of each kind: a router's own answer, a streamed one, and FastAPI's.
PATHS = ("/v1/chat/completions", "/v1/models", "/v1/route", "/health", "/nowhere")


@contextlib.asynccontextmanager
async def router(*allowed: str, **settings):
    async with fleet(EngineDouble("w0"), allowed_origins=allowed, **settings) as (client, _, _):
        yield client


async def pieces():
    for _ in range(3):
        yield b"x" * 1000


async def asked_before(client, path: str, origin: str = PAGE):
    """What a browser asks before it lets a page send JSON and a key."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    return await client.options(path, headers=headers)


async def test_without_allowed_origins_no_other_page_may_read():
    async with router() as client:
        for path in PATHS[:2]:
            assert (await asked_before(client, path)).status_code == 405
        answer = await client.post(PATHS[0], json=CHAT, headers={"origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_a_page_of_an_allowed_origin_may_read_every_answer(allowed, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys:\n- {{sha256: {hash_key('mine')}, scopes: [infer]}}\n")
    async with router(allowed, key_files=(keys,), max_body_bytes=2000) as client:
        for path in PATHS:
            answer = await asked_before(client, path)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, allowed), path
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert answer.headers["access-control-max-age"] == "600"

        async def status(method: str, path: str, key: str = "mine", **more) -> int:
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.request(method, path, headers=headers, **more)
            assert answer.headers.get_list("access-control-allow-origin") == [allowed], path
            assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)
            return answer.status_code

        assert await status("POST", PATHS[0], json=CHAT) == 200
        assert await status("POST", PATHS[0], json={**CHAT, "stream": True}) == 200
        assert await status("GET", "/v1/models") == 200
        assert await status("POST", PATHS[0], json=CHAT, key="guess") == 401
        assert await status("POST", PATHS[0], json={**CHAT, "model": "nope"}) == 404
        assert await status("POST", PATHS[0], json={**CHAT, "model": "x" * 3000}) == 413
        assert await status("POST", PATHS[0], content=pieces()) == 413
        assert await status("OPTIONS", PATHS[0]) == 405
        assert await status("GET", "/nowhere") == 404


async def test_answers_to_other_origins_have_vary_and_no_permission():
    async with router(PAGE, "http://localhost:3000") as client:
        assert (await asked_before(client, PATHS[0], OTHER)).status_code == 400
        for origin in (OTHER, "null", f"{PAGE}.evil.example", PAGE.upper()):
            answer = await client.post(PATHS[0], json=CHAT, headers={"origin": origin})
            assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
            assert "access-control-allow-origin" not in answer.headers
        for origin in (PAGE, "http://localhost:3000"):
            answer = await client.post(PATHS[0], json=CHAT, headers={"origin": origin})
            assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (origin, "Origin")
        answer = await client.post(PATHS[0], json=CHAT)
        assert "access-control-allow-origin" not in answer.headers


async def test_an_engines_cors_headers_are_dropped():
    async def loose(engine, body):
        answer = await echo(engine, body)
        answer.headers["access-control-allow-origin"] = "*"
        return answer

    async with fleet(EngineDouble("w0", loose)) as (client, _, _):
        answer = await client.post(PATHS[0], json=CHAT, headers={"origin": OTHER})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert error_of(await asked_before(client, PATHS[0])) == (405, "method_not_allowed")


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a.example/x", "", "ftp://a", "**"])
def test_an_invalid_origin_is_refused_with_an_example(origin):
    with pytest.raises(ValidationError, match=r"is no origin: expected https://host or http://host:port"):
        RouterSettings(allowed_origins=(origin,))
    assert RouterSettings(allowed_origins=("https://App.Example",)).allowed_origins == ("https://app.example",)
