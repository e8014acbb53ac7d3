"""What the HTTP of every engine has in common: one client, and one way to say that an engine cannot be had."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from lorafleet.service.transport import DirectTransport
from workers.core.errors import EngineError

MODELS_TIMEOUT_S = 10.0
METRICS_TIMEOUT_S = 5.0


class HttpEngineClient:
    """Client of one engine. Redirects and proxies of the environment are not followed."""

    def __init__(self, url: str) -> None:
        self.url = url
        transport = DirectTransport(limits=httpx.Limits(max_keepalive_connections=4, keepalive_expiry=2.0))
        self._client = httpx.AsyncClient(base_url=url, timeout=10.0, transport=transport, trust_env=False)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def adapters(self) -> Mapping[str, str]:
        """engine name -> path; an adapter is what has a parent."""
        return {item["id"]: str(item.get("root") or "") for item in await self._models() if item.get("parent")}

    async def is_healthy(self, *, timeout_s: float) -> bool:
        try:
            return (await self._call("GET", "/health", timeout_s=timeout_s)).is_success
        except EngineError:
            return False

    async def gives_tokens(self, model: str, *, timeout_s: float) -> bool:
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        try:
            return (await self._call("POST", "/v1/completions", body=body, timeout_s=timeout_s)).is_success
        except EngineError:
            return False

    async def _has(self, name: str, path: Path) -> bool:
        """Whether it is listed; False where nobody answers."""
        try:
            return (await self.adapters()).get(name) == str(path)
        except EngineError:
            return False

    async def _base(self) -> Mapping[str, Any]:
        """The base model's entry of /v1/models; empty where there is none."""
        return next((item for item in await self._models() if not item.get("parent")), {})

    async def _models(self) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/v1/models", timeout_s=MODELS_TIMEOUT_S)
        try:
            return list(answer.json()["data"])
        except (ValueError, KeyError, TypeError) as exc:
            message = f"engine {self.url}: /v1/models is no list of models: HTTP {answer.status_code}"
            raise EngineError("engine_unreachable", message, retry_after_s=1) from exc

    async def _metrics_page(self) -> str:
        answer = await self._call("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)
        if not answer.is_success:  # read as a page, it would say that nothing runs
            message = f"engine {self.url}/metrics: HTTP {answer.status_code}"
            raise EngineError("engine_unreachable", message, retry_after_s=1)
        return answer.text

    async def _call(
        self, method: str, path: str, *, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        if self._client.is_closed:  # the supervisor gave this engine up while somebody was still speaking to it
            raise EngineError("engine_down", f"engine {self.url}{path}: given up", retry_after_s=5)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.request(method, path, json=body, timeout=timeout_s)
        except (TimeoutError, httpx.TimeoutException) as exc:
            message = f"engine {self.url}{path}: no answer within {timeout_s:g} s"
            raise EngineError("engine_timeout", message, retry_after_s=2) from exc
        except httpx.HTTPError as exc:
            message = f"engine {self.url}{path}: {exc!r}"
            raise EngineError("engine_unreachable", message, retry_after_s=2) from exc
