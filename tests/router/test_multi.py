import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from lorafleet.auth import hash_key
from router import siblings
from router.api import answers, control_routes
from router.metrics import Metrics
from router.siblings import Siblings
from tests.patience import patience, until, within
from tests.router.doubles import CHAT, Control, Engine, chunk
from tests.router.doubles import fleet as fleet_of
from tests.serving import serving

STREAM = CHAT | {"stream": True}


@dataclass
class Several:
    """A parent and its processes, as whoever started them sees them."""

    process: asyncio.subprocess.Process
    url: str
    engine: Engine
    control: Control

    async def get(self, path: str, client: httpx.AsyncClient | None = None):
        """On a connection of its own, so that the kernel chooses the process anew, unless a client is given."""
        async with contextlib.AsyncExitStack() as stack:
            if client is None:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=10))
            answer = await client.get(f"{self.url}{path}")
            answer.raise_for_status()
            return answer.json() if answer.headers.get("content-type") == "application/json" else answer.text

    async def clients(self, stack: contextlib.AsyncExitStack, pids: set[int]) -> dict[int, httpx.AsyncClient]:
        """For each process a client whose one connection is to that process."""
        found: dict[int, httpx.AsyncClient] = {}
        async with within(20):
            while found.keys() != pids:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=10, base_url=self.url))
                found.setdefault((await self.get("/who", client))["pid"], client)
        return found

    async def pids(self, *, without: int = 0, count: int = 2) -> set[int]:
        """The processes that serve, once there are so many."""
        found: set[int] = set()
        async with within(20):
            while len(found) < count:
                found |= {(await self.get("/who"))["pid"]} - {without}
        return found

    async def ends(self, *, within_s: float = 20) -> int:
        async with within(within_s):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def several(folder: Path, *flags: str, processes: int = 2, port: str = "0", **environment: str):
    """Real router processes in front of one engine of our own."""
    engine, control = Engine("w0"), Control()
    port_file = folder / "port"
    async with contextlib.AsyncExitStack() as stack:
        control.workers["w0"] = await stack.enter_async_context(serving(engine.app))
        control.url = await stack.enter_async_context(serving(control.app))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.router.many", str(processes)),
            *("--orchestrator-url", control.url, "--port", port, "--port-file", str(port_file)),
            *("--tokenizer", "off", "--metadata-poll-s", "0.2", "--catalog-poll-s", "0.2", "--drain-s", "0", *flags),
            env={**os.environ, "TMPDIR": str(folder), **environment},
            start_new_session=True,
        )
        try:
            await until(lambda: port_file.exists() or process.returncode is not None, within_s=30)
            port = port_file.read_text() if port_file.exists() else "0"
            yield Several(process, f"http://127.0.0.1:{port}", engine, control)
        finally:
            engine.go_on.set()
            if process.returncode is None:
                process.terminate()
                await process.wait()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def begun(client: httpx.AsyncClient, stack: contextlib.AsyncExitStack):
    """A stream whose first piece is here and whose second waits for the engine's `go_on`."""
    answer = await stack.enter_async_context(client.stream("POST", "/v1/chat/completions", json=STREAM))
    pieces = answer.aiter_bytes()
    assert (answer.status_code, await anext(pieces)) == (200, chunk("tiny-qwen", "one"))
    return pieces


async def rest(pieces) -> bytes:
    return b"".join([piece async for piece in pieces])


async def routable(fleet: Several, pids: set[int]):
    async with contextlib.AsyncExitStack() as stack, within(20):
        for client in (await fleet.clients(stack, pids)).values():
            while (await client.post("/v1/chat/completions", json=CHAT)).status_code != 200:
                await asyncio.sleep(0.05)


async def refused(fleet: Several):
    """Returns once nobody listens any more."""
    async with within(20):
        while True:
            try:
                await fleet.get("/health")
            except httpx.ConnectError:
                return
            except httpx.TransportError:  # it came at the very moment in which the port was closed
                continue


async def test_every_process_serves_the_one_port_under_a_name_of_its_own(tmp_path):
    async with several(tmp_path, "--router-id", "edge", processes=3) as fleet, contextlib.AsyncExitStack() as stack:
        clients = await fleet.clients(stack, await fleet.pids(count=3))
        told = [await fleet.get("/who", client) for client in clients.values()]
        assert sorted(one["id"] for one in told) == ["edge-0", "edge-1", "edge-2"]
        for one, client in zip(told, clients.values(), strict=True):
            others = await fleet.get("/ask", client)
            assert {other["question"] for other in others} == {"hello"}
            assert {other["slot"] for other in others} == {0, 1, 2} - {one["slot"]}


async def test_a_killed_process_comes_back_and_nobody_elses_request_fails(tmp_path):
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        victim, survivor = sorted(pids)
        client = (await fleet.clients(stack, pids))[survivor]
        fleet.engine.go_on.clear()
        stream = await begun(client, stack)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: is_gone(victim))
        seen: set[int] = set()
        async with within(20):
            # Each on a connection of its own, from the death on and past the newcomer's first.
            while len(seen) < 2:
                async with httpx.AsyncClient(base_url=fleet.url, timeout=10) as fresh:
                    assert (await fresh.post("/v1/chat/completions", json=CHAT)).status_code == 200
                    assert (await fresh.get("/ready")).status_code == 200
                    seen.add((await fleet.get("/who", fresh))["pid"])
        assert victim not in seen
        assert survivor in seen
        fleet.engine.go_on.set()
        assert (await rest(stream)).endswith(b"data: [DONE]\n\n")


async def test_one_that_takes_anothers_place_gets_no_connection_before_it_can_route(tmp_path):
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        victim, survivor = sorted(pids)
        client = (await fleet.clients(stack, pids))[survivor]
        fleet.control.down = True
        os.kill(victim, signal.SIGKILL)
        await until(lambda: is_gone(victim))
        async with within(9):  # less than it would wait for
            while not await fleet.get("/ask", client):  # the newcomer has begun, and answers its sibling
                await asyncio.sleep(0.05)
            for _ in range(20):
                async with httpx.AsyncClient(base_url=fleet.url, timeout=10) as fresh:
                    assert (await fresh.post("/v1/chat/completions", json=CHAT)).status_code == 200
        fleet.control.down = False
        assert len(await fleet.pids(without=victim)) == 2


async def test_a_keys_limits_are_one_over_all_processes_and_what_a_killed_one_had_under_way_is_over(tmp_path):
    keys, limits = tmp_path / "keys.yaml", {"requests_per_minute": 6, "concurrent_requests": 2}
    entry = {"sha256": hash_key("mine"), "tenant": "mine", "scopes": ["infer"], "limits": limits}
    keys.write_text(json.dumps({"keys": [entry]}))
    async with several(tmp_path, "--key-files", str(keys)) as fleet, contextlib.AsyncExitStack() as stack:
        clients = await fleet.clients(stack, await fleet.pids())
        for client in clients.values():
            client.headers["authorization"] = "Bearer mine"
        (there, one), (_, other) = clients.items()
        left = []
        for client in (one, other, one):
            answer = await client.post("/v1/chat/completions", json=CHAT)
            left.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [(200, "5"), (200, "4"), (200, "3")]
        fleet.engine.go_on.clear()
        _lost, kept = await begun(one, stack), await begun(other, stack)
        second = await stack.enter_async_context(
            httpx.AsyncClient(base_url=fleet.url, headers=other.headers, timeout=10)
        )
        refused = await second.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, "2 requests at once" in refused.text) == (429, True)
        os.kill(there, signal.SIGKILL)
        await until(lambda: is_gone(there))
        fleet.engine.go_on.set()
        await rest(kept)
        assert (await other.post("/v1/chat/completions", json=CHAT)).status_code == 200
        refused = await other.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, "6 requests per minute" in refused.text) == (429, True)


async def test_ctrl_c_at_a_terminal_is_one_signal_to_each_process(tmp_path):
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        fleet.engine.go_on.clear()
        streams = [await begun(client, stack) for client in (await fleet.clients(stack, pids)).values()]
        # Two signals so close together may arrive as one, and hide that there were two.
        assert fleet.process.pid not in {os.getpgid(pid) for pid in pids}
        os.killpg(fleet.process.pid, signal.SIGINT)
        await refused(fleet)
        fleet.engine.go_on.set()
        for stream in streams:
            assert (await rest(stream)).endswith(b"data: [DONE]\n\n")
        await stack.aclose()
        assert await fleet.ends() == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
async def test_a_stop_lets_every_process_finish_what_is_in_flight_and_ends_with_0(tmp_path, stop):
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        fleet.engine.go_on.clear()
        streams = [await begun(client, stack) for client in (await fleet.clients(stack, pids)).values()]
        fleet.process.send_signal(stop)
        await refused(fleet)
        assert fleet.process.returncode is None
        fleet.engine.go_on.set()
        for stream in streams:
            assert (await rest(stream)).endswith(b"data: [DONE]\n\n")
        await stack.aclose()
        assert await fleet.ends() == 0
        assert all(map(is_gone, pids))
        assert sorted(tmp_path.iterdir()) == [tmp_path / "port"]


async def test_processes_whose_parent_was_killed_finish_and_end_by_themselves(tmp_path):
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        fleet.engine.go_on.clear()
        streams = [await begun(client, stack) for client in (await fleet.clients(stack, pids)).values()]
        fleet.process.kill()
        await fleet.ends()
        fleet.engine.go_on.set()
        for stream in streams:
            assert (await rest(stream)).endswith(b"data: [DONE]\n\n")
        await stack.aclose()
        await until(lambda: all(map(is_gone, pids)), within_s=20)
        assert sorted(tmp_path.iterdir()) == [tmp_path / "port"]


async def test_a_second_signal_ends_even_a_process_that_hangs(tmp_path):
    async with several(tmp_path, "--grace-s", "60") as fleet:
        pids = await fleet.pids()
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=0.5) as client:
                await client.get(f"{fleet.url}/hang")
        fleet.process.terminate()
        await asyncio.sleep(0)
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ends(within_s=15) == 1
        assert all(map(is_gone, pids))


async def test_processes_that_cannot_start_end_the_parent_with_their_status(tmp_path):
    async with several(tmp_path, REFUSES_TO_START="1") as fleet:
        assert await fleet.ends() == 7
        assert list(tmp_path.iterdir()) == []


PARENT = """
import pathlib, sys; from router import multi
folder = pathlib.Path(sys.argv[1]).parent
within = {"drain_s": 0.0, "stop_s": 1.0}
sys.exit(multi.run(sys.argv[1:], 2, host="127.0.0.1", port=0, port_file=folder / "port", **within))
"""
# Serves nothing, and ends with its parent.
PROCESS = """
import json, os, pathlib, socket
line = socket.socket(fileno=json.loads(os.environ["LORAFLEET_PROCESS"])["lifeline"])
pathlib.Path(__file__).with_name(f"{os.getpid()}.pid").touch()
line.send(b"s")
line.recv(1)
"""


async def test_a_process_that_cannot_be_started_is_started_later_and_the_others_serve_on(tmp_path):
    def pids():
        return {int(path.stem) for path in tmp_path.glob("*.pid")}

    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text(f"#!{sys.executable} -IS{PROCESS}")
    program.chmod(0o700)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(program)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        await until(lambda: len(pids()) == 2, within_s=20)
        victim, survivor = pids()
        program.rename(away)
        os.kill(victim, signal.SIGKILL)
        async with within(20):
            while b"cannot be started" not in (line := await parent.stdout.readline()):
                assert line
        away.rename(program)
        await until(lambda: len(pids()) == 3, within_s=20)
        assert not is_gone(survivor)
        parent.terminate()
        async with within(20):
            await parent.communicate()
        assert parent.returncode == 0
    finally:
        if parent.returncode is None:
            parent.kill()
            await parent.communicate()
    await until(lambda: all(map(is_gone, pids())))


# In the first slot it ends with 7, and is well the second time; in the other it ends with 7 while that one begins.
WELL_TOO_LATE = """
import json, os, pathlib, signal, socket, sys, time
told, here = json.loads(os.environ["LORAFLEET_PROCESS"]), pathlib.Path(__file__).parent
line, parent = socket.socket(fileno=told["lifeline"]), os.getppid()
def serve(*_):
    line.send(b"s")
    while not (here / "port").exists() and os.getppid() == parent:
        time.sleep(0.01)
    (here / "stopped").touch()
    sys.exit(0)
if told["slot"]:
    while not (here / "again").exists():
        time.sleep(0.01)
elif (here / "first").exists():
    signal.signal(signal.SIGTERM, serve)
    (here / "again").touch()
    line.recv(1)
(here / "first").touch()
sys.exit(7)
"""


async def test_a_process_that_begins_once_more_when_none_could_start_is_stopped_in_order(tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -IS{WELL_TOO_LATE}")
    program.chmod(0o700)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(program)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        async with within(20):
            await parent.wait()
    finally:
        if parent.returncode is None:
            parent.kill()
            await parent.wait()
    assert (parent.returncode, (tmp_path / "stopped").exists()) == (7, True)


async def test_a_port_file_that_cannot_be_written_ends_all_with_an_error(tmp_path):
    (tmp_path / "in-the-way").touch()
    async with several(tmp_path, "--port-file", str(tmp_path / "in-the-way" / "port")) as fleet:
        assert await fleet.ends() == 1


async def test_a_long_path_for_temporary_files_hinders_nobody(tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    async with several(tmp_path, TMPDIR=str(deep)) as fleet, contextlib.AsyncExitStack() as stack:
        for client in (await fleet.clients(stack, await fleet.pids())).values():
            assert len(await fleet.get("/ask", client)) == 1


async def test_a_parent_takes_the_port_over_from_the_processes_of_one_that_was_killed(tmp_path):
    (tmp_path / "second").mkdir()
    async with several(tmp_path, "--drain-s", "3") as fleet:
        orphans = await fleet.pids()
        fleet.process.kill()
        await fleet.ends()
        port = fleet.url.rpartition(":")[2]
        async with several(tmp_path / "second", "--drain-s", "3", port=port) as second:
            assert second.process.returncode is None
            assert not orphans & await second.pids()
        await until(lambda: all(map(is_gone, orphans)), within_s=20)


async def test_a_port_that_is_taken_is_refused_also_by_a_second_parent(tmp_path):
    (tmp_path / "second").mkdir()
    async with several(tmp_path) as fleet:
        port = fleet.url.rpartition(":")[2]
        with socket.socket() as alone, pytest.raises(OSError, match="in use"):
            alone.bind(("127.0.0.1", int(port)))
        async with several(tmp_path / "second", port=port) as second:
            assert await second.ends() == 1


@pytest.mark.parametrize("by", ["another parent", "somebody who shares it with nobody"])
async def test_a_port_that_will_not_come_free_is_refused_at_once(tmp_path, by):
    (tmp_path / "second").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        if by == "another parent":
            fleet = await stack.enter_async_context(several(tmp_path))
            await fleet.pids()
            url = fleet.url
        else:
            url = await stack.enter_async_context(serving(Engine("w0").app))
        port = url.rpartition(":")[2]
        # Longer than this test may take.
        async with several(tmp_path / "second", "--drain-s", "300", port=port) as second:
            assert await second.ends() == 1


def value(text: str, name: str, **labels: str) -> float | None:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next((s.value for s in samples if s.name == name and s.labels == labels), None)


async def test_metrics_are_summed_and_a_killed_process_takes_none_with_it(tmp_path):
    answered = "lorafleet_router_requests_total"
    labels = {"route": "/v1/chat/completions", "status": "200", "code": ""}
    async with several(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        await routable(fleet, pids)
        clients = await fleet.clients(stack, pids)
        before = value(await fleet.get("/all"), answered, **labels)
        for client, count in zip(clients.values(), (3, 4), strict=True):
            for _ in range(count):
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for client in clients.values():
            text = await fleet.get("/all", client)
            assert value(text, answered, **labels) == before + 7
            assert value(text, "lorafleet_router_processes") == 2
            assert value(text, "lorafleet_router_catalog_revision") == 1
        victim, survivor = sorted(pids)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: is_gone(victim))
        assert value(await fleet.get("/all", clients[survivor]), answered, **labels) == before + 7
        await fleet.pids(without=victim)
        text = await fleet.get("/all")
        assert value(text, answered, **labels) == before + 7
        assert value(text, "lorafleet_router_processes") == 2


class Process:
    """One process's metrics and its place among the others, in this one."""

    def __init__(self, folder: Path, slot: int) -> None:
        self.registry = CollectorRegistry()
        self.count = Counter("count", 'a "c" of\n two lines', ("by",), registry=self.registry)
        self.took = Histogram("took", "t", buckets=(1, 2), registry=self.registry)
        self.revision = Gauge("lorafleet_router_catalog_revision", "r", registry=self.registry)
        self.waiting = Gauge("lorafleet_router_waiting_requests", "w", registry=self.registry)
        self.place = Siblings(folder, slot, metrics=lambda: generate_latest(self.registry))


@contextlib.asynccontextmanager
async def process(folder: Path, slot: int):
    one = Process(folder, slot)
    await one.place.start()
    try:
        yield one
    finally:
        await one.place.close()


async def test_counts_and_queues_add_up_and_of_one_revision_the_largest_is_shown(tmp_path):
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
        assert value(text, "count_total", by=odd) == 2
        assert (value(text, "count_total", by="x"), value(text, "count_total", by="y")) == (5, 1)
        assert [value(text, "took_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
        assert value(text, "took_sum") == 2.0
        assert value(text, "lorafleet_router_catalog_revision") == 7
        assert value(text, "lorafleet_router_waiting_requests") == 12


async def test_what_one_process_shows_is_what_prometheus_client_writes(tmp_path):
    async with process(tmp_path, 0) as a:
        a.count.labels("x").inc(1_000_000)
        a.took.observe(0.25)
        a.waiting.set(float("inf"))
        told = await a.place.metrics()
        assert told == siblings._OWN.format(processes="1.0").encode() + generate_latest(a.registry)


async def test_what_began_at_two_times_began_at_the_earlier_one(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1) as b:
        for one in (a, b):
            one.count.labels("x").inc()
        earlier = min(one.registry.get_sample_value("count_created", {"by": "x"}) for one in (a, b))
        for one in (a, b):
            assert value((await one.place.metrics()).decode(), "count_created", by="x") == earlier


async def test_what_only_another_process_has_is_shown_while_that_is_there(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            b.count.labels("x").inc(10)
            b.took.observe(0.5)
            Counter("only", "o", registry=b.registry).inc(5)
            text = (await a.place.metrics()).decode()
            assert value(text, "only_total") == 5
            assert "# HELP only_total o\n# TYPE only_total counter\nonly_total 5.0\n" in text
        text = (await a.place.metrics()).decode()
        assert value(text, "only_total") is None
        assert (value(text, "count_total", by="x"), value(text, "took_bucket", le="1.0")) == (10, 1)


async def test_what_was_shown_once_never_falls_whoever_is_asked_and_whoever_went(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            a.count.labels("x").inc(1)
            b.count.labels("x").inc(10)
            b.waiting.set(3)
            assert value((await b.place.metrics()).decode(), "count_total", by="x") == 11
        gone = (await a.place.metrics()).decode()
        assert value(gone, "count_total", by="x") == 11
        assert value(gone, "lorafleet_router_waiting_requests") == 0
        for _ in range(3):
            async with process(tmp_path, 1) as again:
                again.count.labels("x").inc(100)
                assert value((await a.place.metrics()).decode(), "count_total", by="x") in (111, 211, 311)
                assert value((await again.place.metrics()).decode(), "count_total", by="x") in (111, 211, 311)
        assert value((await a.place.metrics()).decode(), "count_total", by="x") == 311


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
async def test_counts_of_those_who_went_stay_while_their_record_cannot_be_kept(tmp_path, trouble):
    async def shown() -> float | None:
        return value((await a.place.metrics()).decode(), "count_total", by="x")

    async with process(tmp_path, 0) as a:
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
            assert value((await other.place.metrics()).decode(), "count_total", by="x") == 1111


async def test_counts_of_one_who_went_stay_though_another_kept_the_record_until_nobody_could(tmp_path):
    async with process(tmp_path, 0) as a:
        async with process(tmp_path, 1) as b:
            b.count.labels("x").inc(10)
            await b.place.metrics()
            with no_writing(tmp_path):
                b.count.labels("x").inc(100)
                assert value((await a.place.metrics()).decode(), "count_total", by="x") == 110
        with no_writing(tmp_path):
            assert value((await a.place.metrics()).decode(), "count_total", by="x") == 110


async def test_the_record_is_written_whole_and_by_nobody_while_another_has_its_lock(tmp_path):
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


async def test_a_question_that_nobody_knows_has_no_answer_and_is_in_the_log(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1):
        with capture_logs() as logs:
            assert await a.place.ask("unheard-of") == {1: None}
        assert [each["event"] for each in logs] == ["a sibling got no answer", "a sibling does not answer"]


async def test_one_that_waits_no_longer_for_an_answer_is_no_trouble(tmp_path):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_question):
        asked.set()
        await go_on.wait()
        return b"too late"

    def serving_it():
        return [task for task in asyncio.all_tasks() if "_serve" in repr(task)]

    unexpected = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unexpected.append(context))
    a, b = (Siblings(tmp_path, slot, metrics=bytes, answers={"slow": slow}) for slot in (0, 1))
    await b.start()
    with capture_logs() as logs:
        asking = asyncio.create_task(a.ask("slow", within_s=60.0))
        await asyncio.wait_for(asked.wait(), patience(5))
        asking.cancel()
        await asyncio.wait([asking])
        assert serving_it()
        go_on.set()
        await until(lambda: not serving_it())
    await b.close()
    assert not logs
    assert not unexpected


async def test_an_answer_is_waited_for_no_longer_than_the_asker_says(tmp_path):
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def hang(_reader, writer):
        await go_on.wait()
        writer.close()
        gone.set()

    hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
    async with within(5):
        assert await Siblings(tmp_path, 0, metrics=bytes).ask("anything", within_s=0.01) == {1: None}
    hanging.close()
    go_on.set()
    await gone.wait()


async def test_a_process_that_does_not_answer_holds_up_nobody_and_its_counts_stay(tmp_path):
    async with process(tmp_path, 0) as a, process(tmp_path, 1) as b:
        b.count.labels("x").inc(10)
        await a.place.metrics()
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def hang(_reader, writer):
            asked.set()
            await go_on.wait()
            writer.close()

        (tmp_path / "1.sock").unlink()
        hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
        assert value((await a.place.metrics()).decode(), "count_total", by="x") == 10
        assert asked.is_set()
        go_on.set()
        hanging.close()
        await hanging.wait_closed()


async def test_an_answer_that_breaks_off_is_none(tmp_path):
    async with process(tmp_path, 0) as a:

        async def break_off(reader, writer):
            await reader.read()
            writer.write((100).to_bytes(8, "big") + b"half of it")
            writer.close()

        broken = await asyncio.start_unix_server(break_off, tmp_path / "1.sock")
        assert await a.place.ask("anything") == {1: None}
        broken.close()


async def test_decisions_of_a_process_that_does_not_answer_are_said_to_be_missing(tmp_path):
    async def break_off(reader, writer):
        await reader.read()
        writer.close()

    async with fleet_of(Engine("w0")) as (client, _, here), fleet_of(Engine("w0")) as (other, _, there):
        for asked in (client, other):
            assert (await asked.post("/v1/chat/completions", json=CHAT)).status_code == 200
        places = [Siblings(tmp_path, n, metrics=bytes, answers=answers(parts)) for n, parts in enumerate((here, there))]
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


def test_every_gauge_is_known_to_be_a_sum_or_the_same_everywhere():
    gauges = {family.name for family in Metrics().registry.collect() if family.type == "gauge"}
    assert gauges - siblings.SUMMED - siblings.LARGEST == set(), "say in router/siblings.py how it adds up"
