"""The command lines of a local fleet's processes: `python -m <house>` with each house's own settings."""

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorafleet.engine.arguments import has
from lorafleet.local.options import DEFAULT_SLOTS, NOTHING, ServiceOptions, prefix_of
from workers.core.errors import SourceError
from workers.core.peft import CONFIG_NAME, parse_config

LOOPBACK = "127.0.0.1"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM 0.32 takes as --max-lora-rank, less the 1 that nobody trains
_HOST_SLOTS_PER_DEVICE_SLOT = 2  # room for adapters that are warm but not in a batch; a guess, adapters are small
# For the tiny model on a few cores: starts quickest, and is still more than the demo asks for.
_TINY = {
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 4096,
    "block_size": 32,
    "num_gpu_blocks_override": 1024,
}
# Measured on the CPU: decodes twice as fast as bfloat16, and greedy answers do not hang on what else is in the batch.
_TINY_DTYPE = ("--dtype", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBaseModel:
    """The base model as every agent is told of it. `name` is the engine's, `asked_by` the one in requests.

    is_tiny   the one made here
    """

    name: str
    folder: Path
    is_tiny: bool
    asked_by: str = ""


def house_of(name: str) -> str:
    """The service that a process of a local fleet is: `w3` is one of the workers."""
    return name if name in ("router", "orchestrator") else "workers"


def environment(name: str, token: str) -> dict[str, str]:
    """The key for its own calls, where there is one: not on the command line, which everybody may read."""
    return {f"{prefix_of(house_of(name))}TOKEN": token} if token else {}


def agents_environment(engine_words: Sequence[str], lora_roots: Sequence[str], *, is_tiny: bool) -> dict[str, str]:
    """Lists that a person may have added to: whole, and as JSON, because a flag's list is cut at commas."""
    dtype = _TINY_DTYPE if is_tiny and not has(engine_words, "--dtype") else ()
    return {
        "LORAFLEET_WORKERS_ENGINE_ARGS": json.dumps([*dtype, *engine_words]),
        "LORAFLEET_WORKERS_LORA_ROOTS": json.dumps(list(lora_roots)),
    }


def common(port: int, port_file: Path, key_files: Iterable[Path], given: ServiceOptions = NOTHING) -> list[str]:
    """The flags that every service gets: its address and keys, and its file of settings where a person named one."""
    keys = [word for path in key_files for word in ("--key-files", str(path))]
    config = [] if given.config is None else ["--config", str(given.config)]
    words = _flags({"host": LOOPBACK, "port": port, "port_file": port_file}, {"log_format": "console"}, given.values)
    return [*config, *words, *keys]


def orchestrator(shared: Sequence[str], store: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "orchestrator", *shared, "--store", str(store)]


def router(
    shared: Sequence[str], orchestrator_url: str, state_dir: Path, grace_s: float, said: Mapping[str, object]
) -> list[str]:
    """`said` are settings that a person gave: of these nothing is said here, but for what has to be so."""
    defaults = {
        "router_id": "router-0",
        "state_dir": state_dir,
        # No load balancer stands in front of a local fleet that would have to hear of a stop first.
        "drain_s": 0,
        "grace_s": grace_s,
    }
    return [
        sys.executable,
        "-P",
        "-m",
        "router",
        *shared,
        *_flags({"orchestrator_url": orchestrator_url}, defaults, said),
    ]


def agent(
    shared: Sequence[str],
    *,
    name: str,
    engine: str,
    base: LocalBaseModel,
    max_loras: int | None,
    max_lora_rank: int,
    orchestrator_url: str,
    folder: Path,
    sockets: Path,
    said: Mapping[str, object],
) -> list[str]:
    """An agent that starts its engine. `folder` is the fleet's; agents share verified adapters, nothing else.

    max_loras   None: as `said` has it, or our default
    said        settings that a person gave otherwise: of these nothing is said here, but for what has to be so
    """
    own: dict[str, object] = {
        "instance_id": name,
        "engine": engine,
        "engine_port": 0,
        "model": base.folder,
        "state_dir": folder / "workers" / name,
        "ipc_dir": sockets,
        "orchestrator_url": orchestrator_url,
    } | ({} if max_loras is None else {"max_loras": max_loras})
    slots = max_loras or _whole(said.get("max_loras")) or DEFAULT_SLOTS
    defaults: dict[str, object] = {
        "served_model_name": base.name,
        "max_loras": slots,
        "max_cpu_loras": _HOST_SLOTS_PER_DEVICE_SLOT * slots,
        "max_lora_rank": max_lora_rank,
        "cache_dir": folder / "cache",
        # A local fleet's router ends before its workers, and with it all that an engine would have to finish.
        "engine_shutdown_s": 5,
        **(_TINY if base.is_tiny else {}),
    }
    # What an engine says is in its worker's folder; a local fleet's own logs are for what the fleet does.
    quiet = [] if "engine_output" in said else ["--no-engine-output"]
    return [sys.executable, "-P", "-m", "workers", *shared, *_flags(own, defaults, said), *quiet]


def _flags(own: Mapping[str, object], defaults: Mapping[str, object], said: Mapping[str, object]) -> list[str]:
    """`own` as flags, and those defaults that `own` does not have and nobody said anything else for."""
    rest = {name: value for name, value in defaults.items() if name not in said and name not in own}
    every = {**own, **rest}
    return [word for name, value in every.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _whole(value: object) -> int:
    return int(str(value)) if str(value).isdigit() else 0


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
