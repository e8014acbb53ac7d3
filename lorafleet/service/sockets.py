"""TCP sockets bound before they listen, and folders for Unix sockets with short paths."""

import os
import socket
import tempfile
from pathlib import Path

# sun_path has 108 bytes on Linux, the last of them zero.
UNIX_PATH_BYTES = 107
_RANDOM_BYTES = 8


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
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
