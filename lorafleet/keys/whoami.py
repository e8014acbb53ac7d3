"""`GET /v1/whoami`: what the caller's key stands for."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

from lorafleet.keys.auth import ApiKeys, KeyCheck
from lorafleet.keys.key_files import LIMITS
from lorafleet.keys.roles import SCOPES, Caller
from lorafleet.service.times import utc_text

_EXAMPLE: JsonDict = {
    "key_id": "2c26b46b68ff",
    "tenant": "acme",
    "scopes": ["tenant-admin"],
    "may": ["infer", "view", "tenant-admin", "register"],
    "is_confined_to_tenant": True,
    "limits": {"requests_per_minute": 600},
    "expires": "2027-01-31T00:00:00Z",
    "wire": 1,
}


class WhoAmI(BaseModel):
    """A key's tenant, scopes and limits; never the key or its hash.

    key_id   the first digits of the key's hash, as in logs and histories; empty where no key is needed
    tenant   null: above tenants
    scopes   as the key file has them
    may      all scopes that these include
    is_confined_to_tenant  whether reads and changes concern the tenant's own objects alone
    limits   those that the key has, by name
    expires  UTC; null: never
    namespace, lora_ids, may_shadow_base  as the key file has them
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra={"examples": [_EXAMPLE]})

    key_id: str
    tenant: str | None
    scopes: tuple[str, ...]
    may: tuple[str, ...]
    is_confined_to_tenant: bool
    limits: dict[str, float]
    expires: str | None
    namespace: str = ""
    lora_ids: tuple[str, ...] = ()
    may_shadow_base: bool = False
    wire: int = 1


def whoami_routes(keys: ApiKeys) -> APIRouter:
    """The route; it takes any valid key."""
    api = APIRouter(tags=["health"])

    @api.get("/v1/whoami")
    async def whoami(caller: Annotated[Caller, Depends(KeyCheck(keys))]) -> WhoAmI:
        """The tenant, scopes, limits and expiry of the caller's key."""
        return who_is(caller)

    return api


def who_is(caller: Caller) -> WhoAmI:
    """The caller as wire model."""
    limits = {name: getattr(caller.limits, name) for name in LIMITS} if caller.limits is not None else {}
    expires_at = caller.expires_at
    return WhoAmI(
        key_id=caller.key_id,
        tenant=caller.tenant,
        scopes=tuple(sorted(caller.scopes)),
        may=tuple(scope for scope in SCOPES if caller.may(scope)),
        is_confined_to_tenant=caller.only_tenant is not None,
        limits={name: limit for name, limit in limits.items() if limit is not None},
        expires=None if expires_at is None else utc_text(datetime.fromtimestamp(expires_at, UTC), "seconds"),
        namespace=caller.namespace,
        lora_ids=caller.lora_ids,
        may_shadow_base=caller.may_shadow_base,
    )
