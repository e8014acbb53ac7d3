"""A new certificate authority, and a server's certificate from it."""

import base64
import datetime
import ipaddress
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate with its key; `ca_pem`: the authority that clients trust."""

    ca_pem: str
    pem: str
    key_pem: str

    @property
    def ca_base64(self) -> str:
        return base64.b64encode(self.ca_pem.encode()).decode()

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile("w") as file:  # ssl reads keys from files alone
            file.write(self.pem + self.key_pem)
            file.flush()
            context.load_cert_chain(Path(file.name))
        return context


def made_for(address: str, *, is_sparse: bool = False) -> Certificate:
    """A certificate valid for a day.

    is_sparse  as EKS makes them: nothing about the keys, neither which they are nor what they may be used for
    """
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    authority = x509.BasicConstraints(ca=True, path_length=None)
    ca = _builder(issuer, issuer, ca_key).add_extension(authority, critical=True)
    server = _builder(subject, issuer, key).add_extension(alternative, critical=False)
    if not is_sparse:
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        ca = ca.add_extension(identifier, critical=False).add_extension(_usage(signs=True), critical=True)
        server = server.add_extension(issued_by, critical=False).add_extension(_usage(signs=False), critical=True)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    signed = [_pem(each.sign(ca_key, hashes.SHA256())) for each in (ca, server)]
    return Certificate(*signed, key_pem.decode())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
