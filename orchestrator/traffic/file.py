"""The file of past traffic: one SQLite row for each series and slice, and for its shares. Bounded in time and in bytes.

It is a record for people, and may be lost: a file that is damaged at the start, or of another version, is begun anew.
"""

import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from lorafleet.service.files import make_private_file
from lorafleet.service.state_files import state_text
from orchestrator.core.traffic import (
    GRAINS,
    SHARE_GRAINS,
    GaugeSums,
    Grain,
    SeriesKind,
    SeriesSums,
    Shares,
    SharesKey,
    TrafficSlice,
)
from orchestrator.model.usage import RequestCounts
from orchestrator.store.database_files import DatabaseFiles

_IN_MEMORY = ":memory:"
log = structlog.get_logger()

_VERSION = 3
_SCHEMA = """
CREATE TABLE slices (
    step INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, at INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (step, kind, name, at)
) WITHOUT ROWID, STRICT;
CREATE INDEX slices_by_time ON slices (step, at);
CREATE TABLE shares (
    step INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, by TEXT NOT NULL, at INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (step, kind, name, by, at)
) WITHOUT ROWID, STRICT;
CREATE INDEX shares_by_time ON shares (step, at);
"""
_BUSY_S = 2.0
# Part of the slices of a grain that go when the file is too large.
_DROPPED_SHARE = 0.1

# A row is the values of its counts in the order of their fields: names would be most of its bytes.
_values_of = attrgetter(*RequestCounts.__dataclass_fields__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[Any], dict[str, GaugeSums]]).decode
_decode_shares = msgspec.msgpack.Decoder(dict[str, list[Any]]).decode


def _counts_of(values: Iterable[Any]) -> RequestCounts:
    """The counts that `_values_of` has taken apart."""
    return RequestCounts(**dict(zip(RequestCounts.__dataclass_fields__, values, strict=True)))


def _encode_series(sums: SeriesSums) -> bytes:
    """A series as bytes for its row in the file."""
    return _encode((_values_of(sums.counts), sums.gauges))


def _decode_series(stored: bytes) -> SeriesSums:
    """The series in the bytes of its row."""
    values, gauges = _decode(stored)
    return SeriesSums(_counts_of(values), gauges)


def _decode_stored_shares(body: bytes) -> Shares:
    """Shares that were kept."""
    return {name: _counts_of(values) for name, values in _decode_shares(body).items()}


class TrafficFile:
    """Slices of every grain by series. Methods block, and may be called from any thread.

    most_bytes  largest size; beyond it the oldest slices of the finest grain go first
    trouble     why nothing was written to the file at the last try; empty: it was
    """

    def __init__(self, path: Path | None, *, most_bytes: int) -> None:
        """The first call of a method opens the file, or begins it. None: in memory, until the process ends."""
        self._path = path
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        self._files: DatabaseFiles | None = None
        self.trouble = ""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    @property
    def _db(self) -> sqlite3.Connection:
        """The open database, that of the file at the path; the lock is held."""
        if self._opened is None:
            self._opened = self._open()
            # One that is kept in memory, because its file could not be opened, has no file to look at.
            is_file = bool(self._opened.execute("PRAGMA database_list").fetchone()[2])
            self._files = DatabaseFiles(str(self._path)) if is_file else None
        elif self._files is not None:
            self._opened = self._in_place(self._opened, self._files)
        return self._opened

    def _in_place(self, opened: sqlite3.Connection, files: DatabaseFiles) -> sqlite3.Connection:
        """The database of the file at the path: the open one, or anew after its file was deleted or replaced.

        A deleted file is written again from what is open. Where neither can be done, the open one goes on, and
        `trouble` says why.
        """
        state = files.state()
        if state == "there":
            return opened
        self.trouble = state_text(state)
        try:
            if state == "deleted":
                files.write_again(opened)
            elif state != "replaced":
                return opened
            anew = _connected(str(self._path))
        except (OSError, sqlite3.Error, ValueError) as exc:
            log.warning("past traffic is not in its file", path=str(self._path), why=self.trouble, error=str(exc))
            return opened
        opened.close()
        log.warning("past traffic's file opened anew", path=str(self._path), why=self.trouble)
        self._files, self.trouble = DatabaseFiles(str(self._path)), ""
        return anew

    def read(self, grain: Grain, kind: SeriesKind, name: str, since: float) -> dict[int, SeriesSums]:
        """Beginning of a slice -> its sums, of one series."""
        rows = self._rows(
            "SELECT at, body FROM slices WHERE step = ? AND kind = ? AND name = ? AND at >= ?",
            (grain.step_s, kind, name, since),
        )
        return {at: _decode_series(body) for at, body in rows}

    def read_all(self, grain: Grain, kind: SeriesKind, since: float) -> Iterable[tuple[str, int, SeriesSums]]:
        """(name, beginning, sums) of every series of a kind."""
        rows = self._rows(
            "SELECT name, at, body FROM slices WHERE step = ? AND kind = ? AND at >= ?", (grain.step_s, kind, since)
        )
        return ((name, at, _decode_series(body)) for name, at, body in rows)

    def read_shares(self, grain: Grain, key: SharesKey, since: float) -> dict[int, Shares]:
        """Beginning of a slice -> shares of one series in it."""
        rows = self._rows(
            "SELECT at, body FROM shares WHERE step = ? AND kind = ? AND name = ? AND by = ? AND at >= ?",
            (grain.step_s, *key, since),
        )
        return {at: _decode_stored_shares(body) for at, body in rows}

    def read_slice(self, grain: Grain, at: int) -> TrafficSlice:
        """All that was written of one slice."""
        rows = self._rows("SELECT kind, name, body FROM slices WHERE step = ? AND at = ?", (grain.step_s, at))
        shares = self._rows("SELECT kind, name, by, body FROM shares WHERE step = ? AND at = ?", (grain.step_s, at))
        return TrafficSlice(
            {(kind, name): _decode_series(body) for kind, name, body in rows},
            {(kind, name, by): _decode_stored_shares(body) for kind, name, by, body in shares},
        )

    def write(self, grain: Grain, at: int, written: TrafficSlice) -> None:
        """Write a slice in place of what it held; raises nothing: what cannot be written is logged and lost."""
        rows = [(grain.step_s, kind, name, at, _encode_series(sums)) for (kind, name), sums in written.series.items()]
        shares = [
            (grain.step_s, *key, at, _encode({name: _values_of(part) for name, part in parts.items()}))
            for key, parts in written.shares.items()
        ]
        try:
            with self._lock, self._db as db:
                db.executemany("INSERT OR REPLACE INTO slices VALUES (?, ?, ?, ?, ?)", rows)
                db.executemany("INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?, ?, ?)", shares)
            if self._files is None or self._files.state() == "there":
                self.trouble = ""
        except sqlite3.Error as exc:
            self.trouble = str(exc)
            log.warning("past traffic not written", path=str(self._path), error=str(exc))

    def trim(self, now: float) -> None:
        """Drop slices that are too old, and the oldest ones while the file is too large. Raises nothing."""
        try:
            with self._lock:
                with self._db:
                    for grain in GRAINS:
                        self._drop_before("slices", grain, now - grain.kept_s)
                    for grain in SHARE_GRAINS:
                        self._drop_before("shares", grain, now - grain.kept_s)
                for grain in GRAINS:
                    while self._size_bytes() > self._most_bytes and self._drop_oldest(grain):
                        pass
                self._db.execute("PRAGMA incremental_vacuum")
        except sqlite3.Error as exc:
            log.warning("past traffic not trimmed", path=str(self._path), error=str(exc))

    def size_bytes(self) -> int:
        """Bytes that rows take."""
        with self._lock:
            return self._size_bytes()

    def _size_bytes(self) -> int:
        """Bytes of the pages in use; the lock is held."""
        (pages,), (free,), (page,) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * page)

    def _drop_before(self, table: Literal["slices", "shares"], grain: Grain, at: float) -> int:
        """Delete a grain's rows of slices that began before; their number."""
        query = f"DELETE FROM {table} WHERE step = ? AND at < ?"  # noqa: S608  (one of our two names)
        return self._db.execute(query, (grain.step_s, at)).rowcount

    def _drop_oldest(self, grain: Grain) -> bool:
        """Delete a tenth of a grain's time span, at least one slice, with its shares; False: it has none."""
        first, last = self._db.execute("SELECT min(at), max(at) FROM slices WHERE step = ?", (grain.step_s,)).fetchone()
        if first is None:
            return False
        before = first + max(1.0, (last - first) * _DROPPED_SHARE)
        with self._db:
            self._drop_before("shares", grain, before)
            return self._drop_before("slices", grain, before) > 0

    def _rows(self, query: str, arguments: tuple[object, ...]) -> list[tuple]:  # type: ignore[type-arg]
        """The rows of a query; none where the file cannot be read, which is logged."""
        try:
            with self._lock:
                return self._db.execute(query, arguments).fetchall()
        except sqlite3.Error as exc:
            log.warning("past traffic not read", path=str(self._path), error=str(exc))
            return []

    def _open(self) -> sqlite3.Connection:
        """The open database: that of the file, or a new one where it cannot be used."""
        if self._path is None:
            return _connected(_IN_MEMORY)
        try:
            return _connected(str(self._path))
        except (sqlite3.Error, ValueError) as exc:
            log.warning("past traffic begun anew", path=str(self._path), error=str(exc))
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()
        try:
            return _connected(str(self._path))
        except sqlite3.Error as exc:
            log.warning("past traffic kept in memory alone", path=str(self._path), error=str(exc))
            return _connected(_IN_MEMORY)


def _connected(path: str) -> sqlite3.Connection:
    """A connection with our tables. Raises sqlite3.Error, ValueError for another version."""
    if path != _IN_MEMORY:
        with suppress(OSError):  # SQLite says what is wrong
            make_private_file(Path(path))
    db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
    try:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        # A power cut may lose the last seconds; the file stays whole.
        db.execute("PRAGMA synchronous = NORMAL")
        _make_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def _make_tables(db: sqlite3.Connection) -> None:
    """Make our tables where they are missing. Raises sqlite3.Error, ValueError for another version."""
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        with db:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {_VERSION}")
    elif found != _VERSION:
        raise ValueError(f"version {found} is not {_VERSION}")
