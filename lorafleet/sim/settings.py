"""The sim's command line: vLLM's own flags, so that agents start both engines alike, and `--sim-*` flags."""

import argparse
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.engine.vllm_plugin.catalog_offers import OfferReader
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.service.network.tls import TlsFiles

# Flags of vLLM without effect in the sim.
IGNORED_WITH_VALUE = (
    "--attention-backend", "--chat-template-content-format", "--compilation-config", "--cpu-offload-gb",
    "--distributed-executor-backend", "--download-dir", "--dtype", "--generation-config",
    "--gpu-memory-utilization", "--hf-overrides", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--load-format",
    "--lora-dtype", "--max-log-len", "--pipeline-parallel-size", "--quantization", "--reasoning-parser", "--revision",
    "--seed", "--swap-space", "--tensor-parallel-size", "--tokenizer-mode", "--tokenizer-revision",
    "--tool-call-parser", "--uvicorn-log-level",
)  # fmt: skip
IGNORED_SWITCHES = (
    "--async-scheduling", "--disable-access-log-for-endpoints", "--disable-log-requests", "--disable-log-stats",
    "--disable-uvicorn-access-log", "--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-log-requests",
    "--enforce-eager", "--fully-sharded-loras", "--no-async-scheduling",
    "--no-enable-log-requests", "--trust-remote-code",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """The value of --kv-events-config; names and defaults are vLLM's (vllm/config/kv_events.py)."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """None is zmq where events are on."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether KV events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The parsed command line; field names are the flags' names."""

    model: Path
    served_model_name: tuple[str, ...]
    host: str
    port: int
    enable_lora: bool
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_gpu_blocks: int
    enable_prompt_tokens_details: bool
    shutdown_timeout: float
    tls: TlsFiles
    ssl_cert_reqs: ssl.VerifyMode
    kv_events: EventsConfig
    runtime_loras: bool
    has_connector: bool
    int_block_hashes: bool
    dev_mode: bool
    scales_out: bool
    """--enable-scale-out: it has /inference/v1/generate."""
    tells_tokenizer: bool
    """--enable-tokenizer-info-endpoint: it has /tokenizer_info."""
    pools: bool
    """--runner pooling: the model pools, and generates nothing."""
    caches_prefixes: bool
    lora_target_modules: frozenset[str] | None
    lora_reports: Path | None
    """Folder for reports on loaded adapters, as lorafleet's plugin of vLLM writes them."""
    offers: OfferReader
    sim_prefill_tokens_per_s: float
    sim_decode_tokens_per_s: float
    sim_load_s: float
    sim_seed: int
    sim_response_tokens: int
    sim_uncalled: frozenset[str]
    """Last parts of names of modules that an adapter may have and that never run."""


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> SimSettings:
    """Settings from the command line and model config; prints errors and raises SystemExit(2) as argparse does."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    if not (flags.model / "tokenizer.json").is_file():
        parser.error(
            f"--model {flags.model}: no tokenizer.json there; give the folder of a model (nothing is downloaded)"
        )
    limit = flags.max_model_len or _position_limit(flags.model)
    if flags.num_gpu_blocks_override - 1 < -(-limit // flags.block_size):
        parser.error(
            f"--num-gpu-blocks-override {flags.num_gpu_blocks_override}: cannot hold one request of "
            f"--max-model-len {limit} in blocks of {flags.block_size} (one is never used); "
            "give more blocks or a shorter length"
        )
    max_cpu_loras = flags.max_cpu_loras or flags.max_loras
    if max_cpu_loras < flags.max_loras:
        parser.error(f"max_cpu_loras ({max_cpu_loras}) must be >= max_loras ({flags.max_loras}).")
    try:
        kv_events = EventsConfig(**json.loads(flags.kv_events_config))
    except (TypeError, ValueError) as exc:
        parser.error(f"--kv-events-config {flags.kv_events_config}: {exc}; give vLLM's JSON object")
    return SimSettings(
        model=flags.model,
        served_model_name=tuple(flags.served_model_name or [str(flags.model)]),
        host=flags.host,
        port=flags.port,
        enable_lora=flags.enable_lora,
        max_loras=flags.max_loras,
        max_cpu_loras=max_cpu_loras,
        max_lora_rank=flags.max_lora_rank,
        max_model_len=limit,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        block_size=flags.block_size,
        num_gpu_blocks=flags.num_gpu_blocks_override,
        enable_prompt_tokens_details=flags.enable_prompt_tokens_details,
        shutdown_timeout=flags.shutdown_timeout,
        tls=TlsFiles(cert=flags.ssl_certfile, key=flags.ssl_keyfile, ca=flags.ssl_ca_certs),
        ssl_cert_reqs=ssl.VerifyMode(flags.ssl_cert_reqs),
        kv_events=kv_events,
        runtime_loras=_is_set(environment, "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0"),
        has_connector=bool(flags.kv_transfer_config),
        int_block_hashes=_is_set(environment, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1"),
        dev_mode=_is_set(environment, "VLLM_SERVER_DEV_MODE", "0"),
        scales_out=flags.enable_scale_out,
        tells_tokenizer=flags.enable_tokenizer_info_endpoint,
        pools=flags.runner == "pooling",
        caches_prefixes=flags.enable_prefix_caching,
        lora_target_modules=frozenset(flags.lora_target_modules) if flags.lora_target_modules else None,
        lora_reports=Path(environment[REPORTS_VARIABLE]) if environment.get(REPORTS_VARIABLE) else None,
        offers=OfferReader.of(environment),
        sim_prefill_tokens_per_s=flags.sim_prefill_tokens_per_s,
        sim_decode_tokens_per_s=flags.sim_decode_tokens_per_s,
        sim_load_s=flags.sim_load_s,
        sim_seed=flags.sim_seed,
        sim_response_tokens=flags.sim_response_tokens,
        sim_uncalled=frozenset(flags.sim_uncalled),
    )


def _parser() -> argparse.ArgumentParser:
    """The argument parser with vLLM's flags and the sim's."""
    parser = argparse.ArgumentParser(prog="python -m lorafleet.sim", description=__doc__, allow_abbrev=False)
    vllm = parser.add_argument_group("vLLM's flags")
    vllm.add_argument("--model", type=Path, required=True)
    vllm.add_argument("--served-model-name", nargs="+")
    vllm.add_argument("--host", default="0.0.0.0")  # noqa: S104 - vLLM's default; agents say 127.0.0.1
    vllm.add_argument("--port", type=int, default=8000)
    vllm.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--max-loras", type=_positive, default=1)
    vllm.add_argument("--max-cpu-loras", type=_positive)
    vllm.add_argument("--max-lora-rank", type=int, choices=(1, 8, 16, 32, 64, 128, 256, 320, 512), default=16)
    vllm.add_argument("--lora-target-modules", nargs="+", help="other modules of an adapter are ignored")
    vllm.add_argument("--max-model-len", type=_positive)
    vllm.add_argument("--max-num-batched-tokens", type=_positive, default=2048)
    vllm.add_argument("--max-num-seqs", type=_positive, default=256)
    vllm.add_argument("--block-size", type=_positive, default=16)
    vllm.add_argument("--num-gpu-blocks-override", type=_positive, default=8192)
    vllm.add_argument("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--enable-scale-out", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--enable-tokenizer-info-endpoint", action=argparse.BooleanOptionalAction, default=False)
    vllm.add_argument("--shutdown-timeout", type=float, default=0.0)
    vllm.add_argument("--ssl-certfile", type=Path)
    vllm.add_argument("--ssl-keyfile", type=Path)
    vllm.add_argument("--ssl-ca-certs", type=Path)
    vllm.add_argument("--ssl-cert-reqs", type=int, default=int(ssl.CERT_NONE))
    vllm.add_argument("--enable-ssl-refresh", action="store_true", help="always on here")
    vllm.add_argument("--runner", choices=("auto", "generate", "pooling", "draft"), default="auto")
    vllm.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="shown in the metrics"
    )
    vllm.add_argument("--kv-events-config", default="{}")
    vllm.add_argument("--kv-transfer-config", default="", help="shown in the metrics; nothing is transferred")
    for flag in IGNORED_WITH_VALUE:
        vllm.add_argument(flag, help=argparse.SUPPRESS)
    for flag in IGNORED_SWITCHES:
        vllm.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    sim = parser.add_argument_group("the simulation (rates of 0 mean: takes no time)")
    sim.add_argument("--sim-prefill-tokens-per-s", type=float, default=20_000.0)
    sim.add_argument("--sim-decode-tokens-per-s", type=float, default=200.0, help="of one request")
    sim.add_argument("--sim-load-s", type=float, default=0.01, help="stall for one adapter read from disk")
    sim.add_argument("--sim-seed", type=int, default=0, help="another seed, other texts")
    sim.add_argument("--sim-response-tokens", type=int, default=0, help="answers end by themselves here; 0: never")
    sim.add_argument("--sim-uncalled", nargs="+", default=(), help="modules that are taken and never run")
    return parser


def _positive(text: str) -> int:
    """The argument as an int of at least 1. Raises argparse.ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def _is_set(environment: Mapping[str, str], name: str, default: str) -> bool:
    """Whether an environment variable, or its default, is `1` or `true`."""
    return environment.get(name, default).strip().lower() in {"1", "true"}


def _position_limit(model: Path) -> int:
    """The context length in the model's config, which is read."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return int(config["max_position_embeddings"])
