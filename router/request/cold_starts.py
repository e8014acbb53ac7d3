"""Cold starts: requests for an adapter that is loaded nowhere wait here, and it is asked for once for all of them.

Requests for a base model of which no replica is ready wait here, too, while one is starting, or where its pool may be
at zero workers: then the orchestrator hears of them at once, and an autoscaler by its metrics.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from statistics import median
from types import MappingProxyType
from typing import Literal, Protocol
from urllib.parse import quote

import structlog
from pydantic_core import from_json

from lorafleet.identity import rendezvous_order
from lorafleet.service.loops import run_watched
from orchestrator.model.adapter_documents import EnsureAnswer, EnsureRequest
from orchestrator.model.catalog import CatalogAdapter
from router.core.errors import (
    AdapterFailed,
    ColdStartTimeout,
    DeadlineExceeded,
    LoadFailed,
    ModelNotFound,
    NoCapacity,
    NoReplica,
    RouterError,
    Saturated,
    without_places,
)
from router.core.fleet import Excluded, Replica
from router.core.queue.admission import QueueLimits, QueueUsage, WaitRefusal
from router.fleet.discovery import Discovery
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from router.telemetry.metrics import RouterMetrics
from workers.wire import LoadRequest

log = structlog.get_logger()

# Seconds between two calls to `ensure`, and the longest that one call waits at the orchestrator.
_ASK_AGAIN_S = 1.0
_ENSURE_WAIT_S = 3.0
# A request without a deadline of its own waits for the next attempt at a load that begins so soon: a guess.
_SOON_S = 5.0
# Retry-After until a load was measured: real ones take 4.4 s at the median, 8.2 s at the 99th percentile.
_DEFAULT_RETRY_S = 5.0
_AT_ZERO = "its pool has no ready worker, and is scaled from zero"
_BASE_NOT_KNOWN = "its base model is known once an orchestrator leads and has read its files"
_MEASURED_LOADS = 50
# Retry-After until an operator has started a worker that takes the adapter: a guess.
_OTHER_WORKER_S = 60.0
# The orchestrator's `wanted_for_s`: it goes on so long with an adapter that no request waits for any more.
_WANTED_FOR_S = 60.0


class Post(Protocol):
    """Post JSON to a path below a service's URL, and return the answer. May raise EngineLost and FetchRefused."""

    async def __call__(self, url: str, path: str, *, body: bytes, timeout_s: float) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LoadTrouble:
    """Why a load is not done yet, as clients may read it.

    kind      room: no worker has a slot; failure: no worker that takes the adapter can load it before `retry_at`;
              progress: its files are being fetched; starting: no replica of its base model is ready
    retry_at  by the clock of `ColdStarts`
    """

    kind: Literal["room", "failure", "progress", "starting"]
    text: str
    retry_at: float = -inf


def waits_for_retry(retry_in_s: float, left_s: float, *, has_deadline: bool) -> bool:
    """Whether a request waits for the next attempt at a load that has failed everywhere.

    left_s        seconds that the request may wait
    has_deadline  its client said how long it waits; other clients learn soon why it takes long
    """
    return retry_in_s < left_s and (has_deadline or retry_in_s <= _SOON_S)


@dataclass(slots=True)
class _ColdStart:
    """The one load of an adapter that any number of requests wait for.

    troubles  logged already: the adapter is asked for each second or two, and a line is not repeated
    """

    task: "asyncio.Task[None]"
    began_at: float
    is_measured: bool
    waiting: int = 0
    expected_s: float | None = None
    trouble: LoadTrouble | None = None
    troubles: set[tuple[str, ...]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ScaleFromZero:
    """What a router knows of pools that may have no worker.

    start_s     base model -> usual seconds until its first worker is ready
    wait_s      most seconds that a request waits for that worker
    report_due  set at a base model's first held request: the next usage report is due now
    """

    start_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    wait_s: float = 0.0
    report_due: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class ColdStarts:
    """Has adapters loaded for requests that wait for them, see `until_resident`.

    max_held, max_held_bytes  requests that may wait at once, and their bodies
    tenant_share              of either, for one tenant
    tenant_adapters           loads under way at once for one tenant
    holds                     counts the requests that waited, or were turned away
    held                      waiting requests and their bytes
    wanted, recently_wanted   adapters that requests of a tenant wait for, or waited for lately
    silent_after_s            an orchestrator that has not confirmed its catalog for so long hangs; an agent without a
                              report, too
    gone_after_s              an unreachable replica without a report for so long is not waited for
    from_zero                 the pools that may have no worker
    held_from_zero            waiting requests by base model, of base models in `from_zero`
    """

    post: Post
    discovery: Discovery
    metrics: RouterMetrics
    orchestrator_url: str
    timeout_s: float
    max_held: int
    max_held_bytes: float = inf
    tenant_share: float = 1.0
    tenant_adapters: float = inf
    silent_after_s: float = inf
    gone_after_s: float = 0.0
    from_zero: ScaleFromZero = field(default_factory=ScaleFromZero)
    clock: Callable[[], float] = time.monotonic
    loading: dict[str, _ColdStart] = field(default_factory=dict)
    held: QueueUsage = field(init=False)
    held_from_zero: Counter[str] = field(default_factory=Counter)
    wanted: dict[str, Counter[str]] = field(default_factory=dict)
    recently_wanted: dict[str, dict[str, float]] = field(default_factory=dict)
    loads_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED_LOADS))

    def __post_init__(self) -> None:
        """Set `held`, the usage of waiting requests, by the limits."""
        settings = "max_held_requests", "max_held_bytes"
        self.held = QueueUsage(QueueLimits(self.max_held, self.max_held_bytes, self.tenant_share, settings))

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of all waiting requests."""
        return self.held.size_bytes

    @contextmanager
    def _holding(self, tenant: str, size_bytes: int, base_model: str) -> Iterator[None]:
        """Count a request as waiting while the block runs; asks for a usage report at a base model's first one."""
        is_from_zero = base_model in self.from_zero.start_s
        self.held.add(tenant, size_bytes)
        if is_from_zero:
            self.held_from_zero[base_model] += 1
            if self.held_from_zero[base_model] == 1:
                self.from_zero.report_due.set()
        self.metrics.held.set(len(self.held))
        try:
            yield
        finally:
            self.held.remove(tenant, size_bytes)
            if is_from_zero:
                self.held_from_zero[base_model] -= 1
            self.metrics.held.set(len(self.held))

    def held_at_zero(self, base_model: str) -> int:
        """Requests that wait for the first ready worker of a base model; 0 once one is ready."""
        return self.held_from_zero[base_model] if self._is_at_zero(base_model) else 0

    def _is_at_zero(self, base_model: str) -> bool:
        """Whether the base model's pool may be at zero, and no replica of it is ready."""
        return base_model in self.from_zero.start_s and not any(
            replica.state == "ready" for replica in self.discovery.fleet.roster(base_model).replicas
        )

    async def _wait_until(
        self, holds: Callable[[], bool], base_model: str, *, began_at: float, left_s: float = inf
    ) -> float:
        """Wait for a condition, at most `timeout_s`, or longer if the base model's pool is at zero then or meanwhile.

        began_at, left_s  when the request's wait began, and the seconds of it that its deadline allows
        returns           the seconds that it might have waited without a deadline
        """
        ends_at, most_s = began_at + min(self.timeout_s, left_s), self.timeout_s
        if base_model in self.from_zero.start_s:

            def holds_or_at_zero() -> bool:
                """Whether the condition holds, or the pool is at zero."""
                return holds() or self._is_at_zero(base_model)

            await self.discovery.changes.until(holds_or_at_zero, timeout_s=max(0.0, ends_at - self.clock()))
            if not holds() and self._is_at_zero(base_model):
                most_s = max(self.timeout_s, self.from_zero.wait_s)
                ends_at = began_at + min(most_s, left_s)
        await self.discovery.changes.until(holds, timeout_s=max(0.0, ends_at - self.clock()))
        return most_s

    def _base_model_of(self, lora_id: str) -> str:
        """The base model of an adapter; "" where it is not known."""
        fleet = self.discovery.fleet
        adapter = fleet.adapters.get(lora_id)
        bases = fleet.base_models
        return (adapter and adapter.base_model) or (next(iter(bases)) if len(bases) == 1 else "")

    async def until_resident(
        self,
        lora_id: str,
        excluded: Callable[[], Excluded] = frozenset,
        *,
        tenant: str = "",
        size_bytes: int = 0,
        deadline_at: float | None = None,
        is_displaced: bool = False,
    ) -> CatalogAdapter:
        """The adapter, once some replica reports its exact digest as ready; at once when one does already.

        Begins its load where none is under way; the load is cancelled when no request waits for it any more.

        excluded     the replicas that may not get this request now
        tenant       of the request, see `tenant_share` and `tenant_adapters`
        size_bytes   of the request's body
        deadline_at  by `clock`: the client waits no longer
        is_displaced the request was admitted and queued before: it is not refused because too many wait

        raises  Saturated where too many requests wait; AdapterFailed, ModelNotFound and, where the adapter fits on no
                worker, NoCapacity by the orchestrator's word; LoadFailed where each worker has failed to load it, and
                the next attempt is far off; after `timeout_s` NoCapacity where there was no room, else
                ColdStartTimeout; DeadlineExceeded at an earlier deadline
        """
        adapter = self.discovery.fleet.resident_adapter(lora_id, excluded())
        if adapter is not None:
            return adapter
        if not is_displaced:
            self._check_limits(lora_id, tenant, size_bytes)
        start = self.loading.get(lora_id)
        if start is None:
            task = asyncio.create_task(self._load(lora_id))
            # Where only this request cannot use a replica that has it, no load is measured.
            is_there = self.discovery.fleet.resident_adapter(lora_id) is not None
            start = self.loading[lora_id] = _ColdStart(task, self.clock(), is_measured=is_there)
            # All requests may be served, or have left, before it fails: then its error is read here.
            start.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            start.task.add_done_callback(lambda _: self.discovery.changes.notify())
        wanted = self.wanted.setdefault(tenant, Counter())
        wanted[lora_id] += 1
        start.waiting += 1
        try:
            with self._holding(tenant, size_bytes, self._base_model_of(lora_id)):
                return await self._wait(lora_id, excluded, start, deadline_at)
        finally:
            wanted[lora_id] -= 1
            if not wanted[lora_id]:
                del wanted[lora_id]
                is_given_up = not start.task.done() and self.discovery.fleet.resident_adapter(lora_id) is None
                if is_given_up and self.tenant_adapters < inf:
                    self.recently_wanted.setdefault(tenant, {})[lora_id] = self.clock() + _WANTED_FOR_S
            if not wanted:
                del self.wanted[tenant]
            start.waiting -= 1
            if not start.waiting:
                start.task.cancel()
                del self.loading[lora_id]

    async def until_started(
        self,
        base_model: str,
        excluded: Callable[[], Excluded],
        *,
        tenant: str,
        size_bytes: int,
        deadline_at: float | None,
        grace_s: float = 0.0,
    ) -> None:
        """Hold a request while no replica may serve its base model, and one is expected: see `_is_any_expected`.

        Returns at once where a replica may serve it, and where none is expected: then the decision says why.

        excluded  the replicas that may not get this request now
        grace_s   the request was admitted before, and every replica failed it or went: it waits at least so long
        raises    Saturated where too many requests wait; DeadlineExceeded; NoReplica after `timeout_s`, or later where
                  the pool may be at zero
        """

        def is_back() -> bool:
            """Whether a replica is ready that may get the request."""
            replicas, barred = self.discovery.fleet.roster(base_model).replicas, excluded()
            return any(replica.state == "ready" and replica.incarnation not in barred for replica in replicas)

        # The last worker of a pool counts as ready until it has been silent for a while: then the pool is at zero.
        may_go_to_zero = bool(grace_s) and base_model in self.from_zero.start_s

        def is_over() -> bool:
            """Whether a replica may serve the request, or none is expected."""
            return is_back() or not (may_go_to_zero or self._is_any_expected(base_model))

        if is_back() or (not grace_s and is_over()):
            return
        refusal = None if grace_s else self.held.refusal(tenant, size_bytes)
        if refusal is not None:
            message = f"no replica of {base_model!r} is ready, and this cannot wait for one: {refusal.why}; try again"
            raise Saturated(message, limit=refusal.limit, retry_after_s=self._start_s(base_model))
        left_s = inf if deadline_at is None else deadline_at - self.clock()
        began_at = self.clock()
        with self._holding(tenant, size_bytes, base_model):
            if grace_s:
                await self.discovery.changes.until(is_back, timeout_s=min(grace_s, left_s))
            most_s = await self._wait_until(is_over, base_model, began_at=began_at, left_s=left_s)
        if is_over():
            return
        states = self._unready_states(base_model)
        if left_s < most_s:
            raise DeadlineExceeded(f"the deadline of this request passed before a replica was ready ({states})")
        message = f"no replica of {base_model!r} was ready within {most_s:g} s ({states}); try again"
        raise NoReplica(message, retry_after_s=self._start_s(base_model))

    def _start_s(self, base_model: str) -> float:
        """Usual seconds until a worker of the base model is ready; a default where none is configured."""
        return self.from_zero.start_s.get(base_model, _DEFAULT_RETRY_S)

    def _is_any_expected(self, base_model: str, rank: int | None = None) -> bool:
        """Whether a replica of the base model is starting, was lost a moment ago, or its pool may be at zero.

        rank  that takes adapters of such a rank; None: whether or not it takes adapters
        """
        return self._is_at_zero(base_model) or any(
            (rank is None or (not replica.refusal and rank <= (replica.max_lora_rank or inf)))
            and (replica.state == "starting" or (replica.state == "unreachable" and self._was_lost_lately(replica)))
            for replica in self.discovery.fleet.roster(base_model).replicas
        )

    def _was_lost_lately(self, replica: Replica) -> bool:
        """Whether the replica's last report is younger than `gone_after_s`."""
        age_s = self.discovery.report_age_s(replica.id)
        return age_s is not None and age_s < self.gone_after_s

    def _check_limits(self, lora_id: str, tenant: str, size_bytes: int) -> None:
        """Raise Saturated where this request may not wait for a cold start."""
        refusal = self.held.refusal(tenant, size_bytes)
        wanted = self._loading_for(tenant)
        if refusal is None and lora_id not in wanted and len(wanted) >= self.tenant_adapters:
            why = f"{len(wanted)} adapters are being loaded for you already, as many as may be for one tenant"
            refusal = WaitRefusal(why, "max_cold_adapters_per_tenant")
        if refusal is not None:
            raise Saturated(
                f"adapter {lora_id!r} is not loaded, and this cannot wait for it: {refusal.why}; try again",
                limit=refusal.limit,
                retry_after_s=self._usual_load_s(),
            )

    def _loading_for(self, tenant: str) -> set[str]:
        """Adapters that are being loaded for a tenant, also those that it no longer waits for.

        Of these it forgets old ones, those that are loaded, and those that were deleted.
        """
        now, registered = self.clock(), self.discovery.fleet.adapters
        left = {
            lora_id: until
            for lora_id, until in self.recently_wanted.pop(tenant, {}).items()
            if until > now and lora_id in registered and self.discovery.fleet.resident_adapter(lora_id) is None
        }
        if left:
            self.recently_wanted[tenant] = left
        return {*self.wanted.get(tenant, ()), *left}

    def _usual_load_s(self) -> float:
        """Median seconds of the measured loads; a default before any was measured."""
        return median(self.loads_s) if self.loads_s else _DEFAULT_RETRY_S

    async def _wait(
        self, lora_id: str, excluded: Callable[[], Excluded], start: _ColdStart, deadline_at: float | None
    ) -> CatalogAdapter:
        """Wait for a load until the timeout or deadline, and measure it. Raises as `until_resident`."""

        left_s = inf if deadline_at is None else deadline_at - self.clock()
        base_model = self._base_model_of(lora_id)
        start.is_measured = start.is_measured or self._is_at_zero(base_model)  # most of that is no load
        ends_at = self.clock() + min(self.timeout_s, left_s)

        def failed() -> bool:
            """Whether each worker has failed to load it, and the request does not wait for the next attempt."""
            trouble, now = start.trouble, self.clock()
            if trouble is None or trouble.kind != "failure":
                return False
            return not waits_for_retry(trouble.retry_at - now, ends_at - now, has_deadline=deadline_at is not None)

        def settled() -> bool:
            """Whether the load has ended or failed, or a replica that may get the request holds the adapter."""
            return (
                start.task.done() or self.discovery.fleet.resident_adapter(lora_id, excluded()) is not None or failed()
            )

        most_s = await self._wait_until(settled, base_model, began_at=self.clock(), left_s=left_s)
        adapter = self.discovery.fleet.resident_adapter(lora_id, excluded())
        if adapter is not None:
            if not start.is_measured:
                start.is_measured = True
                self.loads_s.append(min(self.timeout_s, self.clock() - start.began_at))
            return adapter
        if start.task.done() and not start.task.cancelled() and (failure := start.task.exception()) is not None:
            raise failure
        raise self._unloaded_error(lora_id, start, most_s, is_deadline=left_s < most_s and not failed())

    def _unloaded_error(self, lora_id: str, start: _ColdStart, most_s: float, *, is_deadline: bool) -> RouterError:
        """The error of a request that waits no longer, with what is known of the load.

        most_s       seconds that it was to wait at most
        is_deadline  the client's deadline came first
        """
        trouble = start.trouble
        why = "" if trouble is None else f": {trouble.text}"
        if is_deadline:
            return DeadlineExceeded(f"the deadline of this request passed before adapter {lora_id!r} was loaded{why}")
        if trouble is not None and trouble.kind == "starting":
            message = f"no replica for adapter {lora_id!r} was ready within {most_s:g} s{why}; try again"
            return NoReplica(message, retry_after_s=self._start_s(self._base_model_of(lora_id)))
        if trouble is not None and trouble.kind == "room":
            return NoCapacity(f"adapter {lora_id!r} has no room{why}", retry_after_s=self._usual_load_s())
        if trouble is not None and trouble.kind == "failure":
            retry_in_s = max(1.0, trouble.retry_at - self.clock())
            return LoadFailed(
                f"no worker can load adapter {lora_id!r}{why}; the next attempt is in {retry_in_s:.0f} s, or after:"
                f" lorafleet adapters retry {lora_id}",
                retry_after_s=retry_in_s,
            )
        return ColdStartTimeout(
            f"adapter {lora_id!r} was not loaded within {most_s:g} s{why}; it may be soon, try again",
            retry_after_s=start.expected_s or self._usual_load_s(),
        )

    async def _load(self, lora_id: str) -> None:
        """Ask for the adapter until it is refused, or no request waits any more (then this is cancelled).

        Counts each outcome, and polls the worker where the adapter was placed. Raises RouterError.
        """
        while True:
            adapter = self.discovery.fleet.adapters.get(lora_id)
            if adapter is not None and adapter.is_listed:
                # No one loads a listed adapter: its engine has to come back with it, and is polled anyway.
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            try:
                placed = await self._place(lora_id)
            except RouterError as exc:
                self.metrics.cold_starts.labels(exc.code).inc()
                raise
            self.metrics.cold_starts.labels("asked" if placed is None else "placed").inc()
            if placed is not None:
                self.discovery.poll_now(placed)
            await asyncio.sleep(_ASK_AGAIN_S if placed is None else _ASK_AGAIN_S / 4)

    async def _place(self, lora_id: str) -> str | None:
        """Ask the orchestrator or, in its absence, a home to load it. The worker where it is ready; None: not yet."""
        if not self.orchestrator_url:
            return await self._load_at_a_home(lora_id)
        try:
            return await self._ensure(lora_id)
        except (EngineLost, FetchRefused, ValueError) as exc:
            self._warn("orchestrator away, asking the adapter's homes itself", lora_id, exc)
            return await self._load_at_a_home(lora_id)

    async def _ensure(self, lora_id: str) -> str | None:
        """Ask the orchestrator to place it, and record progress. The worker where it is ready; None: not yet.

        Raises NoCapacity if it fits nowhere, the error of a refusal's status, or FetchRefused and EngineLost.
        """
        try:
            tenants = tuple(sorted(tenant for tenant, wanted in self.wanted.items() if lora_id in wanted))
            ask = EnsureRequest(wait_s=_ENSURE_WAIT_S, tenants=tenants)
            answer = await self._answer(f"/v1/adapters/{quote(lora_id)}/ensure", ask.model_dump_json().encode())
        except FetchRefused as exc:
            if exc.status == HTTPStatus.NOT_FOUND:
                raise ModelNotFound(_refusal_message(exc)) from exc
            if exc.status == HTTPStatus.CONFLICT:
                raise AdapterFailed(_refusal_message(exc), lora_id=lora_id) from exc
            raise
        answered = EnsureAnswer.model_validate_json(answer)
        if answered.fits_nowhere and not answered.ready:
            raise NoCapacity(
                f"adapter {lora_id!r} fits on no worker: {without_places(answered.error or 'no reason is given')}",
                retry_after_s=_OTHER_WORKER_S,
            )
        trouble = _not_ready_reason(answered, self.clock())
        base_model = self._base_model_of(lora_id)
        is_any_ready = any(replica.state == "ready" for replica in self.discovery.fleet.roster(base_model).replicas)
        states = "" if is_any_ready else self._unready_states(base_model)
        if states and not answered.ready and (trouble is None or trouble.kind == "room"):
            trouble = LoadTrouble("starting", states)
        self._record_progress(lora_id, answered.expected_s, trouble)
        return answered.ready[0] if answered.ready else None

    def _unready_states(self, base_model: str) -> str:
        """The states of a base model's replicas that are not ready, or that its pool is at zero; "" with neither."""
        replicas = self.discovery.fleet.roster(base_model).replicas
        states = ", ".join(f"{replica.id}: {replica.state}" for replica in replicas if replica.state != "ready")
        return states or (_AT_ZERO if self._is_at_zero(base_model) else "")

    async def _answer(self, path: str, body: bytes) -> bytes:
        """Post to the orchestrator; its answer, which may take a while.

        Raises EngineLost at once where it is silent to all.
        """

        def check_silence() -> None:
            """Raise EngineLost where the orchestrator has not confirmed its catalog for `silent_after_s`."""
            age_s = self.discovery.catalog_age_s()
            if age_s is not None and age_s > self.silent_after_s:
                raise EngineLost("no_answer_in_time", f"the orchestrator has said nothing for {age_s:.1f} s")

        asking = self.post(self.orchestrator_url, path, body=body, timeout_s=_ENSURE_WAIT_S + 5.0)
        return await run_watched(asking, check_silence, every_s=_ASK_AGAIN_S)

    def _record_progress(self, lora_id: str, expected_s: float | None, trouble: LoadTrouble | None) -> None:
        """Record a load's expected seconds, and why it is not done. A load that had no room or failed is not measured.

        Requests that wait no longer because of a failure are woken.
        """
        start = self.loading.get(lora_id)
        if start is not None:
            start.expected_s, start.trouble = expected_s, trouble
            start.is_measured = start.is_measured or (trouble is not None and trouble.kind != "progress")
            if trouble is not None and trouble.kind == "failure":
                self.discovery.changes.notify()

    async def _load_at_a_home(self, lora_id: str) -> str | None:
        """Have the adapter loaded by its rendezvous home, or the next one that can; None: by none of them.

        All routers ask in the same order, so that they fill the same home. Records why none does. An adapter that no
        orchestrator has inspected yet has no home: requests wait for an orchestrator.

        raises  ModelNotFound; NoReplica and NoCapacity where there is no home
        """
        adapter = self.discovery.fleet.adapters.get(lora_id)
        if adapter is None:
            raise ModelNotFound(f"adapter {lora_id!r} is no longer registered", param="lora_id")
        homes = self.able_replicas(adapter)
        if not homes:
            self._record_progress(lora_id, None, self._missing_home(adapter))
            return None
        wanted = LoadRequest(
            lora_id=lora_id,
            source=adapter.source,
            base_model=adapter.base_model,
            digest=adapter.digest,
            secret=adapter.secret,
            acceptance=adapter.acceptance,
            ignored_modules=adapter.ignored_modules,
            is_awaited=True,
        )
        body = wanted.model_dump_json(exclude_none=True).encode()
        full = 0
        failed, retry_in_s = "", _ASK_AGAIN_S
        for home in homes:
            try:
                await self._load_at(home, body)
            except (EngineLost, FetchRefused) as exc:
                self._warn("home does not load it", lora_id, exc, worker=home.id)
                if isinstance(exc, EngineLost):
                    continue
                code = _refusal_error(exc).get("code")
                full += (exc.status, code) == (409, "no_free_slot")
                failed = f"{home.id}: {_refusal_message(exc)}"
                if exc.status in _ADAPTERS_OWN or code == "digest_mismatch":
                    retry_in_s = _OTHER_WORKER_S
                    break  # the next one would fetch the same bytes, and its engine would stall over them
            else:
                return home.id
        if full:
            # The orchestrator, which decides what makes room, may be back soon: requests go on waiting.
            what = f"its home {homes[0].id!r} has no free slot"
            if len(homes) > 1:
                what = f"none of the {len(homes)} workers that take it has a free slot"
            text = f"{what}, and no orchestrator decides which adapter makes room"
            self._record_progress(lora_id, None, LoadTrouble("room", text))
        elif failed:
            self._record_progress(lora_id, None, LoadTrouble("failure", failed, self.clock() + retry_in_s))
        return None

    def _missing_home(self, adapter: CatalogAdapter) -> LoadTrouble:
        """Why an adapter that may have a home soon has none yet. Raises NoReplica and NoCapacity for all others."""
        if adapter.base_model is None and self.discovery.fleet.replicas:
            return LoadTrouble("starting", _BASE_NOT_KNOWN)
        self._check_accepted(adapter)
        if not self._is_any_expected(adapter.base_model or "", adapter.rank):
            what = repr(adapter.base_model) if adapter.base_model else "any base model"
            raise NoReplica(f"no replica of {what} is there that could load adapter {adapter.lora_id!r}")
        return LoadTrouble("starting", self._unready_states(adapter.base_model or ""))

    def _check_accepted(self, adapter: CatalogAdapter) -> None:
        """Raise NoCapacity where no worker of its base model accepts adapters."""
        replicas = self.discovery.fleet.roster(adapter.base_model or "").replicas
        if replicas and all(replica.refusal for replica in replicas):
            raise NoCapacity(
                f"adapter {adapter.lora_id!r} fits on no worker: {replicas[0].id}: {replicas[0].refusal}",
                retry_after_s=_OTHER_WORKER_S,
            )

    async def _load_at(self, home: Replica, body: bytes) -> None:
        """Have this worker load it. Raises FetchRefused, and EngineLost: at once where its agent is silent to all."""

        def check_silence() -> None:
            """Raise EngineLost where the worker's agent is silent."""
            if self._is_silent(home):
                raise EngineLost("no_answer_in_time", f"the agent of worker {home.id!r} has said nothing for a while")

        asking = self.post(home.agent_url, "/v1/admin/load_lora", body=body, timeout_s=self.timeout_s)
        await run_watched(asking, check_silence, every_s=_ASK_AGAIN_S)

    def _is_silent(self, replica: Replica) -> bool:
        """Whether this worker's agent has sent no report for `silent_after_s`."""
        age_s = self.discovery.report_age_s(replica.id)
        return age_s is None or age_s > self.silent_after_s

    def _warn(self, what: str, lora_id: str, cause: Exception, **about: str) -> None:
        """Log a trouble of this adapter's cold start, each kind once."""
        start = self.loading.get(lora_id)
        trouble = (what, type(cause).__name__, *about.values())
        if start is None or trouble not in start.troubles:
            log.warning(what, lora_id=lora_id, error=repr(cause), **about)
        if start is not None:
            start.troubles.add(trouble)

    def able_replicas(self, adapter: CatalogAdapter) -> list[Replica]:
        """The replicas that may load an adapter, in the orchestrator's rendezvous order; last those that hang now."""
        able = [
            replica
            for replica in self.discovery.fleet.roster(adapter.base_model or "").replicas
            if replica.state == "ready"
            and not replica.is_ending
            and replica.agent_url
            and not replica.refusal
            and adapter.lora_id not in self.discovery.kept_out(replica.id)
            and adapter.rank <= (replica.max_lora_rank or inf)
        ]
        order = rendezvous_order(adapter.lora_id, able)
        return sorted(order, key=lambda replica: replica.is_suspect or self._is_silent(replica))


# Statuses by which an agent refuses the adapter itself, as any other agent would. Others are about that worker alone.
_ADAPTERS_OWN = frozenset({400, 413, 422})


def _refusal_error(refused: FetchRefused) -> dict[str, object]:
    """The `error` object of a refused request's answer; empty where it has none."""
    try:
        error = from_json(refused.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _refusal_message(refused: FetchRefused) -> str:
    """The error message of a refused request's answer, without places; else one with its status."""
    answered = _refusal_error(refused).get("message")
    return without_places(str(answered)) if answered else f"the control plane answered {refused.status}"


def _not_ready_reason(answered: EnsureAnswer, now: float) -> LoadTrouble | None:
    """Why the adapter is not ready, by the orchestrator's answer; None: it is, or nothing is known."""
    if answered.ready:
        return None
    if answered.loading:
        return LoadTrouble("progress", without_places(answered.progress)) if answered.progress else None
    if answered.error is None:
        return None
    text = without_places(answered.error)
    if answered.retry_in_s is None:
        return LoadTrouble("room", text)
    return LoadTrouble("failure", text, now + answered.retry_in_s)
