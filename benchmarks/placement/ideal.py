"""What one LRU over all slots together would do, with nothing between it and the engines."""

from collections import OrderedDict
from collections.abc import Sequence
from math import log
from random import Random

from benchmarks.placement.workload import LOAD_S, LOAD_SIGMA, PlacementRequest


def shared_lru(
    requests: Sequence[PlacementRequest],
    slots: int,
    *,
    warm_s: float,
    takes_time: bool,
    load_s: float = LOAD_S,
    seed: int = 0,
) -> tuple[int, int]:
    """(requests that wait for a load, loads) after `warm_s`.

    Every adapter needs one slot and may have any; as many loads at once as there are misses.

    takes_time  loads take as long as in the fleet, so that who comes meanwhile waits too; else they are done at once
    """
    rng = Random(seed)
    held = OrderedDict[int, float]()
    waits = loads = 0
    for request in requests:
        is_counted = request.at >= warm_s
        ready_at = held.pop(request.adapter, None)
        if ready_at is None:
            if len(held) >= slots:
                held.popitem(last=False)
            loads += is_counted
            ready_at = request.at + (rng.lognormvariate(log(load_s), LOAD_SIGMA) if takes_time else 0.0)
            waits += is_counted
        else:
            waits += is_counted and ready_at > request.at
        held[request.adapter] = ready_at
    return waits, loads
