"""observe: agents' heartbeats in, and our own questions where a worker has gone silent."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from orchestrator.config import OrchestratorSettings
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import LeaseLost, WorkerFailed
from orchestrator.core.state import WantedReplicas
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.in_flight import OperationsInProgress
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.reconcile.tasks import BackgroundTasks
from orchestrator.reconcile.worker_reports import KnownWorker, ReportChange, WorkerReports
from orchestrator.store.store import IntentStore
from workers.wire import Metadata

log = structlog.get_logger()

MOST_AHEAD = 1 << 20
"""Terms that an agent may have obeyed and our store knows nothing of; one a second would take twelve days."""


class HeartbeatMonitor:
    """Keeps the fleet's reports true. `poke` asks for a pass."""

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: IntentStore,
        fleet: WorkerReports,
        demand: DemandBook,
        agents: AgentClient,
        underway: OperationsInProgress,
        reads: FleetQueries,
        tasks: BackgroundTasks,
        poke: Callable[[], None],
        is_leading: Callable[[], bool],
        on_lease_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._fleet = fleet
        self._demand = demand
        self._agents = agents
        self._underway = underway
        self._reads = reads
        self._tasks = tasks
        self._poke = poke
        self._is_leading = is_leading
        self._on_lease_lost = on_lease_lost
        self._claimed: dict[str, int] = {}
        self._refused: dict[str, int] = {}  # worker_id -> our epoch that it refused last
        self._clock = clock

    def hear(self, report: Metadata) -> None:
        """An agent's heartbeat, or its answer. Not taken where its epoch is none that any of us can have had.

        We would have to rise above it, and whoever could make it the highest number there is could end all terms.
        """
        if report.epoch > self._store.epoch + MOST_AHEAD:
            what = {"worker_id": report.instance_id, "epoch": report.epoch, "ours": self._store.epoch}
            log.warning("report not taken: nobody can have led under its epoch", **what)
            return
        known = self._fleet.entries.get(report.instance_id)
        is_same_engine = known is not None and known.report.engine_boot_id == report.engine_boot_id
        change = self._fleet.hear(report)
        if is_same_engine and not self._is_leading():
            change = replace(change, vanished=())  # by the doing of whoever leads, whose drains we do not know
        self._take(report.instance_id, change)
        if report.epoch > self._store.epoch and self._is_leading():
            # Either somebody newer leads, or our store is an old copy. The lease knows; a new term goes above it.
            message = f"worker {report.instance_id} has obeyed epoch {report.epoch}, ours is {self._store.epoch}"
            self._on_lease_lost(message)

    async def claim(self, worker_id: str) -> None:
        """Have the agent refuse every older leader, unless it does already. Raises WorkerFailed, LeaseLost."""
        entry, epoch = self._fleet.entries.get(worker_id), self._store.epoch
        if entry is None or entry.report.epoch >= epoch or self._claimed.get(worker_id) == epoch:
            return
        try:
            fresh = await self._agents.claim(
                entry.report.agent_url, key=f"claim-{epoch}", timeout_s=self._settings.probe_timeout_s
            )
        except LeaseLost as exc:
            self._judge_refusal(worker_id, epoch, exc)
            raise
        except WorkerFailed as exc:
            if exc.code not in ("not_found", "method_not_allowed"):
                raise
            # An agent of the version before: our first action there tells it the epoch.
        else:
            self._refused.pop(worker_id, None)
            if fresh.instance_id == worker_id:
                self.hear(fresh)
        self._claimed[worker_id] = epoch

    def _judge_refusal(self, worker_id: str, epoch: int, exc: LeaseLost) -> None:
        """Raises WorkerFailed where it is this one agent's trouble: one that cannot be claimed must end no more terms.

        It refused us before, the lease was still ours then, and though we are above that epoch and above all that it
        reports, it refuses again. It is not acted on; that needs no other leader.
        """
        if self._is_leading() and self._refused.get(worker_id, epoch) < epoch:
            message = f"worker {worker_id} refuses epoch {epoch}, though it reports none above it; restart its agent"
            raise WorkerFailed(f"{message}: {exc}", code="stale_epoch") from exc
        self._refused[worker_id] = epoch

    def claim_all(self) -> None:
        """Claim everybody, each in its own task; whoever cannot be reached now is claimed before it is acted on."""
        self._claimed.clear()
        self._refused = {name: at for name, at in self._refused.items() if name in self._fleet.entries}
        for worker_id in self._fleet.entries:
            self._tasks.spawn(self._try_to_claim(worker_id))

    async def _try_to_claim(self, worker_id: str) -> None:
        try:
            await self.claim(worker_id)
        except WorkerFailed as exc:
            log.info("worker not claimed yet", worker_id=worker_id, error=str(exc))
        except LeaseLost as exc:
            self._on_lease_lost(str(exc))

    def highest_epoch(self) -> int:
        """That any agent has reported."""
        return max((entry.report.epoch for entry in self._fleet.entries.values()), default=0)

    def probe_the_silent(self) -> None:
        """Ask workers that have not spoken for a while, each in its own task."""
        for worker_id in self._fleet.silent(self._settings.probe_after_s):
            self._tasks.spawn(self._probe(worker_id))

    def forget_the_lost(self) -> None:
        for worker_id in self._fleet.forget(self._settings.forget_after_s):
            log.info("worker forgotten", worker_id=worker_id)

    def _take(self, worker_id: str, change: ReportChange) -> None:
        """Adapters that went with an engine or a worker, and not by our doing, are wanted back."""
        now = self._clock()
        for lora_id in change.vanished:
            adapter = self._store.adapters.get(lora_id)
            if adapter is None or adapter.is_deleting or (lora_id, worker_id) in self._underway.drains:
                continue
            is_hot = self._demand.request_rate(lora_id, now) > 0
            there = len(self._reads.ready_on(lora_id))
            want = WantedReplicas(replicas=there + 1, may_evict=is_hot, is_repair=True, since=now)
            self._demand.add_want(lora_id, want, now + self._settings.wanted_for_s)
            log.info("adapter lost its place", lora_id=lora_id, worker_id=worker_id)
        if change.is_news:
            self._poke()

    async def _probe(self, worker_id: str) -> None:
        entry = self._fleet.entries.get(worker_id)
        if entry is None:
            return  # lost for long, and forgotten in the very pass that wanted it asked
        report, timeout_s = entry.report, self._settings.probe_timeout_s
        agent = asyncio.create_task(self._agents.metadata(report.agent_url, timeout_s=timeout_s))
        engine: asyncio.Task[frozenset[str] | None] | None = None
        try:
            # The engine is asked as soon as the agent takes long: a lost worker is known after one deadline, not two.
            await asyncio.wait([agent], timeout=timeout_s / 3)
            if not agent.done() or agent.exception() is not None:
                engine = asyncio.create_task(
                    self._agents.engine_models(report.transport.engine_url, timeout_s=timeout_s)
                )
            fresh = await _unless_away(agent)
            if fresh is not None and fresh.instance_id == worker_id:
                self.hear(fresh)
            elif fresh is not None and fresh.transport.engine_url == report.transport.engine_url:
                self._is_somebody_else(worker_id, entry, fresh)
            else:
                engine = engine or asyncio.create_task(
                    self._agents.engine_models(report.transport.engine_url, timeout_s=timeout_s)
                )
                await self._judge_by_its_engine(worker_id, entry, engine)
        finally:
            for task in (agent, engine):
                if task is not None:
                    task.cancel()

    def _is_somebody_else(self, worker_id: str, entry: KnownWorker, fresh: Metadata) -> None:
        """Another worker has its agent's address and its engine's: a pod's address is used again, or a name changed."""
        if self._is_heard_again(worker_id) or self._clock() - entry.heard_at < self._settings.lost_after_s:
            return
        change = self._fleet.nobody_answers(worker_id)
        if change.is_news:
            log.warning("worker lost", worker_id=worker_id, instead=fresh.instance_id, agent_url=fresh.agent_url)
        # With the very engine went nothing: all that it holds is the other worker's now.
        is_same_engine = fresh.engine_boot_id != "" and fresh.engine_boot_id == entry.report.engine_boot_id
        self._take(worker_id, replace(change, vanished=()) if is_same_engine else change)

    async def _judge_by_its_engine(
        self, worker_id: str, entry: KnownWorker, engine: "asyncio.Task[frozenset[str] | None]"
    ) -> None:
        """The agent does not answer. Is the engine gone, too?"""
        try:
            models = await engine
        except WorkerFailed:
            if self._is_heard_again(worker_id) or self._clock() - entry.heard_at < self._settings.lost_after_s:
                return
            change = self._fleet.nobody_answers(worker_id)
            if change.is_news:
                log.warning("worker lost", worker_id=worker_id, silent_s=round(self._clock() - entry.heard_at, 1))
            self._take(worker_id, change)
        else:
            if not self._is_heard_again(worker_id):
                self._take(worker_id, self._fleet.engine_answers(worker_id, models))

    def _is_heard_again(self, worker_id: str) -> bool:
        """A heartbeat that came while we probed beats what the probe found."""
        entry = self._fleet.entries.get(worker_id)
        return entry is None or self._clock() - entry.heard_at < self._settings.probe_after_s


async def _unless_away(agent: "asyncio.Task[Metadata]") -> Metadata | None:
    try:
        return await agent
    except WorkerFailed:
        return None
