"""The files of an open SQLite database: whether they are still those at their path, and a deleted one written again.

SQLite goes on writing to a file that was deleted or replaced, and reports success. A commit counts only once the file
at the path is known to be the open one.
"""

import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

from lorafleet.service.state_files import FileState, StateFile

_BESIDE = ("", "-wal", "-shm")


class DatabaseFiles:
    """A database file with the two files of its WAL mode, as one connection has them open.

    A database in memory has none of them, and counts as there.
    """

    def __init__(self, path: str) -> None:
        """Note the files that are there now: call it once the connection has read or written."""
        self.path = Path(path)
        self._noted: dict[str, StateFile] = {}
        self._note()

    def _note(self) -> None:
        """Note files that were not there before."""
        for suffix in _BESIDE:
            if suffix not in self._noted:
                with suppress(OSError):
                    self._noted[suffix] = StateFile.at(self._beside(suffix))

    def _beside(self, suffix: str) -> Path:
        """The path of the database, or of one of the two files beside it."""
        return self.path.with_name(self.path.name + suffix)

    def state(self) -> FileState:
        """What became of the files: the state of the database, or of the first one beside it that is not there."""
        states = (noted.state() for noted in self._noted.values())
        return next((state for state in states if state != "there"), "there")

    def is_replaced(self) -> bool:
        """Whether another database is at the path."""
        return "" in self._noted and self._noted[""].state() == "replaced"

    def remove_beside(self) -> None:
        """Remove our two files beside a path that has our database no more; the connection goes on with them.

        The next process that opens the path would take them for those of the database there, and damage it. Raises
        OSError.
        """
        for suffix in _BESIDE[1:]:
            if suffix in self._noted and self._noted[suffix].state() == "there":
                self._beside(suffix).unlink()

    def write_again(self, db: sqlite3.Connection) -> None:
        """Bring all that the connection has to the path, where files were deleted. The caller opens the path anew.

        A file that somebody else put there stays. Raises OSError, sqlite3.Error; then the connection is still usable.
        """
        if self._noted[""].state() == "there":
            # Without its own WAL file the database lacks what was not yet moved into it.
            busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise sqlite3.OperationalError("another process reads the database")
            return
        copy = _copy_beside(db, self.path)
        try:
            self.remove_beside()
            os.link(copy, self.path)  # unlike a rename it fails where a file is
            _flush_folder(self.path.parent)
        finally:
            copy.unlink(missing_ok=True)


def copy_into(db: sqlite3.Connection, path: Path) -> None:
    """Copy the whole database into an empty file, flushed and without files beside it. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as copy:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")


def _copy_beside(db: sqlite3.Connection, path: Path) -> Path:
    """A copy of the database under a name of its own in the path's folder. Raises OSError, sqlite3.Error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    copy = Path(name)
    try:
        copy_into(db, copy)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    return copy


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk; errors are ignored, as some file systems cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
