"""Adds new API keys to a key file, which holds only their hashes."""

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import yaml

from lorafleet.service.auth import SCOPES, ApiKeys, KeyFileError, hash_key, new_key
from lorafleet.service.failure import CommandFailed
from lorafleet.service.files import mode_of, write_atomically, write_error_text


def add_key(
    path: Path,
    tenant: str | None,
    scopes: Sequence[str],
    note: str = "",
    limits: Mapping[str, float | None] = MappingProxyType({}),
) -> str:
    """Create a key, append its hash to the file, and return the key. The file is replaced atomically.

    limits  by the names of KeyLimits; None for no limit

    Raises CommandFailed for an unknown scope, a tenant's key with a fleet-wide scope, a limit below 1, or a file that
    is not a key file.
    """
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise CommandFailed(f"--scopes: {', '.join(unknown)} unknown; known: {', '.join(SCOPES)}", status=2)
    if not scopes:
        raise CommandFailed(f"--scopes: none given; known: {', '.join(SCOPES)}", status=2)
    # A tenant bounds inference alone; every other scope holds for the whole fleet.
    if tenant is not None and (beyond := sorted(set(scopes) - {"infer"})):
        raise CommandFailed(
            f"--tenant {tenant} --scopes {','.join(scopes)}: {', '.join(beyond)} would hold for the whole fleet, not"
            f" for {tenant} alone. Expected --tenant {tenant} --scopes infer, for a key of the tenant; or"
            f" --scopes {','.join(scopes)} without --tenant, for a key of the fleet's operators",
            status=2,
        )
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise CommandFailed(f"--{name.replace('_', '-')}: must be at least 1, found {value:g}", status=2)
    key = new_key()
    entry = {"sha256": hash_key(key), "tenant": tenant, "scopes": list(scopes), "note": note, "limits": given}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append_entry(path, {name: value for name, value in entry.items() if value})
    except OSError as exc:
        raise CommandFailed(f"--file {path}: {write_error_text(exc, path.absolute().parent)}") from exc
    except KeyFileError as exc:
        raise CommandFailed(f"--file: {exc}") from exc
    return key


def _append_entry(path: Path, entry: dict[str, object]) -> None:
    """Append an entry to the key file, created if missing, under a lock; raises KeyFileError or OSError."""
    # The lock keeps two commands from losing a key. It is on the folder, because the file is replaced.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        mode = mode_of(path)
        before = path.read_text() if mode else ""
        if before.strip():
            ApiKeys([path])  # refuses a file that no service would read
        entries = (yaml.safe_load(before) or {}).get("keys", [])
        after = yaml.safe_dump({"keys": [*entries, entry]}, sort_keys=False)
        write_atomically(path, after.encode(), mode=mode & 0o777 if mode else 0o600)
    finally:
        os.close(folder)
