"""Copies of an adapter with other weights: zeros, NaN, fewer modules, or other module names."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path


def adapter_of_zeros(source: Path, target: Path) -> Path:
    """A copy whose lora_B are zero, as PEFT makes them."""
    return _copy(source, target, lambda name, data: (name, bytes(len(data)) if "lora_B" in name else data))


NAN_BF16 = b"\xc0\x7f"


def adapter_of_nan(source: Path, target: Path) -> Path:
    """A copy whose lora_B are NaN alone in bfloat16, as a training run that diverged leaves them."""
    return _copy(source, target, lambda name, data: (name, NAN_BF16 * (len(data) // 2) if "lora_B" in name else data))


def adapter_of_large_values(source: Path, target: Path) -> Path:
    """A copy whose weights are 1e12 alone in bfloat16: finite, as a run that diverges leaves them before NaN."""
    return _copy(source, target, lambda name, data: (name, b"\x69\x53" * (len(data) // 2)))


def adapter_of_size(source: Path, target: Path, size: float) -> Path:
    """A copy whose weights are all of this size in bfloat16; its change grows with the square."""
    value = struct.pack("<f", size)[2:]
    return _copy(source, target, lambda name, data: (name, value * (len(data) // 2)))


def adapter_with(source: Path, target: Path, is_kept: Callable[[str], bool]) -> Path:
    """A copy with these modules alone."""
    copy = _copy(source, target, lambda name, data: (name, data) if is_kept(name) else None)
    config_file = copy / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["target_modules"] = [module for module in config["target_modules"] if is_kept(f".{module}.")]
    config_file.write_text(json.dumps(config))
    return copy


def renamed_adapter(source: Path, target: Path, rename: Callable[[str], str]) -> Path:
    """A copy whose tensors have other names."""
    return _copy(source, target, lambda name, data: (rename(name), data))


def _copy(source: Path, target: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """A copy of an adapter with each tensor's name and bytes changed, or left out (None)."""
    shutil.copytree(source, target)
    weights = target / "adapter_model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = {}, b""
    for name, tensor in json.loads(content[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        if (changed := change(name, content[begin:end])) is not None:
            header[changed[0]] = tensor | {"data_offsets": [len(data), len(data) + len(changed[1])]}
            data += changed[1]
    head = json.dumps(header).encode()
    weights.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return target
