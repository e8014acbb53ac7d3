"""Adapters that are loaded nowhere: ask once for each, however many requests wait, and hold those for a while."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Protocol
from urllib.parse import quote

import structlog
from pydantic_core import from_json

from lorafleet.identity import rendezvous_order
from lorafleet.service.loops import watched
from orchestrator.wire import EnsureAnswer, EnsureRequest
from router.core.errors import (
    AdapterFailed,
    ColdStartTimeout,
    DeadlineExceeded,
    ModelNotFound,
    NoCapacity,
    NoReplica,
    RouterError,
    Saturated,
    without_addresses,
)
from router.core.fleet import Excluded, Replica, RoutableAdapter
from router.core.queue.admission import QueueLimits, QueueUsage
from router.fleet.discovery import Discovery
from router.fleet.usage_report import HeldRequests
from router.http.engine_pool import EngineLost
from router.http.fetch import FetchRefused
from router.telemetry.metrics import RouterMetrics
from workers.wire import LoadRequest

log = structlog.get_logger()

_ASK_AGAIN_S = 1.0
# One call to `ensure` waits at the orchestrator for at most so long; then it is asked again.
_ENSURE_WAIT_S = 10.0
# Until a load has been seen: real ones take 4.4 s at the median, 8.2 s at the 99th percentile.
_DEFAULT_RETRY_S = 5.0
_MEASURED_LOADS = 50
# Until somebody has started a worker that takes what none does: a guess.
_OTHER_WORKER_S = 60.0
# The orchestrator goes on for so long with an adapter that nobody waits for any more; its `wanted_for_s`.
_WANTED_FOR_S = 60.0


class Post(Protocol):
    """A body of JSON to a path below a house's URL, and what it answers; may raise EngineLost and Refused."""

    async def __call__(self, url: str, path: str, *, body: bytes, timeout_s: float) -> bytes: ...


@dataclass(slots=True)
class _Flight:
    """The one load of an adapter that any number of requests wait for."""

    task: "asyncio.Task[None]"
    began_at: float
    is_measured: bool
    waiting: int = 0
    expected_s: float | None = None
    stuck: str | None = None
    troubles: set[tuple[str, ...]] = field(default_factory=set)
    """What the log was told of it: it is asked for each second or two, and the same is not said again."""


@dataclass(slots=True)
class ColdStarts:
    """Brings an adapter to where a request can run; see `until_resident`.

    post                      how orchestrator and agents are asked
    max_held, max_held_bytes  requests that may wait at once, and what they hold in memory
    tenant_share              of either, for one tenant
    tenant_adapters           that may be brought for one tenant at once
    holds                     told of each request that waited or was turned away
    silent_after_s            an orchestrator that has not confirmed its catalog for so long hangs, and so does an agent
                              without a report
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
    holds: HeldRequests = field(default_factory=HeldRequests)
    silent_after_s: float = inf
    clock: Callable[[], float] = time.monotonic
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _held: QueueUsage = field(init=False)
    _wanted: dict[str, Counter[str]] = field(default_factory=dict)
    _left: dict[str, dict[str, float]] = field(default_factory=dict)
    _loads_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED_LOADS))

    def __post_init__(self) -> None:
        self._held = QueueUsage(QueueLimits(self.max_held, self.max_held_bytes, self.tenant_share))

    @property
    def held_bytes(self) -> int:
        """What the bodies of all that wait take."""
        return self._held.size_bytes

    def resident(self, lora_id: str, excluded: Excluded = frozenset()) -> RoutableAdapter | None:
        """The adapter if some replica reports its exact digest as ready and not as draining.

        excluded  what failed this request: its word does not count for it
        """
        fleet = self.discovery.fleet
        adapter = fleet.adapters.get(lora_id)
        if adapter is None or adapter.engine_name is None:
            return None
        if adapter.base_model is None:
            return adapter if fleet.holding(adapter.engine_name, excluded) else None
        roster = fleet.roster(adapter.base_model)
        able = roster.able(adapter.engine_name)
        if excluded and able:
            return adapter if any(roster.replicas[i].incarnation not in excluded for i in able) else None
        return adapter if able else None

    async def until_resident(
        self,
        lora_id: str,
        excluded: Callable[[], Excluded] = frozenset,
        *,
        tenant: str = "",
        size_bytes: int = 0,
        deadline_at: float | None = None,
        is_displaced: bool = False,
    ) -> RoutableAdapter:
        """The adapter, once some replica reports its exact digest as ready; at once when one does already.

        excluded     what failed this request, as things stand
        tenant       who is held; see `tenant_share` and `tenant_adapters`
        size_bytes   what the request holds while it is
        deadline_at  when, by `clock`, nobody wants its answer any more
        is_displaced it was let in and waited in the line: it is not sent away here because too many do

        raises  Saturated when too many requests wait already; AdapterFailed, ModelNotFound and, of what fits on no
                worker, NoCapacity when the orchestrator says so; after `timeout_s` NoCapacity when there was no room,
                else ColdStartTimeout; DeadlineExceeded where its deadline is earlier than that
        """
        adapter = self.resident(lora_id, excluded())
        if adapter is not None:
            return adapter
        if not is_displaced:
            self._check_hold(lora_id, tenant, size_bytes)
        flight = self._flights.get(lora_id)
        if flight is None:
            task = asyncio.create_task(self._bring(lora_id))
            # Where only this request cannot use what is there, no load is measured.
            is_there = self.resident(lora_id) is not None
            flight = self._flights[lora_id] = _Flight(task, self.clock(), is_measured=is_there)
            # Everybody may be served, or have left, before it fails: nobody reads its error then.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            flight.task.add_done_callback(lambda _: self.discovery.changes.notify())
        wanted = self._wanted.setdefault(tenant, Counter())
        wanted[lora_id] += 1
        self._held.add(tenant, size_bytes)
        flight.waiting += 1
        self.metrics.held.set(len(self._held))
        began_at = self.clock()
        try:
            return await self._wait(lora_id, excluded, flight, deadline_at)
        except (ColdStartTimeout, NoCapacity, DeadlineExceeded):
            self.holds.record_shed(lora_id, self.clock())
            raise
        finally:
            self.holds.record_hold(lora_id, self.clock() - began_at, self.clock())
            self._held.remove(tenant, size_bytes)
            self.metrics.held.set(len(self._held))
            wanted[lora_id] -= 1
            if not wanted[lora_id]:
                del wanted[lora_id]
                if not flight.task.done() and self.tenant_adapters < inf:
                    self._left.setdefault(tenant, {})[lora_id] = self.clock() + _WANTED_FOR_S
            if not wanted:
                del self._wanted[tenant]
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
                del self._flights[lora_id]

    def _check_hold(self, lora_id: str, tenant: str, size_bytes: int) -> None:
        refusal = self._held.refusal(tenant, size_bytes)
        wanted = self._brought_for(tenant)
        if refusal is None and lora_id not in wanted and len(wanted) >= self.tenant_adapters:
            refusal = f"{len(wanted)} adapters are being loaded for you already, as many as may be for one tenant"
        if refusal is not None:
            self.holds.record_shed(lora_id, self.clock())
            raise Saturated(
                f"adapter {lora_id!r} is not loaded, and this cannot wait for it: {refusal}; try again",
                retry_after_s=self._usual_load_s(),
            )

    def _brought_for(self, tenant: str) -> set[str]:
        """Adapters that are on their way for a tenant, those that it did not wait for among them."""
        now = self.clock()
        left = {
            lora_id: until
            for lora_id, until in self._left.pop(tenant, {}).items()
            if until > now and self.resident(lora_id) is None
        }
        if left:
            self._left[tenant] = left
        return {*self._wanted.get(tenant, ()), *left}

    def _usual_load_s(self) -> float:
        return median(self._loads_s) if self._loads_s else _DEFAULT_RETRY_S

    async def _wait(
        self, lora_id: str, excluded: Callable[[], Excluded], flight: _Flight, deadline_at: float | None
    ) -> RoutableAdapter:
        def settled() -> bool:
            return flight.task.done() or self.resident(lora_id, excluded()) is not None

        left_s = inf if deadline_at is None else deadline_at - self.clock()
        await self.discovery.changes.until(settled, timeout_s=min(self.timeout_s, left_s))
        adapter = self.resident(lora_id, excluded())
        if adapter is not None:
            if not flight.is_measured:
                flight.is_measured = True
                self._loads_s.append(min(self.timeout_s, self.clock() - flight.began_at))
            return adapter
        if flight.task.done() and not flight.task.cancelled() and (failure := flight.task.exception()) is not None:
            raise failure
        if left_s < self.timeout_s:
            raise DeadlineExceeded(f"the deadline of this request passed before adapter {lora_id!r} was loaded")
        if flight.stuck is not None:
            raise NoCapacity(
                f"adapter {lora_id!r} has no room: {without_addresses(flight.stuck)}",
                retry_after_s=self._usual_load_s(),
            )
        raise ColdStartTimeout(
            f"adapter {lora_id!r} was not loaded within {self.timeout_s:g} s; it may be soon, try again",
            retry_after_s=flight.expected_s or self._usual_load_s(),
        )

    async def _bring(self, lora_id: str) -> None:
        """Ask until nobody waits any more (then this is cancelled) or somebody says that it will not be."""
        while True:
            adapter = self.discovery.fleet.adapters.get(lora_id)
            if adapter is not None and adapter.is_listed:
                # Nobody brings it: its engine has to come back with it, and is asked in its turn.
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
        """Where it is ready by the orchestrator's word, or by a home's where that is away; None: not yet."""
        try:
            return await self._ensure(lora_id)
        except (EngineLost, FetchRefused, ValueError) as exc:
            self._warn("orchestrator away, asking the adapter's homes itself", lora_id, exc)
            return await self._load_at_a_home(lora_id)

    async def _ensure(self, lora_id: str) -> str | None:
        """Where the orchestrator says that it is ready, or None: not yet."""
        try:
            tenants = tuple(sorted(tenant for tenant, wanted in self._wanted.items() if lora_id in wanted))
            ask = EnsureRequest(wait_s=_ENSURE_WAIT_S, tenants=tenants)
            answer = await self._answer(f"/v1/adapters/{quote(lora_id)}/ensure", ask.model_dump_json().encode())
        except FetchRefused as exc:
            if exc.status in _REFUSALS:
                raise _REFUSALS[exc.status](_message(exc)) from exc
            raise
        told = EnsureAnswer.model_validate_json(answer)
        if told.fits_nowhere and not told.ready:
            raise NoCapacity(
                f"adapter {lora_id!r} fits on no worker: {without_addresses(told.error or 'no reason is given')}",
                retry_after_s=_OTHER_WORKER_S,
            )
        self._note(lora_id, told.expected_s, None if told.ready or told.loading else told.error)
        return told.ready[0] if told.ready else None

    async def _answer(self, path: str, body: bytes) -> bytes:
        """The orchestrator's, which may wait with it; raises EngineLost at once where it says nothing to anybody."""

        def look() -> None:
            age_s = self.discovery.catalog_age_s()
            if age_s is not None and age_s > self.silent_after_s:
                raise EngineLost("no_answer_in_time", f"the orchestrator has said nothing for {age_s:.1f} s")

        asking = self.post(self.orchestrator_url, path, body=body, timeout_s=_ENSURE_WAIT_S + 5.0)
        return await watched(asking, look, every_s=_ASK_AGAIN_S)

    def _note(self, lora_id: str, expected_s: float | None, stuck: str | None) -> None:
        flight = self._flights.get(lora_id)
        if flight is not None:
            flight.expected_s, flight.stuck = expected_s, stuck
            # What waited for room says nothing of how long loads take.
            flight.is_measured = flight.is_measured or stuck is not None

    async def _load_at_a_home(self, lora_id: str) -> str | None:
        """Have the adapter loaded by its rendezvous home, or the next in that order which can; None: by none of them.

        Every router asks in the same order, so that all of them fill the same home.
        """
        adapter = self.discovery.fleet.adapters.get(lora_id)
        if adapter is None:
            raise ModelNotFound(f"adapter {lora_id!r} is no longer registered", param="lora_id")
        homes = self._homes(adapter)
        if not homes:
            self._check_taken(adapter)
            raise NoReplica(f"no replica of {adapter.base_model!r} is there that could load adapter {lora_id!r}")
        wanted = LoadRequest(
            lora_id=lora_id,
            source=adapter.source,
            base_model=adapter.base_model,
            digest=adapter.digest,
            secret=adapter.secret,
        )
        body = wanted.model_dump_json(exclude_none=True).encode()
        full = 0
        for home in homes:
            try:
                await self._load_at(home, body)
            except (EngineLost, FetchRefused) as exc:
                self._warn("home does not load it", lora_id, exc, worker=home.id)
                if isinstance(exc, EngineLost):
                    continue
                code = _error(exc).get("code")
                full += (exc.status, code) == (409, "no_free_slot")
                if exc.status in _ADAPTERS_OWN or code == "digest_mismatch":
                    break  # the next one would fetch the same bytes, and its engine stall over them
            else:
                return home.id
        if full:
            # Who decides what makes room may be back in a moment: those who wait go on waiting.
            what = f"its home {homes[0].id!r} has no free slot"
            if len(homes) > 1:
                what = f"none of the {len(homes)} workers that take it has a free slot"
            self._note(lora_id, None, f"{what}, and nobody decides what makes room")
        return None

    def _check_taken(self, adapter: RoutableAdapter) -> None:
        """Raises NoCapacity where all workers of its base model take no adapters at all."""
        replicas = self.discovery.fleet.roster(adapter.base_model or "").replicas
        if replicas and all(replica.refusal for replica in replicas):
            raise NoCapacity(
                f"adapter {adapter.lora_id!r} fits on no worker: {replicas[0].id}: {replicas[0].refusal}",
                retry_after_s=_OTHER_WORKER_S,
            )

    async def _load_at(self, home: Replica, body: bytes) -> None:
        """Have this worker load it. Raises Refused, and EngineLost: at once where its agent says nothing to anybody."""

        def look() -> None:
            if self._is_silent(home):
                raise EngineLost("no_answer_in_time", f"the agent of worker {home.id!r} has said nothing for a while")

        asking = self.post(home.agent_url, "/v1/admin/load_lora", body=body, timeout_s=self.timeout_s)
        await watched(asking, look, every_s=_ASK_AGAIN_S)

    def _is_silent(self, replica: Replica) -> bool:
        age_s = self.discovery.report_age_s(replica.id)
        return age_s is None or age_s > self.silent_after_s

    def _warn(self, what: str, lora_id: str, cause: Exception, **about: str) -> None:
        flight = self._flights.get(lora_id)
        trouble = (what, type(cause).__name__, *about.values())
        if flight is None or trouble not in flight.troubles:
            log.warning(what, lora_id=lora_id, error=repr(cause), **about)
        if flight is not None:
            flight.troubles.add(trouble)

    def _homes(self, adapter: RoutableAdapter) -> list[Replica]:
        """Where it may be loaded, in the order in which to ask: rendezvous, as the orchestrator would have it, and last
        who takes no loads now.
        """
        able = [
            replica
            for replica in self.discovery.fleet.roster(adapter.base_model or "").replicas
            if replica.state == "ready"
            and not replica.is_ending
            and replica.agent_url
            and not replica.refusal
            and adapter.rank <= (replica.max_lora_rank or inf)
        ]
        order = rendezvous_order(adapter.lora_id, able)
        return sorted(order, key=lambda replica: replica.is_suspect or self._is_silent(replica))


_REFUSALS: dict[int, Callable[[str], RouterError]] = {404: ModelNotFound, 409: AdapterFailed}
# An agent's word on the adapter, which another agent would repeat. What else one answers is about that worker alone.
_ADAPTERS_OWN = frozenset({400, 413, 422})


def _error(refused: FetchRefused) -> dict[str, object]:
    try:
        error = from_json(refused.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _message(refused: FetchRefused) -> str:
    told = _error(refused).get("message")
    return without_addresses(str(told)) if told else f"the control plane answered {refused.status}"
