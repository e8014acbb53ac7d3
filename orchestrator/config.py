"""The orchestrator's settings. `lorafleet.service.settings` says where values come from."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.engine.agentless import engines_by_id
from lorafleet.engine.canary import CanaryMode
from lorafleet.engine.settings import WorkerDiscoverySettings
from lorafleet.service.other_names import OtherName
from lorafleet.service.settings import Url
from orchestrator.store.ledger_rows import USAGE_KEPT_DAYS
from orchestrator.store.upload_store import upload_store


def _policy(change: str, why: str = "the placement policy is stored and changes at run time") -> OtherName:
    """A name for which a change of the placement policy, such as `min_replicas=1`, is to be used."""
    return OtherName(advice=f"{why}: `lorafleet policy set {change}`")


_BY_LABEL = OtherName(
    advice="workers send heartbeats by themselves; those in Kubernetes are found by the labels of their Services in"
    " LORAFLEET_ORCHESTRATOR_KUBE_SELECTOR"
)
_LOADING = _policy("loading=lazy, eager, weighted or everywhere")
_OTHER_NAMES: Mapping[str, OtherName] = {
    # Dynamo's design of LoRA support: variables of its orchestrator's pod, and keys of its file.
    "DYNAMO_NAMESPACE": _BY_LABEL,
    "DYNAMO_COMPONENT": _BY_LABEL,
    "LORA_POLICY": _LOADING,
    "REBALANCE_INTERVAL_SEC": OtherName("pass_interval_s"),
    "policy": _LOADING,
    "min_replicas_per_lora": _policy("min_replicas=N"),
    "target_replicas_per_lora": OtherName(advice="the target is computed from demand, between min_ and max_replicas"),
    "max_replicas_per_lora": _policy("max_replicas=N"),
    "rebalance_interval_sec": OtherName("pass_interval_s"),
    "enable_auto_scaling": OtherName(
        only="true", advice="equal bounds switch it off: `lorafleet policy set min_replicas=N max_replicas=N`"
    ),
    "lru_eviction_enabled": OtherName(
        only="true", advice="an adapter is kept by its own policy: `lorafleet adapters set LORA_ID pinned=true`"
    ),
    "ttl_eviction_enabled": OtherName(only="false", advice="a time of its own switches it on: see ttl_seconds"),
    "ttl_seconds": _policy("ttl_s=SECONDS", "0, the default, switches it off"),
}


class OrchestratorSettings(WorkerDiscoverySettings):
    """lorafleet orchestrator: decides which adapter lives on which worker, and makes it so."""

    file_section: ClassVar[str] = "lora_orchestrator"
    other_names: ClassVar[Mapping[str, OtherName]] = _OTHER_NAMES

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_ORCHESTRATOR_")

    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    store: Path | str = Field(
        default=Path("lorafleet-orchestrator.db"),
        description="where intent is stored: an SQLite file, created when missing; or postgresql://user@host/database,"
        " whose password belongs into a variable or a file, as every user sees a command line",
        repr=False,
    )
    store_file: Path | None = Field(
        default=None,
        description="file with the address of a PostgreSQL database, with its password, used in place of `store`;"
        " re-read at each connection",
    )
    backend: Literal["store", "configmaps"] = Field(
        default="store", description="where intent is stored: in `store`, or in ConfigMaps"
    )
    lease: Literal["store", "kubernetes"] = Field(
        default="store",
        description="leader election: by the store, a file beside an SQLite file or a row in PostgreSQL; or by a"
        " Kubernetes Lease",
    )
    kube_namespace: str = Field(default="", description="namespace of the Lease and the ConfigMaps; empty: our own")
    kube_name: str = Field(
        default="lorafleet",
        pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
        description="name of the Lease, and of the fleet in the ConfigMaps' label lorafleet.io/fleet",
    )
    store_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="with PostgreSQL or backend configmaps: time after which a write that the server does not accept is"
        " given up",
    )
    record: Path | None = Field(
        default=None,
        description="JSON file with a readable copy of the stored intent, written within a second of each change;"
        " default: beside an SQLite file, as <store>.record.json; with another store none",
    )
    traffic: Path | None = Field(
        default=None,
        description="SQLite file of the last two days' traffic, which the console shows; default: beside an SQLite"
        " file, as <store>.traffic.db; with another store in memory, until the process ends",
    )
    traffic_max_bytes: int = Field(
        default=256 * 2**20,
        ge=2**20,
        description="largest size of that file; beyond it the oldest of the finest slices go first",
    )
    usage_kept_days: int = Field(
        default=USAGE_KEPT_DAYS,
        ge=1,
        le=10_000,
        description="days for which the ledger of usage is kept, in the store",
    )
    price_file: Path | None = Field(
        default=None, description="YAML file of the prices by which usage has a cost; read at each question"
    )
    peer_fleets: tuple[Url, ...] = Field(
        default=(),
        description="URLs of other fleets' orchestrators that adapters' files may be fetched from by digest",
    )
    peer_token_file: Path | None = Field(
        default=None,
        description="file with the key for them, of scope `export` there; re-read when it changes",
    )
    upload_store: str = Field(
        default="",
        description="where uploaded adapters are kept: s3://bucket/folder (gs, az), or a folder that workers read under"
        " the same path, below their `lora_roots`; empty: on `fleet_copies` workers",
    )
    max_upload_bytes: int = Field(default=8 << 30, ge=1, description="largest upload, in bytes of its archive")
    max_unfinished_uploads: int = Field(
        default=32, ge=1, description="uploads of one tenant that are under way or broken off; more are a 429"
    )
    max_unfinished_upload_bytes: int = Field(
        default=64 << 30, ge=1, description="bytes that these uploads of one tenant have announced; more are a 429"
    )
    engine_slots: int = Field(
        default=0,
        ge=0,
        description="adapters that each engine of `engines` may hold, its --max-cpu-loras; 0: load none",
    )
    engine_roots: tuple[PurePosixPath, ...] = Field(
        default=(), description="folders on those engines' own disks that file:// adapters may be loaded from"
    )
    engine_offers: bool = Field(
        default=False,
        description="those engines have lorafleet's plugin and ask here which adapters they may load, and from where",
    )
    engine_canary: CanaryMode = Field(
        default="refuse",
        description="compare such an engine's answers with and without a new adapter: refuse one that changes nothing,"
        " warn of it, or do not compare",
    )
    engine_canary_timeout_s: float = Field(
        default=2.0, gt=0, description="seconds that comparison may take; after that the adapter is ready, unproved"
    )
    advertise_url: Url = Field(
        default="", description="URL at which other orchestrators reach this one; empty: http, at host and port"
    )
    lease_duration_s: float = Field(
        default=5.0,
        gt=0,
        description="another orchestrator takes over when the leader has not renewed the lease for this long",
    )
    lease_renew_s: float = Field(default=1.0, gt=0, description="time between renewals or reads of the lease")
    lease_margin_s: float = Field(
        default=1.0, ge=0, description="a leader that cannot renew stops this long before another may take over"
    )
    forward_timeout_s: float = Field(
        default=2.0, gt=0, description="deadline for connecting to the leading orchestrator"
    )
    pass_interval_s: float = Field(default=2.0, gt=0, description="time between passes when nothing happens")
    heartbeat_interval_s: float = Field(
        default=1.0,
        gt=0,
        description="time between two heartbeats of agents that set no `heartbeat_s`, told in the answer to each. Keep"
        " it below probe_after_s and settle_s: an agent that is silent for longer is probed, and after a start not"
        " waited for",
    )
    probe_after_s: float = Field(
        default=2.0, gt=0, description="probe agent and engine of a worker that has been silent this long"
    )
    lost_after_s: float = Field(
        default=3.0,
        gt=0,
        description="a worker that is silent this long, and whose agent and engine do not answer, is lost",
    )
    forget_after_s: float = Field(default=3600.0, gt=0, description="drop a lost worker from the lists after this long")
    fleet_copies: int = Field(
        default=2,
        ge=1,
        le=16,
        description="workers that keep the files of each uploaded or published adapter on their disks",
    )
    settle_s: float = Field(
        default=2.5,
        ge=0,
        description="after a start, wait this long for workers' reports before loading or deleting anything",
    )
    wanted_for_s: float = Field(
        default=60.0, gt=0, description="an `ensure` counts this long, or until the adapter is ready"
    )
    probe_timeout_s: float = Field(
        default=1.5, gt=0, description="deadline of a probe or other read from an agent or engine"
    )
    inspect_timeout_s: float = Field(default=300.0, gt=0, description="deadline of fetching and verifying an adapter")
    load_timeout_s: float = Field(default=300.0, gt=0, description="deadline of a load, the fetch included")
    unload_timeout_s: float = Field(default=30.0, gt=0, description="deadline of an unload")
    pause_lease_s: float = Field(
        default=60.0, gt=0, description="how long a pause of requests lasts unless it is repeated or ended before"
    )
    pause_max_lease_s: float = Field(default=3600.0, gt=0, description="longest pause that one call may ask for")
    pause_wait_s: float = Field(
        default=300.0,
        gt=0,
        description="how long a pause may take to be in force everywhere, in modes wait and abort until nothing runs;"
        " longer: 503, and nothing is paused",
    )
    inspects_in_flight: int = Field(default=8, ge=1, description="most adapters inspected at the same time")
    metrics_adapters: int = Field(
        default=200,
        ge=0,
        le=1000,
        description="adapters with metric series of their own, those with the most requests of late; the rest count as"
        " `other`",
    )
    event_buffer: int = Field(default=4096, ge=1, description="events kept for followers that reconnect")
    confirm_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="a change of adapters, aliases or workers is answered when every router goes by it, or after this"
        " long: a router that is cut off delays one change, and is not waited for until it is back",
    )
    keep_alive_s: float = Field(default=15.0, gt=0, description="time between comments on an idle event stream")
    tombstones_kept_s: float = Field(
        default=7 * 86400.0,
        gt=0,
        description="a worker that returns within this time still unloads adapters that were deleted meanwhile",
    )
    stop_grace_s: float = Field(
        default=10.0, ge=1, allow_inf_nan=False, description="on SIGTERM, time for requests in flight to finish"
    )

    @model_validator(mode="after")
    def _engine_settings_fit(self) -> Self:
        """Raises ValueError for engine settings that contradict each other."""
        engines_by_id(self.engines)
        if bool(self.engine_slots) != bool(self.engine_roots):
            raise ValueError("engine_slots and engine_roots: give both, or neither")
        if not all(root.is_absolute() for root in self.engine_roots):
            raise ValueError(f"engine_roots: {', '.join(map(str, self.engine_roots))} must be absolute paths")
        return self

    @model_validator(mode="after")
    def _upload_settings_fit(self) -> Self:
        """Raises ValueError for a store that cannot be one, or a quota below one upload's largest size."""
        upload_store(self.upload_store)
        if self.max_unfinished_upload_bytes < self.max_upload_bytes:
            raise ValueError("max_unfinished_upload_bytes must be max_upload_bytes or more: one upload must fit")
        return self

    @property
    def needs_kube(self) -> bool:
        """Whether the settings need an API server."""
        has_workload = any(pool.workload for pool in self.scale_from_zero.values())
        return self.lease == "kubernetes" or bool(self.kube_selector) or has_workload

    @property
    def has_database(self) -> bool:
        """Whether the store is a PostgreSQL database."""
        return self.backend == "store" and (self.store_file is not None or isinstance(self.store, str))

    @property
    def record_path(self) -> Path | None:
        """Where the readable copy of the stored intent is; None without one."""
        return self.record or self._path_beside_store("record.json")

    @property
    def traffic_path(self) -> Path | None:
        """Where past traffic is kept; None: in memory."""
        return self.traffic or self._path_beside_store("traffic.db")

    def _path_beside_store(self, suffix: str) -> Path | None:
        """A file beside the SQLite file, with this suffix; None where the store is something else."""
        if self.backend != "store" or self.has_database:
            return None
        path = Path(self.store)
        return path.with_name(f"{path.name}.{suffix}")

    @field_validator("store", mode="after")
    @classmethod
    def _path_or_address(cls, store: Path | str) -> Path | str:
        """A path, or an address of a database as text. Raises ValueError, which repeats nothing of an address."""
        scheme, is_address, _ = str(store).partition("://")
        if is_address and scheme not in ("postgresql", "postgres"):
            raise ValueError(f"{scheme}:// is no store; expected a file's path, or postgresql://user@host/database")
        return str(store) if is_address else Path(store)

    @model_validator(mode="after")
    def _store_settings_fit(self) -> Self:
        """Raises ValueError for two stores, or a database whose lease is elsewhere."""
        if self.store_file is not None and "store" in self.model_fields_set:
            raise ValueError("store and store_file: give one of them")
        if self.has_database and self.lease != "store":
            raise ValueError("a PostgreSQL store needs lease store: the lease's term in the database fences its writes")
        return self

    @model_validator(mode="after")
    def _lease_times_fit(self) -> Self:
        """Raises ValueError unless a leader stops before another orchestrator may take over."""
        if self.lease_renew_s + self.lease_margin_s >= self.lease_duration_s:
            raise ValueError("lease_renew_s and lease_margin_s together must be less than lease_duration_s")
        return self

    @model_validator(mode="after")
    def _configmaps_need_kube_lease(self) -> Self:
        """Raises ValueError for backend configmaps without a Kubernetes Lease."""
        if self.backend == "configmaps" and self.lease != "kubernetes":
            raise ValueError("backend configmaps needs lease kubernetes: a file says nothing about other pods")
        return self
