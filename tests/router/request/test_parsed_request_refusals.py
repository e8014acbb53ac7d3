"""Bodies that are refused before any engine is called, and what of a body counts."""

import json

import pytest

from router.request.engine_body import REFUSED_EXTRA_ARGS, REFUSED_FIELDS
from tests.patience import until
from tests.router.doubles import (
    BASE,
    CHAT,
    EngineDouble,
    error_of,
    fleet,
)
from tests.router.sql_adapter import CHATS, COMPLETIONS


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'"x"', b"\xff\xfe", b'{"model": 3}', b'{"model": "tiny-qwen", "lora_id": []}']
)
async def test_a_malformed_body_is_a_400_and_reaches_no_engine(raw):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", content=raw)
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(
    "more", [*({name: 1} for name in REFUSED_FIELDS), *({"vllm_xargs": {name: 1}} for name in REFUSED_EXTRA_ARGS)]
)
async def test_a_field_that_steers_engine_or_index_is_refused(more):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **more})
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"n": 5}, "n"),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 2, "n": "9" * 4300}, "n"),
        ("/v1/chat/completions/batch", {"messages": [CHAT["messages"]] * 5}, "messages"),
        ("/generate", {"text": "a", "sampling_params": {"n": 5}}, "n"),
    ],
)
async def test_too_many_sequences_are_400_with_the_limit(path, more, param):
    engine = EngineDouble("w0")
    async with fleet(engine, max_sequences=4) as (client, _, _):
        answer = await client.post(path, json={**CHAT, **more} if path != "/generate" else more)
        assert error_of(answer) == (400, "invalid_request_body")
        assert answer.json()["error"]["param"] == param
        assert "at most 4" in answer.json()["error"]["message"]
        assert engine.bodies == []
        assert (await client.post("/v1/chat/completions", json={**CHAT, "n": 4})).status_code == 200
        # A prefill each, whose work is known: these go on, to an engine that has no such route.
        answer = await client.post("/v1/embeddings", json={"model": BASE, "input": ["a"] * 5})
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 500}),
        ("/v1/completions", {f"field{n}": n for n in range(2000)}),
        ("/generate", {"text": ["a"] * 2000}),
    ],
)
async def test_body_of_too_many_items_is_400_and_reaches_no_engine(path, more):
    engine = EngineDouble("w0")
    async with fleet(engine, max_body_items=1000) as (client, _, _):
        answer = await client.post(path, json={**CHAT, **more} if path != "/generate" else more)
        assert error_of(answer) == (400, "invalid_request_body")
        assert "more than 1000 texts, objects and lists" in answer.json()["error"]["message"]
        assert engine.bodies == []
        long = [{"role": "user", "content": '{"[' * 1000}]
        assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": long})).status_code == 200


async def test_generate_of_too_many_items_is_400():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/generate", json={"text": ["a"] * 10_001})
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(("more", "sequences"), [({}, 7), ({"use_beam_search": True}, 1)])
async def test_request_counts_as_many_sequences_as_its_engine_runs(more, sequences):
    engine = EngineDouble("w0")
    engine.go_on.clear()
    async with fleet(engine) as (client, _, parts):
        body = {**CHAT, "n": 7, "stream": True, **more}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            assert parts.scheduler.load.replica_load("w0").in_flight == sequences
            engine.go_on.set()
        await until(lambda: not parts.scheduler.load.replica_load("w0").in_flight)


async def test_a_body_over_the_limit_is_a_413():
    async with fleet(EngineDouble("w0"), max_body_bytes=100) as (client, _, _):
        assert error_of(await client.post("/v1/chat/completions", json={**CHAT, "x": "y" * 200})) == (
            413,
            "body_too_large",
        )

        async def pieces():
            yield b"{" + b" " * 200

        assert error_of(await client.post("/v1/chat/completions", content=pieces())) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("given", "header", "known_as"),
    [("mine", {}, "mine"), ("mine", {"x-request-id": "theirs"}, "theirs"), ("not plain", {}, None), (5, {}, None)],
)
async def test_request_id_in_the_body_counts_where_no_header_has_one(given, header, known_as):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT | {"request_id": given}, headers=header)
    told = answer.headers["x-request-id"]
    assert engine.headers[0]["x-request-id"] == told
    assert engine.bodies[0]["request_id"] == given
    assert told == known_as if known_as else len(told) == 32


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded", "application/vnd.api+json"])
async def test_body_without_a_json_content_type_is_400(given):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        for path in ("/v1/chat/completions", "/generate"):
            headers = {} if given is None else {"content-type": given}
            raw = json.dumps(CHAT if path != "/generate" else {"text": "hi"})
            assert error_of(await client.post(path, content=raw, headers=headers)) == (400, "invalid_request_body")
    assert engine.bodies == []


async def test_byte_order_mark_is_accepted_and_not_sent_on():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        raw = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await client.post("/v1/chat/completions", content=raw, headers=headers)).status_code == 200
    assert engine.bodies == [CHAT]


@pytest.mark.parametrize(
    ("text", "half", "at"),
    [
        (r"\ud83d", r"\ud83d", 0),
        (r"a \uDC00", r"\uDC00", 2),
        (r"\ud83d\u0041", r"\ud83d", 0),
        (r"\ud83d\ude00\ud83d", r"\ud83d", 12),
        (r"\ud83d\ude00\ude00", r"\ude00", 12),
        (r"\\ud83d \udc00", r"\udc00", 8),
    ],
)
async def test_half_a_character_is_named_with_its_place(text, half, at):
    async with fleet(EngineDouble("w0")) as (client, _, _):
        for path, name in ((CHATS, "user"), (COMPLETIONS, "prompt"), ("/generate", "text")):
            before = f'{{"model": "{BASE}", "{name}": "'
            answer = await client.post(path, content=f'{before}{text}"}}', headers=AS_JSON)
            assert error_of(answer) == (400, "invalid_request_body")
            assert f"{half} (byte {len(before) + at}) is half a character" in answer.json()["error"]["message"]


async def test_body_cut_between_characters_is_not_called_half_a_character():
    async with fleet(EngineDouble("w0")) as (client, _, _):
        answer = await client.post(CHATS, content=r'{"user": "\ud83d\ude00 \\ud83d"', headers=AS_JSON)
        assert error_of(answer) == (400, "invalid_request_body")
        assert "half" not in answer.json()["error"]["message"]


AS_JSON = {"content-type": "application/json"}
