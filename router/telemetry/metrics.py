"""The router's Prometheus metrics. Labels are bounded: workers, base models, stages, codes, the busiest adapters."""

from typing import Any

from prometheus_client import CollectorRegistry

from lorafleet.telemetry.fast_metrics import Counter, Gauge, Histogram
from router.telemetry.adapter_series import AdapterSeries

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SHORT = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class RouterMetrics:
    """All metrics, on a registry of this router's own. Those counted for each request are held without labels."""

    def __init__(self, *, metrics_adapters: int = 100) -> None:
        """metrics_adapters  adapters with series of their own"""
        self.registry = CollectorRegistry()
        self.adapters = AdapterSeries(self.registry, most_labels=metrics_adapters)
        on: Any = {"registry": self.registry, "namespace": "lorafleet", "subsystem": "router"}
        self.requests = Counter(
            "requests", "Answers by route, HTTP status and error code.", ("route", "status", "code"), **on
        )
        self.first_data = Histogram(
            "first_data_seconds",
            "From the request read to the first data of its answer.",
            ("base_model",),
            buckets=_SECONDS,
            **on,
        )
        self.decide = Histogram(
            "decide_seconds", "Time to match and decide, at a request's arrival.", buckets=_SHORT, **on
        ).labels()
        self._add_tokenizing(on)
        self.retries = Counter("retries", "Attempts that failed before an answer began, by reason.", ("reason",), **on)
        self.cold_starts = Counter("cold_starts", "Requested adapter loads, by outcome.", ("outcome",), **on)
        self.held = Gauge("held_requests", "Requests that wait for an adapter.", **on)
        self.in_flight = Gauge("in_flight_requests", "Requests at engines.", **on)
        self.waiting = Gauge("waiting_requests", "Requests that wait here for room at an engine.", **on)
        self.waited = Histogram(
            "waited_seconds", "Wait of each sent request for room at an engine.", buckets=_SECONDS, **on
        ).labels()
        self.shadow_decisions = Counter(
            "shadow_decisions",
            "Choices of a shadow policy: the live policy's replica, or another.",
            ("policy", "agrees"),
            **on,
        )
        self.shadow_cost = Counter(
            "shadow_cost_seconds", "Predicted cost of a shadow policy's choices.", ("policy",), **on
        )
        self.live_cost = Counter("live_cost_seconds", "Predicted cost of the live policy's choices.", **on).labels()
        self.prefill_rate = Gauge(
            "replica_prefill_tokens_per_second",
            "Prefill speed learned by the agent; 0 until measured.",
            ("worker",),
            **on,
        )
        self.decode_rate = Gauge(
            "replica_decode_tokens_per_second",
            "Decode speed of one request, learned by the agent; 0 until measured.",
            ("worker",),
            **on,
        )
        self.kv_error = Gauge(
            "kv_error_share", "Difference of predicted and actual cached tokens, per prompt token.", ("worker",), **on
        )
        self.cached_tokens = Counter(
            "engine_cached_tokens", "Prompt tokens cached, as engines report them.", **on
        ).labels()
        self.predicted_tokens = Counter("predicted_cached_tokens", "Prompt tokens predicted as cached.", **on).labels()
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of routed requests.", **on).labels()
        self.kv_events = Counter("kv_events", "KV events applied, by type.", ("worker", "type"), **on)
        self.kv_rejected = Counter("kv_rejected", "KV events rejected, by reason.", ("worker", "reason"), **on)
        self.kv_gaps = Counter("kv_gaps", "Gaps in a KV event stream, by outcome.", ("worker", "outcome"), **on)
        self.kv_blocks = Gauge("kv_blocks", "Blocks known, over all tiers.", ("worker",), **on)
        self.kv_degraded = Gauge("kv_degraded", "1 while the known blocks may be wrong.", ("worker",), **on)
        self.kv_lag = Gauge(
            "kv_lag_seconds", "Age of an engine's newest event when it reaches the index.", ("worker",), **on
        )
        self.kv_snapshots = Counter("kv_snapshots", "Snapshots of agents' ledgers read.", ("worker",), **on)
        self.kv_changed_blocks = Counter("kv_changed_blocks", "Blocks added and dropped.", ("worker", "change"), **on)
        self.kv_feeds = Gauge("kv_feeds", "Workers by the source of their blocks.", ("source",), **on)
        self.kv_bytes = Gauge("kv_bytes", "Memory of the index and of our own ledgers.", ("what",), **on)
        self.kv_sockets_waiting = Gauge("kv_sockets_waiting", "Engines with events that wait to be read.", **on)
        self._add_circuits(on)
        self.rate_limited = Counter("rate_limited", "Requests rejected by their key's limits.", ("limit",), **on)
        self.waiting_bytes = Gauge("waiting_bytes", "Size of the bodies of requests that wait for room.", **on)
        self.held_bytes = Gauge("held_bytes", "Size of the bodies of requests that wait for adapters.", **on)
        self.connections = Gauge("client_connections", "Open connections of clients.", **on)
        self.engine_connections = Gauge("engine_connections", "Open connections to engines, including idle ones.", **on)
        self.refused = Counter(
            "refused_requests",
            "Requests refused as invalid, too large or too slow, or not begun at a stop, by code.",
            ("code",),
            **on,
        )
        self.dropped_fields = Counter(
            "dropped_fields",
            "Requests with hints for another gateway, which no engine got, by field.",
            ("field",),
            **on,
        )
        self.traces = Counter("traces", "Traced requests, by outcome of sending.", ("outcome",), **on)
        self.replicas = Gauge("replicas", "Replicas known, by state.", ("state",), **on)
        self.catalog_age = Gauge("catalog_age_seconds", "Time since the orchestrator last confirmed the catalog.", **on)
        self.slices_age = Gauge("slices_age_seconds", "Time since the API server last confirmed EndpointSlices.", **on)
        self.catalog_revision = Gauge("catalog_revision", "Revision of the catalog in force.", **on)
        self.loop_failures = Counter("loop_failures", "Failures of background loops by our own fault.", ("loop",), **on)

    def _add_tokenizing(self, on: Any) -> None:
        """Add the metrics of prompts' token ids."""
        self.tokenize = Histogram("tokenize_seconds", "Time to tokenize.", ("by",), buckets=_SHORT, **on)
        self.tokenized = Counter("tokenized_tokens", "Prompt tokens tokenized here, by origin.", ("origin",), **on)
        self.token_cache_bytes = Gauge("token_cache_bytes", "Size of the caches of tokenized text and words.", **on)
        self.token_doubts = Counter(
            "token_doubts", "New probes of engines whose answers contradicted our token ids.", ("outcome",), **on
        )
        self.tokenizer_distrusted = Gauge(
            "tokenizer_distrusted",
            "1 while most engines tokenize otherwise than this router, so that prompts are tokenized there.",
            ("base_model",),
            **on,
        )

    def _add_circuits(self, on: Any) -> None:
        """Add the metrics of circuits, of the retry budget and of pauses."""
        self.pauses = Gauge("pauses", "Pauses in force at this router.", **on)
        self.paused = Gauge("paused_requests", "Requests that a pause holds.", **on)
        self.circuit_open = Gauge(
            "circuit_open", "1 while a replica's circuit is open or half-open.", ("worker",), **on
        )
        self.circuit_openings = Counter("circuit_openings", "Circuits opened, by cause.", ("worker", "reason"), **on)
        self.circuit_ignored = Counter(
            "circuit_ignored", "Requests sent to a replica with an open circuit, as all others were open.", **on
        )
        self.circuit_looks = Counter(
            "circuit_looks",
            "Health probes of engines that answered with errors.",
            ("outcome",),
            **on,
        )
        self.retries_refused = Counter(
            "retries_refused", "Failed attempts not retried, because the retry budget was spent.", **on
        )

    def forget_worker(self, worker: str) -> None:
        """Drop a gone worker's series, so that old names do not accumulate."""
        for metric in (
            self.kv_blocks,
            self.kv_degraded,
            self.kv_lag,
            self.kv_error,
            self.prefill_rate,
            self.decode_rate,
            self.circuit_open,
        ):
            metric.remove_by_labels({"worker": worker})
        for counter in (
            self.circuit_openings,
            self.kv_events,
            self.kv_rejected,
            self.kv_gaps,
            self.kv_snapshots,
            self.kv_changed_blocks,
        ):
            counter.remove_by_labels({"worker": worker})
