"""State files that a process keeps open or writes anew: whether each is still the file at its path, or not.

A process that has a file open goes on writing to it after the file was deleted, replaced or moved with its folder.
Nothing fails, and the next start finds none of it. So the owner of a state file looks at the path now and then.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

FileId = tuple[int, int]
"""Device and inode: the same for as long as it is the same file, under whatever name."""

FileState = Literal["there", "deleted", "replaced", "folder_gone", "unreadable"]

_WORDS: dict[FileState, str] = {
    "there": "",
    "deleted": "the file was deleted or moved away",
    "replaced": "another file is in its place",
    "folder_gone": "its folder was moved, deleted or replaced, or its volume went away",
    "unreadable": "the file cannot be looked at, as its disk or volume fails",
}


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file as it was when this process opened or wrote it.

    id      of the file
    folder  of the folder with the file
    """

    path: Path
    id: FileId
    folder: FileId

    @classmethod
    def at(cls, path: Path) -> Self:
        """The file at this path now. Raises OSError if there is none."""
        return cls(path, _id_of(path), _id_of(path.parent))

    def state(self) -> FileState:
        """What became of the file. `deleted` only in the same folder: in another one, nobody deleted this file."""
        try:
            if _id_of(self.path) == self.id:
                return "there"
            return "replaced" if _id_of(self.path.parent) == self.folder else "folder_gone"
        except (FileNotFoundError, NotADirectoryError):
            return self._state_without_file()
        except OSError:  # EIO of a disk, ESTALE of a network file system, or a folder that may not be searched
            return "unreadable"

    def _state_without_file(self) -> FileState:
        """What became of a file that its path does not have."""
        try:
            return "deleted" if _id_of(self.path.parent) == self.folder else "folder_gone"
        except (FileNotFoundError, NotADirectoryError):
            return "folder_gone"
        except OSError:
            return "unreadable"

    def may_be_written_again(self) -> bool:
        """Whether a file or folder that is derived from memory may be made anew at this path.

        Not where its folder or volume went away: the volume comes back with the older state.
        """
        state = self.state()
        if state == "replaced":
            return is_on_device(self.path, self.id[0])
        return state in ("there", "deleted")


def is_on_device(path: Path, device: int) -> bool:
    """Whether there is such a file or folder, on this device; False where that is unknown."""
    try:
        return path.stat().st_dev == device
    except OSError:
        return False


def is_missing(path: Path) -> bool:
    """Whether there is no such file, for certain: not where its disk fails, or its folder may not be searched."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def state_text(state: FileState) -> str:
    """The state in words; empty for a file that is there."""
    return _WORDS[state]


def _id_of(path: Path) -> FileId:
    """Device and inode, links followed. Raises OSError."""
    found = path.stat()
    return found.st_dev, found.st_ino


def is_read_only(folder: Path) -> bool:
    """Whether the folder's file system is mounted read-only; False where that is unknown."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False
