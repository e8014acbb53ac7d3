"""act: one call to an agent, with a deadline, in a task of its own; however it ends becomes data for the next pass."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from orchestrator.agents import Agents
from orchestrator.catalog import CatalogBook
from orchestrator.config import OrchestratorSettings
from orchestrator.core.errors import Permanent, Transient
from orchestrator.core.plan import Action, Drain
from orchestrator.core.state import Adapter, Failure, Held
from orchestrator.fleet import Fleet
from orchestrator.metrics import Metrics
from orchestrator.reads import Reads
from orchestrator.store import Store
from orchestrator.tasks import Tasks
from orchestrator.underway import Underway
from workers.wire import AvailableLora, DrainRequest, InspectRequest, LoadedLora, LoadRequest, UnloadRequest

log = structlog.get_logger()

# Failures of the moment, and how long one counts: less than a restart takes, more than a pass.
PASSING_CODES = frozenset({"worker_unreachable", "engine_unreachable", "engine_down", "not_ready", "draining"})
PASSING_S = 1.0


class Actor:
    """Starts actions and keeps the books of what is under way. `poke` asks for a pass."""

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: Store,
        fleet: Fleet,
        catalog: CatalogBook,
        agents: Agents,
        metrics: Metrics,
        underway: Underway,
        reads: Reads,
        tasks: Tasks,
        poke: Callable[[], None],
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
        self._poke = poke
        self._clock = clock

    def start(self, action: Action) -> None:
        """Begin an action. A drain is a mark in the catalog and done at once; the rest are calls to an agent."""
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        log.info(
            "action",
            operation=action.operation,
            **where,
            reason=action.reason,
            evict=action.evict or action.evict_after,
        )
        if action.operation == "drain" and action.lora_id:
            self._mark_draining(action)
        elif action.operation == "drain":
            self._underway.leaving.add(action.worker_id)
            self._tasks.spawn(self._drain_worker(action))
        elif action.operation == "inspect":
            self._underway.inspecting[action.lora_id] = action.worker_id
            self._tasks.spawn(self._guarded(action, self._inspect(action), self._settings.inspect_timeout_s))
        elif action.operation == "load":
            adapter = self._store.adapters[action.lora_id]
            pair = (action.lora_id, action.worker_id)
            self._underway.busy[action.worker_id] += 1
            self._underway.loading[pair] = adapter.digest or ""
            self._underway.load_began[pair] = self._clock()
            self._tasks.spawn(self._guarded(action, self._load(action, adapter), self._settings.load_timeout_s))
        else:
            self._underway.busy[action.worker_id] += 1
            self._tasks.spawn(self._guarded(action, self._unload(action), self._settings.unload_timeout_s))

    async def _guarded(self, action: Action, work: Coroutine[Any, Any, None], deadline_s: float) -> None:
        """Run one action to its end or its deadline; whatever it raises becomes data, and the next pass is due."""
        outcome, began = "ok", self._clock()
        try:
            async with asyncio.timeout(deadline_s):
                await work
        except Permanent as exc:
            outcome = "refused"
            self._refused(action, exc)
        except Transient as exc:
            outcome = "failed"
            self._failed(action, exc.code, str(exc), exc.retry_after_s)
        except TimeoutError:
            outcome = "timeout"
            self._failed(action, "deadline", f"{action.operation} not done within {deadline_s} s", None)
        except Exception as exc:
            outcome = "error"
            log.exception("action broke", operation=action.operation, lora_id=action.lora_id)
            self._failed(action, "internal_error", f"{action.operation}: {exc!r}", None)
        finally:
            self._ended(action)
        if outcome == "ok":
            where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
            log.info("action done", operation=action.operation, **where, seconds=round(self._clock() - began, 3))
        self._metrics.operations.labels(action.operation, outcome).inc()
        self._reads.refresh_catalog()
        self._poke()

    def _ended(self, action: Action) -> None:
        if action.operation == "inspect":
            self._underway.inspecting.pop(action.lora_id, None)
            return
        self._underway.busy[action.worker_id] -= 1
        if action.operation == "load":
            self._underway.loading.pop((action.lora_id, action.worker_id), None)
            self._underway.load_began.pop((action.lora_id, action.worker_id), None)

    def _failed(self, action: Action, code: str, message: str, retry_after_s: float | None) -> None:
        # A worker that is starting again is a matter of moments, and somebody's request may be waiting for it.
        expiry_s = PASSING_S if code in PASSING_CODES else self._store.rules.failure_expiry_s
        until = self._clock() + max(expiry_s, retry_after_s or 0.0)
        self._underway.failures[action.lora_id, action.worker_id] = Failure(until=until, code=code, message=message)
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        log.warning("action failed", operation=action.operation, **where, code=code, error=message)
        self._catalog.emit(f"{action.operation}_failed", **where, message=f"{code}: {message}")

    def _refused(self, action: Action, exc: Permanent) -> None:
        """The bytes are at fault: quarantine. Unless only the base model did not fit, and there are others to try."""
        self._failed(action, exc.code, str(exc), None)
        adapter = self._store.adapters.get(action.lora_id)
        if adapter is None or adapter.is_deleting:
            return
        if exc.code == "base_model_mismatch" and adapter.base_model is None and self._has_other_base(action):
            return
        self._store.put_adapter(replace(adapter, quarantine=f"{exc.code}: {exc}"))
        log.warning("adapter quarantined", lora_id=action.lora_id, code=exc.code, error=str(exc))

    def _has_other_base(self, action: Action) -> bool:
        """Whether a worker of another base model, that has not refused this adapter, could be asked."""
        now, observed = self._clock(), self._reads.observe()
        tried = observed.workers.get(action.worker_id)
        refused = tried.base_models if tried is not None else frozenset()
        others = [w for w in observed.workers.values() if w.state == "ready" and not (w.base_models & refused)]
        for worker in observed.workers.values():
            if worker.base_models & refused:
                failure = self._underway.failures[action.lora_id, action.worker_id]
                self._underway.failures[action.lora_id, worker.id] = failure
        return any(observed.failed(action.lora_id, w.id, now) is None for w in others)

    async def _inspect(self, action: Action) -> None:
        adapter = self._store.adapters[action.lora_id]
        found = await self._agents.inspect(
            self._agent_url(action.worker_id),
            InspectRequest(lora_id=adapter.lora_id, source=adapter.source, base_model=adapter.base_model),
            key=_key(action),
            timeout_s=self._settings.inspect_timeout_s,
        )
        known = with_manifest(adapter, found)
        current = self._store.adapters.get(action.lora_id)
        if current is not None and not current.is_deleting and current.source == adapter.source:
            # Compared with the row as it is now: a policy changed meanwhile must not be written back.
            self._store.compare_and_set(
                current, replace(current, **{name: getattr(known, name) for name in _MANIFEST_FIELDS})
            )
            self._catalog.emit("adapter_inspected", lora_id=action.lora_id, worker_id=action.worker_id)

    async def inspect_only(self, adapter: Adapter, worker_id: str) -> Adapter:
        """A dry run: what an agent says about bytes that nobody registered. Raises Permanent or Transient."""
        ask = InspectRequest(lora_id=adapter.lora_id, source=adapter.source, base_model=adapter.base_model)
        found = await self._agents.inspect(
            self._agent_url(worker_id), ask, key=secrets.token_hex(8), timeout_s=self._settings.inspect_timeout_s
        )
        return with_manifest(adapter, found)

    async def _load(self, action: Action, adapter: Adapter) -> None:
        began = self._clock()
        evicted = None if action.evict is None else self._held(action.evict, action.worker_id).engine_name
        ask = LoadRequest(
            lora_id=adapter.lora_id,
            source=adapter.source,
            base_model=adapter.base_model,
            digest=adapter.digest,
            evict=evicted,
        )
        url, timeout_s = self._agent_url(action.worker_id), self._settings.load_timeout_s
        lora = await self._agents.load(url, ask, key=_key(action), timeout_s=timeout_s)
        _check_loaded(lora, adapter)
        self._underway.load_seconds.append(self._clock() - began)
        self._fleet.loaded(action.worker_id, lora, evicted)
        if action.evict_after is not None:
            self._underway.owed[action.evict_after, action.worker_id] = action.lora_id
        if action.evict is not None:
            self._underway.drains.pop((action.evict, action.worker_id), None)
            self._catalog.emit(
                "evicted", lora_id=action.evict, worker_id=action.worker_id, message=f"made room for {action.lora_id}"
            )
        self._catalog.emit("loaded", lora_id=action.lora_id, worker_id=action.worker_id)

    async def _unload(self, action: Action) -> None:
        held, timeout_s = self._held(action.lora_id, action.worker_id), self._settings.unload_timeout_s
        ask = UnloadRequest(lora_id=action.lora_id, digest=held.digest or None)
        await self._agents.unload(self._agent_url(action.worker_id), ask, key=_key(action), timeout_s=timeout_s)
        self._fleet.unloaded(action.worker_id, held.engine_name)
        self._underway.drains.pop((action.lora_id, action.worker_id), None)
        self._catalog.emit("unloaded", lora_id=action.lora_id, worker_id=action.worker_id, message=action.reason)

    async def _drain_worker(self, action: Action) -> None:
        try:
            ask = DrainRequest(deadline_s=self._store.rules.drain_deadline_s)
            # The agent answers when its engine is empty, or at that deadline.
            timeout_s = ask.deadline_s + self._settings.unload_timeout_s
            url = self._agent_url(action.worker_id)
            await self._agents.drain(url, ask, key=_key(action), timeout_s=timeout_s)
        except (Transient, Permanent) as exc:
            self._underway.leaving.discard(action.worker_id)  # the next pass asks again
            log.warning("worker not drained", worker_id=action.worker_id, error=str(exc))
        else:
            self._catalog.emit("worker_draining", worker_id=action.worker_id)

    def _mark_draining(self, action: Action) -> None:
        now, pair = self._clock(), (action.lora_id, action.worker_id)
        mark = Drain(
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

    def _held(self, lora_id: str, worker_id: str) -> Held:
        """The adapter there, as reported. Raises Transient when it went meanwhile."""
        worker = self._reads.observe().workers.get(worker_id)
        held = None if worker is None else worker.held.get(lora_id)
        if held is None:
            raise Transient(f"{lora_id} is no longer on worker {worker_id}", code="not_loaded")
        return held

    def _agent_url(self, worker_id: str) -> str:
        entry = self._fleet.entries.get(worker_id)
        if entry is None or not entry.report.agent_url:
            raise Transient(f"worker {worker_id} has no agent_url in its report", code="worker_unreachable")
        return entry.report.agent_url


_MANIFEST_FIELDS = ("digest", "rank", "base_model", "size_bytes")


def with_manifest(adapter: Adapter, found: AvailableLora) -> Adapter:
    """The adapter with what an agent found. Raises Permanent when that contradicts what was said at registration."""
    if adapter.digest is not None and found.digest != adapter.digest:
        message = (
            f"{adapter.source} has digest {found.digest}, expected {adapter.digest}; bytes under a lora_id never change"
        )
        raise Permanent(f"{message}: register the new ones under a new lora_id", code="digest_mismatch")
    base_model = adapter.base_model or found.base_model
    return replace(
        adapter, digest=found.digest, rank=found.rank, base_model=base_model, size_bytes=found.size_bytes or None
    )


def _check_loaded(lora: LoadedLora, adapter: Adapter) -> None:
    if lora.digest != adapter.digest:
        message = f"the worker loaded digest {lora.digest}, expected {adapter.digest}"
        raise Permanent(message, code="digest_mismatch")
    if lora.state != "ready":
        raise Transient(f"the worker answered state {lora.state!r} ({lora.error}), expected 'ready'")


def _key(action: Action) -> str:
    """One key an attempt: an agent that sees it twice may answer the second from the first."""
    return f"{action.operation}-{secrets.token_hex(8)}"
