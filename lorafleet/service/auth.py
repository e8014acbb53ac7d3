"""API keys: bearer keys with a tenant and scopes, in key files of hashes that are reloaded when they change.

A key file is YAML: `keys: [{sha256: <hex of the key>, tenant: acme, scopes: [infer], limits: {requests_per_minute: 60,
tokens_per_minute: 100000, concurrent_requests: 8}}]`; all limits are optional. Keys are random (`lorafleet keys new`),
so a plain hash is safe; the file never holds a key.
"""

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.params import Depends as Depended
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from lorafleet.service import yamls
from lorafleet.service.files import Stamp, stamp_of
from lorafleet.service.http import HttpError
from lorafleet.service.request_log import NOTES, RequestNotes

log = structlog.get_logger()

# Required scope -> scopes that satisfy it.
_SATISFIED_BY = {
    "infer": frozenset({"infer", "load", "admin"}),
    "load": frozenset({"load", "admin"}),
    "register": frozenset({"register", "admin"}),
    "drain": frozenset({"drain", "admin"}),
    "metrics": frozenset({"metrics", "admin"}),
    "export": frozenset({"export", "admin"}),
    "admin": frozenset({"admin"}),
}
SCOPES = tuple(_SATISFIED_BY)
LIMITS = ("requests_per_minute", "tokens_per_minute", "bytes_per_minute", "concurrent_requests")
# Key files are checked for changes this often.
RECHECK_S = 1.0
# `Authorization` headers whose caller is cached, since hashing a key costs more than the rest of the look-up.
_MAX_CACHED_CALLERS = 4096
# Longer headers are not cached: one may have 64 KiB of blanks around its key.
_MAX_CACHED_HEADER_BYTES = 256
# The largest integer that floats represent exactly; token buckets use floats.
_MAX_LIMIT = 2**53
# Digits of a key's hash that identify the key in logs and quotas.
_KEY_ID_DIGITS = 12
# Top-level names below which nobody can register names (RFC 6761, RFC 6762, ICANN 2024).
_RESERVED_NAMES = frozenset({"localhost", "local", "internal"})


# The stamp of each key file; None if it is missing.
_Stamps = tuple[Stamp | None, ...]


class KeyFileError(Exception):
    """A key file is unreadable or invalid. The message names the file, the entry and the expected form."""


class KeyFileUnreadable(KeyFileError):
    """A key file cannot be read now, because of its mode, its disk or a lack of descriptors; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None is no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    bytes_per_minute: float | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller's tenant and scopes. `tenant` is None for an operator.

    name    for quotas and histories
    key_id  the first digits of the key's hash; empty if no key is needed
    limits  None if there are none
    """

    tenant: str | None
    scopes: frozenset[str]
    key_id: str = ""
    limits: KeyLimits | None = None

    @property
    def name(self) -> str:
        """The caller in quotas and histories: role and key, or `anyone` where no key is needed."""
        role = "operator" if self.tenant is None else f"tenant {self.tenant}"
        return f"{role} (key {self.key_id})" if self.key_id else "anyone"

    def may(self, scope: str) -> bool:
        """Whether the caller has this scope; `admin` includes all others, `load` includes `infer`."""
        return not self.scopes.isdisjoint(_SATISFIED_BY[scope])

    def may_use(self, tenants: Container[str] | None) -> bool:
        """Whether this caller may use an adapter with these tenants (None: everyone)."""
        return tenants is None or self.may("load") or (self.tenant is not None and self.tenant in tenants)


ANYONE = Caller(tenant=None, scopes=frozenset(SCOPES))


def hash_key(key: str) -> str:
    """The hash of a key, as key files hold it."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A fresh key with 256 random bits."""
    return "lf-" + secrets.token_urlsafe(32)


class ApiKeys:
    """The keys of the key files, re-read when a file changes. If a new version is invalid, the last good one stays."""

    def __init__(self, files: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeyFileError if a file is unreadable at the start."""
        self._files = tuple(files)
        self._clock = clock
        self._loaded_stamps: _Stamps | None = self._stamps()
        self.cached_callers: dict[str | bytes, Caller] = {}
        self._callers = _read_key_files(self._files)
        self._checked_at = clock()
        self._trouble = ""

    @property
    def is_open(self) -> bool:
        """Whether no key is needed, because there is no key file."""
        return not self._files

    def caller(self, authorization: str | bytes | None) -> Caller:
        """The caller with this `Authorization` header; raises HttpError 401 `invalid_api_key`.

        Reads changed key files again, at most once a second. Headers of valid keys are cached until a file changes.
        """
        if not self._files:
            return ANYONE
        self._reload_if_changed()
        known = self.cached_callers.get(authorization) if authorization is not None else None
        if known is not None:
            return known
        found = self._look_up(authorization)
        assert authorization is not None
        if len(authorization) <= _MAX_CACHED_HEADER_BYTES:
            if len(self.cached_callers) >= _MAX_CACHED_CALLERS:
                self.cached_callers.clear()
            self.cached_callers[authorization] = found
        return found

    def _look_up(self, authorization: str | bytes | None) -> Caller:
        """The caller of a header that is not cached; raises HttpError."""
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
        """The key files' stamps now."""
        return tuple(stamp_of(path) for path in self._files)

    def _reload_if_changed(self) -> None:
        """Read the key files again if their stamps have changed, and forget cached callers; checks once a second.

        An invalid file is logged, and the last good keys stay.
        """
        now = self._clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        stamps = self._stamps()
        if stamps == self._loaded_stamps:
            return
        try:
            self._callers = _read_key_files(self._files)
        except KeyFileError as exc:
            # An unreadable file is read again at every check: a key may be revoked in it, and a restored file may
            # have the stamp of the last good one.
            self._loaded_stamps = None if isinstance(exc, KeyFileUnreadable) else stamps
            self._log_trouble(str(exc))
        else:
            self._loaded_stamps, self._trouble = stamps, ""
            self.cached_callers.clear()
            log.info("keys reloaded", keys=len(self._callers))

    def _log_trouble(self, trouble: str) -> None:
        """Log a problem unless it is the last one logged, without a traceback, and remember it."""
        if trouble != self._trouble:
            log.error("key file not reloaded, the last good one stays in force", error=trouble)
        self._trouble = trouble


class ScopeCheck:
    """A FastAPI dependency that returns the caller and sets `request.state.caller`. `requires` makes one."""

    def __init__(self, keys: ApiKeys, scope: str) -> None:
        self._keys = keys
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        """The request's caller, kept in `request.state`; raises HttpError without a valid key or the scope."""
        request.state.caller = found = self.check(request)
        return found

    def check(self, request: Request) -> Caller:
        """The request's caller, noted for its line in the log. Raises HttpError without a valid key or the scope."""
        found = self._keys.caller(request.headers.get("authorization"))
        notes = request.scope.get(NOTES)
        if isinstance(notes, RequestNotes):
            notes.key, notes.tenant = found.key_id, found.tenant or ""
        check_scope(found, self.scope)
        return found


def requires(keys: ApiKeys, scope: str) -> ScopeCheck:
    """A FastAPI dependency that returns the caller.

    It raises HttpError: 401 without a known key, 403 without the scope.
    """
    return ScopeCheck(keys, scope)


def metrics_dependencies(keys: ApiKeys, *, need_key: bool) -> list[Depended]:
    """The dependencies of a service's `/metrics`: none, or with `need_key` a key with the scope `metrics`."""
    return [Depends(requires(keys, "metrics"))] if need_key else []


class AuthFirstRoute(APIRoute):
    """A route that runs its `dependencies` before its body is read; FastAPI reads and parses the body first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler of the route, after its dependencies have passed."""
        answer = super().get_route_handler()
        checks = [each.dependency for each in self.dependencies if each.dependency is not None]

        async def check_and_answer(request: Request) -> Response:
            """Run the checks, which may raise, then the handler."""
            for check in checks:
                await check(request)
            return await answer(request)

        return check_and_answer


def check_route_scopes(app: FastAPI, scope: Scope) -> bool:
    """Run the scope checks of the route that takes this request; False: none takes it. Raises HttpError.

    So a body need not be read, nor a request forwarded, for a key that its route will refuse.
    """
    for route in app.routes:
        if route.matches(scope)[0] is Match.FULL:
            request = Request(scope)
            for check in _scope_checks(route.dependant) if isinstance(route, APIRoute) else ():
                check.check(request)
            return True
    return False


def _scope_checks(dependant: Dependant) -> Iterator[ScopeCheck]:
    """The scope checks among a route's dependencies, also those of its parameters."""
    for each in dependant.dependencies:
        if isinstance(each.call, ScopeCheck):
            yield each.call
        yield from _scope_checks(each)


def check_scope(caller: Caller, scope: str) -> None:
    """Raises HttpError 403 `scope_missing` if the caller lacks the scope."""
    if not caller.may(scope):
        scopes_held = ", ".join(sorted(caller.scopes)) or "none"
        raise HttpError(403, "scope_missing", f"this needs a key with scope {scope!r}; yours has: {scopes_held}")


def refuse_open_server(keys: ApiKeys, host: str, *, allow_open: bool) -> None:
    """Raises KeyFileError if a server without keys would listen on an address other than loopback."""
    if keys.is_open and not allow_open and not _is_loopback(host):
        raise KeyFileError(
            f"refusing to listen on {host} without keys: give --key-files FILE,"
            " or --allow-open if something else guards it"
        )


def host_check(keys: ApiKeys, *, allow_open: bool) -> Callable[[str | bytes], None] | None:
    """`check_host` for a server without keys, which is protected by its address alone; None for any other."""
    return check_host if keys.is_open and not allow_open else None


@lru_cache(maxsize=1024)
def check_host(host: str | bytes) -> None:
    """Raises HttpError 421 `unknown_host` for a `Host` header with a name that can be registered.

    This prevents DNS rebinding: a web page whose own name points at this machine could call an open server and read its
    answers. Addresses, names without a dot, and names that nobody can register are safe.
    """
    host = host.decode("latin-1") if isinstance(host, bytes) else host
    name = host.strip().lower().partition(":")[0].rstrip(".")
    top = name.rpartition(".")[2]
    if host.startswith("[") or "." not in name or top.isdigit() or top in _RESERVED_NAMES:
        return
    raise HttpError(
        421,
        "unknown_host",
        f"{name!r} is not a name of this machine: without keys only requests to localhost or an address are answered;"
        " give --key-files FILE, or --allow-open if something else guards it",
    )


def _is_loopback(host: str) -> bool:
    """Whether this is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_key_files(files: Sequence[Path]) -> dict[str, Caller]:
    """The callers of all key files by key hash; raises KeyFileError."""
    return {key: caller for path in files for key, caller in _read_key_file(path).items()}


def _read_key_file(path: Path) -> dict[str, Caller]:
    """The callers of one key file by key hash; raises KeyFileError."""
    form = f"expected `keys: [{{sha256: <64 hex>, tenant: <name>, scopes: [{'|'.join(SCOPES)}], limits: {{...}}}}]`"
    try:
        raw = yamls.read_yaml(path)
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
    return dict(_parse_entry(path, number, entry, form) for number, entry in enumerate(entries))


def _parse_entry(path: Path, number: int, entry: object, form: str) -> tuple[str, Caller]:
    """The key hash and the caller of one entry; raises KeyFileError."""
    if not isinstance(entry, dict) or entry.keys() - {"sha256", "tenant", "scopes", "note", "limits"}:
        raise KeyFileError(f"key file {path}: entry {number}: {form}")
    digest, tenant, scopes = entry.get("sha256"), entry.get("tenant"), entry.get("scopes")
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise KeyFileError(f"key file {path}: entry {number}: sha256 must be 64 lower-case hex digits")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise KeyFileError(f"key file {path}: entry {number}: scopes must be some of {', '.join(SCOPES)}")
    if tenant is not None and not isinstance(tenant, str):
        raise KeyFileError(f"key file {path}: entry {number}: tenant must be a name")
    limits = _parse_limits(entry.get("limits"), f"key file {path}: entry {number}")
    return digest, Caller(tenant, frozenset(scopes), digest[:_KEY_ID_DIGITS], limits)


def _parse_limits(limits: object, location: str) -> KeyLimits | None:
    """The limits of one entry; None without any. Raises KeyFileError for an unknown name or an invalid number."""
    if limits is None:
        return None
    if not isinstance(limits, dict) or limits.keys() - set(LIMITS):
        raise KeyFileError(f"{location}: limits must be some of {', '.join(LIMITS)}, each with a number")
    for name, value in limits.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= _MAX_LIMIT
        if not is_number or (name == "concurrent_requests" and value != int(value)):
            kind = "a whole number" if name == "concurrent_requests" else "a number"
            found = f"found {value!r:.40}; leave it out for none"
            raise KeyFileError(f"{location}: {name} must be {kind} of at least 1 and at most 2**53, {found}")
    if "concurrent_requests" in limits:  # 8.0 is valid, and shared quotas need integers
        limits = limits | {"concurrent_requests": int(limits["concurrent_requests"])}
    return KeyLimits(**limits) if limits else None
