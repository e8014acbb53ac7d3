"""What-if plans: passes over a simulated fleet, until nothing is left to do.

`place` and `diff` run on snapshots that a hypothesis has changed, and the fleet is simulated between passes: each load
is ready and each drain has ended by the next pass. So the steps are those that real passes would take; only the times
are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core.placement.load_time import load_s
from orchestrator.core.placement.place import place
from orchestrator.core.plan import WorkerAction, diff, required_drains
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.cards import AdapterCard
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    OCCUPYING,
    DemandSnapshot,
    DesiredPlacement,
    Intent,
    ObservedFleet,
    ObservedWorker,
    ReportedAdapter,
    WantedReplicas,
)

UNKNOWN_DIGEST = "not inspected yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInputs:
    """The arguments of `place`: everything that a pass decides from."""

    intent: Intent
    observed: ObservedFleet
    demand: DemandSnapshot
    policy: PlacementPolicy
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """Changes to the present fleet and demand.

    factors        lora_id -> factor on its demand
    rates          lora_id -> requests a second instead of the measured ones
    workers_gone   worker_ids that are lost, with all that they hold
    workers_more   (worker_id, number of empty workers like it to add)
    policy         global policy instead of the one in force; None: that one
    adapters       lora_id -> adapter registered besides, or with another policy than now
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    workers_gone: Sequence[str] = ()
    workers_more: Sequence[tuple[str, int]] = ()
    policy: PlacementPolicy | None = None
    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One action and its cost. `pass_index`: the pass that takes it, 0 is the next; 0 bytes: the size is not known."""

    action: WorkerAction
    pass_index: int
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOutcome:
    """The result of a what-if plan.

    before, after   lora_id -> replica target: now, and after the last pass
    is_settled      whether the last pass had nothing left to do; otherwise the passes did not suffice
    seconds         time until the last step ends; loads on one worker run one after the other
    """

    steps: tuple[SimulatedStep, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    unplaced: Mapping[str, str]
    seconds: float
    is_settled: bool


def what_if(inputs: PlacementInputs, hypothesis: Hypothesis, *, passes: int) -> WhatIfOutcome:
    """Simulate at most `passes` passes under the hypothesis; `inputs` is not changed."""
    before = _placement_pass(inputs).targets
    inputs = hypothetical_inputs(inputs, hypothesis)
    steps: list[SimulatedStep] = []
    desired, actions = DesiredPlacement(), list[WorkerAction]()
    pass_index = 0
    seconds = 0.0
    for pass_index in range(passes):
        desired = _placement_pass(inputs)
        actions = _actions_after_drains(desired, inputs)
        if not actions:
            break
        costs = [_simulated_step(action, pass_index, inputs) for action in actions]
        steps += costs
        took = max(step.seconds for step in costs)
        seconds += took
        inputs = _inputs_after(inputs, desired, actions, took)
    return WhatIfOutcome(
        steps=tuple(steps),
        before=before,
        after=desired.targets,
        unplaced=desired.unplaced,
        seconds=seconds,
        is_settled=not actions,
    )


def hypothetical_inputs(inputs: PlacementInputs, hypothesis: Hypothesis) -> PlacementInputs:
    """The inputs changed by the hypothesis, with operations in progress taken as done."""
    adapters = {name: _with_typical_shape(adapter, inputs) for name, adapter in hypothesis.adapters.items()}
    intent = replace(inputs.intent, adapters={**inputs.intent.adapters, **adapters}, known_index=None)
    gone = {name: inputs.observed.workers[name] for name in hypothesis.workers_gone}
    kept = {name: _with_loads_done(worker) for name, worker in inputs.observed.workers.items() if name not in gone}
    more = {
        clone.id: clone
        for name, count in hypothesis.workers_more
        for number in range(1, count + 1)
        for clone in (_cloned_worker(inputs.observed.workers[name], number, kept, inputs.now),)
    }
    observed = replace(inputs.observed, workers={**kept, **more}, busy={}, loads_in_flight=0, inspecting={})
    demand = _changed_demand(inputs.demand, hypothesis, inputs.now)
    in_use = frozenset(pair for pair in demand.in_use if pair[1] not in gone)
    wants = {
        **_first_request_wants(hypothesis, observed.workers, intent, inputs.now),
        **_repair_wants(gone, kept, intent, demand),
    }
    demand = replace(demand, in_use=in_use, wants=wants)
    return PlacementInputs(
        intent=intent, observed=observed, demand=demand, policy=hypothesis.policy or inputs.policy, now=inputs.now
    )


def _with_typical_shape(adapter: RegisteredAdapter, inputs: PlacementInputs) -> RegisteredAdapter:
    """The adapter; if it is not inspected, with the median rank and size and the most common base model."""
    if adapter.is_inspected:
        return adapter
    known = [other for other in inputs.intent.adapters.values() if other.is_inspected]
    ranks = sorted(other.rank or 0 for other in known) or [0]
    sizes = sorted(other.size_bytes or 0 for other in known) or [0]
    bases = sorted(worker.base_model for worker in inputs.observed.workers.values())
    named = adapter.with_spec(
        digest=adapter.digest or UNKNOWN_DIGEST,
        base_model=adapter.base_model or (max(bases, key=bases.count) if bases else ""),
    )
    card = replace(
        adapter.card or AdapterCard(),
        rank=adapter.rank or ranks[len(ranks) // 2],
        size_bytes=adapter.size_bytes or sizes[len(sizes) // 2],
    )
    return replace(named, card=card)


def _with_loads_done(worker: ObservedWorker) -> ObservedWorker:
    """The worker with its loading adapters taken as ready."""
    held = {
        name: replace(adapter, state="ready") if adapter.state == "loading" else adapter
        for name, adapter in worker.adapters.items()
    }
    return replace(worker, adapters=held)


def _cloned_worker(
    like: ObservedWorker, number: int, taken: Mapping[str, ObservedWorker], now: float
) -> ObservedWorker:
    """An empty, ready worker like this one, with a new id."""
    name = f"{like.id}+{number}"
    while name in taken:
        name += "+"
    return replace(
        like,
        id=name,
        state="ready",
        adapters={},
        node=name,
        running=0,
        load=0.0,
        drain=None,
        kept_out=frozenset(),
        is_agent_draining=False,
        reported_at=now,
    )


def _changed_demand(demand: DemandSnapshot, hypothesis: Hypothesis, now: float) -> DemandSnapshot:
    """Demand as if the hypothesis had held for long: short, middle and long windows agree."""
    tables = [dict(table) for table in (demand.rates, demand.work, demand.surges, demand.habits)]
    rates, work, surges, habits = tables
    last_request_at, last_asked_at = dict(demand.last_request_at), dict(demand.last_asked_at)
    total = sum(demand.rates.values())
    usual_s = sum(demand.work.values()) / total if total > 0 else 0.0
    for lora_id, rate in hypothesis.rates.items():
        present_rate = demand.rates.get(lora_id, 0.0)
        request_s = demand.work.get(lora_id, 0.0) / present_rate if present_rate > 0 else usual_s
        rates[lora_id] = habits[lora_id] = rate
        work[lora_id] = surges[lora_id] = rate * request_s
        if rate > 0:
            last_request_at[lora_id] = last_asked_at[lora_id] = now
    for lora_id, factor in hypothesis.factors.items():
        for table in tables:
            if lora_id in table:
                table[lora_id] *= factor
    is_said = bool(hypothesis.rates or hypothesis.factors)
    return replace(
        demand,
        rates=rates,
        work=work,
        surges=surges,
        habits=habits,
        last_request_at=last_request_at,
        last_asked_at=last_asked_at,
        is_blind=demand.is_blind and not is_said,
    )


def _first_request_wants(
    hypothesis: Hypothesis, workers: Mapping[str, ObservedWorker], intent: Intent, now: float
) -> Mapping[str, WantedReplicas]:
    """Requests for replicas of adapters that the hypothesis gives demand and that no worker holds."""
    return {
        lora_id: WantedReplicas(replicas=1, since=now)
        for lora_id, rate in hypothesis.rates.items()
        if rate > 0
        and lora_id in intent.adapters
        and not any(worker.has_in_slot(lora_id) for worker in workers.values())
    }


def _repair_wants(
    gone: Mapping[str, ObservedWorker], kept: Mapping[str, ObservedWorker], intent: Intent, demand: DemandSnapshot
) -> Mapping[str, WantedReplicas]:
    """Requests for replicas as after a loss of workers: each of their adapters, in as many copies as before."""
    wants = dict(demand.wants)
    lost = [lora_id for worker in gone.values() for lora_id, held in worker.adapters.items() if held.state == "ready"]
    for lora_id in lost:
        adapter = intent.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            continue
        replicas = _slot_copies(lora_id, kept) + lost.count(lora_id)
        is_hot = demand.rates.get(lora_id, 0.0) > 0
        asked = wants.get(lora_id, WantedReplicas(replicas=0, may_evict=False, is_repair=True))
        wants[lora_id] = replace(asked, replicas=max(asked.replicas, replicas), may_evict=asked.may_evict or is_hot)
    return wants


def _placement_pass(inputs: PlacementInputs) -> DesiredPlacement:
    """The result of one placement pass on these inputs."""
    return place(inputs.intent, inputs.observed, inputs.demand, inputs.policy, inputs.now)


def _actions_after_drains(desired: DesiredPlacement, inputs: PlacementInputs) -> list[WorkerAction]:
    """The actions of a pass that wants this placement, if every drain ended at once."""
    # Every drain is taken to end at once, because the duration of requests in flight is not known.
    observed = replace(inputs.observed, drains=dict.fromkeys(required_drains(desired, inputs.observed), True))
    leaving = replace(
        desired, workers_to_drain=tuple(w for w in desired.workers_to_drain if not _is_draining(inputs, w))
    )
    return diff(leaving, observed, inputs.policy, 0, inputs.now)


def _is_draining(inputs: PlacementInputs, worker_id: str) -> bool:
    """Whether the worker's agent drains already."""
    return inputs.observed.workers[worker_id].is_agent_draining


def _simulated_step(action: WorkerAction, pass_index: int, inputs: PlacementInputs) -> SimulatedStep:
    """The action with its cost: a load takes the adapter's bytes and their time, any other action nothing."""
    if action.operation != "load":
        return SimulatedStep(action=action, pass_index=pass_index)
    adapter = inputs.intent.adapters[action.lora_id]
    seconds = load_s(adapter.size_bytes, inputs.observed.load_figures)
    return SimulatedStep(action=action, pass_index=pass_index, size_bytes=adapter.size_bytes or 0, seconds=seconds)


def _inputs_after(
    inputs: PlacementInputs, desired: DesiredPlacement, actions: Sequence[WorkerAction], took: float
) -> PlacementInputs:
    """The inputs of the next pass: the fleet after these actions, `took` seconds later."""
    now = inputs.now + max(took, 1.0)
    workers, owed, turns = (
        dict(inputs.observed.workers),
        dict(inputs.observed.reserve_victims),
        dict(inputs.demand.last_load_at),
    )
    for action in actions:
        worker = workers[action.worker_id]
        held = dict(worker.adapters)
        if action.operation == "load":
            if action.evict is not None:
                held.pop(action.evict, None)
            if action.evict_after is not None:
                owed[action.evict_after, action.worker_id] = action.lora_id
            adapter = inputs.intent.adapters[action.lora_id]
            held[action.lora_id] = ReportedAdapter(
                lora_id=action.lora_id, digest=adapter.digest or "", engine_name="", state="ready", since=now
            )
            if (want := inputs.demand.wants.get(action.lora_id)) is not None:
                turns |= dict.fromkeys(want.tenants, inputs.now)
        elif action.operation == "unload":
            held.pop(action.lora_id, None)
            owed.pop((action.lora_id, action.worker_id), None)
        is_leaving = worker.is_agent_draining or (action.operation == "drain" and not action.lora_id)
        workers[action.worker_id] = replace(worker, adapters=held, is_agent_draining=is_leaving)
    wants = {
        lora_id: want
        for lora_id, want in inputs.demand.wants.items()
        if _slot_copies(lora_id, workers) < min(want.replicas, len(workers))
    }
    observed = replace(inputs.observed, workers=workers, reserve_victims=owed, memory=desired.memory)
    return replace(inputs, observed=observed, demand=replace(inputs.demand, wants=wants, last_load_at=turns), now=now)


def _slot_copies(lora_id: str, workers: Mapping[str, ObservedWorker]) -> int:
    """Number of workers that have the adapter in a slot."""
    return sum(
        lora_id in worker.adapters and worker.adapters[lora_id].state in OCCUPYING for worker in workers.values()
    )
