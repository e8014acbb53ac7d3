"""What counts as an address of HTTP, a name as part of one, and a key in its headers."""

import re
from urllib.parse import quote, urlsplit

from lorafleet.service.failure import CommandFailed


def path_of(name: str) -> str:
    """A name in a path, its '/' left as they are. Raises Failure for one that would lead elsewhere or is no text."""
    if {".", ".."} & set(name.split("/")):
        raise CommandFailed(f"{name}: no name has a '.' or '..' between its slashes", status=2)
    try:
        return quote(name, safe="/")
    except UnicodeEncodeError as exc:
        raise CommandFailed(f"{name!a} is not UTF-8", status=2) from exc


def is_http(text: str) -> bool:
    """Whether it is `http://` or `https://`, a host, perhaps a port that can be one and a path, and no white space.

    Paths are put behind it: it may have no query and no fragment. Nor has it a user or password: addresses are logged
    and shown, and calls carry a bearer key.
    """
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # a port that is no number, a bracket that does not close
        return False
    return is_whole and parts.scheme in {"http", "https"} and not any(c.isspace() or c in "?#" for c in text)


def shown(text: str) -> str:
    """What was meant as an address as a message may have it: without user, password and query."""
    return re.sub(r"\?.*", "?***", re.sub(r"//.*@", "//***@", text))


def plain_key(text: str) -> str:
    """A key without the white space that files and secrets have around it.

    raises ValueError for what no header can hold; libraries' own errors would repeat the key
    """
    key = text.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("must be one key: one word of printable ASCII")
    return key
