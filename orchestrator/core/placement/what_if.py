"""What would happen if: passes over a fleet that is only supposed, until nothing is left to do.

It drives `place` and `diff` themselves, on snapshots that were changed by a hypothesis, and plays the fleet: a load
that was started is ready by the next pass, a drain has ended, a wish that was met is over. So what it says is what
the passes to come would do, not an estimate of it; only the times are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core.placement.place import place
from orchestrator.core.plan import WorkerAction, diff, drains_wanted
from orchestrator.core.state import (
    OCCUPYING,
    DemandSnapshot,
    DesiredPlacement,
    Intent,
    ObservedFleet,
    ObservedWorker,
    PlacementPolicy,
    RegisteredAdapter,
    ReportedAdapter,
    WantedReplicas,
)

UNKNOWN_DIGEST = "not inspected yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInputs:
    """Everything that a pass decides from."""

    intent: Intent
    observed: ObservedFleet
    demand: DemandSnapshot
    policy: PlacementPolicy
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """What is supposed to be different.

    factors        lora_id -> its demand times this
    rates          lora_id -> this many requests a second instead
    workers_gone   worker_ids that are lost, with what they hold
    workers_more   (worker_id, how many more like it)
    policy         the global policy instead of the one in force
    adapters       registered besides, or with another policy than now, by lora_id
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    workers_gone: Sequence[str] = ()
    workers_more: Sequence[tuple[str, int]] = ()
    policy: PlacementPolicy | None = None
    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One action, in which pass from now on (0 is the next), and what it costs. 0 bytes: the size is not known."""

    action: WorkerAction
    turn: int
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOutcome:
    """What the passes would do.

    before, after   lora_id -> replicas wanted: now, and in the end
    is_settled      whether the last pass had nothing left to do; otherwise the passes did not suffice
    seconds         from now until the last step ends, loads on one worker one after the other
    """

    steps: tuple[SimulatedStep, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    unplaced: Mapping[str, str]
    seconds: float
    is_settled: bool


def what_if(scene: PlacementInputs, hypothesis: Hypothesis, *, load_s: float, passes: int) -> WhatIfOutcome:
    """Neither the scene nor anything in it is changed. Cost: as many passes as it takes, at most `passes`.

    load_s   how long a load takes, as measured
    """
    before = _decided(scene).targets
    scene = supposed(scene, hypothesis)
    steps: list[SimulatedStep] = []
    desired, actions = DesiredPlacement(), list[WorkerAction]()
    turn = 0
    seconds = 0.0
    for turn in range(passes):
        desired = _decided(scene)
        actions = _actions(desired, scene)
        if not actions:
            break
        costs = [_cost(action, turn, scene, load_s) for action in actions]
        steps += costs
        took = max(step.seconds for step in costs)
        seconds += took
        scene = _played(scene, desired, actions, took)
    return WhatIfOutcome(
        steps=tuple(steps),
        before=before,
        after=desired.targets,
        unplaced=desired.unplaced,
        seconds=seconds,
        is_settled=not actions,
    )


def supposed(scene: PlacementInputs, it: Hypothesis) -> PlacementInputs:
    """The scene with the hypothesis in it, and with what is under way taken as done."""
    adapters = {name: _inspected(adapter, scene) for name, adapter in it.adapters.items()}
    intent = replace(scene.intent, adapters={**scene.intent.adapters, **adapters})
    gone = {name: scene.observed.workers[name] for name in it.workers_gone}
    kept = {name: _arrived(worker) for name, worker in scene.observed.workers.items() if name not in gone}
    more = {
        clone.id: clone
        for name, count in it.workers_more
        for number in range(1, count + 1)
        for clone in (_clone(scene.observed.workers[name], number, kept, scene.now),)
    }
    observed = replace(scene.observed, workers={**kept, **more}, busy={}, loads_in_flight=0, inspecting={})
    demand = _asked_for(scene.demand, it, scene.now)
    in_use = frozenset(pair for pair in demand.in_use if pair[1] not in gone)
    wants = {**_first_asked(it, observed.workers, intent, scene.now), **_wanted_back(gone, kept, intent, demand)}
    demand = replace(demand, in_use=in_use, wants=wants)
    return PlacementInputs(
        intent=intent, observed=observed, demand=demand, policy=it.policy or scene.policy, now=scene.now
    )


def _inspected(adapter: RegisteredAdapter, scene: PlacementInputs) -> RegisteredAdapter:
    """An adapter that nobody has looked at, taken for an ordinary one: middle rank and size, the fleet's base model."""
    if adapter.is_inspected:
        return adapter
    known = [other for other in scene.intent.adapters.values() if other.is_inspected]
    ranks = sorted(other.rank or 0 for other in known) or [0]
    sizes = sorted(other.size_bytes or 0 for other in known) or [0]
    bases = sorted(worker.base_model for worker in scene.observed.workers.values())
    return replace(
        adapter,
        digest=adapter.digest or UNKNOWN_DIGEST,
        rank=ranks[len(ranks) // 2] if adapter.rank is None else adapter.rank,
        size_bytes=adapter.size_bytes or sizes[len(sizes) // 2] or None,
        base_model=adapter.base_model or (max(bases, key=bases.count) if bases else ""),
    )


def _arrived(worker: ObservedWorker) -> ObservedWorker:
    held = {name: replace(it, state="ready") if it.state == "loading" else it for name, it in worker.held.items()}
    return replace(worker, held=held)


def _clone(like: ObservedWorker, number: int, taken: Mapping[str, ObservedWorker], now: float) -> ObservedWorker:
    name = f"{like.id}+{number}"
    while name in taken:
        name += "+"
    return replace(
        like,
        id=name,
        state="ready",
        held={},
        node=name,
        running=0,
        load=0.0,
        drain_deadline=None,
        is_agent_draining=False,
        reported_at=now,
    )


def _asked_for(demand: DemandSnapshot, it: Hypothesis, now: float) -> DemandSnapshot:
    """As if it had been so for long: the newest figures and the habit say the same."""
    tables = [dict(table) for table in (demand.rates, demand.work, demand.surges, demand.habits)]
    rates, work, surges, habits = tables
    last = dict(demand.last)
    total = sum(demand.rates.values())
    usual_s = sum(demand.work.values()) / total if total > 0 else 0.0
    for lora_id, rate in it.rates.items():
        had = demand.rates.get(lora_id, 0.0)
        request_s = demand.work.get(lora_id, 0.0) / had if had > 0 else usual_s
        rates[lora_id] = habits[lora_id] = rate
        work[lora_id] = surges[lora_id] = rate * request_s
        if rate > 0:
            last[lora_id] = now
    for lora_id, factor in it.factors.items():
        for table in tables:
            if lora_id in table:
                table[lora_id] *= factor
    is_said = bool(it.rates or it.factors)
    return replace(
        demand,
        rates=rates,
        work=work,
        surges=surges,
        habits=habits,
        last=last,
        is_blind=demand.is_blind and not is_said,
    )


def _first_asked(
    it: Hypothesis, workers: Mapping[str, ObservedWorker], intent: Intent, now: float
) -> Mapping[str, WantedReplicas]:
    """What is said to be asked for and is nowhere: its first request would have it loaded."""
    return {
        lora_id: WantedReplicas(replicas=1, since=now)
        for lora_id, rate in it.rates.items()
        if rate > 0 and lora_id in intent.adapters and not any(worker.holds(lora_id) for worker in workers.values())
    }


def _wanted_back(
    gone: Mapping[str, ObservedWorker], kept: Mapping[str, ObservedWorker], intent: Intent, demand: DemandSnapshot
) -> Mapping[str, WantedReplicas]:
    """As when workers are lost: what they held and nobody deletes is wanted again, as often as it was there."""
    wants = dict(demand.wants)
    lost = [lora_id for worker in gone.values() for lora_id, held in worker.held.items() if held.state == "ready"]
    for lora_id in lost:
        adapter = intent.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            continue
        replicas = _ready(lora_id, kept) + lost.count(lora_id)
        is_hot = demand.rates.get(lora_id, 0.0) > 0
        asked = wants.get(lora_id, WantedReplicas(replicas=0, may_evict=False, is_repair=True))
        wants[lora_id] = replace(asked, replicas=max(asked.replicas, replicas), may_evict=asked.may_evict or is_hot)
    return wants


def _decided(scene: PlacementInputs) -> DesiredPlacement:
    return place(scene.intent, scene.observed, scene.demand, scene.policy, scene.now)


def _actions(desired: DesiredPlacement, scene: PlacementInputs) -> list[WorkerAction]:
    # Every drain is taken to end at once: how long requests in flight take, nobody knows.
    drained = dict.fromkeys(drains_wanted(desired), True)
    leaving = replace(desired, leaving=tuple(w for w in desired.leaving if not _has_left(scene, w)))
    return diff(leaving, scene.observed, drained, scene.policy, 0, scene.now)


def _has_left(scene: PlacementInputs, worker_id: str) -> bool:
    return scene.observed.workers[worker_id].is_agent_draining


def _cost(action: WorkerAction, turn: int, scene: PlacementInputs, load_s: float) -> SimulatedStep:
    if action.operation != "load":
        return SimulatedStep(action=action, turn=turn)
    adapter = scene.intent.adapters[action.lora_id]
    return SimulatedStep(action=action, turn=turn, size_bytes=adapter.size_bytes or 0, seconds=load_s)


def _played(
    scene: PlacementInputs, desired: DesiredPlacement, actions: Sequence[WorkerAction], took: float
) -> PlacementInputs:
    """The fleet after these actions, and after the time that they took."""
    now = scene.now + max(took, 1.0)
    workers, owed, turns = dict(scene.observed.workers), dict(scene.observed.owed), dict(scene.demand.turns)
    for action in actions:
        worker = workers[action.worker_id]
        held = dict(worker.held)
        if action.operation == "load":
            if action.evict is not None:
                held.pop(action.evict, None)
            if action.evict_after is not None:
                owed[action.evict_after, action.worker_id] = action.lora_id
            adapter = scene.intent.adapters[action.lora_id]
            held[action.lora_id] = ReportedAdapter(
                lora_id=action.lora_id, digest=adapter.digest or "", engine_name="", state="ready", since=now
            )
            if (want := scene.demand.wants.get(action.lora_id)) is not None:
                turns |= dict.fromkeys(want.tenants, scene.now)
        elif action.operation == "unload":
            held.pop(action.lora_id, None)
            owed.pop((action.lora_id, action.worker_id), None)
        is_leaving = worker.is_agent_draining or (action.operation == "drain" and not action.lora_id)
        workers[action.worker_id] = replace(worker, held=held, is_agent_draining=is_leaving)
    wants = {
        lora_id: want
        for lora_id, want in scene.demand.wants.items()
        if _ready(lora_id, workers) < min(want.replicas, len(workers))
    }
    observed = replace(scene.observed, workers=workers, owed=owed, memory=desired.memory)
    return replace(scene, observed=observed, demand=replace(scene.demand, wants=wants, turns=turns), now=now)


def _ready(lora_id: str, workers: Mapping[str, ObservedWorker]) -> int:
    return sum(lora_id in worker.held and worker.held[lora_id].state in OCCUPYING for worker in workers.values())
