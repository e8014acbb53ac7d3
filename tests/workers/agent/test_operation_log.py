"""Loads and unloads that no orchestrator asked for: how an agent reports them until they are recorded."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.patience import within
from tests.serving import serving
from tests.workers.running import post
from workers.agent.operation_log import PRELOADING, AdapterOperationLog, Requester, made_room, requester

SQL, LEGAL = "sql-expert/v1", "legal/v2"


@dataclass
class RecordingOrchestrator:
    """Accepts heartbeats, and acknowledges their operations up to `recorded`; "all" or "none" (an older version)."""

    recorded: str | int = 0
    sent: list[list[dict]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serving(self):
        async def register(request: Request) -> JSONResponse:
            operations = (await request.json())["operations"]
            self.sent.append(operations)
            self.news.set()
            answer = {"epoch": 1, "revision": 1, "interval_s": 1.0}
            if self.recorded != "none":
                answer["recorded"] = max([0, *(it["id"] for it in operations)]) if self.recorded == "all" else 0
            return JSONResponse(answer)

        async with serving(Starlette(routes=[Route("/v1/workers/register", register, methods=["POST"])])) as url:
            yield url

    async def until(self, holds):
        """Wait for a heartbeat whose operations are such; returns them."""
        async with within(20):
            while not (found := [operations for operations in self.sent if holds(operations)]):
                self.news.clear()
                await self.news.wait()
        return found[-1]


def brief(operations):
    return [(it["operation"], it["lora_id"], it["asked_by"], it["reason"]) for it in operations]


async def test_loads_that_no_leader_asked_for_are_reported_until_they_are_recorded(worker):
    orchestrator = RecordingOrchestrator()
    async with orchestrator.serving() as url:
        flags = ("--orchestrator-url", url, "--heartbeat-s", "0.1", "--preload-loras", SQL, "--warm-deadline-s", "0")
        async with worker.together(*flags) as client:
            assert (await post(client, "load_lora", lora_id=LEGAL)).status_code == 200
            assert (await post(client, "load_lora", lora_id="python-expert/v1", epoch=1)).status_code == 200
            assert (await post(client, "load_lora", lora_id="nobody/v1")).status_code == 409  # full
            operations = await orchestrator.until(lambda found: len(found) == 3)
            me = operations[1]["asked_by"]
            assert brief(operations) == [
                ("load", SQL, "agent", "named in preload_loras"),
                ("load", LEGAL, me, "asked at the agent"),
                ("load", "nobody/v1", me, "asked at the agent"),
            ]
            assert [bool(it["error"]) for it in operations] == [False, False, True]
            assert (operations[1]["duration_s"] > 0, operations[1]["memory_mb"] > 0) == (True, True)
            orchestrator.recorded = "all"
            await orchestrator.until(lambda found: found == [])  # of the time before and after them
            orchestrator.sent.clear()
            await orchestrator.until(lambda found: found == [])
            assert (await post(client, "unload_lora", lora_id=SQL, epoch=1)).status_code == 200
        # The next agent loads again what its engine had.
        orchestrator.recorded = 0
        orchestrator.sent.clear()
        async with worker.together("--orchestrator-url", url, "--heartbeat-s", "0.1"):
            restored = await orchestrator.until(lambda found: len(found) == 2)
    # They are loaded side by side.
    assert sorted(brief(restored)) == [
        ("load", name, "agent", "loaded before the restart") for name in (LEGAL, "python-expert/v1")
    ]


async def test_an_orchestrator_that_records_nothing_gets_each_operation_once(worker):
    orchestrator = RecordingOrchestrator("none")
    async with orchestrator.serving() as url:
        flags = ("--orchestrator-url", url, "--heartbeat-s", "0.1", "--preload-loras", SQL, "--warm-deadline-s", "0")
        async with worker.together(*flags):
            await orchestrator.until(lambda found: len(found) == 1)
            orchestrator.sent.clear()
            await orchestrator.until(lambda found: found == [])


def test_of_many_operations_the_oldest_are_sent_first_and_a_thousand_are_kept():
    log = AdapterOperationLog(lambda: "now")
    for number in range(1200):
        log.record("load", PRELOADING, lora_id=f"a{number}", digest="d")
    first = log.unrecorded()
    assert (first[0].id, len(first)) == (201, 50)
    log.forget_recorded(first, first[-1].id)
    assert log.unrecorded()[0].id == 251
    log.forget_recorded(log.unrecorded(), 1200)
    assert log.unrecorded() == ()


def test_an_operation_that_ends_while_a_heartbeat_is_under_way_is_sent_with_the_next():
    log = AdapterOperationLog(lambda: "now")
    log.record("load", PRELOADING, lora_id="one", digest="d")
    sent = log.unrecorded()
    log.record("load", PRELOADING, lora_id="two", digest="d")
    log.forget_recorded(sent, None)
    assert [it.lora_id for it in log.unrecorded()] == ["two"]
    log.forget_recorded((), None)
    assert [it.lora_id for it in log.unrecorded()] == ["two"]
    log.forget_recorded(log.unrecorded(), None)
    assert log.unrecorded() == ()


def test_a_victims_unload_is_its_loads_requesters():
    log = AdapterOperationLog(lambda: "now")
    log.record("unload", made_room(requester("router", is_leader=False), "b/v1"), lora_id="a/v1", digest="d")
    log.record("unload", made_room(requester("orchestrator", is_leader=True), "b/v1"), lora_id="c/v1", digest="d")
    assert [(it.lora_id, it.asked_by, it.reason) for it in log.unrecorded()] == [
        ("a/v1", "router", "made room for b/v1")
    ]
    assert isinstance(PRELOADING, Requester)
