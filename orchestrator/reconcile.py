"""observe -> place -> diff -> act, again and again.

Level-driven: each pass starts from what is wanted and what was last reported, so a lost event, a failed action or a
restart costs one pass and nothing else. A pass itself never waits: it starts actions, each in its own task with its
own deadline, and every end of an action asks for the next pass. What is under way is part of what is observed.
"""

import asyncio
import contextlib
import secrets
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import structlog

from orchestrator.agents import Agents
from orchestrator.catalog import CatalogBook
from orchestrator.config import OrchestratorSettings
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import Permanent, Transient
from orchestrator.core.placement import place
from orchestrator.core.plan import Action, Drain, diff, drains_wanted, is_drained
from orchestrator.core.state import Adapter, Desired, Failure, Held, Observed, Pair, Want
from orchestrator.fleet import Change, Fleet, answering, state_of
from orchestrator.metrics import Metrics
from orchestrator.store import Store
from orchestrator.wire import CatalogWorker, Draining
from workers.wire import AvailableLora, DrainRequest, InspectRequest, LoadedLora, LoadRequest, Metadata, UnloadRequest

log = structlog.get_logger()

# Failures of the moment, and how long one counts: less than a restart takes, more than a pass.
PASSING_CODES = frozenset({"worker_unreachable", "engine_unreachable", "engine_down", "not_ready", "draining"})
PASSING_S = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """What the last pass saw and decided; reads are answered from it."""

    observed: Observed
    desired: Desired


class Reconciler:
    """The loop and all that only it may touch: drains, failures, actions under way."""

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        store: Store,
        fleet: Fleet,
        demand: DemandBook,
        catalog: CatalogBook,
        agents: Agents,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: Random | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.fleet = fleet
        self.demand = demand
        self.catalog = catalog
        self._agents = agents
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._rng = rng or Random()
        self._started_at = clock()
        self._due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: Counter[str] = Counter()
        self._loading: dict[Pair, str] = {}
        self._load_began: dict[Pair, float] = {}
        self._inspecting: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._drains: dict[Pair, Drain] = {}
        self._owed: dict[Pair, str] = {}
        self._load_seconds: deque[float] = deque(maxlen=100)
        self.failures: dict[Pair, Failure] = {}
        self.view = View(Observed(), Desired())

    # -- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pass after pass, until cancelled; the worst of them costs a wait, never the loop."""
        wait_s = 0.0
        while True:
            try:
                self._due.clear()
                self.run_pass()
                wait_s = 0.0
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

    def changed(self) -> None:
        """Intent changed: routers may see it now, and a pass is due."""
        self.refresh_catalog()
        self.poke()

    def ensure(self, lora_id: str, want: Want) -> None:
        """Somebody needs this adapter; a pass is due if that is news."""
        if self.demand.want(lora_id, want, self._clock() + self.settings.wanted_for_s):
            self.poke()

    def clipped(self, lora_id: str, replicas: int) -> int:
        """No more replicas than the policy allows, however many are asked for."""
        adapter = self.store.adapters.get(lora_id)
        most = None if adapter is None else adapter.max_replicas
        return min(replicas, self.store.rules.max_replicas if most is None else most)

    def forget_failures(self, lora_id: str) -> None:
        """Let the adapter be tried anywhere again."""
        self.failures = {pair: failure for pair, failure in self.failures.items() if pair[0] != lora_id}

    @property
    def has_drains(self) -> bool:
        return bool(self._drains)

    async def stop(self) -> None:
        """Let go of everything under way. Agents finish what they began; the next start sees what came of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Until no action is under way; for tests and for an orderly look at the result of one pass."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def is_settled(self) -> bool:
        """Whether the fleet has had time to speak since our start, so that silence means absence."""
        return self._clock() - self._started_at >= self.settings.settle_s

    def _next_pass_s(self) -> float:
        left = self._started_at + self.settings.settle_s - self._clock()
        return min(self.settings.pass_interval_s, left) if left > 0 else self.settings.pass_interval_s

    # -- one pass ---------------------------------------------------------------------------------------------

    def run_pass(self) -> list[Action]:
        """Observe, place, diff, act. Returns what was started. Safe to repeat, to miss, and to interrupt."""
        began = time.perf_counter()
        self._probe_the_silent()
        self._drop_what_is_over()
        desired, observed, actions = self._decide()
        self.view = View(observed, desired)
        self._end_drains(desired)
        for action in actions:
            self._start(action)
        self.refresh_catalog()
        self._metrics.pass_seconds.observe(time.perf_counter() - began)
        return actions

    def plan(self) -> tuple[Desired, list[Action]]:
        """What a pass would decide now; starts nothing."""
        desired, _, actions = self._decide()
        return desired, actions

    def observe(self) -> Observed:
        """The fleet now, with what we have under way in it."""
        return self.fleet.snapshot(
            self.store.workers,
            failures=self.failures,
            busy=self._busy,
            loading=self._loading,
            draining=self._drains,
            inspecting=self._inspecting,
            owed=self._owed,
            digests=self._digest,
        )

    def _digest(self, lora_id: str) -> str | None:
        adapter = self.store.adapters.get(lora_id)
        return None if adapter is None else adapter.digest

    def _decide(self) -> tuple[Desired, Observed, list[Action]]:
        now = self._clock()
        observed = self.observe()
        if not self.is_settled:
            return Desired(), observed, []
        desired = place(self.store.intent, observed, self.demand.snapshot(now), self.store.rules, now)
        desired = replace(desired, leaving=tuple(name for name in desired.leaving if name not in self._leaving))
        inspects = self.settings.inspects_in_flight - len(self._inspecting)
        return desired, observed, diff(desired, observed, self._drained(observed), self.store.rules, inspects, now)

    def _drained(self, observed: Observed) -> dict[Pair, bool]:
        now, routers = self._clock(), self.demand.live_routers(self._clock())
        return {
            pair: worker is None or is_drained(drain, routers, worker, now)
            for pair, drain in self._drains.items()
            for worker in (observed.workers.get(drain.worker_id),)
        }

    def _drop_what_is_over(self) -> None:
        now = self._clock()
        self.failures = {pair: failure for pair, failure in self.failures.items() if failure.until > now}
        for worker_id in self.fleet.forget(self.settings.forget_after_s):
            log.info("worker forgotten", worker_id=worker_id)
        for lora_id, want in self.demand.wants().items():
            if lora_id not in self.store.adapters or len(self.ready_on(lora_id)) >= want.replicas:
                self.demand.satisfied(lora_id)
        if self.is_settled:
            self._finish_deletions()

    def _finish_deletions(self) -> None:
        deleting = [adapter for adapter in self.store.adapters.values() if adapter.is_deleting]
        if not deleting:
            return
        held = {lora_id for worker in self.observe().workers.values() for lora_id in worker.held}
        held |= self._inspecting.keys()
        for adapter in deleting:
            if adapter.lora_id not in held:
                self.store.drop_adapter(adapter.lora_id)
                self.demand.forget(adapter.lora_id)
                log.info("adapter deleted", lora_id=adapter.lora_id)

    def _end_drains(self, desired: Desired) -> None:
        """A mark that no pass asks for any more is lifted, unless an action that relies on it is under way."""
        if not self.is_settled:
            return
        wanted = drains_wanted(desired)
        for pair in [pair for pair in self._drains if pair not in wanted and not self._busy[pair[1]]]:
            del self._drains[pair]
        self._owed = {pair: lora_id for pair, lora_id in self._owed.items() if pair in wanted or self._busy[pair[1]]}

    # -- observe ----------------------------------------------------------------------------------------------

    def hear(self, report: Metadata) -> None:
        """An agent's heartbeat."""
        if report.epoch >= self.store.epoch + 1:
            self.store.raise_epoch(report.epoch)
        self._take(report.instance_id, self.fleet.hear(report))

    def _take(self, worker_id: str, change: Change) -> None:
        """Adapters that went with an engine or a worker, and not by our doing, are wanted back."""
        now = self._clock()
        for lora_id in change.vanished:
            adapter = self.store.adapters.get(lora_id)
            if adapter is None or adapter.is_deleting or (lora_id, worker_id) in self._drains:
                continue
            is_hot = self.demand.rate(lora_id, now) > 0
            want = Want(replicas=len(self.ready_on(lora_id)) + 1, may_evict=is_hot)
            self.demand.want(lora_id, want, now + self.settings.wanted_for_s)
            log.info("adapter lost its place", lora_id=lora_id, worker_id=worker_id)
        if change.is_news:
            self.poke()

    def _probe_the_silent(self) -> None:
        for worker_id in self.fleet.silent(self.settings.probe_after_s):
            self._spawn(self._probe(worker_id))

    async def _probe(self, worker_id: str) -> None:
        entry = self.fleet.entries[worker_id]
        report, timeout_s = entry.report, self.settings.probe_timeout_s
        try:
            fresh = await self._agents.metadata(report.agent_url, timeout_s=timeout_s)
        except Transient:
            pass
        else:
            if fresh.instance_id == worker_id:
                self.hear(fresh)
                return
        try:
            models = await self._agents.engine_models(report.transport.engine_url, timeout_s=timeout_s)
        except Transient:
            if self._is_heard_again(worker_id) or self._clock() - entry.heard_at < self.settings.lost_after_s:
                return
            log.warning("worker lost", worker_id=worker_id, silent_s=round(self._clock() - entry.heard_at, 1))
            self._take(worker_id, self.fleet.nobody_answers(worker_id))
        else:
            if not self._is_heard_again(worker_id):
                self._take(worker_id, self.fleet.engine_answers(worker_id, models))

    def _is_heard_again(self, worker_id: str) -> bool:
        """A heartbeat that came while we probed beats what the probe found."""
        entry = self.fleet.entries.get(worker_id)
        return entry is None or self._clock() - entry.heard_at < self.settings.probe_after_s

    # -- act --------------------------------------------------------------------------------------------------

    def _start(self, action: Action) -> None:
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
            self._leaving.add(action.worker_id)
            self._spawn(self._drain_worker(action))
        elif action.operation == "inspect":
            self._inspecting[action.lora_id] = action.worker_id
            self._spawn(self._guarded(action, self._inspect(action), self.settings.inspect_timeout_s))
        elif action.operation == "load":
            adapter = self.store.adapters[action.lora_id]
            pair = (action.lora_id, action.worker_id)
            self._busy[action.worker_id] += 1
            self._loading[pair] = adapter.digest or ""
            self._load_began[pair] = self._clock()
            self._spawn(self._guarded(action, self._load(action, adapter), self.settings.load_timeout_s))
        else:
            self._busy[action.worker_id] += 1
            self._spawn(self._guarded(action, self._unload(action), self.settings.unload_timeout_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        self.refresh_catalog()
        self.poke()

    def _ended(self, action: Action) -> None:
        if action.operation == "inspect":
            self._inspecting.pop(action.lora_id, None)
            return
        self._busy[action.worker_id] -= 1
        if action.operation == "load":
            self._loading.pop((action.lora_id, action.worker_id), None)
            self._load_began.pop((action.lora_id, action.worker_id), None)

    def _failed(self, action: Action, code: str, message: str, retry_after_s: float | None) -> None:
        # A worker that is starting again is a matter of moments, and somebody's request may be waiting for it.
        expiry_s = PASSING_S if code in PASSING_CODES else self.store.rules.failure_expiry_s
        until = self._clock() + max(expiry_s, retry_after_s or 0.0)
        self.failures[action.lora_id, action.worker_id] = Failure(until=until, code=code, message=message)
        where = {"lora_id": action.lora_id, "worker_id": action.worker_id}
        log.warning("action failed", operation=action.operation, **where, code=code, error=message)
        self.catalog.emit(f"{action.operation}_failed", **where, message=f"{code}: {message}")

    def _refused(self, action: Action, exc: Permanent) -> None:
        """The bytes are at fault: quarantine. Unless only the base model did not fit, and there are others to try."""
        self._failed(action, exc.code, str(exc), None)
        adapter = self.store.adapters.get(action.lora_id)
        if adapter is None or adapter.is_deleting:
            return
        if exc.code == "base_model_mismatch" and adapter.base_model is None and self._has_other_base(action):
            return
        self.store.put_adapter(replace(adapter, quarantine=f"{exc.code}: {exc}"))
        log.warning("adapter quarantined", lora_id=action.lora_id, code=exc.code, error=str(exc))

    def _has_other_base(self, action: Action) -> bool:
        """Whether a worker of another base model, that has not refused this adapter, could be asked."""
        now, observed = self._clock(), self.observe()
        tried = observed.workers.get(action.worker_id)
        refused = tried.base_models if tried is not None else frozenset()
        others = [w for w in observed.workers.values() if w.state == "ready" and not (w.base_models & refused)]
        for worker in observed.workers.values():
            if worker.base_models & refused:
                failure = self.failures[action.lora_id, action.worker_id]
                self.failures[action.lora_id, worker.id] = failure
        return any(observed.failed(action.lora_id, w.id, now) is None for w in others)

    async def _inspect(self, action: Action) -> None:
        adapter = self.store.adapters[action.lora_id]
        found = await self._agents.inspect(
            self._agent_url(action.worker_id),
            InspectRequest(lora_id=adapter.lora_id, source=adapter.source, base_model=adapter.base_model),
            key=_key(action),
            timeout_s=self.settings.inspect_timeout_s,
        )
        known = with_manifest(adapter, found)
        current = self.store.adapters.get(action.lora_id)
        if current is not None and not current.is_deleting and current.source == adapter.source:
            # Compared with the row as it is now: a policy changed meanwhile must not be written back.
            self.store.compare_and_set(
                current, replace(current, **{name: getattr(known, name) for name in _MANIFEST_FIELDS})
            )
            self.catalog.emit("adapter_inspected", lora_id=action.lora_id, worker_id=action.worker_id)

    async def inspect_only(self, adapter: Adapter, worker_id: str) -> Adapter:
        """A dry run: what an agent says about bytes that nobody registered. Raises Permanent or Transient."""
        ask = InspectRequest(lora_id=adapter.lora_id, source=adapter.source, base_model=adapter.base_model)
        found = await self._agents.inspect(
            self._agent_url(worker_id), ask, key=secrets.token_hex(8), timeout_s=self.settings.inspect_timeout_s
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
        url, timeout_s = self._agent_url(action.worker_id), self.settings.load_timeout_s
        lora = await self._agents.load(url, ask, key=_key(action), timeout_s=timeout_s)
        _check_loaded(lora, adapter)
        self._load_seconds.append(self._clock() - began)
        self.fleet.loaded(action.worker_id, lora, evicted)
        if action.evict_after is not None:
            self._owed[action.evict_after, action.worker_id] = action.lora_id
        if action.evict is not None:
            self._drains.pop((action.evict, action.worker_id), None)
            self.catalog.emit(
                "evicted", lora_id=action.evict, worker_id=action.worker_id, message=f"made room for {action.lora_id}"
            )
        self.catalog.emit("loaded", lora_id=action.lora_id, worker_id=action.worker_id)

    async def _unload(self, action: Action) -> None:
        held, timeout_s = self._held(action.lora_id, action.worker_id), self.settings.unload_timeout_s
        ask = UnloadRequest(lora_id=action.lora_id, digest=held.digest or None)
        await self._agents.unload(self._agent_url(action.worker_id), ask, key=_key(action), timeout_s=timeout_s)
        self.fleet.unloaded(action.worker_id, held.engine_name)
        self._drains.pop((action.lora_id, action.worker_id), None)
        self.catalog.emit("unloaded", lora_id=action.lora_id, worker_id=action.worker_id, message=action.reason)

    async def _drain_worker(self, action: Action) -> None:
        try:
            ask = DrainRequest(deadline_s=self.store.rules.drain_deadline_s)
            # The agent answers when its engine is empty, or at that deadline.
            timeout_s = ask.deadline_s + self.settings.unload_timeout_s
            url = self._agent_url(action.worker_id)
            await self._agents.drain(url, ask, key=_key(action), timeout_s=timeout_s)
        except (Transient, Permanent) as exc:
            self._leaving.discard(action.worker_id)  # the next pass asks again
            log.warning("worker not drained", worker_id=action.worker_id, error=str(exc))
        else:
            self.catalog.emit("worker_draining", worker_id=action.worker_id)

    def undrained(self, worker_id: str) -> None:
        """The worker may be asked to drain again, one day."""
        self._leaving.discard(worker_id)

    def _mark_draining(self, action: Action) -> None:
        now, pair = self._clock(), (action.lora_id, action.worker_id)
        mark = Drain(
            lora_id=action.lora_id,
            worker_id=action.worker_id,
            engine_name=self._held(action.lora_id, action.worker_id).engine_name,
            revision=0,
            since=now,
            deadline=now + self.store.rules.drain_deadline_s,
            reason=action.reason,
        )
        self._drains[pair] = mark
        # Only now is there a catalog that forbids new requests, and a revision for routers to confirm.
        self.refresh_catalog()
        self._drains[pair] = replace(mark, revision=self.catalog.revision)
        self._metrics.operations.labels("drain", "ok").inc()

    def _held(self, lora_id: str, worker_id: str) -> Held:
        """The adapter there, as reported. Raises Transient when it went meanwhile."""
        worker = self.observe().workers.get(worker_id)
        held = None if worker is None else worker.held.get(lora_id)
        if held is None:
            raise Transient(f"{lora_id} is no longer on worker {worker_id}", code="not_loaded")
        return held

    def _agent_url(self, worker_id: str) -> str:
        entry = self.fleet.entries.get(worker_id)
        if entry is None or not entry.report.agent_url:
            raise Transient(f"worker {worker_id} has no agent_url in its report", code="worker_unreachable")
        return entry.report.agent_url

    # -- what reads see ---------------------------------------------------------------------------------------

    def ready_on(self, lora_id: str) -> list[str]:
        """Workers where the adapter answers requests now: the right bytes, not draining."""
        return sorted(
            worker_id
            for worker_id, entry in self.fleet.entries.items()
            if any(lora.lora_id == lora_id and self._is_ready(lora, worker_id) for lora in answering(entry))
        )

    def ready_table(self) -> dict[str, list[str]]:
        """`ready_on` of every adapter that is ready anywhere, in one walk over the fleet."""
        table: dict[str, list[str]] = {}
        for worker_id, entry in sorted(self.fleet.entries.items()):
            for lora in answering(entry):
                if self._is_ready(lora, worker_id):
                    table.setdefault(lora.lora_id, []).append(worker_id)
        return table

    def _is_ready(self, lora: LoadedLora, worker_id: str) -> bool:
        if lora.state != "ready" or (lora.lora_id, worker_id) in self._drains:
            return False
        return lora.digest != "" and lora.digest == self._digest(lora.lora_id)

    def loading_on(self, lora_id: str) -> list[str]:
        return sorted(worker_id for name, worker_id in self._loading if name == lora_id)

    def expected_s(self, lora_id: str) -> float | None:
        """Seconds until it should be there, by the median of the last hundred loads; None when none was measured."""
        if not self._load_seconds:
            return None
        median = statistics.median(self._load_seconds)
        began = [at for (name, _), at in self._load_began.items() if name == lora_id]
        return round(max(0.0, median - (self._clock() - min(began))) if began else median, 3)

    def last_error(self, lora_id: str) -> str | None:
        """Why the adapter is not, or not often enough, where it should be."""
        adapter = self.store.adapters.get(lora_id)
        if adapter is not None and adapter.quarantine is not None:
            return adapter.quarantine
        now = self._clock()
        failures = [f for (name, _), f in self.failures.items() if name == lora_id and f.until > now]
        if failures:
            newest = max(failures, key=lambda failure: failure.until)
            return f"{newest.code}: {newest.message}"
        return self.view.desired.unplaced.get(lora_id)

    def states(self) -> dict[str, tuple[str, str | None]]:
        """lora_id -> (adapter state, error), for all registered adapters at once."""
        ready = self.ready_table()
        loading = {lora_id for lora_id, _ in self._loading}
        failed = {lora_id for lora_id, _ in self.failures} | self.view.desired.unplaced.keys()
        return {
            lora_id: (
                _state(adapter, lora_id in ready, lora_id in loading, lora_id in self._inspecting),
                self.last_error(lora_id) if adapter.quarantine is not None or lora_id in failed else None,
            )
            for lora_id, adapter in self.store.adapters.items()
        }

    def state_of(self, adapter: Adapter, ready: Mapping[str, Sequence[str]]) -> str:
        """One word for an adapter. `ready`: where it is ready, as `ready_table` says."""
        lora_id = adapter.lora_id
        is_loading = any(name == lora_id for name, _ in self._loading)
        return _state(adapter, bool(ready.get(lora_id)), is_loading, lora_id in self._inspecting)

    def refresh_catalog(self) -> None:
        """Make what routers follow agree with what is known now."""
        workers = {
            name: CatalogWorker.model_validate(
                {
                    "id": name,
                    "agent_url": entry.report.agent_url,
                    "state": state_of(entry, self.store.workers.get(name)),
                }
            )
            for name, entry in self.fleet.entries.items()
        }
        draining = tuple(
            Draining(worker_id=worker_id, lora_id=lora_id, digest=self._digest_on(lora_id, worker_id))
            for lora_id, worker_id in sorted(self._drains)
        )
        self.catalog.refresh(self.states(), workers, draining)

    def _digest_on(self, lora_id: str, worker_id: str) -> str:
        entry = self.fleet.entries.get(worker_id)
        loras = entry.report.lora.loaded_loras if entry is not None else ()
        return next((lora.digest for lora in loras if lora.lora_id == lora_id), "")


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


def _state(adapter: Adapter, is_ready: bool, is_loading: bool, is_inspecting: bool) -> str:
    if adapter.is_deleting:
        return "deleting"
    if adapter.quarantine is not None:
        return "failed"
    if not adapter.is_inspected:
        return "inspecting" if is_inspecting else "registered"
    if is_ready:
        return "ready"
    return "loading" if is_loading else "registered"


def _key(action: Action) -> str:
    """One key an attempt: an agent that sees it twice may answer the second from the first."""
    return f"{action.operation}-{secrets.token_hex(8)}"
