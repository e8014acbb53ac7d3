"""A machine's disk: what of its files outlives a power loss, and writes that fail while it is full.

As with ext4 or XFS. `fsync` of a file keeps its bytes and its present name, `fsync` of a folder the names in it. The
journal keeps all names every five seconds. What was not kept may be there, be there in part, or be gone. A database of
SQLite keeps each commit with `synchronous = FULL`; with less, its log since the last checkpoint may be gone.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.determinism import running_node

JOURNAL_S = 5.0
"""Seconds between two commits of the file system's journal (ext4's default)."""
_WRITTEN_BACK_AFTER = 6
"""Commits after which the kernel has written a file back that nobody changed: 30 s, as dirty_expire_centisecs."""
_DATABASE_ENDS = (".db", ".db-wal", ".db-shm", ".db-journal")
_FULL_SYNC = 2
_MOST_PAGES = 0x7FFFFFFF

Names = dict[str, int]
"""A folder's entries: name -> inode."""


@dataclass(slots=True)
class FileTree:
    """Inodes of a disk: names of each folder, bytes and mode of each file. `root`: the top folder's."""

    root: int = 0
    folders: dict[int, Names] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    modes: dict[int, int] = field(default_factory=dict)


class Disk:
    """The disk of one machine, below one folder.

    is_full   whether writes fail with ENOSPC; SQLite may fill its free pages, and grows no more
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_full = False
        self._kept_bytes: dict[int, bytes] = {}
        self._kept_names: dict[int, Names] = {}
        self._unchanged: dict[int, tuple[bytes, int]] = {}
        # An open descriptor of each flushed inode, so that no other file gets its number.
        self._descriptors: dict[int, int] = {}

    def contains(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{self.folder}{os.sep}")

    def check_room(self) -> None:
        """Raises OSError while the disk is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(self, descriptor: int) -> None:
        """Keep a file's bytes and name, or a folder's names. Raises OSError while the disk is full."""
        self.check_room()
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found = os.fstat(descriptor)
        self._hold(found.st_ino, descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._kept_names[found.st_ino] = _names_in(path)
            return
        if self.contains(path) and path.exists():
            self._kept_bytes[found.st_ino] = path.read_bytes()
            self._kept_names.setdefault(path.parent.stat().st_ino, {})[path.name] = found.st_ino

    def commit_journal(self) -> None:
        """Keep all names, and the bytes of files that have not changed for a while. Call every `JOURNAL_S`."""
        tree = _read_tree(self.folder)
        self._kept_names |= tree.folders
        for inode, content in tree.files.items():
            before, times = self._unchanged.get(inode, (content, 0))
            self._unchanged[inode] = content, times + 1 if before == content else 0
            if self._unchanged[inode][1] >= _WRITTEN_BACK_AFTER:
                self._kept_bytes[inode] = content

    @contextlib.contextmanager
    def losing_power(self, databases: list[sqlite3.Connection], chance: Random) -> Iterator[None]:
        """Lose what is not kept. The machine's processes end within the block, with these databases."""
        unsafe = {path for database in databases for path in _unsafe_logs(database)}
        before = _read_tree(self.folder)
        yield
        _write_tree(self.folder, self._after_loss(before, chance))
        for path in sorted(unsafe):
            if chance.random() < 0.5:
                path.unlink(missing_ok=True)
        for path in self.folder.rglob("*.db-shm"):
            path.unlink()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._unchanged.clear()
        after = _read_tree(self.folder)
        self._kept_names, self._kept_bytes = dict(after.folders), dict(after.files)

    def _hold(self, inode: int, descriptor: int) -> None:
        if inode not in self._descriptors:
            self._descriptors[inode] = os.dup(descriptor)

    def _after_loss(self, now: FileTree, chance: Random) -> FileTree:
        """What is found after the next start."""
        found = FileTree(now.root, modes=now.modes)
        databases = {inode for names in now.folders.values() for name, inode in names.items() if _is_database(name)}

        def visit(folder: int) -> None:
            present, kept = now.folders.get(folder, {}), self._kept_names.get(folder, {})
            chosen = dict(present) if chance.random() < 0.5 else dict(kept)
            chosen |= {name: inode for name, inode in present.items() if _is_database(name)}
            found.folders[folder] = chosen
            for name, inode in sorted(chosen.items()):
                if inode in now.folders or inode in self._kept_names:
                    visit(inode)
                elif inode in now.files or inode in self._kept_bytes:
                    is_kept = inode in databases
                    found.files[inode] = now.files[inode] if is_kept else self._bytes_left(inode, now, chance)
                else:
                    del chosen[name]

        visit(now.root)
        return found

    def _bytes_left(self, inode: int, now: FileTree, chance: Random) -> bytes:
        """A file's bytes: those that were kept, and perhaps what was written since, or its beginning."""
        kept = self._kept_bytes.get(inode, b"")
        written = now.files.get(inode, kept)
        if written == kept:
            return kept
        if not written.startswith(kept):
            return chance.choice((kept, written))
        return written[: chance.choice((len(kept), len(written), chance.randint(len(kept), len(written))))]


def _is_database(name: str) -> bool:
    return name.endswith(_DATABASE_ENDS)


def _names_in(folder: Path) -> Names:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _read_tree(folder: Path) -> FileTree:
    tree = FileTree(folder.stat().st_ino)
    for place, _folders, files in os.walk(folder):
        here = Path(place)
        inode = here.stat().st_ino
        tree.folders[inode] = _names_in(here)
        tree.modes[inode] = here.stat().st_mode
        for name in files:
            if (here / name).is_file() and not (here / name).is_symlink():
                tree.files[tree.folders[inode][name]] = (here / name).read_bytes()
                tree.modes[tree.folders[inode][name]] = (here / name).stat().st_mode
    return tree


def _write_tree(folder: Path, tree: FileTree) -> None:
    """Put these files in the place of the folder's present ones."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()

    def write(into: Path, inode: int) -> None:
        for name, child in tree.folders[inode].items():
            if child in tree.folders:
                (into / name).mkdir()
                write(into / name, child)
            else:
                (into / name).write_bytes(tree.files[child])
            if child in tree.modes:
                (into / name).chmod(stat.S_IMODE(tree.modes[child]))

    write(folder, tree.root)


def _unsafe_logs(database: sqlite3.Connection) -> list[Path]:
    """The log of a database that is not flushed at each commit."""
    try:
        if database.execute("PRAGMA synchronous").fetchone()[0] >= _FULL_SYNC:
            return []
        return [Path(f"{row[2]}-wal") for row in database.execute("PRAGMA database_list").fetchall() if row[2]]
    except sqlite3.Error:  # closed already
        return []


def limit_databases(databases: list[sqlite3.Connection], *, is_full: bool) -> None:
    """Let databases grow no more while the disk is full."""
    for database in databases:
        with contextlib.suppress(sqlite3.Error):
            database.execute(f"PRAGMA max_page_count = {1 if is_full else _MOST_PAGES}").fetchone()


def install() -> None:
    """Let every write of a simulated process go to its machine's disk."""
    os.fsync = _fsync
    os.open = _checked(os.open, lambda _path, flags, *_more, **_named: bool(flags & (os.O_CREAT | os.O_WRONLY)))
    os.mkdir = _checked(os.mkdir, lambda *_all, **_named: True)
    builtins.open = io.open = _checked(io.open, _writes)


def _fsync(file: Any) -> None:
    """`os.fsync` of a simulated process; of the simulation itself nothing is flushed."""
    node = running_node.get()
    if node is not None and node.disk is not None:
        node.disk.fsync(file if isinstance(file, int) else file.fileno())


def _writes(_path: object, mode: str = "r", *_more: object, **_named: object) -> bool:
    return any(letter in mode for letter in "wax+")


def _checked(call: Callable[..., Any], is_write: Callable[..., bool]) -> Callable[..., Any]:
    """The call, which fails for a write to a full disk."""

    def checked(path: Any, *args: Any, **named: Any) -> Any:
        node = running_node.get()
        disk = None if node is None else node.disk
        if disk is not None and disk.is_full and disk.contains(path) and is_write(path, *args, **named):
            disk.check_room()
        return call(path, *args, **named)

    return checked
