"""Which modules of one base model an engine finds under an adapter's names, and what becomes of the others."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from workers.verification.lora_tensors import LoraPair
from workers.verification.model_classes import NUMBER, ModelClass
from workers.verification.tensors import Shape

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")
_A = ".lora_A.weight"

UNCALLED = (
    "the engine runs this layer past what adapters change in it (docs/engines.md, layers that run past an adapter)"
)
"""Why a module that the engine has is ignored."""
Fate = Literal["served", "ignored", "refused", "unknown"]
"""What an engine does with a module of an adapter; unknown: only the engine can say."""


@dataclass(frozen=True, slots=True)
class ModuleFate:
    """What an engine does with one module of an adapter.

    reason  why it is not served, as a part of a sentence
    shape   [out, in] of the base model's weight; None if it is not known
    is_missing  the engine has no module of its name
    is_uncalled  the engine has it, and never runs it with an adapter's weights
    """

    fate: Fate
    reason: str = ""
    shape: Shape | None = None
    is_missing: bool = False
    is_uncalled: bool = False


@dataclass(frozen=True, slots=True)
class EngineModules:
    """The modules of one base model in the engine, found by the names in adapters.

    by_name      the base model's own modules, by their names in the engine, with their shapes
    patterns     their patterns
    layers       layers of its language model; None if not known
    experts      experts of a layer; None if not known or none
    text_names   the language model is also found under the names of the text model alone
    with_towers  the engine takes adapters on towers
    is_pooling   modules are also found without `model.`
    """

    model_class: ModelClass
    by_name: Mapping[str, Shape | None]
    patterns: frozenset[str]
    layers: int | None = None
    experts: int | None = None
    text_names: bool = False
    with_towers: bool = False
    is_pooling: bool = False

    def fate(self, module: str, pair: LoraPair) -> ModuleFate:
        """What the engine does with a module of an adapter.

        source  vLLM 0.32 lora/lora_model.py check_unexpected_modules, lora/model_manager.py activate_adapter
        """
        suffix = ".lora_embedding_A" if pair.is_embedding else _A
        if any(f".{start}" in f".{module}" for start in self.model_class.skipped):
            return ModuleFate("ignored", "the engine passes over modules of this name")
        name = self.model_class.rules.renamed(module + suffix).removesuffix(suffix)
        if self._is_other_variant(name):
            return ModuleFate("unknown", "this variant of the model class is not known here", self.by_name.get(name))
        if refusal := self._refusal(name, pair):
            return ModuleFate("refused", refusal)
        found = [full for full in self._full_names(name) if self._has(full, pair)]
        if not found:
            return self._missing(name)
        full = found[0]
        if self.model_class.language and not full.startswith(self._prefixes()):
            return ModuleFate("ignored", "the engine takes adapters on the language model alone")
        if self._is_uncalled(full):
            return ModuleFate("ignored", UNCALLED, is_uncalled=True)
        is_proved = self.model_class.modules is not None or full in self.by_name
        return ModuleFate("served" if is_proved else "unknown", shape=self.by_name.get(full))

    def _is_uncalled(self, full: str) -> bool:
        """Whether the engine's layer of this name, or the one in which it is packed, runs without adapters."""
        pattern = module_name_pattern(full)
        parent, dot, last = pattern.rpartition(".")
        packed = [f"{parent}{dot}{whole}" for whole, parts in self.model_class.packed.items() if last in parts]
        return any(f".{name}".endswith(f".{end}") for end in self.model_class.uncalled for name in (pattern, *packed))

    def _prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of the modules that take adapters."""
        takes_towers = self.with_towers and self.model_class.takes_towers
        return (self.model_class.language, *(self.model_class.towers if takes_towers else ()))

    def _is_other_variant(self, name: str) -> bool:
        """Whether a module of the base model's language model is in a part that the class was not seen to have.

        Classes were built from default configurations; others may have other kinds of layers.
        """
        parent, _, last = module_name_pattern(name).rpartition(".")
        modules = self.model_class.modules
        is_layer = ".layers." in name and ".experts" not in name
        if modules is None or not is_layer or name not in self.by_name or self._has_pattern(name):
            return False
        is_language = name.startswith(self.model_class.language)
        seen = {module.rpartition(".")[2] for module in modules}
        seen |= {part for packed in seen for part in self.model_class.packed.get(packed, ())}
        # A part with modules of the same names, under another name, is that part: it is not found.
        return is_language and last not in seen and not any(module.startswith(f"{parent}.") for module in modules)

    def _refusal(self, name: str, pair: LoraPair) -> str:
        """Why the engine refuses a file with a module of this name; "" if it does not, or if that is not known."""
        if not self.model_class.taken:
            return self._stacked_refusal(name) if pair.is_stacked else ""
        last = name.rpartition(".")[2]
        if name.endswith(".experts.base_layer"):
            return self._stacked_refusal(name)
        if pair.is_stacked and "experts" in self.model_class.taken:
            return self._stacked_refusal(name)
        _, dot, expert = name.partition(".experts.")
        if dot:
            number, _, part = expert.partition(".")
            is_expert = number.isdigit() and (self.experts is None or int(number) < self.experts)
            if self.model_class.has_3d_experts or not is_expert or part not in self.model_class.expert_parts:
                return self._expert_refusal()
            return ""
        if last in self.model_class.taken:
            return ""
        if name.startswith(self.model_class.towers):
            return "the engine has no such module in any part that it serves: it takes text alone, or not this tower"
        return "the engine takes no adapter on modules of this name"

    def _stacked_refusal(self, name: str) -> str:
        """Why the engine refuses experts that are stored as one module; "" if it does not."""
        runner = name.removesuffix(".base_layer")
        is_known = self.model_class.modules is not None
        if self.model_class.has_3d_experts or (is_known and not self._has_pattern(runner)):
            return ""  # taken, or ignored
        parts = ", ".join(self.model_class.expert_parts) or "..."
        return (
            "PEFT's target_parameters stores all experts as one module, and the engine wants one for each expert of"
            f" this base model (experts.0.{{{parts}}})"
        )

    def _expert_refusal(self) -> str:
        """Why the engine refuses a module of one expert."""
        if self.model_class.has_3d_experts:
            return (
                "the engine takes the experts of this base model as one module alone, as PEFT 0.19 and newer store them"
                " (target_parameters)"
            )
        parts = " and ".join(self.model_class.expert_parts)
        count = "" if self.experts is None else f" below {self.experts}"
        return f"of experts the engine takes modules such as experts.0.{parts}, with a number{count}"

    def _full_names(self, name: str) -> Iterable[str]:
        """The names under which the engine looks for a module of the adapter, the most usual first."""
        yield name
        if self.is_pooling:
            yield f"model.{name}"
        if self.text_names and (language := self.model_class.language.rstrip(".")):
            yield f"{language}.{name}"
            if name.startswith("model."):
                yield f"{language}.{name.removeprefix('model.')}"

    def _has(self, full: str, pair: LoraPair) -> bool:
        """Whether the engine has a module of this name, or one in which it is packed."""
        if pair.is_stacked or ".experts." in full:
            full = full.partition(".experts")[0] + ".experts"
        pattern = module_name_pattern(full)
        if pattern in self.patterns:
            return full in self.by_name and (self.model_class.modules is None or self._has_pattern(full))
        if self.model_class.modules is None:
            # The class could not be built where the table was made: the base model's own names decide.
            return full.endswith(".experts") or not self.patterns
        return self._has_pattern(full) and self._has_layer(full)

    def _has_pattern(self, full: str) -> bool:
        """Whether the class has a module of this name, for any number of its layer."""
        modules = self.model_class.modules
        if modules is None:
            return False
        pattern = module_name_pattern(full)
        if pattern in modules:
            return True
        parent, dot, last = pattern.rpartition(".")
        return any(
            last in parts and f"{parent}{dot}{packed}" in modules for packed, parts in self.model_class.packed.items()
        )

    def _has_layer(self, full: str) -> bool:
        """Whether the layer of a module of the language model exists."""
        number = re.search(r"\.(\d+)(?=\.|$)", full)
        is_language = full.startswith(self.model_class.language)
        return number is None or self.layers is None or not is_language or int(number[1]) < self.layers

    def _missing(self, name: str) -> ModuleFate:
        """The fate of a module that the engine does not have."""
        if self.model_class.modules is None and not self.patterns:
            return ModuleFate("unknown", "the modules of this model class are not known here")
        if name.startswith(self.model_class.towers) and not name.startswith(self._prefixes()):
            # Releases of transformers name a tower's modules differently; no name of them takes effect.
            return ModuleFate("ignored", "the engine takes adapters on the language model alone")
        return ModuleFate("ignored", f"the engine has no module {name}", is_missing=True)


def engine_modules(
    model_class: ModelClass,
    weights: Mapping[str, Shape | None],
    *,
    layers: int | None,
    experts: int | None,
    text_names: bool = False,
    with_towers: bool = False,
    is_pooling: bool = False,
) -> EngineModules:
    """The modules of a base model in an engine.

    weights  module -> [out, in] by the names of its checkpoint; None for a packed weight, whose shape is not known
    """
    by_name = {
        model_class.rules.renamed(f"{module}.weight").removesuffix(".weight"): shape
        for module, shape in weights.items()
    }
    if is_pooling or model_class.is_pooling:
        for name, shape in list(by_name.items()):
            by_name.setdefault(f"model.{name}", shape)  # `AutoModel` stores its modules without it
    # The experts of a layer are one module in the engine, however the checkpoint stores them.
    for name in [name for name in by_name if ".experts" in name]:
        by_name.setdefault(name.partition(".experts")[0] + ".experts", None)
    return EngineModules(
        model_class=model_class,
        by_name=by_name,
        patterns=frozenset(map(module_name_pattern, by_name)),
        layers=layers,
        experts=experts,
        text_names=text_names,
        with_towers=with_towers,
        is_pooling=is_pooling or model_class.is_pooling,
    )


def module_name_pattern(name: str) -> str:
    """A module's name with `#` for its numbers."""
    return _NUMBERS.sub(NUMBER, name)
