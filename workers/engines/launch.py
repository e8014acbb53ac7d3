"""Command line and environment of the engine's process."""

import json
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import structlog

from lorafleet.engine.arguments import LORA_PATHS, has_flag, without_flag
from lorafleet.engine.devices import SGLANG_CPU, is_on_cpu
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from workers.config import WorkerSettings

MODULES = {
    "vllm": "vllm.entrypoints.openai.api_server",
    "sim": "lorafleet.sim",
    "sglang": "sglang.launch_server",
    "sgl-jax": "sgl_jax.launch_server",
}
log = structlog.get_logger()

_Flags = list[tuple[str, str | list[str] | None]]

# Settings for vLLM 0.32 on a CPU with few cores; not set on a GPU.
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The model in the engine core's process (vllm/platforms/cpu.py): a worker process of its own takes 0.6 GB, a third
    # of the start, and a fifth of the CPU time, for messages between the two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_CPU_BLOCK_SIZE = 32  # the CPU backend takes multiples of 32 only
# vLLM's default. SGLang's page is one token on most hardware, which means sixteen times the KV events.
_SGLANG_BLOCK_SIZE = 16

_VLLM_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_SGLANG_ENVIRONMENT = {"DO_NOT_TRACK": "1"}
# Measures GPU seconds in prefill, for the prefill rate. Only on a GPU: on a CPU SGLang 0.5.23 crashes with it.
_SGLANG_GPU_ENVIRONMENT = {"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1"}
# Other names of our flags in a user's command (SGLang 0.5.23 and sgl-jax server_args.py).
_ALIASES = {"--model-path": ("--model-path", "--model"), "--tp-size": ("--tp-size", "--tensor-parallel-size")}


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """The engine's command, and environment variables in addition to the agent's own, which take precedence."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def launch_command(
    settings: WorkerSettings,
    *,
    port: int,
    topic: str,
    own_command: Sequence[str] = (),
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> LaunchCommand:
    """The command that starts the engine: `own_command` or `python -m ...`, with the flags that it lacks.

    Flags added to `own_command` are logged.

    adapters  engine name -> folder, for an engine that takes adapters at its start alone
    """
    is_cpu = settings.engine != "sim" and is_on_cpu(settings.engine, settings.device_profile, os.environ)
    base = tuple(own_command) or (sys.executable, "-P", "-m", MODULES[settings.engine])
    engine_args = settings.engine_args
    if settings.engine == "sgl-jax" and settings.preload_loras:  # which the command's own have become
        base, engine_args = without_flag(base, LORA_PATHS), without_flag(engine_args, LORA_PATHS)
    command = list(base)
    if settings.engine == "sglang":
        flags = _sglang_flags(settings, port=port, topic=topic, is_cpu=is_cpu)
        environment = _SGLANG_ENVIRONMENT | ({SGLANG_CPU: "1"} if is_cpu else _SGLANG_GPU_ENVIRONMENT)
    elif settings.engine == "sgl-jax":
        flags = _sgl_jax_flags(settings, port=port, is_cpu=is_cpu, adapters=adapters)
        environment = dict(_SGLANG_ENVIRONMENT)
    else:
        flags = _vllm_flags(settings, port=port, topic=topic, is_cpu=is_cpu)
        environment = _VLLM_ENVIRONMENT | {REPORTS_VARIABLE: str(settings.lora_reports)}
    added = []
    for flag, value in flags:
        if not any(has_flag(base, name) for name in _ALIASES.get(flag, (flag,))) and not (
            flag == "--model" and "serve" in base
        ):
            added += [flag, *([value] if isinstance(value, str) else value or ())]
    if own_command:
        log.info("added to the engine's command", flags=" ".join(added))
    command += added
    command += engine_args
    if Path(settings.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if is_cpu and settings.engine == "vllm":
        environment |= CPU_ENVIRONMENT
    return LaunchCommand(tuple(command), environment)


def kv_events_config(settings: WorkerSettings, topic: str) -> dict[str, object]:
    """The value of --kv-events-config. Engines bind ipc:// endpoints, but connect to a tcp:// one with an address."""
    # SGLang has no switch: a publisher enables its events.
    switch = {} if settings.engine == "sglang" else {"enable_kv_cache_events": True}
    return {
        **switch,
        "publisher": "zmq",
        "endpoint": f"ipc://{settings.socket_path('events')}",
        "replay_endpoint": f"ipc://{settings.socket_path('replay')}",
        "topic": topic,
    }


def _vllm_flags(settings: WorkerSettings, *, port: int, topic: str, is_cpu: bool) -> _Flags:
    """The flags of vLLM and the sim with these settings; unset sizes are left out, a CPU gets its own block size."""
    block_size = settings.block_size or (_CPU_BLOCK_SIZE if is_cpu else None)
    optional: list[tuple[str, object]] = [
        ("--block-size", block_size),
        ("--num-gpu-blocks-override", settings.num_gpu_blocks_override),
        ("--max-model-len", settings.max_model_len),
    ]
    return [
        ("--model", settings.model),
        ("--served-model-name", settings.model_name),
        ("--host", settings.engine_host),
        ("--port", str(port)),
        ("--enable-lora", None),
        ("--max-loras", str(settings.max_loras)),
        ("--max-cpu-loras", str(settings.max_cpu_loras)),
        ("--max-lora-rank", str(settings.max_lora_rank)),
        ("--max-num-seqs", str(settings.max_num_seqs)),
        ("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        ("--enable-prompt-tokens-details", None),
        ("--enable-scale-out", None),  # serves /inference/v1/generate
        ("--enable-tokenizer-info-endpoint", None),  # serves /tokenizer_info
        ("--shutdown-timeout", str(settings.engine_shutdown_s)),
        ("--kv-events-config", json.dumps(kv_events_config(settings, topic), separators=(",", ":"))),
        *((flag, str(value)) for flag, value in optional if value is not None),
        *([("--enforce-eager", None)] if is_cpu else []),
        *_tls_flags(settings),
    ]


def _tls_flags(settings: WorkerSettings) -> _Flags:
    """vLLM's flags for the agent's own certificate, which vLLM reads again when it changes.

    With the fleet's authorities an engine answers services of the fleet alone: it knows no keys.
    """
    if not settings.speaks_tls_at_engine:
        return []
    only_ours = [("--ssl-ca-certs", str(settings.tls_ca)), ("--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED)))]
    return [
        ("--ssl-certfile", str(settings.tls_cert)),
        ("--ssl-keyfile", str(settings.tls_key)),
        *(only_ours if settings.tls_ca is not None else []),
        ("--enable-ssl-refresh", None),
    ]


def _sglang_flags(settings: WorkerSettings, *, port: int, topic: str, is_cpu: bool) -> _Flags:
    """SGLang's flags (0.5.23 arg_groups/fields/lora.py).

    --max-loras-per-batch counts the base model, too. --max-loaded-loras must be at least that; it also limits adapters
    that requests load again.
    """
    block_size = settings.block_size or _SGLANG_BLOCK_SIZE
    blocks = settings.num_gpu_blocks_override
    optional: list[tuple[str, object]] = [
        ("--context-length", settings.max_model_len),
        ("--max-total-tokens", blocks * block_size if blocks else None),
        ("--lora-backend", "torch_native" if is_cpu else None),  # the others are Triton's
    ]
    per_batch = settings.max_loras + 1
    return [
        ("--model-path", settings.model),
        ("--served-model-name", settings.model_name),
        ("--host", settings.engine_host),
        ("--port", str(port)),
        ("--enable-lora", None),
        ("--max-loras-per-batch", str(per_batch)),
        ("--max-loaded-loras", str(max(settings.max_cpu_loras, per_batch))),
        ("--max-lora-rank", str(settings.max_lora_rank)),
        ("--lora-target-modules", "all"),
        ("--page-size", str(block_size)),
        ("--max-running-requests", str(settings.max_num_seqs)),
        ("--chunked-prefill-size", str(settings.max_num_batched_tokens)),
        ("--enable-metrics", None),
        ("--enable-cache-report", None),
        ("--kv-events-config", json.dumps(kv_events_config(settings, topic), separators=(",", ":"))),
        *((flag, str(value)) for flag, value in optional if value is not None),
    ]


def _sgl_jax_flags(settings: WorkerSettings, *, port: int, is_cpu: bool, adapters: Mapping[str, Path]) -> _Flags:
    """sgl-jax's flags (srt/server_args.py).

    --max-loras-per-batch counts the base model, too, and is the most adapters that it takes at all, plus one. On a CPU
    only `native` attention runs, and compiling ahead for every batch size takes minutes.
    """
    block_size = settings.block_size or _SGLANG_BLOCK_SIZE
    blocks = settings.num_gpu_blocks_override
    optional: list[tuple[str, object]] = [
        ("--context-length", settings.max_model_len),
        ("--max-total-tokens", blocks * block_size if blocks else None),
    ]
    on_cpu: _Flags = [
        ("--device", "cpu"),
        ("--attention-backend", "native"),
        ("--disable-overlap-schedule", None),
        ("--disable-precompile", None),
        ("--skip-server-warmup", None),
    ]
    loras: _Flags = [
        ("--enable-lora", None),
        ("--lora-paths", [f"{name}={folder}" for name, folder in adapters.items()]),
        ("--max-loras-per-batch", str(settings.max_loras + 1)),
        ("--max-lora-rank", str(settings.max_lora_rank)),
        ("--lora-target-modules", "all"),
    ]
    return [
        ("--model-path", settings.model),
        ("--served-model-name", settings.model_name),
        ("--host", settings.engine_host),
        ("--port", str(port)),
        ("--page-size", str(block_size)),
        ("--max-running-requests", str(settings.max_num_seqs)),
        ("--chunked-prefill-size", str(settings.max_num_batched_tokens)),
        ("--enable-cache-report", None),
        *(on_cpu if is_cpu else []),
        *(loras if adapters else []),
        *((flag, str(value)) for flag, value in optional if value is not None),
    ]
