"""What this worker did, on disk: one small JSON file an adapter, and the highest epoch seen. Written whole or not."""

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import structlog

from lorafleet.service.files import what_failed

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledAdapter:
    """An adapter whose files are installed here. `is_loaded`: the engine should hold it, also after a restart."""

    lora_id: str
    digest: str
    engine_name: str
    path: str
    source: str
    base_model: str
    rank: int
    size_bytes: int
    is_loaded: bool = False
    loaded_at: str | None = None
    last_used: str | None = None
    request_count: int = 0
    load_seconds: float | None = None
    pinned_source: str = ""
    """Where these very bytes are, when `source` is a branch that moves on; "" in records of older agents."""
    secret: str = ""
    """name/key of the credentials for its source."""
    order: int = 0
    """Grows with every load: the order in which a restart loads again."""


class InstalledAdapters:
    """The records of one state folder, held in memory and written through.

    A process that is killed loses nothing. A machine that crashes may lose the last few milliseconds: the wait for the
    disk is a thread's, because the event loop would wait as long as a small adapter's load takes. What a full disk
    does not take is said once and written by `save`: until then a process that is killed loses it.
    """

    def __init__(self, folder: Path) -> None:
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._folder = folder / "adapters"
        self._epoch_file = folder / "epoch.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.revision = 0  # grows whenever an adapter comes or goes
        self._sorted: tuple[InstalledAdapter, ...] | None = None
        self._unsaved: set[Path] = set()
        self._records = {record.engine_name: record for record in _read_all(self._folder)}
        self.epoch = _read_epoch(self._epoch_file)

    def get(self, engine_name: str) -> InstalledAdapter | None:
        return self._records.get(engine_name)

    def all(self) -> tuple[InstalledAdapter, ...]:
        if self._sorted is None:
            self._sorted = tuple(sorted(self._records.values(), key=lambda record: record.order))
        return self._sorted

    def of(self, lora_id: str) -> tuple[InstalledAdapter, ...]:
        """Every version of an adapter, oldest load first."""
        return tuple(record for record in self.all() if record.lora_id == lora_id)

    def put(self, record: InstalledAdapter) -> InstalledAdapter:
        self.revision += record.engine_name not in self._records
        self.keep(record)
        self.write(self._folder / _file_name(record.engine_name), asdict(record))
        return record

    def remove(self, record: InstalledAdapter) -> None:
        """Nothing is known of it any more."""
        self._records.pop(record.engine_name, None)
        self._sorted = None
        self.revision += 1
        path = self._folder / _file_name(record.engine_name)
        self._unsaved.discard(path)
        with contextlib.suppress(OSError):  # it comes back with a restart, which finds no files and forgets it again
            path.unlink(missing_ok=True)

    def keep(self, record: InstalledAdapter) -> None:
        """Change what is in memory alone; it reaches the disk with the next `put`. For counts of use."""
        self._records[record.engine_name] = record
        self._sorted = None

    def next_order(self) -> int:
        return max((record.order for record in self._records.values()), default=0) + 1

    def raise_epoch(self, epoch: int) -> None:
        """Remember the highest epoch seen; a lower one changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.write(self._epoch_file, {"epoch": epoch}, is_flushed=True)

    def save(self) -> None:
        """Write what the disk did not take before."""
        if self._epoch_file in self._unsaved:
            self.write(self._epoch_file, {"epoch": self.epoch}, is_flushed=True)
        if self._unsaved:
            for record in self.all():
                path = self._folder / _file_name(record.engine_name)
                if path in self._unsaved:
                    self.write(path, asdict(record))

    def write(self, path: Path, value: object, *, is_flushed: bool = False) -> bool:
        """Whether a file of this state folder is written; one that is not costs what a crash would forget."""
        try:
            write_whole(path, value, is_flushed=is_flushed)
        except OSError as exc:
            if not self._unsaved:
                why = what_failed(exc, path.parent)
                log.error("the worker's record is not kept", path=str(path), error=why)  # noqa: TRY400
            self._unsaved.add(path)
            return False
        self._unsaved.discard(path)
        if not is_flushed:
            self._flusher.submit(_flush, path)
        return True


def _file_name(engine_name: str) -> str:
    return hashlib.sha256(engine_name.encode()).hexdigest()[:32] + ".json"


def _read_all(folder: Path) -> list[InstalledAdapter]:
    known = {field.name for field in fields(InstalledAdapter)}
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text())
            found.append(InstalledAdapter(**{key: value for key, value in raw.items() if key in known}))
        except (OSError, ValueError, TypeError, AttributeError) as exc:
            # One damaged record costs one adapter's memory of itself, not the worker's start.
            log.warning("record left out", path=str(path), error=str(exc))
    return found


def _read_epoch(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["epoch"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as exc:
        # Not 0: that would let a leader that was replaced give orders again.
        message = f'{path} is damaged ({exc!r}); write the orchestrator\'s epoch into it as {{"epoch": N}}'
        raise OSError(message) from exc


def write_whole(path: Path, value: object, *, is_flushed: bool) -> None:
    """JSON on disk, whole or not at all. Raises OSError. `is_flushed`: also if the machine crashes right afterwards."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(value, file)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def _flush(path: Path) -> None:
    with contextlib.suppress(OSError):  # removed, or replaced by what is flushed next
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
