"""Requests that engines died of: sent to two of them, held back, tried alone; and what happened to be there goes on."""

import asyncio

import msgspec
import pytest
from starlette.responses import JSONResponse, StreamingResponse

from lorafleet.engine.errors import ENGINE_DEAD
from lorafleet.identity import engine_name
from router.core.errors import PoisonRequestHeld
from router.core.failover.poison import PoisonRequests
from router.protocols.routes import ROUTES
from router.protocols.stored_responses import tagged_response_id
from router.request.parsed_request import parse_request, request_digest
from tests.patience import until
from tests.router.doubles import BASE, CHAT, DIGEST, AgentDouble, EngineDouble, chunk, error_of, fleet, with_sql

A, B, C = (("w0", "a"), ("w1", "a"), ("w2", "a"))
KILLER = {**CHAT, "messages": [{"role": "user", "content": "kill"}]}


def held_s(deadly, now, which=1):
    """For how long it is still held back, None where it is not; asks as a request does."""
    try:
        deadly.check_held(which, now)
    except PoisonRequestHeld as exc:
        return exc.retry_after_s
    return None


class PoisonRequestsUnderTest(PoisonRequests):
    """Whose deaths are of what was sent just before, if not said."""

    def __init__(self, hold_s=30.0, enough=2):
        super().__init__("this was", enough=enough, hold_s=hold_s)

    def record_death(self, which, engine, now, *, sent_at=None):
        return super().record_death(which, engine, now, sent_at=now if sent_at is None else sent_at)


def test_request_is_held_back_after_two_engine_deaths_not_after_one():
    deadly = PoisonRequestsUnderTest()
    assert deadly.check_held(1, 0.0) is False
    assert deadly.record_death(1, A, 0.0) == 0.0
    assert deadly.check_held(1, 1.0) is False
    assert deadly.record_death(1, B, 2.0) == 30.0
    assert held_s(deadly, 12.0) == 20.0
    assert deadly.check_held(2, 12.0) is False


def test_copies_that_were_in_one_engine_when_it_died_count_as_one():
    deadly = PoisonRequestsUnderTest()
    for _ in range(50):
        deadly.record_death(1, A, 0.0)
    assert deadly.check_held(1, 1.0) is False
    assert deadly.record_death(1, ("w0", "b"), 2.0) == 30.0  # the same worker, started again
    assert deadly.record_death(1, ("w0", "b"), 12.0) == 20.0


def test_engines_lost_together_count_as_one_death():
    deadly = PoisonRequestsUnderTest()
    for i in range(8):
        deadly.record_death(1, ("w", str(i)), 10.0 + i, sent_at=9.9)
    assert deadly.check_held(1, 20.0) is False
    deadly.record_death(1, C, 21.0, sent_at=10.0)  # tried again after the first of them
    assert held_s(deadly, 21.0) == 30.0


def test_after_its_hold_one_request_tries_and_a_death_doubles_the_hold():
    deadly = PoisonRequestsUnderTest()
    deadly.record_death(1, A, 0.0)
    deadly.record_death(1, B, 0.0)
    assert deadly.check_held(1, 30.0) is True
    assert held_s(deadly, 31.0) == 29.0  # until it is known what came of that one
    assert deadly.record_death(1, C, 32.0) == 60.0
    assert deadly.check_held(1, 92.0) is True
    now, lengths = 92.0, []
    for i in range(8):
        lengths.append(deadly.record_death(1, ("w", str(i)), now))
        now += lengths[-1]
    assert lengths == [120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]


def test_an_answer_clears_it():
    deadly = PoisonRequestsUnderTest()
    deadly.record_death(1, A, 0.0)
    deadly.record_death(1, B, 0.0)
    deadly.clear(1)
    deadly.clear(2)
    assert not deadly.suspects
    deadly.record_death(1, C, 1.0)
    assert deadly.check_held(1, 1.0) is False


def test_old_suspect_is_forgotten_unless_held_back():
    deadly = PoisonRequestsUnderTest(3600.0)
    deadly.record_death(1, A, 0.0)
    deadly.record_death(2, A, 0.0)
    deadly.record_death(2, B, 0.0)
    deadly.forget(600.0)
    assert set(deadly.suspects) == {1, 2}
    deadly.forget(600.1)
    assert set(deadly.suspects) == {2}
    deadly.forget(4200.0)
    assert deadly.suspects
    deadly.forget(4200.1)
    assert not deadly.suspects


def test_so_many_are_remembered_and_of_more_those_that_killed_last():
    deadly = PoisonRequestsUnderTest()
    for which in range(4096):
        deadly.record_death(which, A, 0.0)
    deadly.record_death(0, B, 0.0)
    deadly.record_death(4096, A, 0.0)
    assert len(deadly.suspects) == 4096
    assert 1 not in deadly.suspects
    assert held_s(deadly, 0.0, which=0) == 30.0


def test_nothing_is_held_back_where_it_is_so_set():
    deadly = PoisonRequestsUnderTest(0.0)
    assert [deadly.record_death(1, engine, 0.0) for engine in (A, B, C)] == [0.0, 0.0, 0.0]
    assert deadly.check_held(1, 0.0) is False


def question_of(parts, path, body):
    """As a router reads it."""
    return parse_request(parts, "r", ROUTES["POST", path], msgspec.json.encode(body))


# --- behind a router --------------------------------------------------------------------------------------------------


def is_killer(body):
    return body["messages"] == KILLER["messages"]


class MortalEngine(EngineDouble):
    """Breaks off what it `dies_of`, as an engine that dies does, when it may go on."""

    def __init__(self, name, dies_of=is_killer):
        super().__init__(name, self.live_or_die)
        self.dies_of = dies_of

    async def live_or_die(self, _engine, body):
        await self.go_on.wait()
        if not self.dies_of(body):
            return await EngineDouble(self.name).answer(self, body)

        async def half():
            if body.get("stream"):
                yield chunk(body["model"], "one")
            yield b'{"half'
            raise ConnectionResetError

        return StreamingResponse(half(), media_type="text/event-stream" if body.get("stream") else None)


def chat(client, body=CHAT):
    return client.post("/v1/chat/completions", json=body)


def killed(engines):
    return sum(is_killer(body) for engine in engines for body in engine.bodies)


async def test_repeated_poison_request_ends_at_most_two_engines():
    engines = [MortalEngine(f"w{i}") for i in range(4)]
    async with fleet(*engines) as (client, _, parts):
        assert error_of(await chat(client, KILLER)) == (503, "no_replica")
        for request_id in ("one", "two"):
            answer = await chat(client, {**KILLER, "request_id": request_id})
            assert error_of(answer) == (503, "deadly_request")
            assert 25 < int(answer.headers["retry-after"]) <= 30
        assert killed(engines) == 2
        assert (await chat(client)).status_code == 200
        # Its time is over: it is tried once more, and ends one.
        (suspect,) = parts.poison_requests.suspects.values()
        suspect.held_until = parts.clock()
        assert error_of(await chat(client, KILLER)) == (503, "no_replica")
        assert error_of(await chat(client, KILLER)) == (503, "deadly_request")
        assert killed(engines) == 3


async def test_streams_that_end_engines_after_their_first_token_are_held_back_too():
    engines = [MortalEngine(f"w{i}") for i in range(3)]
    async with fleet(*engines, breaker_failures=1) as (client, _, parts):
        stream, ended = {**KILLER, "stream": True}, set()
        while len(ended) < 2:
            answer = await chat(client, stream)
            assert b"stream_broken" in answer.content
            ended.add(answer.headers["x-lorafleet-worker"])
            replica = parts.discovery.fleet.replicas[answer.headers["x-lorafleet-worker"]]
            parts.scheduler.record_failure(replica, "hung", parts.clock())  # as whoever has died gets no more
        assert error_of(await chat(client, stream)) == (503, "deadly_request")


@pytest.mark.parametrize("message", ENGINE_DEAD)
async def test_streams_whose_engines_say_that_they_died_are_held_back_too(message):
    async def die(_engine, body):
        error = {"error": {"message": message, "type": "InternalServerError", "code": 500}}
        said = [chunk(body["model"], "one"), b"data: " + msgspec.json.encode(error) + b"\n\n", b"data: [DONE]\n\n"]
        return StreamingResponse(iter(said), media_type="text/event-stream")

    async with fleet(*(EngineDouble(f"w{i}", die) for i in range(3))) as (client, _, parts):
        stream, ended = {**KILLER, "stream": True}, set()
        while len(ended) < 2:
            answer = await chat(client, stream)
            assert message.encode() in answer.content
            ended.add(answer.headers["x-lorafleet-worker"])
            replica = parts.discovery.fleet.replicas[answer.headers["x-lorafleet-worker"]]
            parts.scheduler.record_failure(replica, "hung", parts.clock())  # as whoever has died gets no more
        assert error_of(await chat(client, stream)) == (503, "deadly_request")


async def test_innocent_suspect_is_answered_by_healthy_engines_and_forgotten():
    engines = [MortalEngine(f"w{i}", lambda _: True) for i in range(2)]
    async with fleet(*engines) as (client, _, parts):
        assert error_of(await chat(client)) == (503, "no_replica")
        assert error_of(await chat(client)) == (503, "deadly_request")
        for engine in engines:
            engine.dies_of = is_killer
        (suspect,) = parts.poison_requests.suspects.values()
        suspect.held_until = parts.clock()
        assert (await chat(client)).status_code == 200
        assert not parts.poison_requests.suspects
        assert (await chat(client, {**CHAT, "stream": True})).status_code == 200


async def slow(engine, body):
    """Until it may go on."""
    await engine.go_on.wait()
    return await EngineDouble(engine.name).answer(engine, body)


IDS = {"model": "sql/v1", "prompt": [1, 2, 3]}  # so that nothing need be waited for before it is sent


@pytest.mark.parametrize("suspect", ["request", "adapter"])
async def test_request_after_its_hold_is_tried_alone_at_an_engine(suspect):
    engine = EngineDouble("w0", slow)
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, _, parts):
        (here,) = (replica.incarnation for replica in parts.discovery.fleet.replicas.values())
        deadly = parts.poison_requests if suspect == "request" else parts.poison_adapters
        which = request_digest(question_of(parts, "/v1/completions", IDS))
        which = which if suspect == "request" else engine_name("sql/v1", DIGEST)
        for elsewhere in (A, B, C):
            deadly.record_death(which, elsewhere, 0.0, sent_at=0.0)
        deadly.suspects[which].held_until = parts.clock()
        async with parts.alone(here):  # something else, that may be what an engine died of
            tries = asyncio.create_task(client.post("/v1/completions", json=IDS))
            await until(lambda: sum(parts.suspects_at.values()) == 2)
            for _ in range(2):
                assert error_of(await client.post("/v1/completions", json=IDS)) == (503, "deadly_request")
            assert not engine.bodies
        engine.go_on.set()
        assert (await tries).status_code == 200
        assert not deadly.suspects
        assert (await client.post("/v1/completions", json=IDS)).status_code == 200


async def test_engines_that_die_together_with_copies_of_a_request_speak_once():
    dying, sound = [MortalEngine("w0"), MortalEngine("w1")], EngineDouble("w2", slow)
    for engine in (*dying, sound):
        engine.go_on.clear()
    async with fleet(*dying, sound, breaker_failures=1) as (client, _, parts):
        replicas = parts.discovery.fleet.replicas
        parts.scheduler.record_failure(replicas["w2"], "hung", parts.clock())  # so that nothing goes there
        asking = [asyncio.create_task(chat(client, KILLER)) for _ in range(12)]
        await until(lambda: all(engine.bodies for engine in dying) and killed(dying) == 12)
        parts.scheduler.breaker.record_not_hung(replicas["w2"], parts.clock())
        for engine in dying:
            parts.scheduler.record_failure(
                replicas[engine.name], "hung", parts.clock()
            )  # nor what the other one died with, there
            engine.go_on.set()
        await until(lambda: sum(parts.suspects_at.values()) == 12 and sound.bodies)
        assert [len(suspect.engines) for suspect in parts.poison_requests.suspects.values()] == [1]
        sound.go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert not parts.poison_requests.suspects


async def erring(_engine, body):
    said = [chunk(body["model"], "one"), b'data: {"error": {"message": "no", "code": 500}}\n\n', b"data: [DONE]\n\n"]
    return StreamingResponse(iter(said), media_type="text/event-stream")


@pytest.mark.parametrize("end", ["its client leaves", "the engine falls silent", "the engine's error"])
async def test_an_answer_that_does_not_come_to_its_end_clears_nothing(end):
    engine, body = EngineDouble("w0", erring) if "error" in end else EngineDouble("w0"), {**CHAT, "stream": True}
    engine.go_on.clear()
    async with fleet(engine, idle_timeout_s=6000.0 if "client" in end else 0.3) as (client, _, parts):
        now, digest = parts.clock(), request_digest(question_of(parts, "/v1/chat/completions", body))
        parts.poison_requests.record_death(digest, A, now, sent_at=now)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            if "silent" in end:
                assert b"stream_broken" in b"".join([piece async for piece in pieces])
        await until(lambda: not parts.scheduler.load.total_in_flight)
        assert digest in parts.poison_requests.suspects


async def test_break_after_the_last_event_is_no_engine_death():
    async def said_all(_engine, body):
        async def events():
            yield chunk(body["model"], "one")
            yield b"data: [DONE]\n\n"
            raise ConnectionResetError

        return StreamingResponse(events(), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", said_all)) as (client, _, parts):
        assert (await chat(client, {**CHAT, "stream": True})).content.endswith(b"data: [DONE]\n\n")
        await until(lambda: not parts.scheduler.load.total_in_flight)
        assert not parts.poison_requests.suspects


async def test_engine_dead_error_counts_as_a_death_without_blaming_an_adapter():
    async def dead(_engine, _body):
        said = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return JSONResponse({"error": {"message": said, "code": 500}}, 500)

    async with fleet(EngineDouble("w0", dead), EngineDouble("w1", dead)) as (client, _, parts):
        assert error_of(await chat(client)) == (503, "no_replica")
        assert error_of(await chat(client)) == (503, "deadly_request")
        assert not parts.poison_adapters.suspects


async def test_a_router_forgets_of_itself():
    async with fleet(EngineDouble("w0")) as (_, _, parts):
        for deadly in (parts.poison_requests, parts.poison_adapters):
            deadly.record_death("x", A, parts.clock() - 601, sent_at=0.0)
        await until(lambda: not parts.poison_requests.suspects and not parts.poison_adapters.suspects)


async def test_request_digest_depends_on_route_fields_and_values():
    async with fleet(EngineDouble("w0")) as (_, _, parts):
        bodies = [CHAT, KILLER, {**CHAT, "a": 1, "b": 2}, {**CHAT, "a": 2, "b": 1}, {**CHAT, "b": 1, "c": 2}]
        chats = {request_digest(question_of(parts, "/v1/chat/completions", body)) for body in bodies}
        others = {request_digest(question_of(parts, "/v1/messages", body)) for body in bodies}
        assert len(chats | others) == 10
        again = question_of(parts, "/v1/chat/completions", {**CHAT, "request_id": "again"})
        assert request_digest(again) in chats


async def test_adapter_is_held_back_after_three_engine_deaths():
    def is_sql(body):
        return body["model"].startswith("sql/v1")

    engines, control = [*(MortalEngine(f"w{i}", is_sql) for i in range(4)), EngineDouble("w4")], AgentDouble()
    control.add_adapter("sql/v1", on=("w0", "w1", "w2", "w3"))
    control.add_adapter("java/v1", on=("w0",))
    async with fleet(*engines, control=control) as (client, _, parts):

        def say(text, model="sql/v1"):
            return chat(client, {"model": model, "messages": [{"role": "user", "content": text}]})

        assert error_of(await say("one")) == (503, "no_replica")
        for engine in engines:
            if engine.bodies:  # as who has died gets nothing
                parts.scheduler.record_failure(parts.discovery.fleet.replicas[engine.name], "hung", parts.clock())
        assert error_of(await say("two")) == (503, "no_replica")
        refused = await say("three")
        assert error_of(refused) == (503, "deadly_request")
        assert "requests for this adapter" in refused.json()["error"]["message"]
        assert sum(any(map(is_sql, engine.bodies)) for engine in engines) == 3
        assert (await say("one", "java/v1")).status_code == 200
        assert (await say("one", BASE)).status_code == 200
        # Somewhere it is well: one tries there, and then it is as any other.
        control.residents = {"w4": ["sql/v1"]}
        control.tell()
        await until(lambda: parts.discovery.fleet.replicas["w4"].residents)
        (suspect,) = parts.poison_adapters.suspects.values()
        suspect.held_until = parts.clock()
        assert (await say("four")).status_code == 200
        assert not parts.poison_adapters.suspects


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_an_engine_that_lives_suspects_nothing_and_clears(status):
    async def refuse(_engine, _body):
        return JSONResponse({"error": {"message": "no", "code": status}}, status)

    async with fleet(EngineDouble("w0", refuse)) as (client, _, parts):
        parts.poison_requests.record_death(
            request_digest(question_of(parts, "/v1/chat/completions", CHAT)), A, 0.0, sent_at=0.0
        )
        assert (await chat(client)).status_code == status
        assert not parts.poison_requests.suspects


async def test_follow_up_of_a_suspect_still_goes_to_its_own_engine():
    ask = {
        "model": BASE,
        "input": "more",
        "previous_response_id": tagged_response_id("r", "", tenant=None, worker="w1"),
    }
    async with fleet(EngineDouble("w0"), EngineDouble("w1")) as (client, _, parts):
        digest = request_digest(question_of(parts, "/v1/responses", ask))
        for _ in range(8):
            for engine in (A, B):
                parts.poison_requests.record_death(digest, engine, 0.0, sent_at=0.0)
            parts.poison_requests.suspects[digest].held_until = parts.clock()
            assert (await client.post("/v1/responses", json=ask)).headers["x-lorafleet-worker"] == "w1"
