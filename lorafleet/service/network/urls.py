"""Checks of HTTP addresses, names in paths, and keys in headers."""

import re
from urllib.parse import quote, urlsplit

from lorafleet.service.failure import CommandFailed


def url_path(name: str) -> str:
    """A name as part of a URL path, quoted except `/`.

    raises  CommandFailed for "", for empty parts (`x/`), `.` and `..` between slashes, and invalid Unicode
    """
    if not name:  # it would be the path of the whole list
        raise CommandFailed("expected a name, found an empty one", status=2)
    parts = name.split("/")
    if {".", ".."} & set(parts):
        raise CommandFailed(f"{name}: no name has a '.' or '..' between its slashes", status=2)
    if "" in parts:
        right = "/".join(filter(None, parts)) or "x/y"
        raise CommandFailed(f"{name}: one '/' stands between two parts of a name, as in {right}", status=2)
    try:
        return quote(name, safe="/")
    except UnicodeEncodeError as exc:
        raise CommandFailed(f"{name!a} is not UTF-8", status=2) from exc


def is_http(text: str) -> bool:
    """Whether the text is an `http://` or `https://` URL with a host, and perhaps a port and a path.

    A query, fragment, user or password is not allowed: paths are appended, and addresses are logged and shown.
    """
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # an invalid port or bracket
        return False
    return is_whole and parts.scheme in {"http", "https"} and not any(c.isspace() or c in "?#" for c in text)


def bracketed(host: str) -> str:
    """A host as it stands in a URL and before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def without_secrets(text: str) -> str:
    """An address for messages: without user, password and query."""
    return re.sub(r"\?.*", "?***", re.sub(r"//.*@", "//***@", text))


def has_database_password(text: str) -> bool:
    """Whether the text has the address of a PostgreSQL database with a password."""
    return re.search(r"postgres(ql)?://([^/?#@]*:[^@]+@|.*[?&]password=)", text) is not None


def checked_key(text: str) -> str:
    """A key without surrounding white space.

    raises  ValueError for a key that no header can hold; libraries' own errors would repeat the key
    """
    key = text.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("must be one key: one word of printable ASCII")
    return key
