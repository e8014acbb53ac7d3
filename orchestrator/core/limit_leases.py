"""Shares of the limits of keys and tenants: each limit holds over all routers together, by leases.

A router's report says what it has and what is in demand there, and the answer says what it has from then on. A share
grows only by what nobody else has: what a router was told to give up counts as its own until its next report says that
it has. So the shares of routers that report never add up to more than a limit.

A silent router keeps its shares for `LEASE_S`. It goes on by them: after that, the limit is exceeded by them at most.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import floor, inf

from orchestrator.core.routers import ROUTER_LIVE_S
from orchestrator.model.usage import HOT_SHARE, LimitShares, LimitUses, UsageReport

LEASE_S = ROUTER_LIVE_S
"""A silent router's shares are given to others after this time."""
LISTEN_S = 3.0
"""A new leader lets no share grow for so long: each router that it can reach has reported by then, once a second."""
REST_S = 60.0
"""A limit that was in demand nowhere for so long is shared out evenly again: all its buckets are full by then."""
SPARE_SHARE = 0.02
"""Part of a limit that is kept for routers where it is not in demand, all together."""
_MOST_BUSY = 2000
"""Limits that are shared out by demand at a time; further ones are shared out evenly."""
_ROUNDING = 1e-9


def shares(limit: float, demands: Mapping[str, float], *, unit: float = 0.0) -> dict[str, float]:
    """router -> its share of a limit. They add up to the limit.

    A demand is met where it is below an even share of what the smaller ones have left. What nobody demands is shared
    out evenly.

    unit  shares are multiples of it, and the limit is one; 0: any share
    """
    left, found = limit, dict[str, float]()
    for place, router in enumerate(sorted(demands, key=lambda router: (demands[router], router))):
        found[router] = min(demands[router], left / (len(demands) - place))
        left -= found[router]
    found = {router: share + left / len(demands) for router, share in found.items()}
    return _in_units(limit, found, unit) if unit else found


def _in_units(limit: float, found: Mapping[str, float], unit: float) -> dict[str, float]:
    """The shares in whole units: what rounding down leaves goes to those that lost most by it."""
    units = {router: floor(share / unit + _ROUNDING) for router, share in found.items()}
    spare = round(limit / unit) - sum(units.values())
    for router in sorted(found, key=lambda router: (units[router] * unit - found[router], router))[:spare]:
        units[router] += 1
    return {router: count * unit for router, count in units.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lessee:
    """A router by its last report, and what it may have since.

    held    as it said in its report
    leased  as it was answered; until its next report it has the one or the other
    """

    held: LimitUses
    leased: LimitShares
    reported_at: float

    def most(self, limit: str) -> float:
        """The largest share of a limit that the router may have now."""
        use = self.held.uses.get(limit)
        return max(self.held.idle_share if use is None else use.share, self.leased.of(limit))

    def demand(self, limit: str) -> float:
        """The router's demand for a limit; what it may be at most where the router does not report it."""
        use = self.held.uses.get(limit)
        return HOT_SHARE * self.held.idle_share if use is None else use.demand


@dataclass(slots=True)
class LimitLeases:
    """The shares that each router has. One writer: the event loop.

    by_router  routers whose leases run, by id
    busy_at    limit -> when it was last in demand somewhere
    units      limit -> the unit of its shares, where not 0
    """

    by_router: dict[str, _Lessee] = field(default_factory=dict)
    busy_at: dict[str, float] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)
    _grows_from: float = -inf

    def begin_term(self, now: float) -> None:
        """Begin to lead: forget all routers, and let no share grow until they have had time to report."""
        self.by_router.clear()
        self.busy_at.clear()
        self.units.clear()
        self._grows_from = now + LISTEN_S

    def record(self, report: UsageReport, now: float) -> LimitShares | None:
        """Record a router's report; its shares from now on. None for a router without limits, or that stops."""
        if report.is_last or report.limits is None:
            self.by_router.pop(report.router_id, None)
            return None
        for router_id in [each for each, lessee in self.by_router.items() if now - lessee.reported_at >= LEASE_S]:
            del self.by_router[router_id]
        lessee = _Lessee(held=report.limits, leased=LimitShares(idle_share=0.0), reported_at=now)
        self.by_router[report.router_id] = lessee
        groups: dict[str, list[_Lessee]] = {}
        for each in self.by_router.values():
            groups.setdefault(each.held.group, []).append(each)
        self._note_busy(report.limits, now, groups)
        leased = self._leased(report.limits.group, groups, now)
        self.by_router[report.router_id] = replace(lessee, leased=leased)
        return leased

    def _note_busy(self, held: LimitUses, now: float, groups: Mapping[str, list[_Lessee]]) -> None:
        """Note the limits that are in demand at a router's group, and forget those that rest."""
        for limit, use in held.uses.items():
            is_hot = sum(each.demand(limit) for each in groups[held.group]) >= HOT_SHARE / len(groups)
            if is_hot and (limit in self.busy_at or len(self.busy_at) < _MOST_BUSY):
                self.busy_at[limit] = now
            if use.unit:
                self.units[limit] = use.unit
        for limit in [each for each, at in self.busy_at.items() if now - at >= REST_S]:
            del self.busy_at[limit]
            self.units.pop(limit, None)

    def _leased(self, group: str, groups: Mapping[str, list[_Lessee]], now: float) -> LimitShares:
        """The shares of a group of routers, without those that are as the share of any other limit."""
        even = 1.0 / len(groups)
        idle_share = self._grown("", even, group, groups, now)
        if len(groups) == 1 and idle_share >= 1:
            return LimitShares(idle_share=1.0)
        found = {}
        for limit in {*self.busy_at, *(limit for each in self.by_router.values() for limit in each.held.uses)}:
            if limit in self.busy_at:
                found[limit] = self._grown(limit, self._target(limit, group, groups), group, groups, now)
            elif (share := self._grown(limit, even, group, groups, now)) < idle_share - _ROUNDING:
                found[limit] = share
        return LimitShares(idle_share=idle_share, shares=found)

    def _target(self, limit: str, group: str, groups: Mapping[str, list[_Lessee]]) -> float:
        """The group's share of a limit, once all others have theirs."""
        least = SPARE_SHARE / len(groups)
        demands = {name: max(least, sum(each.demand(limit) for each in members)) for name, members in groups.items()}
        return shares(1.0, demands, unit=self.units.get(limit, 0.0))[group]

    def _grown(self, limit: str, target: float, group: str, groups: Mapping[str, list[_Lessee]], now: float) -> float:
        """The share that a group may have now: its target, as far as it has that or nobody else does."""
        held = _most(groups[group], limit)
        others = sum(_most(members, limit) for name, members in groups.items() if name != group)
        free = 0.0 if now < self._grows_from else 1.0 - others
        return max(0.0, min(target, max(held, free)))


def _most(lessees: Iterable[_Lessee], limit: str) -> float:
    """The largest share of a limit that routers of one group may have: they use it together."""
    return max(each.most(limit) for each in lessees)
