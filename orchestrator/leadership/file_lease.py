"""The interface of a lease, and a lease in a small SQLite file for orchestrators of one host."""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import structlog

from lorafleet.service.files import make_private_file
from lorafleet.service.state_files import is_missing
from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord
from orchestrator.store.sqlite import no_space, primary_code

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

_TABLE = """
CREATE TABLE IF NOT EXISTS lease (
    id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL, url TEXT NOT NULL, beat INTEGER NOT NULL,
    duration_s REAL NOT NULL, is_released INTEGER NOT NULL
) STRICT
"""
_FIELDS = "holder, url, beat, duration_s, is_released"


class Lease(Protocol):
    """One lease record. Every call may raise LeaseUnreachable.

    is_absence_new   whether a missing record means that no process has ever led, see `LeaseCandidate`
    place            where the record is, in words
    """

    @property
    def place(self) -> str:
        """Where the record is, in words."""
        ...

    @property
    def is_absence_new(self) -> bool:
        """Whether a missing record means that no process has ever led, see `LeaseCandidate`."""
        ...

    async def read(self) -> LeaseRecord | None:
        """The record; None when there is none."""
        ...

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Store `new` if the record is still `seen`; False when it has changed since it was read."""
        ...

    async def is_gone(self, hold: LeaseRecord) -> bool:
        """Whether the holder's process has certainly ended. False where that cannot be known."""
        ...

    def close(self) -> None:
        """Free what this process holds for the lease; it does not release the lease."""
        ...


class FileLease:
    """A lease in a SQLite file, which is opened for each call so that a deleted or replaced file is noticed.

    Each process keeps a lock on a file of its own. The system releases it when the process ends, so that a successor
    need not wait for the lease to expire.
    """

    place = "the lease's file"
    is_absence_new = True  # an orchestrator of one host leads from its first response on

    def __init__(self, path: Path, *, holder: str) -> None:
        """Create and lock our lock file. Raises OSError when the folder cannot be written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")
        self._path = path
        self._lock_file = self._lock_file_of(holder)
        # One process starts at a time: each finds the lock files of all that have started before it.
        start = _locked(self._lock_file_of("start"))
        try:
            self._lock: int | None = _locked(self._lock_file)
            self._remove_damaged_file()
        finally:
            os.close(start)

    def close(self) -> None:
        """Remove our lock file and its lock. May be called twice."""
        self._thread.shutdown(wait=False)
        self._lock_file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def read(self) -> LeaseRecord | None:
        """The record; None when there is none. Raises LeaseUnreachable."""
        return await self._in_own_thread(self._read)

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Store `new` if the record is still `seen`; False when it has changed. Raises LeaseUnreachable."""
        return await self._in_own_thread(self._write, new, seen)

    async def is_gone(self, hold: LeaseRecord) -> bool:
        """Whether the holder's process has ended, which its unlocked lock file shows."""
        return await self._in_own_thread(self._is_gone, hold)

    async def _in_own_thread(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run a blocking call in the lease's thread: the threads that others share may all be busy for seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **named))

    def _lock_file_of(self, holder: str) -> Path:
        """Path of a holder's lock file."""
        return self._path.with_name(f"{self._path.name}.{holder}")

    def _read(self) -> LeaseRecord | None:
        """The record in the file; None when there is none. Blocking; raises LeaseUnreachable."""
        with self._open_file() as db:
            return _read_record(db)

    def _write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Store `new` if the record is still `seen`; false if not. Blocking; raises LeaseUnreachable.

        After a takeover, removes the lock files of dead processes.
        """
        with self._open_file() as db:
            db.execute("BEGIN IMMEDIATE")
            if _read_record(db) != seen:
                return False
            row = asdict(new)
            db.execute(f"REPLACE INTO lease (id, {_FIELDS}) VALUES (1, ?, ?, ?, ?, ?)", tuple(row.values()))  # noqa: S608
            db.execute("COMMIT")
        if seen is None or seen.holder != new.holder:
            self._remove_dead_lock_files()
        return True

    def _remove_dead_lock_files(self) -> None:
        """Remove lock files of dead processes; only after a takeover, as they prove that a holder has died."""
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            if path != self._lock_file and _is_unlocked(path):
                path.unlink(missing_ok=True)

    def _remove_damaged_file(self) -> None:
        """Remove a file that a power loss has damaged. While another process lives, it stays: that one may lead."""
        lock_files = self._path.parent.glob(f"{self._path.name}.*")
        ours = {self._lock_file, self._lock_file_of("start")}
        if not _is_damaged(self._path) or not all(_is_unlocked(path) for path in lock_files if path not in ours):
            return
        log.warning("damaged lease removed", path=str(self._path))
        for path in (self._path, self._path.with_name(f"{self._path.name}-journal")):
            path.unlink(missing_ok=True)

    def _is_gone(self, hold: LeaseRecord) -> bool:
        """Whether the holder's process has certainly ended."""
        return _is_unlocked(self._lock_file_of(hold.holder))

    @contextlib.contextmanager
    def _open_file(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one block, creating it and its table. Raises LeaseUnreachable."""
        try:
            with contextlib.suppress(OSError):  # SQLite says what is wrong
                make_private_file(self._path)
            db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
            try:
                # Durability is not needed: a power loss ends all processes that could hold the lease. It may leave a
                # damaged file (sqlite.org/pragma.html#pragma_synchronous), which the next start removes.
                db.execute("PRAGMA synchronous = OFF")
                db.execute(_TABLE)
                yield db
            finally:
                db.close()
        except sqlite3.Error as exc:
            raise LeaseUnreachable(f"lease {self._path}: {self._fault_text(exc)}") from exc

    def _fault_text(self, exc: sqlite3.Error) -> str:
        """What is wrong with the file, and the next step."""
        if is_missing(self._path.parent):
            return "its folder was moved or deleted, or its volume went away: bring it back, and this goes on by itself"
        return no_space(exc, self._path) or f"{exc}; if the file is damaged, delete it: it is made again"


def lease_path(store: Path) -> Path:
    """The lease's file for this SQLite store."""
    return store.with_name(f"{store.name}.lease")


def _read_record(db: sqlite3.Connection) -> LeaseRecord | None:
    """The record in the table; None when there is none."""
    row = db.execute(f"SELECT {_FIELDS} FROM lease").fetchone()  # noqa: S608
    if row is None:
        return None
    holder, url, beat, duration_s, is_released = row
    return LeaseRecord(holder=holder, url=url, beat=beat, duration_s=duration_s, is_released=bool(is_released))


def _locked(path: Path) -> int:
    """A descriptor of this file, locked; it is created where it is missing. Raises OSError.

    Blocking: a process that checks the lock holds it for a moment, and one that starts until it has started.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _is_damaged(path: Path) -> bool:
    """Whether the file is there and no whole database."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as db:
            return [row[0] for row in db.execute("PRAGMA quick_check(1)")] != ["ok"]
    except sqlite3.DatabaseError as exc:
        return primary_code(exc) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _is_unlocked(path: Path) -> bool:
    """Whether the process that made this lock file has ended. False without a file: then it is not known."""
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
