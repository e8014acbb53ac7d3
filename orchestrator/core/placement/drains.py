"""What a draining worker still has to give away, and until when its drain waits for that.

Unless the operator names a deadline, it follows what must be moved: the adapters' count and bytes, the loads measured,
and how many loads can run at a time.
"""

from collections.abc import Iterable

from orchestrator.core.placement.context import PlacementContext, is_placeable, is_registered_digest
from orchestrator.core.placement.load_time import load_s
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import loads_fleet_wide
from orchestrator.model.snapshot import OCCUPYING, SERVING, DrainProgress, ObservedWorker, WorkerDrainOrder

DEADLINE_MARGIN = 2.0
"""A drain waits for this multiple of the time that its loads should take: other loads run beside them, and victims
drain first. A guess; `drain_deadline_s` comes on top."""


def ready_elsewhere(context: PlacementContext, adapter: RegisteredAdapter, worker_id: str) -> int:
    """Number of other workers that serve the adapter."""
    lora_id = adapter.lora_id
    return sum(
        w.id != worker_id and w.state in SERVING and w.adapters[lora_id].state == "ready"
        for w in context.workers
        if lora_id in w.adapters and w.can_serve(adapter.base_model)
    )


def has_moved(context: PlacementContext, adapter: RegisteredAdapter, worker_id: str) -> bool:
    """Whether so many other workers serve the adapter that it may leave this one, which drains."""
    needed = max(1, min(context.replica_floor(adapter), context.max_replicas(adapter)))
    return ready_elsewhere(context, adapter, worker_id) >= needed


def drain_progress(context: PlacementContext) -> dict[str, DrainProgress]:
    """worker_id -> how far the drain is, of every draining worker."""
    draining = [worker for worker in context.workers if worker.state == "draining"]
    left = {worker.id: tuple(_adapters_to_move(context, worker)) for worker in draining}
    own_s = {
        worker_id: sum(load_s(adapter.size_bytes, context.observed.load_figures) for adapter in adapters)
        for worker_id, adapters in left.items()
    }
    found = {}
    for worker in draining:
        # Drains of one base model share the workers that take their adapters.
        others_s = sum(own_s[w.id] for w in draining if w.id != worker.id and w.base_model == worker.base_model)
        found[worker.id] = _drain_progress(context, worker, left[worker.id], own_s[worker.id], others_s)
    return found


def _adapters_to_move(context: PlacementContext, worker: ObservedWorker) -> Iterable[RegisteredAdapter]:
    """The adapters on a draining worker that are not ready elsewhere yet, by lora_id."""
    for lora_id, held in sorted(worker.adapters.items()):
        adapter = context.intent.adapters.get(lora_id)
        if adapter is None or not is_placeable(adapter) or not worker.can_serve(adapter.base_model):
            continue
        is_here = held.state in OCCUPYING and is_registered_digest(adapter, held)
        if is_here and not has_moved(context, adapter, worker.id):
            yield adapter


def _drain_progress(
    context: PlacementContext,
    worker: ObservedWorker,
    left: tuple[RegisteredAdapter, ...],
    left_s: float,
    others_s: float,
) -> DrainProgress:
    """How far one worker's drain is.

    left_s    seconds of the loads that are left, one after the other
    others_s  the same of other draining workers
    """
    at_once = _loads_at_once(context, worker)
    left_bytes = sum(adapter.size_bytes or 0 for adapter in left)
    order = worker.drain
    moves, move_bytes = len(left), left_bytes
    if order is not None and order.moves is not None:
        moves, move_bytes = order.moves, order.move_bytes
    figures = context.observed.load_figures
    total_s = moves * load_s(move_bytes // moves, figures) if moves else 0.0
    longest_s = max((load_s(adapter.size_bytes, figures) for adapter in left), default=0.0)
    return DrainProgress(
        moves=moves,
        move_bytes=move_bytes,
        left=tuple(adapter.lora_id for adapter in left),
        left_bytes=left_bytes,
        expected_s=round(max(longest_s, (left_s + others_s) / at_once), 3) if left else 0.0,
        deadline=None
        if order is None
        else _moves_deadline(context, order, max(longest_s, (total_s + others_s) / at_once)),
    )


def _loads_at_once(context: PlacementContext, worker: ObservedWorker) -> int:
    """How many of a draining worker's adapters can be loaded elsewhere at a time, at least 1."""
    policy = context.policy
    takers = sum(other.can_accept(worker.base_model, 0) for other in context.workers)
    return max(1, min(loads_fleet_wide(policy, len(context.workers)), policy.loads_per_worker * takers))


def _moves_deadline(context: PlacementContext, order: WorkerDrainOrder, expected_s: float) -> float | None:
    """When the drain stops waiting for moves; not earlier than computed when it began.

    expected_s  seconds in which all its moves should be done, from its begin
    """
    if order.is_fixed:
        return order.deadline
    follows = order.began_at + context.policy.drain_deadline_s + DEADLINE_MARGIN * expected_s
    return follows if order.deadline is None else max(order.deadline, follows)
