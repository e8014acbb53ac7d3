"""A throw-away certificate authority, for a fleet on one machine: `lorafleet up --tls`, and tests."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lorafleet.service.files import write_atomically
from lorafleet.service.network.tls import TlsFiles

_VALID = timedelta(days=30)
_BEFORE = timedelta(hours=1)  # for clocks that differ
_PEM = serialization.Encoding.PEM


class Authority:
    """An authority whose certificate is `ca.pem` in a folder, beside those that it issues. Its key is never written."""

    def __init__(self, folder: Path, name: str = "lorafleet throw-away authority") -> None:
        """Write `ca.pem`, in place of an older one. Raises OSError."""
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        self.ca = folder / "ca.pem"
        write_atomically(
            self.ca, self._signed(self._name, self._key.public_key(), (), until=datetime.now(UTC) + _VALID)
        )

    def issue(self, service: str, *names: str, valid: timedelta = _VALID) -> TlsFiles:
        """Write `<service>.pem` and `<service>.key`, in place of older ones; names may be addresses. Raises OSError.

        valid  from now on; less than nothing: it has expired
        """
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._signed(_common_name(service), key.public_key(), names, until=datetime.now(UTC) + valid)
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        files = TlsFiles(cert=self._folder / f"{service}.pem", key=self._folder / f"{service}.key", ca=self.ca)
        for path, content in ((files.key, secret), (files.cert, cert)):
            assert path is not None
            write_atomically(path, content)
        return files

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, names: tuple[str, ...], until: datetime
    ) -> bytes:
        """A certificate in PEM for these names; for our own, without names, that of an authority."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(until, datetime.now(UTC)) - _BEFORE)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=subject is self._name, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(_general_name, names)]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _common_name(name: str) -> x509.Name:
    """A subject with this name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    """A name of a certificate: an address, or a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
