"""Who makes room for a load: the copy whose loss costs least, among those that may go at all."""

from collections.abc import Iterable
from math import exp, inf

from orchestrator.core.placement.context import PlacementContext, loading_of
from orchestrator.core.state import ObservedWorker, RegisteredAdapter, ReportedAdapter

LOAD_S = 0.5
BYTES_PER_S = 1e9
SIZE_BYTES = 100_000_000
"""What bringing an adapter back takes: a fixed part, its bytes at the speed of a network disk, and a size for those
that do not say. Guesses; only their proportions matter, and the speed is the same for all."""
RECENT_S = 30.0
HABIT = 1.5
"""How long a request counts as recent, and what a request a second by habit weighs against one just now. Tried on six
seeds of `benchmarks.placement`: where the hot set changes twice the weight costs 2 % more loads and four times 9 %, for
1 % fewer where it does not; other times are within its noise."""


PATIENCE_S = 20.0
"""How long a request has waited, and an adapter that is in use has had its slot, when the latter makes room after all:
else who is asked for without a pause keeps its slot for ever. With the drain, 30 s at most, and the load it is within
the minute for which a request waits; a guess otherwise."""


def reload_s(adapter: RegisteredAdapter) -> float:
    """What bringing it back would take, about."""
    size_bytes = SIZE_BYTES if adapter.size_bytes is None else adapter.size_bytes
    return LOAD_S + size_bytes / BYTES_PER_S


def worth(board: PlacementContext, adapter: RegisteredAdapter, at: str | None = None) -> float:
    """What a copy (`at` that worker) saves: demand x reload cost; nothing for one above what is needed.

    Who was asked for a moment ago is about to be asked again, as a conversation goes on; among those silent for longer
    it is the habit that tells who comes back. Requests in the last minute rank worse than either: they favour a
    conversation that has ended over one that has just begun.
    """
    if is_surplus(board, adapter.lora_id, at):
        return 0.0
    last = board.demand.last.get(adapter.lora_id)
    recent = 0.0 if last is None else exp(-max(0.0, board.now - last) / RECENT_S)
    return (recent + HABIT * board.demand.habits.get(adapter.lora_id, 0.0)) * reload_s(adapter)


def is_surplus(board: PlacementContext, lora_id: str, at: str | None = None) -> bool:
    """Whether there are more copies than anybody needs, such as those that a crashed worker brings back.

    at  a worker's copy: whether the others do without it. So of two that are one too many only one is, not each
    """
    if at is not None:
        return board.staying(lora_id, at) >= max(1, board.needed.get(lora_id, 1))
    copies = board.copies(lora_id)
    return copies > 1 and copies > board.needed.get(lora_id, 1)


def victim(
    board: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    *,
    below: float | None = None,
    is_repair: bool = False,
    from_use: bool = False,
) -> tuple[ReportedAdapter, float] | None:
    """The copy there that is missed least, and what it is worth; None when all must stay.

    One that already drains comes first, so that a choice once made stands.
    below      only what is worth less than this
    is_repair  only what is asked for less by habit: who lost its place must not take that of somebody hotter who is
               silent for a moment
    from_use   else what is in use and has been there for `PATIENCE_S`, the longest first; worth infinity
    """
    habits = board.demand.habits
    habit = habits.get(adapter.lora_id, 0.0)
    best: tuple[tuple[object, ...], ReportedAdapter, float] | None = None
    for held in spares(board, adapter, worker, from_use=from_use):
        known = board.intent.adapters[held.lora_id]
        value = worth(board, known, worker.id)
        if below is not None and value >= below:
            continue
        if is_repair and value > 0 and habits.get(held.lora_id, 0.0) >= habit:
            continue
        if is_used(board, held, worker):
            value = inf
        order = (held.state != "draining", known.priority, value, held.since, held.lora_id)
        if best is None or order < best[0]:
            best = (order, held, value)
    return None if best is None else (best[1], best[2])


def is_due(board: PlacementContext, adapter: RegisteredAdapter) -> bool:
    """Whether a request has waited for it for so long that it may have the slot of one that is in use."""
    want = board.demand.wants.get(adapter.lora_id)
    return want is not None and want.is_waited_for and board.now - want.since >= PATIENCE_S


def is_used(board: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether requests run on this copy, or wait for room at whoever has the adapter."""
    demand = board.demand
    return (held.lora_id, worker.id) in demand.in_use or held.lora_id in demand.backlog


def spares(
    board: PlacementContext, adapter: RegisteredAdapter, worker: ObservedWorker, *, from_use: bool = False
) -> Iterable[ReportedAdapter]:
    """Copies there that may make room for the adapter. `from_use`: as in `victim`."""
    return (held for held in worker.held.values() if _is_spare(board, adapter, worker, held, from_use=from_use))


def _is_spare(
    board: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    held: ReportedAdapter,
    *,
    from_use: bool,
) -> bool:
    known = board.intent.adapters.get(held.lora_id)
    if known is None or known.pinned or known.is_deleting or known.priority > adapter.priority:
        return False
    if held.state not in ("ready", "draining") or held.lora_id in board.gone[worker.id]:
        return False
    if (held.lora_id, worker.id) in board.observed.evicting:
        return False
    had_its_turn = from_use and board.now - held.since >= PATIENCE_S
    if _is_waited_for(board, adapter, held, had_its_turn=had_its_turn) or (
        is_used(board, held, worker) and not had_its_turn
    ):
        return False
    if board.now - held.since < board.policy.min_residency_s and not is_surplus(board, held.lora_id, worker.id):
        return False
    if board.failed(held.lora_id, worker.id) is not None:
        return False
    # Weighted adapters share only what the others leave; were they to throw others out, their shares would grow.
    is_weighted = loading_of(adapter, board.policy) == "weighted"
    if is_weighted and loading_of(known, board.policy) != "weighted":
        return False
    # One that makes room already, and only drains still, counts no more; one whose load is under way, or named by this
    # very pass, does not count yet.
    return board.staying(held.lora_id, worker.id) >= board.floor(known)


def _is_waited_for(
    board: PlacementContext, adapter: RegisteredAdapter, held: ReportedAdapter, *, had_its_turn: bool
) -> bool:
    """Whether somebody asks for it whose turn comes first.

    Who is asked for without a pause is asked for as soon as it drains. That must not end the drain.
    """
    wants = board.demand.wants
    if held.lora_id not in wants:
        return False
    is_making_room = had_its_turn and held.state == "draining"
    return not is_making_room or wants[held.lora_id].since <= wants[adapter.lora_id].since
