"""Whether an engine's answers with an adapter are the trainer's, by the acceptance file beside the adapter."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from lorafleet.engine.acceptance import (
    FILE_NAME,
    AcceptanceError,
    AcceptanceFile,
    Logprobs,
    compare_logprobs,
    read_acceptance,
    unknown,
)
from lorafleet.engine.canary import EngineSilent
from orchestrator.model.acceptance import AdapterAcceptance
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.base import EngineClient
from workers.metrics import WorkerMetrics
from workers.wire import WorkerAdapter

log = structlog.get_logger()

_MOST_ATTEMPTS = 2
"""Checks of one adapter in one start of the engine, while they tell nothing."""
_READINGS_KEPT = 64
_HEAD = "lm_head"
_OTHER_TEMPLATE = "; its chat template in training is not the engine's, so chats have other tokens"


class AcceptanceCheck:
    """Asks an engine for the log-probabilities in adapters' acceptance files, at most three requests an adapter.

    The base model's answers to a file's prompts are kept for a start of the engine.
    """

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        engine: CurrentEngine,
        metrics: WorkerMetrics,
        dtype: str,
        templates: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        dtype      in which the engine computes; "" if its command does not say
        templates  sha256 of the chat templates of the engine's tokenizer; blocking
        """
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._dtype = dtype
        self._templates = templates
        self._clock = clock
        self._boot_id = ""
        self._base_readings: dict[str, Sequence[Logprobs]] = {}
        self._attempts: Counter[tuple[str, str]] = Counter()

    async def check(self, client: EngineClient, adapter: WorkerAdapter) -> WorkerAdapter:
        """The loaded adapter with the result of a comparison; measured and logged. Never raises for an engine."""
        self._begin_boot()
        self._attempts[adapter.engine_name, adapter.acceptance_file] += 1
        began_at = self._clock()
        try:
            file = await asyncio.to_thread(read_acceptance, Path(adapter.path))
            found = await self._compare(client, adapter, file) if file else unknown(None, f"it has no {FILE_NAME}")
            if file:
                found = replace(found, why=found.why + await self._remarks(adapter, file))
        except (AcceptanceError, OSError) as exc:
            found = unknown(None, str(exc))
        self._metrics.acceptance_seconds.observe(self._clock() - began_at)
        self._metrics.acceptance_checks.labels(found.result).inc()
        write = log.error if found.result == "differs" else log.info
        write("acceptance", lora_id=adapter.lora_id, result=found.result, looks_like=found.looks_like, why=found.why)
        return replace(adapter, acceptance=found, acceptance_file=found.file or adapter.acceptance_file)

    async def _remarks(self, adapter: WorkerAdapter, file: AcceptanceFile) -> str:
        """What to know of a file beside the result, as the end of a sentence; "" without anything."""
        remarks = ""
        if file.trainer.adapter not in {"", adapter.digest}:
            remarks += f"; the file was made of other weights ({file.trainer.adapter[:12]})"
        if file.trainer.chat_template:
            # Said beside the result: given tokens have no template.
            known = await asyncio.to_thread(self._templates)
            remarks += _OTHER_TEMPLATE * (bool(known) and file.trainer.chat_template not in known)
        return remarks

    async def require_equal(self, client: EngineClient, adapter: WorkerAdapter) -> WorkerAdapter:
        """As `check`. Raises EngineError `not_accepted` or `acceptance_unknown` for any other result than `equal`."""
        checked = await self.check(client, adapter)
        if checked.acceptance is not None and checked.acceptance.result != "equal":
            raise not_accepted_error(adapter, checked.acceptance)
        return checked

    async def has_waiting(self, client: EngineClient) -> bool:
        """Whether a request waits for an adapter slot, or in the queue. Raises EngineError."""
        load = await client.scrape()
        return load.waiting_for_slot + load.waiting > 0

    def next_unchecked(self, adapters: Iterable[WorkerAdapter]) -> WorkerAdapter | None:
        """The next loaded adapter with an acceptance file that this start of the engine was not compared with."""
        self._begin_boot()
        return next((adapter for adapter in adapters if self._is_due(adapter)), None)

    def _is_due(self, adapter: WorkerAdapter) -> bool:
        """Whether an adapter is to be compared now."""
        if not adapter.acceptance_file or adapter.acceptance_mode == "off":
            return False
        known = adapter.acceptance
        is_told = known is not None and known.file == adapter.acceptance_file and known.result != "unknown"
        return not is_told and self._attempts[adapter.engine_name, adapter.acceptance_file] < _MOST_ATTEMPTS

    def forget(self, adapter: WorkerAdapter) -> None:
        """Compare the adapter again: it is loaded anew."""
        self._attempts.pop((adapter.engine_name, adapter.acceptance_file), None)

    def _begin_boot(self) -> None:
        """Forget what an earlier start of the engine has answered."""
        if self._boot_id != self._engine.boot_id:
            self._boot_id = self._engine.boot_id
            self._base_readings.clear()
            self._attempts.clear()

    async def _compare(self, client: EngineClient, adapter: WorkerAdapter, file: AcceptanceFile) -> AdapterAcceptance:
        """The result for an adapter with a file."""
        if problem := self._problem(adapter):
            return unknown(None, problem)
        if not self._engine.reports:
            # Without our plugin vLLM's CPU engine may die of two such prompts in one step.
            file = replace(file, prompts=file.prompts[:1])
        timeout_s = self._settings.acceptance_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._found(client, adapter, file)
                if found is not None and found.result == "differs":
                    # Once more: a busy engine may have computed the two in very different batches.
                    again = await self._found(client, adapter, file)
                    found = again if again is not None and again.result == "equal" else found
        except TimeoutError:
            return unknown(file, f"the engine did not answer within {timeout_s:g} s")
        except EngineSilent as exc:
            return unknown(file, str(exc))
        return found or unknown(None, "the engine gives no log-probabilities of these prompts")

    async def _found(
        self, client: EngineClient, adapter: WorkerAdapter, file: AcceptanceFile
    ) -> AdapterAcceptance | None:
        """What one answer with the adapter shows; None for an engine that gives no numbers. Raises EngineSilent."""
        base = await self._base_reading(client, file)
        served = None if base is None else await self._reading(client, adapter.engine_name, file)
        if base is None or served is None:
            return None
        return compare_logprobs(file, served, base, engine_dtype=self._dtype)

    def _problem(self, adapter: WorkerAdapter) -> str:
        """Why this engine's log-probabilities of a prompt say nothing of the adapter; "" if they do."""
        devices = {report.device for report in self._engine.reports}
        if _HEAD in adapter.target_modules and self._settings.engine == "vllm" and devices != {"cpu"}:
            return "vLLM leaves the head's part out of a prompt's log-probabilities (vllm-project/vllm#51594)"
        return ""

    async def _base_reading(self, client: EngineClient, file: AcceptanceFile) -> Sequence[Logprobs] | None:
        """The base model's answer to a file's prompts, asked once in a start of the engine. Raises EngineSilent."""
        key = f"{file.digest} {len(file.prompts)}"
        if (known := self._base_readings.get(key)) is not None:
            return known
        reading = await self._reading(client, None, file)
        if reading is not None:
            while len(self._base_readings) >= _READINGS_KEPT:
                del self._base_readings[next(iter(self._base_readings))]
            self._base_readings[key] = reading
        return reading

    async def _reading(
        self, client: EngineClient, adapter: str | None, file: AcceptanceFile
    ) -> Sequence[Logprobs] | None:
        """One answer of the engine to a file's prompts; None without numbers. Raises EngineSilent."""
        prompts = [prompt.prompt for prompt in file.prompts]
        return await client.prompt_logprobs(adapter, prompts, base_model=self._engine.model_card().name)


def not_accepted_error(adapter: WorkerAdapter, found: AdapterAcceptance) -> EngineError:
    """The error of an adapter that must not be served with this result."""
    expected = "its policy takes `equal` alone (acceptance: require); see docs/acceptance.md"
    message = f"load {adapter.engine_name}: {found.result}: {found.why}; {expected}"
    if found.is_unanswered:
        return EngineError("acceptance_unknown", message, retry_after_s=5)
    return EngineError("not_accepted", message)
