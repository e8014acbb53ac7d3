"""Pages of other origins in a browser: which of them may read our answers (CORS, https://fetch.spec.whatwg.org).

Starlette's middleware says so for what FastAPI answers, and answers what browsers ask before they ask; here is the same
for the hot routes, whose answers no middleware sees.
"""

from collections.abc import Callable, Collection
from typing import Any

# Of an answer from another origin a page sees these and few more only when they are named.
SHOWN = (
    "retry-after",
    "x-request-id",
    "x-lorafleet-worker",
    "x-lorafleet-adapter",
    "x-lorafleet-cached-tokens",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
ANY = "*"
_BEFORE_IT_ASKS_AGAIN_S = 600


def told(allowed: Collection[str]) -> Callable[[bytes], bytes] | None:
    """Origin -> what an answer to its page says, as header lines; None: no page of another origin may read any."""
    if not allowed:
        return None
    shown = f"access-control-expose-headers: {', '.join(SHOWN)}\r\n".encode()
    if ANY in allowed:
        to_all = b"access-control-allow-origin: *\r\n" + shown
        return lambda _: to_all
    # Whoever keeps the answer for others must know that they may be told otherwise.
    lines = {
        origin: b"access-control-allow-origin: %b\r\nvary: Origin\r\n%b" % (origin, shown)
        for origin in map(str.encode, allowed)
    }
    return lambda origin: lines.get(origin, b"vary: Origin\r\n")


def of_middleware(allowed: Collection[str]) -> dict[str, Any]:
    """The same, as Starlette's CORSMiddleware is told."""
    return {
        "allow_origins": list(allowed),
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": SHOWN,
        "max_age": _BEFORE_IT_ASKS_AGAIN_S,
    }
