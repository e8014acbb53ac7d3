"""Follow engines' KV event sockets: every batch once and in order, holes bridged from the replay socket.

source  vLLM 0.32 distributed/kv_events.py: PUB [topic, seq, batch]; ROUTER takes [b"", first wanted seq] and answers
        [b"", topic, seq, batch]* [b"", b"", ff * 8, b""]. Either drops silently at a full queue.

Messages are drained by one tick for all sockets. A coroutine or a wake-up for each message would cost more than the
message: 64 engines send tens of thousands a second.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import zmq

log = structlog.get_logger()

_END = b"\xff" * 8
_REPLAY_SILENCE_S = 2.0
_REPLAY_TRIES = 3
_MOST_POLL_PAUSE_S = 60.0
# Between ticks while messages come, and what a tick may take of the loop: at most half of it goes to events, and no
# request waits longer than a tick for them. What is over waits in the sockets and shows as lag.
_TICK_S = 0.002
_BUDGET_S = 0.001
# Messages taken from one socket before the next one has its turn.
_TURN = 32
# Ticks without a message after which a socket is waited for instead of asked.
_QUIET_TICKS = 25


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """The sockets of one engine rank. Without `replay` every hole is a loss."""

    events: str
    replay: str
    topic: str


class RankListener(Protocol):
    """Who is told what one follower hears."""

    def batch(self, payload: bytes) -> None:
        """The next batch, in order."""

    def drained(self) -> None:
        """Some batches were told, and others get their turn now: a moment for figures."""

    def opened(self) -> None:
        """What the engine still had of its past has been told; live batches follow."""

    def bridged(self) -> None:
        """A hole was filled."""

    def lost(self, first: int, last: int) -> None:
        """Nothing can bring back batches `first` to `last`; what follows is told on."""

    def malformed(self) -> None:
        """A message was not in the engine's form, and is skipped."""


class RankSubscriber:
    """One rank's batches. `last` is the newest told; times are the loop's."""

    def __init__(self, endpoint: RankEndpoint, listener: RankListener, hub: "SubscriberHub") -> None:
        self.endpoint = endpoint
        self.last = -1
        self.heard_at = hub.loop.time()
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
        # The batch after a hole, until the hole is dealt with.
        self._held: tuple[int, bytes] | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._poll_pause_s = hub.tail_poll_s
        self._look_back()

    @property
    def fd(self) -> int:
        return int(self._live.getsockopt(zmq.FD))

    def is_readable(self) -> bool:
        """Whether a message waits that may be told now."""
        if self._held is not None or not self._is_open:
            return False
        return bool(int(self._live.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def drain(self, most: int) -> int:
        """Tell up to `most` waiting messages; returns how many there were."""
        taken = 0
        while taken < most and self._held is None and self._is_open:
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            taken += 1
            self._take(frames)
        if taken:
            self.heard_at = self._hub.loop.time()
            self._poll_pause_s = self._hub.tail_poll_s
            self._listener.drained()
        return taken

    def poll_tail(self, now: float) -> None:
        """Ask for what came after the last batch, when nothing has come for a while: a loss there is silent."""
        if self._replaying is None and self.endpoint.replay and now - self.heard_at >= self._poll_pause_s:
            self._look_back()

    def close(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
        self._live.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._listener.malformed()
            return
        if frames[0] != self._topic:  # subscriptions are by prefix
            return
        seq = int.from_bytes(frames[1], "big")
        if seq == self.last + 1:
            self._tell(seq, frames[2])
        elif seq > self.last:
            self._held = (seq, frames[2])
            if self._replaying is None:
                self._look_back()

    def _tell(self, seq: int, payload: bytes) -> None:
        self.last = seq
        self._listener.batch(payload)

    def _look_back(self) -> None:
        self._replaying = asyncio.create_task(self._bridge())

    async def _bridge(self) -> None:
        """Ask the replay socket for what is missing, then go on with what it could not give."""
        known = self._held
        has_answered = await self._replayed()
        if self._held is not known and not self._is_bridged():
            # The hole was found meanwhile, and this answer may have been on its way by then.
            has_answered = await self._replayed()
        self._replaying = None
        now = self._hub.loop.time()
        self.heard_at = now
        self._poll_pause_s = (
            self._hub.tail_poll_s if has_answered else min(_MOST_POLL_PAUSE_S, 2 * max(0.1, self._poll_pause_s))
        )
        if not self._is_open:
            self._is_open = True
            self._listener.opened()
        if self._held is not None:
            seq, payload = self._held
            if self._is_bridged():
                self._listener.bridged()
            else:
                self._skip_to(seq)
            if seq == self.last + 1:
                self._tell(seq, payload)
            self._held = None
        self._listener.drained()
        self._hub.wake(self)

    def _is_bridged(self) -> bool:
        return self._held is None or self.last + 1 >= self._held[0]

    async def _replayed(self) -> bool:
        try:
            return await self._replay()
        except Exception:  # the top of a task: it logs and goes on with what is there
            log.exception("replay of KV events failed", endpoint=self.endpoint.replay)
            return False

    async def _replay(self) -> bool:
        """Tell what the engine's buffer has after the last batch; whether it answered to its end."""
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
        """One request; whether it was answered to its end without a hole (the engine drops for a slow reader)."""
        # A socket of its own: the late end of an earlier answer would end this one.
        with self._hub.socket(zmq.DEALER) as dealer:
            dealer.connect(self.endpoint.replay)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            told = 0
            while await _readable(dealer, _REPLAY_SILENCE_S):
                frames = dealer.recv_multipart(zmq.NOBLOCK)
                # Without the topic in older engines (SGLang of 2025 disaggregation/kv_events.py _service_replay).
                if len(frames) not in (3, 4) or frames[-2] == _END:
                    return True
                if len(frames) == 4 and frames[1] != self._topic:
                    continue
                seq = int.from_bytes(frames[-2], "big")
                if seq > self.last + 1:
                    if self.last + 1 > start:
                        return False  # a hole in the middle: ask again from there
                    self._skip_to(seq)
                if seq == self.last + 1:
                    self._tell(seq, frames[-1])
                told += 1
                if not told % _TURN:
                    await asyncio.sleep(0)
            return False

    def _skip_to(self, seq: int) -> None:
        first, self.last = self.last + 1, seq - 1
        log.warning("KV events lost", endpoint=self.endpoint.events, first=first, last=seq - 1)
        self._listener.lost(first, seq - 1)


class SubscriberHub:
    """The sockets of all followers on one event loop. Make it where the loop runs, and close it there."""

    def __init__(self, *, tail_poll_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop = asyncio.get_running_loop()
        self.tail_poll_s = tail_poll_s
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # libzmq's own bound is 1,023, and at a start each rank takes two: 64 engines of eight ranks would be too many.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._followers: dict[RankSubscriber, int] = {}
        self._busy: list[RankSubscriber] = []
        self._tick_at: asyncio.TimerHandle | None = None
        self._watching = asyncio.create_task(self._watch())

    @property
    def waiting(self) -> int:
        """How many sockets have messages that found no time yet."""
        return sum(follower.is_readable() for follower in self._busy)

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """A socket that is never full on our side, and that comes back by itself, with backoff."""
        made = self._context.socket(kind)
        # Unbounded: a dropped message would be a hole; the engine's own queue bounds what can pile up.
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 100)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        return made

    def follow(self, endpoint: RankEndpoint, listener: RankListener) -> RankSubscriber:
        """Tell this listener an endpoint's batches from the oldest that the engine still has; raises zmq.ZMQError."""
        follower = RankSubscriber(endpoint, listener, self)
        self._followers[follower] = follower.fd
        self._wait_for(follower)
        return follower

    def forget(self, follower: RankSubscriber) -> None:
        """Nothing more is told."""
        self.loop.remove_reader(self._followers.pop(follower))
        if follower in self._busy:
            self._busy.remove(follower)
        follower.close()

    async def close(self) -> None:
        """Stop every follower and free the sockets."""
        self._watching.cancel()
        if self._tick_at is not None:
            self._tick_at.cancel()
        for follower in list(self._followers):
            self.forget(follower)
        await asyncio.gather(self._watching, return_exceptions=True)
        self._context.destroy(linger=0)

    def wake(self, follower: RankSubscriber) -> None:
        """There may be messages."""
        if follower not in self._followers:
            return
        self.loop.remove_reader(self._followers[follower])
        follower.quiet_ticks = 0
        if follower not in self._busy:
            self._busy.append(follower)
        if self._tick_at is None:
            self._tick_at = self.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """A turn for every busy socket, in rounds while there is time; quiet ones are waited for again."""
        self._tick_at = None
        until = self._clock() + _BUDGET_S
        todo = [follower for follower in self._busy if self._has_news(follower)]
        while todo:
            more: list[RankSubscriber] = []
            for number, follower in enumerate(todo):
                if self._clock() > until:
                    # Those who missed their turn are first next time.
                    late = todo[number:]
                    self._busy = late + [other for other in self._busy if other not in late]
                    more = []
                    break
                if self._drained(follower) == _TURN:
                    more.append(follower)
            todo = more
        for follower in [each for each in self._busy if each.quiet_ticks > _QUIET_TICKS]:
            self._busy.remove(follower)
            self._wait_for(follower)
        if self._busy and self._tick_at is None:
            self._tick_at = self.loop.call_later(_TICK_S, self._tick)

    def _drained(self, follower: RankSubscriber) -> int:
        try:
            return follower.drain(_TURN)
        except Exception:  # the top of a loop: it logs and goes on, or every socket would fall silent
            log.exception("KV events of one message not taken", endpoint=follower.endpoint.events)
            return 0

    def _has_news(self, follower: RankSubscriber) -> bool:
        if follower.is_readable():
            follower.quiet_ticks = 0
            return True
        follower.quiet_ticks += 1
        return False

    def _wait_for(self, follower: RankSubscriber) -> None:
        self.loop.add_reader(self._followers[follower], self.wake, follower)
        # ZMQ's descriptor tells of changes only: what came before has to be asked for.
        if follower.is_readable():
            self.wake(follower)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.tail_poll_s))
            now = self.loop.time()
            for follower in list(self._followers):
                follower.poll_tail(now)


async def _readable(socket: "zmq.Socket[Any]", timeout_s: float) -> bool:
    """Whether a message came within this time."""
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
