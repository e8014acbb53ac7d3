"""Makes, lists, revokes and rotates API keys in a key file, which holds only their hashes."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lorafleet.keys.key_files import (
    KeyFileError,
    budget_trouble,
    hash_key,
    key_id_of,
    naming_trouble,
    new_key,
    read_key_files,
    scope_trouble,
    with_marks,
)
from lorafleet.keys.key_text import KeyTextError, with_entry, with_expiry, without_entry
from lorafleet.keys.roles import SCOPES, TENANT_SCOPES, Caller
from lorafleet.service import yamls
from lorafleet.service.failure import CommandFailed
from lorafleet.service.files import mode_of, write_atomically, write_error_text
from lorafleet.service.times import utc_text
from orchestrator.model.limits import MOST

_DURATION = re.compile(r"(\d+)\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MOST_DURATION = timedelta(days=36_500)  # so that the time is one of the calendar
_LEAST_ID_DIGITS = 4


def add_key(
    path: Path,
    tenant: str | None,
    scopes: Sequence[str],
    note: str = "",
    limits: Mapping[str, float | None] = MappingProxyType({}),
    expires: datetime | None = None,
    *,
    namespace: str | None = None,
    lora_ids: Sequence[str] = (),
    may_shadow_base: bool = False,
) -> str:
    """Create a key, append its hash to the file, and return the key. The file is replaced atomically.

    limits  by the names of AccountLimits; None for no limit

    Raises CommandFailed for an unknown scope, a tenant's key with a fleet-wide scope, names that do not go together, a
    limit that no service takes, or a file that is not a key file.
    """
    _check_scopes(tenant, scopes)
    if (trouble := naming_trouble(namespace, tuple(lora_ids) or None, may_shadow_base)) is not None:
        raise CommandFailed(f"--{trouble.replace('_', '-', 2)}", status=2)
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if not 1 <= value <= MOST:
            flag = f"--{name.replace('_', '-')}"
            message = f"{flag}: must be at least 1 and at most 2**53, found {value:g}; leave the flag out for no limit"
            raise CommandFailed(message, status=2)
    if (trouble := budget_trouble(given)) is not None:
        raise CommandFailed(f"limits: {trouble}", status=2)
    key = new_key()
    entry: dict[str, Any] = {
        "sha256": hash_key(key),
        "tenant": tenant,
        "scopes": list(scopes),
        "note": note,
        "limits": given,
        "expires": expires,
        "namespace": namespace,
        "lora_ids": list(lora_ids),
        "may_shadow_base": may_shadow_base,
    }
    with _locked_key_file(path, may_create=True) as file:
        file.text = with_entry(file.text, {name: value for name, value in entry.items() if value})
    return key


def list_keys(path: Path) -> list[Caller]:
    """The callers of the file's keys, in its order. Raises CommandFailed if it is not a key file."""
    with _file_errors_as_command_failed(path):
        return list(read_key_files([path]).values())


def revoke_key(path: Path, key_id: str) -> str:
    """Remove the key whose id begins so from the file; returns its whole id. Raises CommandFailed."""
    with _locked_key_file(path) as file:
        index, entry = _find_entry(file.text, key_id)
        file.text = without_entry(file.text, index)
    return key_id_of(entry["sha256"])


def rotate_key(
    path: Path, key_id: str, *, grace: timedelta, now: datetime, expires: datetime | None = None
) -> tuple[str, datetime]:
    """Add a key like the one whose id begins so, which expires after `grace`. Returns the key, and that expiry.

    A key that expires sooner keeps its expiry. The new key has none unless one is given. Raises CommandFailed.
    """
    key = new_key()
    with _locked_key_file(path) as file:
        index, entry = _find_entry(file.text, key_id)
        caller = read_key_files([path])[entry["sha256"]]
        if caller.expires_at is not None and caller.expires_at <= now.timestamp():
            raise CommandFailed(f"key {caller.key_id} has expired: `lorafleet keys new` makes another")
        until = (now + grace).replace(microsecond=0)
        if caller.expires_at is not None:
            until = min(until, datetime.fromtimestamp(caller.expires_at, UTC))
        fresh = {name: value for name, value in entry.items() if name != "expires"} | {"sha256": hash_key(key)}
        fresh |= {"expires": expires} if expires is not None else {}
        file.text = with_entry(with_expiry(file.text, index, utc_text(until, "seconds")), fresh)
    return key, until


def is_duration(text: str) -> bool:
    """Whether the text is a number with s, m, h, d or w."""
    return _DURATION.fullmatch(text.strip()) is not None


def parse_duration(text: str, option: str) -> timedelta:
    """`90d`, `12h`, `30m`, `45s` or `2w` as a duration. Raises CommandFailed."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or int(found[1]) > 1_000_000:
        raise CommandFailed(f"{option} {text}: expected a number with s, m, h, d or w, such as 90d", status=2)
    duration = timedelta(**{_UNITS[found[2]]: int(found[1])})
    if duration > _MOST_DURATION:
        raise CommandFailed(f"{option} {text}: must be at most {_MOST_DURATION.days}d", status=2)
    return duration


def parse_expiry(text: str, now: datetime) -> datetime:
    """The UTC time that `--expires` names: a duration from now, or a time. Raises CommandFailed for a past one."""
    if is_duration(text):
        at = now + parse_duration(text, "--expires")
    else:
        try:
            at = datetime.fromisoformat(text.strip())
            at = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError) as exc:
            message = f"--expires {text}: expected a duration such as 90d, or a UTC time such as 2027-01-31T00:00:00Z"
            raise CommandFailed(message, status=2) from exc
    if at <= now:
        raise CommandFailed(f"--expires {text}: that is in the past", status=2)
    return at.replace(microsecond=0)


def _check_scopes(tenant: str | None, scopes: Sequence[str]) -> None:
    """Raises CommandFailed for scopes that are unknown, or that do not go with the tenant."""
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise CommandFailed(f"--scopes: {', '.join(unknown)} unknown; known: {', '.join(SCOPES)}", status=2)
    if not scopes:
        raise CommandFailed(f"--scopes: none given; known: {', '.join(SCOPES)}", status=2)
    if tenant is not None and (beyond := sorted(set(scopes) - set(TENANT_SCOPES))):
        confined = [scope for scope in scopes if scope in TENANT_SCOPES] or ["tenant-admin"]
        confined = ["tenant-admin"] if {"admin", "operate"} & set(beyond) else confined
        raise CommandFailed(
            f"--tenant {tenant} --scopes {','.join(scopes)}: {', '.join(beyond)} would hold for the whole fleet, not"
            f" for {tenant} alone. Either --tenant {tenant} --scopes {','.join(confined)}, for a key of the tenant; or"
            f" --scopes {','.join(scopes)} without --tenant, for a key of the fleet's operators",
            status=2,
        )
    if (trouble := scope_trouble(tenant, scopes)) is not None:
        raise CommandFailed(f"--scopes {','.join(scopes)}: {trouble}", status=2)


def _find_entry(text: str, key_id: str) -> tuple[int, dict[str, Any]]:
    """Index and entry of the key whose id begins so. Raises CommandFailed unless there is exactly one."""
    entries = yamls.parse_yaml(text).get("keys") or []
    ids = [key_id_of(entry["sha256"]) for entry in entries]
    found = [index for index, known in enumerate(ids) if len(key_id) >= _LEAST_ID_DIGITS and known.startswith(key_id)]
    if len(found) != 1:
        problem = "several keys begin so" if found else "no key of this file has that id"
        raise CommandFailed(f"{key_id}: {problem}; known: {', '.join(ids) or 'none'} (`lorafleet keys list`)")
    return found[0], entries[found[0]]


class _KeyFileText:
    """The text of a key file that is being edited."""

    def __init__(self, text: str) -> None:
        self.text = text


@contextlib.contextmanager
def _locked_key_file(path: Path, *, may_create: bool = False) -> Iterator[_KeyFileText]:
    """The file's text, under a lock; at the end the file is replaced atomically. Raises CommandFailed.

    Mode and owner stay, so that root's command leaves a service its file. A link stays, and its target is replaced.
    """
    with _file_errors_as_command_failed(path):
        path = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop of links
        if may_create:
            path.parent.mkdir(parents=True, exist_ok=True)
        # The lock keeps two commands from losing a key. It is on the folder, because the file is replaced.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            mode = mode_of(path)
            before = path.stat() if mode else None
            file = _KeyFileText(path.read_text(encoding="utf-8") if mode else "")
            is_new = not file.text.strip()
            if not is_new or not may_create:
                read_key_files([path])  # refuses a file that no service would read
            yield file
            if is_new:
                file.text = with_marks(file.text)
            owner = None if before is None else (before.st_uid, before.st_gid)
            write_atomically(path, file.text.encode(), mode=mode & 0o777 if mode else 0o600, owner=owner)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _file_errors_as_command_failed(path: Path) -> Iterator[None]:
    """Errors of reading and writing the file, as CommandFailed."""
    try:
        yield
    except OSError as exc:
        raise CommandFailed(f"--file {path}: {write_error_text(exc, path.absolute().parent)}") from exc
    except KeyFileError as exc:
        raise CommandFailed(f"--file: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"--file {path}: not text in UTF-8 (byte {exc.start}); expected a key file") from exc
    except KeyTextError as exc:
        raise CommandFailed(f"--file {path}: {exc}") from exc
