"""SGLang 0.5.23's HTTP: adapters, health, metrics.

What a client of it must know, read in its source and seen running:
- A model's bare name is not looked at: an adapter is chosen by `base:adapter` alone, and what has no colon is answered
  by the base model, with 200 (entrypoints/openai/serving_base.py). So the router writes the name
  (`router/request/engine_body.py`), and the engine's list, not a try, says what is there.
- An unloaded name stays known: the next request that says it loads it again from its path
  (managers/tokenizer_manager.py `lora_ref_cache`). The list shows that, and the agent reads the list again and again.
- Each load has a new id, which seeds the hashes of the adapter's blocks; an unload says nothing in the KV events
  (lora/lora_registry.py, mem_cache/events.py). So a ledger forgets an adapter at each load (`lorafleet/kv/ledger.py`).
- An unload waits for the adapter's requests, and no load begins meanwhile (managers/tokenizer_control_mixin.py).
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict
from lorafleet.kv.sources import KvEventEndpoints, sources_of
from workers.core.errors import EngineError
from workers.engines.base import EngineShape, EngineTraits
from workers.engines.client import METRICS_TIMEOUT_S, HttpEngineClient
from workers.engines.sglang_adapters import refusal_of

_INFO_TIMEOUT_S = 10.0
# entrypoints/http_server.py: /health runs a token and waits for any sign of life, a second at least, and says 503 after
# 20 (HEALTH_CHECK_TIMEOUT). A long prefill gives no sign, so less patience would take a busy engine for a dead one;
# one that is gone refuses the connection at once.
_HEALTH_WITHIN_S = 25.0
_INCOMPLETE_UNLOAD = "incomplete unload"

# observability/metrics_collector.py. One series a scheduler: with --enable-metrics-for-all-schedulers every tensor rank
# has its own, all of the same requests, and only data-parallel ranks add up.
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
    """Client of one SGLang."""

    traits = EngineTraits(dialect="sglang", keeps_ghosts=False)

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Raises EngineError: `adapter_refused` with the engine's reason, `engine_timeout`, `engine_unreachable`."""
        base = Path(str((await self._info()).get("model_path") or ""))
        if why := await asyncio.to_thread(refusal_of, path, base):
            raise EngineError("adapter_refused", f"load {name}: {why}; see docs/engines.md")
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            answer = await self._call("POST", "/load_lora_adapter", body=body, timeout_s=timeout_s)
            if _INCOMPLETE_UNLOAD in _reason(answer):
                # An unload that nobody saw the end of; until it is asked for again, the name cannot be loaded.
                await self.unload(name, timeout_s=timeout_s)
                answer = await self._call("POST", "/load_lora_adapter", body=body, timeout_s=timeout_s)
        except EngineError:
            # Nobody knows how it ended; the list does.
            if await self._has(name, path):
                return
            raise
        if _is_done(answer) or await self._has(name, path):
            return
        raise EngineError("adapter_refused", _said("load", name, answer))

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Returns when the adapter's requests have ended: SGLang waits for them, and takes no new ones."""
        answer = await self._call("POST", "/unload_lora_adapter", body={"lora_name": name}, timeout_s=timeout_s)
        if _is_done(answer) or name not in await self.adapters():
            return
        raise EngineError("engine_failed", _said("unload", name, answer))

    async def shape(self) -> EngineShape:
        """Raises EngineError `engine_start_failed` where the engine was not started as an agent needs it."""
        info = await self._info()
        _check(self.url, info)
        base = await self._base()
        block_size = _whole(info.get("page_size"))
        return EngineShape(
            block_size=block_size,
            total_kv_blocks=_whole(info.get("max_total_num_tokens")) // max(1, block_size),
            max_model_len=_whole(base.get("max_model_len")),
            model_name=str(base.get("id") or ""),
        )

    async def is_healthy(self, *, timeout_s: float) -> bool:
        return await super().is_healthy(timeout_s=max(timeout_s, _HEALTH_WITHIN_S))

    async def kv_sources(self) -> KvEventEndpoints:
        """Its own --kv-events-config, among the arguments that it tells."""
        try:
            told = dict(json.loads((await self._info()).get("kv_events_config") or "{}"))
        except (ValueError, TypeError):
            return KvEventEndpoints()
        return sources_of(httpx.URL(self.url).host, [told])

    async def connector(self) -> ConnectorVerdict:
        """By its arguments: its own caches are kept apart by adapter, and of these two nobody has looked."""
        info = await self._info()
        for argument in ("enable_lmcache", "hicache_storage_backend"):
            if info.get(argument):
                flag = f"--{argument.replace('_', '-')}"
                return ConnectorVerdict(
                    "refused", f"how SGLang's {flag} keeps adapters apart is not known", is_known=False
                )
        return NO_CONNECTOR

    async def scrape(self) -> EngineMetrics:
        """Its counters are on one page, and who runs now on another: the gauge of that on the first is set every 40
        decoded tokens only (seen running), and `/v1/loads` at each prefill, every 15 tokens and when all is done.
        """
        page = await self._metrics_page()
        answer = await self._call("GET", "/v1/loads", timeout_s=METRICS_TIMEOUT_S)
        if not answer.is_success:
            message = f"engine {self.url}/v1/loads: HTTP {answer.status_code}"
            raise EngineError("engine_unreachable", message, retry_after_s=1)
        return parse_metrics(page, _object(answer).get("loads") or [])

    async def boot_mark(self) -> str:
        """How long the parts of its start took, and its seed: its metrics have no start time."""
        info = await self._info()
        marks = json.dumps([info.get("startup_time"), info.get("random_seed")], sort_keys=True)
        return hashlib.sha256(marks.encode()).hexdigest()[:16]

    async def _info(self) -> Mapping[str, Any]:
        answer = await self._call("GET", "/server_info", timeout_s=_INFO_TIMEOUT_S)
        info = _object(answer)
        if not answer.is_success or "page_size" not in info:
            message = (
                f"engine {self.url}: /server_info is not SGLang's (HTTP {answer.status_code});"
                " say with --engine what runs there"
            )
            raise EngineError("engine_start_failed", message)
        return info


def parse_metrics(page: str, loads: Sequence[Mapping[str, Any]]) -> EngineMetrics:
    """What one page of SGLang's /metrics says, and what its ranks' /v1/loads.

    Seconds in prefill are there only with SGLANG_ENABLE_METRICS_DEVICE_TIMER=1; its times of single requests are
    observed long before their tokens are, so that no quotient of theirs means anything.
    """
    families = list(text_string_to_metric_families("\n".join(_WANTED.findall(page)) + "\n"))
    prefilled = _total(families, "sglang:realtime_tokens_total", mode="prefill_compute")
    in_prefill = _total(families, "sglang:forward_execution_seconds_total", category="extend")
    latency = _total(families, "sglang:e2e_request_latency_seconds_sum")
    queued = _total(families, "sglang:queue_time_seconds_sum")
    running = sum(_whole(load.get("num_running_reqs")) for load in loads)
    waiting = sum(_whole(load.get("num_waiting_reqs")) for load in loads)
    return EngineMetrics(
        # A prompt that is being computed neither runs nor waits there: what is at work is then told by HTTP alone, and
        # by that for two seconds more after the end of a stream.
        running=running if running or waiting else _asked(families),
        waiting=waiting,
        kv_usage=sum(float(load.get("token_usage") or 0) for load in loads) / max(1, len(loads)),
        computed_tokens=prefilled,
        steps=_total(families, "sglang:cuda_graph_passes_total"),
        ended=_total(families, "sglang:num_requests_total"),
        # Counted when a request ends, and so as good as their first tokens over more than a few seconds.
        first_tokens=_total(families, "sglang:num_requests_total"),
        prefill_seconds=in_prefill,
        ended_output_tokens=_total(families, "sglang:generation_tokens_total"),
        ended_seconds=max(0.0, latency - queued),
        token_gaps=_total(families, "sglang:inter_token_latency_seconds_count"),
        gap_seconds=_total(families, "sglang:inter_token_latency_seconds_sum"),
        block_size=int(_largest(families, "sglang:page_size")),
        total_kv_blocks=int(_largest(families, "sglang:num_pages")),
    )


def _by_rank(families: Iterable[Metric], name: str, **labels: str) -> dict[str, dict[str, float]]:
    """Data-parallel rank -> scheduler -> the sum of its series with these labels."""
    found: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            told = sample.labels
            # Under priority scheduling a series without priority is the sum of those with one.
            if sample.name != name or told.get("priority") or any(told.get(k) != v for k, v in labels.items()):
                continue
            schedulers = found.setdefault(told.get("dp_rank", ""), {})
            scheduler = "/".join(told.get(label, "") for label in ("tp_rank", "pp_rank", "moe_ep_rank"))
            schedulers[scheduler] = schedulers.get(scheduler, 0.0) + sample.value
    return found


def _total(families: Iterable[Metric], name: str, **labels: str) -> float:
    return sum(max(schedulers.values()) for schedulers in _by_rank(families, name, **labels).values())


def _largest(families: Iterable[Metric], name: str) -> float:
    return max((max(schedulers.values()) for schedulers in _by_rank(families, name).values()), default=0.0)


def _asked(families: Iterable[Metric]) -> int:
    """HTTP requests under way that have the engine compute something."""
    active = (sample for family in families for sample in family.samples if sample.name == _ACTIVE)
    told = ((sample.labels, sample.value) for sample in active)
    return int(sum(n for of, n in told if of.get("method") == "POST" and of.get("endpoint", "").startswith(_COMPUTING)))


def _check(url: str, info: Mapping[str, Any]) -> None:
    """Raises EngineError when adapters could not be loaded into it, or nothing could be known of it."""
    wrong = [
        what
        for is_wrong, what in (
            (not info.get("enable_lora"), "--enable-lora is missing"),
            (_whole(info.get("dp_size")) > 1, "--dp-size is more than 1, where SGLang loads no adapters at run time"),
            (not info.get("enable_metrics"), "--enable-metrics is missing"),
            (":" in str(info.get("served_model_name") or ""), "--served-model-name has a colon: it names an adapter"),
        )
        if is_wrong
    ]
    if wrong:
        raise EngineError("engine_start_failed", f"engine {url}: {'; '.join(wrong)}; see docs/engines.md")


def _said(what: str, name: str, answer: httpx.Response) -> str:
    return f"{what} {name}: the engine answered {answer.status_code}: {_reason(answer)}"


def _is_done(answer: httpx.Response) -> bool:
    return answer.is_success and _object(answer).get("success") is True


def _reason(answer: httpx.Response) -> str:
    """Why it refused: `error_message` of its own answers, FastAPI's or OpenAI's words else; "" when it did not."""
    if _is_done(answer):
        return ""
    told = _object(answer)
    return str(told.get("error_message") or told.get("message") or told.get("detail") or answer.text[:500])


def _object(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        told = answer.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
