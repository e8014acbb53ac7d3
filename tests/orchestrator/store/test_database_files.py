"""The store's file deleted, replaced, moved or full under a running orchestrator: nothing that was answered is lost."""

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lorafleet.service import state_files
from lorafleet.service.state_files import StateFile
from orchestrator.core.errors import StoreError
from orchestrator.core.traffic import GRAINS, SeriesSums, TrafficSlice
from orchestrator.intent.record_file import RecordFile
from orchestrator.model.usage import RequestCounts
from orchestrator.store import sqlite
from orchestrator.store.store import IntentStore
from orchestrator.traffic.file import TrafficFile
from tests.orchestrator.test_processes import OrchestratorProcess, nothing_is_left  # noqa: F401  (a fixture)
from tests.patience import until
from tests.registered import registered

BESIDE = ("", "-wal", "-shm")


def adapter(name):
    return registered(name, source=f"file:///{name}")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "store.db"


@pytest.fixture
def store(path):
    it = IntentStore(path)
    it.put_adapter(adapter("before"))
    yield it
    it.close()


def stored_at(path):
    """The adapters that the next start would find."""
    with closing(IntentStore(path)) as it:
        return set(it.adapters)


def unlink(path, *suffixes):
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@pytest.mark.parametrize("gone", [BESIDE, ("",), ("-wal",), ("-wal", "-shm")], ids=str)
def test_a_deleted_file_is_written_again_with_all_that_it_held_and_what_comes_after(store, path, gone):
    unlink(path, *gone)
    store.put_adapter(adapter("after"))
    assert store.trouble == ""
    assert "deleted" in store.check()
    assert store.check() == ""
    assert stored_at(path) == {"before", "after"}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert [entry.name for entry in path.parent.glob(".*")] == []


def test_a_file_deleted_while_nothing_is_written_is_there_again_after_one_look(store, path):
    unlink(path, *BESIDE)
    assert "written again" in store.check()
    assert stored_at(path) == {"before"}


def put_another(path, name="another"):
    unlink(path, *BESIDE)
    with closing(IntentStore(path)) as other:
        other.put_adapter(adapter(name))


def test_a_file_that_somebody_put_in_its_place_stays_and_changes_are_refused(store, path):
    put_another(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"another file is in its place.*lorafleet backup FILE") as refusal:
            store.put_adapter(adapter("after"))
        assert (refusal.value.status, refusal.value.code) == (503, "store_unusable")
    assert store.check() == ""
    assert store.trouble == str(refusal.value)
    assert set(store.adapters) == {"before"}
    assert stored_at(path) == {"another"}


def test_a_file_that_was_put_in_place_alone_is_not_mixed_with_the_open_one(store, path, tmp_path):
    put_another(tmp_path / "restored.db")
    (tmp_path / "restored.db").rename(path)
    store.check()
    assert stored_at(path) == {"another"}
    store.backup(tmp_path / "saved.db")
    assert stored_at(tmp_path / "saved.db") == {"before"}


def test_a_file_that_was_moved_away_and_back_goes_on(store, path, tmp_path):
    path.rename(tmp_path / "away.db")
    (tmp_path / "other").write_text("x")
    (tmp_path / "other").rename(path)
    store.check()
    assert "another file" in store.trouble
    (tmp_path / "away.db").rename(path)
    store.put_adapter(adapter("after"))
    assert store.trouble == ""
    assert stored_at(path) == {"before", "after"}


def test_what_a_lost_store_holds_is_saved_by_a_backup(store, path, tmp_path):
    put_another(path)
    store.check()
    store.backup(tmp_path / "saved.db")
    assert stored_at(tmp_path / "saved.db") == {"before"}


def test_the_file_is_never_written_over_one_that_comes_meanwhile(store, path, monkeypatch):
    unlink(path, *BESIDE)
    link = os.link

    def link_late(*args):
        put_another(path)
        link(*args)

    monkeypatch.setattr(os, "link", link_late)
    with pytest.raises(StoreError, match="could not be opened or written again"):
        store.put_adapter(adapter("after"))
    assert stored_at(path) == {"another"}


def test_a_moved_folder_refuses_changes_until_it_is_back(store, path):
    moved = path.parent.rename(path.parent.with_name("moved"))
    with pytest.raises(StoreError, match=r"its folder was moved.*it goes on"):
        store.put_adapter(adapter("lost"))
    path.parent.mkdir()  # an empty mount point: what is written there would be hidden by the volume
    with pytest.raises(StoreError, match="its volume went away"):
        store.put_adapter(adapter("lost"))
    assert list(path.parent.iterdir()) == []
    path.parent.rmdir()
    moved.rename(path.parent)
    store.check()
    assert store.trouble == ""
    store.put_adapter(adapter("after"))
    assert stored_at(path) == {"before", "after"}


def fail_with(number):
    def stat(self, **_):
        raise OSError(number, os.strerror(number), str(self))

    return stat


@pytest.mark.parametrize("number", [5, 116], ids=["EIO", "ESTALE"])
def test_a_volume_that_fails_refuses_changes_until_it_is_back(store, path, monkeypatch, number):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fail_with(number))
        with pytest.raises(StoreError, match="disk or volume fails"):
            store.put_adapter(adapter("lost"))
    store.put_adapter(adapter("after"))
    assert set(store.adapters) == {"before", "after"}


def test_a_read_only_file_system_refuses_changes_before_one_is_tried(store, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sqlite, "is_read_only", lambda _folder: True)
        store.check()
        assert "read-only: mount it writable" in store.trouble
        with pytest.raises(StoreError, match="read-only"):
            store.put_adapter(adapter("lost"))
    store.check()
    assert store.trouble == ""


def test_a_full_disk_is_seen_by_a_write_and_over_once_there_is_room(tmp_path, monkeypatch):
    connect, opened = sqlite3.connect, []
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *args, **named: opened.append(connect(*args, **named)) or opened[-1])
        store = IntentStore(tmp_path / "s.db")
    opened[0].execute("PRAGMA max_page_count = 1")  # no more than there are
    with pytest.raises(StoreError, match="no space left"):
        store.put_adapter(registered("a", source="x" * 100_000))
    assert "no space left" in store.trouble
    opened[0].execute("PRAGMA max_page_count = 1000000")
    store.check()
    assert store.trouble == ""
    store.close()


async def test_a_standby_opens_what_the_leader_wrote_again_and_can_lead_on_it(store, path):
    standby = IntentStore(path)
    unlink(path, *BESIDE)
    assert standby.check() == ""
    assert "deleted" in standby.trouble  # the leader's part
    store.put_adapter(adapter("after"))
    standby.check()
    assert standby.trouble == ""
    store.end_term()
    await standby.catch_up()
    standby.reload()
    standby.put_adapter(adapter("next"))
    standby.close()
    assert stored_at(path) == {"before", "after", "next"}


async def test_a_process_that_takes_over_writes_a_deleted_file_again(store, path):
    standby = IntentStore(path)
    unlink(path, *BESIDE)
    standby.check()
    assert "deleted" in standby.trouble
    await standby.catch_up()
    assert stored_at(path) == {"before"}
    standby.close()


async def test_nobody_leads_on_a_store_that_takes_no_changes(store, path):
    put_another(path)
    with pytest.raises(StoreError, match="another file is in its place"):
        await store.catch_up()


def test_history_goes_on_in_a_lost_file_where_people_still_read_it(store, path):
    put_another(path)
    store.record("store_lost", "")
    assert [entry.kind for entry in store.history(limit=10)] == ["store_lost"]


async def test_a_lost_store_shows_in_ready_history_and_metrics(open_service, path):
    service = open_service(path)
    await service.register("a/v1")
    put_another(path)

    async def look():
        service.reconciler.incidents.look_at_store(service.store.check())
        return await service.http.get("/ready"), (await service.http.get("/metrics")).text

    ready, metrics = await look()
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "store_unusable")
    assert "lorafleet backup FILE" in ready.json()["error"]["message"]
    assert 'lorafleet_orchestrator_state_file_lost{file="store"} 1.0' in metrics
    refused = await service.http.post("/v1/adapters", json={"lora_id": "b/v1", "source": "file:///b/v1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unusable")
    assert int(refused.headers["retry-after"]) >= 1
    kinds = [item["kind"] for item in (await service.http.get("/v1/history")).json()["data"]]
    assert kinds.count("store_lost") == 1
    assert {item["lora_id"] for item in (await service.http.get("/v1/export")).json()["adapters"]} == {"a/v1"}


async def test_a_store_that_takes_changes_again_is_ready_again_and_the_time_is_in_the_history(open_service, path):
    service = open_service(path)
    moved = path.parent.rename(path.parent.with_name("moved"))
    service.reconciler.incidents.look_at_store(service.store.check())
    moved.rename(path.parent)
    service.clock.now += 40
    service.reconciler.incidents.look_at_store(service.store.check())
    assert (await service.http.get("/ready")).status_code == 200
    back, lost = (await service.http.get("/v1/history")).json()["data"][:2]
    assert (back["kind"], back["body"]["seconds"]) == ("store_back", 40.0)
    assert lost["kind"] == "store_lost"


# -- the files that are derived from it ------------------------------------------------------------------------


async def test_a_record_that_was_deleted_or_replaced_is_written_again(store, tmp_path):
    record = RecordFile(tmp_path / "record.json", store)
    assert await record.write_if_changed()
    assert not await record.write_if_changed()
    written = (tmp_path / "record.json").read_bytes()
    (tmp_path / "record.json").unlink()
    assert await record.write_if_changed()
    (tmp_path / "other").write_text("{}")
    (tmp_path / "other").rename(tmp_path / "record.json")
    assert await record.write_if_changed()
    assert (tmp_path / "record.json").read_bytes() == written


async def test_a_record_that_cannot_be_written_says_why(store, tmp_path):
    (tmp_path / "there").mkdir()
    record = RecordFile(tmp_path / "there" / "record.json", store)
    shutil.rmtree(tmp_path / "there")
    with pytest.raises(FileNotFoundError):
        await record.write_if_changed()
    assert "No such file" in record.trouble
    (tmp_path / "there").mkdir()
    assert await record.write_if_changed()
    assert record.trouble == ""


def slice_of(requests):
    return TrafficSlice({("fleet", ""): SeriesSums(RequestCounts(requests=requests))}, {})


def requests_at(path, grain):
    again = TrafficFile(path, most_bytes=2**30)
    try:
        return {at: sums.counts.requests for at, sums in again.read(grain, "fleet", "", 0).items()}
    finally:
        again.close()


@pytest.mark.parametrize("gone", [BESIDE, ("",), ("-wal", "-shm")], ids=str)
def test_past_traffic_is_written_again_after_its_file_was_deleted(path, gone):
    file, grain = TrafficFile(path, most_bytes=2**30), GRAINS[0]
    file.write(grain, 0, slice_of(1))
    unlink(path, *gone)
    file.write(grain, grain.step_s, slice_of(2))
    assert file.trouble == ""
    assert requests_at(path, grain) == {0: 1, grain.step_s: 2}
    file.close()


def test_past_traffic_of_a_lost_folder_is_kept_open_and_reported(path):
    file, grain = TrafficFile(path, most_bytes=2**30), GRAINS[0]
    file.write(grain, 0, slice_of(1))
    moved = path.parent.rename(path.parent.with_name("moved"))
    file.write(grain, grain.step_s, slice_of(2))
    assert "folder" in file.trouble
    moved.rename(path.parent)
    file.write(grain, 2 * grain.step_s, slice_of(3))
    assert file.trouble == ""
    assert requests_at(path, grain) == {0: 1, grain.step_s: 2, 2 * grain.step_s: 3}
    file.close()


def test_a_foreign_file_in_place_of_past_traffic_stays(path):
    file, grain = TrafficFile(path, most_bytes=2**30), GRAINS[0]
    file.write(grain, 0, slice_of(1))
    unlink(path, *BESIDE)
    path.write_text("somebody's notes " * 100)
    file.write(grain, grain.step_s, slice_of(2))
    assert "another file" in file.trouble
    assert path.read_text().startswith("somebody's notes")
    file.close()


# -- the state of a file ---------------------------------------------------------------------------------------


def test_what_became_of_a_file_is_told_by_its_identity(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "file"
    path.write_text("")
    file = StateFile.at(path)
    assert file.state() == "there"
    path.write_text("more")
    assert file.state() == "there"
    path.rename(folder / "moved")
    assert file.state() == "deleted"
    path.write_text("another")
    assert file.state() == "replaced"
    folder.rename(tmp_path / "moved")
    assert file.state() == "folder_gone"
    folder.mkdir()
    assert file.state() == "folder_gone"
    path.write_text("another")
    assert file.state() == "folder_gone"
    folder.rename(tmp_path / "again")
    folder.write_text("")
    assert file.state() == "folder_gone"
    assert state_files.is_missing(path)


# -- processes -------------------------------------------------------------------------------------------------


@pytest.mark.fleet
async def test_an_orchestrator_whose_store_is_deleted_or_replaced_never_answers_a_change_that_is_lost(tmp_path):
    process = OrchestratorProcess(tmp_path, "only")
    await process.start()
    await until(lambda: process.says("is_leading"))
    path = tmp_path / "store.db"

    async def register(name):
        return await process.http.post("/v1/adapters", json={"lora_id": name, "source": f"file:///{name}"})

    async def registered():
        return {item["lora_id"] for item in (await process.http.get("/v1/adapters")).json()["data"]}

    async def is_ready():
        return (await process.http.get("/ready")).status_code == 200

    async def incidents():
        answer = await process.http.get("/v1/history", params={"kind": "store_lost"})
        return [item["body"]["cause"] for item in answer.json()["data"]]

    await until(is_ready)
    assert (await register("a/v1")).status_code == 201
    unlink(path, *BESIDE)
    await until(path.exists)  # nobody asks for anything
    await until(incidents)
    assert (await register("b/v1")).status_code == 201
    await process.stop(signal.SIGKILL)
    await process.start()
    await until(lambda: process.says("is_leading"))
    assert await registered() == {"a/v1", "b/v1"}

    await until(is_ready)
    (tmp_path / "restored.db").write_bytes(b"")
    put_another(tmp_path / "restored.db")
    (tmp_path / "restored.db").rename(path)
    await until(lambda: is_unready(process))
    refused = await register("c/v1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unusable")
    assert "another file is in its place" in refused.json()["error"]["message"]
    assert await registered() == {"a/v1", "b/v1"}
    await process.stop(signal.SIGKILL)
    await process.start()
    await until(lambda: process.says("is_leading"))
    assert await registered() == {"another"}
    await process.stop()


@pytest.mark.fleet
async def test_an_orchestrator_whose_folder_is_moved_takes_no_changes_and_goes_on_once_it_is_back(tmp_path):
    folder, moved = tmp_path / "data", tmp_path / "moved"
    folder.mkdir()
    process = OrchestratorProcess(tmp_path, "only", store=folder / "store.db")
    await process.start()

    async def register(name):
        return (
            await process.http.post("/v1/adapters", json={"lora_id": name, "source": f"file:///{name}"})
        ).status_code

    async def is_ready():
        return (await process.http.get("/ready")).status_code == 200

    await until(lambda: process.says("is_leading"))
    await until(is_ready)
    assert await register("a/v1") == 201
    folder.rename(moved)
    await until(lambda: is_unready(process))
    folder.mkdir()  # the empty mount point
    assert await register("lost/v1") == 503
    assert not (folder / "store.db").exists()
    shutil.rmtree(folder)
    moved.rename(folder)
    await until(is_ready)
    await until(lambda: process.says("is_leading"))
    assert await register("b/v1") == 201
    await process.stop(signal.SIGKILL)
    assert stored_at(folder / "store.db") == {"a/v1", "b/v1"}


async def is_unready(process):
    answer = await process.http.get("/ready")
    return answer.status_code == 503 and answer.json()["error"]["code"] == "store_unusable"
