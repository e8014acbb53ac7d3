"""Wire models of stored intent and reported state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import inf

from lorafleet.identity import fleet_digest
from lorafleet.service.times import utc_text
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.errors import NotFound
from orchestrator.core.placement.context import is_placeable, usable_slots
from orchestrator.core.placement.load_time import load_s
from orchestrator.core.placement.pools import (
    AdapterNeed,
    PoolFigures,
    PoolMember,
    PoolUse,
    engine_wait_s,
    pool_figures,
    with_pools_from_zero,
)
from orchestrator.core.placement.what_if import SimulatedStep, WhatIfOutcome
from orchestrator.core.plan import WorkerAction
from orchestrator.metrics import Counts
from orchestrator.model.adapter_documents import (
    AdapterItem,
    AdapterStatus,
    EnsureAnswer,
    FileCopiesItem,
    Replicas,
)
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.plans import ActionItem, PlacementItem, Plan, PlanCost, TargetChange
from orchestrator.model.snapshot import OCCUPYING, DesiredPlacement, WorkerIntent
from orchestrator.model.workers import WorkerDrainProgress, WorkerFiles, WorkerItem
from orchestrator.reconcile.orphans import is_orphan, orphans
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.reconcile.worker_reports import KnownWorker, worker_state
from workers.wire import WorkerAdapter


class WireViews:
    """Builds wire models from the reconciler's state."""

    def __init__(self, reconciler: Reconciler, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._reconciler = reconciler
        self._clock = clock
        self._wall = wall

    def adapter(
        self,
        adapter: RegisteredAdapter,
        *,
        ready: Mapping[str, Sequence[str]] | None = None,
        copies: Mapping[str, tuple[str, WorkerAdapter]] | None = None,
    ) -> AdapterItem:
        """The adapter as wire model.

        ready, copies  by lora_id: ready workers, and the copy that shows least; computed once for many adapters
        """
        if ready is None:
            ready = {adapter.lora_id: self._reconciler.queries.ready_workers(adapter.lora_id)}
        if copies is None:
            copies = self._reconciler.queries.copies_with_notes({adapter.lora_id}) if ready else {}
        workers, orders = ready.get(adapter.lora_id, ()), self._reconciler.store.workers
        worker_id, copy = copies.get(adapter.lora_id, ("", None))
        has_file = copy is not None and (copy.acceptance_file or copy.acceptance is not None)
        status = AdapterStatus(
            state=self._reconciler.queries.adapter_state(adapter, ready),
            card=adapter.card if adapter.card is None or copy is None else replace(adapter.card, effect=copy.effect),
            replicas=Replicas(desired=self.desired(adapter.lora_id), ready=len(workers)),
            workers=tuple(workers),
            kept_out_of=tuple(name for name, order in orders.items() if adapter.lora_id in order.kept_out),
            requests_per_s=round(self._reconciler.demand.request_rate(adapter.lora_id, self._clock()), 4),
            idle_s=self._idle_s(adapter.lora_id),
            error=self._reconciler.queries.last_error(adapter.lora_id),
            ignored_modules=None if copy is None else copy.ignored_modules,
            note=_note_on(adapter, worker_id, copy),
            acceptance=self._reconciler.queries.acceptance(adapter.lora_id) if workers and has_file else {},
            published_as=self._reconciler.store.published_as(adapter.lora_id),
            copies=self._copies_of(adapter),
        )
        return AdapterItem(lora_id=adapter.lora_id, spec=adapter.spec, status=status)

    def _copies_of(self, adapter: RegisteredAdapter) -> FileCopiesItem | None:
        """How the adapter's files are kept; None where they have a source outside the fleet."""
        digest = fleet_digest(adapter.source)
        if digest is None:
            return None
        state = self._reconciler.copies.state(digest)
        return FileCopiesItem(
            wanted=self._reconciler.settings.fleet_copies,
            state=state.status,
            kept_by=state.kept_by,
            held_by=tuple(sorted(self._reconciler.files.holders.get(digest, ()))),
            reason=state.reason,
        )

    def _files_of(self, worker_id: str) -> WorkerFiles | None:
        """The adapters on the worker's disk; None where its agent does not report them."""
        disk = self._reconciler.files.disks.get(worker_id)
        if disk is None:
            return None
        return WorkerFiles(held=len(disk.files), kept=sum(disk.files.values()), is_whole=disk.is_whole)

    def _idle_s(self, lora_id: str) -> float | None:
        """Seconds since the adapter was asked for last, by the last pass; None where that is not known."""
        at = self._reconciler.queries.last_pass.desired.last_asked_at.get(lora_id, -inf)
        return None if at == -inf else round(max(0.0, self._clock() - at), 1)

    def desired(self, lora_id: str) -> int:
        """Replicas that the adapter should have, by the last pass."""
        desired = self._reconciler.queries.last_pass.desired
        return max(desired.targets.get(lora_id, 0), len(desired.replicas.get(lora_id, ())))

    def worker(self, worker_id: str) -> WorkerItem:
        """The worker's last report as wire model, with the adapters and orphans it holds. Raises NotFound."""
        entry = self._reconciler.reports.workers.get(worker_id)
        if entry is None:
            raise NotFound(f"worker {worker_id!r} has not registered", code="worker_not_found")
        report, store = entry.report, self._reconciler.store
        order = store.workers.get(worker_id)
        held = [lora for lora in report.lora.loaded_loras if lora.state in OCCUPYING]
        orphan_ids = [lora.lora_id for lora in held if is_orphan(lora, store)]
        return WorkerItem.model_validate(
            {
                "id": worker_id,
                "agent_url": agent_url_of(report),
                "engine_url": report.transport.engine_url,
                "base_model": report.model.base_model,
                "state": worker_state(entry, order),
                "zone": report.zone,
                "node": report.node,
                "capacity": report.lora.capacity.model_dump() | {"max_lora_rank": report.lora.max_lora_rank},
                "adapters": sorted(lora.lora_id for lora in held),
                "orphans": sorted(orphan_ids),
                "kept_out": () if order is None else order.kept_out,
                "is_terminating": entry.is_terminating,
                "refusal": report.lora.refusal,
                "punica": report.lora.punica,
                "measured": report.lora.measured,
                "files": self._files_of(worker_id),
                "drain": self._drain_of(entry, order),
                "load": report.load,
            }
        )

    def _drain_of(self, entry: KnownWorker, intent: WorkerIntent | None) -> WorkerDrainProgress | None:
        """How far the worker's drain is; None without one, or while nothing may be decided yet."""
        report = entry.report
        progress = self._reconciler.drain_progress(report.instance_id)
        if progress is None:
            return None
        at_engine = report.load.running + report.load.waiting
        requests = max(at_engine, self._reconciler.router_in_flight(report.instance_id))
        last_phase = "finishing" if requests else "drained"
        unplaced = self._reconciler.queries.last_pass.desired.unplaced
        since = None if intent is None else intent.since
        deadline_in_s = None if progress.deadline is None else progress.deadline - self._clock()
        return WorkerDrainProgress(
            phase=last_phase if report.state == "draining" else "moving",
            requests=requests,
            began_at=None if since is None else timestamp(since),
            deadline=None if deadline_in_s is None else timestamp(self._wall() + deadline_in_s),
            deadline_in_s=None if deadline_in_s is None else round(max(0.0, deadline_in_s), 3),
            moves=progress.moves,
            moved=max(0, progress.moves - len(progress.left)),
            move_bytes=progress.move_bytes,
            left=progress.left,
            left_bytes=progress.left_bytes,
            expected_s=progress.expected_s,
            stuck={lora_id: unplaced[lora_id] for lora_id in progress.left if lora_id in unplaced},
        )

    def placements(self) -> list[PlacementItem]:
        """Present and desired placements, sorted by lora_id and worker; one that is only desired is `remote`."""
        desired = {
            (lora_id, w)
            for lora_id, workers in self._reconciler.queries.last_pass.desired.replicas.items()
            for w in workers
        }
        rows: dict[tuple[str, str], PlacementItem] = {}
        for worker in self._reconciler.queries.observe().workers.values():
            for held in worker.adapters.values():
                pair = (held.lora_id, worker.id)
                rows[pair] = PlacementItem(
                    lora_id=held.lora_id,
                    digest=held.digest,
                    worker_id=worker.id,
                    state=held.state,
                    location=held.location,
                    desired=pair in desired,
                )
        for pair in desired - rows.keys():
            adapter = self._reconciler.store.adapters.get(pair[0])
            digest = None if adapter is None else adapter.digest
            rows[pair] = PlacementItem(
                lora_id=pair[0], digest=digest, worker_id=pair[1], state="remote", location="remote", desired=True
            )
        return [rows[pair] for pair in sorted(rows)]

    def plan(self, actions: Sequence[WorkerAction], desired: DesiredPlacement) -> Plan:
        """The actions as a wire plan with their cost; `desired` gives the adapters that find no place."""
        figures = self._reconciler.queries.load_figures()
        sizes = {name: adapter.size_bytes or 0 for name, adapter in self._reconciler.store.adapters.items()}
        steps = [
            SimulatedStep(action=action, pass_index=0, size_bytes=size, seconds=load_s(size, figures))
            if action.operation == "load"
            else SimulatedStep(action=action, pass_index=0)
            for action, size in ((action, sizes.get(action.lora_id, 0)) for action in actions)
        ]
        seconds = max((step.seconds for step in steps), default=0.0)
        return _wire_plan(steps, desired.unplaced, seconds)

    def what_if_plan(self, outcome: WhatIfOutcome) -> Plan:
        """The outcome of a what-if plan as wire model, with the targets that change."""
        names = sorted(outcome.before.keys() | outcome.after.keys())
        counts = {name: (outcome.before.get(name, 0), outcome.after.get(name, 0)) for name in names}
        targets = {
            name: TargetChange(before=before, after=after)
            for name, (before, after) in counts.items()
            if before != after
        }
        plan = _wire_plan(outcome.steps, outcome.unplaced, outcome.seconds)
        return plan.model_copy(update={"targets": targets, "is_settled": outcome.is_settled})

    def ensure_answer(self, adapter: RegisteredAdapter, replicas: int) -> EnsureAnswer:
        """The answer to an `ensure` of so many replicas: the adapter's state, its workers, and the expected seconds."""
        ready = tuple(self._reconciler.queries.ready_workers(adapter.lora_id))
        queries = self._reconciler.queries
        expected_s = 0.0 if len(ready) >= replicas else queries.expected_s(adapter.lora_id)
        failure = queries.failure_everywhere(adapter.lora_id)
        return EnsureAnswer.model_validate(
            {
                "lora_id": adapter.lora_id,
                "digest": adapter.digest,
                "state": queries.adapter_state(adapter, {adapter.lora_id: ready}),
                "ready": ready,
                "loading": queries.loading_workers(adapter.lora_id),
                "expected_s": expected_s,
                "error": None if len(ready) >= replicas else queries.last_error(adapter.lora_id),
                "fits_nowhere": queries.fits_nowhere(adapter.lora_id),
                "retry_in_s": None if failure is None else round(max(0.0, failure.until - self._clock()), 3),
                "progress": queries.fetch_progress(adapter.lora_id),
            }
        )

    def replica_counts(self) -> Counts:
        """lora_id -> (ready, wanted), of every adapter that is or should be on a worker."""
        desired = self._reconciler.queries.last_pass.desired
        ready = self._reconciler.queries.ready_workers_by_adapter()
        ids = desired.replicas.keys() | desired.targets.keys()
        return {lora_id: (len(ready.get(lora_id, ())), self.desired(lora_id)) for lora_id in ids}

    def pool_figures(self) -> list[PoolFigures]:
        """The figures of each pool with a ready worker, or that may be at zero; empty while another leads."""
        reconciler, now = self._reconciler, self._clock()
        if not reconciler.leadership.is_leading:
            return []
        reserve = reconciler.store.rules.reserve_slots
        members = []
        for worker_id, entry in reconciler.reports.workers.items():
            report = entry.report
            if worker_state(entry, reconciler.store.workers.get(worker_id)) != "ready":
                continue
            capacity, load = report.lora.capacity, report.load
            slots = capacity.loaded_count + capacity.available_slots if report.lora.enabled else 0
            at_engine_s = engine_wait_s(load.running, load.waiting, load.mean_request_s)
            members.append(
                PoolMember(
                    pool=report.pool,
                    base_model=report.model.base_model,
                    slots=usable_slots(slots, reserve),
                    max_lora_rank=report.lora.max_lora_rank,
                    wait_s=at_engine_s + reconciler.demand.routers.wait_s(worker_id, now),
                )
            )
        return with_pools_from_zero(pool_figures(members, self._adapter_needs(now)), self._uses_from_zero(now))

    def _uses_from_zero(self, now: float) -> dict[tuple[str, str], PoolUse]:
        """(base model, pool) -> its use, of each pool that may be at zero."""
        reconciler = self._reconciler
        held = reconciler.demand.routers.held_from_zero(now)
        running = {
            entry.report.model.base_model
            for worker_id, entry in reconciler.reports.workers.items()
            if reconciler.router_in_flight(worker_id)
        }
        return {
            (pool.base_model, name): PoolUse(
                held=held.get(pool.base_model, 0),
                idle_s=0.0 if pool.base_model in running else reconciler.demand.idle_s(pool.base_model, now),
            )
            for name, pool in reconciler.settings.scale_from_zero.items()
        }

    def _adapter_needs(self, now: float) -> Iterator[AdapterNeed]:
        """Needed copies: the placement's targets, and one copy of every adapter with recent requests."""
        store, targets = self._reconciler.store, self._reconciler.queries.last_pass.desired.targets
        demand = self._reconciler.demand.snapshot(now)
        recent = {name for name, at in demand.last_request_at.items() if now - at < store.rules.demand_window_s}
        for lora_id in targets.keys() | recent:
            adapter = store.adapters.get(lora_id)
            if adapter is not None and is_placeable(adapter):
                yield AdapterNeed(
                    base_model=adapter.base_model, rank=adapter.rank or 0, copies=max(1, targets.get(lora_id, 0))
                )

    def orphans_by_origin(self) -> dict[str, int]:
        """Origin -> number of orphans: of settings, of another client, or of the fleet before its store was lost."""
        found = {"settings": 0, "another_client": 0, "fleet": 0}
        for item in orphans(self._reconciler.reports, self._reconciler.store):
            found["settings" if item.is_configured else "another_client" if item.is_foreign else "fleet"] += 1
        return found

    def workers_by_state(self) -> dict[str, int]:
        """Worker state -> number of workers."""
        counts = dict.fromkeys(("starting", "ready", "cordoned", "draining", "unmanaged", "lost"), 0)
        for worker_id, entry in self._reconciler.reports.workers.items():
            counts[worker_state(entry, self._reconciler.store.workers.get(worker_id))] += 1
        return counts


def _note_on(adapter: RegisteredAdapter, worker_id: str, copy: WorkerAdapter | None) -> str:
    """What to know of an adapter: of the files beside its own, and of its copy, with the worker that has it."""
    on_files = "" if adapter.card is None else adapter.card.files_note
    on_copy = f"{worker_id}: {copy.note}" if copy is not None and copy.note else ""
    return "; ".join(filter(None, (on_files, on_copy)))


def _wire_plan(steps: Sequence[SimulatedStep], unplaced: Mapping[str, str], seconds: float) -> Plan:
    """A wire plan of these steps, with their cost."""
    items = tuple(
        ActionItem(
            operation=step.action.operation,
            lora_id=step.action.lora_id,
            worker_id=step.action.worker_id,
            reason=step.action.reason,
            evict=step.action.evict or step.action.evict_after,
            turn=step.pass_index,
            size_bytes=step.size_bytes or None,
            seconds=step.seconds if step.action.operation == "load" else None,
        )
        for step in steps
    )
    operations = [item.operation for item in items]
    cost = PlanCost(
        loads=operations.count("load"),
        # An eviction is the unload that a load does by itself.
        unloads=operations.count("unload") + sum(step.action.evict is not None for step in steps),
        bytes=sum(step.size_bytes for step in steps),
        seconds=round(seconds, 3),
    )
    return Plan(actions=items, unplaced=tuple(sorted(unplaced)), reasons=dict(unplaced), cost=cost)


def timestamp(at: float) -> str:
    """Unix seconds as ISO 8601 text in UTC, with milliseconds."""
    return utc_text(datetime.fromtimestamp(at, UTC))
