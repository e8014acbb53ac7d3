"""Changes and pauses are in force once every live router goes by them: who is waited for, and for how long."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import structlog

from lorafleet.service.loops import ChangeSignal
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import OrchestratorUnavailable, StateConflict
from orchestrator.core.pauses import PauseProgress, expired_scopes, granted, pause_progress
from orchestrator.core.routers import ROUTER_LIVE_S
from orchestrator.model.pauses import PauseLease, PauseMode, PauseScope
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.store.store import IntentStore

log = structlog.get_logger()


@dataclass(slots=True)
class _FollowingRouter:
    """A router that reads the catalog. `is_late`: it missed a wait, and has confirmed nothing newer since."""

    revision: int
    heard_at: float
    is_late: bool = False


class RouterConfirmations:
    """The revisions that routers have confirmed, by their own reads of the catalog.

    Only a router that was heard of in the last `ROUTER_LIVE_S` seconds is waited for, and one that missed a wait is not
    waited for again before it confirms something newer: one that hangs or is cut off delays one change, not all.
    Routers of an older version, which do not say what they have in force, are never waited for.

    A new leader knows how many routers the one before had heard of: until so many have read the catalog, or for
    `gather_s`, no change counts as confirmed. Else a change would be answered before any router is heard of.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._routers: dict[str, _FollowingRouter] = {}
        self._confirmed = ChangeSignal()
        self._expected = 0
        self._gathers_until = -inf

    def begin_term(self, expected: int, gather_s: float) -> None:
        """Forget all routers: a term begins, and each will be heard of again.

        expected  number of routers that the leader before had heard of
        gather_s  longest wait for them
        """
        self._routers.clear()
        self._expected, self._gathers_until = expected, self._clock() + gather_s
        self._confirmed.notify()

    @property
    def is_gathering(self) -> bool:
        """Whether routers that the leader before had heard of may still not have found this one."""
        now = self._clock()
        return now < self._gathers_until and self._count_live(now) < self._expected

    @property
    def count(self) -> int:
        """Number of routers that the next leader has to expect: those heard of lately."""
        return max(self._count_live(self._clock()), self._expected if self.is_gathering else 0)

    def _count_live(self, now: float) -> int:
        return sum(_is_live(router, now) for router in self._routers.values())

    def record_read(self, router_id: str, revision: int | None) -> None:
        """Record that a router reads the catalog, with this revision in force there; None: it has none yet.

        Forgets routers that have fallen silent.
        """
        now = self._clock()
        self._routers = {name: router for name, router in self._routers.items() if _is_live(router, now)}
        known = self._routers.get(router_id)
        seen = -1 if revision is None else revision
        is_late = known is not None and known.is_late and seen <= known.revision
        self._routers[router_id] = _FollowingRouter(seen, now, is_late)
        self._confirmed.notify()

    def record_report(self, router_id: str, *, is_last: bool) -> None:
        """Record that a router has reported its usage: it lives, or, with `is_last`, stops and is waited for no more.

        Ignored for a router that has not read the catalog of late.
        """
        known = self._routers.get(router_id)
        if known is not None and is_last:
            del self._routers[router_id]
            self._confirmed.notify()
        elif known is not None:
            known.heard_at = self._clock()

    def missing(self, revision: int) -> list[str]:
        """The routers that are waited for and have an older revision in force, by name."""
        now = self._clock()
        return sorted(
            name
            for name, router in self._routers.items()
            if router.revision < revision and not router.is_late and _is_live(router, now)
        )

    async def wait(self, revision: int, timeout_s: float) -> None:
        """Wait until no router is missing, at most `timeout_s`; then those that are count as late, which is logged.

        In the first `gather_s` of a term the wait for routers that are not heard of yet comes on top.
        """
        gather_s = self._gathers_until - self._clock()
        if gather_s > 0:
            await self._confirmed.until(lambda: not self.is_gathering, timeout_s=gather_s)
        if not await self._confirmed.until(lambda: not self.missing(revision), timeout_s=timeout_s):
            self._give_up(self.missing(revision), revision, timeout_s)

    def _give_up(self, names: Iterable[str], revision: int, timeout_s: float) -> None:
        """Mark routers as late."""
        for name in names:
            router = self._routers[name]
            router.is_late = True
            log.warning(
                "router has not confirmed a change",
                router_id=name,
                revision=revision,
                revision_seen=router.revision,
                waited_s=timeout_s,
            )


def _is_live(router: _FollowingRouter, now: float) -> bool:
    """Whether the router was heard of lately."""
    return now - router.heard_at < ROUTER_LIVE_S


# Routers report each second and at each change of a pause; this is the longest time between two looks at their reports.
_CHECK_EVERY_S = 0.2


class FleetPauses:
    """The pauses in force. One writer: the event loop.

    reported  notified at each router's report
    """

    def __init__(
        self,
        *,
        store: IntentStore,
        demand: DemandBook,
        catalog: CatalogBook,
        refresh_catalog: Callable[[], None],
        has_heard_routers: Callable[[], bool],
        wait_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """
        has_heard_routers  whether every live router has had the time to report since our term began
        wait_s             how long a pause may take to be in force
        """
        self._store = store
        self._demand = demand
        self._catalog = catalog
        self._refresh_catalog = refresh_catalog
        self._has_heard_routers = has_heard_routers
        self._wait_s = wait_s
        self._clock, self._wall = clock, wall
        self.reported = ChangeSignal()

    def in_force(self) -> list[PauseLease]:
        """The pauses that have not ended, by scope."""
        now = self._wall()
        return [lease for lease in self._store.pauses.values() if lease.expires_at > now]

    def progress(self, lease: PauseLease) -> PauseProgress:
        """How far the pause has reached the routers, by the catalog as it is now."""
        live = self._demand.routers.live(self._clock())
        return pause_progress(lease.scope.key, self._catalog.pause_revisions.get(lease.scope.key, 0), live)

    async def pause(
        self, scope: PauseScope, mode: PauseMode, owner: str, lease_s: float, is_stopping: Callable[[], bool]
    ) -> tuple[PauseLease, PauseProgress]:
        """Begin or renew the pause of this scope, and wait until it is in force everywhere. Renews it while it waits.

        A pause that is not in force within `wait_s` is ended.

        raises  OrchestratorUnavailable: it was not, or this process stops
                StateConflict: somebody ended it meanwhile
                OrchestratorError: it could not be stored
        """
        lease = self._grant(scope, mode, owner, lease_s)
        revision = self._catalog.pause_revisions[scope.key]
        await self._store.wait_durable({("pauses", scope.key)})
        deadline = self._clock() + self._wait_s
        while True:
            known = self._store.pauses.get(scope.key)
            if known is None or known.began_at != lease.began_at:
                raise StateConflict(
                    "this pause was ended by another call while it began; pause again", code="pause_ended"
                )
            progress = pause_progress(scope.key, revision, self._demand.routers.live(self._clock()))
            if self._has_heard_routers() and progress.is_reached(mode):
                return lease, progress
            if self._clock() >= deadline:
                self._end(scope, "not reached")
                raise OrchestratorUnavailable(_not_reached(progress, self._wait_s), code="pause_not_reached")
            if is_stopping():
                raise OrchestratorUnavailable("this orchestrator stops; pause again", code="stopping")
            if known.expires_at - self._wall() < lease_s / 2:
                lease = self._grant(scope, mode, owner, lease_s)
            await self.reported.wait(_CHECK_EVERY_S)

    async def end(self, scope: PauseScope) -> PauseLease | None:
        """End the pause of this scope: it, or None where there is none. Raises OrchestratorError if that is not stored.

        Routers send the held requests within milliseconds.
        """
        ended = self._end(scope, "resumed")
        if ended is not None:
            await self._store.wait_durable({("pauses", scope.key)})
        return ended

    def end_expired(self) -> None:
        """Drop the pauses whose lease has ended, with a line in the log for each."""
        for key in expired_scopes(self._store.pauses, self._wall()):
            self._end(self._store.pauses[key].scope, "expired")

    def _grant(self, scope: PauseScope, mode: PauseMode, owner: str, lease_s: float) -> PauseLease:
        """Store a new or renewed lease, and show it to routers. Logs a new one."""
        lease = granted(self._store.pauses.get(scope.key), scope, mode, owner, lease_s, self._wall())
        self._store.put_pause(scope.key, lease)
        self._refresh_catalog()
        if not lease.renewals:
            log.info("pause began", scope=scope.text, mode=mode, owner=owner, lease_s=lease_s)
        return lease

    def _end(self, scope: PauseScope, reason: str) -> PauseLease | None:
        """Drop the lease, and show that to routers: the lease, or None where there was none."""
        lease = self._store.pauses.get(scope.key)
        if lease is not None:
            self._store.put_pause(scope.key, None)
            self._refresh_catalog()
            paused_s = round(min(self._wall(), lease.expires_at) - lease.began_at, 3)
            log.info("pause ended", scope=scope.text, reason=reason, owner=lease.owner, paused_s=paused_s)
        return lease if lease is not None and lease.expires_at > self._wall() else None


def _not_reached(progress: PauseProgress, wait_s: float) -> str:
    """Why a pause was given up."""
    if progress.behind:
        return (
            f"nothing is paused: {progress.behind} routers did not confirm the pause within {wait_s:g} s; they report,"
            " but do not read the catalog, or are of an older version"
        )
    return (
        f"nothing is paused: {progress.running} requests still ran after {wait_s:g} s (pause_wait_s); use mode keep,"
        " which waits for none, or mode abort"
    )
