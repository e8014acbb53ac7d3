"""Pauses at this router: new requests are held before they start, and requests that run are counted or ended."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import structlog

from lorafleet.http_server.batches import leave_batch
from lorafleet.keys.roles import Caller
from lorafleet.service.loops import ChangeSignal
from orchestrator.model.pauses import PauseLease
from router.core.errors import DeadlineExceeded, Saturated
from router.core.pauses import HeldScope, holding, merge_listed_pauses
from router.core.queue.admission import QueueUsage

log = structlog.get_logger()


class PausedRequest(Protocol):
    """What a pause needs of a request: whose it is, and how to end it."""

    @property
    def caller(self) -> Caller:
        """Whose request it is."""
        ...

    def abort(self) -> None:
        """End the request at its engine."""


class PauseGate:
    """Holds the new requests of paused callers. A request that has started is in `running`.

    in_force  the pauses by their keys; mostly empty
    held      requests that wait here, with their bytes
    running   requests that have started, and have not ended
    awaited   key of a pause that somebody waits for -> the requests that ran when it began and have not ended
    on_settled  called when the last request has ended that a pause waits for
    """

    def __init__(self, room: QueueUsage, clock: Callable[[], float], on_settled: Callable[[], object]) -> None:
        self.held = room
        self._on_settled = on_settled
        self._clock = clock
        self.in_force: Mapping[str, HeldScope] = MappingProxyType({})
        self.running: set[PausedRequest] = set()
        self.awaited: dict[str, set[PausedRequest]] = {}
        self._changed = ChangeSignal()

    # --- the pauses -----------------------------------------------------------------------------------------------

    def adopt(self, listed: Iterable[PauseLease]) -> bool:
        """Put the catalog's pauses in force: whether the orchestrator waits to hear of that.

        Ends running requests where a new pause says so, and lets held ones go where their pause has ended.
        """
        known, now = self.in_force, self._clock()
        found, new = merge_listed_pauses(known, listed, now)
        self.in_force = found
        for held in new:
            self._begin(held, is_known=held.pause.key in known)
        for key in known.keys() - found.keys():
            self.awaited.pop(key, None)
            log.info("pause over", scope=key, held=len(self.held))
        if known != found:
            self._changed.notify()
        return bool(new)

    def _begin(self, held: HeldScope, *, is_known: bool) -> None:
        """Put one pause in force: note the requests that it waits for, and end them where it says so."""
        pause, running = held.pause, self._covered(held)
        if not is_known:
            log.info("pause in force", scope=pause.key, lease_s=pause.lease_s, running=len(running))
        if pause.mode != "keep":
            self.awaited[pause.key] = set(running)
        if pause.mode == "abort":
            for run in running:
                run.abort()

    def holding(self, caller: Caller) -> HeldScope | None:
        """The pause that holds this caller's new requests; None: there is none."""
        return holding(self.in_force, caller.tenant, caller.namespace, self._clock()) if self.in_force else None

    @property
    def count(self) -> int:
        """Pauses in force at this router."""
        now = self._clock()
        return sum(now < held.until for held in self.in_force.values())

    def running_counts(self) -> dict[str, int]:
        """Key of each pause -> requests of its scope that run."""
        return {key: len(self._covered(held)) for key, held in self.in_force.items()}

    def _covered(self, held: HeldScope) -> list[PausedRequest]:
        """The running requests of a pause's scope."""
        now = self._clock()
        return [run for run in self.running if held.covers(run.caller.tenant, run.caller.namespace, now)]

    # --- the requests ---------------------------------------------------------------------------------------------

    def must_wait(self, run: PausedRequest) -> bool:
        """Whether a pause holds this request, which has not started. One that runs goes on."""
        return run not in self.running and self.holding(run.caller) is not None

    def settle(self, run: PausedRequest) -> None:
        """Note for the pauses that wait for it that this request has ended."""
        for key, left in list(self.awaited.items()):
            left.discard(run)
            if not left:
                del self.awaited[key]
                self._on_settled()

    async def wait(self, caller: Caller, size_bytes: int, deadline_at: float | None) -> None:
        """Wait until no pause holds this caller's requests. Leaves the batch.

        size_bytes   of the request's body; `deadline_at`: the client waits no longer
        raises  Saturated: as many requests as may wait in the router's queue wait here
                DeadlineExceeded: the client's own deadline has passed
        """
        tenant, held = caller.tenant or "", self.holding(caller)
        if held is None:
            return
        refusal = self.held.refusal(tenant, size_bytes)
        if refusal is not None:
            message = f"requests are paused, and {refusal.why}; ask again when the pause is over"
            raise Saturated(message, limit=refusal.limit, retry_after_s=max(1.0, held.until - self._clock()))
        self.held.add(tenant, size_bytes)
        try:
            await leave_batch()
            while (held := self.holding(caller)) is not None:
                until = held.until if deadline_at is None else min(held.until, deadline_at)
                now = self._clock()
                if deadline_at is not None and now >= deadline_at:
                    raise DeadlineExceeded("the deadline of this request passed while requests were paused")
                await self._changed.wait(until - now)
        finally:
            self.held.remove(tenant, size_bytes)
