"""Victims: the evictable copy whose loss costs least, and old versions that leave before the next one comes."""

from collections.abc import Iterable
from math import exp, inf
from typing import NamedTuple

from orchestrator.core.placement.context import PlacementContext, loading_mode
from orchestrator.core.placement.load_time import load_s
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import ObservedWorker, PlannedRemoval, ReportedAdapter

RECENT_S = 30.0
HABIT_WEIGHT = 1.5
"""How long a request counts as recent, and the weight of one habitual request a second against one just now. On six
seeds of `benchmarks.placement` twice the weight costs 2 % more loads where the hot set changes, four times 9 %."""


PATIENCE_S = 20.0
"""When a request has waited this long, a copy that `holds_its_slot` and has had it this long may be its victim.
Otherwise an adapter in constant use would keep its slot for ever. Wait, drain (30 s at most) and load fit into the
minute for which a request waits; a guess otherwise."""


def copy_worth(context: PlacementContext, adapter: RegisteredAdapter, at: str | None = None) -> float:
    """The worth of a copy (of the one on worker `at`) in seconds; zero for a surplus copy."""
    return 0.0 if is_surplus(context, adapter.lora_id, at) else _needed_copy_worth(context, adapter)


def _needed_copy_worth(context: PlacementContext, adapter: RegisteredAdapter) -> float:
    """The worth of a copy that is no surplus: expected demand x reload cost x the adapter's `loss_factor`.

    Expected demand is recency (a conversation goes on) plus habit (an adapter that is silent, but usually comes back).
    Counting the requests of the last minute predicts worse: it favours conversations that have ended.
    """
    last = context.demand.last_request_at.get(adapter.lora_id)
    if last is None and not context.demand.hears_every_router:
        last = context.now  # a router that is not heard may just have asked for it
    recent = 0.0 if last is None else exp(-max(0.0, context.now - last) / RECENT_S)
    demand = recent + HABIT_WEIGHT * context.demand.habits.get(adapter.lora_id, 0.0)
    return adapter.policy.loss_factor * demand * load_s(adapter.size_bytes, context.observed.load_figures)


def is_surplus(context: PlacementContext, lora_id: str, at: str | None = None) -> bool:
    """Whether there are more copies than needed, such as those that a restarted worker brings back.

    at  a worker: whether the copies elsewhere suffice, so that of two copies where one is needed only one is surplus
    """
    if at is not None:
        return context.staying_copies(lora_id, at) >= max(1, context.needed_copies.get(lora_id, 1))
    copies = context.copy_count(lora_id)
    return copies > 1 and copies > context.needed_copies.get(lora_id, 1)


def eviction_loss_s(context: PlacementContext, adapter: RegisteredAdapter, at: str) -> float:
    """Expected seconds that requests for an adapter wait in all, if its idle copy on worker `at` leaves its slot.

    Zero for a surplus copy and for a version that no name points at. Otherwise its worth, and the requests that arrive
    while it is away, through one load of another adapter and its own reload: they wait half of that time in the mean.
    """
    if adapter.lora_id in context.intent.superseded or is_surplus(context, adapter.lora_id, at):
        return 0.0
    figures = context.observed.load_figures
    away_s = figures.seconds + load_s(adapter.size_bytes, figures)
    waits_s = requests_per_s(context, adapter.lora_id) * away_s**2 / 2
    return _needed_copy_worth(context, adapter) + adapter.policy.loss_factor * waits_s


def requests_per_s(context: PlacementContext, lora_id: str) -> float:
    """The adapter's request rate: over the demand window, or by habit where that is more."""
    return max(context.demand.rates.get(lora_id, 0.0), context.demand.habits.get(lora_id, 0.0))


class VictimChoice(NamedTuple):
    """The copy on a worker that makes room for a load.

    held     None: all copies must stay for now
    worth    of that copy; infinite for one that `holds_its_slot`
    next_at  when the first copy that must stay now may go, by its loss as it is now; infinite: waiting frees none
    """

    held: ReportedAdapter | None
    worth: float
    next_at: float


def cheapest_victim(
    context: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    *,
    below: float | None = None,
    is_repair: bool = False,
    from_use: bool = False,
) -> VictimChoice:
    """The evictable copy on the worker with the least worth.

    A copy that can leave at once comes first, so that the adapter whose turn it is does not wait for a drain; then one
    that drains, so that a choice once made stands; then versions that no name points at.
    A copy goes once a request has waited as long as the loss of the copy is expected to cost.

    below      only copies worth less than this
    is_repair  only copies with a lower habitual rate: a repair must not evict a hotter adapter that is silent just now
    from_use   copies that have held their slots for `PATIENCE_S` or longer may go too, the least asked for first; their
               worth is infinite
    """
    habits = context.demand.habits
    habit = habits.get(adapter.lora_id, 0.0)
    since, next_at = waits_since(context, adapter), inf
    best: tuple[tuple[object, ...], ReportedAdapter, float] | None = None
    for held in evictable_copies(context, adapter, worker, from_use=from_use):
        known = context.intent.adapters[held.lora_id]
        if below is not None and copy_worth(context, known, worker.id) >= below:
            continue
        loss_s, is_draining = eviction_loss_s(context, known, worker.id), held.state == "draining"
        if is_repair and loss_s > 0 and habits.get(held.lora_id, 0.0) >= habit:
            continue
        is_held = holds_its_slot(context, held, worker)
        if not is_held and not is_draining and since + loss_s > context.now:
            next_at = min(next_at, since + loss_s)
            continue
        is_current = held.lora_id not in context.intent.superseded
        worth = inf if is_held else copy_worth(context, known, worker.id)
        rate = requests_per_s(context, held.lora_id)
        room = room_order(context, held, worker)
        order = (room, known.policy.priority, is_current, worth, rate, held.since, held.lora_id)
        if best is None or order < best[0]:
            best = (order, held, worth)
    return VictimChoice(None, inf, next_at) if best is None else VictimChoice(best[1], best[2], next_at)


def has_waited_long(context: PlacementContext, adapter: RegisteredAdapter) -> bool:
    """Whether a request has waited for the adapter so long that it may take a slot that another one holds."""
    want = context.demand.wants.get(adapter.lora_id)
    return want is not None and want.is_waited_for and context.now - want.since >= PATIENCE_S


def waits_since(context: PlacementContext, adapter: RegisteredAdapter) -> float:
    """When the first request began to wait for the adapter; minus infinity for a load that no request waits for."""
    want = context.demand.wants.get(adapter.lora_id)
    return want.since if want is not None and want.is_waited_for else -inf


def is_in_use(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether requests run on this copy, or wait in routers for room on the adapter's workers."""
    demand = context.demand
    return (held.lora_id, worker.id) in demand.in_use or held.lora_id in demand.backlog


def holds_its_slot(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether requests keep the copy in its slot, whatever its loss would cost, until `PATIENCE_S`.

    Those that wait in routers for room on its workers do: the fleet is busy, and each would wait for a reload, too.
    Those that run do where the copy must drain.
    """
    demand = context.demand
    is_running = (held.lora_id, worker.id) in demand.in_use
    return held.lora_id in demand.backlog or (is_running and not can_leave_at_once(context, held, worker))


def can_leave_at_once(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether the copy need not drain first: it has drained, or its engine finishes what runs on it."""
    return bool(context.observed.drains.get((held.lora_id, worker.id))) or can_evict_in_use(context, worker)


def can_evict_in_use(context: PlacementContext, worker: ObservedWorker) -> bool:
    """Whether a load there may evict a copy on which requests run.

    Its engine finishes them. It refuses what routers send later before the first byte, and they send that elsewhere.
    Without the reports of all routers the loss of a copy in use is not known.
    """
    return worker.finishes_unloaded and context.demand.hears_every_router


def room_order(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> tuple[bool, bool]:
    """Sort key of victims by how soon they make room: those that can leave at once, then those that drain."""
    return not can_leave_at_once(context, held, worker), held.state != "draining"


def evictable_copies(
    context: PlacementContext, adapter: RegisteredAdapter, worker: ObservedWorker, *, from_use: bool = False
) -> Iterable[ReportedAdapter]:
    """Copies on the worker that may be evicted for the adapter at all. `from_use`: as in `cheapest_victim`."""
    return (
        held for held in worker.adapters.values() if _is_evictable(context, adapter, worker, held, from_use=from_use)
    )


def _is_evictable(
    context: PlacementContext,
    adapter: RegisteredAdapter,
    worker: ObservedWorker,
    held: ReportedAdapter,
    *,
    from_use: bool,
) -> bool:
    """Whether this copy may be evicted for the adapter.

    Never one that is pinned, deleting, of higher priority, needed first, failed there, or the last of its floor. One
    that `holds_its_slot` may go only by `from_use`.
    """
    known = context.intent.adapters.get(held.lora_id)
    if known is None or known.policy.pinned or known.is_deleting or known.policy.priority > adapter.policy.priority:
        return False
    if held.state not in ("ready", "draining") or held.lora_id in context.victims[worker.id]:
        return False
    if (held.lora_id, worker.id) in context.observed.loading_victims:
        return False
    had_its_turn = from_use and context.now - held.since >= PATIENCE_S
    if _is_needed_first(context, adapter, held, had_its_turn=had_its_turn) or (
        holds_its_slot(context, held, worker) and not had_its_turn
    ):
        return False
    if context.current_failure(held.lora_id, worker.id) is not None:
        return False
    # Weighted adapters share the slots that others leave; if they evicted others, their shares would grow.
    is_weighted = loading_mode(adapter, context.policy) == "weighted"
    if is_weighted and loading_mode(known, context.policy) != "weighted":
        return False
    # Copies that drain for an eviction do not count any more; copies that are still loading do not count yet.
    return context.staying_copies(held.lora_id, worker.id) >= context.replica_floor(known)


def _is_needed_first(
    context: PlacementContext, adapter: RegisteredAdapter, held: ReportedAdapter, *, had_its_turn: bool
) -> bool:
    """Whether requests wait for the copy's adapter and come before those that wait for the new adapter.

    An adapter in constant use is asked for as soon as it drains. That must not end the drain.
    """
    wants = context.demand.wants
    if held.lora_id not in wants:
        return False
    is_making_room = had_its_turn and held.state == "draining"
    return not is_making_room or wants[held.lora_id].since <= wants[adapter.lora_id].since


def next_version_removals(context: PlacementContext) -> Iterable[PlannedRemoval]:
    """Removals of versions that no name points at, one on each worker without a free slot. Marks them as leaving.

    A publish then loads at once. Else its load would first wait until routers have confirmed the drain of a victim.
    """
    if not context.intent.superseded:
        return
    for worker in context.workers:
        held = _leaving_version(context, worker)
        if held is not None:
            context.leaving.add((held.lora_id, worker.id))
            reason = "a newer version is published, and the next one needs a slot here"
            yield PlannedRemoval(lora_id=held.lora_id, worker_id=worker.id, reason=reason)


def _leaving_version(context: PlacementContext, worker: ObservedWorker) -> ReportedAdapter | None:
    """The old version that leaves a full worker: the one that drains already, else the oldest that nobody asks for.

    None where a slot is free, or another step frees one.
    """
    if worker.state != "ready" or context.free_slots[worker.id] > 0 or context.victims[worker.id]:
        return None
    if any((lora_id, worker.id) in context.leaving for lora_id in worker.adapters):
        return None
    old = [held for lora_id, held in worker.adapters.items() if lora_id in context.intent.superseded]
    idle = [held for held in old if _is_idle(context, held, worker)]
    return min(idle, key=lambda held: (held.state != "draining", held.since, held.lora_id), default=None)


def _is_idle(context: PlacementContext, held: ReportedAdapter, worker: ObservedWorker) -> bool:
    """Whether nobody uses, awaits or needs this copy, and no other step is about it."""
    known, pair = context.intent.adapters.get(held.lora_id), (held.lora_id, worker.id)
    if known is None or known.policy.pinned or known.is_deleting or held.state not in ("ready", "draining"):
        return False
    if context.observed.makes_room(pair) or is_in_use(context, held, worker):
        return False
    needed = max(context.replica_floor(known), context.targets.get(held.lora_id, 0))
    return context.staying_copies(*pair) >= needed and context.current_failure(*pair) is None
