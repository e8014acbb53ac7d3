"""What a worker should hold before it is ready: its share of the adapters that are asked for."""

from collections.abc import Mapping
from dataclasses import replace
from heapq import nsmallest

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable, usable_slots
from orchestrator.core.placement.targets import targets
from orchestrator.core.state import (
    DemandSnapshot,
    Intent,
    ObservedFleet,
    ObservedWorker,
    PlacementPolicy,
    PlannedLoad,
    RegisteredAdapter,
)

WARMING = "warming"
"""State of a worker whose engine is up and takes loads, while nobody sends it requests yet: it holds no replica."""
LOADS_AT_ONCE = 4
"""On a worker that is warming: nobody waits behind a load there. A guess, nothing measured."""


def warm_shares(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> Mapping[str, tuple[PlannedLoad, ...]]:
    """worker_id -> what has to become ready there yet, the hottest first; an entry for each worker that is warming.

    Its share: what is asked for now and has its home there, so about a fifth beside four others. No slot is taken from
    anybody, copies elsewhere stay, and what failed there of late is not waited for.
    """
    warming = {w.id: w for w in observed.workers.values() if w.state == WARMING}
    if not warming:
        return {}
    # Empty, so that what is loaded there already does not change what else should be.
    supposed = {
        name: replace(w, state="ready", held={}) if name in warming else w for name, w in observed.workers.items()
    }
    board = PlacementContext(intent, replace(observed, workers=supposed), demand, policy, now)
    wanted = {lora_id: target.replicas for lora_id, target in targets(board)[0].items()}
    hot = [a for a in intent.adapters.values() if is_placeable(a) and board.weight(a.lora_id) > 0]
    found: dict[str, list[RegisteredAdapter]] = {worker_id: [] for worker_id in warming}
    room = {worker.id: usable_slots(worker.slots, policy.reserve_slots) for worker in warming.values()}
    for adapter in sorted(hot, key=lambda a: (-a.priority, -board.weight(a.lora_id), a.lora_id)):
        for home in nsmallest(wanted.get(adapter.lora_id, 1), board.able(adapter), key=ClaimOrder(adapter.lora_id)):
            if home.id in found and len(found[home.id]) < room[home.id]:
                found[home.id].append(adapter)
        if all(len(share) == room[worker_id] for worker_id, share in found.items()):
            break  # of ten thousand adapters all but the hottest need no look
    return {name: _missing(warming[name], share, room[name]) for name, share in found.items()}


def _missing(worker: ObservedWorker, share: list[RegisteredAdapter], room: int) -> tuple[PlannedLoad, ...]:
    mine = {adapter.lora_id for adapter in share}
    room -= sum(worker.holds(lora_id) for lora_id in worker.held if lora_id not in mine)
    return tuple(
        PlannedLoad(
            lora_id=adapter.lora_id, worker_id=worker.id, reason="its home, and asked for: before the worker is ready"
        )
        for adapter in share[: max(0, room)]
        if adapter.lora_id not in worker.held or worker.held[adapter.lora_id].state != "ready"
    )
