"""Fast Prometheus metrics for one event loop.

prometheus_client takes a lock for each count and builds a tuple of strings for each `labels`: about 12 us for one
request of the router. Here a count is one addition. Names and constructors are as in prometheus_client, whose registry
and exposition are used. Not for threads: two that count at once may lose a count.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class MetricValue:
    """The value of a counter or gauge for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self.value -= amount

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


class BucketCounts:
    """A histogram's counts in each bucket, and the sum of its observations, for one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count an observation in its bucket, and add it to the sum."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


C = TypeVar("C", MetricValue, BucketCounts)


class _MetricFamily(Collector, Generic[C]):
    """One metric with a child for each combination of label values; `_only` is the child of a metric without labels."""

    _only: C

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        namespace: str = "",
        subsystem: str = "",
    ) -> None:
        """Register the metric; without labels, also create its one child."""
        self._name = "_".join(part for part in (namespace, subsystem, name) if part)
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[object, ...], C] = {}
        if not self._labelnames:
            self._only = self.labels()
        registry.register(self)

    def _new_child(self) -> C:
        """A child with value zero."""
        raise NotImplementedError

    def labels(self, *values: object) -> C:
        """The child with these label values, in the order of the label names; created if missing.

        Raises ValueError for another number of values.
        """
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name} has labels {self._labelnames}, found {values}")
            child = self._children[values] = self._new_child()
        return child

    @property
    def label_values(self) -> list[tuple[object, ...]]:
        """The label values of all series."""
        return list(self._children)

    def remove_by_labels(self, labels: Mapping[str, object]) -> None:
        """Drop every child that has all of these label values."""
        at = [(self._labelnames.index(name), value) for name, value in labels.items()]
        for values in [v for v in self._children if all(v[i] == value for i, value in at)]:
            del self._children[values]

    def describe(self) -> Iterable[Metric]:
        """The metric without samples, by which the registry knows its name."""
        return [self._new_family()]

    def _new_family(self) -> Metric:
        """This metric for the exposition, without samples."""
        raise NotImplementedError


class _NumberFamily(_MetricFamily[MetricValue]):
    """Base of counters and gauges; without labels, `inc` counts directly."""

    def _new_child(self) -> MetricValue:
        """A value of zero."""
        return MetricValue()

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self._only.value += amount

    def collect(self) -> Iterable[Metric]:
        """The metric with the values of all children."""
        metric = self._new_family()
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        for values, child in list(self._children.items()):
            metric.add_metric([str(value) for value in values], child.value)
        yield metric


class Counter(_NumberFamily):
    """A value that only grows."""

    def _new_family(self) -> Metric:
        """This metric for the exposition, without samples."""
        return CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)


class Gauge(_NumberFamily):
    """A value that goes up and down."""

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self._only.value -= amount

    def set(self, value: float) -> None:
        """Replace the value."""
        self._only.value = value

    def _new_family(self) -> Metric:
        """This metric for the exposition, without samples."""
        return GaugeMetricFamily(self._name, self._documentation, labels=self._labelnames)


class Histogram(_MetricFamily[BucketCounts]):
    """Observations counted in buckets."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        namespace: str = "",
        subsystem: str = "",
    ) -> None:
        self._bounds = tuple(float(bound) for bound in buckets)
        super().__init__(name, documentation, labelnames, registry=registry, namespace=namespace, subsystem=subsystem)

    def _new_child(self) -> BucketCounts:
        """Buckets without observations."""
        return BucketCounts(self._bounds)

    def observe(self, value: float) -> None:
        """Count an observation in its bucket, and add it to the sum."""
        self._only.observe(value)

    def collect(self) -> Iterable[Metric]:
        """The metric with the cumulative buckets of all children."""
        metric = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, child in list(self._children.items()):
            below, buckets = 0, []
            for bound, count in zip((*self._bounds, inf), child.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == inf else str(bound), float(below)))
            metric.add_metric([str(value) for value in values], buckets, child.sum)
        yield metric

    def _new_family(self) -> Metric:
        """This metric for the exposition, without samples."""
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
