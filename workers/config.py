"""Settings of the agent."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.settings import ServiceSettings, Url, whole_url
from lorafleet.service.sockets import UNIX_PATH_BYTES
from workers.engines.base import STATIC


def _home(kind: str) -> Path:
    return Path.home() / (".cache" if kind == "cache" else ".local/state") / "lorafleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTimers:
    """What nobody has to set; a test that waits for one of them gives a shorter one."""

    # A prompt is in no count of vLLM's before its first step is over, and a beam search never is: one request a token
    # and beam, each over with its step (0.32, seen running). So an engine is idle after so long without either, and
    # after no less than two steps. vLLM's own count of calls (`/load`) is no help: it falls below zero when clients
    # leave.
    quiet_s: float = 2.0
    heartbeat_answer_s: float = 5.0
    watch_s: float = 1.0  # between two questions for an engine's health
    attached_s: float = 3.0  # without health, and an engine of others is taken for gone


TIMERS = AgentTimers()


class WorkerSettings(ServiceSettings):
    """The agent beside one engine: starts and watches it, and holds its adapters."""

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_WORKERS_")

    port: int = Field(default=8090, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    instance_id: str = Field(
        default="worker-0",
        pattern=r"^[A-Za-z0-9._-]{1,100}$",
        description="this worker's name in the fleet; unique, and the same after a restart",
    )
    pool: str = Field(default="", description="what is scaled together: the name that pool metrics have it under")
    zone: str = Field(default="", description="failure zone that the orchestrator spreads over")
    node: str = Field(default="", description="machine that the orchestrator spreads over")
    namespace: str = Field(default="default", description="namespace shown in the metadata")

    engine: Literal["vllm", "sglang", "sim"] = Field(
        default="vllm", description="engine to start, or that runs at engine_url; see docs/engines.md"
    )
    engine_url: Url = Field(default="", description="use this running engine instead of starting one")
    engine_host: str = Field(default="127.0.0.1", description="address the engine listens on")
    engine_port: int = Field(default=8100, ge=0, le=65535, description="port of the engine; 0 picks a free one")
    engine_advertise_url: Url = Field(default="", description="engine URL that routers use, if not its own address")
    engine_args: tuple[str, ...] = Field(
        default=(), description='further engine arguments, each by itself, as a JSON list: ["--seed", "1"]'
    )
    engine_salt: EngineSalt = Field(
        default="auto",
        description="adapters at an engine with a KV connector, see docs/engines.md: auto, as its arguments say;"
        " always or never salted; no_adapters",
    )
    engine_output: bool = Field(
        default=True, description="pass the engine's output on to stderr; it is in state_dir/engine.log, too"
    )
    engine_shutdown_s: int = Field(default=20, ge=0, description="seconds the engine may take to finish requests")
    device_profile: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="cpu: the settings that an engine needs on a CPU; auto: by vLLM's build, or SGLANG_USE_CPU_ENGINE",
    )

    model: str = Field(default="", description="folder (or, on a GPU, hub name) of the base model")
    served_model_name: str = Field(default="", description="what the engine calls the base model; default: as `model`")
    base_model: str = Field(default="", description="its name in the fleet, and in requests; default: the served name")
    max_loras: int = Field(default=4, ge=1, description="adapters in one batch: the engine's device slots")
    max_cpu_loras: int = Field(default=16, ge=1, description="adapters this worker holds: the engine's host slots")
    max_lora_rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(int)] = Field(
        default=64, description="largest rank; the engine pads every adapter to it"
    )
    block_size: int | None = Field(default=None, ge=1, description="tokens a KV block; default: the engine's (CPU: 32)")
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, description="KV blocks; default: what fits")
    max_model_len: int | None = Field(default=None, ge=1, description="tokens a request; default: the model's")
    max_num_seqs: int = Field(default=256, ge=1, description="requests in one batch")
    max_num_batched_tokens: int = Field(default=8192, ge=1, description="tokens in one engine step")

    lora_path: Path | None = Field(
        default=None, description="folder scanned for adapters: a subfolder's path below it is its lora_id"
    )
    lora_roots: tuple[Path, ...] = Field(default=(), description="further folders that sources may name")
    source_prefixes: tuple[str, ...] = Field(
        default=(), description="remote sources that adapters may have, as s3://bucket/team; none named: any"
    )
    source_networks: tuple[str, ...] = Field(
        default=(), description="networks not public that https:// sources may be on, as 10.0.0.0/8"
    )
    source_netrc: Path | None = Field(
        default=None, description="netrc file with users and passwords for https:// sources, by host"
    )
    hf_token_file: Path | None = Field(
        default=None,
        description="file with the token for hf:// sources; default: huggingface_hub's own, HF_TOKEN",
    )
    secrets_dir: Path | None = Field(
        default=None,
        description="credentials that adapters name: <name>/<key> below it, and <name>/sources, which says what for",
    )
    source_timeout_s: float = Field(default=30.0, gt=0, description="seconds a source may send nothing")
    source_attempts: int = Field(default=5, ge=1, description="times in a row that a source is asked without success")
    parallel_fetches: int = Field(default=4, ge=1, description="adapters fetched at a time")
    source_parts: int = Field(default=4, ge=1, description="parts of a file fetched at a time, from object stores")
    lora_downloader_plugin: str = Field(
        default="", description="package.module.Class of a workers.plugin.LoraManager: fetches adapters by name"
    )
    preload_loras: tuple[str, ...] = Field(default=(), description="adapters of lora_path loaded before ready")
    cache_dir: Path = Field(default=_home("cache"), description="verified adapters, one folder a digest; may be shared")
    max_disk_bytes: int = Field(
        default=0,
        ge=0,
        description="most bytes of adapters in cache_dir, least recently used go first; 0: half of its file system",
    )
    cache_grace_s: float = Field(
        default=60.0, ge=1, description="seconds an unused adapter stays in cache_dir at least"
    )
    cache_lease_s: float = Field(
        default=900.0, ge=1, description="seconds of silence after which another agent's adapters count as unused"
    )
    state_dir: Path | None = Field(
        default=None, description="this worker's record and engine log; default: ~/.local/state/lorafleet/<instance_id>"
    )
    ipc_dir: Path = Field(
        default=Path(tempfile.gettempdir()) / f"lorafleet-{os.getuid()}",
        description="folder of the KV event sockets; keep it short, a socket's whole path has at most 107 bytes",
    )
    max_adapter_bytes: int = Field(default=8 << 30, ge=1, description="largest adapter, in bytes on disk")
    allow_pickle: bool = Field(
        default=False,
        description="take adapter_model.bin too: converted, with torch's weights_only, before it is verified",
    )
    base_model_check: Literal["name", "exact", "off"] = Field(
        default="name", description="how an adapter's own base model is compared: last path part, whole, or not"
    )
    check_shapes: bool = Field(default=True, description="hold adapters against the shapes of a local base model")

    orchestrator_url: str = Field(
        default="",
        description="where to send heartbeats; of several, by commas, the one that answers; none: it stands alone",
    )
    advertise_url: Url = Field(default="", description="this agent's URL for others; default: host and port")
    heartbeat_s: float = Field(default=1.0, gt=0, description="seconds between heartbeats when nothing changes")
    warm_deadline_s: float = Field(
        default=60.0,
        ge=0,
        description="how long a new worker may wait for its share of hot adapters before it is ready; 0: not at all",
    )
    scrape_s: float = Field(default=1.0, gt=0, description="seconds between readings of the engine's metrics")
    scan_s: float = Field(default=5.0, gt=0, description="seconds between looks at lora_path and the engine's list")

    start_deadline_s: float = Field(default=900.0, gt=0, description="seconds the engine may take to start")
    fetch_deadline_s: float = Field(default=600.0, gt=0, description="seconds a source may take")
    load_deadline_s: float = Field(default=120.0, gt=0, description="seconds the engine may take to load an adapter")
    health_timeout_s: float = Field(default=5.0, gt=0, description="seconds the engine may take to say it is healthy")
    hang_after_s: float = Field(default=60.0, gt=0, description="seconds without health before a restart")
    suspect_after_s: float = Field(
        default=10.0,
        gt=0,
        description="seconds an engine may have requests and compute nothing until it is suspect",
    )
    stuck_after_s: float = Field(
        default=120.0, gt=0, description="seconds in which a suspect engine gives no token before a restart"
    )
    crash_loop_after: int = Field(default=5, ge=1, description="failures in a row after which restarts become slow")
    crash_loop_retry_s: float = Field(default=60.0, gt=0, description="seconds between such slow restarts")
    event_buffer: int = Field(default=1000, ge=1, description="events kept for those who reconnect")
    keep_alive_s: float = Field(default=15.0, gt=0, description="seconds between signs of life on the event stream")
    stop_grace_s: float = Field(
        default=30.0, ge=1, allow_inf_nan=False, description="seconds open calls may take when stopping"
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _is_driven(cls, kind: object) -> object:
        if isinstance(kind, str) and (traits := STATIC.get(kind)):
            raise ValueError(
                f"{kind} takes adapters {traits.takes_adapters} alone, so no agent can load them; an agent drives vllm,"
                " sglang or sim, see docs/engines.md"
            )
        return kind

    @field_validator("engine_args")
    @classmethod
    def _are_apart(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            flag, _, rest = word.partition(" ")
            if flag.startswith("--") and "=" not in flag and rest:
                raise ValueError(f"each argument by itself: {flag!r}, {rest!r}; found {word!r} as one")
        return words

    @field_validator("orchestrator_url")
    @classmethod
    def _are_whole(cls, urls: str) -> str:
        for url in urls.split(","):
            whole_url(url.strip())
        return urls

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.model and not self.engine_url:
            raise ValueError("model: give the base model's folder, or engine_url of a running engine")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.max_loras}")
        for network in self.source_networks:
            ip_network(network)  # its ValueError says what is wrong
        path = str(self.socket_path("replay"))
        if len(path.encode()) > UNIX_PATH_BYTES:
            raise ValueError(
                f"ipc_dir: socket path {path} has {len(path.encode())} bytes, at most {UNIX_PATH_BYTES} are possible;"
                " give a shorter ipc_dir"
            )
        return self

    @property
    def orchestrator_urls(self) -> tuple[str, ...]:
        """Of one fleet's orchestrators, whichever leads: the others hand heartbeats on to it."""
        return tuple(url.strip().rstrip("/") for url in self.orchestrator_url.split(",") if url.strip())

    @property
    def state(self) -> Path:
        return self.state_dir or _home("state") / self.instance_id

    @property
    def tidy_s(self) -> float:
        """How often leases are renewed: well within them, and so that half the grace is left after any use."""
        return min(self.cache_lease_s / 3, self.cache_grace_s / 2)

    @property
    def base_name(self) -> str:
        return self.base_model or self.model_name

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model

    def socket_path(self, kind: str) -> Path:
        """Where the engine binds its `events` or `replay` socket; the state folder tells two workers apart."""
        worker = hashlib.sha256(str(self.state.absolute()).encode()).hexdigest()[:12]
        return self.ipc_dir.absolute() / f"{worker}.{kind}"
