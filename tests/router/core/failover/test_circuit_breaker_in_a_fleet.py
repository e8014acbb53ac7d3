"""Circuits in a real router: who gets requests while an engine fails or hangs, and how it comes back."""

import asyncio
import json
from random import Random

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from orchestrator.model.catalog import Draining
from router.core.failover.circuit_breaker import BreakerRules
from tests.patience import patience, until
from tests.router.doubles import BASE, DIGEST, AgentDouble, EngineDouble, chunk, error_of, fleet
from workers.wire import Load

FAST = {"open_s": 0.3, "most_open_s": 1.0, "jitter": 0.0}
CHANCE = Random(3)
# What the router asks by itself.
OURS = {"model": BASE, "prompt": "a", "max_tokens": 1}


def ask(client, **more):
    """A short prompt that is like no other, so that nothing but the load chooses."""
    prompt = [CHANCE.randrange(4000) for _ in range(50)]
    return client.post("/v1/completions", json={"model": BASE, "prompt": prompt, **more})


class MoodyEngine(EngineDouble):
    """Answers 503 until it is well."""

    def __init__(self, name):
        super().__init__(name, self.unwell)
        self.is_well = False

    async def unwell(self, engine, body):
        if self.is_well:
            return await EngineDouble(self.name).answer(engine, body)
        return JSONResponse({"error": {"message": "no"}}, 503)


class HangingEngine(EngineDouble):
    """Takes requests and answers none until it wakes up."""

    def __init__(self, name):
        super().__init__(name, self.hang)
        self.awake = asyncio.Event()

    async def hang(self, engine, body):
        await self.awake.wait()
        if body.get("stream"):
            return StreamingResponse(
                iter([chunk(body["model"], "one"), b"data: [DONE]\n\n"]), media_type="text/event-stream"
            )
        return await EngineDouble(self.name).answer(engine, body)


async def test_an_engine_that_always_fails_gets_no_more_requests_until_it_is_well():
    sick, sound = MoodyEngine("w0"), EngineDouble("w1")
    async with fleet(sick, sound) as (client, _, parts):
        breaker = parts.scheduler.breaker
        breaker.rules = BreakerRules(failures=3, **FAST | {"open_s": 60.0, "most_open_s": 60.0})
        for _ in range(60):
            assert (await ask(client)).status_code == 200
        assert len(sick.bodies) == 3
        (replica,) = (r for r in parts.discovery.fleet.replicas.values() if r.id == "w0")
        now = parts.clock()
        assert breaker.state(replica, now) == "open"
        told = (await client.post("/v1/route", json={"model": BASE, "prompt": [1, 2, 3]})).json()
        assert {"worker_id": "w0", "reason": "circuit open"} in told["rejected"]
        # Its time is over: one tries, fails, and it is shut again for longer.
        sick.is_well = True
        breaker.circuits[replica.incarnation].open_until = now
        told = (await client.post("/v1/route", json={"model": BASE, "prompt": [1, 2, 3]})).json()
        assert told["rejected"] == []
        assert told["note"] == "half-open, so that one request at a time tries: w0"
        for _ in range(40):
            assert (await ask(client)).status_code == 200
        assert len(sick.bodies) > 3
        assert breaker.state(replica, parts.clock()) == "closed"
        assert (await client.post("/v1/route", json={"model": BASE, "prompt": [1, 2, 3]})).json()["note"] is None


async def test_when_the_only_engine_fails_it_goes_on_being_asked_and_serves_as_soon_as_it_can():
    sick = MoodyEngine("w0")
    async with fleet(sick, failover_wait_s=0.05) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(failures=2, **FAST | {"open_s": 60.0, "most_open_s": 60.0})
        for _ in range(3):
            assert error_of(await ask(client)) == (503, "no_replica")
        assert len(sick.bodies) == 3
        assert parts.scheduler.breaker.ignored_circuits == 1
        sick.is_well = True
        assert (await ask(client)).status_code == 200


async def fail(_engine, _body):
    return JSONResponse({"error": {"message": "CUDA error", "code": 500}}, 500)


async def test_an_engine_that_answers_everything_with_an_error_of_its_own_gets_no_more_though_each_was_answered():
    sick, sound = EngineDouble("w0", fail), EngineDouble("w1")
    async with fleet(sick, sound) as (client, _, parts):
        breaker = parts.scheduler.breaker
        breaker.rules = BreakerRules(failures=3, **FAST | {"open_s": 60.0, "most_open_s": 60.0})
        statuses = []
        while not breaker.open_incarnations(parts.clock()):
            statuses.append((await ask(client)).status_code)
        assert statuses.count(500) == len(sick.bodies) - 1 >= 3  # and one that is the router's own
        assert OURS in sick.bodies
        assert OURS not in sound.bodies
        assert parts.metrics.circuit_looks.labels("unwell").value == 1
        (shut,) = breaker.open_incarnations(parts.clock())
        assert shut[0] == "w0"
        for _ in range(20):
            assert (await ask(client)).status_code == 200


def wrong(*, in_stream):
    """An engine that answers 500 to what is wrong, before a stream or as its first event, and is well."""

    async def answer(engine, body):
        if body.get("structured_outputs") is not True:
            return await EngineDouble(engine.name).answer(engine, body)
        said = {"error": {"message": "'bool' object has no attribute 'get'", "code": 500}}
        if in_stream and body.get("stream"):
            return StreamingResponse(
                iter([b"data: " + json.dumps(said).encode() + b"\n\n"]), media_type="text/event-stream"
            )
        return JSONResponse(said, 500)

    return answer


@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 503)])
async def test_requests_that_engines_answer_with_errors_though_they_are_well_shut_out_none(stream, status):
    engines = [EngineDouble(f"w{i}", wrong(in_stream=stream)) for i in range(3)]
    async with fleet(*engines) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(look_s=3600.0)
        for _ in range(40):
            answer = await ask(client, structured_outputs=True, stream=stream)
            assert answer.status_code == status
        looks = parts.metrics.circuit_looks.labels
        await until(lambda: looks("well").value == sum(engine.bodies.count(OURS) for engine in engines) > 0)
        assert not parts.scheduler.breaker.open_incarnations(parts.clock())
        assert not parts.metrics.circuit_openings.label_values
        asked = {(await ask(client)).headers["x-lorafleet-worker"] for _ in range(60)}
        assert asked == {"w0", "w1", "w2"}
        assert not parts.poison_requests.suspects
        # Found well, each is left alone for a while.
        assert all(engine.bodies.count(OURS) <= 1 for engine in engines)


@pytest.mark.parametrize("status", [400, 501])
async def test_a_request_that_is_the_clients_fault_opens_nothing(status):
    """vLLM says 501 to what its model is not made for (0.32 and 0.33, `/v1/systemone`)."""

    async def refuse(engine, body):
        return JSONResponse({"error": {"message": "bad temperature", "code": status}}, status)

    engine = EngineDouble("w0", refuse)
    async with fleet(engine) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(failures=2)
        for _ in range(10):
            assert (await ask(client)).status_code == status
        assert not len(parts.scheduler.breaker)


async def test_an_engine_that_hangs_is_found_out_by_its_silence_and_comes_back_when_it_answers():
    hanging, sound = HangingEngine("w0"), EngineDouble("w1")
    async with fleet(hanging, sound) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(
            silent_s=patience(0.2), **FAST | {"open_s": 60.0, "most_open_s": 60.0}
        )
        asking = [asyncio.create_task(ask(client, stream=True)) for _ in range(30)]
        await until(lambda: hanging.bodies)

        def is_shut():
            parts.scheduler.check_engines(list(parts.discovery.fleet.replicas.values()), parts.clock())
            return parts.scheduler.breaker.open_incarnations(parts.clock())

        await until(is_shut)
        drawn = len(hanging.bodies)
        for _ in range(30):
            assert (await ask(client)).status_code == 200
        assert len(hanging.bodies) == drawn
        hanging.awake.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert not parts.scheduler.breaker.open_incarnations(parts.clock())


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_at_an_engine_that_its_agent_suspects_goes_elsewhere_at_once(stream):
    hanging, sound = HangingEngine("w0"), EngineDouble("w1")
    async with fleet(hanging, sound) as (client, control, parts):
        asking = [asyncio.create_task(ask(client, stream=stream)) for _ in range(12)]
        await until(lambda: len(hanging.bodies) + len(sound.bodies) == 12)
        waiting = len(hanging.bodies)
        assert waiting
        control.suspects = frozenset({"w0"})
        answers = await asyncio.gather(*asking)
        assert [(answer.status_code, answer.headers["x-lorafleet-worker"]) for answer in answers] == [(200, "w1")] * 12
        assert (len(hanging.bodies), len(sound.bodies)) == (waiting, 12)
        assert parts.metrics.retries.labels("hung").value == waiting
        assert not parts.scheduler.load.total_in_flight


@pytest.mark.parametrize("other", ["lacks the adapter", "drains it", "starts", "takes less", "fails"])
async def test_what_waits_at_a_suspect_engine_waits_on_where_nobody_else_could_answer_it(other):
    hanging, control = HangingEngine("w0"), AgentDouble()
    control.add_adapter("sql/v1", on=("w0", "w1") if other == "drains it" else ("w0",))
    model = "sql/v1" if "it" in other or "adapter" in other else BASE
    if other == "drains it":
        control.draining = (Draining(lora_id="sql/v1", digest=DIGEST, worker_id="w1"),)
    if other == "starts":
        control.starting = frozenset({"w1"})
    if other == "takes less":
        control.max_model_lens = {"w1": 100}
    async with fleet(hanging, EngineDouble("w1"), control=control) as (client, _, parts):
        if other == "fails":
            parts.scheduler.breaker.rules = BreakerRules(failures=1, open_s=60.0, most_open_s=60.0)
            parts.scheduler.record_failure(parts.discovery.fleet.replicas["w1"], "no_answer", parts.clock())
        waits = asyncio.create_task(ask(client, model=model, max_tokens=100))
        await until(lambda: hanging.bodies)
        control.suspects = frozenset({"w0"})
        await until(lambda: "w0" in {name for name, _ in parts.scheduler.breaker.open_incarnations(parts.clock())})
        hanging.awake.set()
        assert (await waits).headers["x-lorafleet-worker"] == "w0"
        assert not parts.metrics.retries.label_values


async def test_a_request_that_two_engines_hung_with_is_not_given_to_a_third():
    engines, control = [HangingEngine("w0"), HangingEngine("w1"), HangingEngine("w2")], AgentDouble()
    async with fleet(*engines, control=control) as (client, _, parts):
        asking = asyncio.create_task(ask(client))
        for tried in (1, 2):
            await until(lambda tried=tried: sum(bool(engine.bodies) for engine in engines) == tried)
            control.suspects = frozenset(engine.name for engine in engines if engine.bodies)
        assert error_of(await asking) == (503, "no_replica")
        assert [len(engine.bodies) for engine in engines].count(1) == 2
        (suspect,) = parts.poison_requests.suspects.values()
        assert len(suspect.engines) == 2


async def test_an_engine_whose_counters_stand_still_is_passed_over_though_nobody_there_waits_for_a_first_token():
    hanging, sound, control = HangingEngine("w0"), EngineDouble("w1"), AgentDouble(figures=Load(running=1, still_s=0.0))
    async with fleet(hanging, sound, control=control) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(
            silent_s=patience(0.2), **FAST | {"open_s": 60.0, "most_open_s": 60.0}
        )
        asking = [asyncio.create_task(ask(client)) for _ in range(12)]
        await until(lambda: hanging.bodies)
        control.figures = Load(running=1, still_s=1000.0)
        await until(lambda: parts.scheduler.breaker.open_incarnations(parts.clock()))
        drawn = len(hanging.bodies)
        for _ in range(20):
            assert (await ask(client)).headers["x-lorafleet-worker"] == "w1"
        assert len(hanging.bodies) == drawn
        hanging.awake.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_what_a_suspect_engine_has_begun_to_answer_is_its_own():
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    for engine in engines:
        engine.go_on.clear()
    async with fleet(*engines) as (client, control, parts):
        streams = [asyncio.create_task(ask(client, stream=True)) for _ in range(8)]
        await until(lambda: sum(parts.scheduler.load.replica_load(engine.name).in_decode for engine in engines) == 8)
        control.suspects = frozenset({"w0"})
        await until(lambda: parts.scheduler.breaker.open_incarnations(parts.clock()))
        for engine in engines:
            engine.go_on.set()
        answers = await asyncio.gather(*streams)
        assert {answer.headers["x-lorafleet-worker"] for answer in answers} == {"w0", "w1"}
        assert all("two" in answer.text and "error" not in answer.text for answer in answers)
        assert not parts.metrics.retries.label_values


async def test_an_answer_that_is_not_streamed_may_take_long_and_a_stream_that_does_not_begin_may_not():
    slow = HangingEngine("w0")
    async with fleet(slow) as (client, _, parts):
        breaker = parts.scheduler.breaker

        def shut_in_an_hour():
            now = parts.clock() + 3600.0
            parts.scheduler.check_engines(list(parts.discovery.fleet.replicas.values()), now)
            return breaker.open_incarnations(now)

        whole = asyncio.create_task(ask(client))
        await until(lambda: len(slow.bodies) == 1)
        assert not shut_in_an_hour()
        stream = asyncio.create_task(ask(client, stream=True))
        await until(lambda: len(slow.bodies) == 2)
        assert shut_in_an_hour()
        slow.awake.set()
        assert [answer.status_code for answer in await asyncio.gather(whole, stream)] == [200, 200]


async def test_a_trial_that_is_not_streamed_has_as_long_as_any_request():
    engines = [HangingEngine("w0"), HangingEngine("w1")]
    async with fleet(*engines, max_tries=1, trial_timeout_s=0.05) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(failures=1, **FAST)
        for replica in parts.discovery.fleet.replicas.values():
            parts.scheduler.record_failure(replica, "no_answer", parts.clock() - 10.0)
        whole = asyncio.create_task(ask(client))
        await until(lambda: any(engine.bodies for engine in engines))
        assert error_of(await ask(client, stream=True)) == (503, "no_replica")
        assert [len(engine.bodies) for engine in engines] == [1, 1]
        for engine in engines:
            engine.awake.set()
        assert (await whole).status_code == 200
        assert not parts.scheduler.breaker.open_incarnations(parts.clock() + 10.0)


async def test_a_stream_that_tries_an_engine_which_is_not_well_yet_goes_elsewhere():
    hanging, sound = HangingEngine("w0"), EngineDouble("w1")
    async with fleet(hanging, sound, trial_timeout_s=0.05) as (client, _, parts):
        parts.scheduler.breaker.rules = BreakerRules(failures=1, **FAST)
        (replica,) = (r for r in parts.discovery.fleet.replicas.values() if r.id == "w0")
        parts.scheduler.record_failure(replica, "no_answer", parts.clock() - 10.0)
        for _ in range(40):
            assert (await ask(client, stream=True)).status_code == 200
        assert hanging.bodies
        hanging.awake.set()
