"""What an agent says and is told. Unknown fields are ignored, so that neighbouring versions work together."""

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field

from lorafleet.identity import KV_HASHING, AdapterLocation, Tier

WIRE = 1

AdapterState = Literal["remote", "downloading", "on_disk", "loading", "ready", "draining", "failed"]
AgentState = Literal["starting", "ready", "draining", "engine_down"]
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


class _WorkerMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class RuntimeConfig(_WorkerMessage):
    """The engine's shape. `total_kv_blocks` blocks of `block_size` tokens each."""

    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class ModelCard(_WorkerMessage):
    name: str
    type: str = "Completions"
    base_model: str
    runtime_config: RuntimeConfig


class Transport(_WorkerMessage):
    """Where the engine is. `kv_events` and `kv_replay` hold one ZMQ endpoint a data-parallel rank.

    `dialect` is the engine's kind. A newer agent may name one that the reader has never heard of: the rest of what it
    says stands, and whoever would have to speak to such an engine refuses (`router/request/engine_body.py`).
    `kv_ledger` is the hashing version of the ledger that the agent keeps of its engine's blocks; 0: it keeps none.
    """

    engine_url: str
    dialect: str = "vllm"
    kv_events: Annotated[tuple[str, ...], FailFast()] = ()
    kv_replay: Annotated[tuple[str, ...], FailFast()] = ()
    kv_topic: str = ""
    kv_ledger: int = 0


class AvailableLora(_WorkerMessage):
    """An adapter whose verified files are on this worker's disk.

    source  where these very bytes are: the reference that was asked for, with a hub's branch as the commit it had
    """

    lora_id: str
    path: str
    base_model: str
    rank: int
    digest: str
    size_bytes: int = 0
    state: AdapterState = "on_disk"
    source: str = ""


class LoadedLora(_WorkerMessage):
    """An adapter that the engine holds, is loading, or failed to load (then `error` says why)."""

    lora_id: str
    digest: str
    engine_name: str
    state: AdapterState
    location: AdapterLocation
    rank: int = 0
    base_model: str = ""
    path: str = ""
    source: str = ""
    size_bytes: int = 0
    loaded_at: str | None = None
    last_used: str | None = None
    memory_mb: float = 0.0
    request_count: int = 0
    load_seconds: float | None = None
    error: str | None = None


class LoraCapacity(_WorkerMessage):
    """Slots. `available_slots` is how many more adapters may be loaded without evicting one."""

    loaded_count: int = 0
    available_slots: int = 0
    device_slots: int = 0
    host_slots: int = 0
    ghosts: int = 0
    disk_free_bytes: int = 0


class LoraInfo(_WorkerMessage):
    """What a worker holds. `available_loras` are the first of `available_count` on its disk; the rest is at
    `GET /v1/metadata/loras`, and has changed when `available_digest` has.

    list_age_s  since the engine's own list was read, which `loaded_loras` agrees with; None: not known
    refusal     why this worker takes no adapters at all, for people; empty: it takes them
    is_salted   each request for an adapter needs its `cache_salt` (lorafleet/identity.py adapter_salt): the engine's
                KV connector keeps adapters apart by nothing else
    """

    enabled: bool = False
    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    available_loras: Annotated[tuple[AvailableLora, ...], FailFast()] = ()
    available_count: int = 0
    available_digest: str = ""
    loaded_loras: Annotated[tuple[LoadedLora, ...], FailFast()] = ()
    list_age_s: float | None = None
    refusal: str = ""
    is_salted: bool = False
    capacity: LoraCapacity = LoraCapacity()


class Load(_WorkerMessage):
    """The engine's own counters as the agent last read them, and what they taught; 0.0 until measured.

    prefill_tokens_per_s  of a prefill that has the engine for itself
    decode_tokens_per_s   of one request with no prefill beside it; `inter_token_s` is a token's time as it is now
    mean_output_tokens, mean_request_s  of requests that ended lately; seconds from scheduled to the last token
    load_seconds          an adapter from disk to ready: the middle of the loads measured here
    still_s               for how long none of its counters had moved at that reading: one that has requests computes
                          nothing; None: not known, as none ever moved
    """

    running: int = 0
    waiting: int = 0
    waiting_for_slot: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    inter_token_s: float = 0.0
    mean_output_tokens: float = 0.0
    mean_request_s: float = 0.0
    load_seconds: float = 0.0
    read_age_s: float = 0.0
    still_s: float | None = None


class Metadata(_WorkerMessage):
    """`GET /metadata`: everything that a router or an orchestrator may know of a worker.

    instance_id  goes into headers, logs and terminals, so it has no character that means something there
    is_suspect   its engine hangs, whatever that says of its health, in a load or else: none is taken until it has given
                 a token again
    is_warming   it is starting, and takes loads already: what the orchestrator wants there before it is ready
    """

    instance_id: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,253}$")
    namespace: str = "default"
    component: str = "worker"
    state: AgentState = "ready"
    state_reason: str = ""
    is_suspect: bool = False
    is_warming: bool = False
    agent_url: str = ""
    pool: str = ""
    zone: str = ""
    node: str = ""
    model: ModelCard
    transport: Transport
    lora: LoraInfo = LoraInfo()
    load: Load = Load()
    agent_boot_id: str
    engine_boot_id: str = ""
    epoch: int = 0
    wire: int = WIRE


class LoadRequest(_WorkerMessage):
    """`POST /v1/admin/load_lora`. `evict` names the victim; without an epoch only a free slot may be taken.

    secret  name/key of the credentials for the source, a file below this worker's `secrets_dir`
    """

    lora_id: str
    lora_path: str | None = None
    source: str | None = None
    base_model: str | None = None
    digest: str | None = None
    secret: str | None = None
    evict: str | None = None
    wire: int = WIRE


class UnloadRequest(_WorkerMessage):
    """`POST /v1/admin/unload_lora`. Without a digest every version of the adapter goes."""

    lora_id: str
    digest: str | None = None
    wire: int = WIRE


class InspectRequest(_WorkerMessage):
    """`POST /v1/admin/inspect_lora`: fetch and verify, load nothing; answers with the `AvailableLora`.

    digest  as it was registered: the caller compares it, and a worker that cannot read the bytes has to believe it
    """

    lora_id: str
    source: str
    base_model: str | None = None
    digest: str | None = None
    secret: str | None = None
    wire: int = WIRE


class ClaimRequest(_WorkerMessage):
    """`POST /v1/admin/claim`: older epochs than the caller's are refused from now on; answers with the `Metadata`."""

    wire: int = WIRE


class DrainRequest(_WorkerMessage):
    deadline_s: float = Field(default=30.0, ge=0)
    wire: int = WIRE


class UndrainRequest(_WorkerMessage):
    """`POST /v1/admin/undrain`: serve again; answers with the `Metadata`."""

    wire: int = WIRE


class DrainAnswer(_WorkerMessage):
    """Whether the engine finished everything before the deadline, and what it still had if not."""

    is_drained: bool
    running: int
    waiting: int
    wire: int = WIRE


class LoadedLoras(_WorkerMessage):
    data: tuple[LoadedLora, ...]
    next: str | None = None


class AvailableLoras(_WorkerMessage):
    """`GET /v1/metadata/loras`: what is on disk or in the engine, one item a lora_id, in their order.

    next  the `cursor` of the next page; None at the end
    """

    data: tuple[AvailableLora | LoadedLora, ...]
    next: str | None = None


class AgentEvent(_WorkerMessage):
    """One SSE message of `GET /v1/events`; `id` grows by one within an `agent_boot_id`.

    done_bytes, total_bytes  of DOWNLOADING, about once a second; `total_bytes` once the source has said it
    source                   of DOWNLOADED_TO_DISK: as in `AvailableLora`
    """

    id: int
    type: AgentEventType
    at: str
    lora_id: str | None = None
    digest: str | None = None
    engine_name: str | None = None
    error: str | None = None
    source: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None


class ModelFiles(_WorkerMessage):
    """`GET /v1/model/files`: the tokenizer's files by name, so that a router needs no model volume."""

    base_model: str
    files: dict[str, str]
    wire: int = WIRE


class KvRank(msgspec.Struct, frozen=True):
    """What one data-parallel rank of an engine has, a tier each: packed block hashes, in no order."""

    rank: int
    device: bytes = b""
    host: bytes = b""
    storage: bytes = b""


class KvSnapshot(msgspec.Struct, frozen=True):
    """`GET /v1/kv/snapshot`, as a msgpack map: all of an engine's blocks, as of frame `seq` of the stream.

    epoch     one ledger of one engine boot: `<engine_boot_id>.<ledger>`
    is_whole  False when events were lost before: something may be missing, nothing is wrong
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
    """What changed at one tier of one rank: packed block hashes that came, and that went. No hash is in both."""

    rank: int
    tier: Tier
    added: bytes
    dropped: bytes


class KvFrame(msgspec.Struct, frozen=True):
    """One frame of `GET /v1/kv/stream`: 4 bytes big-endian length, then this as a msgpack map.

    seq       one more than the frame before; a heartbeat repeats the last one and has no changes
    at        Unix time of the newest engine event in it, of a heartbeat its own
    cleared   ranks that lost everything, before `changes` came
    is_whole  as in the snapshot
    """

    seq: int
    at: float
    cleared: tuple[int, ...] = ()
    changes: tuple[KvChange, ...] = ()
    is_whole: bool = True


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Block hashes as they travel: unsigned 64-bit integers, little-endian."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """What was packed; raises ValueError when that is no whole number of hashes."""
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
