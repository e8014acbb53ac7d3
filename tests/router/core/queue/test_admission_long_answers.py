"""Answers that take longer than usual: who may wait for them, and what who may not is told."""

import asyncio
from dataclasses import replace
from math import inf

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from router.core.fleet import EngineReport
from tests.patience import within
from tests.router.core.schedule.test_policy import a_replica
from tests.router.doubles import CHAT, AgentDouble, EngineDouble, chunk, error_of, fleet
from workers.wire import Load

WORKING = Load(running=1, still_s=0.0)
LIMITS = {"first_data_timeout_s": 0.2}
ASK = "/v1/chat/completions"


async def held(engine, body):
    """Nothing is said until the test lets it go on."""
    await engine.go_on.wait()
    if body.get("stream"):
        return Response(chunk(body["model"], "one") + b"data: [DONE]\n\n", media_type="text/event-stream")
    return JSONResponse({"id": "1", "model": body["model"], "choices": []})


def a_holding_engine() -> EngineDouble:
    engine = EngineDouble("w0", held)
    engine.go_on.clear()
    return engine


async def test_answer_that_takes_too_long_is_504_that_nobody_sends_again():
    import openai  # a second to import

    engine = a_holding_engine()
    async with fleet(engine, **LIMITS) as (client, _, _):
        answer = await client.post(ASK, json=CHAT)
        assert error_of(answer) == (504, "no_answer_in_time")
        assert "retry-after" not in answer.headers
        assert answer.headers["x-should-retry"] == "false"
        asking = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="k", max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await asking.chat.completions.create(**CHAT)
        await asking.close()
    assert len(engine.bodies) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_client_that_says_that_it_waits_longer_has_that_time(streamed):
    engine = a_holding_engine()
    async with fleet(engine, **LIMITS) as (client, _, _):
        patient = {"x-lorafleet-timeout-s": "300"}
        waiting = asyncio.create_task(client.post(ASK, json={**CHAT, "stream": streamed}, headers=patient))
        assert error_of(await client.post(ASK, json=CHAT)) == (504, "no_answer_in_time")
        assert not waiting.done()
        engine.go_on.set()
        assert (await waiting).status_code == 200


async def test_client_waits_no_longer_than_the_bound_whatever_it_says():
    async with fleet(a_holding_engine(), **LIMITS, max_answer_s=0.3) as (client, _, _):
        answer = await client.post(ASK, json=CHAT, headers={"x-lorafleet-timeout-s": "300"})
        assert error_of(answer) == (504, "no_answer_in_time")


async def test_whole_answer_is_waited_for_while_its_engine_works():
    engine = a_holding_engine()
    async with fleet(engine, control=AgentDouble(figures=WORKING), **LIMITS) as (client, _, _):
        waiting = asyncio.create_task(client.post(ASK, json=CHAT))
        streamed = await client.post(ASK, json={**CHAT, "stream": True})
        assert error_of(streamed) == (504, "no_answer_in_time")
        assert not waiting.done()
        engine.go_on.set()
        assert (await waiting).status_code == 200


async def test_engine_that_works_is_given_up_after_the_longest_time():
    control = AgentDouble(figures=WORKING)
    async with fleet(a_holding_engine(), control=control, **LIMITS, max_answer_s=0.5) as (client, _, _):
        assert error_of(await client.post(ASK, json=CHAT)) == (504, "no_answer_in_time")


async def test_pause_of_a_stream_is_called_a_pause():
    async def pausing(engine, body):
        async def events():
            yield chunk(body["model"], "one")
            await engine.go_on.wait()

        return StreamingResponse(events(), media_type="text/event-stream")

    engine = EngineDouble("w0", pausing)
    engine.go_on.clear()
    async with fleet(engine, idle_timeout_s=0.3) as (client, _, _), within(30):
        answer = await client.post(ASK, json={**CHAT, "stream": True})
        engine.go_on.set()
    assert b"paused for 0.3 s (idle_timeout_s)" in answer.content
    assert b"stream_broken" in answer.content
    assert b"broke off" not in answer.content


AT_WORK = a_replica("w0", report=EngineReport(running=1, at=100.0, moved_at=95.0))


@pytest.mark.parametrize(
    ("replica", "is_at_work"),
    [
        (AT_WORK, True),
        (replace(AT_WORK, state="draining"), True),
        (replace(AT_WORK, state="unreachable"), False),
        (replace(AT_WORK, is_suspect=True), False),
        (replace(AT_WORK, report=EngineReport(running=0, at=100.0, moved_at=95.0)), False),
        (replace(AT_WORK, report=EngineReport(running=1, at=80.0, moved_at=80.0)), False),
        (replace(AT_WORK, report=EngineReport(running=1, at=100.0, moved_at=60.0)), False),
        (replace(AT_WORK, report=EngineReport(running=1, at=100.0, moved_at=inf)), False),
    ],
    ids=["computes", "drains", "lost", "suspect", "idle", "reported long ago", "stands still", "counts nothing"],
)
def test_engine_is_at_work_while_its_own_counters_say_so(replica, is_at_work):
    assert replica.is_at_work(101.0, fresh_s=10.0, still_s=20.0) is is_at_work
