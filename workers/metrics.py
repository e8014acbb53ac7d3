"""The agent's own Prometheus metrics. Only loaded and recently loaded adapters have series of their own."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from lorafleet.engine.rates import EngineRates
from lorafleet.telemetry.metric_table import MetricTable, metric
from workers.wire import WorkerAdapter

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_FEW_BUCKETS = (0.05, 0.25, 1, 5, 20, 60)
MOST_NAMED = 100
"""Adapters with load and unload series: about eight lines each, so that a page stays below 200 KB."""


_SOURCE_KINDS = frozenset({"file", "https", "hf", "s3", "gs", "az", "plugin"})


def source_kind(scheme: str) -> str:
    """The metric label of a source by its scheme; of a downloader that a package brings, `other`."""
    if scheme.startswith("fleet"):
        return "other_fleet"
    return scheme if scheme in _SOURCE_KINDS else "other"


class WorkerMetrics(MetricTable):
    """One agent's metrics, in a registry of their own."""

    _load_seconds = metric(
        Histogram,
        "lora_load_duration_seconds",
        "Duration of loads in the engine.",
        "lora_id",
        "worker_id",
        buckets=_FEW_BUCKETS,
    )
    _unload_seconds = metric(
        Histogram,
        "lora_unload_duration_seconds",
        "Duration of unloads in the engine.",
        "lora_id",
        "worker_id",
        buckets=_FEW_BUCKETS,
    )
    stage_seconds = metric(
        Histogram, "lorafleet_workers_stage_seconds", "Duration of the stages of a load.", "stage", buckets=_BUCKETS
    )
    effect_checks = metric(
        Counter,
        "lorafleet_workers_effect_checks",
        "Checks of whether an engine really uses an adapter, by how it was asked and what was found.",
        "by",
        "found",
    )
    canary_seconds = metric(
        Histogram,
        "lorafleet_workers_canary_seconds",
        "Duration of canaries: an engine's answers with and without an adapter.",
        buckets=_BUCKETS,
    )
    acceptance_checks = metric(
        Counter,
        "lorafleet_workers_acceptance_checks",
        "Comparisons of the engine's log-probabilities with an adapter's acceptance file, by result.",
        "result",
    )
    acceptance_seconds = metric(
        Histogram,
        "lorafleet_workers_acceptance_seconds",
        "Duration of comparisons with an acceptance file.",
        buckets=_BUCKETS,
    )
    differing_adapters = metric(
        Gauge,
        "lorafleet_workers_differing_adapters",
        "Loaded adapters whose log-probabilities are not those of their acceptance file.",
    )
    partial_adapters = metric(
        Gauge, "lorafleet_workers_partial_adapters", "Loaded adapters of which the engine ignores some modules."
    )
    unproved_adapters = metric(
        Gauge, "lorafleet_workers_unproved_adapters", "Loaded adapters whose effect in the engine is not proved."
    )
    _load_failures = metric(
        Counter, "lora_load_failures", "Failed loads, of the adapters that failed last.", "lora_id", "worker_id"
    )
    _failures_by_code = metric(
        Counter, "lorafleet_workers_load_failures", "Failed loads of all adapters, by error code.", "code"
    )
    _memory_bytes = metric(
        Gauge,
        "lora_memory_usage_bytes",
        "What the engine holds for a loaded adapter: its padded device slot and its copy in host memory.",
        "lora_id",
        "worker_id",
    )
    _file_bytes = metric(Gauge, "lora_file_size_bytes", "Size of a loaded adapter's files.", "lora_id", "worker_id")
    pool_requests = metric(
        Counter,
        "lorafleet_workers_pool_requests",
        "Requests by where the engine found their adapter, as the engine counts or as its slots are estimated.",
        "found",
        "by",
    )
    _requests = metric(
        Gauge, "lora_request_count", "Requests to the loaded adapters, by the routers' reports.", "lora_id", "worker_id"
    )
    fetched_bytes = metric(Counter, "lorafleet_workers_fetched_bytes", "Bytes of adapters fetched from sources.")
    source_bytes = metric(
        Counter,
        "lorafleet_workers_source_bytes",
        "Bytes of adapters received, by where they came from: whole or not, right or not.",
        "source",
    )
    neighbour_failures = metric(
        Counter,
        "lorafleet_workers_neighbour_failures",
        "Fetches from other workers that failed, so that the next place was asked: they were silent, lacked the"
        " files, or sent other bytes than the digest's.",
        "reason",
    )
    uploads = metric(Gauge, "lorafleet_workers_uploads", "Files that other workers and fleets read here now.")
    uploaded_bytes = metric(
        Counter, "lorafleet_workers_uploaded_bytes", "Bytes of adapters sent to other workers and fleets."
    )
    uploads_refused = metric(
        Counter, "lorafleet_workers_uploads_refused", "Files not sent because max_uploads were under way."
    )
    kept_adapters = metric(
        Gauge,
        "lorafleet_workers_kept_adapters",
        "Installed adapters that are kept because the fleet has them nowhere else.",
    )
    cache = metric(
        Counter, "lorafleet_workers_cache", "Requested adapters by whether they were on this disk.", "outcome"
    )
    cache_used_bytes = metric(Gauge, "lorafleet_workers_disk_used_bytes", "Size of the installed adapters.")
    cache_held_bytes = metric(
        Gauge, "lorafleet_workers_disk_held_bytes", "Size of the installed adapters that are in use."
    )
    cache_limit_bytes = metric(
        Gauge, "lorafleet_workers_disk_limit_bytes", "Limit for installed adapters, see max_disk_bytes."
    )
    cache_adapters = metric(Gauge, "lorafleet_workers_disk_adapters", "Installed adapters.")
    cache_deleted = metric(Counter, "lorafleet_workers_disk_deleted", "Adapters deleted from the cache.")
    loaded = metric(Gauge, "lorafleet_workers_loaded_adapters", "Adapters that are loaded in the engine.")
    ghosts = metric(Gauge, "lorafleet_workers_ghosts", "Unloaded adapters still in the engine's memory (estimated).")
    disk_free_bytes = metric(Gauge, "lorafleet_workers_disk_free_bytes", "Free bytes of the cache's file system.")
    engine_up = metric(Gauge, "lorafleet_workers_engine_up", "1 while the engine answers.")
    engine_suspect = metric(Gauge, "lorafleet_workers_engine_suspect", "1 while the engine seems to hang.")
    engine_restarts = metric(Counter, "lorafleet_workers_engine_restarts", "Engine failures.")
    heartbeat_failures = metric(
        Counter, "lorafleet_workers_heartbeat_failures", "Heartbeats that no orchestrator accepted."
    )
    loop_failures = metric(
        Counter,
        "lorafleet_workers_loop_failures",
        "Iterations of a background loop that failed with an unexpected error.",
        "loop",
    )
    kv_blocks = metric(Gauge, "lorafleet_workers_kv_blocks", "Cached blocks on the device, by the KV ledger.")
    kv_bytes = metric(Gauge, "lorafleet_workers_kv_ledger_bytes", "Memory of the KV ledger.")
    kv_whole = metric(Gauge, "lorafleet_workers_kv_ledger_whole", "1 while no KV event of this engine is missing.")
    kv_events = metric(Counter, "lorafleet_workers_kv_events", "KV events applied.", "type")
    kv_rejected = metric(Counter, "lorafleet_workers_kv_rejected", "Rejected KV events, by reason.", "reason")
    kv_snapshots = metric(Counter, "lorafleet_workers_kv_snapshots", "KV snapshots sent to routers.")
    kv_readers = metric(Gauge, "lorafleet_workers_kv_readers", "Open streams of KV changes.")
    kv_readers_dropped = metric(
        Counter, "lorafleet_workers_kv_readers_dropped", "Streams of KV changes ended because too slow."
    )
    prefill_tokens_per_s = metric(
        Gauge, "lorafleet_workers_prefill_tokens_per_s", "Measured prefill rate of a request alone in the engine."
    )
    decode_tokens_per_s = metric(
        Gauge,
        "lorafleet_workers_decode_tokens_per_s",
        "Measured decode rate of one request without a concurrent prefill.",
    )
    inter_token_s = metric(
        Gauge, "lorafleet_workers_inter_token_s", "Seconds between two tokens of a request, at the last reading."
    )
    mean_output_tokens = metric(
        Gauge, "lorafleet_workers_mean_output_tokens", "Mean output tokens of recently finished requests."
    )
    mean_request_s = metric(
        Gauge,
        "lorafleet_workers_mean_request_s",
        "Mean duration of recently finished requests, from scheduled to the last token.",
    )

    def __init__(self, worker_id: str = "") -> None:
        """worker_id  a label of the adapters' series"""
        super().__init__()
        self._worker_id = worker_id
        self._timed: OrderedDict[str, None] = OrderedDict()
        self._failed: OrderedDict[str, None] = OrderedDict()

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the duration of the block to the metrics of a stage of a load."""
        with self.stage_seconds.labels(stage).time():
            yield

    def load_seconds(self, lora_id: str) -> Histogram:
        """The histogram of an adapter's load durations; only the `MOST_NAMED` adapters asked for last keep series."""
        return self._load_seconds.labels(*self._timed_labels(lora_id))

    def unload_seconds(self, lora_id: str) -> Histogram:
        """The histogram of an adapter's unload durations; only the `MOST_NAMED` adapters asked for last keep series."""
        return self._unload_seconds.labels(*self._timed_labels(lora_id))

    def count_load_failure(self, lora_id: str, code: str) -> None:
        """Count a failed load; only the `MOST_NAMED` adapters that failed last keep a series."""
        self._failures_by_code.labels(code).inc()
        self._load_failures.labels(*self._labels(lora_id, self._failed, self._load_failures)).inc()

    def set_loaded_adapters(self, adapters: Iterable[WorkerAdapter]) -> None:
        """Replace the memory, size and request series by those of the loaded adapters.

        Those of several versions of one adapter are added up.
        """
        gauges = (self._memory_bytes, self._file_bytes, self._requests)
        for gauge in gauges:
            gauge.clear()
        for adapter in adapters:
            values = (adapter.held_bytes, adapter.size_bytes, adapter.request_count)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.labels(adapter.lora_id, self._worker_id).inc(value)

    def _timed_labels(self, lora_id: str) -> tuple[str, str]:
        """Labels of an adapter's duration series."""
        return self._labels(lora_id, self._timed, self._load_seconds, self._unload_seconds)

    def _labels(self, lora_id: str, named: OrderedDict[str, None], *metrics: MetricWrapperBase) -> tuple[str, str]:
        """Labels of an adapter's series; ends the series of all but the `MOST_NAMED` adapters used last.

        named  the adapters with series in these metrics, least recently used first
        """
        named[lora_id] = None
        named.move_to_end(lora_id)
        while len(named) > MOST_NAMED:
            oldest, _ = named.popitem(last=False)
            for each in metrics:
                each.remove_by_labels({"lora_id": oldest})  # of loaded and never unloaded ones there may be none
        return lora_id, self._worker_id

    def clear_ledger(self) -> None:
        """Set the KV ledger's gauges to 0, as there is no ledger."""
        for gauge in (self.kv_blocks, self.kv_bytes, self.kv_whole):
            gauge.set(0)

    def set_rates(self, rates: EngineRates) -> None:
        """Set the gauges to the engine's measured rates; a rate that is not measured yet is 0."""
        self.prefill_tokens_per_s.set(rates.prefill_tokens_per_s)
        self.decode_tokens_per_s.set(rates.decode_tokens_per_s)
        self.inter_token_s.set(rates.inter_token_s)
        self.mean_output_tokens.set(rates.mean_output_tokens)
        self.mean_request_s.set(rates.mean_request_s)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
