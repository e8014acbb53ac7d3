"""The store keeps intent over restarts, refuses what it cannot read, and its counters only grow."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Barrier
from types import SimpleNamespace

import pytest

from orchestrator.core.errors import LeaseUnreachable, OrchestratorUnavailable, StoreError
from orchestrator.leadership.file_lease import FileLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, ServedName
from orchestrator.model.snapshot import WorkerIntent
from orchestrator.store.sqlite import LAYOUT, SqliteBackend, no_space
from orchestrator.store.store import IntentStore
from tests.orchestrator.store.test_backend import ADAPTER
from tests.registered import changed, registered


@pytest.mark.parametrize("bad", [changed(ADAPTER, rank=object()), replace(ADAPTER, quarantine="half a pair: \ud800")])
def test_a_value_that_no_store_can_hold_writes_nothing(tmp_path, bad):
    store = IntentStore(tmp_path / "s.db")

    def put_both():
        with store.together():
            store.put_adapter(changed(ADAPTER, lora_id="before/v1"))
            store.put_adapter(changed(bad, lora_id="bad/v1"))

    with pytest.raises((TypeError, UnicodeError)):
        put_both()
    assert list(store.adapters) == []
    store.put_adapter(changed(ADAPTER, lora_id="after/v1"))
    store.close()
    again = IntentStore(tmp_path / "s.db")
    assert list(again.adapters) == ["after/v1"]
    again.close()


def test_error_that_is_caught_between_nested_writes_fails_the_whole(tmp_path):
    store = IntentStore(tmp_path / "store.db")

    def write():
        with store.together():
            store.put_name(ServedName(name="before", targets=(AliasTarget("a", 1.0),)))
            with suppress(ValueError), store.together():
                raise ValueError
            store.put_name(ServedName(name="after", targets=(AliasTarget("a", 1.0),)))

    with pytest.raises(AssertionError, match="writes before it are lost"):
        write()
    assert not store.names
    store.put_name(ServedName(name="next", targets=(AliasTarget("a", 1.0),)))
    store.close()
    store = IntentStore(tmp_path / "store.db")
    assert list(store.names) == ["next"]
    store.close()


def test_revisions_grow_after_an_old_backup_is_restored(tmp_path):
    IntentStore(tmp_path / "s.db", wall=lambda: 1_000.0).close()
    shutil.copy(tmp_path / "s.db", tmp_path / "copy.db")
    store = IntentStore(tmp_path / "s.db", wall=lambda: 2_000.0)
    last = store.next_revision()
    store.close()
    restored = IntentStore(tmp_path / "copy.db", wall=lambda: 2_001.0)
    assert restored.next_revision() > last
    restored.close()


def test_orchestrators_can_start_together_on_a_new_store(tmp_path):
    """A race by chance: without the lock nearly every round has a process that finds an existing table."""
    together = Barrier(3)

    def start(number):
        together.wait()
        IntentStore(tmp_path / f"{number}.db").close()

    with ThreadPoolExecutor(3) as pool:
        for number in range(10):
            for one in [pool.submit(start, number) for _ in range(3)]:
                one.result()


def test_rows_fields_and_tables_of_a_newer_version_are_no_reason_to_refuse_its_store(tmp_path):
    path = tmp_path / "s.db"
    store = IntentStore(path)
    store.put_adapter(ADAPTER)
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE intent SET json = json_set(json, '$.added_later', 'x')")
        db.execute("INSERT INTO intent VALUES ('table_added_later', 'key', '{}')")
        db.execute("CREATE TABLE added_later (x)")
        db.commit()
    store = IntentStore(path)
    store.put_name(ServedName(name="sql", targets=(AliasTarget("sql/v1", 1.0),)))
    store.put_rules(PlacementPolicy(loads_per_worker=3))
    store.put_worker("w0", WorkerIntent(state="cordoned", since=7.5))
    store.put_tombstone("old", "e" * 64)
    store.raise_epoch(6)
    store.close()
    again = IntentStore(path)
    assert dict(again.adapters) == {ADAPTER.lora_id: ADAPTER}
    assert again.targets_of("sql") == (AliasTarget("sql/v1", 1.0),)
    assert again.rules == PlacementPolicy(loads_per_worker=3)
    assert again.workers == {"w0": WorkerIntent(state="cordoned", since=7.5)}
    assert again.tombstones == {"old": {"e" * 64}}
    assert again.epoch == 7
    again.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT json FROM intent WHERE table_name = 'table_added_later'").fetchall() == [("{}",)]


def _of_another_layout(path):
    IntentStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {LAYOUT + 1}")
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
    store = IntentStore(path)
    for number in range(200):
        store.put_adapter(registered(f"a{number}", source="x" * 500))
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
        db.execute("UPDATE intent SET json = 'no json'")
    db.close()


def _changed(statement, *values):
    """A complete store, but for one statement."""

    def spoil(path):
        _full(path)
        with sqlite3.connect(path) as db:
            db.execute(statement, values)
        db.close()

    return spoil


_SET_FIELD = "UPDATE adapters SET body = json_set(body, ?, json(?))"


def _text(path):
    path.write_text("this is no database, however long one looks at it " * 100)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_of_another_layout, r"layout 3, .* reads layout 2: start the version that wrote it; .*lorafleet export"),
        (_foreign, "another program"),
        (_foreign_with_a_version, "another program"),
        (_damaged, "not changed"),
        (_truncated, "not changed"),
        (_random, "not changed"),
        (_random_after_the_head, "not changed"),
        (_nonsense_inside, "not changed"),
        (_text, "not changed"),
        (_changed("INSERT INTO intent VALUES ('policy', '', 'null')"), r"\(policy: Expected `object`, got `null`\)"),
        (
            _changed("INSERT INTO intent VALUES ('policy', '', ?)", '{"min_replicas": "x"}'),
            "policy: Expected `int`, got",
        ),
        (
            _changed("UPDATE intent SET json = json_set(json, '$.spec.tenants', 'acme')"),
            r"adapter '.*': Expected `array . null`",
        ),
        (
            _changed("UPDATE intent SET json = json_set(json, '$.card', json_object('rank', 'x'))"),
            r"adapter '.*': Expected `int",
        ),
        (_changed("UPDATE intent SET json = json_remove(json, '$.spec.source')"), r"adapter '.*': .*missing.*`source`"),
        (_changed("UPDATE intent SET json = 'acme'"), r"adapter '.*': JSON is malformed"),
        (_changed("UPDATE intent SET json = ?", '{"x":' + "[" * 100_000), r"adapter '.*': "),
        (_changed("UPDATE intent SET json = CAST(x'ff' AS TEXT)"), "UTF-8"),
        (_changed("ALTER TABLE intent DROP COLUMN json"), r"damaged \(no such column: json\)"),
        (_changed("DROP TABLE history"), r"damaged \(no such table: history\)"),
        (
            _changed("INSERT INTO intent VALUES ('names', 'sql', ?)", '{"name": "sql", "targets": [{"lora_id": 1}]}'),
            "name 'sql': Expected `str`",
        ),
        (_changed("INSERT INTO intent VALUES ('names', 'sql', 'null')"), "name 'sql': Expected `object`"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_unchanged(tmp_path, spoil, says):
    path = tmp_path / "s.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says) as refusal:
        IntentStore(path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def test_a_folder_in_the_place_of_the_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match=str(tmp_path)):
        IntentStore(tmp_path)


@contextmanager
def _as_nobody():
    """Drop root's permission to write any file for the test."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_file_is_refused_unchanged():
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "s.db"
        IntentStore(path).close()
        before = path.read_bytes()
        path.chmod(0o444)
        with _as_nobody(), pytest.raises(StoreError, match="not changed"):
            IntentStore(path)
        assert path.read_bytes() == before


def test_the_history_is_kept_over_restarts_and_bounded_for_each_kind(tmp_path):
    store = IntentStore(SqliteBackend(tmp_path / "s.db", history_kept=100), wall=lambda: 5.0)
    store.record("alias_set", "sql", {"targets": [["sql/v1", 1.0]]}, "tenant acme")
    with store.together():
        for number in range(1000):
            store.record("load", f"a{number}")
    loads = store.history(kinds=("load",), limit=10_000)
    assert 100 <= len(loads) < 200
    assert [entry.subject for entry in loads[:2]] == ["a999", "a998"]
    store.close()
    again = IntentStore(tmp_path / "s.db")
    (entry,) = again.history(subject="sql")
    assert (entry.kind, entry.actor, entry.at, entry.body) == (
        "alias_set",
        "tenant acme",
        5.0,
        {"targets": [["sql/v1", 1.0]]},
    )
    assert again.history(kinds=("load",), before=loads[3].id, limit=1) == [loads[4]]
    again.close()


async def test_a_leader_that_was_paused_writes_nothing_once_another_term_has_begun(tmp_path):
    old, new = IntentStore(tmp_path / "s.db"), IntentStore(tmp_path / "s.db")
    await old.catch_up()
    old.raise_epoch(old.epoch)
    old.put_name(ServedName(name="before", targets=(AliasTarget("a", 1.0),)))
    await new.catch_up()
    new.reload()
    old.put_name(ServedName(name="between", targets=(AliasTarget("a", 1.0),)))
    new.raise_epoch(new.epoch)
    new.refresh()
    assert set(new.names) == {"before", "between"}
    with pytest.raises(OrchestratorUnavailable) as refusal:
        old.put_name(ServedName(name="after", targets=(AliasTarget("a", 1.0),)))
    assert refusal.value.code == "not_leading"
    with pytest.raises(OrchestratorUnavailable):
        old.record("policy_changed", "")
    old.close()
    new.close()
    with closing(IntentStore(tmp_path / "s.db")) as third:
        assert set(third.names) == {"before", "between"}


async def test_two_processes_that_begin_a_term_at_once_never_have_one_epoch(tmp_path):
    one, two = IntentStore(tmp_path / "s.db"), IntentStore(tmp_path / "s.db")
    for store in (one, two):
        await store.catch_up()
        store.reload()
    one.raise_epoch(one.epoch)
    with pytest.raises(OrchestratorUnavailable):
        two.raise_epoch(two.epoch)
    two.reload()
    two.raise_epoch(two.epoch)
    assert two.epoch > one.epoch
    one.close()
    two.close()


def test_a_store_in_a_missing_folder_is_refused_with_advice(tmp_path):
    with pytest.raises(StoreError, match="folder that exists"):
        IntentStore(tmp_path / "nowhere" / "s.db")


class FullDiskConnection(sqlite3.Connection):
    """A connection to a database on a disk with room for two pages."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.execute("PRAGMA max_page_count = 2")


@pytest.fixture
def no_room(monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **named: connect(*args, **named, factory=FullDiskConnection))


@pytest.mark.usefixtures("no_room")
async def test_a_full_disk_is_reported_by_store_and_lease(tmp_path):
    full = f"no space left in {tmp_path}: make room"
    with pytest.raises(StoreError) as refusal:
        IntentStore(tmp_path / "s.db")
    assert str(refusal.value) == f"store {tmp_path}/s.db: {full}; nothing that was in it is lost"
    with closing(sqlite3.connect(tmp_path / "lease")) as db:
        db.execute("CREATE TABLE other (x)")
    lease = FileLease(tmp_path / "lease", holder="a")
    with pytest.raises(LeaseUnreachable) as refusal:
        await lease.read()
    assert str(refusal.value) == f"lease {tmp_path}/lease: {full}"
    lease.close()


def test_a_change_on_a_full_disk_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    connect, opened = sqlite3.connect, []
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *args, **named: opened.append(connect(*args, **named)) or opened[-1])
        store = IntentStore(SqliteBackend(tmp_path / "s.db"))
    opened[0].execute("PRAGMA max_page_count = 1")  # no more than there are
    with pytest.raises(StoreError, match=f"nothing was written: no space left in {tmp_path}: make room"):
        store.put_adapter(registered("a", source="x" * 100_000))
    store.close()
    again = IntentStore(tmp_path / "s.db")
    assert dict(again.adapters) == {}
    again.close()


@pytest.mark.parametrize(("free", "is_said"), [(0, True), (10**9, False)])
def test_an_io_error_counts_as_full_disk_only_without_free_space(tmp_path, monkeypatch, free, is_said):
    failure = sqlite3.OperationalError("disk I/O error")
    failure.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))
    assert (no_space(failure, tmp_path / "s.db") is not None) == is_said
