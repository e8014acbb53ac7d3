"""Certificates from files that may change: what is refused at a start and at a change, names, and errors' words."""

import ssl
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.authority import Authority
from lorafleet.service.network.tls import (
    PeerNames,
    Tls,
    TlsError,
    TlsFiles,
    failure_text,
    peer_names,
    role_name,
    worker_name,
)

ROUTER = role_name("router")


class SetClock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def loaded(files, *names, **more):
    clock = SetClock()
    return Tls(files, names=names, clock=clock, **more), clock


def test_a_certificate_makes_a_context_with_http_alone_and_tls_1_2(authority):
    tls, _ = loaded(authority.issue("router", ROUTER), ROUTER)
    assert tls.server_context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.server_context.options & ssl.OP_NO_RENEGOTIATION
    assert tls.client_context.verify_mode == ssl.CERT_REQUIRED
    assert tls.is_mutual


def test_a_renewed_certificate_is_in_force_at_the_next_check(authority):
    tls, clock = loaded(authority.issue("router", ROUTER), ROUTER)
    before, until = tls.server_context, tls.expires_at
    authority.issue("router", ROUTER, valid=timedelta(days=90))
    assert tls.server_context is before
    clock.now = 1.0
    assert tls.server_context is not before
    assert tls.expires_at > until


def test_files_that_change_one_after_the_other_are_loaded_when_both_have(authority, tmp_path):
    files = authority.issue("router", ROUTER)
    tls, clock = loaded(files, ROUTER)
    before = tls.server_context
    other = Authority.issue(authority, "next", ROUTER)
    files.cert.write_bytes(other.cert.read_bytes())
    clock.now = 1.0
    assert tls.server_context is before
    assert not tls.is_current
    assert "is not the key of" in tls.trouble
    files.key.write_bytes(other.key.read_bytes())
    clock.now = 2.0
    assert tls.server_context is not before
    assert tls.is_current


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "found an empty file"),
        (b"hello", "found 5 bytes of something else"),
        (b"-----BEGIN CERTIFICATE-----\nMIIB\n", "expected a certificate and its key"),
        (None, "No such file or directory"),
    ],
)
def test_a_broken_file_leaves_the_last_certificate_in_force_and_is_named(authority, content, words):
    files = authority.issue("router", ROUTER)
    tls, clock = loaded(files, ROUTER)
    before, good = tls.server_context, files.cert.read_bytes()
    files.cert.unlink() if content is None else files.cert.write_bytes(content)
    clock.now = 1.0
    assert tls.server_context is before
    assert words in tls.trouble
    assert str(files.cert) in tls.trouble
    files.cert.write_bytes(good)
    clock.now = 2.0
    assert tls.is_current


def test_an_expired_certificate_is_refused_at_the_start_and_not_taken_at_a_change(authority):
    expired = authority.issue("old", ROUTER, valid=timedelta(seconds=-1))
    with pytest.raises(TlsError, match=r"old\.pem expired at .*: renew it"):
        Tls(expired)
    files = authority.issue("router", ROUTER)
    tls, clock = loaded(files)
    before = tls.server_context
    authority.issue("router", ROUTER, valid=timedelta(seconds=-1))
    clock.now = 1.0
    assert tls.server_context is before
    assert "expired" in tls.trouble


def test_a_certificate_without_the_services_names_is_refused_with_those_that_it_has(authority):
    files = authority.issue("router", "router.example")
    with pytest.raises(TlsError, match=rf"names router\.example; .* {ROUTER}"):
        Tls(files, names=[ROUTER])
    Tls(TlsFiles(cert=files.cert, key=files.key), names=[ROUTER])  # without an authority nobody asks for them


def test_a_certificate_for_all_workers_is_one_for_each(authority):
    shared = authority.issue("worker", role_name("worker"), worker_name("*"))
    Tls(shared, names=[role_name("worker"), worker_name("w0")])


def test_a_certificate_of_another_authority_is_refused_at_the_start(authority, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    files = authority.issue("router", ROUTER)
    with pytest.raises(TlsError, match=r"router\.pem is not accepted by tls_ca .*other"):
        Tls(TlsFiles(cert=files.cert, key=files.key, ca=other.ca))


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(authority):
    files = authority.issue("router", ROUTER)
    files.key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n")
    with pytest.raises(TlsError, match="has a passphrase"):
        Tls(files)


def test_a_name_is_checked_as_it_is_dialled_and_an_address_by_its_role(authority):
    files = authority.issue("router", ROUTER)
    tls = Tls(files, orchestrators=frozenset({("10.0.0.1", 8080)}))
    assert tls.server_name("agents.example", 8090) == "agents.example"
    assert tls.server_name("10.0.0.9", 8090) == role_name("worker")
    assert tls.server_name("10.0.0.1", 8080) == role_name("orchestrator")
    assert tls.server_name("10.0.0.2", 8080, "orchestrator") == role_name("orchestrator")
    assert Tls(TlsFiles(cert=files.cert, key=files.key)).server_name("10.0.0.9", 8090) == "10.0.0.9"


ids = st.text("ab.-_0AZ", min_size=1, max_size=5)


@given(ids, ids)
def test_a_workers_certificate_is_that_of_no_other_worker(one, other):
    names = PeerNames(frozenset({role_name("worker"), worker_name(one)}))
    assert names.is_worker(one)
    assert names.is_worker(other) == (one.lower() == other.lower())
    assert not names.has_role("router")


def test_only_verified_certificates_have_names():
    assert peer_names(None) is None
    assert peer_names({}) is None  # a certificate that was not asked for
    found = peer_names({"subjectAltName": (("DNS", "A.example"), ("IP Address", "10.0.0.1"))})
    assert found == PeerNames(frozenset({"a.example"}))


def test_an_error_without_tls_has_no_words_of_tls():
    assert failure_text(ConnectionRefusedError()) == ""
