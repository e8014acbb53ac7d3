"""Adapters that are loaded nowhere: ask once for each, however many requests wait, and hold those for a while."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import structlog

from orchestrator.wire import EnsureAnswer, EnsureRequest
from router.core.errors import (
    AdapterFailed,
    ColdStartTimeout,
    ModelNotFound,
    NoCapacity,
    NoReplica,
    RouterError,
    Saturated,
)
from router.core.fleet import Adapter, Excluded, Replica
from router.core.homes import rendezvous_home
from router.discovery import Discovery
from router.metrics import Metrics
from workers.wire import LoadRequest

log = structlog.get_logger()

_ASK_AGAIN_S = 1.0
# One call to `ensure` waits at the orchestrator for at most so long; then it is asked again.
_ENSURE_WAIT_S = 10.0
_DEFAULT_RETRY_S = 5.0


@dataclass(slots=True)
class _Flight:
    """The one load of an adapter that any number of requests wait for."""

    task: "asyncio.Task[None]"
    waiting: int = 0
    expected_s: float | None = None
    stuck: str | None = None


@dataclass(slots=True)
class ColdStarts:
    """Brings an adapter to where a request can run; see `until_resident`."""

    client: httpx.AsyncClient
    discovery: Discovery
    metrics: Metrics
    orchestrator_url: str
    timeout_s: float
    max_held: int
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _held: int = 0

    async def until_resident(self, lora_id: str, excluded: Excluded = frozenset()) -> Adapter:
        """The adapter, once some replica reports its exact digest as ready; at once when one does already.

        excluded  what failed this request: its word does not count for it

        raises  Saturated when too many requests wait already; AdapterFailed and ModelNotFound when the
                orchestrator says so; after `timeout_s` NoCapacity when there was no room, else ColdStartTimeout
        """
        adapter = self._resident(lora_id, excluded)
        if adapter is not None:
            return adapter
        if self._held >= self.max_held:
            raise Saturated(f"{self._held} requests wait for adapters already; try again", retry_after_s=2.0)
        flight = self._flights.get(lora_id)
        if flight is None:
            flight = self._flights[lora_id] = _Flight(asyncio.create_task(self._bring(lora_id)))
            # Everybody may be served, or have left, before it fails: nobody reads its error then.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._held += 1
        flight.waiting += 1
        self.metrics.held.set(self._held)
        try:
            return await self._wait(lora_id, excluded, flight)
        finally:
            self._held -= 1
            self.metrics.held.set(self._held)
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
                if self._flights.get(lora_id) is flight:
                    del self._flights[lora_id]

    async def _wait(self, lora_id: str, excluded: Excluded, flight: _Flight) -> Adapter:
        def settled() -> bool:
            return flight.task.done() or self._resident(lora_id, excluded) is not None

        flight.task.add_done_callback(lambda _: self.discovery.changes.notify())
        await self.discovery.changes.until(settled, timeout_s=self.timeout_s)
        adapter = self._resident(lora_id, excluded)
        if adapter is not None:
            return adapter
        if flight.task.done() and not flight.task.cancelled() and (failure := flight.task.exception()) is not None:
            raise failure
        if flight.stuck is not None:
            raise NoCapacity(f"adapter {lora_id!r} has no room: {flight.stuck}", retry_after_s=_DEFAULT_RETRY_S)
        raise ColdStartTimeout(
            f"adapter {lora_id!r} was not loaded within {self.timeout_s:g} s; it may be soon, try again",
            retry_after_s=flight.expected_s or _DEFAULT_RETRY_S,
        )

    def _resident(self, lora_id: str, excluded: Excluded) -> Adapter | None:
        fleet = self.discovery.fleet
        adapter = fleet.adapters.get(lora_id)
        if adapter is None or adapter.engine_name is None:
            return None
        return adapter if fleet.holding(adapter.engine_name, excluded) else None

    async def _bring(self, lora_id: str) -> None:
        """Ask until nobody waits any more (then this is cancelled) or somebody says that it will not be."""
        while True:
            try:
                placed = await self._ensure(lora_id)
            except RouterError as exc:
                self.metrics.cold_starts.labels(exc.code).inc()
                raise
            except (httpx.HTTPError, ValueError) as exc:
                log.warning("orchestrator away, asking the adapter's home itself", lora_id=lora_id, error=repr(exc))
                placed = await self._load_at_home(lora_id)
            self.metrics.cold_starts.labels("asked" if placed is None else "placed").inc()
            self.discovery.look_now(placed)
            await asyncio.sleep(_ASK_AGAIN_S if placed is None else _ASK_AGAIN_S / 4)

    async def _ensure(self, lora_id: str) -> str | None:
        """Where the orchestrator says that it is ready, or None: not yet."""
        answer = await self.client.post(
            f"{self.orchestrator_url}/v1/adapters/{lora_id}/ensure",
            content=EnsureRequest(wait_s=_ENSURE_WAIT_S).model_dump_json(),
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(5.0, read=_ENSURE_WAIT_S + 5.0),
        )
        if answer.status_code in _REFUSALS:
            raise _REFUSALS[answer.status_code](_message(answer))
        answer.raise_for_status()
        told = EnsureAnswer.model_validate_json(answer.content)
        flight = self._flights.get(lora_id)
        if flight is not None:
            flight.expected_s = told.expected_s
            flight.stuck = None if told.ready or told.loading else told.error
        return told.ready[0] if told.ready else None

    async def _load_at_home(self, lora_id: str) -> str | None:
        """Have the adapter's rendezvous home load it; every router picks the same home."""
        adapter = self.discovery.fleet.adapters.get(lora_id)
        if adapter is None:
            raise ModelNotFound(f"adapter {lora_id!r} is no longer registered", param="lora_id")
        home = rendezvous_home(lora_id, self._homes(adapter))
        if home is None:
            raise NoReplica(f"no replica of {adapter.base_model!r} is there to load adapter {lora_id!r}")
        wanted = LoadRequest(
            lora_id=lora_id, source=adapter.source, base_model=adapter.base_model, digest=adapter.digest
        )
        try:
            answer = await self.client.post(
                f"{home.agent_url}/v1/admin/load_lora",
                json=wanted.model_dump(exclude_none=True),
                timeout=self.timeout_s,
            )
        except httpx.HTTPError as exc:
            log.warning("home does not load it", lora_id=lora_id, worker=home.id, error=repr(exc))
            return None
        if answer.status_code == 409 and _code(answer) == "no_free_slot":
            raise NoCapacity(_message(answer), retry_after_s=_DEFAULT_RETRY_S)
        return home.id if answer.is_success else None

    def _homes(self, adapter: Adapter) -> list[Replica]:
        return [r for r in self.discovery.fleet.roster(adapter.base_model or "").replicas if r.state == "ready"]


_REFUSALS: dict[int, Callable[[str], RouterError]] = {404: ModelNotFound, 409: AdapterFailed}


def _error(answer: httpx.Response) -> dict[str, object]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _message(answer: httpx.Response) -> str:
    return str(_error(answer).get("message") or f"the orchestrator answered {answer.status_code}")


def _code(answer: httpx.Response) -> str:
    return str(_error(answer).get("code") or "")
