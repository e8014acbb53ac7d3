"""When to start a failed engine again."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Consecutive failures, and how long to wait after them. An engine that stayed up `stable_s` starts over at 0."""

    base_s: float = 0.5
    max_s: float = 20.0
    loop_after: int = 5
    loop_retry_s: float = 60.0
    stable_s: float = 120.0
    failures: int = 0

    def failed(self, up_s: float) -> "RestartBackoff":
        """After an exit that followed `up_s` seconds of readiness (0 when it never was ready)."""
        failures = 1 if up_s >= self.stable_s else self.failures + 1
        return RestartBackoff(self.base_s, self.max_s, self.loop_after, self.loop_retry_s, self.stable_s, failures)

    @property
    def is_loop(self) -> bool:
        """Whether it fails so often that somebody should look; it is still tried again, slowly."""
        return self.failures >= self.loop_after

    def delay_s(self, rng: Random) -> float:
        """How long to wait now: doubling, drawn between half and all of it so that workers do not restart in step."""
        full = self.loop_retry_s if self.is_loop else min(self.max_s, self.base_s * 2 ** (self.failures - 1))
        return full * rng.uniform(0.5, 1.0)
