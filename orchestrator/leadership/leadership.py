"""Leader election: take the lease, renew it, and stop acting before another process can hold it.

A lease that expired ends no term by itself: the holder stops acting, and reads the record. Where the record is still
the holder's, no other process has led since, and a renewal by compare-and-set goes on with the same term and epoch.
What a late holder had begun is fenced: agents and the store refuse an epoch below the newest.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from random import Random
from typing import Protocol

import structlog

from orchestrator.core.errors import LeaseLost, LeaseUnreachable, OrchestratorError
from orchestrator.core.lease import LeaseCandidate, LeaseRecord
from orchestrator.leadership.file_lease import Lease

log = structlog.get_logger()


_SUCCESSOR_S = 0.1  # between reads of a lease that we have released
_SOON_S = 0.02  # between reads of an expired lease that another process may be taking
_CHECK_RENEWALS = 5  # deadline of one check of the lease, in `renew_s`
_FAILURES_APART = _CHECK_RENEWALS + 2  # two failed checks are at most so far apart, in `renew_s`
_UNREAD_S = 60.0  # for so long the last holder of a lease that cannot be read counts as its holder
_AFTER_TROUBLE_S = 0.1  # at least, between reads that calls ask for while the lease cannot be reached


class TermHandler(Protocol):
    """Does what the beginning and the end of a term need."""

    async def prepare_term(self) -> None:
        """Awaited when the lease is ours, before a term begins."""
        ...

    def begin_term(self) -> None:
        """Called when a term begins. If it or `prepare_term` raises, the term does not begin and is tried again."""
        ...

    def end_term(self) -> None:
        """Called when a term ends."""
        ...


class Leadership:
    """Holds the lease or watches its holder. A term is the time for which this process may act.

    handler      returns who prepares, begins and ends terms: the parts that act in a term need this one first
    late_wait_s  how long a call waits for a renewal that is late: as long as a standby would need to take over
    """

    def __init__(
        self,
        lease: Lease,
        handler: Callable[[], TermHandler],
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
        self._handler = handler
        self._lease = lease
        self._candidate = LeaseCandidate(
            holder=holder, url=url, duration_s=duration_s, margin_s=margin_s, is_absence_new=lease.is_absence_new
        )
        self._renew_s = renew_s
        self._clock = clock
        self._rng = rng or Random()
        self._is_term = False
        self.late_wait_s = duration_s - margin_s
        self._due = asyncio.Event()
        self._checked = asyncio.Event()
        self._check_lock = asyncio.Lock()
        self._is_stepping_down = False
        self._trouble = ""
        self._failing_since: float | None = None  # when reads of the lease began to fail
        self._failed_at = 0.0  # when the last one failed

    @property
    def is_leading(self) -> bool:
        """Whether this process may act now."""
        return self._is_term and self._candidate.remaining_s(self._clock()) > 0

    @property
    def has_term(self) -> bool:
        """Whether our term has not ended; it may be late."""
        return self._is_term

    @property
    def is_late(self) -> bool:
        """Whether our lease has expired while our term has not ended: the next read of the lease decides."""
        return self._is_term and not self.is_leading

    async def wait_for_check(self) -> None:
        """Request a read of the lease and wait until it no longer `is_late`, at most `late_wait_s` seconds.

        Those seconds begin with the first read that failed: in a long outage calls do not wait, one after another.
        """
        waited_s = self._failing_s()
        if waited_s >= self.late_wait_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.late_wait_s - waited_s):
                while self.is_late:
                    self._checked.clear()
                    self._due.set()
                    await self._checked.wait()

    def _failing_s(self) -> float:
        """Seconds for which reads of the lease have failed; 0.0 after a pause of this process, which no read saw."""
        now = self._clock()
        if self._failing_since is None or now - self._failed_at > self._renew_s * _FAILURES_APART:
            return 0.0
        return now - self._failing_since

    async def confirm_leading(self) -> None:
        """Return once this process may act, after a renewal that is late. Raises LeaseLost if it may not."""
        await self.wait_for_check()
        self.require_leading()

    @property
    def other_holder(self) -> LeaseRecord | None:
        """The lease record of another process that leads; None while we lead or no leader is known.

        While the lease cannot be read this is its last holder, for a minute: that one may go on renewing it.
        """
        if self.is_leading:
            return None
        return self._candidate.other_holder(self._clock(), unread_s=min(_UNREAD_S, self._failing_s()))

    @property
    def lease_place(self) -> str:
        """Where the lease is, in words."""
        return self._lease.place

    @property
    def trouble(self) -> str:
        """Why the last read of the lease or the start of a term failed; empty: it did not."""
        return self._trouble

    @property
    def leader_url(self) -> str | None:
        """URL of the leader, as far as known, else None; ours when we lead."""
        other = self.other_holder
        return self._candidate.own_record.url if self.is_leading else other.url if other is not None else None

    def require_leading(self) -> None:
        """Raise LeaseLost unless this process may act now."""
        if not self.is_leading:
            raise LeaseLost("this orchestrator does not hold the lease")

    def on_newer_leader(self, reason: str) -> None:
        """End our term at once and request a read of the lease: an agent has obeyed a newer epoch.

        A late term is not ended here: its holder does not act, and the read decides.
        """
        if self.is_leading:
            self._end_term(reason)
        self._due.set()

    def lead_until(self, until: float) -> None:
        """Begin a term up to this time without the lease; only where no other orchestrator can exist."""
        self._candidate.hold_until(until)
        if self.is_late:
            self._end_term("its time is over")
        self._begin_term()

    async def start(self) -> None:
        """Read the lease once before serving, and take it if it is free, so that a single orchestrator leads at once.

        A lease that cannot be reached is logged.
        """
        try:
            await self.check_lease()
        except LeaseUnreachable as exc:
            self._trouble = str(exc)
            log.warning("lease not reached", error=str(exc))

    async def run(self) -> None:
        """Take, renew or watch the lease until cancelled. Errors are logged."""
        while True:
            self._due.clear()
            try:
                # A lease call that hangs must not keep calls waiting without a reason that they can name.
                async with asyncio.timeout(self._renew_s * _CHECK_RENEWALS):
                    await self.check_lease()
            except TimeoutError:
                self._record_failure("the lease did not answer in time")
            except LeaseUnreachable as exc:
                self._record_failure(str(exc))
            except Exception:
                log.exception("lease step failed")
            self._checked.set()
            if self._trouble:
                await asyncio.sleep(_AFTER_TROUBLE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s()):
                    await self._due.wait()

    def _record_failure(self, trouble: str) -> None:
        """Record and log that the lease could not be read or written."""
        now = self._clock()
        self._trouble = trouble
        self._failing_since = now - self._failing_s()
        self._failed_at = now
        log.warning("lease not reached", error=trouble, left_s=round(self._candidate.remaining_s(now), 2))

    def _wait_s(self) -> float:
        """Seconds until the next read of the lease.

        About `renew_s` with jitter, less if our lease or another holder's expires earlier.
        """
        now = self._clock()
        if self._is_stepping_down and self.other_holder is None:
            return _SUCCESSOR_S  # calls wait for the next leader
        if self.is_late and not self._trouble:
            return _SOON_S  # the renewal itself took longer than the lease
        ends = [end for end in (self._candidate.remaining_s(now), self._candidate.free_in_s(now)) if end]
        return max(_SOON_S, min([self._renew_s * self._rng.uniform(0.8, 1.0), *ends]))

    async def check_lease(self) -> None:
        """Read the lease, and write it if it is ours to renew or free to take; begins or ends our term accordingly.

        After `step_down` it is only read, and released if it is still ours. Awaits `prepare` before a term, whose
        errors are logged. Raises LeaseUnreachable.
        """
        async with self._check_lock:  # or a renewal could undo a release
            await self._check_lease()

    async def _check_lease(self) -> None:
        """As `check_lease`, by one task at a time."""
        candidate, clock = self._candidate, self._clock
        candidate.observe_record(await self._lease.read(), clock())
        was_late = self.is_late
        if was_late and not candidate.holds_lease():
            # Another process has it, or may have held and released it since our last read.
            self._end_term("the lease expired, and its record is not ours any more")
        other = candidate.last_seen if candidate.last_seen and candidate.last_seen.holder != self.holder else None
        is_gone = other is not None and await self._lease.is_gone(other)
        asked_at = clock()
        wanted = None if self._is_stepping_down else candidate.next_record(asked_at, is_holder_gone=is_gone)
        if wanted is not None and await self._lease.write(wanted, candidate.last_seen):
            candidate.record_written(wanted, asked_at)
            if was_late and self.is_leading:
                log.warning("lease renewed late; no other process led meanwhile", holder=self.holder)
        if self._is_stepping_down:
            await self._write_release()
        self._trouble, self._failing_since = "", None
        if candidate.remaining_s(clock()) > 0 and not self._is_term and not self._is_stepping_down:
            try:
                await self._handler().prepare_term()
            except OrchestratorError as exc:
                self._trouble = str(exc)
                log.warning("cannot lead yet, though the lease is ours", error=str(exc))
            except Exception:
                log.exception("cannot lead yet, though the lease is ours")
            else:
                self._begin_term()

    async def step_down(self) -> None:
        """End the term, with its handler, and release the lease, so that the next leader need not wait.

        This process leads no more, and goes on watching the lease for its next holder. Safe to repeat. A lease that
        cannot be reached within `renew_s` expires instead.
        """
        self._is_stepping_down = True
        if self._is_term:
            self._end_term("stopping")
        with contextlib.suppress(LeaseUnreachable, TimeoutError):
            async with asyncio.timeout(self._renew_s), self._check_lock:
                await self._write_release()
        self._due.set()

    async def _write_release(self) -> None:
        """Mark the lease as released if it is ours. Raises LeaseUnreachable."""
        candidate, now = self._candidate, self._clock()
        held = candidate.last_seen if candidate.remaining_s(now) else None
        if held is not None and held.holder == self.holder:
            gone = LeaseRecord(
                holder=held.holder, url="", beat=held.beat + 1, duration_s=held.duration_s, is_released=True
            )
            if await self._lease.write(gone, held):
                candidate.record_written(gone, now)

    async def wait_for_successor(self, within_s: float) -> None:
        """After `step_down` has begun: wait until another process leads, at most `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_leading or self.other_holder is None:
                    self._checked.clear()
                    await self._checked.wait()

    async def release(self) -> None:
        """Step down, and close the lease."""
        await self.step_down()
        self._lease.close()

    def _begin_term(self) -> None:
        """Begin a term unless one is in progress or the lease has expired; logs the handler's errors."""
        if self._is_term or self._is_stepping_down or not self._candidate.remaining_s(self._clock()):
            return
        try:
            self._handler().begin_term()
        except Exception as exc:
            # Callers see `trouble`, so it holds messages of our own errors only.
            self._trouble = str(exc) if isinstance(exc, OrchestratorError) else ""
            log.exception("cannot lead, though the lease is ours")
        else:
            self._is_term = True
            log.info("leading", holder=self.holder)

    def _end_term(self, reason: str) -> None:
        """End the term, log the reason, and call the handler."""
        self._is_term = False
        log.warning("not leading any more", holder=self.holder, reason=reason)
        self._handler().end_term()
