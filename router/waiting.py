"""Where requests wait for room at an engine; who goes next is the mind's choice."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from lorafleet.loops import forever
from router.core.decision import Decision
from router.core.dispatch import Ticket
from router.core.errors import NoReplica, Saturated
from router.core.mind import Mind
from router.metrics import Metrics

# While somebody waits: an engine's queue drains by the clock, without any event of ours.
_LOOK_EVERY_S = 0.02


class Displaced(Exception):
    """Every replica that could have served a request went while it waited; others may come, or these come back."""


class Sent(Protocol):
    """A request on its way, which counts as load until `end`."""

    def end(self) -> None: ...


S = TypeVar("S", bound=Sent)


class _Wait(Generic[S]):
    """One request's wait: how it is begun, and who is told."""

    def __init__(self, begin: Callable[[Decision], S]) -> None:
        self.begin = begin
        self.sent: asyncio.Future[S] = asyncio.get_running_loop().create_future()

    def tell(self, outcome: Decision | NoReplica) -> None:
        if self.sent.done():
            return
        if isinstance(outcome, NoReplica):
            displaced = Displaced(str(outcome))
            displaced.__cause__ = outcome
            self.sent.set_exception(displaced)
            return
        try:
            self.sent.set_result(self.begin(outcome))
        except Exception as exc:  # noqa: BLE001  (its owner's, whatever it is: the others go on)
            self.sent.set_exception(exc)

    def undo(self) -> None:
        """Whoever waited has left, perhaps in the very moment in which it was sent."""
        if self.sent.done() and not self.sent.cancelled() and self.sent.exception() is None:
            self.sent.result().end()


class WaitingRoom:
    """Holds requests back until the mind lets them go; bounded in number and in time."""

    def __init__(
        self, mind: Mind, metrics: Metrics, *, most_waiting: int, most_wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._mind = mind
        self._metrics = metrics
        self._most_waiting = most_waiting
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._poke = asyncio.Event()
        self._somebody = asyncio.Event()

    async def admitted(self, ticket: Ticket, begin: Callable[[Decision], S]) -> S:
        """What `begin` made of the decision, as soon as there is room for this request.

        raises  NoReplica at once, Displaced later; Saturated when too many wait already, or it has waited for too long
        """
        waiting = self._mind.waiting
        began_at = self._clock()
        decision = waiting.offer(ticket, began_at)
        self._metrics.decide.observe(self._clock() - began_at)
        if decision is not None:
            return begin(decision)
        wait = _Wait(begin)
        ticket.payload = wait
        if len(waiting) > self._most_waiting:
            waiting.withdraw(ticket)
            raise self._saturated(f"{len(waiting)} requests wait for room at an engine already")
        try:
            self._metrics.waiting.set(len(waiting))
            self._somebody.set()
            async with asyncio.timeout(self._most_wait_s):
                return await wait.sent
        except TimeoutError as exc:
            wait.undo()
            raise self._saturated(f"no engine had room within {self._most_wait_s:g} s") from exc
        except BaseException:
            wait.undo()
            raise
        finally:
            waiting.withdraw(ticket)
            self._metrics.waiting.set(len(waiting))

    def poke(self) -> None:
        """There may be room now."""
        self._poke.set()

    async def run(self) -> None:
        """Let requests go as room appears, until cancelled."""
        on_failure = self._metrics.loop_failures.labels("waiting").inc
        await forever(self._look, name="waiting", every_s=_LOOK_EVERY_S, poke=self._poke, on_failure=on_failure)

    async def _look(self) -> None:
        if not len(self._mind.waiting):
            self._somebody.clear()
            await self._somebody.wait()
        for ticket, outcome in self._mind.waiting.ready(self._clock()):
            wait = ticket.payload
            assert isinstance(wait, _Wait)
            wait.tell(outcome)

    def _saturated(self, what: str) -> Saturated:
        backlog = self._mind.waiting.backlog
        drained_s = sum(backlog.values()) / max(1, len(backlog))
        return Saturated(f"{what}; try again", retry_after_s=max(1.0, drained_s))
