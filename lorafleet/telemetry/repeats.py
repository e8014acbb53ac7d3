"""Log lines whose cause repeats: one at once, then at most one in a while, with a count of all that it stands for."""

import time
from collections.abc import Callable, Hashable

import msgspec

EVERY_S = 60.0
# Causes that are told apart; the one written about longest ago is forgotten for a further one.
_MOST_CAUSES = 1024


class _Repeats(msgspec.Struct):
    """When a cause was last written about, and how often it has come since."""

    written_at: float
    since: int = 0


class RepeatLimiter:
    """Which occurrences of each cause get a log line: the first, and then one in EVERY_S if it comes again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._causes: dict[Hashable, _Repeats] = {}

    def count(self, cause: Hashable) -> int:
        """Count an occurrence: how many a line written now stands for, itself included; 0 if none is to be written."""
        now = self._clock()
        repeats = self._causes.get(cause)
        if repeats is not None and now - repeats.written_at < EVERY_S:
            repeats.since += 1
            return 0
        # Taken out and put in again, so that the order is that of the lines.
        self._causes.pop(cause, None)
        if len(self._causes) >= _MOST_CAUSES:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = _Repeats(now)
        return 1 + (repeats.since if repeats is not None else 0)
