"""Room for the next version of a published name: an old one leaves a full worker before a trainer waits for that."""

from collections.abc import Iterable

from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.placement.victims import is_in_use
from orchestrator.model.snapshot import ObservedWorker, PlannedRemoval, ReportedAdapter


def next_version_removals(context: PlacementContext) -> Iterable[PlannedRemoval]:
    """Removals of versions that no name points at, one on each worker without a free slot. Marks them as leaving.

    A publish then loads at once. Else its load would first wait until routers have confirmed the drain of a victim.
    """
    if not context.intent.superseded:
        return
    for worker in context.workers:
        held = _leaving_version(context, worker)
        if held is not None:
            context.leaving.add((held.lora_id, worker.id))
            reason = "a newer version is published, and the next one needs a slot here"
            yield PlannedRemoval(lora_id=held.lora_id, worker_id=worker.id, reason=reason)


def _leaving_version(context: PlacementContext, worker: ObservedWorker) -> ReportedAdapter | None:
    """The old version that leaves a full worker: the one that drains already, else the oldest that nobody asks for.

    None where a slot is free, or another step frees one.
    """
    if worker.state != "ready" or context.free_slots[worker.id] > 0 or context.victims[worker.id]:
        return None
    if any((lora_id, worker.id) in context.leaving for lora_id in worker.adapters):
        return None
    old = [held for lora_id, held in worker.adapters.items() if lora_id in context.intent.superseded]
    idle = [held for held in old if _is_idle(context, held, worker)]
    return min(idle, key=lambda held: (held.state != "draining", held.since, held.lora_id), default=None)


def _is_idle(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether nobody uses, awaits or needs this copy, and no other step is about it."""
    known, pair = context.intent.adapters.get(held.lora_id), (held.lora_id, worker.id)
    if known is None or known.pinned or known.is_deleting or held.state not in ("ready", "draining"):
        return False
    if context.observed.makes_room(pair) or is_in_use(context, held, worker):
        return False
    needed = max(context.replica_floor(known), context.targets.get(held.lora_id, 0))
    return context.staying_copies(*pair) >= needed and context.current_failure(*pair) is None
