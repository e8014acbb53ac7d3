"""The adapters of this worker and the highest epoch seen, as JSON files: one per adapter, replaced atomically.

The record is the folder of adapters that the engine should have: a file named after each, written after its load
succeeded, deleted with its unload, and read at start. `lora_name` and `lora_path` in it are the body of vLLM's own
`/v1/load_lora_adapter`; a file with these two alone is an adapter that another client loaded. Adapters that are only on
disk have the same files in a folder of their own.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog
from pydantic import TypeAdapter

from lorafleet.identity import lora_id_of
from lorafleet.service.files import make_private_folder, private_opener, write_error_text
from lorafleet.service.state_files import StateFile, state_text
from workers.wire import WorkerAdapter

log = structlog.get_logger()


_RECORD = TypeAdapter(WorkerAdapter)
_LONGEST_NAME = 200
"""Characters of an adapter's name in a file's name, of the 255 that file systems take."""


class InstalledAdapters:
    """The installed adapters of one worker, and those that other clients loaded, in memory and on disk.

    foreign  engine name -> an adapter that another client loaded, or, not wanted, the engine's own settings

    Every change is written at once, so a killed process loses nothing. A thread does the fsync, because in the event
    loop it would take as long as the load of a small adapter: a crashed machine may lose the last few milliseconds.
    A failed write (full disk) is logged once and repeated by `retry_writes`, as is that of a file that was deleted.
    """

    def __init__(self, folder: Path, record: Path | None = None) -> None:
        """Read the adapters and the epoch. Raises OSError for a damaged epoch.

        folder  the state folder, which is created
        record  folder of the adapters that the engine should have; default: `adapters` in the state folder
        """
        self._fsync_thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._record, self._on_disk = record or folder / "adapters", folder / "on_disk"
        self._epoch_file = folder / "epoch.json"
        self._make_folders()
        self._volumes = [StateFile.at(folder), *([] if record is None else [StateFile.at(record)])]
        self._is_away = False
        self.revision = 0  # grows when an adapter is added or removed
        self._sorted: tuple[WorkerAdapter, ...] | None = None
        self._unwritten: set[Path] = set()
        self._adapters: dict[str, WorkerAdapter] = {}
        self.foreign: dict[str, WorkerAdapter] = {}
        self._read_all()
        self.epoch = _read_epoch(self._epoch_file)
        self._start_file = folder / "engine_start.json"
        self._at_start = _read_engine_start(self._start_file)

    def _make_folders(self) -> None:
        """Create both folders of adapters; one that the user named keeps its mode. Raises OSError."""
        if self._record.parent == self._on_disk.parent:
            make_private_folder(self._record)
        else:
            self._record.mkdir(parents=True, exist_ok=True)
        make_private_folder(self._on_disk)

    def _read_all(self) -> None:
        """Read all adapters; damaged files are logged and left out. The record's file counts where there are two."""
        for folder in (self._on_disk, self._record):
            for adapter in _adapters_in(folder):
                if adapter.digest:
                    self._adapters[adapter.engine_name] = replace(adapter, is_wanted=folder == self._record)
                elif folder == self._record:
                    # What was known of its files may have changed since.
                    self.foreign[adapter.engine_name] = replace(adapter, is_wanted=True, files_digest="")

    def get(self, engine_name: str) -> WorkerAdapter | None:
        """The adapter with this engine name; None if it is not installed."""
        return self._adapters.get(engine_name)

    def all(self) -> tuple[WorkerAdapter, ...]:
        """All installed adapters in load order, oldest load first; sorted once after a change."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self._adapters.values(), key=lambda adapter: adapter.order))
        return self._sorted

    def versions(self, lora_id: str) -> tuple[WorkerAdapter, ...]:
        """All versions (digests) of an adapter, oldest load first."""
        return tuple(adapter for adapter in self.all() if adapter.lora_id == lora_id)

    def store(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """Add or replace an adapter in memory and write its file; returns it. A failed write is logged, not raised."""
        self.revision += adapter.engine_name not in self._adapters
        self.update_in_memory(adapter)
        self._write(adapter)
        return adapter

    def store_foreign(self, adapter: WorkerAdapter) -> None:
        """Add or replace an adapter that another client loaded. One that is wanted has a file, as `store` writes it."""
        self.foreign[adapter.engine_name] = adapter
        if adapter.is_wanted:
            self._write(adapter)
        else:
            self._delete(self._path(replace(adapter, is_wanted=True)))

    def forget_foreign(self, name: str) -> None:
        """Remove an adapter that another client loaded, with its file. No-op for one that is not there."""
        if (adapter := self.foreign.pop(name, None)) is not None:
            self._delete(self._path(replace(adapter, is_wanted=True)))

    def remove(self, adapter: WorkerAdapter) -> None:
        """Remove an adapter from memory and delete its file."""
        stored = self._adapters.pop(adapter.engine_name, adapter)
        self._sorted = None
        self.revision += 1
        self._delete(self._path(stored))

    def _path(self, adapter: WorkerAdapter) -> Path:
        """The file of an adapter: in the record where the engine should have it."""
        return (self._record if adapter.is_wanted else self._on_disk) / file_name(adapter.engine_name)

    def _write(self, adapter: WorkerAdapter) -> None:
        """Write an adapter's file, then delete the one in the other folder: a failed write must not lose both."""
        if self.write_json(self._path(adapter), _content(adapter)):
            self._delete(self._path(replace(adapter, is_wanted=not adapter.is_wanted)))

    def _delete(self, path: Path) -> None:
        """Delete a file, which may be missing; `retry_writes` tries again what fails."""
        self._unwritten.discard(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("state file not deleted", path=str(path), error=str(exc))
            self._unwritten.add(path)

    def update_in_memory(self, adapter: WorkerAdapter) -> None:
        """Replace an adapter in memory only, for request counts. The next `store` writes them to disk."""
        self._adapters[adapter.engine_name] = adapter
        self._sorted = None

    def next_load_order(self) -> int:
        """The `order` of an adapter that is loaded now: one more than the highest."""
        return max((adapter.order for adapter in self._adapters.values()), default=0) + 1

    def names_at_start(self, engine_boot_id: str, listed: Iterable[str]) -> frozenset[str]:
        """The names of its own that an engine had when this worker first saw this start of it; `listed`: those now.

        Written to disk, so that an agent that is started again takes nothing for the engine's own that a client has
        loaded meanwhile. Names with a digest are the fleet's.
        """
        if self._at_start[0] != engine_boot_id:
            self._at_start = engine_boot_id, frozenset(name for name in listed if lora_id_of(name) == name)
            self._write_engine_start()
        return self._at_start[1]

    def _write_engine_start(self) -> None:
        """Write which names the engine had at its start."""
        boot_id, names = self._at_start
        self.write_json(self._start_file, {"engine_boot_id": boot_id, "names": sorted(names)})

    def raise_epoch(self, epoch: int) -> None:
        """Set the epoch and write it to disk if it is higher than the stored one; a lower one changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.write_json(self._epoch_file, {"epoch": epoch}, is_flushed=True)

    def retry_writes(self) -> None:
        """Write the adapters' files and the epoch again whose last write failed, or that somebody deleted.

        Deletes files whose deletion failed.

        Without them the next start would lose the adapters, and obey a leader that was replaced. Another failure keeps
        them for later.
        """
        missing = self._missing_files() - self._unwritten
        if missing:
            log.error("state files were deleted: they are written again", folder=str(self._record), files=len(missing))
        for path in sorted(missing | self._unwritten):
            if path == self._epoch_file:
                self.write_json(path, {"epoch": self.epoch}, is_flushed=True)
            elif path == self._start_file:
                self._write_engine_start()
            elif (adapter := self._by_file.get(path)) is not None:
                self._write(adapter)
            elif path.parent in (self._record, self._on_disk):
                self._delete(path)

    @property
    def _by_file(self) -> dict[Path, WorkerAdapter]:
        """The file of each adapter -> the adapter."""
        foreign = (adapter for adapter in self.foreign.values() if adapter.is_wanted)
        return {self._path(adapter): adapter for adapter in (*self.all(), *foreign)}

    def _missing_files(self) -> set[Path]:
        """The files that the folders should have and do not; makes the folders anew.

        None, and logged once, where a folder's volume went away: it comes back with its own files.
        """
        was_away, lost = self._is_away, [each for each in self._volumes if not each.may_be_written_again()]
        self._is_away = bool(lost)
        if lost:
            if not was_away:
                why, folder = state_text(lost[0].state()), str(lost[0].path)
                log.error("state folder lost; bring it back, or restart the agent", folder=folder, why=why)
            return set()
        try:
            self._make_folders()
            there = {folder / name for folder in (self._record, self._on_disk) for name in os.listdir(folder)}  # noqa: PTH208  (names alone)
            is_epoch_there = not self.epoch or self._epoch_file.exists()
        except OSError:
            return set()
        missing = self._by_file.keys() - there
        return missing if is_epoch_there else missing | {self._epoch_file}

    def write_json(self, path: Path, value: object, *, is_flushed: bool = False) -> bool:
        """Replace a JSON file of the state folder; False if the disk does not take it, which the first failure logs.

        A file that was not written is kept for `retry_writes`. `is_flushed`: wait for the disk; else a thread flushes
        the file.
        """
        try:
            write_json_atomically(path, value, is_flushed=is_flushed)
        except OSError as exc:
            if not self._unwritten:
                reason = write_error_text(exc, path.parent)
                log.error("state file not written", path=str(path), error=reason)  # noqa: TRY400
            self._unwritten.add(path)
            return False
        self._unwritten.discard(path)
        if not is_flushed:
            self._fsync_thread.submit(_fsync_file, path)
        return True


def file_name(engine_name: str) -> str:
    """Name of an adapter's file: its engine name, in which `/` and what file systems refuse is percent-encoded.

    A long name is cut, and ends with its hash.
    """
    name = quote(engine_name, safe="@:")
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 33]}~{hashlib.sha256(engine_name.encode()).hexdigest()[:32]}"
    return f"{name}.json"


def _content(adapter: WorkerAdapter) -> Mapping[str, Any]:
    """An adapter's file: the body of vLLM's own load, and what is known of the adapter beside it."""
    known = asdict(adapter)
    del known["is_wanted"]  # its folder says so
    return {"lora_name": adapter.engine_name, "lora_path": adapter.path, **known}


def _adapters_in(folder: Path) -> Iterator[WorkerAdapter]:
    """The adapters of a folder; damaged files are logged and left out."""
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_bytes())
            if "lora_id" not in found:
                name, place = found["lora_name"], found["lora_path"]
                found = {"lora_id": name, "digest": "", "engine_name": name, "path": place}
            yield _RECORD.validate_python(found)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            # A damaged file costs one adapter's history, not the worker's start.
            log.warning("damaged state file ignored", path=str(path), error=repr(exc))


def _read_epoch(path: Path) -> int:
    """The stored epoch, 0 without a file. Raises OSError for a damaged one."""
    try:
        return int(json.loads(path.read_text())["epoch"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as exc:
        # Not 0: a replaced leader's commands would be accepted again.
        message = f'{path} is damaged ({exc!r}); write the orchestrator\'s epoch into it as {{"epoch": N}}'
        raise OSError(message) from exc


def _read_engine_start(path: Path) -> tuple[str, frozenset[str]]:
    """(boot id of an engine, the names of its own that it had at its start); of no engine without a readable file."""
    try:
        found = json.loads(path.read_text())
        return str(found["engine_boot_id"]), frozenset(map(str, found["names"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as exc:
        log.warning("damaged state file ignored", path=str(path), error=str(exc))
    return "", frozenset()


def write_json_atomically(path: Path, value: object, *, is_flushed: bool) -> None:
    """Replace a JSON file atomically; `is_flushed` waits for the disk. Raises OSError."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", opener=private_opener) as file:
        json.dump(value, file)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def _fsync_file(path: Path) -> None:
    """Flush a file to the disk; blocking, errors are ignored."""
    with contextlib.suppress(OSError):  # the file was removed or replaced meanwhile
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
