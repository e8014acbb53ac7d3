"""Pauses: new requests of a scope are held."""

from typing import Literal

from pydantic import Field

from orchestrator.model.documents import ServiceDocument, WrittenDocument

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that run when a pause begins: they go on, are waited for, or are ended."""


class CatalogPause(ServiceDocument):
    """A pause: routers hold the new requests of its scope.

    key           of the scope, as in `UsageReport.running_in_pause`
    tenant        null: every tenant's requests; `namespace`: "" for those of every namespace
    began_at, renewals  tell a new call from one that the router knows
    lease_s       a router that hears nothing more ends the pause so many seconds after it has read it
    """

    key: str
    tenant: str | None = None
    namespace: str = ""
    mode: PauseMode = "keep"
    began_at: float
    renewals: int = 0
    expires_at: float
    lease_s: float


class PauseSpec(WrittenDocument):
    """`POST /v1/pauses`. `lease_s`: default `pause_lease_s`, at most `pause_max_lease_s`."""

    mode: PauseMode = "keep"
    lease_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class PauseItem(ServiceDocument):
    """A pause. `running`: requests of its scope that run on, at routers that have reported.

    routers_behind  live routers that do not hold yet; 0 in the answer to `POST /v1/pauses`
    """

    scope: str
    tenant: str | None
    namespace: str
    mode: PauseMode
    owner: str
    began_at: str
    expires_at: str
    running: int
    routers_behind: int


class PauseList(ServiceDocument):
    data: tuple[PauseItem, ...]
