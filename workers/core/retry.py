"""Number of attempts at a source, and the waits between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in a row without a byte of progress; waits double from `base_s` up to `max_s`."""

    attempts: int = 5
    base_s: float = 0.5
    max_s: float = 20.0

    def delays_s(self, rng: Random) -> Iterator[float]:
        """The wait before each further attempt, with jitter of up to half."""
        for failures in range(self.attempts - 1):
            yield min(self.max_s, self.base_s * 2**failures) * rng.uniform(0.5, 1.0)
