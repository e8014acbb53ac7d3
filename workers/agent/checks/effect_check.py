"""The stage after a load: what the engine really does with the adapter, asked of it or shown by its answers."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from lorafleet.engine.canary import BaseReadings, CanaryResult, run_canary, shown_effect
from lorafleet.engine.lora_weights import ZERO_NOTE, has_zero_weights, weights_effect
from lorafleet.engine.vllm_plugin.lora_reports import (
    LoadedModules,
    ask_for_reports,
    forget_all_reports,
    forget_reports,
    is_of_experts,
    loaded_modules,
    read_reports,
)
from orchestrator.model.cards import AdapterEffectState
from workers.agent.checks.effect import (
    ADVICE,
    NAMES_SHOWN,
    NOT_CHECKED,
    AdapterEffect,
    IgnoredPolicy,
    check_ignored,
    ignored_note,
    uncalled_modules,
)
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.base import EngineClient
from workers.engines.kinds import engine_traits
from workers.metrics import WorkerMetrics
from workers.verification.manifest import AdapterDescription
from workers.wire import AdapterMemory, IgnoredModules, WorkerAdapter

log = structlog.get_logger()

_NUMBER_BYTES = 2
"""Of a number in an engine: bfloat16 or float16, whatever the adapter's file has."""
_MOST_ATTEMPTS = 2
"""Later canaries of an adapter whose first one proved nothing."""


class EffectCheck:
    """Asks an engine what it has of an adapter; compares its answers with and without it where it does not say."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        engine: CurrentEngine,
        metrics: WorkerMetrics,
        describe: Callable[[Path], AdapterDescription | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` reads an adapter's folder and says what the engine's table says of it. Blocking, never raises."""
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._describe = describe
        self._clock = clock
        self._readings = BaseReadings()
        self._attempts: Counter[str] = Counter()
        self._attempts_boot = ""

    async def forget_reports(self) -> None:
        """Delete what an earlier engine, or an earlier agent, left of reports."""
        await asyncio.to_thread(forget_all_reports, self._settings.lora_reports)

    async def prepare(self, adapter: WorkerAdapter) -> None:
        """Ask the engine's processes to report on the adapter when they load it. An error of the disk is logged."""
        try:
            await asyncio.to_thread(ask_for_reports, self._settings.lora_reports, adapter.engine_name)
        except OSError as exc:
            log.warning("the engine cannot report on adapters", folder=str(self._settings.lora_reports), error=str(exc))

    async def check(self, client: EngineClient, adapter: WorkerAdapter) -> WorkerAdapter:
        """The adapter, just loaded, with its effect in the engine.

        raises  EngineError `adapter_no_effect`, `modules_ignored`
        """
        described = await asyncio.to_thread(self._describe, Path(adapter.path))
        effect = await self._reported_effect(client, adapter, described)
        if effect is None:
            if described is not None:
                self._check_table(adapter, described)
            effect = await self._shown_effect(client, adapter)
            if described is not None:
                note = _joined_notes(effect.note, *described.verdict.why)
                effect = AdapterEffect(effect.effect, note, described.verdict.ignored)
        if described is not None:
            effect = replace(effect, note=_joined_notes(effect.note, *described.verdict.notes))
        if effect.note:
            log.warning("adapter's effect", lora_id=adapter.lora_id, effect=effect.effect, note=effect.note)
        return replace(with_effect(adapter, effect), memory=self._memory(effect, described))

    async def check_measured(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """A loaded adapter by what was measured in its engine since its load.

        raises  EngineError `adapter_no_effect`, `modules_ignored`
        """
        described = await asyncio.to_thread(self._describe, Path(adapter.path))
        if described is None or described.verdict.measured.isdisjoint(described.verdict.uncalled):
            return adapter
        self._check_table(adapter, described)
        known = adapter.ignored_modules
        if known is not None and known.count >= len(described.verdict.ignored):
            return adapter
        note = _joined_notes(*described.verdict.why, *described.verdict.notes)
        return with_effect(adapter, AdapterEffect(adapter.effect, note, described.verdict.ignored, adapter.lora_int_id))

    def _memory(self, effect: AdapterEffect, described: AdapterDescription | None) -> AdapterMemory | None:
        """What the engine holds for an adapter: as its processes say, else by the adapter's own modules."""
        if effect.host_bytes and (slot_bytes := sum(report.slot_bytes for report in self._engine.reports)):
            return AdapterMemory(slot_bytes=slot_bytes, host_bytes=effect.host_bytes, by="engine")
        if described is None:
            return None
        slot_bytes = described.width * self._settings.max_lora_rank * _NUMBER_BYTES
        return AdapterMemory(slot_bytes=slot_bytes, host_bytes=described.numbers * _NUMBER_BYTES, by="estimate")

    def _check_table(self, adapter: WorkerAdapter, described: AdapterDescription) -> None:
        """Raises EngineError if the adapter must not be served without the modules that its table calls ignored."""
        lost = sum(map(is_of_experts, described.verdict.ignored))
        policy = _ignored_modules_policy(adapter, self._settings.ignored_modules)
        try:
            check_ignored(
                described.modules,
                described.verdict.ignored,
                experts=described.experts,
                ignored_experts=lost,
                policy=policy,
                uncalled=described.verdict.uncalled,
            )
        except EngineError as exc:
            self._count("table", "refused")
            raise EngineError(exc.code, f"load {adapter.engine_name}: {exc}") from exc

    async def _reported_effect(
        self, client: EngineClient, adapter: WorkerAdapter, described: AdapterDescription | None
    ) -> AdapterEffect | None:
        """The effect of an adapter by the reports of the engine's processes; None without a report of each.

        A process that has not seen yet which layers run sees it in the canary's requests, once in its life.

        raises  EngineError
        """
        shown: AdapterEffect | None = None
        loaded = await asyncio.to_thread(self._read_reports, adapter)
        if loaded is not None and loaded.calls_seen == "not yet" and self._settings.canary != "off":
            result = await self._run_canary(client, adapter)
            loaded = await asyncio.to_thread(self._read_reports, adapter) or loaded
            if loaded.calls_seen == "not yet":
                shown = AdapterEffect("unknown", f"which of its modules run is not known yet: {result.found}")
            elif result.outcome == "none":
                shown = await self._judged_answers(adapter, result)
        if shown is None or shown.effect != "unknown":
            await asyncio.to_thread(forget_reports, self._settings.lora_reports, adapter.engine_name)
        if loaded is None:
            return None
        effect = await asyncio.to_thread(self._effect_of_modules, adapter, loaded, described)
        return (
            effect
            if shown is None
            else replace(effect, effect=shown.effect, note=_joined_notes(effect.note, shown.note))
        )

    def _read_reports(self, adapter: WorkerAdapter) -> LoadedModules | None:
        """What the reports so far say of an adapter. Blocking."""
        return loaded_modules(read_reports(self._settings.lora_reports, adapter.engine_name))

    def _effect_of_modules(
        self, adapter: WorkerAdapter, loaded: LoadedModules, described: AdapterDescription | None
    ) -> AdapterEffect:
        """The effect of an adapter by the modules that the engine has, and that run. Blocking. Raises EngineError."""
        count = partial(self._count, "report")
        uncalled = uncalled_modules(loaded, described)
        ignored = tuple(sorted({*loaded.ignored, *uncalled}))
        if ignored:
            policy = _ignored_modules_policy(adapter, self._settings.ignored_modules)
            try:
                check_ignored(
                    loaded.modules,
                    ignored,
                    experts=loaded.experts,
                    ignored_experts=sum(map(is_of_experts, ignored)),
                    policy=policy,
                    uncalled=uncalled,
                )
            except EngineError as exc:
                count("none" if exc.code == "adapter_no_effect" else "refused")
                raise EngineError(exc.code, f"load {adapter.engine_name}: {exc}") from exc
            count("partial")
            note = ignored_note(loaded.modules, ignored, uncalled)
            return AdapterEffect("applied", note, ignored, loaded.lora_int_id, loaded.host_bytes)
        found: AdapterEffectState = "zero" if _is_zero(adapter) else "applied"
        count(found)
        note = ZERO_NOTE if found == "zero" else ""
        return AdapterEffect(found, note, lora_int_id=loaded.lora_int_id, host_bytes=loaded.host_bytes)

    async def _shown_effect(self, client: EngineClient, adapter: WorkerAdapter) -> AdapterEffect:
        """The effect of an adapter by the engine's answers. Raises EngineError `adapter_no_effect`."""
        if self._settings.canary == "off":
            return NOT_CHECKED
        if await asyncio.to_thread(_is_zero, adapter):
            self._count("canary", "zero")
            return AdapterEffect("zero", ZERO_NOTE)
        return await self._judged_answers(adapter, await self._run_canary(client, adapter))

    async def _judged_answers(self, adapter: WorkerAdapter, result: CanaryResult) -> AdapterEffect:
        """The effect that a canary's result shows. Raises EngineError `adapter_no_effect`."""
        self._count("canary", result.outcome)
        folder = Path(adapter.path)
        weights = await asyncio.to_thread(weights_effect, folder) if result.outcome == "none" else None
        shown = shown_effect(result, weights, self._settings.canary)
        if shown.refusal:
            message = f"load {adapter.engine_name}: {shown.refusal}; {ADVICE}, or see `canary` in docs/configuration.md"
            raise EngineError("adapter_no_effect", message)
        return AdapterEffect(shown.effect, shown.note)

    async def _run_canary(self, client: EngineClient, adapter: WorkerAdapter) -> CanaryResult:
        """Compare the engine's answers with and without the adapter; measured. Base answers are kept for a boot."""
        self._readings = self._readings.of_boot(self._engine.boot_id)
        began_at = self._clock()
        result = await run_canary(
            partial(client.fingerprint, base_model=self._engine.model_card().name),
            adapter.engine_name,
            readings=self._readings,
            timeout_s=self._settings.canary_timeout_s,
        )
        self._metrics.canary_seconds.observe(self._clock() - began_at)
        return result

    def next_unproved(self, adapters: Iterable[WorkerAdapter]) -> WorkerAdapter | None:
        """The next loaded adapter to be checked again by the engine's answers; counts the attempt.

        None while the engine has requests, without a canary, and where no further attempt is left.
        """
        is_able = engine_traits(self._settings.engine).takes_adapters == "while running"
        if self._settings.canary == "off" or not is_able or not self._engine.is_idle:
            return None
        if self._attempts_boot != self._engine.boot_id:
            self._attempts_boot = self._engine.boot_id
            self._attempts.clear()
        for adapter in adapters:
            if adapter.effect in {"", "unknown"} and self._attempts[adapter.engine_name] < _MOST_ATTEMPTS:
                self._attempts[adapter.engine_name] += 1
                return adapter
        return None

    def _count(self, by: str, found: str) -> None:
        """Count a check by how the engine was asked, and what was found."""
        self._metrics.effect_checks.labels(by, found).inc()


def _joined_notes(*notes: str) -> str:
    """Notes as one text; empty ones are left out."""
    return "; ".join(note for note in notes if note)


def _is_zero(adapter: WorkerAdapter) -> bool:
    """Whether the adapter's weights are all zero. Blocking, and reads nothing if an earlier load has shown others."""
    return adapter.effect not in {"applied", "seen"} and has_zero_weights(Path(adapter.path))


def with_effect(adapter: WorkerAdapter, effect: AdapterEffect) -> WorkerAdapter:
    """The adapter with an effect, of which the count and the first names of ignored modules are kept."""
    count, names = len(effect.ignored), effect.ignored[:NAMES_SHOWN]
    ignored = IgnoredModules(count=count, names=names) if count else None
    return replace(
        adapter, effect=effect.effect, note=effect.note, ignored_modules=ignored, lora_int_id=effect.lora_int_id
    )


def with_effect_of(adapter: WorkerAdapter, checked: WorkerAdapter) -> WorkerAdapter:
    """The adapter with the effect of a checked copy of it."""
    return replace(adapter, effect=checked.effect, note=checked.note, ignored_modules=checked.ignored_modules)


def _ignored_modules_policy(adapter: WorkerAdapter, default: IgnoredPolicy) -> IgnoredPolicy:
    """What to do with an adapter of which modules are ignored: as its load request says, else the setting."""
    return "accept" if adapter.ignored_policy == "accept" else "refuse" if adapter.ignored_policy else default
