"""Whether a request may wait, how long it would, and when a refused client should come back.

Pure: time is an argument.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

from router.core.kv.index import WorkerId

# Seconds of waiting over which a service rate is measured. The first guess, a second of prefill in a second, counts for
# two of them; decoding makes engines slower. After as many seconds the rate counts as measured.
_RATE_HORIZON_S = 20.0
_RATE_PRIOR_S = 2.0
_MAX_LINES = 1000
# Waits of a tenant whose prediction errors are remembered, and how many there must be before the first guess counts no
# more. Waits of less than a second say nothing about long ones.
_KEPT_RATIOS = 150
_FIRST_RATIOS = 25
_FIRST_RATIO = 1.5
_LEAST_EXPECTED_S = 1.0
# Share of predictions that must hold with the margin, and how much longer a request that gave up would have waited. By
# trial in a simulation: at most one in forty admitted requests waits in vain, in steady and in growing overload.
_FORESEEN_SHARE = 0.97
_IN_VAIN = 1.5
_LEAST_MARGIN = 1.25
_MOST_MARGIN = 4.0
_LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests, and how many bytes of them, may wait at once.

    tenant_share  share of either that one tenant may take
    settings      the settings that the two numbers come from
    """

    requests: float = inf
    size_bytes: float = inf
    tenant_share: float = 1.0
    settings: tuple[str, str] = ("max_waiting_requests", "max_waiting_bytes")

    def __post_init__(self) -> None:
        """Raise ValueError for a tenant share out of its range."""
        if not 0 < self.tenant_share <= 1:
            raise ValueError(f"tenant_share must be above 0 and at most 1, found {self.tenant_share:g}")


class WaitRefusal(NamedTuple):
    """Why a request may not wait, and the setting that says so."""

    why: str
    limit: str


@dataclass(slots=True)
class QueueUsage:
    """Requests that wait, counted by tenant. Each `add` needs one `remove` with the same arguments."""

    bounds: QueueLimits = field(default_factory=QueueLimits)
    requests: int = 0
    size_bytes: int = 0
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many requests wait."""
        return self.requests

    def refusal(self, tenant: str, size_bytes: int) -> WaitRefusal | None:
        """Why one more request may not wait, or None. A single request always may, however large."""
        bounds, share = self.bounds, self.bounds.tenant_share
        if not self.requests:
            return None
        of_requests, of_bytes = bounds.settings
        if self.requests >= bounds.requests:
            return WaitRefusal(f"{self.requests} requests wait already, as many as may", of_requests)
        if self.size_bytes + size_bytes > bounds.size_bytes:
            why = f"waiting requests hold {self.size_bytes} bytes already, of {bounds.size_bytes:g}"
            return WaitRefusal(why, of_bytes)
        own, own_bytes = self.tenants.get(tenant, (0, 0))
        if own + 1 > max(1.0, share * bounds.requests):
            why = f"{own} requests of yours wait already; one tenant may have {share:.0%} of {bounds.requests:g}"
            return WaitRefusal(why, "tenant_share")
        if own and own_bytes + size_bytes > share * bounds.size_bytes:
            why = f"waiting requests of yours hold {own_bytes} bytes; one tenant may have {share:.0%} of the room"
            return WaitRefusal(why, "tenant_share")
        return None

    def add(self, tenant: str, size_bytes: int) -> None:
        """Count one more waiting request, with its bytes, for the tenant and in all."""
        own, own_bytes = self.tenants.get(tenant, (0, 0))
        self.tenants[tenant] = own + 1, own_bytes + size_bytes
        self.requests += 1
        self.size_bytes += size_bytes

    def remove(self, tenant: str, size_bytes: int) -> None:
        """Count one waiting request less, with its bytes; a tenant without any is dropped.

        Raises KeyError if it has none.
        """
        own, own_bytes = self.tenants.pop(tenant)
        if own > 1:
            self.tenants[tenant] = own - 1, own_bytes - size_bytes
        self.requests -= 1
        self.size_bytes -= size_bytes


@dataclass(slots=True)
class _ServiceSpeed:
    work_s: float = 0.0
    passed_s: float = 0.0


@dataclass(slots=True)
class ServiceRates:
    """Seconds of queued work served a second, by line: the requests for one replica, or those of one tenant.

    Measured while requests wait in the line.
    """

    horizon_s: float = _RATE_HORIZON_S
    _speeds: dict[str, _ServiceSpeed] = field(default_factory=dict)
    _at: float = 0.0

    def start(self, now: float) -> None:
        """Start measuring: the queue is no longer empty. Forgets all rates when there are too many lines."""
        self._at = now
        if len(self._speeds) > _MAX_LINES:
            self._speeds.clear()

    def advance(self, waited_for: Iterable[str], now: float) -> None:
        """Count the time since the last call for these lines, in which requests wait; older measurements fade."""
        # A long standstill of this process does not make a line slow.
        passed_s = min(max(0.0, now - self._at), self.horizon_s)
        self._at = now
        fading = exp(-passed_s / self.horizon_s)
        for line in waited_for:
            speed = self._speeds.get(line)
            if speed is None:
                speed = self._speeds[line] = _ServiceSpeed()
            speed.work_s *= fading
            speed.passed_s = speed.passed_s * fading + passed_s

    def record_served(self, line: str, work_s: float) -> None:
        """Count the seconds of work of a request of this line that was sent. Ignored for an unmeasured line."""
        speed = self._speeds.get(line)
        if speed is not None:
            speed.work_s += work_s

    def is_measured(self, line: str) -> bool:
        """Whether requests have waited in this line for long enough to measure it."""
        speed = self._speeds.get(line)
        return speed is not None and speed.passed_s >= _RATE_PRIOR_S

    def rate(self, line: str, guess: float = 1.0) -> float:
        """Seconds of work served a second. `guess` counts before any measurement, and a little after."""
        speed = self._speeds.get(line)
        if speed is None:
            return guess
        return (speed.work_s + guess * _RATE_PRIOR_S) / (speed.passed_s + _RATE_PRIOR_S)


class WaitMargin:
    """The factor on a tenant's predicted waits with which few of its admitted requests wait in vain.

    Learned from the tenant's own recent waits: what another tenant's requests wait says nothing about them, because in
    fair order they are served apart.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, deque[float]] = {}
        self._factors: dict[str, float] = {}

    def __len__(self) -> int:
        """Tenants whose waits are remembered."""
        return len(self._ratios)

    def record_wait(self, tenant: str, expected_s: float, waited_s: float, *, is_over: bool) -> None:
        """Add a request's wait to its tenant's, and recompute the factor; predictions below a second are left out.

        Of too many tenants the one that waited longest ago is forgotten. `is_over`: the request was sent; else it gave
        up at the end of its wait.
        """
        if expected_s < _LEAST_EXPECTED_S:
            return
        ratios = self._ratios.pop(tenant, None) or deque(maxlen=_KEPT_RATIOS)
        # How much longer it would have waited is not known.
        ratios.append(waited_s / expected_s * (1.0 if is_over else _IN_VAIN))
        self._ratios[tenant] = ratios
        ordered = sorted([*ratios, *[_FIRST_RATIO] * (_FIRST_RATIOS - len(ratios))])
        self._factors[tenant] = min(_MOST_MARGIN, max(_LEAST_MARGIN, ordered[int(_FORESEEN_SHARE * len(ordered))]))
        if len(self._ratios) > _MAX_LINES:
            oldest = next(iter(self._ratios))
            del self._ratios[oldest], self._factors[oldest]

    def factor(self, tenant: str) -> float:
        """The factor for a predicted wait of this tenant."""
        return self._factors.get(tenant, _FIRST_RATIO)


@dataclass(slots=True)
class RetryTimes:
    """The times that refused clients were given, by tenant, so that each gets a later one than the one before."""

    _until: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Tenants whose time is remembered."""
        return len(self._until)

    def next_s(self, tenant: str, room_s: float, each_s: float, most_s: float, now: float) -> float:
        """Seconds after which one more request of this tenant finds room; remembers that time as given to the tenant.

        room_s  seconds until there is room for the first refused request
        each_s  seconds from one request's room to the next one's
        most_s  the most that earlier refusals add: not all of those clients come back
        """
        if len(self._until) > _MAX_LINES:
            self._until = {name: until for name, until in self._until.items() if until > now}
        first_s = max(_LEAST_RETRY_S, room_s)
        until = max(now + first_s, self._until.get(tenant, 0.0) + each_s)
        self._until[tenant] = until = min(until, now + first_s + most_s)
        return until - now


def wait_s(
    ahead_s: float,
    backlog: Mapping[WorkerId, float],
    able: Iterable[WorkerId],
    rates: ServiceRates,
    guess: Callable[[WorkerId], float] = lambda _: 1.0,
) -> float:
    """Seconds until the able replicas have served the work that is ahead of a request in the queue.

    ahead_s  queued seconds of work ahead; the able replicas' part of it is as their part of the whole queue
    backlog  all queued work by likely replica
    guess    a replica's seconds of work a second, before any measurement
    """
    total_s = sum(backlog.values())
    theirs_s = rate = 0.0
    for worker in able:
        theirs_s += backlog.get(worker, 0.0)
        rate += rates.rate(worker, guess(worker))
    return ahead_s * theirs_s / (total_s * rate) if total_s and rate else 0.0
