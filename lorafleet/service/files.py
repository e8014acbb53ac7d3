"""Files that appear whole or not at all, whether a file has changed, and what a full disk is called."""

import errno
import os
import tempfile
from pathlib import Path

# A file's time of change in nanoseconds, its inode, and its size in bytes.
Stamp = tuple[int, int, int]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Put `content` at `path`, in place of what is there, once its bytes are on the disk.

    raises  OSError; then nothing of it is left, and what was at `path` is as it was
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        partial.chmod(mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_folder(folder: Path, setting: str) -> None:
    """Make it where it is not there. Raises OSError that names the setting, and says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        what = what_failed(exc, folder)
        raise OSError(f"{setting} {folder}: {what}; name a folder that can be made and written") from exc


def stamp_of(file: Path) -> Stamp | None:
    """A mark of the file's present content, another one after each change; None where its state cannot be asked for.

    Links are followed: Kubernetes updates a mounted Secret by moving a link.
    """
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def mode_of(path: Path) -> int:
    """`st_mode` of the file or folder, links followed; 0 when nothing is there.

    raises  OSError where that cannot be told, as behind a folder that is not ours to search. So do `Path.exists()` and
            its like up to Python 3.13; from 3.14 on they say that nothing is there.
    """
    try:
        return path.stat().st_mode
    except OSError as exc:
        if exc.errno not in _NOTHING:
            raise
        return 0


def is_full(exc: OSError) -> bool:
    """Whether the disk, or our share of it, is."""
    return exc.errno in _FULL


def no_space(folder: Path) -> str:
    """What is said of a full disk, with what to do."""
    return f"no space left in {folder}: make room"


def what_failed(exc: OSError, folder: Path) -> str:
    """A failure to write in `folder`, in words; a full disk's with what to do."""
    return no_space(folder) if is_full(exc) else exc.strerror or str(exc)
