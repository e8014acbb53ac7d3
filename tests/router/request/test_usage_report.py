"""What a router reports of its requests: cumulative, of every end that a request may come to."""

import asyncio
import json

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from router.request.usage_report import usage_report
from tests.patience import patience, until
from tests.router.doubles import CHAT, EngineDouble, chunk, counted, error_of, fleet, with_sql

SQL = {**CHAT, "lora_id": "sql/v1"}
TOLD = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def in_flight(parts):
    """Requests at engines, as reported."""
    return sum(sum(names.values()) for names in usage_report(parts, parts.clock()).in_flight.values())


async def whole(engine, body):
    return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": TOLD})


async def streamed(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        await engine.go_on.wait()
        usage = {"id": "1", "model": body["model"], "choices": [], "usage": TOLD}
        yield b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def broken(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        raise ConnectionResetError

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def erring(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        yield b'data: {"error": {"message": "out of order", "code": 500}}\n\ndata: [DONE]\n\n'

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def failing(engine, body):
    return JSONResponse({"error": {"message": "out of order"}}, 500)


async def breaking_off(engine, body):
    async def pieces():
        raise ConnectionResetError
        yield b""

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def refusing(engine, body):
    return JSONResponse({"error": {"message": "your fault"}}, 400)


async def full(engine, body):
    return Response(status_code=503)


async def test_an_answers_tokens_and_work_are_counted_and_its_first_token_where_it_was_streamed():
    for answer, first_tokens in ((whole, 0), (streamed, 1)):
        async with fleet(EngineDouble("w0", answer), control=with_sql("w0")) as (client, control, parts):
            said = await client.post("/v1/chat/completions", json=SQL | {"stream": answer is streamed})
            assert said.status_code == 200
            (counts,) = counted(control, parts).values()
            assert (counts.requests, counts.sent, counts.output_tokens, counts.engine_errors) == (1, 1, 7, 0)
            assert in_flight(parts) == 0
            assert sum(counts.first_token.values()) == first_tokens
            assert (counts.engine_first_token_s > 0) == bool(first_tokens)
            assert counts.engine_first_token_s <= counts.first_token_sum_s
            assert counts.work_s > 0


@pytest.mark.parametrize(("answer", "errors"), [(failing, 1), (broken, 1), (erring, 1), (refusing, 0), (full, 0)])
async def test_an_engines_failure_counts_as_error_and_its_refusal_does_not(answer, errors):
    async with fleet(EngineDouble("w0", answer), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        control,
        parts,
    ):
        is_streamed = answer in (broken, erring)
        await client.post("/v1/chat/completions", json=SQL | {"stream": is_streamed})
        (counts,) = counted(control, parts).values()
        assert (counts.sent, counts.engine_errors, counts.output_tokens > 0) == (1, errors, is_streamed)
        assert in_flight(parts) == 0
        if not is_streamed:
            assert (counts.work_s, counts.first_token) == (0.0, {})


async def test_a_request_that_one_engine_failed_and_another_answered_counts_once_with_an_error():
    async def first_breaks_off(engine, body):
        is_first = sum(len(other.bodies) for other in engines) == 1
        return await (breaking_off if is_first else streamed)(engine, body)

    engines = [EngineDouble(name, first_breaks_off) for name in ("w0", "w1")]
    async with fleet(*engines, control=with_sql("w0", "w1")) as (client, control, parts):
        assert (await client.post("/v1/chat/completions", json=SQL | {"stream": True})).status_code == 200
        assert sum(len(engine.bodies) for engine in engines) == 2
        (counts,) = counted(control, parts).values()
        assert (counts.requests, counts.sent, counts.engine_errors, counts.codes) == (1, 1, 1, {})


@pytest.mark.parametrize("question", [SQL, CHAT], ids=["adapter", "base model"])
async def test_a_client_that_leaves_is_no_engine_error(question):
    engine = EngineDouble("w0", streamed)
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, control, parts):
        async with client.stream("POST", "/v1/chat/completions", json=question | {"stream": True}) as answer:
            await anext(answer.aiter_bytes())
            assert in_flight(parts) == 1
        await until(lambda: in_flight(parts) == 0 and counted(control, parts))
        (counts,) = counted(control, parts).values()
        assert (counts.engine_errors, counts.output_tokens, sum(counts.first_token.values())) == (0, 1, 1)


async def never(control, lora_id):
    await asyncio.Event().wait()


async def without_room(control, lora_id):
    entry = {"lora_id": lora_id, "digest": None, "state": "registered", "ready": [], "loading": [], "expected_s": None}
    return JSONResponse({**entry, "error": "no slot"})


@pytest.mark.parametrize(
    ("ensure", "is_deadline_first", "entry"),
    [
        (never, False, (503, "adapter_loading")),
        (without_room, False, (503, "no_capacity")),
        (never, True, (504, "deadline_exceeded")),
    ],
)
async def test_a_rejected_held_request_counts_as_hold_and_shed(ensure, is_deadline_first, entry):
    control = with_sql()
    control.ensure = ensure
    timeout_s = patience(0.2)
    headers = {"x-lorafleet-timeout-s": f"{timeout_s / 2}"} if is_deadline_first else {}
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=timeout_s) as (client, control, parts):
        answer = await client.post("/v1/chat/completions", json=SQL, headers=headers)
        assert error_of(answer) == entry
        assert "sql/v1" in answer.json()["error"]["message"]
        counts = counted(control, parts)["sql/v1"]
        assert counts.codes == {f"{entry[0]} {entry[1]}": 1}
        assert (counts.requests, counts.sent, counts.cold_starts) == (1, 0, 1)
        assert 0 < counts.cold_s < patience(10)  # a part of the deadline may have passed before the hold began


async def test_expected_waits_for_each_worker_are_reported():
    engine = EngineDouble("w0", streamed)
    async with fleet(engine, control=with_sql("w0"), max_in_flight_tokens=1) as (client, control, parts):
        engine.go_on.clear()
        asks = [asyncio.create_task(client.post("/v1/chat/completions", json=SQL | {"stream": True})) for _ in range(3)]
        await until(lambda: len(parts.scheduler.queue))
        assert usage_report(parts, parts.clock()).waits_s.keys() == {"w0"}
        await until(lambda: control.usage and control.usage[-1].get("waits_s"))
        engine.go_on.set()
        await asyncio.gather(*asks)
        assert usage_report(parts, parts.clock()).waits_s == {}


async def test_a_router_that_stops_says_so_in_its_last_report():
    async with fleet(EngineDouble("w0", streamed), control=with_sql("w0")) as (client, control, _):
        assert (await client.post("/v1/chat/completions", json=SQL)).status_code == 200
        await until(lambda: any(report.get("batches") for report in control.usage))
        assert not any(report.get("is_last") for report in control.usage)
    last = control.usage[-1]
    assert (last["is_last"], "in_flight" in last) == (True, False)
    assert last["seq"] > control.usage[-2]["seq"]


async def test_a_report_that_does_not_arrive_is_repeated(monkeypatch):
    monkeypatch.setattr("router.lifespan.USAGE_EVERY_S", 3600.0)
    async with fleet(EngineDouble("w0", whole), control=with_sql("w0")) as (client, control, parts):
        await until(lambda: control.usage)
        await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(3)))
        for _ in range(2):
            report = usage_report(parts, parts.clock())
            assert [row.counts.requests for batch in report.batches for row in batch.rows] == [3]
        parts.usage.accept(report.batches)
        again = usage_report(parts, parts.clock())
        assert (again.batches, again.seq) == ((), report.seq + 1)
        assert report.now.policy == "kv_lora"
