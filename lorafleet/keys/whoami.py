"""A key as answers show it, and `GET /v1/whoami`: what the caller's key stands for."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends
from pydantic import ConfigDict
from pydantic.config import JsonDict

from lorafleet.keys.auth import ApiKeys, KeyCheck
from lorafleet.keys.roles import SCOPES, Caller

_EXAMPLE: JsonDict = {
    "key_id": "2c26b46b68ff",
    "spec": {
        "tenant": "acme",
        "scopes": ["tenant-admin"],
        "limits": {"requests_per_minute": 600},
        "expires_at": "2027-01-31T00:00:00Z",
        "namespace": "",
        "lora_ids": [],
        "may_shadow_base": False,
        "note": "",
        "issuer": "",
    },
    "status": {
        "may": ["infer", "view", "tenant-admin", "register"],
        "is_confined_to_tenant": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatus:
    """What a key's scopes come to."""

    __pydantic_config__: ClassVar[ConfigDict] = {"use_attribute_docstrings": True}

    may: tuple[str, ...]
    """all scopes that the key's own include"""
    is_confined_to_tenant: bool
    """whether reads and changes concern the tenant's own objects alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyItem:
    """A key: what the key file says of it, and what that comes to; never the key or its hash."""

    __pydantic_config__: ClassVar[ConfigDict] = {
        "use_attribute_docstrings": True,
        "json_schema_extra": {"examples": [_EXAMPLE]},
    }

    key_id: str
    """the first digits of the key's hash, as in logs and histories; empty where no key is needed"""
    spec: Caller
    status: KeyStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyList:
    """The keys of the key files."""

    __pydantic_config__: ClassVar[ConfigDict] = {"json_schema_extra": {"examples": [{"data": [_EXAMPLE]}]}}

    data: tuple[KeyItem, ...]
    next: str | None = None


def key_item(caller: Caller, reader: Caller) -> KeyItem:
    """The caller's key, for an answer. A key's note is the operators' comment, for readers above tenants alone."""
    status = KeyStatus(
        may=tuple(scope for scope in SCOPES if caller.may(scope)),
        is_confined_to_tenant=caller.only_tenant is not None,
    )
    sees_note = reader.only_tenant is None or bool(caller.issuer)  # of a token the note is the reader's own name
    return KeyItem(key_id=caller.key_id, spec=caller if sees_note else replace(caller, note=""), status=status)


def whoami_routes(keys: ApiKeys) -> APIRouter:
    """The route; it takes any valid key."""
    api = APIRouter(tags=["health"])

    @api.get("/v1/whoami")
    async def whoami(caller: Annotated[Caller, Depends(KeyCheck(keys))]) -> KeyItem:
        """The tenant, scopes, limits and expiry of the caller's key."""
        return key_item(caller, caller)

    return api
