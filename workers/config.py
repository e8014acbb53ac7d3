"""Settings of the agent."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.engine.canary import CanaryMode
from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.network.sockets import UNIX_PATH_BYTES
from lorafleet.service.other_names import OtherName
from lorafleet.service.settings import ServiceSettings, Url, checked_url
from workers.engines.base import UNSUPPORTED_ENGINES


def _user_folder(kind: str) -> Path:
    """This user's folder of lorafleet: below ~/.cache for `kind` "cache", else below ~/.local/state."""
    return Path.home() / (".cache" if kind == "cache" else ".local/state") / "lorafleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTimers:
    """Intervals that are no settings; tests pass shorter ones.

    quiet_s             a drained engine is idle after so long without requests, and at least two steps
    heartbeat_answer_s  timeout of a heartbeat
    watch_s             between two health checks of the engine
    attached_s          an attached engine counts as gone after so long without health
    """

    # vLLM 0.32 counts a prompt only after its first step, and a beam search never: it is one request per token and
    # beam. vLLM's own count of calls (`/load`) does not help: it falls below zero when clients disconnect.
    quiet_s: float = 2.0
    heartbeat_answer_s: float = 5.0
    watch_s: float = 1.0
    attached_s: float = 3.0


TIMERS = AgentTimers()


_SERVES_ADAPTERS = OtherName(only="true", advice="an agent always serves adapters; leave it out")
_LOADS_AT_RUN_TIME = OtherName(only="true", advice="an agent always loads adapters at run time; leave it out")
_OTHER_NAMES: Mapping[str, OtherName] = {
    # Dynamo's design of LoRA support: variables of its worker's pod, and keys of its two files.
    "DYNAMO_LORA_PATH": OtherName("lora_path"),
    "VLLM_ENABLE_LORA": _SERVES_ADAPTERS,
    "VLLM_MAX_LORAS": OtherName("max_loras"),
    "VLLM_MAX_LORA_RANK": OtherName("max_lora_rank"),
    "VLLM_PRELOAD_LORAS": OtherName("preload_loras"),
    # vLLM's RFC of production LoRA serving.
    "VLLM_LORA_ADAPTER_CACHE": OtherName("record_dir"),
    "enable_lora": _SERVES_ADAPTERS,
    "enable_dynamic_loading": _LOADS_AT_RUN_TIME,
    "vllm_server_url": OtherName("engine_url"),
    # SGLang and sgl-jax.
    "lora_paths": OtherName(
        advice="give the folder that the adapters are in as --lora-path and their names below it as --preload-loras, or"
        " the engine's own command behind `--`"
    ),
    "max_loras_per_batch": OtherName(advice="it counts the base model, too: give --max-loras, which is one less"),
}


class WorkerSettings(ServiceSettings):
    """The agent beside one engine: starts, watches and restarts it, and loads its adapters."""

    file_section: ClassVar[str] = "worker"
    other_names: ClassVar[Mapping[str, OtherName]] = _OTHER_NAMES

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_WORKERS_")

    port: int = Field(default=8090, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    instance_id: str = Field(
        default="worker-0",
        pattern=r"^[A-Za-z0-9._-]{1,100}$",
        description="this worker's name in the fleet; must be unique, and stay the same over restarts",
    )
    pool: str = Field(default="", description="name of the pool that is scaled together, a label of the pool metrics")
    zone: str = Field(default="", description="failure zone; the orchestrator spreads replicas over zones")
    node: str = Field(default="", description="machine; the orchestrator spreads replicas over machines")
    namespace: str = Field(default="default", description="namespace in the metadata")
    component: str = Field(default="worker", description="component in the metadata")

    engine: Literal["vllm", "sglang", "sgl-jax", "sim"] = Field(
        default="vllm", description="kind of the engine that is started or runs at engine_url; see docs/engines.md"
    )
    engine_url: Url = Field(default="", description="use this running engine instead of starting one")
    engine_host: str = Field(default="127.0.0.1", description="address the engine listens on")
    engine_port: int = Field(default=8100, ge=0, le=65535, description="port of the engine; 0 picks a free one")
    engine_advertise_url: Url = Field(default="", description="engine URL that routers use, if not its own address")
    engine_args: tuple[str, ...] = Field(
        default=(), description='further engine arguments as a JSON list, one per word: ["--seed", "1"]'
    )
    engine_salt: EngineSalt = Field(
        default="auto",
        description="cache salt of adapters at an engine with a KV connector, see docs/engines.md: auto (from the"
        " engine's arguments), always, never, or no_adapters",
    )
    engine_output: bool = Field(
        default=True, description="copy the engine's output to stderr; it is always in state_dir/engine.log"
    )
    engine_shutdown_s: int = Field(default=20, ge=0, description="seconds the engine may take to finish requests")
    device_profile: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="cpu sets the flags that engines need on a CPU; auto detects vLLM's build or SGLANG_USE_CPU_ENGINE",
    )

    model: str = Field(default="", description="folder (or, on a GPU, hub name) of the base model")
    served_model_name: str = Field(default="", description="the engine's name of the base model; default: `model`")
    base_model: str = Field(
        default="", description="the base model's name in the fleet and in requests; default: served_model_name"
    )
    max_loras: int = Field(default=4, ge=1, description="adapters in one batch: the engine's device slots")
    max_cpu_loras: int = Field(default=16, ge=1, description="adapters loaded at a time: the engine's host slots")
    max_lora_rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(int)] = Field(
        default=64, description="largest rank; the engine pads every adapter to it"
    )
    block_size: int | None = Field(
        default=None, ge=1, description="tokens per KV block; default: the engine's (CPU: 32)"
    )
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, description="KV blocks; default: as many as fit")
    max_model_len: int | None = Field(default=None, ge=1, description="tokens per request; default: the model's")
    max_num_seqs: int = Field(default=256, ge=1, description="requests in one batch")
    max_num_batched_tokens: int = Field(default=8192, ge=1, description="tokens in one engine step")

    lora_path: Path | None = Field(
        default=None, description="folder scanned for adapters; the lora_id is the subfolder's path below it"
    )
    lora_roots: tuple[Path, ...] = Field(default=(), description="further folders that file:// sources may be in")
    source_prefixes: tuple[str, ...] = Field(
        default=(), description="allowed prefixes of remote sources, for example s3://bucket/team; default: any source"
    )
    source_networks: tuple[str, ...] = Field(
        default=(), description="non-public networks that https:// sources may be in, for example 10.0.0.0/8"
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
        description="folder of credentials for adapters: files <name>/<key>, and <name>/sources with allowed prefixes",
    )
    source_timeout_s: float = Field(default=30.0, gt=0, description="seconds a source may send nothing")
    source_attempts: int = Field(default=5, ge=1, description="attempts in a row without progress before a fetch fails")
    parallel_fetches: int = Field(default=4, ge=1, description="adapters fetched at a time")
    source_parts: int = Field(default=4, ge=1, description="parts of one object-store file fetched at a time")
    max_uploads: int = Field(
        default=8,
        ge=1,
        description="adapters' files that this agent sends to other workers and fleets at a time; more are refused",
    )
    upload_bytes_per_s: int = Field(
        default=512 << 20,
        ge=0,
        description="bytes a second of all these files together, so that answers have their share; 0: no limit",
    )
    lora_downloader_plugin: str = Field(
        default="",
        description="package.module.Class of a workers.plugin.LoraDownloaderBase that fetches adapters by name;"
        " default: workers.plugin.HuggingFaceDownloader, unless lora_path is set",
    )
    preload_loras: tuple[str, ...] = Field(
        default=(),
        description="adapters of lora_path that are loaded before the worker is ready; at sgl-jax all that it serves",
    )
    cache_dir: Path = Field(
        default=_user_folder("cache"),
        description="folder of verified adapters, one subfolder per digest; may be shared",
    )
    max_disk_bytes: int = Field(
        default=0,
        ge=0,
        description="limit for adapters in cache_dir, in bytes; the least recently used are deleted first;"
        " 0: half of its file system",
    )
    cache_grace_s: float = Field(
        default=60.0, ge=1, description="seconds that an unused adapter stays in cache_dir at least"
    )
    cache_lease_s: float = Field(
        default=900.0, ge=1, description="seconds without a sign of another agent until its adapters count as unused"
    )
    state_dir: Path | None = Field(
        default=None,
        description="folder of this worker's installed adapters and engine log;"
        " default: ~/.local/state/lorafleet/<instance_id>",
    )
    record_dir: Path | None = Field(
        default=None,
        description="folder with a JSON file for each adapter that the engine should have, named after it, written"
        " after its load and read at start; of this worker alone; default: `adapters` in state_dir",
    )
    ipc_dir: Path = Field(
        default=Path(tempfile.gettempdir()) / f"lorafleet-{os.getuid()}",
        description="folder of the KV event sockets; keep it short: a socket's path has at most 107 bytes",
    )
    max_adapter_bytes: int = Field(default=8 << 30, ge=1, description="largest adapter, in bytes on disk")
    allow_pickle: bool = Field(
        default=False,
        description="accept adapter_model.bin too: it is converted with torch's weights_only and then verified",
    )
    base_model_check: Literal["name", "exact", "off"] = Field(
        default="name",
        description="comparison of an adapter's base model with this worker's: the model's own name (without owner,"
        " folders, quantization or format), the whole name, or none",
    )
    canary: CanaryMode = Field(
        default="refuse",
        description="compare the engine's answers with and without a new adapter where the engine does not say which"
        " of its modules it has: refuse an adapter that changes nothing, warn of it, or do not compare",
    )
    canary_timeout_s: float = Field(
        default=2.0, gt=0, description="seconds that comparison may take; after that the adapter is ready, unproved"
    )
    offer_loads: bool = Field(
        default=True,
        description="vLLM loads an adapter again with the request that waits for it, in place of a call before it",
    )
    acceptance_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="seconds that the comparison with an adapter's acceptance file may take; after that it is unknown",
    )
    probe_modules: Literal["auto", "always", "off"] = Field(
        default="auto",
        description="measure with small adapters, while the engine is idle, on which kinds of modules an adapter has an"
        " effect in it, once for each version, base model and command: auto does so for vllm alone",
    )
    ignored_modules: Literal["auto", "accept", "refuse"] = Field(
        default="auto",
        description="adapters of which the engine ignores some modules: auto refuses those that lose all experts,"
        " accept takes them, too, refuse takes none; those that lose everything are always refused",
    )
    check_shapes: bool = Field(default=True, description="compare adapters with the shapes of a local base model")

    orchestrator_url: str = Field(
        default="",
        description="orchestrator that gets the heartbeats; several, separated by commas, are tried in turn;"
        " empty: no orchestrator",
    )
    advertise_url: Url = Field(default="", description="this agent's URL for others; default: host and port")
    heartbeat_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds between heartbeats when nothing changes; default: as the orchestrator says, its"
        " `heartbeat_interval_s`",
    )
    warm_deadline_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds that a new worker may wait for its share of hot adapters before it is ready; 0: no wait",
    )
    scrape_s: float = Field(default=1.0, gt=0, description="seconds between readings of the engine's metrics")
    scan_s: float = Field(default=5.0, gt=0, description="seconds between scans of lora_path and the engine's list")

    start_deadline_s: float = Field(default=900.0, gt=0, description="seconds the engine may take to start")
    fetch_deadline_s: float = Field(default=600.0, gt=0, description="seconds a source may take")
    load_deadline_s: float = Field(default=120.0, gt=0, description="seconds the engine may take to load an adapter")
    health_timeout_s: float = Field(
        default=5.0, gt=0, description="timeout of a health check of the engine, in seconds"
    )
    hang_after_s: float = Field(default=60.0, gt=0, description="seconds without health before the engine is restarted")
    suspect_after_s: float = Field(
        default=10.0,
        gt=0,
        description="seconds an engine may have requests without computing before it becomes suspect",
    )
    stuck_after_s: float = Field(
        default=120.0, gt=0, description="seconds a suspect engine may return no token before it is restarted"
    )
    crash_loop_after: int = Field(default=5, ge=1, description="failures in a row that count as a crash loop")
    crash_loop_retry_s: float = Field(default=60.0, gt=0, description="seconds between restarts in a crash loop")
    event_buffer: int = Field(default=1000, ge=1, description="events kept for clients that reconnect")
    keep_alive_s: float = Field(default=15.0, gt=0, description="seconds between comments on the event stream")
    stop_grace_s: float = Field(
        default=30.0, ge=1, allow_inf_nan=False, description="seconds that open requests may take during shutdown"
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _refuse_unsupported_engine(cls, kind: object) -> object:
        """Raises ValueError for a kind of engine that no agent can drive."""
        if isinstance(kind, str) and (traits := UNSUPPORTED_ENGINES.get(kind)):
            raise ValueError(
                f"{kind} takes adapters {traits.takes_adapters} alone, so no agent can load them; an agent drives vllm,"
                " sglang, sgl-jax or sim; see docs/engines.md"
            )
        return kind

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        """Raises ValueError if a flag and its value are one word."""
        for word in words:
            flag, _, value = word.partition(" ")
            if flag.startswith("--") and "=" not in flag and value:
                raise ValueError(f"give each word as its own argument: {flag!r}, {value!r}; found {word!r}")
        return words

    @field_validator("orchestrator_url")
    @classmethod
    def _check_orchestrator_urls(cls, urls: str) -> str:
        """Raises ValueError if one of the URLs is invalid."""
        for url in urls.split(","):
            checked_url(url.strip())
        return urls

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Raises ValueError for settings that do not fit together."""
        if not self.model and not self.engine_url:
            raise ValueError("model: give the base model's folder, or engine_url of a running engine")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.max_loras}")
        if self.engine == "sgl-jax" and not self.engine_url and len(self.preload_loras) > self.max_loras:
            raise ValueError(
                f"preload_loras names {len(self.preload_loras)} adapters, and sgl-jax keeps all of them on the device:"
                f" max_loras {self.max_loras} must be at least that"
            )
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
        """URLs of the fleet's orchestrators; a non-leader forwards heartbeats to the leader."""
        return tuple(url.strip().rstrip("/") for url in self.orchestrator_url.split(",") if url.strip())

    @property
    def state(self) -> Path:
        """The state folder: `state_dir`, else ~/.local/state/lorafleet/<instance_id>."""
        return self.state_dir or _user_folder("state") / self.instance_id

    @property
    def lora_reports(self) -> Path:
        """Folder in which the engine's processes report on adapters that they load."""
        return self.state.absolute() / "lora-reports"

    @property
    def tidy_s(self) -> float:
        """Seconds between sweeps, which renew leases: a third of the lease or half of the grace, whichever is less."""
        return min(self.cache_lease_s / 3, self.cache_grace_s / 2)

    @property
    def base_name(self) -> str:
        """The base model's name in the fleet: `base_model`, else the engine's name."""
        return self.base_model or self.model_name

    @property
    def model_name(self) -> str:
        """The engine's name of the base model: `served_model_name`, else `model`."""
        return self.served_model_name or self.model

    @property
    def speaks_tls_at_engine(self) -> bool:
        """Whether the engine that is started gets this agent's certificate; SGLang and sgl-jax take none."""
        return self.tls_cert is not None and self.engine in {"vllm", "sim"}

    @property
    def engine_scheme(self) -> str:
        """What the engine that is started speaks: `https` with a certificate, else `http`."""
        return "https" if self.speaks_tls_at_engine else "http"

    def socket_path(self, kind: str) -> Path:
        """Path of the engine's `events` or `replay` socket, unique per state folder."""
        worker = hashlib.sha256(str(self.state.absolute()).encode()).hexdigest()[:12]
        return self.ipc_dir.absolute() / f"{worker}.{kind}"
