"""ZMQ sockets between simulated processes, for KV events: as much of pyzmq as our subscribers use.

As in ZMQ, a subscriber connects again by itself, and a message that nobody receives is lost without a word.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import ClassVar

import msgspec
import zmq

from lorafleet.service.numbered_log import NumberedLog
from lorafleet.sim.events import END_OF_REPLAY, POLL_S, EventBatch
from lorafleet.sim.settings import EventsConfig
from tests.simulation.determinism import running_node
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.nodes import Node

_FIRST_DESCRIPTOR = 1_000_000


class EventBus:
    """The endpoints of all publishers, and the sockets that are connected to each."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.publishers: dict[str, SimulatedPublisher] = {}
        self.subscribers: dict[str, dict[SimulatedZmqSocket, None]] = {}
        self.lost_share = 0.0
        """Share of live messages that are lost, as at a full queue."""


class SimulatedPublisher:
    """The sim's `KVEventPublisher`, without sockets and thread. Publishes for the running node."""

    def __init__(self, config: EventsConfig, bus: EventBus) -> None:
        node = running_node.get()
        assert node is not None
        self.config, self._bus, self._node = config, bus, node
        self._sent = NumberedLog[tuple[bytes, bytes]](config.buffer_steps, last=-1)
        self._encoder = msgspec.msgpack.Encoder()
        bus.publishers[config.endpoint] = self
        if config.replay_endpoint is not None:
            bus.publishers[config.replay_endpoint] = self

    def publish(self, batch: EventBatch) -> None:
        """Number a batch, keep it for replays, and send it to all subscribers."""
        payload = self._encoder.encode(batch)
        seq = self._sent.next_number.to_bytes(8, "big")
        self._sent.add((seq, payload))
        chance = self._bus.loop.chance
        for socket in list(self._bus.subscribers.get(self.config.endpoint, ())):
            if not self._bus.lost_share or chance.random() >= self._bus.lost_share:
                socket.receive([self.config.topic.encode(), seq, payload], sender=self._node)

    def answer(self, socket: "SimulatedZmqSocket", first: int) -> None:
        """Send the buffered batches from number `first` on, and the end."""
        topic = self.config.topic.encode()
        for seq, payload in self._sent.after(first - 1):
            socket.receive([b"", topic, seq, payload], sender=self._node)
        socket.receive([b"", b"", END_OF_REPLAY, b""], sender=self._node)

    def close(self) -> None:
        for endpoint in (self.config.endpoint, self.config.replay_endpoint):
            if endpoint is not None and self._bus.publishers.get(endpoint) is self:
                del self._bus.publishers[endpoint]

    @property
    def is_alive(self) -> bool:
        return self._node.may_run


class SimulatedZmqSocket:
    """A SUB or DEALER socket of the running node."""

    def __init__(self, kind: int, bus: EventBus, number: int) -> None:
        node = running_node.get()
        assert node is not None
        self._kind, self._bus, self._number, self._node = kind, bus, number, node
        self._endpoint = ""
        self._waiting: deque[list[bytes]] = deque()
        self._arrives_at = 0.0
        self._is_closed = False

    def setsockopt(self, *_option: object) -> None:
        """Options change nothing here."""

    def subscribe(self, topic: bytes) -> None:
        """All messages come: subscribers compare topics themselves."""

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        if self._kind == zmq.SUB:
            self._bus.subscribers.setdefault(endpoint, {})[self] = None

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self._number
        return zmq.POLLIN if option == zmq.EVENTS and self._waiting else 0

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        del flags
        if not self._waiting:
            raise zmq.Again
        return self._waiting.popleft()

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        """Request a replay; without a living publisher nothing comes."""
        first = int.from_bytes(frames[1], "big")

        def arrive() -> None:
            publisher = self._bus.publishers.get(self._endpoint)
            if publisher is not None and publisher.is_alive and not self._is_closed:
                publisher.answer(self, first)

        self._bus.loop.call_later(self._bus.loop.chance.random() * POLL_S, arrive)

    def receive(self, frames: list[bytes], *, sender: Node) -> None:
        """Let a message arrive a moment later, in order."""
        loop = self._bus.loop
        at = max(self._arrives_at + 1e-7, loop.time() + loop.network.delay_s(sender.host, self._node.host))
        self._arrives_at = at
        loop.network.send(
            sender.host,
            self._node.host,
            lambda: self._deliver_at(at, frames),
        )

    def _deliver_at(self, at: float, frames: list[bytes]) -> None:
        token = running_node.set(self._node)
        try:
            self._bus.loop.call_exactly_at(at, self._take, frames)
        finally:
            running_node.reset(token)

    def _take(self, frames: list[bytes]) -> None:
        if not self._is_closed:
            self._waiting.append(frames)
            self._bus.loop.wake_reader(self._number)

    def close(self, linger: int | None = None) -> None:
        del linger
        self._is_closed = True
        if self._kind == zmq.SUB:
            self._bus.subscribers.get(self._endpoint, {}).pop(self, None)

    def __enter__(self) -> "SimulatedZmqSocket":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class SimulatedZmqContext:
    """`zmq.Context` within the simulation; `bus` is set before any is made."""

    bus: ClassVar[EventBus]
    _numbers: "ClassVar[count[int]]" = count(_FIRST_DESCRIPTOR)

    def socket(self, kind: int) -> SimulatedZmqSocket:
        return SimulatedZmqSocket(kind, self.bus, next(self._numbers))

    def set(self, *_option: object) -> None:
        """Options change nothing here."""

    def get(self, _option: int) -> int:
        return 1 << 16

    def destroy(self, linger: int | None = None) -> None:
        """Sockets close by themselves."""


def install(bus: EventBus) -> None:
    """Make all ZMQ sockets of this process simulated ones."""
    SimulatedZmqContext.bus = bus
    zmq.Context = SimulatedZmqContext  # type: ignore[misc,assignment]
