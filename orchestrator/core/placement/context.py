"""The fleet while one pass fills it: who holds what, what is free, what has been named so far."""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest

from lorafleet.identity import rendezvous_score
from orchestrator.core.state import (
    OCCUPYING,
    SERVING,
    AdapterFailure,
    DemandSnapshot,
    Intent,
    ObservedFleet,
    ObservedWorker,
    Pair,
    PlacementPolicy,
    PlannedLoad,
    RegisteredAdapter,
    ReportedAdapter,
)

HOME_LOAD = 1.25
"""A worker with more than this share of the mean load is nobody's home: consistent hashing with bounded loads."""
RELIEF_S = 30.0
"""What waits for room is to be worked off within this time, by moving adapters. Of 5 to 60 s tried in
`benchmarks.placement`, shorter ones move more for queues that would have gone by themselves, and longer ones less than
is needed."""


def usable_slots(slots: int, reserve: int) -> int:
    """Slots that placement fills: some stay free for moves, but never the only one."""
    return max(1, slots - reserve) if slots > 1 else slots


def loading_of(adapter: RegisteredAdapter, policy: PlacementPolicy) -> str:
    """lazy, eager or weighted: the adapter's own word, else the global one."""
    return adapter.loading or policy.loading


def is_placeable(adapter: RegisteredAdapter) -> bool:
    return adapter.is_inspected and not adapter.is_deleting and adapter.quarantine is None


def is_same(adapter: RegisteredAdapter, held: ReportedAdapter) -> bool:
    """Whether these are the registered bytes."""
    return adapter.digest is not None and adapter.digest == held.digest


class PlacementContext:
    """A pass's working state.

    holders  lora_id -> workers whose copy counts, those of loads named so far included
    leaving  (lora_id, worker_id) that this pass takes away as one too many, or as the old half of a move
    """

    def __init__(
        self, intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
    ) -> None:
        self.intent = intent
        self.observed = observed
        self.demand = demand
        self.policy = policy
        self.now = now
        self.workers = [observed.workers[worker_id] for worker_id in sorted(observed.workers)]
        self.free = {w.id: usable_slots(w.slots, policy.reserve_slots) - w.occupied for w in self.workers}
        self.gone: dict[str, set[str]] = {w.id: set() for w in self.workers}
        self.leaving: set[Pair] = set()
        self.begun: Counter[str] = Counter()
        self.targets: Mapping[str, int] = {}
        self.needed: Mapping[str, int] = {}
        self.holders: dict[str, set[str]] = {}
        self.movers: set[str] = set()
        self._find_holders()
        self._able: dict[tuple[str | None, int], list[ObservedWorker]] = {}
        self._failures: dict[str, dict[str, AdapterFailure]] = {}
        for (lora_id, worker_id), failure in observed.failures.items():
            if failure.until > now:
                self._failures.setdefault(lora_id, {})[worker_id] = failure
        self.weights = _weights(demand)
        self.loads = self._loads()

    def _find_holders(self) -> None:
        """Holders, and movers: what a draining worker holds and what must be elsewhere before it may leave there."""
        adapters = self.intent.adapters
        for worker in self.workers:
            if worker.state not in SERVING and worker.state != "draining":
                continue
            for held in worker.held.values():
                adapter = adapters.get(held.lora_id)
                if adapter is None or held.state not in OCCUPYING or not is_same(adapter, held):
                    continue
                if not worker.serves(adapter.base_model):
                    continue
                # Its agent does not answer: nobody knows when that load ends, and somebody may wait for the adapter.
                if held.state == "loading" and worker.state == "unmanaged":
                    continue
                if worker.state == "draining":
                    self.movers.add(held.lora_id)
                else:
                    self.holders.setdefault(held.lora_id, set()).add(worker.id)

    def _loads(self) -> dict[str, float]:
        """worker_id -> its part of the demand for what it holds: busy seconds a second, or requests a second."""
        found = dict.fromkeys(self.gone, 0.0)
        for lora_id in sorted(self.holders.keys() & self.weights.keys()):
            self._spread(lora_id, self.weight(lora_id), found)
        return found

    def _spread(self, lora_id: str, weight: float, loads: dict[str, float]) -> None:
        """Add the adapter's weight to its holders' loads, in equal parts."""
        holders = self.holders.get(lora_id, ())
        for worker_id in holders:
            loads[worker_id] += weight / len(holders)

    def weight(self, lora_id: str) -> float:
        return self.weights.get(lora_id, 0.0)

    def copies(self, lora_id: str) -> int:
        return len(self.holders.get(lora_id, ()))

    def staying(self, lora_id: str, besides: str) -> int:
        """Copies on other workers than this one that are ready, and that nobody is about to take away."""
        return sum(
            worker_id != besides and self._is_to_stay(lora_id, worker_id) for worker_id in self.holders.get(lora_id, ())
        )

    def _is_to_stay(self, lora_id: str, worker_id: str) -> bool:
        held = self.observed.workers[worker_id].held.get(lora_id)
        if held is None or held.state != "ready":
            return False
        pair = lora_id, worker_id
        return pair not in self.observed.owed and pair not in self.observed.evicting and pair not in self.leaving

    def least(self, adapter: RegisteredAdapter) -> int:
        return self.policy.min_replicas if adapter.min_replicas is None else adapter.min_replicas

    def most(self, adapter: RegisteredAdapter) -> int:
        return self.policy.max_replicas if adapter.max_replicas is None else adapter.max_replicas

    def floor(self, adapter: RegisteredAdapter) -> int:
        """Replicas below which an adapter is never pushed."""
        loading = loading_of(adapter, self.policy)
        if loading == "weighted":
            return self.targets.get(adapter.lora_id, 0)
        return self.least(adapter) if loading == "eager" else adapter.min_replicas or 0

    def failed(self, lora_id: str, worker_id: str) -> AdapterFailure | None:
        """The failure that counts there now; one under the worker_id "" counts everywhere."""
        known = self._failures.get(lora_id)
        return None if known is None else known.get(worker_id) or known.get("")

    def fits(self, base_model: str | None, rank: int) -> list[ObservedWorker]:
        """Ready workers of the base model with slots for adapters of this rank, by id."""
        key = (base_model, rank)
        if key not in self._able:
            self._able[key] = [worker for worker in self.workers if worker.fits(base_model, rank)]
        return self._able[key]

    def can_load(self, adapter: RegisteredAdapter, worker: ObservedWorker) -> bool:
        """Whether this worker is one of the adapter's `able`."""
        fits = worker.fits(adapter.base_model, adapter.rank or 0)
        return fits and self.failed(adapter.lora_id, worker.id) is None

    def able(self, adapter: RegisteredAdapter) -> list[ObservedWorker]:
        """Workers that could load it now: they fit, and it has not failed there of late."""
        fitting = self.fits(adapter.base_model, adapter.rank or 0)
        if adapter.lora_id not in self._failures:
            return fitting
        return [worker for worker in fitting if self.failed(adapter.lora_id, worker.id) is None]

    def is_busy(self, worker_id: str) -> bool:
        """Whether a load named for it now would wait for another there."""
        return self.observed.busy.get(worker_id, 0) + self.begun[worker_id] >= self.policy.loads_per_worker

    def homes(self, adapter: RegisteredAdapter, able: list[ObservedWorker], count: int) -> list[str]:
        """Where `count` copies belong: the highest claims, in other zones and on other nodes while there are any.

        Workers far above the mean load are passed over while others are left.
        """
        bar = HOME_LOAD * self.mean_load(able)
        calm = [worker for worker in able if self.loads[worker.id] <= bar]
        claim = ClaimOrder(adapter.lora_id)
        if count <= 1:
            return [worker.id for worker in nsmallest(count, calm or able, key=claim)]
        ranked = sorted(able, key=lambda worker: (self.loads[worker.id] > bar, *claim(worker)))
        homes: list[ObservedWorker] = []
        while ranked and len(homes) < count:
            zones, nodes = {w.zone for w in homes}, {w.node for w in homes}
            best = min(range(len(ranked)), key=lambda i: (ranked[i].zone in zones, ranked[i].node in nodes, i))
            homes.append(ranked.pop(best))
        return [worker.id for worker in homes]

    def mean_load(self, workers: Iterable[ObservedWorker]) -> float:
        loads = [self.loads[worker.id] for worker in workers]
        return sum(loads) / len(loads) if loads else 0.0

    def take(self, load: PlannedLoad) -> None:
        """A load is named: from now on it counts as there, and its victim as gone; other copies have less, or more."""
        changed = [lora_id for lora_id in (load.lora_id, load.evict) if lora_id is not None]
        for lora_id in changed:
            self._spread(lora_id, -self.weight(lora_id), self.loads)
        self.holders.setdefault(load.lora_id, set()).add(load.worker_id)
        self.begun[load.worker_id] += 1
        if load.evict is None:
            self.free[load.worker_id] -= 1
        else:
            self.gone[load.worker_id].add(load.evict)
            # Nobody's where the copy has other bytes than the registered ones, which may not be known yet.
            self.holders.get(load.evict, set()).discard(load.worker_id)
        for lora_id in changed:
            self._spread(lora_id, self.weight(lora_id), self.loads)


def _weights(demand: DemandSnapshot) -> Mapping[str, float]:
    """lora_id -> busy seconds a second that it needs; requests a second where routers count no work."""
    return offered(demand.work, demand, RELIEF_S) if any(demand.work.values()) else demand.rates


def offered(work: Mapping[str, float], demand: DemandSnapshot, within_s: float) -> Mapping[str, float]:
    """Busy seconds a second: work that engines were given, and what works off within this time what waits for them.

    A router gives an engine no more than it can do, so without what waits an overloaded adapter would look just busy.
    """
    if not demand.backlog:
        return work
    found = dict(work)
    for lora_id, waiting_s in demand.backlog.items():
        found[lora_id] = found.get(lora_id, 0.0) + waiting_s / within_s
    return found


class ClaimOrder:
    """Workers in order of their claim on an adapter, the highest first."""

    __slots__ = ("lora_id",)

    def __init__(self, lora_id: str) -> None:
        self.lora_id = lora_id

    def __call__(self, worker: ObservedWorker) -> tuple[int, str]:
        return -rendezvous_score(self.lora_id, worker.id), worker.id
