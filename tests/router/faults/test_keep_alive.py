"""Keep-alive comments: a stream that waits for its first event."""

import asyncio
import contextlib
import json

import pytest

from tests.patience import patience
from tests.router.doubles import BASE, AgentDouble
from tests.router.faults.faulty_fleet import (
    CHAT,
    COMPLETIONS,
    DONE,
    EVENTS,
    STREAM,
    WHOLE,
    answering,
    faulty_fleet,
    saying,
)

WAITING = b": waiting\n\n"
OFTEN = {"stream_keep_alive_s": 0.05}
REFUSAL = json.dumps({"error": {"message": "too long", "type": "x", "param": None, "code": 400}}).encode()


def held(go_on, raw=STREAM, then="stay"):
    """An engine that is silent until the test lets it go on."""

    async def act(writer, body):
        await go_on.wait()
        return await saying(raw, then)(writer, body)

    return act


@contextlib.asynccontextmanager
async def begun(router, *acts, path=COMPLETIONS, **more):
    """(answer, its pieces): a stream of which a client has a comment."""
    router.play.acts["x"] = list(acts)
    body = {"model": BASE, "prompt": "x", "stream": True, **more}
    async with router.client.stream("POST", path, json=body) as answer:
        pieces = answer.aiter_bytes()
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await anext(pieces)).startswith(WAITING)
        yield answer, pieces


async def rest(pieces):
    """What comes after the comments."""
    got = b"".join([piece async for piece in pieces])
    while got.startswith(WAITING):
        got = got.removeprefix(WAITING)
    return got


@pytest.mark.parametrize("connected", [True, False])
async def test_waiting_stream_gets_comments_and_then_all_its_events(connected):
    async with faulty_fleet(1, **OFTEN) as router:
        if connected:
            await router.connect()
        go_on = asyncio.Event()
        async with begun(router, held(go_on)) as (answer, pieces):
            assert "x-lorafleet-worker" not in answer.headers
            assert (await anext(pieces)).startswith(WAITING), "again and again"
            go_on.set()
            assert await rest(pieces) == b"".join(EVENTS)


async def test_it_may_still_go_elsewhere():
    async with faulty_fleet(2, **OFTEN) as router:
        go_on = asyncio.Event()
        async with begun(router, held(go_on, b"", "reset"), saying(STREAM)) as (_, pieces):
            go_on.set()
            assert await rest(pieces) == b"".join(EVENTS)
        assert router.play.asked["x"] == 2


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (answering(REFUSAL, status=b"400 Bad Request"), "too long"),
        (answering(b"Bad", status=b"400 Bad Request"), "Bad"),
        (answering(b'{"error":{"message":"no"}}', status=b"503 Service Unavailable"), "attempts failed"),
    ],
)
async def test_what_fails_after_that_is_told_as_an_event(raw, said):
    async with faulty_fleet(1, **OFTEN, max_tries=1) as router:
        go_on = asyncio.Event()
        async with begun(router, held(go_on, raw)) as (_, pieces):
            go_on.set()
            got = await rest(pieces)
        assert got.endswith(b"\n\n" + DONE)
        assert said in json.loads(got.removesuffix(DONE).removeprefix(b"data: "))["error"]["message"]


async def test_a_message_is_told_its_errors_in_its_own_form():
    async with faulty_fleet(1, **OFTEN) as router:
        go_on = asyncio.Event()
        raw = answering(REFUSAL, status=b"400 Bad Request")
        more = {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
        async with begun(router, held(go_on, raw), path="/v1/messages", **more) as (_, pieces):
            go_on.set()
            assert (await rest(pieces)).startswith(b'event: error\ndata: {"type":"error","error":')


async def test_one_that_waits_for_a_cold_adapter_is_told_so():
    async def never(control, lora_id):
        await asyncio.Event().wait()

    control = AgentDouble(ensure=never)
    control.add_adapter("cold/v1")
    async with faulty_fleet(1, control=control, **OFTEN, cold_start_timeout_s=patience(0.3)) as router:
        async with begun(router, model="cold/v1") as (_, pieces):
            got = await rest(pieces)
        assert json.loads(got.removesuffix(DONE).removeprefix(b"data: "))["error"]["code"] == "adapter_loading"


async def test_a_client_that_leaves_is_told_nothing_more():
    async with faulty_fleet(1, **OFTEN) as router:
        go_on = asyncio.Event()
        async with begun(router, held(go_on)):
            pass


async def test_what_is_not_streamed_gets_no_comments():
    async with faulty_fleet(1, **OFTEN) as router:
        go_on = asyncio.Event()
        whole = asyncio.create_task(router.ask("whole", held(go_on, answering(WHOLE))))
        async with begun(router, held(go_on)) as (_, pieces):
            await anext(pieces)
            go_on.set()
            await rest(pieces)
        assert (await whole).content == WHOLE


async def test_what_has_failed_before_the_first_comment_keeps_its_status():
    async with faulty_fleet(1, stream_keep_alive_s=patience(1)) as router:
        refused = await router.client.post(CHAT, json={"model": "nobody", "messages": [], "stream": True})
        assert refused.status_code == 404
