"""Who may call: bearer keys, each a tenant with scopes, in hot-reloaded files of hashes.

A key file is YAML: `keys: [{sha256: <hex of the key>, tenant: acme, scopes: [infer], limits: {requests_per_minute: 60,
tokens_per_minute: 100000, concurrent_requests: 8}}]`; limits, and each of them, may be left out. Keys are random
(`lorafleet keys new`), so a plain hash is enough; the file never holds a key.
"""

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from fastapi import Depends, Request, Response
from fastapi.params import Depends as Depended
from fastapi.routing import APIRoute

from lorafleet.service import yamls
from lorafleet.service.files import Stamp, stamp_of
from lorafleet.service.http import HttpError

log = structlog.get_logger()

# Which scopes do for one that is asked for.
_DO_FOR = {
    "infer": frozenset({"infer", "load", "admin"}),
    "load": frozenset({"load", "admin"}),
    "register": frozenset({"register", "admin"}),
    "drain": frozenset({"drain", "admin"}),
    "metrics": frozenset({"metrics", "admin"}),
    "admin": frozenset({"admin"}),
}
SCOPES = tuple(_DO_FOR)
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
# Files of keys are looked at this often.
RECHECK_S = 1.0
# Headers whose caller is remembered: a hash costs more than the rest of the look-up.
_REMEMBERED = 4096
# A header may have 64 KiB, most of them blanks around its key, and be another each time.
_REMEMBERED_BYTES = 256
# What floats count exactly, as buckets do.
_MOST_OF_A_LIMIT = 2**53
# Of a key's hash, enough to tell keys apart in logs and accounts.
_KEY_ID_DIGITS = 12
# Names below these cannot be registered (RFC 6761, RFC 6762, ICANN 2024).
_NOBODYS = frozenset({"localhost", "local", "internal"})


# Of each file: when it was changed, which it is, how large; None where it is not there.
_Stamps = tuple[Stamp | None, ...]


class KeyFileError(Exception):
    """A key file cannot be read or breaks its form; the message names the file, the entry and the form."""


class KeyFileUnreadable(KeyFileError):
    """What the file holds is not known, and may be by the next try: its mode, its disk or our descriptors say no."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much one key may ask for; None is no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant and what it may do. `tenant` is None for a caller that stands above tenants.

    name    as accounts and histories say it
    key_id  the beginning of the key's hash, never of the key; empty where no key is needed
    limits  None: none, and nothing to count
    """

    tenant: str | None
    scopes: frozenset[str]
    key_id: str = ""
    limits: KeyLimits | None = None

    @property
    def name(self) -> str:
        who = "operator" if self.tenant is None else f"tenant {self.tenant}"
        return f"{who} (key {self.key_id})" if self.key_id else "anyone"

    def may(self, scope: str) -> bool:
        """Whether this scope is held; `admin` includes the others, `load` includes `infer`."""
        return not self.scopes.isdisjoint(_DO_FOR[scope])

    def may_use(self, tenants: Container[str] | None) -> bool:
        """Whether an adapter with these tenants (None: everyone) is this caller's to use."""
        return tenants is None or self.may("load") or (self.tenant is not None and self.tenant in tenants)


OPEN = Caller(tenant=None, scopes=frozenset(SCOPES))


def hash_key(key: str) -> str:
    """What a key file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A fresh key with 256 random bits."""
    return "lf-" + secrets.token_urlsafe(32)


class ApiKeys:
    """The keys of some files, re-read when a file changes. A broken new version leaves the last good one in force."""

    def __init__(self, files: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeyFileError when a file is unreadable now, at the start."""
        self._files = tuple(files)
        self._clock = clock
        self._seen: _Stamps | None = self._stamps()
        self._remembered: dict[str | bytes, Caller] = {}
        self._callers = _read_all(self._files)
        self._checked_at = clock()
        self._trouble = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody needs a key, because no file was given."""
        return not self._files

    def caller(self, authorization: str | bytes | None) -> Caller:
        """Who sent this `Authorization` header; raises HttpError 401 `invalid_api_key`.

        Known keys' headers are remembered in memory, until a file changes.
        """
        if not self._files:
            return OPEN
        self._reload_if_changed()
        known = self._remembered.get(authorization) if authorization is not None else None
        if known is not None:
            return known
        found = self._found(authorization)
        assert authorization is not None
        if len(authorization) <= _REMEMBERED_BYTES:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[authorization] = found
        return found

    def _found(self, authorization: str | bytes | None) -> Caller:
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise HttpError(401, "invalid_api_key", "no API key: send `Authorization: Bearer <key>`")
        found = self._callers.get(hash_key(key.strip()))
        if found is None:
            raise HttpError(401, "invalid_api_key", "this API key is not known; ask the operator for one")
        return found

    def _stamps(self) -> _Stamps:
        return tuple(stamp_of(path) for path in self._files)

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self._callers = _read_all(self._files)
        except KeyFileError as exc:
            # What could not be read is read again until it can be: a key may be revoked in it, and no stamp tells that
            # it can be read by now: one that is put back may have the stamp of the last good one.
            self._seen = None if isinstance(exc, KeyFileUnreadable) else stamps
            self._say(str(exc))
        else:
            self._seen, self._trouble = stamps, ""
            self._remembered.clear()
            log.info("keys reloaded", keys=len(self._callers))

    def _say(self, trouble: str) -> None:
        """One line for each trouble, no traceback: it names the file and the entry, and nothing of ours is wrong."""
        if trouble != self._trouble:
            log.error("key file not reloaded, the last good one stays in force", error=trouble)
        self._trouble = trouble


def requires(keys: ApiKeys, scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """A FastAPI dependency: the caller, or 401 without a known key, 403 without the scope."""

    async def caller(request: Request) -> Caller:
        found = keys.caller(request.headers.get("authorization"))
        check_scope(found, scope)
        request.state.caller = found
        return found

    return caller


def of_metrics(keys: ApiKeys, *, need_key: bool) -> list[Depended]:
    """The dependencies of a house's `/metrics`: none, or a key with the scope `metrics`."""
    return [Depends(requires(keys, "metrics"))] if need_key else []


class AuthFirstRoute(APIRoute):
    """A route whose `dependencies` are asked before its body is read; FastAPI reads and parses that first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        first = [each.dependency for each in self.dependencies if each.dependency is not None]

        async def ask_and_answer(request: Request) -> Response:
            for ask in first:
                await ask(request)
            return await answer(request)

        return ask_and_answer


def may_send(keys: ApiKeys, *scopes: str) -> Callable[[str | None], None]:
    """Raises HttpError for an `Authorization` header without a known key, or whose key has none of these scopes."""

    def check(authorization: str | None) -> None:
        caller = keys.caller(authorization)
        if not any(map(caller.may, scopes)):
            wanted, held = " or ".join(map(repr, scopes)), ", ".join(sorted(caller.scopes))
            raise HttpError(403, "scope_missing", f"a body is taken from keys with scope {wanted}; yours has: {held}")

    return check


def check_scope(caller: Caller, scope: str) -> None:
    """Raises HttpError 403 `scope_missing` when the caller lacks the scope."""
    if not caller.may(scope):
        held = ", ".join(sorted(caller.scopes)) or "none"
        raise HttpError(403, "scope_missing", f"this needs a key with scope {scope!r}; yours has: {held}")


def refuse_open_server(keys: ApiKeys, host: str, *, allow_open: bool) -> None:
    """Raises KeyFileError when a server without keys would listen beyond loopback."""
    if keys.is_open and not allow_open and not _is_loopback(host):
        raise KeyFileError(
            f"refusing to listen on {host} without keys: give --key-files FILE,"
            " or --allow-open if something else guards it"
        )


def host_check(keys: ApiKeys, *, allow_open: bool) -> Callable[[str | bytes], None] | None:
    """`check_host` for a server without keys, which relies on being out of everybody's reach; None for any other."""
    return check_host if keys.is_open and not allow_open else None


@lru_cache(maxsize=1024)
def check_host(host: str | bytes) -> None:
    """Raises HttpError 421 `unknown_host` for a `Host` header with a name that somebody may own.

    A page in this machine's browser whose own name was pointed at this machine (DNS rebinding) calls what is open here
    as if it were its own server, and reads the answers. It cannot do so by an address, by a name without a dot, or by
    one that nobody can register.
    """
    host = host.decode("latin-1") if isinstance(host, bytes) else host
    name = host.strip().lower().partition(":")[0].rstrip(".")
    top = name.rpartition(".")[2]
    if host.startswith("[") or "." not in name or top.isdigit() or top in _NOBODYS:
        return
    raise HttpError(
        421,
        "unknown_host",
        f"{name!r} is no name of this machine: without keys only those are answered that call it localhost or by an"
        " address; give --key-files FILE, or --allow-open if something else guards it",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_all(files: Sequence[Path]) -> dict[str, Caller]:
    return {key: caller for path in files for key, caller in _read(path).items()}


def _read(path: Path) -> dict[str, Caller]:
    form = f"expected `keys: [{{sha256: <64 hex>, tenant: <name>, scopes: [{'|'.join(SCOPES)}], limits: {{...}}}}]`"
    try:
        raw = yamls.parsed(path.read_text())
    except FileNotFoundError as exc:
        message = f"key file {path}: {exc.strerror}; `lorafleet keys new --file {path}` makes one"
        raise KeyFileUnreadable(message) from exc
    except OSError as exc:
        raise KeyFileUnreadable(f"key file {path}: {exc}") from exc
    except ValueError as exc:  # no text, or no YAML
        raise KeyFileError(f"key file {path}: {exc}") from exc
    entries = raw.get("keys") if isinstance(raw, dict) else None
    if not isinstance(entries, list):
        raise KeyFileError(f"key file {path}: {form}")
    return dict(_entry(path, number, entry, form) for number, entry in enumerate(entries))


def _entry(path: Path, number: int, entry: object, form: str) -> tuple[str, Caller]:
    if not isinstance(entry, dict) or entry.keys() - {"sha256", "tenant", "scopes", "note", "limits"}:
        raise KeyFileError(f"key file {path}: entry {number}: {form}")
    digest, tenant, scopes = entry.get("sha256"), entry.get("tenant"), entry.get("scopes")
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise KeyFileError(f"key file {path}: entry {number}: sha256 must be 64 lower-case hex digits")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise KeyFileError(f"key file {path}: entry {number}: scopes must be some of {', '.join(SCOPES)}")
    if tenant is not None and not isinstance(tenant, str):
        raise KeyFileError(f"key file {path}: entry {number}: tenant must be a name")
    limits = _limits(entry.get("limits"), f"key file {path}: entry {number}")
    return digest, Caller(tenant, frozenset(scopes), digest[:_KEY_ID_DIGITS], limits)


def _limits(given: object, where: str) -> KeyLimits | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() - set(LIMITS):
        raise KeyFileError(f"{where}: limits must be some of {', '.join(LIMITS)}, each with a number")
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= _MOST_OF_A_LIMIT
        if not is_number or (name == "concurrent_requests" and value != int(value)):
            kind = "a whole number" if name == "concurrent_requests" else "a number"
            found = f"found {value!r:.40}; leave it out for none"
            raise KeyFileError(f"{where}: {name} must be {kind} of at least 1 and at most 2**53, {found}")
    if "concurrent_requests" in given:  # 8.0 is whole, too, and what is counted with it goes to others as integers
        given = given | {"concurrent_requests": int(given["concurrent_requests"])}
    return KeyLimits(**given) if given else None
