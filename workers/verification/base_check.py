"""Checks of an adapter's modules against the base model, and against what its engine does with them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.core.errors import SourceError
from workers.verification.base_model import BaseModel, ModuleShapes
from workers.verification.engine_modules import EngineModules, ModuleFate, module_name_pattern
from workers.verification.lora_tensors import PREFIX, RENAME_HINT, AdapterTensors, LoraPair, unwrapped_name
from workers.verification.peft import EMBEDDINGS
from workers.verification.tensors import Shape
from workers.wire import ProbeOutcome

BaseModelCheck = Literal["name", "exact", "off"]

# Endings of names of copies with the model's own weights, stored otherwise: formats, widths, methods and their options.
_COPY = re.compile(
    r"[-_.](?:hf|unsloth|mlx|gguf|exl[23]|onnx|ov|openvino|ao|torchao|compressed|quantized"
    r"|bf16|fp?(?:16|32)|fp8(?:[-_](?:kv|block|tensor))?|(?:nv|mx)fp[48](?:a16)?|nf4|u?int[1-8](?:wo)?|w\da\d+"
    r"|q\d(?:[-_](?:[01]|k))?(?:[-_](?:xs|s|m|l|xl))?|(?:\d\.)?\d(?:bpw|bit)(?:gs\d+)?|g(?:roup)?s?\d+|\d+g|h[68]"
    r"|bnb|awq|gptq|gptqmodel|marlin|hqq|dwq(?:[-_]\d{6})?|aqlm|eetq|autoround|auto[-_]round|inc|sym|asym"
    r"|dynamic|static)$"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(?:.+--)?(?P<name>.+)")
_VERSION = re.compile(r"\d{1,4}")
_FRAMEWORKS = frozenset(("transformers", "pytorch", "keras", "safetensors"))


def is_same_base(declared: str, names: Iterable[str], check: BaseModelCheck) -> bool:
    """Whether an adapter's declared base model is one of these names; always with `check` "off" or none declared.

    `name` compares the model's own name case-insensitively, without owner, folders and what is said of a copy's
    storage. A relative folder, such as `.`, names no model.
    """
    if check == "off" or not declared.strip():
        return True
    if check == "exact":
        return declared in set(names)
    if not _path_parts(declared):
        return True
    known = {_plain_model_name(_last_part(_path_parts(name))) for name in names}
    return not known.isdisjoint(_model_names(declared))


def _model_names(name: str) -> set[str]:
    """The model's own name: of a hub name, a folder of any system, or a cache of Hugging Face, ModelScope or Kaggle.

    Kaggle's `model/transformers/variation/1` is two names: the variation's, and that of both.
    """
    parts = _path_parts(name)
    if len(parts) > 1 and _VERSION.fullmatch(parts[-1]):
        parts = parts[:-1]
        if len(parts) > 2 and parts[-2].lower() in _FRAMEWORKS:
            return {_plain_model_name(parts[-1]), _plain_model_name(f"{parts[-3]}-{parts[-1]}")}
    return {_plain_model_name(_last_part(parts))}


def _path_parts(name: str) -> list[str]:
    """The parts of a path of any system, without Hugging Face's `snapshots/<commit>`."""
    parts = [part for part in map(str.strip, re.split(r"[/\\]+", name)) if part.strip(".")]
    if len(parts) > 2 and parts[-2] == "snapshots" and (_COMMIT.fullmatch(parts[-1]) or _CACHED.fullmatch(parts[-3])):
        return parts[:-2]
    return parts


def _last_part(parts: list[str]) -> str:
    """The last part of a path; of a folder in Hugging Face's cache, `models--org--name`, the name."""
    last = parts[-1] if parts else ""
    cached = _CACHED.fullmatch(last)
    return cached["name"] if cached else last


def _plain_model_name(name: str) -> str:
    """A model's name in lower case, without the endings of copies that are stored otherwise."""
    plain = name.lower().replace("___", ".")  # ModelScope's folders: Qwen2___5
    while (shorter := _COPY.sub("", plain)) != plain and shorter:
        plain = shorter
    return plain


_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARTS = frozenset(["q_proj", "qkv_proj"])
_SHOWN = 3
_MEASURED_IDLE = "an adapter on such a module was seen to change no answer of this engine"


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """What becomes of an adapter's modules in the engine.

    ignored   modules that the engine takes and does not use, sorted
    uncalled  those of them that it has, and never runs
    measured  those of all modules of which probes in this very engine have said what it does with them
    why       why they are ignored, and what the table does not say, as sentences
    notes     sentences for operators: what could not be compared
    """

    ignored: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    measured: frozenset[str] = frozenset()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_COMPARED = ModuleVerdict()


def check_against_base(tensors: AdapterTensors, base: BaseModel, *, takes_unmatched: bool = False) -> ModuleVerdict:
    """The verdict on an adapter's modules. Raises SourceError if the engine refuses it, or answers wrongly with it.

    takes_unmatched  describe an adapter of which nothing takes effect, in place of refusing it
    """
    _check_heads(tensors, base)
    if base.engine is not None:
        return _check_in_engine(tensors, base, base.engine, takes_unmatched=takes_unmatched)
    return _check_by_names(tensors, base, takes_unmatched=takes_unmatched)


def measured_outcomes(pairs: Mapping[str, LoraPair], base: BaseModel) -> dict[str, ProbeOutcome]:
    """module -> what the engine was seen to do with its kind; without modules of which nothing was seen."""
    found = {
        module: base.measured.outcomes.get(module_name_pattern(module))
        for module, pair in pairs.items()
        if not pair.is_stacked
    }
    return {module: outcome for module, outcome in found.items() if outcome is not None and outcome != "unknown"}


def embeddings_taken(base: BaseModel | None) -> frozenset[str] | None:
    """Those of EMBEDDINGS on which the engine takes adapters; None if that is not known."""
    if base is None or base.unknown_class:
        return None
    found = {name: module for module in base.shapes if (name := module.rpartition(".")[2]) in EMBEDDINGS}
    if base.engine is None:
        works = {
            name for name, module in found.items() if base.measured.outcomes.get(module_name_pattern(module)) == "works"
        }
        return frozenset(found if base.takes_embeddings else works)
    engine = base.engine
    pairs = {name: LoraPair((1, 1), (1, 1), is_embedding=name == "embed_tokens") for name in found}
    measured = measured_outcomes({module: pairs[name] for name, module in found.items()}, base)
    return frozenset(
        name
        for name, module in found.items()
        if _measured_fate(engine.fate(module, pairs[name]), measured.get(module)).fate == "served"
    )


def with_single_ranks(pairs: Mapping[str, LoraPair], base: BaseModel | None) -> dict[str, int]:
    """module -> its rank; of stacked experts the rank of one. Raises SourceError if it is no whole number."""
    experts = base.engine.experts if base is not None and base.engine is not None else None
    ranks = {}
    for module, pair in pairs.items():
        if pair.is_stacked and experts is not None:
            if pair.rank % experts:
                message = f"module {module}: lora_A {list(pair.a)} is no multiple of the base model's {experts} experts"
                raise SourceError("rank_mismatch", f"{message}; accepted is [rank * experts, in], as PEFT stores them")
            ranks[module] = pair.rank // experts
        else:
            ranks[module] = pair.rank
    return ranks


def _check_heads(tensors: AdapterTensors, base: BaseModel) -> None:
    """Raises SourceError if the adapter has a classification head, and the engine takes none."""
    if tensors.heads and not base.takes_heads:
        message = f"its classification head {' and '.join(sorted(tensors.heads))} (modules_to_save) has no place in the"
        accepted = "accepted are such adapters where the base model is served as a classifier"
        raise SourceError("modules_to_save_unsupported", f"{message} engine's model; {accepted}")


# --- by the engine's own table ------------------------------------------------------------------------------------


def _measured_fate(fate: ModuleFate, outcome: ProbeOutcome | None) -> ModuleFate:
    """A module's fate by what the engine was seen to do with its kind, else as its table says."""
    if outcome == "works":
        return ModuleFate("served", shape=fate.shape)
    if outcome == "no effect" and fate.fate != "ignored":
        return ModuleFate("ignored", _MEASURED_IDLE, is_uncalled=True)
    if outcome == "refused" and fate.fate != "refused":
        return ModuleFate("refused", "this engine was seen to refuse an adapter on such a module")
    return fate


def _check_in_engine(
    tensors: AdapterTensors, base: BaseModel, engine: EngineModules, *, takes_unmatched: bool
) -> ModuleVerdict:
    """The verdict by what was measured, and by the engine's model class. Raises SourceError."""
    measured = measured_outcomes(tensors.pairs, base)
    fates = {
        module: _measured_fate(engine.fate(module, pair), measured.get(module))
        for module, pair in tensors.pairs.items()
    }
    by_fate: dict[str, list[str]] = {}
    for module, fate in fates.items():
        by_fate.setdefault(fate.fate, []).append(module)
    ignored = by_fate.get("ignored", [])
    if refused := by_fate.get("refused"):
        _raise_refused(refused, fates, base)
    if len(ignored) == len(fates) and not takes_unmatched:
        reason = fates[ignored[0]].reason
        message = f"none of its {len(fates)} modules ({ignored[0]}, ...) takes effect: {reason}"
        if all(fates[module].is_uncalled for module in ignored):
            raise SourceError("modules_unmatched", f"{message}; accepted are adapters on other layers, too")
        raise SourceError("modules_unmatched", f"{message}{_naming_hint(ignored, base, engine)}")
    names = base.module_shapes()
    absent = [module for module in ignored if _is_absent(module, fates[module], base, names)]
    if absent:
        message = f"module {absent[0]} ({len(absent)} in all) is not in the base model: {fates[absent[0]].reason}"
        raise SourceError("module_unknown", f"{message}; accepted are the base model's own layers")
    _check_stacked_halves(tensors.pairs)
    compared = _check_shapes(tensors, base, fates)
    notes = _uncompared_notes(len(fates) - len(ignored), compared, base)
    why = _ignored_notes(ignored, fates)
    if unknown := by_fate.get("unknown"):
        why = (*why, f"whether the engine uses {_first_names(unknown)} is not in its table")
    uncalled = tuple(sorted(module for module in ignored if fates[module].is_uncalled))
    return ModuleVerdict(tuple(sorted(ignored)), uncalled, frozenset(measured), why, tuple(notes))


def _is_absent(module: str, fate: ModuleFate, base: BaseModel, names: ModuleShapes) -> bool:
    """Whether an ignored module is of another model: neither engine nor checkpoint have it under any of its names."""
    is_expert = base.has_experts and ".experts" in module
    return fate.is_missing and not is_expert and names.find(module) is None


def _raise_refused(refused: Sequence[str], fates: Mapping[str, ModuleFate], base: BaseModel) -> None:
    """Raise the SourceError for modules with which the engine refuses the file."""
    module = refused[0]
    last = module.rpartition(".")[2]
    message = f"module {module} ({len(refused)} in all): {fates[module].reason}"
    if last in ("embed_tokens", "lm_head"):
        message = f"module {module}: the engine takes no adapter on the embeddings of this architecture"
        raise SourceError("module_unsupported", f"{message}; accepted are its linear layers")
    if ".experts" in module:
        raise SourceError("module_unsupported", f"{message}; train it without experts, or in that form")
    hint = _packing_hint(module, base.module_shapes()) or "; leave it out of target_modules, as 'all-linear' does not"
    raise SourceError("module_unknown", f"{message}{hint}")


def _naming_hint(modules: Sequence[str], base: BaseModel, engine: EngineModules) -> str:
    """Which trainer names modules so, and what to do."""
    model_class = engine.model_class
    first = modules[0]
    example = _example_module(base)
    accepted = f"; accepted are modules such as {example}" if example else ""
    if model_class.language and first.startswith(("model.layers.", "model.model.layers.", "model.embed_tokens")):
        return (
            ". So names the text model alone (AutoModelForCausalLM, Unsloth's FastLanguageModel), and the engine's"
            f" {model_class.name} is multimodal: train through AutoModelForImageTextToText (Unsloth's FastVisionModel),"
            f" or rename its modules{RENAME_HINT}{accepted}"
        )
    if first.startswith(("layers.", "encoder.", "h.")):
        hint = "train through AutoModelForCausalLM, or rename its modules"
        return f". So names AutoModel, which trains embeddings: {hint}{RENAME_HINT}{accepted}"
    if unwrapped_name(PREFIX + first) != PREFIX + first:
        return (
            f". So names a compiled or wrapped model: save it unwrapped, or rename its modules{RENAME_HINT}{accepted}"
        )
    if ".linear_" in first:
        return f". So names Megatron: export it with Megatron-Bridge, or rename its modules{RENAME_HINT}{accepted}"
    return accepted or ": it is of another model"


def _check_stacked_halves(pairs: Mapping[str, LoraPair]) -> None:
    """Raises SourceError if only one of the two matrices of stacked experts is adapted: the engine fails on it."""
    for module, pair in pairs.items():
        if not pair.is_stacked:
            continue
        runner = module.removesuffix(".base_layer")
        if runner not in pairs or f"{runner}.base_layer" not in pairs:
            message = f"module {module}: of these experts only one of gate_up_proj and down_proj is adapted"
            raise SourceError(
                "module_unsupported", f"{message}; the engine takes both (target_parameters) or none; accepted are both"
            )


def _check_shapes(tensors: AdapterTensors, base: BaseModel, fates: Mapping[str, ModuleFate]) -> int:
    """How many modules were compared with the base model's shapes. Raises SourceError for one that differs."""
    compared = 0
    shapes = base.module_shapes()
    for module, pair in tensors.pairs.items():
        if fates[module].fate == "ignored":
            continue
        if pair.is_stacked:
            shape = next((shape for end, shape in base.expert_shapes.items() if f".{module}".endswith(end)), None)
        else:
            shape = fates[module].shape or shapes.find(module)
        if shape is None:
            continue
        compared += 1
        check_shape(module, pair, shape)
    return compared


def check_shape(module: str, pair: LoraPair, shape: Shape) -> None:
    """Raises SourceError if a pair is for weights of another shape."""
    if pair.base_shape == shape:
        return
    message = f"module {module} is {list(shape)} in the base model, the adapter is for {list(pair.base_shape)}"
    if pair.is_stacked and pair.base_shape == shape[::-1]:
        message += ": PEFT before 0.19 stored experts the other way round, train it with a newer one"
    raise SourceError("shape_mismatch", f"{message}; accepted are adapters of the base model's own shapes")


def _ignored_notes(ignored: Sequence[str], fates: Mapping[str, ModuleFate]) -> tuple[str, ...]:
    """Notes on ignored modules, one for each reason."""
    by_reason: dict[str, list[str]] = {}
    for module in ignored:
        reason = fates[module].reason.partition(" module ")[0]
        by_reason.setdefault(reason, []).append(module)
    return tuple(
        f"{len(modules)} of its {len(fates)} modules are ignored ({_first_names(modules)}): {fates[modules[0]].reason}"
        for modules in by_reason.values()
    )


def _uncompared_notes(served: int, compared: int, base: BaseModel) -> list[str]:
    """The note on modules that have no shape to be compared with."""
    if compared >= served:
        return []
    because = f"its weights are packed ({base.quantization})" if base.quantization else "its files are not here"
    return [f"{served - compared} of {served} modules were not compared with the base model's shapes: {because}"]


def _first_names(modules: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(modules) - _SHOWN
    return ", ".join(sorted(modules)[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


# --- without a table ----------------------------------------------------------------------------------------------


def _check_by_names(tensors: AdapterTensors, base: BaseModel, *, takes_unmatched: bool) -> ModuleVerdict:
    """The verdict by what was measured, and by the names in the base model's checkpoint. Raises SourceError."""
    modules = tensors.pairs
    names = base.module_shapes()
    measured = measured_outcomes(modules, base)
    idle = tuple(sorted(module for module, outcome in measured.items() if outcome == "no effect"))
    if len(idle) == len(modules) and not takes_unmatched:
        message = f"none of its {len(modules)} modules ({idle[0]}, ...) takes effect: {_MEASURED_IDLE}"
        raise SourceError("modules_unmatched", f"{message}; accepted are adapters on other layers, too")
    unknown = [
        module
        for module in modules
        if names.find(module) is None and module not in measured and not (base.has_experts and ".experts" in module)
    ]
    stacked = [module for module, pair in modules.items() if pair.is_stacked]
    if base.unknown_class and stacked:
        message = (
            f"module {stacked[0]}: PEFT's target_parameters stores all experts as one module, and the engine takes"
        )
        accepted = "accepted are adapters without experts"
        raise SourceError("module_unsupported", f"{message} that for model classes of its table alone; {accepted}")
    if base.unknown_class:
        unknown = _unknown_anywhere(unknown, modules, base)
    if len(unknown) == len(modules):
        hint = f"accepted are modules such as {_example_module(base)}"
        message = f"none of its {len(modules)} modules ({unknown[0]}, ...) is in the base model; {hint}"
        raise SourceError("modules_unmatched", message)
    if unknown:
        hint = _packing_hint(unknown[0], names) or "; accepted are the base model's own layers"
        raise SourceError(
            "module_unknown", f"module {unknown[0]} ({len(unknown)} in all) is not in the base model{hint}"
        )
    for module, pair in modules.items():
        takes = base.takes_embeddings or base.unknown_class or measured.get(module) == "works"
        if module.rpartition(".")[2] in EMBEDDINGS and not takes:
            message = f"module {module}: the engine takes no adapter on the embeddings of this architecture"
            raise SourceError("module_unsupported", f"{message}; accepted are its linear layers")
        if (shape := names.find(module)) is not None:
            check_shape(module, pair, shape)
    why = []
    if idle:
        why.append(f"{len(idle)} of its {len(modules)} modules are ignored ({_first_names(idle)}): {_MEASURED_IDLE}")
    if base.unknown_class and len(measured) < len(modules):
        why.append(f"which modules of {base.unknown_class} the engine uses is not in its table")
    return ModuleVerdict(idle, idle, frozenset(measured), tuple(why))


def _unknown_anywhere(unknown: Sequence[str], modules: Collection[str], base: BaseModel) -> list[str]:
    """Those of an adapter's modules that no engine finds; of a class without a table, so the others are asked for.

    Engines find AutoModel's names, which lack the first part. A module that the base model has in other layers alone is
    of another model.
    """
    ends = frozenset(name.partition(".")[2] for name in base.shapes)
    unknown = [module for module in unknown if module not in ends]
    if len(unknown) == len(modules):
        return unknown
    patterns = frozenset(map(module_name_pattern, (*base.shapes, *ends)))
    return [module for module in unknown if module_name_pattern(module) in patterns]


def _example_module(base: BaseModel) -> str:
    """A module name of the base model, for error messages."""
    first = next(iter(base.shapes), "")
    parts = [module for module in base.shapes if module.rpartition(".")[2] in _PARTS]
    if base.engine is None:
        return next(iter(parts), first)
    pair = LoraPair((1, 1), (1, 1))
    return next((module for module in parts if base.engine.fate(module, pair).fate == "served"), "")


def _packing_hint(module: str, names: ModuleShapes) -> str:
    """A hint for the error message if the base model packs the module's parts together, or keeps them apart."""
    parent, _, last = module.rpartition(".")
    for packed, parts in _PACKED.items():
        if last == packed and names.find(f"{parent}.{parts[0]}"):
            return f"; accepted are its parts {', '.join(parts)}, one pair each"
        if last in parts and names.find(f"{parent}.{packed}"):
            return f"; accepted is {packed}, which holds {', '.join(parts)}"
    return ""
