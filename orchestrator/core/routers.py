"""Routers by their last reports: each report counts once, and each batch of counts in them.

A report that is lost costs nothing: its batches come again, and the rest of it is how the router is now. `seq` tells
repeated and late reports of one boot, `boot_id` those of a process that has ended.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lorafleet.identity import asked_version, lora_id_of
from orchestrator.model.usage import CountBatch, UsageReport

ROUTER_LIVE_S = 10.0
"""A router's report expires after this much silence (make before break)."""
ROUTER_GONE_S = 900.0
"""A router that is silent for this long without a last report is taken to have ended. Until then it may be at work, cut
off from here alone: agents hear it, but only those that it reaches. Longer than restarts and most partitions; a guess
otherwise."""
_FORGET_ROUTER_S = 3600.0
"""A router may come back with its old boot id: its numbers are kept so long, so that nothing counts twice."""
_MOST_ROUTERS = 1000
_BOOTS_REMEMBERED = 8


@dataclass(slots=True)
class KnownRouter:
    """A router by its last report.

    batch      number of the last batch that was counted since the router's boot
    old_boots  boot ids that it had before
    """

    report: UsageReport
    reported_at: float
    batch: int = -1
    old_boots: tuple[str, ...] = ()

    def in_flight(self, engine_name: str, worker_id: str) -> int:
        """The router's requests for the engine name that run on the worker; 0 if it reports none."""
        return self.report.in_flight.get(worker_id, {}).get(engine_name, 0)

    def in_flight_at(self, worker_id: str) -> int:
        """The router's requests for all engine names that run on the worker."""
        return sum(self.report.in_flight.get(worker_id, {}).values())

    def adapters_in_flight(self) -> Iterator[tuple[str, str, int]]:
        """(lora_id, worker_id, requests that run there) of each adapter; base models are left out."""
        for worker_id, counts in self.report.in_flight.items():
            for engine_name, count in counts.items():
                if count and asked_version(engine_name):
                    yield lora_id_of(engine_name), worker_id, count


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProgress:
    """What a report has brought beyond the router's last one.

    batches    those that no earlier report brought
    started    lora_id -> growth of its requests at engines; below 0 where more have ended than begun
    over_s     seconds since the last report
    is_first   no report of this router was known: what it counted before is of unknown age
    """

    batches: tuple[CountBatch, ...]
    started: Mapping[str, int]
    over_s: float
    is_first: bool


@dataclass(slots=True)
class RouterBook:
    """The last report of each router. One writer: the event loop."""

    by_id: OrderedDict[str, KnownRouter] = field(default_factory=OrderedDict)

    def record(self, report: UsageReport, now: float) -> RouterProgress | None:
        """Record a router's report in place of its last one. None for one that is repeated or late: nothing changes."""
        last = self.by_id.get(report.router_id)
        is_same_boot = last is not None and report.boot_id == last.report.boot_id
        if last is not None and (report.boot_id in last.old_boots or (is_same_boot and report.seq <= last.report.seq)):
            return None
        router = KnownRouter(report, now)
        ran: Counter[str] = Counter()
        if last is not None:
            router.old_boots = last.old_boots
            if is_same_boot:
                router.batch = last.batch
                ran = _running_by_adapter(last)
            else:
                router.old_boots = (*last.old_boots, last.report.boot_id)[-_BOOTS_REMEMBERED:]
        batches = []
        for batch in report.batches:
            if batch.number > router.batch:
                router.batch = batch.number
                batches.append(batch)
        self.by_id[report.router_id] = router
        self.by_id.move_to_end(report.router_id)
        if len(self.by_id) > _MOST_ROUTERS:
            self.by_id.popitem(last=False)
        started = _running_by_adapter(router)
        started.subtract(ran)
        return RouterProgress(
            batches=tuple(batches),
            started={lora_id: count for lora_id, count in started.items() if count},
            over_s=0.0 if last is None else now - last.reported_at,
            is_first=last is None,
        )

    def drop_old(self, now: float) -> None:
        """Forget routers that have not reported for an hour."""
        for router_id in [name for name, router in self.by_id.items() if now - router.reported_at >= _FORGET_ROUTER_S]:
            del self.by_id[router_id]

    def live(self, now: float) -> list[KnownRouter]:
        """Routers whose last report is younger than `ROUTER_LIVE_S`."""
        return [router for router in self._running() if now - router.reported_at < ROUTER_LIVE_S]

    def silent(self, now: float) -> list[KnownRouter]:
        """Routers that have not reported for `ROUTER_LIVE_S` without a last report: killed, or cut off from us.

        One that is cut off serves on, and may have requests that nobody reports.
        """
        return [router for router in self._running() if now - router.reported_at >= ROUTER_LIVE_S]

    def may_be_unheard(self, now: float) -> bool:
        """Whether a router may be at work unheard: it is silent, and not taken to have ended."""
        return any(now - router.reported_at < ROUTER_GONE_S for router in self.silent(now))

    def wait_s(self, worker_id: str, now: float) -> float:
        """Seconds of the longest queue that a live router reports for the worker: routers share the engine's speed."""
        return max((router.report.waits_s.get(worker_id, 0.0) for router in self.live(now)), default=0.0)

    def held_from_zero(self, now: float) -> dict[str, int]:
        """base model -> requests that live routers hold for its first ready worker, where there are any."""
        found: Counter[str] = Counter()
        for router in self.live(now):
            found.update(router.report.held_from_zero)
        return {base_model: held for base_model, held in found.items() if held}

    def in_flight_at(self, worker_id: str, now: float) -> int:
        """Requests of all live routers at the worker's engine."""
        return sum(router.in_flight_at(worker_id) for router in self.live(now))

    def _running(self) -> Iterable[KnownRouter]:
        """Routers that have not said that they stop."""
        return (router for router in self.by_id.values() if not router.report.is_last)


def _running_by_adapter(router: KnownRouter) -> Counter[str]:
    """lora_id -> the router's requests at engines."""
    found: Counter[str] = Counter()
    for lora_id, _, count in router.adapters_in_flight():
        found[lora_id] += count
    return found
