"""Copies that change their place, and copies that go because there are too many. Only while all is calm.

A move is a load and, once that copy is ready, a removal: make before break. It is worth its loads only where a worker
has about as much to do as it can, so that requests queue there, and another has less than its fair share; it may never
bring the other above that, so that the same demand never moves anything back. What is merely uneven evens out with the
loads that requests ask for.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest

from orchestrator.core.placement.context import ClaimOrder, PlacementContext, is_placeable
from orchestrator.core.placement.victims import victim, worth
from orchestrator.core.state import ObservedWorker, Pair, PlannedLoad, PlannedRemoval, RegisteredAdapter

FULL = 2.0
"""A worker that is to be busy for less than so many times the target utilisation gives nothing away: one that is always
busy has a dozen seconds of work waiting then, and one busy for 0.8 half as much again. This and `SMALL` were chosen on
four to twelve seeds of `benchmarks.placement`: lower ones move what waits for little, and cost loads."""
DONORS = 4
"""Workers with most to do that are looked at for each that takes a move."""
SMALL = 0.3
"""Part of the mean load below which an adapter is not worth a move."""


def unfinished(board: PlacementContext) -> dict[Pair, str]:
    """Moves that still are: the old copy is there, and so is the new one, or its load."""
    found = {}
    for (lora_id, worker_id), to in board.observed.memory.moves.items():
        adapter = board.intent.adapters.get(lora_id)
        old, new = board.observed.workers.get(worker_id), board.observed.workers.get(to)
        if adapter is None or old is None or new is None or not is_placeable(adapter):
            continue
        if old.holds(lora_id) and new.state == "ready" and new.holds(lora_id):
            found[lora_id, worker_id] = to
    return found


def finished(board: PlacementContext, moves: Mapping[Pair, str]) -> Iterable[PlannedRemoval]:
    """The old halves of moves whose new half is ready."""
    for (lora_id, worker_id), to in sorted(moves.items()):
        if board.observed.workers[to].held[lora_id].state == "ready":
            yield PlannedRemoval(lora_id=lora_id, worker_id=worker_id, reason=f"moved: ready on {to}")


def new_moves(board: PlacementContext, moves: Mapping[Pair, str]) -> Iterable[tuple[PlannedLoad, str]]:
    """(load, worker_id it leaves): at most one for each worker that has less to do than the mean."""
    for base_model in sorted({worker.base_model for worker in board.workers}):
        group = [w for w in board.workers if w.state == "ready" and w.slots > 0 and w.base_model == base_model]
        mean = board.mean_load(group)
        if len(group) < 2 or mean <= 0 or not any(board.demand.work.values()):
            continue
        moving = {lora_id for lora_id, _ in moves}
        for idle in sorted(group, key=lambda w: (board.loads[w.id], w.id)):
            if board.loads[idle.id] >= mean:
                break
            if board.is_busy(idle.id) or idle.id in moves.values():
                continue
            found = _move_to(board, idle, group, mean, moving)
            if found is not None:
                moving.add(found[0].lora_id)
                board.take(found[0])
                yield found


def _move_to(
    board: PlacementContext, idle: ObservedWorker, group: list[ObservedWorker], mean: float, moving: set[str]
) -> tuple[PlannedLoad, str] | None:
    bar = max(mean, FULL * board.policy.target_utilisation)
    for donor in nsmallest(DONORS, group, key=lambda w: (-board.loads[w.id], w.id)):
        if board.loads[donor.id] < bar:
            return None
        room = min(mean - board.loads[idle.id], (board.loads[donor.id] - board.loads[idle.id]) / 2)
        movable = [
            (part, adapter)
            for lora_id in sorted(donor.held)
            for adapter in (board.intent.adapters.get(lora_id),)
            if adapter is not None and lora_id not in moving
            for part in (board.weight(lora_id) / max(1, board.copies(lora_id)),)
            if SMALL * mean <= part <= room and _may_move(board, adapter, donor, idle)
        ]
        # The hottest few; of those that are about as hot, one that has its home there.
        movable = nsmallest(4, movable, key=lambda entry: (-entry[0], entry[1].lora_id))
        movable.sort(key=lambda entry: (-entry[0] * _pull(entry[1], idle, group), entry[1].lora_id))
        for part, adapter in movable:
            evict = None
            if board.free[idle.id] <= 0:
                spare = victim(board, adapter, idle, below=worth(board, adapter) / 2)
                if spare is None:
                    continue
                evict = spare[0].lora_id
            why = f"moves from {donor.id}, {board.loads[donor.id]:.2f} busy with what it holds, and takes {part:.2f}"
            reason = f"{why}; here it is {board.loads[idle.id]:.2f}"
            return PlannedLoad(lora_id=adapter.lora_id, worker_id=idle.id, evict=evict, reason=reason), donor.id
    return None


def _pull(adapter: RegisteredAdapter, worker: ObservedWorker, group: list[ObservedWorker]) -> float:
    return 2.0 if min(group, key=ClaimOrder(adapter.lora_id)).id == worker.id else 1.0


def _may_move(board: PlacementContext, adapter: RegisteredAdapter, donor: ObservedWorker, to: ObservedWorker) -> bool:
    held = donor.held[adapter.lora_id]
    if adapter.pinned or held.state != "ready" or donor.id not in board.holders.get(adapter.lora_id, ()):
        return False
    if board.copies(adapter.lora_id) > board.targets.get(adapter.lora_id, 1):
        return False
    # A copy that is on its way, by this very pass perhaps, will take its part of the load.
    if any(not _is_ready(board, adapter.lora_id, worker_id) for worker_id in board.holders[adapter.lora_id]):
        return False
    if board.now - held.since < board.policy.min_residency_s or adapter.lora_id in board.demand.wants:
        return False
    return board.can_load(adapter, to) and not to.holds(adapter.lora_id)


def _is_ready(board: PlacementContext, lora_id: str, worker_id: str) -> bool:
    held = board.observed.workers[worker_id].held.get(lora_id)
    return held is not None and held.state == "ready"


def surplus(board: PlacementContext, moving: Iterable[str]) -> Iterable[PlannedRemoval]:
    """Copies above a target that has stood long enough: never in use, young, pinned, or the last one.

    The copy that goes is one that drains already, else one that shares its zone or node with another, else the one on
    the worker with most to do.
    """
    skipped = set(moving)
    for lora_id in sorted(board.holders):
        target = max(board.targets.get(lora_id, 1), 1)
        extra = board.copies(lora_id) - target
        if extra <= 0 or lora_id in skipped or lora_id in board.demand.wants or lora_id in board.movers:
            continue
        adapter = board.intent.adapters[lora_id]
        if adapter.pinned or adapter.is_deleting or not _are_enough_ready(board, lora_id, target):
            continue
        for worker in _least_missed(board, lora_id)[:extra]:
            reason = f"surplus copy: {board.copies(lora_id)} there, {target} needed"
            yield PlannedRemoval(lora_id=lora_id, worker_id=worker.id, reason=reason)


def _are_enough_ready(board: PlacementContext, lora_id: str, target: int) -> bool:
    """Whether the target is met by copies that answer already, or still."""
    holders = [board.observed.workers[worker_id] for worker_id in board.holders[lora_id]]
    return sum(w.holds(lora_id) and w.held[lora_id].state in ("ready", "draining") for w in holders) > target


def _least_missed(board: PlacementContext, lora_id: str) -> list[ObservedWorker]:
    holders = [board.observed.workers[worker_id] for worker_id in sorted(board.holders[lora_id])]

    def may_go(worker: ObservedWorker) -> bool:
        held = worker.held.get(lora_id)
        if held is None or worker.state != "ready" or board.failed(lora_id, worker.id) is not None:
            return False
        if held.state == "draining":
            return True
        is_old = board.now - held.since >= board.policy.min_residency_s
        return held.state == "ready" and is_old and (lora_id, worker.id) not in board.demand.in_use

    def order(worker: ObservedWorker) -> tuple[object, ...]:
        others = [other for other in holders if other.id != worker.id]
        return (
            worker.held[lora_id].state != "draining",
            worker.zone not in {other.zone for other in others},
            worker.node not in {other.node for other in others},
            -board.loads[worker.id],
            ClaimOrder(lora_id)(worker)[0],
        )

    # The claim last and reversed: the home stays longest.
    return sorted((worker for worker in holders if may_go(worker)), key=lambda w: (*order(w)[:4], -order(w)[4], w.id))  # type: ignore[operator]
