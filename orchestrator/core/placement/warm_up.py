"""Warm-up and prefetch: what a worker loads or fetches before any request waits for it.

A new worker loads its share of the adapters in demand before it is ready. Files of adapters that should be asked for
soon are fetched to the disk of the worker that will load them: one that has joined, or that takes over the adapters of
a lost one, has none of their files. That is done while nothing that is asked for now needs the network.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import nsmallest
from itertools import islice

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable, usable_slots
from orchestrator.core.placement.targets import replica_targets
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, Intent, ObservedFleet, ObservedWorker, PlannedLoad

WARMING = "warming"
"""State of a worker whose engine is up and takes loads while routers send it no requests yet: it holds no replica."""
LOADS_AT_ONCE = 4
"""Loads at once on a warming worker, where no request waits behind a load. A guess, nothing measured."""
AHEAD_S = 300.0
"""Requests of the next five minutes count. A guess: a fetch takes seconds, and habits hold for a quarter of an hour."""
LEAST_EXPECTED = 0.1
"""Fewer expected requests are worth no fetch: of one request this is left after 18 minutes."""
FETCHES_AT_ONCE = 2
"""Prefetches under way in the fleet. They hold up no fetch of a load, and share the network with it."""
LOOKED_AT = 1000
"""Adapters that one pass looks at: with thousands that are asked for now and then, it takes a few milliseconds."""
SPARE_FILES = 4
"""A disk takes files that would fit so many times: what is asked for later needs room, too."""


def warm_up_loads(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> Mapping[str, tuple[PlannedLoad, ...]]:
    """worker_id -> loads still missing there, the hottest adapter first; one entry for each warming worker.

    A worker's share is the adapters in demand whose home it is: about a fifth beside four other workers. No slot is
    taken from another adapter, copies elsewhere stay, and an adapter that failed there of late is left out. A worker
    that requests wait for has no share: it is ready at once, and loads the adapters of those requests first.
    """
    warming = {w.id: w for w in observed.workers.values() if w.state == WARMING}
    awaited = {w.id: w for w in warming.values() if demand.held_from_zero.get(w.base_model)}
    warming = {name: w for name, w in warming.items() if name not in awaited}
    if not warming:
        return dict.fromkeys(awaited, ())
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
    missing = {name: _missing_loads(warming[name], share, room[name]) for name, share in found.items()}
    return dict.fromkeys(awaited, ()) | missing


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


def expected_requests(demand: DemandSnapshot, lora_id: str, within_s: float = AHEAD_S) -> float:
    """Requests for the adapter within this time, if they come as they did in the last quarter of an hour."""
    return demand.habits.get(lora_id, 0.0) * within_s


def prefetches(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> tuple[PlannedLoad, ...]:
    """Files to fetch now that no request waits for, the most expected first; none while any request waits for a load.

    The worker is the adapter's home, where its next load will be. Adapters that are in a slot need none. One that has
    failed somewhere gets none: a further failure would keep its load away.
    """
    is_busy = observed.loads_in_flight > 0 or any(want.is_waited_for for want in demand.wants.values())
    if is_busy or not observed.files.is_whole or len(observed.fetching) >= FETCHES_AT_ONCE:
        return ()
    failed = {lora_id for lora_id, _ in observed.failures}
    served = {name for worker in observed.workers.values() for name in worker.adapters if worker.has_in_slot(name)}
    expected = [
        (-requests, adapter)
        for name in demand.habits.keys() - served - failed
        if (requests := expected_requests(demand, name)) >= LEAST_EXPECTED
        if (adapter := intent.adapters.get(name)) is not None and is_placeable(adapter)
    ]
    if not expected:
        return ()
    context = PlacementContext(intent, observed, demand, policy, now)
    first = nsmallest(LOOKED_AT, expected, key=lambda each: (each[0], each[1].lora_id))
    missing = _missing_files(context, (adapter for _, adapter in first))
    return tuple(islice(missing, FETCHES_AT_ONCE - len(observed.fetching)))


def _missing_files(context: PlacementContext, adapters: Iterable[RegisteredAdapter]) -> Iterator[PlannedLoad]:
    """A load of each adapter whose home lacks its files, and has room for them."""
    for adapter in adapters:
        home = min(context.able_workers(adapter), key=ClaimOrder(adapter.lora_id), default=None)
        if home is not None and _lacks_files(context, home, adapter):
            yield PlannedLoad(lora_id=adapter.lora_id, worker_id=home.id, reason="it is asked for every few minutes")


def _lacks_files(context: PlacementContext, worker: ObservedWorker, adapter: RegisteredAdapter) -> bool:
    """Whether the worker's disk has not got the adapter's files, and has room for several such adapters."""
    has_files = worker.id in context.observed.files.holders.get(adapter.digest or "", ())
    has_room = SPARE_FILES * (adapter.size_bytes or 0) <= worker.disk_room_bytes
    return (
        worker.has_agent
        and has_room
        and not has_files
        and (adapter.lora_id, worker.id) not in context.observed.fetching
    )
