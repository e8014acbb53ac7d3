"""The router's settings."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, DirectoryPath, Field, NonNegativeFloat, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.engine.agentless import engines_by_id
from lorafleet.engine.settings import WorkerDiscoverySettings
from lorafleet.service.settings import Url
from router.core.schedule.cost_settings import CostSettings

_ORIGIN = re.compile(r"\*|https?://[^/?#@\s]+")


def _origin(text: str) -> str:
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no origin: expected https://host or http://host:port, without a path, or *")
    return text.lower()


Origin = Annotated[str, AfterValidator(_origin)]
PolicyName = Literal["kv_lora", "round_robin", "least_loaded", "session", "prefix_hash"]


class RouterSettings(WorkerDiscoverySettings):
    """KV-aware, LoRA-aware router in front of a fleet of vLLM workers.

    Example: python -m router --port 8000 --orchestrator-url http://127.0.0.1:8080
    """

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_ROUTER_")

    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    orchestrator_url: Url = Field(
        default="http://127.0.0.1:8080", description="where the catalog comes from; with engines named, none by default"
    )
    zone: str = Field(
        default="", description="the zone this router is in: replicas there are preferred, see other_zone_s in costs"
    )
    router_id: str = Field(default="", description="our name in usage reports; empty: host name and process id")
    state_dir: Path | None = Field(
        default=None, description="keep the last catalog here, so that a restart does not need the orchestrator"
    )
    catalog_poll_s: float = Field(default=1.0, gt=0, description="longest time between looks at the catalog")
    metadata_poll_s: float = Field(default=1.0, gt=0, description="longest time between looks at each agent")
    control_timeout_s: float = Field(default=5.0, gt=0, description="for each call to an agent or the orchestrator")
    unreachable_after_s: float = Field(
        default=10.0, gt=0, description="an agent silent for so long no longer vouches for its engine"
    )
    connect_timeout_s: float = Field(default=2.0, gt=0, description="to open a connection to an engine")
    first_data_timeout_s: float = Field(
        default=300.0, gt=0, description="from sending a request to its first token or whole answer"
    )
    trial_timeout_s: float = Field(
        default=30.0, gt=0, description="the same, for the one stream that finds out whether a failing replica is well"
    )
    max_answer_s: float = Field(
        default=3600.0,
        gt=0,
        description="to a first token or whole answer at most, where the client says in x-lorafleet-timeout-s that it"
        " waits for longer, or where the answer is not streamed and its engine is seen to work",
    )
    idle_timeout_s: float = Field(default=120.0, gt=0, description="between two pieces of a streamed answer")
    stream_keep_alive_s: float = Field(
        default=0.0,
        ge=0,
        description="say this often, by a comment, that a stream's first event is waited for; 0: never. The first one"
        " is sent with status 200, and what fails after it is told in the stream",
    )
    cold_start_timeout_s: float = Field(
        default=60.0, gt=0, description="how long a request waits for an adapter that is loaded nowhere"
    )
    first_sync_wait_s: float = Field(
        default=10.0,
        ge=0,
        description="from its start on, how long a router that has met no worker holds requests before it says no",
    )
    failover_wait_s: float = Field(
        default=10.0, gt=0, description="how long a base model's request waits when every replica has failed it"
    )
    max_held_requests: int = Field(default=1000, ge=1, description="requests that may wait for adapters at once")
    max_held_bytes: int = Field(default=256 * 2**20, gt=0, description="and what their bodies may take together")
    max_cold_adapters_per_tenant: int = Field(
        default=32, ge=1, description="adapters that may be brought for one tenant at once; more: 429"
    )
    max_head_bytes: int = Field(default=64 * 2**10, ge=1024, description="largest head of a request; larger: 431")
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="largest request body; larger: 413")
    max_body_items: int = Field(
        default=200_000,
        ge=1000,
        description="texts, objects and lists in a request's body: messages, their parts, tools; more: 400",
    )
    max_sequences: int = Field(
        default=256,
        ge=1,
        description="answers that one request may ask for: n, for each prompt of a list; more: 400. As many as an"
        " engine runs at once (--max-num-seqs): others wait behind what is more",
    )
    max_bodies_bytes: int = Field(
        default=2**30, gt=0, description="bodies of all requests that are not answered yet; more: 429"
    )
    head_timeout_s: float = Field(default=15.0, gt=0, description="for a client to send a whole head; longer: 408")
    body_timeout_s: float = Field(default=60.0, gt=0, description="for a client to send a whole body; longer: 408")
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="how long a client may read nothing of its answer before it is hung up on"
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="whose pages in a browser may ask and read answers, each as https://host, or * for all; none by"
        " default. With * and without keys any page that a user of this machine opens may",
    )
    keep_alive_s: float = Field(
        default=75.0,
        gt=0,
        description="how long a client's connection may idle; a proxy in front must give up first",
    )
    max_answer_bytes: int = Field(default=64 * 2**20, gt=0, description="largest unstreamed answer from an engine")
    background_timeout_s: float = Field(
        default=3600.0, gt=0, description="how long a response in the background counts as under way at most"
    )
    max_background_responses: int = Field(
        default=1000, ge=1, description="responses that may be under way in the background at once; more: 429"
    )
    max_tries: int = Field(default=3, ge=1, description="replicas that one request may be sent to before it fails")
    tokenizer: str = Field(
        default="auto",
        pattern="^(auto|remote|off)$",
        description="auto: here when equal to the engine's, else there; remote: always there; off: no KV matching",
    )
    tokenizer_paths: dict[str, DirectoryPath] = Field(
        default={}, description="base model -> folder with its tokenizer's files; without one an agent's are fetched"
    )
    tokenize_timeout_s: float = Field(
        default=0.5, gt=0, description="how long an engine's /tokenize may hold up a request that is not tokenized here"
    )
    send_prompt_ids: Literal["off", "completions", "all"] = Field(
        default="completions",
        description="give vLLM the ids of prompts tokenized here; all: of chats, too, by kv_transfer_params",
    )
    kv_tail_poll_s: float = Field(
        default=5.0, gt=0, description="how often a silent engine is asked for KV events that got lost"
    )
    policy: PolicyName = Field(
        default="kv_lora", description="the rule that picks a replica; docs/architecture.md tells them apart"
    )
    shadow_policies: tuple[PolicyName, ...] = Field(
        default=(), description="policies to run beside it on live traffic; they decide nothing, metrics compare them"
    )
    costs: dict[str, NonNegativeFloat] = Field(
        default={},
        description="numbers of the cost model, by name: temperature_s, kappa_min, ... (schedule/cost_settings.py)",
    )
    late_binding_s: float = Field(
        default=1.0,
        ge=0,
        description="seconds of work queued at an engine at most; the rest waits here, in fair order",
    )
    max_waiting_requests: int = Field(default=10_000, ge=1, description="requests that may wait for room at an engine")
    max_waiting_bytes: int = Field(default=2**30, gt=0, description="and what their bodies may take together")
    tenant_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="of what may wait, for room or adapters, and of bodies, that one tenant may take",
    )
    max_in_flight_tokens: int = Field(
        default=0, ge=0, description="prompt tokens at one base model's engines at once, the rest waits; 0: no bound"
    )
    max_wait_s: float = Field(default=60.0, gt=0, description="how long a request may wait for room; longer: 429")
    breaker_failures: int = Field(default=5, ge=1, description="failures in a row that open an engine's circuit")
    breaker_open_s: float = Field(default=2.0, gt=0, description="how long a circuit stays open first; it doubles")
    breaker_max_open_s: float = Field(default=60.0, gt=0, description="and how long at most")
    breaker_eject_share: float = Field(
        default=0.5, ge=0, le=1, description="of a base model's fleet that may be shut for failing more than the others"
    )
    breaker_silent_s: float = Field(
        default=20.0, gt=0, description="silence, beyond what its work explains, that opens an engine's circuit"
    )
    retry_share: float = Field(default=0.2, ge=0, le=1, description="share of recent requests that may be retried")
    retry_floor_per_s: float = Field(default=3.0, ge=0, description="and so many retries a second besides")
    deadly_hold_s: float = Field(
        default=30.0,
        ge=0,
        description="for how long what engines died of is sent to none; it doubles; 0: it is not held back",
    )
    session_header: str = Field(
        default="x-session-id", description="names a client's session, for policy session; without it: the body's user"
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="on SIGTERM, how long to go on serving while /ready says no: balancers lag",
    )
    grace_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="then, how long requests in flight may still take"
    )
    processes: int = Field(default=1, ge=1, le=64, description="router processes on this port, each with its own index")
    otlp_endpoint: Url = Field(
        default="", description="OpenTelemetry collector for traces, such as http://127.0.0.1:4318; empty: none"
    )
    trace_ratio: float = Field(
        default=0.1, ge=0, le=1, description="of requests to trace, where the client's traceparent has not decided"
    )

    @model_validator(mode="before")
    @classmethod
    def _engines_need_no_orchestrator(cls, given: dict[str, object]) -> dict[str, object]:
        return {"orchestrator_url": "", **given} if given.get("engines") else given

    @model_validator(mode="after")
    def _has_somebody_to_follow(self) -> Self:
        if not engines_by_id(self.engines) and not self.orchestrator_url and not self.kube_selector:
            raise ValueError("orchestrator_url: give one, or name engines, or a kube_selector")
        return self

    @field_validator("costs")
    @classmethod
    def _known(cls, costs: dict[str, float]) -> dict[str, float]:
        known = [field.name for field in fields(CostSettings)]
        if unknown := sorted(costs.keys() - set(known)):
            raise ValueError(f"unknown {unknown}; known: {', '.join(known)}")
        CostSettings(**costs)
        return costs
