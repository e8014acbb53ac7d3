"""How many attempts after the first there may be: a share of all requests, so that trouble is not doubled.

The balance leaks, so that a quiet hour does not pay for a storm of retries. Source of the shape and of the numbers:
Finagle's RetryBudget and Linkerd's retry budgets (20 %, 10 a second, 10 s).
"""

from dataclasses import dataclass, field
from math import exp, expm1


@dataclass(slots=True)
class RetryBudget:
    """One base model's; see `take`.

    share        of recent requests that may be tried again
    floor_per_s  and this many a second besides, so that a few requests an hour can be, too
    window_s     what counts as recent
    """

    share: float = 0.2
    floor_per_s: float = 3.0
    window_s: float = 10.0
    requests: int = 0
    refused: int = 0
    _balance: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._balance = self.floor_per_s * self.window_s

    def begin(self, now: float) -> None:
        """From now on requests come."""
        self._at = now

    def take(self, now: float) -> bool:
        """Whether one more attempt may be made; it is then paid for.

        `requests` is counted up by whoever sends one, and settled here: nothing is computed for a request that works.
        """
        windows = max(0.0, now - self._at) / self.window_s
        # As if they had come evenly since the last look: the leak applies to them, too.
        kept = -expm1(-windows) / windows if windows > 0 else 1.0
        deposit = (self.share * self.requests + self.floor_per_s * self.window_s * windows) * kept
        self._balance = self._balance * exp(-windows) + deposit
        self._at, self.requests = now, 0
        if self._balance < 1:
            self.refused += 1
            return False
        self._balance -= 1
        return True
