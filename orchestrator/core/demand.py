"""Demand in memory: routers' usage reports and `ensure` calls in, one `DemandSnapshot` out.

Reports are cumulative since the router's boot, so a lost report costs nothing; `seq` tells repeated and late ones. The
growth between two reports counts as spread evenly over the time between them, so that a router that was cut off does
not come back as a burst. Rates are exponentially weighted over `window_s`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from orchestrator.model.snapshot import DemandSnapshot, Pair, TrafficFigures, WantedReplicas

WINDOW_S = 60.0
ROUTER_LIVE_S = 10.0
"""A router's report expires after this much silence (make before break)."""
HABIT_WINDOWS = 15
"""`habits` are weighted over this many windows. Of real adapters the ten hottest stay about the same for an hour."""
SURGE_WINDOWS = 1 / 6
"""`surges` are weighted over this part of a window, so that a flash crowd is seen soon."""
ABANDONED_AFTER_S = 5.0
"""A want that is not repeated for this long counts as abandoned. A waiting `ensure` repeats it every `ENSURE_REPEAT_S`;
routers make the next `ensure` a second later."""
ENSURE_REPEAT_S = 2.0
ROUTER_GONE_S = 900.0
"""A router that is silent for this long without a last report is taken to have ended. Until then it may be at work, cut
off from here alone: agents hear it, but only those that it reaches. Longer than restarts and most partitions; a guess
otherwise."""
_BOOTS_REMEMBERED = 8
_FORGET_ROUTER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUsage:
    """One router's counts of one adapter on one worker since the router's boot; `in_flight` is the present number.

    work_s        seconds of engine work that the router estimates for the requests: prefill and decode
    errors        responses that failed in the engine, and broken streams
    first_tokens  requests with a first token; `first_token_s`: the sum of the seconds until it
    last_dispatch_age_s  seconds since a request was last sent there; None where the router does not say
    """

    lora_id: str
    worker_id: str
    engine_name: str
    requests: int
    in_flight: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    work_s: float = 0.0
    errors: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    last_dispatch_age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterQueueing:
    """One router's counts of one adapter's queued requests since the router's boot.

    held     requests whose wait for a load or for room is over; `hold_s`: the sum of their waits
    sheds    requests refused
    waiting  requests that wait now for room on workers that have the adapter
    """

    lora_id: str
    held: int = 0
    hold_s: float = 0.0
    sheds: int = 0
    waiting: int = 0


_TRAFFIC_FIELDS = tuple(field.name for field in fields(TrafficFigures))
_USAGE_FIELDS = tuple(name for name in _TRAFFIC_FIELDS if name in AdapterUsage.__dataclass_fields__)
_QUEUEING_FIELDS = tuple(name for name in _TRAFFIC_FIELDS if name in AdapterQueueing.__dataclass_fields__)
_CountKey = tuple[str, str]
"""(engine_name, worker_id) of an `AdapterUsage`; ("", lora_id) of an `AdapterQueueing`"""


@dataclass(frozen=True, slots=True)
class _RecentCounts:
    """The last count of every key that a router reported in the last hour, and of some of the hour before.

    A router drops a key that is unused for 15 minutes, and begins it at zero when it comes back. Without an end, ten
    thousand versions of a name would stay for as long as the router runs.
    """

    since: float = 0.0
    now: Mapping[_CountKey, AdapterUsage | AdapterQueueing] = field(default_factory=dict)
    before: Mapping[_CountKey, AdapterUsage | AdapterQueueing] = field(default_factory=dict)

    def get(self, key: _CountKey) -> AdapterUsage | AdapterQueueing | None:
        """The key's last count; None if it was not reported of late."""
        return self.now.get(key) or self.before.get(key)

    def turned(self, now: float) -> "_RecentCounts":
        """These counts, the older ones dropped where an hour is over."""
        return self if now - self.since < _FORGET_ROUTER_S else _RecentCounts(now, {}, self.now)

    def with_counts(self, fresh: Mapping[_CountKey, AdapterUsage | AdapterQueueing]) -> "_RecentCounts":
        """These counts with those of one more report."""
        return _RecentCounts(self.since, {**self.now, **fresh}, self.before)


@dataclass(slots=True)
class RouterCounts:
    """A router's last report. `uses`: (engine_name, worker_id) -> usage."""

    boot_id: str
    seq: int
    revision_seen: int
    reported_at: float
    uses: Mapping[tuple[str, str], AdapterUsage]
    has_ended: bool = False
    """Whether it was the last report of a router that stops."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """lora_id -> requests that wait for room"""
    running_in_pause: Mapping[str, int] | None = None
    """scope of a pause -> its requests that are at engines; None from a router of an older version, which holds none"""
    counted: _RecentCounts = field(default_factory=_RecentCounts)
    """The last count of every key of late, so that a key that a report omits is not counted again later."""
    old_boots: list[str] = field(default_factory=list)

    def in_flight(self, engine_name: str, worker_id: str) -> int:
        """The router's requests for the engine name that run on the worker; 0 if it reports none."""
        use = self.uses.get((engine_name, worker_id))
        return 0 if use is None else use.in_flight

    def in_flight_at(self, worker_id: str) -> int:
        """The router's requests for all engine names that run on the worker."""
        return sum(use.in_flight for use in self.uses.values() if use.worker_id == worker_id)


@dataclass(slots=True)
class _AdapterSums:
    """One adapter's sums, in the order of `TrafficFigures`'s fields: totals, and weighted rates as of `at`."""

    at: float
    total: list[float] = field(default_factory=lambda: [0.0] * len(_TRAFFIC_FIELDS))
    weighted: list[float] = field(default_factory=lambda: [0.0] * len(_TRAFFIC_FIELDS))
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

    keep_asked_s  how long the time of an adapter's last request is remembered: at least the longest `ttl_s`, and
                  the time after which a published name is idle
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.keep_asked_s = 0.0
        self._routers: dict[str, RouterCounts] = {}
        self._sums: dict[str, _AdapterSums] = {}
        self._open_wants: dict[str, _OpenWant] = {}
        self._last_load_at: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._current_versions: dict[str, str] = {}
        self._counts_since: float | None = None
        self._listens_since: float | None = None

    def begin_term(self, now: float) -> None:
        """Begin to listen: until a living router has had time to report, one may be unheard."""
        self._listens_since = now

    def record_report(
        self,
        router_id: str,
        boot_id: str,
        seq: int,
        revision_seen: int,
        uses: Iterable[AdapterUsage],
        now: float,
        *,
        holds: Iterable[AdapterQueueing] = (),
        is_last: bool = False,
        running_in_pause: Mapping[str, int] | None = None,
    ) -> bool:
        """Record a router's cumulative counts, and add their growth to the adapters' sums.

        is_last           the router stops: it has no requests any more, and is neither live nor silent from now on
        running_in_pause  as in `RouterCounts`

        False for a report that was recorded before or is out of date; it changes nothing.
        """
        last = self._routers.get(router_id)
        if last is not None and (boot_id in last.old_boots or (boot_id == last.boot_id and seq <= last.seq)):
            return False
        is_same_boot = last is not None and boot_id == last.boot_id
        holds = tuple(holds)
        table = {(use.engine_name, use.worker_id): use for use in uses}
        fresh: dict[_CountKey, AdapterUsage | AdapterQueueing] = {
            **table,
            **{("", hold.lora_id): hold for hold in holds},
        }
        counted = last.counted if last is not None and is_same_boot else _RecentCounts(since=now)
        counted = counted.turned(now)
        # The first report after our own start counts since the router's boot: a total, not a rate.
        if last is not None:
            for source, count in fresh.items():
                self._add_growth(count, counted.get(source), now, now - last.reported_at)
        elif self._counts_since is None:
            self._counts_since = now
        if self._listens_since is None:
            self._listens_since = now
        self._record_asked(table.values(), counted, now)
        old = [] if last is None else last.old_boots if is_same_boot else [*last.old_boots, last.boot_id]
        self._routers[router_id] = RouterCounts(
            boot_id=boot_id,
            seq=seq,
            revision_seen=revision_seen,
            reported_at=now,
            uses=table,
            waiting={hold.lora_id: hold.waiting for hold in holds if hold.waiting > 0},
            running_in_pause=running_in_pause,
            counted=counted.with_counts(fresh),
            has_ended=is_last,
            old_boots=old[-_BOOTS_REMEMBERED:],
        )
        return True

    def _record_asked(self, uses: Iterable[AdapterUsage], counted: _RecentCounts, now: float) -> None:
        """Update when each adapter was asked for last, from one report and the counts before it."""
        for use in uses:
            before = counted.get((use.engine_name, use.worker_id))
            if use.in_flight > 0:
                at = now
            elif use.last_dispatch_age_s is not None:
                at = now - max(0.0, use.last_dispatch_age_s)
            elif isinstance(before, AdapterUsage) and use.requests == before.requests:
                continue
            else:
                at = now  # a router of an older version: its first report, too, counts as a request
            self._note_asked(use.lora_id, at)

    def _note_asked(self, lora_id: str, at: float) -> None:
        """Set when the adapter was asked for last, unless a later time is known."""
        self._asked_at[lora_id] = max(at, self._asked_at.get(lora_id, -math.inf))

    def _add_growth(
        self,
        count: AdapterUsage | AdapterQueueing,
        before: AdapterUsage | AdapterQueueing | None,
        now: float,
        over_s: float,
    ) -> None:
        """Add the growth of one count since the last report, spread over `over_s` seconds, to the adapter's sums.

        The sums fade to `now` first. Without growth nothing changes.
        """
        names = _USAGE_FIELDS if isinstance(count, AdapterUsage) else _QUEUEING_FIELDS
        grown = [(name, _growth(getattr(count, name), getattr(before, name, 0))) for name in names]
        if not any(amount for _, amount in grown):
            return
        entry = self._sums.get(count.lora_id)
        if entry is None:
            entry = self._sums[count.lora_id] = _AdapterSums(now)
        share = _unit_weight(over_s, self.window_s)
        self._fade(entry, now)
        if isinstance(count, AdapterQueueing):
            self._note_asked(count.lora_id, now)
        for name, amount in grown:
            entry.total[_TRAFFIC_FIELDS.index(name)] += amount
            entry.weighted[_TRAFFIC_FIELDS.index(name)] += amount * share
            if name == "requests":
                entry.habit += amount / (HABIT_WINDOWS * self.window_s)
            elif name == "work_s":
                entry.surge += amount * _unit_weight(over_s, SURGE_WINDOWS * self.window_s)

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
        taken.weighted = [a + b for a, b in zip(taken.weighted, given.weighted, strict=True)]
        taken.habit, taken.surge = taken.habit + given.habit, taken.surge + given.surge
        given.weighted = [0.0] * len(_TRAFFIC_FIELDS)
        given.habit = given.surge = 0.0

    def _fade(self, entry: _AdapterSums, at: float) -> None:
        """Bring an adapter's weighted sums to a later time."""
        over_s = at - entry.at
        fade = math.exp(-over_s / self.window_s)
        entry.weighted = [amount * fade for amount in entry.weighted]
        entry.habit *= math.exp(-over_s / (HABIT_WINDOWS * self.window_s))
        entry.surge *= math.exp(-over_s / (SURGE_WINDOWS * self.window_s))
        entry.at = at

    def request_rate(self, lora_id: str, now: float) -> float:
        """The adapter's requests per second, recent ones weighted most."""
        return self.traffic_rates(lora_id, now).requests

    def traffic_rates(self, lora_id: str, now: float) -> TrafficFigures:
        """The adapter's traffic figures per second, recent ones weighted most."""
        entry = self._sums.get(lora_id)
        if entry is None:
            return TrafficFigures()
        scale = self._window_correction(now) * math.exp(-(now - entry.at) / self.window_s)
        return TrafficFigures(*(amount * scale for amount in entry.weighted))

    def traffic_totals(self, lora_id: str) -> TrafficFigures:
        """The adapter's totals since our own start. The difference of two totals is exact."""
        entry = self._sums.get(lora_id)
        return TrafficFigures() if entry is None else TrafficFigures(*entry.total)

    def live_routers(self, now: float) -> list[RouterCounts]:
        """Routers whose last report is younger than `ROUTER_LIVE_S`."""
        return [router for router in self._running_routers() if now - router.reported_at < ROUTER_LIVE_S]

    def silent_routers(self, now: float) -> list[RouterCounts]:
        """Routers that have not reported for `ROUTER_LIVE_S` without a last report: killed, or cut off from us.

        One that is cut off serves on, and may have requests that nobody reports.
        """
        return [router for router in self._running_routers() if now - router.reported_at >= ROUTER_LIVE_S]

    def _running_routers(self) -> Iterable[RouterCounts]:
        """Routers of the last hour that have not said that they stop."""
        return (router for router in self._routers.values() if not router.has_ended)

    def snapshot(self, now: float) -> DemandSnapshot:
        """The demand now. Drops expired requests for replicas, old sums and old routers first."""
        self._drop_old(now)
        in_use: set[Pair] = {
            (use.lora_id, use.worker_id)
            for router in self.live_routers(now)
            for use in router.uses.values()
            if use.in_flight > 0
        }
        scale = self._window_correction(now)
        requests, work_s = _TRAFFIC_FIELDS.index("requests"), _TRAFFIC_FIELDS.index("work_s")
        rates: dict[str, float] = {}
        work: dict[str, float] = {}
        habits: dict[str, float] = {}
        surges: dict[str, float] = {}
        for lora_id, entry in self._sums.items():
            fade = scale * math.exp(-(now - entry.at) / self.window_s)
            rates[lora_id] = entry.weighted[requests] * fade
            habits[lora_id] = entry.habit * math.exp(-(now - entry.at) / (HABIT_WINDOWS * self.window_s))
            surges[lora_id] = entry.surge * math.exp(-(now - entry.at) / (SURGE_WINDOWS * self.window_s))
            work[lora_id] = entry.weighted[work_s] * fade
        return DemandSnapshot(
            rates=rates,
            work=work,
            habits=habits,
            surges=surges,
            last_request_at={lora_id: entry.at for lora_id, entry in self._sums.items()},
            last_asked_at=dict(self._asked_at),
            is_blind=not self.live_routers(now),
            has_unheard_routers=self._has_unheard_routers(now),
            backlog=self._backlog(now),
            in_use=frozenset(in_use),
            wants=self.open_wants(now),
            last_load_at=dict(self._last_load_at),
        )

    def _has_unheard_routers(self, now: float) -> bool:
        """Whether a router may be at work unheard: one is silent and not taken to have ended, or we just began."""
        if self._listens_since is None or now - self._listens_since < ROUTER_LIVE_S:
            return True
        return any(now - router.reported_at < ROUTER_GONE_S for router in self.silent_routers(now))

    def _backlog(self, now: float) -> dict[str, float]:
        """lora_id -> seconds of engine work queued in routers: requests times the adapter's mean work per request.

        An adapter without a mean of its own gets that of all.
        """
        waiting: dict[str, int] = {}
        for router in self.live_routers(now):
            for lora_id, count in router.waiting.items():
                waiting[lora_id] = waiting.get(lora_id, 0) + count
        if not waiting:
            return {}
        requests, work_s = _TRAFFIC_FIELDS.index("requests"), _TRAFFIC_FIELDS.index("work_s")
        sums = self._sums.values()
        usual_s = _ratio(sum(entry.total[work_s] for entry in sums), sum(entry.total[requests] for entry in sums))
        found = {}
        for lora_id, count in waiting.items():
            entry = self._sums.get(lora_id)
            own_s = 0.0 if entry is None else _ratio(entry.weighted[work_s], entry.weighted[requests])
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
        self._last_load_at = {tenant: at for tenant, at in self._last_load_at.items() if now - at < _FORGET_ROUTER_S}
        # After ten windows less than 1/20,000 of a rate is left. Totals are kept for an hour.
        keep_s = max(10 * self.window_s, _FORGET_ROUTER_S)
        self._sums = {lora_id: entry for lora_id, entry in self._sums.items() if now - entry.at < keep_s}
        keep_s = max(self.keep_asked_s, _FORGET_ROUTER_S)
        self._asked_at = {lora_id: at for lora_id, at in self._asked_at.items() if now - at < keep_s}
        # A router may come back with its old boot id; its counts are kept for an hour so that they are not doubled.
        self._routers = {
            name: router for name, router in self._routers.items() if now - router.reported_at < _FORGET_ROUTER_S
        }


def _unit_weight(over_s: float, window_s: float) -> float:
    """The weighted rate of one unit that is spread evenly over the last `over_s` seconds."""
    return -math.expm1(-over_s / window_s) / over_s if over_s > 0 else 1 / window_s


def _ratio(amount: float, of: float) -> float:
    """`amount` divided by `of`; 0.0 if `of` is not positive."""
    return amount / of if of > 0 else 0.0


def _growth(count: float, before: float) -> float:
    """The increase since `before`; a count that fell began again from 0."""
    return count - before if count >= before else count
