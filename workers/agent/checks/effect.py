"""What an engine really does with an adapter: which modules it ignores, and whether that is accepted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lorafleet.engine.vllm_plugin.lora_reports import LoadedModules
from orchestrator.model.cards import AdapterEffectState
from workers.core.errors import EngineError
from workers.verification.engine_modules import UNCALLED
from workers.verification.manifest import AdapterDescription

IgnoredPolicy = Literal["auto", "accept", "refuse"]

NAMES_SHOWN = 5
ADVICE = (
    "train it under the names of the model class that the engine serves (docs/engines.md), or rename its tensors so"
)


@dataclass(frozen=True, slots=True)
class AdapterEffect:
    """What is known of an adapter's effect in the engine.

    effect   "" not checked; applied: the engine says it has its modules; seen: its answers change with the adapter;
             zero: its weights change nothing, by their bytes; unknown: neither could be proved
    note     a sentence, where there is something to say
    ignored  modules of its file that the engine does not have
    lora_int_id  the engine's number of the adapter, where the engine reports it
    host_bytes   of the engine's copies in host memory, where the engine reports it
    """

    effect: AdapterEffectState = ""
    note: str = ""
    ignored: tuple[str, ...] = ()
    lora_int_id: int | None = None
    host_bytes: int = 0


NOT_CHECKED = AdapterEffect()


def check_ignored(
    modules: int,
    ignored: Collection[str],
    *,
    experts: int,
    ignored_experts: int,
    policy: IgnoredPolicy,
    uncalled: Collection[str] = (),
) -> None:
    """Raises EngineError if an adapter must not be served without the modules that the engine ignores.

    modules  how many its file has; of these so many of experts
    policy   auto: refused if all modules, or all experts, are ignored; accept: only if all are; refuse: if any is
    uncalled those of the ignored ones that the engine has, and never runs
    raises   `adapter_no_effect` if nothing is left, `modules_ignored` for a part that is missed
    """
    if not ignored:
        return
    found = f"the engine has {modules - len(ignored)} of its {modules} modules"
    if uncalled:
        found = f"the engine uses {modules - len(ignored)} of its {modules} modules"
    names = f"it ignores {names_text(ignored)}{_uncalled_text(ignored, uncalled)}"
    if len(ignored) >= modules:
        message = f"{found}, so it would answer by the base model: {names}"
        advice = "train it on other layers, too" if len(uncalled) >= len(ignored) else ADVICE
        raise EngineError("adapter_no_effect", f"{message}; {advice}")
    if policy == "auto" and 0 < experts <= ignored_experts:
        raise EngineError("modules_ignored", f"{found}, and none of its experts: {names}; {ADVICE}")
    if policy == "refuse":
        raise EngineError("modules_ignored", f"{found}: {names}; accepted are adapters that it takes as a whole")


def names_text(names: Collection[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = sorted(names)[:NAMES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def ignored_note(modules: int, ignored: Sequence[str], uncalled: Collection[str] = ()) -> str:
    """The note of an adapter that is served without some of its modules; `uncalled`: as of `check_ignored`."""
    found = f"the engine ignores {len(ignored)} of its {modules} modules: {names_text(ignored)}"
    return f"{found}{_uncalled_text(ignored, uncalled)}"


def _uncalled_text(ignored: Collection[str], uncalled: Collection[str]) -> str:
    """Why modules that the engine has are ignored; "" where there are none."""
    if not uncalled:
        return ""
    which = "" if len(uncalled) == len(ignored) else f", of {names_text(uncalled)}"
    return f" ({UNCALLED}{which})"


def uncalled_modules(loaded: LoadedModules, described: AdapterDescription | None) -> tuple[str, ...]:
    """The modules of an adapter that its engine has and never runs, sorted.

    What was measured in this very engine counts first, then what its processes have seen, then its table.
    """
    if described is None:
        return loaded.uncalled
    seen = described.verdict.uncalled if loaded.calls_seen != "yes" else loaded.uncalled
    measured = {module for module in described.verdict.uncalled if module in described.verdict.measured}
    found = measured | {module for module in seen if module not in described.verdict.measured}
    return tuple(sorted(found - set(loaded.ignored)))
