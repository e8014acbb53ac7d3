"""The client of vLLM 0.32, which works for the sim, too."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx

from lorafleet.engine.acceptance import LOGPROBS_ROUTE, Logprobs, vllm_logprobs_body, vllm_prompt_logprobs
from lorafleet.engine.canary import Fingerprint, VllmQuestions
from lorafleet.engine.errors import is_engine_stopping
from lorafleet.engine.metrics_page import SERVER_INFO, EngineMetrics, parse_metrics, transfer_config
from lorafleet.kv.connectors import ConnectorVerdict, verdict_of_running_engine
from lorafleet.kv.sources import KvEventEndpoints, kv_event_endpoints
from lorafleet.service.network.tls import Tls
from workers.core.errors import EngineError
from workers.engines.base import EngineShape, EngineTraits
from workers.engines.client import MODELS_TIMEOUT_S, HttpEngineClient
from workers.wire import UNKNOWN_RUNTIME

_INFO_TIMEOUT_S = 30.0  # the first call inspects the whole machine


class VllmClient(HttpEngineClient):
    """The client of one vLLM or sim."""

    # Two loads at once: vLLM 0.32's API server reads one request while its core loads the other's weights. Fifty loads
    # take 0.65 to 0.85 of the time; three or four at once gain no more.
    traits = EngineTraits(dialect="vllm", keeps_ghosts=True, loads_at_once=2)

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        super().__init__(url, tls)
        self._questions = VllmQuestions()

    async def load(self, name: str, path: Path, *, timeout_s: float) -> None:
        """Load an adapter; returns when the engine confirms it or lists it.

        raises  EngineError `adapter_refused` with the engine's reason, `engine_failed` if the engine itself is
                broken, `engine_timeout`, `engine_unreachable`
        """
        body = {"lora_name": name, "lora_path": str(path)}
        try:
            answer = await self._request("POST", "/v1/load_lora_adapter", body=body, timeout_s=timeout_s)
        except EngineError:
            # The load may have succeeded: check the engine's list.
            if await self._has_loaded(name, path):
                return
            raise
        if answer.is_success or await self._has_loaded(name, path):
            return
        error_text = _error_text(f"load {name}", answer)
        raise EngineError("engine_failed" if is_engine_stopping(error_text) else "adapter_refused", error_text)

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Unload an adapter; no error if it is not loaded. Raises EngineError."""
        answer = await self._request("POST", "/v1/unload_lora_adapter", body={"lora_name": name}, timeout_s=timeout_s)
        if not answer.is_success and answer.status_code != 404:
            raise EngineError("engine_failed", _error_text(f"unload {name}", answer))

    async def read_shape(self) -> EngineShape:
        """Block size and count from vllm:cache_config_info, context length and name from /v1/models.

        Reads both pages; raises EngineError.
        """
        base = await self._base_model_entry()
        scrape = await self.scrape()
        sizes = {
            "block_size": scrape.block_size,
            "total_kv_blocks": scrape.total_kv_blocks,
            "max_model_len": int(base.get("max_model_len") or 0),
            "caches_prefixes": scrape.caches_prefixes,
        }
        return EngineShape(
            runtime=UNKNOWN_RUNTIME.model_copy(update=sizes),
            model_name=str(base.get("id") or ""),
            model_path=str(base.get("root") or ""),
            boot_mark=_start_time_text(scrape),
        )

    async def takes_loads(self) -> bool:
        """Whether the engine has the load route, which VLLM_ALLOW_RUNTIME_LORA_UPDATING adds. Raises EngineError."""
        answer = await self._request("GET", "/v1/load_lora_adapter", timeout_s=MODELS_TIMEOUT_S)
        return answer.status_code != httpx.codes.NOT_FOUND

    async def version(self) -> str:
        """The engine's version, as /version says it; "" without an answer. Never raises.

        source  entrypoints/serve/instrumentator/basic.py show_version
        """
        try:
            answer = await self._request("GET", "/version", timeout_s=MODELS_TIMEOUT_S)
            return str(answer.json()["version"]).partition("+")[0]
        except (EngineError, ValueError, KeyError, TypeError):
            return ""

    async def boot_mark(self) -> str:
        """The process's start time, from the engine's metrics. Raises EngineError."""
        return _start_time_text(await self.scrape())

    async def fingerprint(self, adapter: str | None, prompt: Sequence[int], *, base_model: str) -> Fingerprint | None:
        """The log-probabilities of the next token; a pooling model's scores or embedding. Raises EngineSilent."""
        return await self._questions.ask(self._ask_for_numbers, adapter or base_model, prompt)

    async def prompt_logprobs(
        self, adapter: str | None, prompts: Sequence[Sequence[int]], *, base_model: str
    ) -> Sequence[Logprobs] | None:
        """The log-probability of each token but the first of these prompts. Raises EngineSilent."""
        body = vllm_logprobs_body(adapter or base_model, prompts)
        return await self._ask_for_numbers(LOGPROBS_ROUTE, body, partial(vllm_prompt_logprobs, prompts))

    async def kv_event_endpoints(self) -> KvEventEndpoints:
        """The KV event endpoints of each rank, read from /kv_event_sources; empty for an older vLLM.

        source  entrypoints/serve/instrumentator/basic.py: rank -> KVEventsConfig
        """
        answer = await self._request("GET", "/kv_event_sources", timeout_s=MODELS_TIMEOUT_S)
        try:
            ranks = answer.json()
            configs = [dict(ranks[rank]) for rank in sorted(ranks, key=int)]
        except (ValueError, KeyError, TypeError):
            return KvEventEndpoints()  # an older vLLM
        return kv_event_endpoints(httpx.URL(self.url).host, configs)

    async def kv_connector(self) -> ConnectorVerdict:
        """The verdict on the engine's KV connector, from `/server_info` if the engine has it, else from its metrics.

        Raises EngineError.
        """
        answer = await self._request("GET", SERVER_INFO, timeout_s=_INFO_TIMEOUT_S)
        config = transfer_config(answer.content) if answer.is_success else None
        scrape = await self.scrape()
        return verdict_of_running_engine(config, offloading=scrape.offloading, has_connector=scrape.has_connector)

    async def scrape(self) -> EngineMetrics:
        """Read the engine's /metrics. Raises EngineError."""
        return parse_metrics(await self._metrics_page())


def _error_text(action: str, answer: httpx.Response) -> str:
    """A failed action with the status and error message of vLLM's answer."""
    try:
        error = answer.json()
        text = str((error.get("error") or error)["message"])  # flat before 2025
    except (ValueError, KeyError, TypeError, AttributeError):
        text = answer.text[:500]
    return f"{action}: the engine answered {answer.status_code}: {text}"


def _start_time_text(scrape: EngineMetrics) -> str:
    """The process's start time in the metrics, as a text."""
    return f"{scrape.started_at:.2f}"
