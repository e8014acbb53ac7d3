"""Who uses an adapter of the cache folder: `<digest>/.users/<agent>`, a file whose mtime says until when.

It holds where that agent's engine is, so that the engine can be asked when its agent has fallen silent.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

USERS = ".users"

Listed = Callable[[str], Collection[str]]
"""Digests that the engine at a URL serves; nothing where none answers."""


def renew(adapter: Path, user: str, *, engine_url: str, outlives_s: float) -> None:
    """Raises FileNotFoundError when the adapter is not here, OSError when no lease can be written."""
    users = adapter / USERS
    with contextlib.suppress(FileExistsError):
        users.mkdir()
    lease = users / user
    told = json.dumps({"engine": engine_url, "host": socket.gethostname()})
    if not lease.exists() or lease.read_text() != told:
        lease.write_text(told)
    lease.touch()
    if outlives_s:
        until = lease.stat().st_mtime + outlives_s
        os.utime(lease, (until, until))


def has_other(adapter: Path, user: str, *, now: float, lease_s: float) -> bool:
    """Whether another agent's lease is running. Our own says nothing: what we want is known better."""
    users = adapter / USERS
    with contextlib.suppress(FileNotFoundError):
        others = [lease for lease in users.iterdir() if lease.name != user]
        return any(now - lease.stat().st_mtime <= lease_s for lease in others)
    return False


def serving(adapter: Path, user: str, listed: Listed) -> str:
    """The engine of another agent that still lists the adapter; the lease is renewed for it. "" when there is none."""
    for lease in (adapter / USERS).glob("*"):
        engine_url = "" if lease.name == user else _engine_of(lease)
        if engine_url and adapter.name in listed(engine_url):
            with contextlib.suppress(OSError):
                lease.touch()
            return engine_url
    return ""


def used_at(adapter: Path) -> float:
    """When a lease was last taken, renewed or given up; the folder's own time before the first."""
    users = adapter / USERS
    try:
        return max(each.stat().st_mtime for each in (users, *users.iterdir()))
    except FileNotFoundError:
        return adapter.stat().st_mtime


def _engine_of(lease: Path) -> str:
    """Where the engine beside an agent can be called from here; "" where that is not known."""
    try:
        told = json.loads(lease.read_text())
        url, host = str(told["engine"]), told["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    is_loopback = any(name in url for name in ("//127.", "//[::1]", "//localhost"))
    return "" if is_loopback and host != socket.gethostname() else url
