"""Atomic writes, change stamps of files, and messages for disk errors."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

# A file's modification time in nanoseconds, its inode, and its size in bytes.
Stamp = tuple[int, int, int]

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


def make_folder(folder: Path, setting: str) -> None:
    """Create a folder unless it exists; raises OSError that names the setting and says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = write_error_text(exc, folder)
        raise OSError(f"{setting} {folder}: {problem}; name a folder that can be created and written") from exc


def stamp_of(file: Path) -> Stamp | None:
    """A stamp that changes with the file's content; None if the file cannot be read.

    Links are followed: Kubernetes updates a mounted Secret by moving a link.
    """
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


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
