"""Metrics by adapter, with a bounded number of labels: the adapters with the most recent use, and `other`.

A request counts in a pending entry of its adapter. At a scrape the labels are chosen (`adapter_labels.agree`, over all
processes of the router) and pending entries are added to the series. So each request is counted under one label, and no
series falls while it lasts.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from math import exp, inf
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.telemetry.adapter_labels import OTHER, AdapterFigures, AgreedLabels, RecentUse, agree
from router.core.errors import RoutingOutcome

_OUTCOMES: tuple[RoutingOutcome, ...] = get_args(RoutingOutcome)
# Seconds of whole answers. Coarser than the router's other histograms: each bucket is one series an adapter.
_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Time constant of recent use.
_RECENT_S = 300.0
# Adapters whose pending counts, or recent use, are kept apart: about 0.5 KB each. A guess, nothing measured.
_MOST_KEPT = 4096
# Adapters whose use a process reports, for each label: of those further down hardly one is among the first in all.
_REPORTED_A_LABEL = 4


class AdapterCounts:
    """What one adapter has been counted: outcomes, latencies of whole answers, and prompt tokens."""

    __slots__ = ("cached_tokens", "latencies", "latency_sum_s", "outcomes", "prompt_tokens")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(_OUTCOMES, 0)
        self.latencies = [0] * (len(_BUCKETS) + 1)
        self.latency_sum_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def observe_latency(self, seconds: float) -> None:
        """Count the duration of a whole answer."""
        self.latencies[bisect_left(_BUCKETS, seconds)] += 1
        self.latency_sum_s += seconds

    def add_tokens(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count an answer's prompt tokens, and how many of them its engine found cached."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def add(self, more: "AdapterCounts") -> None:
        """Add another's counts to these."""
        # Most are zero: of the thousands that a scrape adds, few adapters have been asked much.
        for outcome, count in more.outcomes.items():
            if count:
                self.outcomes[outcome] += count
        for bucket, count in enumerate(more.latencies):
            if count:
                self.latencies[bucket] += count
        self.latency_sum_s += more.latency_sum_s
        self.add_tokens(more.prompt_tokens, more.cached_tokens)

    @property
    def use(self) -> AdapterFigures:
        """These counts as use."""
        return AdapterFigures(sum(self.outcomes.values()), self.prompt_tokens, self.cached_tokens)


class AdapterSeries(Collector):
    """The series by adapter of one process. `recent_use`, then `show` with what was agreed, precede each exposition."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        most_labels: int,
        most_kept: int = _MOST_KEPT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Register the metrics.

        most_labels  adapters with series of their own
        most_kept    adapters whose pending counts, or recent use, are kept apart, beside those with series
        """
        self.most_labels = most_labels
        self._most_kept = most_kept
        self._clock = clock
        self._pending: dict[str, AdapterCounts] = {}
        self._unshown: dict[str, AdapterCounts] = {}
        self._series: dict[str, AdapterCounts] = {}
        self._hit_rates: Mapping[str, float] = {}
        self._recent: dict[str, AdapterFigures] = {}
        self._total = AdapterFigures()
        self._decayed_at = inf
        registry.register(self)

    def of(self, lora_id: str) -> AdapterCounts:
        """The counts of an adapter since the last scrape; add to them at once, and keep no reference."""
        counts = self._pending.get(lora_id)
        if counts is None:
            if len(self._pending) + len(self._unshown) >= self._most_kept + len(self._series):
                # Nobody scrapes, or few do.
                self._absorb()
                self._count_rest_as_other()
            counts = self._pending[lora_id] = AdapterCounts()
        return counts

    def settle(self) -> None:
        """Choose the labels for this process alone, and add what was counted to the series."""
        self.show(agree([self.recent_use()], self.most_labels))

    def recent_use(self) -> RecentUse:
        """The recent use of the busiest adapters up to now, and the present labels. Old use decays."""
        now = self._clock()
        factor = exp(min(0.0, self._decayed_at - now) / _RECENT_S)
        self._decayed_at = now
        for use in (self._total, *self._recent.values()):
            use.decay(factor)
        self._absorb()
        busiest = nlargest(_REPORTED_A_LABEL * self.most_labels, self._recent.items(), key=_recent_requests)
        return RecentUse([name for name in self._series if name != OTHER], dict(busiest), self._total)

    def show(self, agreed: AgreedLabels) -> None:
        """Use these labels from now on: end other series, begin new ones, and add what was counted until `recent_use`.

        Hit rates are shown only by the process that answers the scrape, which has those of all.
        """
        for name in self._series.keys() - {*agreed.adapters, OTHER}:
            del self._series[name]
        for name in agreed.adapters:
            self._series.setdefault(name, AdapterCounts())
        self._add_unshown(agreed.from_zero)
        self._hit_rates = agreed.hit_rates

    def _absorb(self) -> None:
        """Add pending counts to the recent use, and to those that the next `show` adds to the series."""
        for name, counts in self._pending.items():
            use = counts.use
            self._total.add(use)
            self._recent.setdefault(name, AdapterFigures()).add(use)
            if name in self._unshown:
                self._unshown[name].add(counts)
            else:
                self._unshown[name] = counts
        self._pending = {}
        if len(self._recent) > self._most_kept:
            self._recent = dict(nlargest(self._most_kept // 2, self._recent.items(), key=_recent_requests))

    def _add_unshown(self, from_zero: Sequence[str]) -> None:
        """Add absorbed counts to the series of their adapters; to `other` where there is none, or it begins at 0."""
        for name, counts in self._unshown.items():
            label = name if name in self._series and name not in from_zero else OTHER
            self._series.setdefault(label, AdapterCounts()).add(counts)
        self._unshown = {}

    def _count_rest_as_other(self) -> None:
        """Add absorbed counts of adapters without series to `other`.

        Those with series wait for `show`: it may end a series, and nobody would see what this one had grown by.
        """
        for name in self._unshown.keys() - self._series.keys():
            self._series.setdefault(OTHER, AdapterCounts()).add(self._unshown.pop(name))

    def describe(self) -> Iterable[Metric]:
        """The metrics without samples, by which the registry knows their names."""
        return self._families({}, {})

    def collect(self) -> Iterable[Metric]:
        """The metrics by label, as of the last `show`."""
        return self._families(self._series, self._hit_rates)

    def _families(self, series: Mapping[str, AdapterCounts], hit_rates: Mapping[str, float]) -> Iterable[Metric]:
        """The metrics with the samples of these series."""
        decisions = CounterMetricFamily(
            "lora_routing_decisions", "Requests for an adapter, by outcome.", labels=("lora_id", "outcome")
        )
        latency = HistogramMetricFamily(
            "lora_request_latency_seconds", "From the request read to the end of its whole answer.", labels=("lora_id",)
        )
        prompt = _adapter_counter("lora_prompt_tokens", "Prompt tokens of answers that report cached tokens.")
        cached = _adapter_counter("lora_cached_tokens", "Those of them that engines found cached.")
        hit_rate = GaugeMetricFamily(
            "lora_cache_hit_rate", "Cached share of prompt tokens over five minutes.", labels=("lora_id",)
        )
        for label, counts in series.items():
            for outcome, count in counts.outcomes.items():
                decisions.add_metric((label, outcome), count)
            latency.add_metric((label,), _cumulative_buckets(counts.latencies), counts.latency_sum_s)
            prompt.add_metric((label,), counts.prompt_tokens)
            cached.add_metric((label,), counts.cached_tokens)
        for label, rate in hit_rates.items():
            hit_rate.add_metric((label,), rate)
        return (decisions, latency, prompt, cached, hit_rate)


def _recent_requests(item: tuple[str, AdapterFigures]) -> float:
    """The recent requests of an adapter with its use."""
    return item[1].requests


def _adapter_counter(name: str, documentation: str) -> CounterMetricFamily:
    """An empty counter by adapter."""
    return CounterMetricFamily(name, documentation, labels=("lora_id",))


def _cumulative_buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets as Prometheus has them: counts up to each bound."""
    below, buckets = 0, []
    for bound, count in zip((*_BUCKETS, inf), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == inf else str(bound), float(below)))
    return buckets
