"""Moves of copies to less loaded workers, and removals of surplus copies.

A move is a load and, once the new copy is ready, a removal: make before break. It is worth a load only from a worker
that is so busy that requests queue, to one with less than its fair share of the load. It never lifts the receiver above
that share, so the same demand never moves an adapter back. Smaller imbalance evens out with the loads of requests.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable
from orchestrator.core.placement.victims import cheapest_victim, copy_worth
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import ObservedWorker, Pair, PlannedLoad, PlannedRemoval

FULL_WORKER = 2.0
"""A worker loaded below this multiple of the target utilisation gives no adapter away. This and `SMALL_ADAPTER` were
chosen on four to twelve seeds of `benchmarks.placement`: lower values cost loads and save little waiting."""
DONOR_CANDIDATES = 4
"""Most loaded workers that are considered as donors for each receiver."""
SMALL_ADAPTER = 0.3
"""An adapter with less than this part of the mean load is not worth a move."""


def unfinished_moves(context: PlacementContext) -> dict[Pair, str]:
    """Moves in progress: (lora_id, worker it leaves) -> worker it goes to, while both copies are there or loading."""
    found = {}
    for (lora_id, worker_id), to in context.observed.memory.moves.items():
        adapter = context.intent.adapters.get(lora_id)
        old, new = context.observed.workers.get(worker_id), context.observed.workers.get(to)
        if adapter is None or old is None or new is None or not is_placeable(adapter):
            continue
        if old.has_in_slot(lora_id) and new.state == "ready" and new.has_in_slot(lora_id):
            found[lora_id, worker_id] = to
    return found


def finished_move_removals(context: PlacementContext, moves: Mapping[Pair, str]) -> Iterable[PlannedRemoval]:
    """Removals of the old copies of moves whose new copy is ready."""
    for (lora_id, worker_id), to in sorted(moves.items()):
        if context.observed.workers[to].adapters[lora_id].state == "ready":
            yield PlannedRemoval(lora_id=lora_id, worker_id=worker_id, reason=f"moved: ready on {to}")


def new_moves(context: PlacementContext, moves: Mapping[Pair, str]) -> Iterable[tuple[PlannedLoad, str]]:
    """(load, worker_id that the adapter leaves), at most one for each worker below the mean load.

    Each load is applied to the context before it is yielded.
    """
    for base_model in sorted({worker.base_model for worker in context.workers}):
        group = [w for w in context.workers if w.state == "ready" and w.slots > 0 and w.base_model == base_model]
        mean = context.mean_load(group)
        if len(group) < 2 or mean <= 0 or not any(context.demand.work.values()):
            continue
        moving = {lora_id for lora_id, _ in moves}
        for idle in sorted(group, key=lambda w: (context.loads[w.id], w.id)):
            if context.loads[idle.id] >= mean:
                break
            if context.is_busy(idle.id) or idle.id in moves.values():
                continue
            found = _best_move_to(context, idle, group, mean, moving)
            if found is not None:
                moving.add(found[0].lora_id)
                context.apply_load(found[0])
                yield found


def _best_move_to(
    context: PlacementContext, idle: ObservedWorker, group: list[ObservedWorker], mean: float, moving: set[str]
) -> tuple[PlannedLoad, str] | None:
    """The load that moves an adapter from a busy worker to `idle`, and the worker it leaves; None without one."""
    bar = max(mean, FULL_WORKER * context.policy.target_utilisation)
    for donor in nsmallest(DONOR_CANDIDATES, group, key=lambda w: (-context.loads[w.id], w.id)):
        if context.loads[donor.id] < bar:
            return None
        room = min(mean - context.loads[idle.id], (context.loads[donor.id] - context.loads[idle.id]) / 2)
        movable = [
            (part, adapter)
            for lora_id in sorted(donor.adapters)
            for adapter in (context.intent.adapters.get(lora_id),)
            if adapter is not None and lora_id not in moving
            for part in (context.demand_weight(lora_id) / max(1, context.copy_count(lora_id)),)
            if SMALL_ADAPTER * mean <= part <= room and _can_move(context, adapter, donor, idle)
        ]
        # The hottest few; among about equally hot ones, an adapter whose home the receiver is.
        movable = nsmallest(4, movable, key=lambda entry: (-entry[0], entry[1].lora_id))
        movable.sort(key=lambda entry: (-entry[0] * _home_preference(entry[1], idle, group), entry[1].lora_id))
        for part, adapter in movable:
            evict = None
            if context.free_slots[idle.id] <= 0:
                spare = cheapest_victim(context, adapter, idle, below=copy_worth(context, adapter) / 2).held
                if spare is None:
                    continue
                evict = spare.lora_id
            why = f"moves from {donor.id}, {context.loads[donor.id]:.2f} busy with what it holds, and takes {part:.2f}"
            reason = f"{why}; here it is {context.loads[idle.id]:.2f}"
            return PlannedLoad(lora_id=adapter.lora_id, worker_id=idle.id, evict=evict, reason=reason), donor.id
    return None


def _home_preference(adapter: RegisteredAdapter, worker: ObservedWorker, group: list[ObservedWorker]) -> float:
    """Factor by which a move to the adapter's home is preferred: 2.0 for its home in the group, else 1.0."""
    return 2.0 if min(group, key=ClaimOrder(adapter.lora_id)).id == worker.id else 1.0


def _can_move(context: PlacementContext, adapter: RegisteredAdapter, donor: ObservedWorker, to: ObservedWorker) -> bool:
    """Whether the adapter may be moved from `donor` to `to` now.

    Not if it is pinned, young, requested or above its target, or while one of its copies is not ready.
    """
    held = donor.adapters[adapter.lora_id]
    if adapter.policy.pinned or held.state != "ready" or donor.id not in context.holders.get(adapter.lora_id, ()):
        return False
    if context.copy_count(adapter.lora_id) > context.targets.get(adapter.lora_id, 1):
        return False
    # A copy that is still loading will take its part of the load.
    if any(not _is_ready(context, adapter.lora_id, worker_id) for worker_id in context.holders[adapter.lora_id]):
        return False
    if context.now - held.since < context.policy.min_residency_s or adapter.lora_id in context.demand.wants:
        return False
    return context.can_load(adapter, to) and not to.has_in_slot(adapter.lora_id)


def _is_ready(context: PlacementContext, lora_id: str, worker_id: str) -> bool:
    """Whether the worker reports the adapter as ready."""
    held = context.observed.workers[worker_id].adapters.get(lora_id)
    return held is not None and held.state == "ready"


def surplus_removals(context: PlacementContext, moving: Iterable[str]) -> Iterable[PlannedRemoval]:
    """Removals of copies above the target: never one in use, young, pinned, or the last.

    The copy that goes drains already, or shares its zone or node with another, or is on the most loaded worker.
    """
    skipped = set(moving)
    for lora_id in sorted(context.holders):
        target = max(context.targets.get(lora_id, 1), 1)
        extra = context.copy_count(lora_id) - target
        if extra <= 0 or lora_id in skipped or lora_id in context.demand.wants or lora_id in context.draining_ids:
            continue
        adapter = context.intent.adapters[lora_id]
        if adapter.policy.pinned or adapter.is_deleting or not _has_ready_beyond(context, lora_id, target):
            continue
        for worker in _removable_holders(context, lora_id)[:extra]:
            reason = f"surplus copy: {context.copy_count(lora_id)} there, {target} needed"
            yield PlannedRemoval(lora_id=lora_id, worker_id=worker.id, reason=reason)


def _has_ready_beyond(context: PlacementContext, lora_id: str, target: int) -> bool:
    """Whether more than `target` copies answer requests, those that drain included."""
    holders = [context.observed.workers[worker_id] for worker_id in context.holders[lora_id]]
    return sum(w.has_in_slot(lora_id) and w.adapters[lora_id].state in ("ready", "draining") for w in holders) > target


def _removable_holders(context: PlacementContext, lora_id: str) -> list[ObservedWorker]:
    """Workers whose copy may be removed, the first to go first."""
    holders = [context.observed.workers[worker_id] for worker_id in sorted(context.holders[lora_id])]

    def may_go(worker: ObservedWorker) -> bool:
        """Whether the worker's copy may be unloaded: draining already, or ready, old enough and unused."""
        held = worker.adapters.get(lora_id)
        if held is None or worker.state != "ready" or context.current_failure(lora_id, worker.id) is not None:
            return False
        if held.state == "draining":
            return True
        is_old = context.now - held.since >= context.policy.min_residency_s
        return held.state == "ready" and is_old and (lora_id, worker.id) not in context.demand.in_use

    def order(worker: ObservedWorker) -> tuple[object, ...]:
        """Sort key of copies to unload: draining first, then a shared zone, a shared node, the most load."""
        others = [other for other in holders if other.id != worker.id]
        return (
            worker.adapters[lora_id].state != "draining",
            worker.zone not in {other.zone for other in others},
            worker.node not in {other.node for other in others},
            -context.loads[worker.id],
            ClaimOrder(lora_id)(worker)[0],
        )

    # The claim last and reversed: the home stays longest.
    return sorted((worker for worker in holders if may_go(worker)), key=lambda w: (*order(w)[:4], -order(w)[4], w.id))  # type: ignore[operator]
