"""The router's Prometheus metrics. Labels are bounded: workers, base models, stages and codes, never adapters."""

from typing import Any

from prometheus_client import CollectorRegistry

from lorafleet.service.fast_metrics import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SHORT = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class RouterMetrics:
    """All of them, on one registry of this router's own; of those that count each request their one number itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        on: Any = {"registry": self.registry, "namespace": "lorafleet", "subsystem": "router"}
        self.requests = Counter(
            "requests", "Answers, by HTTP status and error code.", ("route", "status", "code"), **on
        )
        self.first_data = Histogram(
            "first_data_seconds", "Request read to first data from an engine.", ("base_model",), buckets=_SECONDS, **on
        )
        self.decide = Histogram(
            "decide_seconds", "match and decide, of a request that arrives.", buckets=_SHORT, **on
        ).labels()
        self.tokenize = Histogram("tokenize_seconds", "tokenize.", ("by",), buckets=_SHORT, **on)
        self.tokenized = Counter("tokenized_tokens", "Ids of prompts tokenized here, by origin.", ("origin",), **on)
        self.token_cache_bytes = Gauge("token_cache_bytes", "Pieces of prompts and their ids that are kept.", **on)
        self.retries = Counter("retries", "Attempts that failed unseen by the client, by reason.", ("reason",), **on)
        self.cold_starts = Counter("cold_starts", "Loads asked for, by outcome.", ("outcome",), **on)
        self.held = Gauge("held_requests", "Requests waiting for an adapter.", **on)
        self.in_flight = Gauge("in_flight_requests", "Requests at engines.", **on)
        self.waiting = Gauge("waiting_requests", "Requests waiting here for room at an engine.", **on)
        self.waited = Histogram("waited_seconds", "Wait for room at an engine.", buckets=_SECONDS, **on).labels()
        self.shadow_decisions = Counter(
            "shadow_decisions", "What a shadow policy would have done.", ("policy", "agrees"), **on
        )
        self.shadow_cost = Counter(
            "shadow_cost_seconds", "Predicted cost of a shadow policy's choices.", ("policy",), **on
        )
        self.live_cost = Counter("live_cost_seconds", "Predicted cost of the live policy's choices.", **on).labels()
        self.prefill_rate = Gauge(
            "replica_prefill_tokens_per_second", "Learned, as its agent reports it.", ("worker",), **on
        )
        self.decode_rate = Gauge(
            "replica_decode_tokens_per_second", "Of one request, learned, as its agent reports it.", ("worker",), **on
        )
        self.kv_error = Gauge(
            "kv_error_share", "Predicted against the engine's cached tokens: off per prompt token.", ("worker",), **on
        )
        self.cached_tokens = Counter(
            "engine_cached_tokens", "Prompt tokens cached, by the engines' own word.", **on
        ).labels()
        self.predicted_tokens = Counter("predicted_cached_tokens", "Prompt tokens predicted as cached.", **on).labels()
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of routed requests.", **on).labels()
        self.kv_events = Counter("kv_events", "KV events applied, by type.", ("worker", "type"), **on)
        self.kv_rejected = Counter("kv_rejected", "KV events not accepted, by reason.", ("worker", "reason"), **on)
        self.kv_gaps = Counter("kv_gaps", "Holes in a KV event stream, by how they ended.", ("worker", "outcome"), **on)
        self.kv_blocks = Gauge("kv_blocks", "Blocks known, over all tiers.", ("worker",), **on)
        self.kv_degraded = Gauge("kv_degraded", "1 while known blocks may be wrong.", ("worker",), **on)
        self.kv_lag = Gauge("kv_lag_seconds", "From an engine's newest event to the index.", ("worker",), **on)
        self.kv_snapshots = Counter("kv_snapshots", "Snapshots of agents' ledgers taken.", ("worker",), **on)
        self.kv_changed_blocks = Counter("kv_changed_blocks", "Blocks that came and went.", ("worker", "change"), **on)
        self.kv_feeds = Gauge("kv_feeds", "Workers by where their blocks are learned from.", ("source",), **on)
        self.kv_bytes = Gauge("kv_bytes", "Memory of the index and of our own ledgers.", ("what",), **on)
        self.kv_sockets_waiting = Gauge("kv_sockets_waiting", "Engines whose events find no time yet.", **on)
        self._add_circuits(on)
        self.rate_limited = Counter("rate_limited", "Requests beyond their key's limits.", ("limit",), **on)
        self.waiting_bytes = Gauge("waiting_bytes", "Bodies of requests that wait for room.", **on)
        self.held_bytes = Gauge("held_bytes", "Bodies of requests that wait for adapters.", **on)
        self.connections = Gauge("client_connections", "Clients' connections that are open.", **on)
        self.engine_connections = Gauge("engine_connections", "Connections to engines, idle ones too.", **on)
        self.refused = Counter("refused_requests", "Not valid HTTP, too large or too slow, by code.", ("code",), **on)
        self.traces = Counter("traces", "Traced requests, by what became of them.", ("outcome",), **on)
        self.replicas = Gauge("replicas", "Replicas known, by state.", ("state",), **on)
        self.catalog_age = Gauge("catalog_age_seconds", "Since the orchestrator last confirmed the catalog.", **on)
        self.slices_age = Gauge("slices_age_seconds", "Since the API server last confirmed EndpointSlices.", **on)
        self.catalog_revision = Gauge("catalog_revision", "Revision of the catalog in force.", **on)
        self.loop_failures = Counter(
            "loop_failures", "Rounds of a background loop that ended in a fault of ours.", ("loop",), **on
        )

    def _add_circuits(self, on: Any) -> None:
        self.circuit_open = Gauge("circuit_open", "1 while a replica is passed over.", ("worker",), **on)
        self.circuit_openings = Counter("circuit_openings", "Circuits opened, by cause.", ("worker", "reason"), **on)
        self.circuit_ignored = Counter("circuit_ignored", "Sent to a shut replica: every other was shut, too.", **on)
        self.circuit_looks = Counter(
            "circuit_looks",
            "Engines asked by ourselves whether they are well: they answered errors.",
            ("outcome",),
            **on,
        )
        self.retries_refused = Counter("retries_refused", "Attempts not made again: the budget was spent.", **on)

    def forget_worker(self, worker: str) -> None:
        """Drop a gone worker's series, so that names which never come back do not pile up."""
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
