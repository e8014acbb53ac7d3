"""hash: the `cache_salt` of a request, which keeps cached prompts of different tenants or keys apart.

The stage `hash` makes it once. Block hashes are made with it, and every engine gets it in its own dialect: so what is
predicted and what an engine does cannot differ.
"""

from lorafleet.identity import OWN_SALT, CacheScope, adapter_salt, own_salt
from lorafleet.keys.roles import Caller
from router.core.errors import BadBody
from router.protocols.routes import Route


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


def cache_owner(caller: Caller, cache: CacheScope) -> tuple[str, str]:
    """The tenant and the key id whose requests alone find this caller's cached prompts.

    Without a key id, all keys of the tenant do; with neither, everyone does.
    """
    if cache == "shared":
        return "", ""
    return caller.tenant or "", caller.key_id if cache == "key" else ""


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
