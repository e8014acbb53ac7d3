"""What a reference to an adapter's files may not hold: it is stored, shown, logged and told to every worker."""


def secret_part(source: str) -> str | None:
    """Which part of `scheme://where/what` may be a secret: a user or password, a query or a fragment; None for none.

    A plain path and a `file://` may have any character in them. Agents refuse the same before they fetch.
    """
    scheme, found, rest = source.partition("://")
    if not found or scheme.lower() == "file":
        return None
    plain = _plain(rest)
    if "@" in plain.partition("/")[0]:
        return "a user or password"
    if len(plain) == len(rest):
        return None
    return "a query" if rest[len(plain)] == "?" else "a fragment"


def without_secrets(source: str) -> str:
    """The reference as a message may have it: neither user, password, query nor fragment, and not too long."""
    scheme, _, rest = source.partition("://")
    where, slash, path = _plain(rest).partition("/")
    return ascii(f"{scheme}://{where.rpartition('@')[2]}{slash}{path}"[:300])


def _plain(rest: str) -> str:
    return rest.partition("#")[0].partition("?")[0]
