"""The placement context: a pass's working copy of the fleet, with the loads that the pass has named so far."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest

from lorafleet.identity import fleet_digest, rendezvous_score
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    OCCUPYING,
    SERVING,
    AdapterFailure,
    DemandSnapshot,
    Intent,
    ObservedFleet,
    ObservedWorker,
    Pair,
    PlannedLoad,
    ReportedAdapter,
)

HOME_LOAD_LIMIT = 1.25
"""A worker above this multiple of the mean load is no adapter's home: consistent hashing with bounded loads."""
DRAIN_AHEAD_S = 2.0
"""Loads are named ahead for a worker as far as their victims need to drain: an engine that loads in milliseconds would
otherwise stand idle while each victim in turn ends its requests."""
BACKLOG_RELIEF_S = 30.0
"""Moves are planned so that queued work is done within this time. Of 5 to 60 s tried in `benchmarks.placement`,
shorter ones move adapters for queues that end by themselves, longer ones move too few."""


def usable_slots(slots: int, reserve: int) -> int:
    """Slots that placement fills: `reserve` of them stay free for moves, but never the only one."""
    return max(1, slots - reserve) if slots > 1 else slots


def loading_mode(adapter: RegisteredAdapter, policy: PlacementPolicy) -> str:
    """The adapter's own setting, else the global one; see `PlacementPolicy.loading`."""
    return adapter.policy.loading or policy.loading


def is_placeable(adapter: RegisteredAdapter) -> bool:
    """Whether the adapter may get replicas: inspected, not being deleted and not in quarantine."""
    return adapter.is_inspected and not adapter.is_deleting and adapter.quarantine is None


def is_registered_digest(adapter: RegisteredAdapter, held: ReportedAdapter) -> bool:
    """Whether the adapter on the worker has the registered digest."""
    return adapter.digest is not None and adapter.digest == held.digest


class PlacementContext:
    """The working state of one pass.

    free_slots     worker_id -> slots that placement may still fill
    victims        worker_id -> adapters that loads of this pass evict there
    leaving        (lora_id, worker_id) that this pass removes as surplus, or as the old copy of a move
    loads_named    worker_id -> loads of this pass
    targets        lora_id -> replica target
    needed_copies  lora_id -> copies below which none counts as surplus
    holders        lora_id -> workers whose copy counts, loads of this pass included
    draining_ids   adapters that should be elsewhere: of draining workers, and those in use that an operator keeps out
    kept_out_ids   adapters that an operator keeps out of some worker
    index          of the registered adapters
    weights        lora_id -> demand, see `demand_weight`
    loads          worker_id -> its part of the demand for what it holds, in the unit of `weights`
    """

    def __init__(
        self, intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
    ) -> None:
        """Collect each adapter's holders, and the failures that still keep it off a worker."""
        self.intent = intent
        self.observed = observed
        self.demand = demand
        self.policy = policy
        self.now = now
        self.workers = [observed.workers[worker_id] for worker_id in sorted(observed.workers)]
        self.free_slots = {w.id: usable_slots(w.slots, policy.reserve_slots) - w.occupied_slots for w in self.workers}
        self.victims: dict[str, set[str]] = {w.id: set() for w in self.workers}
        self.leaving: set[Pair] = set()
        self.loads_named: Counter[str] = Counter()
        self.targets: Mapping[str, int] = {}
        self.needed_copies: Mapping[str, int] = {}
        self.holders: dict[str, set[str]] = {}
        self.draining_ids: set[str] = set()
        self.kept_out_ids = frozenset[str]().union(*(worker.kept_out for worker in self.workers))
        self._find_holders()
        self._able: dict[tuple[str | None, int], list[ObservedWorker]] = {}
        self._failures: dict[str, dict[str, AdapterFailure]] = {}
        for (lora_id, worker_id), failure in observed.failures.items():
            if failure.until > now:
                self._failures.setdefault(lora_id, {})[worker_id] = failure
        self.weights = _demand_weights(demand)
        self.index = intent.index
        self.loads = self._worker_loads()

    def _find_holders(self) -> None:
        """Fill `holders` and `draining_ids` from the reports of workers that serve or drain.

        Copies of another digest or base model do not count, nor loads on a worker whose agent does not answer, nor
        copies that an operator keeps out: they leave.
        """
        adapters = self.intent.adapters
        for worker in self.workers:
            if worker.state not in SERVING and worker.state != "draining":
                continue
            for held in worker.adapters.values():
                adapter = adapters.get(held.lora_id)
                if adapter is None or held.state not in OCCUPYING or not is_registered_digest(adapter, held):
                    continue
                if not worker.can_serve(adapter.base_model):
                    continue
                # The agent does not answer, so the end of that load is unknown, and a request may wait for the adapter.
                if held.state == "loading" and worker.state == "unmanaged":
                    continue
                is_leaving = worker.keeps_out(held)
                is_in_use = self.demand.rates.get(held.lora_id, 0.0) > 0
                if worker.state == "draining" or (is_leaving and is_in_use):
                    self.draining_ids.add(held.lora_id)
                elif not is_leaving:
                    self.holders.setdefault(held.lora_id, set()).add(worker.id)

    def adapters_to_look_at(self) -> Iterator[RegisteredAdapter]:
        """Registered adapters that may be due a replica, by lora_id: all where the policy loads them unasked."""
        adapters = self.intent.adapters
        if self.policy.loading != "lazy":
            yield from (adapters[lora_id] for lora_id in sorted(adapters))
            return
        asked = self.index.standing.union(self.demand.wants, self.draining_ids)
        yield from (adapters[lora_id] for lora_id in sorted(asked & adapters.keys()))

    def standing_adapters(self) -> Iterator[RegisteredAdapter]:
        """Registered adapters for which something is due though nobody asks, by lora_id."""
        yield from (self.intent.adapters[lora_id] for lora_id in sorted(self.index.standing))

    def _worker_loads(self) -> dict[str, float]:
        """worker_id -> its part of the demand for what it holds; 0.0 for a worker that holds nothing in demand."""
        found = dict.fromkeys(self.victims, 0.0)
        for lora_id in sorted(self.holders.keys() & self.weights.keys()):
            self._add_to_holders(lora_id, self.demand_weight(lora_id), found)
        return found

    def _add_to_holders(self, lora_id: str, weight: float, loads: dict[str, float]) -> None:
        """Change `loads`: add the weight to the adapter's holders, in equal parts."""
        holders = self.holders.get(lora_id, ())
        for worker_id in holders:
            loads[worker_id] += weight / len(holders)

    def demand_weight(self, lora_id: str) -> float:
        """The adapter's demand, in the unit of `weights`."""
        return self.weights.get(lora_id, 0.0)

    def copy_count(self, lora_id: str) -> int:
        """Number of the adapter's copies that count."""
        return len(self.holders.get(lora_id, ()))

    def staying_copies(self, lora_id: str, besides: str) -> int:
        """Ready copies on workers other than `besides` that no step is about to remove."""
        return sum(
            worker_id != besides and self._is_to_stay(lora_id, worker_id) for worker_id in self.holders.get(lora_id, ())
        )

    def _is_to_stay(self, lora_id: str, worker_id: str) -> bool:
        """Whether the copy is ready and no step is about to remove it."""
        held = self.observed.workers[worker_id].adapters.get(lora_id)
        if held is None or held.state != "ready":
            return False
        pair = lora_id, worker_id
        return not self.observed.makes_room(pair) and pair not in self.leaving

    def min_replicas(self, adapter: RegisteredAdapter) -> int:
        """The adapter's own minimum of replicas, else the policy's."""
        return self.policy.min_replicas if adapter.policy.min_replicas is None else adapter.policy.min_replicas

    def max_replicas(self, adapter: RegisteredAdapter) -> int:
        """The adapter's own maximum of replicas, else the policy's."""
        return self.policy.max_replicas if adapter.policy.max_replicas is None else adapter.policy.max_replicas

    def replica_floor(self, adapter: RegisteredAdapter) -> int:
        """Replicas below which no copy of the adapter is evicted."""
        loading = loading_mode(adapter, self.policy)
        if loading == "weighted":
            return self.targets.get(adapter.lora_id, 0)
        return adapter.policy.min_replicas or 0 if loading == "lazy" else self.min_replicas(adapter)

    def is_everywhere(self, adapter: RegisteredAdapter) -> bool:
        """Whether the adapter is to be on every worker that takes it: no version that its published name has left."""
        return loading_mode(adapter, self.policy) == "everywhere" and adapter.lora_id not in self.intent.superseded

    def possible_replicas(self, adapter: RegisteredAdapter) -> int:
        """Workers that take the adapter, and those that have it and take nothing new."""
        workers = self.observed.workers
        holders = self.holders.get(adapter.lora_id, ())
        closed = sum(not self.can_load(adapter, workers[worker_id]) for worker_id in holders)
        return len(self.able_workers(adapter)) + closed

    def current_failure(self, lora_id: str, worker_id: str) -> AdapterFailure | None:
        """The adapter's failure that blocks loads on the worker now, or None; see `ObservedFleet.current_failure`."""
        known = self._failures.get(lora_id)
        return None if known is None else known.get(worker_id) or known.get("")

    def accepting_workers(self, base_model: str | None, rank: int) -> list[ObservedWorker]:
        """Ready workers whose engine takes adapters of exactly this base model and rank, by id; they may be full.

        The list is cached: do not modify it.
        """
        key = (base_model, rank)
        if key not in self._able:
            self._able[key] = [worker for worker in self.workers if worker.can_accept(base_model, rank)]
        return self._able[key]

    def can_load(self, adapter: RegisteredAdapter, worker: ObservedWorker) -> bool:
        """Whether the worker is one of the adapter's `able_workers`."""
        fits = worker.can_take(adapter) and (worker.has_agent or fleet_digest(adapter.source) is None)
        return fits and self.current_failure(adapter.lora_id, worker.id) is None

    def able_workers(self, adapter: RegisteredAdapter) -> list[ObservedWorker]:
        """Ready workers that take the adapter, where no operator keeps it out and it has not failed of late."""
        fitting = self.accepting_workers(adapter.base_model, adapter.rank or 0)
        if fleet_digest(adapter.source) is not None:
            fitting = [worker for worker in fitting if worker.has_agent]
        if adapter.lora_id in self.kept_out_ids:
            fitting = [worker for worker in fitting if adapter.lora_id not in worker.kept_out]
        if adapter.lora_id not in self._failures:
            return fitting
        return [worker for worker in fitting if self.current_failure(adapter.lora_id, worker.id) is None]

    def is_busy(self, worker_id: str) -> bool:
        """Whether a load named now for the worker would wait for another operation there."""
        return self.operation_count(worker_id) >= self.policy.loads_per_worker

    def is_booked(self, worker_id: str) -> bool:
        """Whether a load named now for the worker would wait for others longer than its victim needs to drain."""
        ahead_s = self.operation_count(worker_id) * self.observed.load_figures.seconds
        return self.is_busy(worker_id) and ahead_s >= DRAIN_AHEAD_S

    def operation_count(self, worker_id: str) -> int:
        """Operations in progress at the worker, and the loads that this pass has named for it."""
        return self.observed.busy.get(worker_id, 0) + self.loads_named[worker_id]

    def home_workers(self, adapter: RegisteredAdapter, able: list[ObservedWorker], count: int) -> list[str]:
        """The home workers of `count` copies: highest rendezvous claims, spread over zones and nodes.

        Workers above `HOME_LOAD_LIMIT` times the mean load come last.
        """
        bar = HOME_LOAD_LIMIT * self.mean_load(able)
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
        """The mean of these workers' loads; 0.0 without workers."""
        loads = [self.loads[worker.id] for worker in workers]
        return sum(loads) / len(loads) if loads else 0.0

    def apply_load(self, load: PlannedLoad) -> None:
        """Change the context as if the load were done and its victim gone; the demand of both is divided anew.

        Changes `holders`, `loads`, `loads_named`, and `free_slots` or `victims`.
        """
        changed = [lora_id for lora_id in (load.lora_id, load.evict) if lora_id is not None]
        for lora_id in changed:
            self._add_to_holders(lora_id, -self.demand_weight(lora_id), self.loads)
        self.holders.setdefault(load.lora_id, set()).add(load.worker_id)
        self.loads_named[load.worker_id] += 1
        if load.evict is None:
            self.free_slots[load.worker_id] -= 1
        else:
            self.victims[load.worker_id].add(load.evict)
            # A copy with another digest than the registered one has no entry in `holders`.
            self.holders.get(load.evict, set()).discard(load.worker_id)
        for lora_id in changed:
            self._add_to_holders(lora_id, self.demand_weight(lora_id), self.loads)


def _demand_weights(demand: DemandSnapshot) -> Mapping[str, float]:
    """lora_id -> engine work in seconds a second, backlog included; requests a second where routers report no work."""
    return work_with_backlog(demand.work, demand, BACKLOG_RELIEF_S) if any(demand.work.values()) else demand.rates


def work_with_backlog(work: Mapping[str, float], demand: DemandSnapshot, within_s: float) -> Mapping[str, float]:
    """`work` plus, per adapter, the rate that would finish its backlog within `within_s` seconds.

    A router sends an engine no more than it can do: without the backlog an overloaded adapter would look merely busy.
    """
    if not demand.backlog:
        return work
    found = dict(work)
    for lora_id, waiting_s in demand.backlog.items():
        found[lora_id] = found.get(lora_id, 0.0) + waiting_s / within_s
    return found


class ClaimOrder:
    """Sort key for workers: the highest rendezvous claim on the adapter first."""

    __slots__ = ("lora_id",)

    def __init__(self, lora_id: str) -> None:
        self.lora_id = lora_id

    def __call__(self, worker: ObservedWorker) -> tuple[int, str]:
        """The worker's sort key: its negative rendezvous score, then its id."""
        return -rendezvous_score(self.lora_id, worker.id), worker.id
