"""One orchestrator acts: takes the lease, renews it, and stops acting before anybody else can have it."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from random import Random

import structlog

from orchestrator.core.errors import LeaseLost, LeaseUnreachable, OrchestratorError
from orchestrator.core.lease import LeaseCandidate, LeaseRecord
from orchestrator.leadership.file_lease import Lease

log = structlog.get_logger()


_SOON_S = 0.02  # between looks at a lease whose time is over and which somebody else may be writing


def _nothing() -> None:
    pass


async def _no_preparation() -> None:
    pass


class Leadership:
    """Holds the lease or watches who does. `on_begin` and `on_end` bracket each term.

    prepare    awaited with the lease in hand, before a term begins
    on_begin   may raise, as `prepare` may: then the term does not begin, and is tried again
    on_end     everything under way is dropped
    """

    def __init__(
        self,
        lease: Lease,
        *,
        holder: str,
        url: str,
        duration_s: float,
        renew_s: float,
        margin_s: float,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.holder = holder
        self.prepare: Callable[[], Awaitable[None]] = _no_preparation
        self.on_begin: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self._lease = lease
        self._candidate = LeaseCandidate(
            holder=holder, url=url, duration_s=duration_s, margin_s=margin_s, is_absence_new=lease.is_absence_new
        )
        self._renew_s = renew_s
        self._clock = clock
        self._rng = rng or Random()
        self._is_term = False
        self._margin_s = margin_s
        self._due = asyncio.Event()
        self._looked = asyncio.Event()
        self._trouble = ""

    @property
    def is_leading(self) -> bool:
        """Whether we may act at this moment."""
        return self._is_term and self._candidate.remaining_s(self._clock()) > 0

    @property
    def is_late(self) -> bool:
        """Whether our time is over and our term not yet: one look at the lease says which of them goes on."""
        return self._is_term and not self.is_leading

    async def looked(self, within_s: float) -> None:
        """Until we are not late any more, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_late:
                    self._looked.clear()
                    self._due.set()
                    await self._looked.wait()

    @property
    def other_holder(self) -> LeaseRecord | None:
        """Who leads, when we do not and somebody does."""
        return None if self.is_leading else self._candidate.other_holder(self._clock())

    @property
    def trouble(self) -> str:
        """Why the last look at the lease, or the term that it should have begun, came to nothing; empty: it did not."""
        return self._trouble

    @property
    def leader_url(self) -> str | None:
        """Of whoever leads, as far as we know; ours when we do."""
        other = self.other_holder
        return self._candidate.own_record.url if self.is_leading else other.url if other is not None else None

    def require(self) -> None:
        """Raises LeaseLost unless we may act at this moment."""
        if not self.is_leading:
            raise LeaseLost("this orchestrator does not hold the lease")

    def doubt(self, reason: str) -> None:
        """An agent has obeyed somebody newer: stop at once, and look at the lease."""
        if self._is_term:
            self._end(reason)
        self._due.set()

    def lead_until(self, until: float) -> None:
        """Begin a term without asking for the lease, up to this time: for whoever knows that nobody else is there."""
        self._candidate.hold_until(until)
        self._end_in_time()
        self._begin()

    async def start(self) -> None:
        """The first look, before anything is served: so that who starts alone leads from its first answer on."""
        try:
            await self.step()
        except LeaseUnreachable as exc:
            self._trouble = str(exc)
            log.warning("lease not reached", error=str(exc))

    async def run(self) -> None:
        """Take, renew or watch until cancelled; a lease that cannot be reached ends a term in time.

        On a starved machine our time may be over before we look again. Where the record is still as we wrote it nobody
        has led since, and the term goes on.
        """
        while True:
            self._due.clear()
            left_s = self._candidate.remaining_s(self._clock())
            try:
                if self.is_late and not await self._may_look_late():
                    self._end_in_time()
                # A lease that hangs must not keep a term from ending before somebody else may act.
                async with asyncio.timeout(left_s + self._margin_s / 2 if left_s else self._renew_s * 5):
                    await self.step()
            except TimeoutError:
                self._trouble = "the lease did not answer in time"
                log.warning("lease not reached", error=self._trouble, left_s=round(left_s, 2))
                if self.is_late and left_s and await self._may_look_late():
                    continue
            except LeaseUnreachable as exc:
                self._trouble = str(exc)
                log.warning("lease not reached", error=repr(exc), left_s=round(left_s, 2))
            except Exception:
                log.exception("lease step failed")
            self._end_in_time()
            self._looked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s()):
                    await self._due.wait()

    async def _may_look_late(self) -> bool:
        try:
            async with asyncio.timeout(self._renew_s):
                return await self._lease.is_late_look_safe()
        except (TimeoutError, OSError) as exc:
            log.warning("not known who else could hold the lease", error=repr(exc))
            return False

    def _wait_s(self) -> float:
        """Until the next look: sooner where our own time ends before it, or somebody else's."""
        now = self._clock()
        ends = [end for end in (self._candidate.remaining_s(now), self._candidate.free_in_s(now)) if end]
        return max(_SOON_S, min([self._renew_s * self._rng.uniform(0.8, 1.0), *ends]))

    async def step(self) -> None:
        """One look at the lease, and one write if it is ours to renew or free to take. Raises LeaseUnreachable."""
        candidate, clock = self._candidate, self._clock
        candidate.observe_record(await self._lease.read(), clock())
        if not candidate.holds_lease():
            self._end_in_time()  # somebody else may have had it, and given it back, since our last look
        other = candidate.last_seen if candidate.last_seen and candidate.last_seen.holder != self.holder else None
        is_gone = other is not None and await self._lease.is_gone(other)
        asked_at = clock()
        wanted = candidate.next_record(asked_at, is_holder_gone=is_gone)
        if wanted is not None and await self._lease.write(wanted, candidate.last_seen):
            candidate.record_written(wanted, asked_at)
        self._end_in_time()
        self._trouble = ""
        if candidate.remaining_s(clock()) > 0 and not self._is_term:
            try:
                await self.prepare()
            except OrchestratorError as exc:
                self._trouble = str(exc)
                log.warning("cannot lead yet, though the lease is ours", error=str(exc))
            except Exception:
                log.exception("cannot lead yet, though the lease is ours")
            else:
                self._begin()

    async def release(self) -> None:
        """An orderly end: whoever is next need not wait."""
        held = self._candidate.last_seen if self._candidate.remaining_s(self._clock()) else None
        if self._is_term:
            self._end("stopping")
        if held is not None and held.holder == self.holder:
            gone = LeaseRecord(
                holder=held.holder, url="", beat=held.beat + 1, duration_s=held.duration_s, is_released=True
            )
            with contextlib.suppress(LeaseUnreachable):
                await self._lease.write(gone, held)
        self._lease.close()

    def _begin(self) -> None:
        """Begin a term, if there is still time for one."""
        if self._is_term or not self._candidate.remaining_s(self._clock()):
            return
        try:
            self.on_begin()
        except Exception as exc:
            # Of what is not ours the words may be anything, and whoever is refused may be anybody.
            self._trouble = str(exc) if isinstance(exc, OrchestratorError) else ""
            log.exception("cannot lead, though the lease is ours")
        else:
            self._is_term = True
            log.info("leading", holder=self.holder)

    def _end_in_time(self) -> None:
        if self._is_term and not self._candidate.remaining_s(self._clock()):
            self._end("the lease was not renewed in time, or somebody else has it")

    def _end(self, reason: str) -> None:
        self._is_term = False
        log.warning("not leading any more", holder=self.holder, reason=reason)
        self.on_end()
