"""Names that move and versions that retire: observes the fleet for `core.rollout` and `core.published_names`.

`NameMover` points names elsewhere: when targets are placed, step by step, back on a regression, or at a version that
was published. `VersionRetention` deletes the versions that are too many, too old or unfinished, so that a trainer that
died leaves nothing behind. Both run once a pass, and store what is decided.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from math import inf

import structlog

from orchestrator.core.adoption import is_left_nowhere, with_left_at
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import NotFound, OrchestratorRequestError, StateConflict
from orchestrator.core.published_names import (
    after_deletion,
    after_pointing,
    is_trained,
    is_unused,
    last_used_at,
    retired_versions,
    taken_over,
    without_versions,
)
from orchestrator.core.rollout import (
    RolloutObservation,
    aborted_rollout,
    advance,
    missing_by_adapter,
    paused_rollout,
    replica_floors,
    resumed_rollout,
    tally_of,
    with_last_step,
)
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.served_names import (
    AliasTarget,
    NameVersion,
    Publication,
    RequestTally,
    Rollout,
    RolloutSpec,
    ServedName,
    Targets,
    weight_pairs,
)
from orchestrator.model.snapshot import DemandSnapshot, Intent, ObservedWorker
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import NOBODY, IntentStore

log = structlog.get_logger()

_USE_NOTED_PART = 0.1
"""A name's use is stored when the stored time is older than this part of `unused_name_s`: a write a day, not a pass."""
_LISTEN_S = 600.0
"""No name is deleted as unused before routers have had this long to report to the leader; a guess."""

_CountKey = tuple[str, float]
"""A name, and when its rollout began."""


class NameMover:
    """Points names at other targets: decides by `core.rollout`, writes to the store, and tells the catalog."""

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
        self._marks: dict[_CountKey, dict[str, RequestTally]] = {}

    def advance_all(self) -> None:
        """Advance every active rollout as far as its observation allows, and store the progress.

        Not before workers have had time to report. Forgets the counts of ended rollouts.
        """
        going = [name for name in self._store.names.values() if name.active_rollout is not None]
        keys = {_count_key(name) for name in going}
        self._marks = {key: marks for key, marks in self._marks.items() if key in keys}
        if going and self._is_settled():
            ready, workers = self._queries.ready_workers_by_adapter(), self._observed_workers()
            for name in going:
                self._advance_by(name, self._observation(name, ready, workers))

    def with_replica_floors(self, intent: Intent) -> Intent:
        """The intent with `min_replicas` raised to what active rollouts need."""
        wanted: dict[str, int] = {}
        for name in self._store.names.values():
            for lora_id, least in (replica_floors(name.rollout) if name.rollout is not None else {}).items():
                wanted[lora_id] = max(wanted.get(lora_id, 0), least)
        if not wanted:
            return intent
        found = {name: intent.adapters[name] for name in wanted if name in intent.adapters}
        raised = {name: self._with_min_replicas(adapter, wanted[name]) for name, adapter in found.items()}
        return intent.with_raised(raised)

    def point_alias(self, name: str, targets: Targets, actor: str, *, place_s: float) -> None:
        """Set a name's targets: at once if it is new or `place_s` is 0, else when the targets are placed.

        place_s  how long the switch may wait for the replicas of its targets

        A switch in progress is replaced. Raises StateConflict while a rollout is in progress.
        """
        present = self._store.names.get(name) or ServedName(name=name)
        was, going = present.targets, present.active_rollout
        if going is not None and going.spec is not None:
            raise StateConflict(
                f"a rollout of {name!r} is under way; wait for its end or abort it"
                f" (DELETE /v1/aliases/{name}/rollout), then change the alias",
                code="rollout_running",
                param="name",
            )
        now = self._wall()
        is_at_once = not was or targets == was or place_s == 0
        switch = Rollout(before=was, after=targets, place_s=place_s, began_at=now, since=now)
        with self._store.together():
            if going is not None:
                self._store.record("alias_rollout", name, {"what": "given up", "why": "set anew"}, actor)
            if not is_at_once:
                self._store_new_rollout(present, switch, actor)
            elif targets != was or present.rollout is not None:
                self._store.put_name(replace(present, targets=targets, rollout=None))
            if is_at_once and targets != was:
                body = {"targets": weight_pairs(targets), "was": weight_pairs(was) or None}
                self._store.record("alias_set", name, body, actor)
        if not is_at_once:
            self._advance_now(name)

    def point_at_version(self, name: str, version: NameVersion, actor: str, *, is_new: bool) -> None:
        """Point a published name at one of its versions at once, and end a rollout of it; its older versions stay.

        is_new  whether this publish made the version, for the history
        """
        present = self._store.names[name]
        with self._store.together():
            self._store.put_name(after_pointing(present, version.lora_id, self._wall()))
            was = weight_pairs(present.targets) or None
            body = {"lora_id": version.lora_id, "digest": version.digest, "was": was, "is_new": is_new}
            self._store.record("name_published", name, body, actor)

    def start_rollout(self, alias: str, spec: RolloutSpec, actor: str) -> tuple[Rollout, bool]:
        """Store a new rollout and advance it; returns it, and whether it is new: the same one again changes nothing.

        Raises StateConflict while another rollout or change of the alias is in progress, OrchestratorRequestError when
        the alias has only this target already.
        """
        present = self._store.names[alias]
        before, known = present.targets, present.active_rollout
        whole = with_last_step(spec)
        if known is not None:
            if known.spec == whole:
                return known, False
            kind = "a rollout" if known.spec is not None else "a change"
            raise StateConflict(
                f"{kind} of {alias!r} is under way; wait for its end or abort it (DELETE /v1/aliases/{alias}/rollout)",
                code="rollout_running",
                param="name",
            )
        if [target.lora_id for target in before if target.weight > 0] == [spec.to]:
            raise OrchestratorRequestError(f"alias {alias!r} points at {spec.to!r} alone already", param="to")
        now = self._wall()
        after = (AliasTarget(spec.to),)
        rollout = Rollout(before=before, after=after, spec=whole, place_s=spec.place_s, began_at=now, since=now)
        counted = (tally_of(self._demand.totals(lora_id)) for lora_id in rollout.old_ids)
        rollout = replace(rollout, baseline=sum(counted, RequestTally()))
        with self._store.together():
            self._store_new_rollout(present, rollout, actor)
        self._advance_now(alias)
        return self.rollout_of(alias), True

    def rollout_of(self, alias: str) -> Rollout:
        """The alias's rollout in progress, or its last one. Raises NotFound."""
        found = self._store.names.get(alias)
        if found is None or found.rollout is None:
            raise NotFound(f"alias {alias!r} has had no rollout", code="rollout_not_found", param="name")
        return found.rollout

    def set_paused(self, alias: str, is_paused: bool, actor: str) -> Rollout:
        """Pause or resume the rollout; repeats change nothing. A resumed one advances at once.

        Raises NotFound, StateConflict when it is over.
        """
        rollout = self._active_rollout(alias)
        after = paused_rollout(rollout, self._wall()) if is_paused else resumed_rollout(rollout, self._wall())
        if after != rollout:
            self._store_progress(alias, rollout, after, None, "paused" if is_paused else "resumed", actor)
            self._advance_now(alias)
        return self.rollout_of(alias)

    def abort_rollout(self, alias: str, actor: str) -> Rollout:
        """End the rollout and restore the alias's old targets at once; returns the ended rollout.

        Raises NotFound, StateConflict when it is over.
        """
        rollout = self._active_rollout(alias)
        after, targets = aborted_rollout(rollout, self._wall())
        self._store_progress(alias, rollout, after, targets, "aborted", actor)
        return after

    def missing_for(self, name: ServedName) -> Mapping[str, str]:
        """lora_id -> what is missing before the name may shift; empty once it has shifted."""
        rollout = name.rollout
        if rollout is None or rollout.phase != "placing":
            return {}
        if not self._is_settled():
            return dict.fromkeys(sorted(rollout.new_ids), "the fleet has not spoken yet")
        ready = self._queries.ready_workers_by_adapter()
        seen = self._observation(name, ready, self._observed_workers(), takes_counts=False)
        return missing_by_adapter(rollout, seen)

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

    def _store_new_rollout(self, name: ServedName, rollout: Rollout, actor: str) -> None:
        """Store a new rollout and its history entry."""
        self._store.put_name(replace(name, rollout=rollout))
        self._store.record(
            "alias_rollout",
            name.name,
            {
                "what": "began",
                "from": weight_pairs(rollout.before),
                "to": weight_pairs(rollout.after),
                "watched": rollout.spec is not None,
            },
            actor,
        )

    def _advance_now(self, alias: str) -> None:
        """Advance one rollout now, so that a switch to placed targets needs no pass."""
        name = self._store.names[alias]
        if self._is_settled() and name.active_rollout is not None:
            seen = self._observation(name, self._queries.ready_workers_by_adapter(), self._observed_workers())
            self._advance_by(name, seen)

    def _advance_by(self, name: ServedName, seen: RolloutObservation) -> None:
        """Advance the name's rollout as far as this observation allows, maybe several steps, and store its progress.

        Counts within a step are kept in memory only.
        """
        rollout, observation = name.rollout, seen
        while rollout is not None:
            after, targets = advance(rollout, observation, self._wall())
            if (after.phase, after.step, after.scale) != (rollout.phase, rollout.step, rollout.scale):
                progress = after.phase if not after.is_active else f"{after.phase} step {after.step + 1}"
                self._store_progress(name.name, rollout, after, targets, progress, NOBODY)
            elif after != rollout:
                # Counts within a step are not stored: after a restart the step's requests are counted anew.
                self._store.names[name.name] = replace(self._store.names[name.name], rollout=after)
            if (after.phase, after.step) == (rollout.phase, rollout.step) or not after.is_active:
                return
            rollout, observation = after, replace(seen, old=RequestTally(), new=RequestTally())

    def _store_progress(
        self, alias: str, before: Rollout, after: Rollout, targets: Targets | None, progress: str, actor: str
    ) -> None:
        """Store the rollout's new state and the alias's new targets, with log and event.

        History is written only for a changed phase, step or pause. A switch that is done is removed.
        """
        is_over_switch = after.phase == "done" and after.spec is None
        present = self._store.names[alias]
        moved = replace(
            present,
            targets=present.targets if targets is None else targets,
            rollout=None if is_over_switch else after,
        )
        with self._store.together():
            self._store.put_name(moved)
            if moved.targets != present.targets:
                why = after.reason or f"rollout: {progress}"
                body = {"targets": weight_pairs(moved.targets), "was": weight_pairs(present.targets), "why": why}
                self._store.record("alias_set", alias, body, actor)
            is_step = (before.phase, before.step, before.paused_at) != (after.phase, after.step, after.paused_at)
            if is_step and (after.spec is not None or after.phase != "watching"):
                self._store.record("alias_rollout", alias, {"what": progress, "why": after.reason}, actor)
        log.info("rollout", alias=alias, progress=progress, why=after.reason, targets=targets and weight_pairs(targets))
        self._catalog.emit_event(
            "alias_rollout", message=f"{alias}: {progress}" + (f": {after.reason}" if after.reason else "")
        )

    def _observation(
        self,
        name: ServedName,
        ready: Mapping[str, Sequence[str]],
        workers: Collection[ObservedWorker],
        *,
        takes_counts: bool = True,
    ) -> RolloutObservation:
        """The observation of the name's rollout.

        takes_counts  whether it takes the requests counted since the last such call; the next call does not get them
        """
        rollout = name.rollout
        if rollout is None:
            return RolloutObservation()
        ids = rollout.old_ids | rollout.new_ids
        adapters = {lora_id: self._store.adapters[lora_id] for lora_id in ids if lora_id in self._store.adapters}
        why = {lora_id: self._queries.last_error(lora_id) for lora_id in ids}
        counted = self._new_counts(_count_key(name), ids) if takes_counts else {}
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

    def _new_counts(self, key: _CountKey, ids: frozenset[str]) -> dict[str, RequestTally]:
        """lora_id -> requests counted since the last call, and marked as counted now; empty at the first call."""
        now = {lora_id: tally_of(self._demand.totals(lora_id)) for lora_id in ids}
        marks = self._marks.get(key)
        self._marks[key] = now
        if marks is None:
            return {}
        return {lora_id: _growth_or_zero(tally, marks.get(lora_id, RequestTally())) for lora_id, tally in now.items()}

    def _observed_workers(self) -> Collection[ObservedWorker]:
        """All workers, as observed now."""
        return self._queries.observe().workers.values()

    def _max_replicas(self, adapter: RegisteredAdapter) -> int:
        """The adapter's own maximum of replicas, else the policy's."""
        return self._store.rules.max_replicas if adapter.policy.max_replicas is None else adapter.policy.max_replicas

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
        loading = adapter.policy.loading or self._store.rules.loading
        own = self._store.rules.min_replicas if loading != "lazy" else 0
        own = own if adapter.policy.min_replicas is None else adapter.policy.min_replicas
        least = min(least, self._max_replicas(adapter))
        return adapter.with_policy(min_replicas=least) if least > own else adapter


class VersionRetention:
    """Deletes retired versions and unused names. Placement then drains and unloads them, as any deleted adapter.

    awaited  lora_ids of versions that publishes in progress wait for: they are loaded, and not retired
    """

    def __init__(
        self,
        store: IntentStore,
        demand: DemandBook,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._demand = demand
        self._clock = clock
        self._wall = wall
        self._term_began_at = clock()
        self.awaited: set[str] = set()

    def begin_term(self) -> None:
        """Note the begin of a term: a new leader knows nothing of requests before it."""
        self._term_began_at = self._clock()

    def last_asked_at(self, demand: DemandSnapshot) -> Mapping[str, float]:
        """Published name -> Unix time of the last request for one of its versions, as far as routers have reported."""
        return {name: at for name, record in self._published() if (at := self._asked_at(record, demand))}

    def idle_names(self, demand: DemandSnapshot, asked: Mapping[str, float]) -> frozenset[str]:
        """Published names that nobody has used in the policy's `scale_down_after_s`; none where that is not known.

        asked  `last_asked_at` of the same demand
        """
        after_s = self._store.rules.scale_down_after_s
        if not demand.hears_every_router or self._clock() - self._term_began_at < after_s:
            return frozenset()
        since = self._wall() - after_s
        return frozenset(name for name, record in self._published() if last_used_at(record, asked.get(name)) < since)

    def trained_names(self) -> frozenset[str]:
        """Published names of which another version is to be expected soon."""
        rules, now = self._store.rules, self._wall()
        return frozenset(name for name, record in self._published() if is_trained(record, rules, now))

    def _published(self) -> list[tuple[str, Publication]]:
        """Published names and their versions, those of deleted names too."""
        return [(name.name, name.published) for name in self._store.names.values() if name.published is not None]

    def _asked_at(self, record: Publication, demand: DemandSnapshot) -> float:
        """Unix time of the last request for a version of the name; 0.0 if none is known."""
        at = max(map(demand.asked_at, record.lora_ids), default=-inf)
        return 0.0 if at == -inf else self._wall() - (self._clock() - at)

    def targeted_ids(self) -> frozenset[str]:
        """lora_ids that a name points at, or is about to, or that a rollout leads from or to."""
        return frozenset(self.awaited).union(*(name.needed_ids for name in self._store.names.values()))

    def busy_ids(self) -> frozenset[str]:
        """lora_ids with requests that wait in live routers, or run."""
        found: set[str] = set()
        for router in self._demand.routers.live(self._clock()):
            found |= router.report.waiting.keys()
            found |= {lora_id for lora_id, _, _ in router.adapters_in_flight()}
        return frozenset(found)

    def retire(self) -> int:
        """Mark retired versions as to be deleted, and delete unused names; returns the number of versions marked."""
        published = self._published()
        if not published:
            return 0
        demand = self._demand.snapshot(self._clock())
        asked, targeted, busy = self.last_asked_at(demand), self.targeted_ids(), self.busy_ids()
        is_listening = self._clock() - self._term_began_at >= _LISTEN_S and not demand.has_unheard_routers
        gone = 0
        for name, record in published:
            current = self._note_use(name, record, asked.get(name))
            is_idle = is_unused(current, asked.get(name), self._store.rules, self._wall())
            if is_listening and is_idle and current.deleted_at is None:
                self.delete_name(name, NOBODY, f"nobody asked for it in {self._store.rules.unused_name_s:.0f} s")
            else:
                gone += self._retire_versions(name, current, targeted, busy)
        return gone

    def forget_left(self, named: Container[str], held: Container[str]) -> list[str]:
        """Note which adopted adapters no worker's settings name, and drop those that are left nowhere; returns these.

        Not where a worker holds one, a name points at it or a request waits for it, nor while a router may be unheard.

        named, held  lora_ids that workers' settings name, and that workers hold in a slot
        """
        adapters = map(self._store.adapters.__getitem__, sorted(self._store.intent.index.adopted))
        adopted = [adapter for adapter in adapters if not adapter.is_deleting]
        now, demand = self._wall(), self._demand.snapshot(self._clock())
        is_listening = self._clock() - self._term_began_at >= _LISTEN_S and not demand.has_unheard_routers
        targeted, busy = self.targeted_ids(), self.busy_ids()
        gone = []
        with self._store.together():
            for adapter in adopted:
                noted = with_left_at(adapter, is_named=adapter.lora_id in named, now=now)
                if noted is not adapter:
                    self._store.put_adapter(noted)
                asked_at = now - (self._clock() - demand.asked_at(adapter.lora_id))
                is_idle = is_left_nowhere(noted, asked_at, self._store.rules, now)
                is_needed = adapter.lora_id in held or adapter.lora_id in targeted or adapter.lora_id in busy
                if is_listening and is_idle and not is_needed:
                    self._store.forget_adapter(adapter.lora_id, "no worker's settings name it, and nobody asks for it")
                    gone.append(adapter.lora_id)
        return gone

    def _retire_versions(self, name: str, record: Publication, targeted: frozenset[str], busy: frozenset[str]) -> int:
        """Mark a name's retired versions as to be deleted, and drop them from its record; returns their number.

        A name without any version left, deleted or after a first publish that failed, is dropped.
        """
        retired = set(retired_versions(record, targeted, self._store.rules, self._wall(), busy))
        # Somebody may have deleted a version by hand.
        retired |= {version.lora_id for version in record.versions if version.lora_id not in self._store.adapters}
        if not retired and record.versions:
            return 0
        left = self.drop_versions(name, retired)
        log.info("versions retired", name=name, lora_ids=sorted(retired), kept=len(left.versions))
        return len(retired)

    def drop_versions(self, name: str, lora_ids: Collection[str]) -> Publication:
        """Delete versions of a published name, and the name if it is left without any; returns what is left of it.

        Placement drains and unloads the adapters.
        """
        present = self._store.names[name]
        left = without_versions(present.published or Publication(), lora_ids)
        with self._store.together():
            # Versions of a name that is gone leave tombstones: their numbers say nothing without the name.
            if left.versions or present.targets:
                self._store.put_name(replace(present, published=left))
            else:
                self._store.drop_name(name)
            for lora_id in lora_ids:
                adapter = self._store.adapters.get(lora_id)
                if adapter is not None and not adapter.is_deleting:
                    self._store.put_adapter(replace(adapter, is_deleting=True))
        return left

    def delete_name(self, name: str, actor: str, why: str) -> None:
        """Delete a published name, and record it in the history. Its versions go when no request needs them."""
        present = self._store.names[name]
        versions = () if present.published is None else present.published.versions
        with self._store.together():
            self._store.put_name(after_deletion(present, self._wall()))
            self._store.record("name_deleted", name, {"versions": len(versions), "why": why}, actor)
        log.info("published name deleted", name=name, why=why, asked_by=actor)

    def take_over(self, name: str, theirs: Publication, actor: str) -> None:
        """Store another fleet's published name with the versions that are registered here, and a history entry."""
        here = self._store.names.get(name) or ServedName(name=name)
        taken = taken_over(theirs, here, self._store.adapters, self._wall())
        with self._store.together():
            self._store.put_name(taken)
            versions = () if taken.published is None else taken.published.versions
            body = {"versions": len(versions), "why": "taken over from a record"}
            self._store.record("name_published", name, body, actor)

    def _note_use(self, name: str, record: Publication, asked_at: float | None) -> Publication:
        """The record with its last use, stored where the stored one is old: a new leader has to know of it."""
        noted = max(record.used_at, record.published_at)
        if asked_at is None or asked_at - noted < self._store.rules.unused_name_s * _USE_NOTED_PART:
            return record
        used = replace(record, used_at=asked_at)
        self._store.put_name(replace(self._store.names[name], published=used))
        return used


def name_problem(store: IntentStore, reports: WorkerReports, name: str) -> str | None:
    """Why nothing new may get the name: it is an alias, a published name, an adapter or a base model. None: it may."""
    taken = None
    if store.targets_of(name):
        taken = "an alias"
    elif name in store.adapters:
        taken = "an adapter"
    elif name in store.names:
        taken = "a published name"
    elif name in (bases := reports.base_model_names()):
        taken = "a base model that a worker serves"
    elif any(name.startswith(f"{base}:") for base in bases):
        begin = f"{name!r} begins with a base model's name and a colon, which requests write before an adapter's"
        return f"{begin}; choose another"
    return None if taken is None else f"{name!r} is the name of {taken}; choose another"


def _count_key(name: ServedName) -> _CountKey:
    """The key of the counts of the name's rollout."""
    return name.name, 0.0 if name.rollout is None else name.rollout.began_at


def _able_worker_count(adapter: RegisteredAdapter, workers: Collection[ObservedWorker], holders: Sequence[str]) -> int:
    """Number of workers that can hold the adapter, or do."""
    fits = {worker.id for worker in workers if worker.can_take(adapter)}
    return len(fits.union(holders))


def _growth_or_zero(now: RequestTally, before: RequestTally) -> RequestTally:
    """The growth of each count; 0 where a count fell because it began anew."""
    return RequestTally(
        max(0.0, now.requests - before.requests),
        max(0.0, now.errors - before.errors),
        max(0.0, now.first_tokens - before.first_tokens),
        max(0.0, now.first_token_s - before.first_token_s),
    )
