"""Where the next copy of an adapter goes, and who makes room for it.

Workers are ranked by: the adapter's rendezvous home, a free slot, another zone and node than its other copies, the
least load. Two exceptions:

- A full home yields to a worker with a free slot: an eviction costs a reload, and a home only saves one.
- For a request that waits, a worker that is loading yields to an idle one: a worker's loads run one after another.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from lorafleet.identity import fleet_digest
from orchestrator.core.placement.context import ClaimOrder, PlacementContext, loading_mode
from orchestrator.core.placement.victims import (
    can_evict_in_use,
    cheapest_victim,
    copy_worth,
    has_waited_long,
    room_order,
)
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import ObservedWorker, PlannedLoad

CANDIDATES = 16
"""Workers whose adapters are compared when one has to be evicted: the best by the ranking above."""
NEAR_WORTH = 1.2
"""Victims worth up to this multiple of the cheapest count as equal, so that the home decides between them. At 1.5
`benchmarks.placement` needs up to 2 % more loads."""


class LoadChoice(NamedTuple):
    """The load that adds one copy of an adapter.

    load     None: no worker has room that the adapter may take
    room_at  when a copy that must stay now may make room for the adapter; infinite: waiting makes none
    room_on  the worker of that copy, or one whose loads come first; None: neither
    """

    load: PlannedLoad | None
    room_at: float = inf
    room_on: str | None = None


def next_load(context: PlacementContext, adapter: RegisteredAdapter) -> LoadChoice:
    """The load that adds one copy of the adapter."""
    lora_id = adapter.lora_id
    present = context.holders.get(lora_id, set())
    able = context.able_workers(adapter)
    homes = context.home_workers(adapter, able, context.targets.get(lora_id, 1))
    able = [worker for worker in able if worker.id not in present and not worker.has_in_slot(lora_id)]
    if not able:
        return LoadChoice(None)
    ranked = _ranked_workers(context, adapter, able, homes, present)
    want = context.demand.wants.get(lora_id)
    is_waiting = want is not None and not want.is_repair
    free = [worker for worker in ranked if context.free_slots[worker.id] > 0]
    idle = [worker for worker in free if not context.is_busy(worker.id)] if is_waiting else free
    if idle:
        return LoadChoice(_planned_load(context, adapter, idle[0], homes))
    victim = WorkerVictim(None, "", inf, None)
    if can_evict(context, adapter):
        below = None if is_waiting else _worth_limit(context, adapter)
        is_repair = want is not None and want.is_repair
        from_use = not free and not context.copy_count(lora_id) and has_waited_long(context, adapter)
        victim = _worker_and_victim(context, adapter, ranked, below=below, is_repair=is_repair, from_use=from_use)
    if victim.worker is not None:
        return LoadChoice(_planned_load(context, adapter, victim.worker, homes, victim.lora_id), victim.next_at)
    load = _planned_load(context, adapter, free[0], homes) if free else None
    booked = next((worker.id for worker in ranked if context.is_booked(worker.id)), None)
    return LoadChoice(load, victim.next_at, victim.next_on or booked)


def can_evict(context: PlacementContext, adapter: RegisteredAdapter) -> bool:
    """Whether the adapter may evict others.

    A request waits, its minimum is not met, demand needs more copies, or its only copies, which are in use of late, are
    on workers that drain.
    """
    want = context.demand.wants.get(adapter.lora_id)
    if want is not None and want.may_evict:
        return True
    copies = context.copy_count(adapter.lora_id)
    if context.replica_floor(adapter) > copies:
        return True
    if adapter.lora_id in context.draining_ids:
        return not copies and context.demand.rates.get(adapter.lora_id, 0.0) > 0
    return want is None and copies > 0


def _worth_limit(context: PlacementContext, adapter: RegisteredAdapter) -> float | None:
    """The worth of the new copy, which a victim must be below; None: no limit, as the adapter's minimum is not met."""
    if context.replica_floor(adapter) > context.copy_count(adapter.lora_id):
        return None
    return copy_worth(context, adapter) / (context.copy_count(adapter.lora_id) + 1)


def _ranked_workers(
    context: PlacementContext,
    adapter: RegisteredAdapter,
    able: list[ObservedWorker],
    homes: list[str],
    present: set[str],
) -> list[ObservedWorker]:
    """The best `CANDIDATES` workers for the next copy, best first."""
    zones = {context.observed.workers[worker_id].zone for worker_id in present}
    nodes = {context.observed.workers[worker_id].node for worker_id in present}
    claim = ClaimOrder(adapter.lora_id)

    def order(worker: ObservedWorker) -> tuple[object, ...]:
        """Sort key of workers for a copy: homes first, then free slots, a new zone, a new node, the least load."""
        return (
            worker.id not in homes,
            context.free_slots[worker.id] <= 0,
            worker.zone in zones,
            worker.node in nodes,
            context.loads[worker.id],
            worker.load,
            -context.free_slots[worker.id],
            claim(worker),
        )

    return nsmallest(max(CANDIDATES, 1), able, key=order)


class WorkerVictim(NamedTuple):
    """The worker whose copy makes room; None: every copy must stay.

    next_at  as in `VictimChoice`, of all workers; `next_on`: the worker of that copy
    """

    worker: ObservedWorker | None
    lora_id: str
    next_at: float
    next_on: str | None


def _worker_and_victim(
    context: PlacementContext,
    adapter: RegisteredAdapter,
    ranked: list[ObservedWorker],
    *,
    below: float | None,
    is_repair: bool,
    from_use: bool,
) -> WorkerVictim:
    """The best worker whose victim is among the cheapest, and that victim.

    A victim that can leave at once is preferred, then one that drains already, in use or not: otherwise adapters in
    constant use, each silent for a moment in turn, would start drains that never end. Workers with as many loads ahead
    as a drain takes are left out.
    """
    found, next_at, next_on = [], inf, None
    for position, worker in enumerate(ranked):
        if context.is_booked(worker.id):
            continue
        choice = cheapest_victim(context, adapter, worker, below=below, is_repair=is_repair, from_use=from_use)
        held, value = choice.held, choice.worth
        if choice.next_at < next_at:
            next_at, next_on = choice.next_at, worker.id
        if held is not None:
            known = context.intent.adapters[held.lora_id]
            # Without a free reserve slot the load waits until the victim has drained.
            is_late = worker.is_full
            room = room_order(context, held, worker)
            order = (room, known.policy.priority, value == inf, context.is_busy(worker.id), is_late)
            found.append((order, value, position, worker, held.lora_id))
    if not found:
        return WorkerVictim(None, "", next_at, next_on)
    first = min(found, key=lambda entry: entry[:3])
    equal = [entry for entry in found if entry[0] == first[0] and entry[1] <= first[1] * NEAR_WORTH]
    best = min(equal, key=lambda entry: entry[2])
    return WorkerVictim(best[3], best[4], next_at, next_on)


def _planned_load(
    context: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    homes: list[str],
    evict: str | None = None,
) -> PlannedLoad:
    """The load of the adapter on this worker, with its reason in words."""
    present, target = context.copy_count(adapter.lora_id), context.targets.get(adapter.lora_id, 1)
    want = context.demand.wants.get(adapter.lora_id)
    asked = "" if want is None else " lost its place" if want.is_repair else " on request"
    moving = " to leave a worker" if adapter.lora_id in context.draining_ids else ""
    where = "its home" if worker.id in homes else "next best to its home"
    reason = f"replica {present + 1} of {target} ({loading_mode(adapter, context.policy)}{asked}{moving}); {where}"
    if evict is not None:
        reason += f"; {evict} makes room: least asked for there"
    return PlannedLoad(
        lora_id=adapter.lora_id,
        worker_id=worker.id,
        evict=evict,
        evicts_at_once=evict is not None and can_evict_in_use(context, worker),
        reason=reason,
    )


class PoolLimit(NamedTuple):
    """The best that a base model's workers offer.

    refusal  why none of them takes adapters at all; empty: one does
    """

    max_lora_rank: int
    refusal: str


class PlacementMisfit(NamedTuple):
    """Error code and message: why no worker could ever hold an adapter."""

    code: str
    message: str


def limits_by_base_model(workers: Iterable[ObservedWorker]) -> dict[str, PoolLimit]:
    """base model -> the largest adapter rank of its workers that take adapters.

    Where none takes any: the largest rank of all, with the first one's refusal.
    """
    limits: dict[str, PoolLimit] = {}
    for worker in workers:
        known = limits.get(worker.base_model)
        refusal = f"{worker.id}: {worker.refusal}" if worker.refusal else ""
        if known is None or (known.refusal and not refusal):
            limits[worker.base_model] = PoolLimit(worker.max_lora_rank, refusal)
        elif bool(known.refusal) == bool(refusal):
            limits[worker.base_model] = known._replace(max_lora_rank=max(worker.max_lora_rank, known.max_lora_rank))
    return limits


def placement_misfit(base_model: str | None, rank: int, limits: Mapping[str, PoolLimit]) -> PlacementMisfit | None:
    """Why no worker behind `limits` could ever hold such an adapter.

    None while one could, or none has its base model.
    """
    limit = limits.get(base_model or "")
    if limit is None:
        return None
    if limit.refusal:
        message = f"no worker of {base_model} takes adapters ({limit.refusal}); start one that does"
        return PlacementMisfit("adapters_refused", message)
    if rank <= limit.max_lora_rank:
        return None
    most = f"(at most {limit.max_lora_rank})"
    return PlacementMisfit(
        "rank_too_big", f"rank {rank} is above every worker's max_lora_rank {most}; start a worker with more"
    )


def kept_out_misfit(context: PlacementContext, adapter: RegisteredAdapter) -> PlacementMisfit | None:
    """Why no worker gets the adapter, where operators keep it out of all that could hold it; else None."""
    if adapter.lora_id not in context.kept_out_ids:
        return None
    fits = [w for w in context.workers if w.base_model == adapter.base_model and (adapter.rank or 0) <= w.max_lora_rank]
    if not fits or any(adapter.lora_id not in worker.kept_out for worker in fits):
        return None
    return PlacementMisfit("kept_out", kept_out_text(adapter.lora_id, fits))


def kept_out_text(lora_id: str, workers: Iterable[ObservedWorker]) -> str:
    """Of which workers an operator keeps the adapter out, and the call that ends it."""
    names = ", ".join(worker.id for worker in workers if lora_id in worker.kept_out)
    return f"an operator keeps it out of {names}; POST /v1/workers/WORKER/adapters/{lora_id} lets it in again"


def unplaced_reason(context: PlacementContext, adapter: RegisteredAdapter, room_at: float) -> str | None:
    """Why the adapter gets no further copy; None when it only waits, for a busy worker or for a copy to make room.

    room_at  as in `LoadChoice`
    """
    ready = [w for w in context.workers if w.state == "ready"]
    fits = [w for w in ready if w.base_model == adapter.base_model]
    if not fits:
        return f"no ready worker serves {adapter.base_model}"
    if (misfit := placement_misfit(adapter.base_model, adapter.rank or 0, limits_by_base_model(ready))) is not None:
        return misfit.message
    rank = adapter.rank or 0
    takers = context.accepting_workers(adapter.base_model, rank)
    if fleet_digest(adapter.source) is not None:
        takers = [w for w in takers if w.has_agent]
    kept_out = [w for w in takers if adapter.lora_id in w.kept_out]
    takers = [w for w in takers if adapter.lora_id not in w.kept_out]
    if not takers:
        return kept_out_text(adapter.lora_id, kept_out) if kept_out else _no_taker_reason(context, adapter, fits)
    failures = [context.current_failure(adapter.lora_id, w.id) for w in takers]
    if all(failure is not None for failure in failures):
        return "; ".join(sorted({failure.message for failure in failures if failure is not None}))
    able = [w for w in context.able_workers(adapter) if not w.has_in_slot(adapter.lora_id)]
    if not able:
        count = len(context.able_workers(adapter))
        others = f", and {kept_out_text(adapter.lora_id, kept_out)}" if kept_out else ""
        return f"there are no more workers for it: each of the {count} that can have it has it{others}"
    if room_at < inf:
        return None
    if can_evict(context, adapter) and any(
        context.is_busy(w.id) and cheapest_victim(context, adapter, w).held is not None for w in able
    ):
        return None
    small = sum(w.max_lora_rank < rank for w in fits)
    others = f"; {small} more take no adapter of rank {rank}" if small else ""
    return f"no free slot on {len(able)} workers, and nothing there may be evicted{others}"


def _no_taker_reason(context: PlacementContext, adapter: RegisteredAdapter, fits: Iterable[ObservedWorker]) -> str:
    """Why none of the ready workers of its base model could have the adapter, not even without any others."""
    rank = adapter.rank or 0
    if not any(w.slots for w in fits):
        return f"no ready worker of {adapter.base_model} loads adapters while it runs; start one that does"
    if not context.accepting_workers(adapter.base_model, rank):
        return f"no ready worker of {adapter.base_model} that loads adapters takes rank {rank}; start one that does"
    return (
        f"only workers' agents have its files, and no ready worker of {adapter.base_model} that takes rank {rank} has"
        " an agent; start `python -m workers` beside an engine"
    )
