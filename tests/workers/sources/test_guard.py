"""Attacks by references, servers and archives."""

import functools
import gzip
import io
import ssl
import stat
import tarfile
import zipfile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.source_servers import SourceAnswer, SourceServer, certificate, files_of, ranged
from workers.core.addresses import is_allowed, parse_networks
from workers.core.errors import SourceError
from workers.core.references import bucket_and_folder, is_below, parse_hub_reference, parse_reference, redacted
from workers.core.retry import RetryPolicy
from workers.sources import archive
from workers.sources.base import Limits, Transfer, source_for
from workers.sources.guard import GuardedTransport
from workers.sources.local import LocalSource
from workers.sources.objects import ObjectSource
from workers.sources.web import WebSource

LIMITS = Limits(max_bytes=10 << 20, timeout_s=5, retry=RetryPolicy(attempts=2, base_s=0.01))
CONFIG = b'{"r": 8}'


def web(client: ssl.SSLContext, *allowed: str, resolve=None) -> WebSource:
    networks = parse_networks(allowed)
    transport = functools.partial(GuardedTransport, client, allowed=networks, resolve=resolve)
    return WebSource(LIMITS, transport=transport)


async def refusal(source, ref, into) -> SourceError:
    into.mkdir(exist_ok=True)
    with pytest.raises(SourceError) as caught:
        await source.fetch(ref, into, Transfer())
    return caught.value


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.20.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "0.0.0.0", "::1", "::",
     "fd00:ec2::254", "fe80::1%eth0", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "168.63.129.16",
     "fec0::1", "192.0.0.192", "224.0.0.1", "ff02::1", "240.0.0.1", "255.255.255.255"],
)  # fmt: skip
def test_non_public_address_is_refused(address):
    assert not is_allowed(address, ())


def test_public_addresses_and_allowed_networks_are_accepted():
    assert is_allowed("1.1.1.1", ())
    assert is_allowed("2606:4700::1111", ())
    assert is_allowed("10.1.2.3", parse_networks(["10.0.0.0/8"]))
    assert not is_allowed("11.1.2.3", parse_networks(["10.0.0.0/8"])) or is_allowed("11.1.2.3", ())


async def test_private_host_is_refused_before_a_connection(tmp_path):
    server, client = certificate(tmp_path)
    async with SourceServer(files_of({})).serving(server) as site:
        error = await refusal(web(client), f"{site.url}/adapter", tmp_path / "into")
        named = await refusal(web(client), site.url.replace("127.0.0.1", "localhost") + "/a", tmp_path / "into2")
    assert (error.code, named.code) == ("source_address_forbidden",) * 2
    assert site.requests == []


async def test_host_is_checked_by_the_address_of_its_connection(tmp_path):
    """A host that resolves to a public address first and to a private one later: it is resolved once."""
    server, client = certificate(tmp_path)
    answers = [["127.0.0.2"], ["10.0.0.1"]]

    async def resolve(host, port):
        return answers.pop(0)

    files = {"a/adapter_config.json": CONFIG, "a/adapter_model.safetensors": b"w"}
    async with SourceServer(files_of(files)).serving(server) as site:
        port = site.url.rpartition(":")[2]
        source = web(client, "127.0.0.1/32", resolve=resolve)
        assert (await refusal(source, f"https://adapters.test:{port}/a", tmp_path / "i")).code == (
            "source_address_forbidden"
        )
        answers[:] = [["127.0.0.1"], ["10.0.0.1"]]
        assert (await refusal(source, f"https://adapters.test:{port}/a", tmp_path / "j")).code == (
            "source_address_forbidden"
        )
    assert [request.headers["host"] for request in site.requests] == [f"adapters.test:{port}"]


async def test_certificate_must_be_for_the_requested_host(tmp_path):
    server, client = certificate(tmp_path)

    async def resolve(host, port):
        return ["127.0.0.1"]

    async with SourceServer(files_of({})).serving(server) as site:
        ref = f"https://elsewhere.test:{site.url.rpartition(':')[2]}/a"
        error = await refusal(web(client, "127.0.0.1/32", resolve=resolve), ref, tmp_path / "i")
        assert (error.code, "its certificate is not accepted" in str(error)) == ("source_failed", True)
    assert site.requests == []


@pytest.mark.parametrize(
    "target", ["https://127.0.0.2:{port}/x", "http://127.0.0.1:{port}/x", "https://169.254.169.254/latest"]
)
async def test_redirects_are_checked_like_the_first_address(tmp_path, target):
    server, client = certificate(tmp_path)
    site = SourceServer(
        lambda request: SourceAnswer(302, b"", {"location": target.format(port=site.url.rpartition(":")[2])})
    )
    async with site.serving(server):
        error = await refusal(web(client, "127.0.0.1/32"), f"{site.url}/a.zip", tmp_path / "into")
    assert error.code == "source_address_forbidden"
    assert len(site.requests) == 1


async def test_redirect_loop_is_refused(tmp_path):
    server, client = certificate(tmp_path)
    async with SourceServer(lambda request: SourceAnswer(302, b"", {"location": request.path})).serving(server) as site:
        error = await refusal(web(client, "127.0.0.1/32"), f"{site.url}/a.zip", tmp_path / "into")
    assert (error.code, len(site.requests)) == ("source_invalid", 6)


async def test_body_without_length_is_refused_beyond_the_limit(tmp_path):
    server, client = certificate(tmp_path)

    def respond(request):
        return (
            SourceAnswer(200, bytes(20 << 20), {"content-length": "9" * 30})
            if "model" in request.path
            else ranged(request, CONFIG)
        )

    async with SourceServer(respond).serving(server) as site:
        error = await refusal(web(client, "127.0.0.1/32"), f"{site.url}/a", tmp_path / "into")
    assert error.code in {"source_too_big", "source_failed"}
    assert sum(path.stat().st_size for path in (tmp_path / "into").iterdir()) <= 11 << 20


SECRETS = ["https://me:hunter2@host/a.zip", "https://host/a.zip?sig=hunter2", "s3://me:hunter2@bucket/a",
           "https://host/a#hunter2", "az://me:hunter2@box/a?hunter2",
           "https://[hunter2/a", "gopher://me:hunter2@h/"]  # fmt: skip


@pytest.mark.parametrize("ref", SECRETS)
def test_reference_with_a_secret_is_refused_without_showing_it(ref):
    sources = dict.fromkeys(("https", "s3", "az"))
    with pytest.raises(SourceError) as caught:
        source_for(ref, sources)
    assert caught.value.code in {"source_invalid", "source_unsupported"}
    assert "hunter2" not in str(caught.value) or "[hunter2" in ref


@given(st.text(max_size=60))
def test_redacted_reference_has_no_password_or_query(text):
    for ref in (f"https://me:hunter2{text}@host/a", f"https://host/a?{text}hunter2", f"s3://b/a#{text}hunter2"):
        if "/" not in text and "#" not in text and "?" not in text:
            assert "hunter2" not in redacted(ref)


@pytest.mark.parametrize(
    "ref",
    ["hf://org", "hf://org/repo@", "hf://org/../repo", "hf://org/repo@../x", "hf://org/repo@a b", "hf://o/r/../../x",
     "hf://org/re%2Fpo", "hf://me:pw@org/repo"],
)  # fmt: skip
def test_hub_reference_has_one_form(ref):
    with pytest.raises(SourceError, match="source"):
        parse_hub_reference(ref)


def test_hub_reference_is_parsed():
    assert parse_hub_reference("hf://org/repo").revision == "main"
    found = parse_hub_reference("hf://org/repo/sql/v1@refs/pr/1")
    assert (found.repo, found.folder, found.revision) == ("org/repo", "sql/v1", "refs/pr/1")
    assert found.at_commit("c" * 40) == "hf://org/repo/sql/v1@" + "c" * 40


@pytest.mark.parametrize("ref", ["s3://bucket", "s3://b/../c", "s3://bucket/a/%2e%2e/b", "s3://bucket/a*", "s3:///a"])
def test_object_reference_names_a_bucket_and_a_folder(ref):
    with pytest.raises(SourceError, match="source"):
        bucket_and_folder(ref)


def test_allowed_prefixes_end_at_a_slash():
    allowed = ("s3://bucket/team", "hf://acme", "hf://other/repo", "https://host/", "https://shared/team")
    assert is_below("s3://bucket/team/sql", allowed)
    assert is_below("s3://bucket/team/100%25..v1;a", allowed)
    assert is_below("hf://other/repo@v1", allowed)
    assert is_below("hf://acme/repo@main", allowed)
    assert is_below("https://host/a.zip", allowed)
    for ref in (
        "s3://bucket/team2/a",
        "s3://bucket/team/../b",
        "s3://bucket/team/%2e%2e/b",
        "s3://bucket/team@example.com/a",
        "hf://acme2/r",
        "https://host2/a",
        "https://shared/team@b/a",
        "https://shared/team/%252e%252e/b",
        "https://shared/team/..%5cb",
        "https://shared/team/..;/b",
        "https://shared/team/%25252e/b",
        "https://shared/team/%" + "25" * 1000 + "2e/b",
    ):
        assert not is_below(ref, allowed), ref
    with pytest.raises(SourceError, match="source_prefixes"):
        source_for("s3://other/a", {"s3": ObjectSource("s3", LIMITS)}, allowed)


async def test_unreadable_folder_is_not_reported_as_missing(tmp_path):
    source = LocalSource([tmp_path], max_bytes=10 << 20)
    for name, target in (("circle", "circle"), ("gone", "nowhere"), ("unknown", "x" * 300)):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("circle", "gone"):
        error = await refusal(source, f"file://{tmp_path / name}", tmp_path / "into")
        assert (error.code, name) == ("source_not_found", name)
    with pytest.raises(OSError, match="File name too long"):  # the cache reports it as an error that may be retried
        await source.fetch(f"file://{tmp_path / 'unknown'}", tmp_path / "into", Transfer())


async def test_missing_library_is_named_with_its_install_command(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = await refusal(ObjectSource("s3", LIMITS), "s3://bucket/a", tmp_path / "into")
    assert (error.code, "pip install 'lorafleet[s3]'" in str(error)) == ("source_extra_missing", True)


def tar(*members: tuple[str, object], mode="w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode, format=tarfile.PAX_FORMAT) as made:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                made.addfile(info)
    return packed.getvalue()


def zipped(*members: tuple[str, bytes, int]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            made.writestr(info, content)
    return packed.getvalue()


def many_headers(size_bytes: int, count: int) -> bytes:
    """One member with `count` extended headers of `size_bytes`."""
    member = tarfile.TarInfo("x" * size_bytes).tobuf(tarfile.PAX_FORMAT)
    header = member[: -tarfile.BLOCKSIZE]
    return gzip.compress(header * (count - 1) + member + bytes(2 * tarfile.BLOCKSIZE), 1)


def encrypted(packed: bytes) -> bytes:
    """The zip with the flag of a password in all its headers."""
    for start, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = packed.split(start)
        packed = start.join([parts[0], *(part[: at - 4] + b"\1\0" + part[at - 2 :] for part in parts[1:])])
    return packed


def of_method(packed: bytes, method: int) -> bytes:
    """The zip with another compression method in all its headers."""
    deflated, message = (zipfile.ZIP_DEFLATED.to_bytes(2, "little"), method.to_bytes(2, "little"))
    for start, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        parts = packed.split(start)
        assert all(part[at - 4 : at - 2] == deflated for part in parts[1:])
        packed = start.join([parts[0], *(part[: at - 4] + message + part[at - 2 :] for part in parts[1:])])
    return packed


GOOD = (("a/adapter_config.json", CONFIG), ("a/adapter_model.safetensors", b"weights"))
FILE, LINK = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
PLAIN = tuple((name, data, FILE) for name, data in GOOD)

ARCHIVES = {
    "link": ("a.tar.gz", lambda: tar(*GOOD, ("a/more.safetensors", (tarfile.SYMTYPE, "/etc/passwd"))), "source_unsafe"),
    "hard link": ("a.tar.gz", lambda: tar(*GOOD, ("a/x", (tarfile.LNKTYPE, "adapter_config.json"))), "source_unsafe"),
    "device": ("a.tar.gz", lambda: tar(*GOOD, ("a/null", (tarfile.CHRTYPE, ""))), "source_unsafe"),
    "fifo": ("a.tgz", lambda: tar(*GOOD, ("a/pipe", (tarfile.FIFOTYPE, ""))), "source_unsafe"),
    "parent": ("a.tar.gz", lambda: tar(*GOOD, ("a/../../x.safetensors", b"")), "source_unsafe"),
    "absolute": ("a.tar.gz", lambda: tar(("/tmp/adapter_config.json", CONFIG)), "source_unsafe"),
    "twice": ("a.tar.gz", lambda: tar(*GOOD, GOOD[0]), "source_unsafe"),
    "two adapters": ("a.tar.gz", lambda: tar(*GOOD, ("b/adapter_config.json", CONFIG)), "source_invalid"),
    "no adapter": ("a.tar.gz", lambda: tar(("README", b"")), "source_not_found"),
    "too many": ("a.tar.gz", lambda: tar(*((f"f{number}", b"") for number in range(1001))), "source_too_big"),
    "bomb": ("a.tar.gz", lambda: tar(*GOOD, ("zeros", bytes(101 << 20))), "source_too_big"),
    "header bomb": ("a.tar.gz", lambda: tar(("x" * (5 << 20), b"")), "source_invalid"),
    "header chain": ("a.tar.gz", lambda: many_headers(3 << 20, 3), "source_invalid"),
    "cut": ("a.tar.gz", lambda: tar(*GOOD, ("b.bin", Random(1).randbytes(200_000)))[:100_000], "source_invalid"),
    "not a tar": ("a.tar.gz", lambda: gzip.compress(b"hello" * 1000), "source_invalid"),
    "not a gzip": ("a.tar.gz", lambda: b"hello", "source_invalid"),
    "zip link": ("a.zip", lambda: zipped(*PLAIN, ("a/l.safetensors", b"/etc/passwd", LINK)), "source_unsafe"),
    "zip parent": ("a.zip", lambda: zipped(*PLAIN, ("../x.safetensors", b"", FILE)), "source_unsafe"),
    "zip windows": ("a.zip", lambda: zipped(*PLAIN, ("..\\x.safetensors", b"", FILE)), "source_unsafe"),
    "zip bomb": ("a.zip", lambda: zipped(*PLAIN, ("a/z.safetensors", bytes(200 << 20), FILE)), "source_too_big"),
    "zip ratio": ("a.zip", lambda: zipped(*PLAIN, ("a/z.safetensors", bytes(65 << 20), FILE)), "source_too_big"),
    "tar ratio": ("a.tgz", lambda: tar(*GOOD, ("a/optimizer.pt", bytes(65 << 20))), "source_too_big"),
    "zip encrypted": ("a.zip", lambda: encrypted(zipped(*PLAIN)), "source_invalid"),
    "zip deflate64": ("a.zip", lambda: of_method(zipped(*PLAIN), 9), "source_invalid"),
    "zip long path": ("a.zip", lambda: zipped(*PLAIN, ("d/" * 600 + "x", b"", FILE)), "source_unsafe"),
    "zip zstandard": ("a.zip", lambda: of_method(zipped(*PLAIN), 93), "source_invalid"),
    "not a zip": ("a.zip", lambda: b"hello" * 100, "source_invalid"),
    "tar link": ("a.tar", lambda: tar(*GOOD, ("a/l", (tarfile.SYMTYPE, "/etc/passwd")), mode="w"), "source_unsafe"),
    "tar bomb": ("a.tar", lambda: tar(*GOOD, ("zeros", bytes(101 << 20)), mode="w"), "source_too_big"),
    "tar cut": ("a.tar", lambda: tar(*GOOD, ("b.bin", bytes(200_000)), mode="w")[:100_000], "source_invalid"),
    "empty": ("a.tar", lambda: b"", "source_invalid"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "made", "code"), ARCHIVES.values(), ids=ARCHIVES)
def test_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path, name, made, code):
    (tmp_path / "into").mkdir()
    (tmp_path / "packed").write_bytes(made())
    with pytest.raises(SourceError) as caught:
        archive.unpack(tmp_path / "packed", tmp_path / "into", f"https://host/{name}", 100 << 20, Transfer())
    assert (caught.value.code, str(caught.value)[:6]) == (code, "source")
    assert {path.name for path in tmp_path.iterdir()} == {"into", "packed"}
    assert not [path for path in (tmp_path / "into").rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.zip"])
@pytest.mark.parametrize(
    "packed",
    [tar(*GOOD, mode="w"), tar(*GOOD), zipped(*PLAIN), tar(*GOOD, mode="w").rstrip(b"\0") + bytes(512)],
    ids=["tar", "gzip", "zip", "tar without its end"],
)
def test_an_archive_is_read_by_its_bytes_whatever_its_name(tmp_path, name, packed):
    (tmp_path / "into").mkdir()
    (tmp_path / "packed").write_bytes(packed)
    archive.unpack(tmp_path / "packed", tmp_path / "into", f"https://host/{name}", 10 << 20, Transfer())
    found = {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()}
    assert found == {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"weights"}


@pytest.mark.parametrize("folder", ["", "my adapter\\", "a\\b\\", "a/b/"])
def test_a_zip_that_windows_made_is_read_with_its_separators(tmp_path, folder):
    parts = [(folder, b"", 0)] if folder else []
    files = ((folder + "adapter_config.json", CONFIG, 0), (folder + "adapter_model.safetensors", b"weights", 0))
    (tmp_path / "into").mkdir()
    (tmp_path / "packed").write_bytes(zipped(*parts, *files))
    archive.unpack(tmp_path / "packed", tmp_path / "into", "https://host/a.zip", 10 << 20, Transfer())
    found = {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()}
    assert found == {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"weights"}


def test_a_small_archive_of_zeros_and_a_large_one_of_some_are_unpacked(tmp_path):
    """A trainer's first step has zeros in half of its weights; a whole adapter of zeros is harmless if it is small."""
    for number, weights in enumerate((bytes(60 << 20), Random(1).randbytes(1 << 20) + bytes(80 << 20))):
        into = tmp_path / f"into{number}"
        into.mkdir()
        packed = tmp_path / "packed"
        packed.write_bytes(tar(("adapter_config.json", CONFIG), ("adapter_model.safetensors", weights)))
        archive.unpack(packed, into, "https://host/a.tgz", 100 << 20, Transfer())
        assert (into / "adapter_model.safetensors").stat().st_size == len(weights)


def test_macos_files_in_an_archive_are_ignored(tmp_path):
    extra = (("a/._adapter_model.safetensors", b"x"), ("__MACOSX/a/._adapter_config.json", b"x"))
    (tmp_path / "into").mkdir()
    (tmp_path / "packed").write_bytes(tar(*GOOD, *extra))
    archive.unpack(tmp_path / "packed", tmp_path / "into", "https://host/a.tgz", 10 << 20, Transfer())
    assert {path.name for path in (tmp_path / "into").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_waits_between_attempts_double_up_to_a_limit_with_jitter():
    delays = [list(RetryPolicy(attempts=6, base_s=1, max_s=4).delays_s(Random(seed))) for seed in range(20)]
    assert all(0.5 * full <= delay <= full for row in delays for delay, full in zip(row, [1, 2, 4, 4, 4], strict=True))
    assert len({row[0] for row in delays}) == 20


def test_references_without_a_user_are_accepted():
    assert parse_reference("https://host:8443/a/b.zip").port == 8443


@pytest.mark.parametrize(
    ("ref", "code"),
    [("/etc", "source_forbidden"), ("folder", "source_relative"), ("file://host/x", "source_invalid"), ("", None)],
)
async def test_forbidden_folder_is_refused_before_it_exists(tmp_path, ref, code):
    source = LocalSource([tmp_path / "root"], max_bytes=1)
    if code is None:
        await source.check(str(tmp_path / "root" / "later"))
        return
    with pytest.raises(SourceError) as refused:
        await source.check(ref)
    assert refused.value.code == code
