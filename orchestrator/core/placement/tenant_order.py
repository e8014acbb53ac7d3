"""The fair order in which adapters that requests wait for are loaded: tenants take turns."""

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import log2

from orchestrator.core.placement.context import PlacementContext
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import LoadFigures, WantedReplicas

WAIT_BUCKET_LOADS = 3.0
WAIT_BUCKET_BOUNDS_S = (1 / 16, 8.0)
"""Requests that began to wait in the same bucket, which is as long as so many loads take, are served by request rate,
earlier buckets first. By rate alone an adapter just below the hottest ones would wait for ever."""


def in_tenant_order(
    context: PlacementContext, waiting: Sequence[RegisteredAdapter], loads_by_tenant: Counter[str]
) -> Iterator[RegisteredAdapter]:
    """The waiting adapters in the order in which they get loads.

    The tenant with the fewest loads in this pass comes first, then the longest wait. A tenant's wait begins with its
    request or with the last load for that tenant, whichever is later. An adapter that several tenants wait for has the
    turn of the first of them, and counts for each. An adapter with unknown tenants is a tenant of its own.
    The caller applies an adapter's load to the context before it asks for the next adapter.

    waiting          adapters with an entry in `wants`, in the order that those of one tenant keep
    loads_by_tenant  tenant -> loads of this pass so far; updated
    """
    wants = context.demand.wants
    lines: dict[frozenset[str] | str, list[RegisteredAdapter]] = {}
    for adapter in reversed(waiting):
        lines.setdefault(wants[adapter.lora_id].tenants or adapter.lora_id, []).append(adapter)

    def order(adapter: RegisteredAdapter) -> tuple[int, float, float, str]:
        """Sort key of adapters: the earliest turn of a tenant that waits for it, then request rate."""
        lora_id = adapter.lora_id
        heat = context.demand.rates.get(lora_id, 0.0)
        return *min(_tenant_turns(context, wants[lora_id], loads_by_tenant)), -heat, lora_id

    # Sort keys only grow while loads are named, so a head whose key has grown is pushed back.
    heads = [(order(line[-1]), line) for line in lines.values()]
    heapify(heads)
    while heads:
        seen, line = heappop(heads)
        if (now := order(line[-1])) != seen:
            heappush(heads, (now, line))
            continue
        adapter = line.pop()
        before = context.copy_count(adapter.lora_id)
        yield adapter
        named = context.copy_count(adapter.lora_id) - before
        loads_by_tenant.update(dict.fromkeys(wants[adapter.lora_id].tenants, named))
        if line:
            heappush(heads, (order(line[-1]), line))


def _tenant_turns(
    context: PlacementContext, want: WantedReplicas, loads_by_tenant: Counter[str]
) -> Iterator[tuple[int, float]]:
    """For each tenant of the want: its loads of this pass, and since when it waits."""
    since = wait_bucket(context, want)
    if not want.tenants:
        yield 0, since
    for tenant in want.tenants:
        yield loads_by_tenant[tenant], max(since, context.demand.last_load_at.get(tenant, 0.0))


def wait_bucket(context: PlacementContext, want: WantedReplicas) -> float:
    """The start of the clock bucket in which the wait began.

    Buckets of the clock, not ages, so that two waiting adapters never change places as time passes.
    """
    bucket_s = wait_bucket_s(context.observed.load_figures)
    return want.since // bucket_s * bucket_s


def wait_bucket_s(figures: LoadFigures) -> float:
    """Length of a bucket: a power of two in seconds, so that one more measured load seldom changes it."""
    least_s, most_s = WAIT_BUCKET_BOUNDS_S
    return 2.0 ** round(log2(min(most_s, max(least_s, WAIT_BUCKET_LOADS * figures.seconds))))
