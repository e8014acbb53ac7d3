"""The canary at one agentless engine: adapters that do not change its answers are refused, or ready with a note."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from lorafleet.engine.canary import (
    VLLM_ROUTES,
    BaseReadings,
    CanaryMode,
    EngineSilent,
    Fingerprint,
    ShownEffect,
    run_canary,
    shown_effect,
    vllm_body,
    vllm_fingerprint,
)
from lorafleet.engine.lora_weights import weights_effect


class AgentlessCanary:
    """Compares one engine's answers with and without an adapter. Effects are kept until the engine restarts."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, mode: CanaryMode, timeout_s: float) -> None:
        self._url = url
        self._client = client
        self._mode = mode
        self._timeout_s = timeout_s
        self._routes: Sequence[str] = VLLM_ROUTES
        self._readings = BaseReadings()
        self._effects: dict[str, ShownEffect] = {}

    def effect_of(self, engine_name: str, boot_id: str) -> ShownEffect:
        """What was found of a loaded adapter in this start of the engine; empty if it was not checked then."""
        return self._effects.get(engine_name, ShownEffect()) if boot_id == self._readings.boot_id else ShownEffect()

    async def check(self, engine_name: str, path: str, *, base_model: str, boot_id: str) -> ShownEffect:
        """Ask the engine about an adapter that it has just loaded from a path on its disk, and keep what was found.

        The files are read where this machine has the same folder. Never raises.
        """
        if self._mode == "off":
            return ShownEffect()
        if boot_id != self._readings.boot_id:
            self._effects.clear()
        self._readings = self._readings.of_boot(boot_id)

        async def ask(adapter: str | None, prompt: Sequence[int]) -> Fingerprint | None:
            """Send a prompt to the adapter or the base model. Raises EngineSilent."""
            return await self._ask(adapter or base_model, prompt)

        result = await run_canary(ask, engine_name, readings=self._readings, timeout_s=self._timeout_s)
        weights = await asyncio.to_thread(weights_effect, Path(path)) if result.outcome == "none" else None
        found = shown_effect(result, weights, self._mode)
        if not found.refusal:
            self._effects[engine_name] = found
        return found

    def forget(self, engine_name: str) -> None:
        """Forget what was found of an adapter that is unloaded."""
        self._effects.pop(engine_name, None)

    async def _ask(self, model: str, prompt: Sequence[int]) -> Fingerprint | None:
        """The engine's numbers for a prompt; None if it gives none. Raises EngineSilent.

        The route that gave numbers is the only one that is asked from then on.
        """
        for route in self._routes:
            try:
                body = vllm_body(route, model, prompt)
                answer = await self._client.post(self._url + route, json=body, timeout=self._timeout_s)
            except httpx.HTTPError as exc:
                raise EngineSilent(f"{self._url}{route}: {exc!r}") from exc
            if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or answer.status_code in {408, 429}:
                raise EngineSilent(f"{self._url}{route}: HTTP {answer.status_code}")
            numbers = vllm_fingerprint(route, _json(answer)) if answer.is_success else None
            if numbers is not None:
                self._routes = (route,)
                return numbers
        return None


def _json(answer: httpx.Response) -> object:
    """The answer's JSON; None if it is none."""
    try:
        return answer.json()
    except ValueError:
        return None
