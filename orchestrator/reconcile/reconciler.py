"""The reconcile loop: observe, place, diff, act.

Level-driven: each pass starts from the stored intent and the last reports, so a lost event, a failed action or a
restart costs one pass and nothing else. A pass never waits: it starts actions, each in a task of its own with a
deadline, and the end of an action requests the next pass. Operations in progress are part of the observed fleet.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from math import inf

import structlog

from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.core.placement.expiry import longest_ttl_s
from orchestrator.core.placement.place import place
from orchestrator.core.placement.warm_up import prefetches, warm_up_loads
from orchestrator.core.plan import WorkerAction, diff, is_drained, required_drains
from orchestrator.core.published_names import current_versions, with_published_floors
from orchestrator.model.snapshot import (
    DesiredPlacement,
    DrainProgress,
    Intent,
    ObservedFleet,
    Pair,
    PlannedLoad,
    WantedReplicas,
)
from orchestrator.model.usage import UsageReport
from orchestrator.reconcile.actor import ActionRunner
from orchestrator.reconcile.confirmations import FleetPauses, RouterConfirmations
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.file_copies import FileCopies
from orchestrator.reconcile.heartbeats import HeartbeatMonitor
from orchestrator.reconcile.incidents import IncidentRecorder
from orchestrator.reconcile.orphans import adopt_by_policy
from orchestrator.reconcile.queries import FleetQueries, LastPass
from orchestrator.reconcile.served_names import NameMover, VersionRetention
from orchestrator.reconcile.worker_reports import worker_state
from orchestrator.store.audit import AuditLog
from orchestrator.store.store import NOBODY
from orchestrator.store.tables import Subject

log = structlog.get_logger()

_LOOK_FOR_LEFT_S = 60.0
_LATE_S = 0.05  # grace for a heartbeat that is only just due, so that it does not cost a pass


class Reconciler:
    """The loop and its passes, and the parts that observe, act and answer queries.

    queries     where adapters are and in which state
    operations  operations in progress, and failures
    monitor     heartbeats and probes
    runner      runs actions on agents
    names       moves names to other targets
    retention   deletes old versions of published names
    files       what is on the workers' disks
    copies      keeps copies of files that only the fleet has
    audit       who asked for what
    pass_ended  set at the end of each pass
    """

    def __init__(self, context: PassContext) -> None:
        """Build the parts, and connect the gauges of usage and term in `metrics`."""
        self._context = context
        self.settings, self.store, self.reports = context.settings, context.store, context.reports
        self.demand, self.catalog, self.leadership = context.demand, context.catalog, context.leadership
        self.operations, self.files = context.operations, context.files
        self.confirmations = RouterConfirmations(context.clock)
        self._started_at = self._term_began_at = context.clock()
        self._looked_for_left_at = -inf
        self.pass_ended = asyncio.Event()
        self.audit = AuditLog(self.store)
        self.incidents = IncidentRecorder(
            store=self.store,
            reports=self.reports,
            catalog=self.catalog,
            metrics=context.metrics,
            leadership=self.leadership,
            wall=context.wall,
        )
        self.queries = FleetQueries(context)
        self.pauses = FleetPauses(
            store=self.store,
            demand=self.demand,
            catalog=self.catalog,
            refresh_catalog=self.queries.refresh_catalog,
            has_heard_routers=lambda: context.clock() - self._term_began_at >= self.settings.settle_s,
            wait_s=self.settings.pause_wait_s,
            clock=context.clock,
            wall=context.wall,
        )
        self.names = NameMover(
            store=self.store,
            demand=self.demand,
            catalog=self.catalog,
            queries=self.queries,
            is_settled=lambda: self._can_decide,
            clock=context.clock,
            wall=context.wall,
        )
        self.retention = VersionRetention(self.store, self.demand, clock=context.clock, wall=context.wall)
        self.monitor = HeartbeatMonitor(context, self.queries)
        self.runner = ActionRunner(context, self.queries, self.monitor, self.audit)
        self.copies = FileCopies(context, self.monitor)
        self._connect_gauges()

    def _connect_gauges(self) -> None:
        """Connect the gauges that are read when metrics are scraped."""
        metrics, queries = self._context.metrics, self.queries
        metrics.observe_pauses(lambda: len(self.pauses.in_force()))
        metrics.observe_usage(self._usage_by_adapter)
        metrics.observe_term(
            failed=queries.failed_count,
            frozen=lambda: queries.last_pass.desired.frozen_reason is not None,
            leading=lambda: self.leadership.is_leading,
            epoch=lambda: self.store.epoch,
        )

    # -- terms ------------------------------------------------------------------------------------------------

    async def prepare_term(self) -> None:
        """Before a term begins: read the stored intent, raise our epoch and wait until it is durable.

        After a failure the store takes no writes, such as those of calls from a term before. Raises OrchestratorError.
        """
        try:
            await self.store.catch_up()
            self.reload_intent()
            await self.store.wait_durable()
            # What a late leader wrote before our epoch was stored; its later writes are refused.
            self.store.refresh()
        except BaseException:
            self.store.end_term()
            raise

    def reload_intent(self) -> None:
        """Read the stored intent, drop old tombstones, and raise our epoch above all epochs seen. Raises StoreError."""
        self.store.reload()
        self.store.expire_tombstones(self.settings.tombstones_kept_s)
        self.store.raise_epoch(max(self.store.epoch, self.monitor.highest_epoch()))

    def begin_term(self) -> None:
        """Begin to lead: drop failures and events, claim all workers and request a pass."""
        self._term_began_at = self._context.clock()
        self.demand.begin_term(self._term_began_at)
        self.retention.begin_term()
        # A leader in between may have dropped failures or registered an adapter anew.
        self.operations.failures.clear()
        self.catalog.begin_term()
        self.confirmations.begin_term(self.store.routers, self.settings.confirm_wait_s)
        self.incidents.begin_term()
        self.files.clear_seen()
        self.monitor.claim_all_workers()
        self.request_pass()

    def end_term(self) -> None:
        """Stop leading: cancel all actions, forget drains, wake followers.

        Agents finish the calls they have, or refuse them.
        """
        self._context.tasks.cancel_all()
        self.operations.clear()
        self.copies.clear()
        self.store.end_term()
        self.catalog.changed.notify()  # followers must follow the new leader

    # -- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run passes until cancelled, when one is requested or due.

        A pass that raises is logged and delays the next one.
        """
        wait_s = 0.0
        while True:
            try:
                self._context.due.clear()
                began = time.perf_counter()
                self.run_pass()
                wait_s = 0.0
                # The end of every action requests a pass: with thousands of adapters leave time for other work.
                await asyncio.sleep(min(1.0, time.perf_counter() - began))
            except Exception:
                wait_s = min(30.0, max(0.2, wait_s * 2))
                log.exception("pass failed", again_in_s=wait_s)
                self._context.metrics.passes_failed.inc()
                await asyncio.sleep(wait_s * self._context.rng.uniform(0.5, 1.0))
                continue
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the event.
                async with asyncio.timeout(self._next_pass_s()):
                    await self._context.due.wait()

    def request_pass(self) -> None:
        """Make the loop run a pass now rather than at the next interval. Returns at once."""
        self._context.request_pass()

    @property
    def is_pass_due(self) -> bool:
        """Whether a pass has been requested and not begun."""
        return self._context.due.is_set()

    async def publish_change(self, *about: Subject) -> int:
        """Show changed intent to routers, request a pass, and wait until it is durable and every router goes by it.

        Returns the catalog's revision that has the change.

        A router that does not confirm it within `confirm_wait_s` is not waited for; see `RouterConfirmations`.

        about   the changes that must be durable
        raises  OrchestratorError when they cannot be made durable
        """
        self.on_intent_changed()
        revision = self.catalog.revision
        await self.store.wait_durable(about)
        await self.confirmations.wait(revision, self.settings.confirm_wait_s)
        return revision

    def on_intent_changed(self) -> None:
        """Refresh the catalog, which shows changed intent to routers, and request a pass."""
        self.queries.refresh_catalog()
        self.request_pass()

    def ensure_replicas(self, lora_id: str, replicas: int, by: str = NOBODY, tenants: Iterable[str] = ()) -> None:
        """Request replicas of the adapter for `wanted_for_s`; requests a pass if that is more than was known.

        by       who asks, for the audit log
        tenants  as in `WantedReplicas`
        """
        self.audit.note_requester(lora_id, by)
        now = self._context.clock()
        want = WantedReplicas(replicas=replicas, since=now, tenants=frozenset(tenants))
        if self.demand.add_want(lora_id, want, now + self.settings.wanted_for_s):
            self.request_pass()

    def act_on_report(self, report: UsageReport) -> None:
        """Begin at once what a router's report makes due: a pass that may end a drain, and a pool's first worker."""
        if report.held_from_zero:
            self._context.held_due.set()
        if self.operations.drains:
            self.request_pass()

    def allowed_replicas(self, lora_id: str, replicas: int) -> int:
        """The requested replicas, limited to the maximum of the policy."""
        adapter = self.store.adapters.get(lora_id)
        most = None if adapter is None else adapter.policy.max_replicas
        return min(replicas, self.store.rules.max_replicas if most is None else most)

    def router_in_flight(self, worker_id: str) -> int:
        """Requests that live routers have at the worker's engine."""
        return self.demand.routers.in_flight_at(worker_id, self._context.clock())

    async def stop(self) -> None:
        """Cancel all actions and wait for their end.

        Agents finish the calls they have, and the next start reads the results from them.
        """
        await self._context.tasks.cancel_and_wait()

    async def wait_for_actions(self) -> None:
        """Wait until no action is in progress; for tests."""
        await self._context.tasks.wait_all()

    @property
    def is_settled(self) -> bool:
        """Whether workers have had `settle_s` to report since our start, so that a missing one is absent."""
        return self.store.is_read and self._context.clock() - self._started_at >= self.settings.settle_s

    @property
    def _can_decide(self) -> bool:
        """Whether workers have had `settle_s` to report since our term began, too, and the store is fully read."""
        has_settled = self._context.clock() - self._term_began_at >= self.settings.settle_s
        return self.is_settled and has_settled and self.store.is_caught_up

    def _store_router_count(self) -> None:
        """Store how many routers follow us, for the next leader; a later pass does, if the store cannot be written."""
        with contextlib.suppress(StoreError, OrchestratorUnavailable):
            self.store.put_routers(self.confirmations.count)

    def _next_pass_s(self) -> float:
        """Seconds until the next pass.

        That is the interval, the end of `settle_s`, the next probe of a silent worker, when a load holds up no others
        any more, or when a request has waited long enough for a slot.
        """
        now = self._context.clock()
        moments = [at + self.store.rules.load_spread_s for at in self.operations.load_began.values()]
        moments.append(max(self._started_at, self._term_began_at) + self.settings.settle_s)
        if (look_again_at := self.queries.last_pass.desired.look_again_at) is not None:
            moments.append(look_again_at)
        waits = [self.settings.pass_interval_s, *(moment - now for moment in moments if moment > now)]
        silent_in = self.reports.next_probe_in_s(self.settings.probe_after_s)
        waits += [silent_in + _LATE_S] if silent_in is not None else []
        return min(waits)

    # -- one pass ---------------------------------------------------------------------------------------------

    def run_pass(self) -> list[WorkerAction]:
        """Observe, place, diff, act; returns the actions started. Only probes silent workers unless we lead.

        Safe to repeat, to miss and to interrupt.
        """
        began = time.perf_counter()
        self.monitor.probe_silent_workers()
        self.incidents.look()
        if not self.leadership.is_leading:
            return []
        self.monitor.read_configured_adapters()
        self._adopt()
        self._drop_finished()
        self._store_router_count()
        self.pauses.end_expired()
        self.names.advance_all()
        desired, observed, actions, warming = self._decide()
        if desired.frozen_reason is not None and self.queries.last_pass.desired.frozen_reason is None:
            log.warning("moves frozen", reason=desired.frozen_reason)
        self.queries.last_pass = LastPass(observed, desired, warming, tuple(self.reports.configured))
        self._end_drains(desired, observed)
        self._count_moves(desired)
        if self._can_decide:
            actions = self.copies.run(actions)
            self.queries.lost_files = self.copies.lost()
            self.runner.resume_workers_without_order()
        for action in actions:
            self.runner.start_action(action)
            if action.operation == "load":
                self.demand.record_load_started(action.lora_id, self._context.clock())
        self.queries.refresh_catalog()
        self.pass_ended.set()
        self._context.metrics.pass_seconds.observe(time.perf_counter() - began)
        return actions

    def planned_actions(self) -> tuple[DesiredPlacement, list[WorkerAction]]:
        """The placement and actions that a pass would decide now; starts nothing."""
        desired, _, actions, _ = self._decide()
        return desired, actions

    def _decide(
        self,
    ) -> tuple[DesiredPlacement, ObservedFleet, list[WorkerAction], Mapping[str, tuple[PlannedLoad, ...]]]:
        """The placement, observed fleet, actions and warm-up loads of a pass now.

        Starts no action; sets from the policy the demand window, and how long last requests are remembered.

        Placement, actions and loads are empty before `_can_decide`.
        """
        now = self._context.clock()
        observed = self.queries.observe()
        if not self._can_decide:
            return DesiredPlacement(), observed, [], {}
        observed = replace(observed, drains=self._drain_results(observed))
        self.demand.window_s = self.store.rules.demand_window_s
        intent = self.wanted_intent(self.store.intent, observed)
        self.demand.keep_asked_s = max(longest_ttl_s(intent, self.store.rules), self.store.rules.scale_down_after_s)
        self.demand.follow_names(current_versions(self.store.names.values()))
        demand = self.demand.snapshot(now)
        desired = place(intent, observed, demand, self.store.rules, now)
        warming = warm_up_loads(intent, observed, demand, self.store.rules, now)
        desired = replace(
            desired,
            workers_to_drain=tuple(
                name for name in desired.workers_to_drain if name not in self.operations.draining_workers
            ),
        )
        inspects = self.settings.inspects_in_flight - len(self.operations.inspecting)
        # Warm-up loads come after every load that a request may wait for, prefetches where none waits.
        steps = replace(
            desired,
            loads=(*desired.loads, *chain.from_iterable(warming.values())),
            fetches=(*desired.fetches, *prefetches(intent, observed, demand, self.store.rules, now)),
        )
        actions = diff(steps, observed, self.store.rules, inspects, now, adapters=intent.adapters)
        return desired, observed, actions, warming

    def wanted_intent(self, stored: Intent, observed: ObservedFleet) -> Intent:
        """The stored intent with the replicas that rollouts and published names need."""
        intent = self.names.with_replica_floors(stored)
        published = [name for name in self.store.names.values() if name.published is not None]
        if not published:
            return intent
        demand = self.demand.snapshot(self._context.clock())
        asked = self.retention.last_asked_at(demand)
        return with_published_floors(
            intent,
            published,
            observed.workers.values(),
            most_replicas=self.store.rules.max_replicas,
            reserve_slots=self.store.rules.reserve_slots,
            last_asked_at=asked,
            awaited=self.retention.awaited,
            idle=self.retention.idle_names(demand, asked),
            trained=self.retention.trained_names(),
        )

    def _drain_results(self, observed: ObservedFleet) -> dict[Pair, bool]:
        """(lora_id, worker_id) of each drain -> whether it has finished."""
        now = self._context.clock()
        routers = self.demand.routers.live(now), self.demand.routers.silent(now)
        return {
            pair: pair not in self.operations.unloading and (worker is None or is_drained(drain, *routers, worker, now))
            for pair, drain in self.operations.drains.items()
            for worker in (observed.workers.get(drain.worker_id),)
        }

    def _drop_finished(self) -> None:
        """Drop expired failures, lost workers, met requests for replicas, and adapters whose deletion is done."""
        now = self._context.clock()
        self.operations.failures.drop_expired(now)
        self.monitor.drop_lost_workers()
        wants = self.demand.open_wants(now)
        ready = self.queries.ready_workers_by_adapter() if wants else {}
        for lora_id, want in wants.items():
            if lora_id not in self.store.adapters or len(ready.get(lora_id, ())) >= want.replicas:
                self.demand.drop_want(lora_id)
                self.audit.forget_requester(lora_id)
        if self._can_decide:
            self.retention.retire()
            self._forget_left()
            self._finish_deletions()

    def _adopt(self) -> None:
        """Register what workers' settings name; copies under an engine's own names are loaded under the fleet's.

        A later pass does, if the store cannot be written now.
        """
        if not self.store.is_caught_up:
            return
        with contextlib.suppress(StoreError, OrchestratorUnavailable):
            for item in adopt_by_policy(self.reports, self.store):
                if item.is_foreign:
                    self.ensure_replicas(item.lora_id, self.allowed_replicas(item.lora_id, len(item.workers)))

    def _forget_left(self) -> None:
        """Once a minute, drop adopted adapters that are left nowhere, if all lists of configured adapters are read."""
        now = self._context.clock()
        entries = self.reports.workers.values()
        are_read = all(entry.report.lora.configured_digest in ("", *self.reports.configured) for entry in entries)
        if not are_read or now - self._looked_for_left_at < _LOOK_FOR_LEFT_S:
            return
        self._looked_for_left_at = now
        named = {
            lora.lora_id
            for entry in entries
            for lora in (*self.reports.configured_adapters(entry), *entry.report.lora.loaded_loras)
            if lora.is_configured
        }
        observed = self.queries.observe().workers.values()
        held = {lora_id for worker in observed for lora_id in worker.adapters if worker.has_in_slot(lora_id)}
        with contextlib.suppress(StoreError, OrchestratorUnavailable):
            self._forget_gone(self.retention.forget_left(named, held))

    def finish_deletions(self) -> None:
        """While we lead and may decide, drop deleted adapters that no worker holds, and request a pass in any case.

        The adapters are dropped at once, not in the pass, because thousands may be deleted in a row.
        """
        if self.leadership.is_leading and self._can_decide:
            self._finish_deletions()
            self.request_pass()

    def _finish_deletions(self) -> None:
        """Drop deleted adapters that no worker holds or inspects, with their demand, failures and metrics."""
        standing = map(self.store.adapters.__getitem__, sorted(self.store.intent.index.standing))
        deleting = [adapter for adapter in standing if adapter.is_deleting]
        if not deleting:
            return
        # Agents report a failed load for as long as they run; a deletion need not wait for it.
        held = {
            held.lora_id
            for worker in self.queries.observe().workers.values()
            for held in worker.adapters.values()
            if held.state != "failed"
        }
        held |= self.operations.inspecting.keys()
        gone = [adapter.lora_id for adapter in deleting if adapter.lora_id not in held]
        with self.store.together():
            for lora_id in gone:
                self.store.drop_adapter(lora_id)
        self._forget_gone(gone)

    def _forget_gone(self, gone: Iterable[str]) -> None:
        """Forget demand, failures and metrics of adapters that were dropped, and log each."""
        for lora_id in gone:
            self.demand.forget_adapter(lora_id)
            self.operations.failures.forget_adapter(lora_id)  # the name may be registered again with another source
            self._context.metrics.end_adapter_series(lora_id)
            self.audit.forget_requester(lora_id)
            log.info("adapter deleted", lora_id=lora_id)

    def _end_drains(self, desired: DesiredPlacement, observed: ObservedFleet) -> None:
        """End drains and reserved victims that the placement does not require any more.

        Not before `_can_decide`, nor where an operation on that worker relies on them.
        """
        if not self._can_decide:
            return
        wanted = required_drains(desired, observed)
        for pair in [
            pair for pair in self.operations.drains if pair not in wanted and not self.operations.busy[pair[1]]
        ]:
            del self.operations.drains[pair]
        self.operations.reserve_victims = {
            pair: lora_id
            for pair, lora_id in self.operations.reserve_victims.items()
            if pair in wanted or self.operations.busy[pair[1]]
        }

    def _count_moves(self, desired: DesiredPlacement) -> None:
        """Store what drains that have just begun must move, and until when they wait for that."""
        for worker_id, progress in desired.drains.items():
            intent = self.store.workers.get(worker_id)
            if intent is None or intent.state != "draining" or intent.moves is not None or progress.deadline is None:
                continue
            until = (
                self._context.wall() + progress.deadline - self._context.clock()
                if intent.until is None
                else intent.until
            )
            counted = replace(intent, until=until, moves=progress.moves, move_bytes=progress.move_bytes)
            self.store.put_worker(worker_id, counted)
            log.info(
                "worker drains",
                worker_id=worker_id,
                adapters=progress.moves,
                size_bytes=progress.move_bytes,
                expected_s=progress.expected_s,
                deadline_s=round(progress.deadline - self._context.clock(), 1),
            )

    def drain_progress(self, worker_id: str) -> DrainProgress | None:
        """How far the worker's drain is, by the last pass, or by one decided now where that did not know of the drain.

        None without a drain, or while nothing may be decided.
        """
        entry = self.reports.workers.get(worker_id)
        if entry is None or worker_state(entry, self.store.workers.get(worker_id)) != "draining":
            return None
        known = self.queries.last_pass.desired.drains.get(worker_id)
        return known or self.planned_actions()[0].drains.get(worker_id)

    def _usage_by_adapter(self) -> Mapping[str, tuple[float, float]]:
        """lora_id -> (requests since our start, requests a second now)."""
        rates = self.demand.snapshot(self._context.clock()).rates
        return {lora_id: (self.demand.totals(lora_id).sent, rate) for lora_id, rate in rates.items()}
