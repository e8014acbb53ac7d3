import time

import pytest
from structlog.testing import capture_logs

from lorafleet.service.repeats import RepeatLimiter
from orchestrator.wire import Catalog, CatalogAdapter
from router.fleet.saved_catalog import SavedCatalog


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "no-folder/catalog.json", "broken"])
def test_an_unreadable_saved_catalog_is_logged_and_ignored(tmp_path, name):
    (tmp_path / "no-folder").write_text("")
    (tmp_path / "broken").write_text("{")
    with capture_logs() as said:
        assert SavedCatalog(tmp_path / name, RepeatLimiter(time.monotonic)).load() is None
    assert [line["event"] for line in said] == (["saved catalog not used"] if name != "nothing" else [])


def item(lora_id, **more):
    given = {"digest": "a" * 64, "base_model": "b", "source": "file:///x", "state": "ready"} | more
    return CatalogAdapter(lora_id=lora_id, **given)


def saved_in(folder):
    return SavedCatalog(folder / "catalog.json", RepeatLimiter(time.monotonic))


def json_of(**catalog):
    return Catalog(**catalog).model_dump_json().encode()


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
