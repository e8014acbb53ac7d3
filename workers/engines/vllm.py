"""vLLM 0.32's HTTP, which the sim speaks too: adapters, health, metrics."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import httpx
from prometheus_client.parser import text_string_to_metric_families

from workers.core.errors import EngineError
from workers.engines.base import Scrape, Shape, Traits
from workers.engines.client import EngineClient

# Only these lines of /metrics are parsed: the whole page is thousands of histogram buckets, and read every second.
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_TOTALS = (
    # Counted at a prompt's first token, at each step that gave tokens, and at each token (v1/metrics/loggers.py
    # record(), v1/metrics/stats.py IterationStats).
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:iteration_tokens_total_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    # Observed when a request ends, so that their quotients fit together.
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:request_generation_tokens_count",
)
_WANTED = re.compile(
    r"^(?:" + "|".join((*_GAUGES, *_TOTALS, "vllm:num_requests_waiting_by_reason", "vllm:cache_config_info"))
    + r"|process_start_time_seconds)[ {].*$",
    re.MULTILINE,
)  # fmt: skip


class VllmEngine(EngineClient):
    """Client of one vLLM, or of the sim."""

    traits = Traits(dialect="vllm", keeps_ghosts=True)

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Raises EngineError: `adapter_refused` with the engine's reason, `engine_timeout`, `engine_unreachable`."""
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            answer = await self._call("POST", "/v1/load_lora_adapter", body=body, timeout_s=timeout_s)
        except EngineError:
            # Nobody knows how it ended; the list does.
            if await self._has(name, path):
                return
            raise
        if answer.is_success or await self._has(name, path):
            return
        self._refuse(f"load {name}", answer)

    async def unload(self, name: str, *, timeout_s: float) -> None:
        answer = await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name}, timeout_s=timeout_s)
        if not answer.is_success and answer.status_code != 404:
            self._refuse(f"unload {name}", answer)

    async def shape(self) -> Shape:
        """Block size and count from vllm:cache_config_info, length and name from /v1/models."""
        base = await self._base()
        scrape = await self.scrape()
        return Shape(
            block_size=scrape.block_size,
            total_kv_blocks=scrape.total_kv_blocks,
            max_model_len=int(base.get("max_model_len") or 0),
            model_name=str(base.get("id") or ""),
        )

    async def boot_mark(self) -> str:
        started_at = (await self.scrape()).started_at
        return f"{started_at:.2f}"

    async def scrape(self) -> Scrape:
        return parse_metrics(await self._metrics_page())

    def _refuse(self, what: str, answer: httpx.Response) -> NoReturn:
        try:
            error = answer.json()
            text = str((error.get("error") or error)["message"])  # flat before 2025
        except (ValueError, KeyError, TypeError, AttributeError):
            text = answer.text[:500]
        raise EngineError("adapter_refused", f"{what}: the engine answered {answer.status_code}: {text}")


def parse_metrics(page: str) -> Scrape:
    """What one page of vLLM's /metrics says, summed over data-parallel ranks (usage: the mean)."""
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
    usage = values.get("vllm:kv_cache_usage_perc", [0.0])
    return Scrape(
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
        started_at=total.get("process_start_time_seconds", 0.0),
        block_size=_number(cache.get("block_size")),
        total_kv_blocks=_number(cache.get("num_gpu_blocks")),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
