"""hash: the `cache_salt` of a request, which keeps cached prompts of different tenants or keys apart.

The stage `hash` makes it once. Block hashes are made with it, and every engine gets it in its own dialect: so what is
predicted and what an engine does cannot differ.
"""

from collections.abc import Mapping
from typing import Any

from lorafleet.identity import OWN_SALT, CacheScope, adapter_salt, own_salt
from lorafleet.keys.roles import Caller
from router.core.errors import BadBody
from router.protocols.routes import Route

# The fields whose parts may be media.
_WITH_MEDIA = ("messages", "input", "content_parts")


def cache_salt_of(route: Route, caller: Caller, cache: CacheScope, given: object) -> str:
    """The salt of a request at every engine; empty: it has none, or one that engines refuse.

    cache   who shares cached prompts of the adapter or base model
    given   the client's own salt, decoded; it separates prompts within its tenant's or key's cache
    raises  BadBody at a route without salts for a caller with a cache of its own, and there for an invalid salt
    """
    tenant, key_id = cache_owner(caller, cache)
    if not tenant and not key_id:
        if not isinstance(given, str):
            return ""
        return own_salt("", "", given) if given.startswith(OWN_SALT) else given
    if not route.computes:
        return ""
    if not route.takes_salt:
        message = f"your cached prompts are your {'key' if key_id else 'tenant'}'s own, which {route.path} cannot keep"
        raise BadBody(f"{message}: it takes no cache_salt; there is /v1/embeddings")
    return own_salt(tenant, key_id, _checked_salt(given))


def refuse_media_names(decoded: Mapping[str, Any]) -> None:
    """Raise BadBody where a client names its media itself, in a part's `uuid` or by the hashes in `features`.

    An engine keeps processed media under such names for all callers: who knows another's name would get its picture
    (vLLM 0.32 renderers/base.py _validate_mm_uuids takes a name without data).
    """
    why = "is not accepted where cached prompts are a caller's own: the engine keeps media under it for all callers"
    if decoded.get("features") is not None:
        raise BadBody(f"features {why}; send content_parts", param="features")
    for name in _WITH_MEDIA:
        if _has_media_name(decoded.get(name)):
            raise BadBody(f"uuid {why}; leave it out", param=name)


def _has_media_name(value: object) -> bool:
    """Whether a part in these messages, or their contents, has a `uuid`."""
    if isinstance(value, list):
        # The ids of a prompt are many.
        return bool(value) and not isinstance(value[0], int) and any(map(_has_media_name, value))
    if isinstance(value, dict):
        is_named = value.get("uuid") is not None and "role" not in value
        return is_named or _has_media_name(value.get("content"))
    return False


def cache_owner(caller: Caller, cache: CacheScope) -> tuple[str, str]:
    """The tenant and the key id whose requests alone find this caller's cached prompts.

    Without a key id, all keys of the tenant do; with neither, everyone does.
    """
    if cache == "shared":
        return "", ""
    return caller.tenant or "", caller.key_id if cache == "key" else ""


def owner_name(caller: Caller, cache: CacheScope) -> str:
    """A name of this caller's cache that no other has; empty: everyone shares it."""
    tenant, key_id = cache_owner(caller, cache)
    return own_salt(tenant, key_id) if tenant or key_id else ""


def is_own_salt(cache_salt: str) -> bool:
    """Whether this salt keeps the cached prompts of a tenant or key apart."""
    return cache_salt.startswith(OWN_SALT)


def salt_for(route: Route, engine_name: str, cache_salt: object) -> str:
    """The `cache_salt` for an engine where prompts are salted; empty: none.

    engine_name  of the adapter; empty for the base model
    cache_salt   of the request, see `cache_salt_of`; the client's own where that is empty
    raises       BadBody for an invalid salt, and for an adapter at a route without salts: its answer could come from
                 another adapter's KV
    """
    if not route.computes:
        return ""
    if engine_name and not route.takes_salt:
        message = (
            f"this adapter is served by engines that keep adapters apart by cache_salt, which {route.path} has not"
        )
        raise BadBody(f"{message}; there are /v1/chat/completions, /v1/completions and /v1/embeddings", param="model")
    return adapter_salt(engine_name, _checked_salt(cache_salt))


def _checked_salt(given: object) -> str:
    """A client's salt; empty: it gives none. Raises BadBody for one that no engine would take."""
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise BadBody(f"cache_salt must be a text that is not empty, found {given!r:.100}", param="cache_salt")
    return given
