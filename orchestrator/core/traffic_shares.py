"""Shares of traffic: an adapter's by worker and by tenant, a worker's by adapter and by tenant. Pure.

Each is bounded: the busiest names are kept apart, the rest are one. Shares of two times or two routers add up.
"""

from collections.abc import Iterable, Mapping
from heapq import nlargest
from types import MappingProxyType
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from orchestrator.core.traffic import OTHER, Grain, TrafficSums

ShareBy = Literal["worker", "adapter", "tenant"]
ShareKind = Literal["adapter", "worker"]
SharesKey = tuple[ShareKind, str, ShareBy]
"""The key of one table of shares: kind, name, and by what it is divided, as `("adapter", "sql/v1", "worker")`."""

SHARED: Final[tuple[tuple[ShareKind, ShareBy], ...]] = (
    ("adapter", "worker"),
    ("adapter", "tenant"),
    ("worker", "adapter"),
    ("worker", "tenant"),
)
TIMED: Final = SHARED[0]
"""The table whose shares have first tokens. The histograms are most of the bytes, so the other tables have none."""
SHARE_GRAINS: Final = (Grain(60, 3600), Grain(600, 48 * 3600))
"""Shares are kept from a minute up, and the minutes for an hour: as finely as series they would be twice as large."""
MOST_SHARES: Final[Mapping[ShareBy, int]] = MappingProxyType({"worker": 16, "adapter": 32, "tenant": 16})
"""Names that one series is divided among in one slice. A guess: a page shows about as many."""
_FOLD_AT: Final = 2
"""In memory twice as many: what is new in a slice may yet become one of the busiest."""


class ShareSums(msgspec.Struct, array_like=True):
    """One name's part of a series. Fields as in `TrafficSums`; `first_token` is empty where it is not `TIMED`."""

    requests: int = 0
    errors: int = 0
    cold_starts: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    compared_tokens: int = 0
    first_token: dict[int, int] = {}

    def add(self, other: "ShareSums", *, is_timed: bool = True) -> None:
        """Add another part, or the same over another time, to this one. `is_timed`: with first tokens."""
        self.requests += other.requests
        self.errors += other.errors
        self.cold_starts += other.cold_starts
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.compared_tokens += other.compared_tokens
        if is_timed:
            mine = self.first_token
            for bucket, count in other.first_token.items():
                mine[bucket] = mine.get(bucket, 0) + count

    def copied(self) -> "ShareSums":
        """A copy with a histogram of its own."""
        return replace(self, first_token=dict(self.first_token))


Shares = dict[str, ShareSums]


def share_of(sums: TrafficSums) -> ShareSums:
    """The part that these sums are. Its histogram is theirs."""
    return ShareSums(
        sums.requests,
        sums.errors,
        sums.cold_starts,
        sums.output_tokens,
        sums.cached_tokens,
        sums.compared_tokens,
        sums.first_token,
    )


def count_shares(table: dict[SharesKey, Shares], parts: Mapping[ShareBy, str], part: ShareSums) -> None:
    """Count requests of one adapter, worker and tenant in `table`, in place.

    parts  the adapter, "" for the base model; the worker, "" for none; the tenant, "" for none
    """
    for kind, by in SHARED:
        if not parts[kind]:
            continue
        shares = table.get((kind, parts[kind], by))
        if shares is None:
            shares = table[kind, parts[kind], by] = {}
        known = shares.get(parts[by])
        if known is None:
            known = shares[parts[by]] = ShareSums()
            if len(shares) > _FOLD_AT * MOST_SHARES[by]:
                # The newcomer comes after: it may be folded away with the rest at the next one.
                shares.pop(parts[by])
                shares = table[kind, parts[kind], by] = folded(shares, MOST_SHARES[by])
                known = shares.setdefault(parts[by], known)
        known.add(part, is_timed=(kind, by) == TIMED)


def add_shares(mine: Shares, theirs: Mapping[str, ShareSums]) -> None:
    """Add shares to `mine`, in place."""
    for name, part in theirs.items():
        known = mine.get(name)
        if known is None:
            known = mine[name] = ShareSums()
        known.add(part)


def folded(shares: Mapping[str, ShareSums], most: int) -> Shares:
    """At most so many shares: those with the most requests, and the rest as one, named `OTHER`."""
    if len(shares) <= most:
        return dict(shares)
    named = [name for name in shares if name != OTHER]
    kept = set(nlargest(most - 1, named, key=lambda name: (shares[name].requests, name)))
    found = {name: shares[name] for name in named if name in kept}
    found[OTHER] = merged(part for name, part in shares.items() if name not in kept)
    return found


def merged(parts: Iterable[ShareSums]) -> ShareSums:
    """All of these together; they stay as they are."""
    whole = ShareSums()
    for part in parts:
        whole.add(part)
    return whole


def share_grain_for(range_s: float) -> Grain:
    """The finest grain whose shares are kept for so long."""
    return next((grain for grain in SHARE_GRAINS if grain.kept_s >= range_s), SHARE_GRAINS[-1])
