"""The tensors of an adapter as LoRA pairs: a module and the shapes of its lora_A and lora_B.

source   PEFT 0.21 writes `base_model.model.<module>.lora_A.weight`, `<module>.lora_embedding_A` for embeddings, and
         `<module>.weight` for the modules of `modules_to_save`; vLLM 0.32 lora/utils.py parse_fine_tuned_lora_name
         takes nothing else, also not the adapter's name before `.weight`
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.core.errors import SourceError
from workers.verification.adapter_files import WEIGHTS_NAME
from workers.verification.peft import EMBEDDINGS, embeddings_advice
from workers.verification.tensors import FLOAT_DTYPES, Shape, TensorHeader

STACKED = (".experts", ".experts.base_layer")
"""Ends of the names under which PEFT's `target_parameters` stores the experts of a layer as one module."""

PREFIX = "base_model.model."
"""What PEFT puts before every module's name."""
_TENSOR = re.compile(r"(?P<module>.+)\.(?:lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))")
_BASE_COPY = re.compile(r"(?P<module>(?:.+\.)?(?:embed_tokens|lm_head))\.base_layer\.weight")
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_OUTER_WRAPPERS = ("module.", "pretrained_model.")
RENAME_HINT = " (lorafleet adapters rename-modules)"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Shapes of a module's matrices: A [rank, in], B [out, rank]; embeddings: A [rank, vocab], B [hidden, rank].

    Of experts in one module (`is_stacked`) the rank is that of all together: A is [rank * experts, in].
    """

    a: Shape
    b: Shape
    is_embedding: bool = False
    is_stacked: bool = False

    @property
    def rank(self) -> int:
        """The rank of the pair; of stacked experts that of all together."""
        return self.a[0]

    @property
    def numbers(self) -> int:
        """How many numbers both matrices have."""
        return self.a[0] * self.a[1] + self.b[0] * self.b[1]

    @property
    def base_shape(self) -> Shape:
        """The shape of the base model's weight to which this pair applies; of stacked experts that of one."""
        return (self.a[1], self.b[0]) if self.is_embedding else (self.b[0], self.a[1])


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """An adapter's tensors.

    pairs   module -> its pair
    heads   head of a classifier -> `weight` or `bias` -> shape
    copies  tensor -> its module, of copies of the base model's embeddings
    """

    pairs: Mapping[str, LoraPair]
    heads: Mapping[str, Mapping[str, Shape]]
    copies: Mapping[str, str]


def plain_name(name: str) -> str:
    """A tensor's name without PEFT's prefix, which may be there more than once; as vLLM reads it."""
    return name.replace(PREFIX, "") if name.startswith(PREFIX) else name


def unwrapped_name(name: str) -> str:
    """A tensor's name with PEFT's prefix once, and without parts that wrappers left on a model put into it.

    torch.compile, FSDP and activation checkpointing name modules anywhere; DDP, DeepSpeed (`module`) and TRL's value
    head (`pretrained_model`) name the whole model, before PEFT's prefix or behind it.
    """
    parts = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    module = parts.rpartition(PREFIX)[2]
    while module.startswith(_OUTER_WRAPPERS):
        module = module.partition(".")[2]
    return PREFIX + module


def adapter_tensors(
    tensors: Mapping[str, TensorHeader], saved: Collection[str] = (), embeddings: Collection[str] | None = None
) -> AdapterTensors:
    """The tensors of a file by their meaning. Raises SourceError for tensors that are no valid part of a LoRA.

    saved       the config's `modules_to_save`
    embeddings  as of `parse_config`
    """
    shapes: dict[str, dict[str, Shape]] = {}
    heads: dict[str, dict[str, Shape]] = {}
    copies: dict[str, str] = {}
    for full_name, tensor in tensors.items():
        name = plain_name(full_name)
        if copied := _BASE_COPY.fullmatch(name):
            copies[full_name] = copied["module"]
        elif (head := _head_part(name, saved)) is not None:
            _check_dtype(full_name, tensor)
            heads.setdefault(head[0], {})[head[1]] = tensor.shape
        else:
            module, half = _lora_half(full_name, name, tensor, embeddings)
            shapes.setdefault(module, {})[half] = tensor.shape
    if not shapes:
        message = (
            f"{WEIGHTS_NAME} holds no LoRA tensor; accepted is at least one <module>.lora_A.weight with its lora_B"
        )
        raise SourceError("weights_empty", message)
    return AdapterTensors({module: _matrix_pair(module, halves) for module, halves in shapes.items()}, heads, copies)


def _head_part(name: str, saved: Collection[str]) -> tuple[str, str] | None:
    """(head, `weight` or `bias`) of a classifier's head in the file; None for other tensors."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-1] not in ("weight", "bias") or parts[-2] not in saved:
        return None
    return parts[-2], parts[-1]


def _lora_half(full_name: str, name: str, tensor: TensorHeader, embeddings: Collection[str] | None) -> tuple[str, str]:
    """(module, A or B) of one tensor. Raises SourceError if it is no half of a pair."""
    match = _TENSOR.fullmatch(name)
    if not match:
        accepted = "accepted are <module>.lora_A.weight and <module>.lora_B.weight"
        raise SourceError(
            "tensor_unexpected",
            f"tensor {full_name!r} is no part of a LoRA{_tensor_name_hint(name, embeddings)}; {accepted}",
        )
    _check_dtype(full_name, tensor)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        accepted = "accepted are two dimensions of 1 or more"
        raise SourceError("shape_mismatch", f"tensor {full_name!r} has shape {list(tensor.shape)}; {accepted}")
    module = match["module"]
    if (match["embedding"] is not None) != (module.rpartition(".")[2] == "embed_tokens"):
        message = f"tensor {full_name!r}: embed_tokens has lora_embedding_A and _B, every other module lora_A and _B"
        raise SourceError("tensor_unexpected", message)
    return module, match["embedding"] or match["half"]


def _check_dtype(full_name: str, tensor: TensorHeader) -> None:
    """Raises SourceError for a tensor that holds no floating-point numbers of a kind that engines take."""
    if tensor.dtype not in FLOAT_DTYPES:
        message = f"tensor {full_name!r} is {tensor.dtype}; accepted are {', '.join(FLOAT_DTYPES)}"
        raise SourceError("dtype_unsupported", message)


def _tensor_name_hint(name: str, embeddings: Collection[str] | None) -> str:
    """What writes a tensor of this name, and what to do; "" if it is not known."""
    if re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
        return f": with the adapter's name in it; save it with PEFT's save_pretrained, or rename it{RENAME_HINT}"
    if name.endswith((".lora_a", ".lora_b")):
        return ": an MLX adapter; convert it to PEFT's names, lora_a and lora_b transposed"
    if name.endswith((".lora_down.weight", ".lora_up.weight", ".alpha")):
        return ": kohya's names; convert it to PEFT's"
    if ".lora_magnitude_vector" in name:
        return ": DoRA; train without it"
    if name.endswith((".modules_to_save.weight", ".original_module.weight", ".weight", ".bias")):
        if any(part in EMBEDDINGS for part in name.split(".")):
            return f": a whole module; {embeddings_advice(embeddings)} (modules_to_save, Unsloth's embed_tokens)"
        return ": a whole module; leave it out of modules_to_save"
    return ""


def _matrix_pair(module: str, halves: Mapping[str, Shape]) -> LoraPair:
    """The pair of a module's matrices. Raises SourceError if one is missing, or if they share no rank."""
    if len(halves) != 2:
        message = f"module {module} has lora_{next(iter(halves))} alone; accepted are both lora_A and lora_B"
        raise SourceError("tensor_unpaired", message)
    is_embedding = module.rpartition(".")[2] == "embed_tokens"
    pair = LoraPair(halves["A"], halves["B"], is_embedding, is_stacked=f".{module}".endswith(STACKED))
    if pair.a[0] != pair.b[1]:
        message = f"module {module}: lora_A {list(pair.a)} and lora_B {list(pair.b)} do not share a rank"
        raise SourceError("rank_mismatch", f"{message}; accepted are [rank, in] and [out, rank]")
    return pair
