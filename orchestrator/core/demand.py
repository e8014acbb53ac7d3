"""What routers sent and ask for, kept in memory: usage reports in, one `DemandSnapshot` snapshot out.

Reports are cumulative since the router's boot, so a lost one costs nothing, and one that comes twice or late is told by
its `seq`. What a report adds is taken as spread evenly over the time since the last one, so that a router that was cut
off for minutes does not come back as a burst. Rates are exponentially weighted over `window_s`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from orchestrator.core.state import DemandSnapshot, Pair, TrafficFigures, WantedReplicas

WINDOW_S = 60.0
LIVE_S = 10.0
"""A router's word expires after this much silence (make before break)."""
HABIT = 15
"""Windows over which a habit is weighted. Of real adapters the ten hottest stay about the same for an hour."""
SURGE = 1 / 6
"""Of a window: how soon a flash crowd is seen."""
LEFT_S = 5.0
"""Who waits for an adapter asks again sooner than this: an `ensure` that waits does so every `ASKS_S`, and routers make
the next one a second later."""
ASKS_S = 2.0
_BOOTS_REMEMBERED = 8
_FORGET_ROUTER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUsage:
    """One adapter on one worker, as one router counts it since its boot; in_flight is now.

    work_s        seconds of engine work that the router charges for the requests: prefill and decode
    errors        answers that were the engine's failure, and streams that broke
    first_tokens  requests that had a first token, and `first_token_s` the sum of the seconds until it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterQueueing:
    """One adapter as one router counts it since its boot: held back for a load or for room, for how long, refused.

    waiting  requests that wait for room now, at workers that have the adapter
    """

    lora_id: str
    held: int = 0
    hold_s: float = 0.0
    sheds: int = 0
    waiting: int = 0


_FLOWS = tuple(field.name for field in fields(TrafficFigures))
_USED = tuple(name for name in _FLOWS if name in AdapterUsage.__dataclass_fields__)
_HELD = tuple(name for name in _FLOWS if name in AdapterQueueing.__dataclass_fields__)
_Source = tuple[str, str]
"""(engine_name, worker_id) of a use; ("", lora_id) of a hold"""


@dataclass(slots=True)
class RouterCounts:
    """A router's last word. `uses`: (engine_name, worker_id) -> Use."""

    boot_id: str
    seq: int
    revision_seen: int
    heard_at: float
    uses: Mapping[tuple[str, str], AdapterUsage]
    waiting: Mapping[str, int] = field(default_factory=dict)
    """lora_id -> requests that wait for room"""
    counted: dict[_Source, AdapterUsage | AdapterQueueing] = field(default_factory=dict)
    """The last count of all that was named since that boot: what a report omits must not be counted again later."""
    old_boots: list[str] = field(default_factory=list)

    def in_flight(self, engine_name: str, worker_id: str) -> int:
        use = self.uses.get((engine_name, worker_id))
        return 0 if use is None else use.in_flight


@dataclass(slots=True)
class _AdapterSums:
    """One adapter's amounts, in the order of `TrafficFigures`'s fields: in all, and weighted as of `at`."""

    at: float
    total: list[float] = field(default_factory=lambda: [0.0] * len(_FLOWS))
    weighted: list[float] = field(default_factory=lambda: [0.0] * len(_FLOWS))
    habit: float = 0.0
    surge: float = 0.0


@dataclass(slots=True)
class _OpenWant:
    want: WantedReplicas
    until: float
    last: float


class DemandBook:
    """Takes reports and asks, answers with snapshots. One writer: the event loop."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._routers: dict[str, RouterCounts] = {}
        self._sums: dict[str, _AdapterSums] = {}
        self._wants: dict[str, _OpenWant] = {}
        self._turns: dict[str, float] = {}
        self._counts_since: float | None = None

    def report(
        self,
        router_id: str,
        boot_id: str,
        seq: int,
        revision_seen: int,
        uses: Iterable[AdapterUsage],
        now: float,
        *,
        holds: Iterable[AdapterQueueing] = (),
    ) -> bool:
        """Take a router's cumulative counts; False for one already taken, or older than what was taken."""
        last = self._routers.get(router_id)
        if last is not None and (boot_id in last.old_boots or (boot_id == last.boot_id and seq <= last.seq)):
            return False
        is_same_boot = last is not None and boot_id == last.boot_id
        holds = tuple(holds)
        table = {(use.engine_name, use.worker_id): use for use in uses}
        fresh: dict[_Source, AdapterUsage | AdapterQueueing] = {**table, **{("", hold.lora_id): hold for hold in holds}}
        counted = last.counted if last is not None and is_same_boot else {}
        # The first report after our own start counts from the router's boot: that is history, not a rate.
        if last is not None:
            for source, count in fresh.items():
                self._add(count, counted.get(source), now, now - last.heard_at)
        elif self._counts_since is None:
            self._counts_since = now
        old = [] if last is None else last.old_boots if is_same_boot else [*last.old_boots, last.boot_id]
        self._routers[router_id] = RouterCounts(
            boot_id=boot_id,
            seq=seq,
            revision_seen=revision_seen,
            heard_at=now,
            uses=table,
            waiting={hold.lora_id: hold.waiting for hold in holds if hold.waiting > 0},
            counted=counted | fresh,
            old_boots=old[-_BOOTS_REMEMBERED:],
        )
        return True

    def _add(
        self,
        count: AdapterUsage | AdapterQueueing,
        before: AdapterUsage | AdapterQueueing | None,
        now: float,
        over_s: float,
    ) -> None:
        names = _USED if isinstance(count, AdapterUsage) else _HELD
        grown = [(name, _growth(getattr(count, name), getattr(before, name, 0))) for name in names]
        if not any(amount for _, amount in grown):
            return
        entry = self._sums.get(count.lora_id)
        if entry is None:
            entry = self._sums[count.lora_id] = _AdapterSums(now)
        fade = math.exp(-(now - entry.at) / self.window_s)
        share = _share(over_s, self.window_s)
        entry.weighted = [amount * fade for amount in entry.weighted]
        entry.habit *= math.exp(-(now - entry.at) / (HABIT * self.window_s))
        entry.surge *= math.exp(-(now - entry.at) / (SURGE * self.window_s))
        entry.at = now
        for name, amount in grown:
            entry.total[_FLOWS.index(name)] += amount
            entry.weighted[_FLOWS.index(name)] += amount * share
            if name == "requests":
                entry.habit += amount / (HABIT * self.window_s)
            elif name == "work_s":
                entry.surge += amount * _share(over_s, SURGE * self.window_s)

    def want(self, lora_id: str, want: WantedReplicas, until: float) -> bool:
        """Remember that somebody asks, since now; True when that says more than was known."""
        asked = self._wants.get(lora_id)
        if asked is None:
            self._wants[lora_id] = _OpenWant(want, until, want.since)
            return True
        joined = WantedReplicas(
            replicas=max(want.replicas, asked.want.replicas),
            may_evict=want.may_evict or asked.want.may_evict,
            is_repair=want.is_repair and asked.want.is_repair,
            # A request that waits waits from its own beginning, not from when the worker was lost.
            since=want.since if asked.want.is_repair and not want.is_repair else asked.want.since,
            tenants=want.tenants | asked.want.tenants,
        )
        is_more = joined != asked.want
        self._wants[lora_id] = _OpenWant(joined, max(until, asked.until), max(want.since, asked.last))
        return is_more

    def wants(self, now: float) -> Mapping[str, WantedReplicas]:
        """What is asked for, and whether anybody still does."""
        return {
            lora_id: replace(asked.want, is_left=True) if now - asked.last > LEFT_S else asked.want
            for lora_id, asked in self._wants.items()
        }

    def left(self, lora_id: str) -> None:
        """One who waited has gone; others who still wait say so when they ask again."""
        asked = self._wants.get(lora_id)
        if asked is not None:
            asked.last = -math.inf

    def begun(self, lora_id: str, now: float) -> None:
        """A load of it has begun: whoever waits for it has had a turn."""
        asked = self._wants.get(lora_id)
        if asked is not None:
            self._turns |= dict.fromkeys(asked.want.tenants, now)

    def satisfied(self, lora_id: str) -> None:
        """It is there: asking ends, so that it may one day be a victim like any other."""
        self._wants.pop(lora_id, None)

    def forget(self, lora_id: str) -> None:
        """It is deleted."""
        self._wants.pop(lora_id, None)
        self._sums.pop(lora_id, None)

    def rate(self, lora_id: str, now: float) -> float:
        """Requests a second."""
        return self.flow(lora_id, now).requests

    def flow(self, lora_id: str, now: float) -> TrafficFigures:
        """Everything that is counted of an adapter, a second."""
        entry = self._sums.get(lora_id)
        if entry is None:
            return TrafficFigures()
        scale = self._scale(now) * math.exp(-(now - entry.at) / self.window_s)
        return TrafficFigures(*(amount * scale for amount in entry.weighted))

    def total(self, lora_id: str) -> TrafficFigures:
        """Everything that is counted of an adapter, in all since our own start; two of these make an exact share."""
        entry = self._sums.get(lora_id)
        return TrafficFigures() if entry is None else TrafficFigures(*entry.total)

    def live_routers(self, now: float) -> list[RouterCounts]:
        return [router for router in self._routers.values() if now - router.heard_at < LIVE_S]

    def snapshot(self, now: float) -> DemandSnapshot:
        self._expire(now)
        in_use: set[Pair] = {
            (use.lora_id, use.worker_id)
            for router in self.live_routers(now)
            for use in router.uses.values()
            if use.in_flight > 0
        }
        scale = self._scale(now)
        requests, work_s = _FLOWS.index("requests"), _FLOWS.index("work_s")
        rates: dict[str, float] = {}
        work: dict[str, float] = {}
        habits: dict[str, float] = {}
        surges: dict[str, float] = {}
        for lora_id, entry in self._sums.items():
            fade = scale * math.exp(-(now - entry.at) / self.window_s)
            rates[lora_id] = entry.weighted[requests] * fade
            habits[lora_id] = entry.habit * math.exp(-(now - entry.at) / (HABIT * self.window_s))
            surges[lora_id] = entry.surge * math.exp(-(now - entry.at) / (SURGE * self.window_s))
            work[lora_id] = entry.weighted[work_s] * fade
        return DemandSnapshot(
            rates=rates,
            work=work,
            habits=habits,
            surges=surges,
            last={lora_id: entry.at for lora_id, entry in self._sums.items()},
            is_blind=not self.live_routers(now),
            backlog=self._backlog(now),
            in_use=frozenset(in_use),
            wants=self.wants(now),
            turns=dict(self._turns),
        )

    def _backlog(self, now: float) -> dict[str, float]:
        """lora_id -> seconds of work that wait: requests in line, each as much as its adapter's usual one."""
        waiting: dict[str, int] = {}
        for router in self.live_routers(now):
            for lora_id, count in router.waiting.items():
                waiting[lora_id] = waiting.get(lora_id, 0) + count
        if not waiting:
            return {}
        requests, work_s = _FLOWS.index("requests"), _FLOWS.index("work_s")
        sums = self._sums.values()
        usual_s = _ratio(sum(entry.total[work_s] for entry in sums), sum(entry.total[requests] for entry in sums))
        found = {}
        for lora_id, count in waiting.items():
            entry = self._sums.get(lora_id)
            own_s = 0.0 if entry is None else _ratio(entry.weighted[work_s], entry.weighted[requests])
            found[lora_id] = count * (own_s or usual_s)
        return found

    def _scale(self, now: float) -> float:
        """What makes up for the part of the window before we first counted; never more than for a quarter of it."""
        if self._counts_since is None:
            return 1.0
        return 1 / -math.expm1(-max(0.25, (now - self._counts_since) / self.window_s))

    def _expire(self, now: float) -> None:
        self._wants = {lora_id: asked for lora_id, asked in self._wants.items() if asked.until > now}
        self._turns = {tenant: at for tenant, at in self._turns.items() if now - at < _FORGET_ROUTER_S}
        # Ten windows on, less than 1/20,000 of a rate is left: it ranks nothing any more. Totals last an hour.
        keep_s = max(10 * self.window_s, _FORGET_ROUTER_S)
        self._sums = {lora_id: entry for lora_id, entry in self._sums.items() if now - entry.at < keep_s}
        # A router long gone may come back under its old boot id; an hour of memory keeps its counts from doubling.
        self._routers = {
            name: router for name, router in self._routers.items() if now - router.heard_at < _FORGET_ROUTER_S
        }


def _share(over_s: float, window_s: float) -> float:
    """What one unit, spread evenly over the time since the last report, weighs at its end, as a rate."""
    return -math.expm1(-over_s / window_s) / over_s if over_s > 0 else 1 / window_s


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def _growth(count: float, before: float) -> float:
    """What was added since; a count that fell began again from 0."""
    return count - before if count >= before else count
