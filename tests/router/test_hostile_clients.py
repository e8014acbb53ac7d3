"""What a client can do to the router, to an engine or to its neighbours by sending something odd."""

import httpx
import pytest
from starlette.responses import JSONResponse

from router.tokens import Tokenizers
from tests.router.doubles import BASE, Control, Engine, fleet, until

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


def with_sql(*on):
    control = Control()
    control.add_adapter("sql/v1", on=on)
    return control


def error_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("depth", [950, 100_000])
@pytest.mark.parametrize("name", ["unknown", "messages", "tools"])
async def test_a_body_nested_without_end_is_never_a_500(name, depth):
    nested = b"[" * depth + b"]" * depth
    async with fleet(Engine("w0")) as (client, _, _):
        raw = b'{"model": "%s", "messages": [], "%s": %s}' % (BASE.encode(), name.encode(), nested)
        answer = await client.post("/v1/chat/completions", content=raw)
        assert answer.status_code in (200, 400), answer.text
        if depth > 1000:
            assert error_of(answer) == (400, "invalid_request_body")


async def test_a_prompt_that_cannot_be_put_into_json_again_is_routed_without_ids():
    async with httpx.AsyncClient() as client:
        tokenizers = Tokenizers(client, mode="remote")
        for odd in ("\ud800", float("nan"), 10**5000):
            tokens = await tokenizers.ids({"prompt": odd}, base_model=BASE, engine_url="http://127.0.0.1:1")
            assert tokens.ids is None


async def test_decisions_kept_for_explaining_hold_no_prompts():
    async with fleet(Engine("w0")) as (client, _, parts):
        await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(1000))})
        (kept,) = parts.decisions
        assert kept.tokens.ids is None
        assert kept.hashes == ()
        (told,) = (await client.get("/v1/decisions")).json()["data"]
        assert (told["prompt_tokens"], told["tokens_from"]) == (1000, "given")


async def test_a_route_that_the_engine_does_not_serve_is_a_404_at_once_and_no_missing_adapter():
    async def no_route(engine, body):
        return JSONResponse({"detail": "Not Found"}, 404)

    engine = Engine("w0", no_route)
    async with fleet(engine, control=with_sql("w0"), cold_start_timeout_s=60) as (client, control, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
        assert control.ensured == []
    assert len(engine.bodies) == 1


async def test_adapters_of_the_catalog_are_read_once_and_not_at_every_report():
    async with fleet(Engine("w0"), control=with_sql("w0")) as (_, _, parts):
        before, adapters = parts.discovery.fleet, parts.discovery.fleet.adapters
        parts.discovery.look_now("w0")
        await until(lambda: parts.discovery.fleet is not before)
        if parts.discovery.fleet.adapters is not adapters:
            # A catalog came in between; the next report brings none.
            adapters = parts.discovery.fleet.adapters
        parts.discovery._rebuild()
        assert parts.discovery.fleet.adapters is adapters
