"""vLLM's checks of an adapter's files before it is loaded.

Error messages are vLLM 0.32's (lora/peft_helper.py, lora/lora_model.py, entrypoints/openai/models/serving.py), as
agents parse them. As in vLLM, neither the base model's name nor the tensors' shapes are checked.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER_LIMIT = 100_000_000
"""Largest header that the safetensors library accepts, in bytes."""

MODULES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""The modules of a Llama-like model (for example Qwen2) with LoRA layers."""
_PACKED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


class NoAdapterFound(Exception):
    """No folder, or none with an adapter_config.json. vLLM answers 404."""


class AdapterRefused(Exception):
    """The files are no adapter that this engine can load. vLLM answers 500."""


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """One load of an adapter. Another load of the same name is another adapter, as in vLLM."""

    int_id: int
    name: str
    path: str
    digest: bytes
    """sha256 over config and weights, which seeds its text; b"", the base model's, if all its modules are ignored."""
    modules: int = 1
    ignored: tuple[str, ...] = ()
    """Modules of its file, and those that the engine does not take: `--lora-target-modules` leaves them out."""
    uncalled: tuple[str, ...] = ()
    """Modules that the engine takes and never runs (`--sim-uncalled`)."""
    delay_s: float = 0.0
    """Seconds by which its answers are delayed."""
    failing: float = 0.0
    """Share of prompts that are answered with 500."""

    def fails(self, prompt: Sequence[int]) -> bool:
        """Whether this prompt is answered with 500; the same prompts always are."""
        return zlib.crc32(repr(prompt).encode()) < self.failing * 2**32


def read_adapter(
    int_id: int,
    name: str,
    path: str,
    *,
    max_rank: int,
    target_modules: frozenset[str] | None = None,
    uncalled_modules: frozenset[str] = frozenset(),
) -> SimAdapter:
    """Read and check the adapter in folder `path`. Raises `NoAdapterFound` or `AdapterRefused`.

    target_modules    the only modules that the engine takes; None: all
    uncalled_modules  last parts of names of modules that it takes and never runs
    """
    folder = Path(path).expanduser()
    try:
        config_text = (folder / "adapter_config.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NoAdapterFound(f"Loading lora {name} failed: No adapter found for {path}") from exc
    try:
        config = json.loads(config_text)
        _check_config(config, max_rank)
        # Simulated faults of a bad version; vLLM ignores unknown fields.
        faults = config.get("sim") or {}
        delay_s, failing = float(faults.get("delay_s", 0.0)), float(faults.get("failing", 0.0))
    except (ValueError, TypeError) as exc:
        raise AdapterRefused(str(exc)) from exc
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise AdapterRefused(f"{path} doesn't contain tensors")
    modules = sorted({_module_of(tensor) for tensor in _tensor_names(weights)})
    _check_modules(modules, path)
    ignored = tuple(module for module in modules if target_modules and not _is_target(module, target_modules))
    digest = hashlib.sha256(config_text)
    with weights.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    taken = [module for module in modules if module not in ignored]
    uncalled = tuple(module for module in taken if module.rpartition(".")[2] in uncalled_modules)
    text_seed = b"" if len(uncalled) == len(taken) else digest.digest()
    return SimAdapter(int_id, name, path, text_seed, len(modules), ignored, uncalled, delay_s, failing)


def _check_config(config: dict[str, Any], max_rank: int) -> None:
    """Raises ValueError with vLLM's message for a config that vLLM refuses."""
    missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in config]
    if missing:
        raise ValueError(f"Missing required configuration fields: {set(missing)}")
    rank = config["r"]
    if not isinstance(rank, int) or rank <= 0:
        raise ValueError(f"LoRA rank `r` must be a positive integer, got {rank}.")
    faults = []
    if config.get("use_dora"):
        faults.append("vLLM does not yet support DoRA.")
    rank = max([rank, *(config.get("rank_pattern") or {}).values()])
    if rank > max_rank:
        faults.append(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        faults.append("Adapter bias is not supported.")
    if faults:
        raise ValueError(" ".join(faults))


def _tensor_names(weights: Path) -> list[str]:
    """Tensor names in a safetensors file. Raises `AdapterRefused` with the safetensors library's messages."""
    size = weights.stat().st_size
    with weights.open("rb") as stream:
        length_bytes = stream.read(8)
        if len(length_bytes) < 8:
            raise AdapterRefused("Error while deserializing header: header too small")
        length = int.from_bytes(length_bytes, "little")
        if length > HEADER_LIMIT:
            raise AdapterRefused("Error while deserializing header: header too large")
        if length + 8 > size:
            raise AdapterRefused("Error while deserializing header: invalid header length")
        header_text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(header_text)
    except ValueError as exc:
        raise AdapterRefused(f"Error while deserializing header: invalid JSON in header: {exc}") from exc
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != size:
        raise AdapterRefused("Error while deserializing header: incomplete metadata, file not fully covered")
    return list(header)


def _module_of(tensor: str) -> str:
    """The module of a tensor's name."""
    return re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", tensor)


def _is_target(module: str, targets: frozenset[str]) -> bool:
    """Whether the engine takes a module with this setting: it, or one that it is packed with, is named.

    source  vLLM 0.32 lora/utils.py is_in_target_modules
    """
    last = module.rpartition(".")[2]
    packed = next((parts for parts in _PACKED if last in parts), frozenset({last}))
    return bool(packed & targets)


def _check_modules(modules: list[str], path: str) -> None:
    """Raises `AdapterRefused` with vLLM's message for unknown modules."""
    unexpected = [module for module in modules if module.rsplit(".", 1)[-1] not in MODULES]
    if unexpected:
        raise AdapterRefused(
            f"While loading {path}, expected target modules in {set(MODULES)} but received {unexpected}. "
            "Please verify that the loaded LoRA module is correct"
        )
