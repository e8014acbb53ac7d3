"""Replicas that failed a request: each is excluded for that request until the reason for it is over."""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from router.core.failover.verdict import VERDICTS, Sign
from router.core.fleet import Excluded, Incarnation, Replica
from router.core.kv.index import WorkerId


class AttemptFailure(NamedTuple):
    """One failed attempt at a replica.

    at           when it failed, by the router's clock
    tells_start  whether another start of that engine would have another boot id
    """

    reason: str
    at: float
    tells_start: bool = True


def excluded_incarnations(
    failures: Mapping[Incarnation, AttemptFailure],
    replicas: Mapping[WorkerId, Replica],
    served_at: Callable[[Replica], float],
) -> Excluded:
    """The incarnations that must not get this request again now.

    failures   its last failed attempt at each incarnation
    replicas   all replicas of the fleet
    served_at  when a replica last answered a request; -inf: not known
    """
    found = []
    for incarnation, failure in failures.items():
        replica = replicas.get(incarnation[0])
        # After a restart it is another incarnation, which no request is excluded from.
        is_over = replica is not None and replica.incarnation == incarnation and _is_over(failure, replica, served_at)
        if not is_over:
            found.append(incarnation)
    return frozenset(found)


def _is_over(failure: AttemptFailure, replica: Replica, served_at: Callable[[Replica], float]) -> bool:
    """Whether the replica has given the sign after which it may get the failed request again; see `Sign`."""
    if replica.state != "ready":
        return False
    sign: Sign = VERDICTS[failure.reason].back_after
    if sign == "restarted" and not failure.tells_start:
        sign = "answered"
    seen_at = -inf
    if sign == "answered" and not replica.is_suspect:
        seen_at = replica.report.at
    elif sign == "listed":
        seen_at = replica.report.listed_at
    elif sign == "served":
        seen_at = served_at(replica)
    return seen_at > failure.at
