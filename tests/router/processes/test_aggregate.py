"""Processes of one router ask each other: metrics that add up, decisions of all, and siblings that do not answer."""

import asyncio
import contextlib
import fcntl
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from structlog.testing import capture_logs

from router.api.control import control_routes, process_handlers
from router.processes import aggregate
from router.processes.aggregate import WorkerProcesses
from router.telemetry.adapter_series import AdapterSeries
from router.telemetry.metrics import RouterMetrics
from tests.patience import until, within
from tests.router.doubles import CHAT, EngineDouble, fleet, sample_value


def no_adapters() -> AdapterSeries:
    """Series by adapter that no request counts in, and that no page shows."""
    return AdapterSeries(CollectorRegistry(), most_labels=0)


class MetricsProcess:
    """One process's metrics and its place among the others, in this one."""

    def __init__(self, folder: Path, slot: int, **limits: float) -> None:
        self.registry = CollectorRegistry()
        self.count = Counter("count", 'a "c" of\n two lines', ("by",), registry=self.registry)
        self.took = Histogram("took", "t", buckets=(1, 2), registry=self.registry)
        self.revision = Gauge("lorafleet_router_catalog_revision", "r", registry=self.registry)
        self.waiting = Gauge("lorafleet_router_waiting_requests", "w", registry=self.registry)
        self.place = WorkerProcesses(
            folder, slot, metrics=lambda: generate_latest(self.registry), adapters=no_adapters(), **limits
        )


@contextlib.asynccontextmanager
async def process(folder: Path, slot: int, **limits: float):
    one = MetricsProcess(folder, slot, **limits)
    await one.place.start()
    try:
        yield one
    finally:
        await one.place.close()


async def test_counts_and_queues_add_up_and_the_largest_revision_is_shown(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1) as b:
        odd = 'spaces, "quotes" and\n# TYPE lines\u2028\x0b'
        for one in (a, b):
            one.count.labels(odd).inc()
        a.count.labels("x").inc(2)
        b.count.labels("x").inc(3)
        b.count.labels("y").inc(1)
        a.took.observe(0.5)
        b.took.observe(1.5)
        for one, number in ((a, 5), (b, 7)):
            one.revision.set(number)
            one.waiting.set(number)
        text = (await a.place.metrics()).decode()
        assert sorted(text.splitlines()) == sorted((await b.place.metrics()).decode().splitlines())
        assert sample_value(text, "count_total", by=odd) == 2
        assert (sample_value(text, "count_total", by="x"), sample_value(text, "count_total", by="y")) == (5, 1)
        assert [sample_value(text, "took_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
        assert sample_value(text, "took_sum") == 2.0
        assert sample_value(text, "lorafleet_router_catalog_revision") == 7
        assert sample_value(text, "lorafleet_router_waiting_requests") == 12


async def test_one_process_shows_exactly_what_prometheus_client_writes(tmp_path):
    async with process(tmp_path, 0) as a:
        a.count.labels("x").inc(1_000_000)
        a.took.observe(0.25)
        a.waiting.set(float("inf"))
        told = await a.place.metrics()
        assert told == aggregate.PROCESSES_GAUGE.format(processes="1.0").encode() + generate_latest(a.registry)


async def test_of_two_creation_times_the_earlier_is_shown(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1) as b:
        for one in (a, b):
            one.count.labels("x").inc()
        earlier = min(one.registry.get_sample_value("count_created", {"by": "x"}) for one in (a, b))
        for one in (a, b):
            assert sample_value((await one.place.metrics()).decode(), "count_created", by="x") == earlier


async def test_a_gauge_or_counter_of_one_process_is_shown_while_it_lives(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            b.count.labels("x").inc(10)
            b.took.observe(0.5)
            Counter("only", "o", registry=b.registry).inc(5)
            text = (await a.place.metrics()).decode()
            assert sample_value(text, "only_total") == 5
            assert "# HELP only_total o\n# TYPE only_total counter\nonly_total 5.0\n" in text
        text = (await a.place.metrics()).decode()
        assert sample_value(text, "only_total") is None
        assert (sample_value(text, "count_total", by="x"), sample_value(text, "took_bucket", le="1.0")) == (10, 1)


async def test_counts_never_fall_when_processes_end(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            a.count.labels("x").inc(1)
            b.count.labels("x").inc(10)
            b.waiting.set(3)
            assert sample_value((await b.place.metrics()).decode(), "count_total", by="x") == 11
        gone = (await a.place.metrics()).decode()
        assert sample_value(gone, "count_total", by="x") == 11
        assert sample_value(gone, "lorafleet_router_waiting_requests") == 0
        for _ in range(3):
            async with process(tmp_path, 1) as again:
                again.count.labels("x").inc(100)
                assert sample_value((await a.place.metrics()).decode(), "count_total", by="x") in (111, 211, 311)
                assert sample_value((await again.place.metrics()).decode(), "count_total", by="x") in (111, 211, 311)
        assert sample_value((await a.place.metrics()).decode(), "count_total", by="x") == 311


@contextlib.contextmanager
def no_writing(folder: Path):
    """As a full disk, for what keeps the counts; root may write into any other folder."""
    (folder / "seen.partial").mkdir()
    yield
    (folder / "seen.partial").rmdir()


@contextlib.contextmanager
def no_lock(folder: Path):
    """As one that was stopped while it had the lock."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def no_descriptor(folder: Path):
    """As without any left: the lock cannot be opened."""
    (folder / "lock").unlink(missing_ok=True)
    (folder / "lock").mkdir()
    yield
    (folder / "lock").rmdir()


@pytest.mark.parametrize("trouble", [no_writing, no_lock, no_descriptor])
async def test_counts_of_ended_processes_stay_while_their_record_cannot_be_kept(tmp_path, trouble):
    async def shown() -> float | None:
        return sample_value((await a.place.metrics()).decode(), "count_total", by="x")

    async with process(tmp_path, 0, lock_tries=2) as a:
        a.count.labels("x").inc(1)
        async with process(tmp_path, 1) as b:
            b.count.labels("x").inc(10)
            assert await shown() == 11
            with trouble(tmp_path):
                b.count.labels("x").inc(100)
                assert await shown() == 111
        with trouble(tmp_path):
            assert await shown() == 111
            async with process(tmp_path, 1) as again:
                again.count.labels("x").inc(1000)
                assert await shown() == 1111
            assert await shown() == 1111
        assert await shown() == 1111
        async with process(tmp_path, 2) as other:
            assert sample_value((await other.place.metrics()).decode(), "count_total", by="x") == 1111


async def test_counts_stay_though_another_process_wrote_the_last_record(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            b.count.labels("x").inc(10)
            await b.place.metrics()
            with no_writing(tmp_path):
                b.count.labels("x").inc(100)
                assert sample_value((await a.place.metrics()).decode(), "count_total", by="x") == 110
        with no_writing(tmp_path):
            assert sample_value((await a.place.metrics()).decode(), "count_total", by="x") == 110


async def test_the_record_is_written_whole_and_only_under_its_lock(tmp_path):
    def lock_is_open_twice():
        links = Path("/proc/self/fd").iterdir()
        return [link.exists() and link.readlink() == tmp_path / "lock" for link in links].count(True) == 2

    async with process(tmp_path, 0) as a:
        seen = tmp_path / "seen"
        await a.place.metrics()
        before = seen.read_bytes()
        a.count.labels("x").inc()
        for trouble in (no_writing, no_lock):
            with trouble(tmp_path):
                await a.place.metrics()
                assert seen.read_bytes() == before
        with no_lock(tmp_path):
            asking = asyncio.create_task(a.place.metrics())
            await until(lock_is_open_twice)
            assert seen.read_bytes() == before
        await asking
        assert seen.read_bytes() != before


async def test_an_unknown_question_gets_no_answer_and_is_logged(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1):
        with capture_logs() as logs:
            assert await a.place.ask("unheard-of") == {1: None}
        assert [each["event"] for each in logs] == [
            "another worker process got no answer",
            "a worker process does not answer",
        ]


async def test_a_process_that_stops_waiting_causes_no_error(tmp_path):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_question):
        asked.set()
        await go_on.wait()
        return b"too late"

    def serving_it():
        return [task for task in asyncio.all_tasks() if "_serve" in repr(task)]

    unexpected = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unexpected.append(context))
    a, b = (
        WorkerProcesses(tmp_path, slot, metrics=bytes, adapters=no_adapters(), answers={"slow": slow})
        for slot in (0, 1)
    )
    await b.start()
    with capture_logs() as logs:
        asking = asyncio.create_task(a.ask("slow", within_s=6000.0))
        async with within(5):
            await asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert serving_it()
        go_on.set()
        await until(lambda: not serving_it())
    await b.close()
    assert not logs
    assert not unexpected


async def test_a_question_times_out_as_its_asker_set(tmp_path):
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def hang(_reader, writer):
        await go_on.wait()
        writer.close()
        gone.set()

    hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
    async with within(5):
        assert await WorkerProcesses(tmp_path, 0, metrics=bytes, adapters=no_adapters()).ask(
            "anything", within_s=0.01
        ) == {1: None}
    hanging.close()
    go_on.set()
    await gone.wait()


async def test_a_silent_process_is_left_out_and_keeps_its_counts(tmp_path):
    async def shown() -> float | None:
        return sample_value((await a.place.metrics()).decode(), "count_total", by="x")

    async with process(tmp_path, 0, answer_within_s=0.3) as a, process(tmp_path, 1) as b:
        b.count.labels("x").inc(10)
        assert await until(shown) == 10
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def hang(_reader, writer):
            asked.set()
            await go_on.wait()
            writer.close()

        (tmp_path / "1.sock").unlink()
        hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
        assert await shown() == 10
        assert asked.is_set()
        go_on.set()
        hanging.close()
        await hanging.wait_closed()


async def test_a_truncated_answer_counts_as_none(tmp_path):
    async with process(tmp_path, 0) as a:

        async def break_off(reader, writer):
            await reader.read()
            writer.write((100).to_bytes(8, "big") + b"half of it")
            writer.close()

        broken = await asyncio.start_unix_server(break_off, tmp_path / "1.sock")
        assert await a.place.ask("anything") == {1: None}
        broken.close()


async def test_decisions_of_a_silent_process_are_reported_missing(tmp_path):
    async def break_off(reader, writer):
        await reader.read()
        writer.close()

    async with fleet(EngineDouble("w0")) as (client, _, here), fleet(EngineDouble("w0")) as (other, _, there):
        for asked in (client, other):
            assert (await asked.post("/v1/chat/completions", json=CHAT)).status_code == 200
        places = [
            WorkerProcesses(tmp_path, n, metrics=bytes, adapters=no_adapters(), answers=process_handlers(parts))
            for n, parts in enumerate((here, there))
        ]
        for place in places:
            await place.start()
        breaking = await asyncio.start_unix_server(break_off, tmp_path / "2.sock")
        app = FastAPI()
        app.include_router(control_routes(here, places[0]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as asking:
            found = (await asking.get("/v1/decisions")).json()
        assert (len(found["data"]), found["missing"]) == (2, [2])
        assert (await client.get("/v1/decisions")).json()["missing"] == []
        breaking.close()
        for place in places:
            await place.close()


def test_every_gauge_is_listed_as_a_sum_or_a_largest():
    gauges = {family.name for family in RouterMetrics().registry.collect() if family.type == "gauge"}
    assert gauges - aggregate.SUMMED - aggregate.LARGEST == set(), "say in router/processes/aggregate.py how it adds up"
