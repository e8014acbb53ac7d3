"""What counts as an address of HTTP."""

from urllib.parse import urlsplit


def is_http(text: str) -> bool:
    """Whether it is `http://` or `https://`, a host, perhaps a port that can be one, and no white space."""
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that does not close
        return False
    return is_whole and parts.scheme in {"http", "https"} and not any(map(str.isspace, text))
