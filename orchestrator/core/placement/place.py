"""One placement pass: which adapter should be on which worker. Pure, so any decision can be replayed from its inputs.

1. `targets.py`: a target number of replicas for every adapter.
2. `tenant_order.py`: the order in which missing replicas are placed.
3. `choose.py`: a worker for each, and `victims.py`: the adapter that makes room on a full worker.
4. `moves.py`: moves and removals of surplus copies, unless `churn.py` limits them.
5. `expiry.py`: removals of copies that nobody asks for, where a policy says so.
6. `next_versions.py`: removals of old versions, where the next version of a published name finds no slot.
7. `drains.py`: how far each draining worker is, and until when its drain waits.

State between passes is in `ObservedFleet.memory` and nowhere else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from math import inf

from lorafleet.identity import lora_id_of, rendezvous_score
from orchestrator.core.placement import churn
from orchestrator.core.placement.choose import (
    PlacementMisfit,
    kept_out_misfit,
    limits_by_base_model,
    next_load,
    placement_misfit,
    unplaced_reason,
)
from orchestrator.core.placement.context import PlacementContext, is_registered_digest, usable_slots
from orchestrator.core.placement.drains import drain_progress, has_moved, ready_elsewhere
from orchestrator.core.placement.expiry import expired_removals, last_asked_at
from orchestrator.core.placement.moves import finished_move_removals, new_moves, surplus_removals, unfinished_moves
from orchestrator.core.placement.targets import ReplicaTarget, replica_targets
from orchestrator.core.placement.tenant_order import in_tenant_order, wait_bucket
from orchestrator.core.placement.victims import next_version_removals
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    OCCUPYING,
    DemandSnapshot,
    DesiredPlacement,
    DrainProgress,
    Intent,
    ObservedFleet,
    ObservedWorker,
    Pair,
    PassMemory,
    PlannedInspection,
    PlannedLoad,
    PlannedRemoval,
    ReportedAdapter,
    lora_id_of_held,
)

__all__ = ["place", "usable_slots"]

MOST_INSPECTIONS = 64
"""Most inspections named in one pass: far more than can run at once, far fewer than may wait."""
MOST_LOADS = 128
"""Most loads named in one pass, for the same reason."""
LOOK_AGAIN_S = 0.05
"""Least time until a pass that only looks whether a request has waited long enough: a pass over thousands of adapters
takes tens of milliseconds."""


def place(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> DesiredPlacement:
    """Where every adapter should be, and the steps there. Deterministic: the order of the mappings does not matter.

    Low demand alone removes nothing, unless a `ttl_s` is set. Removals are deleted adapters, copies that an operator
    keeps out, finished moves, expired copies, and copies above the target, but not the last one; victims are named in
    the load that needs their slot. Adapters unknown to the intent stay, unless an operator keeps them out.
    """
    return _PlacementPass(PlacementContext(intent, observed, demand, policy, now)).run()


class _PlacementPass:
    """One pass over one `PlacementContext`.

    steps       steps named so far that no request waits for: loads, moves, removals
    steps_left  how many more of them the churn limiter allows
    fetches     loads that requests wait for
    look_again_at  when a request will have waited long enough for a slot; infinite: none waits for that
    """

    def __init__(self, context: PlacementContext) -> None:
        self.context = context
        self.targets: dict[str, ReplicaTarget] = {}
        self.churn_history = context.observed.memory.churn
        self.workers = sum(worker.state == "ready" for worker in context.workers)
        self.is_frozen = churn.is_frozen(self.churn_history, context.policy, self.workers, context.now)
        count = churn.steps_in_window(self.churn_history, context.policy, context.now)
        self.steps_left = 0 if self.is_frozen else churn.step_limit(context.policy, self.workers) - count
        self.steps: set[churn.PlacementStep] = set()
        self.look_again_at = inf
        self.fetches: list[PlannedLoad] = []

    def run(self) -> DesiredPlacement:
        """Run the pass, which changes the context, and return the placement. Call it once."""
        context = self.context
        self.targets, scales = replica_targets(context)
        context.targets = {lora_id: target.replicas for lora_id, target in self.targets.items()}
        context.needed_copies = {lora_id: target.needed for lora_id, target in self.targets.items()}
        unplaced: dict[str, str] = {}
        loads = self._plan_loads(unplaced)
        misfits = self._misfits()
        unplaced |= self._unserved_base_models() | {lora_id: misfit.message for lora_id, misfit in misfits.items()}
        removals = {(step.lora_id, step.worker_id): step for step in self._due_removals()}
        moves = unfinished_moves(context)
        for step in self._limited_removals(moves):
            removals.setdefault((step.lora_id, step.worker_id), step)
        if not self.is_frozen:
            # Not counted as steps: a night of expiries must not hold back the copies that the morning needs.
            for step in expired_removals(context, [lora_id for lora_id, _ in moves]):
                removals.setdefault((step.lora_id, step.worker_id), step)
            for step in next_version_removals(context):
                removals.setdefault((step.lora_id, step.worker_id), step)
        if self.steps_left > 0 and len(loads) < MOST_LOADS:
            for load, leaves in islice(new_moves(context, moves), min(self.steps_left, MOST_LOADS)):
                moves[load.lora_id, leaves] = load.worker_id
                loads.append(load)
                self.steps.add((load.lora_id, load.worker_id, "load"))
        why = (
            churn.freeze_reason(self.churn_history, context.policy, self.workers, context.now)
            if self.is_frozen
            else None
        )
        kept = churn.history_after(
            self.churn_history, frozenset(self.steps), context.policy, is_held=self.is_frozen, now=context.now
        )
        drains = drain_progress(context)
        return DesiredPlacement(
            replicas={lora_id: tuple(sorted(held)) for lora_id, held in context.holders.items() if held},
            targets=context.targets,
            loads=tuple(loads),
            fetches=tuple(self.fetches),
            removals=tuple(removals[pair] for pair in sorted(removals, key=lambda pair: (pair[1], pair[0]))),
            inspections=tuple(islice(self._inspections(), MOST_INSPECTIONS)),
            unplaced=unplaced,
            fits_nowhere={lora_id: misfit.code for lora_id, misfit in misfits.items()},
            workers_to_drain=tuple(self._workers_ready_for_agent_drain(drains)),
            drains=drains,
            last_asked_at=last_asked_at(context),
            frozen_reason=why,
            look_again_at=None if self.look_again_at == inf else max(self.look_again_at, context.now + LOOK_AGAIN_S),
            memory=PassMemory(standing_targets=scales, moves=moves, churn=kept),
        )

    def _plan_loads(self, unplaced: dict[str, str]) -> list[PlannedLoad]:
        """Loads of missing replicas, at most MOST_LOADS, each applied to the context.

        A load that nobody asked for is a step. Fills `unplaced`: lora_id -> why a replica cannot be placed.
        """
        context = self.context
        loads: list[PlannedLoad] = []
        for adapter in self._missing_replicas():
            target = self.targets[adapter.lora_id]
            while context.copy_count(adapter.lora_id) < target.replicas:
                if len(loads) == MOST_LOADS:
                    return loads
                load, room_at, room_on = next_load(context, adapter)
                if load is None:
                    if room_on is not None:
                        why = "a copy there will make room"
                        self._plan_fetch(PlannedLoad(lora_id=adapter.lora_id, worker_id=room_on, reason=why))
                    self.look_again_at = min(self.look_again_at, room_at)
                    reason = unplaced_reason(context, adapter, room_at)
                    if reason is not None and context.copy_count(adapter.lora_id) < max(1, target.asked):
                        unplaced[adapter.lora_id] = reason
                    break
                want = context.demand.wants.get(adapter.lora_id)
                is_asked = want is not None or context.copy_count(adapter.lora_id) < target.asked
                if not is_asked and not self._take_step((load.lora_id, load.worker_id, "load")):
                    break
                if want is not None and want.is_repair:
                    self.steps.add((load.lora_id, load.worker_id, "load"))
                context.apply_load(load)
                loads.append(load)
                self._plan_fetch(load)
        return loads

    def _plan_fetch(self, load: PlannedLoad) -> None:
        """Name the load's files as needed if requests wait for its adapter, should the load not begin now."""
        want = self.context.demand.wants.get(load.lora_id)
        if want is not None and want.is_waited_for and len(self.fetches) < MOST_LOADS:
            self.fetches.append(load)

    def _take_step(self, step: churn.PlacementStep) -> bool:
        """Whether the churn limiter allows this step, which no request waits for. If so, the step is counted, once."""
        if step not in self.churn_history.named_steps:
            if self.steps_left <= 0:
                return False
            self.steps_left -= 1
        self.steps.add(step)
        return True

    def _limited_removals(self, moves: Mapping[Pair, str]) -> Iterable[PlannedRemoval]:
        """Removals of the old copies of moves, and of surplus copies as far as the churn limiter allows.

        Each is counted as a step, and its copy as leaving.
        """
        for step in finished_move_removals(self.context, moves):
            self.steps.add((step.lora_id, step.worker_id, "unload"))
            self.context.leaving.add((step.lora_id, step.worker_id))
            yield step
        for step in surplus_removals(self.context, [lora_id for lora_id, _ in moves]):
            if self._take_step((step.lora_id, step.worker_id, "unload")):
                self.context.leaving.add((step.lora_id, step.worker_id))
                yield step

    def _missing_replicas(self) -> Iterator[RegisteredAdapter]:
        """Adapters with fewer replicas than their target, in the order in which they get loads.

        By priority, then those without any copy, then those that requests wait for, then by the tenants' turns, then
        by request rate. Abandoned wants come last: clients that give up early must not take all loads.
        """
        context, demand = self.context, self.context.demand
        short = [lora_id for lora_id, n in context.targets.items() if context.copy_count(lora_id) < n]

        def rank(adapter: RegisteredAdapter) -> tuple[int, bool, bool]:
            """Sort key of adapters: priority, those without a copy first, then those that requests wait for."""
            want = demand.wants.get(adapter.lora_id)
            is_waiting = want is not None and want.is_waited_for
            return -adapter.policy.priority, bool(context.copy_count(adapter.lora_id)), not is_waiting

        def order(adapter: RegisteredAdapter) -> tuple[object, ...]:
            want = demand.wants.get(adapter.lora_id)
            turn = wait_bucket(context, want) if want is not None and want.is_waited_for else 0.0
            return (*rank(adapter), want is None, turn, -demand.rates.get(adapter.lora_id, 0.0), adapter.lora_id)

        adapters = sorted((context.intent.adapters[lora_id] for lora_id in short), key=order)
        loads_by_tenant = Counter[str]()
        # Materialized first: an adapter that gets a load meanwhile changes its rank.
        for (_, _, is_idle), equal_rank in [
            (key, list(adapters_of_rank)) for key, adapters_of_rank in groupby(adapters, key=rank)
        ]:
            yield from equal_rank if is_idle else in_tenant_order(context, equal_rank, loads_by_tenant)

    def _due_removals(self) -> Iterable[PlannedRemoval]:
        """Removals that no limiter holds back: deleted, kept-out, misplaced and moved adapters, reserve victims."""
        for worker in self.context.workers:
            if worker.state in ("lost", "unmanaged", "starting"):
                continue
            for lora_id in sorted(worker.adapters):
                held = worker.adapters[lora_id]
                reason = self._removal_reason(worker, held) if held.state in OCCUPYING else None
                if reason is not None:
                    yield PlannedRemoval(lora_id=lora_id, worker_id=worker.id, reason=reason)

    def _removal_reason(self, worker: ObservedWorker, held: ReportedAdapter) -> str | None:
        """Why the adapter must leave the worker; None when it stays."""
        context = self.context
        if worker.keeps_out(held):
            return "an operator keeps it out of this worker"
        if held.is_foreign:
            return self._foreign_removal_reason(worker, held)
        adapter = context.intent.adapters.get(held.lora_id)
        owed_to = context.observed.reserve_victims.get((held.lora_id, worker.id))
        if owed_to is not None and held.lora_id not in context.demand.wants:
            return f"made room for {owed_to}"
        if adapter is None:
            return "deleted" if context.intent.is_deleted(lora_id_of_held(held), held.digest) else None
        if adapter.is_deleting or context.intent.is_deleted(held.lora_id, held.digest):
            return "deleted"
        if not worker.can_serve(adapter.base_model):
            return f"of {adapter.base_model!r}, which this worker does not serve"
        if (
            worker.state == "draining"
            and not worker.is_terminating
            and not adapter.quarantine
            and is_registered_digest(adapter, held)
            and has_moved(context, adapter, worker.id)
        ):
            return f"moved: {ready_elsewhere(context, adapter, worker.id)} ready elsewhere, this worker drains"
        return None

    def _foreign_removal_reason(self, worker: ObservedWorker, held: ReportedAdapter) -> str | None:
        """Why a copy that another client loaded must leave the worker; None when it stays.

        An adopted one leaves once the fleet's own copy serves somewhere, or when its slot is needed for that. What the
        engine had at its start leaves only when its slot is needed: its clients may call the engine directly.
        """
        if not self.context.intent.is_deleted(held.lora_id, held.digest):
            return None
        lora_id = lora_id_of(held.engine_name)
        adapter = self.context.intent.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            return "deleted"
        is_replaced = not held.is_configured and ready_elsewhere(self.context, adapter, "")
        if is_replaced or worker.is_full:
            return f"adopted as {lora_id}, which is loaded under its own engine name"
        return None

    def _workers_ready_for_agent_drain(self, drains: Mapping[str, DrainProgress]) -> Iterable[str]:
        """Draining workers without adapters to move, or past their deadline."""
        for worker in self.context.workers:
            if worker.state == "draining" and not worker.is_agent_draining and not worker.is_terminating:
                is_empty = not any(held.lora_id in self.context.draining_ids for held in worker.adapters.values())
                deadline = drains[worker.id].deadline
                is_late = deadline is not None and self.context.now >= deadline
                if is_empty or is_late:
                    yield worker.id

    def _unserved_base_models(self) -> dict[str, str]:
        """lora_id -> reason, of adapters that cannot be inspected because no ready worker serves their base model."""
        served = {worker.base_model for worker in self.context.workers if worker.state == "ready"}
        if not served:
            return {}
        return {
            adapter.lora_id: f"no ready worker serves {adapter.base_model!r}; those there are serve {sorted(served)}"
            for adapter in self.context.standing_adapters()
            if not adapter.is_inspected and not adapter.is_deleting
            if adapter.base_model is not None and adapter.base_model not in served
        }

    def _misfits(self) -> dict[str, PlacementMisfit]:
        """lora_id -> why no worker could ever hold it. Starting and lost workers count, as they may be back soon."""
        context, limits = self.context, limits_by_base_model(self.context.workers)
        found = {}
        for (base_model, rank), lora_ids in context.index.by_shape.items():
            misfit = placement_misfit(base_model, rank, limits)
            for lora_id in lora_ids if misfit is not None else lora_ids & context.kept_out_ids:
                reason = misfit or kept_out_misfit(context, context.intent.adapters[lora_id])
                if reason is not None and not context.copy_count(lora_id):
                    found[lora_id] = reason
        return found

    def _inspections(self) -> Iterable[PlannedInspection]:
        """Inspections of adapters without a known digest or rank, on their home among the able workers.

        Those that requests wait for come first; one that is in progress is not repeated.
        """
        context = self.context
        ready = [w for w in context.workers if w.state == "ready" and w.max_lora_rank > 0]
        unknown = [
            adapter
            for adapter in context.standing_adapters()
            if not adapter.is_inspected and not adapter.is_deleting and adapter.quarantine is None
        ]
        wants = context.demand.wants

        def order(adapter: RegisteredAdapter) -> tuple[bool, str]:
            # A request waits for a minute only, and thousands of adapters may be registered at once.
            return adapter.lora_id not in wants, adapter.lora_id

        for adapter in sorted(unknown, key=order) if ready else ():
            lora_id = adapter.lora_id
            if lora_id in context.observed.inspecting:
                continue
            able = [w for w in ready if w.can_serve(adapter.base_model)]
            able = [w for w in able if context.current_failure(lora_id, w.id) is None]
            if able:
                home = min(able, key=lambda w: (-rendezvous_score(lora_id, w.id), w.id))
                yield PlannedInspection(lora_id=lora_id, worker_id=home.id, reason="digest and rank are not known yet")
