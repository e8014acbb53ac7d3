"""Late binding in a real router: what waits for room, who goes, and who is sent away."""

import asyncio
import itertools
import json
import time

import pytest
from starlette.responses import JSONResponse

from lorafleet.keys.key_files import hash_key
from router.request.usage_report import usage_report
from tests.patience import patience, until
from tests.router.doubles import BASE, CHAT, DIGEST, AgentDouble, EngineDouble, counted, error_of, fleet, with_sql
from workers.wire import Load

NUMBERS = itertools.count()
TIMEOUT = "x-lorafleet-timeout-s"


def a_prompt():
    """0.2 s, at the rate that counts before anything has been measured, and like no prompt before it."""
    number = next(NUMBERS)
    return {"model": BASE, "prompt": list(range(number, number + 2000)), "stream": True}


class SlowEngine(EngineDouble):
    """Sends nothing before it is told to."""

    def __init__(self, name):
        super().__init__(name, self.hold)
        self.first = asyncio.Event()

    async def hold(self, engine, body):
        await self.first.wait()
        return await EngineDouble(self.name).answer(engine, body)


def ask(client, **more):
    return asyncio.create_task(client.post("/v1/completions", json={**a_prompt(), **more}))


async def value(client, name):
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_requests_wait_in_the_router_until_an_engine_has_room():
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client) for _ in range(6)]
        await until(lambda: len(parts.scheduler.queue) == 4)
        await until(lambda: len(engine.bodies) == 2)  # one runs, one is there for when it ends
        assert await value(client, "lorafleet_router_waiting_requests") == 4
        assert not usage_report(parts, 0.0).waiting  # the base model's are nobody's
        engine.first.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 6
        assert len(engine.bodies) == 6
        assert await value(client, "lorafleet_router_waited_seconds_count") == 6
        assert await value(client, "lorafleet_router_decide_seconds_count") >= 6
        assert 0 < await value(client, "lorafleet_router_decide_seconds_sum") < 60
        assert not len(parts.scheduler.queue)


async def test_request_of_a_client_that_left_the_queue_is_never_sent():
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client) for _ in range(5)]
        await until(lambda: len(parts.scheduler.queue) == 3 and len(engine.bodies) == 2)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not len(parts.scheduler.queue) and not list(parts.scheduler.load.counts_by_name()))
        engine.first.set()
        assert (await ask(client)).status_code == 200
    assert len(engine.bodies) == 3


async def test_queue_failure_is_counted_and_requests_are_sent_afterwards():
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client) for _ in range(3)]
        await until(lambda: len(parts.scheduler.queue) == 1)
        drain, parts.scheduler.queue.rates = parts.scheduler.queue.rates, None
        await until(lambda: parts.metrics.loop_failures.labels("waiting").value)
        parts.scheduler.queue.rates = drain
        engine.first.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3


@pytest.mark.parametrize(
    ("limit", "says"), [({"max_waiting_requests": 1}, "1 requests"), ({"max_wait_s": 0.3}, "0.3 s")]
)
async def test_who_cannot_wait_gets_429_with_a_time_to_come_back(limit, says):
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05, **limit) as (client, _, parts):
        asking = [ask(client) for _ in range(4)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=patience(5))
        for refused in done:
            answer = await refused
            assert error_of(answer) == (429, "saturated")
            assert int(answer.headers["retry-after"]) >= 1
            assert says in answer.json()["error"]["message"]
        engine.first.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} <= {200, 429}
        assert not len(parts.scheduler.queue)
    assert done


async def test_who_may_not_wait_counts_as_turned_away_from_its_adapter():
    engine = SlowEngine("w0")
    async with fleet(engine, control=with_sql("w0"), late_binding_s=0.05, max_waiting_requests=1) as (
        client,
        control,
        parts,
    ):
        asking = [ask(client, model="sql/v1") for _ in range(4)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=patience(5))
        engine.first.set()
        told = [answer.status_code for answer in await asyncio.gather(*asking)]
        codes = counted(control, parts)["sql/v1"].codes
        assert sum(count for code, count in codes.items() if code.startswith("429 saturated")) == told.count(429)
        assert not usage_report(parts, parts.clock()).waiting
        assert 429 in told


async def test_a_distant_deadline_lets_nobody_wait_for_longer_than_anybody_may():
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05, max_wait_s=0.3) as (client, _, _):
        ahead = [ask(client) for _ in range(2)]
        await until(lambda: len(engine.bodies) == 2)
        late = await client.post("/v1/completions", json=a_prompt(), headers={TIMEOUT: "60"})
        assert error_of(late) == (429, "saturated")
        engine.first.set()
        await asyncio.gather(*ahead)


@pytest.mark.parametrize("busy_s", [0, 1], ids=["idle loop", "busy loop"])
async def test_deadline_passing_in_the_queue_is_counted_as_turned_away(busy_s):
    engine = SlowEngine("w0")
    async with fleet(engine, control=with_sql("w0"), late_binding_s=0.05) as (client, control, parts):
        ahead = [ask(client, model="sql/v1") for _ in range(2)]
        await until(lambda: len(engine.bodies) == 2)
        asyncio.get_running_loop().call_later(0.9, time.sleep, busy_s)  # over the deadline
        late = await client.post("/v1/completions", json=a_prompt() | {"model": "sql/v1"}, headers={TIMEOUT: "1"})
        assert error_of(late) == (504, "deadline_exceeded")
        assert "while it waited for room" in late.json()["error"]["message"]
        assert counted(control, parts)["sql/v1"].codes == {"504 deadline_exceeded": 1}
        assert not usage_report(parts, parts.clock()).waiting
        engine.first.set()
        await asyncio.gather(*ahead)


async def test_queued_request_is_served_where_its_adapter_is_loaded_again():
    async def load_elsewhere(control, lora_id):
        control.residents["w1"] = [lora_id]
        control.tell()
        told = {"lora_id": lora_id, "digest": DIGEST, "state": "ready", "ready": ["w1"], "loading": []}
        return JSONResponse({**told, "expected_s": None})

    engines, control = (SlowEngine("w0"), EngineDouble("w1")), with_sql("w0")
    control.ensure = load_elsewhere
    async with fleet(*engines, control=control, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client, model="sql/v1") for _ in range(5)]
        await until(lambda: len(parts.scheduler.queue) == 3)
        control.residents["w0"] = []
        control.tell()
        await until(lambda: len(engines[1].bodies) == 3)
        assert control.ensured == ["sql/v1"]
        engines[0].first.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 5
        assert not len(parts.scheduler.queue)
        assert not list(parts.scheduler.load.counts_by_name())


async def test_queued_request_waits_until_its_last_engine_is_back():
    engine, control = SlowEngine("w0"), AgentDouble()
    async with fleet(engine, control=control, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client) for _ in range(5)]
        await until(lambda: len(parts.scheduler.queue) == 3)
        control.starting = frozenset({"w0"})
        control.tell()
        await until(lambda: not len(parts.scheduler.queue))
        asking.append(ask(client))  # who comes now waits with them
        await until(lambda: len(parts.cold_starts.held) == 4)
        control.starting = frozenset()
        control.tell()
        engine.first.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 6


async def test_who_waited_is_told_when_no_engine_comes_back():
    engine, control = SlowEngine("w0"), AgentDouble()
    waits = {"failover_wait_s": 0.1, "cold_start_timeout_s": 0.2}
    async with fleet(engine, control=control, late_binding_s=0.05, **waits) as (client, _, parts):
        asking = [ask(client) for _ in range(3)]
        await until(lambda: len(parts.scheduler.queue) == 1)
        control.starting = frozenset({"w0"})
        control.tell()
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=patience(5))
        assert [error_of(await task) for task in done] == [(503, "no_replica")]
        engine.first.set()
        await asyncio.gather(*asking)


async def test_a_request_tells_how_long_it_waited_and_what_became_of_it():
    engine = SlowEngine("w0")
    async with fleet(engine, late_binding_s=0.05) as (client, _, parts):
        asking = [ask(client) for _ in range(3)]
        await until(lambda: len(parts.scheduler.queue) == 1)
        told = (await client.post("/v1/route", json=a_prompt())).json()
        assert "wait in the router" in told["note"]
        engine.first.set()
        await asyncio.gather(*asking)
        last, *_ = (await client.get("/v1/decisions")).json()["data"]
        assert last["waited_s"] > 0
        assert last["first_data_s"] > 0
        assert last["policy"] == "kv_lora"


async def test_a_shadow_policy_is_counted_and_decides_nothing():
    engines = EngineDouble("w0"), EngineDouble("w1")
    async with fleet(*engines, policy="session", shadow_policies=("round_robin", "session")) as (client, _, _):
        for _ in range(4):
            headers = {"x-session-id": "mine"}
            assert (await client.post("/v1/completions", json=a_prompt(), headers=headers)).status_code == 200
        counted = 'lorafleet_router_shadow_decisions_total{agrees="%s",policy="%s"}'
        assert await value(client, counted % ("yes", "session")) == 4
        assert await value(client, counted % ("no", "round_robin")) == 2
        assert await value(client, "lorafleet_router_shadow_cost_seconds_total") > 0
    assert sorted(len(engine.bodies) for engine in engines) == [0, 4]


async def test_prefix_lost_behind_a_queue_does_not_blame_the_index():
    async def empty(engine, body):
        await engine.go_on.wait()
        usage = {"prompt_tokens": 2000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    engine = EngineDouble("w0", empty)
    async with fleet(engine, late_binding_s=1e9) as (client, _, parts):
        body = {**a_prompt(), "stream": False}
        engine.go_on.clear()
        first = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.bodies) == 1)
        behind = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.bodies) == 2)
        engine.go_on.set()
        await asyncio.gather(first, behind)
        record = parts.decisions[-1]
        await until(lambda: record.cached_tokens == 0)
        assert record.decision.score.cached_tokens > 0
        assert parts.accuracy.error_share("w0") == 0.0
        await client.post("/v1/completions", json=body)
        await until(lambda: parts.accuracy.error_share("w0") > 0.0)


async def test_large_picture_counts_at_most_the_engines_context():
    engine = SlowEngine("w0")
    async with fleet(engine) as (client, _, parts):
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**20}}
        body = {**CHAT, "messages": [{"role": "user", "content": [picture]}], "media_io_kwargs": {}}
        asking = [asyncio.create_task(client.post("/v1/chat/completions", json=body))]
        await until(lambda: len(engine.bodies) == 1)
        assert 1000 < parts.decisions[-1].decision.request.prompt_tokens <= 2048
        asking.append(ask(client))
        await until(lambda: len(engine.bodies) == 2)
        engine.first.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 2


async def test_reported_load_expires_when_its_agent_is_away():
    engine, control = EngineDouble("w0"), AgentDouble(figures=Load(running=8, waiting=20))
    async with fleet(engine, control=control, unreachable_after_s=0.1) as (client, _, parts):
        await until(lambda: parts.scheduler.load.replica_load("w0").others_in_flight == 28)
        control.silent = True
        await until(lambda: not parts.scheduler.load.replica_load("w0").others_in_flight)
        assert (await ask(client)).status_code == 200
        control.silent = False
        control.tell()
        await until(lambda: parts.scheduler.load.replica_load("w0").others_in_flight == 28)


async def test_waiting_requests_are_refused_once_the_budget_of_their_key_is_exhausted(tmp_path):
    usage = {"prompt_tokens": 20, "completion_tokens": 40, "total_tokens": 60}

    async def slow(engine, body):
        await engine.go_on.wait()
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    path = tmp_path / "keys.yaml"
    limits = {"a": {"tokens_per_day": 50}, "b": {"tokens_per_day": 500}}
    keys = [{"sha256": hash_key(name), "scopes": ["infer"], "limits": limits[name]} for name in "ab"]
    path.write_text(json.dumps({"keys": keys}))
    engine = EngineDouble("w0", slow)
    engine.go_on.clear()
    async with fleet(engine, late_binding_s=0.05, key_files=(path,)) as (client, _, parts):

        def ask_by(key):
            headers = {"authorization": f"Bearer {key}"}
            body = {**a_prompt(), "stream": False}
            return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

        asking = [ask_by("a") for _ in range(5)]
        await until(lambda: len(parts.scheduler.queue) == 3)
        asking.append(ask_by("b"))
        await until(lambda: len(parts.scheduler.queue) == 4)
        engine.go_on.set()
        answers = await asyncio.gather(*asking)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 3
        assert {error_of(answer) for answer in refused} == {(429, "budget_exhausted")}
        assert answers[-1].status_code == 200
        assert len(engine.bodies) == 3
