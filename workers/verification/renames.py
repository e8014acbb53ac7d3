"""Renames of an adapter's modules that leave its weights as they are, into names that an engine finds.

Trainers name the same module in several ways: by the class through which they loaded the base model, by wrappers that
were left on it, or with a prefix twice. Whether a name is right is the verification's answer alone.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.core.errors import SourceError
from workers.verification.adapter_files import WEIGHTS_NAME, adapter_file_names, folder_description
from workers.verification.base_model import NO_ENGINE, EngineFacts
from workers.verification.lora_tensors import PREFIX, unwrapped_name
from workers.verification.manifest import AdapterDescription, AdapterRules, check_adapter
from workers.verification.patterns import MatchTime, SlowExpressionError
from workers.verification.peft import CONFIG_NAME, LoraConfig, invalid_config, parse_config
from workers.verification.tensors import TensorHeader
from workers.verification.verify import read_base_model, read_tensors

# Where classes have their language model.
LANGUAGE_PREFIXES = {
    "text": "model.",  # AutoModelForCausalLM
    "wrapped": "model.language_model.",  # AutoModelForImageTextToText
    "idefics": "model.text_model.",  # Idefics3, SmolVLM
    "outer": "language_model.model.",  # transformers 4
    "automodel": "",
}

_ROOT = re.compile(r"(?:model\.language_model\.|model\.text_model\.|language_model\.model\.|model\.)?(?=layers\.\d)")
_FULL_NAME = re.compile(r"(?:model|language_model|decoder|encoder)\.[\w.\-]+")
_EMBEDDINGS = re.compile(
    r"(?:model\.language_model\.|model\.text_model\.|language_model\.model\.|model\.)(?=embed_tokens\.)"
)
_ADAPTER_NAME = re.compile(r"(\.lora_(?:embedding_)?[AB])\.(?!weight$)(\w+)(?=\.weight$|$)")
# Megatron's modules whose weights are those of one module in Hugging Face's names, row by row.
# source   Megatron-Core transformer_layer.py, attention.py, mlp.py; Megatron-Bridge's canonical LoRA for q, k, v
_MEGATRON_LAYER = re.compile(r"(?:(?:model|language_model|decoder|encoder|transformer)\.)*layers\.(?=\d+\.)")
_MEGATRON = {
    "self_attention.linear_proj": "self_attn.o_proj", "self_attention.linear_q": "self_attn.q_proj",
    "self_attention.linear_k": "self_attn.k_proj", "self_attention.linear_v": "self_attn.v_proj",
    "mlp.linear_fc2": "mlp.down_proj", "mlp.linear_fc1_gate": "mlp.gate_proj", "mlp.linear_fc1_up": "mlp.up_proj",
}  # fmt: skip
_MEGATRON_ENDS = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in _MEGATRON.items()}
_MEGATRON_PACKED = re.compile(r"\.linear_(?:qkv|fc1)(?=\.)")
_TENSOR_END = re.compile(r"\.(?:lora_(?:embedding_)?[AB](?:\.weight)?|base_layer\.weight|weight)$")


@dataclass(frozen=True, slots=True)
class RenamePlan:
    """New names of an adapter's tensors.

    names      tensor -> its new name, of every tensor
    config     the new adapter_config.json
    steps      what was done, one sentence each; empty if the names are right as they are
    described  the renamed adapter
    """

    names: Mapping[str, str]
    config: bytes
    steps: tuple[str, ...]
    described: AdapterDescription


def plan_renames(
    config: bytes,
    tensors: Mapping[str, TensorHeader],
    rules: AdapterRules,
    *,
    language: str | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> RenamePlan:
    """The renames after which the adapter keeps the rules, and the engine ignores none of its modules.

    rules     of the base model that will serve it; without its modules only wrappers and doubled prefixes are removed
    language  whose names the language model gets, a key of LANGUAGE_PREFIXES; None: they are tried in turn
    clock     CPU time of this thread, which ends expressions of the config that take too long
    raises    SourceError if no renames mend it: the fault that is left
    """
    plain, steps = _plain_names(tensors)
    places = [LANGUAGE_PREFIXES[language]] if language else [None, *(LANGUAGE_PREFIXES.values() if rules.base else ())]
    fault: SourceError | None = None
    for place in places:
        names = {name: _moved_tensor_name(_hugging_face_name(new), place) for name, new in plain.items()}
        if len(set(names.values())) < len(names):
            continue  # two tensors of one name: not the same module in another spelling
        try:
            modules = {_tensor_module(plain[name]): _tensor_module(new) for name, new in names.items()}
            new_config = _renamed_config(config, modules, place, MatchTime(clock))
            described = check_adapter(new_config, {new: tensors[name] for name, new in names.items()}, rules)
            _check_language_served(described)
        except SourceError as exc:
            if fault is None or fault.code == "modules_unmatched":
                fault = exc  # names that the base model has show what else is wrong
            continue
        moved = sum(plain[name] != new for name, new in names.items())
        moves = (f"the language model is renamed, {moved} tensors: {_rename_example(plain, names)}",) if moved else ()
        return RenamePlan(names, new_config, (*steps, *moves), described)
    if fault is None:
        raise SourceError("tensor_unexpected", "two tensors get one name; accepted are other names, or none to move to")
    raise fault


def _check_language_served(described: AdapterDescription) -> None:
    """Raises SourceError `module_unknown` if the engine would ignore modules of the language model.

    Engines ignore towers under any name.
    """
    ignored = [module for module in described.verdict.ignored if _ROOT.match(module) or _EMBEDDINGS.match(f"{module}.")]
    if ignored:
        message = f"the engine ignores {len(ignored)} of its modules ({ignored[0]}, ...)"
        raise SourceError("module_unknown", f"{message}; no safe rename leads to modules of the base model")


def _plain_names(tensors: Mapping[str, TensorHeader]) -> tuple[dict[str, str], list[str]]:
    """Tensor -> its name with one prefix, without wrappers and adapter name; and what was done.

    Raises SourceError `tensor_unexpected` for tensors of several adapters, or of one name.
    """
    names = {name: name for name in tensors}
    steps = []
    for what, rename in (
        (f"tensors have the prefix {PREFIX} once, and no names of wrappers", unwrapped_name),
        ("the adapter's name was removed from the tensors' names", _without_adapter_name),
    ):
        renamed = {name: rename(new) for name, new in names.items()}
        if count := sum(names[name] != new for name, new in renamed.items()):
            steps.append(f"{what}, {count} tensors: {_rename_example(names, renamed)}")
        names = renamed
    adapters = {match[2] for name in tensors if (match := _ADAPTER_NAME.search(name))}
    if len(adapters) > 1 or len(set(names.values())) < len(names):
        message = f"tensors of several adapters in one file ({', '.join(sorted(adapters)[:5]) or 'with equal names'})"
        raise SourceError("tensor_unexpected", f"{message}; accepted is one: save it alone, by selected_adapters")
    return names, steps


def _without_adapter_name(name: str) -> str:
    """`lora_A.default.weight` as `lora_A.weight`."""
    return _ADAPTER_NAME.sub(r"\1", name)


def _hugging_face_name(name: str) -> str:
    """A tensor of Megatron's name under Hugging Face's; other names as they are.

    Raises SourceError `tensor_unexpected` for a module that holds several: its rows are in another order.
    """
    if packed := _MEGATRON_PACKED.search(name):
        message = f"tensor {name!r}: Megatron's {packed[0].strip('.')} holds several modules, its rows in another order"
        advice = "export it with Megatron-Bridge's AutoBridge.export_adapter_ckpt, or train its canonical LoRA"
        raise SourceError("tensor_unexpected", f"{message}; accepted are single modules: {advice}")
    module, end = _tensor_module(name), name[len(PREFIX) + len(_tensor_module(name)) :]
    for megatron, hugging_face in _MEGATRON.items():
        if module.endswith(f".{megatron}") and (layer := _MEGATRON_LAYER.match(module)):
            number = module[layer.end() :].removesuffix(megatron)
            return f"{PREFIX}model.layers.{number}{hugging_face}{end}"
    return name


def _moved_tensor_name(name: str, place: str | None) -> str:
    """A tensor of the language model's layers or embeddings in another place; other modules keep their names.

    None moves nothing.
    """
    module = name.removeprefix(PREFIX)
    for part in (_ROOT, _EMBEDDINGS):
        if place is not None and (match := part.match(module)):
            return PREFIX + place + module[match.end() :]
    return name


def _rename_example(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The first change, as `old -> new`."""
    return next(f"{old[name]} -> {new[name]}" for name in old if old[name] != new[name])


# --- the config ---------------------------------------------------------------------------------------------------


def _renamed_config(config: bytes, modules: Mapping[str, str], place: str | None, match_time: MatchTime) -> bytes:
    """The config for the new names: it targets them, and gives each module the rank and scale of its old name.

    modules  module -> its new name
    raises   SourceError `adapter_config_invalid` if a pattern would match other modules than before
    """
    parsed = parse_config(config)
    content: dict[str, Any] = json.loads(config)
    for field in ("rank_pattern", "alpha_pattern"):
        if content.get(field):
            content[field] = {_moved_key(key, place): value for key, value in content[field].items()}
    renamed = parse_config(json.dumps(content).encode())
    for module, new in modules.items():
        if _matching_entries(parsed, module, match_time) != _matching_entries(renamed, new, match_time):
            message = f"rank_pattern or alpha_pattern has expressions that match only one of {module} and {new}"
            raise invalid_config(f"{message}; accepted are expressions for both")
    if any(renamed.is_targeted(new, match_time) is False for new in modules.values()):
        content["target_modules"] = sorted(set(modules.values()))
    return json.dumps(content, indent=2).encode()


def _moved_key(key: str, place: str | None) -> str:
    """A key of a pattern field: renamed if it is a module's full name, as it is if it is an expression or an end."""
    if not _FULL_NAME.fullmatch(key):
        return _MEGATRON_ENDS.get(key, key)
    return _moved_tensor_name(_hugging_face_name(PREFIX + key), place).removeprefix(PREFIX)


def _matching_entries(config: LoraConfig, module: str, match_time: MatchTime) -> list[int | None]:
    """The places of the entries of `rank_pattern` and `alpha_pattern` that hold for a module. Raises SourceError."""
    try:
        return [
            next((place for place, pattern in enumerate(patterns) if pattern.end.matches(module, match_time)), None)
            for patterns in (config.ranks, config.alphas)
        ]
    except SlowExpressionError as exc:
        raise invalid_config(f"an expression of rank_pattern or alpha_pattern takes too long on {exc}") from exc


def _tensor_module(name: str) -> str:
    """The module of a tensor."""
    return _TENSOR_END.sub("", name.removeprefix(PREFIX))


_ALIGNMENT = 8  # of a header's length, as safetensors writes it


def rename_modules(
    folder: Path, into: Path, *, base: Path | None, facts: EngineFacts = NO_ENGINE, language: str | None = None
) -> RenamePlan:
    """Write the adapter of a folder into a new one, under names that its base model has; returns what was done.

    base      folder of the base model that will serve it, with its config and weights; None: it is not looked at
    facts     what is known of the engine that will serve it
    language  whose names its language model gets; None: those that the engine finds
    raises    SourceError, and nothing is written; FileExistsError if `into` has files; OSError
    """
    entries = list(folder.iterdir())
    names, folders = [path.name for path in entries], [path.name for path in entries if path.is_dir()]
    if not adapter_file_names(names, allow_pickle=False, folders=folders):
        raise SourceError("adapter_incomplete", f"{CONFIG_NAME} missing, {folder_description(names, folders)}")
    if into.exists() and any(into.iterdir()):
        raise FileExistsError(f"{into} is not empty; name a new folder")
    base_model = read_base_model(base, facts) if base else None
    if base and base_model is None:
        raise SourceError("modules_unmatched", f"{base} has no weights to compare with; accepted is a model's folder")
    rules = AdapterRules(max_rank=None, base_names=frozenset(), base_check="off", base=base_model)
    config = (folder / CONFIG_NAME).read_bytes()
    plan = plan_renames(config, read_tensors(folder / WEIGHTS_NAME), rules, language=language)
    into.mkdir(parents=True, exist_ok=True)
    _write_renamed(folder / WEIGHTS_NAME, into / WEIGHTS_NAME, plan.names)
    (into / CONFIG_NAME).write_bytes(plan.config)
    return plan


def _write_renamed(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copy a valid safetensors file with renamed tensors; the data behind the header is the same. Raises OSError."""
    with source.open("rb") as old:
        length = int.from_bytes(old.read(8), "little")
        header = json.loads(old.read(length))
        renamed = {names.get(name, name): entry for name, entry in header.items()}  # `__metadata__` keeps its name
        raw = json.dumps(renamed, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % _ALIGNMENT)
        with target.open("xb") as new:
            new.write(len(raw).to_bytes(8, "little") + raw)
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
