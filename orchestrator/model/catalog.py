"""The catalog and the events that routers follow; routers route by these very objects."""

from dataclasses import dataclass
from typing import Literal

from lorafleet import identity
from orchestrator.model.acceptance import AcceptanceMode
from orchestrator.model.names import MESSAGE, WIRE
from orchestrator.model.pauses import PauseLease
from orchestrator.model.served_names import Targets

WorkerState = Literal["starting", "ready", "cordoned", "draining", "unmanaged", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogAdapter:
    """An adapter that requests may name."""

    __pydantic_config__ = MESSAGE

    lora_id: str
    digest: str | None
    """null until an agent has inspected it"""
    base_model: str | None
    source: str = ""
    """where workers fetch it from"""
    rank: int = 0
    """0 until an agent has inspected it"""
    tenants: tuple[str, ...] | None = None
    """null: everyone"""
    is_deleting: bool = False
    """it takes no new requests"""
    error: str | None = None
    """why no worker can use it; a request may wait for any other error to pass"""
    priority: int = 0
    secret: str | None = None
    """name/key of the credentials for `source`"""
    cache: identity.CacheScope | None = None
    """who shares its cached prompts; null: the catalog's `cache`"""
    published_as: str | None = None
    """published name that it is a version of"""
    acceptance: AcceptanceMode = "warn"
    """what a worker is to do with its acceptance file, by its policy or the fleet's"""
    ignored_modules: Literal["accept", "refuse"] | None = None
    """what a worker is to do where its engine ignores a part of its modules; null: the worker's setting"""
    # Made once: each request looks it up in several tables, and a new string would be hashed anew.
    engine_name: str | None = None
    """its name at engines, with the digest, so that other bytes have another name; null until the digest is known"""

    def __post_init__(self) -> None:
        if self.digest is not None:
            object.__setattr__(self, "engine_name", identity.engine_name(self.lora_id, self.digest))

    @property
    def is_listed(self) -> bool:
        """Whether it is not in the catalog: an engine without an agent lists it by this name."""
        return self.digest is None and self.engine_name is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogAlias:
    """A name in the catalog, and what requests for it get."""

    __pydantic_config__ = MESSAGE

    name: str
    targets: Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogWorker:
    """A worker in the catalog. An agentless engine has no `agent_url`; routers ask the engine instead."""

    __pydantic_config__ = MESSAGE

    id: str
    agent_url: str
    state: WorkerState
    engine_url: str = ""
    agent_boot_id: str = ""
    """boot id of the agent that reported this state; a new agent of the worker has a state of its own"""
    kept_out: tuple[str, ...] = ()
    """adapters that get no copy there, because an operator keeps them out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A drain: no new request for the adapter may go to the worker."""

    __pydantic_config__ = MESSAGE

    worker_id: str
    lora_id: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """`GET /v1/catalog`: all that routers follow, at one revision. Revisions only grow, over restarts too.

    With `since`, adapters and aliases are only those that changed after that revision; drains and workers are all.
    """

    __pydantic_config__ = MESSAGE

    revision: int
    since: int | None = None
    """the revision that these are the changes to; null: all"""
    adapters: tuple[CatalogAdapter, ...] = ()
    aliases: tuple[CatalogAlias, ...] = ()
    gone_adapters: tuple[str, ...] = ()
    """lora_ids that there are no longer"""
    gone_aliases: tuple[str, ...] = ()
    """alias names that there are no longer"""
    draining: tuple[Draining, ...] = ()
    workers: tuple[CatalogWorker, ...] = ()
    pauses: tuple[PauseLease, ...] = ()
    cache: identity.CacheScope = "tenant"
    """who shares cached prompts where an adapter does not say so: the policy's"""
    wire: int = WIRE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """One event of `GET /v1/events`; `id` is its revision."""

    __pydantic_config__ = MESSAGE

    id: int
    type: str
    at: str
    lora_id: str | None = None
    worker_id: str | None = None
    message: str = ""
