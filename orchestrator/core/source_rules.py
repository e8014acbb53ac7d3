"""Rules for an adapter's source URL. It may hold no secret, because it is stored, shown, logged and sent to workers."""


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
