"""act: one call to an agent, with a deadline, in a task of its own; however it ends becomes data for the next pass."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import structlog

from orchestrator.config import OrchestratorSettings
from orchestrator.core.errors import (
    InvalidAdapter,
    LeaseLost,
    OrchestratorUnavailable,
    StateConflict,
    StoreError,
    WorkerFailed,
)
from orchestrator.core.failures import ANYWHERE, ENGINE_REFUSED, LONGEST_S, failure_scope
from orchestrator.core.plan import AdapterDrain, WorkerAction
from orchestrator.core.state import RegisteredAdapter, ReportedAdapter
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.agent_client import SOURCE_CODES, AgentClient
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.in_flight import OperationsInProgress
from orchestrator.reconcile.queries import FleetQueries
from orchestrator.reconcile.tasks import BackgroundTasks
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.audit import AuditLog
from orchestrator.store.backend import Subject
from orchestrator.store.store import IntentStore
from workers.wire import AvailableLora, DrainRequest, InspectRequest, LoadedLora, LoadRequest, UnloadRequest

log = structlog.get_logger()

# Failures of the moment, and how long one counts: less than a restart takes, more than a pass.
PASSING_CODES = frozenset({"worker_unreachable", "engine_unreachable", "engine_down", "not_ready", "draining"})
PASSING_S = 1.0
MOST_TRIED = 3
"""Workers that look for an adapter at its source before it counts as absent everywhere; a guess, nothing measured."""
_CHECK_S = 1.0  # an agent that takes longer to judge a source leaves that to the inspection


@dataclass(frozen=True, slots=True)
class _ActionResult:
    outcome: str
    code: str
    error: str


class ActionRunner:
    """Starts actions and keeps the books of what is under way. `poke` asks for a pass."""

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: IntentStore,
        fleet: WorkerReports,
        catalog: CatalogBook,
        agents: AgentClient,
        metrics: OrchestratorMetrics,
        underway: OperationsInProgress,
        reads: FleetQueries,
        tasks: BackgroundTasks,
        audit: AuditLog,
        poke: Callable[[], None],
        claim: Callable[[str], Awaitable[None]],
        on_lease_lost: Callable[[str], None],
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._fleet = fleet
        self._catalog = catalog
        self._agents = agents
        self._metrics = metrics
        self._underway = underway
        self._reads = reads
        self._tasks = tasks
        self._audit = audit
        self._claim = claim
        self._on_lease_lost = on_lease_lost
        self._rng = rng
        self._poke = poke
        self._clock = clock

    def start(self, action: WorkerAction) -> None:
        """Begin an action. A drain is a mark in the catalog and done at once; the rest are calls to an agent."""
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        evict = action.evict or action.evict_after
        log.info("action", operation=action.operation, **where, reason=action.reason, evict=evict)
        it, settings = self._underway, self._settings
        if action.operation == "drain" and action.lora_id:
            self._mark_draining(action)
        elif action.operation == "drain":
            it.leaving.add(action.worker_id)
            self._tasks.spawn(self._drain_worker(action))
        elif action.operation == "inspect":
            it.inspecting[action.lora_id] = action.worker_id
            self._tasks.spawn(self._guarded(action, self._inspect(action), settings.inspect_timeout_s))
        elif action.operation == "load":
            adapter = self._store.adapters[action.lora_id]
            pair = (action.lora_id, action.worker_id)
            it.busy[action.worker_id] += 1
            it.loading[pair] = adapter.digest or ""
            it.load_began[pair] = self._clock()
            if action.evict is not None:
                it.loading_victims.add((action.evict, action.worker_id))
            self._tasks.spawn(self._guarded(action, self._load(action, adapter), settings.load_timeout_s))
        else:
            it.busy[action.worker_id] += 1
            it.unloading.add((action.lora_id, action.worker_id))
            self._tasks.spawn(self._guarded(action, self._unload(action), settings.unload_timeout_s))

    async def _guarded(self, action: WorkerAction, work: Coroutine[Any, Any, None], deadline_s: float) -> None:
        """Run one action to its end or its deadline; whatever it raises becomes data, and the next pass is due."""
        began, who = self._clock(), self._audit.who(action.lora_id)
        asked = self._question(action)
        end = _ActionResult("dropped", "", "")
        try:
            async with asyncio.timeout(deadline_s):
                # What this follows from must not be forgotten once it is done.
                await self._store.saved(_follows_from(action))
                await self._claim(action.worker_id)
                await work
            end = _ActionResult("ok", "", "")
            self._succeeded(action)
        except LeaseLost as exc:
            end = _ActionResult("dropped", exc.code, str(exc))
            self._on_lease_lost(str(exc))
        except (
            StateConflict,
            StoreError,
            OrchestratorUnavailable,
        ) as exc:  # the store's: the next pass decides from what is there
            end = _ActionResult("dropped", exc.code, str(exc))
        except InvalidAdapter as exc:
            end = _ActionResult("refused", exc.code, str(exc))
            if self._question(action) == asked:  # else it is asked for otherwise by now, and nobody has refused that
                with _as_far_as_written():
                    self._refused(action, exc)
        except WorkerFailed as exc:
            end = _ActionResult("failed", exc.code, str(exc))
            self._failed(action, exc.code, str(exc), exc.retry_after_s)
        except TimeoutError:
            end = _ActionResult("timeout", "deadline", f"{action.operation} not done within {deadline_s} s")
            self._failed(action, end.code, end.error, None)
        except Exception as exc:
            end = _ActionResult("error", "internal_error", f"{action.operation}: {exc!r}")
            log.exception("action broke", operation=action.operation, lora_id=action.lora_id)
            self._failed(action, end.code, end.error, None)
        finally:
            work.close()  # it may never have been begun
            self._ended(action, end, who, self._clock() - began)
        self._reads.refresh_catalog()
        self._poke()

    def _ended(self, action: WorkerAction, end: _ActionResult, who: str, duration_s: float) -> None:
        it = self._underway
        if action.operation == "inspect":
            it.inspecting.pop(action.lora_id, None)
        else:
            it.busy[action.worker_id] -= 1
        if action.operation == "load":
            it.loading.pop((action.lora_id, action.worker_id), None)
            it.load_began.pop((action.lora_id, action.worker_id), None)
            if action.evict is not None:
                it.loading_victims.discard((action.evict, action.worker_id))
        elif action.operation == "unload":
            it.unloading.discard((action.lora_id, action.worker_id))
        self._metrics.ended(action.operation, end.outcome, duration_s)
        if end.outcome != "dropped":  # what is dropped was not ours to finish: nor is the store ours to write
            with _as_far_as_written():
                self._audit.ended(
                    action, who=who, outcome=end.outcome, duration_s=duration_s, code=end.code, error=end.error
                )

    def _succeeded(self, action: WorkerAction) -> None:
        failures = self._underway.failures
        failures.record_success((action.lora_id, action.worker_id))
        if action.operation != "unload":
            failures.record_success((action.lora_id, ANYWHERE))  # somebody found good bytes, or an engine took them

    def _failed(self, action: WorkerAction, code: str, message: str, retry_after_s: float | None) -> None:
        """It counts against this adapter on this worker, for longer each time in a row."""
        expiry_s = self._store.rules.failure_expiry_s
        # A worker that is starting again is a matter of moments, and somebody's request may be waiting for it.
        is_passing = code in PASSING_CODES
        self._underway.failures.record_failure(
            (action.lora_id, action.worker_id),
            code,
            message,
            first_s=min(PASSING_S, expiry_s) if is_passing else expiry_s,
            most_s=expiry_s if is_passing else LONGEST_S,
            least_s=retry_after_s or 0.0,
            now=self._clock(),
            rng=self._rng,
        )
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        self._catalog.emit(f"{action.operation}_failed", **where, message=f"{code}: {message}")

    def _refused(self, action: WorkerAction, exc: InvalidAdapter) -> None:
        """An agent says that source or bytes are wrong, or that its engine refuses bytes of the registered digest.

        The latter may be the adapter's fault for good: quarantine. All else is wrong with one worker's way to the
        bytes; the digest was found right before. Unless nobody ever found good ones: then the failure is everybody's,
        until somebody looks again.
        """
        self._failed(action, exc.code, str(exc), None)
        adapter = self._store.adapters.get(action.lora_id)
        if adapter is None or adapter.is_deleting:
            return
        blame = "worker"
        if not adapter.is_inspected:
            blame = "worker" if self._has_others_to_ask(action, adapter, exc.code) else "fleet"
        elif exc.code == ENGINE_REFUSED:
            blame = failure_scope(adapter, self._reads.observe(), self._clock())
        if blame == "adapter":
            self._store.put_adapter(replace(adapter, quarantine=f"{exc.code}: {exc}"))
            log.warning("adapter quarantined", lora_id=action.lora_id, code=exc.code, error=str(exc))
        elif blame == "fleet":
            self._failed(replace(action, worker_id=ANYWHERE), exc.code, str(exc), None)
            log.warning("adapter failed", lora_id=action.lora_id, code=exc.code, error=str(exc))

    def _has_others_to_ask(self, action: WorkerAction, adapter: RegisteredAdapter, code: str) -> bool:
        """Whether another worker might find good bytes where this one found none."""
        now, observed = self._clock(), self._reads.observe()
        ready = [worker for worker in observed.workers.values() if worker.state == "ready"]
        if code == "base_model_mismatch" and adapter.base_model is None:
            tried = observed.workers.get(action.worker_id)
            failure = self._underway.failures.by_pair[action.lora_id, action.worker_id]
            for worker in ready:
                if tried is not None and worker.base_model == tried.base_model:
                    self._underway.failures.set_failure((action.lora_id, worker.id), failure)
        elif (
            code not in SOURCE_CODES or self._underway.failures.blocked_worker_count(action.lora_id, now) >= MOST_TRIED
        ):
            return False
        observed = replace(observed, failures=self._underway.failures.by_pair)
        return any(observed.current_failure(action.lora_id, worker.id, now) is None for worker in ready)

    async def _inspect(self, action: WorkerAction) -> None:
        adapter = self._store.adapters[action.lora_id]
        found = await self._agents.inspect(
            self._agent_url(action.worker_id),
            _inspection_of(adapter),
            key=_key(action),
            timeout_s=self._settings.inspect_timeout_s,
        )
        known = with_manifest(adapter, found)
        current = self._store.adapters.get(action.lora_id)
        if current is not None and not current.is_deleting and _inspection_of(current) == _inspection_of(adapter):
            # Compared with the row as it is now: a policy changed meanwhile must not be written back.
            self._store.compare_and_set(
                current, replace(current, **{name: getattr(known, name) for name in _MANIFEST_FIELDS})
            )
            self._catalog.emit("adapter_inspected", lora_id=action.lora_id, worker_id=action.worker_id)

    async def why_forbidden(self, source: str, worker_ids: Sequence[str]) -> InvalidAdapter | None:
        """Why none of these workers may fetch this source; None where one may, or does not say."""
        answers = await asyncio.gather(*(self._why_forbidden(source, worker_id) for worker_id in worker_ids))
        return answers[0] if answers and all(answers) else None

    async def _why_forbidden(self, source: str, worker_id: str) -> InvalidAdapter | None:
        try:
            await self._agents.check_source(self._agent_url(worker_id), source, timeout_s=_CHECK_S)
        except InvalidAdapter as exc:
            return exc if exc.code in ("source_forbidden", "source_invalid") else None
        except (WorkerFailed, LeaseLost):
            return None  # an agent of an older version, or one that is busy: the inspection will tell
        return None

    async def inspect_only(self, adapter: RegisteredAdapter, worker_id: str) -> RegisteredAdapter:
        """A dry run: what an agent says about bytes that nobody registered. Raises InvalidAdapter or WorkerFailed."""
        ask = _inspection_of(adapter)
        found = await self._agents.inspect(
            self._agent_url(worker_id), ask, key=secrets.token_hex(8), timeout_s=self._settings.inspect_timeout_s
        )
        return with_manifest(adapter, found)

    async def _load(self, action: WorkerAction, adapter: RegisteredAdapter) -> None:
        began = self._clock()
        evicted = None if action.evict is None else self._held(action.evict, action.worker_id).engine_name
        ask = LoadRequest(
            lora_id=adapter.lora_id,
            source=adapter.fetched_from,
            base_model=adapter.base_model,
            digest=adapter.digest,
            secret=adapter.secret,
            evict=evicted,
        )
        url, timeout_s = self._agent_url(action.worker_id), self._settings.load_timeout_s
        lora = await self._agents.load(url, ask, key=_key(action), timeout_s=timeout_s)
        _check_loaded(lora, adapter)
        self._underway.load_seconds.append(self._clock() - began)
        self._fleet.loaded(action.worker_id, lora, evicted)
        if action.evict_after is not None:
            self._underway.reserve_victims[action.evict_after, action.worker_id] = action.lora_id
        if action.evict is not None:
            self._underway.drains.pop((action.evict, action.worker_id), None)
            self._metrics.evicted(action.evict, "lru")
            who = self._audit.who(action.lora_id)
            self._audit.evicted(action.evict, action.worker_id, made_room_for=action.lora_id, who=who)
            self._catalog.emit(
                "evicted", lora_id=action.evict, worker_id=action.worker_id, message=f"made room for {action.lora_id}"
            )
        self._catalog.emit("loaded", lora_id=action.lora_id, worker_id=action.worker_id)

    async def _unload(self, action: WorkerAction) -> None:
        held, timeout_s = self._held(action.lora_id, action.worker_id), self._settings.unload_timeout_s
        ask = UnloadRequest(lora_id=action.lora_id, digest=held.digest or None)
        await self._agents.unload(self._agent_url(action.worker_id), ask, key=_key(action), timeout_s=timeout_s)
        self._fleet.unloaded(action.worker_id, held.engine_name)
        self._underway.drains.pop((action.lora_id, action.worker_id), None)
        if (why := self._why_evicted(action)) is not None:
            self._metrics.evicted(action.lora_id, why)
        self._catalog.emit("unloaded", lora_id=action.lora_id, worker_id=action.worker_id, message=action.reason)

    def _why_evicted(self, action: WorkerAction) -> str | None:
        """lru: made room for another; capacity: its worker is to be empty; ttl: nobody needs this copy any more."""
        if (action.lora_id, action.worker_id) in self._underway.reserve_victims:
            return "lru"
        adapter = self._store.adapters.get(action.lora_id)
        if adapter is None or adapter.is_deleting:
            return None  # deleted: nothing was evicted
        intent = self._store.workers.get(action.worker_id)
        return "capacity" if intent is not None and intent.state == "draining" else "ttl"

    def undrain(self, worker_id: str) -> None:
        """Have an agent that drains take requests again."""
        self._tasks.spawn(self._undrain_worker(worker_id))

    async def _undrain_worker(self, worker_id: str) -> None:
        try:
            url, timeout_s = self._agent_url(worker_id), self._settings.unload_timeout_s
            await self._claim(worker_id)
            await self._agents.undrain(url, key=secrets.token_hex(8), timeout_s=timeout_s)
        except (WorkerFailed, InvalidAdapter) as exc:
            log.warning(
                "worker drains still: uncordon it again, or restart its agent", worker_id=worker_id, error=str(exc)
            )
        except LeaseLost as exc:
            self._on_lease_lost(str(exc))
        else:
            self._catalog.emit("worker_undrained", worker_id=worker_id)
            self._poke()

    async def _drain_worker(self, action: WorkerAction) -> None:
        try:
            ask = DrainRequest(deadline_s=self._store.rules.drain_deadline_s)
            # The agent answers when its engine is empty, or at that deadline.
            timeout_s = ask.deadline_s + self._settings.unload_timeout_s
            url = self._agent_url(action.worker_id)
            await self._claim(action.worker_id)
            await self._agents.drain(url, ask, key=_key(action), timeout_s=timeout_s)
        except (WorkerFailed, InvalidAdapter) as exc:
            self._underway.leaving.discard(action.worker_id)  # the next pass asks again
            log.warning("worker not drained", worker_id=action.worker_id, error=str(exc))
        except LeaseLost as exc:
            self._on_lease_lost(str(exc))
        else:
            self._catalog.emit("worker_draining", worker_id=action.worker_id)

    def _mark_draining(self, action: WorkerAction) -> None:
        now, pair = self._clock(), (action.lora_id, action.worker_id)
        mark = AdapterDrain(
            lora_id=action.lora_id,
            worker_id=action.worker_id,
            engine_name=self._held(action.lora_id, action.worker_id).engine_name,
            revision=0,
            since=now,
            deadline=now + self._store.rules.drain_deadline_s,
            reason=action.reason,
        )
        self._underway.drains[pair] = mark
        # Only now is there a catalog that forbids new requests, and a revision for routers to confirm.
        self._reads.refresh_catalog()
        self._underway.drains[pair] = replace(mark, revision=self._catalog.revision)
        self._metrics.operations.labels("drain", "ok").inc()

    def _question(self, action: WorkerAction) -> InspectRequest | None:
        """What workers are asked about the adapter by now."""
        adapter = self._store.adapters.get(action.lora_id)
        return None if adapter is None else _inspection_of(adapter)

    def _held(self, lora_id: str, worker_id: str) -> ReportedAdapter:
        """The adapter there, as reported. Raises WorkerFailed when it went meanwhile."""
        worker = self._reads.observe().workers.get(worker_id)
        held = None if worker is None else worker.adapters.get(lora_id)
        if held is None:
            raise WorkerFailed(f"{lora_id} is no longer on worker {worker_id}", code="not_loaded")
        return held

    def _agent_url(self, worker_id: str) -> str:
        entry = self._fleet.entries.get(worker_id)
        if entry is None or not entry.report.agent_url:
            raise WorkerFailed(f"worker {worker_id} has no agent_url in its report", code="worker_unreachable")
        return entry.report.agent_url


@contextmanager
def _as_far_as_written() -> Iterator[None]:
    """What has happened on the fleet has happened, whether the store takes a note of it or not."""
    try:
        yield
    except (StoreError, OrchestratorUnavailable) as exc:
        log.warning("how an action ended is not written down", error=str(exc))


def _inspection_of(adapter: RegisteredAdapter) -> InspectRequest:
    return InspectRequest(
        lora_id=adapter.lora_id,
        source=adapter.source,
        base_model=adapter.base_model,
        digest=adapter.digest,
        secret=adapter.secret,
    )


_MANIFEST_FIELDS = ("digest", "rank", "base_model", "size_bytes", "pinned_source")


def with_manifest(adapter: RegisteredAdapter, found: AvailableLora) -> RegisteredAdapter:
    """The adapter with what an agent found. Raises InvalidAdapter when the registered digest is another."""
    if adapter.digest is not None and found.digest != adapter.digest:
        message = (
            f"{adapter.source} has digest {found.digest}, expected {adapter.digest}; bytes under a lora_id never change"
        )
        raise InvalidAdapter(f"{message}: register the new ones under a new lora_id", code="digest_mismatch")
    base_model = adapter.base_model or found.base_model
    return replace(
        adapter,
        digest=found.digest,
        rank=found.rank,
        base_model=base_model,
        size_bytes=found.size_bytes or None,
        pinned_source=found.source if _is_pin(found.source, adapter.source) else None,
    )


def _is_pin(found: str, source: str) -> bool:
    """Whether it names the same place on a hub, at a commit."""
    return found != source and found.startswith("hf://") and found.partition("@")[0] == source.partition("@")[0]


def _check_loaded(lora: LoadedLora, adapter: RegisteredAdapter) -> None:
    if lora.digest != adapter.digest:
        message = f"the worker loaded digest {lora.digest}, expected {adapter.digest}"
        raise InvalidAdapter(message, code="digest_mismatch")
    if lora.state != "ready":
        raise WorkerFailed(f"the worker answered state {lora.state!r} ({lora.error}), expected 'ready'")


def _follows_from(action: WorkerAction) -> list[Subject]:
    """What has to be durable before it."""
    names = [name for name in (action.lora_id, action.evict, action.evict_after) if name]
    adapters: list[Subject] = [("adapters", name) for name in names]
    return [*adapters, *(("tombstones", name) for name in names), ("workers", ""), ("policy", "")]


def _key(action: WorkerAction) -> str:
    """One key an attempt: an agent that sees it twice may answer the second from the first."""
    return f"{action.operation}-{secrets.token_hex(8)}"
