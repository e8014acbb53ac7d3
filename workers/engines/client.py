"""The HTTP client that the clients of all engines share, with errors translated to EngineError."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from lorafleet.engine.acceptance import Logprobs
from lorafleet.engine.canary import PROBE_REQUESTS, EngineSilent, Fingerprint, answered_numbers
from lorafleet.service.network.tls import Tls
from lorafleet.service.network.transport import DirectTransport
from workers.core.errors import EngineError
from workers.engines.base import EngineTraits

T = TypeVar("T")

MODELS_TIMEOUT_S = 10.0
METRICS_TIMEOUT_S = 5.0
_NUMBERS_TIMEOUT_S = 60.0  # the canary's own deadline is shorter


class HttpEngineClient:
    """HTTP client of one engine. Ignores redirects and the environment's proxies."""

    traits: EngineTraits

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        self.url = url
        limits = httpx.Limits(max_keepalive_connections=4, keepalive_expiry=2.0)
        transport = DirectTransport(limits=limits, tls=tls)
        self._client = httpx.AsyncClient(base_url=url, timeout=10.0, transport=transport, trust_env=False)

    async def aclose(self) -> None:
        """Close the connections; later calls raise EngineError `engine_down`."""
        await self._client.aclose()

    async def list_adapters(self) -> Mapping[str, str]:
        """engine name -> path of all loaded adapters: the models in /v1/models with a parent. Raises EngineError."""
        return {item["id"]: str(item.get("root") or "") for item in await self._list_models() if item.get("parent")}

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether GET /health answers with success in time. Never raises EngineError."""
        try:
            return (await self._request("GET", "/health", timeout_s=timeout_s)).is_success
        except EngineError:
            return False

    async def can_generate(self, model: str, *, timeout_s: float) -> bool:
        """Whether a completion of one token succeeds in time, or the pooling of one. Never raises EngineError."""
        try:
            for path, fields in PROBE_REQUESTS:
                answer = await self._request("POST", path, body={"model": model, **fields}, timeout_s=timeout_s)
                if answer.is_success or answer.status_code >= 500:
                    return answer.is_success
        except EngineError:
            pass
        return False

    async def fingerprint(
        self,
        adapter: str | None,  # noqa: ARG002  (of clients that ask)
        prompt: Sequence[int],  # noqa: ARG002
        *,
        base_model: str,  # noqa: ARG002
    ) -> Fingerprint | None:
        """None: this kind of engine is not asked for log-probabilities."""
        return None

    async def prompt_logprobs(
        self,
        adapter: str | None,  # noqa: ARG002  (of clients that ask)
        prompts: Sequence[Sequence[int]],  # noqa: ARG002
        *,
        base_model: str,  # noqa: ARG002
    ) -> Sequence[Logprobs] | None:
        """None: this kind of engine is not asked for the log-probabilities of a prompt."""
        return None

    async def _ask_for_numbers(self, route: str, body: Mapping[str, Any], numbers_of: Callable[[Any], T]) -> T | None:
        """POST a request and read the numbers in its answer; None for a 4xx, or an answer without numbers.

        Raises EngineSilent if the engine does not answer, or fails.
        """
        try:
            answer = await self._request("POST", route, body=body, timeout_s=_NUMBERS_TIMEOUT_S)
        except EngineError as exc:
            raise EngineSilent(str(exc)) from exc
        return answered_numbers(f"engine {self.url}{route}", answer.status_code, answer.content, numbers_of)

    async def version(self) -> str:
        """An empty text: only vLLM's version matters to adapters."""
        return ""

    async def _has_loaded(self, name: str, path: Path) -> bool:
        """Ask whether the engine lists the adapter with this path; False if it does not answer."""
        try:
            return (await self.list_adapters()).get(name) == str(path)
        except EngineError:
            return False

    async def _base_model_entry(self) -> Mapping[str, Any]:
        """The base model's entry in the engine's /v1/models; empty without one. Raises EngineError."""
        return next((item for item in await self._list_models() if not item.get("parent")), {})

    async def _list_models(self) -> list[dict[str, Any]]:
        """Ask the engine for the entries of /v1/models. Raises EngineError."""
        answer = await self._request("GET", "/v1/models", timeout_s=MODELS_TIMEOUT_S)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            models = list(answer.json()["data"])
            if all(isinstance(item["id"], str) for item in models):
                return models
        message = f"engine {self.url}: /v1/models is no list of models: HTTP {answer.status_code}"
        raise EngineError("engine_unreachable", message, retry_after_s=1)

    async def _metrics_page(self) -> str:
        """Ask the engine for the text of /metrics. Raises EngineError."""
        answer = await self._request("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)
        if not answer.is_success:  # parsed as metrics, an error page would mean an idle engine
            message = f"engine {self.url}/metrics: HTTP {answer.status_code}"
            raise EngineError("engine_unreachable", message, retry_after_s=1)
        return answer.text

    async def takes_loads(self) -> bool:
        """Whether the engine loads and unloads adapters while it runs: by its kind."""
        return self.traits.takes_adapters == "while running"

    async def _request(
        self, method: str, path: str, *, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Send a request. Raises EngineError `engine_timeout`, `engine_unreachable`, or `engine_down` if closed."""
        if self._client.is_closed:  # the supervisor detached the engine during a call
            raise EngineError("engine_down", f"engine {self.url}{path}: the client is closed", retry_after_s=5)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.request(method, path, json=body, timeout=timeout_s)
        except (TimeoutError, httpx.TimeoutException) as exc:
            message = f"engine {self.url}{path}: no answer within {timeout_s:g} s"
            raise EngineError("engine_timeout", message, retry_after_s=2) from exc
        except httpx.HTTPError as exc:
            message = f"engine {self.url}{path}: {exc!r}"
            raise EngineError("engine_unreachable", message, retry_after_s=2) from exc
