"""The client of SGLang 0.5.23.

How SGLang differs from vLLM:
- A request chooses an adapter by the model name `base:adapter`. Without a colon the base model answers with 200
  (entrypoints/openai/serving_base.py). So the router writes the name (`router/request/engine_body.py`), and only the
  engine's list tells whether an adapter is loaded.
- A request that names an unloaded adapter loads it again from its path (managers/tokenizer_manager.py
  `lora_ref_cache`). The list shows that, so the agent reads the list every few seconds.
- Each load gets a new id, which seeds the adapter's block hashes; an unload sends no KV event (lora/lora_registry.py,
  mem_cache/events.py). So the KV ledger forgets an adapter's blocks at each load (`lorafleet/kv/ledger.py`).
- An unload waits for the adapter's requests, and no load begins meanwhile (managers/tokenizer_control_mixin.py).
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.engine.acceptance import Logprobs, sglang_logprobs_body, sglang_prompt_logprobs
from lorafleet.engine.canary import SGLANG_ROUTE, Fingerprint, sglang_body, sglang_fingerprint
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict
from lorafleet.kv.sources import KvEventEndpoints, kv_event_endpoints
from workers.core.errors import EngineError
from workers.engines.base import EngineShape, EngineTraits
from workers.engines.client import METRICS_TIMEOUT_S, HttpEngineClient
from workers.engines.sglang_adapters import sglang_refusal
from workers.wire import UNKNOWN_RUNTIME

_INFO_TIMEOUT_S = 10.0
# entrypoints/http_server.py: /health generates a token and answers 503 after 20 s (HEALTH_CHECK_TIMEOUT). A long
# prefill delays it, so a shorter timeout would take a busy engine for a dead one. A dead engine refuses the
# connection at once.
_HEALTH_WITHIN_S = 25.0
_INCOMPLETE_UNLOAD = "incomplete unload"

# observability/metrics_collector.py. One series per scheduler: with --enable-metrics-for-all-schedulers all tensor
# ranks report the same requests, so only data-parallel ranks are added up.
_ACTIVE = "sglang:http_requests_active"
_GAUGES = ("sglang:page_size", "sglang:num_pages", _ACTIVE)
_TOTALS = (
    "sglang:realtime_tokens_total",
    "sglang:cuda_graph_passes_total",
    "sglang:forward_execution_seconds_total",
    "sglang:num_requests_total",
    "sglang:generation_tokens_total",
    "sglang:e2e_request_latency_seconds_sum",
    "sglang:queue_time_seconds_sum",
    "sglang:inter_token_latency_seconds_count",
    "sglang:inter_token_latency_seconds_sum",
)
_COMPUTING = ("/v1/", "/generate", "/classify")  # paths of POSTs; adapters are loaded at none of them
_WANTED = re.compile(r"^(?:" + "|".join((*_GAUGES, *_TOTALS)) + r")[ {].*$", re.MULTILINE)


class SglangClient(HttpEngineClient):
    """The client of one SGLang."""

    traits = EngineTraits(dialect="sglang", keeps_ghosts=False)

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Load an adapter that SGLang serves correctly; after an interrupted unload it is first unloaded again.

        raises  EngineError `adapter_refused` with our reason or the engine's, `engine_timeout`, `engine_unreachable`
        """
        base = Path(str((await self._server_info()).get("model_path") or ""))
        if refusal := await asyncio.to_thread(sglang_refusal, path, base):
            raise EngineError("adapter_refused", f"load {name}: {refusal}; see docs/engines.md")
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            answer = await self._request("POST", "/load_lora_adapter", body=body, timeout_s=timeout_s)
            if _INCOMPLETE_UNLOAD in _refusal_reason(answer):
                # An interrupted unload: the name can only be loaded after another unload.
                await self.unload(name, timeout_s=timeout_s)
                answer = await self._request("POST", "/load_lora_adapter", body=body, timeout_s=timeout_s)
        except EngineError:
            # The load may have succeeded: check the engine's list.
            if await self._has_loaded(name, path):
                return
            raise
        if _has_succeeded(answer) or await self._has_loaded(name, path):
            return
        raise EngineError("adapter_refused", _error_text("load", name, answer))

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Unload an adapter; SGLang refuses new requests for it and waits until the others have ended.

        Raises EngineError if the adapter is still listed after a refusal.
        """
        answer = await self._request("POST", "/unload_lora_adapter", body={"lora_name": name}, timeout_s=timeout_s)
        if _has_succeeded(answer) or name not in await self.list_adapters():
            return
        raise EngineError("engine_failed", _error_text("unload", name, answer))

    async def read_shape(self) -> EngineShape:
        """The engine's shape from /server_info and /v1/models.

        raises  EngineError `engine_start_failed` if the engine lacks arguments that we need
        """
        info = await self._server_info()
        _check_arguments(self.url, info)
        return shape_of(info, await self._base_model_entry())

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether /health answers within 25 s or `timeout_s`, whichever is longer.

        A long prefill delays the answer by seconds.
        """
        return await super().is_healthy(timeout_s=max(timeout_s, _HEALTH_WITHIN_S))

    async def fingerprint(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        *,
        base_model: str,  # noqa: ARG002  (it needs no name)
    ) -> Fingerprint | None:
        """The log-probabilities of the next token. Raises EngineSilent."""
        return await self._ask_for_numbers(SGLANG_ROUTE, sglang_body(adapter, prompt), sglang_fingerprint)

    async def prompt_logprobs(
        self,
        adapter: str | None,
        prompts: Sequence[Sequence[int]],
        *,
        base_model: str,  # noqa: ARG002  (it needs no name)
    ) -> Sequence[Logprobs] | None:
        """The log-probability of each token but the first of these prompts. Raises EngineSilent."""
        body = sglang_logprobs_body(adapter, prompts)
        return await self._ask_for_numbers(SGLANG_ROUTE, body, partial(sglang_prompt_logprobs, prompts))

    async def kv_event_endpoints(self) -> KvEventEndpoints:
        """The KV event endpoints in the engine's --kv-events-config, read from /server_info.

        Empty if absent or malformed. Raises EngineError.
        """
        try:
            content = dict(json.loads((await self._server_info()).get("kv_events_config") or "{}"))
        except (ValueError, TypeError):
            return KvEventEndpoints()
        return kv_event_endpoints(httpx.URL(self.url).host, [content])

    async def kv_connector(self) -> ConnectorVerdict:
        """The verdict on the engine's KV connector, from its arguments in /server_info.

        SGLang's own caches separate adapters; for LMCache and HiCache that is not known, so they are refused.
        """
        info = await self._server_info()
        for argument in ("enable_lmcache", "hicache_storage_backend"):
            if info.get(argument):
                flag = f"--{argument.replace('_', '-')}"
                return ConnectorVerdict(
                    "refused", f"how SGLang's {flag} keeps adapters apart is not known", is_known=False
                )
        return NO_CONNECTOR

    async def scrape(self) -> EngineMetrics:
        """Read counters from /metrics, running and waiting requests from /v1/loads. Raises EngineError.

        The gauges in /metrics are updated only every 40 decoded tokens, /v1/loads every 15 and at each prefill.
        """
        page = await self._metrics_page()
        answer = await self._request("GET", "/v1/loads", timeout_s=METRICS_TIMEOUT_S)
        if not answer.is_success:
            message = f"engine {self.url}/v1/loads: HTTP {answer.status_code}"
            raise EngineError("engine_unreachable", message, retry_after_s=1)
        return parse_metrics(page, _json_object(answer).get("loads") or [])

    async def boot_mark(self) -> str:
        """A hash of the durations of the engine's start and its random seed, from /server_info.

        SGLang's metrics have no start time. Raises EngineError.
        """
        info = await self._server_info()
        marks = json.dumps([info.get("startup_time"), info.get("random_seed")], sort_keys=True)
        return hashlib.sha256(marks.encode()).hexdigest()[:16]

    async def _server_info(self) -> Mapping[str, Any]:
        """Read the engine's /server_info. Raises EngineError `engine_start_failed` if it is not SGLang's."""
        answer = await self._request("GET", "/server_info", timeout_s=_INFO_TIMEOUT_S)
        info = _json_object(answer)
        if not answer.is_success or "page_size" not in info:
            message = (
                f"engine {self.url}: /server_info is not SGLang's (HTTP {answer.status_code});"
                " say with --engine what runs there"
            )
            raise EngineError("engine_start_failed", message)
        return info


def shape_of(info: Mapping[str, Any], base: Mapping[str, Any]) -> EngineShape:
    """The shape of an engine of SGLang's kind.

    info  its own arguments
    base  the base model's entry in its /v1/models
    """
    block_size = int_or_zero(info.get("page_size"))
    sizes = {
        "block_size": block_size,
        "total_kv_blocks": int_or_zero(info.get("max_total_num_tokens")) // max(1, block_size),
        "max_model_len": int_or_zero(base.get("max_model_len")),
    }
    return EngineShape(
        runtime=UNKNOWN_RUNTIME.model_copy(update=sizes),
        model_name=str(base.get("id") or ""),
    )


def parse_metrics(page: str, loads: Sequence[Mapping[str, Any]]) -> EngineMetrics:
    """The engine metrics from SGLang's /metrics page and its ranks' /v1/loads.

    Seconds in prefill exist only with SGLANG_ENABLE_METRICS_DEVICE_TIMER=1. SGLang observes a request's times long
    before its tokens, so their quotient cannot serve as a rate.
    """
    families = list(text_string_to_metric_families("\n".join(_WANTED.findall(page)) + "\n"))
    prefilled = _sum_over_ranks(families, "sglang:realtime_tokens_total", mode="prefill_compute")
    in_prefill = _sum_over_ranks(families, "sglang:forward_execution_seconds_total", category="extend")
    latency = _sum_over_ranks(families, "sglang:e2e_request_latency_seconds_sum")
    queued = _sum_over_ranks(families, "sglang:queue_time_seconds_sum")
    running = sum(int_or_zero(load.get("num_running_reqs")) for load in loads)
    waiting = sum(int_or_zero(load.get("num_waiting_reqs")) for load in loads)
    return EngineMetrics(
        # A prompt in prefill is neither running nor waiting in SGLang. Then HTTP requests in progress count, which
        # SGLang reports for two more seconds after the end of a stream.
        running=running if running or waiting else _computing_requests(families),
        waiting=waiting,
        kv_usage=sum(float(load.get("token_usage") or 0) for load in loads) / max(1, len(loads)),
        computed_tokens=prefilled,
        steps=_sum_over_ranks(families, "sglang:cuda_graph_passes_total"),
        ended=_sum_over_ranks(families, "sglang:num_requests_total"),
        # Counted when a request ends, which over more than a few seconds equals the number of first tokens.
        first_tokens=_sum_over_ranks(families, "sglang:num_requests_total"),
        prefill_seconds=in_prefill,
        ended_output_tokens=_sum_over_ranks(families, "sglang:generation_tokens_total"),
        ended_seconds=max(0.0, latency - queued),
        token_gaps=_sum_over_ranks(families, "sglang:inter_token_latency_seconds_count"),
        gap_seconds=_sum_over_ranks(families, "sglang:inter_token_latency_seconds_sum"),
        block_size=int(_max_value(families, "sglang:page_size")),
        total_kv_blocks=int(_max_value(families, "sglang:num_pages")),
    )


def _values_by_rank(families: Iterable[Metric], name: str, **labels: str) -> dict[str, dict[str, float]]:
    """Data-parallel rank -> scheduler -> the sum of its series with these labels."""
    by_rank: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            found = sample.labels
            # With priority scheduling the series without a priority is the sum of the others.
            if sample.name != name or found.get("priority") or any(found.get(k) != v for k, v in labels.items()):
                continue
            schedulers = by_rank.setdefault(found.get("dp_rank", ""), {})
            scheduler = "/".join(found.get(label, "") for label in ("tp_rank", "pp_rank", "moe_ep_rank"))
            schedulers[scheduler] = schedulers.get(scheduler, 0.0) + sample.value
    return by_rank


def _sum_over_ranks(families: Iterable[Metric], name: str, **labels: str) -> float:
    """The sum of a metric over data-parallel ranks; of a rank's schedulers the largest value counts."""
    return sum(max(schedulers.values()) for schedulers in _values_by_rank(families, name, **labels).values())


def _max_value(families: Iterable[Metric], name: str) -> float:
    """The largest value over all ranks and schedulers; 0 if the metric is missing."""
    return max((max(schedulers.values()) for schedulers in _values_by_rank(families, name).values()), default=0.0)


def _computing_requests(families: Iterable[Metric]) -> int:
    """HTTP requests in progress on routes that generate tokens."""
    active = (sample for family in families for sample in family.samples if sample.name == _ACTIVE)
    return int(sum(sample.value for sample in active if _is_computing(sample.labels)))


def _is_computing(labels: Mapping[str, str]) -> bool:
    """Whether the labels of `http_requests_active` are of a POST to a route that generates tokens."""
    return labels.get("method") == "POST" and labels.get("endpoint", "").startswith(_COMPUTING)


def _check_arguments(url: str, info: Mapping[str, Any]) -> None:
    """Raises EngineError if the engine's arguments prevent loading adapters or reading metrics."""
    wrong = [
        fault
        for is_wrong, fault in (
            (not info.get("enable_lora"), "--enable-lora is missing"),
            (
                int_or_zero(info.get("dp_size")) > 1,
                "--dp-size is more than 1, where SGLang loads no adapters at run time",
            ),
            (not info.get("enable_metrics"), "--enable-metrics is missing"),
            (":" in str(info.get("served_model_name") or ""), "--served-model-name has a colon: it names an adapter"),
        )
        if is_wrong
    ]
    if wrong:
        raise EngineError("engine_start_failed", f"engine {url}: {'; '.join(wrong)}; see docs/engines.md")


def _error_text(action: str, name: str, answer: httpx.Response) -> str:
    """A failed action on an adapter with the status and reason of SGLang's answer."""
    return f"{action} {name}: the engine answered {answer.status_code}: {_refusal_reason(answer)}"


def _has_succeeded(answer: httpx.Response) -> bool:
    """Whether SGLang's answer confirms the call: a success status, and `success` in the body."""
    return answer.is_success and _json_object(answer).get("success") is True


def _refusal_reason(answer: httpx.Response) -> str:
    """The reason of a refusal: SGLang's `error_message`, else FastAPI's or OpenAI's message; "" after a success."""
    if _has_succeeded(answer):
        return ""
    content = _json_object(answer)
    return str(content.get("error_message") or content.get("message") or content.get("detail") or answer.text[:500])


def _json_object(answer: httpx.Response) -> Mapping[str, Any]:
    """The JSON object in an answer; empty if it has none."""
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def int_or_zero(value: object) -> int:
    """The value if it is an int, else 0."""
    return value if isinstance(value, int) else 0
