"""What reports and silence of agents change at the router, and what they leave."""

import pytest
from structlog.testing import capture_logs

from router.request.usage_report import usage_report
from tests.patience import until
from tests.router.doubles import (
    CHAT,
    AgentDouble,
    EngineDouble,
    counted,
    error_of,
    fleet,
    with_sql,
)
from tests.router.sql_adapter import SQL
from workers.wire import Load, Metadata


async def test_loads_are_told_at_once_and_all_agents_figures_make_one_snapshot():
    engines = [EngineDouble(f"w{number}") for number in range(4)]
    async with fleet(*engines, metadata_poll_s=3600, catalog_poll_s=3600) as (_, control, parts):
        discovery, load = parts.discovery, parts.scheduler.load
        await until(discovery.is_synced)
        before = discovery.fleet
        control.figures = Load(running=7)
        for follow in discovery.followed.values():
            follow.wake.set()
        await until(lambda: {load.replica_load(worker).others_in_flight for worker in before.replicas} == {7})
        assert discovery.fleet is before
        assert await discovery.changes.wait(5)
        assert {replica.report.running for replica in discovery.fleet.replicas.values()} == {7}


async def test_a_catalog_that_names_no_worker_takes_none_away_that_answers():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control, unreachable_after_s=0.1) as (client, _, parts):
        named, control.named = control.named, frozenset()
        control.tell()
        await until(lambda: parts.discovery.fleet.revision == control.revision)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        control.silent = True
        engine.healthy = False
        await until(lambda: not parts.discovery.fleet.replicas)
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert error_of(answer) == (503, "no_replica")
        control.silent, control.named = False, named
        control.tell()
        await until(lambda: parts.discovery.fleet.replicas)


async def test_an_agents_silence_takes_nothing_away_while_its_engine_answers():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control, unreachable_after_s=0.1) as (client, _, parts):
        control.silent = True
        await until(lambda: control.unanswered >= 4)
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert answer.status_code == 200
        assert parts.metrics.loop_failures.labels("metadata").value == 0  # nothing of ours


@pytest.mark.parametrize("boot_id", ["first", "second"])
async def test_request_on_a_moved_worker_counts_until_it_ends(boot_id):
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, control, parts):

        def follow():
            return parts.discovery.followed.get("w0")

        def in_flight():
            return usage_report(parts, parts.clock()).in_flight.get("w0", {}).get(SQL, 0)

        engine.go_on.clear()
        before = follow()
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "model": "sql/v1", "stream": True}) as a:
            pieces = a.aiter_bytes()
            await anext(pieces)
            control.agents, control.boot_id = "elsewhere", boot_id
            control.tell()
            await until(lambda: follow() is not before and follow().metadata is not None)
            assert parts.discovery.fleet.replicas["w0"].agent_url.endswith("/elsewhere/w0")
            is_same_engine = boot_id == "first"
            assert in_flight() == (1 if is_same_engine else 0)
            engine.go_on.set()
            assert b"[DONE]" in b"".join([piece async for piece in pieces])
        await until(lambda: in_flight() == 0)
        counts = counted(control, parts)["sql/v1"]
        assert (counts.sent, sum(counts.first_token.values())) == (1, 1)


async def test_unreadable_report_is_counted_and_logged_with_its_worker():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control) as (_, _, parts):
        with capture_logs() as logs:
            control.metadata = lambda worker: Metadata.model_construct(instance_id=worker)
            control.tell()
            await until(lambda: parts.metrics.loop_failures.labels("metadata").value >= 1)
        (said,) = [line for line in logs if line["event"] == "loop step failed"]
        assert (said["loop"], said["worker"], said["exc_info"]) == ("metadata", "w0", True)


def lose_an_index(parts):
    parts.feeds.indexes["another model", 16] = None


def lose_the_rules(parts):
    parts.scheduler.breaker.rules = None


def lose_what_waits(parts):
    parts.usage.numbers = None


@pytest.mark.parametrize(
    ("loop", "breaks"),
    [
        ("sweep", lose_an_index),
        ("kv_feeds", lose_an_index),
        ("watch", lose_the_rules),
        ("usage", lose_what_waits),
    ],
)
async def test_a_fault_of_ours_in_a_loop_is_counted_under_its_name(loop, breaks):
    async with fleet(EngineDouble("w0")) as (_, _, parts):
        breaks(parts)
        await until(lambda: parts.metrics.loop_failures.labels(loop).value)


async def test_a_worker_that_is_still_starting_disturbs_nobody():
    engines, control = [EngineDouble("w0", ids=[1, 2, 3] * 20), EngineDouble("w1")], with_sql("w0")
    control.starting = frozenset({"w1"})
    async with fleet(*engines, control=control) as (client, _, _):
        for body in (CHAT, {**CHAT, "lora_id": "sql/v1"}):
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "w0")
        explained = (await client.post("/v1/route", json=CHAT)).json()
        assert (explained["tokens_from"], explained["prompt_tokens"]) == ("remote", 60)
        assert explained["rejected"] == [{"worker_id": "w1", "reason": "starting"}]


async def test_engine_with_missing_events_is_asked_for_full_reports():
    class WithEvents(AgentDouble):
        def metadata(self, worker):
            told = super().metadata(worker)
            transport = told.transport.model_copy(update={"kv_events": ("tcp://127.0.0.1:1",)})
            return told.model_copy(update={"transport": transport})

    engine = EngineDouble("w0")
    async with fleet(engine, control=WithEvents()) as (client, _, parts):
        await until(lambda: parts.feeds.may_repeat("w0"))
        await client.post("/v1/chat/completions", json=CHAT)
        parts.accuracy.record_lost_events("w0")
        await client.post("/v1/chat/completions", json=CHAT)
    assert [body.get("vllm_xargs") for body in engine.bodies] == [None, {"kv_cache_report_mode": "full"}]
