"""Subscribes to engines' KV event sockets: every batch once and in order, gaps filled from the replay socket.

source  vLLM 0.32 distributed/kv_events.py: PUB [topic, seq, batch]; ROUTER takes [b"", first wanted seq] and answers
        [b"", topic, seq, batch]* [b"", b"", ff * 8, b""]. Both drop messages silently at a full queue.

One tick drains all sockets. 64 engines send tens of thousands of messages a second, and a coroutine or wake-up for
each would cost more than the message. A tick is work beside requests (`LoopTurns`): it goes on message by message, in
as many turns of the event loop as it needs.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import structlog
import zmq

from lorafleet.kv.turns import LoopTurns

log = structlog.get_logger()

_END = b"\xff" * 8
_REPLAY_SILENCE_S = 2.0
_REPLAY_TRIES = 3
_MAX_POLL_PAUSE_S = 60.0
# Time between ticks while messages come. Messages that come meanwhile wait in the sockets and show as lag.
_TICK_S = 0.002
# Messages that one tick reads from a socket at most.
_MESSAGES_PER_TICK = 32
# After this many ticks without a message a socket is watched instead of polled.
_QUIET_TICKS = 25
# A peer that does not answer for so long is connected to again: a connection that a network has dropped looks quiet.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """The sockets of one engine rank. Without `replay` every gap is a loss."""

    events: str
    replay: str
    topic: str


class RankListener(Protocol):
    """Receives what one subscriber reads."""

    def on_batch(self, payload: bytes) -> None:
        """Take the next batch; batches come in order."""

    def on_drained(self) -> None:
        """Several batches were delivered; a moment to update metrics."""

    def on_opened(self) -> None:
        """The engine's buffered batches were delivered; live batches follow."""

    def on_bridged(self) -> None:
        """A gap was filled."""

    def on_lost(self, first: int, last: int) -> None:
        """Batches `first` to `last` are lost; later ones are still delivered."""

    def on_restarted(self) -> None:
        """The engine has started again: its cache is empty, and its batches follow from the first one on."""

    def on_malformed(self) -> None:
        """A message had another form and was skipped."""


class RankSubscriber:
    """Reads one rank's batches. `last` is the number of the newest delivered batch; times are the loop's.

    An engine that starts again begins with number 0 on the same endpoint. Mostly its boot id says so as well, but a
    vLLM with several API servers reports no start time.
    """

    def __init__(self, endpoint: RankEndpoint, listener: RankListener, hub: "SubscriberHub") -> None:
        """Connect to the endpoint and start a replay of the buffered batches; raises zmq.ZMQError."""
        self.endpoint = endpoint
        self.last = -1
        self._last_live = -1
        self.received_at = hub.loop.time()
        self.quiet_ticks = 0
        self._listener = listener
        self._hub = hub
        self._topic = endpoint.topic.encode()
        self._live = hub.socket(zmq.SUB)
        self._live.subscribe(self._topic)
        try:
            self._live.connect(endpoint.events)
        except zmq.ZMQError:
            self._live.close()
            raise
        self._is_open = False
        # The batch after a gap, until the gap is filled or given up.
        self._after_gap: tuple[int, bytes] | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._poll_pause_s = hub.tail_poll_s
        self._start_replay()

    @property
    def fd(self) -> int:
        """The file descriptor of the socket for live batches."""
        return int(self._live.getsockopt(zmq.FD))

    def is_readable(self) -> bool:
        """Whether a message waits that may be delivered now."""
        if self._after_gap is not None or not self._is_open:
            return False
        return bool(int(self._live.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def drain(self, limit: int) -> int:
        """Read and handle up to `limit` waiting messages, fewer at a gap; returns the number read.

        After any message, notes the time and calls `on_drained`.
        """
        count = 0
        while count < limit and self._after_gap is None and self._is_open:
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            count += 1
            self._handle_message(frames)
        if count:
            self.received_at = self._hub.loop.time()
            self._poll_pause_s = self._hub.tail_poll_s
            self._listener.on_drained()
        return count

    def poll_tail(self, now: float) -> None:
        """Start a replay if no batch has come for a while: nothing else shows the loss of the last batch."""
        if self._replaying is None and self.endpoint.replay and now - self.received_at >= self._poll_pause_s:
            self._start_replay()

    def close(self) -> None:
        """Close the live socket and cancel a replay; nothing more is delivered."""
        if self._replaying is not None:
            self._replaying.cancel()
        self._live.close(linger=0)

    def _handle_message(self, frames: list[bytes]) -> None:
        """Deliver a batch, ignore an old one or another topic's, or keep it and start filling the gap before it.

        A malformed message is reported to the listener, and so is an engine whose numbers begin anew.
        """
        if len(frames) != 3 or len(frames[1]) != 8:
            self._listener.on_malformed()
            return
        if frames[0] != self._topic:  # subscriptions are by prefix
            return
        seq = int.from_bytes(frames[1], "big")
        if seq <= self._last_live:
            self._begin_anew()
        self._last_live = seq
        if seq == self.last + 1:
            self._deliver(seq, frames[2])
        elif seq > self.last:
            self._after_gap = (seq, frames[2])
            if self._replaying is None:
                self._start_replay()

    def _begin_anew(self) -> None:
        """Expect the first batch: the engine has started again, as numbers on one socket only grow.

        Cancels a replay, which requests batches by the former engine's numbers.
        """
        log.info("KV events begin anew: the engine has started again", endpoint=self.endpoint.events, last=self.last)
        if self._replaying is not None:
            self._replaying.cancel()
            self._replaying = None
        self.last = -1
        self._listener.on_restarted()

    def _deliver(self, seq: int, payload: bytes) -> None:
        """Pass a batch to the listener and count it as the newest."""
        self.last = seq
        self._listener.on_batch(payload)

    def _deliver_next(self, seq: int, payload: bytes) -> Iterator[None]:
        """Deliver a batch of a replay, unless it came from the live socket meanwhile: one step."""
        if seq == self.last + 1:
            self._deliver(seq, payload)
        yield

    def _start_replay(self) -> None:
        """Start a task that requests the batches after the last one."""
        self._replaying = asyncio.create_task(self._fill_gap())

    async def _fill_gap(self) -> None:
        """Request and deliver missing batches, report those that are lost, then let live batches follow.

        Opens the subscription if it was not. Without an answer, later polls are rarer.
        """
        gap_before = self._after_gap
        has_answered = await self._try_replay()
        if self._after_gap is not gap_before and not self._is_gap_filled():
            # The gap was found meanwhile, so this answer may be older than the gap.
            has_answered = await self._try_replay()
        self._replaying = None
        now = self._hub.loop.time()
        self.received_at = now
        self._poll_pause_s = (
            self._hub.tail_poll_s if has_answered else min(_MAX_POLL_PAUSE_S, 2 * max(0.1, self._poll_pause_s))
        )
        if not self._is_open:
            self._is_open = True
            self._listener.on_opened()
        if self._after_gap is not None:
            seq, payload = self._after_gap
            if self._is_gap_filled():
                self._listener.on_bridged()
            else:
                self._give_up_to(seq)
            if seq == self.last + 1:
                self._deliver(seq, payload)
            self._after_gap = None
        self._listener.on_drained()
        self._hub.wake(self)

    def _is_gap_filled(self) -> bool:
        """Whether every batch before the one kept after the gap is delivered."""
        return self._after_gap is None or self.last + 1 >= self._after_gap[0]

    async def _try_replay(self) -> bool:
        """`_replay`, but an error is logged and returns false."""
        try:
            return await self._replay()
        except Exception:  # the top of a task: it logs and continues with live batches
            log.exception("replay of KV events failed", endpoint=self.endpoint.replay)
            return False

    async def _replay(self) -> bool:
        """Request and deliver the buffered batches after the last one; whether the answer was complete.

        Requests again from a gap in the answer, three times at most.
        """
        if not self.endpoint.replay:
            return False
        for _ in range(_REPLAY_TRIES):
            start = self.last + 1
            is_finished = await self._replay_from(start)
            if is_finished:
                return True
            if self.last + 1 == start:
                return False
        return False

    async def _replay_from(self, start: int) -> bool:
        """Send one replay request and deliver its batches; false if the answer stops or has a gap in its middle.

        Batches before its first one are reported as lost.
        """
        # A new socket: the late end of an earlier answer would end this one.
        with self._hub.socket(zmq.DEALER) as dealer:
            dealer.connect(self.endpoint.replay)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while await _wait_readable(dealer, _REPLAY_SILENCE_S):
                frames = dealer.recv_multipart(zmq.NOBLOCK)
                # Without the topic in older engines (SGLang of 2025 disaggregation/kv_events.py _service_replay).
                if len(frames) not in (3, 4) or frames[-2] == _END:
                    return True
                if len(frames) == 4 and frames[1] != self._topic:
                    continue
                seq = int.from_bytes(frames[-2], "big")
                if seq > self.last + 1:
                    if self.last + 1 > start:
                        return False  # a gap in the middle: request again from there
                    self._give_up_to(seq)
                await self._hub.turns.run(self._deliver_next(seq, frames[-1]))
            return False

    def _give_up_to(self, seq: int) -> None:
        """Skip the missing batches before `seq`: log them and report them to the listener as lost."""
        first, self.last = self.last + 1, seq - 1
        log.warning("KV events lost", endpoint=self.endpoint.events, first=first, last=seq - 1)
        self._listener.on_lost(first, seq - 1)


class SubscriberHub:
    """The sockets of all subscribers on one event loop. Create and close it on that loop."""

    def __init__(self, *, tail_poll_s: float, turns: LoopTurns | None = None) -> None:
        """Start the periodic polling for lost last batches.

        tail_poll_s  seconds without a batch after which a subscriber is polled
        turns        shared with other work beside requests of this event loop; None: the hub's own
        """
        self.loop = asyncio.get_running_loop()
        self.tail_poll_s = tail_poll_s
        self.turns = turns or LoopTurns()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # libzmq's default is 1,023 sockets, and each rank starts with two: too few for 64 engines of eight ranks.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._subscribers: dict[RankSubscriber, int] = {}
        self._busy: list[RankSubscriber] = []
        self._tick_at: asyncio.TimerHandle | None = None
        self._is_ticking = self._is_closed = False
        self._tail_poller = asyncio.create_task(self._poll_tails())

    @property
    def waiting(self) -> int:
        """Number of busy sockets with a message that waits for a tick."""
        return sum(subscriber.is_readable() for subscriber in self._busy)

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A new socket without a receive limit. It reconnects by itself, with backoff, also from a silent peer."""
        sock = self._context.socket(kind)
        # Unbounded: a dropped message would be a gap. The engine's own queue bounds the backlog.
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        return sock

    def follow(self, endpoint: RankEndpoint, listener: RankListener) -> RankSubscriber:
        """Deliver an endpoint's batches to a listener, from the oldest buffered one on; raises zmq.ZMQError."""
        subscriber = RankSubscriber(endpoint, listener, self)
        self._subscribers[subscriber] = subscriber.fd
        self._watch_socket(subscriber)
        return subscriber

    def forget(self, subscriber: RankSubscriber) -> None:
        """Remove a subscriber and close its sockets; nothing more is delivered."""
        self.loop.remove_reader(self._subscribers.pop(subscriber))
        if subscriber in self._busy:
            self._busy.remove(subscriber)
        subscriber.close()

    async def close(self) -> None:
        """Stop every subscriber, the ticks and the tail poller, and free the sockets."""
        self._is_closed = True
        self._tail_poller.cancel()
        if self._tick_at is not None:
            self._tick_at.cancel()
        for subscriber in list(self._subscribers):
            self.forget(subscriber)
        await asyncio.gather(self._tail_poller, return_exceptions=True)
        self._context.destroy(linger=0)

    def poll_tails_now(self) -> None:
        """Start a replay for every subscriber, as after a long silence. Ends the periodic polling."""
        self._tail_poller.cancel()
        for subscriber in self._subscribers:
            subscriber.received_at = -inf
            subscriber.poll_tail(0.0)

    def wake(self, subscriber: RankSubscriber) -> None:
        """Poll a subscriber at the next ticks instead of watching its socket: it may have messages.

        Does nothing for one that is not subscribed.
        """
        if subscriber not in self._subscribers:
            return
        self.loop.remove_reader(self._subscribers[subscriber])
        subscriber.quiet_ticks = 0
        if subscriber not in self._busy:
            self._busy.append(subscriber)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Have a tick begin after `_TICK_S`, unless one is due or under way."""
        if self._tick_at is None and not self._is_ticking and not self._is_closed:
            self._tick_at = self.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Drain the busy sockets, in as many turns of the event loop as that takes."""
        self._tick_at = None
        self._is_ticking = True
        self.turns.start(self._drain_busy(), self._end_tick)

    def _drain_busy(self) -> Iterator[None]:
        """Read the messages that wait, one from each busy socket in turn; at most `_MESSAGES_PER_TICK` of a socket."""
        todo = [subscriber for subscriber in self._busy if self._has_message(subscriber)]
        for _ in range(_MESSAGES_PER_TICK):
            unfinished: list[RankSubscriber] = []
            for subscriber in todo:
                if subscriber in self._subscribers and self._drain_one(subscriber):
                    unfinished.append(subscriber)
                yield
            todo = unfinished
            if not todo:
                return

    def _end_tick(self, failure: Exception | None) -> None:
        """Watch quiet sockets again, and schedule the next tick if any is busy. Logs a failure of the tick."""
        self._is_ticking = False
        if failure is not None:
            log.error("KV events of one tick not taken", exc_info=failure)
        for subscriber in [each for each in self._busy if each.quiet_ticks > _QUIET_TICKS]:
            self._busy.remove(subscriber)
            self._watch_socket(subscriber)
        if self._busy:
            self._schedule_tick()

    def _drain_one(self, subscriber: RankSubscriber) -> int:
        """Read one message of a subscriber; the number read, 0 after an error, which is logged."""
        try:
            return subscriber.drain(1)
        except Exception:  # the top of a loop: one bad message must not stop all sockets
            log.exception("KV events of one message not taken", endpoint=subscriber.endpoint.events)
            return 0

    def _has_message(self, subscriber: RankSubscriber) -> bool:
        """Whether a message waits; counts ticks without one."""
        if subscriber.is_readable():
            subscriber.quiet_ticks = 0
            return True
        subscriber.quiet_ticks += 1
        return False

    def _watch_socket(self, subscriber: RankSubscriber) -> None:
        """Wake this subscriber when its socket becomes readable, or at once if it is."""
        self.loop.add_reader(self._subscribers[subscriber], self.wake, subscriber)
        # ZMQ's descriptor signals changes only; earlier messages must be polled.
        if subscriber.is_readable():
            self.wake(subscriber)

    async def _poll_tails(self) -> None:
        """Call `poll_tail` of each subscriber every second, or more often, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.tail_poll_s))
            now = self.loop.time()
            for subscriber in list(self._subscribers):
                subscriber.poll_tail(now)


async def _wait_readable(socket: "zmq.Socket[Any]", timeout_s: float) -> bool:
    """Wait until the socket has a message; false if none comes within `timeout_s`."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    fd = int(socket.getsockopt(zmq.FD))
    if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return True
    loop.add_reader(fd, woken.set)
    try:
        async with asyncio.timeout(timeout_s):
            while not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                woken.clear()
                await woken.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
