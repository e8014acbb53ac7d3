"""Values of an adapter's weights with which no engine can compute, found in the bytes as they are read for the digest.

One NaN in the KV cache of an engine spoils other requests too: vLLM 0.32 answers the next request of any caller
wrongly, with status 200. NaN and infinity are such values, and so are finite numbers that become infinite: float16
holds numbers below 65,520, and products of larger ones leave the range of bfloat16 and float32 within a few layers.
"""

import functools
import math
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from workers.core.errors import SourceError
from workers.verification.adapter_files import WEIGHTS_NAME
from workers.verification.lora_tensors import PREFIX
from workers.verification.tensors import TensorHeader, tensor_bytes

LARGEST: Final = 65520.0
"""The least number that float16 rounds to infinity. Weights of healthy adapters are below 100."""

_MOST_SAMPLED = 2048
"""Numbers of a tensor whose sizes are taken for all of them."""
_SAMPLED_AT_ONCE = 256
_UNPACKED = {"F64": "d", "F32": "f", "F16": "e"}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_MOST_NAME_CHARACTERS = 128  # of a card, which each heartbeat may have a hundred times
_A_END, _B_END = ".lora_A.weight", ".lora_B.weight"
# The lowest code of a magnitude that is infinite or NaN. Codes of all these dtypes grow with the magnitude.
_NOT_A_NUMBER = {
    "F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C,
}  # fmt: skip


class _Span(NamedTuple):
    """Bytes of one tensor, up to `end` in the file; `code`: the lowest code that is refused, 0 in bytes not checked."""

    end: float
    name: str = ""
    dtype: str = ""
    width: int = 1
    code: int = 0


class ModuleChange(NamedTuple):
    """How large an adapter's change of a module is, as a multiple of ordinary weights; 0: none was measured."""

    size: float = 0.0
    module: str = ""


class FiniteCheck:
    """Counts refused values of a safetensors file while its bytes pass by. Its memory is that of two chunks."""

    def __init__(self, file_bytes: int, tensors: Mapping[str, TensorHeader], scale: float) -> None:
        """
        file_bytes  the file's size
        tensors     all of them, in the order of their data
        scale       the largest factor by which an engine multiplies a lora_B
        """
        self._scale = scale
        at = file_bytes - sum(map(tensor_bytes, tensors.values()))
        self._spans = [_Span(at)]
        for name, tensor in tensors.items():
            at += tensor_bytes(tensor)
            if tensor.dtype in _WIDTHS:
                limit = LARGEST / max(1.0, scale if _is_lora_b(name) else 1.0)
                width, code = _WIDTHS[tensor.dtype], _lowest_refused(tensor.dtype, limit)
                self._spans.append(_Span(at, name, tensor.dtype, width, code))
            else:
                self._spans.append(_Span(at))  # integers are finite
        self._spans.append(_Span(math.inf))  # the file may have grown
        self._index, self._position, self._rest = 0, 0, b""
        self._nan_or_inf, self._too_large = 0, 0
        self._names: dict[str, None] = {}
        self._tensors = tensors
        self._squares: dict[str, tuple[float, int]] = {}

    def feed(self, chunk: bytes) -> None:
        """Check the file's next bytes."""
        begin = 0
        while begin < len(chunk):
            span = self._spans[self._index]
            if self._position >= span.end:
                self._index += 1
                continue
            end = int(min(len(chunk), begin + span.end - self._position))
            self._position += end - begin
            if span.code:
                piece = self._rest + chunk[begin:end]
                whole = len(piece) - len(piece) % span.width
                self._rest = piece[whole:]
                self._check(piece[:whole], span)
                self._sample(piece, whole, span)
            begin = end

    def _check(self, piece: bytes, span: _Span) -> None:
        """Count the refused values among whole values of one tensor."""
        # The last byte of a value has its sign and the first bits of its exponent: small ones clear nearly all pieces.
        if not piece[span.width - 1 :: span.width].translate(None, _small_last_bytes(span.width, span.code)):
            return
        if refused := _count_at_least(piece, span.width, span.code):
            nan_or_inf = _count_at_least(piece, span.width, _NOT_A_NUMBER[span.dtype])
            self._nan_or_inf += nan_or_inf
            self._too_large += refused - nan_or_inf
            self._names[span.name] = None

    def _sample(self, piece: bytes, whole: int, span: _Span) -> None:
        """Add the squares of a few of a tensor's numbers, of which `whole` bytes are in the piece."""
        total, count = self._squares.get(span.name, (0.0, 0))
        taken = min(whole // span.width, _SAMPLED_AT_ONCE)
        if not taken or count >= _MOST_SAMPLED or span.dtype not in {*_UNPACKED, "BF16"}:
            return
        numbers = _numbers(piece[: taken * span.width], span.dtype)
        self._squares[span.name] = (total + sum(each * each for each in numbers), count + taken)

    def largest_change(self) -> ModuleChange:
        """The largest change of a module, to three digits.

        A change B @ A of independent numbers has the size scale * sqrt(rank) * size(A) * size(B).
        """
        found = ModuleChange()
        for name, tensor in self._tensors.items():
            module = name.removesuffix(_A_END)
            half_a, half_b = self._size(name), self._size(module + _B_END)
            if module == name or ".experts" in name or half_a is None or half_b is None:
                continue
            rank, inputs = tensor.shape
            size = self._scale * math.sqrt(rank * inputs) * half_a * half_b
            if size > found.size:
                found = ModuleChange(size, module)
        return ModuleChange(float(f"{found.size:.3g}"), found.module.removeprefix(PREFIX)[:_MOST_NAME_CHARACTERS])

    def _size(self, tensor: str) -> float | None:
        """The root of the mean square of a tensor's sampled numbers; None if none were."""
        total, count = self._squares.get(tensor, (0.0, 0))
        return math.sqrt(total / count) if count else None

    def require_finite(self) -> None:
        """Raises SourceError `weights_not_finite` if a refused value has passed by."""
        if not self._names:
            return
        counts = []
        if self._nan_or_inf:
            counts.append(f"{self._nan_or_inf} NaN or infinite values")
        if self._too_large:
            scaled = f", lora_B times the config's scale {self._scale:g}" if self._scale > 1 else ""
            counts.append(f"{self._too_large} values of {LARGEST:g} or more{scaled}")
        tensors = f"{len(self._names)} of its tensors, the first is {next(iter(self._names))!r}"
        accepted = "accepted are finite numbers that float16 holds, too: others spoil the answers of other adapters"
        advice = "the training run has diverged: publish its last checkpoint before that, with its loss still finite"
        raise SourceError(
            "weights_not_finite", f"{WEIGHTS_NAME}: {' and '.join(counts)} in {tensors}; {accepted}; {advice}"
        )


def _numbers(raw: bytes, dtype: str) -> tuple[float, ...]:
    """The numbers of whole values."""
    count = len(raw) // _WIDTHS[dtype]
    if dtype == "BF16":  # the upper half of a float32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[::2], raw[1::2]
        return struct.unpack(f"<{count}f", wide)
    return struct.unpack(f"<{count}{_UNPACKED[dtype]}", raw)


def _is_lora_b(tensor: str) -> bool:
    """Whether an engine multiplies the tensor of this name by the adapter's scale."""
    return tensor.endswith((".lora_B.weight", ".lora_embedding_B"))


@functools.lru_cache(maxsize=64)
def _lowest_refused(dtype: str, limit: float) -> int:
    """The code of the least magnitude of a dtype that is `limit` or more; at most that of infinity or NaN."""
    code: int
    if dtype == "F64":
        (code,) = struct.unpack("<Q", struct.pack("<d", limit))
    elif dtype in {"F32", "BF16"}:
        (code,) = struct.unpack("<I", struct.pack("<f", limit))
        code = code if dtype == "F32" else -(-code >> 16)  # BF16 is the upper half, here rounded up
    elif dtype in {"F16", "F8_E5M2"}:
        code = 0x1F << 10
        if limit < LARGEST:
            (code,) = struct.unpack("<H", struct.pack("<e", limit))
        code = code if dtype == "F16" else -(-code >> 8)
    else:
        code = next((code for code in range(0x7F) if math.ldexp(8 + code % 8, code // 8 - 10) >= limit), 0x7F)
    return max(1, min(code, _NOT_A_NUMBER[dtype]))


@functools.lru_cache(maxsize=64)
def _small_last_bytes(width: int, code: int) -> bytes:
    """The last bytes of values whose magnitude is certainly below a code, with either sign."""
    end = code >> 8 * (width - 1)
    return bytes([*range(end), *range(0x80, 0x80 + end)])


def _count_at_least(piece: bytes, width: int, code: int) -> int:
    """How many values of so many bytes each have a magnitude with this code or a higher one.

    All at once, in one number: to each magnitude is added what lifts the code into the bit of the sign.
    """
    sign = 1 << 8 * width - 1
    ones = int.from_bytes((b"\1" + bytes(width - 1)) * (len(piece) // width), "little")
    magnitudes = int.from_bytes(piece, "little") & ones * (sign - 1)
    return (magnitudes + ones * (sign - code) & ones * sign).bit_count()
