"""Limits of keys and tenants, as key files have them. Core reads this module: it needs the standard library alone."""

from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from annotated_types import Ge, Le

from orchestrator.model.names import RESOURCE

MOST: Final = 2**53
"""The largest integer that floats represent exactly; token buckets use floats."""
Amount = Annotated[float, Ge(1), Le(MOST)]
_TENANT: Final = "tenant "


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """Limits of a key, or of all keys of a tenant together; None is no limit."""

    __pydantic_config__ = RESOURCE

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    """of prompts and answers"""
    bytes_per_minute: Amount | None = None
    """of bodies, as they are read"""
    concurrent_requests: Annotated[int, Ge(1), Le(MOST)] | None = None


class LimitedAccount(NamedTuple):
    """Whose limits a request counts against, and these.

    id  the key's id, or that of `tenant_account`
    """

    id: str
    limits: AccountLimits


def tenant_account(tenant: str) -> str:
    """The id of a tenant's account; no key has such an id."""
    return _TENANT + tenant


def account_tenant(account: str) -> str | None:
    """The tenant whose account this is; None: it is a key's."""
    return account.removeprefix(_TENANT) if account.startswith(_TENANT) else None
