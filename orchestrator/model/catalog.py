"""The catalog and the events that routers follow."""

from pydantic import Field

from orchestrator.model.adapter_documents import AdapterState
from orchestrator.model.documents import WIRE, ServiceDocument
from orchestrator.model.pauses import CatalogPause
from orchestrator.model.served_names import Targets
from orchestrator.model.workers import WorkerState


class CatalogAdapter(ServiceDocument):
    """An adapter in the catalog."""

    lora_id: str
    digest: str | None
    base_model: str | None
    source: str
    rank: int | None = None
    tenants: tuple[str, ...] | None = None
    state: AdapterState = "registered"
    error: str | None = None
    priority: int = 0
    secret: str | None = Field(default=None, description="name/key of the credentials for `source`")
    published_as: str | None = Field(default=None, description="published name that it is a version of")


class CatalogAlias(ServiceDocument):
    """A name in the catalog, and what requests for it get."""

    name: str
    targets: Targets


class CatalogWorker(ServiceDocument):
    """A worker in the catalog. An agentless engine has no `agent_url`; routers ask the engine instead.

    agent_boot_id  boot id of the agent that reported this state; a new agent of the worker has a state of its own
    """

    id: str
    agent_url: str
    state: WorkerState
    engine_url: str = ""
    agent_boot_id: str = ""


class Draining(ServiceDocument):
    """A drain: no new request for the adapter may go to the worker."""

    worker_id: str
    lora_id: str
    digest: str


class Catalog(ServiceDocument):
    """`GET /v1/catalog`: all that routers follow, at one revision. Revisions only grow, over restarts too.

    With `since`, adapters and aliases are only those that changed after that revision; drains and workers are all.
    """

    revision: int
    since: int | None = Field(default=None, description="the revision that these are the changes to; null: all")
    adapters: tuple[CatalogAdapter, ...] = ()
    aliases: tuple[CatalogAlias, ...] = ()
    gone_adapters: tuple[str, ...] = Field(default=(), description="lora_ids that there are no longer")
    gone_aliases: tuple[str, ...] = Field(default=(), description="alias names that there are no longer")
    draining: tuple[Draining, ...] = ()
    workers: tuple[CatalogWorker, ...] = ()
    pauses: tuple[CatalogPause, ...] = ()
    wire: int = WIRE


class FleetEvent(ServiceDocument):
    """One event of `GET /v1/events`; `id` is its revision."""

    id: int
    type: str
    at: str
    lora_id: str | None = None
    worker_id: str | None = None
    message: str = ""
