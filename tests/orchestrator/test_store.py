"""The store keeps intent over restarts, refuses what it cannot read, and its counters only grow."""

import os
import shutil
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from orchestrator.backend import WorkerIntent
from orchestrator.core.errors import StoreError
from orchestrator.core.rollout import Guard, Rollout, Step, Tally
from orchestrator.core.state import Adapter, Rules
from orchestrator.sqlite import SCHEMA, SqliteFile
from orchestrator.store import Store

ADAPTER = Adapter(
    lora_id="sql/v1",
    source="file:///sql",
    base_model="qwen",
    digest="d" * 64,
    rank=8,
    size_bytes=12,
    loading="eager",
    min_replicas=2,
    max_replicas=3,
    pinned=True,
    priority=-5,
    weight=2.5,
    tenants=("acme",),
    quarantine="adapter_invalid: no",
)

ROLLOUT = Rollout(
    alias="sql",
    before=(("sql/v1", 1.0),),
    after=(("sql/v2", 1.0),),
    steps=(Step(0.1, 60.0), Step(1.0, 0.0)),
    guard=Guard(min_requests=7),
    began_at=5.0,
    since=6.0,
    phase="watching",
    scale=3,
    new=Tally(10, 1, 9, 0.5),
)


def test_everything_asked_for_is_there_after_a_restart(tmp_path):
    store = Store(tmp_path / "s.db")
    store.put_adapter(ADAPTER)
    store.put_alias("sql", (("sql/v1", 1.0),))
    store.put_rollout("sql", ROLLOUT)
    store.put_rules(Rules(loading="weighted", loads_per_worker=3))
    store.put_worker("w0", WorkerIntent("draining", 17.5))
    store.put_adapter(Adapter(lora_id="old", source="x", digest="e" * 64))
    store.drop_adapter("old")
    store.raise_epoch(6)
    store.close()

    again = Store(tmp_path / "s.db")
    assert dict(again.adapters) == {"sql/v1": ADAPTER}
    assert dict(again.aliases) == {"sql": (("sql/v1", 1.0),)}
    assert again.rollouts == {"sql": ROLLOUT}
    assert again.rules == Rules(loading="weighted", loads_per_worker=3)
    assert again.workers == {"w0": WorkerIntent("draining", 17.5)}
    assert again.tombstones == {"old": "e" * 64}
    assert again.epoch == 7
    again.drop_alias("sql")
    again.close()
    assert Store(tmp_path / "s.db").rollouts == {}


def test_revisions_grow_over_a_restart_even_when_the_clock_runs_backwards(tmp_path):
    store = Store(tmp_path / "s.db", wall=lambda: 2_000_000.0)
    last = [store.next_revision() for _ in range(2500)][-1]
    store.close()
    again = Store(tmp_path / "s.db", wall=lambda: 1_000_000.0)
    assert again.next_revision() > last
    again.close()


def test_revisions_grow_when_an_old_copy_of_the_store_is_put_back(tmp_path):
    Store(tmp_path / "s.db", wall=lambda: 1_000.0).close()
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    store = Store(tmp_path / "s.db", wall=lambda: 2_000.0)
    last = store.next_revision()
    store.close()
    restored = Store(tmp_path / "copy.db", wall=lambda: 2_001.0)
    assert restored.next_revision() > last
    restored.close()


def test_compare_and_set_refuses_what_somebody_changed_in_between(tmp_path):
    store = Store(tmp_path / "s.db")
    store.put_adapter(ADAPTER)
    seen = store.adapters["sql/v1"]
    store.put_adapter(Adapter(lora_id="sql/v1", source="file:///sql", priority=7))
    assert not store.compare_and_set(seen, ADAPTER)
    assert store.adapters["sql/v1"].priority == 7
    store.close()


def test_registering_a_name_again_takes_its_tombstone_away(tmp_path):
    store = Store(tmp_path / "s.db")
    store.put_adapter(ADAPTER)
    store.drop_adapter("sql/v1")
    assert store.tombstones == {"sql/v1": "d" * 64}
    store.put_adapter(ADAPTER)
    assert store.tombstones == {}
    store.close()


def test_old_tombstones_are_forgotten(tmp_path):
    now = [1000.0]
    store = Store(tmp_path / "s.db", wall=lambda: now[0])
    store.put_adapter(ADAPTER)
    store.drop_adapter("sql/v1")
    now[0] = 1100.0
    store.expire_tombstones(200)
    assert store.tombstones
    store.expire_tombstones(50)
    assert store.tombstones == {}
    store.close()


SCHEMAS = Path(__file__).parent / "schemas"


def test_every_older_schema_has_a_store_that_it_wrote():
    assert sorted(int(path.stem) for path in SCHEMAS.glob("*.sql")) == list(range(1, SCHEMA))


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.sql")), ids=lambda path: path.name)
def test_a_store_of_any_older_schema_is_brought_up_to_date_with_all_that_is_in_it(tmp_path, path):
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        db.executescript(path.read_text())
    for _ in range(2):
        store = Store(tmp_path / "s.db")
        assert dict(store.adapters) == {"sql/v1": replace(ADAPTER, quarantine=None)}
        assert dict(store.aliases) == {"sql": (("sql/v1", 1.0),)}
        assert store.rules == Rules(loading="weighted", loads_per_worker=3)
        assert store.workers == {"w0": WorkerIntent("cordoned"), "w1": WorkerIntent("draining", 17.5)}
        assert store.tombstones == {"old": "e" * 64}
        assert store.epoch == 7
        assert store.revision > 1_800_000_000_000
        store.record("alias_set", "sql", {"targets": []}, "me")
        assert store.history(subject="sql")[0].actor == "me"
        store.close()


def _newer(path):
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    db.close()


def _foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebody_elses (x)")
    db.close()


def _foreign_with_a_version(path):
    _foreign(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


def _full(path):
    store = Store(path)
    for number in range(200):
        store.put_adapter(Adapter(lora_id=f"a{number}", source="x" * 500))
    store.close()
    return bytearray(path.read_bytes())


def _damaged(path):
    raw = _full(path)
    raw[4096:20000] = bytes(20000 - 4096)
    path.write_bytes(raw)


def _truncated(path):
    raw = _full(path)
    path.write_bytes(raw[: len(raw) // 2])


def _random(path):
    path.write_bytes(Random(7).randbytes(50_000))


def _random_after_the_head(path):
    raw = _full(path)
    raw[100:] = Random(7).randbytes(len(raw) - 100)
    path.write_bytes(raw)


def _nonsense_inside(path):
    _full(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE adapters SET policy = 'no json'")
    db.close()


def _text(path):
    path.write_text("this is no database, however long one looks at it " * 100)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_newer, "newer version"),
        (_foreign, "another program"),
        (_foreign_with_a_version, "another program"),
        (_damaged, "not changed"),
        (_truncated, "not changed"),
        (_random, "not changed"),
        (_random_after_the_head, "not changed"),
        (_nonsense_inside, "not changed"),
        (_text, "not changed"),
    ],
)
def test_a_file_that_is_not_ours_to_read_is_refused_and_left_as_it_is(tmp_path, spoil, says):
    path = tmp_path / "s.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says) as refusal:
        Store(path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def test_a_folder_in_the_place_of_the_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match=str(tmp_path)):
        Store(tmp_path)


@contextmanager
def _as_nobody():
    """Root may write any file; for a while nobody is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_only_be_read_is_refused_and_left_as_it_is():
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "s.db"
        Store(path).close()
        before = path.read_bytes()
        path.chmod(0o444)
        with _as_nobody(), pytest.raises(StoreError, match="not changed"):
            Store(path)
        assert path.read_bytes() == before


def test_the_history_is_kept_over_restarts_and_bounded_for_each_kind(tmp_path):
    store = Store(SqliteFile(tmp_path / "s.db", history_kept=100), wall=lambda: 5.0)
    store.record("alias_set", "sql", {"targets": [["sql/v1", 1.0]]}, "tenant acme")
    with store.together():
        for number in range(1000):
            store.record("load", f"a{number}")
    loads = store.history(kinds=("load",), limit=10_000)
    assert 100 <= len(loads) < 200
    assert [entry.subject for entry in loads[:2]] == ["a999", "a998"]
    store.close()
    again = Store(tmp_path / "s.db")
    (entry,) = again.history(subject="sql")
    assert (entry.kind, entry.actor, entry.at, entry.body) == (
        "alias_set",
        "tenant acme",
        5.0,
        {"targets": [["sql/v1", 1.0]]},
    )
    assert again.history(kinds=("load",), before=loads[3].id, limit=1) == [loads[4]]
    again.close()


def test_a_change_and_its_line_of_history_are_written_together_or_not_at_all(tmp_path):
    store = Store(tmp_path / "s.db")

    def fail():
        with store.together():
            store.put_adapter(ADAPTER)
            store.record("adapter_registered", "sql/v1")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        fail()
    assert store.history() == []
    assert dict(store.adapters) == {}
    store.close()


def test_a_standby_reads_what_the_leader_wrote_and_its_counters_go_on_above(tmp_path):
    leader, standby = Store(tmp_path / "s.db"), Store(tmp_path / "s.db")
    leader.put_adapter(ADAPTER)
    last = [leader.next_revision() for _ in range(2500)][-1]
    assert dict(standby.adapters) == {}
    standby.reload()
    assert dict(standby.adapters) == {"sql/v1": ADAPTER}
    assert standby.next_revision() > last
    leader.close()
    standby.close()


def test_a_backup_is_a_store_that_leaves_out_what_would_take_from_a_fleet(tmp_path):
    store = Store(tmp_path / "s.db")
    store.put_adapter(ADAPTER)
    store.put_adapter(Adapter(lora_id="going", source="x", digest="e" * 64, is_deleting=True))
    store.put_adapter(Adapter(lora_id="gone", source="x", digest="f" * 64))
    store.drop_adapter("gone")
    store.put_worker("w0", WorkerIntent("draining", 17.5))
    store.put_worker("w1", WorkerIntent("cordoned"))
    store.record("adapter_registered", "sql/v1")
    store.backup(tmp_path / "b.db")
    store.put_rules(Rules(loading="eager"))
    with pytest.raises(StoreError, match="new file"):
        store.backup(tmp_path / "b.db")
    assert sorted(store.adapters) == ["going", "sql/v1"]
    store.close()
    copy = Store(tmp_path / "b.db")
    assert (sorted(copy.adapters), copy.tombstones) == (["going", "sql/v1"], {})
    assert not copy.adapters["going"].is_deleting
    assert copy.workers == {"w1": WorkerIntent("cordoned")}
    assert (len(copy.history()), copy.rules) == (1, Rules())
    copy.close()


def test_a_store_in_a_folder_that_is_not_there_is_refused_with_advice(tmp_path):
    with pytest.raises(StoreError, match="folder that exists"):
        Store(tmp_path / "nowhere" / "s.db")


def test_of_writes_that_belong_together_none_stays_when_one_fails(tmp_path):
    store = Store(tmp_path / "s.db")
    store.put_alias("keep", (("x", 1.0),))

    def fail_in_the_middle():
        with store.together():
            store.put_adapter(ADAPTER)
            store.drop_alias("keep")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert (dict(store.adapters), list(store.aliases)) == ({}, ["keep"])
    with store.together():
        store.put_adapter(ADAPTER)
    store.close()
    again = Store(tmp_path / "s.db")
    assert list(again.adapters) == ["sql/v1"]
    again.close()
