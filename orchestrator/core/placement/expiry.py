"""Removals of copies that nobody has asked for in their adapter's `ttl_s`. Off unless a policy sets one.

An adapter has been asked for when a request for it was sent, runs, waits or was refused, or when `ensure` named it.
Routers and agents count independently of each other, and the later word of the two counts. So the clock goes on over a
restart of either, and over a change of leader. Silence of a router is no evidence: while one may be unheard, nothing
expires. A copy's own clock begins when it is ready, so that a load that no request follows has its time, too.
"""

from collections.abc import Iterable, Mapping

from orchestrator.core.placement.context import PlacementContext, is_placeable
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import Intent, ObservedWorker, PlannedRemoval


def ttl_s(adapter: RegisteredAdapter, policy: PlacementPolicy) -> float:
    """Seconds without a request after which the adapter is unloaded: its own, else the policy's; 0 for never."""
    return policy.ttl_s if adapter.policy.ttl_s is None else adapter.policy.ttl_s


def longest_ttl_s(intent: Intent, policy: PlacementPolicy) -> float:
    """The longest `ttl_s` in force; 0.0 where no adapter expires."""
    in_force = [ttl_s(intent.adapters[lora_id], policy) for lora_id in intent.index.standing]
    if len(in_force) < len(intent.adapters):
        in_force.append(policy.ttl_s)  # adapters with a `ttl_s` of their own stand
    return max(in_force, default=0.0)


def last_asked_at(context: PlacementContext) -> Mapping[str, float]:
    """lora_id -> when it was asked for last, by routers or agents, of adapters with a `ttl_s` and a copy.

    -inf where nobody has asked yet, as far as is known.
    """
    adapters = context.intent.adapters
    timed = {lora_id for lora_id in context.holders if ttl_s(adapters[lora_id], context.policy) > 0}
    found = {lora_id: context.demand.asked_at(lora_id) for lora_id in timed}
    for worker in context.workers if timed else ():
        for lora_id in timed & worker.adapters.keys():
            used_at = worker.adapters[lora_id].last_used_at
            if used_at is not None:
                found[lora_id] = max(found[lora_id], used_at)
    return found


def expired_removals(context: PlacementContext, moving: Iterable[str]) -> Iterable[PlannedRemoval]:
    """Removals of expired copies: none pinned or `everywhere`, none below the minimum. Adds each to `context.leaving`.

    At most one copy of a worker at a time, so that a load there never waits for many unloads. The copy that drains
    already goes first, then the one that was idle longest. Nothing expires while a router may be unheard.

    moving  adapters with a move in progress, which stay
    """
    if not context.demand.hears_every_router:
        return
    asked, skipped, taken = last_asked_at(context), set(moving), set[str]()
    candidates = [
        (worker.adapters[lora_id].state != "draining", max(asked_at, worker.adapters[lora_id].since), lora_id, worker)
        for lora_id, asked_at in asked.items()
        if lora_id not in skipped and _may_expire(context, lora_id)
        for worker in (context.observed.workers[name] for name in context.holders[lora_id])
        if _may_leave(context, lora_id, worker)
    ]
    for _, idle_since, lora_id, worker in sorted(candidates, key=lambda found: (*found[:3], found[3].id)):
        adapter = context.intent.adapters[lora_id]
        limit_s, idle_s = ttl_s(adapter, context.policy), context.now - idle_since
        if idle_s < limit_s or worker.id in taken:
            continue
        if context.staying_copies(lora_id, worker.id) < context.replica_floor(adapter):
            continue
        taken.add(worker.id)
        context.leaving.add((lora_id, worker.id))
        reason = f"expired: nobody asked for it in {idle_s:.0f} s, and its ttl_s is {limit_s:g}"
        yield PlannedRemoval(lora_id=lora_id, worker_id=worker.id, reason=reason, is_expired=True)


def _may_expire(context: PlacementContext, lora_id: str) -> bool:
    """Whether the adapter may leave for want of requests: it can be loaded again, and nobody waits for it."""
    adapter, demand = context.intent.adapters[lora_id], context.demand
    is_waited_for = lora_id in demand.wants or lora_id in demand.backlog
    is_to_stay = adapter.policy.pinned or context.is_everywhere(adapter)
    return not (is_to_stay or is_waited_for or lora_id in context.draining_ids) and is_placeable(adapter)


def _may_leave(context: PlacementContext, lora_id: str, worker: ObservedWorker) -> bool:
    """Whether no other step is about this copy, and it has been there for `min_residency_s`."""
    held, pair = worker.adapters.get(lora_id), (lora_id, worker.id)
    if held is None or worker.state != "ready" or context.current_failure(lora_id, worker.id) is not None:
        return False
    if pair in context.leaving or pair in context.demand.in_use or lora_id in context.victims[worker.id]:
        return False
    if context.observed.makes_room(pair):
        return False
    is_old = context.now - held.since >= context.policy.min_residency_s
    return held.state == "draining" or (held.state == "ready" and is_old)
