"""Which workers have which adapter's files, and where a load's files come from. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lorafleet.identity import fleet_digest, rendezvous_score

STALLED_S = 15.0
"""A fetch without a new byte for this long no longer keeps others from the source: a guess, more than a slow check of
the bytes takes, less than a client waits."""
READERS_PER_HOLDER = 4
"""Fetches from one worker at a time. Each that ends adds a worker to fetch from; an agent refuses more than its
`max_uploads`."""
NEIGHBOURS_NAMED = 4
"""Workers named in one load: one that fails leaves enough others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingFetch:
    """A fetch of a digest's files. `moved_at`: when it began or its bytes last grew."""

    worker_id: str
    moved_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSnapshot:
    """Files on the workers' disks.

    is_known  whether it was observed; otherwise every load fetches for itself
    is_whole  whether every worker that answers has said all that it has
    holders   digest -> workers with verified files
    fetches   digest -> fetches under way
    """

    is_known: bool = False
    is_whole: bool = False
    holders: Mapping[str, Collection[str]] = field(default_factory=dict)
    fetches: Mapping[str, Sequence[OngoingFetch]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """Where the files of a load come from: first these workers, then the source. `is_held`: the load must wait."""

    neighbours: tuple[str, ...] = ()
    is_held: bool = False


_AT_ONCE, _HELD = FetchChoice(), FetchChoice(is_held=True)


def fetch_choice(
    source: str,
    digest: str,
    worker_id: str,
    files: FilesSnapshot,
    *,
    reachable: Collection[str],
    begun: Sequence[OngoingFetch],
    now: float,
) -> FetchChoice:
    """Where a worker gets the files of a digest, so that the source is asked once in a fleet.

    The first worker asks the source, and all others wait for it. Whoever has the files sends them to a few at a time. A
    fetch whose worker is gone, or that has stalled, holds nobody back: one more worker asks the source then.

    reachable  workers whose agents answer
    begun      fetches of the digest that this pass has begun
    """
    if not files.is_known or _is_path(source):
        return _AT_ONCE
    held_by = files.holders.get(digest, ())
    if worker_id in held_by:
        return _AT_ONCE
    holders = [name for name in held_by if name in reachable]
    live = [
        fetch
        for fetch in (*files.fetches.get(digest, ()), *begun)
        if fetch.worker_id in reachable and fetch.worker_id not in held_by and now - fetch.moved_at < STALLED_S
    ]
    if not holders:
        is_lost = fleet_digest(source) is not None and files.is_whole
        return _HELD if live or is_lost else _AT_ONCE
    if len(live) >= READERS_PER_HOLDER * len(holders):
        return _HELD
    # In another order for each reader, so that all holders send.
    order = sorted(holders, key=lambda name: rendezvous_score(f"{digest}{worker_id}", name))
    return FetchChoice(neighbours=tuple(order[:NEIGHBOURS_NAMED]))


def _is_path(source: str) -> bool:
    """Whether the source is a path, which is read where it is: on the worker's own disk, or on its mount."""
    return fleet_digest(source) is None and ("://" not in source or source.lower().startswith("file://"))
