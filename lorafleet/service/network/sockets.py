"""TCP sockets bound before they listen, and folders for Unix sockets with short paths."""

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

# sun_path has 108 bytes on Linux, the last of them zero.
UNIX_PATH_BYTES = 107
_RANDOM_BYTES = 8
KEEP_ALIVE: Sequence[tuple[int, int, int]] = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Options of sockets between machines. A peer that has gone without FIN, as with its machine, is noticed in 2 minutes.

60 s: load balancers and NAT drop silent connections after 4 to 6 minutes (AWS 350 s, Azure 240 s). A stream may be
silent that long before its first token.
"""


class HasOptions(Protocol):
    """A socket, or what an event loop has in its place."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """Set an option. Raises OSError on a closed socket."""


def keep_alive(sock: HasOptions) -> None:
    """Turn TCP keep-alive on for a connection, or for all that a listening socket accepts. Raises OSError."""
    for level, name, value in KEEP_ALIVE:
        sock.setsockopt(level, name, value)


def socket_folder(prefix: str, *, name_bytes: int) -> Path:
    """A new private folder for sockets with names of up to `name_bytes`: in TMPDIR, or in /tmp if that is too long."""
    parent = tempfile.gettempdir()
    longest = len(os.fsencode(parent)) + len(f"/{prefix}/") + _RANDOM_BYTES + name_bytes
    if longest > UNIX_PATH_BYTES:
        parent = "/tmp"  # noqa: S108  (mkdtemp makes a new name, for us alone)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that is bound to the port and does not listen; port 0 picks a free one. Raises OSError.

    While it is open the system assigns the port to no other program. A server that binds this very port with
    SO_REUSEADDR may still have it and listen.

    shared  with SO_REUSEPORT, so that several sockets may have the port
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)  # Linux and the BSDs hand the options to each accepted connection
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
