"""The agent's events and their readers, and the history that an agent reports until it is recorded."""

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
from workers.inventory.event_log import (
    PRELOADING,
    AgentEventLog,
    Requester,
    UnrecordedHistory,
    made_room,
    requester,
    shortened,
)

SQL, LEGAL = "sql-expert/v1", "legal/v2"


def event_log(size=10):
    return AgentEventLog(boot_id="b", size=size, now=lambda: "now")


def types(pieces):
    return [piece.partition("event: ")[2].partition("\n")[0] for piece in pieces if "event: " in piece]


async def test_events_before_the_end_are_delivered_to_streams_that_are_open():
    events = event_log()
    events.add("ENGINE_UP")
    stream = events.stream(0, keep_alive_s=60)
    seen = [await anext(stream), await anext(stream)]
    events.add("DRAINING")
    events.add("ENGINE_DOWN")
    events.close()
    seen += [piece async for piece in stream]
    assert types(seen) == ["ENGINE_UP", "DRAINING", "ENGINE_DOWN"]


async def test_a_reader_may_leave_out_what_has_become_of_files_on_the_disk():
    events = event_log()
    for kind in ("DOWNLOADING", "DOWNLOADED_TO_DISK", "LOADED_TO_DEVICE", "DELETED_FROM_DISK", "UNLOADED_FROM_DEVICE"):
        events.add(kind)
    events.close()
    seen = [piece async for piece in events.stream(0, keep_alive_s=60, with_files=False)]
    assert types(seen) == ["LOADED_TO_DEVICE", "UNLOADED_FROM_DEVICE"]


async def test_a_reader_that_comes_after_the_end_gets_no_stream():
    events = event_log()
    events.add("DRAINING")
    events.close()
    assert [piece async for piece in events.stream(events.position_after(None), keep_alive_s=60)] == [": connected\n\n"]


async def test_a_stream_that_fell_behind_the_buffer_ends():
    events = event_log(size=2)
    stream = events.stream(0, keep_alive_s=60)
    await anext(stream)
    for _ in range(3):
        events.add("DRAINING")
    assert [piece async for piece in stream] == []


@dataclass
class RecordingOrchestrator:
    """Accepts heartbeats, and acknowledges all of their operations or none."""

    records: bool = False
    sent: list[list[dict]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serving(self):
        async def register(request: Request) -> JSONResponse:
            operations = (await request.json())["operations"]
            self.sent.append(operations)
            self.news.set()
            recorded = max([0, *(it["id"] for it in operations)]) if self.records else 0
            return JSONResponse({"epoch": 1, "revision": 1, "interval_s": 1.0, "recorded": recorded})

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
            orchestrator.records = True
            await orchestrator.until(lambda found: found == [])  # of the time before and after them
            orchestrator.sent.clear()
            await orchestrator.until(lambda found: found == [])
            assert (await post(client, "unload_lora", lora_id=SQL, epoch=1)).status_code == 200
        # The next agent loads again what its engine had.
        orchestrator.records = False
        orchestrator.sent.clear()
        async with worker.together("--orchestrator-url", url, "--heartbeat-s", "0.1"):
            restored = await orchestrator.until(lambda found: len(found) == 2)
    # They are loaded side by side.
    assert sorted(brief(restored)) == [
        ("load", name, "agent", "loaded before the restart") for name in (LEGAL, "python-expert/v1")
    ]


def test_of_many_operations_the_oldest_are_sent_first_and_a_thousand_are_kept():
    log = UnrecordedHistory(lambda: "now")
    for number in range(1200):
        log.record_operation("load", PRELOADING, lora_id=f"a{number}", digest="d")
    first = log.operations()
    assert (first[0].id, len(first)) == (201, 50)
    log.forget_recorded(operations=first[-1].id, incidents=0)
    assert log.operations()[0].id == 251
    log.forget_recorded(operations=1200, incidents=0)
    assert log.operations() == ()


def test_an_operation_that_ends_while_a_heartbeat_is_under_way_is_sent_with_the_next():
    log = UnrecordedHistory(lambda: "now")
    log.record_operation("load", PRELOADING, lora_id="one", digest="d")
    sent = log.operations()
    log.record_operation("load", PRELOADING, lora_id="two", digest="d")
    log.forget_recorded(operations=sent[-1].id, incidents=0)
    assert [it.lora_id for it in log.operations()] == ["two"]
    log.forget_recorded(operations=0, incidents=0)
    assert [it.lora_id for it in log.operations()] == ["two"]
    log.forget_recorded(operations=2, incidents=0)
    assert log.operations() == ()


def test_a_victims_unload_is_its_loads_requesters():
    log = UnrecordedHistory(lambda: "now")
    log.record_operation("unload", made_room(requester("router", is_leader=False), "b/v1"), lora_id="a/v1", digest="d")
    log.record_operation(
        "unload", made_room(requester("orchestrator", is_leader=True), "b/v1"), lora_id="c/v1", digest="d"
    )
    assert [(it.lora_id, it.asked_by, it.reason) for it in log.operations()] == [
        ("a/v1", "router", "made room for b/v1")
    ]
    assert isinstance(PRELOADING, Requester)


def test_incidents_are_kept_until_they_are_recorded_and_the_newest_of_too_many():
    log = UnrecordedHistory(lambda: "2027-01-01T00:00:00Z")
    for _ in range(250):
        log.record_incident("engine_died", "killed")
    assert [each.id for each in log.incidents()] == list(range(51, 71))
    log.forget_recorded(operations=0, incidents=60)
    assert log.incidents()[0].id == 61
    log.forget_recorded(operations=250, incidents=70)
    assert log.incidents()[0].id == 71


def test_a_long_cause_keeps_its_first_line_and_its_last():
    cause = "the engine exited (status 1)\n" + "x" * 9000 + "\nCUDA out of memory"
    assert len(shortened(cause)) < 1100
    assert shortened(cause).startswith("the engine exited (status 1)\n")
    assert shortened(cause).endswith("CUDA out of memory")
    assert shortened("killed") == "killed"
