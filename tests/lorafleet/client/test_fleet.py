"""The Python client: archives that are never written, broken uploads that go on, and the server's words in errors."""

import asyncio
import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorafleet.cli.context import FleetAddress
from lorafleet.client import AsyncFleet, Fleet, FleetError
from lorafleet.client.archive import AdapterArchive
from lorafleet.client.calls import Answer, Call, Pause, push, unload, wait_ready
from lorafleet.service.http import envelope
from tests.serving import serving, serving_in_thread
from workers.verification.manifest import FileEntry
from workers.verification.manifest import digest as digest_at_workers
from workers.verification.verify import read_file_entry

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def folder_with(path: Path, config: bytes = b"{}", weights: bytes = bytes(3000)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


def test_a_name_that_would_lead_to_another_path_is_refused():
    with pytest.raises(FleetError, match=r"\.\./keys: no name has"):
        next(wait_ready("../keys"))


@given(config=st.binary(max_size=1500), weights=st.binary(max_size=3000), start=st.floats(0, 1))
def test_an_archive_from_any_byte_on_is_the_end_of_the_tar_file_of_the_folder(config, weights, start):
    with tempfile.TemporaryDirectory() as name:
        folder = folder_with(Path(name), config, weights)
        archive = AdapterArchive(folder)
        whole = b"".join(archive.chunks(0))
        assert len(whole) == archive.size_bytes
        with tarfile.open(fileobj=io.BytesIO(whole)) as read:
            found = {member.name: read.extractfile(member).read() for member in read}
        assert found == {CONFIG: config, WEIGHTS: weights}
        begin = int(start * archive.size_bytes)
        assert b"".join(archive.chunks(begin)) == whole[begin:]
        entries: list[FileEntry] = [read_file_entry(folder / each) for each in (CONFIG, WEIGHTS)]
        assert archive.digest == digest_at_workers(entries)


def test_an_archive_names_what_lies_beside_and_has_the_beginning_of_texts_that_workers_compare(tmp_path):
    folder = folder_with(tmp_path / "a")
    plain = AdapterArchive(folder)
    (folder / "adapter_model.bin").write_bytes(bytes(5000))
    (folder / "README.md").write_text("hello")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "other").mkdir()
    (folder / "other" / "weights.bin").write_bytes(bytes(5000))
    archive = AdapterArchive(folder)
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive.chunks(0)))) as read:
        beside = {
            member.name: read.extractfile(member).read() for member in read if member.name not in {CONFIG, WEIGHTS}
        }
    assert beside == {"adapter_model.bin": b"", "chat_template.jinja": b"{{ x }}", "other/other": b""}
    assert archive.digest == plain.digest


def test_a_folder_with_trained_embeddings_beside_is_refused_before_a_byte_is_sent(tmp_path):
    folder = folder_with(tmp_path / "a")
    (folder / "new_embeddings.safetensors").write_bytes(b"1")
    with pytest.raises(FleetError, match="trained embeddings") as refused:
        AdapterArchive(folder)
    assert refused.value.code == "adapter_file_unsupported"


@pytest.mark.parametrize("kind", [Fleet, AsyncFleet])
async def test_an_answer_that_cannot_be_decoded_and_a_folder_that_goes_away_are_the_clients_error(tmp_path, kind):
    folder = folder_with(tmp_path / "a")

    async def garbled(request: Request) -> Response:
        return Response(b"no gzip", headers={"content-encoding": "gzip"})

    async def takes_all(request: Request) -> JSONResponse:
        (folder / WEIGHTS).unlink(missing_ok=True)
        return JSONResponse({"received_bytes": 0}, 202)

    async def error_of(app: Starlette, method: str, *args: object) -> FleetError:
        async with serving(app) as url:
            fleet = kind(url)
            call = getattr(fleet, method)
            ended = call(*args) if kind is AsyncFleet else asyncio.to_thread(call, *args)
            with pytest.raises(FleetError) as failed:
                await ended
            await fleet.close() if kind is AsyncFleet else fleet.close()
            return failed.value

    routes = [Route("/{path:path}", garbled, methods=["DELETE"]), Route("/{path:path}", takes_all, methods=["PUT"])]
    assert "does not answer" in str(await error_of(Starlette(routes=routes), "unload", "a/v1"))
    assert "while the folder was sent" in str(await error_of(Starlette(routes=routes), "push", "a/v1", folder))


@pytest.mark.parametrize(
    "answered", [{}, [], None, {"received_bytes": "all"}, {"received_bytes": -1}, {"received_bytes": 1 << 40}]
)
def test_an_answer_that_is_no_fleets_ends_an_upload_with_the_clients_error(tmp_path, answered):
    upload = push("a/v1", folder_with(tmp_path / "a"))
    next(upload)
    with pytest.raises(FleetError, match="is the URL right") as failed:
        upload.send(Answer(202, json=answered))
    assert failed.value.status == 202


def test_an_empty_name_is_refused_before_a_call(tmp_path):
    for operation in (push("", folder_with(tmp_path / "a")), unload("")):
        with pytest.raises(FleetError, match="expected a name") as refused:
            next(operation)
        assert refused.value.code == "invalid_name"


def test_tenants_that_are_one_text_are_refused_before_a_call(tmp_path):
    with pytest.raises(TypeError, match=r"expected a list of names, such as \['acme'\]"):
        next(push("a/v1", folder_with(tmp_path / "a"), tenants="acme"))


def test_a_folder_that_is_no_adapter_and_another_digest_are_refused_before_a_call(tmp_path):
    with pytest.raises(FleetError, match="expected an adapter's folder"):
        next(push("a/v1", tmp_path))
    with pytest.raises(FleetError, match="has digest") as other:
        next(push("a/v1", folder_with(tmp_path / "a"), digest="0" * 64))
    assert other.value.code == "digest_mismatch"


class UploadServer:
    """A fleet that takes uploads. `cuts`: bytes after which the next requests with a body break off."""

    def __init__(self, *cuts: int) -> None:
        self.cuts = list(cuts)
        self.received = b""
        self.total = 0
        self.bodies: list[int] = []
        self.refuse: list[tuple[int, str]] = []
        self.app = Starlette(routes=[Route("/v1/adapters/{name:path}", self.put, methods=["PUT"])])

    async def put(self, request: Request):
        if self.refuse:
            status, code = self.refuse.pop(0)
            return JSONResponse(envelope(status, code, f"because of {code}"), status)
        numbers, _, total = request.headers["content-range"].removeprefix("bytes ").partition("/")
        if numbers == "*":
            if not self.received:
                return JSONResponse(envelope(409, "upload_unknown", "nothing"), 409)
        else:
            start = int(numbers.partition("-")[0])
            assert start <= len(self.received)
            self.received = self.received[:start]
            self.bodies.append(start)
            cut = self.cuts.pop(0) if self.cuts else None
            async for chunk in request.stream():
                self.received += chunk if cut is None else chunk[: max(0, start + cut - len(self.received))]
                if cut is not None and len(self.received) >= start + cut:
                    raise ConnectionError("the line was cut")
        if len(self.received) < int(total):
            return JSONResponse({"received_bytes": len(self.received)}, 202)
        digest = request.query_params["digest"]
        item = {"lora_id": request.path_params["name"], "spec": {"digest": digest}, "kept_on": ["w0"]}
        return JSONResponse(item, 201)


@pytest.mark.parametrize("kind", [Fleet, AsyncFleet])
def test_a_broken_upload_goes_on_where_it_was(tmp_path, kind, monkeypatch):
    folder = folder_with(tmp_path / "a", weights=bytes(range(256)) * 20_000)
    server = UploadServer(2_000_000, 1_000_000)
    seen = []

    def report(progress):
        seen.append(progress.sent_bytes)

    with serving_in_thread(lambda: server.app) as url:
        if kind is Fleet:
            with Fleet(url) as fleet:
                pushed = fleet.push("sql/v1", folder, on_progress=report)
        else:

            async def run():
                async with AsyncFleet(url) as fleet:
                    return await fleet.push("sql/v1", folder, on_progress=report)

            pushed = asyncio.run(run())
    assert (pushed.lora_id, pushed.is_new, pushed.kept_on) == ("sql/v1", True, ("w0",))
    assert server.bodies == [0, 2_000_000, 3_000_000]
    archive = AdapterArchive(folder)
    assert server.received == b"".join(archive.chunks(0))
    assert (pushed.digest, seen[-1]) == (archive.digest, archive.size_bytes)


async def test_errors_have_the_servers_words_and_pass_where_a_retry_helps(tmp_path):
    folder = folder_with(tmp_path / "a")
    server = UploadServer()
    async with serving(server.app) as url, AsyncFleet(url, "lf-key") as fleet:
        server.refuse = [(403, "scope_missing")]
        with pytest.raises(FleetError) as refused:
            await fleet.push("sql/v1", folder)
        assert (refused.value.status, refused.value.code) == (403, "scope_missing")
        assert str(refused.value) == "because of scope_missing"
        server.refuse = [(503, "not_leading")]
        assert (await fleet.push("sql/v1", folder)).is_new
    with pytest.raises(FleetError, match="characters that no key has"):
        Fleet("http://127.0.0.1:1", "key\nx")


def drive(operation, *answers: Answer) -> tuple[list[Call | Pause], object]:
    """The steps of an operation that gets these answers to its calls, and its result or error."""
    given, steps, answer = iter(answers), [], None
    try:
        while True:
            step = next(operation) if answer is None else operation.send(answer)
            steps.append(step)
            answer = Answer(0) if isinstance(step, Pause) else next(given)
    except StopIteration as end:
        return steps, end.value
    except FleetError as exc:
        return steps, exc


def test_a_server_that_never_answers_is_given_up_after_growing_pauses(tmp_path):
    steps, error = drive(push("a/v1", folder_with(tmp_path / "a")), *[Answer(0, error="no route to it")] * 6)
    assert isinstance(error, FleetError)
    assert (str(error), error.status) == ("no route to it", None)
    pauses = [step.seconds for step in steps if isinstance(step, Pause)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0]


def test_a_retry_after_is_waited_for_and_progress_makes_attempts_count_anew(tmp_path):
    busy = Answer(503, {"retry-after": "9"}, envelope(503, "disk_full", "full"))
    broken = [each for received in range(20) for each in (Answer(202, json={"received_bytes": received}), busy)]
    done = Answer(201, json={"lora_id": "a/v1", "spec": {"digest": "d"}})
    steps, result = drive(push("a/v1", folder_with(tmp_path / "a")), *broken, done)
    assert result.lora_id == "a/v1"
    assert {step.seconds for step in steps if isinstance(step, Pause)} == {9.0}


def test_waiting_ends_with_the_workers_or_at_its_time():
    ready = Answer(200, json={"ready": ["w0", "w1"]})
    late = Answer(200, json={"ready": ["w0"]})
    steps, result = drive(wait_ready("a/v1", replicas=2, clock=lambda: 0.0), Answer(0, error="away"), late, ready)
    assert result == ("w0", "w1")
    assert [type(step) for step in steps] == [Call, Pause, Call, Pause, Call]
    now = iter([0.0, 0.0, 9.0])
    _, error = drive(wait_ready("a/v1", replicas=2, timeout_s=5, clock=lambda: next(now)), late)
    assert "ready on 1 of 2 workers after 5 s" in str(error)
    unknown = Answer(404, json=envelope(404, "adapter_not_found", "no such adapter"))
    _, error = drive(wait_ready("a/v1"), unknown)
    assert (str(error), error.code) == ("no such adapter", "adapter_not_found")


def test_the_command_line_pushes_without_a_proxy_of_the_environment(tmp_path, monkeypatch):
    async def has_all(request: Request) -> JSONResponse:
        return JSONResponse({"lora_id": "a/v1", "spec": {"digest": "0" * 64}}, 200)

    folder = folder_with(tmp_path / "a")
    app = Starlette(routes=[Route("/v1/adapters/{name:path}", has_all, methods=["PUT"])])
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving_in_thread(lambda: app) as url, FleetAddress(url, url, "").fleet() as fleet:
        assert fleet.push("a/v1", folder).lora_id == "a/v1"


async def test_an_answer_of_endless_nesting_is_the_clients_error():
    async def nested(request: Request) -> Response:
        return Response("[" * 100_000, media_type="application/json")

    async with serving(Starlette(routes=[Route("/{path:path}", nested, methods=["POST"])])) as url:
        async with AsyncFleet(url) as fleet:
            with pytest.raises(FleetError, match="is the URL right"):
                await fleet.wait_ready("a/v1")
        with Fleet(url) as fleet, pytest.raises(FleetError, match="is the URL right"):
            await asyncio.to_thread(fleet.wait_ready, "a/v1")
