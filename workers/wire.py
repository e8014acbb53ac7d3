"""The agent's wire format: requests, answers, events and KV frames.

Unknown fields are ignored between services, so that neighbouring versions work together; the routes refuse them from
anybody else (lorafleet.service.http.known_fields.py).
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, SerializerFunctionWrapHandler, WrapSerializer

from lorafleet.identity import KV_HASHING, AdapterLocation, FileMark, Tier
from orchestrator.model.acceptance import AcceptanceMode, AdapterAcceptance
from orchestrator.model.cards import AdapterCard

WIRE = 1
MOST_NEIGHBOURS = 64
"""Agents that a request may name as places to fetch from: a bound, not an aim."""

MOST_DIGESTS = 1000
"""Digests of each kind in one request or heartbeat: 70 KB."""

REPORT_HEADER = "x-lorafleet-report"
"""Header of the answers to an orchestrator's calls: `<agent_boot_id>/<report_number>` of a report made at that moment.

What such an answer says is older than reports with a higher number, and as new as those with the same one.
"""

AdapterState = Literal["remote", "downloading", "on_disk", "loading", "ready", "draining", "failed"]
AgentState = Literal["starting", "ready", "draining", "engine_down"]
AdapterOperationKind = Literal["load", "unload"]
AgentIncidentKind = Literal[
    "agent_started",
    "engine_started",
    "engine_start_failed",
    "engine_died",
    "engine_hung",
    "engine_back",
    "disk_full",
    "lora_kernels_missing",
    "acceptance_differs",
]
AgentEventType = Literal[
    "DOWNLOADING",
    "DOWNLOADED_TO_DISK",
    "DELETED_FROM_DISK",
    "LOADED_TO_DEVICE",
    "UNLOADED_FROM_DEVICE",
    "LOAD_FAILED",
    "UNLOAD_FAILED",
    "ENGINE_UP",
    "ENGINE_DOWN",
    "DRAINING",
    "UNDRAINED",
    "SUSPECT",
    "TRUSTED",
]


_LENIENT = ConfigDict(extra="ignore", use_attribute_docstrings=True)
_KEPT = Field(exclude=True)  # by the worker alone: in no message
_EMPTY: tuple[object, ...] = (None, "", 0)


class _WorkerMessage(BaseModel):
    """Base of all messages: immutable, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class RuntimeConfig(_WorkerMessage):
    """The engine's limits, and its KV cache of `total_kv_blocks` blocks with `block_size` tokens each.

    caches_prefixes  whether it keeps blocks for later prompts; older agents do not say, and their engines do
    """

    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    caches_prefixes: bool = True


UNKNOWN_RUNTIME = RuntimeConfig(
    block_size=0, total_kv_blocks=0, max_num_seqs=0, max_num_batched_tokens=0, max_model_len=0
)
"""Of an engine that says nothing of itself."""


class ModelCard(_WorkerMessage):
    """The engine's base model: `name` in the engine, `base_model` in the fleet.

    path  where vLLM read it from, which it hashes into the ids of pictures; empty: not known, or another engine
    """

    name: str
    type: str = "Completions"
    base_model: str
    path: str = ""
    runtime_config: RuntimeConfig


class Transport(_WorkerMessage):
    """How to reach the engine.

    dialect               the engine's kind; a router refuses to use an engine of an unknown kind
    kv_events, kv_replay  one ZMQ endpoint per data-parallel rank
    kv_ledger             hashing version of the agent's KV ledger; 0 without a ledger
    """

    engine_url: str
    dialect: str = "vllm"
    kv_events: Annotated[tuple[str, ...], FailFast()] = ()
    kv_replay: Annotated[tuple[str, ...], FailFast()] = ()
    kv_topic: str = ""
    kv_ledger: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredModules:
    """Modules of an adapter's file that an engine does not have: how many, and the first names."""

    __pydantic_config__ = _LENIENT

    count: int
    names: tuple[str, ...] = ()


ProbeOutcome = Literal["works", "no effect", "refused", "unknown"]
"""What an engine was seen to do with an adapter on one kind of module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModules:
    """What small adapters have shown of each kind of module in one engine; it goes before what its table says.

    A kind is a module's name in an adapter's file, with `#` for its numbers.
    """

    __pydantic_config__ = _LENIENT

    engine_version: str = ""
    flags: str = ""
    """Digest of what else decides: base model, command, environment, device."""
    outcomes: Mapping[str, ProbeOutcome] = field(default_factory=dict)
    pending: int = 0
    """Kinds that are still to be asked."""
    seconds: float = 0.0
    """In which the engine was asked, all kinds together."""


NOTHING_MEASURED = MeasuredModules()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemory:
    """What an engine holds for a loaded adapter. Its file may be much smaller, or larger."""

    __pydantic_config__ = _LENIENT

    slot_bytes: int
    """On the device, while it is in a slot: the engine pads every slot to its `max_lora_rank`."""
    host_bytes: int
    """Of its copy in host memory, from which a slot is filled."""
    by: Literal["engine", "estimate"]
    """engine: its processes have said so. estimate: by the adapter's own modules, two bytes a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdapter(AdapterCard):
    """An adapter on a worker: its card, its place in the engine, and what is known of its effect.

    The worker's inventory keeps these, writes them to its state folder and reports them. What it keeps for itself is
    never sent: `is_wanted`, `order`, `secret`, `ignored_policy` and `acceptance_mode`.
    """

    lora_id: str
    engine_name: str = ""
    state: AdapterState = "on_disk"
    location: AdapterLocation = "disk"
    path: str = ""
    pinned_source: str = ""
    """The immutable reference of these bytes: `source` with a branch resolved to its commit, for example."""
    files_digest: str = ""
    """Of an adapter that another client loaded: digest of the files at its path; empty while they are not read."""
    loaded_at: str | None = None
    last_used: str | None = None
    request_count: int = 0
    load_seconds: float | None = None
    memory: AdapterMemory | None = None
    """None: not loaded, or not known; then the size of its files stands for it."""
    memory_mb: float = 0.0
    """Of a loaded one: what the engine holds where the adapter is now, in 10^6 bytes."""
    fetched_bytes: int | None = None
    """Of an adapter that is being downloaded: bytes so far."""
    error: str | None = None
    """Why it is not loaded or not readable, or what is wrong with a loaded one."""
    ignored_modules: IgnoredModules | None = None
    """None: the engine has all of them, or does not say."""
    note: str = ""
    """What an operator should know of a ready adapter, as a sentence."""
    acceptance: AdapterAcceptance | None = None
    """Whether its answers are the trainer's, at this start of the engine. None: not compared."""
    lora_int_id: int | None = None
    """The engine's own number of it; None: not loaded, or the engine does not say. Another one after a restart."""
    is_configured: bool = False
    """The operator's own settings name these bytes: a folder in `lora_path`, `preload_loras`, or what the engine had at
    its start, such as its `--lora-modules`."""
    is_wanted: Annotated[bool, _KEPT] = False
    """The engine should have it loaded; a restarted engine loads it again."""
    order: Annotated[int, _KEPT] = 0
    """Load order: a restarted engine loads adapters in ascending order."""
    secret: Annotated[str, _KEPT] = ""
    """name/key of the credential for its source."""
    ignored_policy: Annotated[str, _KEPT] = ""
    """What the load request said about modules that the engine ignores; empty: the setting decides."""
    acceptance_mode: Annotated[AcceptanceMode, _KEPT] = "warn"
    """What the last request for it said about its acceptance file."""
    rules: Annotated[int, _KEPT] = 0
    """The version of the rules by which its files were verified."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the engine holds for it, by its place there."""
        return self.held_bytes_at(self.location)

    @property
    def held_mb(self) -> float:
        """`held_bytes` in MB (10^6 bytes)."""
        return in_mb(self.held_bytes)

    def held_bytes_at(self, location: AdapterLocation) -> int:
        """Bytes that an engine holds for an adapter at this place."""
        if location not in {"device", "host"}:
            return 0
        if self.memory is None:
            return self.size_bytes
        return self.memory.host_bytes + (self.memory.slot_bytes if location == "device" else 0)


def in_mb(size_bytes: int) -> float:
    """Bytes as MB (10^6 bytes), with three decimals."""
    return round(size_bytes / 1e6, 3)


def field_values(adapter: WorkerAdapter) -> dict[str, Any]:
    """An adapter's fields by name, for a message that has them and more."""
    return {each.name: getattr(adapter, each.name) for each in fields(adapter)}


def _without_empty_fields(adapter: WorkerAdapter, write: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """The adapter's fields that are not empty: a heartbeat lists a hundred adapters.

    No result type: pydantic would then show it in OpenAPI in place of the adapter's own.
    """
    return {name: value for name, value in write(adapter).items() if value not in _EMPTY}


class LoraCapacity(_WorkerMessage):
    """The engine's adapter slots. `available_slots` more adapters can be loaded without evicting one.

    max_loras        adapters that one batch of the engine can run, the same as `device_slots`; more may be loaded
    disk_room_bytes  of further adapters' files, before others are deleted for them
    """

    max_loras: int = 0
    loaded_count: int = 0
    available_slots: int = 0
    device_slots: int = 0
    host_slots: int = 0
    ghosts: int = 0
    disk_room_bytes: int = 0


class LoraInfo(_WorkerMessage):
    """A worker's adapters.

    available_loras  the first of `available_count` adapters on its disk, without empty fields; all are at
                     `GET /v1/metadata/loras`, a list that changes together with `available_digest`. Heartbeats and
                     `GET /metadata?available=false` leave it out
    configured_digest  of the adapters that the operator's settings name, "" without any; they are all at
                     `GET /v1/metadata/loras?configured=true`, a list that changes together with it
    list_age_s       seconds since the engine's own list last agreed with `loaded_loras`; None: not known
    refusal          why this worker accepts no adapters at all; "" if it does
    punica           class of the engine's wrapper of LoRA kernels, such as PunicaWrapperGPU; "": it does not say
    measured         what was measured of the kinds of modules in this engine; None: nothing
    is_salted        every request for an adapter needs its `cache_salt` (lorafleet/identity.py adapter_salt), because
                     the engine's KV connector separates adapters by nothing else
    """

    enabled: bool = False
    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    available_loras: Annotated[
        tuple[Annotated[WorkerAdapter, WrapSerializer(_without_empty_fields)], ...], FailFast()
    ] = ()
    available_count: int = 0
    available_digest: str = ""
    configured_digest: str = ""
    loaded_loras: Annotated[tuple[WorkerAdapter, ...], FailFast()] = ()
    list_age_s: float | None = None
    refusal: str = ""
    punica: str = ""
    measured: MeasuredModules | None = None
    is_salted: bool = False
    capacity: LoraCapacity = LoraCapacity()


class Load(_WorkerMessage):
    """The engine's load at the last metrics reading, and its measured rates; 0.0 until measured.

    prefill_tokens_per_s  of a request alone in the engine
    decode_tokens_per_s   of one request alone, without a concurrent prefill and with little context
    token_s, sequence_s, context_token_s  of a step without prefill: its own time, and what each sequence and each token
                          of context in the KV cache add
    inter_token_s         between two tokens of a request, at the last reading
    mean_output_tokens, mean_request_s  of recently finished requests; seconds from scheduled to the last token
    load_seconds          median time of a load from this worker's disk
    still_s               seconds since a counter of the engine last moved, at that reading; None if none ever moved
    """

    running: int = 0
    waiting: int = 0
    waiting_for_slot: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    inter_token_s: float = 0.0
    mean_output_tokens: float = 0.0
    mean_request_s: float = 0.0
    load_seconds: float = 0.0
    read_age_s: float = 0.0
    still_s: float | None = None


class DeploymentCard(_WorkerMessage):
    """The model deployment card of a worker's base model, as Dynamo's metadata has one, with what adapters need.

    max_rank      largest rank of an adapter
    module_names  last parts of the names of the loaded adapters' modules
    """

    display_name: str
    context_length: int
    kv_cache_block_size: int
    max_rank: int
    module_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: ModelCard, lora: LoraInfo) -> "DeploymentCard":
        """The card of a worker with this base model and these adapters."""
        return cls(
            display_name=model.name,
            context_length=model.runtime_config.max_model_len,
            kv_cache_block_size=model.runtime_config.block_size,
            max_rank=lora.max_lora_rank,
            module_names=tuple(sorted({name for adapter in lora.loaded_loras for name in adapter.target_modules})),
        )


class Metadata(_WorkerMessage):
    """`GET /metadata`: the state of a worker for routers and orchestrators.

    instance_id  appears in headers, logs and terminals, so special characters are excluded
    is_suspect   the engine seems to hang, even if its health route answers; it gets no loads until it returns a token
    mdc          the base model's deployment card; adapters have cards of their own in `lora`. None: no agent
    engine_version  as the engine says it, such as 0.32.0; "" if it does not
    is_warming   the worker is starting and already accepts loads: the orchestrator loads its hot adapters first
    is_drain_ordered  an orchestrator ordered the drain of a draining worker: it ends when no order stands for it
    report_number  changes of the worker's state so far, the first report's being 1, within an `agent_boot_id`: of two
                   reports the one with the lower number is the older one. 0: an older agent, which does not count
    """

    instance_id: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,253}$")
    namespace: str = "default"
    component: str = "worker"
    state: AgentState = "ready"
    state_reason: str = ""
    is_suspect: bool = False
    is_warming: bool = False
    is_drain_ordered: bool = False
    agent_url: str = ""
    pool: str = ""
    zone: str = ""
    node: str = ""
    model: ModelCard
    mdc: DeploymentCard | None = None
    transport: Transport
    engine_version: str = ""
    lora: LoraInfo = LoraInfo()
    load: Load = Load()
    agent_boot_id: str
    engine_boot_id: str = ""
    epoch: int = 0
    report_number: int = 0
    wire: int = WIRE


WORKER_PROOF_PATH = "/v1/prove"


class ProofRequest(_WorkerMessage):
    """`POST /v1/prove`: asks whoever is at an address to prove that it is a worker. Carries no key.

    nonce  64 hex digits, drawn for this request alone
    url    the address that the asking service calls
    """

    nonce: str = Field(pattern=r"^[0-9a-f]{64}$")
    url: str = Field(max_length=2000)


class ProofAnswer(_WorkerMessage):
    """The agent at the address. `proof`: `lorafleet.engine.worker_proofs.proof_of`, an HMAC over request and agent."""

    instance_id: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,253}$")
    agent_boot_id: str = Field(max_length=100)
    key_id: str = Field(max_length=100)
    proof: str = Field(pattern=r"^[0-9a-f]{64}$")
    wire: int = WIRE


class AdapterRequest(_WorkerMessage):
    """Which adapter a worker is to have on its disk, and where its files are.

    secret      name/key of the credential for the source, a file below this worker's `secrets_dir`
    neighbours  URLs of agents that have these files, asked before the source
    """

    lora_id: str
    base_model: str | None = None
    digest: str | None = None
    secret: str | None = None
    neighbours: Annotated[tuple[str, ...], Field(max_length=MOST_NEIGHBOURS)] = ()
    wire: int = WIRE


class LoadRequest(AdapterRequest):
    """`POST /v1/admin/load_lora`.

    evict   the adapter to unload if no slot is free; needs an epoch if the worker has an orchestrator
    from_fleet  the files of `digest` may come from the fleet's other workers in place of the source: needs an epoch.
                `neighbours` count with it alone
    ignored_modules  what to do if the engine ignores a part of its modules; default: the worker's setting
    is_awaited  a request waits for it: an engine that can may load it with that request
    acceptance  what to do with its acceptance file; `acceptance_file`: its digest, if the caller knows it
    only_files  fetch and verify its files for a load that will come, after what loads fetch; nothing is loaded
    keeps_files  keep its files, as `mark_files` does: needs an epoch
    """

    lora_path: str | None = None
    source: str | None = None
    evict: str | None = None
    from_fleet: bool = False
    ignored_modules: Literal["accept", "refuse"] | None = None
    is_awaited: bool = False
    acceptance: AcceptanceMode = "warn"
    acceptance_file: str = ""
    only_files: bool = False
    keeps_files: bool = False


class CheckRequest(_WorkerMessage):
    """`POST /v1/admin/check_lora`: compare a loaded adapter's answers with its acceptance file now.

    Answers with the `WorkerAdapter`. `digest`: of the version; default: each that is loaded.
    content          of an acceptance file that replaces the one beside the adapter; "": it stays
    acceptance_file  digest of the file to compare with, if the caller knows it
    neighbours       URLs of agents that have that file, if this worker has another one or none
    """

    lora_id: str
    digest: str | None = None
    acceptance: AcceptanceMode = "warn"
    content: str = ""
    acceptance_file: str = ""
    neighbours: Annotated[tuple[str, ...], Field(max_length=MOST_NEIGHBOURS)] = ()
    wire: int = WIRE


class InspectRequest(AdapterRequest):
    """`POST /v1/admin/inspect_lora`: fetch and verify without loading; answers with the `WorkerAdapter`.

    `POST /v1/uploads/{upload_id}` does so with what has come of an upload, whose source is then the fleet itself.

    source  of `fleet:<digest>` the `neighbours` are asked first
    digest  the registered digest. The caller compares it with the answer; a worker that cannot read the adapter's
            files (an engine without an agent) returns it unchecked. Of an upload: the digest that its bytes must have
    """

    source: str


class UnloadRequest(_WorkerMessage):
    """`POST /v1/admin/unload_lora`. Without a digest all versions of the adapter are unloaded.

    engine_name  of an adapter that another client loaded: then only that one is unloaded
    """

    lora_id: str
    digest: str | None = None
    engine_name: str | None = None
    wire: int = WIRE


class MarkFilesRequest(_WorkerMessage):
    """`POST /v1/admin/mark_files`: how this worker is to treat the files of these digests.

    neighbours  URLs of agents that have those to keep, if this worker does not
    """

    mark: FileMark
    digests: Annotated[tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...], Field(max_length=MOST_DIGESTS)]
    neighbours: Annotated[tuple[str, ...], Field(max_length=MOST_NEIGHBOURS)] = ()
    wire: int = WIRE


class ClaimRequest(_WorkerMessage):
    """`POST /v1/admin/claim`: refuse older epochs than the caller's from now on; answers with the `Metadata`."""

    wire: int = WIRE


class DrainRequest(_WorkerMessage):
    """`POST /v1/admin/drain`: refuse loads and wait until the engine is idle; answers with the `DrainAnswer`."""

    deadline_s: float = Field(default=30.0, ge=0)
    wire: int = WIRE


class UndrainRequest(_WorkerMessage):
    """`POST /v1/admin/undrain`: end a drain; answers with the `Metadata`."""

    wire: int = WIRE


class DrainAnswer(_WorkerMessage):
    """Whether the engine finished all requests before the deadline, and how many were left."""

    is_drained: bool
    running: int
    waiting: int
    wire: int = WIRE


class LoadedLoras(_WorkerMessage):
    """`GET /v1/admin/loras`: loaded, loading and failed adapters, and the engine's slots."""

    loaded_loras: tuple[WorkerAdapter, ...]
    capacity: LoraCapacity = LoraCapacity()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer(WorkerAdapter):
    """The answer to `POST /v1/admin/load_lora`: the adapter. `message`: its name at the engine, in words."""

    status: Literal["success"] = "success"
    message: str = ""

    @classmethod
    def of(cls, adapter: WorkerAdapter) -> "LoadAnswer":
        """The answer about an adapter that is loaded, or whose files alone were asked for."""
        place = f"loaded as {adapter.engine_name}" if adapter.state == "ready" else "on this worker's disk"
        return cls(**field_values(adapter), message=f"{adapter.lora_id} is {place}")


class UnloadAnswer(LoadedLoras):
    """The answer to `POST /v1/admin/unload_lora`: what is still loaded.

    message  the unloaded names at the engine, in words
    """

    status: Literal["success"] = "success"
    lora_id: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedAdapter(WorkerAdapter):
    """An item of `GET /v1/metadata/loras`: an adapter, and what its folder says of it."""

    loaded: bool = False
    """Whether the engine has it."""
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    """What the file `metadata.json` beside an adapter of `lora_path` holds; nothing of it is acted on."""


class AvailableLoras(_WorkerMessage):
    """`GET /v1/metadata/loras`: adapters on disk or in the engine, one item per lora_id, in their order.

    With `?configured=true` those that the operator's settings name.

    available_loras  the same page, with the fields that are not empty
    loaded_loras     all loaded adapters, as in /metadata
    next             the `cursor` of the next page; None at the end
    """

    data: tuple[ListedAdapter, ...]
    available_loras: tuple[Annotated[ListedAdapter, WrapSerializer(_without_empty_fields)], ...]
    loaded_loras: tuple[WorkerAdapter, ...]
    capacity: LoraCapacity
    next: str | None = None


class AgentEvent(_WorkerMessage):
    """One SSE message of `GET /v1/events`; `id` grows by one within an `agent_boot_id`.

    done_bytes, total_bytes  of DOWNLOADING, about once a second; `total_bytes` is None until the source reports it
    source                   of DOWNLOADED_TO_DISK: the adapter's `pinned_source`
    instance_id              the worker's
    timestamp                the same as `at`
    """

    id: int
    type: AgentEventType
    at: str
    timestamp: str = ""
    instance_id: str = ""
    lora_id: str | None = None
    digest: str | None = None
    engine_name: str | None = None
    error: str | None = None
    source: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None


Digests = Annotated[tuple[str, ...], FailFast(), Field(max_length=MOST_DIGESTS)]


class HeldFiles(_WorkerMessage):
    """Changes of the digests on a worker's disk since those that the orchestrator has confirmed, in a heartbeat.

    disk_id  names the folder: agents that share it have one copy
    since    the confirmed number, which these changes follow; 0: these are the first of all that is there
    upto     the number to confirm; `left`: how many changes follow it
    held, kept, gone  digests that are there, there and kept, and no longer there
    """

    disk_id: str = Field(max_length=100)
    since: int = Field(ge=0)
    upto: int = Field(ge=0)
    left: int = Field(default=0, ge=0)
    held: Digests = ()
    kept: Digests = ()
    gone: Digests = ()


class AdapterFile(_WorkerMessage):
    """One file of an adapter."""

    name: str
    size_bytes: int = Field(ge=0)


class AdapterFiles(_WorkerMessage):
    """`GET /v1/files/{digest}`: the files of a verified adapter. Each is at `/v1/files/{digest}/{name}`."""

    digest: str
    files: Annotated[tuple[AdapterFile, ...], FailFast()]
    wire: int = WIRE


class ReceivedFile(_WorkerMessage):
    """One file of an upload. `total_bytes`: None where the client did not say."""

    name: str
    received_bytes: int = Field(ge=0)
    total_bytes: int | None = None


class UploadState(_WorkerMessage):
    """`/v1/uploads/{upload_id}`: an adapter that a client sends, its files as far as they have come.

    lora_id  of the adapter; `tenant`: whose quota it counts for
    digest   of the adapter once it is verified and installed here; then it needs no more bytes
    """

    upload_id: str
    lora_id: str = ""
    tenant: str = ""
    files: Annotated[tuple[ReceivedFile, ...], FailFast()] = ()
    digest: str = ""
    wire: int = WIRE

    @property
    def size_bytes(self) -> int:
        """Bytes of all files as announced, or as many as have come where they are more."""
        return sum(max(file.total_bytes or 0, file.received_bytes) for file in self.files)


class BeginFileRequest(_WorkerMessage):
    """`POST /v1/uploads/{upload_id}/{name}`: begin a file, from its first byte; answers with the `UploadState`.

    name         `archive` (a tar or zip file), or the name of one of an adapter's two files
    total_bytes  its size, for which room is kept from now on; None: not known
    lora_id      of the adapter, for the list of unfinished uploads
    tenant       whose quota the upload counts for
    """

    total_bytes: int | None = Field(default=None, ge=0)
    lora_id: str = ""
    tenant: str = ""
    wire: int = WIRE


class UnfinishedUploads(_WorkerMessage):
    """`GET /v1/uploads`: the uploads that are not installed yet, and that no hour without growth has ended."""

    data: Annotated[tuple[UploadState, ...], FailFast()] = ()
    wire: int = WIRE


class AdapterOperation(_WorkerMessage):
    """A load or unload that no orchestrator asked for, in a heartbeat. `id` grows by one within an `agent_boot_id`.

    asked_by  the caller's name, or "agent"; `reason`: why
    error     why it failed: a code and a sentence; None: it is done
    """

    id: int
    at: str
    operation: AdapterOperationKind
    lora_id: str
    digest: str = ""
    asked_by: str
    reason: str = ""
    duration_s: float | None = None
    memory_mb: float = 0.0
    error: str | None = None


class AgentIncident(_WorkerMessage):
    """What happened to an engine or a disk by itself, in a heartbeat. `id` grows by one within an `agent_boot_id`.

    kind      an orchestrator records kinds that it knows, and passes over others
    cause     in words; the first line names it, the engine's last output may follow
    seconds   how long it took or lasted; None: does not apply
    adapters  adapters that the engine has again; None: does not apply
    """

    id: int
    at: str
    kind: str
    cause: str = ""
    seconds: float | None = None
    adapters: int | None = None


class LogTail(_WorkerMessage):
    """`GET /v1/log`: the last lines of the agent's log, the oldest first."""

    lines: tuple[str, ...]
    wire: int = WIRE


class ModelFiles(_WorkerMessage):
    """`GET /v1/model/files`: the tokenizer's files by name, so that a router needs no model volume."""

    base_model: str
    files: dict[str, str]
    wire: int = WIRE


class KvRank(msgspec.Struct, frozen=True):
    """The cached blocks of one data-parallel rank, by tier: packed block hashes in no order."""

    rank: int
    device: bytes = b""
    host: bytes = b""
    storage: bytes = b""


class KvSnapshot(msgspec.Struct, frozen=True):
    """`GET /v1/kv/snapshot`, as a msgpack map: all cached blocks of an engine, as of frame `seq` of the stream.

    epoch     identifies one ledger of one engine boot: `<engine_boot_id>.<ledger>`
    is_whole  False after lost events: blocks may be missing, but those listed are cached
    """

    epoch: str
    seq: int
    base_model: str
    block_size: int
    ranks: tuple[KvRank, ...]
    is_whole: bool = True
    hashing: int = KV_HASHING
    wire: int = WIRE


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one tier of one rank: packed hashes of added and of dropped blocks. No hash is in both."""

    rank: int
    tier: Tier
    added: bytes
    dropped: bytes


class KvFrame(msgspec.Struct, frozen=True):
    """One frame of `GET /v1/kv/stream`: 4 bytes big-endian length, then this as a msgpack map.

    seq       grows by one per frame; a heartbeat repeats the last one and has no changes
    at        Unix time of the newest engine event in the frame; of a heartbeat the time of sending
    cleared   ranks whose whole cache was cleared before `changes`
    is_whole  as in the snapshot
    """

    seq: int
    at: float
    cleared: tuple[int, ...] = ()
    changes: tuple[KvChange, ...] = ()
    is_whole: bool = True


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Block hashes as unsigned 64-bit little-endian integers."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """The block hashes in packed data; raises ValueError if its length is no multiple of 8."""
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
