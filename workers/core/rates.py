"""Tokens a second, learned from two of the engine's counters: tokens done, and seconds spent on them."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median


@dataclass(slots=True)
class Rate:
    """The median over the newest windows. A window closes once `min_tokens` have been counted in it.

    One slow or lucky window moves nothing; short prompts are summed up until there is enough to divide.
    """

    min_tokens: float
    keep: int = 15
    _since: tuple[float, float] | None = None
    _windows: deque[float] = field(default_factory=deque)

    def add(self, tokens_total: float, seconds_total: float) -> float:
        """The rate, after the counters' newest reading; 0.0 before the first full window.

        Counters that fell belong to a restarted engine: counting starts again, what was learned stays.
        """
        since = self._since
        if since is None or tokens_total < since[0] or seconds_total < since[1]:
            self._since = (tokens_total, seconds_total)
            return self.value
        tokens, seconds = tokens_total - since[0], seconds_total - since[1]
        if tokens >= self.min_tokens and seconds > 0:
            self._since = (tokens_total, seconds_total)
            self._windows.append(tokens / seconds)
            if len(self._windows) > self.keep:
                self._windows.popleft()
        return self.value

    @property
    def value(self) -> float:
        return median(self._windows) if self._windows else 0.0
