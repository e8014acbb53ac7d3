"""The canary at one agentless engine: adapters that do not change its answers are refused, or ready with a note."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from lorafleet.engine.canary import (
    BaseReadings,
    CanaryMode,
    EngineSilent,
    Fingerprint,
    ReadNumbers,
    ShownEffect,
    VllmQuestions,
    answered_numbers,
    run_canary,
    shown_effect,
)
from lorafleet.engine.lora_weights import weights_effect
from lorafleet.service.network.transport import why_no_answer


class AgentlessCanary:
    """Compares one engine's answers with and without an adapter. Effects are kept until the engine restarts."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, mode: CanaryMode, timeout_s: float) -> None:
        self._url = url
        self._client = client
        self._mode = mode
        self._timeout_s = timeout_s
        self._questions = VllmQuestions()
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
            return await self._questions.ask(self._post, adapter or base_model, prompt)

        result = await run_canary(ask, engine_name, readings=self._readings, timeout_s=self._timeout_s)
        weights = await asyncio.to_thread(weights_effect, Path(path)) if result.outcome == "none" else None
        found = shown_effect(result, weights, self._mode)
        if not found.refusal:
            self._effects[engine_name] = found
        return found

    def forget(self, engine_name: str) -> None:
        """Forget what was found of an adapter that is unloaded."""
        self._effects.pop(engine_name, None)

    async def _post(self, route: str, body: Mapping[str, Any], read: ReadNumbers) -> Fingerprint | None:
        """The numbers in the engine's answer; None without numbers. Raises EngineSilent."""
        try:
            answer = await self._client.post(self._url + route, json=body, timeout=self._timeout_s)
        except httpx.HTTPError as exc:
            raise EngineSilent(f"{self._url}{route}: {why_no_answer(exc)}") from exc
        return answered_numbers(f"{self._url}{route}", answer.status_code, answer.content, read)
