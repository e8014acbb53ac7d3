"""What came in one turn of the loop, worked on together: a stage of all of it, then the next stage of all of it.

A request's way through the router is more code than a processor keeps at hand. Gone through from end to end for one
request after the other, all of it is fetched and its jumps are guessed wrongly for each of them; stage by stage that
is so for the first of a crowd only, and a request costs a fifth to a quarter less. As packets are switched by VPP
(Barach et al., High-speed Software Data Plane via Vectorized Packet Processing, 2018). A request that comes alone waits
for nobody.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from lorafleet.http_server.outbox import Outbox

# Begun together, before the sockets are looked at again: a millisecond or two of work. More of them cost less each (at
# 32 a twentieth, seen), but every stream waits meanwhile.
_MOST = 16
# Of their bodies: a long prompt takes as long as many short ones.
_MOST_BYTES = 64 * 2**10

# A stage at each `next`, and whatever must wait for something else goes on in another way.
Steps = Iterator[None]
_OVER: Final = object()


class BatchMember(Protocol):
    """One of a crowd: a request, and what answers it."""

    body: bytes

    def begin_answer(self) -> Steps | None:
        """The steps that answer it; None where there are none, or no more. Does not raise."""

    def failed(self, exc: Exception) -> None:
        """A step raised this. Does not raise."""


class Batches:
    """The crowds of one loop. `outbox`: what they write, sent when they are through."""

    __slots__ = ("_answered", "_is_due", "_requests", "outbox")

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self._requests: deque[BatchMember] = deque()
        self._answered: list[tuple[BatchMember, Steps]] = []
        self._is_due = False

    def begin(self, request: BatchMember, loop: asyncio.AbstractEventLoop) -> None:
        """Have a request answered that has come."""
        self._requests.append(request)
        if not self._is_due:
            self._call(loop)

    def go_on(self, request: BatchMember, steps: Steps, loop: asyncio.AbstractEventLoop) -> None:
        """Have these steps taken for a request that an engine has answered: before what is still to be begun."""
        self._answered.append((request, steps))
        if not self._is_due:
            self._call(loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = True
        loop.call_soon(self._work, loop)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        try:
            if self._answered:
                answered, self._answered = self._answered, []
                self._take_through(answered)
            if self._requests:
                self._take_through(self._crowd())
        finally:
            if self._requests and not self._is_due:
                self._call(loop)

    def _crowd(self) -> list[tuple[BatchMember, Steps]]:
        requests, crowd = self._requests, []
        size = begun = 0
        while requests and begun < _MOST and size < _MOST_BYTES:
            request = requests.popleft()
            begun += 1
            size += len(request.body)
            steps = request.begin_answer()
            if steps is not None:
                crowd.append((request, steps))
        return crowd

    def _take_through(self, crowd: list[tuple[BatchMember, Steps]]) -> None:
        self.outbox.is_due = True
        try:
            while crowd:
                crowd = _stepped(crowd)
        finally:
            self.outbox.flush()


def _stepped(crowd: list[tuple[BatchMember, Steps]]) -> list[tuple[BatchMember, Steps]]:
    """Those that have more steps to go."""
    going: list[tuple[BatchMember, Steps]] = []
    left = iter(crowd)
    while True:
        try:
            for one in left:
                if next(one[1], _OVER) is None:
                    going.append(one)
        except Exception as exc:  # noqa: BLE001  (whatever it is: it is this request's, and no other's)
            one[0].failed(exc)
        else:
            return going
