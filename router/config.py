"""The router's settings."""

from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import DirectoryPath, Field, NonNegativeFloat, field_validator
from pydantic_settings import SettingsConfigDict

from lorafleet.settings import HouseSettings
from router.core.cost import Costs

PolicyName = Literal["kv_lora", "round_robin", "least_loaded", "session", "prefix_hash"]


class RouterSettings(HouseSettings):
    """KV-aware, LoRA-aware router in front of a fleet of vLLM workers.

    Example: python -m router --port 8000 --orchestrator-url http://127.0.0.1:8080
    """

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_ROUTER_")

    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    orchestrator_url: str = Field(default="http://127.0.0.1:8080", description="where the catalog comes from")
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
        default=30.0, gt=0, description="the same, for the one request that finds out whether a failing replica is well"
    )
    idle_timeout_s: float = Field(default=120.0, gt=0, description="between two pieces of a streamed answer")
    cold_start_timeout_s: float = Field(
        default=60.0, gt=0, description="how long a request waits for an adapter that is loaded nowhere"
    )
    failover_wait_s: float = Field(
        default=10.0, gt=0, description="how long a base model's request waits when every replica has failed it"
    )
    max_held_requests: int = Field(default=1000, ge=1, description="requests that may wait for adapters at once")
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="largest request body; larger: 413")
    max_answer_bytes: int = Field(default=64 * 2**20, gt=0, description="largest unstreamed answer from an engine")
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
    send_token_ids: bool = Field(
        default=True, description="give engines the ids of prompts tokenized here, where they then answer the same"
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
        description="other numbers in the cost model, by name: temperature_s, kappa_min, ... (router/core/cost.py)",
    )
    late_binding_s: float = Field(
        default=1.0,
        ge=0,
        description="seconds of work queued at an engine at most; the rest waits here, in fair order",
    )
    max_waiting_requests: int = Field(default=10_000, ge=1, description="requests that may wait for room at an engine")
    max_wait_s: float = Field(default=60.0, gt=0, description="how long one of them may wait before it gets 429")
    session_header: str = Field(
        default="x-session-id", description="names a client's session, for policy session; without it: the body's user"
    )
    grace_s: float = Field(default=30.0, ge=0, description="on SIGTERM, how long requests in flight may still take")

    @field_validator("costs")
    @classmethod
    def _known(cls, costs: dict[str, float]) -> dict[str, float]:
        known = [field.name for field in fields(Costs)]
        if unknown := sorted(costs.keys() - set(known)):
            raise ValueError(f"unknown {unknown}; known: {', '.join(known)}")
        Costs(**costs)
        return costs
