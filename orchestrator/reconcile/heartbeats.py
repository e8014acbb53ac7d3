"""Observe: heartbeats of agents, and probes of workers that are silent."""

import asyncio
import hashlib
from dataclasses import replace
from math import inf

import structlog

from lorafleet.engine.worker_proofs import AgentUnproved, ProvedAgent
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.errors import InvalidAdapter, LeaseLost, StateConflict, WorkerFailed
from orchestrator.model.snapshot import Pair, WantedReplicas
from orchestrator.reconcile.agent_view import as_of
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.reconcile.worker_reports import KnownWorker, ReportChange
from workers.wire import HeldFiles, Metadata

log = structlog.get_logger()

MOST_AHEAD = 1 << 20
"""An agent's epoch may be ahead of our store by this much. At one term a second that takes twelve days."""


_AGENTS_EVERY_S = 1.0
_READ_AGAIN_S = 1.0
_MOST_AGENTS = 1000
"""Agents named to an agent: 30 KB, and enough to find any adapter at."""


class HeartbeatMonitor:
    """Keeps `WorkerReports` up to date, and makes each agent refuse older leaders."""

    def __init__(self, context: PassContext, queries: FleetQueries) -> None:
        self._context = context
        self._queries = queries
        self._claimed: dict[str, int] = {}
        self._agents_named: tuple[float, tuple[str, ...], str] = (
            -inf,
            (),
            "",
        )  # when it was listed, the list, its digest
        self._refused: dict[str, int] = {}  # worker_id -> our epoch that it refused last
        self._lists_tried: dict[str, tuple[int, float]] = {}  # configured_digest -> calls, time of the last

    async def require_proof(self, report: Metadata, key_id: str) -> None:
        """Have the agent prove the address of its heartbeat, unless it has; raises StateConflict `worker_unproved`.

        key_id  of the key that the heartbeat came with: the address must be proved by the same key
        """
        sender = ProvedAgent(report.instance_id, report.agent_boot_id, key_id)
        try:
            await self._context.agents.proofs.prove_sender(report.agent_url, sender)
        except AgentUnproved as exc:
            message = f"worker {report.instance_id} at {report.agent_url} gets no requests: {exc}"
            raise StateConflict(message, code="worker_unproved", param="metadata.agent_url") from exc

    def record_heartbeat(self, report: Metadata) -> None:
        """Record an agent's report, from a heartbeat or a probe.

        Requests a pass if the report can change a decision, and the replicas that the worker has lost. A report with an
        impossible epoch is dropped: our epoch must rise above every reported one, so an agent that reports the highest
        number would end all terms. A possible epoch above ours ends our term.
        """
        if report.epoch > self._context.store.epoch + MOST_AHEAD:
            fields = {"worker_id": report.instance_id, "epoch": report.epoch, "ours": self._context.store.epoch}
            log.warning("report dropped: no orchestrator can have led under its epoch", **fields)
            return
        known = self._context.reports.workers.get(report.instance_id)
        is_same_engine = known is not None and known.report.engine_boot_id == report.engine_boot_id
        change = self._context.reports.record_report(report)
        if is_same_engine and not self._context.leadership.is_leading:
            change = replace(change, vanished=())  # unloads by the leader, whose drains we do not know
        if not change.is_overtaken:
            self._note_fetches(report)
        self._apply_change(report.instance_id, change)
        if report.epoch > self._context.store.epoch and self._context.leadership.is_leading:
            # Either a newer leader exists or our store is an old copy. Read the lease; a new term gets a higher epoch.
            message = (
                f"worker {report.instance_id} has obeyed epoch {report.epoch}, ours is {self._context.store.epoch}"
            )
            self._context.leadership.on_newer_leader(message)

    def _note_fetches(self, report: Metadata) -> None:
        """Record how far the worker's downloads are, so that one that stalls keeps no other worker waiting."""
        now = self._context.clock()
        for lora in report.lora.loaded_loras:
            if lora.state == "downloading":
                pair = (lora.lora_id, report.instance_id)
                self._context.operations.note_fetched_bytes(pair, lora.fetched_bytes, now)
            elif lora.state == "loading" and lora.digest:
                self._context.files.note(report.instance_id, lora.digest, as_of(report))  # verified and installed

    def record_files(self, report: Metadata, files: HeldFiles) -> int:
        """Record what a heartbeat says of the worker's files; returns the number of the last change that is known.

        Requests a pass if it changes anything. A heartbeat that was overtaken changes nothing.
        """
        if self._context.reports.is_overtaken(report):
            disk = self._context.files.disks.get(report.instance_id)
            return 0 if disk is None else disk.seen
        if self._context.files.record(report, files):
            self._context.request_pass()
        return self._context.files.disks[report.instance_id].seen

    def agents_for(self, digest: str) -> tuple[tuple[str, ...] | None, str]:
        """URLs of the agents that answer (None: the reader has this list), and the list's digest; at most 1,000."""
        now = self._context.clock()
        if now - self._agents_named[0] >= _AGENTS_EVERY_S:
            entries = self._context.reports.workers.values()
            urls = sorted(filter(None, (agent_url_of(entry.report) for entry in entries if entry.reach == "heard")))
            named = tuple(urls[:_MOST_AGENTS])
            self._agents_named = now, named, hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]
        _, named, known = self._agents_named
        return (None if digest == known else named), known

    async def claim_worker(self, worker_id: str) -> None:
        """Send the agent our epoch, unless it has it, so that it refuses every older one; record the report it answers.

        Raises WorkerFailed, LeaseLost.
        """
        entry, epoch = self._context.reports.workers.get(worker_id), self._context.store.epoch
        if entry is None or entry.report.epoch >= epoch or self._claimed.get(worker_id) == epoch:
            return
        try:
            fresh = await self._context.agents.claim(
                entry.report.agent_url, timeout_s=self._context.settings.probe_timeout_s
            )
        except LeaseLost as exc:
            self._judge_refusal(worker_id, epoch, exc)
            raise
        except WorkerFailed as exc:
            if exc.code not in ("not_found", "method_not_allowed"):
                raise
            # An agent of an older version learns the epoch from the first action.
        else:
            self._refused.pop(worker_id, None)
            if fresh.instance_id == worker_id:
                self.record_heartbeat(fresh)
        self._claimed[worker_id] = epoch

    def _judge_refusal(self, worker_id: str, epoch: int, exc: LeaseLost) -> None:
        """Record that the agent refused our epoch.

        Raises WorkerFailed if it refuses a second, higher epoch of ours, though it reports no higher one. Then the
        agent is at fault, not our lease: the worker gets no actions, and our term goes on.
        """
        if self._context.leadership.is_leading and self._refused.get(worker_id, epoch) < epoch:
            message = f"worker {worker_id} refuses epoch {epoch}, though it reports none above it; restart its agent"
            raise WorkerFailed(f"{message}: {exc}", code="stale_epoch") from exc
        self._refused[worker_id] = epoch

    def claim_all_workers(self) -> None:
        """Forget former claims and claim all workers, each in its own task.

        An unreachable worker is claimed before its next action.
        """
        self._claimed.clear()
        self._refused = {name: at for name, at in self._refused.items() if name in self._context.reports.workers}
        for worker_id in self._context.reports.workers:
            self._context.tasks.spawn(self._try_to_claim(worker_id))

    async def _try_to_claim(self, worker_id: str) -> None:
        """Ask the agent to accept our epoch; a failure is logged, and a lost lease ends the term."""
        try:
            await self.claim_worker(worker_id)
        except WorkerFailed as exc:
            log.info("worker not claimed yet", worker_id=worker_id, error=str(exc))
        except LeaseLost as exc:
            self._context.leadership.on_newer_leader(str(exc))

    def highest_epoch(self) -> int:
        """The highest epoch that an agent has reported."""
        return max((entry.report.epoch for entry in self._context.reports.workers.values()), default=0)

    def probe_silent_workers(self) -> None:
        """Probe silent workers, each in its own task."""
        for worker_id in self._context.reports.workers_to_probe(self._context.settings.probe_after_s):
            self._context.tasks.spawn(self._probe_worker(worker_id))

    def read_configured_adapters(self) -> None:
        """Read the lists of adapters that workers' settings name and that are new, each in a task of its own.

        Workers with the same list are asked for it once. After a failure another one is asked, a second later.
        """
        now = self._context.clock()
        for digest, worker_ids in self._context.reports.unread_lists().items():
            tried, at = self._lists_tried.get(digest, (0, -inf))
            if now - at >= _READ_AGAIN_S:
                self._lists_tried[digest] = tried + 1, now
                self._context.tasks.spawn(self._read_configured(digest, worker_ids[tried % len(worker_ids)]))

    async def _read_configured(self, digest: str, worker_id: str) -> None:
        """Read a worker's list of configured adapters, and request a pass; a failure is logged."""
        entry = self._context.reports.workers.get(worker_id)
        if entry is None:
            return
        url, timeout_s = entry.report.agent_url, self._context.settings.probe_timeout_s
        try:
            found = await self._context.agents.configured_adapters(url, timeout_s=timeout_s)
        except (WorkerFailed, InvalidAdapter, LeaseLost) as exc:
            log.warning("configured adapters not read", worker_id=worker_id, error=str(exc))
            return
        self._lists_tried.pop(digest, None)
        self._context.reports.configured[digest] = found
        self._context.request_pass()

    def drop_lost_workers(self) -> None:
        """Drop and log workers that have been lost for `forget_after_s`."""
        dropped = self._context.reports.drop_lost(self._context.settings.forget_after_s)
        for worker_id in dropped:
            log.info("worker forgotten", worker_id=worker_id)
        if dropped:
            self._context.files.forget(self._context.reports.workers)

    def _apply_change(self, worker_id: str, change: ReportChange) -> None:
        """Request a pass where the change calls for one, and one more replica of each adapter that was lost.

        Adapters that are being deleted, or that drain or make room there, are left out. Each loss is logged.
        """
        now, operations = self._context.clock(), self._context.operations
        leaving = operations.drains.keys() | operations.loading_victims if change.vanished else frozenset[Pair]()
        for lora_id in change.vanished:
            adapter = self._context.store.adapters.get(lora_id)
            if adapter is None or adapter.is_deleting or (lora_id, worker_id) in leaving:
                continue
            is_hot = self._context.demand.request_rate(lora_id, now) > 0
            ready_count = len(self._queries.ready_workers(lora_id))
            want = WantedReplicas(replicas=ready_count + 1, may_evict=is_hot, is_repair=True, since=now)
            self._context.demand.add_want(lora_id, want, now + self._context.settings.wanted_for_s)
            log.info("adapter lost its place", lora_id=lora_id, worker_id=worker_id)
        if change.is_news:
            self._context.request_pass()

    async def _probe_worker(self, worker_id: str) -> None:
        """Ask the agent and, if it is slow or silent, the engine; record the report, or judge the worker without it.

        Does nothing for a worker that has been dropped.
        """
        entry = self._context.reports.workers.get(worker_id)
        if entry is None:
            return  # dropped in the pass that started this probe
        report, timeout_s = entry.report, self._context.settings.probe_timeout_s
        agent = asyncio.create_task(self._context.agents.metadata(report.agent_url, timeout_s=timeout_s))
        engine: asyncio.Task[frozenset[str] | None] | None = None
        try:
            # The engine is probed before the agent's deadline, so that a loss is known after one deadline, not two.
            await asyncio.wait([agent], timeout=timeout_s / 3)
            if not agent.done() or agent.exception() is not None:
                engine = asyncio.create_task(
                    self._context.agents.engine_models(report.transport.engine_url, timeout_s=timeout_s)
                )
            fresh = await _report_or_none(agent)
            if fresh is not None and fresh.instance_id == worker_id:
                self.record_heartbeat(fresh)
            elif fresh is not None and fresh.transport.engine_url == report.transport.engine_url:
                self._on_other_worker(worker_id, entry, fresh)
            else:
                engine = engine or asyncio.create_task(
                    self._context.agents.engine_models(report.transport.engine_url, timeout_s=timeout_s)
                )
                await self._judge_by_engine(worker_id, entry, engine)
        finally:
            for task in (agent, engine):
                if task is not None:
                    task.cancel()

    def _on_other_worker(self, worker_id: str, entry: KnownWorker, fresh: Metadata) -> None:
        """Mark, and log, a worker as lost whose URLs now belong to another worker: a reused address, or a new name.

        Not before it has been silent for `lost_after_s`. Adapters are requested again unless the engine is the same.
        """
        if self._has_reported_since(worker_id) or not self._is_long_silent(entry):
            return
        change = self._context.reports.mark_lost(worker_id)
        if change.is_news:
            log.warning("worker lost", worker_id=worker_id, instead=fresh.instance_id, agent_url=fresh.agent_url)
        # The same engine under a new worker id: nothing is lost.
        is_same_engine = fresh.engine_boot_id != "" and fresh.engine_boot_id == entry.report.engine_boot_id
        self._apply_change(worker_id, replace(change, vanished=()) if is_same_engine else change)

    async def _judge_by_engine(
        self, worker_id: str, entry: KnownWorker, engine: "asyncio.Task[frozenset[str] | None]"
    ) -> None:
        """Mark the worker as unmanaged if its engine answers; as lost if it does not and the silence is long enough.

        Not if the worker has reported meanwhile. A loss is logged.
        """
        try:
            models = await engine
        except WorkerFailed:
            if self._has_reported_since(worker_id) or not self._is_long_silent(entry):
                return
            change = self._context.reports.mark_lost(worker_id)
            if change.is_news:
                log.warning(
                    "worker lost", worker_id=worker_id, silent_s=round(self._context.clock() - entry.heard_at, 1)
                )
            self._apply_change(worker_id, change)
        else:
            if not self._has_reported_since(worker_id):
                self._apply_change(worker_id, self._context.reports.record_engine_models(worker_id, models))

    def _is_long_silent(self, entry: KnownWorker) -> bool:
        """Whether the worker has been silent for `lost_after_s`."""
        return self._context.clock() - entry.heard_at >= self._context.settings.lost_after_s

    def _has_reported_since(self, worker_id: str) -> bool:
        """Whether a heartbeat has come during the probe, and so outweighs its result."""
        entry = self._context.reports.workers.get(worker_id)
        return entry is None or self._context.clock() - entry.heard_at < self._context.settings.probe_after_s


async def _report_or_none(agent: "asyncio.Task[Metadata]") -> Metadata | None:
    """Wait for the agent's report; None when the agent does not answer."""
    try:
        return await agent
    except WorkerFailed:
        return None
