"""Adapters that pass the agent's checks but that SGLang 0.5.23 or sgl-jax does not serve correctly.

SGLang loads most of them with 200. Then the first request kills it, or is answered with wrongly scaled weights
(lora/lora.py LoRAAdapter, lora/mem_pool.py load_lora_weight_to_buffer). sgl-jax scales in the same way (its
lora/lora.py) and does not fuse modules.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.core.errors import SourceError
from workers.verification.adapter_files import WEIGHTS_NAME
from workers.verification.peft import CONFIG_NAME
from workers.verification.verify import read_base_model, read_tensors

_A = (".lora_A.weight", ".lora_embedding_A")
_PREFIX = "base_model.model."


def sglang_refusal(folder: Path, base: Path | None) -> str:
    """Why SGLang must not load the adapter, or "". Reads its config and tensor header; unreadable files are allowed.

    base  the base model's folder, or None
    """
    if (read := _read_adapter(folder)) is None:
        return ""
    config, ranks = read
    return (
        _head_refusal(config, "SGLang")
        or _scaling_refusal(config, "SGLang")
        or _rank_refusal(config, ranks, "SGLang")
        or _fused_module_refusal(ranks, _gate_test(base))
    )


def sgl_jax_refusal(folder: Path) -> str:
    """Why sgl-jax must not start with the adapter, or "". Reads as `sglang_refusal` does."""
    if (read := _read_adapter(folder)) is None:
        return ""
    config, ranks = read
    return (
        _head_refusal(config, "sgl-jax")
        or _scaling_refusal(config, "sgl-jax")
        or _rank_refusal(config, ranks, "sgl-jax")
    )


def _read_adapter(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, int]] | None:
    """The adapter's config, and the rank of each module by its tensor header; None for unreadable files."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_bytes())
        tensors = read_tensors(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SourceError):
        return None
    if not isinstance(config, dict):
        return None
    ranks = {
        name.removeprefix(_PREFIX).removesuffix(suffix): tensor.shape[0]
        for name, tensor in tensors.items()
        for suffix in _A
        if name.endswith(suffix) and tensor.shape
    }
    return config, ranks


def _head_refusal(config: Mapping[str, Any], engine: str) -> str:
    """A refusal of adapters with a classification head of their own; or ""."""
    if saved := config.get("modules_to_save"):
        return (
            f"modules_to_save is {saved!r}: {engine} would answer by the base model's head; accepted is vLLM for these"
        )
    return ""


def _scaling_refusal(config: Mapping[str, Any], engine: str) -> str:
    """A refusal of configs whose scale is not lora_alpha / r, as these engines always use that; or ""."""
    if config.get("use_rslora") and config.get("r") != 1:
        return (
            f"use_rslora: {engine} scales by lora_alpha / r all the same; accepted is lora_alpha times sqrt(r) instead"
        )
    alphas = config.get("alpha_pattern") or {}
    if isinstance(alphas, dict) and any(alpha != config.get("lora_alpha") for alpha in alphas.values()):
        return f"alpha_pattern: {engine} scales every module by lora_alpha / r; accepted is one lora_alpha"
    return ""


def _rank_refusal(config: Mapping[str, Any], ranks: Mapping[str, int], engine: str) -> str:
    """Why an adapter with more than one rank is refused; "" if all its modules have the config's `r`."""
    other = next((module for module, rank in ranks.items() if rank != config.get("r")), None)
    if other is None:
        return ""
    message = f"module {other} has rank {ranks[other]}, r is {config.get('r')!r}: {engine} expects that everywhere"
    return f"{message}; accepted is one rank"


def _fused_module_refusal(modules: Iterable[str], is_gated: Callable[[str], bool]) -> str:
    """A refusal of adapters with only some parts of a module that SGLang fuses; or "".

    Query, key and value are fused, and gate and up: only key and up may be missing.
    """
    leaves: dict[str, set[str]] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        leaves.setdefault(parent, set()).add(leaf)
    for parent, leaves_of_parent in leaves.items():
        if leaves_of_parent & {"q_proj", "k_proj", "v_proj"} and not leaves_of_parent >= {"q_proj", "v_proj"}:
            present = ", ".join(sorted(leaves_of_parent & {"q_proj", "k_proj", "v_proj"}))
            return f"{parent} has {present} alone: SGLang crashes with it; accepted are q_proj and v_proj together"
        if "up_proj" in leaves_of_parent and "gate_proj" not in leaves_of_parent and is_gated(f"{parent}.gate_proj"):
            return f"{parent} has up_proj alone: SGLang crashes with it; accepted is up_proj with gate_proj"
    return ""


def _gate_test(base: Path | None) -> Callable[[str], bool]:
    """A test whether the base model has a gate module, from its folder; always True if that cannot be read."""
    try:
        base_model = read_base_model(base) if base is not None and base.is_dir() else None
    except (OSError, ValueError, SourceError):
        base_model = None
    if base_model is None:
        return lambda _gate: True
    names = base_model.module_shapes()
    return lambda gate: names.find(gate) is not None
