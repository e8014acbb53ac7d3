"""The contract of all sources, each against a server on loopback."""

import asyncio
import contextlib
import functools
import gzip
import hashlib
import io
import logging
import math
import shutil
import tarfile
import zipfile
from pathlib import Path
from random import Random

import pytest

from tests.patience import within
from tests.serving import client_of
from tests.workers.source_servers import (
    SECRET,
    FaultyConnection,
    SourceAnswer,
    SourceServer,
    StubHub,
    azure,
    certificate,
    files_of,
    google,
    ranged,
)
from workers.core.addresses import parse_networks
from workers.core.errors import SourceError
from workers.core.retry import RetryPolicy
from workers.sources.base import Limits, Transfer, TransferCancelled
from workers.sources.guard import GuardedTransport
from workers.sources.hub import HubSource
from workers.sources.local import LocalSource
from workers.sources.objects import ObjectSource
from workers.sources.web import WebSource
from workers.verification.beside import MOST_TEXT_BYTES

MAX_BYTES = 40 << 20
PART_BYTES = 1 << 20
LOOPBACK = parse_networks(["127.0.0.0/8"])
ADAPTER = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": Random(5).randbytes(3 << 20)}
BESIDE = {"README.md": b"# hello", "checkpoint-1/adapter_model.safetensors": b"older"}
PICKLE = {"adapter_model.bin": b"pickled"}
MERGED = {"model-00001-of-00002.safetensors": b"1" * 1000, "model-00002-of-00002.safetensors": b"2" * 1000}


def limits(**changes) -> Limits:
    given = {"max_bytes": MAX_BYTES, "timeout_s": 5, "retry": RetryPolicy(attempts=3, base_s=0.01, max_s=0.02)}
    return Limits(**given | changes)


class SourceStore:
    """A store of adapters, reached through a faulty connection."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.connection = FaultyConnection()

    def deny(self) -> None:
        self.site.error_status = 403


class WebFiles(SourceStore):
    has_list = False

    @contextlib.asynccontextmanager
    async def open(self):
        self.files = {}
        self.site = SourceServer(files_of(self.files))
        server, self.client = certificate(self.tmp_path)
        netrc = self.tmp_path / "netrc"
        netrc.write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
        async with self.site.serving(server), self.connection.to(self.site.url) as self.url:
            yield self

    def source(self, **changes):
        transport = functools.partial(GuardedTransport, self.client, allowed=LOOPBACK)
        return WebSource(limits(**changes), transport=transport, netrc=self.tmp_path / "netrc")

    def put(self, name, files):
        self.files |= {f"{name}/{path}": data for path, data in files.items()}
        return f"{self.url}/{name}"


class WebTar(WebFiles):
    has_list = True

    def put(self, name, files):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for path, data in files.items():
                info = tarfile.TarInfo(f"adapter/{path}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        self.files[f"{name}.tar.gz"] = packed.getvalue()
        return f"{self.url}/{name}.tar.gz"


class WebZip(WebFiles):
    has_list = True

    def put(self, name, files):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.comment = b"made by hand"
            for path, data in files.items():
                archive.writestr(path, data)
        self.files[f"{name}.zip"] = packed.getvalue()
        return f"{self.url}/{name}.zip"


class HubStore(SourceStore):
    @contextlib.asynccontextmanager
    async def open(self):
        self.hub = StubHub()
        self.site = SourceServer(self.hub.respond)
        async with self.site.serving(), self.connection.to(self.site.url) as self.url:
            self.hub.url = self.url.replace("127.0.0.1", "localhost")  # another host: the token is not sent
            yield self

    def source(self, **changes):
        token = self.tmp_path / "token"
        token.write_text(f"{SECRET}\n")
        return HubSource(limits(**changes), endpoint=self.url, token_file=token)

    def put(self, name, files):
        self.hub.push(f"acme/{name}", "main", files)
        return f"hf://acme/{name}"


class ObjectStore(SourceStore):
    @contextlib.asynccontextmanager
    async def open(self):
        self.objects = {}
        self.site = SourceServer(self.dialect(self.objects))
        async with self.site.serving(), self.connection.to(self.site.url) as self.url:
            yield self

    def put(self, name, files):
        self.objects |= {f"bucket/team/{name}/{path}": data for path, data in files.items()}
        return f"{self.scheme}://bucket/team/{name}"

    def source(self, **changes):
        return ObjectSource(self.scheme, limits(**changes), options=self.options(), part_bytes=PART_BYTES)


class GoogleStore(ObjectStore):
    scheme, dialect = "gs", staticmethod(google)

    def options(self):
        return {"token": "anon", "endpoint_url": self.url, "project": "p"}


class AzureStore(ObjectStore):
    scheme, dialect = "az", staticmethod(azure)

    def options(self):
        key = "aHVudGVyMi1odW50ZXIy"  # base64 of the secret
        where = f"BlobEndpoint={self.url}/acme;"
        return {"connection_string": f"DefaultEndpointsProtocol=http;AccountName=acme;AccountKey={key};{where}"}


class S3Store(SourceStore):
    server = ""  # one server for all tests

    @contextlib.asynccontextmanager
    async def open(self):
        self.site = SourceServer(lambda request: None)
        async with client_of() as client:
            (await client.post(f"{self.server}/moto-api/reset")).raise_for_status()
        async with self.connection.to(self.server) as self.url, self.site.serving():
            yield self

    def files(self, url):
        import s3fs

        return s3fs.S3FileSystem(**self.options(url), skip_instance_cache=True)

    def options(self, url):
        return {"key": "me", "secret": SECRET, "endpoint_url": url}

    def put(self, name, files):
        store = self.files(self.url)
        store.mkdirs("bucket", exist_ok=True)
        for path, data in files.items():
            store.pipe_file(f"bucket/team/{name}/{path}", data)
        return f"s3://bucket/team/{name}"

    def deny(self):
        self.site.error_status = 403
        self.url = self.site.url

    def source(self, **changes):
        return ObjectSource("s3", limits(**changes), options=self.options(self.url), part_bytes=PART_BYTES)


class FolderStore(SourceStore):
    @contextlib.asynccontextmanager
    async def open(self):
        yield self

    def source(self, **changes):
        given = limits(**changes)
        return LocalSource([self.tmp_path], max_bytes=given.max_bytes, allow_pickle=given.allow_pickle)

    def put(self, name, files):
        for path, data in files.items():
            (self.tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tmp_path / name / path).write_bytes(data)
        return f"file://{self.tmp_path / name}"


SLOW_S3 = pytest.param(S3Store, marks=pytest.mark.slow)  # its client takes half a second per test
REMOTE = [WebFiles, WebTar, WebZip, HubStore, SLOW_S3, GoogleStore, AzureStore]


@pytest.fixture(scope="module")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
async def store(request, tmp_path):
    if request.param is S3Store:
        S3Store.server = request.getfixturevalue("s3_server")
    async with request.param(tmp_path).open() as opened:
        yield opened


every = pytest.mark.parametrize("store", [*REMOTE, FolderStore], indirect=True, ids=lambda cls: cls.__name__)
remote = pytest.mark.parametrize("store", REMOTE, indirect=True, ids=lambda cls: cls.__name__)


resuming = pytest.mark.parametrize(
    "store", [each for each in REMOTE if each is not HubStore], indirect=True, ids=lambda cls: cls.__name__
)


async def put(store, name, files):
    return await asyncio.to_thread(store.put, name, files)


async def fetched(store, ref, **changes) -> tuple[dict[str, bytes], Transfer]:
    into = store.tmp_path / "into"
    into.mkdir(exist_ok=True)
    reports = []
    transfer = Transfer(on_progress=reports.append, every_s=0)
    async with within(20):
        await store.source(**changes).fetch(ref, into, transfer)
    assert reports[-1] == transfer.progress
    return {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}, transfer


async def refusal(store, ref, **changes) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await fetched(store, ref, **changes)
    return caught.value


@every
async def test_only_the_adapters_files_are_fetched_byte_for_byte(store):
    found, transfer = await fetched(store, await put(store, "sql", ADAPTER | BESIDE))
    assert found == ADAPTER
    assert list((store.tmp_path / "into").iterdir()) == [store.tmp_path / "into" / name for name in found]
    done = transfer.progress
    assert done.done_bytes == (done.total_bytes or done.done_bytes) > 3 << 20


@every
async def test_weights_that_engines_do_not_read_are_left_out_and_named(store):
    found, transfer = await fetched(store, await put(store, "merged", ADAPTER | MERGED | PICKLE))
    assert found == ADAPTER
    if not isinstance(store, WebFiles) or store.has_list:
        assert [note.partition(" (")[0] for note in transfer.notes] == [
            "not served: adapter_model.bin",
            "not served: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
        ]


@every
async def test_trained_embeddings_beside_an_adapter_are_refused(store):
    refused = await refusal(store, await put(store, "tokens", ADAPTER | {"new_embeddings.safetensors": b"1" * 100}))
    assert refused.code == "adapter_file_unsupported"
    assert "new_embeddings.safetensors" in str(refused)


@every
async def test_of_a_tokenizer_beside_an_adapter_the_beginning_is_read_and_nothing_kept(store):
    text = b'{"added_tokens": [' + b" " * MOST_TEXT_BYTES + b"]}"
    found, transfer = await fetched(store, await put(store, "tok", ADAPTER | {"tokenizer.json": text}))
    assert found == ADAPTER
    assert transfer.texts == {"tokenizer.json": text[:MOST_TEXT_BYTES]}


@every
async def test_folder_without_an_adapters_config_is_not_found(store):
    ref = await put(store, "empty", {"README.md": b"", "model.safetensors": b"0" * 100})
    assert (await refusal(store, ref)).code == "source_not_found"


@remote
async def test_missing_adapter_is_not_found(store):
    ref = (await put(store, "sql", ADAPTER)).replace("sql", "nosuch")
    assert (await refusal(store, ref)).code == "source_not_found"


@every
async def test_too_large_adapter_is_not_fetched(store):
    ref = await put(store, "big", ADAPTER | {"adapter_model.safetensors": Random(6).randbytes(6 << 20)})
    store.connection.carried = 0
    error = await refusal(store, ref, max_bytes=1 << 20)
    assert (error.code, "are allowed" in str(error)) == ("source_too_big", True)
    assert store.connection.carried < 4 << 20


@every
@pytest.mark.parametrize("allow_pickle", [True, False])
async def test_pickled_weights_are_fetched_if_allowed_and_without_safetensors(store, allow_pickle):
    pickled = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    ref = await put(store, "pickled", pickled)  # moto's buckets survive their server
    if allow_pickle:
        assert (await fetched(store, ref, allow_pickle=True))[0] == pickled
    else:
        wanted = "source_not_found" if type(store) is WebFiles else "adapter_pickled"  # it lists the accepted names
        assert (await refusal(store, ref)).code == wanted


@every
async def test_too_large_config_is_refused(store):
    ref = await put(store, "big", ADAPTER | {"adapter_config.json": Random(6).randbytes(2 << 20)})
    assert (await refusal(store, ref)).code == "source_too_big"


@remote
async def test_broken_connection_is_resumed(store):
    ref = await put(store, "sql", ADAPTER)
    store.connection.cuts = [1 << 20]
    found, transfer = await fetched(store, ref)
    assert found == ADAPTER
    assert store.connection.cuts == []
    assert transfer.progress.done_bytes == transfer.progress.total_bytes or transfer.progress.total_bytes is None


@pytest.mark.parametrize("store", [WebFiles, SLOW_S3], indirect=True, ids=lambda cls: cls.__name__)
async def test_unanswering_source_fails_after_all_attempts(store):
    ref = await put(store, "sql", ADAPTER)
    store.connection.is_dead = True
    error = await refusal(store, ref)
    assert (error.code, "tried 3 times" in str(error), error.retry_after_s) == ("source_failed", True, 30)


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_silent_server_fails_after_the_timeout(store):
    ref = await put(store, "sql", ADAPTER)
    store.connection.stall_after = 1 << 20
    error = await refusal(store, ref, timeout_s=0.1)
    assert (error.code, "ReadTimeout" in str(error)) == ("source_failed", True)


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_partial_file_is_dropped_when_the_server_has_a_new_version(store):
    ref = await put(store, "sql", ADAPTER)
    newer = ADAPTER | {"adapter_model.safetensors": Random(9).randbytes(3 << 20)}
    store.connection.cuts = [2 << 20]
    task = asyncio.create_task(fetched(store, ref))
    while store.connection.cuts:
        await asyncio.sleep(0)
    store.put("sql", newer)
    found, _ = await task
    assert found == newer


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_only_missing_parts_are_requested_again(store):
    ref = await put(store, "sql", ADAPTER)
    store.connection.cuts = [2 << 20]
    await fetched(store, ref)
    assert store.site.requests[-1].headers["range"].startswith("bytes=1")


async def killed_half_way(store, ref: str, after: int, kept: int) -> None:
    """Leave the folder of a fetch that was killed after `after` bytes, with at least `kept` of them on disk."""
    into, found = store.tmp_path / "into", store.tmp_path / "found"
    store.connection.carried = 0
    store.connection.stall_at = after
    task = asyncio.create_task(fetched(store, ref, parts=1))
    async with within(15):
        await store.connection.stalled.wait()
        while sum(path.stat().st_size for path in into.rglob("*") if path.is_file()) < kept:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(shutil.copytree, into, found)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)
    found.rename(into)
    store.connection.stall_at, store.connection.carried = math.inf, 0


@resuming
async def test_later_fetch_resumes_a_killed_one(store):
    ref = await put(store, "sql", ADAPTER)
    await killed_half_way(store, ref, after=5 << 19, kept=2 << 20)
    found, transfer = await fetched(store, ref, parts=1)
    assert found == ADAPTER
    assert transfer.progress.done_bytes == (transfer.progress.total_bytes or transfer.progress.done_bytes)
    assert 0 < store.connection.carried < 5 << 19


@resuming
async def test_leftovers_of_another_version_are_not_resumed(store):
    ref = await put(store, "sql", ADAPTER)
    await killed_half_way(store, ref, after=2 << 20, kept=0)
    newer = ADAPTER | {"adapter_model.safetensors": Random(9).randbytes(3 << 20)}
    await put(store, "sql", newer)
    assert (await fetched(store, ref))[0] == newer


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
@pytest.mark.parametrize("first_byte", [0, 7, None], ids=["the start", "another byte", "no content-range"])
async def test_range_at_another_byte_than_requested_is_fetched_anew(store, first_byte):
    ref = await put(store, "sql", ADAPTER)
    await killed_half_way(store, ref, after=5 << 19, kept=2 << 20)
    honest, lies = store.site.respond, []

    def respond(request):
        answer = honest(request)
        if answer.status != 206 or lies:
            return answer
        lies.append(request)
        body = store.files[request.path.lstrip("/")]
        headers = {name: value for name, value in answer.headers.items() if name != "content-range"}
        if first_byte is not None:
            headers["content-range"] = f"bytes {first_byte}-{len(body) - 1}/{len(body)}"
        return SourceAnswer(206, body[first_byte or 0 :], headers)

    store.site.respond = respond
    assert (await fetched(store, ref, parts=1))[0] == ADAPTER
    assert lies


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_versions_are_not_mixed_where_a_server_ignores_if_range(store):
    ref = await put(store, "sql", ADAPTER)
    await killed_half_way(store, ref, after=5 << 19, kept=2 << 20)
    newer = ADAPTER | {"adapter_model.safetensors": Random(9).randbytes(3 << 20)}
    await put(store, "sql", newer)
    honest = store.site.respond

    def respond(request):
        request.headers.pop("if-range", None)
        return honest(request)

    store.site.respond = respond
    assert (await fetched(store, ref))[0] == newer
    assert any("range" in request.headers for request in store.site.requests)


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_ranges_shorter_than_requested_are_joined(store):
    ref = await put(store, "sql", ADAPTER)
    await killed_half_way(store, ref, after=2 << 20, kept=1 << 20)
    honest, most = store.site.respond, 300_000

    def respond(request):
        if start := request.headers.get("range", "").partition("=")[2].rstrip("-"):
            request.headers["range"] = f"bytes={start}-{int(start) + most - 1}"
        return honest(request)

    store.site.respond = respond
    found, transfer = await fetched(store, ref, parts=1)
    assert found == ADAPTER
    assert transfer.progress.done_bytes == transfer.progress.total_bytes


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_first_part_of_a_file_is_not_taken_for_the_whole(store):
    ref = await put(store, "sql", ADAPTER)

    def respond(request):
        body = store.files[request.path.lstrip("/")]
        return SourceAnswer(206, body[:5], {"content-range": f"bytes 0-4/{len(body)}"})

    store.site.respond = respond
    error = await refusal(store, ref)
    assert (error.code, "a part of the file" in str(error)) == ("source_failed", True)


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_file_that_is_sent_compressed_is_not_resumed(store):
    ref = await put(store, "sql", ADAPTER)
    packed = {f"sql/{name}": gzip.compress(data, 1) for name, data in ADAPTER.items()}

    def respond(request):
        return ranged(request, packed[request.path.lstrip("/")], {"content-encoding": "gzip"})

    store.site.respond = respond
    store.connection.cuts = [2 << 20]
    assert (await fetched(store, ref))[0] == ADAPTER
    assert store.connection.cuts == []


@pytest.mark.parametrize("store", [WebFiles, WebTar], indirect=True, ids=lambda cls: cls.__name__)
async def test_body_that_is_not_encoded_as_it_says_is_refused(store):
    ref = await put(store, "sql", ADAPTER)
    store.site.respond = lambda _: SourceAnswer(200, b"not gzip", {"content-encoding": "gzip"})
    error = await refusal(store, ref)
    assert (error.code, "Content-Encoding" in str(error)) == ("source_invalid", True)


@pytest.mark.parametrize("store", [WebFiles, WebTar], indirect=True, ids=lambda cls: cls.__name__)
async def test_complete_file_of_a_killed_fetch_is_not_fetched_again(store):
    ref = await put(store, "sql", ADAPTER)
    body = next(data for name, data in store.files.items() if not name.endswith(".json"))
    name = ".packed" if ref.endswith(".gz") else "adapter_model.safetensors"
    into = store.tmp_path / "into"
    into.mkdir()
    (into / name).write_bytes(body)
    (into / f".{name}.tag").write_text(f'"{hashlib.md5(body).hexdigest()}"')
    (into / ".0").mkdir()  # half unpacked
    (into / ".0" / name).write_bytes(b"half")
    store.connection.carried = 0
    assert (await fetched(store, ref))[0] == ADAPTER
    assert store.connection.carried < 1 << 19


@pytest.mark.parametrize("store", [HubStore], indirect=True)
async def test_branch_is_resolved_to_its_commit_before_the_fetch(store):
    ref = await put(store, "sql", ADAPTER)
    first = store.hub.branches["acme/sql", "main"]
    _, transfer = await fetched(store, ref)
    assert transfer.pinned == f"hf://acme/sql@{first}"
    store.hub.push("acme/sql", "main", ADAPTER | {"adapter_config.json": b"{}"})
    (store.tmp_path / "into").rename(store.tmp_path / "first")
    assert (await fetched(store, transfer.pinned))[0] == ADAPTER


@pytest.mark.parametrize("store", [HubStore], indirect=True)
async def test_hub_token_is_sent_only_to_the_hub(store):
    await fetched(store, await put(store, "sql", ADAPTER))
    requested = {request.path.split("/")[1]: request.headers.get("authorization") for request in store.site.requests}
    assert requested == {"api": f"Bearer {SECRET}", "acme": f"Bearer {SECRET}", "signed": None}


@pytest.mark.parametrize("store", [WebFiles], indirect=True)
async def test_netrc_passwords_are_sent_only_to_their_host(store):
    await fetched(store, await put(store, "sql", ADAPTER))
    assert all(request.headers["authorization"].startswith("Basic ") for request in store.site.requests)


@remote
async def test_cancelled_fetch_ends_at_once(store):
    ref = await put(store, "sql", ADAPTER)
    store.connection.stall_after = 1 << 20
    task = asyncio.create_task(fetched(store, ref))
    async with within(15):
        await store.connection.stalled.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("store", [WebFiles, HubStore, SLOW_S3], indirect=True, ids=lambda cls: cls.__name__)
async def test_error_messages_never_quote_the_server(store, caplog):
    caplog.set_level(logging.WARNING)
    ref = await put(store, "sql", ADAPTER)
    store.deny()
    store.site.error_status = 500
    error = await refusal(store, ref, retry=RetryPolicy(attempts=1))
    assert error.code == "source_failed"
    seen = [str(error), str(error.__cause__), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in seen if SECRET in text]


async def test_cancelled_transfer_ends_the_librarys_download():
    transfer = Transfer()
    transfer.advance(1)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.advance(1)


@remote
async def test_error_messages_never_contain_credentials(store, caplog):
    caplog.set_level(logging.WARNING)
    ref = await put(store, "sql", ADAPTER)
    store.deny()
    error = await refusal(store, ref)
    assert error.code == "source_unauthorized"
    assert ref.partition("://")[2] in str(error)
    seen = [str(error), repr(error.__cause__), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in seen if SECRET in text or "aHVudGVyMi1odW50ZXIy" in text]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["in place", "renamed over"])
async def test_folder_that_changes_during_the_copy_is_not_taken(tmp_path, is_replaced):
    store = FolderStore(tmp_path)
    ref = store.put("sql", ADAPTER)
    weights = tmp_path / "sql" / "adapter_model.safetensors"

    def save_next_step(_) -> None:
        target = weights.with_suffix(".new") if is_replaced else weights
        target.write_bytes(Random(9).randbytes(3 << 20))
        target.replace(weights)

    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(SourceError) as caught:
        await store.source().fetch(ref, into, Transfer(on_progress=save_next_step, every_s=0))
    assert (caught.value.code, caught.value.retry_after_s) == ("source_failed", 30)
    assert "changed while they were copied" in str(caught.value)


@pytest.mark.parametrize(
    ("ref", "code", "words"),
    [
        ("outputs/lora", "source_relative", "a folder of that name lies below one of this worker's `lora_roots`"),
        ("./outputs/lora", "source_relative", "a folder of that name lies below"),
        ("acme/known", "source_is_repository", "write hf://acme/known"),
        ("acme/unknown", "source_relative", "no folder of that name .* and on the hub: .*no such repository"),
        ("../outputs/lora", "source_relative", "no folder of that name"),
        ("~/outputs/lora", "source_relative", "a home folder of yours, .*; give the absolute path that workers see"),
        ("C:\\outputs\\lora", "source_relative", "a path of Windows"),
        ("outputs", "source_relative", "workers do not share your working folder"),
        ("a/b/c", "source_relative", "workers do not share your working folder"),
    ],
)
async def test_a_relative_path_is_refused_by_what_is_there(tmp_path, ref, code, words):
    (tmp_path / "shelf/outputs/lora").mkdir(parents=True)
    into = tmp_path / "into"
    into.mkdir()
    async with HubStore(tmp_path).open() as store:
        store.put("known", ADAPTER)
        hub = store.source()
        source = LocalSource([tmp_path / "shelf"], max_bytes=1 << 30, hub=hub)
        with pytest.raises(SourceError, match=words) as refused:
            await source.fetch(ref, into, Transfer())
        assert refused.value.code == code
        assert str(tmp_path) not in str(refused.value)
        if "/" in ref and code == "source_relative" and not ref.startswith(("~", "C:")):
            assert "absolute path" in str(refused.value)


async def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    source = LocalSource([tmp_path], max_bytes=1, hub=HubSource(limits(), endpoint="http://127.0.0.1:9"))
    with pytest.raises(SourceError, match="it cannot be reached from this worker") as refused:
        await source.fetch("outputs/lora", tmp_path, Transfer())
    assert refused.value.code == "source_relative"
    assert "a repository on the Hugging Face hub is written hf://outputs/lora" in str(refused.value)
