"""The router's settings."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, DirectoryPath, Field, NonNegativeFloat, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.engine.agentless import engines_by_id
from lorafleet.engine.settings import WorkerDiscoverySettings
from lorafleet.identity import CacheScope
from lorafleet.service.settings import Url
from router.core.queue.fair_queue import Fairness
from router.core.schedule.cost_settings import CostSettings

_ORIGIN = re.compile(r"\*|https?://[^/?#@\s]+")


def _parse_origin(text: str) -> str:
    """The origin in lower case, or `*`. Raises ValueError for any other text."""
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no origin: expected https://host or http://host:port, without a path, or *")
    return text.lower()


Origin = Annotated[str, AfterValidator(_parse_origin)]
PolicyName = Literal["kv_lora", "round_robin", "least_loaded", "session", "prefix_hash"]


class RouterSettings(WorkerDiscoverySettings):
    """KV-aware, LoRA-aware router in front of a fleet of vLLM workers.

    Example: lorafleet router --port 8000 --orchestrator-url http://127.0.0.1:8080
    """

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_ROUTER_")

    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    orchestrator_url: Url = Field(
        default="http://127.0.0.1:8080", description="orchestrator that serves the catalog; default with engines: none"
    )
    zone: str = Field(
        default="", description="zone of this router: replicas there are preferred, see other_zone_s in costs"
    )
    kept_requests: int = Field(
        default=5000,
        ge=0,
        le=1_000_000,
        description="ended requests that each process keeps for /v1/requests, and as many that failed; some 1 KB each",
    )
    router_id: str = Field(
        default="", description="this router's name in usage reports; empty: host name and process id"
    )
    state_dir: Path | None = Field(
        default=None, description="folder for the last catalog, so that a restart does not need the orchestrator"
    )
    catalog_poll_s: float = Field(default=1.0, gt=0, description="longest time between two reads of the catalog")
    metadata_poll_s: float = Field(
        default=1.0, gt=0, description="longest time between two reads of each agent's report"
    )
    control_timeout_s: float = Field(default=5.0, gt=0, description="timeout of a call to an agent or the orchestrator")
    publish_timeout_s: float = Field(
        default=28.0,
        gt=0,
        le=110,
        description="longest time that /v1/load_lora_adapter and its kin may take; trainers give up after 30 s",
    )
    unreachable_after_s: float = Field(
        default=10.0, gt=0, description="silence after which an agent's worker counts as unreachable"
    )
    connect_timeout_s: float = Field(default=2.0, gt=0, description="timeout for opening a connection to an engine")
    spare_connections: int = Field(
        default=64,
        ge=0,
        description="unused connections kept open to an engine for a minute after so many were in use; 0: none",
    )
    first_data_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="timeout from sending a request to its first token, or to its whole unstreamed answer",
    )
    trial_timeout_s: float = Field(
        default=30.0, gt=0, description="the same for the trial request of a half-open circuit"
    )
    max_answer_s: float = Field(
        default=3600.0,
        gt=0,
        description="upper bound of that timeout, where the client asks for more in x-lorafleet-timeout-s, or where the"
        " engine is seen to compute an unstreamed answer",
    )
    idle_timeout_s: float = Field(default=120.0, gt=0, description="timeout between two pieces of a streamed answer")
    stream_keep_alive_s: float = Field(
        default=0.0,
        ge=0,
        description="send an SSE comment every so many seconds until the first token; 0: off. The first comment commits"
        " status 200, so later errors arrive as a stream event",
    )
    cold_start_timeout_s: float = Field(
        default=60.0, gt=0, description="how long a request waits for an adapter that no worker has loaded"
    )
    scale_from_zero_wait_s: float = Field(
        default=600.0,
        gt=0,
        description="how long a request waits for the first worker of a pool of `scale_from_zero`; longer: 503",
    )
    first_sync_wait_s: float = Field(
        default=10.0,
        ge=0,
        description="after its start, how long a router without any known worker holds requests before it refuses them",
    )
    failover_wait_s: float = Field(
        default=10.0, gt=0, description="how long a request waits for another replica when every one has failed it"
    )
    max_held_requests: int = Field(default=1000, ge=1, description="requests that may wait for cold adapters at once")
    max_held_bytes: int = Field(default=256 * 2**20, gt=0, description="bytes of their bodies together")
    max_cold_adapters_per_tenant: int = Field(
        default=32, ge=1, description="cold adapters that may load for one tenant at once; more: 429"
    )
    max_head_bytes: int = Field(default=64 * 2**10, ge=1024, description="largest head of a request; larger: 431")
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="largest request body; larger: 413")
    max_body_items: int = Field(
        default=200_000,
        ge=1000,
        description="JSON strings, objects and lists in a request's body; more: 400",
    )
    max_sequences: int = Field(
        default=256,
        ge=1,
        description="sequences of one request: n for each of its prompts; more: 400. Best as many as an engine runs at"
        " once (--max-num-seqs)",
    )
    max_bodies_bytes: int = Field(default=2**30, gt=0, description="bytes of all unanswered bodies; more: 429")
    head_timeout_s: float = Field(
        default=15.0, gt=0, description="timeout for a client to send a whole head; later: 408"
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, description="timeout for a client to send a whole body; later: 408"
    )
    send_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="how long a client may read nothing of its answer before its connection is closed",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="CORS: origins whose pages may use this router: https://host, or * for all; none by default."
        " With * and without keys, any page that a user of this machine opens can use it",
    )
    keep_alive_s: float = Field(
        default=75.0,
        gt=0,
        description="how long a client's connection may idle; a proxy in front must close earlier",
    )
    max_answer_bytes: int = Field(default=64 * 2**20, gt=0, description="largest unstreamed answer from an engine")
    background_timeout_s: float = Field(
        default=3600.0, gt=0, description="how long a background response counts as running at most"
    )
    max_background_responses: int = Field(
        default=1000, ge=1, description="background responses that may run at once; more: 429"
    )
    max_tries: int = Field(default=3, ge=1, description="attempts at one request, each at another replica")
    tokenizer: str = Field(
        default="auto",
        pattern="^(auto|remote|off)$",
        description="auto: in the router when equal to the engine's, else by the engine; remote: always by the engine;"
        " off: no prefix matching",
    )
    tokenizer_paths: dict[str, DirectoryPath] = Field(
        default={},
        description="base model -> folder with its tokenizer's files; by default they are fetched from an agent",
    )
    tokenize_timeout_s: float = Field(
        default=0.5,
        gt=0,
        description="timeout of an engine's /tokenize for a request that is not tokenized in the router",
    )
    send_prompt_ids: Literal["off", "completions", "all"] = Field(
        default="completions",
        description="send vLLM the ids of prompts tokenized in the router; all: of chats, too, in kv_transfer_params",
    )
    kv_tail_poll_s: float = Field(
        default=5.0, gt=0, description="how often a silent engine is asked for lost KV events"
    )
    cache: CacheScope = Field(
        default="tenant",
        description="who shares cached prompts, without an orchestrator (with one, its policy says so): the keys of one"
        " tenant, the requests of one key, or everyone (shared); see docs/security.md",
    )
    policy: PolicyName = Field(default="kv_lora", description="routing policy; see docs/architecture.md")
    shadow_policies: tuple[PolicyName, ...] = Field(
        default=(), description="shadow policies on live traffic: they decide nothing, metrics compare them"
    )
    metrics_adapters: int = Field(
        default=100,
        ge=0,
        le=1000,
        description="adapters with metric series of their own, those with the most requests of late; the rest count as"
        " `other`",
    )
    costs: dict[str, NonNegativeFloat] = Field(
        default={},
        description="numbers of the cost model, by name: temperature_s, kappa_min, ... (schedule/cost_settings.py)",
    )
    late_binding_s: float = Field(
        default=1.0,
        ge=0,
        description="seconds of work queued at an engine at most; further requests wait in the router, in fair order",
    )
    fairness: Fairness = Field(
        default="request",
        description="what goes first among a tenant's queued requests for an adapter: what came first, or (program)"
        " what is of a program that was served least, at most 10 s ahead",
    )
    max_waiting_requests: int = Field(default=10_000, ge=1, description="requests that may wait for an engine at once")
    max_waiting_bytes: int = Field(default=2**30, gt=0, description="bytes of their bodies together")
    tenant_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share that one tenant may take of requests waiting for engines or adapters, and of bodies",
    )
    max_in_flight_tokens: int = Field(
        default=0,
        ge=0,
        description="prompt tokens at one base model's engines at once, further requests wait; 0: no bound",
    )
    max_wait_s: float = Field(default=60.0, gt=0, description="how long a request may wait for an engine; longer: 429")
    breaker_failures: int = Field(default=5, ge=1, description="failures in a row that open an engine's circuit")
    breaker_open_s: float = Field(
        default=2.0, gt=0, description="how long a circuit stays open at first; doubles with each opening"
    )
    breaker_max_open_s: float = Field(default=60.0, gt=0, description="how long a circuit stays open at most")
    breaker_eject_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of a base model's replicas whose circuits may open for failing more than the others",
    )
    breaker_silent_s: float = Field(
        default=20.0, gt=0, description="silence beyond the time of its work that opens an engine's circuit"
    )
    retry_share: float = Field(
        default=0.2, ge=0, le=1, description="retry budget: share of recent requests that may be retried"
    )
    retry_floor_per_s: float = Field(default=3.0, ge=0, description="retry budget: retries a second besides that share")
    deadly_hold_s: float = Field(
        default=30.0,
        ge=0,
        description="how long a request that engines died of is held back; doubles; 0: never",
    )
    session_header: str = Field(
        default="x-session-id",
        description="header that names a client's session before all others, see docs/protocol.md",
    )
    fingerprint: Literal["engine", "adapter"] = Field(
        default="engine",
        description="system_fingerprint of chats and completions: the engine's own, or the adapter that answered,"
        " lora_id@digest12; header x-lorafleet-fingerprint decides for one request",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="on SIGTERM, how long to go on serving while /ready fails, for load balancers to notice",
    )
    grace_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="after that, how long requests in flight may still take"
    )
    ext_proc: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port for gateways that ask where to send each request (Envoy's external processing, of a Gateway"
        " API InferencePool); 0 picks a free one; none by default (docs/gateway.md)",
    )
    ext_proc_self_signed: bool = Field(
        default=False,
        description="TLS on that port with a certificate made at the start, for gateways that ask for TLS and verify"
        " nobody; with `tls_cert` that certificate is used",
    )
    processes: int = Field(default=1, ge=1, le=64, description="router processes on this port, each with its own index")
    otlp_endpoint: Url = Field(
        default="", description="OpenTelemetry collector for traces, such as http://127.0.0.1:4318; empty: no traces"
    )
    trace_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of requests to trace, where the client's traceparent does not decide",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_orchestrator_to_none_with_engines(cls, given: dict[str, object]) -> dict[str, object]:
        """With `engines` the default of `orchestrator_url` is empty."""
        return {"orchestrator_url": "", **given} if given.get("engines") else given

    @model_validator(mode="after")
    def _require_worker_source(self) -> Self:
        """Raise ValueError where no setting names a source of workers."""
        if not engines_by_id(self.engines) and not self.orchestrator_url and not self.kube_selector:
            raise ValueError("orchestrator_url: give one, or name engines, or a kube_selector")
        return self

    @model_validator(mode="after")
    def _require_one_port_for_gateways(self) -> Self:
        """Raise ValueError where each of several processes would pick a port of its own for gateways."""
        if self.ext_proc == 0 and self.processes > 1:
            raise ValueError("ext_proc: give a port, such as 9002: 0 would be another one in each of the processes")
        return self

    @field_validator("costs")
    @classmethod
    def _check_costs(cls, costs: dict[str, float]) -> dict[str, float]:
        """Raise ValueError for an unknown or invalid cost setting."""
        known = [field.name for field in fields(CostSettings)]
        if unknown := sorted(costs.keys() - set(known)):
            raise ValueError(f"unknown {unknown}; known: {', '.join(known)}")
        CostSettings(**costs)
        return costs
