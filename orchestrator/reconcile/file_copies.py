"""Act on copies: have agents keep, fetch and release files that are nowhere but in the fleet."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

import structlog

from lorafleet.identity import fleet_digest
from lorafleet.service.loops import ChangeSignal
from lorafleet.service.tasks import BackgroundTasks
from orchestrator.agentless.transport import agent_url_of
from orchestrator.config import OrchestratorSettings
from orchestrator.core.copies import CopyPlan, CopyState, KeepStep, ReleaseStep, WorkerDisk, plan_copies
from orchestrator.core.errors import InvalidAdapter, LeaseLost, WorkerFailed
from orchestrator.core.failures import LONGEST_S, FailureBook
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.held_files import HeldFilesBook, ReportedDisk
from orchestrator.reconcile.worker_reports import KnownWorker, WorkerReports, worker_state
from orchestrator.store.store import IntentStore
from workers.wire import KeepRequest, ReleaseRequest

log = structlog.get_logger()

_ABSENT_S = 10.0
"""A worker silent for less still counts with its copies: agents restart in that time. A guess."""


class FileCopies:
    """Keeps `fleet_copies` copies of the files that only the fleet has.

    states   digest -> state, of those that are not simply kept
    changed  wakes those that wait for copies
    """

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: IntentStore,
        reports: WorkerReports,
        files: HeldFilesBook,
        agents: AgentClient,
        metrics: OrchestratorMetrics,
        tasks: BackgroundTasks,
        claim: Callable[[str], Awaitable[None]],
        request_pass: Callable[[], None],
        on_lease_lost: Callable[[str], None],
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._reports = reports
        self._files = files
        self._agents = agents
        self._metrics = metrics
        self._tasks = tasks
        self._claim = claim
        self._request_pass = request_pass
        self._on_lease_lost = on_lease_lost
        self._rng = rng
        self._clock = clock
        self._failures = FailureBook()
        self._under_way: set[tuple[str, str]] = set()
        self._arriving: Counter[str] = Counter()
        self._releasing: set[str] = set()
        self._dropping: set[tuple[str, str]] = set()
        self.states: Mapping[str, CopyState] = {}
        self.changed = ChangeSignal()

    # --- a pass --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Decide, and start what is to be done, each call in a task of its own."""
        now = self._clock()
        self._failures.drop_expired(now)
        needs = self._needs()
        plan = self._plan(needs, now)
        for digest, state in plan.states.items():
            before = self.states.get(digest)
            if state.status == "lost" and (before is None or before.status != "lost"):
                log.error("the files of an adapter are lost", digest=digest, reason=state.reason)
        self.states = plan.states
        for keep in plan.keeps:
            self._under_way.add((keep.digest, keep.worker_id))
            self._tasks.spawn(self._keep(keep))
        for release in plan.releases:
            if release.worker_id not in self._releasing:
                self._releasing.add(release.worker_id)
                self._tasks.spawn(self._release(release))
        self._metrics.set_copies(len(needs), Counter(state.status for state in plan.states.values()))

    def lost(self) -> dict[str, str]:
        """lora_id -> reason, of registered adapters whose files are lost."""
        lost = {digest: state.reason for digest, state in self.states.items() if state.status == "lost"}
        if not lost:
            return {}
        return {
            lora_id: f"files_lost: {lost[digest]}"
            for lora_id, adapter in self._store.adapters.items()
            if (digest := fleet_digest(adapter.source)) in lost and digest is not None
        }

    def state(self, digest: str) -> CopyState:
        """How the files of a digest are kept."""
        return self.states.get(digest) or CopyState(status="kept", kept_by=self.kept_by(digest))

    def kept_by(self, digest: str) -> tuple[str, ...]:
        """Workers that keep the files of a digest, by their reports."""
        return tuple(sorted(self._files.keepers.get(digest, ())))

    async def wait_kept(self, digest: str, copies: int, *, timeout_s: float) -> tuple[str, ...]:
        """Wait until so many workers keep the files of a digest; returns those that do when that is so, or time is up.

        The adapter must be registered with the fleet's own source, or the copies be made by the caller.
        """
        self._request_pass()
        await self.changed.until(lambda: len(self.kept_by(digest)) >= copies, timeout_s=timeout_s)
        return self.kept_by(digest)

    def on_report(self) -> None:
        """Wake those that wait for copies, because a report has come."""
        self.changed.notify()

    def clear(self) -> None:
        """Forget failures, calls under way and states at the end of a term; the next leader reports the copies."""
        self._failures.clear()
        self._under_way.clear()
        self._releasing.clear()
        self._dropping.clear()
        self.states = {}
        self._metrics.set_copies(0, {})

    @contextmanager
    def arriving(self, digest: str) -> Iterator[None]:
        """Release no copy of a digest during the block: it is about to be registered, perhaps after a deletion."""
        self._arriving[digest] += 1
        try:
            yield
        finally:
            self._arriving[digest] -= 1
            if not self._arriving[digest]:
                del self._arriving[digest]

    def _needs(self) -> dict[str, str]:
        """digest -> base model, of registered adapters whose files only the fleet has."""
        return {
            digest: adapter.base_model or ""
            for adapter in self._store.adapters.values()
            if (digest := fleet_digest(adapter.source)) is not None
        }

    def _plan(self, needs: Mapping[str, str], now: float) -> CopyPlan:
        """The steps of this pass."""
        strays = self._files.holders.keys() - needs.keys()
        deleted = self._store.dropped_digests() - self._arriving.keys() if strays else frozenset[str]()
        self._dropping = {pair for pair in self._dropping if pair[0] in deleted}
        disks = [
            self._disk(entry, self._files.disks[worker_id], now)
            for worker_id, entry in self._reports.workers.items()
            if worker_id in self._files.disks and agent_url_of(entry.report)
        ]
        return plan_copies(
            needs,
            disks,
            self._files.keepers,
            copies=self._settings.fleet_copies,
            under_way=self._under_way,
            blocked=self._failures.by_pair.keys(),
            deleted=deleted,
            dropping=self._dropping,
        )

    def _disk(self, entry: KnownWorker, disk: ReportedDisk, now: float) -> WorkerDisk:
        """A worker's disk as the decision sees it."""
        report = entry.report
        intent = self._store.workers.get(report.instance_id)
        is_going = entry.is_terminating or (intent is not None and intent.state == "draining")
        is_heard = entry.reach == "heard"
        takes_copies = is_heard and not is_going and worker_state(entry, intent) in ("ready", "cordoned", "starting")
        return WorkerDisk(
            worker_id=report.instance_id,
            disk_id=disk.disk_id,
            base_model=report.model.base_model,
            zone=report.zone,
            node=report.node,
            files=disk.files,
            is_whole=disk.is_whole,
            is_safe=not is_going and (is_heard or now - entry.heard_at < _ABSENT_S),
            is_reachable=is_heard,
            # An agent of an older version keeps nothing.
            takes_copies=takes_copies and disk.seen is not None,
        )

    # --- calls to agents -----------------------------------------------------------------------------------------

    async def _keep(self, step: KeepStep) -> None:
        """Have a worker keep the files of a digest; record the result and request a pass.

        A stale epoch ends our term.
        """
        pair = step.digest, step.worker_id
        try:
            await self._claim(step.worker_id)
            urls = tuple(filter(None, map(self._agent_url, step.neighbours)))
            ask = KeepRequest(digest=step.digest, neighbours=urls)
            url, timeout_s = self._agent_url(step.worker_id), self._settings.load_timeout_s
            at = await self._agents.keep_files(url, ask, timeout_s=timeout_s)
        except LeaseLost as exc:
            self._on_lease_lost(str(exc))
        except (InvalidAdapter, WorkerFailed) as exc:
            log.warning("copy not made", digest=step.digest, worker_id=step.worker_id, error=str(exc))
            expiry_s = self._store.rules.failure_expiry_s
            self._failures.record_failure(
                pair, exc.code, str(exc), first_s=expiry_s, most_s=LONGEST_S, now=self._clock(), rng=self._rng
            )
        else:
            self._failures.record_success(pair)
            self._files.note(step.worker_id, step.digest, at, is_kept=True)
            log.info("copy kept", digest=step.digest, worker_id=step.worker_id)
        finally:
            self._under_way.discard(pair)
            self.changed.notify()
            self._request_pass()

    async def _release(self, step: ReleaseStep) -> None:
        """Let a worker delete files again; a failure is logged, and the next pass tries again."""
        try:
            await self._claim(step.worker_id)
            ask = ReleaseRequest(digests=step.digests, is_dropped=step.is_dropped)
            url, timeout_s = self._agent_url(step.worker_id), self._settings.unload_timeout_s
            at = await self._agents.release_files(url, ask, timeout_s=timeout_s)
        except LeaseLost as exc:
            self._on_lease_lost(str(exc))
        except (InvalidAdapter, WorkerFailed) as exc:
            log.warning("copies not released", worker_id=step.worker_id, error=str(exc))
        else:
            self._files.note_released(step.worker_id, step.digests, at)
            if step.is_dropped:
                self._dropping |= {(digest, step.worker_id) for digest in step.digests}
        finally:
            self._releasing.discard(step.worker_id)

    def _agent_url(self, worker_id: str) -> str:
        """URL of a worker's agent; "" without one."""
        entry = self._reports.workers.get(worker_id)
        return "" if entry is None else agent_url_of(entry.report)
