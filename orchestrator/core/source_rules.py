"""Rules for an adapter's source URL.

It may hold no secret, because it is stored, shown, logged and sent to workers. A tenant may name no bytes of others.
"""

from collections.abc import Iterable

from lorafleet.identity import fleet_digest
from orchestrator.model.adapters import RegisteredAdapter


def secret_part(source: str) -> str | None:
    """The part of the URL that may be a secret: a user or password, a query or a fragment; None without one.

    A plain path and a `file://` URL may hold any character. Agents check the same before they fetch.
    """
    scheme, found, rest = source.partition("://")
    if not found or scheme.lower() == "file":
        return None
    plain = _without_query(rest)
    if "@" in plain.partition("/")[0]:
        return "a user or password"
    if len(plain) == len(rest):
        return None
    return "a query" if rest[len(plain)] == "?" else "a fragment"


def without_secrets(source: str) -> str:
    """The URL for messages: without user, password, query and fragment, at most 300 characters."""
    scheme, _, rest = source.partition("://")
    where, slash, path = _without_query(rest).partition("/")
    return ascii(f"{scheme}://{where.rpartition('@')[2]}{slash}{path}"[:300])


def _without_query(rest: str) -> str:
    """The part of a URL before its query and fragment."""
    return rest.partition("#")[0].partition("?")[0]


def digest_problem(source: str, usable: Iterable[RegisteredAdapter]) -> str | None:
    """Why a tenant may not name this source, which names bytes by their digest; None: it may.

    A digest is no permission: it is in logs, and in the answers of everyone who shares the adapter.

    usable  the adapters that the tenant may use; not read for a source without a digest
    """
    named = source.strip().lower()
    if named.startswith("fleet+"):
        return "a tenant's key may not name a source in another fleet; an operator takes it over, by `lorafleet sync`"
    digest = fleet_digest(named)
    if digest is None or any(adapter.digest == digest for adapter in usable):
        return None
    return f"no adapter that your key may use has digest {digest}; name another `source`, or upload the adapter"
