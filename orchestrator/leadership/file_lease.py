"""Where the lease is kept: an interface, and a small SQLite file beside the store for orchestrators of one host."""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord
from orchestrator.store.sqlite import no_space

_TABLE = """
CREATE TABLE IF NOT EXISTS lease (
    id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL, url TEXT NOT NULL, beat INTEGER NOT NULL,
    duration_s REAL NOT NULL, is_released INTEGER NOT NULL
) STRICT
"""
_FIELDS = "holder, url, beat, duration_s, is_released"


class Lease(Protocol):
    """One record. Every call may raise LeaseUnreachable.

    is_absence_new   whether no record means that nobody has ever led, as far as whoever starts may tell
    """

    @property
    def is_absence_new(self) -> bool: ...

    async def read(self) -> LeaseRecord | None: ...

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Put `new` in place of exactly `seen`; False when something else is there by now."""
        ...

    async def is_gone(self, hold: LeaseRecord) -> bool:
        """Whether its holder certainly runs no more. False where that cannot be known."""
        ...

    async def is_late_look_safe(self) -> bool:
        """Whether a holder whose time is over may look at the record before its term ends.

        True where nobody else is there who could have taken it, or where all that a late holder writes is refused.
        """
        ...

    def close(self) -> None: ...


class FileLease:
    """The record in a SQLite file, opened for each call, so that a file that is deleted or replaced is noticed.

    A living holder keeps a lock on a file of its own, which the system lets go of with the process, however it ends:
    so its successor need not wait for the time to run out.
    """

    is_absence_new = True  # a fleet of one host leads from its first answer on

    def __init__(self, path: Path, *, holder: str) -> None:
        """Raises OSError when the folder cannot be written."""
        self._path = path
        self._alive = self._sign_of_life(holder)
        self._lock: int | None = os.open(self._alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # who looks whether we live has it for a moment

    def close(self) -> None:
        """No sign of life any more. May be called again."""
        self._alive.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def read(self) -> LeaseRecord | None:
        return await asyncio.to_thread(self._read)

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        return await asyncio.to_thread(self._write, new, seen)

    async def is_gone(self, hold: LeaseRecord) -> bool:
        return await asyncio.to_thread(self._is_gone, hold)

    async def is_late_look_safe(self) -> bool:
        """Whether no other process lives that could hold this lease; one that starts now waits for our time first."""
        return await asyncio.to_thread(self._is_alone)

    def _is_alone(self) -> bool:
        others = [path for path in self._path.parent.glob(f"{self._path.name}.*") if path != self._alive]
        return all(_is_unlocked(path) or not path.exists() for path in others)

    def _sign_of_life(self, holder: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{holder}")

    def _read(self) -> LeaseRecord | None:
        with self._open() as db:
            return _found(db)

    def _write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            if _found(db) != seen:
                return False
            row = asdict(new)
            db.execute(f"REPLACE INTO lease (id, {_FIELDS}) VALUES (1, ?, ?, ?, ?, ?)", tuple(row.values()))  # noqa: S608
            db.execute("COMMIT")
        if seen is None or seen.holder != new.holder:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Remove what killed processes have left. Only by who took the lease: until then it says that a holder died."""
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            if path != self._alive and _is_unlocked(path):
                path.unlink(missing_ok=True)

    def _is_gone(self, hold: LeaseRecord) -> bool:
        return _is_unlocked(self._sign_of_life(hold.holder))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
            try:
                # Not worth a wait for the disk: a host that loses power loses all who could hold the lease.
                db.execute("PRAGMA synchronous = OFF")
                db.execute(_TABLE)
                yield db
            finally:
                db.close()
        except sqlite3.Error as exc:
            what = no_space(exc, self._path) or f"{exc}; if the file is damaged, delete it: it is made again"
            raise LeaseUnreachable(f"lease {self._path}: {what}") from exc


def _found(db: sqlite3.Connection) -> LeaseRecord | None:
    row = db.execute(f"SELECT {_FIELDS} FROM lease").fetchone()  # noqa: S608
    if row is None:
        return None
    holder, url, beat, duration_s, is_released = row
    return LeaseRecord(holder=holder, url=url, beat=beat, duration_s=duration_s, is_released=bool(is_released))


def _is_unlocked(path: Path) -> bool:
    """Whether the process that made this file has ended. False when there is no such file: only time will tell."""
    try:
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(found)
