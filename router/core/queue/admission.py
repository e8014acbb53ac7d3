"""Whether a request may wait, for how long it would, and when to come back: bounds in number and in bytes, how fast a
line moves, and what those who were turned away have been told.

Pure: time is an argument.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf

from router.core.kv.index import WorkerId

# Over how many seconds of waiting the speed of a line is measured, and for how many the guess counts with which it
# begins: that an engine does a second of prefill in a second. Decoding makes it slower. After as many seconds of
# waiting the speed is evidence.
_DRAIN_HORIZON_S = 20.0
_DRAIN_PRIOR_S = 2.0
_MOST_DRAINS = 1000
# Of how many waits the errors are remembered, and how many count with the guess that the first one is. Waits of less
# than a second say nothing of long ones.
_KEPT_RATIOS = 150
_FIRST_RATIOS = 25
_FIRST_RATIO = 1.5
_LEAST_EXPECTED_S = 1.0
# This share of predictions, each with the margin, is to come true; what waited in vain would have waited for so much
# longer. Both by trial in a simulation: a fortieth in vain at most, in steady overload and when others come.
_FORESEEN_SHARE = 0.97
_IN_VAIN = 1.5
_LEAST_MARGIN = 1.25
_MOST_MARGIN = 4.0
_LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
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
class QueueUsage:
    """Who waits, counted by tenant; whoever enters must leave."""

    bounds: QueueLimits = field(default_factory=QueueLimits)
    requests: int = 0
    size_bytes: int = 0
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)

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
        own, own_bytes = self.tenants.get(tenant, (0, 0))
        if own + 1 > max(1.0, share * bounds.requests):
            return f"{own} requests of yours wait already; one tenant may have {share:.0%} of {bounds.requests:g}"
        if own and own_bytes + size_bytes > share * bounds.size_bytes:
            return f"waiting requests of yours hold {own_bytes} bytes; one tenant may have {share:.0%} of the room"
        return None

    def add(self, tenant: str, size_bytes: int) -> None:
        """One more waits."""
        own, own_bytes = self.tenants.get(tenant, (0, 0))
        self.tenants[tenant] = own + 1, own_bytes + size_bytes
        self.requests += 1
        self.size_bytes += size_bytes

    def remove(self, tenant: str, size_bytes: int) -> None:
        """One of those that entered, with the same words, waits no more."""
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
    """How fast each line moves, in seconds of prefill a second, measured while somebody waits in it. A line is those
    who wait for one replica, or the requests of one tenant.
    """

    horizon_s: float = _DRAIN_HORIZON_S
    _speeds: dict[str, _ServiceSpeed] = field(default_factory=dict)
    _at: float = 0.0

    def begin(self, now: float) -> None:
        """Somebody waits, and nobody did before."""
        self._at = now
        if len(self._speeds) > _MOST_DRAINS:
            self._speeds.clear()

    def advance(self, waited_for: Iterable[str], now: float) -> None:
        """Time has passed in which requests waited in these lines."""
        # One long standstill of this process is no slow line.
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
        """One that waited was sent."""
        speed = self._speeds.get(line)
        if speed is not None:
            speed.work_s += work_s

    def is_measured(self, line: str) -> bool:
        """Whether it has been waited in for long enough to tell."""
        speed = self._speeds.get(line)
        return speed is not None and speed.passed_s >= _DRAIN_PRIOR_S

    def rate(self, line: str, guess: float = 1.0) -> float:
        """Seconds of work a second; `guess` is what counts before any was measured, and a little after."""
        speed = self._speeds.get(line)
        if speed is None:
            return guess
        return (speed.work_s + guess * _DRAIN_PRIOR_S) / (speed.passed_s + _DRAIN_PRIOR_S)


class WaitMargin:
    """How much longer than predicted requests have waited of late: what a prediction is multiplied by, so that of those
    who are let in few wait in vain.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque([_FIRST_RATIO] * _FIRST_RATIOS, maxlen=_KEPT_RATIOS)
        self._margin = _FIRST_RATIO

    def record_wait(self, expected_s: float, waited_s: float, *, is_over: bool) -> None:
        """A request has waited. `is_over`: it was sent; else it left when it might wait no longer."""
        if expected_s < _LEAST_EXPECTED_S:
            return
        # How long it would still have waited is not known.
        self._ratios.append(waited_s / expected_s * (1.0 if is_over else _IN_VAIN))
        ordered = sorted(self._ratios)
        self._margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, ordered[int(_FORESEEN_SHARE * len(ordered))]))

    @property
    def margin(self) -> float:
        """By what a predicted wait is to be multiplied."""
        return self._margin


@dataclass(slots=True)
class RetryTimes:
    """When those who were turned away were told to come back, by tenant: who comes later is told a later time."""

    _until: dict[str, float] = field(default_factory=dict)

    def next_s(self, tenant: str, room_s: float, each_s: float, most_s: float, now: float) -> float:
        """Seconds after which one more of this tenant finds room.

        room_s  until there is room for the first of those that were turned away
        each_s  until there is room for one more, from one to the next
        most_s  what the others of its tenant add to that at most: of those that were told, not all come back
        """
        if len(self._until) > _MOST_DRAINS:
            self._until = {name: until for name, until in self._until.items() if until > now}
        first_s = max(_LEAST_RETRY_S, room_s)
        until = max(now + first_s, self._until.get(tenant, 0.0) + each_s)
        self._until[tenant] = until = min(until, now + first_s + most_s)
        return until - now


def wait_s(
    ahead_s: float,
    bound: Mapping[WorkerId, float],
    able: Iterable[WorkerId],
    drain: ServiceRates,
    guess: Callable[[WorkerId], float] = lambda _: 1.0,
) -> float:
    """Seconds until the replicas that are able have worked off what is ahead of a request in the line.

    ahead_s  of all work in the line; for the able ones as much of it is taken as they have of the whole
    bound    the line's work by the replica that each request would go to as things stand
    guess    of a replica: seconds of work a second, before any was measured
    """
    total_s = sum(bound.values())
    theirs_s = rate = 0.0
    for worker in able:
        theirs_s += bound.get(worker, 0.0)
        rate += drain.rate(worker, guess(worker))
    return ahead_s * theirs_s / (total_s * rate) if total_s and rate else 0.0
