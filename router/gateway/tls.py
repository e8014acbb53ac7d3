"""TLS of a picker's port."""

import tempfile
from pathlib import Path
from typing import Any

import grpc
import structlog

from lorafleet.local.authority import Authority
from lorafleet.service.network.tls import TlsFiles

log = structlog.get_logger()


def credentials_of(files: TlsFiles, *, is_self_signed: bool) -> Any:
    """gRPC's credentials with the router's own certificate, or one made now; None: plain text.

    The router's own files are read again when they change. Raises OSError where they cannot be read.
    """
    if files.cert is not None and files.key is not None:
        return _following(files.cert, files.key, files)
    if not is_self_signed:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Authority(Path(folder)).issue("lorafleet endpoint picker", "localhost", "127.0.0.1")
        assert made.cert is not None
        assert made.key is not None
        return grpc.ssl_server_credentials([(made.key.read_bytes(), made.cert.read_bytes())])


def _following(cert: Path, key: Path, files: TlsFiles) -> Any:
    """Credentials with the pair in these files, as they are at each handshake."""
    seen = files.stamps

    def read() -> Any:
        """gRPC's configuration with the pair in the files. Raises OSError."""
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())])

    def changed() -> Any:
        """The configuration where the files have changed; None: the one before stays."""
        nonlocal seen
        now = files.stamps
        if now == seen:
            return None
        try:
            made = read()
        except OSError as exc:
            log.warning("the certificate for gateways cannot be read; the former one stays", error=str(exc))
            return None
        seen = now
        return made

    return grpc.dynamic_ssl_server_credentials(read(), changed)
