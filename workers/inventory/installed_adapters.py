"""The adapters installed on this worker and the highest epoch seen, as JSON files in the state folder.

One file per adapter, replaced atomically.
"""

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import structlog
from pydantic import TypeAdapter

from lorafleet.service.files import make_private_folder, private_opener, write_error_text
from lorafleet.service.state_files import StateFile, state_text
from workers.wire import WorkerAdapter

log = structlog.get_logger()


_RECORD = TypeAdapter(WorkerAdapter)


class InstalledAdapters:
    """The installed adapters of one state folder, in memory and on disk.

    Every change is written at once, so a killed process loses nothing. A thread does the fsync, because in the event
    loop it would take as long as the load of a small adapter: a crashed machine may lose the last few milliseconds.
    A failed write (full disk) is logged once and repeated by `retry_writes`, as is that of a file that was deleted.
    """

    def __init__(self, folder: Path) -> None:
        """Read the adapters and the epoch in the state folder, which is created. Raises OSError for a damaged epoch."""
        self._fsync_thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._folder = folder / "adapters"
        self._epoch_file = folder / "epoch.json"
        make_private_folder(self._folder)
        self._state_folder = StateFile.at(folder)
        self._is_away = False
        self.revision = 0  # grows when an adapter is added or removed
        self._sorted: tuple[WorkerAdapter, ...] | None = None
        self._unwritten: set[Path] = set()
        self._adapters = {adapter.engine_name: adapter for adapter in _read_all(self._folder)}
        self.epoch = _read_epoch(self._epoch_file)

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
        self.write_json(self._folder / _file_name(adapter.engine_name), asdict(adapter))
        return adapter

    def remove(self, adapter: WorkerAdapter) -> None:
        """Remove an adapter from memory and delete its JSON file; an error of the disk is ignored."""
        self._adapters.pop(adapter.engine_name, None)
        self._sorted = None
        self.revision += 1
        path = self._folder / _file_name(adapter.engine_name)
        self._unwritten.discard(path)
        with contextlib.suppress(OSError):  # the next start reads it again, finds no weights and removes it
            path.unlink(missing_ok=True)

    def update_in_memory(self, adapter: WorkerAdapter) -> None:
        """Replace an adapter in memory only, for request counts. The next `store` writes them to disk."""
        self._adapters[adapter.engine_name] = adapter
        self._sorted = None

    def next_load_order(self) -> int:
        """The `order` of an adapter that is loaded now: one more than the highest."""
        return max((adapter.order for adapter in self._adapters.values()), default=0) + 1

    def raise_epoch(self, epoch: int) -> None:
        """Set the epoch and write it to disk if it is higher than the stored one; a lower one changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.write_json(self._epoch_file, {"epoch": epoch}, is_flushed=True)

    def retry_writes(self) -> None:
        """Write the adapters' files and the epoch again whose last write failed, or that somebody deleted.

        Without them the next start would lose the adapters, and obey a leader that was replaced. Another failure keeps
        them for later.
        """
        missing = self._missing_files() - self._unwritten
        if missing:
            log.error("state files were deleted: they are written again", folder=str(self._folder), files=len(missing))
        for path in sorted(missing | self._unwritten):
            if path == self._epoch_file:
                self.write_json(path, {"epoch": self.epoch}, is_flushed=True)
            elif (adapter := self._by_file.get(path)) is not None:
                self.write_json(path, asdict(adapter))

    @property
    def _by_file(self) -> dict[Path, WorkerAdapter]:
        """The file of each adapter -> the adapter."""
        return {self._folder / _file_name(adapter.engine_name): adapter for adapter in self.all()}

    def _missing_files(self) -> set[Path]:
        """The files that the folder should have and does not; makes the folder anew.

        None, and logged once, where the folder's volume went away: it comes back with its own files.
        """
        was_away, self._is_away = self._is_away, not self._state_folder.may_be_written_again()
        if self._is_away:
            if not was_away:
                why = state_text(self._state_folder.state())
                log.error("state folder lost; bring it back, or restart the agent", folder=str(self._folder), why=why)
            return set()
        try:
            make_private_folder(self._folder)
            names = set(os.listdir(self._folder))  # noqa: PTH208  (names alone)
            is_epoch_there = not self.epoch or self._epoch_file.exists()
        except OSError:
            return set()
        missing = {path for path in self._by_file if path.name not in names}
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


def _file_name(engine_name: str) -> str:
    """Name of an adapter's JSON file: a hash of its engine name."""
    return hashlib.sha256(engine_name.encode()).hexdigest()[:32] + ".json"


def _read_all(folder: Path) -> list[WorkerAdapter]:
    """Read all JSON files of the folder; damaged ones are logged and left out."""
    adapters = []
    for path in sorted(folder.glob("*.json")):
        try:
            adapters.append(_RECORD.validate_json(path.read_bytes()))
        except (OSError, ValueError) as exc:
            # A damaged file costs one adapter's history, not the worker's start.
            log.warning("damaged state file ignored", path=str(path), error=str(exc))
    return adapters


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
