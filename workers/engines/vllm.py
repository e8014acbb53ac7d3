"""vLLM 0.32's HTTP, which the sim speaks too: adapters, health, metrics."""

from pathlib import Path

import httpx

from lorafleet.engine.metrics_page import SERVER_INFO, EngineMetrics, parse_metrics, transfer_config
from lorafleet.engine.vllm_errors import is_ending
from lorafleet.kv.connectors import ConnectorVerdict, learned
from lorafleet.kv.sources import KvEventEndpoints, sources_of
from workers.core.errors import EngineError
from workers.engines.base import EngineShape, EngineTraits
from workers.engines.client import MODELS_TIMEOUT_S, HttpEngineClient

_INFO_TIMEOUT_S = 30.0  # it looks at its whole machine for that, once


class VllmClient(HttpEngineClient):
    """Client of one vLLM, or of the sim."""

    # Two: its API server reads one request while its core takes in the other's weights, and the two keep their order
    # nearly always (0.32, seen running: 50 loads in 0.65 to 0.85 of the time; three or four gain no more).
    traits = EngineTraits(dialect="vllm", keeps_ghosts=True, loads_at_once=2)

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Raises EngineError: `adapter_refused` with the engine's reason, `engine_failed` with what is wrong with the
        engine itself, `engine_timeout`, `engine_unreachable`.
        """
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
        said = _said(f"load {name}", answer)
        raise EngineError("engine_failed" if is_ending(said) else "adapter_refused", said)

    async def unload(self, name: str, *, timeout_s: float) -> None:
        answer = await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name}, timeout_s=timeout_s)
        if not answer.is_success and answer.status_code != 404:
            raise EngineError("engine_failed", _said(f"unload {name}", answer))

    async def shape(self) -> EngineShape:
        """Block size and count from vllm:cache_config_info, length and name from /v1/models."""
        base = await self._base()
        scrape = await self.scrape()
        return EngineShape(
            block_size=scrape.block_size,
            total_kv_blocks=scrape.total_kv_blocks,
            max_model_len=int(base.get("max_model_len") or 0),
            model_name=str(base.get("id") or ""),
            mark=_mark(scrape),
        )

    async def boot_mark(self) -> str:
        return _mark(await self.scrape())

    async def kv_sources(self) -> KvEventEndpoints:
        """entrypoints/serve/instrumentator/basic.py: rank -> KVEventsConfig."""
        answer = await self._call("GET", "/kv_event_sources", timeout_s=MODELS_TIMEOUT_S)
        try:
            ranks = answer.json()
            told = [dict(ranks[rank]) for rank in sorted(ranks, key=int)]
        except (ValueError, KeyError, TypeError):
            return KvEventEndpoints()  # an older vLLM
        return sources_of(httpx.URL(self.url).host, told)

    async def connector(self) -> ConnectorVerdict:
        """From its `/server_info` where it has one, else from its metrics."""
        answer = await self._call("GET", SERVER_INFO, timeout_s=_INFO_TIMEOUT_S)
        told = transfer_config(answer.content) if answer.is_success else None
        scrape = await self.scrape()
        return learned(told, offloading=scrape.offloading, has_connector=scrape.has_connector)

    async def scrape(self) -> EngineMetrics:
        return parse_metrics(await self._metrics_page())


def _said(what: str, answer: httpx.Response) -> str:
    try:
        error = answer.json()
        text = str((error.get("error") or error)["message"])  # flat before 2025
    except (ValueError, KeyError, TypeError, AttributeError):
        text = answer.text[:500]
    return f"{what}: the engine answered {answer.status_code}: {text}"


def _mark(scrape: EngineMetrics) -> str:
    return f"{scrape.started_at:.2f}"
