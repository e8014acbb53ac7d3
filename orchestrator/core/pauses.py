"""Pauses: leases under which routers hold new requests, of one tenant or namespace, or of the whole fleet.

A lease ends by itself, so a trainer that dies leaves nothing paused. Times are Unix times: a lease outlives its leader.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from orchestrator.core.routers import KnownRouter
from orchestrator.model.pauses import PauseLease, PauseMode, PauseScope

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
WHOLE_FLEET = PauseScope()


def granted(
    known: PauseLease | None, scope: PauseScope, mode: PauseMode, owner: str, lease_s: float, now: float
) -> PauseLease:
    """The lease after a call for this scope: a new one, or the known one renewed. A renewal never ends it earlier.

    known  the lease of this scope, in force or expired; None: there is none
    """
    if known is None or known.expires_at <= now:
        return PauseLease(
            tenant=scope.tenant,
            namespace=scope.namespace,
            mode=mode,
            owner=owner,
            began_at=now,
            expires_at=now + lease_s,
            lease_s=lease_s,
        )
    expires_at = max(known.expires_at, now + lease_s)
    return replace(
        known,
        mode=mode,
        owner=owner,
        expires_at=expires_at,
        lease_s=expires_at - now,
        renewals=known.renewals + 1,
    )


def expired_scopes(leases: Mapping[str, PauseLease], now: float) -> list[str]:
    """The keys of the leases that have ended."""
    return [key for key, lease in leases.items() if lease.expires_at <= now]


@dataclass(frozen=True, slots=True)
class PauseProgress:
    """How far a pause has reached the live routers.

    behind   routers that do not hold the scope's requests yet
    running  the scope's requests at engines, by the routers that hold
    """

    behind: int
    running: int

    def is_reached(self, mode: PauseMode) -> bool:
        """Whether the pause is in force everywhere, and where its mode says so nothing runs any more."""
        return not self.behind and (mode == "keep" or not self.running)


def pause_progress(key: str, revision: int, live: Iterable[KnownRouter]) -> PauseProgress:
    """The progress of the pause with this key by the live routers' last reports.

    revision  of the catalog that has the pause: a router that reports it, or a later one, holds
    """
    behind = running = 0
    for router in live:
        if router.report.revision_seen < revision:
            behind += 1
        else:
            running += router.report.running_in_pause.get(key, 0)
    return PauseProgress(behind, running)
