"""The orchestrator's settings; see `lorafleet.service.settings` for where they come from."""

from pathlib import Path, PurePosixPath
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.engine.agentless import engines_by_id
from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.settings import Key, ServiceSettings, Url


class OrchestratorSettings(ServiceSettings):
    """lorafleet orchestrator: decides which adapter lives on which worker, and makes it so."""

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_ORCHESTRATOR_")

    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    store: Path = Field(
        default=Path("lorafleet-orchestrator.db"), description="SQLite file with what was asked for; made when missing"
    )
    backend: Literal["sqlite", "configmaps"] = Field(
        default="sqlite", description="where what was asked for is kept: the file `store`, or ConfigMaps"
    )
    lease: Literal["file", "kubernetes"] = Field(
        default="file", description="who leads: by a file beside `store`, or by a Lease of Kubernetes"
    )
    kube_selector: str = Field(
        default="",
        description="labels of the workers' Services in Kubernetes, whose EndpointSlices are followed; empty: none are",
    )
    kube_namespaces: tuple[str, ...] = Field(default=(), description="where those Services are; empty: our own")
    kubeconfig: Path | None = Field(
        default=None, description="how to reach the API server; default: KUBECONFIG's, else the pod's service account"
    )
    kube_namespace: str = Field(default="", description="of the Lease and the ConfigMaps; empty: our own")
    kube_name: str = Field(
        default="lorafleet",
        pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
        description="of the Lease, and of the fleet in the ConfigMaps' label lorafleet.io/fleet",
    )
    store_timeout_s: float = Field(
        default=30.0, gt=0, description="with backend configmaps: give up a change that the API server does not take"
    )
    engines: tuple[str, ...] = Field(
        default=(), description="vLLMs without an agent, each as http://host:port or id=http://host:port"
    )
    engine_slots: int = Field(
        default=0, ge=0, description="adapters that each of those may hold, its --max-cpu-loras; 0: none is loaded"
    )
    engine_roots: tuple[PurePosixPath, ...] = Field(
        default=(), description="folders on those engines' own disks that adapters may be loaded from, as file://"
    )
    engine_key: Key = Field(
        default="", repr=False, description="bearer key for engines without an agent that want one: their --api-key"
    )
    engine_salt: EngineSalt = Field(
        default="auto",
        description="adapters at engines without an agent that have a KV connector, see docs/engines.md: auto, as they"
        " tell; always or never salted; no_adapters",
    )
    advertise_url: Url = Field(
        default="", description="where other orchestrators reach this one; empty: http, at host and port"
    )
    lease_duration_s: float = Field(
        default=5.0, gt=0, description="another orchestrator takes over after the leader was silent this long"
    )
    lease_renew_s: float = Field(default=1.0, gt=0, description="time between looks at the lease")
    lease_margin_s: float = Field(
        default=1.0, ge=0, description="a leader that could not renew stops this long before another may take over"
    )
    forward_timeout_s: float = Field(
        default=2.0, gt=0, description="deadline of the connection to the orchestrator that leads"
    )
    pass_interval_s: float = Field(default=2.0, gt=0, description="time between passes when nothing happens")
    heartbeat_interval_s: float = Field(default=1.0, gt=0, description="how often agents are told to report")
    probe_after_s: float = Field(
        default=2.0, gt=0, description="ask agent and engine ourselves when a worker has been silent this long"
    )
    lost_after_s: float = Field(
        default=3.0, gt=0, description="silent this long, and neither agent nor engine answers: the worker is lost"
    )
    forget_after_s: float = Field(default=3600.0, gt=0, description="drop a lost worker from the lists after this long")
    settle_s: float = Field(
        default=2.5, ge=0, description="after a start, hear the fleet out this long before loading or deleting anything"
    )
    wanted_for_s: float = Field(
        default=60.0, gt=0, description="an `ensure` counts this long, or until the adapter is there"
    )
    probe_timeout_s: float = Field(default=1.5, gt=0, description="deadline of a call that only asks")
    inspect_timeout_s: float = Field(default=300.0, gt=0, description="deadline of fetching and verifying an adapter")
    load_timeout_s: float = Field(default=300.0, gt=0, description="deadline of a load, the fetch included")
    unload_timeout_s: float = Field(default=30.0, gt=0, description="deadline of an unload")
    inspects_in_flight: int = Field(default=8, ge=1, description="most adapters inspected at the same time")
    event_buffer: int = Field(default=4096, ge=1, description="events kept for followers that reconnect")
    keep_alive_s: float = Field(default=15.0, gt=0, description="time between comments on an idle event stream")
    tombstones_kept_s: float = Field(
        default=7 * 86400.0, gt=0, description="a worker that returns within this time still gives up what was deleted"
    )
    stop_grace_s: float = Field(
        default=10.0, ge=1, allow_inf_nan=False, description="on SIGTERM, time for requests in flight to finish"
    )

    @model_validator(mode="after")
    def _engines_are_whole(self) -> Self:
        engines_by_id(self.engines)
        if bool(self.engine_slots) != bool(self.engine_roots):
            raise ValueError("engine_slots and engine_roots: give both, or neither")
        if not all(root.is_absolute() for root in self.engine_roots):
            raise ValueError(f"engine_roots: {', '.join(map(str, self.engine_roots))} must be absolute paths")
        return self

    @model_validator(mode="after")
    def _lease_can_be_renewed_in_time(self) -> Self:
        if self.lease_renew_s + self.lease_margin_s >= self.lease_duration_s:
            raise ValueError("lease_renew_s and lease_margin_s together must be less than lease_duration_s")
        return self

    @model_validator(mode="after")
    def _configmaps_have_one_writer(self) -> Self:
        if self.backend == "configmaps" and self.lease != "kubernetes":
            raise ValueError("backend configmaps needs lease kubernetes: a file says nothing about other pods")
        return self
