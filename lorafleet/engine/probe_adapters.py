"""Small adapters that show what an engine does with one kind of module: of rank 1, and with a large effect."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

PROBE_PREFIX = "lorafleet-probe-"
"""Of the engine names of these adapters, which nobody requests."""

_PLUS, _MINUS = 0, 0x80
_BIAS = 15  # of float16's exponent
_UPDATE = 2  # an output changes by about 2**-2 times its input, where weights of base models give about 1
_EMBEDDING = 4  # embeddings are smaller


def write_probe(folder: Path, modules: Mapping[str, Sequence[int]], *, seed: int = 0) -> None:
    """Write an adapter of rank 1 on these modules into a folder, which it creates. Raises OSError.

    modules  name in an adapter's file -> [out, in] of the base model's weight
    """
    rng = random.Random(seed)
    tensors: dict[str, tuple[tuple[int, int], bytes]] = {}
    for name, (out, inner) in modules.items():
        module = f"base_model.model.{name}"
        if name.rpartition(".")[2] == "embed_tokens":
            tensors[f"{module}.lora_embedding_A"] = (1, out), _signs(rng, out, 0)
            tensors[f"{module}.lora_embedding_B"] = (inner, 1), _signs(rng, inner, _EMBEDDING)
        else:
            tensors[f"{module}.lora_A.weight"] = (1, inner), _signs(rng, inner, round(math.log2(inner) / 2))
            tensors[f"{module}.lora_B.weight"] = (out, 1), _signs(rng, out, _UPDATE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _signs(rng: random.Random, count: int, exponent: int) -> bytes:
    """So many numbers 2**-exponent in float16 with random signs."""
    numbers = bytearray(2 * count)
    high = (_BIAS - exponent) << 2
    table = bytes(high | (_MINUS if byte & 1 else _PLUS) for byte in range(256))
    numbers[1::2] = rng.randbytes(count).translate(table)
    return bytes(numbers)


def _safetensors(tensors: Mapping[str, tuple[tuple[int, int], bytes]]) -> bytes:
    """A safetensors file of these float16 tensors."""
    header, end = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(data for _, data in tensors.values())
