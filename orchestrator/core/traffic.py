"""Sums of traffic over a time, and the grid of times that they are kept by: coarser with age.

Pure: sums of two times, of two adapters or of two routers add up, in any order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, Literal

import msgspec

SeriesKind = Literal["fleet", "adapter", "base", "worker", "tenant", "key"]
SeriesKey = tuple[SeriesKind, str]
"""What is counted: a kind and a name. The fleet has the name ""; a base model's own traffic is `base`."""

OTHER: Final = "(others)"
"""The series of those that were too many to be kept apart."""
_MOST_CODES: Final = 50


class GaugeSums(msgspec.Struct, array_like=True, frozen=True):
    """Readings of one quantity: how many, their sum, and the highest."""

    readings: int
    total: float
    most: float

    @property
    def mean(self) -> float:
        """The mean of the readings."""
        return self.total / self.readings if self.readings else 0.0


class TrafficSums(msgspec.Struct, array_like=True):
    """One series over a time: counts of requests that ended in it, and readings taken in it.

    Fields as in wire.TrafficRow; `gauges`: name -> readings.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    compared_tokens: int = 0
    waited_s: float = 0.0
    cold_starts: int = 0
    cold_s: float = 0.0
    codes: dict[str, int] = {}
    first_token: dict[int, int] = {}
    whole: dict[int, int] = {}
    gauges: dict[str, GaugeSums] = {}
    first_token_sum_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0

    def add(self, other: "TrafficSums") -> None:
        """Add another series, or the same one over another time, to this one."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.predicted_tokens += other.predicted_tokens
        self.cached_tokens += other.cached_tokens
        self.compared_tokens += other.compared_tokens
        self.waited_s += other.waited_s
        self.cold_starts += other.cold_starts
        self.cold_s += other.cold_s
        self.first_token_sum_s += other.first_token_sum_s
        self.decode_s += other.decode_s
        self.decode_tokens += other.decode_tokens
        _add_counts(self.first_token, other.first_token)
        _add_counts(self.whole, other.whole)
        for code, count in other.codes.items():
            name = code if code in self.codes or len(self.codes) < _MOST_CODES else "other"
            self.codes[name] = self.codes.get(name, 0) + count
        for name, read in other.gauges.items():
            self.gauges[name] = _added(self.gauges.get(name), read)

    def read_gauge(self, name: str, value: float) -> None:
        """Add one reading of a quantity."""
        self.gauges[name] = _added(self.gauges.get(name), GaugeSums(1, value, value))

    @property
    def errors(self) -> int:
        """Requests that failed: a 5xx, or an answer that broke off."""
        return sum(count for code, count in self.codes.items() if is_error(code))

    @property
    def refusals(self) -> int:
        """Requests that were refused for what they were, or for a limit: a 4xx, without clients that left."""
        return sum(count for code, count in self.codes.items() if code.startswith("4") and not code.startswith("499"))


def is_error(code: str) -> bool:
    """Whether a `<status> <code>` is a failure of ours or of an engine: a 5xx, or a stream that broke off."""
    return code.startswith(("5", "2"))


def _add_counts(mine: dict[int, int], theirs: Mapping[int, int]) -> None:
    """Add counts by bucket to `mine`."""
    for bucket, count in theirs.items():
        mine[bucket] = mine.get(bucket, 0) + count


def _added(mine: GaugeSums | None, theirs: GaugeSums) -> GaugeSums:
    """Both readings together."""
    if mine is None:
        return theirs
    return GaugeSums(mine.readings + theirs.readings, mine.total + theirs.total, max(mine.most, theirs.most))


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


def grain_for(range_s: float) -> Grain:
    """The finest grain that is kept for so long."""
    return next((grain for grain in GRAINS if grain.kept_s >= range_s), GRAINS[-1])


def bounded(series: Mapping[SeriesKey, TrafficSums], most: int) -> dict[SeriesKey, TrafficSums]:
    """The series, of each kind at most so many: those with the most requests. The rest are one, named `OTHER`."""
    kept: dict[SeriesKey, TrafficSums] = {}
    by_kind: dict[SeriesKind, list[SeriesKey]] = {}
    for key in series:
        by_kind.setdefault(key[0], []).append(key)
    for kind, keys in by_kind.items():
        if len(keys) <= most:
            kept |= {key: series[key] for key in keys}
            continue
        first = set(nlargest(most - 1, keys, key=lambda key: (series[key].requests, key)))
        kept |= {key: series[key] for key in first}
        kept[kind, OTHER] = summed([series[key] for key in keys if key not in first])
    return kept


def summed(parts: Iterable[TrafficSums]) -> TrafficSums:
    """All of these together; they stay as they are."""
    whole = TrafficSums()
    for part in parts:
        whole.add(part)
    return whole
