"""What an adapter is: its digest, rank and modules, told from file headers alone. No tensor is ever loaded."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from workers.core.errors import SourceError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20

# PEFT writes `base_model.model.<module>.lora_A.weight`; some writers put the adapter's name before `.weight`.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<half>lora_A|lora_B)(?:\.[^.]+)?\.weight")

_UNSUPPORTED = ("use_dora", "modules_to_save", "lora_bias", "alora_invocation_tokens", "layer_replication")

BaseModelCheck = Literal["name", "exact", "off"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an adapter: path relative to its folder with `/`, bytes, sha256 as 64 hex digits."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A verified adapter. `rank` is the largest of its modules'; `base_model` is "" where its config names none."""

    digest: str
    rank: int
    base_model: str
    size_bytes: int
    modules: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What this worker accepts.

    base_names    names under which its base model is known
    base_shapes   module -> [out, in] of the base model's weights; empty where they are not known, then unchecked
    """

    max_rank: int
    base_names: frozenset[str]
    base_check: BaseModelCheck = "name"
    base_shapes: Mapping[str, Shape] | None = None


def is_adapter_file(name: str) -> bool:
    """Whether a file of this name belongs to an adapter: only these are copied, hashed and kept."""
    return name == CONFIG_NAME or name.endswith(".safetensors")


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


def parse_header(raw: bytes, name: str) -> tuple[dict[str, Shape], int]:
    """Shape of every tensor, and where the last one ends after the header, from a safetensors header's JSON."""
    try:
        header = json.loads(raw)
        tensors = {key: value for key, value in header.items() if key != "__metadata__"}
        end = max((int(value["data_offsets"][1]) for value in tensors.values()), default=0)
        return {key: _shape(value) for key, value in tensors.items()}, end
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as exc:
        raise _invalid(f"{name}: not a safetensors header: {exc!r}") from exc


def inspect(config: bytes, tensors: Mapping[str, Shape], files: Iterable[FileEntry], rules: Rules) -> Manifest:
    """The manifest of an adapter that keeps every rule; raises SourceError naming the first that it breaks."""
    parsed = _parse_config(config)
    entries = tuple(files)
    base_model = str(parsed.get("base_model_name_or_path") or "")
    _check_base(base_model, rules)
    pairs = _pairs(tensors)
    _check_targets(parsed, pairs)
    ranks = {module: _rank(module, a, b, parsed) for module, (a, b) in pairs.items()}
    rank = max(ranks.values())
    if rank > rules.max_rank:
        raise SourceError(
            "rank_too_big",
            f"rank {rank} is more than this worker's max_lora_rank {rules.max_rank};"
            " place it on a worker with a higher one",
        )
    for module, (a, b) in pairs.items():
        _check_shape(module, a, b, rules.base_shapes)
    return Manifest(digest(entries), rank, base_model, sum(entry.size_bytes for entry in entries), len(pairs))


def is_same_base(declared: str, names: Iterable[str], check: BaseModelCheck) -> bool:
    """Whether an adapter that declares this base model may run on a base model of these names.

    `name` compares the last path part without case, because trainers write local paths and hub names alike.
    """
    if check == "off" or not declared:
        return True
    if check == "exact":
        return declared in set(names)
    return _last(declared) in {_last(name) for name in names}


def _last(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name.lower()


def _invalid(message: str) -> SourceError:
    return SourceError("adapter_invalid", message)


def _shape(value: Any) -> Shape:
    shape = value["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r} is not a list of sizes")
    return tuple(shape)


def _parse_config(raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise _invalid(f"{CONFIG_NAME}: not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise _invalid(f"{CONFIG_NAME}: expected an object, found {type(config).__name__}")
    if config.get("peft_type", "LORA") != "LORA":
        raise _invalid(f"{CONFIG_NAME}: peft_type {config['peft_type']!r}; only LORA adapters can be served")
    # vLLM 0.32 lora/peft_helper.py refuses these when it loads; told here, no engine is stalled for it.
    for unsupported in _UNSUPPORTED:
        if config.get(unsupported):
            raise _invalid(f"{CONFIG_NAME}: {unsupported} is set; the engine serves plain LoRA weights only")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise _invalid(f"{CONFIG_NAME}: r is {config.get('r')!r}; expected a rank of 1 or more")
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not all(type(rank) is int and rank > 0 for rank in ranks.values()):
        raise _invalid(f"{CONFIG_NAME}: rank_pattern must map module names to ranks of 1 or more")
    return config


def _pairs(tensors: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    halves: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        if match := _TENSOR.fullmatch(name):
            if len(shape) != 2:
                raise _invalid(f"tensor {name} has shape {list(shape)}; expected two dimensions")
            halves.setdefault(match["module"], {})[match["half"]] = shape
    if not halves:
        raise _invalid("no tensor is called <module>.lora_A.weight or .lora_B.weight; is this a PEFT LoRA adapter?")
    for module, found in halves.items():
        if len(found) != 2:
            raise _invalid(f"module {module} has {next(iter(found))} but not the other half")
    return {module: (found["lora_A"], found["lora_B"]) for module, found in halves.items()}


def _check_targets(config: dict[str, Any], pairs: Mapping[str, object]) -> None:
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, (str, list)):
        raise _invalid(f"{CONFIG_NAME}: target_modules is {targets!r}; expected module names")
    if isinstance(targets, str):
        return  # a regular expression or "all-linear": the base model's shapes decide
    for module in pairs:
        if not any(module == target or module.endswith(f".{target}") for target in targets):
            raise _invalid(f"tensors of module {module}, which {CONFIG_NAME} target_modules does not name")


def _rank(module: str, a: Shape, b: Shape, config: dict[str, Any]) -> int:
    if a[0] != b[1]:
        raise _invalid(f"module {module}: lora_A {list(a)} and lora_B {list(b)} do not share a rank")
    expected = _expected_ranks(module, config)
    if a[0] not in expected:
        listed = " or ".join(str(rank) for rank in expected)
        raise _invalid(f"module {module}: its tensors have rank {a[0]}, {CONFIG_NAME} says {listed}")
    return a[0]


def _expected_ranks(module: str, config: dict[str, Any]) -> tuple[int, ...]:
    """The rank that the config gives a module; every rank it mentions where only a pattern could tell.

    PEFT allows regular expressions in rank_pattern. They are not run: a hostile one could take hours.
    """
    patterns: dict[str, int] = config.get("rank_pattern") or {}
    for pattern, rank in patterns.items():
        if module == pattern or module.endswith(f".{pattern}"):
            return (rank,)
    plain = all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns)
    return (config["r"],) if plain else (config["r"], *patterns.values())


def _check_base(declared: str, rules: Rules) -> None:
    if not is_same_base(declared, rules.base_names, rules.base_check):
        raise SourceError(
            "base_model_mismatch",
            f"the adapter was trained on {declared!r}; this worker serves {', '.join(sorted(rules.base_names))}",
        )


def _check_shape(module: str, a: Shape, b: Shape, base: Mapping[str, Shape] | None) -> None:
    if not base:
        return
    found = base.get(module)
    if found is None:
        raise _invalid(f"module {module} does not exist in the base model")
    if (b[0], a[1]) != found:
        raise _invalid(f"module {module} is {list(found)} in the base model, the adapter is for {[b[0], a[1]]}")
