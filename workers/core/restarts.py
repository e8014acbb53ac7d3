"""Backoff between restarts of a failing engine."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Consecutive failures and the wait after them. A failure after `stable_s` of readiness counts as the first."""

    base_s: float = 0.5
    max_s: float = 20.0
    loop_after: int = 5
    loop_retry_s: float = 60.0
    stable_s: float = 120.0
    failures: int = 0

    def after_failure(self, up_s: float) -> "RestartBackoff":
        """The backoff after one more failure, `up_s` seconds after the engine became ready (0 if it never did)."""
        failures = 1 if up_s >= self.stable_s else self.failures + 1
        return RestartBackoff(self.base_s, self.max_s, self.loop_after, self.loop_retry_s, self.stable_s, failures)

    @property
    def is_loop(self) -> bool:
        """Whether the engine is in a crash loop: restarts are slow and need an operator's attention."""
        return self.failures >= self.loop_after

    def delay_s(self, rng: Random) -> float:
        """Seconds to wait before the restart: doubles per failure, with jitter of up to half."""
        full = self.loop_retry_s if self.is_loop else min(self.max_s, self.base_s * 2 ** (self.failures - 1))
        return full * rng.uniform(0.5, 1.0)
