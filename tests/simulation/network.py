"""A network between simulated machines: delays, lost packets, partitions, resets, slow readers and full buffers.

Bytes of a connection arrive in order or not at all, as with TCP. A lost packet is a later one. Bytes into a partition
wait for its end; where that takes too long, or the other process has ended, the connection is reset.
"""

import asyncio
import errno
import re
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.simulation.determinism import running_node
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.nodes import Node

Address = tuple[str, int]

_LOCAL_S = 0.00005
_NEXT_S = 1e-7
_RETRANSMIT_S = 0.2
# The kernel gives a connection up after so long without an answer (Linux tcp_user_timeout, shortened).
_GIVE_UP_S = 120.0
_HIGH_WATER = 64 * 1024
_FIRST_PORT = 40_000
_REQUEST = re.compile(rb"([A-Z]+) ([^ ?]+)[^ ]* HTTP/1\.1\r\n")


@dataclass(slots=True)
class Weather:
    """How well the network works: seconds of delay, their spread, and the share of packets sent twice."""

    delay_s: float = 0.0003
    jitter_s: float = 0.0003
    loss: float = 0.0


class SimulatedSocket:
    """The socket of a simulated connection or listener, for those who ask for its names or set options."""

    family = 2
    type = 1
    proto = 6

    def __init__(self, local: Address, remote: Address | None, number: int) -> None:
        self._local, self._remote, self._number = local, remote, number

    def getsockname(self) -> Address:
        return self._local

    def getpeername(self) -> Address:
        if self._remote is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self._remote

    def setsockopt(self, *_option: object) -> None:
        """Options change nothing here."""

    def getsockopt(self, *_option: object) -> int:
        return 0

    def fileno(self) -> int:
        return self._number


class Network:
    """All connections and listeners. Hosts are IPv4 addresses; `cut` has the pairs between which nothing arrives."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.weather = Weather()
        self.listeners: dict[Address, SimulatedServer] = {}
        self.shared: dict[Address, list[Address]] = {}
        """An address of several listeners, as a Service of Kubernetes: each connection goes to one that listens."""
        self.distance_s: dict[frozenset[str], float] = {}
        """Further seconds that a packet takes between two hosts."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """(process, method and path) -> HTTP requests that it has begun to send."""
        self.cut: set[frozenset[str]] = set()
        self._held: dict[frozenset[str], list[Callable[[], None]]] = {}
        self._ports = count(_FIRST_PORT)
        self._numbers = count(10_000)

    def number(self) -> int:
        """A number for a simulated socket's descriptor."""
        return next(self._numbers)

    def delay_s(self, one: str, other: str) -> float:
        """Seconds that a packet takes between two hosts now."""
        if one == other:
            return _LOCAL_S
        chance, weather = self.loop.chance, self.weather
        delay_s = weather.delay_s + weather.jitter_s * chance.expovariate(1.0)
        delay_s += self.distance_s.get(frozenset((one, other)), 0.0)
        while weather.loss and chance.random() < weather.loss:
            delay_s += _RETRANSMIT_S
        return delay_s

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cut

    def send(self, one: str, other: str, deliver: Callable[[], None]) -> None:
        """Call `deliver` when the network lets it through."""
        if self.is_cut(one, other):
            self._held.setdefault(frozenset((one, other)), []).append(deliver)
        else:
            deliver()

    def partition(self, one: str, other: str) -> None:
        """Let nothing through between two hosts, until `heal`."""
        self.cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Let everything through again; what was held arrives now."""
        pair = frozenset((one, other))
        self.cut.discard(pair)
        for deliver in self._held.pop(pair, ()):
            deliver()

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> "SimulatedServer":
        """A listener of the running node. Raises OSError where the address is taken."""
        node = running_node.get()
        assert node is not None, "only simulated processes listen"
        address = (node.host, port)
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"{address} is taken by {self.listeners[address].node.name}")
        server = SimulatedServer(self, factory, address, node)
        self.listeners[address] = server
        node.listeners.append(server)
        del host
        return server

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[asyncio.Transport, Any]:
        """Open a connection from the running node. Raises OSError where nobody listens."""
        node = running_node.get()
        assert node is not None, "only simulated processes connect"
        loop = self.loop
        target = node.host if host in {"127.0.0.1", "localhost"} else host
        if behind := self.shared.get((target, port)):
            target, port = loop.chance.choice([each for each in behind if each in self.listeners] or behind)
        opened: asyncio.Future[SimulatedServer] = loop.create_future()

        def arrive() -> None:
            """The first packet is at the other host."""
            if opened.done():
                return
            if (server := self.listeners.get((target, port))) is None:
                opened.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, f"connect to {target}:{port} refused"))
            else:
                opened.set_result(server)

        round_trip_s = self.delay_s(node.host, target) + self.delay_s(target, node.host)
        self.send(node.host, target, lambda: loop.call_exactly_at(loop.time() + round_trip_s, arrive))
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                server = await opened
        except TimeoutError as exc:
            raise OSError(errno.ETIMEDOUT, f"connect to {target}:{port} timed out") from exc
        protocol = factory()
        mine = Stream(self, node, (node.host, next(self._ports)), (target, port), protocol, copy_context())
        theirs = Stream(self, server.node, (target, port), mine.local, None, server.context.copy())
        mine.peer, theirs.peer = theirs, mine
        theirs.call_soon(theirs.accept, server.factory)
        protocol.connection_made(mine)
        return mine, protocol


class SimulatedServer(asyncio.AbstractServer):
    """A listener at one address."""

    def __init__(self, network: Network, factory: Callable[[], Any], address: Address, node: Node) -> None:
        self._network = network
        self.factory = factory
        self.address = address
        self.node = node
        self.context = copy_context()

    @property
    def sockets(self) -> tuple[SimulatedSocket, ...]:
        return (SimulatedSocket(self.address, None, self._network.number()),)

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    def is_serving(self) -> bool:
        return self._network.listeners.get(self.address) is self

    async def wait_closed(self) -> None:
        """Nothing is left to close."""


class Stream(asyncio.Transport):
    """One end of a connection."""

    peer: "Stream"

    def __init__(
        self, network: Network, node: Node, local: Address, remote: Address, protocol: Any, context: Context
    ) -> None:
        self._socket = SimulatedSocket(local, remote, network.number())
        super().__init__({"socket": self._socket, "sockname": local, "peername": remote})
        self._network, self._node = network, node
        self.local, self.remote = local, remote
        self._protocol, self._context = protocol, context
        self._is_reading = True
        self._inbound: deque[bytes | BaseException | None] = deque()
        self._unread = 0
        self._in_flight = 0
        self.set_write_buffer_limits()
        self._is_paused = self._is_closing = self._is_lost = self._has_written_eof = False
        self._arrives_at = 0.0
        node.streams[self] = None

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in the process of this end."""
        self._network.loop.call_soon(callback, *args, context=self._context)

    def accept(self, factory: Callable[[], Any]) -> None:
        """The listener's process takes the connection."""
        if self._is_lost:
            return
        self._protocol = factory()
        self._protocol.connection_made(self)
        self._read()

    # What a protocol calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data or self._is_lost or self._is_closing or self._has_written_eof:
            return
        chunk = bytes(data)
        if (request := _REQUEST.match(chunk)) is not None:
            self._network.requests[self._node.name, f"{request[1].decode()} {request[2].decode()}"] += 1
        self._in_flight += len(chunk)
        self._send(chunk)
        if not self._is_paused and self._in_flight > self._high:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if not self._has_written_eof:
            self._has_written_eof = True
            self._send(None)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self.write_eof()
        self.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = True
            self._send(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            self.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._in_flight

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    # What the network and the simulation call.

    def reset(self) -> None:
        """Break the connection for both ends, as a middlebox does."""
        error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        for end in (self, self.peer):
            end._is_closing = True
            end.call_soon(end._lose, error)

    def leave(self) -> None:
        """The process of this end has been killed: the kernel closes its side."""
        self._is_lost = self._is_closing = True
        self._send(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _send(self, item: bytes | BaseException | None) -> None:
        network, peer = self._network, self.peer
        loop = network.loop

        def deliver() -> None:
            # Strictly later than what was sent before: timers of one time run in any order.
            at = max(self._arrives_at + _NEXT_S, loop.time() + network.delay_s(self.local[0], self.remote[0]))
            self._arrives_at = at
            loop.call_exactly_at(at, peer._take, item, context=peer._context)

        network.send(self.local[0], self.remote[0], deliver)

    def _take(self, item: bytes | BaseException | None) -> None:
        """Something has arrived at this end."""
        if self._is_lost or (self._is_closing and not isinstance(item, BaseException)):
            if isinstance(item, bytes) and not self._is_lost:
                self.peer._acknowledge(len(item))
            elif isinstance(item, bytes):  # nobody reads here any more
                self.peer._is_closing = True
                self.peer.call_soon(self.peer._lose, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            return
        if isinstance(item, BaseException):
            self._inbound.clear()
        self._inbound.append(item)
        self._read()

    def _read(self) -> None:
        """Hand on what has arrived, while the protocol reads."""
        while self._inbound and self._protocol is not None and not self._is_lost:
            item = self._inbound[0]
            if isinstance(item, BaseException):
                self._inbound.clear()
                self._is_closing = True
                self._lose(item)
                return
            if not self._is_reading or self._is_closing:
                return
            self._inbound.popleft()
            if item is None:
                if not self._protocol.eof_received():
                    self.close()
            else:
                self.peer._acknowledge(len(item))
                self._protocol.data_received(item)

    def _acknowledge(self, size: int) -> None:
        """The other end has read so many bytes."""
        self._in_flight -= size
        if self._is_paused and self._in_flight <= self._low and not self._is_lost:
            self._is_paused = False
            self.call_soon(self._resume_writing)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._is_paused:
            self._protocol.resume_writing()

    def _lose(self, error: BaseException | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._node.streams.pop(self, None)
        if self._protocol is not None:
            self._protocol.connection_lost(error)
