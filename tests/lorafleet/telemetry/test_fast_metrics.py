"""Fast metrics are exposed as prometheus_client's own."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lorafleet.telemetry import fast_metrics

SEEN = (0.0, 0.005, 0.01, 0.010001, 0.5, 7.0, 100.0)


def exposed(kind):
    registry = CollectorRegistry()
    on = {"registry": registry, "namespace": "a", "subsystem": "b"}
    requests = kind.Counter("requests", "How many.", ("route", "status"), **on)
    requests.labels("/x", 200).inc()
    requests.labels("/x", 200).inc(2)
    requests.labels('/"y"\n', 503).inc()
    kind.Counter("tokens", "All.", **on).inc(3.5)
    kind.Counter("none", "Never.", **on)
    depth = kind.Gauge("depth", "Now.", **on)
    depth.inc(4)
    depth.dec()
    kind.Gauge("state", "Of a worker.", ("worker",), **on).labels("w0").set(1)
    waited = kind.Histogram("waited", "How long.", buckets=(0.01, 0.1, 1, 10), **on)
    by = kind.Histogram("by", "How long.", ("who",), buckets=(0.01, 5), **on)
    for value in SEEN:
        waited.observe(value)
        by.labels("me").observe(value)
    gone = kind.Gauge("gone", "Of a worker.", ("worker", "x"), **on)
    gone.labels("w0", "1").set(1)
    gone.labels("w1", "1").set(2)
    gone.remove_by_labels({"worker": "w0"})
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


def test_the_exposition_equals_prometheus_clients():
    assert exposed(fast_metrics) == exposed(prometheus_client)


def test_a_metric_name_is_unique_and_labels_match_their_names():
    registry = CollectorRegistry()
    counter = fast_metrics.Counter("x", "X.", ("one",), registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        fast_metrics.Counter("x", "X.", registry=registry)
    with pytest.raises(ValueError, match="labels"):
        counter.labels("a", "b")
