"""Prometheus metrics, on a registry of their own. Per-adapter series are bounded: the largest, and one for the rest."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lorafleet.telemetry.adapter_labels import OTHER, choose_labels
from lorafleet.telemetry.metric_table import MetricTable, metric
from orchestrator.core.incidents import KINDS_OF_INCIDENTS
from orchestrator.core.placement.pools import PoolFigures

COPY_STATES = ("kept", "copying", "short", "lost", "unknown")
EVICTED = ("lru", "capacity", "ttl", "surplus")

Counts = Mapping[str, tuple[int, int]]
"""lora_id -> (replicas now, replicas wanted)"""
_LOADS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class OrchestratorMetrics(MetricTable):
    """The orchestrator's metrics. The `observe_...` methods set functions that are read at each scrape."""

    operations = metric(Counter, "lora_placement_operations", "Placement operations by outcome", "operation", "outcome")
    evictions = metric(
        Counter,
        "lora_evictions",
        "Adapters unloaded without a deletion: for another adapter (lru), to empty a worker (capacity),"
        " for want of requests (ttl), or as a surplus copy (surplus)",
        "lora_id",
        "reason",
    )
    usage = metric(Counter, "lora_usage_requests", "Requests that routers report", "lora_id")
    load_seconds = metric(Histogram, "lorafleet_orchestrator_load_seconds", "Time of one load", buckets=_LOADS)
    unload_seconds = metric(Histogram, "lorafleet_orchestrator_unload_seconds", "Time of one unload", buckets=_LOADS)
    pass_seconds = metric(
        Histogram,
        "lorafleet_orchestrator_pass_seconds",
        "Time of one pass: observe, place, diff, and starting the actions",
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
    )
    incidents = metric(
        Counter,
        "lorafleet_orchestrator_incidents",
        "What happened to workers and engines by itself, by kind; also what the history sums up",
        "kind",
    )
    passes_failed = metric(Counter, "lorafleet_orchestrator_passes_failed", "Passes that ended in an unexpected error")
    failed = metric(Gauge, "lorafleet_orchestrator_adapters_failed", "Adapters that no worker can load")
    leading = metric(Gauge, "lorafleet_orchestrator_leading", "1 while this orchestrator holds the lease")
    epoch = metric(Gauge, "lorafleet_orchestrator_epoch", "The epoch of our last term")
    publishes = metric(
        Counter,
        "lorafleet_orchestrator_publishes",
        "Publishes of names, by outcome: new, same (bytes that the name had), unfinished, refused, failed",
        "outcome",
    )
    publish_seconds = metric(
        Histogram,
        "lorafleet_orchestrator_publish_seconds",
        "Duration of publishes that ended well, until every router went by them",
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    )
    published_names = metric(Gauge, "lorafleet_orchestrator_published_names", "Published names")
    published_versions = metric(
        Gauge, "lorafleet_orchestrator_published_versions", "Versions of published names that are kept"
    )
    frozen = metric(Gauge, "lorafleet_orchestrator_frozen", "1 while the churn limiter freezes moves")
    pauses = metric(Gauge, "lorafleet_orchestrator_pauses", "Pauses of requests in force")
    _copies = metric(
        Gauge, "lorafleet_orchestrator_copies", "Adapters whose files only the fleet has, by how they are kept", "state"
    )
    scaled_from_zero = metric(
        Counter, "lorafleet_orchestrator_scaled_from_zero", "Pools at zero that were scaled to one worker", "pool"
    )
    forwarded = metric(
        Counter,
        "lorafleet_orchestrator_forwarded",
        "Requests that this orchestrator does not answer itself, by outcome",
        "outcome",
    )

    def __init__(self, metrics_adapters: int = 200) -> None:
        """metrics_adapters  adapters with series of their own"""
        super().__init__()
        self.adapter_labels = BoundedLabels(metrics_adapters)
        self._usage: Callable[[], Mapping[str, tuple[float, float]]] = dict
        self._counted: Mapping[str, float] = {}
        for kind in KINDS_OF_INCIDENTS:
            self.incidents.labels(kind)

    def set_copies(self, total: int, states: Mapping[str, int]) -> None:
        """Set how many adapters' files are kept as wanted, or are in another state.

        total   all of them; states: number in each state, of those that are not simply kept
        """
        others = {name: states.get(name, 0) for name in COPY_STATES if name != "kept"}
        for name, count in {**others, "kept": total - sum(others.values())}.items():
            self._copies.labels(name).set(count)

    def observe_state_files(self, troubles: Mapping[str, Callable[[], str]]) -> None:
        """Set what a scrape reads: for each state file, by name, why nothing is written to it; empty: it is."""
        gauge = Gauge(
            "lorafleet_orchestrator_state_file_lost",
            "1 while nothing is written to a state file: deleted, replaced, or its disk fails or is full",
            ["file"],
            registry=self.registry,
        )
        for name, trouble in troubles.items():
            gauge.labels(name).set_function(partial(_is_said, trouble))

    def observe_slices(self, age_s: Callable[[], float | None]) -> None:
        """Set what a scrape reads: seconds since the API server last confirmed the EndpointSlices; None: never."""
        gauge = Gauge(
            "lorafleet_orchestrator_slices_age_seconds",
            "Seconds since the API server last confirmed the EndpointSlices",
            registry=self.registry,
        )

        def read() -> float:
            """The age in seconds; infinite while there is none."""
            seconds = age_s()
            return math.inf if seconds is None else seconds

        gauge.set_function(read)

    def observe_fleet(
        self,
        replicas: Callable[[], Counts],
        workers: Callable[[], Mapping[str, int]],
        pools: Callable[[], Iterable[PoolFigures]] = list,
        orphans: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Set what a scrape reads: adapters' replicas, workers by state, pools, orphans by origin. Call it once."""
        self.registry.register(_FleetCollector(self.adapter_labels, replicas, workers, orphans))
        self.registry.register(_PoolCollector(pools))

    def observe_pauses(self, count: Callable[[], float]) -> None:
        """Set what a scrape reads: the pauses in force."""
        self.pauses.set_function(count)

    def observe_term(
        self,
        *,
        failed: Callable[[], float],
        frozen: Callable[[], bool],
        leading: Callable[[], bool],
        epoch: Callable[[], float],
    ) -> None:
        """Set what a scrape reads: failed adapters, whether moves are frozen, whether we lead, and our epoch.

        The first two are 0 unless we lead, since alerts take the largest of all orchestrators.
        """
        self.failed.set_function(lambda: failed() if leading() else 0)
        self.frozen.set_function(lambda: frozen() and leading())
        self.leading.set_function(leading)
        self.epoch.set_function(epoch)

    def record_operation(self, operation: str, outcome: str, seconds: float) -> None:
        """Count an operation that has ended, and its duration if it succeeded."""
        self.operations.labels(operation, outcome).inc()
        if outcome == "ok" and operation == "load":
            self.load_seconds.observe(seconds)
        elif outcome == "ok" and operation == "unload":
            self.unload_seconds.observe(seconds)

    def end_adapter_series(self, lora_id: str) -> None:
        """Remove the series of a deleted adapter, and free its place among the labels."""
        if lora_id in self.adapter_labels.names:
            self.adapter_labels.names.discard(lora_id)
            self._remove_series(lora_id)

    def _remove_series(self, lora_id: str) -> None:
        """Remove the adapter's series; its place among the labels stays."""
        self.usage.remove(lora_id)
        for reason in EVICTED:
            self.evictions.remove(lora_id, reason)

    def record_eviction(self, lora_id: str, reason: str) -> None:
        """Count an eviction under the adapter's label, which may take a free place. `reason`: one of `EVICTED`."""
        self.evictions.labels(self.adapter_labels.label(lora_id), reason).inc()

    def observe_usage(self, usage: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
        """Set what a scrape reads: lora_id -> (requests since our start, requests a second)."""
        self._usage = usage

    def render(self) -> bytes:
        """Count the usage since the last call, and return all metrics in Prometheus' text format."""
        self._count_usage()
        return generate_latest(self.registry)

    def _count_usage(self) -> None:
        """Count the requests since the last scrape under each adapter's present label; remove unlabelled series."""
        now = self._usage()
        for lora_id in self.adapter_labels.update({lora_id: rate for lora_id, (_, rate) in now.items()}):
            # From now on its requests count as `other`.
            self._remove_series(lora_id)
        for lora_id, (total, _) in now.items():
            grown = total - self._counted.get(lora_id, 0.0)
            if grown:
                self.usage.labels(self.adapter_labels.label(lora_id)).inc(grown if grown > 0 else total)
        self._counted = {lora_id: total for lora_id, (total, _) in now.items()}


def _is_said(trouble: Callable[[], str]) -> float:
    """1.0 while there is trouble, else 0.0."""
    return float(bool(trouble()))


class BoundedLabels:
    """The adapters with series of their own, at most `most`, by traffic. The rest are counted as `other`.

    A request is counted once, under the label of its moment, so no series ever falls. An adapter keeps its series until
    it is clearly not among the first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.names: set[str] = set()

    def label(self, lora_id: str) -> str:
        """The adapter's label: its lora_id, for which it takes a free place if there is one, else `other`."""
        if lora_id in self.names:
            return lora_id
        if lora_id != OTHER and len(self.names) < self._most:
            self.names.add(lora_id)
            return lora_id
        return OTHER

    def update(self, rates: Mapping[str, float]) -> set[str]:
        """Give the places to the busiest adapters, by requests a second; returns those that lost theirs."""
        chosen = choose_labels(self.names, rates, self._most)
        gone, self.names = self.names - chosen, chosen
        return gone


class _PoolCollector(Collector):
    """The figures for autoscalers, from the leader only."""

    def __init__(self, pools: Callable[[], Iterable[PoolFigures]]) -> None:
        self._pools = pools

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The pools' queue waits, slots and wanted slots, and the use of those that may be at zero, as of now."""
        labels = ["base_model", "pool"]
        wait = GaugeMetricFamily(
            "lorafleet_pool_queue_wait_seconds", "Queue wait of a request that comes now, in seconds", labels=labels
        )
        slots = GaugeMetricFamily("lorafleet_pool_slots", "Adapter slots of a pool's ready workers", labels=labels)
        wanted = GaugeMetricFamily("lorafleet_pool_slots_wanted", "Slots that the pool's load needs", labels=labels)
        held = GaugeMetricFamily(
            "lorafleet_pool_held_requests",
            "Requests that routers hold for the pool's first worker",
            labels=labels,
        )
        idle = GaugeMetricFamily(
            "lorafleet_pool_idle_seconds",
            "Seconds since a request for the pool's base model was held, ran or ended",
            labels=labels,
        )
        for pool in self._pools():
            name = [pool.base_model, pool.name]
            if pool.use is not None:
                held.add_metric(name, pool.use.held)
                idle.add_metric(name, pool.use.idle_s)
            wait.add_metric(name, pool.queue_wait_s)
            slots.add_metric(name, pool.slots)
            wanted.add_metric(name, pool.slots_wanted)
        yield from (wait, slots, wanted, held, idle)


class _FleetCollector(Collector):
    """Replicas by adapter, workers by state, and orphans by origin."""

    def __init__(
        self,
        labels: BoundedLabels,
        replicas: Callable[[], Counts],
        workers: Callable[[], Mapping[str, int]],
        orphans: Callable[[], Mapping[str, int]],
    ) -> None:
        self._labels = labels
        self._replicas = replicas
        self._workers = workers
        self._orphans = orphans

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The replicas, workers and orphans as of now. An adapter may take a free place among the labels."""
        current = GaugeMetricFamily("lora_replicas_current", "Ready replicas of an adapter", labels=["lora_id"])
        target = GaugeMetricFamily("lora_replicas_target", "Replicas an adapter should have", labels=["lora_id"])
        sums: dict[str, tuple[int, int]] = {}
        for lora_id, (now, wanted) in self._replicas().items():
            label = self._labels.label(lora_id)
            before = sums.get(label, (0, 0))
            sums[label] = (before[0] + now, before[1] + wanted)
        for label, (now, wanted) in sums.items():
            current.add_metric([label], now)
            target.add_metric([label], wanted)
        workers = GaugeMetricFamily("lorafleet_orchestrator_workers", "Workers by state", labels=["state"])
        for state, count in self._workers().items():
            workers.add_metric([state], count)
        orphans = GaugeMetricFamily(
            "lorafleet_orchestrator_orphans",
            "Adapters on workers that are not registered, by origin",
            labels=["origin"],
        )
        for origin, orphan_count in self._orphans().items():
            orphans.add_metric([origin], orphan_count)
        yield from (current, target, workers, orphans)
