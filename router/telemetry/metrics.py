"""The router's Prometheus metrics. Labels are bounded: workers, base models, stages, codes, the busiest adapters."""

from lorafleet.telemetry.fast_metrics import Counter, Gauge, Histogram
from lorafleet.telemetry.metric_table import MetricTable, bare_counter, bare_histogram, metric
from router.telemetry.adapter_series import AdapterSeries

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Around 1, where a prediction was right.
_RATIOS = (0.1, 0.25, 0.5, 0.6, 0.75, 0.85, 0.95, 1.05, 1.15, 1.4, 2, 4, 10)
_SHORT = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class RouterMetrics(MetricTable):
    """All metrics, on a registry of this router's own. Those counted for each request are held without labels."""

    requests = metric(
        Counter, "lorafleet_router_requests", "Answers by route, HTTP status and error code.", "route", "status", "code"
    )
    first_data = metric(
        Histogram,
        "lorafleet_router_first_data_seconds",
        "From the request read to the first data of its answer.",
        "base_model",
        buckets=_SECONDS,
    )
    first_token_ratio = bare_histogram(
        "lorafleet_router_first_token_ratio",
        "Seconds from dispatch to a stream's first token, by those that were predicted.",
        _RATIOS,
    )
    decide = bare_histogram(
        "lorafleet_router_decide_seconds", "Time to match and decide, at a request's arrival.", _SHORT
    )
    retries = metric(
        Counter, "lorafleet_router_retries", "Attempts that failed before an answer began, by reason.", "reason"
    )
    cold_starts = metric(Counter, "lorafleet_router_cold_starts", "Requested adapter loads, by outcome.", "outcome")
    held = metric(Gauge, "lorafleet_router_held_requests", "Requests that wait for an adapter.")
    held_from_zero = metric(
        Gauge,
        "lorafleet_router_held_from_zero_requests",
        "Requests that wait for the first ready worker of a base model whose pools may be at zero.",
        "base_model",
    )
    in_flight = metric(Gauge, "lorafleet_router_in_flight_requests", "Requests at engines.")
    waiting = metric(Gauge, "lorafleet_router_waiting_requests", "Requests that wait here for room at an engine.")
    waited = bare_histogram(
        "lorafleet_router_waited_seconds", "Wait of each sent request for room at an engine.", _SECONDS
    )
    shadow_decisions = metric(
        Counter,
        "lorafleet_router_shadow_decisions",
        "Choices of a shadow policy: the live policy's replica, or another.",
        "policy",
        "agrees",
    )
    shadow_cost = metric(
        Counter, "lorafleet_router_shadow_cost_seconds", "Predicted cost of a shadow policy's choices.", "policy"
    )
    live_cost = bare_counter("lorafleet_router_live_cost_seconds", "Predicted cost of the live policy's choices.")
    prefill_rate = metric(
        Gauge,
        "lorafleet_router_replica_prefill_tokens_per_second",
        "Prefill speed learned by the agent; 0 until measured.",
        "worker",
    )
    decode_rate = metric(
        Gauge,
        "lorafleet_router_replica_decode_tokens_per_second",
        "Decode speed of one request, learned by the agent; 0 until measured.",
        "worker",
    )
    kv_error = metric(
        Gauge,
        "lorafleet_router_kv_error_share",
        "Difference of predicted and actual cached tokens, per prompt token.",
        "worker",
    )
    cached_tokens = bare_counter(
        "lorafleet_router_engine_cached_tokens", "Prompt tokens cached, as engines report them."
    )
    predicted_tokens = bare_counter("lorafleet_router_predicted_cached_tokens", "Prompt tokens predicted as cached.")
    prompt_tokens = bare_counter("lorafleet_router_prompt_tokens", "Prompt tokens of routed requests.")
    sampled_tokens = bare_counter(
        "lorafleet_router_private_cache_sampled_tokens",
        "Prompt tokens of the requests of private caches that were compared with other callers' caches.",
    )
    lost_tokens = bare_counter(
        "lorafleet_router_private_cache_lost_tokens", "Those of them that only other callers' caches held."
    )
    kv_events = metric(Counter, "lorafleet_router_kv_events", "KV events applied, by type.", "worker", "type")
    kv_rejected = metric(Counter, "lorafleet_router_kv_rejected", "KV events rejected, by reason.", "worker", "reason")
    kv_gaps = metric(Counter, "lorafleet_router_kv_gaps", "Gaps in a KV event stream, by outcome.", "worker", "outcome")
    kv_blocks = metric(Gauge, "lorafleet_router_kv_blocks", "Blocks known, over all tiers.", "worker")
    kv_degraded = metric(Gauge, "lorafleet_router_kv_degraded", "1 while the known blocks may be wrong.", "worker")
    kv_lag = metric(
        Gauge, "lorafleet_router_kv_lag_seconds", "Age of an engine's newest event when it reaches the index.", "worker"
    )
    kv_snapshots = metric(Counter, "lorafleet_router_kv_snapshots", "Snapshots of agents' ledgers read.", "worker")
    kv_changed_blocks = metric(
        Counter, "lorafleet_router_kv_changed_blocks", "Blocks added and dropped.", "worker", "change"
    )
    kv_feeds = metric(Gauge, "lorafleet_router_kv_feeds", "Workers by the source of their blocks.", "source")
    kv_bytes = metric(Gauge, "lorafleet_router_kv_bytes", "Memory of the index and of our own ledgers.", "what")
    kv_sockets_waiting = metric(
        Gauge, "lorafleet_router_kv_sockets_waiting", "Engines with events that wait to be read."
    )
    budget_lines = metric(
        Counter,
        "lorafleet_router_budget_lines",
        "Budgets of keys and tenants that have reached their soft or hard line, once a day or month each.",
        "limit",
        "line",
    )
    rate_limited = metric(Counter, "lorafleet_router_rate_limited", "Requests rejected by their key's limits.", "limit")
    waiting_bytes = metric(
        Gauge, "lorafleet_router_waiting_bytes", "Size of the bodies of requests that wait for room."
    )
    held_bytes = metric(Gauge, "lorafleet_router_held_bytes", "Size of the bodies of requests that wait for adapters.")
    connections = metric(Gauge, "lorafleet_router_client_connections", "Open connections of clients.")
    engine_connections = metric(
        Gauge, "lorafleet_router_engine_connections", "Open connections to engines, including idle ones."
    )
    refused = metric(
        Counter,
        "lorafleet_router_refused_requests",
        "Requests refused as invalid, too large or too slow, or not begun at a stop, by code.",
        "code",
    )
    dropped_fields = metric(
        Counter,
        "lorafleet_router_dropped_fields",
        "Requests with hints for another gateway, which no engine got, by field.",
        "field",
    )
    traces = metric(Counter, "lorafleet_router_traces", "Traced requests, by outcome of sending.", "outcome")
    replicas = metric(Gauge, "lorafleet_router_replicas", "Replicas known, by state.", "state")
    catalog_age = metric(
        Gauge, "lorafleet_router_catalog_age_seconds", "Time since the orchestrator last confirmed the catalog."
    )
    slices_age = metric(
        Gauge, "lorafleet_router_slices_age_seconds", "Time since the API server last confirmed EndpointSlices."
    )
    catalog_revision = metric(Gauge, "lorafleet_router_catalog_revision", "Revision of the catalog in force.")
    loop_failures = metric(
        Counter, "lorafleet_router_loop_failures", "Failures of background loops by our own fault.", "loop"
    )
    tokenize = metric(Histogram, "lorafleet_router_tokenize_seconds", "Time to tokenize.", "by", buckets=_SHORT)
    tokenized = metric(
        Counter, "lorafleet_router_tokenized_tokens", "Prompt tokens tokenized here, by origin.", "origin"
    )
    token_cache_bytes = metric(
        Gauge, "lorafleet_router_token_cache_bytes", "Size of the caches of tokenized text and words."
    )
    token_doubts = metric(
        Counter,
        "lorafleet_router_token_doubts",
        "New probes of engines whose answers contradicted our token ids.",
        "outcome",
    )
    tokenizer_distrusted = metric(
        Gauge,
        "lorafleet_router_tokenizer_distrusted",
        "1 while most engines tokenize otherwise than this router, so that prompts are tokenized there.",
        "base_model",
    )
    pauses = metric(Gauge, "lorafleet_router_pauses", "Pauses in force at this router.")
    paused = metric(Gauge, "lorafleet_router_paused_requests", "Requests that a pause holds.")
    circuit_open = metric(
        Gauge, "lorafleet_router_circuit_open", "1 while a replica's circuit is open or half-open.", "worker"
    )
    circuit_openings = metric(
        Counter, "lorafleet_router_circuit_openings", "Circuits opened, by cause.", "worker", "reason"
    )
    circuit_ignored = metric(
        Counter,
        "lorafleet_router_circuit_ignored",
        "Requests sent to a replica with an open circuit, as all others were open.",
    )
    circuit_looks = metric(
        Counter, "lorafleet_router_circuit_looks", "Health probes of engines that answered with errors.", "outcome"
    )
    retries_refused = metric(
        Counter, "lorafleet_router_retries_refused", "Failed attempts not retried, because the retry budget was spent."
    )

    def __init__(self, *, metrics_adapters: int = 100) -> None:
        """metrics_adapters  adapters with series of their own"""
        super().__init__()
        self.adapters = AdapterSeries(self.registry, most_labels=metrics_adapters)

    def forget_worker(self, worker: str) -> None:
        """Drop a gone worker's series, so that old names do not accumulate."""
        self.forget("worker", worker)
