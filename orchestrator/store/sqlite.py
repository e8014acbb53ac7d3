"""The store backend in one SQLite file (WAL): a write is durable when the call returns."""

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec

from lorafleet.service import files
from lorafleet.service.state_files import FileState, is_read_only, state_text
from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.core.ledger import hour_of, new_rows
from orchestrator.model.history import HistoryEntry
from orchestrator.model.ledger import UsageBatch, UsageQuery, UsageRows
from orchestrator.store.backend import HistoryText, StoreText
from orchestrator.store.database_files import DatabaseFiles, copy_into
from orchestrator.store.ledger_rows import (
    USAGE_KEPT_DAYS,
    LedgerTables,
    LedgerText,
    read_rows,
    row_values,
)
from orchestrator.store.tables import COUNTERS, TABLES, StoreChange, StoredRows, Subject, backup_rows

LAYOUT = 2
"""The file's `user_version`. New stored tables and new fields of their rows leave it as it is."""
_APPLICATION_ID = 0x4C6F5241
"""Says that a database is a store of ours; "LoRA" in ASCII."""
_LEDGER = LedgerTables(prefix="", mark="?", whole="INTEGER", real="REAL", suffix=" STRICT")
_CREATE = f"""
    CREATE TABLE intent (
        table_name TEXT NOT NULL, key TEXT NOT NULL, json TEXT NOT NULL, PRIMARY KEY (table_name, key)
    ) STRICT;
    CREATE TABLE history (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL,
        actor TEXT NOT NULL, body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX history_by_kind ON history (kind, id);
    CREATE INDEX history_by_subject ON history (subject, id);
    {";".join(_LEDGER.create)};
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {LAYOUT}
"""
_READ_INTENT = "SELECT table_name, key, json FROM intent"
_READ_HISTORY = "SELECT id, at, kind, subject, actor, body FROM history"
_ADD_HISTORY = "INSERT INTO history (id, at, kind, subject, actor, body) VALUES (?,?,?,?,?,?)"
_IN_MEMORY = ":memory:"
_TRIM_EVERY = 64
_BUSY_S = 5.0
_BUSY_PAUSE_S = 0.02
# A new store takes about 150 KB with the files beside it.
_NO_SPACE_BYTES = 2**20
# Errors of the disk, its mode or the file itself: the next write would fail, too.
_FAULTS_OF_FILE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    }
)
_NOT_LEADING = "this orchestrator leads no longer, so it writes nothing"
_SAVE_IT = "save what this process still has open with `lorafleet backup FILE` or `lorafleet export FILE`"
_NEXT_STEPS: dict[FileState, str] = {
    "deleted": f"{_SAVE_IT}, stop the orchestrator, put the backup in place, and start it",
    "replaced": f"{_SAVE_IT}, stop the orchestrator, leave the file that is to count in place, and start it",
    "folder_gone": f"bring the folder or volume back, and it goes on; or {_SAVE_IT}, and restart it where the store is",
    "unreadable": f"mend the disk or volume, and it goes on; or {_SAVE_IT}, and restart it where the store is",
}


class SqliteBackend:
    """A `StoreBackend`; each `write` is one transaction.

    Raises StoreError when the file is no store of ours, damaged, or of another layout.
    Raises OrchestratorUnavailable while another process holds the write lock.

    history_kept     entries of each kind; older ones go, so that many loads push out no change of policy
    usage_kept_days  days for which the ledger's rows are kept
    trouble        why no change is written now, and what to do; empty: changes are written
    """

    has_ledger = True

    def __init__(self, path: Path | str, *, history_kept: int = 10_000, usage_kept_days: int = USAGE_KEPT_DAYS) -> None:
        """Open the file, and create it if it is missing. Raises StoreError."""
        self._path = str(path)
        self._history_kept = history_kept
        self._usage_kept_days = usage_kept_days
        self._trimmed_hour = 0  # of the ledger
        self._recorded: dict[str, int] = {}
        self._term: Literal["none", "ours", "over"] = "none"
        self._epoch: int | None = None  # of our term, once it is stored
        self.trouble = ""
        self._has_failed = False  # the last write, by a fault of the file
        self._has_written = False  # since the file was opened, or a term ended with the file in its place
        self._mended = ""
        self._open()

    def _open(self) -> None:
        """Open the file at the path. Raises StoreError."""
        self._db = _open_store(self._path)
        self._files = DatabaseFiles(self._path)

    is_caught_up = is_read = True
    backup_name = "lorafleet.db"

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Return at once: `write` waits for the disk."""

    async def catch_up(self) -> None:
        """Allow writes again; every `read` reads the file. Raises StoreError for a file that takes no changes."""
        self._term, self._epoch = "ours", None
        self._require_file()

    async def write_remaining(self) -> None:
        """Return at once: no write is pending."""

    def end_term(self) -> None:
        """Refuse writes until `catch_up`: another process may lead. No write is pending."""
        self._term = "over"
        self._has_written = self._has_written and self._files.state() != "there"

    def check(self) -> str:
        """Look at the file, and set `trouble`. Returns what was mended since the last call, in words; mostly "".

        The leader writes a deleted file again from what is open, where nobody put another one. Without writes of our
        own the file that is at the path now counts: the leader has written it again, or somebody restored it.
        """
        self._look()
        mended, self._mended = self._mended, ""
        return mended

    def _look(self) -> None:
        """Set `trouble`, after mending what can be mended."""
        state, error = self._files.state(), ""
        try:
            if self._files.is_replaced():
                self._files.remove_beside()
            if self._can_mend(state):
                self._mend(state)
                state = "there"
        except (OSError, sqlite3.Error, StoreError) as exc:
            error = f", and could not be opened or written again ({exc})"
        if state != "there":
            self.trouble = f"store {self._path}: {state_text(state)}{error}. No change is written: {_NEXT_STEPS[state]}"
        elif self._path != _IN_MEMORY and is_read_only(Path(self._path).absolute().parent):
            self.trouble = f"store {self._path}: its file system is read-only: mount it writable, and it goes on"
        elif self._has_failed:
            self._try_write()
        else:
            self.trouble = ""

    def _can_mend(self, state: FileState) -> bool:
        """Whether opening the path anew, where needed after writing the file again, loses nothing."""
        if state == "deleted":
            return self._has_written or self._term == "ours"  # else the leader does
        return state in ("replaced", "folder_gone") and not self._has_written and Path(self._path).exists()

    def _mend(self, state: FileState) -> None:
        """Write a deleted file again, and open the one at the path. Raises OSError, sqlite3.Error, StoreError."""
        if state == "deleted":
            self._files.write_again(self._db)
        before = self._db
        self._open()
        before.close()
        if state == "deleted":
            self._mended = f"store {self._path}: {state_text(state)}; it is written again, with all that it held"

    def _try_write(self) -> None:
        """Write the layout's number again after a write that failed, and set `trouble` by the result."""
        try:
            self._db.execute(f"PRAGMA user_version = {LAYOUT}")
        except sqlite3.Error as exc:
            self.trouble = self._failure_text(exc)
        else:
            self.trouble, self._has_failed = "", False

    def _failure_text(self, exc: sqlite3.Error) -> str:
        """The message for a write that the file did not take."""
        return f"store {self._path}: nothing was written: {no_space(exc, self._path) or exc}"

    def _require_file(self) -> None:
        """Raise StoreError unless a change that is written now is found at the path by the next start."""
        self._look()
        if self.trouble:
            raise StoreError(self.trouble)

    def read(self) -> StoredRows:
        """Read the whole stored intent from the file. Raises StoreError when it cannot be read."""
        try:
            return _read_rows(self._db)
        except (sqlite3.Error, ValueError) as exc:
            raise _unreadable_error(self._path, exc) from exc

    def dump(self) -> StoreText:
        """All that the file holds. Raises StoreError when it cannot be read."""
        try:
            rows = [(table, key, text) for table, key, text in self._db.execute(_READ_INTENT)]
            history = [HistoryText(*row) for row in self._db.execute(f"{_READ_HISTORY} ORDER BY id")]
            ledger = LedgerText(*(tuple(map(tuple, self._db.execute(query))) for query in _LEDGER.copied()))
            return StoreText(rows, history, ledger)
        except sqlite3.Error as exc:
            raise _unreadable_error(self._path, exc) from exc

    def load(self, text: StoreText) -> None:
        """Replace all rows by those of another store, and add its history with its ids. Raises StoreError."""
        try:
            with self._db:
                if text.rows is not None:
                    self._db.execute("DELETE FROM intent")
                    self._db.executemany("INSERT INTO intent (table_name, key, json) VALUES (?,?,?)", text.rows)
                self._db.executemany(_ADD_HISTORY, text.history)
                self._db.executemany(_LEDGER.add_row, text.ledger.rows)
                self._db.executemany(_LEDGER.copy_source, text.ledger.sources)
        except sqlite3.Error as exc:
            raise StoreError(self._failure_text(exc)) from exc

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        """Write changes and history in one transaction, durable on return; after an error none is written.

        History alone is also written to a file that is lost, where people still read it. Raises StoreError, and
        OrchestratorUnavailable while the file is busy or after our term.
        """
        if self._term == "over":
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading")
        if changes:
            self._require_file()
        with self._transaction():
            self._require_epoch(changes)
            for change in changes:
                self._write_change(change)
            for entry in entries:
                self._add_history(entry)
        if changes:
            self._epoch = _epoch_in(changes) or self._epoch
            self._has_written, self._has_failed = True, False
            self._require_file()  # lost during the write: the caller must not rely on it

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what the block writes; after an error none is written. Raises StoreError, OrchestratorUnavailable."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.commit()
        except sqlite3.Error as exc:
            message = self._failure_text(exc)
            self._db.rollback()
            if _is_busy(exc):
                raise OrchestratorUnavailable(
                    f"store {self._path}: nothing was written: another process is in the middle of a write",
                    code="store_unreachable",
                    retry_after_s=_BUSY_S,
                ) from exc
            if primary_code(exc) in _FAULTS_OF_FILE:
                self.trouble, self._has_failed = message, True
            raise StoreError(message) from exc
        except BaseException:
            self._db.rollback()  # e.g. an integer of over 64 bits, which SQLite cannot store
            raise

    async def add_usage(self, batches: Sequence[UsageBatch], now: float) -> UsageRows:
        """Add batches to the ledger, each once; durable on return. The rows that were added.

        Raises StoreError, OrchestratorUnavailable.
        """
        if self._term == "over":
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading")
        self._require_file()
        hour = hour_of(now)
        with self._transaction():
            self._require_epoch(())
            counted = {
                source: self._db.execute(_LEDGER.hold_source, (source, now)).fetchone()[0]
                for source in sorted({batch.source for batch in batches})
            }
            found = new_rows(batches, counted)
            self._db.executemany(_LEDGER.add_row, row_values(found.rows))
            self._db.executemany(_LEDGER.set_number, [(number, source) for source, number in found.numbers.items()])
            if hour > self._trimmed_hour:
                for statement, before in _LEDGER.trims(now, self._usage_kept_days):
                    self._db.execute(statement, (before,))
        self._trimmed_hour = hour
        self._has_written, self._has_failed = True, False
        self._require_file()
        return found.rows

    async def usage(self, query: UsageQuery) -> UsageRows:
        """The ledger's rows, added up as the query says. Raises StoreError, OrchestratorRequestError for too many."""
        if self._path == _IN_MEMORY or self._files.state() != "there":
            return _usage_of(self._db, self._path, query)
        return await asyncio.to_thread(_read_usage, self._path, query)

    def _require_epoch(self, changes: Sequence[StoreChange]) -> None:
        """Raise OrchestratorUnavailable if another process has begun a term since ours, in the open transaction.

        So a leader that was paused past its lease writes nothing after another term began, and no two terms have one
        epoch.
        """
        query = "SELECT CAST(json AS INTEGER) FROM intent WHERE table_name = ? AND key = 'epoch'"
        (stored,) = self._db.execute(query, (COUNTERS.name,)).fetchone() or (None,)
        new = _epoch_in(changes)
        if stored is not None and ((self._epoch is not None and stored > self._epoch) or (new and stored >= new)):
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading")

    def _write_change(self, change: StoreChange) -> None:
        """Replace or delete one row in the open transaction."""
        if change.row is None:
            self._db.execute("DELETE FROM intent WHERE table_name = ? AND key = ?", (change.table, change.key))
        else:
            row = (change.table, change.key, TABLES[change.table].encode(change.row))
            self._db.execute("REPLACE INTO intent (table_name, key, json) VALUES (?,?,?)", row)

    def _add_history(self, entry: HistoryEntry) -> None:
        """Insert one entry in the open transaction; now and then delete the oldest of its kind. Id 0: SQLite's next."""
        row = (entry.at, entry.kind, entry.subject, entry.actor, msgspec.json.encode(entry.body).decode())
        self._db.execute(_ADD_HISTORY, (entry.id or None, *row))
        count = self._recorded.get(entry.kind, _TRIM_EVERY)
        self._recorded[entry.kind] = (count + 1) % _TRIM_EVERY if count < _TRIM_EVERY else 1
        if count % _TRIM_EVERY == 0:
            oldest = "SELECT id FROM history WHERE kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
            self._db.execute(
                f"DELETE FROM history WHERE kind = ? AND id <= ({oldest})",  # noqa: S608
                (entry.kind, entry.kind, self._history_kept),
            )

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """History entries, newest first, with ids below `before`, of these kinds (empty: all). Raises StoreError."""
        wheres: list[str] = ["id < ?"]
        values: list[Any] = [2**62 if before is None else min(before, 2**62)]
        if kinds:
            wheres.append(f"kind IN ({','.join('?' * len(kinds))})")
            values += kinds
        if subject is not None:
            wheres.append("subject = ?")
            values.append(subject)
        query = f"{_READ_HISTORY} WHERE {' AND '.join(wheres)} ORDER BY id DESC LIMIT ?"
        try:
            return [_history_entry(row) for row in self._db.execute(query, (*values, limit))]
        except (sqlite3.Error, ValueError) as exc:
            raise _unreadable_error(self._path, exc) from exc

    def backup(self, path: Path) -> None:
        """Write a copy with `backup_rows` and the history. Raises StoreError, also if the path exists."""
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as exc:
            raise StoreError(f"backup {path}: {exc.strerror}; name a new file in a folder that can be written") from exc
        os.close(handle)
        try:
            copy_into(self._db, path)
            with closing(sqlite3.connect(path)) as copy, copy:
                rows = backup_rows(_read_rows(copy))
                copy.executemany("DELETE FROM intent WHERE table_name = ?", [(name,) for name in TABLES])
                copy.executemany(
                    "INSERT INTO intent (table_name, key, json) VALUES (?,?,?)",
                    (
                        (name, key, table.encode(row))
                        for name, table in TABLES.items()
                        for key, row in rows.of(table).items()
                    ),
                )
        except (sqlite3.Error, ValueError) as exc:
            message = (isinstance(exc, sqlite3.Error) and no_space(exc, path)) or str(exc)
            path.unlink(missing_ok=True)
            raise StoreError(f"backup {path}: {message}") from exc


def _epoch_in(changes: Sequence[StoreChange]) -> int | None:
    """The epoch of a term that the changes begin; None without one."""
    found = (change.row for change in changes if change[:2] == (COUNTERS.name, "epoch"))
    return next((value for value in found if isinstance(value, int)), None)


def no_space(exc: sqlite3.Error, path: Path | str) -> str | None:
    """Message for an error that a full disk caused; None for any other.

    source  sqlite.org/rescode.html, and SQLite 3.40 as observed: on a full disk the shared-memory file beside the
            store cannot be made, which is an I/O error and not SQLITE_FULL
    """
    folder = Path(path).absolute().parent
    primary = primary_code(exc)
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and _free_bytes(folder) < _NO_SPACE_BYTES):
        return files.disk_full_text(folder)
    return None


def _free_bytes(folder: Path) -> float:
    """Free bytes on the folder's disk; infinite when that is not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return inf


def _open_store(path: str) -> sqlite3.Connection:
    """Open the file, and create it if it is missing. Raises StoreError for any other file than a store of ours."""
    try:
        if path != _IN_MEMORY:
            with suppress(OSError):  # SQLite says what is wrong
                files.make_private_file(Path(path))
        db = sqlite3.connect(path, timeout=_BUSY_S)
    except sqlite3.Error as exc:
        raise StoreError(f"store {path}: {exc}; name a file in a folder that exists and can be written") from exc
    try:
        _check_file(db, path)
        _use_wal(db)
        db.execute("PRAGMA synchronous = FULL")
        _create_tables(db)
    except sqlite3.Error as exc:
        full = no_space(exc, path)
        db.close()
        if full:
            raise StoreError(f"store {path}: {full}; nothing that was in it is lost") from exc
        raise StoreError(f"store {path}: {exc}; restore it from a backup or name another, it was not changed") from exc
    except StoreError:
        db.close()
        raise
    db.row_factory = sqlite3.Row
    return db


def _check_file(db: sqlite3.Connection, path: str) -> None:
    """Raise StoreError for a damaged file, another program's database, or a store of another layout."""
    found = [row[0] for row in db.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise StoreError(f"store {path} is damaged ({found[0]}); restore it from a backup, it was not changed")
    tables = sorted(row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
    if not tables:
        return
    if _number(db, "application_id") != _APPLICATION_ID:
        raise StoreError(
            f"store {path} is another program's database (tables {', '.join(tables)}); name another file, it was not"
            " changed"
        )
    if (layout := _number(db, "user_version")) != LAYOUT:
        raise StoreError(
            f"store {path} has layout {layout}, and this version reads layout {LAYOUT}: start the version that wrote"
            " it; or save its fleet with that version's `lorafleet export FILE`, name a new file here, and run"
            " `lorafleet import FILE`. The file was not changed"
        )
    try:
        for query in (_READ_INTENT, _READ_HISTORY, *_LEDGER.copied()):
            db.execute(f"{query} LIMIT 0")
    except sqlite3.OperationalError as exc:
        raise StoreError(f"store {path} is damaged ({exc}); restore it from a backup, it was not changed") from exc


def _read_rows(db: sqlite3.Connection) -> StoredRows:
    """The rows of all tables. Those of a table that only a newer version knows stay in the file.

    Raises sqlite3.Error, ValueError.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for name, key, text in db.execute(_READ_INTENT):
        if name in TABLES:
            tables[name][key] = TABLES[name].decode(text, key)
    return StoredRows(tables)


def _unreadable_error(path: str, exc: Exception) -> StoreError:
    """The store's error for a file that cannot be read."""
    return StoreError(f"store {path} cannot be read ({exc}); restore it from a backup, it was not changed")


def _read_usage(path: str, query: UsageQuery) -> UsageRows:
    """The rows of the ledger in a file, by a connection of its own: a year's rows take a while to add up."""
    try:
        with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)) as db:
            return _usage_of(db, path, query)
    except sqlite3.Error as exc:
        raise _unreadable_error(path, exc) from exc


def _usage_of(db: sqlite3.Connection, path: str, query: UsageQuery) -> UsageRows:
    """The rows of the ledger that a connection finds. Raises StoreError, OrchestratorRequestError."""
    text, values = _LEDGER.read(query)
    try:
        return read_rows(db.execute(text, values).fetchall(), query)
    except sqlite3.Error as exc:
        raise _unreadable_error(path, exc) from exc


def _is_busy(exc: sqlite3.Error) -> bool:
    """Whether another process holds the file's lock."""
    return primary_code(exc) == sqlite3.SQLITE_BUSY


def primary_code(exc: sqlite3.Error) -> int:
    """SQLite's primary result code of an error."""
    return int(getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch the file to WAL mode.

    With retries, which block: while another process switches too, SQLite 3.40 may refuse without waiting.
    """
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as exc:
            if not _is_busy(exc) or time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_PAUSE_S)
        else:
            return


def _create_tables(db: sqlite3.Connection) -> None:
    """Create the tables in one transaction, unless they are there: two orchestrators may start on one new file."""
    if _number(db, "user_version"):
        return
    db.execute("BEGIN IMMEDIATE")
    if not _number(db, "user_version"):  # read again: another process may have created them meanwhile
        for statement in _CREATE.split(";"):
            db.execute(statement)
    db.commit()


def _number(db: sqlite3.Connection, pragma: str) -> int:
    """A number in the file's head: `application_id` or `user_version`."""
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


def _history_entry(row: Mapping[str, Any]) -> HistoryEntry:
    """The history entry of a row. Raises ValueError."""
    try:
        body = msgspec.json.decode(row["body"], type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ValueError(f"history {row['id']}: {exc}") from exc
    return HistoryEntry(
        id=row["id"], at=row["at"], kind=row["kind"], subject=row["subject"], actor=row["actor"], body=body
    )
