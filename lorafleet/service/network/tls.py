"""TLS to clients and between services: certificates from files that may change, the names in them, and what went wrong.

With an authority of the fleet (`tls_ca`) a service proves its role by DNS names in its certificate, below a domain that
no public authority signs. Pods are reached by address, and no certificate knows its pod's address beforehand.
"""

import contextlib
import ipaddress
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import structlog

from lorafleet.service.files import Stamp, stamp_of
from lorafleet.service.times import utc_text

log = structlog.get_logger()

Role = Literal["router", "orchestrator", "worker"]

# RFC 6762 and ICANN keep `internal` for private use.
_DOMAIN = "lorafleet.internal"
PEER = "lorafleet.peer"
"""Key of a request's `state`: the PeerNames of its client's certificate, where it has shown one."""
RECHECK_S = 1.0
"""The files are checked for changes this often, when a connection is opened."""
_HANDSHAKE_TURNS = 10
_CHAIN_ERRORS = frozenset({7, 18, 19, 20, 21})
"""X509_V_ERR_* of OpenSSL: no authority that is trusted here has signed the certificate."""
_EXPIRED, _NOT_YET_VALID, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64


def role_name(role: Role) -> str:
    """The DNS name that the certificate of each service with this role has."""
    return f"{role}.{_DOMAIN}"


def worker_name(worker_id: str) -> str:
    """The DNS name by which a certificate is one worker's own."""
    return f"{worker_id}.{role_name('worker')}".lower()


class TlsError(OSError):
    """Certificate, key or authority cannot be used. The message names the file, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class PeerNames:
    """The DNS names of the verified certificate at the other end of a connection, in lower case."""

    names: frozenset[str]

    def has_role(self, role: Role) -> bool:
        """Whether the certificate is that of a service with this role."""
        return role_name(role) in self.names

    def is_worker(self, worker_id: str) -> bool:
        """Whether the certificate is this worker's own, or one that all workers share (`*`)."""
        return not self.names.isdisjoint({worker_name(worker_id), worker_name("*")})

    def __str__(self) -> str:
        return ", ".join(sorted(self.names)) or "no DNS name"


def peer_names(certificate: Mapping[str, Any] | None) -> PeerNames | None:
    """The names in a certificate, as `SSLObject.getpeercert` returns it; None: the peer has shown no verified one."""
    if not certificate:
        return None
    return PeerNames(frozenset(value.lower() for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: the certificate with its chain, its key, and the authorities that the fleet trusts.

    Either of the first two comes with the other.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def stamps(self) -> tuple[Stamp | None, ...]:
        """The files' stamps now."""
        return tuple(stamp_of(file) for file in (self.cert, self.key, self.ca) if file is not None)


@dataclass(frozen=True, slots=True)
class _LoadedTls:
    """The contexts made from the files. `expires_at`: Unix seconds at which the certificate expires; None without."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    expires_at: float | None


@dataclass(slots=True)
class Tls:
    """A service's TLS contexts, made again when the files change. While the files cannot be used the last ones stay.

    names         DNS names that the service's certificate must have, where there is an authority
    clients       whether clients are asked for a certificate of the authority: no, optionally, or always
    orchestrators host and port of orchestrators that settings name; other addresses are workers'
    trouble       why the files are not in use as they are now; empty: they are
    """

    files: TlsFiles
    names: Sequence[str] = ()
    clients: ssl.VerifyMode = ssl.CERT_NONE
    orchestrators: frozenset[tuple[str, int]] = frozenset()
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    trouble: str = field(default="", init=False)
    _loaded: _LoadedTls = field(init=False)
    _stamps: tuple[Stamp | None, ...] | None = field(init=False)
    _checked_at: float = field(init=False)

    def __post_init__(self) -> None:
        """Load the files. Raises TlsError."""
        self._stamps, self._checked_at = self.files.stamps, self.clock()
        self._loaded = self._load()

    @classmethod
    def of_service(
        cls,
        files: TlsFiles,
        *names: str,
        clients: ssl.VerifyMode = ssl.CERT_NONE,
        orchestrator_urls: Sequence[str] = (),
    ) -> Self | None:
        """The TLS of a service with these files and DNS names; None without files. Raises TlsError."""
        if files.cert is None and files.ca is None:
            return None
        orchestrators = frozenset(map(address_of, orchestrator_urls))
        return cls(files, names=names, clients=clients, orchestrators=orchestrators)

    @property
    def is_mutual(self) -> bool:
        """Whether services prove their roles to each other by certificates."""
        return self.files.cert is not None and self.files.ca is not None

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """The context for a connection that a client opens now; None without a certificate."""
        self._reload_if_changed()
        return self._loaded.server

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """The context for a connection to another service; None: any public authority will do, and no proof is sent."""
        self._reload_if_changed()
        return self._loaded.client

    @property
    def expires_at(self) -> float | None:
        """Unix seconds at which the certificate in use expires; None without one."""
        self._reload_if_changed()
        return self._loaded.expires_at

    @property
    def is_current(self) -> bool:
        """Whether the files are in use as they are now."""
        self._reload_if_changed()
        return not self.trouble

    def server_name(self, host: str, port: int, role: Role | None = None) -> str:
        """The name that the certificate of the service at this host must have: its own, or its role's at an address.

        role  of a service whose address is not among `orchestrators`; None: `worker`
        """
        if self.files.ca is None or not _is_address(host):
            return host
        return role_name(role or ("orchestrator" if (host, port) in self.orchestrators else "worker"))

    def without_certificate(self) -> "Tls":
        """The same authorities for calls that prove nothing, such as those that only pass a client's own key on."""
        return Tls(TlsFiles(ca=self.files.ca), orchestrators=self.orchestrators, clock=self.clock, wall=self.wall)

    def _reload_if_changed(self) -> None:
        """Load the files again where they have changed; a failure is logged once, and the last ones stay."""
        now = self.clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        stamps = self.files.stamps
        if stamps == self._stamps:
            return
        try:
            self._loaded = self._load()
        except TlsError as exc:
            self._stamps = None  # tried again at each check: one of the files may have been replaced before the others
            if str(exc) != self.trouble:
                log.error("TLS files not reloaded, the last good ones stay", error=str(exc))  # noqa: TRY400  (it says all)
            self.trouble = str(exc)
            return
        self._stamps, self.trouble = stamps, ""
        expires = self._loaded.expires_at
        log.info("TLS files reloaded", expires_at=None if expires is None else _utc(expires))

    def _load(self) -> _LoadedTls:
        """New contexts from the files. Raises TlsError."""
        files = self.files
        client = None if files.ca is None else client_context(files.ca)
        if files.cert is None or files.key is None:
            return _LoadedTls(None, client, None)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _harden(server)
        expires_at = _load_pair(server, files.cert, files.key, self.names if client else (), self.wall())
        if client is not None:
            client.load_cert_chain(files.cert, files.key)
            with _as_own_certificate(files):
                _check_own_chain(server, client)
            server.load_verify_locations(files.ca)
            server.verify_mode = self.clients
        return _LoadedTls(server, client, expires_at)


def client_context(ca: Path) -> ssl.SSLContext:
    """A context that trusts these authorities alone. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    _text(ca, "tls_ca", "CERTIFICATE-----", "the authority's certificate in PEM")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as exc:
        raise TlsError(f"tls_ca {ca}: {exc.reason or exc}; expected the authority's certificate in PEM") from exc
    return context


def address_of(url: str) -> tuple[str, int]:
    """Host and port of an `http://` or `https://` URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def failure_text(exc: BaseException, tls: Tls | None = None, expected: str = "") -> str:
    """Why a TLS connection to a service failed, and what to do; empty where TLS is not the reason.

    exc       what the connection raised; its causes are searched
    tls       of this service
    expected  the name that the service's certificate must have
    """
    found = _ssl_error(exc)
    if found is None:
        return ""
    ours = "the public authorities" if tls is None or tls.files.ca is None else f"tls_ca {tls.files.ca}"
    if isinstance(found, ssl.SSLCertVerificationError):
        return _verification_text(found, ours, expected)
    reason = found.reason or ""
    if reason in {"WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "HTTP_REQUEST"}:
        return "it speaks plain HTTP there: give it --tls-cert and --tls-key, or use an http:// address"
    if "ALERT" in reason:
        own = "this service's certificate" if tls is None else f"tls_cert {tls.files.cert or '(none is given)'}"
        return f"it refuses {own} ({reason.lower()}): give both services certificates of one authority, its tls_ca"
    return f"TLS failed ({reason.lower() or found})"


def _verification_text(exc: ssl.SSLCertVerificationError, authorities: str, expected: str) -> str:
    """Why a certificate is not accepted, and what to do."""
    if exc.verify_code == _EXPIRED:
        return "its certificate has expired: renew the file of its --tls-cert; it is read again without a restart"
    if exc.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: compare the two machines' clocks"
    if exc.verify_code in {_OTHER_NAME, _OTHER_ADDRESS}:
        return (
            f"its certificate does not name {expected or 'this host'}: issue its --tls-cert with that subjectAltName,"
            " or reach it by a name that it has"
        )
    if exc.verify_code in _CHAIN_ERRORS:
        return (
            f"its certificate is signed by none of {authorities} ({exc.verify_message}): give both the same authority"
        )
    return f"its certificate is not accepted: {exc.verify_message}"


def _ssl_error(exc: BaseException | None) -> ssl.SSLError | None:
    """The TLS error behind an error; None without one."""
    while exc is not None:
        if isinstance(exc, ssl.SSLError):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


def _is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _harden(context: ssl.SSLContext) -> None:
    """TLS 1.2 or newer, HTTP/1.1 alone."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, names: Sequence[str], now: float) -> float:
    """Load certificate and key; returns when the certificate expires. Raises TlsError.

    names  DNS names that the certificate must have
    """
    from cryptography import x509  # noqa: PLC0415  (a service without TLS needs no 5 MB of it)

    text = _text(cert, "tls_cert", "CERTIFICATE-----", "the service's certificate in PEM, and its chain behind it")
    key_text = _text(key, "tls_key", "PRIVATE KEY-----", "the certificate's key in PEM")
    if b"ENCRYPTED" in key_text:
        raise TlsError(f"tls_key {key} has a passphrase, which nobody could give: `openssl pkey` writes it without")
    try:
        context.load_cert_chain(cert, key)
    except OSError as exc:  # ssl.SSLError is one
        reason = getattr(exc, "reason", None) or exc.strerror or str(exc)
        if reason == "KEY_VALUES_MISMATCH":
            raise TlsError(
                f"tls_key {key} is not the key of tls_cert {cert}: give the two files of one certificate"
            ) from exc
        raise TlsError(f"tls_cert {cert} with tls_key {key}: {reason}; expected a certificate and its key") from exc
    try:
        found = x509.load_pem_x509_certificate(text)
    except ValueError as exc:
        raise TlsError(f"tls_cert {cert}: {exc}; expected the service's certificate in PEM") from exc
    expires_at = found.not_valid_after_utc.timestamp()
    if now >= expires_at:
        raise TlsError(f"tls_cert {cert} expired at {_utc(expires_at)}: renew it")
    if now < found.not_valid_before_utc.timestamp():
        begins = _utc(found.not_valid_before_utc.timestamp())
        raise TlsError(f"tls_cert {cert} is not valid before {begins}: is this machine's clock right?")
    own = frozenset(name.lower() for name in _dns_names(found))
    missing = [name for name in names if not {name, f"*.{name.partition('.')[2]}"} & own]
    if missing:
        raise TlsError(
            f"tls_cert {cert} names {', '.join(sorted(own)) or 'nothing'}; with tls_ca it must have the DNS names"
            f" {', '.join(names)} (subjectAltName), by which other services know this one"
        )
    return expires_at


def _dns_names(certificate: Any) -> list[str]:
    """The DNS names in a certificate of `cryptography`."""
    from cryptography import x509  # noqa: PLC0415

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.DNSName))


def _text(file: Path, setting: str, marker: str, expected: str) -> bytes:
    """The bytes of a PEM file. Raises TlsError where it cannot be read, or has not this marker."""
    try:
        content = file.read_bytes()
    except OSError as exc:
        raise TlsError(f"{setting} {file}: {exc.strerror}; expected {expected}") from exc
    if marker.encode() not in content:
        found = "an empty file" if not content else f"{len(content)} bytes of something else"
        raise TlsError(f"{setting} {file}: found {found}; expected {expected}")
    return content


@contextlib.contextmanager
def _as_own_certificate(files: TlsFiles) -> Iterator[None]:
    """Raise a failure of our own chain as TlsError."""
    try:
        yield
    except ssl.SSLError as exc:
        why = getattr(exc, "verify_message", "") or exc.reason or str(exc)
        raise TlsError(
            f"tls_cert {files.cert} is not accepted by tls_ca {files.ca} ({why}): services of a fleet have certificates"
            " of one authority; while it changes, the file has the old one and the new one"
        ) from exc


def _check_own_chain(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Have our own authorities verify our own certificate, in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client.check_hostname = False
    try:
        ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    finally:
        client.check_hostname = True
    for _ in range(_HANDSHAKE_TURNS):
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def _utc(seconds: float) -> str:
    """Unix seconds as UTC text."""
    return utc_text(datetime.fromtimestamp(seconds, UTC), "seconds")
