"""Who asks: a client of our own that costs less than any router, and an ordinary one."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import httptools

from benchmarks.relay.prompts import Requests
from benchmarks.row_runner import RowFailed

_DONE = b"data: [DONE]\n\n"
# uvloop's own time() moves in milliseconds.
_clock = time.perf_counter


@dataclass(slots=True)
class LoadOutcome:
    """Of one run. latencies_s: from a request to the end of its answer, in the order of the ends."""

    requests: int = 0
    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _LoadRun:
    """What the connections of one run share. `left` requests are still to be sent."""

    next: Callable[[], bytes]
    events: int
    left: int
    open: int
    over: asyncio.Future[None]
    outcome: LoadOutcome = field(default_factory=LoadOutcome)

    def closed(self) -> None:
        self.open -= 1
        if not self.open and not self.over.done():
            self.over.set_result(None)


class _Lane(asyncio.Protocol):
    """One connection: the next request goes out when the answer to the last is complete.

    events  that a streamed answer has; 0: it is not streamed
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self._run: _LoadRun | None = None
        self._parser: Any = None
        self._is_answered = True
        self._began = 0.0
        self._events = 0
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, run: _LoadRun) -> None:
        self._run = run
        self._ask()

    def _ask(self) -> None:
        run = self._run
        assert run is not None
        if not run.left:
            self._run = None
            run.closed()
            return
        run.left -= 1
        # A parser each: one that has seen an answer without a length would take what follows for its body.
        self._parser = httptools.HttpResponseParser(self)
        self._is_answered = False
        self._events, self._end = 0, b""
        self._began = _clock()
        self.transport.write(run.next())

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(repr(exc))
            self.transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            if not self._is_answered:
                run.outcome.failures.append("connection closed in the middle of an answer")
            run.closed()

    def on_body(self, body: bytes) -> None:
        run = self._run
        if run is not None and run.events:
            # An event may end across two pieces.
            self._events += body.count(b"\n\n") + (self._end[-1:] == b"\n" and body[:1] == b"\n")
            self._end = (self._end + body)[-len(_DONE) :] if len(body) < len(_DONE) else body[-len(_DONE) :]
        else:
            self._end = body

    def on_message_complete(self) -> None:
        run = self._run
        assert run is not None
        self._is_answered = True
        run.outcome.latencies_s.append(_clock() - self._began)
        run.outcome.requests += 1
        if self._parser.get_status_code() != 200:
            self._fail(f"{self._parser.get_status_code()} {self._end[:300]!r}")
        elif run.events and (self._events != run.events or self._end != _DONE):
            self._fail(f"a stream of {self._events} events, not {run.events}, that ends with {self._end!r}")
        # Not in the parser's own callback: it is about to be replaced.
        asyncio.get_running_loop().call_soon(self._ask)

    def _fail(self, why: str) -> None:
        if self._run is not None:
            self._run.outcome.failures.append(why)


class LoadClient:
    """Keep-alive connections to one contender."""

    def __init__(self, name: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._name = name
        self._port = port
        self._tls = tls
        self._lanes: list[_Lane] = []

    async def run(
        self, requests: Requests, *, total: int, connections: int, over_s: float = 0.0, most_s: float = 120.0
    ) -> LoadOutcome:
        """Closed loop, `total` requests in all; raises RowFailed if any was not answered as it should be.

        over_s  the connections begin spread over so many seconds
        """
        outcome = await self.attempt(requests, total=total, connections=connections, over_s=over_s, most_s=most_s)
        if outcome.failures:
            count, first = len(outcome.failures), outcome.failures[0]
            raise RowFailed(f"{self._name}: {count} of {total} requests failed; the first: {first}")
        return outcome

    async def attempt(
        self, requests: Requests, *, total: int, connections: int, over_s: float = 0.0, most_s: float = 120.0
    ) -> LoadOutcome:
        """The same, with failures counted; those that take longer than `most_s` are among them."""
        loop = asyncio.get_running_loop()
        await self._connect(connections)
        ask = requests.ask
        # The first event has the role, the last but one the reason why it ends.
        events = ask.chunks + 3 if ask.chunks else 0
        run = _LoadRun(requests.next, events, total, connections, loop.create_future())
        start, began = loop.time(), _clock()
        for number, lane in enumerate(self._lanes[:connections]):
            if over_s:
                loop.call_at(start + over_s * number / connections, lane.start, run)
            else:
                lane.start(run)
        try:
            await asyncio.wait_for(run.over, most_s)
        except TimeoutError:
            run.outcome.failures += ["no whole answer in time"] * (total - run.outcome.requests)
            self.close()
        run.outcome.wall_s = _clock() - began
        return run.outcome

    async def get(self, path: str, *, every_s: float, until: asyncio.Event) -> list[float]:
        """Seconds that each GET took, one after the other with a pause in between."""
        loop = asyncio.get_running_loop()
        _, lane = await loop.create_connection(_Lane, "127.0.0.1", self._port, ssl=self._tls)
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        taken: list[float] = []
        while not until.is_set():
            run = _LoadRun(lambda: request, 0, 1, 1, loop.create_future())
            lane.start(run)
            await run.over
            taken += run.outcome.latencies_s
            await asyncio.sleep(every_s)
        lane.transport.close()
        return taken

    async def _connect(self, connections: int) -> None:
        loop = asyncio.get_running_loop()
        self._lanes = [lane for lane in self._lanes if not lane.transport.is_closing()]
        while len(self._lanes) < connections:
            _, lane = await loop.create_connection(_Lane, "127.0.0.1", self._port, ssl=self._tls)
            self._lanes.append(lane)

    def close(self) -> None:
        """Leave."""
        for lane in self._lanes:
            lane.transport.abort()
        self._lanes = []


async def first_chunks_s(port: int, requests: Requests, *, streams: int, turns: int) -> list[float]:
    """Seconds to each stream's first data, by aiohttp on kept connections; all streams of a turn begin at once.

    The first turn, on new connections, is not counted.
    """
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    found: list[float] = []

    async def one(session: aiohttp.ClientSession, body: bytes) -> float:
        began = _clock()
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            first = await answer.content.readany()
            taken = _clock() - began
            rest = await answer.read()
        if answer.status != 200 or not (first + rest).endswith(_DONE):
            raise RowFailed(f"port {port}: {answer.status} {(first + rest)[-300:]!r}")
        return taken

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn in range(turns + 1):
            bodies = [requests.next().partition(b"\r\n\r\n")[2] for _ in range(streams)]
            taken = await asyncio.gather(*(one(session, body) for body in bodies))
            found += taken if turn else []
    return found


async def new_connections_s(port: int, requests: Requests, *, streams: int) -> list[float]:
    """Seconds from the connect to the first event of streams that begin at once, each on a new connection."""
    loop = asyncio.get_running_loop()
    lanes = [_NewStream(requests.next(), loop.create_future()) for _ in range(streams)]
    await asyncio.gather(*(loop.create_connection(partial(_same, lane), "127.0.0.1", port) for lane in lanes))
    return [await asyncio.wait_for(lane.first_s, 60) for lane in lanes]


def _same(lane: "_NewStream") -> "_NewStream":
    return lane


class _NewStream(asyncio.Protocol):
    """One stream on one connection, which ends with it. `first_s` is set once the answer is complete."""

    def __init__(self, request: bytes, first_s: "asyncio.Future[float]") -> None:
        self._request = request
        self.first_s = first_s
        self._began = _clock()
        self._taken_s = 0.0
        self._data = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._taken_s and b"data:" in self._data:
            self._taken_s = _clock() - self._began
        if self._taken_s and _DONE in self._data:
            self.first_s.set_result(self._taken_s)
            self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.first_s.done():
            self.first_s.set_exception(RowFailed(f"a stream on a new connection ended with {self._data[-300:]!r}"))
