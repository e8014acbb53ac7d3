"""What clients send, on one worker: received in pieces, resumed after a break, verified, or refused without trace."""

import asyncio
import contextlib
import errno
import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.identity import engine_name, fleet_source
from tests.patience import until
from tests.workers.running import code, metadata_of
from workers.core.errors import AgentRequestError, SourceError
from workers.sources.base import Limits, Transfer
from workers.storage.cache_folder import CacheFolder
from workers.storage.uploads import ARCHIVE, Uploads
from workers.wire import BeginFileRequest

UPLOAD = "a" * 24
LEADER = {"x-lorafleet-epoch": "1"}
FILES = ("adapter_config.json", "adapter_model.safetensors")


def packed(folder: Path, mode="w:gz") -> bytes:
    """The files of an adapter's folder as an archive."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=mode) as made:
        for name in FILES:
            made.add(folder / name, f"{folder.name}/{name}")
    return into.getvalue()


async def send(client, data: bytes, name=ARCHIVE, *, start=None):
    """Begin a file, unless it goes on at `start`, and send all of it."""
    if start is None:
        begun = await client.post(f"/v1/uploads/{UPLOAD}/{name}", json={"total_bytes": len(data)}, headers=LEADER)
        assert begun.is_success, begun.text
    return await client.put(
        f"/v1/uploads/{UPLOAD}/{name}", params={"start": start or 0}, content=data[start or 0 :], headers=LEADER
    )


async def install(client, lora_id="up/v1", **more):
    return await client.post(
        f"/v1/uploads/{UPLOAD}", json={"lora_id": lora_id, "source": "upload", **more}, headers=LEADER
    )


def leftovers(worker) -> list[str]:
    return [path.name for path in worker.cache_dir.glob(".partial-*")]


@pytest.mark.parametrize("form", ["tar", "gzip", "files"])
async def test_an_upload_is_verified_installed_and_loadable(worker, agent_adapters, form):
    folder = agent_adapters / "sql-expert/v1"
    async with worker.together() as client:
        if form == "files":
            for name in FILES:
                assert (await send(client, (folder / name).read_bytes(), name)).is_success
        else:
            assert (await send(client, packed(folder, "w" if form == "tar" else "w:gz"))).is_success
        found = (await install(client)).json()
        assert (found["source"], found["state"]) == (fleet_source(found["digest"]), "on_disk")
        again = (await install(client)).json()
        assert again == found
        state = (await client.get(f"/v1/uploads/{UPLOAD}")).json()
        assert state["digest"] == found["digest"]
        loaded = await client.post(
            "/v1/admin/load_lora", json={"lora_id": "up/v1", "digest": found["digest"]}, headers=LEADER
        )
        assert loaded.json()["engine_name"] == engine_name("up/v1", found["digest"])
        assert (await client.delete(f"/v1/uploads/{UPLOAD}", headers=LEADER)).status_code == 204
        assert code(await client.get(f"/v1/uploads/{UPLOAD}")) == "upload_unknown"
    assert leftovers(worker) == []


async def test_a_broken_upload_goes_on_where_it_was_after_a_restart_of_the_agent(worker, agent_adapters):
    whole = packed(agent_adapters / "sql-expert/v1")
    cut = len(whole) // 2

    async def broken():
        yield whole[:cut]
        await until(lambda: any(path.stat().st_size for path in worker.cache_dir.glob(".partial-*/.packed")))
        raise ConnectionError("the client is gone")

    async with worker.together() as client:
        await client.post(f"/v1/uploads/{UPLOAD}/{ARCHIVE}", json={"total_bytes": len(whole)}, headers=LEADER)
        with contextlib.suppress(ConnectionError):
            await client.put(f"/v1/uploads/{UPLOAD}/{ARCHIVE}", content=broken(), headers=LEADER)
    async with worker.together() as client:
        (file,) = (await client.get(f"/v1/uploads/{UPLOAD}")).json()["files"]
        assert (file["total_bytes"], 0 < file["received_bytes"] <= cut) == (len(whole), True)
        assert code(await install(client)) == "upload_incomplete"
        assert code(await send(client, whole, start=file["received_bytes"] + 1)) == "upload_offset"
        assert (await send(client, whole, start=file["received_bytes"])).is_success
        assert (await install(client)).is_success


async def test_bytes_that_are_refused_leave_nothing(worker, agent_adapters):
    whole = packed(agent_adapters / "sql-expert/v1")
    async with worker.together() as client:
        await send(client, whole)
        refused = await install(client, digest="0" * 64)
        assert (refused.status_code, code(refused)) == (409, "digest_mismatch")
        await send(client, b"no archive at all")
        assert code(await install(client)) == "source_invalid"
        await send(client, packed(agent_adapters / "sql-expert/v1", "w")[:1500])
        assert code(await install(client)) in {"source_invalid", "source_not_found"}
        assert (await metadata_of(client)).lora.available_count == 4  # those in lora_path
        assert leftovers(worker) == []


async def test_an_upload_for_another_base_model_is_kept_for_a_request_that_names_ours(worker, agent_adapters):
    async with worker.together() as client:
        await send(client, packed(agent_adapters / "sql-expert/v1"))
        assert code(await install(client, base_model="another/model")) == "base_model_mismatch"
        assert (await install(client, base_model="tiny-qwen")).is_success


async def test_files_that_are_no_part_of_an_adapter_and_too_many_bytes_are_refused(worker):
    async with worker.together("--max-adapter-bytes", "5000000") as client:
        path = f"/v1/uploads/{UPLOAD}"
        for name in ("adapter_model.bin", "..%2F..%2Fetc", ".packed", "x"):
            refused = await client.post(f"{path}/{name}", json={}, headers=LEADER)
            assert (refused.status_code, code(refused)) in {(400, "upload_file_unknown"), (404, "not_found")}
        refused = await client.post(f"{path}/{ARCHIVE}", json={"total_bytes": 7_000_000}, headers=LEADER)
        assert (refused.status_code, code(refused)) == (413, "source_too_big")
        await client.post(f"{path}/{ARCHIVE}", json={}, headers=LEADER)
        refused = await client.put(f"{path}/{ARCHIVE}", content=bytes(7_000_000), headers=LEADER)
        assert (refused.status_code, code(refused)) == (413, "source_too_big")
        await client.post(f"{path}/{ARCHIVE}", json={"total_bytes": 5}, headers=LEADER)
        assert code(await client.put(f"{path}/{ARCHIVE}", content=b"123456", headers=LEADER)) == "upload_offset"
        assert (await client.post("/v1/uploads/zz/archive", json={}, headers=LEADER)).status_code == 400


async def test_a_replaced_leader_sends_nothing_any_more(worker):
    async with worker.together() as client:
        await client.post(f"/v1/uploads/{UPLOAD}/{ARCHIVE}", json={}, headers={"x-lorafleet-epoch": "2"})
        for method, path, more in (
            ("POST", "/archive", {}), ("PUT", "/archive", {}), ("POST", "", {"source": "upload"}), ("DELETE", "", {}),
        ):  # fmt: skip
            body = {"lora_id": "a"} | more
            stale = await client.request(method, f"/v1/uploads/{UPLOAD}{path}", json=body, headers=LEADER)
            assert code(stale) == "stale_epoch"


# --- the store by itself ---------------------------------------------------------------------------------------------


def uploads_in(folder: Path, **limits) -> Uploads:
    return Uploads(CacheFolder(folder, agent_id="me", grace_s=0, lease_s=60), Limits(max_bytes=1 << 20, **limits))


async def in_pieces(*pieces: bytes):
    for piece in pieces:
        yield piece


async def test_the_newest_connection_takes_a_file_over_from_one_that_is_silent(tmp_path):
    uploads, silent = uploads_in(tmp_path), asyncio.Event()

    async def hangs():
        yield b"abc"
        silent.set()
        await asyncio.Event().wait()

    await uploads.begin(UPLOAD, ARCHIVE, begin(6))
    old = asyncio.create_task(uploads.receive(UPLOAD, ARCHIVE, 0, hangs()))
    await silent.wait()
    state = await uploads.receive(UPLOAD, ARCHIVE, 3, in_pieces(b"def"))
    assert [file.received_bytes for file in state.files] == [6]
    with pytest.raises(AgentRequestError) as ended:
        await old
    assert ended.value.code == "upload_superseded"
    assert next(tmp_path.glob(".partial-*/.packed")).read_bytes() == b"abcdef"


async def test_an_upload_that_goes_on_after_its_installation_leaves_the_installed_files_alone(tmp_path):
    uploads, installed = uploads_in(tmp_path / "cache"), tmp_path / "installed"
    installed.mkdir()
    for name, data in zip(FILES, (b"{}", b"weights"), strict=True):
        await uploads.begin(UPLOAD, name, begin(len(data)))
        await uploads.receive(UPLOAD, name, 0, in_pieces(data))
    await uploads.unpack(UPLOAD, "upload", installed, Transfer())
    (installed / FILES[1]).chmod(0o444)  # as the cache does; then the agent is killed, and the client sends again
    assert (await uploads.receive(UPLOAD, FILES[1], 7, in_pieces())).files[1].received_bytes == 7
    await uploads.receive(UPLOAD, FILES[1], 2, in_pieces(b"other"))
    assert (installed / FILES[1]).read_bytes() == b"weights"
    again = tmp_path / "again"
    again.mkdir()
    await uploads.unpack(UPLOAD, "upload", again, Transfer())
    assert (again / FILES[1]).read_bytes() == b"weother"


async def test_files_that_are_begun_at_the_same_time_are_all_known(tmp_path):
    uploads = uploads_in(tmp_path)
    for number in range(100):
        upload = f"{number:024x}"
        await asyncio.gather(*(uploads.begin(upload, name, begin(5)) for name in FILES))
        assert {file.name for file in (await uploads.state(upload)).files} == set(FILES)


async def test_a_connection_that_leaves_while_it_waits_for_a_file_changes_nothing_for_the_others(tmp_path):
    uploads, begun, may_end = uploads_in(tmp_path), asyncio.Event(), asyncio.Event()

    async def ends_slowly():
        yield b"abc"
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    await uploads.begin(UPLOAD, ARCHIVE, begin(6))
    first = asyncio.create_task(uploads.receive(UPLOAD, ARCHIVE, 0, ends_slowly()))
    await begun.wait()
    second = asyncio.create_task(uploads.receive(UPLOAD, ARCHIVE, 0, in_pieces(b"second")))
    await until(first.cancelling)
    second.cancel()
    await asyncio.wait({second})
    may_end.set()
    with pytest.raises(AgentRequestError) as ended:
        await first
    assert ended.value.code == "upload_superseded"
    await uploads.receive(UPLOAD, ARCHIVE, 0, in_pieces(b"third."))
    assert next(tmp_path.glob(".partial-*/.packed")).read_bytes() == b"third."


async def test_a_full_disk_refuses_a_file_before_it_is_sent_and_keeps_what_came_before(tmp_path, monkeypatch):
    uploads = uploads_in(tmp_path)
    monkeypatch.setattr(CacheFolder, "free_bytes", lambda _: 1000)
    with pytest.raises(SourceError) as refused:
        await uploads.begin(UPLOAD, ARCHIVE, begin(501))  # as much again is needed to unpack it
    assert (refused.value.code, "1000 bytes are free" in str(refused.value)) == ("disk_full", True)
    await uploads.begin(UPLOAD, ARCHIVE, begin(500))

    async def filling():
        yield b"abc"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        await uploads.receive(UPLOAD, ARCHIVE, 0, filling())
    assert (await uploads.state(UPLOAD)).files[0].received_bytes == 3


@given(
    whole=st.binary(min_size=1, max_size=400),
    attempts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200), st.integers(1, 60)), max_size=6),
)
def test_pieces_from_any_connections_are_joined_to_the_bytes_that_were_sent(whole, attempts):
    async def run(folder):
        uploads = uploads_in(folder)
        await uploads.begin(UPLOAD, ARCHIVE, begin(len(whole)))
        for back, sent, piece in attempts:
            received = (await uploads.state(UPLOAD)).files[0].received_bytes
            start = max(0, received - back)
            data = whole[start : start + sent]
            pieces = [data[at : at + piece] for at in range(0, len(data), piece)]

            async def broken(pieces=pieces):
                for each in pieces:
                    yield each
                raise ConnectionError

            with pytest.raises(ConnectionError):
                await uploads.receive(UPLOAD, ARCHIVE, start, broken())
            assert next(folder.glob(".partial-*/.packed")).read_bytes() == whole[: start + len(data)]
        received = (await uploads.state(UPLOAD)).files[0].received_bytes
        state = await uploads.receive(UPLOAD, ARCHIVE, received, in_pieces(whole[received:]))
        assert state.files[0].received_bytes == len(whole)
        assert next(folder.glob(".partial-*/.packed")).read_bytes() == whole

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


@given(data=st.data())
def test_a_damaged_archive_is_refused_or_gives_the_very_files(data):
    """One byte changed, or the end cut off, at any place: never other files, never a traceback, nothing outside."""
    members = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": bytes(range(256)) * 4}
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=data.draw(st.sampled_from(["w", "w:gz"]))) as made:
        for name, content in members.items():
            info = tarfile.TarInfo(f"a/{name}")
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    whole = bytearray(into.getvalue())
    if data.draw(st.booleans()):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]

    async def run(folder):
        uploads = uploads_in(folder / "cache")
        await uploads.begin(UPLOAD, ARCHIVE, begin(len(whole)))
        await uploads.receive(UPLOAD, ARCHIVE, 0, in_pieces(bytes(whole)))
        (folder / "into").mkdir()
        with contextlib.suppress(SourceError):
            await uploads.source(UPLOAD).fetch("upload", folder / "into", Transfer())
            found = {path.name: path.read_bytes() for path in (folder / "into").iterdir()}
            assert found.keys() == members.keys()
            # A tar file has no checksum of its members' bytes; the adapter's digest is that.
            assert all(len(found[name]) == len(members[name]) for name in members)
        assert {path.name for path in folder.iterdir()} == {"cache", "into"}

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def begin(total_bytes: int | None, **more) -> BeginFileRequest:
    return BeginFileRequest(total_bytes=total_bytes, **more)


async def test_room_is_kept_for_announced_uploads_until_they_end(tmp_path, monkeypatch):
    folder = CacheFolder(tmp_path, agent_id="w0", grace_s=0, lease_s=60)
    monkeypatch.setattr(folder, "free_bytes", lambda: 10_000)
    uploads = Uploads(folder, Limits(max_bytes=1 << 20))
    names = [number * 24 for number in "abcd"]
    await uploads.begin(names[0], ARCHIVE, begin(3000, lora_id="one", tenant="acme"))
    await uploads.begin(names[1], FILES[1], begin(3000))
    with pytest.raises(SourceError, match="needs 1001 bytes, and 9000 are kept for others") as refused:
        await uploads.begin(names[2], FILES[1], begin(1001))
    assert refused.value.code == "disk_full"
    listed = {
        upload.upload_id: (upload.lora_id, upload.tenant, upload.size_bytes) for upload in await uploads.unfinished()
    }
    assert listed == {names[0]: ("one", "acme", 3000), names[1]: ("", "", 3000)}
    # What has come is on the disk already, and counts there.
    await uploads.receive(names[1], FILES[1], 0, chunks_of(bytes(2000)))
    await uploads.begin(names[2], FILES[1], begin(1001))
    # An upload that is begun anew, dropped or installed gives its room back.
    await uploads.begin(names[0], ARCHIVE, begin(1000))
    await uploads.begin(names[3], FILES[1], begin(4000))
    await uploads.drop(names[3])
    await uploads.finish(names[0], "0" * 64)
    await uploads.begin(names[3], ARCHIVE, begin(3900))
    assert {upload.upload_id for upload in await uploads.unfinished()} == set(names[1:])


async def chunks_of(*chunks: bytes):
    for chunk in chunks:
        yield chunk
