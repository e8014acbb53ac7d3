"""What was asked for, in one SQLite file: adapters, aliases, policy, workers' cordons, tombstones, and two counters.

Nothing that was observed is stored. Everything is also kept in memory, so reads never touch the file; writes are
small, synchronous and durable when the call returns. One process owns the file.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from orchestrator.core.errors import StoreError
from orchestrator.core.state import Adapter, Intent, Rules

_MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
    CREATE TABLE adapters (
        lora_id TEXT PRIMARY KEY, source TEXT NOT NULL, base_model TEXT, digest TEXT, rank INTEGER, size_bytes INTEGER,
        policy TEXT NOT NULL, tenants TEXT, quarantine TEXT, is_deleting INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE aliases (name TEXT PRIMARY KEY, targets TEXT NOT NULL) STRICT;
    CREATE TABLE policy (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL) STRICT;
    CREATE TABLE workers (id TEXT PRIMARY KEY, state TEXT NOT NULL, until REAL) STRICT;
    CREATE TABLE tombstones (lora_id TEXT PRIMARY KEY, digest TEXT NOT NULL, at REAL NOT NULL) STRICT;
    """,
)
SCHEMA = len(_MIGRATIONS)
_POLICY_FIELDS = ("loading", "min_replicas", "max_replicas", "pinned", "priority", "weight")
_RESERVED = 1000
"""Revisions taken from the file at a time; what is not used by the time of a crash is skipped."""


@dataclass(frozen=True, slots=True)
class WorkerIntent:
    """cordoned or draining; `until`: Unix time at which a drain stops waiting for moves."""

    state: str
    until: float | None = None


class Store:
    """The intent. Raises StoreError when the file is no store of ours, damaged, or of a newer version."""

    def __init__(self, path: Path | str, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._db = _open(str(path))
        self._writes = 0
        self.adapters: MutableMapping[str, Adapter] = SortedDict()
        self.aliases: MutableMapping[str, tuple[tuple[str, float], ...]] = SortedDict()
        self.workers: dict[str, WorkerIntent] = {}
        self.tombstones: dict[str, str] = {}
        self.rules = Rules()
        try:
            self._read()
        except (sqlite3.DatabaseError, ValueError, TypeError) as exc:
            self._db.close()
            raise StoreError(
                f"store {path} cannot be read ({exc}); restore it from a copy, it was not changed"
            ) from exc
        self.epoch = self._counter("epoch") + 1
        # The clock lifts the revision above everything routers saw, even when the file is an old copy put back.
        self.revision = max(self._counter("revision") + 1, int(wall() * 1000))
        self._reserved = self.revision + _RESERVED
        with self.together():
            self._set_counter("epoch", self.epoch)
            self._set_counter("revision", self._reserved)

    def close(self) -> None:
        self._db.close()

    @property
    def intent(self) -> Intent:
        return Intent(adapters=self.adapters, tombstones=self.tombstones)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Writes in here are one transaction: one wait for the disk, all or none. May be nested."""
        self._writes += 1
        try:
            yield
            if self._writes == 1:
                self._db.commit()
        except BaseException:
            self._db.rollback()
            self._read()  # memory must not know what the file does not
            raise
        finally:
            self._writes -= 1

    @property
    def adapter_ids(self) -> Sequence[str]:
        """All lora_ids in order; indexing and bisecting it copies nothing."""
        return cast("Sequence[str]", self.adapters.keys())

    @property
    def alias_names(self) -> Sequence[str]:
        return cast("Sequence[str]", self.aliases.keys())

    def next_revision(self) -> int:
        """One more than ever before, over restarts too."""
        self.revision += 1
        if self.revision >= self._reserved:
            self._reserved = self.revision + _RESERVED
            with self.together():
                self._set_counter("revision", self._reserved)
        return self.revision

    def raise_epoch(self, above: int) -> None:
        """Some agent has obeyed this epoch, so ours must be higher."""
        if above >= self.epoch:
            self.epoch = above + 1
            with self.together():
                self._set_counter("epoch", self.epoch)

    def put_adapter(self, adapter: Adapter) -> None:
        """Insert or replace. A registration takes back an earlier deletion of the same name."""
        with self.together():
            self._db.execute("REPLACE INTO adapters VALUES (?,?,?,?,?,?,?,?,?,?)", _adapter_row(adapter))
            if not adapter.is_deleting:
                self._db.execute("DELETE FROM tombstones WHERE lora_id = ?", (adapter.lora_id,))
        self.adapters[adapter.lora_id] = adapter
        if not adapter.is_deleting:
            self.tombstones.pop(adapter.lora_id, None)

    def compare_and_set(self, seen: Adapter, adapter: Adapter) -> bool:
        """Replace the adapter only if nobody has changed it since it was seen."""
        if self.adapters.get(seen.lora_id) is not seen:
            return False
        self.put_adapter(adapter)
        return True

    def drop_adapter(self, lora_id: str) -> None:
        """The row goes, a tombstone stays: a worker that comes back with this adapter still has to give it up."""
        adapter = self.adapters[lora_id]
        with self.together():
            self._db.execute("DELETE FROM adapters WHERE lora_id = ?", (lora_id,))
            if adapter.digest is not None:
                row = (lora_id, adapter.digest, self._wall())
                self._db.execute("REPLACE INTO tombstones VALUES (?,?,?)", row)
        del self.adapters[lora_id]
        if adapter.digest is not None:
            self.tombstones[lora_id] = adapter.digest

    def expire_tombstones(self, kept_s: float) -> None:
        with self.together():
            self._db.execute("DELETE FROM tombstones WHERE at < ?", (self._wall() - kept_s,))
        self.tombstones = dict(self._db.execute("SELECT lora_id, digest FROM tombstones"))

    def put_alias(self, name: str, targets: tuple[tuple[str, float], ...]) -> None:
        with self.together():
            self._db.execute("REPLACE INTO aliases VALUES (?,?)", (name, json.dumps(targets)))
        self.aliases[name] = targets

    def drop_alias(self, name: str) -> None:
        with self.together():
            self._db.execute("DELETE FROM aliases WHERE name = ?", (name,))
        del self.aliases[name]

    def put_rules(self, rules: Rules) -> None:
        body = json.dumps({f.name: getattr(rules, f.name) for f in fields(Rules)})
        with self.together():
            self._db.execute("REPLACE INTO policy VALUES (1,?)", (body,))
        self.rules = rules

    def put_worker(self, worker_id: str, intent: WorkerIntent | None) -> None:
        """Cordon or drain; None takes that back."""
        with self.together():
            if intent is None:
                self._db.execute("DELETE FROM workers WHERE id = ?", (worker_id,))
            else:
                self._db.execute("REPLACE INTO workers VALUES (?,?,?)", (worker_id, intent.state, intent.until))
        if intent is None:
            self.workers.pop(worker_id, None)
        else:
            self.workers[worker_id] = intent

    def _counter(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def _set_counter(self, name: str, value: int) -> None:
        self._db.execute("REPLACE INTO counters VALUES (?,?)", (name, value))

    def _read(self) -> None:
        for table in (self.adapters, self.aliases, self.workers):
            table.clear()
        for row in self._db.execute("SELECT * FROM adapters"):
            self.adapters[row["lora_id"]] = _adapter(row)
        for name, targets in self._db.execute("SELECT name, targets FROM aliases"):
            self.aliases[name] = tuple((lora_id, float(weight)) for lora_id, weight in json.loads(targets))
        for worker_id, state, until in self._db.execute("SELECT id, state, until FROM workers"):
            self.workers[worker_id] = WorkerIntent(state, until)
        self.tombstones = {row[0]: row[1] for row in self._db.execute("SELECT lora_id, digest FROM tombstones")}
        for (body,) in self._db.execute("SELECT body FROM policy"):
            known = {f.name for f in fields(Rules)}
            self.rules = Rules(**{name: value for name, value in json.loads(body).items() if name in known})


def _open(path: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, timeout=5.0)
    except sqlite3.Error as exc:
        raise StoreError(f"store {path}: {exc}; name a file in a folder that exists and can be written") from exc
    try:
        _check(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        _migrate(db)
    except sqlite3.Error as exc:
        db.close()
        raise StoreError(f"store {path}: {exc}; restore it from a copy or name another, it was not changed") from exc
    except StoreError:
        db.close()
        raise
    db.row_factory = sqlite3.Row
    return db


def _check(db: sqlite3.Connection, path: str) -> None:
    found = [row[0] for row in db.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise StoreError(f"store {path} is damaged ({found[0]}); restore it from a copy, it was not changed")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        raise StoreError(f"store {path} has schema {version}, this version knows {SCHEMA}; start the newer version")
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if version == 0 and tables:
        raise StoreError(f"store {path} is another program's database (tables {', '.join(tables)}); name another file")


def _migrate(db: sqlite3.Connection) -> None:
    with closing(db.cursor()) as cursor:
        version = cursor.execute("PRAGMA user_version").fetchone()[0]
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            cursor.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")


def _adapter(row: Mapping[str, Any]) -> Adapter:
    tenants = row["tenants"]
    adapter = Adapter(
        lora_id=row["lora_id"],
        source=row["source"],
        base_model=row["base_model"],
        digest=row["digest"],
        rank=row["rank"],
        size_bytes=row["size_bytes"],
        tenants=None if tenants is None else tuple(json.loads(tenants)),
        quarantine=row["quarantine"],
        is_deleting=bool(row["is_deleting"]),
    )
    policy = json.loads(row["policy"])
    return replace(adapter, **{name: policy[name] for name in _POLICY_FIELDS if name in policy})


def _adapter_row(a: Adapter) -> tuple[Any, ...]:
    policy = json.dumps({name: getattr(a, name) for name in _POLICY_FIELDS})
    tenants = None if a.tenants is None else json.dumps(a.tenants)
    known = (a.lora_id, a.source, a.base_model, a.digest, a.rank, a.size_bytes)
    return (*known, policy, tenants, a.quarantine, int(a.is_deleting))
