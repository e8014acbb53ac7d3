"""Signing keys of issuers: discovered, fetched, kept while an issuer is away, fetched again when they are rotated."""

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import jwt
import msgspec
import structlog
from jwt.algorithms import get_default_algorithms

from lorafleet.keys.issuers import Issuer, is_safe_url
from lorafleet.keys.key_files import KeyFileError
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.loops import backoff_s
from lorafleet.service.network.transport import DirectTransport, why_no_answer
from lorafleet.service.tasks import BackgroundTasks

log = structlog.get_logger()

_TIMEOUT_S = 5.0
_DISCOVERY = "/.well-known/openid-configuration"
# An issuer has a handful of keys, of a kilobyte each.
_MOST_BYTES = 2**20
_MOST_KEYS = 64
# Between two fetches for tokens whose key is not known: anybody can send such a token.
_REFETCH_S = 5.0
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 60.0
_LEAST_PAUSE_S = 0.05
_LEAST_RSA_BITS = 2048
# Algorithm of a signature -> the kind of key that it takes: a curve, or else the key's type.
_KINDS = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    "ES256": "P-256",
    "ES384": "P-384",
    "ES512": "P-521",
    "EdDSA": "Ed25519",
}
_ALGORITHM_OF = {"RSA": "RS256", "P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
_READERS = get_default_algorithms()


class IssuerTrouble(Exception):
    """An issuer's discovery document or keys cannot be had, or are none. The message says why."""


class SigningKey(NamedTuple):
    """A public key of an issuer. `algorithm`: the only one that the issuer signs with by it; empty: any of its kind."""

    kid: str
    kind: str
    algorithm: str
    public_key: Any

    def takes(self, algorithm: str) -> bool:
        """Whether this key checks signatures of this algorithm."""
        return _KINDS.get(algorithm) == self.kind and self.algorithm in {"", algorithm}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where an issuer lets people log in and out; empty where it does not say."""

    authorization: str = ""
    token: str = ""
    end_session: str = ""


@dataclass(slots=True, kw_only=True)
class _IssuerState:
    """What is known of an issuer. `tried_at`: the end of the last fetch; `fetched_at`: of the last good one."""

    keys: tuple[SigningKey, ...] = ()
    endpoints: Endpoints = field(default_factory=Endpoints)
    raw_keys: bytes = b""
    tried_at: float = -math.inf
    fetched_at: float = -math.inf
    is_wanted: bool = False
    is_fetching: bool = False
    failures: int = 0
    pause_s: float = 0.0
    trouble: str = ""


class SigningKeys:
    """The signing keys of all issuers. `follow` fetches them; all other methods read what has been fetched.

    generation  grows when keys change or are dropped: what was verified before it must be verified again
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._issuers: tuple[Issuer, ...] = ()
        self._states: dict[str, _IssuerState] = {}
        self._poke = asyncio.Event()
        self.generation = 0

    def set_issuers(self, issuers: Iterable[Issuer]) -> None:
        """Follow these issuers from now on. Keys of one that is read from where it was are kept."""
        kept = {_place_of(issuer): self._states[issuer.issuer] for issuer in self._issuers}
        self._issuers = tuple(issuers)
        self._states = {each.issuer: kept.get(_place_of(each), _IssuerState()) for each in self._issuers}
        self._poke.set()

    def find(self, issuer: Issuer, kid: str | None, algorithm: str) -> SigningKey | None:
        """The key of a token with this `kid`; without one, the only key that takes the algorithm. None: it has none."""
        able = [key for key in self._states[issuer.issuer].keys if key.takes(algorithm)]
        if kid is None:
            return able[0] if len(able) == 1 else None
        return next((key for key in able if key.kid == kid), None)

    def want_fetch(self, issuer: Issuer) -> bool:
        """Have the keys fetched for a token whose key is not known; False: they were fetched a moment ago."""
        state = self._states[issuer.issuer]
        if not state.trouble and self._clock() - state.tried_at < _REFETCH_S:
            return False
        if not state.is_wanted:
            state.is_wanted = True
            self._poke.set()
        return True

    def trouble(self, issuer: Issuer) -> str:
        """Why the last fetch gave no keys; empty: it did."""
        return self._states[issuer.issuer].trouble

    def endpoints(self, issuer: Issuer) -> Endpoints:
        """Where people log in."""
        return self._states[issuer.issuer].endpoints

    def ages_s(self) -> Mapping[str, float]:
        """Issuer -> seconds since its keys were fetched; infinite: never."""
        now = self._clock()
        return {name: now - state.fetched_at for name, state in self._states.items()}

    async def fetch_due(self) -> None:
        """Fetch the keys that are due, and drop those of issuers that were away for too long."""
        await asyncio.gather(*map(self._fetch, self._due()))
        self._drop_outlived()

    async def follow(self) -> None:
        """Fetch the keys of all issuers when they are due, until cancelled. A slow issuer delays no other."""
        fetching = BackgroundTasks()
        try:
            while True:
                self._poke.clear()
                for issuer in self._due():
                    fetching.spawn(self._fetch(issuer))
                self._drop_outlived()
                pause_s = min((self._due_at(issuer) for issuer in self._issuers), default=math.inf) - self._clock()
                with contextlib.suppress(TimeoutError):
                    # Where nothing is due this waits for the next change of a key file, or the end of a fetch.
                    async with asyncio.timeout(None if pause_s == math.inf else max(_LEAST_PAUSE_S, pause_s)):
                        await self._poke.wait()
        finally:
            await fetching.cancel_and_wait()

    def _due(self) -> list[Issuer]:
        """The issuers whose keys are to be fetched now; counts them as being fetched."""
        found = [issuer for issuer in self._issuers if self._due_at(issuer) <= self._clock()]
        for issuer in found:
            self._states[issuer.issuer].is_fetching = True
        return found

    def _due_at(self, issuer: Issuer) -> float:
        """When the issuer's keys are to be fetched next; infinite while they are."""
        state = self._states[issuer.issuer]
        if state.is_fetching:
            return math.inf
        if state.trouble:
            return state.tried_at + state.pause_s
        return state.tried_at + (_REFETCH_S if state.is_wanted else issuer.refresh_s)

    def _drop_outlived(self) -> None:
        """Drop the keys of issuers that could not be reached for too long."""
        for issuer in self._issuers:
            state = self._states[issuer.issuer]
            if state.keys and self._clock() - state.fetched_at > issuer.outlive_s + issuer.refresh_s:
                state.keys, state.raw_keys = (), b""
                self.generation += 1
                log.error("issuer away for too long, its tokens are refused", issuer=issuer.issuer, error=state.trouble)

    async def _fetch(self, issuer: Issuer) -> None:
        """Fetch one issuer's keys, and keep them. Trouble is logged once, and the last keys stay."""
        state = self._states.get(issuer.issuer, _IssuerState())  # a key file may have dropped it meanwhile
        try:
            async with asyncio.timeout(2 * _TIMEOUT_S):
                endpoints, raw = await _fetch_keys(issuer)
            keys = state.keys if raw == state.raw_keys else read_keys(raw)
        except (IssuerTrouble, KeyFileError, httpx.HTTPError, OSError, TimeoutError) as exc:
            why = str(exc) if isinstance(exc, IssuerTrouble | KeyFileError) else why_no_answer(exc)
            if why != state.trouble:
                log.warning("issuer's keys not fetched, the last ones stay", issuer=issuer.issuer, error=why)
            state.failures += 1
            state.trouble, state.pause_s = why, backoff_s(state.failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S)
        except Exception as exc:  # a fault of ours, or of a library; the other issuers go on
            log.exception("issuer's keys not read", issuer=issuer.issuer)
            state.failures += 1
            state.trouble, state.pause_s = repr(exc), _MOST_BACKOFF_S
        else:
            if raw != state.raw_keys:
                self.generation += 1
                log.info("issuer's keys read", issuer=issuer.issuer, kids=[key.kid for key in keys])
            state.keys, state.raw_keys, state.endpoints = keys, raw, endpoints
            state.failures, state.trouble, state.fetched_at = 0, "", self._clock()
        finally:
            state.tried_at, state.is_wanted, state.is_fetching = self._clock(), False, False
            self._poke.set()


def _place_of(issuer: Issuer) -> tuple[object, ...]:
    """Where and how an issuer's keys and endpoints are read."""
    return issuer.issuer, issuer.keys_url, issuer.ca_file, issuer.token_file, issuer.console is None


async def _fetch_keys(issuer: Issuer) -> tuple[Endpoints, bytes]:
    """The issuer's endpoints and its key set, as bytes. Raises IssuerTrouble, httpx.HTTPError, OSError."""
    verify = True if issuer.ca_file is None else ssl.create_default_context(cafile=str(issuer.ca_file))
    async with httpx.AsyncClient(
        transport=DirectTransport(verify=verify),
        trust_env=False,
        timeout=_TIMEOUT_S,
        auth=None if issuer.token_file is None else OwnKey(file=issuer.token_file),
    ) as client:
        endpoints, keys_url = Endpoints(), issuer.keys_url
        if not keys_url or issuer.console is not None:
            found = _decoded(await _read(client, issuer.issuer.rstrip("/") + _DISCOVERY))
            if found.get("issuer") != issuer.issuer:
                raise IssuerTrouble(
                    f"its discovery document is of issuer {found.get('issuer')!r:.200}: write that in the key file"
                )
            keys_url = keys_url or _url_in(found, "jwks_uri")
            if issuer.console is not None:
                endpoints = Endpoints(
                    authorization=_url_in(found, "authorization_endpoint"),
                    token=_url_in(found, "token_endpoint"),
                    end_session=_url_in(found, "end_session_endpoint") if "end_session_endpoint" in found else "",
                )
        return endpoints, await _read(client, keys_url)


def _url_in(found: Mapping[str, Any], name: str) -> str:
    """A URL of the discovery document. Raises IssuerTrouble."""
    url = found.get(name)
    if not isinstance(url, str) or not is_safe_url(url.partition("?")[0]):
        raise IssuerTrouble(f"its discovery document has no safe {name}, found {url!r:.200}")
    return url


async def _read(client: httpx.AsyncClient, url: str) -> bytes:
    """The body of a bounded answer. Raises IssuerTrouble, httpx.HTTPError."""
    async with client.stream("GET", url) as answer:
        if answer.status_code != 200:
            raise IssuerTrouble(f"{url} answers HTTP {answer.status_code}, expected 200")
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MOST_BYTES:
                raise IssuerTrouble(f"{url} answers with more than {_MOST_BYTES} bytes")
    return bytes(body)


def _decoded(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises IssuerTrouble."""
    try:
        found = msgspec.json.decode(raw)
    except DECODE_ERRORS as exc:
        raise IssuerTrouble(f"it answers with no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise IssuerTrouble("it answers with no JSON object")
    return found


def read_keys(raw: bytes) -> tuple[SigningKey, ...]:
    """The keys of a key set that check signatures. Raises IssuerTrouble for a set without any.

    Keys for encryption, symmetric and private keys, and keys that are too short are left out, and logged.
    """
    listed = _decoded(raw).get("keys")
    if not isinstance(listed, list):
        raise IssuerTrouble("its key set has no list `keys`")
    found, left_out = [], []
    for each in (entry for entry in listed[:_MOST_KEYS] if isinstance(entry, dict)):
        try:
            found.append(_read_key(each))
        except ValueError as exc:
            left_out.append(str(exc))
    if not found:
        raise IssuerTrouble(f"its key set has no key for signatures: {_joined(left_out) or 'it is empty'}")
    if left_out:
        log.info("keys of an issuer left out", why=left_out)
    return tuple(found)


def _joined(reasons: Sequence[str]) -> str:
    """Reasons as one short text."""
    return "; ".join(reasons)[:300]


def _read_key(entry: Mapping[str, Any]) -> SigningKey:
    """One key of a set. Raises ValueError for one that is not for signatures, or not safe."""
    kid, kty = entry.get("kid", ""), entry.get("kty")
    kind = entry.get("crv") if kty in ("EC", "OKP") else kty
    name = f"key {kid!r:.60}"
    if not isinstance(kid, str) or not isinstance(kind, str) or kind not in _ALGORITHM_OF:
        raise ValueError(f"{name} is of type {kty!r:.20} {entry.get('crv') or ''!s:.20}, which is not taken")
    operations = entry.get("key_ops", ["verify"])
    if entry.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        raise ValueError(f"{name} is not for signatures")
    if "d" in entry:
        raise ValueError(f"{name} is published with its private part")
    try:
        public_key: Any = _READERS[_ALGORITHM_OF[kind]].from_jwk(dict(entry))
    except (jwt.PyJWTError, ValueError, TypeError, KeyError) as exc:
        raise ValueError(f"{name} is not valid: {exc!r:.100}") from exc
    if kind == "RSA" and public_key.key_size < _LEAST_RSA_BITS:
        raise ValueError(f"{name} has {public_key.key_size} bits, expected {_LEAST_RSA_BITS} at least")
    algorithm = entry.get("alg") or ""
    return SigningKey(kid, kind, algorithm if isinstance(algorithm, str) else "none", public_key)
