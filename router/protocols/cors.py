"""CORS headers: which web pages of other origins may read our answers (https://fetch.spec.whatwg.org).

Starlette's middleware adds them to FastAPI's answers and answers preflight requests. The inference routes bypass all
middleware, so their headers are built here.
"""

from collections.abc import Callable, Collection
from typing import Any

# Headers that a page of another origin may read; without this list it sees only a few.
EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-lorafleet-worker",
    "x-lorafleet-adapter",
    "x-lorafleet-cached-tokens",
    "x-lorafleet-first-token-s",
    *(
        f"x-ratelimit-{kind}-{unit}"
        for kind in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens", "bytes")
    ),
)
ANY_ORIGIN = "*"
_PREFLIGHT_MAX_AGE_S = 600


def cors_header_lines(allowed: Collection[str]) -> Callable[[bytes], bytes] | None:
    """A function from an `Origin` header to the CORS header lines of an answer; None if no origin is allowed."""
    if not allowed:
        return None
    shown = f"access-control-expose-headers: {', '.join(EXPOSED_HEADERS)}\r\n".encode()
    if ANY_ORIGIN in allowed:
        to_all = b"access-control-allow-origin: *\r\n" + shown
        return lambda _: to_all
    # A cache must know that the answer depends on the origin.
    lines = {
        origin: b"access-control-allow-origin: %b\r\nvary: Origin\r\n%b" % (origin, shown)
        for origin in map(str.encode, allowed)
    }
    return lambda origin: lines.get(origin, b"vary: Origin\r\n")


def cors_middleware_options(allowed: Collection[str]) -> dict[str, Any]:
    """The same rules as keyword arguments of Starlette's CORSMiddleware."""
    return {
        "allow_origins": list(allowed),
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": EXPOSED_HEADERS,
        "max_age": _PREFLIGHT_MAX_AGE_S,
    }
