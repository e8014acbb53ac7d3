"""The usual time to a session's next turn, learned for each tenant and adapter."""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import frexp

# Gaps are counted by powers of two: below a second, below two, and so on; the last ones are as long as any.
_BINS = 11
# Before anything is known half of all turns have a next one, after any of these gaps alike.
_FIRST_SHARE = 1.0 / _BINS
# Beyond so many turns the counts are halved, so that a habit which has changed is learned again.
_MOST_TURNS = 2000.0


@dataclass(slots=True)
class ReturnHabit:
    """After how many seconds the next turns of sessions came, and how many sessions had no next turn."""

    gaps: list[float] = field(default_factory=lambda: [_FIRST_SHARE] * _BINS)
    ended: float = 1.0

    def add_gap(self, gap_s: float) -> None:
        """Count a next turn, so many seconds after the end of the one before."""
        self.gaps[_bin_of(gap_s)] += 1.0
        self._forget()

    def add_end(self) -> None:
        """Count a session without a next turn."""
        self.ended += 1.0
        self._forget()

    def take_back_end(self) -> None:
        """Count a session no longer as one without a next turn: that came."""
        self.ended = max(1.0, self.ended - 1.0)

    def chance(self, idle_s: float) -> float:
        """The chance that a session returns which has been idle for so long; falls with that."""
        at = _bin_of(idle_s)
        end_s = 2.0**at
        share = (end_s - idle_s) / (end_s / 2 if at else 1.0)
        later = sum(self.gaps[at + 1 :]) + self.gaps[at] * max(0.0, min(1.0, share))
        return later / (later + self.ended)

    def usual_gap_s(self) -> float:
        """Seconds to the next turn of the middle session that returns: the end of its bin."""
        half, seen = sum(self.gaps) / 2, 0.0
        for at, count in enumerate(self.gaps):
            seen += count
            if seen >= half:
                return 2.0**at
        raise AssertionError("half of a sum is reached before its end")

    def _forget(self) -> None:
        if sum(self.gaps) + self.ended > _MOST_TURNS:
            self.gaps = [count / 2 for count in self.gaps]
            self.ended /= 2


def _bin_of(gap_s: float) -> int:
    """The bin of a gap: 0 is below a second, n below 2 ** n seconds."""
    return min(_BINS - 1, max(0, frexp(gap_s)[1]))


class ReturnHabits:
    """The habits of tenants with adapters; of too many the one that was unused for longest is forgotten."""

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._habits: OrderedDict[tuple[str, str], ReturnHabit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._habits)

    def habit(self, tenant: str, lora_id: str) -> ReturnHabit:
        """The habit of a tenant's sessions with an adapter (empty: the base model); a new one where none is known."""
        key = tenant, lora_id
        found = self._habits.get(key)
        if found is None:
            found = self._habits[key] = ReturnHabit()
            if len(self._habits) > self._most:
                self._habits.popitem(last=False)
        else:
            self._habits.move_to_end(key)
        return found
