"""What a version of vLLM does with adapters, for each model class: which names it knows, and which modules it has.

vLLM renames an adapter's tensors by its model class, and looks them up among the modules of that class. It ignores a
module that it does not find, without a word. So names alone decide whether an adapter has an effect.
source   vLLM 0.32 lora/utils.py, lora/lora_model.py, lora/model_manager.py; model_executor/models/utils.py
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import regex

NUMBER = "#"
"""What stands for any number in a pattern of module names."""

# Ends of architectures that vLLM derives from another class of the same model.
# source   vLLM 0.32 config/model.py _SUFFIX_TO_DEFAULTS, model_executor/models/registry.py _normalize_arch
_SUFFIXES = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel",
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip
_GENERATES = frozenset(_SUFFIXES[:4])
_CLASSIFIES = ("Classification", "ClassificationModel")


@dataclass(frozen=True, slots=True)
class NameRules:
    """How a model class renames tensors: by expressions, parts, beginnings and ends, in this order."""

    expressions: tuple[tuple["regex.Pattern[str]", str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    beginnings: tuple[tuple[str, str], ...] = ()
    ends: tuple[tuple[str, str], ...] = ()

    def renamed(self, name: str) -> str:
        """The tensor's name in the engine."""
        for expression, new in self.expressions:
            name = expression.sub(new, name)
        for part, new in self.parts:
            name = name.replace(part, new, 1)
        for beginning, new in self.beginnings:
            if name.startswith(beginning):
                name = new + name[len(beginning) :]
        for end, new in self.ends:
            if name.endswith(end):
                name = new.join(name.rsplit(end, 1))
        return name


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One model class of an engine.

    packed           module -> the modules that adapters know in its place, such as qkv_proj -> q_proj, k_proj, v_proj
    modules          patterns of the modules that take adapters, with `#` for numbers; None: not known
    uncalled         patterns, or their ends, of modules that the model reads or runs past what adapters change
    taken            last parts of module names that the engine accepts; it refuses a file with any other
    expert_parts     the parts of one expert, such as gate_proj, in a class whose experts are modules of their own
    has_3d_experts   experts are one module with PEFT's `target_parameters`: lora_A is [rank * experts, in]
    language         where the language model is in a multimodal class, such as `language_model`; "" for others
    towers           where vision and audio towers and their connectors are
    takes_towers     the engine can be told to take adapters on them (`--enable-tower-connector-lora`)
    skipped          beginnings of names that the engine passes over
    is_pooling       its modules are also found without `model.`, as `AutoModel` names them
    """

    name: str
    rules: NameRules = NameRules()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modules: frozenset[str] | None = None
    uncalled: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    expert_parts: tuple[str, ...] = ()
    has_3d_experts: bool = False
    language: str = ""
    towers: tuple[str, ...] = ()
    takes_towers: bool = False
    skipped: tuple[str, ...] = ()
    is_pooling: bool = False


SCORE = "score"


def with_score(model_class: ModelClass) -> ModelClass:
    """The class that the engine derives from a language model's for its classifiers: with a linear head `score`.

    source  vLLM 0.32 model_executor/models/adapters.py as_seq_cls_model
    """
    modules = model_class.modules
    return replace(
        model_class,
        modules=None if modules is None else modules | {SCORE},
        taken=model_class.taken | {SCORE} if model_class.taken else model_class.taken,
    )


def without_towers(model_class: ModelClass) -> ModelClass:
    """The class in an engine that takes no media: it builds no towers, and refuses a file with names of theirs alone.

    source  vLLM 0.32 model_executor/models/interfaces.py _mark_tower_model, lora/lora_model.py check_unexpected_modules
    """
    modules = model_class.modules or frozenset()
    kept = frozenset(module for module in modules if not module.startswith(model_class.towers))
    gone = _last_parts(modules - kept, model_class.packed) - _last_parts(kept, model_class.packed)
    return replace(model_class, modules=kept or model_class.modules, taken=model_class.taken - gone, takes_towers=False)


def _last_parts(modules: Iterable[str], packed: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """The last parts of module names, with the names of adapters for packed ones."""
    lasts = {module.rpartition(".")[2] for module in modules}
    return frozenset(part for last in lasts for part in packed.get(last, (last,)))


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The model classes of one version of vLLM.

    classes      architecture, as in a base model's config, -> class
    text_names   a multimodal class also finds its language model under the names of the text model alone
    heads        of which models `modules_to_save` may hold the classification head: those that score, or all
    """

    version: str
    classes: Mapping[str, ModelClass]
    text_names: bool = False
    all_heads: bool = False

    def find(self, architectures: Iterable[str]) -> ModelClass | None:
        """The class that serves a model of these architectures; None if it is not in the table."""
        names = list(architectures)
        for name in names:
            if (found := self._by_name(name)) is not None:
                return found
        return None

    def _by_name(self, architecture: str) -> ModelClass | None:
        """The class of an architecture, or of the one from which the engine derives it."""
        if architecture in self.classes:
            return self.classes[architecture]
        suffix = next((end for end in _SUFFIXES if architecture.endswith(end)), None)
        if suffix is None:
            return None
        stem = architecture.removesuffix(suffix)
        return next((self.classes[stem + end] for end in _SUFFIXES if stem + end in self.classes), None)


def is_pooling(architectures: Iterable[str]) -> bool:
    """Whether the engine serves a model of these architectures for embeddings, scores or classes by default."""
    for name in architectures:
        suffix = next((end for end in _SUFFIXES if name.endswith(end)), None)
        return suffix is not None and suffix not in _GENERATES
    return False


def is_classifier(architectures: Iterable[str]) -> bool:
    """Whether a model of these architectures has a classification head."""
    return any(name.endswith(_CLASSIFIES) for name in architectures)


def model_table(raw: Mapping[str, Any]) -> ModelTable:
    """The table of a data file, as `tests/tools/vllm_classes.py` writes it."""
    classes = {name: _model_class(name, entry) for name, entry in raw["classes"].items()}
    return ModelTable(
        version=raw["version"],
        classes={architecture: classes[name] for architecture, name in raw["architectures"].items()},
        text_names=raw["text_names"],
        all_heads=raw["all_heads"],
    )


def _model_class(name: str, entry: Mapping[str, Any]) -> ModelClass:
    """One class of the data file."""
    renames = entry.get("renames", {})
    packed = {module: tuple(parts) for module, parts in entry.get("packed", {}).items()}
    modules = entry.get("modules")
    parts = tuple(entry.get("expert_parts", ()))
    return ModelClass(
        name=name,
        rules=NameRules(
            expressions=tuple((regex.compile(old), new) for old, new in renames.get("expressions", ())),
            parts=_as_text_pairs(renames.get("parts", ())),
            beginnings=_as_text_pairs(renames.get("beginnings", ())),
            ends=_as_text_pairs(renames.get("ends", ())),
        ),
        packed=packed,
        modules=None if modules is None else frozenset(modules),
        uncalled=frozenset(entry.get("uncalled", ())),
        taken=frozenset(part for last in entry.get("linear", ()) for part in packed.get(last, (last,))),
        expert_parts=parts,
        has_3d_experts=entry.get("has_3d_experts", False),
        language=entry.get("language", ""),
        towers=tuple(entry.get("towers", ())),
        takes_towers=entry.get("takes_towers", False),
        skipped=tuple(entry.get("skipped", ())),
        is_pooling=entry.get("is_pooling", False),
    )


def _as_text_pairs(rows: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    """Rows of two texts as tuples."""
    return tuple((old, new) for old, new in rows)
