"""Parses vLLM's /metrics and /server_info, for agents and for engines without an agent."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Only these lines of /metrics are parsed: the whole page is thousands of histogram buckets, and read every second.
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_TOTALS = (
    # Counted at a prompt's first token, at each step that gave tokens, and at each token (v1/metrics/loggers.py
    # record(), v1/metrics/stats.py IterationStats).
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:iteration_tokens_total_count",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    # Observed when a request ends, so that their quotients are consistent.
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:request_generation_tokens_count",
)
_LABELS = ("vllm:num_requests_waiting_by_reason", "vllm:cache_config_info")
_WANTED = re.compile(
    r"^(?:" + "|".join((*_GAUGES, *_TOTALS, *_LABELS)) + r"|process_start_time_seconds)[ {].*$", re.MULTILINE
)
# Searched alone: it has a series for every set of adapters that ever ran together.
_MAX_LORAS = re.compile(r'^vllm:lora_requests_info\{(?:[^}\n]*,)?max_lora="(\d+)"', re.MULTILINE)
# The first exists from the start if a connector loads; the second counts only then, also in older versions.
_CONNECTOR = re.compile(
    r"^vllm:num_requests_kv_fetch_by_stage\{|^vllm:external_prefix_cache_queries_total\{[^}\n]*\} (?!0\.0$)",
    re.MULTILINE,
)


SERVER_INFO = "/server_info?config_format=json"
"""The engine's configuration; vLLM 0.32 serves it with VLLM_SERVER_DEV_MODE=1 (entrypoints/serve/dev/server_info)."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's metrics at one time. Totals count from the engine's start; 0 if it has no such counter.

    at_s             when they were read, by the reader's clock; 0 until the reader sets it
    computed_tokens  prompt tokens computed (not cached), counted when their prefill ends
    steps            engine steps that produced tokens
    ended_*          of ended requests; `ended_seconds` from scheduled to the last token
    token_gaps       gaps between two tokens of a request; `gap_seconds` is their sum
    first_tokens     number of requests with a first token
    prefill_seconds  of prefill on the device; vLLM does not count them
    max_loras        device slots for adapters, which vLLM reports once an adapter has run
    offloading       backend of its --kv-offloading-size; empty if it has none
    has_connector    whether it has a KV connector that loads
    caches_prefixes  whether it keeps KV blocks for later prompts; most models without causal attention do not
    """

    at_s: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_for_slot: int = 0
    kv_usage: float = 0.0
    computed_tokens: float = 0.0
    steps: float = 0.0
    ended: float = 0.0
    ended_prefill_tokens: float = 0.0
    ended_prefill_seconds: float = 0.0
    ended_output_tokens: float = 0.0
    ended_seconds: float = 0.0
    token_gaps: float = 0.0
    gap_seconds: float = 0.0
    first_tokens: float = 0.0
    prefill_seconds: float = 0.0
    started_at: float = 0.0
    block_size: int = 0
    total_kv_blocks: int = 0
    max_loras: int = 0
    offloading: str = ""
    has_connector: bool = False
    caches_prefixes: bool = True

    @property
    def tokens_in_use(self) -> float:
        """Tokens of context that running requests hold in the KV cache; 0.0 without its size."""
        return self.kv_usage * self.total_kv_blocks * self.block_size


def parse_metrics(page: str) -> EngineMetrics:
    """The metrics on a page of vLLM's /metrics, summed over data-parallel ranks (usage: the mean)."""
    values: dict[str, list[float]] = {}
    cache: Mapping[str, str] = {}
    deferred = 0.0
    for family in text_string_to_metric_families("\n".join(_WANTED.findall(page)) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == "vllm:cache_config_info":
                cache = sample.labels
            if sample.labels.get("reason") == "deferred":
                deferred += sample.value
    total = {name: sum(found) for name, found in values.items()}
    slots = _MAX_LORAS.search(page)
    usage = values.get("vllm:kv_cache_usage_perc", [0.0])
    return EngineMetrics(
        running=int(total.get("vllm:num_requests_running", 0)),
        waiting=int(total.get("vllm:num_requests_waiting", 0)),
        waiting_for_slot=int(deferred),
        kv_usage=sum(usage) / len(usage),
        computed_tokens=total.get("vllm:prompt_tokens_total", 0.0) - total.get("vllm:prompt_tokens_cached_total", 0.0),
        steps=total.get("vllm:iteration_tokens_total_count", 0.0),
        ended=total.get("vllm:request_generation_tokens_count", 0.0),
        ended_prefill_tokens=total.get("vllm:request_prefill_kv_computed_tokens_sum", 0.0),
        ended_prefill_seconds=total.get("vllm:request_prefill_time_seconds_sum", 0.0),
        ended_output_tokens=total.get("vllm:request_generation_tokens_sum", 0.0),
        ended_seconds=total.get("vllm:request_inference_time_seconds_sum", 0.0),
        token_gaps=total.get("vllm:inter_token_latency_seconds_count", 0.0),
        gap_seconds=total.get("vllm:inter_token_latency_seconds_sum", 0.0),
        first_tokens=total.get("vllm:time_to_first_token_seconds_count", 0.0),
        started_at=total.get("process_start_time_seconds", 0.0),
        block_size=_whole_number_or_zero(cache.get("block_size")),
        total_kv_blocks=_whole_number_or_zero(cache.get("num_gpu_blocks")),
        max_loras=int(slots[1]) if slots else 0,
        offloading=cache["kv_offloading_backend"] if cache.get("kv_offloading_size", "None") != "None" else "",
        has_connector=_CONNECTOR.search(page) is not None,
        caches_prefixes=cache.get("enable_prefix_caching") != "False",
    )


def transfer_config(server_info: bytes) -> Mapping[str, Any] | None:
    """The `kv_transfer_config` in a body of `SERVER_INFO`, empty if there is none; None for any other body."""
    try:
        config = json.loads(server_info)["vllm_config"]
        transfer = config["kv_transfer_config"] or {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return transfer if isinstance(transfer, dict) else None


def _whole_number_or_zero(text: str | None) -> int:
    """The number in a text of digits; 0 for anything else."""
    return int(text) if text and text.isdigit() else 0
