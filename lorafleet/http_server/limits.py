"""What one client may take of a server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bytes, seconds and counts.

    head_bytes     request line and headers, and trailers; more: 431
    body_bytes     one request's body; more: 413
    held_bytes     all bodies of all connections that are not answered yet; more: 429 `saturated`
    tenant_bytes   of those, the bodies of one tenant; None: no bound
    head_s         to send a whole head, from its first byte (or from connecting); more: 408
    body_s         to send a whole body; more: 408
    send_stall_s   without reading anything of a response that waits
    idle_s         between two requests
    pipelined      requests that may wait behind the one being answered
    """

    head_bytes: int = 64 * 2**10
    body_bytes: int = 32 * 2**20
    held_bytes: int = 2**30
    tenant_bytes: int | None = None
    head_s: float = 15.0
    body_s: float = 60.0
    send_stall_s: float = 60.0
    idle_s: float = 75.0
    pipelined: int = 16
