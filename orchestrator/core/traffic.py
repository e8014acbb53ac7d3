"""Past traffic: series and their shares, summed over slices of time that are coarser with age. Pure.

A series counts requests that ended in its time: those of the fleet, an adapter, a base model, a worker, a tenant or a
key. Shares divide an adapter's by worker and by tenant, a worker's by adapter and by tenant. Both are bounded: the
busiest names are kept apart, the rest are one. Sums of two times, of two adapters or of two routers add up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from orchestrator.model.usage import CountedRow, RequestCounts, sum_into

SeriesKind = Literal["fleet", "adapter", "base", "worker", "tenant", "key"]
SeriesKey = tuple[SeriesKind, str]
"""What is counted: a kind and a name. The fleet has the name ""; a base model's own traffic is `base`."""
ShareBy = Literal["worker", "adapter", "tenant"]
ShareKind = Literal["adapter", "worker"]
SharesKey = tuple[ShareKind, str, ShareBy]
"""The key of one table of shares: kind, name, and by what it is divided, as `("adapter", "sql/v1", "worker")`."""
Shares = dict[str, RequestCounts]
"""Name -> its part of a series"""

OTHER: Final = "(others)"
"""The series, or the share, of those that were too many to be kept apart."""
SHARED: Final[tuple[tuple[ShareKind, ShareBy], ...]] = (
    ("adapter", "worker"),
    ("adapter", "tenant"),
    ("worker", "adapter"),
    ("worker", "tenant"),
)
TIMED: Final = SHARED[0]
"""The table whose shares have first tokens. The histograms are most of the bytes, so the other tables have none."""


@dataclass(frozen=True, slots=True)
class Grain:
    """Slices of `step_s` seconds, kept for `kept_s`."""

    step_s: int
    kept_s: int

    def start_of(self, at: float) -> int:
        """The beginning of the slice that a time is in, in Unix seconds."""
        return int(at // self.step_s) * self.step_s


GRAINS: Final = (Grain(5, 900), Grain(60, 6 * 3600), Grain(600, 48 * 3600))
"""From fine to coarse; each step divides the next."""
SHARE_GRAINS: Final = (Grain(60, 3600), Grain(600, 48 * 3600))
"""Shares are kept from a minute up, and the minutes for an hour: as finely as series they would be twice as large."""
MOST_SHARES: Final[Mapping[ShareBy, int]] = MappingProxyType({"worker": 16, "adapter": 32, "tenant": 16})
"""Names that one series is divided among in one slice. A guess: a page shows about as many."""
_FOLD_AT: Final = 2
"""In memory twice as many: what is new in a slice may yet become one of the busiest."""


def grain_for(range_s: float) -> Grain:
    """The finest grain that is kept for so long."""
    return next((grain for grain in GRAINS if grain.kept_s >= range_s), GRAINS[-1])


def share_grain_for(range_s: float) -> Grain:
    """The finest grain whose shares are kept for so long."""
    return next((grain for grain in SHARE_GRAINS if grain.kept_s >= range_s), SHARE_GRAINS[-1])


class GaugeSums(NamedTuple):
    """Readings of one quantity: how many, their sum, and the highest."""

    readings: int
    total: float
    most: float

    @property
    def mean(self) -> float:
        """The mean of the readings."""
        return self.total / self.readings if self.readings else 0.0

    def with_readings(self, other: "GaugeSums") -> "GaugeSums":
        """Both readings together."""
        return GaugeSums(self.readings + other.readings, self.total + other.total, max(self.most, other.most))


_NOTHING_READ: Final = GaugeSums(0, 0.0, float("-inf"))


@dataclass(slots=True)
class SeriesSums:
    """One series over a time: counts of requests that ended in it, and readings taken in it by their quantity."""

    counts: RequestCounts = field(default_factory=RequestCounts)
    gauges: dict[str, GaugeSums] = field(default_factory=dict)

    def add(self, other: "SeriesSums") -> None:
        """Add another series, or the same one over another time, to this one."""
        self.counts.add(other.counts)
        for name, read in other.gauges.items():
            self.gauges[name] = self.gauges.get(name, _NOTHING_READ).with_readings(read)

    def read_gauge(self, name: str, value: float) -> None:
        """Add one reading of a quantity."""
        self.gauges[name] = self.gauges.get(name, _NOTHING_READ).with_readings(GaugeSums(1, value, value))


@dataclass(slots=True)
class TrafficSlice:
    """Series and shares of one time. `shares` is empty in slices too fine for them."""

    series: dict[SeriesKey, SeriesSums] = field(default_factory=dict)
    shares: dict[SharesKey, Shares] = field(default_factory=dict)

    def series_of(self, key: SeriesKey) -> SeriesSums:
        """The sums of a series, begun where there are none."""
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = SeriesSums()
        return found

    def bounded(self, most: int) -> "TrafficSlice":
        """This slice with at most so many series of each kind, and at most so many shares of each as are kept.

        The other series are one, with shares of its own.
        """
        series = bounded(self.series, most)
        shares: dict[SharesKey, Shares] = {}
        for (kind, name, by), parts in self.shares.items():
            key = (kind, name if (kind, name) in series else OTHER, by)
            if key in shares or key[1] == OTHER:
                add_shares(shares.setdefault(key, {}), parts)
            else:
                shares[key] = parts
        return TrafficSlice(series, {key: folded(parts, MOST_SHARES[key[2]]) for key, parts in shares.items()})

    def copied(self) -> "TrafficSlice":
        """A copy that another thread may read."""
        return TrafficSlice(
            {key: sum_into(SeriesSums(), [sums]) for key, sums in self.series.items()},
            {
                key: {name: sum_into(RequestCounts(), [part]) for name, part in shares.items()}
                for key, shares in self.shares.items()
            },
        )


def series_of(row: CountedRow) -> Iterable[SeriesKey]:
    """The series that a row counts in."""
    yield "fleet", ""
    if row.adapter:
        yield "adapter", row.adapter
    elif row.base_model:
        yield "base", row.base_model
    if row.worker:
        yield "worker", row.worker
    yield "tenant", row.tenant
    if row.key:
        yield "key", row.key


def bounded(series: Mapping[SeriesKey, SeriesSums], most: int) -> dict[SeriesKey, SeriesSums]:
    """The series, of each kind at most so many: those with the most requests. The rest are one, named `OTHER`."""
    kept: dict[SeriesKey, SeriesSums] = {}
    by_kind: dict[SeriesKind, list[SeriesKey]] = {}
    for key in series:
        by_kind.setdefault(key[0], []).append(key)
    for kind, keys in by_kind.items():
        if len(keys) <= most:
            kept |= {key: series[key] for key in keys}
            continue
        first = set(nlargest(most - 1, keys, key=lambda key: (series[key].counts.requests, key)))
        kept |= {key: series[key] for key in first}
        kept[kind, OTHER] = sum_into(SeriesSums(), [series[key] for key in keys if key not in first])
    return kept


def count_shares(table: dict[SharesKey, Shares], row: CountedRow) -> None:
    """Count a row's requests in the shares of its adapter and of its worker, in place."""
    parts: dict[ShareBy, str] = {"adapter": row.adapter, "worker": row.worker, "tenant": row.tenant}
    for kind, by in SHARED:
        if not parts[kind]:
            continue
        shares = table.get((kind, parts[kind], by))
        if shares is None:
            shares = table[kind, parts[kind], by] = {}
        known = shares.get(parts[by])
        if known is None:
            known = shares[parts[by]] = RequestCounts()
            if len(shares) > _FOLD_AT * MOST_SHARES[by]:
                # The newcomer comes after: it may be folded away with the rest at the next one.
                shares.pop(parts[by])
                shares = table[kind, parts[kind], by] = folded(shares, MOST_SHARES[by])
                known = shares.setdefault(parts[by], known)
        _add_share(known, row.counts, is_timed=(kind, by) == TIMED)


def _add_share(part: RequestCounts, counts: RequestCounts, *, is_timed: bool) -> None:
    """Add to a share what the console shows of one: a slice has many, and each further count is bytes on disk."""
    part.requests += counts.requests
    part.cold_starts += counts.cold_starts
    part.output_tokens += counts.output_tokens
    part.cached_tokens += counts.cached_tokens
    part.compared_tokens += counts.compared_tokens
    part.lost_tokens += counts.lost_tokens
    part.sampled_tokens += counts.sampled_tokens
    for code, count in counts.codes.items():
        part.add_code(code, count)
    if is_timed:
        for bucket, count in counts.first_token.items():
            part.first_token[bucket] = part.first_token.get(bucket, 0) + count


def add_shares(mine: Shares, theirs: Mapping[str, RequestCounts]) -> None:
    """Add shares to `mine`, in place."""
    for name, part in theirs.items():
        known = mine.get(name)
        if known is None:
            known = mine[name] = RequestCounts()
        known.add(part)


def folded(shares: Mapping[str, RequestCounts], most: int) -> Shares:
    """At most so many shares: those with the most requests, and the rest as one, named `OTHER`."""
    if len(shares) <= most:
        return dict(shares)
    named = [name for name in shares if name != OTHER]
    kept = set(nlargest(most - 1, named, key=lambda name: (shares[name].requests, name)))
    found = {name: shares[name] for name in named if name in kept}
    found[OTHER] = sum_into(RequestCounts(), (part for name, part in shares.items() if name not in kept))
    return found
