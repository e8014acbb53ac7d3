"""Warm-up: the adapters that a new worker loads before it is ready, its share of those in demand."""

from collections.abc import Mapping
from dataclasses import replace
from heapq import nsmallest

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable, usable_slots
from orchestrator.core.placement.targets import replica_targets
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, Intent, ObservedFleet, ObservedWorker, PlannedLoad

WARMING = "warming"
"""State of a worker whose engine is up and takes loads while routers send it no requests yet: it holds no replica."""
LOADS_AT_ONCE = 4
"""Loads at once on a warming worker, where no request waits behind a load. A guess, nothing measured."""


def warm_up_loads(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> Mapping[str, tuple[PlannedLoad, ...]]:
    """worker_id -> loads still missing there, the hottest adapter first; one entry for each warming worker.

    A worker's share is the adapters in demand whose home it is: about a fifth beside four other workers. No slot is
    taken from another adapter, copies elsewhere stay, and an adapter that failed there of late is left out.
    """
    warming = {w.id: w for w in observed.workers.values() if w.state == WARMING}
    if not warming:
        return {}
    # Taken as empty, so that adapters loaded already do not change the share.
    supposed = {
        name: replace(w, state="ready", adapters={}) if name in warming else w for name, w in observed.workers.items()
    }
    context = PlacementContext(intent, replace(observed, workers=supposed), demand, policy, now)
    wanted = {lora_id: target.replicas for lora_id, target in replica_targets(context)[0].items()}
    hot = [a for a in intent.adapters.values() if is_placeable(a) and context.demand_weight(a.lora_id) > 0]
    found: dict[str, list[RegisteredAdapter]] = {worker_id: [] for worker_id in warming}
    room = {worker.id: usable_slots(worker.slots, policy.reserve_slots) for worker in warming.values()}
    for adapter in sorted(hot, key=lambda a: (-a.policy.priority, -context.demand_weight(a.lora_id), a.lora_id)):
        for home in nsmallest(
            wanted.get(adapter.lora_id, 1), context.able_workers(adapter), key=ClaimOrder(adapter.lora_id)
        ):
            if home.id in found and len(found[home.id]) < room[home.id]:
                found[home.id].append(adapter)
        if all(len(share) == room[worker_id] for worker_id, share in found.items()):
            break  # all shares are full: the thousands of colder adapters need no look
    return {name: _missing_loads(warming[name], share, room[name]) for name, share in found.items()}


def _missing_loads(worker: ObservedWorker, share: list[RegisteredAdapter], room: int) -> tuple[PlannedLoad, ...]:
    """Loads of the share's adapters that are not ready on the worker, as far as its slots go."""
    share_ids = {adapter.lora_id for adapter in share}
    room -= sum(worker.has_in_slot(lora_id) for lora_id in worker.adapters if lora_id not in share_ids)
    return tuple(
        PlannedLoad(
            lora_id=adapter.lora_id, worker_id=worker.id, reason="its home, and asked for: before the worker is ready"
        )
        for adapter in share[: max(0, room)]
        if adapter.lora_id not in worker.adapters or worker.adapters[adapter.lora_id].state != "ready"
    )
