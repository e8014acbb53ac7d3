"""How many replicas each adapter should have: what was asked for, and what demand needs beyond it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.core.placement.context import PlacementContext, is_placeable, loading_of, offered, usable_slots
from orchestrator.core.state import OCCUPYING, ObservedWorker, RegisteredAdapter, StandingTarget

FAIR = 1.1
"""A replica may have so much more than a worker's fair share of the load before another is due."""
SURE = 1.3
"""A surge of the last seconds has to ask for so much more than what the whole window does."""
CROWD_S = 15.0
"""Within this time more copies are to work off what waits for one adapter. With 30 s p99 through a flash crowd and a
loss was half as long again in `benchmarks.placement` (twelve seeds), with 15 s there were 1 % more loads."""
SLACK = 0.8
"""Demand must be under this part of what a target was raised for before the target may fall."""


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """Replicas due now; `asked` without demand's part; `needed`: copies above are spare to whoever waits for a slot."""

    replicas: int
    asked: int
    needed: int


def due(share: float, fleet: int, busy: float, target_utilisation: float) -> float:
    """Replicas that demand is worth, not rounded: as its share of the load asks for, but no more than it keeps busy.

    share               of the base model's load, 0 to 1
    fleet               workers that could serve it
    busy                seconds of engine work a second; by this one user at night is not a hot adapter
    target_utilisation  of a worker that does nothing else
    """
    return min(share * fleet / FAIR, busy / target_utilisation)


def stand(
    up: int, down: int, copies: int, scale: StandingTarget | None, now: float, scale_down_after_s: float
) -> tuple[int, StandingTarget | None]:
    """The target that stands, and what to remember: up at once, down only after demand was clearly less for long.

    up, down  what demand asks for, and what it would with some slack: `up` <= `down`
    copies    there now; where nothing is remembered (a restart), these stand like a target of our own
    """
    before = copies if scale is None else scale.replicas
    since = None if scale is None else scale.below_since
    if up >= before:
        target, since = up, None
    elif down >= before:
        target, since = before, None
    else:
        since = now if since is None else since
        if now - since >= scale_down_after_s:
            target, since = down, None
        else:
            # A copy that went meanwhile, as a victim or with its worker, is not worth a load.
            target = min(before, max(copies, up))
    return target, StandingTarget(replicas=target, below_since=since) if max(target, copies) > 1 else None


def targets(board: PlacementContext) -> tuple[dict[str, ReplicaTarget], dict[str, StandingTarget]]:
    """lora_id -> its target, of all that should be anywhere; and the scales that stand."""
    asked = _asked(board)
    work, surges = (offered(part, board.demand, CROWD_S) for part in (board.demand.work, board.demand.surges))
    totals, surging = _totals(board, work), _totals(board, surges)
    scales = board.observed.memory.scales
    moving = {lora_id for lora_id, _ in board.observed.memory.moves}
    found: dict[str, ReplicaTarget] = {}
    standing: dict[str, StandingTarget] = {}
    for lora_id in asked.keys() | board.holders.keys():
        adapter = board.intent.adapters[lora_id]
        if not is_placeable(adapter):
            continue
        base, copies = asked.get(lora_id, 0), _settled(board, lora_id, moving)
        raw = _raw(board, adapter, totals, work)
        least = max(base, 1)
        sudden = _raw(board, adapter, surging, surges) / SURE
        up = max(least, min(math.ceil(max(raw, sudden) - 1e-9), board.most(adapter)))
        down = max(up, min(math.ceil(raw / SLACK - 1e-9), board.most(adapter)))
        # While no router speaks, that little is counted is no reason to fall.
        scale = scales.get(lora_id)
        if board.demand.is_blind and scale is not None:
            scale = replace(scale, below_since=None)
        target, kept = stand(up, down, copies, scale, board.now, board.policy.scale_down_after_s)
        target = min(target, max(board.most(adapter), 1))
        if kept is not None:
            standing[lora_id] = kept
        if target > 1 or base:
            found[lora_id] = ReplicaTarget(target, base, min(target, down))
    return found, standing


def _settled(board: PlacementContext, lora_id: str, moving: set[str]) -> int:
    """Copies there, a move's two halves counted as one."""
    if lora_id not in moving:
        return board.copies(lora_id)
    moves = board.observed.memory.moves
    holders = board.holders.get(lora_id, set())
    doubled = sum(name == lora_id and worker_id in holders and to in holders for (name, worker_id), to in moves.items())
    return len(holders) - doubled


def _totals(board: PlacementContext, weights: Mapping[str, float]) -> dict[str | None, float]:
    """base model -> the load of all its adapters."""
    found: dict[str | None, float] = {}
    for lora_id in sorted(weights):
        adapter = board.intent.adapters.get(lora_id)
        if adapter is not None:
            found[adapter.base_model] = found.get(adapter.base_model, 0.0) + weights[lora_id]
    return found


def _raw(
    board: PlacementContext, adapter: RegisteredAdapter, totals: Mapping[str | None, float], work: Mapping[str, float]
) -> float:
    """Replicas that this work is worth, and no more than could hold it; `totals` of the same work, by base model."""
    busy = work.get(adapter.lora_id, 0.0)
    if busy <= 0:
        return 0.0
    able = len(board.able(adapter))
    raw = due(busy / totals[adapter.base_model], able, busy, board.policy.target_utilisation)
    return min(raw, able)


def _asked(board: PlacementContext) -> dict[str, int]:
    """What is due without demand: minimum, share of the slots, somebody's request, a worker that drains."""
    weighted = _weighted(board)
    found = {}
    for lora_id, adapter in board.intent.adapters.items():
        if is_placeable(adapter):
            count = min(max(weighted.get(lora_id, 0), _plain(board, adapter)), board.most(adapter))
            if count:
                found[lora_id] = count
    return found


def _plain(board: PlacementContext, adapter: RegisteredAdapter) -> int:
    is_eager = loading_of(adapter, board.policy) == "eager"
    target = board.least(adapter) if is_eager else adapter.min_replicas or 0
    want = board.demand.wants.get(adapter.lora_id)
    asked = 0 if want is None else want.replicas
    return min(max(target, asked, int(adapter.lora_id in board.movers)), board.most(adapter))


def _weighted(board: PlacementContext) -> dict[str, int]:
    """Each base model's slots that no other adapter holds, shared out among its weighted adapters."""
    groups: dict[str, list[RegisteredAdapter]] = {}
    for adapter in board.intent.adapters.values():
        if adapter.base_model is None or not is_placeable(adapter):
            continue
        if loading_of(adapter, board.policy) == "weighted":
            groups.setdefault(adapter.base_model, []).append(adapter)
    found: dict[str, int] = {}
    for base_model, adapters in groups.items():
        mine = {adapter.lora_id for adapter in adapters}
        fleet = [w for w in board.workers if w.base_model == base_model and w.state == "ready"]
        slots = sum(_slots_for(board, mine, worker) for worker in fleet) - _owed(board, base_model)
        able = {a.lora_id: sum((a.rank or 0) <= w.max_lora_rank for w in fleet) for a in adapters}
        caps = {a.lora_id: min(board.most(a), able[a.lora_id]) for a in adapters}
        for lora_id, count in shares({a.lora_id: a.weight for a in adapters}, caps, slots).items():
            found[lora_id] = max(count, min(board.least(board.intent.adapters[lora_id]), able[lora_id]))
    return found


def _slots_for(board: PlacementContext, mine: set[str], worker: ObservedWorker) -> int:
    others = sum(held.state in OCCUPYING and held.lora_id not in mine for held in worker.held.values())
    return max(0, usable_slots(worker.slots, board.policy.reserve_slots) - others)


def _owed(board: PlacementContext, base_model: str) -> int:
    """Slots that this base model's other adapters lack; the weighted ones divide what is left after those."""
    return sum(
        max(0, _plain(board, a) - board.copies(a.lora_id))
        for a in board.intent.adapters.values()
        if a.base_model == base_model and is_placeable(a) and loading_of(a, board.policy) != "weighted"
    )


def shares(weights: Mapping[str, float], caps: Mapping[str, int], slots: int) -> dict[str, int]:
    """Slots divided in proportion to weights by largest remainder, none above its cap.

    weights, caps   name -> weight (> 0), name -> most it may have
    returns         name -> slots; what a cap cuts off goes to the others, in proportion
    """
    given: dict[str, int] = {}
    open_ = sorted(weights)
    left = max(0, slots)
    while open_:
        total = sum(weights[name] for name in open_)
        over = [name for name in open_ if left * weights[name] / total >= caps[name]]
        if not over:
            break
        for name in over:
            given[name] = min(caps[name], left)
            left -= given[name]
        open_ = [name for name in open_ if name not in given]
    if open_:
        given |= _largest_remainder({name: weights[name] for name in open_}, left)
    return given


def _largest_remainder(weights: Mapping[str, float], slots: int) -> dict[str, int]:
    total = sum(weights.values())
    quotas = {name: slots * weight / total for name, weight in weights.items()}
    given = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(weights, key=lambda name: (given[name] - quotas[name], name))
    for name in by_remainder[: slots - sum(given.values())]:
        given[name] += 1
    return given
