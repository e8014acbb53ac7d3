"""The lease protocol: one record that all orchestrators see and that only compare-and-set changes decides who leads.

Clocks of different machines are never compared. A holder counts its time from before its last renewal, the others from
when they saw that renewal, which is later. So the holder stops, by a margin, before another can take over.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The lease record. `beat` grows with every renewal, so that others see a renewal without comparing clocks.

    holder       id of one process; a restarted process has another
    url          where other orchestrators reach the holder
    is_released  given back in an orderly shutdown: free at once
    """

    holder: str
    url: str
    beat: int = 0
    duration_s: float
    is_released: bool = False


class LeaseCandidate:
    """One process's state in the lease protocol. `now` is always its own monotonic clock.

    is_absence_new   whether a missing record means that no process has ever led: then the lease is free at once.
                     Otherwise the record may have been deleted, and its holder still acts for `duration_s`
    own_record       the record that this process writes
    last_seen        the record as last read or written; None: there is none
    """

    def __init__(
        self, *, holder: str, url: str, duration_s: float, margin_s: float, is_absence_new: bool = True
    ) -> None:
        self.own_record = LeaseRecord(holder=holder, url=url, duration_s=duration_s)
        self.last_seen: LeaseRecord | None = None
        self._margin_s = margin_s
        self._is_absence_new = is_absence_new
        self._seen_at = 0.0
        self._has_seen = False
        self._beat = -1  # the highest seen or written
        self._until: float | None = None

    def observe_record(self, found: LeaseRecord | None, now: float) -> None:
        """Record what was read before `now`. If another holder is in it, this process may no longer act."""
        if found != self.last_seen or not self._has_seen:
            # No record at a first start: the lease is free. No record after one was seen: it was deleted, and its
            # holder still acts.
            is_first = found is None and not self._has_seen and self._is_absence_new
            self._seen_at = now - self.own_record.duration_s if is_first else now
        self.last_seen, self._has_seen = found, True
        self._beat = self._beat if found is None else max(self._beat, found.beat)
        if found is not None and found.holder != self.own_record.holder:
            self._until = None

    def next_record(self, now: float, *, is_holder_gone: bool) -> LeaseRecord | None:
        """The record to write in place of `last_seen`, with the next beat; None while another process holds the lease.

        is_holder_gone   whether the holder's process has certainly ended
        """
        if not self._may_write(now, is_holder_gone):
            return None
        # No two of our writes are alike, not even lost ones. Otherwise a process that sees the second would take it for
        # the first, whose time may be over.
        self._beat += 1
        return replace(self.own_record, beat=self._beat)

    def _may_write(self, now: float, is_holder_gone: bool) -> bool:
        """Whether this process may write the record: it holds the lease, or the lease is free."""
        seen = self.last_seen
        if seen is not None and seen.holder == self.own_record.holder and not seen.is_released:
            return True
        if seen is None and self.remaining_s(now) > 0:
            return True  # our record was deleted, and its time is not over
        lasts_s = self.own_record.duration_s if seen is None else seen.duration_s
        is_over = now - self._seen_at >= lasts_s
        return is_over or (seen is not None and (seen.is_released or is_holder_gone))

    def record_written(self, hold: LeaseRecord, asked_at: float) -> None:
        """Record that `hold` is written, and how long this process may act by it.

        asked_at  time before the write, because the write's duration is not ours
        """
        self.last_seen, self._has_seen, self._seen_at = hold, True, asked_at
        self._until = None if hold.is_released else asked_at + hold.duration_s - self._margin_s

    def hold_until(self, until: float) -> None:
        """Hold the lease up to `until` without a record; only where no other orchestrator can exist."""
        self._until = until

    def holds_lease(self) -> bool:
        """Whether the record as last read is ours: then no other process has led since we wrote it."""
        return (
            self.last_seen is not None
            and self.last_seen.holder == self.own_record.holder
            and not self.last_seen.is_released
        )

    def remaining_s(self, now: float) -> float:
        """Seconds for which this process may still act; 0.0 when it may not."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def free_in_s(self, now: float) -> float:
        """Seconds until another process's lease expires, as far as known; 0.0 when no other holds it."""
        other = self.other_holder(now)
        return 0.0 if other is None else self._seen_at + other.duration_s - now

    def other_holder(self, now: float, *, unread_s: float = 0.0) -> LeaseRecord | None:
        """The unreleased, unexpired record of another process that holds the lease, as far as known; else None.

        unread_s  for so long the lease could not be read: its holder may have renewed it since
        """
        seen = self.last_seen
        if seen is None or seen.holder == self.own_record.holder or seen.is_released:
            return None
        return seen if now - self._seen_at < seen.duration_s + unread_s else None
