"""Which adapter should be on which worker: pure, so that any decision can be replayed from its inputs.

For every adapter a target number of replicas, then for every missing replica a worker. In order of weight: what
is there stays; the adapter's rendezvous-hash home; a free slot; another zone and node; the least loaded worker.
One exception to that order, on purpose: a home that is full yields to another worker with a free slot, because
throwing somebody out costs a reload and a home only saves one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from orchestrator.core.state import (
    OCCUPYING,
    SERVING,
    Adapter,
    Demand,
    Desired,
    Held,
    Inspection,
    Intent,
    Load,
    Observed,
    Removal,
    Rules,
    Worker,
)

INSPECTIONS = 64
"""Most inspections named in one pass; far more than can be under way, far fewer than may be waiting."""


def place(intent: Intent, observed: Observed, demand: Demand, policy: Rules, now: float) -> Desired:
    """Where everything should be. The same input gives the same output, whatever the order of its mappings.

    Nothing is ever listed for removal because nobody asks for it: only tombstones and finished moves are, and
    victims are named in the load that needs their slot. Adapters that no intent knows are left alone.
    """
    return _Pass(intent, observed, demand, policy, now).run()


def usable_slots(slots: int, reserve: int) -> int:
    """Slots that placement fills: some stay free for moves, but never the only one."""
    return max(1, slots - reserve) if slots > 1 else slots


def rendezvous(lora_id: str, worker_id: str) -> int:
    """This worker's claim on the adapter; the highest is its home. A worker that leaves moves only its own adapters."""
    return xxhash.xxh3_64_intdigest(f"{len(lora_id)}:{lora_id}{worker_id}".encode())


def loading_of(adapter: Adapter, policy: Rules) -> str:
    """lazy, eager or weighted: the adapter's own word, else the global one."""
    return adapter.loading or policy.loading


def shares(weights: Mapping[str, float], caps: Mapping[str, int], slots: int) -> dict[str, int]:
    """Slots divided in proportion to weights by largest remainder, none above its cap.

    weights, caps   name -> weight (> 0), name -> most it may have
    returns         name -> slots; what a cap cuts off goes to the others, in proportion
    """
    given: dict[str, int] = {}
    open_ = sorted(weights)
    left = max(0, slots)
    while open_:
        total = sum(weights[name] for name in open_)
        over = [name for name in open_ if left * weights[name] / total >= caps[name]]
        if not over:
            break
        for name in over:
            given[name] = min(caps[name], left)
            left -= given[name]
        open_ = [name for name in open_ if name not in given]
    if open_:
        given |= _largest_remainder({name: weights[name] for name in open_}, left)
    return given


def _largest_remainder(weights: Mapping[str, float], slots: int) -> dict[str, int]:
    total = sum(weights.values())
    quotas = {name: slots * weight / total for name, weight in weights.items()}
    given = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(weights, key=lambda name: (given[name] - quotas[name], name))
    for name in by_remainder[: slots - sum(given.values())]:
        given[name] += 1
    return given


@dataclass(slots=True)
class _Room:
    """A worker while a pass fills it."""

    worker: Worker
    free: int
    gone: set[str] = field(default_factory=set)


class _Pass:
    def __init__(self, intent: Intent, observed: Observed, demand: Demand, policy: Rules, now: float) -> None:
        self.intent = intent
        self.observed = observed
        self.demand = demand
        self.policy = policy
        self.now = now
        self.workers = [observed.workers[worker_id] for worker_id in sorted(observed.workers)]
        self.rooms = {w.id: _Room(w, usable_slots(w.slots, policy.reserve_slots) - w.occupied) for w in self.workers}
        self.holders = self._holders()
        self.movers = self._movers()
        self.targets: dict[str, int] = {}

    def run(self) -> Desired:
        self.targets = self._targets()
        loads: list[Load] = []
        unplaced: dict[str, str] = {}
        for adapter in self._hungry():
            loads += self._fill(adapter, unplaced)
        replicas = {lora_id: tuple(sorted(held)) for lora_id, held in self.holders.items() if held}
        return Desired(
            replicas=replicas,
            targets=self.targets,
            loads=tuple(loads),
            removals=tuple(self._removals()),
            inspections=tuple(islice(self._inspections(), INSPECTIONS)),
            unplaced=unplaced,
            leaving=tuple(self._leaving()),
        )

    def _holders(self) -> dict[str, set[str]]:
        """lora_id -> workers whose copy counts: the right bytes, on a worker that stays."""
        found: dict[str, set[str]] = {}
        for worker in self.workers:
            if worker.state in SERVING:
                for held in worker.held.values():
                    adapter = self.intent.adapters.get(held.lora_id)
                    if adapter is not None and held.state in OCCUPYING and _is_same(adapter, held):
                        found.setdefault(held.lora_id, set()).add(worker.id)
        return found

    def _movers(self) -> set[str]:
        """Adapters that a draining worker holds and that must be somewhere else before they may leave it."""
        found: set[str] = set()
        for worker in self.workers:
            if worker.state == "draining":
                for held in worker.held.values():
                    adapter = self.intent.adapters.get(held.lora_id)
                    if adapter is not None and held.state in OCCUPYING and _is_same(adapter, held):
                        found.add(held.lora_id)
        return found

    def _targets(self) -> dict[str, int]:
        weighted = self._weighted_targets()
        found: dict[str, int] = {}
        for lora_id, adapter in self.intent.adapters.items():
            if not _is_placeable(adapter):
                continue
            target = max(weighted.get(lora_id, 0), self._plain_target(adapter))
            if target:
                found[lora_id] = min(target, self._most(adapter))
        return found

    def _plain_target(self, adapter: Adapter) -> int:
        """Replicas that are due to its minimum, to somebody who asks for it, or to a worker that drains."""
        target = self._least(adapter) if loading_of(adapter, self.policy) == "eager" else adapter.min_replicas or 0
        want = self.demand.wants.get(adapter.lora_id)
        asked = 0 if want is None else want.replicas
        return min(max(target, asked, int(adapter.lora_id in self.movers)), self._most(adapter))

    def _least(self, adapter: Adapter) -> int:
        return self.policy.min_replicas if adapter.min_replicas is None else adapter.min_replicas

    def _most(self, adapter: Adapter) -> int:
        return self.policy.max_replicas if adapter.max_replicas is None else adapter.max_replicas

    def _weighted_targets(self) -> dict[str, int]:
        """Each base model's slots that no other adapter holds, shared out among its weighted adapters."""
        groups: dict[str, list[Adapter]] = {}
        for adapter in self.intent.adapters.values():
            if not _is_placeable(adapter) or adapter.base_model is None:
                continue
            if loading_of(adapter, self.policy) == "weighted":
                groups.setdefault(adapter.base_model, []).append(adapter)
        found: dict[str, int] = {}
        for base_model, adapters in groups.items():
            mine = {adapter.lora_id for adapter in adapters}
            fleet = [w for w in self.workers if base_model in w.base_models and w.state == "ready"]
            slots = sum(self._slots_for(mine, worker) for worker in fleet) - self._owed(base_model)
            able = {a.lora_id: sum((a.rank or 0) <= w.max_lora_rank for w in fleet) for a in adapters}
            caps = {a.lora_id: min(self._most(a), able[a.lora_id]) for a in adapters}
            for lora_id, count in shares({a.lora_id: a.weight for a in adapters}, caps, slots).items():
                found[lora_id] = max(count, min(self._least(self.intent.adapters[lora_id]), able[lora_id]))
        return found

    def _slots_for(self, mine: set[str], worker: Worker) -> int:
        others = sum(held.state in OCCUPYING and held.lora_id not in mine for held in worker.held.values())
        return max(0, usable_slots(worker.slots, self.policy.reserve_slots) - others)

    def _owed(self, base_model: str) -> int:
        """Slots that this base model's other adapters lack; the weighted ones divide what is left after those."""
        return sum(
            max(0, self._plain_target(a) - len(self.holders.get(a.lora_id, ())))
            for a in self.intent.adapters.values()
            if a.base_model == base_model and _is_placeable(a) and loading_of(a, self.policy) != "weighted"
        )

    def _hungry(self) -> list[Adapter]:
        """Adapters with fewer replicas than their target; those with none, then the hottest, first."""
        short = [lora_id for lora_id, n in self.targets.items() if len(self.holders.get(lora_id, ())) < n]
        adapters = [self.intent.adapters[lora_id] for lora_id in short]
        return sorted(
            adapters,
            key=lambda a: (
                -a.priority,
                bool(self.holders.get(a.lora_id)),
                a.lora_id not in self.demand.wants,
                -self.demand.rates.get(a.lora_id, 0.0),
                a.lora_id,
            ),
        )

    def _fill(self, adapter: Adapter, unplaced: dict[str, str]) -> Iterable[Load]:
        there = self.holders.setdefault(adapter.lora_id, set())
        while len(there) < self.targets[adapter.lora_id]:
            load = self._next_load(adapter, there)
            if load is None:
                unplaced[adapter.lora_id] = self._why_not(adapter)
                return
            there.add(load.worker_id)
            room = self.rooms[load.worker_id]
            if load.evict is None:
                room.free -= 1
            else:
                room.gone.add(load.evict)
                self.holders[load.evict].discard(load.worker_id)
            yield load

    def _next_load(self, adapter: Adapter, there: set[str]) -> Load | None:
        able = self._able(adapter)
        homes = {w.id for w in sorted(able, key=_claim(adapter.lora_id))[: self.targets[adapter.lora_id]]}
        zones = {self.observed.workers[worker_id].zone for worker_id in there}
        nodes = {self.observed.workers[worker_id].node for worker_id in there}

        def order(worker: Worker) -> tuple[object, ...]:
            load = (worker.load, -self.rooms[worker.id].free)
            return (
                worker.id not in homes,
                worker.zone in zones,
                worker.node in nodes,
                load,
                _claim(adapter.lora_id)(worker),
            )

        able = sorted((w for w in able if w.id not in there and not w.holds(adapter.lora_id)), key=order)
        for worker in able:
            if self.rooms[worker.id].free > 0:
                return Load(lora_id=adapter.lora_id, worker_id=worker.id, reason=self._why(adapter, worker.id in homes))
        if not self._may_evict(adapter):
            return None
        for worker in able:
            victim = self._victim(adapter, worker)
            if victim is not None:
                reason = f"{self._why(adapter, worker.id in homes)}; {victim} makes room: least asked for there"
                return Load(lora_id=adapter.lora_id, worker_id=worker.id, evict=victim, reason=reason)
        return None

    def _able(self, adapter: Adapter) -> list[Worker]:
        return [
            worker
            for worker in self.workers
            if worker.state == "ready"
            and adapter.base_model in worker.base_models
            and (adapter.rank or 0) <= worker.max_lora_rank
            and worker.slots > 0
            and self.observed.failed(adapter.lora_id, worker.id, self.now) is None
        ]

    def _may_evict(self, adapter: Adapter) -> bool:
        want = self.demand.wants.get(adapter.lora_id)
        if want is not None and want.may_evict:
            return True
        return self._floor(adapter) > len(self.holders.get(adapter.lora_id, ()))

    def _floor(self, adapter: Adapter) -> int:
        """Replicas below which an adapter is never pushed."""
        loading = loading_of(adapter, self.policy)
        if loading == "weighted":
            return self.targets.get(adapter.lora_id, 0)
        return self._least(adapter) if loading == "eager" else adapter.min_replicas or 0

    def _victim(self, adapter: Adapter, worker: Worker) -> str | None:
        """The adapter there that is missed least; one that already drains first, so that a choice once made stands."""
        spare = [held for held in worker.held.values() if self._is_spare(adapter, worker, held)]
        if not spare:
            return None

        def order(held: Held) -> tuple[object, ...]:
            known = self.intent.adapters[held.lora_id]
            rate = self.demand.rates.get(held.lora_id, 0.0)
            return (held.state != "draining", known.priority, rate, held.since, held.lora_id)

        return min(spare, key=order).lora_id

    def _is_spare(self, adapter: Adapter, worker: Worker, held: Held) -> bool:
        known = self.intent.adapters.get(held.lora_id)
        if known is None or known.pinned or known.is_deleting or known.priority > adapter.priority:
            return False
        if held.state not in ("ready", "draining") or held.lora_id in self.rooms[worker.id].gone:
            return False
        if held.lora_id in self.demand.wants or (held.lora_id, worker.id) in self.demand.in_use:
            return False
        if self.now - held.since < self.policy.min_residency_s:
            return False
        if self.observed.failed(held.lora_id, worker.id, self.now) is not None:
            return False
        # Weighted adapters share only what the others leave; were they to throw others out, their shares would grow.
        is_weighted = loading_of(adapter, self.policy) == "weighted"
        if is_weighted and loading_of(known, self.policy) != "weighted":
            return False
        return len(self.holders.get(held.lora_id, ())) > self._floor(known)

    def _why(self, adapter: Adapter, is_home: bool) -> str:
        there, target = len(self.holders.get(adapter.lora_id, ())), self.targets[adapter.lora_id]
        want = " on request" if adapter.lora_id in self.demand.wants else ""
        moving = " to leave a draining worker" if adapter.lora_id in self.movers else ""
        where = "its home" if is_home else "next best to its home"
        return f"replica {there + 1} of {target} ({loading_of(adapter, self.policy)}{want}{moving}); {where}"

    def _why_not(self, adapter: Adapter) -> str:
        ready = [w for w in self.workers if w.state == "ready"]
        fits = [w for w in ready if adapter.base_model in w.base_models]
        if not fits:
            return f"no ready worker serves {adapter.base_model}"
        if all((adapter.rank or 0) > w.max_lora_rank for w in fits):
            most = max(w.max_lora_rank for w in fits)
            return f"rank {adapter.rank} is above every worker's max_lora_rank (at most {most})"
        failures = [self.observed.failed(adapter.lora_id, w.id, self.now) for w in fits]
        if all(failure is not None for failure in failures):
            return "; ".join(sorted({failure.message for failure in failures if failure is not None}))
        return f"no free slot on {len(fits)} workers, and nothing there may be evicted"

    def _removals(self) -> Iterable[Removal]:
        for worker in self.workers:
            if worker.state in ("lost", "unmanaged", "starting"):
                continue
            for lora_id in sorted(worker.held):
                held = worker.held[lora_id]
                reason = self._why_removed(worker, held) if held.state in OCCUPYING else None
                if reason is not None:
                    yield Removal(lora_id=lora_id, worker_id=worker.id, reason=reason)

    def _why_removed(self, worker: Worker, held: Held) -> str | None:
        adapter = self.intent.adapters.get(held.lora_id)
        owed_to = self.observed.owed.get((held.lora_id, worker.id))
        if owed_to is not None and held.lora_id not in self.demand.wants:
            return f"made room for {owed_to}"
        if adapter is None:
            return "deleted" if self.intent.tombstones.get(held.lora_id) == held.digest else None
        if adapter.is_deleting:
            return "deleted"
        if worker.state == "draining" and not adapter.quarantine and _is_same(adapter, held):
            ready = self._ready_elsewhere(held.lora_id, worker.id)
            if ready >= max(1, min(self._floor(adapter), self._most(adapter))):
                return f"moved: {ready} ready elsewhere, this worker drains"
        return None

    def _ready_elsewhere(self, lora_id: str, worker_id: str) -> int:
        return sum(
            w.id != worker_id and w.state in SERVING and w.held[lora_id].state == "ready"
            for w in self.workers
            if lora_id in w.held
        )

    def _leaving(self) -> Iterable[str]:
        for worker in self.workers:
            if worker.state == "draining" and not worker.is_agent_draining:
                is_empty = not any(held.lora_id in self.movers for held in worker.held.values())
                is_late = worker.drain_deadline is not None and self.now >= worker.drain_deadline
                if is_empty or is_late:
                    yield worker.id

    def _inspections(self) -> Iterable[Inspection]:
        ready = [w for w in self.workers if w.state == "ready" and w.max_lora_rank > 0]
        for lora_id in sorted(self.intent.adapters) if ready else ():
            adapter = self.intent.adapters[lora_id]
            if adapter.is_inspected or adapter.is_deleting or adapter.quarantine is not None:
                continue
            if lora_id in self.observed.inspecting:
                continue
            able = [w for w in ready if adapter.base_model is None or adapter.base_model in w.base_models]
            able = [w for w in able if self.observed.failed(lora_id, w.id, self.now) is None]
            if able:
                home = min(able, key=_claim(lora_id))
                yield Inspection(lora_id=lora_id, worker_id=home.id, reason="digest and rank are not known yet")


def _is_placeable(adapter: Adapter) -> bool:
    return adapter.is_inspected and not adapter.is_deleting and adapter.quarantine is None


class _claim:  # noqa: N801  (a key function with one argument bound)
    __slots__ = ("lora_id",)

    def __init__(self, lora_id: str) -> None:
        self.lora_id = lora_id

    def __call__(self, worker: Worker) -> tuple[int, str]:
        return -rendezvous(self.lora_id, worker.id), worker.id


def _is_same(adapter: Adapter, held: Held) -> bool:
    return adapter.digest is not None and adapter.digest == held.digest
