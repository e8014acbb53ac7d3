"""Which adapters have metric series of their own: at most so many, by recent use; the rest share the label `other`.

Pure: time and use come in as arguments. A process counts under the labels that `agree` returns, see `RecentUse`.
"""

from collections.abc import Mapping, Sequence, Set
from heapq import nlargest

import msgspec

OTHER = "other"
"""The label of all adapters without series of their own. An adapter with this name shares it."""


class AdapterFigures(msgspec.Struct, array_like=True):
    """Recent use of an adapter: requests, prompt tokens of answers, and how many of them engines found cached."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    def add(self, more: "AdapterFigures", times: float = 1.0) -> None:
        """Add `more` to this use, so many times."""
        self.requests += more.requests * times
        self.prompt_tokens += more.prompt_tokens * times
        self.cached_tokens += more.cached_tokens * times

    def decay(self, factor: float) -> None:
        """Multiply all figures by `factor`."""
        self.requests *= factor
        self.prompt_tokens *= factor
        self.cached_tokens *= factor

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were cached; None without a whole token."""
        return min(1.0, max(0.0, self.cached_tokens / self.prompt_tokens)) if self.prompt_tokens >= 1.0 else None


class RecentUse(msgspec.Struct, array_like=True, frozen=True):
    """What one process knows: its labels now, the recent use of its busiest adapters, and that of all together."""

    labels: Sequence[str]
    adapters: Mapping[str, AdapterFigures]
    total: AdapterFigures


class AgreedLabels(msgspec.Struct, array_like=True, frozen=True):
    """The adapters with series of their own, in every process of a router.

    from_zero  those of them whose series begins at 0: what they had until now stays in `other`
    hit_rates  recent share of cached prompt tokens, by label (`other` included)
    """

    adapters: Sequence[str]
    from_zero: Sequence[str] = ()
    hit_rates: Mapping[str, float] = {}


def choose_labels(current: Set[str], requests: Mapping[str, float], most: int) -> set[str]:
    """The adapters with series of their own, at most `most`, by recent requests.

    An adapter keeps its series until another one needs it and it is not among the first `2 * most`. A series ends only
    where another begins.
    """
    order = nlargest(2 * most, (name for name in requests if name != OTHER), key=lambda name: (requests[name], name))
    chosen = set(current)
    newcomers = set(order[:most]) - chosen
    if len(chosen) + len(newcomers) > most:
        chosen &= set(order)
    for name in (*order, *sorted(current)):
        if len(chosen) >= most:
            break
        chosen.add(name)
    return chosen


def agree(processes: Sequence[RecentUse], most: int) -> AgreedLabels:
    """The labels that all these processes of one router are to use from now on.

    A series that ended and begins again must be seen to begin at 0, else Prometheus takes a part of its count for an
    increase or misses one. So where labels change hands, newcomers begin at 0. Before that no series has ended, and
    newcomers take what they have been counted.
    """
    uses: dict[str, AdapterFigures] = {}
    rest = AdapterFigures()
    for process in processes:
        rest.add(process.total)
        for name, use in process.adapters.items():
            uses.setdefault(name, AdapterFigures()).add(use)
    current = {name for process in processes for name in process.labels}
    chosen = choose_labels(current, {name: use.requests for name, use in uses.items()}, most)
    is_crowded = bool(current) and len(uses.keys() | current) > most
    for name in chosen & uses.keys():
        rest.add(uses[name], -1.0)
    rates = {name: uses[name].hit_rate for name in chosen & uses.keys()} | {OTHER: rest.hit_rate}
    return AgreedLabels(
        sorted(chosen),
        sorted(chosen - current) if is_crowded else (),
        {name: rate for name, rate in rates.items() if rate is not None},
    )
