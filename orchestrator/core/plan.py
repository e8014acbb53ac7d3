"""The actions of a pass: the difference between the desired placement and the observed fleet, within the budgets.

An adapter is unloaded only where `place` names it with a reason, and only after it has drained there. On an engine that
finishes what runs on an unloaded adapter the victim of a load need not drain: it serves until the load takes its slot.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from orchestrator.core.copies import FetchChoice, fetch_choice, is_path
from orchestrator.core.placement.load_time import load_s
from orchestrator.core.placement.warm_up import LOADS_AT_ONCE, WARMING
from orchestrator.core.routers import KnownRouter
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy, acceptance_mode, loads_fleet_wide
from orchestrator.model.snapshot import (
    UNREACHABLE,
    DesiredPlacement,
    LoadFigures,
    ObservedFleet,
    ObservedWorker,
    OngoingFetch,
    Pair,
    PlannedLoad,
)

Operation = Literal["inspect", "fetch", "load", "check", "drain", "unload"]
SHORT_LOAD_S = 0.1
"""A load that should take less is not spread over the workers: its stall is like that of a step with a long prompt."""
_NO_ADAPTERS: Mapping[str, RegisteredAdapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAction:
    """One operation on one worker. A drain with an empty lora_id drains the whole worker.

    evict        victim of a load without a free slot, which need not drain any more: the agent unloads it with the load
    evict_after  victim of a load that takes a reserve slot: it drains meanwhile and is unloaded afterwards
    is_expired   an unload for want of requests
    neighbours   of a load or fetch: workers that have the adapter's files, asked before its source
    keeps_files  of a load: its worker is to keep the files, which only the fleet has
    """

    operation: Operation
    lora_id: str
    worker_id: str
    reason: str
    evict: str | None = None
    evict_after: str | None = None
    is_expired: bool = False
    neighbours: tuple[str, ...] = ()
    keeps_files: bool = False


def ends_move(action: WorkerAction, outcome: str, moves: Mapping[Pair, str]) -> bool:
    """Whether a move ends with this action: with the unload of its old copy, or with a load that failed.

    moves  (lora_id, worker that it leaves) -> worker that it goes to, as the action began
    """
    if action.operation == "unload":
        return (action.lora_id, action.worker_id) in moves
    is_new_copy = any(moved == action.lora_id and to == action.worker_id for (moved, _), to in moves.items())
    return action.operation == "load" and outcome != "ok" and is_new_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDrain:
    """A drain in progress: routers send no new requests for the adapter to the worker.

    revision  catalog revision that forbids them
    deadline  when the drain counts as finished in any case
    """

    lora_id: str
    worker_id: str
    engine_name: str
    revision: int
    since: float
    deadline: float
    reason: str


def is_drained(
    drain: AdapterDrain,
    live: Collection[KnownRouter],
    silent: Collection[KnownRouter],
    worker: ObservedWorker,
    now: float,
) -> bool:
    """Whether no request for the adapter is in flight on the worker any more, or the deadline has passed.

    Every live router must have confirmed that. For routers that are silent and have not confirmed it, and where no
    router is live, the engine's own count decides: after the drain began it must report no request beyond those of the
    live routers.

    live, silent  as in `RouterBook`
    """
    if now >= drain.deadline:
        return True
    if not all(_has_confirmed(drain, router) for router in live):
        return False
    if live and all(_has_confirmed(drain, router) for router in silent):
        return True
    known = sum(router.in_flight_at(worker.id) for router in live)
    return worker.running <= known and worker.reported_at > drain.since


def _has_confirmed(drain: AdapterDrain, router: KnownRouter) -> bool:
    """Whether the router saw the drain's catalog revision, and reported no request for the adapter there since."""
    return router.report.revision_seen >= drain.revision and not router.in_flight(drain.engine_name, drain.worker_id)


def required_drains(desired: DesiredPlacement, observed: ObservedFleet) -> dict[Pair, str]:
    """(lora_id, worker_id) -> reason, of the adapters that must take no new requests on the worker.

    A victim that leaves at once takes them until it does; one whose load takes a reserve slot leaves afterwards.
    """
    wanted = {(removal.lora_id, removal.worker_id): removal.reason for removal in desired.removals}
    for load in desired.loads:
        if load.evict is not None and not (load.evicts_at_once and observed.workers[load.worker_id].is_full):
            wanted[load.evict, load.worker_id] = f"makes room for {load.lora_id}"
    return wanted


def diff(
    desired: DesiredPlacement,
    observed: ObservedFleet,
    policy: PlacementPolicy,
    inspects: int,
    now: float,
    *,
    adapters: Mapping[str, RegisteredAdapter] = _NO_ADAPTERS,
) -> list[WorkerAction]:
    """The actions to start now, in order, within the budgets and without those in progress already.

    A load whose files another worker is fetching waits; see `fetch_choice`.

    inspects   number of further inspections that may start
    adapters   the registered adapters; a load of another one fetches at once
    """
    actions = [
        WorkerAction(operation="inspect", lora_id=step.lora_id, worker_id=step.worker_id, reason=step.reason)
        for step in desired.inspections[: max(0, inspects)]
    ]
    actions += [
        WorkerAction(operation="drain", lora_id=lora_id, worker_id=worker_id, reason=reason)
        for (lora_id, worker_id), reason in required_drains(desired, observed).items()
        if (lora_id, worker_id) not in observed.drains
    ]
    busy = dict(observed.busy)
    actions += _unload_actions(desired, observed, policy, busy, now)
    sources = _FileSources(observed, adapters, now)
    loads = _load_actions(desired, observed, policy, busy, sources, adapters=adapters, now=now)
    actions += [*loads, *_fetch_actions(desired, observed, sources, loads, adapters=adapters)]
    actions += _check_actions(observed, policy, adapters, now)
    actions += [
        WorkerAction(
            operation="drain", lora_id="", worker_id=worker_id, reason="asked to drain; nothing is left to move"
        )
        for worker_id in desired.workers_to_drain
        if not busy.get(worker_id)
    ]
    return actions


def _unload_actions(
    desired: DesiredPlacement,
    observed: ObservedFleet,
    policy: PlacementPolicy,
    busy: dict[str, int],
    now: float,
) -> list[WorkerAction]:
    """Unloads of drained adapters that did not fail there of late, within each worker's budget.

    Adds to the counts in `busy`.
    """
    actions: list[WorkerAction] = []
    for step in desired.removals:
        is_failing = observed.current_failure(step.lora_id, step.worker_id, now) is not None
        if not observed.drains.get((step.lora_id, step.worker_id)) or is_failing:
            continue
        if busy.get(step.worker_id, 0) < policy.loads_per_worker:
            busy[step.worker_id] = busy.get(step.worker_id, 0) + 1
            actions.append(
                WorkerAction(
                    operation="unload",
                    lora_id=step.lora_id,
                    worker_id=step.worker_id,
                    reason=step.reason,
                    is_expired=step.is_expired,
                )
            )
    return actions


def parallel_loads_of_adapter(serving_workers: int) -> int:
    """Most workers of a base model that load one adapter at once: half of the serving ones, at least one."""
    return max(1, math.ceil(serving_workers / 2))


def _load_actions(
    desired: DesiredPlacement,
    observed: ObservedFleet,
    policy: PlacementPolicy,
    busy: dict[str, int],
    sources: "_FileSources",
    *,
    adapters: Mapping[str, RegisteredAdapter],
    now: float,
) -> list[WorkerAction]:
    """Loads that have a slot, or a victim that can leave now, within the budgets. Adds them to the counts in `busy`.

    An adapter is loaded on half of its base model's workers at once, since they stall meanwhile. A load that takes
    longer than `load_spread_s` holds the others up no more, nor does one that should take less than `SHORT_LOAD_S`.
    """
    actions: list[WorkerAction] = []
    peers = Counter(worker.base_model for worker in observed.workers.values() if worker.state == "ready")
    loading = Counter(
        lora_id for (lora_id, _), began_at in observed.load_began.items() if now - began_at < policy.load_spread_s
    )
    left = loads_fleet_wide(policy, len(observed.workers)) - observed.loads_in_flight
    free = {worker_id: worker.slots - worker.occupied_slots for worker_id, worker in observed.workers.items()}
    for step in desired.loads:
        if left <= 0:
            break
        has_slot = free[step.worker_id] > 0
        has_room = has_slot or step.evicts_at_once or observed.drains.get((step.evict or "", step.worker_id))
        if not has_room:
            continue
        worker = observed.workers[step.worker_id]
        is_warming = worker.state == WARMING
        is_spread = policy.load_spread_s > 0 and not is_warming and not _is_short(step, adapters, observed.load_figures)
        if is_spread and loading[step.lora_id] >= parallel_loads_of_adapter(peers[worker.base_model]):
            continue
        most = max(LOADS_AT_ONCE, policy.loads_per_worker) if is_warming else policy.loads_per_worker
        if busy.get(step.worker_id, 0) < most:
            choice = sources.choose(step.lora_id, step.worker_id)
            if choice.is_held:
                continue
            busy[step.worker_id] = busy.get(step.worker_id, 0) + 1
            left -= 1
            loading[step.lora_id] += 1
            free[step.worker_id] -= has_slot
            actions.append(
                WorkerAction(
                    operation="load",
                    lora_id=step.lora_id,
                    worker_id=step.worker_id,
                    reason=step.reason,
                    evict=None if has_slot else step.evict,
                    evict_after=step.evict if has_slot else None,
                    neighbours=choice.neighbours,
                )
            )
    return actions


def _fetch_actions(
    desired: DesiredPlacement,
    observed: ObservedFleet,
    sources: "_FileSources",
    loads: Sequence[WorkerAction],
    *,
    adapters: Mapping[str, RegisteredAdapter],
) -> list[WorkerAction]:
    """Fetches ahead of loads that requests wait for and that cannot begin yet, in their order.

    A worker gets one at a time, and none while a load fetches there. None is made of a folder that is read in no time.
    """
    begun = {(load.lora_id, load.worker_id) for load in loads}
    fetching = {fetch.worker_id for fetches in observed.files.fetches.values() for fetch in fetches}
    taken = fetching.union((worker_id for _, worker_id in observed.fetching), sources.fetching())
    actions: list[WorkerAction] = []
    for step in desired.fetches if observed.files.is_known else ():
        adapter, worker = adapters.get(step.lora_id), observed.workers[step.worker_id]
        if (step.lora_id, step.worker_id) in begun or step.worker_id in taken or not worker.has_agent:
            continue
        if adapter is None or step.worker_id in observed.files.holders.get(adapter.digest or "", ()):
            continue
        if is_path(adapter.source) and _is_short(step, adapters, observed.load_figures):
            continue
        choice = sources.choose(step.lora_id, step.worker_id)
        if not choice.is_held:
            taken.add(step.worker_id)
            actions.append(
                WorkerAction(
                    operation="fetch",
                    lora_id=step.lora_id,
                    worker_id=step.worker_id,
                    reason=f"ahead of its load: {step.reason}",
                    neighbours=choice.neighbours,
                )
            )
    return actions


def _check_actions(
    observed: ObservedFleet, policy: PlacementPolicy, adapters: Mapping[str, RegisteredAdapter], now: float
) -> list[WorkerAction]:
    """Comparisons of loaded copies whose answers are not proved equal, though their policy requires that by now.

    A worker gets one at a time, and unloads a copy that is not equal then. A copy without an acceptance file has never
    been compared: it stays until its next load.
    """
    actions: list[WorkerAction] = []
    for worker in observed.workers.values():
        if worker.id in observed.checking or worker.state in UNREACHABLE or not worker.has_agent:
            continue
        for held in worker.adapters.values():
            if held.acceptance in {None, "equal"} or held.state != "ready":
                continue
            adapter = adapters.get(held.lora_id)
            if adapter is None or acceptance_mode(adapter.policy, policy) != "require":
                continue
            if observed.current_failure(held.lora_id, worker.id, now) is None:
                reason = f"its answers are not proved equal ({held.acceptance}), and its policy requires that"
                actions.append(
                    WorkerAction(operation="check", lora_id=held.lora_id, worker_id=worker.id, reason=reason)
                )
                break
    return actions


def _is_short(step: PlannedLoad, adapters: Mapping[str, RegisteredAdapter], figures: LoadFigures) -> bool:
    """Whether the load should stall its engine so briefly that nobody notices."""
    adapter = adapters.get(step.lora_id)
    return load_s(None if adapter is None else adapter.size_bytes, figures) < SHORT_LOAD_S


class _FileSources:
    """Where the files of a pass's loads and fetches come from, so that each source is asked once."""

    def __init__(self, observed: ObservedFleet, adapters: Mapping[str, RegisteredAdapter], now: float) -> None:
        self._files, self._adapters, self._now = observed.files, adapters, now
        self._reachable = {name for name, worker in observed.workers.items() if worker.state not in UNREACHABLE}
        self._begun: dict[str, list[OngoingFetch]] = {}

    def choose(self, lora_id: str, worker_id: str) -> FetchChoice:
        """The place for this adapter's files on this worker; its fetch counts as begun unless it is held."""
        adapter = self._adapters.get(lora_id)
        if adapter is None or adapter.digest is None:
            return FetchChoice()
        ours = self._begun.setdefault(adapter.digest, [])
        choice = fetch_choice(
            adapter.source,
            adapter.digest,
            worker_id,
            self._files,
            reachable=self._reachable,
            begun=ours,
            now=self._now,
        )
        if not choice.is_held:
            ours.append(OngoingFetch(worker_id=worker_id, moved_at=self._now))
        return choice

    def fetching(self) -> set[str]:
        """The workers that lack files which this pass has them fetch."""
        return {
            fetch.worker_id
            for digest, fetches in self._begun.items()
            for fetch in fetches
            if fetch.worker_id not in self._files.holders.get(digest, ())
        }
