"""Who may act, by one record that all orchestrators can see and that only compare-and-set changes.

Clocks of different machines are never compared. A holder measures its own time from before its last renewal; everybody
else from when they saw that renewal, which is later. So the holder stops, by a margin, before anybody can take over.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The record. `beat` grows with every renewal, so that a renewal can be seen without a clock.

    holder       one process; a restarted one is another
    url          where the others reach it
    is_released  given back in an orderly end: free at once
    """

    holder: str
    url: str
    beat: int = 0
    duration_s: float
    is_released: bool = False


class LeaseCandidate:
    """What one process makes of the record. `now` is always its own monotonic clock.

    is_absence_new   whether a record that this process has never seen has never been: then it is free at once, else
                     only when the time of a holder whose record was deleted is over
    """

    def __init__(
        self, *, holder: str, url: str, duration_s: float, margin_s: float, is_absence_new: bool = True
    ) -> None:
        self.mine = LeaseRecord(holder=holder, url=url, duration_s=duration_s)
        self.seen: LeaseRecord | None = None
        self._margin_s = margin_s
        self._is_absence_new = is_absence_new
        self._seen_at = 0.0
        self._has_seen = False
        self._beat = -1  # the highest seen or written
        self._until: float | None = None

    def look(self, found: LeaseRecord | None, now: float) -> None:
        """The record was read, before `now`."""
        if found != self.seen or not self._has_seen:
            # A process that has never seen one finds no lease: a first start. One that had seen it waits: the holder
            # of a record that somebody deleted still acts.
            is_first = found is None and not self._has_seen and self._is_absence_new
            self._seen_at = now - self.mine.duration_s if is_first else now
        self.seen, self._has_seen = found, True
        self._beat = self._beat if found is None else max(self._beat, found.beat)
        if found is not None and found.holder != self.mine.holder:
            self._until = None

    def wanted(self, now: float, *, is_holder_gone: bool) -> LeaseRecord | None:
        """What to write in place of what was seen; None while somebody else holds the lease.

        is_holder_gone   that process certainly runs no more
        """
        if not self._may_write(now, is_holder_gone):
            return None
        # No two writes of ours are alike, not even one that is lost or deleted: else somebody who saw the one and sees
        # the other would take it for the same, and its time for over.
        self._beat += 1
        return replace(self.mine, beat=self._beat)

    def _may_write(self, now: float, is_holder_gone: bool) -> bool:
        seen = self.seen
        if seen is not None and seen.holder == self.mine.holder and not seen.is_released:
            return True
        if seen is None and self.left_s(now) > 0:
            return True  # somebody deleted ours: the time that it gave us is not over
        lasts_s = self.mine.duration_s if seen is None else seen.duration_s
        is_over = now - self._seen_at >= lasts_s
        return is_over or (seen is not None and (seen.is_released or is_holder_gone))

    def wrote(self, hold: LeaseRecord, asked_at: float) -> None:
        """It is written. `asked_at`: before the call, because the time that it took is not ours."""
        self.seen, self._has_seen, self._seen_at = hold, True, asked_at
        self._until = None if hold.is_released else asked_at + hold.duration_s - self._margin_s

    def hold_until(self, until: float) -> None:
        """Held up to then without a record, by whoever knows that nobody else is there."""
        self._until = until

    def is_held(self) -> bool:
        """Whether the record, as it was last read, is ours: then nobody has led since we wrote it."""
        return self.seen is not None and self.seen.holder == self.mine.holder and not self.seen.is_released

    def left_s(self, now: float) -> float:
        """Seconds for which we may still act; 0.0 when we may not."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def free_in_s(self, now: float) -> float:
        """Seconds until somebody else's hold is over, as far as we know; 0.0 when nobody else holds it."""
        other = self.other(now)
        return 0.0 if other is None else self._seen_at + other.duration_s - now

    def other(self, now: float) -> LeaseRecord | None:
        """Who else holds the lease, as far as we know."""
        seen = self.seen
        if seen is None or seen.holder == self.mine.holder or seen.is_released:
            return None
        return seen if now - self._seen_at < seen.duration_s else None
