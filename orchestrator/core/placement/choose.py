"""Where the next copy of an adapter goes, and who makes room for it.

In order of weight: what is there stays; the adapter's rendezvous home; a free slot; another zone and node; the least
load. Two exceptions, on purpose. A home that is full yields to another worker with a free slot, because throwing
somebody out costs a reload and a home only saves one. And for a request that waits, a worker that is loading
already yields to one that is not, because the loads of one worker come one after another.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, loading_of
from orchestrator.core.placement.victims import is_due, victim, worth
from orchestrator.core.state import ObservedWorker, PlannedLoad, RegisteredAdapter

CANDIDATES = 16
"""Workers whose adapters are compared when somebody has to go: of more, the best by all else."""
NEAR = 1.2
"""Victims worth up to so many times the least are as good, so that the home decides. More costs loads, up to 2 % at 1.5
in `benchmarks.placement`, and a home saves few."""


def next_load(board: PlacementContext, adapter: RegisteredAdapter) -> PlannedLoad | None:
    """The load that brings one copy more, or None when there is no room that it may have."""
    lora_id = adapter.lora_id
    there = board.holders.get(lora_id, set())
    able = board.able(adapter)
    homes = board.homes(adapter, able, board.targets.get(lora_id, 1))
    able = [worker for worker in able if worker.id not in there and not worker.holds(lora_id)]
    if not able:
        return None
    ranked = _ranked(board, adapter, able, homes, there)
    want = board.demand.wants.get(lora_id)
    is_waiting = want is not None and not want.is_repair
    free = [worker for worker in ranked if board.free[worker.id] > 0]
    idle = [worker for worker in free if not board.is_busy(worker.id)] if is_waiting else free
    if idle:
        return _load(board, adapter, idle[0], homes)
    if may_evict(board, adapter):
        below = None if is_waiting else _below(board, adapter)
        is_repair = want is not None and want.is_repair
        from_use = not free and not board.copies(lora_id) and is_due(board, adapter)
        found = _with_victim(board, adapter, ranked, below=below, is_repair=is_repair, from_use=from_use)
        if found is not None:
            worker, evict = found
            return _load(board, adapter, worker, homes, evict)
    return _load(board, adapter, free[0], homes) if free else None


def may_evict(board: PlacementContext, adapter: RegisteredAdapter) -> bool:
    """Whether anybody may be thrown out for it: a request waits, its minimum is not met, or demand needs it more."""
    want = board.demand.wants.get(adapter.lora_id)
    if want is not None and want.may_evict:
        return True
    copies = board.copies(adapter.lora_id)
    return board.floor(adapter) > copies or (want is None and copies > 0 and adapter.lora_id not in board.movers)


def _below(board: PlacementContext, adapter: RegisteredAdapter) -> float | None:
    """Without a request that waits, only what is worth less than the copy that is to come goes."""
    if board.floor(adapter) > board.copies(adapter.lora_id):
        return None
    return worth(board, adapter) / (board.copies(adapter.lora_id) + 1)


def _ranked(
    board: PlacementContext, adapter: RegisteredAdapter, able: list[ObservedWorker], homes: list[str], there: set[str]
) -> list[ObservedWorker]:
    """The best first; no more than can matter."""
    zones = {board.observed.workers[worker_id].zone for worker_id in there}
    nodes = {board.observed.workers[worker_id].node for worker_id in there}
    claim = ClaimOrder(adapter.lora_id)

    def order(worker: ObservedWorker) -> tuple[object, ...]:
        return (
            worker.id not in homes,
            board.free[worker.id] <= 0,
            worker.zone in zones,
            worker.node in nodes,
            board.loads[worker.id],
            worker.load,
            -board.free[worker.id],
            claim(worker),
        )

    return nsmallest(max(CANDIDATES, 1), able, key=order)


def _with_victim(
    board: PlacementContext,
    adapter: RegisteredAdapter,
    ranked: list[ObservedWorker],
    *,
    below: float | None,
    is_repair: bool,
    from_use: bool,
) -> tuple[ObservedWorker, str] | None:
    """The first worker whose victim is among those missed least; a victim that drains already before all others, in
    use or not: those that are asked for without a pause are each silent for a moment in turn, and none would ever go.

    A worker that is loading is left out: its turn comes when it has finished, and until then nobody drains for it.
    """
    found = []
    for position, worker in enumerate(ranked):
        if board.is_busy(worker.id):
            continue
        chosen = victim(board, adapter, worker, below=below, is_repair=is_repair, from_use=from_use)
        if chosen is not None:
            held, value = chosen
            known = board.intent.adapters[held.lora_id]
            # Without even the reserve free, the load has to wait until the victim has drained.
            is_late = worker.occupied >= worker.slots
            order = (held.state != "draining", known.priority, value == inf, is_late)
            found.append((order, value, position, worker, held.lora_id))
    if not found:
        return None
    first = min(found, key=lambda entry: entry[:3])
    alike = [entry for entry in found if entry[0] == first[0] and entry[1] <= first[1] * NEAR]
    best = min(alike, key=lambda entry: entry[2])
    return best[3], best[4]


def _load(
    board: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    homes: list[str],
    evict: str | None = None,
) -> PlannedLoad:
    there, target = board.copies(adapter.lora_id), board.targets.get(adapter.lora_id, 1)
    want = board.demand.wants.get(adapter.lora_id)
    asked = "" if want is None else " lost its place" if want.is_repair else " on request"
    moving = " to leave a draining worker" if adapter.lora_id in board.movers else ""
    where = "its home" if worker.id in homes else "next best to its home"
    reason = f"replica {there + 1} of {target} ({loading_of(adapter, board.policy)}{asked}{moving}); {where}"
    if evict is not None:
        reason += f"; {evict} makes room: least asked for there"
    return PlannedLoad(lora_id=adapter.lora_id, worker_id=worker.id, evict=evict, reason=reason)


class PoolLimit(NamedTuple):
    """The most that any of a base model's workers takes: the rank, and why none takes an adapter (empty: one does)."""

    max_lora_rank: int
    refusal: str


class PlacementMisfit(NamedTuple):
    """Why no worker could hold an adapter."""

    code: str
    message: str


def limits_of(workers: Iterable[ObservedWorker]) -> dict[str, PoolLimit]:
    """What these workers take, by base model."""
    limits: dict[str, PoolLimit] = {}
    for worker in workers:
        known = limits.get(worker.base_model)
        refusal = f"{worker.id}: {worker.refusal}" if worker.refusal else ""
        if known is None or (known.refusal and not refusal):
            limits[worker.base_model] = PoolLimit(worker.max_lora_rank, refusal)
        elif bool(known.refusal) == bool(refusal):
            limits[worker.base_model] = known._replace(max_lora_rank=max(worker.max_lora_rank, known.max_lora_rank))
    return limits


def fits_nowhere(adapter: RegisteredAdapter, limits: Mapping[str, PoolLimit]) -> PlacementMisfit | None:
    """Why none of the workers that `limits` is made of could ever hold the adapter; None while one could, or none
    serves its base model.
    """
    limit = limits.get(adapter.base_model or "")
    if limit is None:
        return None
    if limit.refusal:
        message = f"no worker of {adapter.base_model} takes adapters ({limit.refusal}); start one that does"
        return PlacementMisfit("adapters_refused", message)
    if (adapter.rank or 0) <= limit.max_lora_rank:
        return None
    most = f"(at most {limit.max_lora_rank})"
    return PlacementMisfit(
        "rank_too_big", f"rank {adapter.rank} is above every worker's max_lora_rank {most}; start a worker with more"
    )


def why_not(board: PlacementContext, adapter: RegisteredAdapter) -> str | None:
    """Why there is no next copy; None when it only waits for its turn."""
    ready = [w for w in board.workers if w.state == "ready"]
    fits = [w for w in ready if w.base_model == adapter.base_model]
    if not fits:
        return f"no ready worker serves {adapter.base_model}"
    if (misfit := fits_nowhere(adapter, limits_of(ready))) is not None:
        return misfit.message
    failures = [board.failed(adapter.lora_id, w.id) for w in fits]
    if all(failure is not None for failure in failures):
        return "; ".join(sorted({failure.message for failure in failures if failure is not None}))
    able = [w for w in board.able(adapter) if not w.holds(adapter.lora_id)]
    if not able:
        return f"there are no more workers for it: each of the {len(board.able(adapter))} that can have it has it"
    if may_evict(board, adapter) and any(board.is_busy(w.id) and victim(board, adapter, w) for w in able):
        return None
    return f"no free slot on {len(fits)} workers, and nothing there may be evicted"
