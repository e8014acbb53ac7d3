"""What a request's answer teaches: predicted against reported cached tokens, and lengths."""

import json
import time
from math import inf

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from lorafleet.identity import block_hashes, root_hash
from router.core.queue.fair_queue import FairQueue
from tests.patience import until
from tests.router.doubles import (
    BASE,
    CHAT,
    AgentDouble,
    EngineDouble,
    chunk,
    fleet,
)
from tests.router.sql_adapter import CHATS, COMPLETIONS
from workers.wire import Load


@pytest.mark.parametrize("streamed", [True, False])
async def test_only_answers_are_measured_and_show_that_an_engine_lives(streamed):
    statuses = [400, 200]

    async def answer(engine, body):
        status = statuses[len(engine.bodies) - 1]
        if status == 200 and streamed:
            events = iter([chunk(body["model"], "x"), b"data: [DONE]\n\n"])
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse({"id": "1", "model": body["model"], "choices": []}, status)

    async with fleet(EngineDouble("w0", answer)) as (client, _, parts):
        book = parts.scheduler.load.book("w0")
        for status, ended in zip(statuses, (0, 1), strict=True):
            assert (await client.post("/v1/chat/completions", json={**CHAT, "stream": streamed})).status_code == status
            await until(lambda: not parts.scheduler.load.total_in_flight)
            assert (book.ended, book.mean_request_s > 0, book.data_at > -inf) == (ended, ended == 1, ended == 1)
        assert not book.in_prefill
        assert not book.prefill_s


async def test_engine_without_events_keeps_its_prompts_and_corrects_the_estimate():
    async def with_usage(engine, body):
        usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": engine.cached}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    engines = [EngineDouble(f"w{i}", with_usage) for i in range(4)]
    for engine in engines:
        engine.cached = 0
    body = {"model": BASE, "prompt": list(range(1, 65))}
    async with fleet(*engines) as (client, _, parts):
        first = await client.post("/v1/completions", json=body)
        home = first.headers["x-lorafleet-worker"]
        assert parts.accuracy.state(home) == "estimate"
        parts.feeds.index(BASE, 16).sweep(1000)
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        by_name = {engine.name: engine for engine in engines}
        by_name[home].cached = 48
        for _ in range(5):
            again = await client.post("/v1/completions", json=body)
            assert again.headers["x-lorafleet-worker"] == home
            assert again.headers["x-lorafleet-cached-tokens"] == "48"
        last, *_ = (await client.get("/v1/decisions")).json()["data"]
        assert (last["cached_tokens"], last["engine_cached_tokens"], last["trust"]) == (48, 48, "estimate")


@pytest.mark.parametrize(
    ("asked", "seen"),
    [({}, False), ({"stream_options": {"include_usage": True}}, True), ({"stream_options": {"x": 1}}, False)],
)
async def test_stream_usage_reaches_the_router_and_only_asking_clients(asked, seen):
    async def stream(engine, body):
        assert body["stream_options"]["include_usage"] is True
        usage = {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
        last = {"id": "1", "model": body["model"], "choices": [], "usage": usage}
        text = json.dumps(last, separators=(",", ":")).encode()
        pieces = [
            chunk(body["model"], 'no "choices":[] here') + chunk(body["model"], "b"),
            b"data: " + text + b"\n\ndata: [DONE]\n\n",
        ]
        return StreamingResponse(iter(pieces), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", stream)) as (client, _, parts):
        body = {"model": BASE, "prompt": list(range(64)), "stream": True, **asked}
        answer = await client.post("/v1/completions", json=body)
        assert answer.text.count("data: ") == 3 + seen
        assert ('"usage"' in answer.text) is seen
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: parts.decisions[0].cached_tokens == 32)


@pytest.mark.parametrize(
    ("path", "more", "cached_tokens"),
    [
        (COMPLETIONS, {}, 64),
        (COMPLETIONS, {"logprobs": 1}, 64),
        (COMPLETIONS, {"echo": True}, 64),
        (COMPLETIONS, {"echo": False, "logprobs": 0}, 64),
        (COMPLETIONS, {"echo": True, "logprobs": None}, 64),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, 0),
        (COMPLETIONS, {"prompt_logprobs": None}, 64),
        (COMPLETIONS, {"prompt_logprobs": 0}, 0),
        (COMPLETIONS, {"n": 2}, 64),
        (CHATS, {"logprobs": True, "top_logprobs": 2}, 64),
        (CHATS, {"echo": True}, 0),
        (CHATS, {"echo": True, "logprobs": True, "top_logprobs": 2}, 0),
        (CHATS, {"echo": True, "top_logprobs": None}, 0),
        (CHATS, {"prompt_logprobs": 1}, 0),
    ],
)
async def test_no_hit_is_expected_where_an_engine_computes_the_whole_prompt(path, more, cached_tokens):
    ids = list(range(1, 101))
    async with fleet(EngineDouble("w0", ids=ids)) as (client, _, parts):
        chain = block_hashes(ids, block_size=16, root=root_hash(BASE))
        parts.feeds.index(BASE, 16).add("w0", chain[:4])
        body = {**CHAT, "prompt": ids} | more
        answer = await client.post(path, json=body)
        assert int(answer.headers["x-lorafleet-cached-tokens"]) == cached_tokens


@pytest.mark.parametrize(
    ("more", "is_compared"),
    [({}, True), ({"n": 1}, True), ({"n": None}, True), ({"n": 2}, False), ({"use_beam_search": True}, False)],
)
async def test_cached_tokens_of_one_sequence_of_many_are_not_compared(more, is_compared):
    async def with_usage(engine, body):
        usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    async with fleet(EngineDouble("w0", with_usage)) as (client, _, parts):
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(1, 65)), **more})
        assert answer.status_code == 200
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        assert parts.decisions[0].cached_tokens == (48 if is_compared else None)


async def test_the_length_of_an_answer_counts_for_its_tenant_and_its_adapter(monkeypatch):
    told = []
    monkeypatch.setattr(FairQueue, "charge_answer", lambda _, *what: told.append(what))
    monkeypatch.setattr(FairQueue, "__len__", lambda _: 1)  # somebody waits, as far as others look

    async def with_usage(engine, body):
        usage = {"prompt_tokens": 4, "completion_tokens": 100}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    control = AgentDouble()
    control.add_adapter("sql/v1", on=["w0"], priority=1)
    control.figures = Load(prefill_tokens_per_s=1e9, running=2)
    began = time.monotonic()
    async with fleet(EngineDouble("w0", with_usage), control=control) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
        await until(lambda: told)
    ((tenant, adapter, weight, decode_s),) = told
    assert (tenant, adapter, weight) == ("", "sql/v1", 2.0)
    assert 0 < decode_s < (time.monotonic() - began) / 3  # two others run there
