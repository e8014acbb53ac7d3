"""How long an adapter's config and header take, how fast its digest is made, and whether disk or hash bounds that."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.report import ReportRow
from lorafleet.engine.lora_weights import has_zero_weights, weights_effect
from workers.verification.adapter_files import WEIGHTS_NAME
from workers.verification.base_model import BaseModel, base_model
from workers.verification.manifest import CONFIG_NAME, AdapterRules
from workers.verification.verify import read_description, read_manifest

HEADER_REACH_MS = 10.0
_CHUNK = 1 << 20
# Llama 3 8B. Rank 64 on every linear layer is 336 MB.
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def rows(folder: Path, *, quick: bool) -> list[ReportRow]:
    """Verification of an adapter of 336 MB, or of 42 MB when quick."""
    base = base_model(_CONFIG, {})
    assert base is not None
    rank = 8 if quick else 64
    size = _write(folder, base, rank)
    rules = AdapterRules(rank, frozenset(), "off", base)
    name, weights = f"{size / 1e6:.0f} MB adapter", folder / WEIGHTS_NAME
    calls = 5 if quick else 20
    header_ms = median(_seconds(lambda: read_description(folder, rules)) for _ in range(calls)) * 1e3
    digest_s = median(_seconds(lambda: read_manifest(folder, rules)) for _ in range(3))
    block = Random(1).randbytes(_CHUNK)
    sha256_s = median(_seconds(lambda: _hash(block, size)) for _ in range(3))
    disk_s = median(_from_disk(weights) for _ in range(3))
    trained_ms = median(_seconds(lambda: has_zero_weights(folder)) for _ in range(calls)) * 1e3
    sampled_ms = median(_seconds(lambda: weights_effect(folder)) for _ in range(3)) * 1e3
    bound = "hash" if sha256_s > disk_s else "disk"
    return [
        ReportRow(f"{name}: config and header verified (median of {calls})", header_ms, "ms", reach=HEADER_REACH_MS),
        ReportRow(
            f"{name}: digest and values ({bound} bounds it)",
            size / digest_s / 1e6,
            "MB/s",
            None,
            "sha256",
            size / sha256_s / 1e6,
        ),
        ReportRow(f"{name}: read from disk alone", size / disk_s / 1e6, "MB/s"),
        ReportRow(f"{name}: known to be other than zero (median of {calls})", trained_ms, "ms", reach=HEADER_REACH_MS),
        ReportRow(f"{name}: its weights held against rounding, before a refusal alone", sampled_ms, "ms"),
    ]


def _write(folder: Path, base: BaseModel, rank: int) -> int:
    """An adapter on every linear layer of the base model; the bytes of its weights."""
    header: dict[str, object] = {}
    end = 0
    linear = {module: shape for module, shape in base.shapes.items() if ".layers." in module}
    for module, (out, into) in linear.items():
        for half, shape in (("A", (rank, into)), ("B", (out, rank))):
            begin, end = end, end + 2 * shape[0] * shape[1]
            name = f"base_model.model.{module}.lora_{half}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    targets = sorted({module.rpartition(".")[2] for module in linear})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    raw = json.dumps(header).encode()
    rng = Random(1)
    with (folder / WEIGHTS_NAME).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, end, _CHUNK):
            block = bytearray(rng.randbytes(min(_CHUNK, end - start)))
            block[1::2] = b"\x3c" * (len(block) // 2)  # all of them about 0.01
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return end


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _hash(block: bytes, size: int) -> None:
    found = hashlib.sha256()
    for _ in range(size // len(block)):
        found.update(block)


def _from_disk(path: Path) -> float:
    """Seconds of reading a file that the page cache was told to forget; the disk's own cache may still know it."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_CHUNK)
        began = time.perf_counter()
        while file.readinto(buffer):
            pass
        return time.perf_counter() - began
