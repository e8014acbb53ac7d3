"""Work beside requests: a little of it in each turn of the event loop, so that no request waits long for it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Seconds of such work in one turn: the first while it keeps up, the second once some of it has waited for the third.
# A decision takes about a fifth of a millisecond.
_FEW_S, _MOST_S, _PATIENCE_S = 0.00025, 0.001, 0.1


def turn_budget_s(waited_s: float) -> float:
    """Seconds of one turn for this work, of which the oldest has waited for so long."""
    return _FEW_S if waited_s < _PATIENCE_S else _MOST_S


@dataclass(slots=True, eq=False)
class _Work:
    """Steps that are left, and what is told of their end. `owner`: once it is done, no further step is run."""

    steps: Iterator[object]
    on_end: Callable[[Exception | None], None]
    since: float
    owner: "asyncio.Future[None] | None" = None


class LoopTurns:
    """Runs work in small steps: all of it together for at most `turn_budget_s` in one turn of the event loop.

    Between two turns the loop reads its sockets and runs requests. Work that does not fit into a turn goes on in later
    ones, each piece of work in its turn. A step should take some tens of microseconds: one is never interrupted.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[_Work] = deque()
        self._left_s = _FEW_S
        self._is_due = False

    @property
    def waiting(self) -> int:
        """Pieces of work with steps that are left for later turns."""
        return len(self._waiting)

    async def run(self, steps: Iterator[object]) -> None:
        """Run these steps, and return after the last. Raises what a step raises; cancelled, it runs no further step."""
        if self._can_begin():
            work = _Work(steps, _raise_failure, 0.0)
            if self._advance(work):
                return
        done = asyncio.get_running_loop().create_future()

        def on_end(failure: Exception | None) -> None:
            """Resolve the future that is waited for."""
            if done.done():
                return
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        self._queue(_Work(steps, on_end, self._clock(), done))
        await done

    def start(self, steps: Iterator[object], on_end: Callable[[Exception | None], None]) -> None:
        """Run these steps, now as far as this turn allows, and call `on_end` with a step's error, or None.

        May call it at once.
        """
        work = _Work(steps, on_end, self._clock())
        if not (self._can_begin() and self._advance(work)):
            self._queue(work)

    def _can_begin(self) -> bool:
        """Whether new work may begin in this turn: there is time left, and no other work waits for it."""
        return not self._waiting and self._left_s > 0.0

    def _queue(self, work: _Work) -> None:
        """Let this work go on in later turns, behind all other."""
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        """Have the next turn begun, unless that is due already."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Give this turn its time, and let the waiting work go on in it; schedules the next turn if any is left."""
        self._is_due = False
        waiting = self._waiting
        oldest = min([work.since for work in waiting], default=None)
        self._left_s = turn_budget_s(0.0 if oldest is None else self._clock() - oldest)
        while waiting and self._left_s > 0.0:
            work = waiting.popleft()
            if work.owner is not None and work.owner.done():
                continue  # cancelled
            if not self._advance(work):
                waiting.append(work)
        if waiting:
            self._schedule()

    def _advance(self, work: _Work) -> bool:
        """Run steps of this work until the turn's time is over; whether it has ended, which it is told.

        Takes their time from the turn's, and has a new turn begun when little is left.
        """
        began, failure, has_ended = self._clock(), None, False
        try:
            for _ in work.steps:
                if self._clock() - began >= self._left_s:
                    break
            else:
                has_ended = True
        except Exception as exc:  # noqa: BLE001  (handed to the work's owner)
            failure, has_ended = exc, True
        self._left_s -= self._clock() - began
        if self._left_s < _FEW_S / 2:
            self._schedule()
        if has_ended:
            work.on_end(failure)
        return has_ended


def _raise_failure(failure: Exception | None) -> None:
    """Raise the error of a step."""
    if failure is not None:
        raise failure
