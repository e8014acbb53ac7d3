"""Rollouts in progress: observes the fleet for `core.rollout` and stores its decisions.

Runs once a pass, and when an alias changes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import NotFound, OrchestratorRequestError, StateConflict
from orchestrator.core.rollout import (
    RequestTally,
    Rollout,
    RolloutGuard,
    RolloutObservation,
    Targets,
    WeightStep,
    aborted_rollout,
    advance,
    missing_by_adapter,
    paused_rollout,
    replica_floors,
    resumed_rollout,
    with_last_step,
)
from orchestrator.model.snapshot import Intent, ObservedWorker, RegisteredAdapter
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.store.store import NOBODY, IntentStore

log = structlog.get_logger()


class RolloutController:
    """Starts, advances, pauses and aborts rollouts: decides by `core.rollout` and writes to the store."""

    def __init__(
        self,
        *,
        store: IntentStore,
        demand: DemandBook,
        catalog: CatalogBook,
        queries: FleetQueries,
        is_settled: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._demand = demand
        self._catalog = catalog
        self._queries = queries
        self._is_settled = is_settled
        self._clock = clock
        self._wall = wall
        # (alias, began_at) -> request totals of its adapters at the last observation
        self._marks: dict[tuple[str, float], dict[str, RequestTally]] = {}

    def advance_all(self) -> None:
        """Advance every active rollout as far as its observation allows, and store the progress.

        Not before workers have had time to report. Forgets the counts of ended rollouts.
        """
        going = [rollout for rollout in self._store.rollouts.values() if rollout.is_active]
        self._marks = {key: marks for key, marks in self._marks.items() if key in {_rollout_key(r) for r in going}}
        if going and self._is_settled():
            ready, running, workers = (
                self._queries.ready_workers_by_adapter(),
                self._requests_in_flight(),
                self._observed_workers(),
            )
            for rollout in going:
                self._advance_by(rollout, self._observation(rollout, ready, running, workers))

    def with_replica_floors(self, intent: Intent) -> Intent:
        """The intent with `min_replicas` raised to what active rollouts need."""
        wanted: dict[str, int] = {}
        for rollout in self._store.rollouts.values():
            for lora_id, least in replica_floors(rollout).items():
                wanted[lora_id] = max(wanted.get(lora_id, 0), least)
        if not wanted:
            return intent
        found = {name: intent.adapters[name] for name in wanted if name in intent.adapters}
        raised = {name: self._with_min_replicas(adapter, wanted[name]) for name, adapter in found.items()}
        return replace(intent, adapters={**intent.adapters, **raised})

    def point_alias(self, alias: str, targets: Targets, actor: str, *, place_s: float) -> None:
        """Set an alias's targets: at once if it is new or `place_s` is 0, else when the targets are placed.

        place_s  how long the switch may wait for the replicas of its targets

        A switch in progress is replaced. Raises StateConflict while a rollout is in progress.
        """
        was, under_way = self._store.aliases.get(alias), self._store.rollouts.get(alias)
        if under_way is not None and under_way.is_active and under_way.guard is not None:
            raise StateConflict(
                f"a rollout of {alias!r} is under way; wait for its end or abort it"
                f" (DELETE /v1/aliases/{alias}/rollout), then change the alias",
                code="rollout_running",
                param="name",
            )
        with self._store.together():
            if under_way is not None and under_way.is_active:
                self._store.record("alias_rollout", alias, {"what": "given up", "why": "set anew"}, actor)
            self._store.put_rollout(alias, None)
            if was is None or targets == was or place_s == 0:
                if targets != was:
                    self._store.put_alias(alias, targets)
                    self._store.record("alias_set", alias, {"targets": targets, "was": was}, actor)
                return
            now = self._wall()
            switch = Rollout(alias=alias, before=was, after=targets, place_s=place_s, began_at=now, since=now)
            self._store_new_rollout(switch, actor)
        self._advance_now(switch)

    def start_rollout(
        self, alias: str, to: str, steps: Sequence[WeightStep], guard: RolloutGuard, actor: str, *, place_s: float
    ) -> tuple[Rollout, bool]:
        """Store a new rollout and advance it; returns it, and whether it is new: the same one again changes nothing.

        place_s  how long each step may wait for its replicas

        Raises StateConflict while another rollout or change of the alias is in progress, OrchestratorRequestError when
        the alias has only this target already.
        """
        before, known = self._store.aliases[alias], self._store.rollouts.get(alias)
        after, way = ((to, 1.0),), with_last_step(tuple(steps))
        if known is not None and known.is_active:
            if (known.after, known.steps, known.guard, known.place_s) == (after, way, guard, place_s):
                return known, False
            kind = "a rollout" if known.guard is not None else "a change"
            raise StateConflict(
                f"{kind} of {alias!r} is under way; wait for its end or abort it (DELETE /v1/aliases/{alias}/rollout)",
                code="rollout_running",
                param="name",
            )
        if [lora_id for lora_id, weight in before if weight > 0] == [to]:
            raise OrchestratorRequestError(f"alias {alias!r} points at {to!r} alone already", param="to")
        now = self._wall()
        rollout = Rollout(
            alias=alias,
            before=before,
            after=after,
            steps=way,
            guard=guard,
            place_s=place_s,
            began_at=now,
            since=now,
        )
        counted = {lora_id: self._finished_requests(lora_id, self._requests_in_flight()) for lora_id in rollout.old_ids}
        rollout = replace(rollout, baseline=sum(counted.values(), RequestTally()))
        with self._store.together():
            self._store_new_rollout(rollout, actor)
        self._advance_now(rollout)
        return self._store.rollouts[alias], True

    def rollout_of(self, alias: str) -> Rollout:
        """The alias's rollout in progress, or its last one. Raises NotFound."""
        found = self._store.rollouts.get(alias)
        if found is None:
            raise NotFound(f"alias {alias!r} has had no rollout", code="rollout_not_found", param="name")
        return found

    def set_paused(self, alias: str, is_paused: bool, actor: str) -> Rollout:
        """Pause or resume the rollout; repeats change nothing. A resumed one advances at once.

        Raises NotFound, StateConflict when it is over.
        """
        rollout = self._active_rollout(alias)
        after = paused_rollout(rollout, self._wall()) if is_paused else resumed_rollout(rollout, self._wall())
        if after != rollout:
            self._store_progress(rollout, after, None, "paused" if is_paused else "resumed", actor)
            self._advance_now(after)
        return self._store.rollouts[alias]

    def abort_rollout(self, alias: str, actor: str) -> Rollout:
        """End the rollout and restore the alias's old targets at once; returns the ended rollout.

        Raises NotFound, StateConflict when it is over.
        """
        rollout = self._active_rollout(alias)
        after, targets = aborted_rollout(rollout, self._wall())
        self._store_progress(rollout, after, targets, "aborted", actor)
        return after

    def missing_for(self, rollout: Rollout) -> Mapping[str, str]:
        """lora_id -> what is missing before the alias may shift; empty once it has shifted."""
        if rollout.phase != "placing":
            return {}
        if not self._is_settled():
            return dict.fromkeys(sorted(rollout.new_ids), "the fleet has not spoken yet")
        return missing_by_adapter(
            rollout,
            self._observation(
                rollout, self._queries.ready_workers_by_adapter(), {}, self._observed_workers(), takes_counts=False
            ),
        )

    def _active_rollout(self, alias: str) -> Rollout:
        """The alias's rollout in progress. Raises NotFound, StateConflict when it is over."""
        found = self.rollout_of(alias)
        if not found.is_active:
            raise StateConflict(
                f"the last rollout of {alias!r} is over: {found.phase}; POST starts another",
                code="rollout_over",
                param="name",
            )
        return found

    def _store_new_rollout(self, rollout: Rollout, actor: str) -> None:
        """Store a new rollout and its history entry."""
        self._store.put_rollout(rollout.alias, rollout)
        self._store.record(
            "alias_rollout",
            rollout.alias,
            {"what": "began", "from": rollout.before, "to": rollout.after, "watched": rollout.guard is not None},
            actor,
        )

    def _advance_now(self, rollout: Rollout) -> None:
        """Advance one rollout now, so that a switch to placed targets needs no pass."""
        if self._is_settled() and rollout.is_active:
            seen = self._observation(
                rollout, self._queries.ready_workers_by_adapter(), self._requests_in_flight(), self._observed_workers()
            )
            self._advance_by(rollout, seen)

    def _advance_by(self, rollout: Rollout, seen: RolloutObservation) -> None:
        """Advance the rollout as far as this observation allows, maybe several steps, and store its progress.

        Counts within a step are kept in memory only.
        """
        observation = seen
        while True:
            after, targets = advance(rollout, observation, self._wall())
            if (after.phase, after.step, after.scale) != (rollout.phase, rollout.step, rollout.scale):
                progress = after.phase if not after.is_active else f"{after.phase} step {after.step + 1}"
                self._store_progress(rollout, after, targets, progress, NOBODY)
            elif after != rollout:
                # Counts within a step are not stored: after a restart the step's requests are counted anew.
                self._store.rollouts[rollout.alias] = after
            if (after.phase, after.step) == (rollout.phase, rollout.step) or not after.is_active:
                return
            rollout, observation = after, replace(seen, old=RequestTally(), new=RequestTally())

    def _store_progress(
        self, before: Rollout, after: Rollout, targets: Targets | None, progress: str, actor: str
    ) -> None:
        """Store the rollout's new state and the alias's new targets, with log and event.

        History is written only for a changed phase, step or pause. A switch (no guard) that is done is removed.
        """
        alias, is_over_switch = after.alias, after.phase == "done" and after.guard is None
        with self._store.together():
            was = self._store.aliases[alias]
            if targets is not None and targets != was:
                self._store.put_alias(alias, targets)
                why = after.reason or f"rollout: {progress}"
                self._store.record("alias_set", alias, {"targets": targets, "was": was, "why": why}, actor)
            self._store.put_rollout(alias, None if is_over_switch else after)
            is_step = (before.phase, before.step, before.paused_at) != (after.phase, after.step, after.paused_at)
            if is_step and (after.guard is not None or after.phase != "watching"):
                self._store.record("alias_rollout", alias, {"what": progress, "why": after.reason}, actor)
        log.info("rollout", alias=alias, progress=progress, why=after.reason, targets=targets)
        self._catalog.emit_event(
            "alias_rollout", message=f"{alias}: {progress}" + (f": {after.reason}" if after.reason else "")
        )

    def _observation(
        self,
        rollout: Rollout,
        ready: Mapping[str, Sequence[str]],
        running: Mapping[str, int],
        workers: Collection[ObservedWorker],
        *,
        takes_counts: bool = True,
    ) -> RolloutObservation:
        """The observation of the rollout.

        takes_counts  whether it takes the requests counted since the last such call; the next call does not get them
        """
        ids = rollout.old_ids | rollout.new_ids
        adapters = {lora_id: self._store.adapters[lora_id] for lora_id in ids if lora_id in self._store.adapters}
        why = {lora_id: self._queries.last_error(lora_id) for lora_id in ids}
        counted = self._new_counts(rollout, ids, running) if takes_counts else {}
        return RolloutObservation(
            ready={lora_id: len(ready.get(lora_id, ())) for lora_id in ids},
            most={lora_id: self._max_replicas(adapter) for lora_id, adapter in adapters.items()},
            room={
                lora_id: _able_worker_count(adapter, workers, ready.get(lora_id, ()))
                for lora_id, adapter in adapters.items()
                if adapter.is_inspected
            },
            unusable={lora_id: wrong for lora_id in ids if (wrong := self._unusable_reason(lora_id))},
            unplaced={lora_id: reason for lora_id, reason in why.items() if reason is not None},
            known=frozenset(lora_id for lora_id, adapter in adapters.items() if adapter.is_inspected),
            old=sum((counted[lora_id] for lora_id in rollout.old_ids if lora_id in counted), RequestTally()),
            new=sum((counted[lora_id] for lora_id in rollout.new_ids if lora_id in counted), RequestTally()),
        )

    def _new_counts(self, rollout: Rollout, ids: frozenset[str], running: Mapping[str, int]) -> dict[str, RequestTally]:
        """lora_id -> requests counted since the last call, and marked as counted now; empty at the first call."""
        now = {lora_id: self._finished_requests(lora_id, running) for lora_id in ids}
        marks = self._marks.get(_rollout_key(rollout))
        self._marks[_rollout_key(rollout)] = now
        return (
            {}
            if marks is None
            else {name: _tally_growth(tally, marks.get(name, RequestTally())) for name, tally in now.items()}
        )

    def _finished_requests(self, lora_id: str, running: Mapping[str, int]) -> RequestTally:
        """The adapter's finished requests since our start: the reported ones without those in flight."""
        flow = self._demand.traffic_totals(lora_id)
        over = max(0.0, flow.requests - running.get(lora_id, 0))
        return RequestTally(over, flow.errors, flow.first_tokens, flow.first_token_s)

    def _requests_in_flight(self) -> Counter[str]:
        """lora_id -> requests in flight, as live routers report."""
        found: Counter[str] = Counter()
        for router in self._demand.live_routers(self._clock()):
            for use in router.uses.values():
                if use.in_flight:
                    found[use.lora_id] += use.in_flight
        return found

    def _observed_workers(self) -> Collection[ObservedWorker]:
        """All workers, as observed now."""
        return self._queries.observe().workers.values()

    def _max_replicas(self, adapter: RegisteredAdapter) -> int:
        """The adapter's own maximum of replicas, else the policy's."""
        return self._store.rules.max_replicas if adapter.max_replicas is None else adapter.max_replicas

    def _unusable_reason(self, lora_id: str) -> str | None:
        """Why routers refuse requests for the adapter; None when they do not."""
        adapter = self._store.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            return "it is deleted"
        return self._queries.quarantine_reason(lora_id) if adapter.is_inspected else None

    def _with_min_replicas(self, adapter: RegisteredAdapter, least: int) -> RegisteredAdapter:
        """The adapter with at least `least` replicas, up to its maximum.

        Unchanged if its own or the policy's minimum is as high.
        """
        loading = adapter.loading or self._store.rules.loading
        own = self._store.rules.min_replicas if loading != "lazy" else 0
        own = own if adapter.min_replicas is None else adapter.min_replicas
        least = min(least, self._max_replicas(adapter))
        return replace(adapter, min_replicas=least) if least > own else adapter


def _rollout_key(rollout: Rollout) -> tuple[str, float]:
    """The key of a rollout's counts: alias and start."""
    return rollout.alias, rollout.began_at


def _able_worker_count(adapter: RegisteredAdapter, workers: Collection[ObservedWorker], holders: Sequence[str]) -> int:
    """Number of workers that can hold the adapter, or do."""
    fits = {worker.id for worker in workers if worker.can_accept(adapter.base_model, adapter.rank or 0)}
    return len(fits.union(holders))


def _tally_growth(now: RequestTally, before: RequestTally) -> RequestTally:
    """The growth of each count; 0 where a count fell because it began anew."""
    return RequestTally(
        max(0.0, now.requests - before.requests),
        max(0.0, now.errors - before.errors),
        max(0.0, now.first_tokens - before.first_tokens),
        max(0.0, now.first_token_s - before.first_token_s),
    )
