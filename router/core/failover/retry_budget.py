"""The retry budget: attempts after the first are a bounded share of requests, so that failures do not double the load.

The balance leaks, so that a quiet hour does not save up for many retries at once. Source of the shape and the numbers:
Finagle's RetryBudget and Linkerd's retry budgets (20 %, 10 a second, 10 s).
"""

from dataclasses import dataclass, field
from math import exp, expm1


@dataclass(slots=True)
class RetryBudget:
    """One base model's retry budget.

    share        share of recent requests that may be retried
    floor_per_s  retries a second besides, so that a few requests an hour can be retried, too
    window_s     seconds that count as recent
    requests     requests sent since the last `take`: the caller counts them
    refused      retries that were refused
    """

    share: float = 0.2
    floor_per_s: float = 3.0
    window_s: float = 10.0
    requests: int = 0
    refused: int = 0
    _balance: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        """Start with the balance of a full window without requests."""
        self._balance = self.floor_per_s * self.window_s

    def begin(self, now: float) -> None:
        """Start the budget's clock; call once, before the first `take`."""
        self._at = now

    def take(self, now: float) -> bool:
        """Take one retry out of the budget; returns whether there was one, and counts a refusal. Resets `requests`.

        The deposits for `requests` are settled here, so that requests that work cost no computation.
        """
        windows = max(0.0, now - self._at) / self.window_s
        # As if the requests had come evenly since the last call: the leak applies to them, too.
        kept = -expm1(-windows) / windows if windows > 0 else 1.0
        deposit = (self.share * self.requests + self.floor_per_s * self.window_s * windows) * kept
        self._balance = self._balance * exp(-windows) + deposit
        self._at, self.requests = now, 0
        if self._balance < 1:
            self.refused += 1
            return False
        self._balance -= 1
        return True
