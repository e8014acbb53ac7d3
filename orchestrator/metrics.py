"""Prometheus metrics, on a registry of their own. Per-adapter series are bounded: the largest, then the rest."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

MOST_SERIES = 200
"""Adapters with a series of their own; a guess at what a dashboard can bear, nothing measured."""
REST = "_other"

Counts = Mapping[str, tuple[int, int]]
"""lora_id -> (replicas now, replicas wanted)"""


class Metrics:
    """What the reconcile loop counts. `observe` binds what is read at scrape time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operations = Counter(
            "lora_placement_operations",
            "Placement operations by outcome",
            ["operation", "outcome"],
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "lorafleet_orchestrator_pass_seconds",
            "Time of one pass: observe, place, diff, and starting the actions",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
            registry=self.registry,
        )
        self.passes_failed = Counter(
            "lorafleet_orchestrator_passes_failed", "Passes that ended in an error of ours", registry=self.registry
        )

    def observe(self, replicas: Callable[[], Counts], workers: Callable[[], Mapping[str, int]]) -> None:
        """Read these at each scrape: adapters' replicas, and workers by state."""
        self.registry.register(_Gauges(replicas, workers))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, replicas: Callable[[], Counts], workers: Callable[[], Mapping[str, int]]) -> None:
        self._replicas = replicas
        self._workers = workers

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        current = GaugeMetricFamily("lora_replicas_current", "Ready replicas of an adapter", labels=["lora_id"])
        target = GaugeMetricFamily("lora_replicas_target", "Replicas an adapter should have", labels=["lora_id"])
        for lora_id, (now, wanted) in bounded(self._replicas()).items():
            current.add_metric([lora_id], now)
            target.add_metric([lora_id], wanted)
        workers = GaugeMetricFamily("lorafleet_orchestrator_workers", "Workers by state", labels=["state"])
        for state, count in self._workers().items():
            workers.add_metric([state], count)
        yield from (current, target, workers)


def bounded(counts: Counts) -> Counts:
    """The adapters with the most replicas, and everything else as one."""
    if len(counts) <= MOST_SERIES:
        return counts
    order = sorted(counts, key=lambda lora_id: (-max(counts[lora_id]), lora_id))
    kept = {lora_id: counts[lora_id] for lora_id in order[:MOST_SERIES]}
    rest = [counts[lora_id] for lora_id in order[MOST_SERIES:]]
    return kept | {REST: (sum(now for now, _ in rest), sum(wanted for _, wanted in rest))}
