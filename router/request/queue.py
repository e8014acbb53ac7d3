"""Where requests wait for room at an engine. The scheduler chooses which one is sent next."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Generic, TypeVar

import structlog

from lorafleet.http_server.batches import leave_batch
from lorafleet.service.loops import forever
from router.core.errors import DeadlineExceeded, NoReplica, RouterError
from router.core.queue.admission import QueueLimits, QueueUsage
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.policy import Decision
from router.core.scheduler import Scheduler
from router.telemetry.metrics import RouterMetrics

log = structlog.get_logger()

# Seconds between two checks while a request waits: an engine's queue drains without any event here.
_CHECK_EVERY_S = 0.02


class Displaced(Exception):
    """Every replica that could serve a queued request has gone away; others may come, or these come back."""


S = TypeVar("S")


class _Waiter(Generic[S]):
    """The coroutine that waits with one queued request.

    begin  makes the dispatched request of a decision, which counts as load until `end`
    check  raises RouterError where the request may no longer be sent
    sent   resolves to it
    """

    def __init__(self, begin: Callable[[Decision], S], end: Callable[[S], object], check: Callable[[], object]) -> None:
        self.begin = begin
        self.end = end
        self.check = check
        self.sent: asyncio.Future[S] = asyncio.get_running_loop().create_future()

    def resolve(self, outcome: Decision | NoReplica) -> None:
        """Wake the coroutine with the dispatched request of `begin`, its error, or Displaced. Does nothing if done."""
        if self.sent.done():
            return
        if isinstance(outcome, NoReplica):
            displaced = Displaced(str(outcome))
            displaced.__cause__ = outcome
            self.sent.set_exception(displaced)
            return
        try:
            self.sent.set_result(self.begin(outcome))
        except Exception as exc:  # noqa: BLE001  (raised in this request's coroutine: the others go on)
            self.sent.set_exception(exc)

    def refuse_exhausted(self) -> None:
        """Wake the coroutine with the error of `check`, if it raises one. Does nothing if done."""
        if self.sent.done():
            return
        try:
            self.check()
        except RouterError as exc:
            self.sent.set_exception(exc)

    def undo(self) -> None:
        """End a dispatched request whose coroutine has left at the moment in which it was sent."""
        if self.sent.done() and not self.sent.cancelled() and self.sent.exception() is None:
            self.end(self.sent.result())


def _left_s(deadline_at: float, now: float) -> float:
    """Seconds until the deadline. Raises DeadlineExceeded where it has passed."""
    if deadline_at <= now:
        raise DeadlineExceeded("the deadline of this request passed before it could be sent to an engine")
    return deadline_at - now


class RequestQueue:
    """Requests that wait for room at an engine, bounded in number, in bytes and in time."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: RouterMetrics,
        *,
        most_waiting: int,
        most_wait_s: float,
        clock: Callable[[], float],
        most_waiting_bytes: float = inf,
        tenant_share: float = 1.0,
    ) -> None:
        """`tenant_share`: share of `most_waiting` and of the bytes that one tenant may take."""
        self._scheduler = scheduler
        self._metrics = metrics
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._poke = asyncio.Event()
        # Call it when there may be room.
        self.poke = self._poke.set
        self._is_occupied = asyncio.Event()
        self._waiters: set[_Waiter[Any]] = set()
        scheduler.queue.usage = QueueUsage(QueueLimits(most_waiting, most_waiting_bytes, tenant_share))

    def decide_or_enqueue(self, queued: QueuedRequest) -> Decision | None:
        """The decision, if this request may be sent now; else None, and it is queued: `wait` follows at once.

        raises  NoReplica, DeadlineExceeded; Saturated where it may not wait, or would wait too long
        """
        began_at = self._clock()
        queued.most_wait_s = self._most_wait_s
        if queued.deadline_at is not None:
            queued.most_wait_s = min(self._most_wait_s, _left_s(queued.deadline_at, began_at))
        decision = self._scheduler.queue.decide_or_enqueue(queued, began_at)
        self._metrics.decide.observe(self._clock() - began_at)
        return decision

    async def wait(
        self,
        queued: QueuedRequest,
        begin: Callable[[Decision], S],
        end: Callable[[S], object],
        check: Callable[[], object] = lambda: None,
    ) -> S:
        """The dispatched request that `begin` makes of a queued request's decision, as soon as there is room.

        end     gives back what a dispatched request counts as, where its coroutine has left meanwhile
        check   raises RouterError where a budget of the request has been exhausted meanwhile
        raises  Displaced, Saturated, DeadlineExceeded, and what `check` does
        """
        waiting = self._scheduler.queue
        waiter = _Waiter(begin, end, check)
        queued.payload = waiter
        self._waiters.add(waiter)
        try:
            self._metrics.waiting.set(len(waiting))
            self._is_occupied.set()
            await leave_batch()
            async with asyncio.timeout(queued.most_wait_s):
                return await waiter.sent
        except TimeoutError as exc:
            waiter.undo()
            raise self._timeout_error(queued) from exc
        except BaseException:
            waiter.undo()
            raise
        finally:
            self._waiters.discard(waiter)
            waiting.remove(queued)
            self._metrics.waiting.set(len(waiting))

    def refuse_exhausted(self) -> None:
        """Refuse the queued requests whose budget is exhausted. Call it when one has been."""
        for waiter in self._waiters:
            waiter.refuse_exhausted()

    async def run(self) -> None:
        """Send queued requests as room appears, until cancelled."""
        on_failure = self._metrics.loop_failures.labels("waiting").inc
        await forever(self._send_ready, name="waiting", every_s=_CHECK_EVERY_S, poke=self._poke, on_failure=on_failure)

    async def _send_ready(self) -> None:
        """Resolve the queued requests for which there is room now; sleep while none is queued."""
        if not len(self._scheduler.queue):
            self._is_occupied.clear()
            await self._is_occupied.wait()
        for queued, outcome in self._scheduler.queue.take_admissible(self._clock()):
            if isinstance(outcome, NoReplica) and outcome.__cause__ is not None:
                log.error("a waiting request could not be decided", exc_info=outcome.__cause__)
            waiter = queued.payload
            assert isinstance(waiter, _Waiter)
            waiter.resolve(outcome)

    def _timeout_error(self, queued: QueuedRequest) -> RouterError:
        """The error for a request that waited too long; the queue's wait margin is updated by it: call once."""
        if queued.deadline_at is not None and self._clock() >= queued.deadline_at:
            return DeadlineExceeded("the deadline of this request passed while it waited for room at an engine")
        return self._scheduler.queue.time_out(queued, self._clock())
