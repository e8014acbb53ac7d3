"""The order in which a worker tries the places that may have an adapter's files."""

from typing import Literal

FetchWay = Literal["disk", "neighbours", "source", "fleet"]
"""disk: this worker's own; neighbours: workers that the leader named; source: the registered one; fleet: any worker."""


def fetch_ways(
    scheme: str, *, has_digest: bool, has_neighbours: bool, may_use_digest: bool, has_fleet: bool
) -> tuple[FetchWay, ...]:
    """The ways to fetch an adapter, in the order to try them.

    scheme          of the source: `file` is this worker's own disk or mount, `fleet` has no place but the workers
    has_digest      the digest of the files is known; without it only the source can say which bytes are right
    has_neighbours  the leader named workers that have the digest
    may_use_digest  the caller may have files of the digest in place of those of the source
    has_fleet       this worker has an orchestrator, so that it knows other workers
    """
    is_own_fleet = scheme == "fleet"
    by_digest = has_digest and (may_use_digest or is_own_fleet)
    disk: tuple[FetchWay, ...] = ("disk",) if by_digest else ()
    neighbours: tuple[FetchWay, ...] = ("neighbours",) if by_digest and has_neighbours and has_fleet else ()
    fleet: tuple[FetchWay, ...] = ("fleet",) if by_digest and has_fleet else ()
    if is_own_fleet:
        return (*disk, *neighbours, *fleet)
    if scheme == "file":
        return (*disk, "source", *neighbours, *fleet)
    return (*disk, *neighbours, "source", *fleet)
