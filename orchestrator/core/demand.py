"""What routers sent and ask for, kept in memory: usage reports in, one `Demand` snapshot out.

Demand here is requests a second per adapter, exponentially weighted over 60 s, and who has requests in flight where.
It ranks victims and repairs. It does not yet raise the number of replicas: that is the policy's minimum, or what an
`ensure` asks for, up to the policy's maximum.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.state import Demand, Pair, Want

WINDOW_S = 60.0
LIVE_S = 10.0
"""A router's word expires after this much silence (make before break)."""
_BOOTS_REMEMBERED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One adapter on one worker, as one router counts it since its boot."""

    lora_id: str
    worker_id: str
    engine_name: str
    requests: int
    in_flight: int


@dataclass(slots=True)
class Router:
    """A router's last word. `uses`: (engine_name, worker_id) -> Use."""

    boot_id: str
    seq: int
    revision_seen: int
    heard_at: float
    uses: Mapping[tuple[str, str], Use]
    old_boots: list[str] = field(default_factory=list)

    def in_flight(self, engine_name: str, worker_id: str) -> int:
        use = self.uses.get((engine_name, worker_id))
        return 0 if use is None else use.in_flight


@dataclass(slots=True)
class _Rate:
    amount: float
    at: float

    def value(self, now: float) -> float:
        return self.amount * math.exp(-(now - self.at) / WINDOW_S)


@dataclass(slots=True)
class _Asked:
    want: Want
    until: float


class DemandBook:
    """Takes reports and asks, answers with snapshots. One writer: the event loop."""

    def __init__(self) -> None:
        self._routers: dict[str, Router] = {}
        self._rates: dict[str, _Rate] = {}
        self._wants: dict[str, _Asked] = {}

    def report(
        self, router_id: str, boot_id: str, seq: int, revision_seen: int, uses: Iterable[Use], now: float
    ) -> bool:
        """Take a router's cumulative counts; False for one already taken, or older than what was taken."""
        last = self._routers.get(router_id)
        if last is not None and (boot_id in last.old_boots or (boot_id == last.boot_id and seq <= last.seq)):
            return False
        is_same_boot = last is not None and boot_id == last.boot_id
        before = last.uses if last is not None and is_same_boot else {}
        table = {(use.engine_name, use.worker_id): use for use in uses}
        for key, use in table.items():
            seen = before[key].requests if key in before else 0
            # The first report after our own start counts from the router's boot: that is history, not a rate.
            if use.requests > seen and (is_same_boot or last is not None):
                self._add(use.lora_id, use.requests - seen, now)
        old = [] if last is None else last.old_boots if is_same_boot else [*last.old_boots, last.boot_id]
        self._routers[router_id] = Router(boot_id, seq, revision_seen, now, table, old[-_BOOTS_REMEMBERED:])
        return True

    def _add(self, lora_id: str, requests: int, now: float) -> None:
        rate = self._rates.get(lora_id)
        self._rates[lora_id] = _Rate((rate.value(now) if rate else 0.0) + requests / WINDOW_S, now)

    def want(self, lora_id: str, want: Want, until: float) -> bool:
        """Remember that somebody asks; True when that says more than was known."""
        asked = self._wants.get(lora_id)
        if asked is None:
            self._wants[lora_id] = _Asked(want, until)
            return True
        joined = Want(
            replicas=max(want.replicas, asked.want.replicas), may_evict=want.may_evict or asked.want.may_evict
        )
        is_more = joined != asked.want
        self._wants[lora_id] = _Asked(joined, max(until, asked.until))
        return is_more

    def wants(self) -> Mapping[str, Want]:
        return {lora_id: asked.want for lora_id, asked in self._wants.items()}

    def satisfied(self, lora_id: str) -> None:
        """It is there: asking ends, so that it may one day be a victim like any other."""
        self._wants.pop(lora_id, None)

    def forget(self, lora_id: str) -> None:
        """It is deleted."""
        self._wants.pop(lora_id, None)
        self._rates.pop(lora_id, None)

    def rate(self, lora_id: str, now: float) -> float:
        rate = self._rates.get(lora_id)
        return 0.0 if rate is None else rate.value(now)

    def live_routers(self, now: float) -> list[Router]:
        return [router for router in self._routers.values() if now - router.heard_at < LIVE_S]

    def snapshot(self, now: float) -> Demand:
        self._expire(now)
        in_use: set[Pair] = {
            (use.lora_id, use.worker_id)
            for router in self.live_routers(now)
            for use in router.uses.values()
            if use.in_flight > 0
        }
        rates = {lora_id: rate.value(now) for lora_id, rate in self._rates.items()}
        return Demand(rates=rates, in_use=frozenset(in_use), wants=self.wants())

    def _expire(self, now: float) -> None:
        self._wants = {lora_id: asked for lora_id, asked in self._wants.items() if asked.until > now}
        # Ten windows on, less than 1/20,000 of a rate is left: it ranks nothing any more.
        self._rates = {lora_id: rate for lora_id, rate in self._rates.items() if now - rate.at < 10 * WINDOW_S}
        # A router long gone may come back under its old boot id; an hour of memory keeps its counts from doubling.
        self._routers = {name: router for name, router in self._routers.items() if now - router.heard_at < 3600}
