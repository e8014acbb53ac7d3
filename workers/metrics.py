"""The agent's own metrics. Labels are bounded: adapters are named while they are loaded or were among the last."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lorafleet.engine.rates import EngineRates

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_FEW_BUCKETS = (0.05, 0.25, 1, 5, 20, 60)
MOST_NAMED = 100
"""Adapters with a series of their own: some eight lines each, so that a page stays below 200 KB."""


class WorkerMetrics:
    """One agent's metrics, in a registry of their own."""

    def __init__(self, worker_id: str = "") -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._worker_id = worker_id
        self._named: OrderedDict[str, None] = OrderedDict()
        labels = ["lora_id", "worker_id"]
        self._load_seconds = Histogram(
            "lora_load_duration_seconds",
            "Until the engine has an adapter.",
            labels,
            registry=registry,
            buckets=_FEW_BUCKETS,
        )
        self._unload_seconds = Histogram(
            "lora_unload_duration_seconds", "Unloads.", labels, registry=registry, buckets=_FEW_BUCKETS
        )
        self.stage_seconds = Histogram(
            "lorafleet_workers_stage_seconds", "Stages of a load.", ["stage"], registry=registry, buckets=_BUCKETS
        )
        self.load_failures = Counter("lora_load_failures", "Failed loads by error code.", ["code"], registry=registry)
        self._memory_bytes = Gauge(
            "lora_memory_usage_bytes", "Weights of the loaded adapters.", labels, registry=registry
        )
        self._requests = Gauge(
            "lora_request_count", "Requests on the loaded adapters, as routers report them.", labels, registry=registry
        )
        self.fetched_bytes = Counter("lorafleet_workers_fetched_bytes", "Adapters from sources.", registry=registry)
        self.cache = Counter(
            "lorafleet_workers_cache", "Adapters asked for: on this disk or not.", ["outcome"], registry=registry
        )
        self.cache_used_bytes = Gauge("lorafleet_workers_disk_used_bytes", "Installed adapters.", registry=registry)
        self.cache_held_bytes = Gauge(
            "lorafleet_workers_disk_held_bytes", "Of those, adapters that are in use.", registry=registry
        )
        self.cache_limit_bytes = Gauge("lorafleet_workers_disk_limit_bytes", "max_disk_bytes.", registry=registry)
        self.cache_adapters = Gauge("lorafleet_workers_disk_adapters", "Installed adapters.", registry=registry)
        self.cache_deleted = Counter(
            "lorafleet_workers_disk_deleted", "Adapters that left the cache.", registry=registry
        )
        self.loaded = Gauge("lorafleet_workers_loaded_adapters", "Adapters that the engine holds.", registry=registry)
        self.ghosts = Gauge(
            "lorafleet_workers_ghosts", "Unloaded adapters still in the engine's memory (estimated).", registry=registry
        )
        self.disk_free_bytes = Gauge("lorafleet_workers_disk_free_bytes", "Free in the cache.", registry=registry)
        self.engine_up = Gauge("lorafleet_workers_engine_up", "1 while the engine answers.", registry=registry)
        self.engine_suspect = Gauge(
            "lorafleet_workers_engine_suspect", "1 while the engine hangs, as it seems.", registry=registry
        )
        self.engine_restarts = Counter("lorafleet_workers_engine_restarts", "Engine failures.", registry=registry)
        self.heartbeat_failures = Counter(
            "lorafleet_workers_heartbeat_failures", "Heartbeats that were not taken.", registry=registry
        )
        self._rates = {
            name: Gauge(f"lorafleet_workers_{name}", text, registry=registry)
            for name, text in {
                "prefill_tokens_per_s": "Learned: of a prefill that has the engine for itself.",
                "decode_tokens_per_s": "Learned: of one request with no prefill beside it.",
                "inter_token_s": "Between two tokens of a request, at the last reading.",
                "mean_output_tokens": "Of requests that ended lately.",
                "mean_request_s": "Of requests that ended lately, from scheduled to the last token.",
            }.items()
        }
        self.loop_failures = Counter(
            "lorafleet_workers_loop_failures",
            "Rounds of a background loop that ended in a fault of ours.",
            ["loop"],
            registry=registry,
        )
        self.kv_blocks = Gauge(
            "lorafleet_workers_kv_blocks", "Blocks on the device, by the KV ledger.", registry=registry
        )
        self.kv_bytes = Gauge("lorafleet_workers_kv_ledger_bytes", "Memory of the KV ledger.", registry=registry)
        self.kv_whole = Gauge(
            "lorafleet_workers_kv_ledger_whole", "1 while no KV event of this engine is missing.", registry=registry
        )
        self.kv_events = Counter("lorafleet_workers_kv_events", "KV events applied.", ["type"], registry=registry)
        self.kv_rejected = Counter(
            "lorafleet_workers_kv_rejected", "KV events not accepted, by reason.", ["reason"], registry=registry
        )
        self.kv_snapshots = Counter("lorafleet_workers_kv_snapshots", "KV snapshots given.", registry=registry)
        self.kv_readers = Gauge("lorafleet_workers_kv_readers", "Open streams of KV changes.", registry=registry)
        self.kv_readers_dropped = Counter(
            "lorafleet_workers_kv_readers_dropped", "Streams of KV changes ended as too slow.", registry=registry
        )

    def load_seconds(self, lora_id: str) -> Histogram:
        return self._load_seconds.labels(*self._labels(lora_id))

    def unload_seconds(self, lora_id: str) -> Histogram:
        return self._unload_seconds.labels(*self._labels(lora_id))

    def resident(self, adapters: Iterable[tuple[str, int, int]]) -> None:
        """What the engine holds now, as (lora_id, bytes, requests); other adapters have no such series."""
        totals: dict[str, tuple[int, int]] = {}
        for lora_id, size_bytes, requests in adapters:  # two versions of one are one series
            before = totals.get(lora_id, (0, 0))
            totals[lora_id] = (before[0] + size_bytes, before[1] + requests)
        self._memory_bytes.clear()
        self._requests.clear()
        for lora_id, (size_bytes, requests) in totals.items():
            self._memory_bytes.labels(lora_id, self._worker_id).set(size_bytes)
            self._requests.labels(lora_id, self._worker_id).set(requests)

    def _labels(self, lora_id: str) -> tuple[str, str]:
        """The series of the adapters that were loaded or unloaded last; older ones end."""
        self._named[lora_id] = None
        self._named.move_to_end(lora_id)
        while len(self._named) > MOST_NAMED:
            oldest, _ = self._named.popitem(last=False)
            for each in (self._load_seconds, self._unload_seconds):
                with contextlib.suppress(KeyError):  # loaded and never unloaded
                    each.remove(oldest, self._worker_id)
        return lora_id, self._worker_id

    def no_ledger(self) -> None:
        """There is no engine whose blocks could be known."""
        for gauge in (self.kv_blocks, self.kv_bytes, self.kv_whole):
            gauge.set(0)

    def rates(self, learned: EngineRates) -> None:
        """Show what the engine's counters have taught; 0 until measured."""
        for name, gauge in self._rates.items():
            gauge.set(getattr(learned, name))

    def page(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)
