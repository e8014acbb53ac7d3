"""The store keeps intent over restarts, refuses what it cannot read, and its counters only grow."""

import shutil
import sqlite3

import pytest

from orchestrator.backend import WorkerIntent
from orchestrator.core.errors import StoreError
from orchestrator.core.rollout import Guard, Rollout, Step, Tally
from orchestrator.core.state import Adapter, Rules
from orchestrator.sqlite import SCHEMA
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
    store.close()

    again = Store(tmp_path / "s.db")
    assert dict(again.adapters) == {"sql/v1": ADAPTER}
    assert dict(again.aliases) == {"sql": (("sql/v1", 1.0),)}
    assert again.rollouts == {"sql": ROLLOUT}
    assert again.rules == Rules(loading="weighted", loads_per_worker=3)
    assert again.workers == {"w0": WorkerIntent("draining", 17.5)}
    assert again.tombstones == {"old": "e" * 64}
    assert again.epoch == store.epoch + 1
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


def _newer(path):
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    db.close()


def _foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebody_elses (x)")
    db.close()


def _damaged(path):
    store = Store(path)
    for number in range(200):
        store.put_adapter(Adapter(lora_id=f"a{number}", source="x" * 500))
    store.close()
    raw = bytearray(path.read_bytes())
    raw[4096:20000] = bytes(20000 - 4096)
    path.write_bytes(raw)


def _text(path):
    path.write_text("this is no database, however long one looks at it " * 100)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(_newer, "newer version"), (_foreign, "another program"), (_damaged, "not changed"), (_text, "not changed")],
)
def test_a_file_that_is_not_ours_to_read_is_refused_and_left_as_it_is(tmp_path, spoil, says):
    path = tmp_path / "s.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says):
        Store(path)
    assert path.read_bytes() == before


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
