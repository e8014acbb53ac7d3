"""Whether a request may wait, and for how long it would: bounds in number and in bytes, and how fast a line moves.

Pure: time is an argument.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf

from router.core.index import WorkerId

# Over how many seconds of waiting the speed of a line is measured, and for how many the guess counts with which it
# begins: that an engine does a second of prefill in a second. Decoding makes it slower.
_DRAIN_HORIZON_S = 20.0
_DRAIN_PRIOR_S = 2.0
_MOST_DRAINS = 1000


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait at once.

    tenant_share  of either that one tenant may take, so that nobody fills the room alone
    """

    requests: float = inf
    size_bytes: float = inf
    tenant_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.tenant_share <= 1:
            raise ValueError(f"tenant_share must be above 0 and at most 1, found {self.tenant_share:g}")


@dataclass(slots=True)
class Room:
    """Who waits, counted by tenant; whoever enters must leave."""

    bounds: Bounds = field(default_factory=Bounds)
    requests: int = 0
    size_bytes: int = 0
    _tenants: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many wait."""
        return self.requests

    def refusal(self, tenant: str, size_bytes: int) -> str | None:
        """Why one more request cannot wait here, or None. One alone always may, however large."""
        bounds, share = self.bounds, self.bounds.tenant_share
        if not self.requests:
            return None
        if self.requests >= bounds.requests:
            return f"{self.requests} requests wait already, as many as may"
        if self.size_bytes + size_bytes > bounds.size_bytes:
            return f"waiting requests hold {self.size_bytes} bytes already, of {bounds.size_bytes:g}"
        own, own_bytes = self._tenants.get(tenant, (0, 0))
        if own + 1 > max(1.0, share * bounds.requests):
            return f"{own} requests of yours wait already; one tenant may have {share:.0%} of {bounds.requests:g}"
        if own and own_bytes + size_bytes > share * bounds.size_bytes:
            return f"waiting requests of yours hold {own_bytes} bytes; one tenant may have {share:.0%} of the room"
        return None

    def enter(self, tenant: str, size_bytes: int) -> None:
        """One more waits."""
        own, own_bytes = self._tenants.get(tenant, (0, 0))
        self._tenants[tenant] = own + 1, own_bytes + size_bytes
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, tenant: str, size_bytes: int) -> None:
        """One of those that entered, with the same words, waits no more."""
        own, own_bytes = self._tenants.pop(tenant)
        if own > 1:
            self._tenants[tenant] = own - 1, own_bytes - size_bytes
        self.requests -= 1
        self.size_bytes -= size_bytes


@dataclass(slots=True)
class _Speed:
    work_s: float = 0.0
    passed_s: float = 0.0


@dataclass(slots=True)
class Drain:
    """How fast each replica's line moves, in seconds of prefill a second, measured while somebody waits for it."""

    _speeds: dict[WorkerId, _Speed] = field(default_factory=dict)
    _at: float = 0.0

    def begin(self, now: float) -> None:
        """Somebody waits, and nobody did before."""
        self._at = now
        if len(self._speeds) > _MOST_DRAINS:
            self._speeds.clear()

    def passed(self, waited_for: Iterable[WorkerId], now: float) -> None:
        """Time has passed in which requests waited for these replicas."""
        # One long standstill of this process is no slow line.
        passed_s = min(max(0.0, now - self._at), _DRAIN_HORIZON_S)
        self._at = now
        fading = exp(-passed_s / _DRAIN_HORIZON_S)
        for worker in waited_for:
            speed = self._speeds.get(worker)
            if speed is None:
                speed = self._speeds[worker] = _Speed()
            speed.work_s *= fading
            speed.passed_s = speed.passed_s * fading + passed_s

    def served(self, worker: WorkerId, work_s: float) -> None:
        """One that waited was sent."""
        speed = self._speeds.get(worker)
        if speed is not None:
            speed.work_s += work_s

    def rate(self, worker: WorkerId) -> float:
        """Seconds of work a second."""
        speed = self._speeds.get(worker)
        if speed is None:
            return 1.0
        return (speed.work_s + _DRAIN_PRIOR_S) / (speed.passed_s + _DRAIN_PRIOR_S)


def wait_s(ahead_s: float, bound: Mapping[WorkerId, float], able: Iterable[WorkerId], drain: Drain) -> float:
    """Seconds until the replicas that are able have worked off what is ahead of a request in the line.

    ahead_s  of all work in the line; for the able ones as much of it is taken as they have of the whole
    bound    the line's work by the replica that each request would go to as things stand
    """
    total_s = sum(bound.values())
    theirs_s = rate = 0.0
    for worker in able:
        theirs_s += bound.get(worker, 0.0)
        rate += drain.rate(worker)
    return ahead_s * theirs_s / (total_s * rate) if total_s and rate else 0.0
