import shutil
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lorafleet.telemetry.repeats import RepeatLimiter
from orchestrator.model.catalog import Catalog, CatalogAdapter
from orchestrator.model.changes import reader_of
from router.fleet.saved_catalog import SavedCatalog


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "no-folder/catalog.json", "broken"])
def test_an_unreadable_saved_catalog_is_logged_and_ignored(tmp_path, name):
    (tmp_path / "no-folder").write_text("")
    (tmp_path / "broken").write_text("{")
    with capture_logs() as said:
        assert SavedCatalog(tmp_path / name, RepeatLimiter(time.monotonic)).load() is None
    assert [line["event"] for line in said] == (["saved catalog not used"] if name != "nothing" else [])


def item(lora_id, **more):
    given = {"digest": "a" * 64, "base_model": "b", "source": "file:///x"} | more
    return CatalogAdapter(lora_id=lora_id, **given)


def saved_in(folder):
    return SavedCatalog(folder / "catalog.json", RepeatLimiter(time.monotonic))


def json_of(**catalog):
    return reader_of(Catalog).dump_json(Catalog(**catalog))


def test_the_saved_catalog_has_the_changes_since_it_was_written(tmp_path):
    saved = saved_in(tmp_path)
    saved.save_whole(json_of(revision=1, adapters=(item("a"), item("b"))))
    saved.add_changes(json_of(revision=3, since=1, adapters=(item("c"),), gone_adapters=("a",)))
    saved_in(tmp_path).add_changes(json_of(revision=3, since=1, adapters=(item("c"),), gone_adapters=("a",)))
    saved.add_changes(json_of(revision=4, since=3, adapters=(item("b", digest="c" * 64),)))
    loaded = saved_in(tmp_path).load()
    assert (loaded.revision, sorted(loaded.adapters), loaded.adapters["b"].digest) == (4, ["b", "c"], "c" * 64)
    saved.changes_file.write_bytes(saved.changes_file.read_bytes()[:-40])
    assert saved_in(tmp_path).load().revision == 3, "up to the change that was cut off"
    saved.save_whole(json_of(revision=9))
    assert saved_in(tmp_path).load().revision == 9
    saved.add_changes(json_of(revision=12, since=11))
    assert saved_in(tmp_path).load().revision == 9, "a change is missing between"


def test_a_saved_catalog_is_written_again_when_its_changes_outgrow_it(tmp_path):
    saved = saved_in(tmp_path)
    saved.save_whole(json_of(revision=1))
    for revision in range(1, 12):
        assert not saved.wants_whole
        saved.add_changes(json_of(revision=revision + 1, since=revision, gone_adapters=("x" * 100_000,)))
    assert saved.wants_whole
    saved.save_whole(json_of(revision=12))
    assert not saved.wants_whole
    assert not saved.changes_file.exists()


def test_a_saved_catalog_that_was_deleted_is_written_again_whole(tmp_path):
    saved = saved_in(tmp_path / "state")
    saved.save_whole(json_of(revision=1, adapters=(item("a"),)))
    assert not saved.wants_whole
    saved.file.unlink()
    saved.add_changes(json_of(revision=2, since=1, adapters=(item("b"),)))
    assert saved_in(tmp_path / "state").load() is None, "changes alone are no catalog"
    assert saved.wants_whole
    shutil.rmtree(tmp_path / "state")
    saved.save_whole(json_of(revision=2, adapters=(item("a"), item("b"))))
    assert sorted(saved_in(tmp_path / "state").load().adapters) == ["a", "b"]
    assert not saved.wants_whole


class FullDisk:
    """A file that takes the first bytes of a write and no more, as on a disk that is full."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        return self.file.write(content[:20])


@pytest.mark.parametrize("how", ["a part", "an error"])
def test_a_catalog_is_saved_whole_again_soon_after_a_change_could_not_be_written(tmp_path, monkeypatch, how):
    now = 1000.0
    saved = SavedCatalog(tmp_path / "catalog.json", RepeatLimiter(lambda: now), lambda: now)
    saved.save_whole(json_of(revision=1))

    def open_full(path, *args, **named):
        if how == "an error":
            raise OSError(28, "No space left on device")
        return FullDisk(open(path, *args, **named))  # noqa: PTH123  (the method itself is replaced)

    with monkeypatch.context() as full, capture_logs() as said:
        full.setattr(Path, "open", open_full)
        saved.add_changes(json_of(revision=2, since=1, adapters=(item("lost"),)))
    assert [line["event"] for line in said] == ["catalog not saved"]
    assert not saved.wants_whole, "not at each read while the disk is full"
    saved.add_changes(json_of(revision=3, since=2, adapters=(item("later"),)))
    now += 1
    assert saved.wants_whole
    saved.save_whole(json_of(revision=3, adapters=(item("lost"), item("later"))))
    assert not saved.wants_whole
    assert sorted(saved_in(tmp_path).load().adapters) == ["later", "lost"]


@pytest.mark.parametrize("damage", [b"", b'{"cut', b"\xff\x00", b"[]"])
def test_a_change_that_does_not_follow_costs_no_later_one_that_does(tmp_path, damage):
    saved = saved_in(tmp_path)
    saved.save_whole(json_of(revision=7))
    with saved.changes_file.open("wb") as changes:
        changes.write(damage + b"\n")
    saved.add_changes(json_of(revision=11, since=10, adapters=(item("b"),)))  # of a process that was ahead
    saved.add_changes(json_of(revision=11, since=7, adapters=(item("a"), item("b"))))
    with capture_logs() as said:
        loaded = saved_in(tmp_path).load()
    assert (loaded.revision, sorted(loaded.adapters)) == (11, ["a", "b"])
    assert [(line["event"], line["changes"]) for line in said] == [("saved changes not used", 2)]
