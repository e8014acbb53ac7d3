"""How much an adapter's weights can change: nothing, too little to show in an answer, or enough.

A fresh adapter has zeros in every `lora_B`, and answers as the base model does: so does a trainer's step 0. After a
first tiny step the change can still be lost when an engine rounds to bfloat16.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

WeightsEffect: TypeAlias = Literal["none", "small", "enough"]
ZERO_NOTE = "its weights are all zero, so it answers as the base model does: a fresh adapter, or a trainer's first one"

_NOT_READABLE = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, struct.error
)  # fmt: skip
_HALF = re.compile(r"\.lora_(?:embedding_)?[AB](?:\.weight)?$")
_HALF_A = re.compile(r"\.lora_(?:embedding_)?A(?:\.weight)?$")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_HEADER = 100 << 20
_CHUNK_BYTES = 1 << 20
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_SAMPLE = 128
# Of a base model's weights; 0.02 is the usual standard deviation at their initialisation.
_BASE_RMS = 0.02
_ROUNDING = 2.0**-8
"""bfloat16: relative distance of two numbers. An engine in float32 shows smaller changes, too."""
_ENOUGH_CHANGES = 10_000
"""Rounded outputs of layers that change, for a prompt of a dozen tokens. One in a hundred reaching a logit suffices;
an estimate. Above it, equal answers prove that an engine ignores the weights."""
_PROMPT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in a safetensors file: dtype, shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def has_zero_weights(folder: Path) -> bool:
    """Whether the adapter in a folder changes nothing, by its bytes; False if they are not an adapter's.

    Reads up to the first module with other weights; all of the file if there is none.
    """
    with suppress(*_NOT_READABLE), (folder / _WEIGHTS).open("rb") as file:
        return _Adapter(folder, file).is_zero()
    return False


def weights_effect(folder: Path) -> WeightsEffect | None:
    """What the adapter in a folder can change; None if its files cannot be read as an adapter's.

    Reads samples of each tensor, and all of the file if its weights are zero.
    """
    with suppress(*_NOT_READABLE), (folder / _WEIGHTS).open("rb") as file:
        adapter = _Adapter(folder, file)
        if adapter.is_zero():
            return "none"
        return "enough" if adapter.expected_changes() >= _ENOUGH_CHANGES else "small"
    return None


class _Adapter:
    """The config and the open weights of an adapter. Its methods raise an error of `_NOT_READABLE`."""

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self._file = file
        self._scaling = _largest_scaling(json.loads((folder / _CONFIG).read_bytes()))
        tensors = _tensors_by_name(file)
        self._pairs = [(a, tensors[_other_half(name)]) for name, a in tensors.items() if _HALF_A.search(name)]
        self._others = [tensor for name, tensor in tensors.items() if not _HALF.search(name)]

    def is_zero(self) -> bool:
        """Whether every pair of matrices has a zero one, and there are no weights but pairs."""
        if self._others or not self._pairs:
            return False
        return not self._scaling or all(self._is_zero(b) or self._is_zero(a) for a, b in self._pairs)

    def expected_changes(self) -> float:
        """An estimate: outputs of layers that bfloat16 rounds to another number for a prompt of a dozen tokens."""
        return sum(self._changes(a, b) for a, b in self._pairs)

    def _changes(self, a: _Tensor, b: _Tensor) -> float:
        """That number for one module with matrices A [rank, in] and B [out, rank]."""
        change_rms = self._scaling * self._rms(a) * self._rms(b) * math.sqrt(a.shape[0])
        share = min(1.0, change_rms / _BASE_RMS / _ROUNDING)
        return b.shape[0] * share * _PROMPT_TOKENS

    def _is_zero(self, tensor: _Tensor) -> bool:
        """Whether all numbers of the tensor are 0 or -0."""
        width = _WIDTHS[tensor.dtype]
        self._file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            chunk = self._file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ValueError("the file ends within a tensor")
            left -= len(chunk)
            if chunk.count(0) < len(chunk):
                without_signs = int.from_bytes((b"\xff" * (width - 1) + b"\x7f") * (len(chunk) // width), "little")
                if int.from_bytes(chunk, "little") & without_signs:
                    return False
        return True

    def _rms(self, tensor: _Tensor) -> float:
        """The root mean square of at most `_SAMPLE` numbers of the tensor, at even distances."""
        width = _WIDTHS[tensor.dtype]
        count = (tensor.end - tensor.begin) // width
        numbers = []
        for index in range(0, count, max(1, count // _SAMPLE)):
            self._file.seek(tensor.begin + index * width)
            numbers.append(_decode_number(self._file.read(width), tensor.dtype))
        return math.sqrt(sum(number * number for number in numbers) / max(1, len(numbers)))


def _other_half(name: str) -> str:
    """The name of B's tensor, from that of A's."""
    start, _, end = name.rpartition("A")
    return f"{start}B{end}"


def _largest_scaling(config: Mapping[str, Any]) -> float:
    """The largest factor by which PEFT multiplies a module's change. Raises an error of `_NOT_READABLE`."""
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    rank = float(config["r"])
    return max(map(float, alphas)) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _tensors_by_name(file: BinaryIO) -> dict[str, _Tensor]:
    """The tensors of a safetensors file by name, without copies of the base model's weights.

    Raises an error of `_NOT_READABLE`.
    """
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LARGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    return {
        name: _Tensor(
            entry["dtype"], tuple(entry["shape"]), *(8 + length + int(offset) for offset in entry["data_offsets"])
        )
        for name, entry in header.items()
        if name != "__metadata__" and not name.endswith(".base_layer.weight")
    }


def _decode_number(raw: bytes, dtype: str) -> float:
    """One number of a safetensors dtype. Raises an error of `_NOT_READABLE`."""
    if dtype == "BF16":
        raw, dtype = b"\0\0" + raw, "F32"
    if dtype.startswith("F8"):
        # Sign, exponent of 4 or 5 bits, mantissa; special values do not matter for a magnitude.
        mantissa = 3 if dtype == "F8_E4M3" else 2
        bias = 7 if mantissa == 3 else 15
        exponent, fraction = (raw[0] & 0x7F) >> mantissa, (raw[0] & ((1 << mantissa) - 1)) / (1 << mantissa)
        return math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
    (number,) = struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], raw)
    return float(number)
