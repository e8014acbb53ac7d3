"""Pauses: new requests of a scope are held."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from annotated_types import Gt

from orchestrator.model.names import MESSAGE, RESOURCE

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that run when a pause begins: they go on, are waited for, or are ended."""


class PauseScope(NamedTuple):
    """Whose requests a pause holds. `tenant`: None for every tenant's; `namespace`: "" for those of every namespace."""

    tenant: str | None = None
    namespace: str = ""

    @property
    def key(self) -> str:
        """The scope as a key, different for different scopes; so is it named in `UsageReport.running_in_pause`."""
        return json.dumps([self.tenant, self.namespace])

    @classmethod
    def of_key(cls, key: str) -> "PauseScope":
        """The scope with this key."""
        tenant, namespace = json.loads(key)
        return cls(tenant, namespace)

    @property
    def text(self) -> str:
        """The scope for people."""
        parts = [] if self.tenant is None else [f"tenant {self.tenant}"]
        parts += [f"namespace {self.namespace}"] if self.namespace else []
        return ", ".join(parts) or "the whole fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseLease:
    """One pause as it is stored, and as routers follow it: they hold the new requests of its scope.

    It ends at `expires_at` unless it is renewed or ended before.
    """

    __pydantic_config__ = MESSAGE

    tenant: str | None
    """null: every tenant's requests"""
    namespace: str = ""
    """"": those of every namespace"""
    mode: PauseMode
    owner: str
    """the name of the caller who asked for it last"""
    began_at: float
    expires_at: float
    lease_s: float
    """seconds that the last call asked for: a router that hears nothing more ends the pause so long after it"""
    renewals: int = 0
    """calls since the first: with `began_at` it tells a router of a new call"""

    @property
    def scope(self) -> PauseScope:
        """Whose requests it holds."""
        return PauseScope(self.tenant, self.namespace)

    @property
    def key(self) -> str:
        """The key of its scope."""
        return self.scope.key


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseSpec:
    """`POST /v1/pauses`. `lease_s`: default `pause_lease_s`, at most `pause_max_lease_s`."""

    __pydantic_config__ = RESOURCE

    mode: PauseMode = "keep"
    lease_s: Annotated[float, Gt(0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseItem:
    """A pause as callers see it: whose requests it holds in words, times as text, and how far it is in force."""

    __pydantic_config__ = MESSAGE

    scope: str
    tenant: str | None
    namespace: str
    mode: PauseMode
    owner: str
    began_at: str
    expires_at: str
    running: int
    """requests of its scope that run on, at routers that have reported"""
    routers_behind: int
    """live routers that do not hold yet; 0 in the answer to `POST /v1/pauses`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseList:
    __pydantic_config__ = MESSAGE

    data: tuple[PauseItem, ...]
