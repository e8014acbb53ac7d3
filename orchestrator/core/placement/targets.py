"""Replica targets: what settings and requests ask for, and what demand needs beyond that."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.core.placement.context import (
    PlacementContext,
    is_placeable,
    loading_mode,
    usable_slots,
    work_with_backlog,
)
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.snapshot import OCCUPYING, ObservedWorker, StandingTarget

FAIR_SHARE_MARGIN = 1.1
"""A replica may have this multiple of a worker's fair share of the load before another replica is due."""
SURGE_MARGIN = 1.3
"""The demand of the last seconds is divided by this before it is compared with that of the whole window."""
SURGE_RELIEF_S = 15.0
"""Targets are raised so that an adapter's backlog is done within this time. In `benchmarks.placement` 30 s makes p99 in
a flash crowd half as long again; 15 s costs 1 % more loads."""
SCALE_DOWN_SLACK = 0.8
"""Demand must fall below this part of a target's demand before the target may fall."""


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """An adapter's replica target.

    asked   the part of it that settings and requests ask for, without demand
    needed  copies above this number are surplus for an adapter that waits for a slot
    """

    replicas: int
    asked: int
    needed: int


def replicas_for_demand(share: float, fleet: int, busy: float, target_utilisation: float) -> float:
    """Replicas that demand is worth, not rounded: by its share of the load, but no more than it keeps busy.

    share               the adapter's part of its base model's load, 0 to 1
    fleet               workers that could serve it
    busy                seconds of engine work a second: the only user at night has share 1 and keeps nothing busy
    target_utilisation  of a worker that serves only this adapter
    """
    return min(share * fleet / FAIR_SHARE_MARGIN, busy / target_utilisation)


def standing_target(
    up: int, down: int, copies: int, scale: StandingTarget | None, now: float, scale_down_after_s: float
) -> tuple[int, StandingTarget | None]:
    """The target in force, and what to remember of it (nothing for one copy or none).

    It rises at once. It falls to `down` after `scale_down_after_s` of low demand. A copy that is lost meanwhile lowers
    it at once, to no less than `up`.

    up, down  replicas that demand needs, and those with some slack; `up` <= `down`
    copies    copies there now; after a restart, when nothing is remembered, they count as the former target
    scale     what the last pass remembered; None: nothing
    scale_down_after_s  seconds of low demand before the target falls
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
            # A copy that went meanwhile, as a victim or with its worker, is not loaded again.
            target = min(before, max(copies, up))
    return target, StandingTarget(replicas=target, below_since=since) if max(target, copies) > 1 else None


def replica_targets(context: PlacementContext) -> tuple[dict[str, ReplicaTarget], dict[str, StandingTarget]]:
    """lora_id -> target, of adapters with a target above 0; and lora_id -> target to remember for the next pass."""
    asked = _requested_replicas(context)
    work, surges = (
        work_with_backlog(part, context.demand, SURGE_RELIEF_S) for part in (context.demand.work, context.demand.surges)
    )
    totals, surging = _load_by_base_model(context, work), _load_by_base_model(context, surges)
    scales = context.observed.memory.standing_targets
    moving = {lora_id for lora_id, _ in context.observed.memory.moves}
    found: dict[str, ReplicaTarget] = {}
    standing: dict[str, StandingTarget] = {}
    for lora_id in asked.keys() | context.holders.keys():
        adapter = context.intent.adapters[lora_id]
        if not is_placeable(adapter):
            continue
        base, copies = asked.get(lora_id, 0), _copies_counting_moves_once(context, lora_id, moving)
        raw = _demanded_replicas(context, adapter, totals, work)
        least = max(base, 1)
        sudden = _demanded_replicas(context, adapter, surging, surges) / SURGE_MARGIN
        up = max(least, min(math.ceil(max(raw, sudden) - 1e-9), context.max_replicas(adapter)))
        down = max(up, min(math.ceil(raw / SCALE_DOWN_SLACK - 1e-9), context.max_replicas(adapter)))
        # While no router reports, a low count is no reason to lower a target.
        scale = scales.get(lora_id)
        if context.demand.is_blind and scale is not None:
            scale = replace(scale, below_since=None)
        target, kept = standing_target(up, down, copies, scale, context.now, context.policy.scale_down_after_s)
        target = min(target, max(context.max_replicas(adapter), 1))
        if kept is not None:
            standing[lora_id] = kept
        if target > 1 or base:
            found[lora_id] = ReplicaTarget(target, base, min(target, down))
    return found, standing


def _copies_counting_moves_once(context: PlacementContext, lora_id: str, moving: set[str]) -> int:
    """The adapter's copies, the two of a move in progress counted as one."""
    if lora_id not in moving:
        return context.copy_count(lora_id)
    moves = context.observed.memory.moves
    holders = context.holders.get(lora_id, set())
    doubled = sum(name == lora_id and worker_id in holders and to in holders for (name, worker_id), to in moves.items())
    return len(holders) - doubled


def _load_by_base_model(context: PlacementContext, weights: Mapping[str, float]) -> dict[str | None, float]:
    """base model -> the load of all its adapters."""
    found: dict[str | None, float] = {}
    for lora_id in sorted(weights):
        adapter = context.intent.adapters.get(lora_id)
        if adapter is not None:
            found[adapter.base_model] = found.get(adapter.base_model, 0.0) + weights[lora_id]
    return found


def _demanded_replicas(
    context: PlacementContext, adapter: RegisteredAdapter, totals: Mapping[str | None, float], work: Mapping[str, float]
) -> float:
    """Replicas that this work is worth, at most as many as can hold the adapter; 0.0 without work.

    totals  work by base model
    """
    busy = work.get(adapter.lora_id, 0.0)
    if busy <= 0:
        return 0.0
    able = len(context.able_workers(adapter))
    raw = replicas_for_demand(busy / totals[adapter.base_model], able, busy, context.policy.target_utilisation)
    return min(raw, able)


def _requested_replicas(context: PlacementContext) -> dict[str, int]:
    """lora_id -> replicas due without demand: its minimum, share of slots, `ensure` calls, or a worker that drains."""
    weighted = _weighted_replicas(context)
    found = {}
    for adapter in context.adapters_to_look_at():
        if is_placeable(adapter):
            count = max(weighted.get(adapter.lora_id, 0), _replicas_asked_for(context, adapter))
            if count := min(count, context.max_replicas(adapter)):
                found[adapter.lora_id] = count
    return found


def _replicas_asked_for(context: PlacementContext, adapter: RegisteredAdapter) -> int:
    """Replicas that the adapter's minimum, requests for replicas or a draining worker ask for, up to its maximum."""
    is_eager = loading_mode(adapter, context.policy) == "eager"
    target = context.min_replicas(adapter) if is_eager else adapter.policy.min_replicas or 0
    if context.is_everywhere(adapter):
        target = max(target, context.possible_replicas(adapter))
    want = context.demand.wants.get(adapter.lora_id)
    asked = 0 if want is None else want.replicas
    return min(max(target, asked, int(adapter.lora_id in context.draining_ids)), context.max_replicas(adapter))


def _weighted_replicas(context: PlacementContext) -> dict[str, int]:
    """lora_id -> replicas, of weighted adapters: each base model's slots that no other adapter needs, by weight."""
    groups: dict[str, list[RegisteredAdapter]] = {}
    for adapter in context.adapters_to_look_at():
        if adapter.base_model is None or not is_placeable(adapter):
            continue
        if loading_mode(adapter, context.policy) == "weighted":
            groups.setdefault(adapter.base_model, []).append(adapter)
    found: dict[str, int] = {}
    for base_model, adapters in groups.items():
        weighted_ids = {adapter.lora_id for adapter in adapters}
        fleet = [w for w in context.workers if w.base_model == base_model and w.state == "ready"]
        slots = sum(_slots_left_for(context, weighted_ids, worker) for worker in fleet) - _lacking_slots(
            context, base_model
        )
        able = {a.lora_id: sum((a.rank or 0) <= w.max_lora_rank for w in fleet) for a in adapters}
        caps = {a.lora_id: min(context.max_replicas(a), able[a.lora_id]) for a in adapters}
        for lora_id, count in slot_shares({a.lora_id: a.policy.weight for a in adapters}, caps, slots).items():
            found[lora_id] = max(count, min(context.min_replicas(context.intent.adapters[lora_id]), able[lora_id]))
    return found


def _slots_left_for(context: PlacementContext, weighted_ids: set[str], worker: ObservedWorker) -> int:
    """The worker's usable slots that hold none but these adapters."""
    others = sum(held.state in OCCUPYING and held.lora_id not in weighted_ids for held in worker.adapters.values())
    return max(0, usable_slots(worker.slots, context.policy.reserve_slots) - others)


def _lacking_slots(context: PlacementContext, base_model: str) -> int:
    """Slots that the base model's other adapters still lack; weighted ones divide what is left after those."""
    return sum(
        max(0, _replicas_asked_for(context, a) - context.copy_count(a.lora_id))
        for a in context.adapters_to_look_at()
        if a.base_model == base_model and is_placeable(a) and loading_mode(a, context.policy) != "weighted"
    )


def slot_shares(weights: Mapping[str, float], caps: Mapping[str, int], slots: int) -> dict[str, int]:
    """name -> slots, divided in proportion to weights by largest remainder, none above its cap.

    weights, caps   name -> weight (> 0), name -> most slots
    returns         what a cap cuts off goes to the others, in proportion
    """
    given: dict[str, int] = {}
    open_ = sorted(weights)
    left = max(0, slots)
    while open_:
        quotas = _slot_quotas({name: weights[name] for name in open_}, left)
        over = [name for name in open_ if quotas[name] >= caps[name]]
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
    """All the slots divided in proportion to weights, by largest remainder; without caps."""
    quotas = _slot_quotas(weights, slots)
    given = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(weights, key=lambda name: (given[name] - quotas[name], name))
    for name in by_remainder[: slots - sum(given.values())]:
        given[name] += 1
    return given


def _slot_quotas(weights: Mapping[str, float], slots: int) -> dict[str, float]:
    """name -> part of the slots in proportion to weights, not rounded; for weights of any size."""
    # A power of two, so that scaling rounds nothing: the largest weight is between 1/2 and 1 then.
    _, exponent = math.frexp(max(weights.values()))
    scaled = {name: math.ldexp(weight, -exponent) for name, weight in weights.items()}
    total = sum(scaled.values())
    return {name: slots * weight / total for name, weight in scaled.items()}
