"""Several router processes on one port: what their parent starts, watches and stops, and what they serve meanwhile."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from lorafleet.keys.key_files import hash_key
from tests.patience import patience, until, within
from tests.router.doubles import CHAT, AgentDouble, EngineDouble, chunk, sample_value
from tests.router.variables import JOIN_WITHIN_S, REFUSES_TO_START
from tests.serving import client_of, serving

pytestmark = pytest.mark.fleet

STREAM = CHAT | {"stream": True}
ROUTERS, BARE = "tests.router.router_in_processes", "tests.router.app_in_processes"


@dataclass
class SupervisedRouters:
    """A supervisor and its processes, seen from outside."""

    process: asyncio.subprocess.Process
    folder: Path
    engine: EngineDouble = field(default_factory=lambda: EngineDouble("w0"))
    control: AgentDouble = field(default_factory=AgentDouble)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{(self.folder / 'port').read_text()}"

    async def serves(self) -> None:
        """Returns once a process listens, or once the parent has ended."""
        file = self.folder / "port"
        await until(lambda: file.exists() or self.process.returncode is not None, within_s=30)

    async def get(self, path: str, client: httpx.AsyncClient | None = None):
        """On a connection of its own, so that the kernel chooses the process anew, unless a client is given."""
        async with contextlib.AsyncExitStack() as stack:
            if client is None:
                client = await stack.enter_async_context(client_of(self.url))
            answer = await client.get(path)
            answer.raise_for_status()
            return answer.json() if answer.headers.get("content-type") == "application/json" else answer.text

    async def clients(self, stack: contextlib.AsyncExitStack, pids: set[int]) -> dict[int, httpx.AsyncClient]:
        """One client for each process, connected to that process."""
        found: dict[int, httpx.AsyncClient] = {}
        async with within(20):
            while found.keys() != pids:
                client = await stack.enter_async_context(client_of(self.url))
                found.setdefault((await self.get("/who", client))["pid"], client)
        return found

    async def pids(self, *, without: int = 0, count: int = 2) -> set[int]:
        """Wait until this many processes serve; returns them."""
        found: set[int] = set()
        async with within(20):
            while len(found) < count:
                found |= {(await self.get("/who"))["pid"]} - {without}
        return found

    async def ends(self) -> int:
        async with within(20):
            return await self.process.wait()

    async def refuses(self) -> None:
        """Wait until no process listens."""
        async with within(20):
            while True:
                try:
                    await self.get("/health")
                except httpx.ConnectError:
                    return
                except httpx.TransportError:  # it came at the very moment in which the port was closed
                    continue

    def left(self) -> list[Path]:
        """Temporary files that are still there."""
        return list((self.folder / "tmp").iterdir())


@contextlib.asynccontextmanager
async def several(
    folder: Path, *flags: str, of: str = BARE, processes: int = 2, port: str = "0", log=None, **environment: str
):
    """A supervisor of this many processes in its own folder; its bare processes do not drain."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", of, str(processes), "--port", port, "--port-file", str(folder / "port"), *flags),
        env={**os.environ, "TMPDIR": str(temporary), **environment},
        stdout=log,
        start_new_session=True,
    )
    try:
        yield SupervisedRouters(process, folder)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # which drains for no time
            await process.wait()


@contextlib.asynccontextmanager
async def bare(folder: Path, *flags: str, **more):
    """Processes of a small app, once one of them listens or their parent has ended."""
    async with several(folder, *flags, **more) as fleet:
        await fleet.serves()
        yield fleet


@contextlib.asynccontextmanager
async def routers(folder: Path, *flags: str, drain_s: float = 0, silent: bool = False, **environment: str):
    """Two real router processes in front of one engine double, once both can route.

    silent  the agent does not answer yet; then once both listen
    """
    engine, control = EngineDouble("w0"), AgentDouble(silent=silent)
    async with contextlib.AsyncExitStack() as stack:
        control.workers["w0"] = await stack.enter_async_context(serving(engine.app))
        control.url = await stack.enter_async_context(serving(control.app))
        usual = ("--orchestrator-url", control.url, "--tokenizer", "off", "--drain-s", str(drain_s))
        often = ("--metadata-poll-s", "0.2", "--catalog-poll-s", "0.2")
        fleet = await stack.enter_async_context(several(folder, *usual, *often, *flags, of=ROUTERS, **environment))
        fleet.engine, fleet.control = engine, control
        stack.callback(engine.go_on.set)
        await fleet.serves()
        async with contextlib.AsyncExitStack() as asking:
            for client in (await fleet.clients(asking, await fleet.pids())).values():
                await until(lambda client=client: silent or is_ready(client))
        yield fleet


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    """Two routers, for tests that kill one of them and wait for its replacement."""
    async with routers(tmp_path_factory.mktemp("routers"), **{JOIN_WITHIN_S: str(patience(600))}) as fleet:
        yield fleet


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await until(lambda: is_gone(pid))


async def begun(client: httpx.AsyncClient, stack: contextlib.AsyncExitStack):
    """A router's stream whose first piece is here and whose second waits for the engine's `go_on`."""
    answer = await stack.enter_async_context(client.stream("POST", "/v1/chat/completions", json=STREAM))
    pieces = answer.aiter_bytes()
    assert (answer.status_code, await anext(pieces)) == (200, chunk("tiny-qwen", "one"))
    return pieces


async def all_begun(fleet: SupervisedRouters, pids: set[int], stack: contextlib.AsyncExitStack):
    """A bare stream of each process, whose first piece is here and whose second waits for `let_end`."""
    streams = []
    for client in (await fleet.clients(stack, pids)).values():
        answer = await stack.enter_async_context(client.stream("GET", "/stream"))
        streams.append(answer.aiter_bytes())
        assert await anext(streams[-1]) == b"one"
    return streams


async def let_end(fleet: SupervisedRouters, streams) -> None:
    """End all streams of `all_begun`, and see that each is whole."""
    (fleet.folder / "go-on").touch()
    assert [await rest(stream) for stream in streams] == [b"two"] * len(streams)


async def rest(pieces) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_every_process_holds_requests_until_it_knows_a_worker(tmp_path):
    patient = ("--first-sync-wait-s", "600")
    async with routers(tmp_path, *patient, silent=True) as fleet, contextlib.AsyncExitStack() as stack:
        clients = await fleet.clients(stack, await fleet.pids())
        asks = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for client in clients.values()]
        before = fleet.control.unanswered
        await until(lambda: fleet.control.unanswered >= before + 4)
        assert not [task for task in asks if task.done()]
        fleet.control.silent = False
        assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200, 200]


async def test_every_process_serves_the_one_port_under_its_own_name(tmp_path):
    async with bare(tmp_path, "--router-id", "edge", processes=3) as fleet, contextlib.AsyncExitStack() as stack:
        clients = await fleet.clients(stack, await fleet.pids(count=3))
        answers = [await fleet.get("/who", client) for client in clients.values()]
        assert sorted(answer_of["id"] for answer_of in answers) == ["edge-0", "edge-1", "edge-2"]
        for answer_of, client in zip(answers, clients.values(), strict=True):
            others = await fleet.get("/ask", client)
            assert {other["question"] for other in others} == {"hello"}
            assert {other["slot"] for other in others} == {0, 1, 2} - {answer_of["slot"]}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_process_is_restarted_and_no_other_request_fails(shared):
    fleet = shared
    async with contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        victim, survivor = sorted(pids)
        client = (await fleet.clients(stack, pids))[survivor]
        fleet.engine.go_on.clear()
        stream = await begun(client, stack)
        await kill(victim)
        seen: set[int] = set()
        async with within(20):
            # Each on a connection of its own, from the death on and past the newcomer's first.
            while len(seen) < 2:
                async with client_of(fleet.url) as fresh:
                    assert (await fresh.post("/v1/chat/completions", json=CHAT)).status_code == 200
                    assert (await fresh.get("/ready")).status_code == 200
                    seen.add((await fleet.get("/who", fresh))["pid"])
        assert victim not in seen
        assert survivor in seen
        fleet.engine.go_on.set()
        assert (await rest(stream)).endswith(b"data: [DONE]\n\n")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_replacement_gets_no_connection_before_it_can_route(shared):
    fleet = shared
    async with contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        victim, survivor = sorted(pids)
        client = (await fleet.clients(stack, pids))[survivor]
        fleet.control.down = True
        try:
            await kill(victim)
            # The newcomer has begun, and answers its sibling.
            await until(lambda: fleet.get("/siblings", client))
            for _ in range(20):
                async with client_of(fleet.url) as fresh:
                    assert (await fresh.post("/v1/chat/completions", json=CHAT)).status_code == 200
        finally:
            fleet.control.down = False
        assert len(await fleet.pids(without=victim)) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_are_summed_and_survive_a_killed_process(shared):
    fleet, labels = shared, {"route": "/v1/chat/completions", "status": "200", "code": ""}

    async def shown(client: httpx.AsyncClient) -> tuple[float | None, ...]:
        """(answered requests, processes, revision of the catalog)"""
        text = await fleet.get("/all", client)
        names = ("lorafleet_router_processes", "lorafleet_router_catalog_revision")
        answered = sample_value(text, "lorafleet_router_requests_total", **labels)
        return answered or 0, *(sample_value(text, name) for name in names)

    async def shows(client: httpx.AsyncClient, *expected: float) -> None:
        # A sibling that was slow to answer is left out this once.
        async def as_expected() -> bool:
            found.append(await shown(client))
            return found[-1] == expected

        found: list = []
        try:
            await until(as_expected)
        except TimeoutError:
            assert found[-1] == expected

    async with contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        clients = await fleet.clients(stack, pids)
        (before, *_) = await shown(next(iter(clients.values())))
        for client, count in zip(clients.values(), (3, 4), strict=True):
            for _ in range(count):
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for client in clients.values():
            await shows(client, before + 7, 2, fleet.control.revision)
        victim, survivor = sorted(pids)
        await kill(victim)
        assert (await shown(clients[survivor]))[0] == before + 7
        others = await fleet.clients(stack, await fleet.pids(without=victim))
        for client in others.values():
            await shows(client, before + 7, 2, fleet.control.revision)


async def test_a_keys_limits_hold_over_all_processes(tmp_path):
    keys, limits = tmp_path / "keys.yaml", {"requests_per_minute": 6, "concurrent_requests": 2}
    entry = {"sha256": hash_key("mine"), "tenant": "mine", "scopes": ["infer"], "limits": limits}
    agents = {"sha256": hash_key(AgentDouble.worker_key), "scopes": ["worker"]}
    keys.write_text(json.dumps({"keys": [entry, agents]}))
    async with routers(tmp_path / "one", "--key-files", str(keys)) as fleet, contextlib.AsyncExitStack() as stack:
        clients = await fleet.clients(stack, await fleet.pids())
        for client in clients.values():
            client.headers["authorization"] = "Bearer mine"
        (there, answer_of), (_, other) = clients.items()
        left = []
        for client in (answer_of, other, answer_of):
            answer = await client.post("/v1/chat/completions", json=CHAT)
            left.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
        assert left == [(200, "5"), (200, "4"), (200, "3")]
        fleet.engine.go_on.clear()
        _lost, kept = await begun(answer_of, stack), await begun(other, stack)
        second = await stack.enter_async_context(client_of(fleet.url, headers=other.headers))
        refused = await second.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, "2 requests at once" in refused.text) == (429, True)
        await kill(there)
        fleet.engine.go_on.set()
        await rest(kept)
        assert (await other.post("/v1/chat/completions", json=CHAT)).status_code == 200
        refused = await other.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, "6 requests per minute" in refused.text) == (429, True)


async def test_ctrl_c_sends_one_signal_to_each_process(tmp_path):
    async with bare(tmp_path, "--grace-s", "600") as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        streams = await all_begun(fleet, pids, stack)
        # Two signals so close together may arrive as one, and hide that there were two.
        assert fleet.process.pid not in {os.getpgid(pid) for pid in pids}
        os.killpg(fleet.process.pid, signal.SIGINT)
        await fleet.refuses()
        await let_end(fleet, streams)
        await stack.aclose()
        assert await fleet.ends() == 0


async def test_a_stop_lets_every_router_finish_and_ends_with_0(tmp_path):
    async with routers(tmp_path) as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        fleet.engine.go_on.clear()
        streams = [await begun(client, stack) for client in (await fleet.clients(stack, pids)).values()]
        fleet.process.terminate()
        await fleet.refuses()
        assert fleet.process.returncode is None
        fleet.engine.go_on.set()
        for stream in streams:
            assert (await rest(stream)).endswith(b"data: [DONE]\n\n")
        await stack.aclose()
        assert await fleet.ends() == 0
        assert all(map(is_gone, pids))
        assert not fleet.left()


async def test_a_hang_up_lets_every_process_finish_and_ends_with_0(tmp_path):
    async with bare(tmp_path, "--grace-s", "600") as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        streams = await all_begun(fleet, pids, stack)
        fleet.process.send_signal(signal.SIGHUP)
        await fleet.refuses()
        assert fleet.process.returncode is None
        await let_end(fleet, streams)
        await stack.aclose()
        assert await fleet.ends() == 0
        assert all(map(is_gone, pids))
        assert not fleet.left()


async def test_processes_of_a_killed_parent_drain_and_end(tmp_path):
    async with bare(tmp_path, "--grace-s", "600") as fleet, contextlib.AsyncExitStack() as stack:
        pids = await fleet.pids()
        streams = await all_begun(fleet, pids, stack)
        fleet.process.kill()
        await fleet.ends()
        await fleet.refuses()
        await let_end(fleet, streams)
        await stack.aclose()
        await until(lambda: all(map(is_gone, pids)))
        assert not fleet.left()


async def test_a_second_signal_ends_even_a_process_that_hangs(tmp_path):
    async with bare(tmp_path, "--grace-s", "6000") as fleet, client_of(fleet.url) as client:
        pids = await fleet.pids()
        hanging = asyncio.create_task(client.get("/hang"))
        await until((tmp_path / "hangs").exists)
        fleet.process.terminate()
        await asyncio.sleep(0)
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ends() == 1
        assert all(map(is_gone, pids))
        with pytest.raises(httpx.TransportError):
            await hanging


async def test_processes_that_cannot_start_end_the_parent_with_their_status(tmp_path):
    async with bare(tmp_path, **{REFUSES_TO_START: "1"}) as fleet:
        assert await fleet.ends() == 7
        assert not fleet.left()


PARENT = """
import pathlib, sys; from router.processes import supervisor
folder = pathlib.Path(sys.argv[1]).parent
within = {"drain_s": 0.0, "stop_s": 1.0}
sys.exit(supervisor.run(sys.argv[1:], 2, host="127.0.0.1", port=0, port_file=folder / "port", **within))
"""
# Serves nothing, and ends with its parent.
PROCESS = """
import json, os, pathlib, socket
line = socket.socket(fileno=json.loads(os.environ["LORAFLEET_PROCESS"])["lifeline"])
pathlib.Path(__file__).with_name(f"{os.getpid()}.pid").touch()
line.send(b"s")
line.recv(1)
"""


async def test_a_process_that_cannot_start_is_retried_while_others_serve(tmp_path):
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


async def test_giving_up_stops_a_restarting_process_in_order(tmp_path):
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
    async with bare(tmp_path, "--port-file", str(tmp_path / "in-the-way" / "port")) as fleet:
        assert await fleet.ends() == 1


async def test_a_long_tmpdir_works(tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    async with bare(tmp_path, TMPDIR=str(deep)) as fleet, contextlib.AsyncExitStack() as stack:
        for client in (await fleet.clients(stack, await fleet.pids())).values():
            assert len(await fleet.get("/ask", client)) == 1


async def test_a_new_parent_gets_the_port_of_a_killed_parents_processes(tmp_path):
    drain_s, said = 6000, tmp_path / "said"
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(routers(tmp_path / "first", drain_s=drain_s))
        orphans, port = await fleet.pids(), fleet.url.rpartition(":")[2]
        fleet.process.kill()
        await fleet.ends()
        with said.open("wb") as log:
            flags = ("--drain-s", str(drain_s))
            second = await stack.enter_async_context(several(tmp_path / "second", *flags, port=port, log=log))
        await until(lambda: b"the port is taken" in said.read_bytes() or second.process.returncode is not None)
        assert second.process.returncode is None
        for pid in orphans:
            os.kill(pid, signal.SIGTERM)  # a second time: they drain no more
        await until(lambda: all(map(is_gone, orphans)))
        await second.serves()
        assert second.process.returncode is None
        assert not orphans & await second.pids()


@pytest.mark.parametrize("by", ["another parent", "somebody who shares it with nobody"])
async def test_a_port_of_another_program_is_refused_at_once(tmp_path, by):
    async with contextlib.AsyncExitStack() as stack:
        if by == "another parent":
            fleet = await stack.enter_async_context(bare(tmp_path / "first"))
            await fleet.pids()
            port = fleet.url.rpartition(":")[2]
            with socket.socket() as alone, pytest.raises(OSError, match="in use"):
                alone.bind(("127.0.0.1", int(port)))
        else:
            port = (await stack.enter_async_context(serving(EngineDouble("w0").app))).rpartition(":")[2]
        # Longer than this test may take.
        async with bare(tmp_path / "second", "--drain-s", "6000", port=port) as second:
            assert await second.ends() == 1
