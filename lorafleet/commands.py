"""The command lines of a local fleet's processes: `python -m <house>` with each house's own settings."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.core.errors import SourceError
from workers.core.peft import CONFIG_NAME, parse_config

LOOPBACK = "127.0.0.1"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM 0.32 takes as --max-lora-rank, less the 1 that nobody trains
_HOST_SLOTS_PER_DEVICE_SLOT = 2  # room for adapters that are warm but not in a batch; a guess, adapters are small
# For the tiny model on a few cores: starts quickest, and is still more than the demo asks for.
_TINY = ("--max-model-len", "4096", "--max-num-seqs", "32", "--max-num-batched-tokens", "4096")
_TINY_BLOCKS = ("--block-size", "32", "--num-gpu-blocks-override", "1024")
# Measured on the CPU: decodes twice as fast as bfloat16, and greedy answers do not hang on what else is in the batch.
_TINY_DTYPE = ("--engine-args=--dtype", "--engine-args=float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The base model as every agent is told of it. `is_tiny`: the one made here."""

    name: str
    folder: Path
    is_tiny: bool


def environment(name: str, token: str) -> dict[str, str]:
    """The key for its own calls, where there is one: not on the command line, which everybody may read."""
    house = name.upper() if name in ("router", "orchestrator") else "WORKERS"
    return {f"LORAFLEET_{house}_TOKEN": token} if token else {}


def common(port: int, port_file: Path, key_files: Iterable[Path]) -> list[str]:
    """What every house is told."""
    keys = [word for path in key_files for word in ("--key-files", str(path))]
    return ["--host", LOOPBACK, "--port", str(port), "--port-file", str(port_file), "--log-format", "console", *keys]


def orchestrator(shared: Sequence[str], store: Path) -> list[str]:
    return [sys.executable, "-m", "orchestrator", *shared, "--store", str(store)]


def router(shared: Sequence[str], orchestrator_url: str, state_dir: Path, grace_s: float) -> list[str]:
    # No load balancer stands in front of a local fleet that would have to hear of a stop first.
    stop = ["--drain-s", "0", "--grace-s", str(grace_s)]
    flags = ["--orchestrator-url", orchestrator_url, "--state-dir", str(state_dir), *stop]
    return [sys.executable, "-m", "router", *shared, "--router-id", "router-0", *flags]


def agent(
    shared: Sequence[str],
    *,
    name: str,
    engine: str,
    base: Base,
    max_loras: int,
    max_lora_rank: int,
    orchestrator_url: str,
    adapters: Path,
    folder: Path,
    sockets: Path,
) -> list[str]:
    """An agent that starts its engine. `folder` is the fleet's; agents share verified adapters, nothing else."""
    flags = {
        "instance-id": name,
        "engine": engine,
        "engine-port": 0,
        "model": base.folder,
        "served-model-name": base.name,
        "max-loras": max_loras,
        "max-cpu-loras": _HOST_SLOTS_PER_DEVICE_SLOT * max_loras,
        "max-lora-rank": max_lora_rank,
        "lora-roots": adapters,
        "cache-dir": folder / "cache",
        "state-dir": folder / "workers" / name,
        "ipc-dir": sockets,
        "orchestrator-url": orchestrator_url,
        # A local fleet's router ends before its workers, and with it all that an engine would have to finish.
        "engine-shutdown-s": 5,
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    tiny = [*_TINY, *_TINY_BLOCKS, *_TINY_DTYPE] if base.is_tiny else []
    # What an engine says is in its worker's folder; a local fleet's own logs are for what the fleet does.
    return [sys.executable, "-m", "workers", *shared, *words, "--no-engine-output", *tiny]


def rank_for(adapters: Iterable[Path]) -> int:
    """The least --max-lora-rank that fits these adapters: every adapter costs what the largest would.

    An adapter counts with the largest rank that its config mentions, `rank_pattern` included, as the agent counts it.
    One whose config the agent refuses counts for nothing: the agent says what is wrong with it.
    """
    largest = 16
    for folder in adapters:
        with contextlib.suppress(OSError, SourceError):
            largest = max(largest, parse_config((folder / CONFIG_NAME).read_bytes()).max_rank)
    return next((rank for rank in _RANKS if rank >= largest), _RANKS[-1])
