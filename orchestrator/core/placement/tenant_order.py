"""In which order adapters that requests wait for are loaded: a tenant's take turns as one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.state import RegisteredAdapter, WantedReplicas

TURN_S = 10.0
"""Requests that began to wait in the same so many seconds are served hottest first, earlier ones before them. By heat
alone whoever is asked for a little less than enough others to keep all slots changing waits for ever."""


def in_turn(
    board: PlacementContext, waiting: Sequence[RegisteredAdapter], had: Counter[str]
) -> Iterator[RegisteredAdapter]:
    """The adapters by whose turn it is; who is named a load before the next is asked for has had one.

    First those whose tenant was named the fewest loads in this pass, then those whose wait is the longest: it began
    with their own, or with the last load for their tenant where that was later. What several tenants wait for comes by
    the turn of the first of them, and each has had it. Where nobody says who waits, an adapter has a turn of its own.

    waiting  in the order that those of one tenant keep; all have a want
    had      tenant -> loads of this pass so far
    """
    wants = board.demand.wants
    lines: dict[frozenset[str] | str, list[RegisteredAdapter]] = {}
    for adapter in reversed(waiting):
        lines.setdefault(wants[adapter.lora_id].tenants or adapter.lora_id, []).append(adapter)

    def order(adapter: RegisteredAdapter) -> tuple[int, float, float, str]:
        lora_id = adapter.lora_id
        heat = board.demand.rates.get(lora_id, 0.0)
        return *min(_turns(board, wants[lora_id], had)), -heat, lora_id

    # Orders only grow while loads are named, so one that has grown since it was looked at goes back among the others.
    heads = [(order(line[-1]), line) for line in lines.values()]
    heapify(heads)
    while heads:
        seen, line = heappop(heads)
        if (now := order(line[-1])) != seen:
            heappush(heads, (now, line))
            continue
        adapter = line.pop()
        before = board.copies(adapter.lora_id)
        yield adapter
        named = board.copies(adapter.lora_id) - before
        had.update(dict.fromkeys(wants[adapter.lora_id].tenants, named))
        if line:
            heappush(heads, (order(line[-1]), line))


def _turns(board: PlacementContext, want: WantedReplicas, had: Counter[str]) -> Iterator[tuple[int, float]]:
    """For each tenant: loads of this pass, and since when it waits."""
    since = turn_of(want)
    if not want.tenants:
        yield 0, since
    for tenant in want.tenants:
        yield had[tenant], max(since, board.demand.turns.get(tenant, 0.0))


def turn_of(want: WantedReplicas) -> float:
    """When the stretch of the clock began in which its wait did.

    A stretch and not an age, so that no two who wait ever change places because time passes.
    """
    return want.since // TURN_S * TURN_S
