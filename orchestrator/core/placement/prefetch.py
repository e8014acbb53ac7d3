"""Prefetch: files of adapters that should be asked for soon, on the disk of the worker that will load them.

A worker that has just joined, or that takes over the adapters of a lost one, has none of their files: each first
request would wait for a fetch. So the files are fetched before, while nothing that is asked for now needs the network.
"""

from collections.abc import Iterable, Iterator
from heapq import nsmallest
from itertools import islice

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, Intent, ObservedFleet, ObservedWorker, PlannedLoad

AHEAD_S = 300.0
"""Requests of the next five minutes count. A guess: a fetch takes seconds, and habits hold for a quarter of an hour."""
LEAST_EXPECTED = 0.1
"""Fewer expected requests are worth no fetch: of one request this is left after 18 minutes."""
AT_ONCE = 2
"""Prefetches under way in the fleet. They hold up no fetch of a load, and share the network with it."""
LOOKED_AT = 1000
"""Adapters that one pass looks at: with thousands that are asked for now and then, it takes a few milliseconds."""
SPARE_FILES = 4
"""A disk takes files that would fit so many times: what is asked for later needs room, too."""


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
    if is_busy or not observed.files.is_whole or len(observed.fetching) >= AT_ONCE:
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
    return tuple(islice(missing, AT_ONCE - len(observed.fetching)))


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
