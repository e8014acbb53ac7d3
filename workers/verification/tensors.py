"""Names, dtypes and shapes of the tensors in a safetensors file, from its header. No tensor is loaded.

A file is 8 bytes of header length (little-endian), the header (JSON), then the tensors without gap or overlap.
source   safetensors 0.8 tensor.rs `validate`: the same files are refused, with the tensor's name
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from workers.core.errors import SourceError

MAX_HEADER_BYTES = 32 << 20  # about 200,000 tensors; safetensors itself stops at 100 MB
MAX_NAME = 500

Shape = tuple[int, ...]

# Bits of one element, by safetensors' dtype name.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

FLOAT_DTYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
"""Those of weights in the shape [out, in], of base models and adapters; packed weights have others."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor: its dtype as safetensors spells it, and its shape."""

    dtype: str
    shape: Shape


# What else lies under the name of an adapter's file: beginnings of other files, and what to do.
_OTHER_FILES = (
    (b"version ", "a Git LFS pointer instead of the file: fetch the file, as with `git lfs pull`"),
    (b"<", "a web page instead of the file: download the file itself, signed in where that is needed"),
    (b"{", "a JSON text, such as a server's error, instead of the file: download the file itself"),
    (b"PK\x03\x04", "a pickle of torch.save: convert it with safetensors.torch.save_file"),
    (b"\x80", "a pickle: convert it with safetensors.torch.save_file"),
    (b"GGUF", "llama.cpp's GGUF, which engines do not read as an adapter"),
    (b"\x1f\x8b", "a gzip archive: unpack it"),
)


def other_file(start: bytes) -> str:
    """What a file with this beginning is, and what to do; "" for a beginning that says nothing."""
    return next((what for beginning, what in _OTHER_FILES if start.lstrip().startswith(beginning)), "")


def header_bytes(start: bytes, file_bytes: int, name: str) -> int:
    """Length of a file's header, from its first 8 bytes; raises SourceError if it exceeds the file or the limit."""
    if file_bytes < 8 or len(start) < 8:
        raise _corrupt_error(
            name, f"it has {file_bytes} bytes; a safetensors file begins with 8 bytes of header length"
        )
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES and (other := other_file(start)):
        raise _corrupt_error(name, f"it is {other}; accepted is a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise _corrupt_error(name, f"its header claims {length} bytes; accepted are at most {MAX_HEADER_BYTES}")
    if length > file_bytes - 8:
        raise _corrupt_error(
            name, f"its header claims {length} bytes, the file has {file_bytes - 8} after it: cut short"
        )
    return length


def parse_header(raw: bytes, data_bytes: int, name: str) -> dict[str, TensorHeader]:
    """All tensors of a file by name, in the order of their data, from its header and the number of bytes after it.

    Raises SourceError.
    """
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_dict_without_duplicates)
    except (ValueError, RecursionError) as exc:
        raise _corrupt_error(name, f"its header is not JSON: {exc}") from exc
    if not raw.startswith(b"{") or not isinstance(header, dict):
        raise _corrupt_error(name, "its header is not a JSON object")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise _corrupt_error(name, "__metadata__ of its header does not map strings to strings")
    spans = sorted(_checked_span(name, key, value) for key, value in header.items())
    end = 0
    for begins, ends, key in spans:
        if begins != end:
            fault = "overlaps the one before" if begins < end else f"leaves {begins - end} bytes unused before it"
            raise _corrupt_error(name, f"tensor {key!r} begins at {begins} and {fault}")
        end = ends
    if end != data_bytes:
        raise _corrupt_error(name, f"its tensors take {end} bytes, the file has {data_bytes}: cut short or padded")
    return {key: TensorHeader(header[key]["dtype"], tuple(header[key]["shape"])) for _, _, key in spans}


def tensor_bytes(tensor: TensorHeader) -> int:
    """The size of a tensor's data in the file."""
    return math.prod(tensor.shape) * _BITS[tensor.dtype] // 8


def _checked_span(name: str, key: str, value: Any) -> tuple[int, int, str]:
    """(begin, end, name) of one tensor's data. Raises SourceError for an invalid header entry."""
    if not key.isprintable() or len(key) > MAX_NAME:
        raise _corrupt_error(name, f"a tensor is called {key[:80]!r}; accepted are {MAX_NAME} printable characters")
    if not isinstance(value, dict):
        raise _corrupt_error(name, f"tensor {key!r} is described by no object")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _corrupt_error(name, f"tensor {key!r} has dtype {dtype!r}; accepted are {', '.join(_BITS)}")
    if not _are_sizes(shape):
        raise _corrupt_error(name, f"tensor {key!r} has shape {shape!r}; accepted is a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _corrupt_error(name, f"tensor {key!r} has data_offsets {offsets!r}; accepted is [begin, end]")
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        expected = f"{dtype} of shape {shape} takes {bits / 8:g} bytes"
        raise _corrupt_error(
            name, f"tensor {key!r}: {expected}, its data_offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1], key


def _are_sizes(value: Any) -> bool:
    """Whether a JSON value is a list of at most eight valid sizes."""
    # Sizes are below 2**63; larger numbers would give products of a million digits.
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of these pairs. Raises ValueError for a duplicate key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _corrupt_error(name: str, message: str) -> SourceError:
    """A SourceError `weights_corrupt` for the file of this name."""
    return SourceError("weights_corrupt", f"{name}: {message}")
