"""observe -> place -> diff -> act, again and again.

Level-driven: each pass starts from what is wanted and what was last reported, so a lost event, a failed action or a
restart costs one pass and nothing else. A pass itself never waits: it starts actions, each in its own task with its
own deadline, and every end of an action asks for the next pass. What is under way is part of what is observed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random

import structlog

from orchestrator.config import OrchestratorSettings
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import InvalidAdapter
from orchestrator.core.placement.place import place
from orchestrator.core.placement.pools import RouterQueues
from orchestrator.core.placement.warm_up import warm_up_loads
from orchestrator.core.plan import WorkerAction, diff, is_drained, required_drains
from orchestrator.core.state import (
    AdapterFailure,
    DesiredPlacement,
    ObservedFleet,
    Pair,
    PlannedLoad,
    RegisteredAdapter,
    WantedReplicas,
)
from orchestrator.leadership.leadership import Leadership
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.actor import ActionRunner
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.heartbeats import HeartbeatMonitor
from orchestrator.reconcile.in_flight import OperationsInProgress
from orchestrator.reconcile.queries import FleetQueries, LastPass
from orchestrator.reconcile.rollouts import RolloutController
from orchestrator.reconcile.tasks import BackgroundTasks
from orchestrator.reconcile.worker_reports import WorkerReports, is_warming
from orchestrator.store.audit import AuditLog
from orchestrator.store.backend import Subject
from orchestrator.store.store import NOBODY, IntentStore
from workers.wire import Metadata

log = structlog.get_logger()

_LATE_S = 0.05  # a heartbeat that is only just due is given this long, rather than a pass of its own


class Reconciler:
    """The loop and its passes, in front of the parts that observe, act and answer reads.

    on_pass   called at the end of each pass
    """

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: IntentStore,
        fleet: WorkerReports,
        demand: DemandBook,
        catalog: CatalogBook,
        agents: AgentClient,
        metrics: OrchestratorMetrics,
        leadership: Leadership,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: Random | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.fleet = fleet
        self.demand = demand
        self.queues = RouterQueues()
        self.catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._rng = rng or Random()
        self._leadership = leadership
        self._started_at = self._term_began_at = clock()
        self._due = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._audit = AuditLog(store)
        self._underway = underway = OperationsInProgress()
        self._reads = reads = FleetQueries(store=store, fleet=fleet, catalog=catalog, underway=underway, clock=clock)
        self.rollouts = RolloutController(
            store=store,
            demand=demand,
            catalog=catalog,
            reads=reads,
            is_settled=lambda: self._may_decide,
            clock=clock,
            wall=wall,
        )
        self._watcher = HeartbeatMonitor(
            settings=settings,
            store=store,
            fleet=fleet,
            demand=demand,
            agents=agents,
            underway=underway,
            reads=reads,
            tasks=self._tasks,
            poke=self.poke,
            is_leading=lambda: leadership.is_leading,
            on_lease_lost=leadership.doubt,
            clock=clock,
        )
        self._actor = ActionRunner(
            settings=settings,
            store=store,
            fleet=fleet,
            catalog=catalog,
            agents=agents,
            metrics=metrics,
            underway=underway,
            reads=reads,
            tasks=self._tasks,
            audit=self._audit,
            claim=self._watcher.claim,
            poke=self.poke,
            on_lease_lost=leadership.doubt,
            rng=self._rng,
            clock=clock,
        )
        metrics.count_usage(self._usage)
        metrics.watch(failed=reads.failed_count, leading=lambda: leadership.is_leading, epoch=lambda: store.epoch)
        self.on_pass: Callable[[], None] = lambda: None
        leadership.prepare, leadership.on_begin, leadership.on_end = self.prepare_term, self.begin_term, self.end_term

    # -- terms ------------------------------------------------------------------------------------------------

    async def prepare_term(self) -> None:
        """Before we lead: the intent as it is stored now, and an epoch of our own that is stored too.

        Raises OrchestratorError.
        """
        await self.store.catch_up()
        self.take_up()
        await self.store.saved()

    def take_up(self) -> None:
        """Read the intent again, and rise above every epoch that anybody has seen. Raises StoreError."""
        self.store.reload()
        self.store.expire_tombstones(self.settings.tombstones_kept_s)
        self.store.raise_epoch(max(self.store.epoch, self._watcher.highest_epoch()))

    def begin_term(self) -> None:
        """We lead, under an epoch that nobody has had."""
        self._term_began_at = self._clock()
        # Whoever has led since our last term may have been told to forget them, or that an adapter is another one.
        self._underway.failures.clear()
        self.catalog.begin()
        self._watcher.claim_all()
        self.poke()

    def end_term(self) -> None:
        """Somebody else may lead: all that is under way is dropped. Agents finish what they were told, or refuse it."""
        self._tasks.cancel()
        self._underway.clear()
        self.store.let_go()
        self.catalog.changed.notify()  # whoever follows it is to follow another's

    # -- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pass after pass, until cancelled; the worst of them costs a wait, never the loop."""
        wait_s = 0.0
        while True:
            try:
                self._due.clear()
                began = time.perf_counter()
                self.run_pass()
                wait_s = 0.0
                # Every end of an action asks for a pass: with thousands of adapters those leave time for others.
                await asyncio.sleep(min(1.0, time.perf_counter() - began))
            except Exception:
                wait_s = min(30.0, max(0.2, wait_s * 2))
                log.exception("pass failed", again_in_s=wait_s)
                self._metrics.passes_failed.inc()
                await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
                continue
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the event.
                async with asyncio.timeout(self._next_pass_s()):
                    await self._due.wait()

    def poke(self) -> None:
        """Something changed: pass now rather than at the next interval."""
        self._due.set()

    async def changed(self, *about: Subject) -> None:
        """Intent about these changed: routers may see it now, a pass is due, and it is durable on return.

        Raises OrchestratorError when it is not.
        """
        self.taken_in()
        await self.store.saved(about)

    def taken_in(self) -> None:
        """Intent changed where it is kept: routers may see it now, and a pass is due."""
        self.refresh_catalog()
        self.poke()

    def ensure(self, lora_id: str, replicas: int, by: str = NOBODY, tenants: Iterable[str] = ()) -> None:
        """Somebody needs so many replicas of this adapter; a pass is due if that is news. `tenants`: as in Want."""
        self.asked(lora_id, by)
        now = self._clock()
        want = WantedReplicas(replicas=replicas, since=now, tenants=frozenset(tenants))
        if self.demand.add_want(lora_id, want, now + self.settings.wanted_for_s):
            self.poke()

    def asked(self, lora_id: str, by: str) -> None:
        """Who wants this adapter loaded, or gone: the audit log will say so."""
        self._audit.asked(lora_id, by)

    def clipped(self, lora_id: str, replicas: int) -> int:
        """No more replicas than the policy allows, however many are asked for."""
        adapter = self.store.adapters.get(lora_id)
        most = None if adapter is None else adapter.max_replicas
        return min(replicas, self.store.rules.max_replicas if most is None else most)

    def forget_failures(self, lora_id: str) -> None:
        """Let the adapter be tried anywhere again."""
        self._underway.failures.forget_adapter(lora_id)

    @property
    def has_drains(self) -> bool:
        return bool(self._underway.drains)

    async def stop(self) -> None:
        """Let go of everything under way. Agents finish what they began; the next start sees what came of it."""
        await self._tasks.drop()

    async def settled(self) -> None:
        """Until no action is under way; for tests and for an orderly look at the result of one pass."""
        await self._tasks.done()

    @property
    def is_settled(self) -> bool:
        """Whether store and fleet have had time to speak since our start, so that silence means absence."""
        return self.store.is_read and self._clock() - self._started_at >= self.settings.settle_s

    @property
    def _may_decide(self) -> bool:
        """Whether the fleet has had time to speak since our term began, too, and the store has said all."""
        has_spoken = self._clock() - self._term_began_at >= self.settings.settle_s
        return self.is_settled and has_spoken and self.store.is_caught_up

    def _next_pass_s(self) -> float:
        """Until the interval is over, we may decide at last, or somebody will have been silent for too long."""
        waits = [self.settings.pass_interval_s]
        settled_in = max(self._started_at, self._term_began_at) + self.settings.settle_s - self._clock()
        silent_in = self.fleet.next_silent_s(self.settings.probe_after_s)
        waits += [settled_in] if settled_in > 0 else []
        waits += [silent_in + _LATE_S] if silent_in is not None else []
        return min(waits)

    # -- one pass ---------------------------------------------------------------------------------------------

    def run_pass(self) -> list[WorkerAction]:
        """Observe, place, diff, act. Returns what was started. Safe to repeat, to miss, and to interrupt."""
        began = time.perf_counter()
        self._watcher.probe_the_silent()
        if not self._leadership.is_leading:
            return []
        self._drop_what_is_over()
        self.rollouts.turn()
        desired, observed, actions, warming = self._decide()
        if desired.frozen_reason is not None and self._reads.view.desired.frozen_reason is None:
            log.warning("moves frozen", reason=desired.frozen_reason)
        self._reads.view = LastPass(observed, desired, warming)
        self._end_drains(desired)
        for action in actions:
            self._actor.start(action)
            if action.operation == "load":
                self.demand.record_load_started(action.lora_id, self._clock())
        self._metrics.frozen.set(desired.frozen_reason is not None)
        self.refresh_catalog()
        self.on_pass()
        self._metrics.pass_seconds.observe(time.perf_counter() - began)
        return actions

    def plan(self) -> tuple[DesiredPlacement, list[WorkerAction]]:
        """What a pass would decide now; starts nothing."""
        desired, _, actions, _ = self._decide()
        return desired, actions

    def _decide(
        self,
    ) -> tuple[DesiredPlacement, ObservedFleet, list[WorkerAction], Mapping[str, tuple[PlannedLoad, ...]]]:
        now = self._clock()
        observed = self.observe()
        if not self._may_decide:
            return DesiredPlacement(), observed, [], {}
        self.demand.window_s = self.store.rules.demand_window_s
        intent, demand = self.rollouts.with_replica_floors(self.store.intent), self.demand.snapshot(now)
        desired = place(intent, observed, demand, self.store.rules, now)
        warming = warm_up_loads(intent, observed, demand, self.store.rules, now)
        desired = replace(
            desired,
            workers_to_drain=tuple(name for name in desired.workers_to_drain if name not in self._underway.leaving),
        )
        inspects = self.settings.inspects_in_flight - len(self._underway.inspecting)
        # After everything that somebody may wait for.
        steps = replace(desired, loads=(*desired.loads, *chain.from_iterable(warming.values())))
        actions = diff(steps, observed, self._drained(observed), self.store.rules, inspects, now)
        return desired, observed, actions, warming

    def _drained(self, observed: ObservedFleet) -> dict[Pair, bool]:
        now, routers = self._clock(), self.demand.live_routers(self._clock())
        return {
            pair: pair not in self._underway.unloading and (worker is None or is_drained(drain, routers, worker, now))
            for pair, drain in self._underway.drains.items()
            for worker in (observed.workers.get(drain.worker_id),)
        }

    def _drop_what_is_over(self) -> None:
        now = self._clock()
        self._underway.failures.drop_expired(now)
        self._watcher.forget_the_lost()
        wants = self.demand.open_wants(now)
        ready = self.ready_table() if wants else {}
        for lora_id, want in wants.items():
            if lora_id not in self.store.adapters or len(ready.get(lora_id, ())) >= want.replicas:
                self.demand.drop_want(lora_id)
                self._audit.served(lora_id)
        if self._may_decide:
            self._finish_deletions()

    def finish_deletions(self) -> None:
        """Forget what is deleted and held nowhere, without all else that a pass does: thousands may go in a row."""
        if self._leadership.is_leading and self._may_decide:
            self._finish_deletions()
            self.poke()

    def _finish_deletions(self) -> None:
        deleting = [adapter for adapter in self.store.adapters.values() if adapter.is_deleting]
        if not deleting:
            return
        # That a load failed is told by an agent for as long as it runs; there is nothing of it to wait for.
        held = {
            held.lora_id
            for worker in self.observe().workers.values()
            for held in worker.adapters.values()
            if held.state != "failed"
        }
        held |= self._underway.inspecting.keys()
        for adapter in deleting:
            if adapter.lora_id not in held:
                self.store.drop_adapter(adapter.lora_id)
                self.demand.forget_adapter(adapter.lora_id)
                self.forget_failures(adapter.lora_id)  # registered anew, it may name another source
                self._metrics.forget(adapter.lora_id)
                self._audit.served(adapter.lora_id)
                log.info("adapter deleted", lora_id=adapter.lora_id)

    def _end_drains(self, desired: DesiredPlacement) -> None:
        """A mark that no pass asks for any more is lifted, unless an action that relies on it is under way."""
        if not self._may_decide:
            return
        wanted = required_drains(desired)
        for pair in [pair for pair in self._underway.drains if pair not in wanted and not self._underway.busy[pair[1]]]:
            del self._underway.drains[pair]
        self._underway.reserve_victims = {
            pair: lora_id
            for pair, lora_id in self._underway.reserve_victims.items()
            if pair in wanted or self._underway.busy[pair[1]]
        }

    def _usage(self) -> Mapping[str, tuple[float, float]]:
        """lora_id -> (requests in all since our start, requests a second now)."""
        rates = self.demand.snapshot(self._clock()).rates
        return {lora_id: (self.demand.traffic_totals(lora_id).requests, rate) for lora_id, rate in rates.items()}

    # -- what others ask ---------------------------------------------------------------------------------------

    @property
    def is_leading(self) -> bool:
        return self._leadership.is_leading

    @property
    def leader_url(self) -> str | None:
        """Where the orchestrator is that leads; None when that is not known."""
        return self._leadership.leader_url

    @property
    def view(self) -> LastPass:
        """What the last pass saw and decided."""
        return self._reads.view

    @property
    def failures(self) -> Mapping[Pair, AdapterFailure]:
        return self._underway.failures.by_pair

    def hear(self, report: Metadata) -> None:
        """An agent's heartbeat."""
        self._watcher.hear(report)

    def is_warm(self, worker_id: str) -> bool:
        """Whether a worker that waits to become ready has what it should hold, or is given nothing."""
        entry = self.fleet.entries.get(worker_id)
        if entry is not None and not is_warming(entry, self.store.workers.get(worker_id)):
            return True
        return self._reads.view.warming.get(worker_id) == ()  # None: no pass has looked at it yet

    def in_flight(self, worker_id: str) -> int:
        """Requests that routers have at that worker's engine."""
        return self.queues.in_flight(worker_id, self._clock())

    def observe(self) -> ObservedFleet:
        """The fleet now, with what we have under way in it."""
        return self._reads.observe()

    async def why_forbidden(self, source: str, worker_ids: Sequence[str]) -> InvalidAdapter | None:
        """Why none of these workers may fetch this source; None where one may, or does not say."""
        return await self._actor.why_forbidden(source, worker_ids)

    async def inspect_only(self, adapter: RegisteredAdapter, worker_id: str) -> RegisteredAdapter:
        """A dry run: what an agent says about bytes that nobody registered. Raises InvalidAdapter or WorkerFailed."""
        return await self._actor.inspect_only(adapter, worker_id)

    def undrained(self, worker_id: str) -> None:
        """The worker may be asked to drain again, one day."""
        self._underway.leaving.discard(worker_id)

    def serve_again(self, worker_id: str) -> None:
        """An agent that was told to drain, or says that it does, takes requests again."""
        entry = self.fleet.entries.get(worker_id)
        if worker_id in self._underway.leaving or (entry is not None and entry.report.state == "draining"):
            self._actor.undrain(worker_id)
        self.undrained(worker_id)

    def ready_on(self, lora_id: str) -> list[str]:
        """Workers where the adapter answers requests now: the right bytes, not draining."""
        return self._reads.ready_on(lora_id)

    def ready_table(self) -> dict[str, list[str]]:
        """`ready_on` of every adapter that is ready anywhere, in one walk over the fleet."""
        return self._reads.ready_table()

    def loading_on(self, lora_id: str) -> list[str]:
        return self._reads.loading_on(lora_id)

    def expected_s(self, lora_id: str) -> float | None:
        """Seconds until it should be there; None when no load was measured yet."""
        return self._reads.expected_s(lora_id)

    def quarantine(self, lora_id: str) -> str | None:
        """Why the adapter cannot be loaded anywhere; None while it may be tried."""
        return self._reads.quarantine(lora_id)

    def last_error(self, lora_id: str) -> str | None:
        """Why the adapter is not, or not often enough, where it should be."""
        return self._reads.last_error(lora_id)

    def fits_nowhere(self, lora_id: str) -> bool:
        """Whether no worker could hold the adapter, by the last pass; `last_error` says why."""
        return lora_id in self.view.desired.fits_nowhere

    def failed(self) -> dict[str, str]:
        """lora_id -> why, of the adapters that can be used nowhere."""
        return self._reads.failed()

    def states(self) -> dict[str, tuple[str, str | None]]:
        """lora_id -> (adapter state, error), for all registered adapters at once."""
        return self._reads.states()

    def state_of(self, adapter: RegisteredAdapter, ready: Mapping[str, Sequence[str]]) -> str:
        """One word for an adapter. `ready`: where it is ready, as `ready_table` says."""
        return self._reads.state_of(adapter, ready)

    def refresh_catalog(self) -> None:
        """Make what routers follow agree with what is known now."""
        self._reads.refresh_catalog()
