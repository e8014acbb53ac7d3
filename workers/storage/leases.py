"""Leases on adapters in a shared cache folder: files `<digest>/.users/<agent>`, renewed by touching them.

A lease contains the URL of the agent's engine, so that other agents can ask that engine after the lease has expired.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

USERS = ".users"

ServedDigests = Callable[[str], Collection[str]]
"""Lists the digests that the engine at a URL serves; empty if it does not answer."""


def renew(adapter: Path, agent_id: str, *, engine_url: str, engine_outlives_s: float) -> None:
    """Take or renew an agent's lease on an adapter.

    raises  FileNotFoundError if the adapter is not in the cache, OSError if the lease cannot be written
    """
    users = adapter / USERS
    with contextlib.suppress(FileExistsError):
        users.mkdir()
    lease = users / agent_id
    content = json.dumps({"engine": engine_url, "host": socket.gethostname()})
    if not lease.exists() or lease.read_text() != content:
        lease.write_text(content)
    lease.touch()
    if engine_outlives_s:
        until = lease.stat().st_mtime + engine_outlives_s
        os.utime(lease, (until, until))


def has_other_user(adapter: Path, agent_id: str, *, now: float, lease_s: float) -> bool:
    """Whether another agent has an unexpired lease on the adapter."""
    users = adapter / USERS
    with contextlib.suppress(FileNotFoundError):
        other_leases = [lease for lease in users.iterdir() if lease.name != agent_id]
        return any(now - lease.stat().st_mtime <= lease_s for lease in other_leases)
    return False


def engine_using(adapter: Path, agent_id: str, served_digests: ServedDigests) -> str:
    """URL of another agent's engine that still lists the adapter, or ""; asks the engines, renews that lease."""
    for lease in (adapter / USERS).glob("*"):
        engine_url = "" if lease.name == agent_id else _engine_url_usable_here(lease)
        if engine_url and adapter.name in served_digests(engine_url):
            with contextlib.suppress(OSError):
                lease.touch()
            return engine_url
    return ""


def last_used_at(adapter: Path) -> float:
    """Time when a lease on the adapter was last taken, renewed or removed; before the first, the folder's mtime.

    Raises FileNotFoundError if that folder is gone.
    """
    users = adapter / USERS
    try:
        return max(path.stat().st_mtime for path in (users, *users.iterdir()))
    except FileNotFoundError:
        return adapter.stat().st_mtime


def _engine_url_usable_here(lease: Path) -> str:
    """The engine URL in a lease if it can be reached from this host, else ""."""
    try:
        content = json.loads(lease.read_text())
        url, host = str(content["engine"]), content["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    is_loopback = any(name in url for name in ("//127.", "//[::1]", "//localhost"))
    return "" if is_loopback and host != socket.gethostname() else url
