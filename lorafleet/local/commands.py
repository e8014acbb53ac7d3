"""The command lines of a local fleet's processes: `python -m <service>` with each service's settings."""

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lorafleet.engine.arguments import has_flag
from lorafleet.local.options import DEFAULT_SLOTS, NO_OPTIONS, FleetOptions, ServiceOptions, prefix_of
from lorafleet.service.network.tls import TlsFiles
from workers.core.errors import SourceError
from workers.verification.peft import CONFIG_NAME, parse_config

LOOPBACK = "127.0.0.1"
_NO_TLS = TlsFiles()
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM 0.32's --max-lora-rank, without 1
_HOST_SLOTS_PER_DEVICE_SLOT = 2  # a guess: adapters are small
_ENGINE_SHUTDOWN_S = 5  # the router stops first, and with it every request of the engines
_AGENT_SPARE_S = 10.0  # an agent kills its engine so long after `engine_shutdown_s`: workers/agent/supervisor.py
# Behind the times that a service's settings give to requests: last reports, a released lease, closed files, and the end
# of the interpreter. Under a second, but for a starved machine; helm/lorafleet and the router's parent leave as much.
_STOP_SPARE_S = 10.0
# For the tiny model on a few cores: the fastest start that still fits the demo.
_TINY = {
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 4096,
    "block_size": 32,
    "num_gpu_blocks_override": 1024,
}
# On a CPU float32 decodes twice as fast as bfloat16, and greedy answers do not depend on the rest of the batch.
_TINY_DTYPE = ("--dtype", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBaseModel:
    """The base model that every agent serves.

    name          the engine's name for it; `request_name` is the name in requests
    is_tiny       whether it is the generated demo model
    """

    name: str
    folder: Path
    is_tiny: bool
    request_name: str = ""


def service_of(name: str) -> str:
    """The service of a process: router and orchestrator by their names, else "workers", as for `w3`."""
    return name if name in ("router", "orchestrator") else "workers"


KEY_SCOPES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "orchestrator": {"TOKEN": ("load",), "AGENT_TOKEN": ("agent",)},
        "router": {"TOKEN": ("load",), "AGENT_TOKEN": ("agent-load",)},
        "workers": {"TOKEN": ("worker", "drain")},
    }
)
"""Service -> setting with a key -> that key's scopes: a key opens what its holder calls, and nothing else."""


def token_environment(name: str, tokens: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """The variables with a process's own API keys, if there are any. Command lines can be read by every user.

    tokens  (service, setting) -> key
    """
    own = service_of(name)
    return {f"{prefix_of(own)}{setting}": token for (service, setting), token in tokens.items() if service == own}


def engine_environment(options: FleetOptions, lora_roots: Sequence[str], *, is_tiny: bool) -> dict[str, str]:
    """Engine arguments and adapter folders as variables in JSON: a flag's list would be split at commas."""
    dtype = _TINY_DTYPE if is_tiny and not has_flag(options.known_arguments, "--dtype") else ()
    return {
        "LORAFLEET_WORKERS_ENGINE_ARGS": json.dumps([*dtype, *options.engine_arguments]),
        "LORAFLEET_WORKERS_LORA_ROOTS": json.dumps(list(lora_roots)),
    }


def preload_environment(folder: Path, lora_ids: Iterable[str]) -> dict[str, str]:
    """The variables of an agent that is to start its engine with these adapters of a folder."""
    return {
        "LORAFLEET_WORKERS_LORA_PATH": str(folder),
        "LORAFLEET_WORKERS_PRELOAD_LORAS": json.dumps(sorted(lora_ids)),
    }


def common_flags(
    port: int,
    port_file: Path,
    key_files: Iterable[Path],
    given: ServiceOptions = NO_OPTIONS,
    tls: TlsFiles = _NO_TLS,
) -> list[str]:
    """Flags of every service: its address, keys and certificate, and its settings file if one is given."""
    keys = [word for path in key_files for word in ("--key-files", str(path))]
    config = [] if given.config is None else ["--config", str(given.config)]
    certificate = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}
    fixed: dict[str, object] = {"host": LOOPBACK, "port": port, "port_file": port_file}
    fixed |= {name: file for name, file in certificate.items() if file is not None}
    words = _setting_flags(fixed, {"log_format": "console"}, given.values)
    return [*config, *words, *keys]


def stop_timeout_s(service: str, given: ServiceOptions, grace_s: float) -> float:
    """Seconds after SIGTERM before a service is killed: more than it needs to cut off its requests and end in order."""
    if service == "router":
        return given.number("drain_s", 0.0) + given.number("grace_s", grace_s) + _STOP_SPARE_S
    requests_s = given.number("stop_grace_s", grace_s)
    if service == "orchestrator":
        return requests_s + _STOP_SPARE_S
    return requests_s + given.number("engine_shutdown_s", _ENGINE_SHUTDOWN_S) + _AGENT_SPARE_S + _STOP_SPARE_S


def orchestrator_command(
    shared: Sequence[str], store: Path, upload_store: str | None, grace_s: float, given: Mapping[str, object]
) -> list[str]:
    """The orchestrator's command. `upload_store`: None leaves it to the environment; `given` replaces defaults."""
    kept = [] if upload_store is None else ["--upload-store", upload_store]
    words = _setting_flags({"store": store}, {"stop_grace_s": grace_s}, given)
    return [sys.executable, "-P", "-m", "orchestrator", *shared, *words, *kept]


def router_command(
    shared: Sequence[str], orchestrator_url: str, state_dir: Path, grace_s: float, given: Mapping[str, object]
) -> list[str]:
    """The router's command; `given` settings replace its defaults."""
    defaults = {
        "router_id": "router-0",
        "state_dir": state_dir,
        # A local fleet has no load balancer that must notice a stop first.
        "drain_s": 0,
        "grace_s": grace_s,
    }
    return [
        sys.executable,
        "-P",
        "-m",
        "router",
        *shared,
        *_setting_flags({"orchestrator_url": orchestrator_url}, defaults, given),
    ]


def agent_command(
    shared: Sequence[str],
    *,
    name: str,
    engine: str,
    base: LocalBaseModel,
    max_loras: int | None,
    max_lora_rank: int | None,
    needed_rank: int,
    orchestrator_url: str,
    folder: Path,
    sockets: Path,
    grace_s: float,
    given: Mapping[str, object],
) -> list[str]:
    """The command of an agent that starts its engine.

    folder       the fleet's state folder; agents share its cache of verified adapters
    max_loras, max_lora_rank  None takes the value in `given`, or our default
    needed_rank  the largest rank of its adapters: our default for `max_lora_rank`
    given        settings from environment, file or engine arguments, which replace the defaults
    """
    fixed: dict[str, object] = {
        "instance_id": name,
        "engine": engine,
        "engine_port": 0,
        "model": base.folder,
        "state_dir": folder / "workers" / name,
        "ipc_dir": sockets,
        "orchestrator_url": orchestrator_url,
    }
    if record := given.get("record_dir"):
        fixed["record_dir"] = Path(str(record)) / name  # no two agents share one
    flags = {"max_loras": max_loras, "max_lora_rank": max_lora_rank}
    fixed |= {name: value for name, value in flags.items() if value is not None}
    slots = max_loras or _whole_number(given.get("max_loras")) or DEFAULT_SLOTS
    defaults: dict[str, object] = {
        "served_model_name": base.name,
        "max_loras": slots,
        "max_cpu_loras": _HOST_SLOTS_PER_DEVICE_SLOT * slots,
        "max_lora_rank": needed_rank,
        "cache_dir": folder / "cache",
        "engine_shutdown_s": _ENGINE_SHUTDOWN_S,
        "stop_grace_s": grace_s,
        **(_TINY if base.is_tiny else {}),
    }
    # The engine's output is in its worker's folder, not in the agent's log.
    quiet = [] if "engine_output" in given else ["--no-engine-output"]
    return [sys.executable, "-P", "-m", "workers", *shared, *_setting_flags(fixed, defaults, given), *quiet]


def _setting_flags(
    fixed: Mapping[str, object], defaults: Mapping[str, object], given: Mapping[str, object]
) -> list[str]:
    """Flags and values of all `fixed` settings, and of the defaults that neither `fixed` nor `given` has."""
    used_defaults = {name: value for name, value in defaults.items() if name not in given and name not in fixed}
    flags = {**fixed, **used_defaults}
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _whole_number(value: object) -> int:
    """The number if its text is digits; 0 for anything else."""
    return int(str(value)) if str(value).isdigit() else 0


def rank_for(adapters: Iterable[Path]) -> int:
    """The smallest --max-lora-rank that fits these adapters by their configs: every adapter takes memory for it.

    An adapter's rank is the largest in its config, `rank_pattern` included. Configs that an agent would refuse are left
    out.
    """
    largest = 16
    for folder in adapters:
        with contextlib.suppress(OSError, SourceError):
            largest = max(largest, parse_config((folder / CONFIG_NAME).read_bytes()).max_rank)
    return next((rank for rank in _RANKS if rank >= largest), _RANKS[-1])
