"""A service's metrics as a table: one row a metric, in the body of a class."""

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge

from lorafleet.service.network.tls import Tls
from lorafleet.telemetry.fast_metrics import BucketCounts, Counter, Histogram, MetricValue

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _MetricRow:
    """How one metric is made. `is_bare`: the attribute is the metric's only child, so that a count is one call."""

    kind: type[Any]
    name: str
    documentation: str
    labels: tuple[str, ...]
    options: dict[str, Any]
    is_bare: bool = False

    def create(self, registry: CollectorRegistry) -> Any:
        """The metric, registered under its name."""
        metric = self.kind(self.name, self.documentation, self.labels, registry=registry, **self.options)
        return metric.labels() if self.is_bare else metric


def metric(kind: type[M], name: str, documentation: str, *labels: str, **options: Any) -> M:
    """A row: the attribute is a metric of this kind, of `fast_metrics` or of prometheus_client.

    options  of the kind, such as a histogram's `buckets`
    """
    return cast("M", _MetricRow(kind, name, documentation, labels, options))


def bare_counter(name: str, documentation: str) -> MetricValue:
    """A row: the attribute is the value of a counter of `fast_metrics` without labels."""
    return cast("MetricValue", _MetricRow(Counter, name, documentation, (), {}, is_bare=True))


def bare_histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> BucketCounts:
    """A row: the attribute is the counts of a histogram of `fast_metrics` without labels."""
    return cast("BucketCounts", _MetricRow(Histogram, name, documentation, (), {"buckets": buckets}, is_bare=True))


class MetricTable:
    """Base of a service's metrics: creates those of the class body on a registry of the instance's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._labelled: list[tuple[tuple[str, ...], Any]] = []
        for attribute, row in vars(type(self)).items():
            if isinstance(row, _MetricRow):
                created = row.create(self.registry)
                setattr(self, attribute, created)
                self._labelled.append((row.labels, created))

    def observe_tls(self, service: str, tls: Tls | None) -> None:
        """Set what a scrape reads of a service's certificate; nothing without one."""
        if tls is None or tls.files.cert is None:
            return
        at = Gauge(
            f"lorafleet_{service}_tls_expiry_timestamp_seconds",
            "When the certificate in use expires, in Unix seconds.",
            registry=self.registry,
        )
        at.set_function(lambda: tls.expires_at or 0.0)
        current = Gauge(
            f"lorafleet_{service}_tls_files_current",
            "1 while the TLS files are in use as they are on disk, 0 while they cannot be used.",
            registry=self.registry,
        )
        current.set_function(lambda: float(tls.is_current))

    def forget(self, label: str, value: str) -> None:
        """Drop the series of this label value in every metric that has the label, as its owner is gone."""
        for labels, created in self._labelled:
            if label in labels:
                created.remove_by_labels({label: value})
