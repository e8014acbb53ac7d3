"""The caller of a request at a server, by key or token; key files are re-read when they change. Checks of scopes."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, AnyStr

import structlog
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.params import Depends as Depended
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from lorafleet.keys.issuers import Issuer
from lorafleet.keys.key_files import (
    RECHECK_S,
    KeyFile,
    KeyFileError,
    KeyFileUnreadable,
    hash_key,
    key_id_of,
    read_key_file,
)
from lorafleet.keys.peers import caller_of_peer, check_certificate, peer_of
from lorafleet.keys.roles import ANYONE, SCOPES, Caller, check_scope, expiry_text, with_tenant_limits
from lorafleet.keys.runs import RUN, caller_in_run
from lorafleet.keys.signing_keys import SigningKeys
from lorafleet.keys.tokens import TokenRefused, caller_of_token, expired, is_token, subject_in
from lorafleet.service.files import Stamp, stamp_of
from lorafleet.service.http import HttpError
from lorafleet.telemetry.request_log import NOTES, RequestNotes
from orchestrator.model.limits import AccountLimits, tenant_account

log = structlog.get_logger()

# A changed key file without marks counts once it has stood still for so long: one that is still being written may be
# valid, with fewer keys or with a key that has lost its tenant. A guess; editors and `scp` write in milliseconds.
SETTLE_S = 2.0
# `Authorization` headers whose caller is cached, since hashing a key costs more than the rest of the look-up.
_MAX_CACHED_CALLERS = 4096
# Longer headers are not cached: one may have 64 KiB of blanks around its key.
_MAX_CACHED_HEADER_BYTES = 256
# A refused token of each reason is logged so often at most, with the number of those since.
_LOG_REFUSED_S = 10.0
KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with a caller's key: `Bearer <key>`, or else the key alone, as Anthropic's clients send it."""
# Top-level names below which nobody can register names (RFC 6761, RFC 6762, ICANN 2024).
_RESERVED_NAMES = frozenset({"localhost", "local", "internal"})


# The stamp of each key file; None if it is missing.
_Stamps = tuple[Stamp | None, ...]


def authorization_of(authorization: AnyStr | None, api_key: AnyStr | None) -> AnyStr | None:
    """The `Authorization` of a caller with these values of the KEY_HEADERS; None without either."""
    if authorization is not None or api_key is None:
        return authorization
    return f"Bearer {api_key}" if isinstance(api_key, str) else b"Bearer " + api_key


class ApiKeys:
    """The keys and issuers of the key files, re-read when a file changes. An invalid version leaves the last good one.

    signing_keys    of the issuers; the server fetches them (`SigningKeys.follow`)
    refused_tokens  by reason, since the start
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        needs_certificates: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises KeyFileError if a file is unreadable at the start.

        needs_certificates  calls between services come with certificates, which are their keys, too
        """
        self.needs_certificates = needs_certificates
        self._files = tuple(files)
        self._clock = clock
        self._wall = wall
        self._loaded_stamps: _Stamps | None = self._stamps()
        self.cached_callers: dict[str | bytes, Caller] = {}
        self._callers: dict[str, Caller] = {}
        self._issuers: dict[str, Issuer] = {}
        self._tenant_limits: dict[str, AccountLimits] = {}
        self._budgeted: Mapping[str, AccountLimits] = {}
        self.signing_keys = SigningKeys(clock=clock)
        self._verified: dict[str, Caller] = {}  # by the hash of a token; of this generation of signing keys
        self._generation = 0
        self.refused_tokens: Counter[str] = Counter()
        self._refusals_logged: dict[str, tuple[float, int]] = {}  # reason -> when, and how many there were
        self._take([read_key_file(path) for path in self._files])
        self._checked_at = clock()
        self._seen: tuple[_Stamps | None, float] = (None, 0.0)  # the last stamps that differed, and since when
        self._trouble = ""

    @property
    def is_open(self) -> bool:
        """Whether no key is needed, because there is no key file."""
        return not self._files

    @property
    def issuers(self) -> Mapping[str, Issuer]:
        """The issuers whose tokens are taken, by URL, as the files have them now."""
        if self._files:
            self._reload_if_changed()
        return self._issuers

    @property
    def budgeted(self) -> Mapping[str, AccountLimits]:
        """account -> its limits, of the keys and tenants with budgets that the files have now."""
        if self._files:
            self._reload_if_changed()
        return self._budgeted

    def caller(self, authorization: str | bytes | None) -> Caller:
        """The caller with this `Authorization` header; raises HttpError 401 `invalid_api_key`, TokenRefused.

        Reads changed key files again, at most once a second. Headers of valid keys are cached until a file changes, and
        verified tokens until a file or their issuer's keys change.
        """
        if not self._files:
            return ANYONE
        self._reload_if_changed()
        known = self.cached_callers.get(authorization) if authorization is not None else None
        if known is not None:
            self._require_valid_now(known)
            return known
        found = self._look_up(authorization)
        assert authorization is not None
        if len(authorization) <= _MAX_CACHED_HEADER_BYTES and not found.issuer:
            if len(self.cached_callers) >= _MAX_CACHED_CALLERS:
                self.cached_callers.clear()
            self.cached_callers[authorization] = found
        return found

    def callers(self) -> list[Caller]:
        """The callers of all keys, as the files have them now, then those of tokens that were seen and are valid.

        None where no key is needed.
        """
        if self._files:
            self._reload_if_changed()
        of_tokens = {caller.key_id: caller for caller in self._verified.values() if not self._has_expired(caller)}
        return [*self._callers.values(), *of_tokens.values()]

    def caller_by_id(self, key_id: str) -> Caller:
        """The caller of the valid key with this id; of no id, where no key is needed, anyone.

        Raises HttpError 403 `key_unknown` for any other.
        """
        if not self._files and not key_id:
            return ANYONE
        for caller in self.callers():
            if key_id and caller.key_id == key_id and not self._has_expired(caller):
                return caller
        raise HttpError(
            403, "key_unknown", "this router does not know that key, or it has expired: give it the same key files"
        )

    def hash_of(self, key_id: str, scope: str) -> str | None:
        """The hash of the valid key of the fleet with this id and scope; None without one."""
        self._reload_if_changed()
        return next(
            (
                digest
                for digest, caller in self._callers.items()
                if caller.key_id == key_id and caller.may_for_fleet(scope) and not self._has_expired(caller)
            ),
            None,
        )

    def _look_up(self, authorization: str | bytes | None) -> Caller:
        """The caller of a header that is not cached; raises HttpError."""
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise HttpError(
                401, "invalid_api_key", "no API key: send `Authorization: Bearer <key>`, or `x-api-key: <key>`"
            )
        digest = hash_key(key.strip())
        found = self._callers.get(digest)
        if found is None and is_token(key.strip()) and self._issuers:
            found = self._caller_of_token(key.strip(), digest)
        if found is None:
            why = "is a token, and no issuer of tokens is named in the key files" if is_token(key) else "is not known"
            raise HttpError(401, "invalid_api_key", f"this API key {why}; ask the operator for one")
        self._require_valid_now(found)
        return found

    def _caller_of_token(self, token: str, digest: str) -> Caller:
        """The caller of a token, which is verified once; raises TokenRefused, which is counted and logged."""
        if self._generation != self.signing_keys.generation:
            self._generation = self.signing_keys.generation
            self._verified.clear()
        found = self._verified.get(digest)
        if found is not None:
            return found
        try:
            found = caller_of_token(
                token, self._issuers, self.signing_keys, id_of_subject=_id_of_subject, now=self._wall()
            )
        except TokenRefused as exc:
            self._note_refusal(exc, token)
            raise
        if len(self._verified) >= _MAX_CACHED_CALLERS:
            self._verified.clear()
        self._verified[digest] = found = with_tenant_limits(found, self._tenant_limits)
        return found

    def _note_refusal(self, exc: TokenRefused, token: str) -> None:
        """Count a refused token, and log it unless one was logged for the same reason a moment ago."""
        self.refused_tokens[exc.reason] += 1
        count, now = self.refused_tokens[exc.reason], self._clock()
        logged_at, logged = self._refusals_logged.get(exc.reason, (-_LOG_REFUSED_S, 0))
        if now - logged_at >= _LOG_REFUSED_S:
            self._refusals_logged[exc.reason] = now, count
            log.warning(
                "token refused", reason=exc.reason, error=str(exc), subject=subject_in(token), count=count - logged
            )

    def _require_valid_now(self, caller: Caller) -> None:
        """Raises HttpError 401 `expired_api_key`, or TokenRefused, if the caller's key or token has expired."""
        if self._has_expired(caller):
            if caller.issuer and caller.expires_at is not None:
                self.refused_tokens["expired"] += 1
                raise expired(caller.expires_at)
            raise HttpError(
                401,
                "expired_api_key",
                f"this API key (key {caller.key_id}) expired at {expiry_text(caller.expires_at)}: ask the operator for"
                " another, which `lorafleet keys rotate` makes",
            )

    def _has_expired(self, caller: Caller) -> bool:
        """Whether the caller's key is past its expiry."""
        return caller.expires_at is not None and self._wall() >= caller.expires_at

    def _stamps(self) -> _Stamps:
        """The key files' stamps now."""
        return tuple(stamp_of(path) for path in self._files)

    def _reload_if_changed(self) -> None:
        """Read the key files again if their stamps have changed, and forget cached callers; checks once a second.

        An invalid file is logged, and the last good keys stay. So they do while a file without marks may still be
        written.
        """
        now = self._clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        stamps = self._stamps()
        if stamps == self._loaded_stamps:
            return
        if stamps != self._seen[0]:
            self._seen = stamps, now
        try:
            found = [read_key_file(path) for path in self._files]
        except KeyFileError as exc:
            # An unreadable file is read again at every check: a key may be revoked in it, and a restored file may
            # have the stamp of the last good one.
            self._loaded_stamps = None if isinstance(exc, KeyFileUnreadable) else stamps
            self._log_trouble(str(exc))
            return
        if self._differs(found) and self._may_be_unfinished(found, stamps, now):
            return
        before = self._callers.keys()
        self._take(found)
        self._loaded_stamps, self._trouble = stamps, ""
        log.info("keys reloaded", keys=len(self._callers), gone=len(before - self._callers.keys()))

    def _take(self, files: Sequence[KeyFile]) -> None:
        """Go by these files from now on: forget cached callers and verified tokens."""
        self._callers, self._issuers = _callers_in(files), _issuers_in(files)
        self._tenant_limits = _tenant_limits_in(files)
        self._budgeted = _budgeted_in(self._callers.values(), self._tenant_limits)
        self.cached_callers.clear()
        self._verified.clear()
        self.signing_keys.set_issuers(self._issuers.values())

    def _differs(self, files: Sequence[KeyFile]) -> bool:
        """Whether these files give other keys, issuers or limits than those in force."""
        return (
            _callers_in(files) != self._callers
            or _issuers_in(files) != self._issuers
            or _tenant_limits_in(files) != self._tenant_limits
        )

    def _may_be_unfinished(self, found: Sequence[KeyFile], stamps: _Stamps, now: float) -> bool:
        """Whether a changed file has no marks and has not stood still for `SETTLE_S`, here or by its own time."""
        if now - self._seen[1] >= SETTLE_S:
            return False
        before = self._loaded_stamps or (None,) * len(stamps)
        files = zip(found, stamps, before, strict=True)
        changed = [stamp for file, stamp, was in files if stamp != was and not file.is_marked]
        return any(stamp is None or self._wall() - stamp[0] / 1e9 < SETTLE_S for stamp in changed)

    def _log_trouble(self, trouble: str) -> None:
        """Log a problem unless it is the last one logged, without a traceback, and remember it."""
        if trouble != self._trouble:
            log.error("key file not reloaded, the last good one stays in force", error=trouble)
        self._trouble = trouble


def _callers_in(files: Sequence[KeyFile]) -> dict[str, Caller]:
    """The callers of all files by key hash, with their tenants' limits; of a hash in two files the last."""
    limits = _tenant_limits_in(files)
    return {key: with_tenant_limits(caller, limits) for file in files for key, caller in file.callers.items()}


def _tenant_limits_in(files: Sequence[KeyFile]) -> dict[str, AccountLimits]:
    """The limits of all files by tenant; of a tenant in two files the last."""
    return {tenant: limits for file in files for tenant, limits in file.tenant_limits.items()}


def _budgeted_in(callers: Iterable[Caller], tenants: Mapping[str, AccountLimits]) -> dict[str, AccountLimits]:
    """The limits of the accounts that have budgets."""
    of_tenants = {tenant_account(tenant): limits for tenant, limits in tenants.items()}
    of_keys = {caller.key_id: caller.limits for caller in callers if caller.limits is not None}
    return {account: limits for account, limits in (of_tenants | of_keys).items() if any(limits.budgets())}


def _issuers_in(files: Sequence[KeyFile]) -> dict[str, Issuer]:
    """The issuers of all files by URL; of an issuer in two files the last."""
    return {url: issuer for file in files for url, issuer in file.issuers.items()}


def _id_of_subject(issuer: str, subject: str) -> str:
    """The id of a token's caller: the same for all tokens of one subject."""
    return key_id_of(hash_key(f"{issuer}\n{subject}"))


class ScopeCheck:
    """A FastAPI dependency that returns the caller and sets `request.state.caller`. `requires` makes one.

    scopes        each of them is enough
    is_for_fleet  whether a tenant's own scope is not enough
    """

    def __init__(self, keys: ApiKeys, scopes: Sequence[str], *, is_for_fleet: bool) -> None:
        self._keys = keys
        self.scopes = tuple(scopes)
        self.is_for_fleet = is_for_fleet

    async def __call__(self, request: Request) -> Caller:
        """The request's caller, kept in `request.state`; raises HttpError without a valid key or the scope."""
        request.state.caller = found = self.check(request)
        return found

    def check(self, request: Request) -> Caller:
        """The request's caller, noted for its line in the log. Raises HttpError without a valid key or the scope."""
        authorization = authorization_of(*map(request.headers.get, KEY_HEADERS))
        peer = peer_of(request) if self._keys.needs_certificates else None
        by_certificate = None if authorization is not None or self._keys.is_open else caller_of_peer(peer)
        key_caller = by_certificate or self._keys.caller(authorization)
        found = caller_in_run(key_caller, request.scope.get(RUN, ""))
        notes = request.scope.get(NOTES)
        if isinstance(notes, RequestNotes):
            notes.key, notes.tenant = found.key_id, found.tenant or ""
        check_scope(found, *self.scopes, is_for_fleet=self.is_for_fleet)
        if self._keys.needs_certificates:
            check_certificate(found, self.scopes, peer)
        return found


class KeyCheck(ScopeCheck):
    """A FastAPI dependency that accepts any valid key."""

    def __init__(self, keys: ApiKeys) -> None:
        super().__init__(keys, SCOPES, is_for_fleet=False)


def requires(keys: ApiKeys, *scopes: str, is_for_fleet: bool = False) -> ScopeCheck:
    """A FastAPI dependency that returns the caller.

    It raises HttpError: 401 without a known key, 403 without one of the scopes.

    is_for_fleet  refuse a key that has the scope for its tenant alone
    """
    return ScopeCheck(keys, scopes, is_for_fleet=is_for_fleet)


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
    route = route_of(app, scope)
    request = Request(scope)
    for check in _scope_checks(route.dependant) if isinstance(route, APIRoute) else ():
        check.check(request)
    return route is not None


def route_of(app: FastAPI, scope: Scope) -> BaseRoute | None:
    """The route that takes this request; None: none does."""
    return next((route for route in app.routes if route.matches(scope)[0] is Match.FULL), None)


def _scope_checks(dependant: Dependant) -> Iterator[ScopeCheck]:
    """The scope checks among a route's dependencies, also those of its parameters."""
    for each in dependant.dependencies:
        if isinstance(each.call, ScopeCheck):
            yield each.call
        yield from _scope_checks(each)


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
