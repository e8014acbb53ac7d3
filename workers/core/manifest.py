"""Checks of an adapter's config and tensor headers, and its manifest: digest, rank, modules. No tensor is loaded.

An adapter is refused if an engine would refuse it, or would load it and serve it wrongly: vLLM 0.32 accepts adapters
of another base model, with more layers or without any matching module, and then serves the base model.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from workers.core.adapter_files import WEIGHTS_NAME
from workers.core.base_model import BaseModel, ModuleShapes
from workers.core.errors import SourceError
from workers.core.peft import CONFIG_NAME, MAX_CONFIG_BYTES, LoraConfig, invalid_config, parse_config
from workers.core.tensors import Shape, TensorHeader

__all__ = [
    "CONFIG_NAME",
    "MAX_CONFIG_BYTES",
    "WEIGHTS_NAME",
    "AdapterDescription",
    "AdapterRules",
    "FileEntry",
    "Manifest",
    "check_adapter",
    "digest",
    "is_same_base",
]

# PEFT writes `base_model.model.<module>.lora_A.weight`, and `<module>.lora_embedding_A` for embeddings. vLLM 0.32
# lora/utils.py parse_fine_tuned_lora_name takes nothing else, also not the adapter's name before `.weight`.
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))"
)
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>(?:.+\.)?(?:embed_tokens|lm_head))\.base_layer\.weight")
_DTYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARTS = frozenset(["q_proj", "qkv_proj"])

# Limit for rank_pattern keys times modules, a microsecond each: 4,000 modules with a key each are fine.
_MOST_MATCHES = 16_000_000

BaseModelCheck = Literal["name", "exact", "off"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an adapter: its path relative to the folder (with `/`), size, and sha256 as 64 hex digits."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A verified adapter. `rank` is the largest of its modules; `base_model` is "" if its config names none."""

    digest: str
    rank: int
    base_model: str
    size_bytes: int
    modules: int


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """An adapter by its config and tensor headers: a Manifest without digest and size."""

    rank: int
    base_model: str
    modules: int


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """The rules that adapters of this worker must keep.

    max_rank     largest rank that the engine accepts; None: any, for inspections
    base_names   names of the worker's base model
    base         the base model's modules; None if unknown: then adapters are not compared with them
    max_bytes    largest total size of an adapter's files; None: no limit
    """

    max_rank: int | None
    base_names: frozenset[str]
    base_check: BaseModelCheck = "name"
    base: BaseModel | None = None
    max_bytes: int | None = None
    allow_pickle: bool = False


def digest(files: Iterable[FileEntry]) -> str:
    """sha256 over the adapter's files, as 64 hex digits.

    The hashed bytes are compact ASCII JSON (`separators=(",", ":")`, other characters as `\\uXXXX`): one list of
    `[path, size, sha256]` lists in the order of the paths' UTF-8 bytes. Of `adapter_config.json` holding `{}` and
    `adapter_model.safetensors` holding nothing they are (without the line break)

        [["adapter_config.json",2,"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"],
        ["adapter_model.safetensors",0,"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]]

    and the digest is 2ee415dc86b41cb4ebf3b6f39ba9ea4c853fb11a59eb8eb6dc5dc2832de9815e.
    """
    ordered = sorted(files, key=lambda entry: entry.path.encode())
    rows = [[entry.path, entry.size_bytes, entry.sha256] for entry in ordered]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


def check_adapter(config: bytes, tensors: Mapping[str, TensorHeader], rules: AdapterRules) -> AdapterDescription:
    """Check an adapter against the rules and describe it; raises SourceError with the first rule that it breaks.

    config    bytes of its adapter_config.json
    tensors   of its adapter_model.safetensors, by name
    """
    lora_config = parse_config(config)
    _check_base_name(lora_config.base_model, rules)
    check_rank(lora_config.max_rank, rules)
    modules = _lora_pairs(tensors, rules.base)
    if len(lora_config.ranks) * len(modules) > _MOST_MATCHES:
        message = f"rank_pattern has {len(lora_config.ranks)} keys for {len(modules)} modules"
        raise invalid_config(f"{message}; accepted are fewer: each is held against each, here and in the engine")
    for module, pair in modules.items():
        _check_pair(module, pair, lora_config)
    if rules.base:
        _check_against_base_model(modules, rules.base)
    rank = max(pair.rank for pair in modules.values())
    check_rank(rank, rules)
    return AdapterDescription(rank, lora_config.base_model, len(modules))


def is_same_base(declared: str, names: Iterable[str], check: BaseModelCheck) -> bool:
    """Whether an adapter's declared base model is one of these names; always with `check` "off" or none declared.

    `name` compares the last path part case-insensitively, because trainers write local paths as well as hub names.
    """
    if check == "off" or not declared:
        return True
    if check == "exact":
        return declared in set(names)
    return _last_path_part(declared) in {_last_path_part(name) for name in names}


def _last_path_part(name: str) -> str:
    """The last path part of a name, in lower case."""
    return PurePosixPath(name.rstrip("/")).name.lower()


# --- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LoraPair:
    """Shapes of a module's matrices: A [rank, in], B [out, rank]; embeddings: A [rank, vocab], B [hidden, rank]."""

    a: Shape
    b: Shape
    is_embedding: bool

    @property
    def rank(self) -> int:
        """The rank of the pair."""
        return self.a[0]

    @property
    def base_shape(self) -> Shape:
        """The shape of the base model's weight to which this pair applies."""
        return (self.a[1], self.b[0]) if self.is_embedding else (self.b[0], self.a[1])


def _lora_pairs(tensors: Mapping[str, TensorHeader], base: BaseModel | None) -> dict[str, _LoraPair]:
    """module -> shapes of its lora_A and lora_B. Raises SourceError for tensors that are no valid part of a LoRA."""
    shapes_by_module: dict[str, dict[str, Shape]] = {}
    names = base.module_shapes() if base else None
    for name, tensor in tensors.items():
        if copied := _BASE_COPY.fullmatch(name):
            _check_embedding_copy(name, copied["module"], tensor, names)
            continue
        match = _TENSOR.fullmatch(name)
        if not match:
            accepted = "accepted are <module>.lora_A.weight and <module>.lora_B.weight"
            raise SourceError("tensor_unexpected", f"tensor {name!r} is no part of a LoRA; {accepted}")
        if tensor.dtype not in _DTYPES:
            message = f"tensor {name!r} is {tensor.dtype}; accepted are {', '.join(_DTYPES)}"
            raise SourceError("dtype_unsupported", message)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            accepted = "accepted are two dimensions of 1 or more"
            raise SourceError("shape_mismatch", f"tensor {name!r} has shape {list(tensor.shape)}; {accepted}")
        module = match["module"]
        is_embedding = match["embedding"] is not None
        if is_embedding != (module.rpartition(".")[2] == "embed_tokens"):
            message = f"tensor {name!r}: embed_tokens has lora_embedding_A and _B, every other module lora_A and _B"
            raise SourceError("tensor_unexpected", message)
        shapes_by_module.setdefault(module, {})[match["embedding"] or match["half"]] = tensor.shape
    if not shapes_by_module:
        message = (
            f"{WEIGHTS_NAME} holds no LoRA tensor; accepted is at least one <module>.lora_A.weight with its lora_B"
        )
        raise SourceError("weights_empty", message)
    return {module: _pair_of(module, shapes) for module, shapes in shapes_by_module.items()}


def _pair_of(module: str, shapes: Mapping[str, Shape]) -> _LoraPair:
    """The pair of a module's matrices. Raises SourceError if one is missing."""
    if len(shapes) != 2:
        message = f"module {module} has lora_{next(iter(shapes))} alone; accepted are both lora_A and lora_B"
        raise SourceError("tensor_unpaired", message)
    return _LoraPair(shapes["A"], shapes["B"], module.rpartition(".")[2] == "embed_tokens")


def _check_embedding_copy(name: str, module: str, tensor: TensorHeader, names: ModuleShapes | None) -> None:
    """Check a copy of the base model's embeddings, which PEFT may save and engines ignore: no tokens may be added.

    Raises SourceError `shape_mismatch`; checks nothing if the base model's shapes are unknown.
    """
    shape = names.find(module) if names else None
    if shape is not None and tensor.shape != shape:
        message = f"tensor {name!r} is {list(tensor.shape)}, the base model's is {list(shape)}: tokens were added"
        raise SourceError("shape_mismatch", f"{message}; accepted are adapters for the base model's own vocabulary")


def _check_pair(module: str, pair: _LoraPair, lora_config: LoraConfig) -> None:
    """Raises SourceError if the pair's rank differs from the config's, or its module is not targeted."""
    if pair.a[0] != pair.b[1]:
        message = f"module {module}: lora_A {list(pair.a)} and lora_B {list(pair.b)} do not share a rank"
        raise SourceError("rank_mismatch", f"{message}; accepted are [rank, in] and [out, rank]")
    if pair.rank != (expected := lora_config.rank_of(module)):
        message = f"module {module}: its tensors have rank {pair.rank}, {CONFIG_NAME} says {expected}"
        raise SourceError("rank_mismatch", f"{message}; accepted are equal ones, through r or rank_pattern")
    if lora_config.is_targeted(module) is False:
        message = f"tensors of module {module}, which target_modules of {CONFIG_NAME} leaves out"
        raise SourceError("module_untargeted", f"{message}; accepted are tensors of targeted modules")


# --- against the base model ---------------------------------------------------------------------------------------


def _check_against_base_model(modules: Mapping[str, _LoraPair], base: BaseModel) -> None:
    """Raises SourceError if a module is not in the base model, or has another shape."""
    names = base.module_shapes()
    unknown = [
        module for module in modules if names.find(module) is None and not (base.has_experts and ".experts" in module)
    ]
    if len(unknown) == len(modules):
        hint = f"accepted are modules such as {_example_module(base)}"
        message = f"none of its {len(modules)} modules ({unknown[0]}, ...) is in the base model; {hint}"
        raise SourceError("modules_unmatched", message)
    if unknown:
        message = (
            f"module {unknown[0]} ({len(unknown)} in all) is not in the base model{_packing_hint(unknown[0], names)}"
        )
        raise SourceError("module_unknown", message)
    for module, pair in modules.items():
        if module.rpartition(".")[2] in ("embed_tokens", "lm_head") and not base.takes_embeddings:
            message = f"module {module}: the engine takes no adapter on the embeddings of this architecture"
            raise SourceError("module_unsupported", f"{message}; accepted are its linear layers")
        shape = names.find(module)
        if shape is not None and pair.base_shape != shape:
            message = f"module {module} is {list(shape)} in the base model, the adapter is for {list(pair.base_shape)}"
            raise SourceError("shape_mismatch", f"{message}; accepted are adapters of the base model's own shapes")


def _example_module(base: BaseModel) -> str:
    """A module name of the base model, for error messages."""
    return next((module for module in base.shapes if module.rpartition(".")[2] in _PARTS), next(iter(base.shapes)))


def _packing_hint(module: str, names: ModuleShapes) -> str:
    """A hint for the error message if the base model packs the module's parts together, or keeps them apart."""
    parent, _, last = module.rpartition(".")
    for packed, parts in _PACKED.items():
        if last == packed and names.find(f"{parent}.{parts[0]}"):
            return f"; accepted are its parts {', '.join(parts)}, one pair each"
        if last in parts and names.find(f"{parent}.{packed}"):
            return f"; accepted is {packed}, which holds {', '.join(parts)}"
    return "; accepted are the base model's own layers"


def check_rank(rank: int, rules: AdapterRules) -> None:
    """Raises SourceError `rank_too_big` if the rank exceeds the engine's limit."""
    if rules.max_rank is not None and rank > rules.max_rank:
        message = f"rank {rank} is more than this worker's max_lora_rank {rules.max_rank}"
        raise SourceError("rank_too_big", f"{message}; accepted are smaller ones, or a worker with a higher limit")


def _check_base_name(declared: str, rules: AdapterRules) -> None:
    """Raises SourceError `base_model_mismatch` for an adapter of another base model."""
    if not is_same_base(declared, rules.base_names, rules.base_check):
        message = f"the adapter was trained on {declared!r}; this worker serves {', '.join(sorted(rules.base_names))}"
        advice = (
            "accepted are those; if it fits all the same, register it with that base_model, or see base_model_check"
        )
        raise SourceError("base_model_mismatch", f"{message}; {advice}")
