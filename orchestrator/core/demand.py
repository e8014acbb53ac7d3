"""Demand in memory: routers' usage reports and `ensure` calls in, one `DemandSnapshot` out.

What a report has brought counts as spread evenly over the time since the router's last one, so that a router that was
cut off does not come back as a burst. Rates are exponentially weighted over `window_s`. Requests count for rates when
they reach an engine: those that have ended since, and the growth of those that run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.limit_leases import LimitLeases
from orchestrator.core.routers import ROUTER_LIVE_S, RouterBook, RouterProgress
from orchestrator.core.worker_uses import WorkerUses
from orchestrator.model.snapshot import DemandSnapshot, Pair, WantedReplicas
from orchestrator.model.usage import RequestCounts, UsageReport

WINDOW_S = 60.0
HABIT_WINDOWS = 15
"""`habits` are weighted over this many windows. Of real adapters the ten hottest stay about the same for an hour."""
SURGE_WINDOWS = 1 / 6
"""`surges` are weighted over this part of a window, so that a flash crowd is seen soon."""
ABANDONED_AFTER_S = 5.0
"""A want that is not repeated for this long counts as abandoned. A waiting `ensure` repeats it every `ENSURE_REPEAT_S`;
routers make the next `ensure` a second later."""
ENSURE_REPEAT_S = 2.0
_KEEP_S = 3600.0
"""Totals, last requests and tenants' turns are kept for at least so long."""


@dataclass(slots=True)
class _AdapterSums:
    """One adapter's counts since our own start, and its weighted rates as of `at`.

    requests, work_s  a second, weighted over a window; `habit`: requests over many windows; `surge`: work over a part
    """

    at: float
    total: RequestCounts = field(default_factory=RequestCounts)
    requests: float = 0.0
    work_s: float = 0.0
    habit: float = 0.0
    surge: float = 0.0


@dataclass(slots=True)
class _OpenWant:
    """One adapter's open request for replicas. `until`: when it expires; `last`: when it was repeated last."""

    want: WantedReplicas
    until: float
    last: float


class DemandBook:
    """Routers' usage reports and open requests for replicas. One writer: the event loop.

    routers       the routers by their last reports
    uses          what each worker is to know of them
    limits        the routers' shares of the limits of keys and tenants
    keep_asked_s  how long the time of an adapter's last request is remembered: at least the longest `ttl_s`, and
                  the time after which a published name is idle
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.keep_asked_s = 0.0
        self.routers = RouterBook()
        self.uses = WorkerUses()
        self.limits = LimitLeases()
        self._sums: dict[str, _AdapterSums] = {}
        self._open_wants: dict[str, _OpenWant] = {}
        self._last_load_at: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._base_model_used_at: dict[str, float] = {}
        self._current_versions: dict[str, str] = {}
        self._counts_since: float | None = None
        self._listens_since: float | None = None

    def begin_term(self, now: float) -> None:
        """Begin to listen: until a living router has had time to report, one may be unheard."""
        self._listens_since = now
        self.limits.begin_term(now)

    def record_report(self, report: UsageReport, now: float) -> RouterProgress | None:
        """Record a router's report, and add what it brought to the adapters' sums.

        Returns what it brought. None for a report that was recorded before or is out of date; it changes nothing.
        """
        progress = self.routers.record(report, now)
        if progress is None:
            return None
        self.uses.add(progress.batches)
        # What was counted before we knew the router is of unknown age: no rate.
        if not progress.is_first:
            self._add_progress(progress, now)
        elif self._counts_since is None:
            self._counts_since = now
        if self._listens_since is None:
            self._listens_since = now
        for lora_id, age_s in report.asked_age_s.items():
            self._note_asked(lora_id, now - age_s)
        self._base_model_used_at |= dict.fromkeys(report.held_from_zero, now)
        for batch in progress.batches:
            for row in batch.rows:
                at = self._base_model_used_at.get(row.base_model, -math.inf)
                self._base_model_used_at[row.base_model] = max(at, now - batch.age_s)
        for lora_id in report.waiting:
            self._note_asked(lora_id, now)
        for lora_id, _, _ in self.routers.by_id[report.router_id].adapters_in_flight():
            self._note_asked(lora_id, now)
        return progress

    def _note_asked(self, lora_id: str, at: float) -> None:
        """Set when the adapter was asked for last, unless a later time is known."""
        self._asked_at[lora_id] = max(at, self._asked_at.get(lora_id, -math.inf))

    def _add_progress(self, progress: RouterProgress, now: float) -> None:
        """Add what a report has brought to the adapters' sums, spread over the time since the last one."""
        grown = {lora_id: RequestCounts() for lora_id in progress.started}
        for batch in progress.batches:
            for row in batch.rows:
                if row.adapter:
                    grown.setdefault(row.adapter, RequestCounts()).add(row.counts)
        share = _unit_weight(progress.over_s, self.window_s)
        surge_share = _unit_weight(progress.over_s, SURGE_WINDOWS * self.window_s)
        for lora_id, counts in grown.items():
            entry = self._sums.get(lora_id)
            if entry is None:
                entry = self._sums[lora_id] = _AdapterSums(now)
            self._fade(entry, now)
            entry.total.add(counts)
            # A request that was taken back from an engine had counted: no rate falls below 0 by it.
            requests = counts.sent + progress.started.get(lora_id, 0)
            entry.requests = max(0.0, entry.requests + requests * share)
            entry.habit = max(0.0, entry.habit + requests / (HABIT_WINDOWS * self.window_s))
            entry.work_s += counts.work_s * share
            entry.surge += counts.work_s * surge_share

    def add_want(self, lora_id: str, want: WantedReplicas, until: float) -> bool:
        """Add a request for replicas, merged with the adapter's open one. True when it asks for more than was known.

        until  when it expires unless it is repeated
        """
        if not want.is_repair:
            self._note_asked(lora_id, want.since)
        asked = self._open_wants.get(lora_id)
        if asked is None:
            self._open_wants[lora_id] = _OpenWant(want, until, want.since)
            return True
        joined = WantedReplicas(
            replicas=max(want.replicas, asked.want.replicas),
            may_evict=want.may_evict or asked.want.may_evict,
            is_repair=want.is_repair and asked.want.is_repair,
            # A request's wait begins with the request, not with the loss of a worker before it.
            since=want.since if asked.want.is_repair and not want.is_repair else asked.want.since,
            tenants=want.tenants | asked.want.tenants,
        )
        is_more = joined != asked.want
        self._open_wants[lora_id] = _OpenWant(joined, max(until, asked.until), max(want.since, asked.last))
        return is_more

    def open_wants(self, now: float) -> Mapping[str, WantedReplicas]:
        """lora_id -> open request for replicas, marked as abandoned where no caller has repeated it of late."""
        return {
            lora_id: replace(asked.want, is_abandoned=True) if now - asked.last > ABANDONED_AFTER_S else asked.want
            for lora_id, asked in self._open_wants.items()
        }

    def is_waited_for(self, lora_id: str, now: float) -> bool:
        """Whether requests wait for the adapter, as far as is known."""
        asked = self._open_wants.get(lora_id)
        return asked is not None and asked.want.is_waited_for and now - asked.last <= ABANDONED_AFTER_S

    def mark_abandoned(self, lora_id: str) -> None:
        """Mark the adapter's open request for replicas as abandoned, because a waiting client has gone.

        Other waiting clients renew it when they repeat their `ensure`. Ignored without an open request.
        """
        asked = self._open_wants.get(lora_id)
        if asked is not None:
            asked.last = -math.inf

    def record_load_started(self, lora_id: str, now: float) -> None:
        """Record that a load of the adapter has begun: a turn of each tenant that waits for it.

        Ignored if none waits.
        """
        asked = self._open_wants.get(lora_id)
        if asked is not None:
            self._last_load_at |= dict.fromkeys(asked.want.tenants, now)

    def drop_want(self, lora_id: str) -> None:
        """Drop the adapter's open request for replicas: the adapter is ready, and may be evicted like any other."""
        self._open_wants.pop(lora_id, None)

    def forget_adapter(self, lora_id: str) -> None:
        """Drop a deleted adapter's counts and its open request for replicas."""
        self._open_wants.pop(lora_id, None)
        self._sums.pop(lora_id, None)
        self._asked_at.pop(lora_id, None)

    def follow_names(self, current: Mapping[str, str]) -> None:
        """Let demand follow published names: one whose version has changed takes the demand of the version before.

        A version that is superseded begins at zero again: it has the demand of those who still ask for it alone. So a
        name with ten versions is one hot adapter and not ten.

        current  published name -> lora_id of the version that its requests get; names that are missing are forgotten
        """
        for name, lora_id in current.items():
            before = self._current_versions.get(name, lora_id)
            if before != lora_id:
                self._hand_over(before, lora_id)
        self._current_versions = dict(current)

    def _hand_over(self, before: str, after: str) -> None:
        """Move one adapter's rates to another. Totals stay: they say which version was asked."""
        given = self._sums.get(before)
        if given is None:
            return
        taken = self._sums.setdefault(after, _AdapterSums(given.at))
        at = max(given.at, taken.at)
        self._fade(given, at)
        self._fade(taken, at)
        taken.requests, taken.work_s = taken.requests + given.requests, taken.work_s + given.work_s
        taken.habit, taken.surge = taken.habit + given.habit, taken.surge + given.surge
        given.requests = given.work_s = given.habit = given.surge = 0.0

    def _fade(self, entry: _AdapterSums, at: float) -> None:
        """Bring an adapter's weighted sums to a later time."""
        over_s = at - entry.at
        fade = math.exp(-over_s / self.window_s)
        entry.requests *= fade
        entry.work_s *= fade
        entry.habit *= math.exp(-over_s / (HABIT_WINDOWS * self.window_s))
        entry.surge *= math.exp(-over_s / (SURGE_WINDOWS * self.window_s))
        entry.at = at

    def request_rate(self, lora_id: str, now: float) -> float:
        """The adapter's requests per second, recent ones weighted most."""
        entry = self._sums.get(lora_id)
        if entry is None:
            return 0.0
        return entry.requests * self._window_correction(now) * math.exp(-(now - entry.at) / self.window_s)

    def totals(self, lora_id: str) -> RequestCounts:
        """The counts of the adapter's requests that have ended since our own start. Read them, and do not keep them."""
        entry = self._sums.get(lora_id)
        return RequestCounts() if entry is None else entry.total

    def snapshot(self, now: float) -> DemandSnapshot:
        """The demand now. Drops expired requests for replicas, old sums and old routers first."""
        self._drop_old(now)
        live = self.routers.live(now)
        in_use: set[Pair] = {
            (lora_id, worker_id) for router in live for lora_id, worker_id, _ in router.adapters_in_flight()
        }
        scale = self._window_correction(now)
        rates: dict[str, float] = {}
        work: dict[str, float] = {}
        habits: dict[str, float] = {}
        surges: dict[str, float] = {}
        for lora_id, entry in self._sums.items():
            fade = scale * math.exp(-(now - entry.at) / self.window_s)
            rates[lora_id] = entry.requests * fade
            habits[lora_id] = entry.habit * math.exp(-(now - entry.at) / (HABIT_WINDOWS * self.window_s))
            surges[lora_id] = entry.surge * math.exp(-(now - entry.at) / (SURGE_WINDOWS * self.window_s))
            work[lora_id] = entry.work_s * fade
        return DemandSnapshot(
            rates=rates,
            work=work,
            habits=habits,
            surges=surges,
            last_request_at={lora_id: entry.at for lora_id, entry in self._sums.items()},
            last_asked_at=dict(self._asked_at),
            is_blind=not live,
            has_unheard_routers=self._has_unheard_routers(now),
            backlog=self._backlog(now),
            in_use=frozenset(in_use),
            wants=self.open_wants(now),
            last_load_at=dict(self._last_load_at),
            held_from_zero=self.routers.held_from_zero(now),
        )

    def idle_s(self, base_model: str, now: float) -> float:
        """Seconds since a request for the base model or its adapters was held or ended, or since we began to listen.

        0.0 while a router may be at work unheard.
        """
        if self._listens_since is None or self._has_unheard_routers(now):
            return 0.0
        return now - max(self._listens_since, self._base_model_used_at.get(base_model, -math.inf))

    def _has_unheard_routers(self, now: float) -> bool:
        """Whether a router may be at work unheard: one is silent and not taken to have ended, or we just began."""
        if self._listens_since is None or now - self._listens_since < ROUTER_LIVE_S:
            return True
        return self.routers.may_be_unheard(now)

    def _backlog(self, now: float) -> dict[str, float]:
        """lora_id -> seconds of engine work queued in routers: requests times the adapter's mean work per request.

        An adapter without a mean of its own gets that of all.
        """
        waiting: dict[str, int] = {}
        for router in self.routers.live(now):
            for lora_id, count in router.report.waiting.items():
                waiting[lora_id] = waiting.get(lora_id, 0) + count
        if not waiting:
            return {}
        totals = [entry.total for entry in self._sums.values()]
        usual_s = _ratio(sum(total.work_s for total in totals), sum(total.sent for total in totals))
        found = {}
        for lora_id, count in waiting.items():
            entry = self._sums.get(lora_id)
            own_s = 0.0 if entry is None else _ratio(entry.work_s, entry.requests)
            found[lora_id] = count * (own_s or usual_s)
        return found

    def _window_correction(self, now: float) -> float:
        """Factor that makes up for the part of the window before the first report, at most for three quarters of it.

        1.0 before any report.
        """
        if self._counts_since is None:
            return 1.0
        return 1 / -math.expm1(-max(0.25, (now - self._counts_since) / self.window_s))

    def _drop_old(self, now: float) -> None:
        """Drop expired requests for replicas, faded sums, and tenants and routers not seen for an hour."""
        self._open_wants = {lora_id: asked for lora_id, asked in self._open_wants.items() if asked.until > now}
        self._last_load_at = {tenant: at for tenant, at in self._last_load_at.items() if now - at < _KEEP_S}
        # After ten windows less than 1/20,000 of a rate is left. Totals are kept for an hour.
        keep_s = max(10 * self.window_s, _KEEP_S)
        self._sums = {lora_id: entry for lora_id, entry in self._sums.items() if now - entry.at < keep_s}
        keep_s = max(self.keep_asked_s, _KEEP_S)
        self._asked_at = {lora_id: at for lora_id, at in self._asked_at.items() if now - at < keep_s}
        used_at = self._base_model_used_at
        self._base_model_used_at = {name: at for name, at in used_at.items() if now - at < keep_s}
        self.routers.drop_old(now)


def _unit_weight(over_s: float, window_s: float) -> float:
    """The weighted rate of one unit that is spread evenly over the last `over_s` seconds."""
    return -math.expm1(-over_s / window_s) / over_s if over_s > 0 else 1 / window_s


def _ratio(amount: float, of: float) -> float:
    """`amount` divided by `of`; 0.0 if `of` is not positive."""
    return amount / of if of > 0 else 0.0
