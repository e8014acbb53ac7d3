"""Atomic writes, change stamps of files, and messages for disk errors."""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

# A file's modification time in nanoseconds, its inode, and its size in bytes.
Stamp = tuple[int, int, int]

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replace `path` by a file with this content, after the bytes are on the disk.

    owner   user and group that the file gets where the process may give them; None: the process's own
    raises  OSError; then `path` is unchanged and no partial file is left
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        if owner is not None:
            with contextlib.suppress(PermissionError):
                os.chown(partial, *owner)
        partial.chmod(mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_folder(folder: Path, setting: str, *, is_private: bool = False) -> None:
    """Create a folder unless it exists; raises OSError that names the setting and says what to do.

    is_private  only this process's user may look into it, and read the files in it: an earlier version let everybody
    """
    try:
        if is_private:
            make_private_folder(folder)
            for entry in os.scandir(folder):
                if entry.is_file(follow_symlinks=False):
                    _restrict_mode(Path(entry.path), _PRIVATE_FILE)
        else:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = write_error_text(exc, folder)
        raise OSError(f"{setting} {folder}: {problem}; name a folder that can be created and written") from exc


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this process's user may look into; an existing one becomes so. Raises OSError.

    A folder of another user, or one that everybody shares (sticky, such as /tmp), keeps its mode.
    """
    try:
        folder.mkdir(mode=_PRIVATE_FOLDER, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        if not folder.stat().st_mode & stat.S_ISVTX:
            _restrict_mode(folder, _PRIVATE_FOLDER)


def make_private_file(path: Path) -> None:
    """Create an empty file that only this process's user may read, unless it exists; an existing one becomes so.

    So do the files that SQLite keeps beside a database; those that it makes later get the database's mode. A file of
    another user keeps its mode. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_FILE))
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            _restrict_mode(path.with_name(path.name + suffix), _PRIVATE_FILE)


def private_opener(path: str, flags: int) -> int:
    """An `opener` of `open`: a file that it creates is for this process's user alone."""
    return os.open(path, flags | os.O_CLOEXEC, _PRIVATE_FILE)


def _restrict_mode(path: Path, most: int) -> None:
    """Take the rights beyond `most` from a file or folder of this user. Raises OSError."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and mode & ~most & 0o777:
        path.chmod(mode & (most | 0o7000))


def stamp_of(file: Path) -> Stamp | None:
    """A stamp that changes with the file's content; None if the file cannot be read.

    Links are followed: Kubernetes updates a mounted Secret by moving a link.
    """
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def mode_of(path: Path) -> int:
    """`st_mode` of a file or folder, links followed; 0 if it does not exist.

    raises  OSError if that is unknown, as in a folder that may not be searched. (`Path.exists()` raises as well up to
            Python 3.13; from 3.14 on it returns False.)
    """
    try:
        return path.stat().st_mode
    except OSError as exc:
        if exc.errno not in _MISSING:
            raise
        return 0


def is_full(exc: OSError) -> bool:
    """Whether the error is a full disk or an exceeded quota."""
    return exc.errno in _DISK_FULL


def disk_full_text(folder: Path) -> str:
    """The message for a full disk."""
    return f"no space left in {folder}: make room"


def write_error_text(exc: OSError, folder: Path) -> str:
    """The message for a failed write in `folder`."""
    return disk_full_text(folder) if is_full(exc) else exc.strerror or str(exc)
