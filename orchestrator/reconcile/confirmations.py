"""Which catalog revision each router has in force, so that a change is answered once every router goes by it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import structlog

from lorafleet.service.loops import ChangeSignal
from orchestrator.core.demand import ROUTER_LIVE_S

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
