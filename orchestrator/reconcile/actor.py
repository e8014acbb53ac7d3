"""Act: each action is one call to an agent, in a task of its own with a deadline. Its result is recorded."""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from lorafleet.identity import fleet_digest
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.copies import NEIGHBOURS_NAMED
from orchestrator.core.errors import (
    InvalidAdapter,
    LeaseLost,
    OrchestratorUnavailable,
    StateConflict,
    StoreError,
    WorkerFailed,
)
from orchestrator.core.failures import ANYWHERE, ENGINE_REFUSALS, LONGEST_S, MOST_TRIED, SOURCE_CODES, failure_scope
from orchestrator.core.plan import AdapterDrain, WorkerAction, ends_move
from orchestrator.model.adapter_documents import AcceptanceAnswer
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.cards import AdapterCard, large_change, large_growth
from orchestrator.model.policy import LargeWeightsMode, acceptance_mode
from orchestrator.model.snapshot import ReportedAdapter, lora_id_of_held
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.heartbeats import HeartbeatMonitor
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.store.audit import AuditLog
from orchestrator.store.tables import Subject
from workers.wire import (
    MOST_NEIGHBOURS,
    CheckRequest,
    DrainRequest,
    InspectRequest,
    LoadRequest,
    UnloadRequest,
    WorkerAdapter,
)

log = structlog.get_logger()

# Failures that pass by themselves, and for how long one blocks: less than a restart takes, more than a pass.
PASSING_CODES = frozenset(
    {"worker_unreachable", "worker_unproved", "engine_unreachable", "engine_down", "not_ready", "draining"}
)
PASSING_S = 1.0
_CHECK_S = 1.0  # without an answer by then the inspection decides


@dataclass(frozen=True, slots=True)
class _ActionResult:
    """How an action ended. `outcome`: as in `AuditLog.record_action`; `note`: the agent's on a loaded adapter."""

    outcome: str
    code: str
    error: str
    note: str = ""


class ActionRunner:
    """Runs actions on agents and records operations in progress, failures and the audit log."""

    def __init__(self, context: PassContext, queries: FleetQueries, monitor: HeartbeatMonitor, audit: AuditLog) -> None:
        self._context = context
        self._queries = queries
        self._monitor = monitor
        self._audit = audit

    def start_action(self, action: WorkerAction) -> None:
        """Log an action, start it and record it as in progress.

        A drain of an adapter only changes the catalog; all others call an agent in a task. Loads and unloads make the
        worker busy.
        """
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        evict = action.evict or action.evict_after
        log.info("action", operation=action.operation, **where, reason=action.reason, evict=evict)
        operations, settings = self._context.operations, self._context.settings
        if action.operation == "drain" and action.lora_id:
            self._mark_draining(action)
        elif action.operation == "drain":
            operations.draining_workers.add(action.worker_id)
            self._context.tasks.spawn(self._drain_worker(action))
        elif action.operation == "inspect":
            operations.inspecting[action.lora_id] = action.worker_id
            self._context.tasks.spawn(self._run_action(action, self._inspect(action), settings.inspect_timeout_s))
        elif action.operation == "fetch":
            adapter, pair = self._context.store.adapters[action.lora_id], (action.lora_id, action.worker_id)
            operations.fetching[pair] = adapter.digest or ""
            operations.note_fetched_bytes(pair, 0, self._context.clock())
            self._context.tasks.spawn(self._run_action(action, self._fetch(action, adapter), settings.load_timeout_s))
        elif action.operation == "check":
            adapter = self._context.store.adapters[action.lora_id]
            operations.checking[action.worker_id] = action.lora_id
            work = self._check_copy(action, adapter)
            self._context.tasks.spawn(self._run_action(action, work, settings.load_timeout_s))
        elif action.operation == "load":
            adapter = self._context.store.adapters[action.lora_id]
            pair = (action.lora_id, action.worker_id)
            operations.busy[action.worker_id] += 1
            operations.loading[pair] = adapter.digest or ""
            operations.load_began[pair] = self._context.clock()
            if action.evict is not None:
                operations.loading_victims.add((action.evict, action.worker_id))
            self._context.tasks.spawn(self._run_action(action, self._load(action, adapter), settings.load_timeout_s))
        else:
            operations.busy[action.worker_id] += 1
            operations.unloading.add((action.lora_id, action.worker_id))
            self._context.tasks.spawn(self._run_action(action, self._unload(action), settings.unload_timeout_s))

    async def _run_action(self, action: WorkerAction, work: Coroutine[Any, Any, str | None], deadline_s: float) -> None:
        """Run one action to its end or deadline, record its result, refresh the catalog and request a pass.

        Waits first until the intent behind it is durable and the agent has our epoch. A stale epoch ends our term.
        """
        began, requester = self._context.clock(), self._audit.requester(action.lora_id)
        moves = self._queries.last_pass.desired.memory.moves
        asked = self._inspect_request(action)
        end = _ActionResult("dropped", "", "")
        try:
            async with asyncio.timeout(deadline_s):
                # The intent behind the action must be durable before the action.
                await self._context.store.wait_durable(_required_subjects(action))
                await self._monitor.claim_worker(action.worker_id)
                note = await work
            end = _ActionResult("ok", "", "", note or "")
            self._record_success(action)
        except LeaseLost as exc:
            end = _ActionResult("dropped", exc.code, str(exc))
            self._context.leadership.on_newer_leader(str(exc))
        except (
            StateConflict,
            StoreError,
            OrchestratorUnavailable,
        ) as exc:  # raised by the store: the next pass decides anew
            end = _ActionResult("dropped", exc.code, str(exc))
        except InvalidAdapter as exc:
            end = _ActionResult("refused", exc.code, str(exc))
            if self._inspect_request(action) == asked:  # otherwise the adapter has changed meanwhile
                with _log_store_errors():
                    self._record_refusal(action, exc)
        except WorkerFailed as exc:
            end = _ActionResult("failed", exc.code, str(exc))
            self._record_failure(action, exc.code, str(exc), exc.retry_after_s)
        except TimeoutError:
            end = _ActionResult("timeout", "deadline", f"{action.operation} not done within {deadline_s} s")
            if action.operation != "fetch":  # which may have waited for the fetches of loads
                self._record_failure(action, end.code, end.error, None)
        except Exception as exc:
            end = _ActionResult("error", "internal_error", f"{action.operation}: {exc!r}")
            log.exception("action broke", operation=action.operation, lora_id=action.lora_id)
            self._record_failure(action, end.code, end.error, None)
        finally:
            work.close()  # it may never have been started
            self._record_end(action, end, requester, self._context.clock() - began)
            if end.outcome != "dropped" and ends_move(action, end.outcome, moves):
                self._context.metrics.operations.labels("rebalance", end.outcome).inc()
        self._queries.refresh_catalog()
        self._context.request_pass()

    def _record_end(self, action: WorkerAction, end: _ActionResult, requester: str, duration_s: float) -> None:
        """Remove the action from the operations in progress; record it in metrics and audit log.

        A dropped action is not audited.
        """
        operations = self._context.operations
        if action.operation == "inspect":
            operations.inspecting.pop(action.lora_id, None)
        elif action.operation == "check":
            operations.checking.pop(action.worker_id, None)
        elif action.operation == "fetch":
            operations.fetching.pop((action.lora_id, action.worker_id), None)
            operations.fetch_moved.pop((action.lora_id, action.worker_id), None)
        else:
            operations.busy[action.worker_id] -= 1
        if action.operation == "load":
            digest = operations.loading.pop((action.lora_id, action.worker_id), "")
            if action.keeps_files:
                operations.copying.discard((digest, action.worker_id))
            operations.load_began.pop((action.lora_id, action.worker_id), None)
            operations.fetch_moved.pop((action.lora_id, action.worker_id), None)
            if action.evict is not None:
                operations.loading_victims.discard((action.evict, action.worker_id))
        elif action.operation == "unload":
            operations.unloading.discard((action.lora_id, action.worker_id))
        self._context.metrics.record_operation(action.operation, end.outcome, duration_s)
        if end.outcome != "dropped":  # a dropped action belongs to a term that is over
            with _log_store_errors():
                self._audit.record_action(
                    action,
                    requester=requester,
                    outcome=end.outcome,
                    duration_s=duration_s,
                    code=end.code,
                    error=end.error,
                    note=end.note,
                )

    def _record_success(self, action: WorkerAction) -> None:
        """Drop the pair's failure; after a load or inspection also the failure that blocks all workers."""
        failures = self._context.operations.failures
        failures.record_success((action.lora_id, action.worker_id))
        if action.operation != "unload":
            failures.record_success((action.lora_id, ANYWHERE))  # a worker found good bytes, or an engine took them

    def _record_failure(self, action: WorkerAction, code: str, message: str, retry_after_s: float | None) -> None:
        """Block the adapter on the worker, for longer with each failure in a row, and emit an event.

        retry_after_s  least time of the block, as the agent asked
        """
        expiry_s = self._context.store.rules.failure_expiry_s
        # A restart takes moments, and a request may wait for it.
        is_passing = code in PASSING_CODES
        self._context.operations.failures.record_failure(
            (action.lora_id, action.worker_id),
            code,
            message,
            first_s=min(PASSING_S, expiry_s) if is_passing else expiry_s,
            most_s=expiry_s if is_passing else LONGEST_S,
            least_s=retry_after_s or 0.0,
            now=self._context.clock(),
            rng=self._context.rng,
        )
        self._context.catalog.emit_event(
            f"{action.operation}_failed",
            lora_id=action.lora_id,
            worker_id=action.worker_id,
            message=f"{code}: {message}",
        )

    def _record_refusal(self, action: WorkerAction, exc: InvalidAdapter) -> None:
        """Record that an agent found source or bytes wrong, or that its engine refuses the registered bytes.

        The failure blocks this worker only, as the digest was found right elsewhere; with two exceptions:
        no worker ever found good bytes and none is left to try: all workers are blocked until it expires;
        engines refuse the registered bytes: `failure_scope` may block all workers, or quarantine the adapter.
        """
        self._record_failure(action, exc.code, str(exc), None)
        adapter = self._context.store.adapters.get(action.lora_id)
        if adapter is None or adapter.is_deleting:
            return
        blame = "worker"
        if not adapter.is_inspected:
            blame = "worker" if self._can_ask_others(action, adapter, exc.code) else "fleet"
        elif exc.code in ENGINE_REFUSALS:
            blame = failure_scope(adapter, self._queries.observe(), self._context.clock())
        if blame == "adapter":
            self._context.store.put_adapter(replace(adapter, quarantine=f"{exc.code}: {exc}"))
            log.warning("adapter quarantined", lora_id=action.lora_id, code=exc.code, error=str(exc))
        elif blame == "fleet":
            self._record_failure(replace(action, worker_id=ANYWHERE), exc.code, str(exc), None)
            log.warning("adapter failed", lora_id=action.lora_id, code=exc.code, error=str(exc))

    def _can_ask_others(self, action: WorkerAction, adapter: RegisteredAdapter, code: str) -> bool:
        """Whether another worker may still find good bytes where this one found none.

        A wrong base model also records the failure for all ready workers with the same base model.
        """
        now, observed = self._context.clock(), self._queries.observe()
        ready = [worker for worker in observed.workers.values() if worker.state == "ready"]
        if code == "base_model_mismatch" and adapter.base_model is None:
            tried = observed.workers.get(action.worker_id)
            failure = self._context.operations.failures.by_pair[action.lora_id, action.worker_id]
            for worker in ready:
                if tried is not None and worker.base_model == tried.base_model:
                    self._context.operations.failures.set_failure((action.lora_id, worker.id), failure)
        elif (
            code not in SOURCE_CODES
            or self._context.operations.failures.blocked_worker_count(action.lora_id, now) >= MOST_TRIED
        ):
            return False
        observed = replace(observed, failures=self._context.operations.failures.by_pair)
        return any(observed.current_failure(action.lora_id, worker.id, now) is None for worker in ready)

    async def _inspect(self, action: WorkerAction) -> None:
        """Let the worker inspect the adapter; store the results and emit an event if the adapter has not changed.

        Raises WorkerFailed, InvalidAdapter, LeaseLost.
        """
        adapter = self._context.store.adapters[action.lora_id]
        found, at = await self._context.agents.inspect(
            self._agent_url(action.worker_id),
            self._inspection_of(adapter, action.worker_id),
            timeout_s=self._context.settings.inspect_timeout_s,
        )
        known = self._with_inspection(adapter, found)
        self._context.files.note(action.worker_id, found.digest, at)
        current = self._context.store.adapters.get(action.lora_id)
        if (
            current is not None
            and not current.is_deleting
            and _inspect_request_for(current) == _inspect_request_for(adapter)
        ):
            # Compared with the present row, so that a policy changed meanwhile is not overwritten.
            self._context.store.compare_and_set(current, current.with_inspection_of(known))
            self._context.catalog.emit_event("adapter_inspected", lora_id=action.lora_id, worker_id=action.worker_id)

    async def forbidden_source_reason(self, source: str, worker_ids: Sequence[str]) -> InvalidAdapter | None:
        """Ask these workers why they may not fetch the source; None if one may, or does not answer."""
        answers = await asyncio.gather(*(self._forbidden_by(source, worker_id) for worker_id in worker_ids))
        return answers[0] if answers and all(answers) else None

    async def _forbidden_by(self, source: str, worker_id: str) -> InvalidAdapter | None:
        """Ask this worker why it may not fetch the source; None if it may, does not answer, or fails otherwise."""
        try:
            await self._context.agents.check_source(self._agent_url(worker_id), source, timeout_s=_CHECK_S)
        except InvalidAdapter as exc:
            return exc if exc.code in ("source_forbidden", "source_invalid") else None
        except (WorkerFailed, LeaseLost):
            return None  # an older agent, or a busy one: the inspection will tell
        return None

    async def check(self, adapter: RegisteredAdapter, content: str = "") -> AcceptanceAnswer:
        """Have each worker that has the adapter ready compare it with its acceptance file now.

        content  of an acceptance file that replaces the adapter's; "": it stays. Where the adapter is ready nowhere,
                 the workers with its files keep it for a load, which is tried again at once
        """
        ready = self._queries.ready_workers(adapter.lora_id)
        holders = ready or (sorted(self._context.files.holders.get(adapter.digest or "", ())) if content else [])
        known = "" if adapter.card is None else adapter.card.acceptance_file
        file = hashlib.sha256(content.encode()).hexdigest() if content else known
        found = await asyncio.gather(*(self._check_at(adapter, each, holders, content, file) for each in holders))
        results = dict(zip(holders, found, strict=True))
        has_file = bool(ready) or any(isinstance(each, WorkerAdapter) for each in found)
        if content and has_file:
            self._record_file(adapter, file, is_retried=not ready)
        return AcceptanceAnswer(
            lora_id=adapter.lora_id,
            acceptance={
                name: each.acceptance
                for name, each in results.items()
                if isinstance(each, WorkerAdapter) and each.acceptance is not None
            },
            errors={
                name: each if isinstance(each, str) else "not loaded there; its next load is compared with this file"
                for name, each in results.items()
                if isinstance(each, str) or each.acceptance is None
            },
        )

    async def _check_at(
        self, adapter: RegisteredAdapter, worker_id: str, holders: Sequence[str], content: str, file: str
    ) -> WorkerAdapter | str:
        """The adapter with what one worker has found; the error's text where it could not, or has unloaded it."""
        try:
            return await self._compare(adapter, worker_id, holders, file, content)
        except (InvalidAdapter, WorkerFailed, LeaseLost) as exc:
            return str(exc)

    async def _compare(
        self, adapter: RegisteredAdapter, worker_id: str, holders: Sequence[str], file: str, content: str = ""
    ) -> WorkerAdapter:
        """Have one worker compare the adapter, and record what it has found. Raises as `AgentClient.check`.

        holders  workers that may have the acceptance file
        file     digest of the acceptance file to compare with
        content  of the file, if it is new
        """
        ask = CheckRequest(
            lora_id=adapter.lora_id,
            digest=adapter.digest,
            acceptance=acceptance_mode(adapter.policy, self._context.store.rules),
            content=content,
            acceptance_file=file,
            neighbours=self._agent_urls([name for name in holders if name != worker_id][:MOST_NEIGHBOURS]),
        )
        url, timeout_s = self._agent_url(worker_id), self._context.settings.load_timeout_s
        found, at = await self._context.agents.check(url, ask, timeout_s=timeout_s)
        if found.state == "ready":
            self._context.reports.record_load(worker_id, found, None, at)
        return found

    async def _check_copy(self, action: WorkerAction, adapter: RegisteredAdapter) -> str:
        """Have the worker compare its copy, which it unloads unless it is equal; returns what it found, as a sentence.

        Raises InvalidAdapter, WorkerFailed.
        """
        file = "" if adapter.card is None else adapter.card.acceptance_file
        holders = self._queries.ready_workers(adapter.lora_id)
        found = (await self._compare(adapter, action.worker_id, holders, file)).acceptance
        return "" if found is None else found.why

    def _record_file(self, adapter: RegisteredAdapter, file: str, *, is_retried: bool) -> None:
        """Store the digest of an adapter's new acceptance file, unless the adapter has changed meanwhile.

        is_retried  drop its failures and quarantine, too: the former file may be their cause
        """
        current = self._context.store.adapters.get(adapter.lora_id)
        if current is None or current.card is None or current.digest != adapter.digest:
            return
        known = replace(current, card=replace(current.card, acceptance_file=file))
        if is_retried:
            known = replace(known, quarantine=None)
            self._context.operations.failures.forget_adapter(adapter.lora_id)
            self._context.request_pass()
        self._context.store.put_adapter(known)

    async def inspect_unregistered(self, adapter: RegisteredAdapter, worker_id: str) -> RegisteredAdapter:
        """The adapter with the results of an inspection by this worker's agent; nothing is stored.

        Raises InvalidAdapter, WorkerFailed.
        """
        ask, timeout_s = self._inspection_of(adapter, worker_id), self._context.settings.inspect_timeout_s
        found, at = await self._context.agents.inspect(self._agent_url(worker_id), ask, timeout_s=timeout_s)
        self._context.files.note(worker_id, found.digest, at)
        return self._with_inspection(adapter, found)

    def _with_inspection(self, adapter: RegisteredAdapter, found: WorkerAdapter) -> RegisteredAdapter:
        """The adapter with what an agent found. Raises InvalidAdapter for another digest, and by its policy."""
        require_usual_weights(found.card, adapter.policy.large_weights or self._context.store.rules.large_weights)
        return with_manifest(adapter, found)

    def _load_request(self, action: WorkerAction, adapter: RegisteredAdapter) -> LoadRequest:
        """The request for the adapter's files, of a load or ahead of one."""
        return LoadRequest(
            lora_id=adapter.lora_id,
            source=adapter.fetched_from,
            base_model=adapter.base_model,
            digest=adapter.digest,
            secret=adapter.secret,
            from_fleet=True,
            neighbours=self._agent_urls(action.neighbours),
            ignored_modules=adapter.policy.ignored_modules,
            acceptance=acceptance_mode(adapter.policy, self._context.store.rules),
            acceptance_file="" if adapter.card is None else adapter.card.acceptance_file,
            only_files=action.operation == "fetch",
            keeps_files=action.keeps_files,
        )

    async def _fetch(self, action: WorkerAction, adapter: RegisteredAdapter) -> None:
        """Have the worker fetch and verify the adapter's files for a load that will come.

        Raises InvalidAdapter, WorkerFailed.
        """
        url, timeout_s = self._agent_url(action.worker_id), self._context.settings.load_timeout_s
        found, at = await self._context.agents.load(url, self._load_request(action, adapter), timeout_s=timeout_s)
        self._context.files.note(action.worker_id, found.digest, at)

    async def _load(self, action: WorkerAction, adapter: RegisteredAdapter) -> str:
        """Load the adapter on the worker; record the load and the eviction of its victim, and emit events.

        Returns the agent's note on it: what its engine ignores, or could not prove; "" without one. Ends the victim's
        drain, and remembers a copy that is owed. Raises InvalidAdapter, WorkerFailed.
        """
        began = self._context.clock()
        evicted = None if action.evict is None else self._reported_adapter(action.evict, action.worker_id).engine_name
        is_awaited = self._context.demand.is_waited_for(action.lora_id, began)
        ask = self._load_request(action, adapter).model_copy(update={"evict": evicted, "is_awaited": is_awaited})
        url, timeout_s = self._agent_url(action.worker_id), self._context.settings.load_timeout_s
        lora, at = await self._context.agents.load(url, ask, timeout_s=timeout_s)
        _check_loaded(lora, adapter)
        if action.keeps_files:
            self._context.files.note_mark(action.worker_id, (lora.digest,), "kept", at)
        else:
            self._context.files.note(action.worker_id, lora.digest, at)
        if lora.location != "disk":  # else the engine loads it with its first request
            self._context.operations.measured_loads.append((self._context.clock() - began, adapter.size_bytes or 0))
        self._context.reports.record_load(action.worker_id, lora, evicted, at)
        if action.evict_after is not None:
            self._context.operations.reserve_victims[action.evict_after, action.worker_id] = action.lora_id
        if action.evict is not None:
            self._context.operations.drains.pop((action.evict, action.worker_id), None)
            self._context.metrics.record_eviction(action.evict, "lru")
            requester = self._audit.requester(action.lora_id)
            self._audit.record_eviction(
                action.evict, action.worker_id, made_room_for=action.lora_id, requester=requester
            )
            self._context.catalog.emit_event(
                "evicted", lora_id=action.evict, worker_id=action.worker_id, message=f"made room for {action.lora_id}"
            )
        self._context.catalog.emit_event(
            "loaded", lora_id=action.lora_id, worker_id=action.worker_id, message=lora.note
        )
        return lora.note

    async def _unload(self, action: WorkerAction) -> None:
        """Unload the adapter from the worker; end its drain, record the eviction, and emit an event.

        Raises WorkerFailed, InvalidAdapter.
        """
        held, timeout_s = (
            self._reported_adapter(action.lora_id, action.worker_id),
            self._context.settings.unload_timeout_s,
        )
        ask = UnloadRequest(
            lora_id=held.engine_name if held.is_foreign else lora_id_of_held(held),
            digest=None if held.is_foreign else held.digest or None,
            engine_name=held.engine_name if held.is_foreign else None,
        )
        at = await self._context.agents.unload(self._agent_url(action.worker_id), ask, timeout_s=timeout_s)
        self._context.reports.record_unload(action.worker_id, held.engine_name, at)
        self._context.operations.drains.pop((action.lora_id, action.worker_id), None)
        if (why := self._eviction_reason(action)) is not None:
            self._context.metrics.record_eviction(action.lora_id, why)
        self._context.catalog.emit_event(
            "unloaded", lora_id=action.lora_id, worker_id=action.worker_id, message=action.reason
        )

    def _eviction_reason(self, action: WorkerAction) -> str | None:
        """Why the unload is an eviction; None: the adapter was deleted, or an operator keeps it out of the worker.

        lru: it made room for another adapter; capacity: its worker drains; ttl: nobody asked for it in its `ttl_s`;
        surplus: a copy above demand, or the old copy of a move
        """
        if (action.lora_id, action.worker_id) in self._context.operations.reserve_victims:
            return "lru"
        adapter = self._context.store.adapters.get(action.lora_id)
        intent = self._context.store.workers.get(action.worker_id)
        if adapter is None or adapter.is_deleting or (intent is not None and action.lora_id in intent.kept_out):
            return None
        if intent is not None and intent.state == "draining":
            return "capacity"
        return "ttl" if action.is_expired else "surplus"

    def forget_drain(self, worker_id: str) -> None:
        """Forget that the worker was told to drain, so that it may be told again, and how far its drain was."""
        self._context.operations.draining_workers.discard(worker_id)
        self._queries.forget_drain(worker_id)

    def resume_worker(self, worker_id: str) -> None:
        """Take back a drain: in a task, tell the agent to take requests again if it drains or was told to."""
        worker = self._context.reports.workers.get(worker_id)
        is_told = worker_id in self._context.operations.draining_workers
        if is_told or (worker is not None and worker.report.state == "draining"):
            self._context.operations.resuming.add(worker_id)
            self._context.tasks.spawn(self._undrain_worker(worker_id))
        self.forget_drain(worker_id)

    def resume_workers_without_order(self) -> None:
        """Take back drains that an orchestrator ordered, and whose order is gone.

        The leader that took the order back may have ended before its call reached the agent.
        """
        operations = self._context.operations
        for worker_id, worker in self._context.reports.workers.items():
            order = self._context.store.workers.get(worker_id)
            is_wanted = worker.is_terminating or (order is not None and order.state == "draining")
            if worker.reach != "heard" or not worker.report.is_drain_ordered or is_wanted:
                continue
            if worker_id not in operations.resuming | operations.draining_workers:
                self.resume_worker(worker_id)

    async def _undrain_worker(self, worker_id: str) -> None:
        """Tell the agent to take requests again, and record its report; then emit an event and request a pass.

        After a failure, which is logged, a later pass does it. A stale epoch ends our term.
        """
        try:
            url, timeout_s = self._agent_url(worker_id), self._context.settings.unload_timeout_s
            await self._monitor.claim_worker(worker_id)
            fresh = await self._context.agents.undrain(url, timeout_s=timeout_s)
        except (WorkerFailed, InvalidAdapter) as exc:
            log.warning("worker drains still; the next pass tells it again", worker_id=worker_id, error=str(exc))
        except LeaseLost as exc:
            self._context.leadership.on_newer_leader(str(exc))
        else:
            if fresh.instance_id == worker_id:
                self._monitor.record_heartbeat(fresh)
            self._context.catalog.emit_event("worker_undrained", worker_id=worker_id)
            self._context.request_pass()
        finally:
            self._context.operations.resuming.discard(worker_id)

    async def _drain_worker(self, action: WorkerAction) -> None:
        """Tell the agent to drain, and wait until it has. A failure is logged, and the next pass tries again.

        Emits an event once drained.
        """
        try:
            ask = DrainRequest(deadline_s=self._context.store.rules.drain_deadline_s)
            # The agent answers when its engine is empty, or at that deadline.
            timeout_s = ask.deadline_s + self._context.settings.unload_timeout_s
            url = self._agent_url(action.worker_id)
            await self._monitor.claim_worker(action.worker_id)
            await self._context.agents.drain(url, ask, timeout_s=timeout_s)
        except (WorkerFailed, InvalidAdapter) as exc:
            self._context.operations.draining_workers.discard(action.worker_id)  # the next pass tries again
            log.warning("worker not drained", worker_id=action.worker_id, error=str(exc))
        except LeaseLost as exc:
            self._context.leadership.on_newer_leader(str(exc))
        else:
            self._context.catalog.emit_event("worker_draining", worker_id=action.worker_id)
            self._context.store.record("drain", action.worker_id, {"outcome": "ok", "reason": action.reason})

    def _mark_draining(self, action: WorkerAction) -> None:
        """Begin and count a drain: refreshes the catalog, which forbids new requests for the adapter on the worker.

        Raises WorkerFailed if the worker does not report the adapter. Nothing drains if the catalog cannot be written.
        """
        now, pair = self._context.clock(), (action.lora_id, action.worker_id)
        mark = AdapterDrain(
            lora_id=action.lora_id,
            worker_id=action.worker_id,
            engine_name=self._reported_adapter(action.lora_id, action.worker_id).engine_name,
            revision=0,
            since=now,
            deadline=now + self._context.store.rules.drain_deadline_s,
            reason=action.reason,
        )
        self._context.operations.drains[pair] = mark
        # The refreshed catalog forbids new requests; its revision is what routers confirm.
        try:
            self._queries.refresh_catalog()
        except BaseException:
            del self._context.operations.drains[pair]  # revision 0 would count as confirmed by every router
            raise
        self._context.operations.drains[pair] = replace(mark, revision=self._context.catalog.revision)
        self._context.metrics.operations.labels("drain", "ok").inc()

    def _inspect_request(self, action: WorkerAction) -> InspectRequest | None:
        """The adapter's inspect request as of now, to compare with a later one; None for an adapter that is gone."""
        adapter = self._context.store.adapters.get(action.lora_id)
        return None if adapter is None else _inspect_request_for(adapter)

    def _reported_adapter(self, lora_id: str, worker_id: str) -> ReportedAdapter:
        """The adapter on the worker as reported. Raises WorkerFailed when it is gone."""
        worker = self._queries.observe().workers.get(worker_id)
        held = None if worker is None else worker.adapters.get(lora_id)
        if held is None:
            raise WorkerFailed(f"{lora_id} is no longer on worker {worker_id}", code="not_loaded")
        return held

    def _inspection_of(self, adapter: RegisteredAdapter, worker_id: str) -> InspectRequest:
        """The inspect request, which names workers with the files where only the fleet has them."""
        request, digest = _inspect_request_for(adapter), fleet_digest(adapter.source)
        if digest is None:
            return request
        holders = sorted(name for name in self._context.files.holders.get(digest, ()) if name != worker_id)
        return request.model_copy(update={"neighbours": self._agent_urls(holders[:NEIGHBOURS_NAMED])})

    def _agent_urls(self, worker_ids: Iterable[str]) -> tuple[str, ...]:
        """URLs of the agents among these workers that answer."""
        entries = [self._context.reports.workers.get(worker_id) for worker_id in worker_ids]
        urls = [agent_url_of(entry.report) for entry in entries if entry is not None and entry.reach == "heard"]
        return tuple(filter(None, urls))

    def _agent_url(self, worker_id: str) -> str:
        """URL of the worker's agent. Raises WorkerFailed."""
        entry = self._context.reports.workers.get(worker_id)
        if entry is None or not entry.report.agent_url:
            raise WorkerFailed(f"worker {worker_id} has no agent_url in its report", code="worker_unreachable")
        return entry.report.agent_url


@contextmanager
def _log_store_errors() -> Iterator[None]:
    """Log store errors of the block and go on: the action itself has happened."""
    try:
        yield
    except (StoreError, OrchestratorUnavailable) as exc:
        log.warning("result of an action not recorded", error=str(exc))


def _inspect_request_for(adapter: RegisteredAdapter) -> InspectRequest:
    """The inspect request of the adapter."""
    return InspectRequest(
        lora_id=adapter.lora_id,
        source=adapter.source,
        base_model=adapter.base_model,
        digest=adapter.digest,
        secret=adapter.secret,
    )


def with_manifest(adapter: RegisteredAdapter, found: WorkerAdapter) -> RegisteredAdapter:
    """The adapter with what an agent found. Raises InvalidAdapter when the registered digest is another."""
    if adapter.digest is not None and found.digest != adapter.digest:
        message = (
            f"{adapter.source} has digest {found.digest}, expected {adapter.digest}; bytes under a lora_id never change"
        )
        raise InvalidAdapter(f"{message}: register the new ones under a new lora_id", code="digest_mismatch")
    named = adapter.with_spec(digest=found.digest, base_model=adapter.base_model or found.base_model)
    return replace(
        named,
        card=found.card,
        pinned_source=found.pinned_source if _is_pin(found.pinned_source, adapter.source) else None,
    )


def require_usual_weights(card: AdapterCard, mode: LargeWeightsMode, former: AdapterCard | None = None) -> None:
    """Raise InvalidAdapter where the policy refuses a change of the weights that is far too large.

    former  of the version that a published name is at
    """
    grown = "" if former is None else large_growth(card, former)
    found = "; ".join(filter(None, (large_change(card), grown)))
    if mode == "refuse" and found:
        message = (
            f"{found}; usual are changes below 1, and the policy refuses this one (large_weights: refuse): register or"
            " publish an earlier checkpoint, check lora_alpha, or set large_weights: note"
        )
        raise InvalidAdapter(message, code="weights_too_large")


def _is_pin(found: str, source: str) -> bool:
    """Whether `found` is the same hub repository as `source`, pinned to a commit."""
    return found != source and found.startswith("hf://") and found.partition("@")[0] == source.partition("@")[0]


def _check_loaded(lora: WorkerAdapter, adapter: RegisteredAdapter) -> None:
    """Raise InvalidAdapter if the loaded adapter has another digest, WorkerFailed if it is not ready."""
    if lora.digest != adapter.digest:
        message = f"the worker loaded digest {lora.digest}, expected {adapter.digest}"
        raise InvalidAdapter(message, code="digest_mismatch")
    if lora.state != "ready":
        raise WorkerFailed(f"the worker answered state {lora.state!r} ({lora.error}), expected 'ready'")


def _required_subjects(action: WorkerAction) -> list[Subject]:
    """Intent that must be durable before the action starts."""
    names = [name for name in (action.lora_id, action.evict, action.evict_after) if name]
    adapters: list[Subject] = [("adapters", name) for name in names]
    return [*adapters, *(("tombstones", name) for name in names), ("workers", ""), ("policy", "")]
