"""What an engine's processes say of their LoRA kernels and their adapter pool. Files that an agent reads.

Each process writes one report at its start, and the first one counts in a mapped file: a count costs the engine a few
nanoseconds and no call of the system.
"""

import contextlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_FOLDER = "engine"
_MISSES = struct.Struct("=QQ")
_LARGEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EngineProcessReport:
    """What one process of an engine runs adapters with.

    punica      class of the wrapper of its LoRA kernels, such as PunicaWrapperGPU
    device      torch's type of its device, such as cuda or cpu
    slot_bytes  memory there of one adapter slot, whatever adapter is in it
    """

    punica: str
    device: str
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PoolMisses:
    """Adapters that a batch needed and that were in no device slot: found in host memory, or read from disk."""

    host: int = 0
    disk: int = 0


class PoolMissCounter:
    """Counts a process's pool misses in a mapped file, from 0."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the file below the reports' folder cannot be made."""
        path = engine_folder(folder) / f"{os.getpid()}.misses"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_MISSES.pack(0, 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _MISSES.size)
        self._host = self._disk = 0

    def count(self, wanted: Iterable[int], on_device: Container[int], in_host: Container[int]) -> None:
        """Count the adapters of a batch by where they are before it runs; those on the device cost a look-up alone."""
        missing = [number for number in wanted if number not in on_device]
        if missing:
            found = sum(number in in_host for number in missing)
            self._host += found
            self._disk += len(missing) - found
            _MISSES.pack_into(self._map, 0, self._host, self._disk)


def has_no_gpu_kernels(reports: Iterable[EngineProcessReport]) -> bool:
    """Whether a process on a GPU runs adapters without the kernels of its device."""
    return any(report.device not in {"", "cpu"} and not report.punica.endswith(("GPU", "XPU")) for report in reports)


def punica_names(reports: Iterable[EngineProcessReport]) -> str:
    """The wrappers of an engine's processes, mostly one; "" without a report."""
    return ", ".join(sorted({report.punica for report in reports}))


def write_engine_report(folder: Path, report: EngineProcessReport) -> None:
    """Write this process's report, atomically. Raises OSError."""
    place = engine_folder(folder)
    place.mkdir(parents=True, exist_ok=True)
    partial = place / f"{os.getpid()}.partial"
    partial.write_text(json.dumps(asdict(report)))
    partial.replace(place / f"{os.getpid()}.json")


def read_engine_reports(folder: Path) -> tuple[EngineProcessReport, ...]:
    """The reports of the engine's processes; a file that is no report is left out."""
    reports = []
    for path in sorted(engine_folder(folder).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if path.stat().st_size <= _LARGEST_BYTES:
                raw = json.loads(path.read_bytes())
                reports.append(EngineProcessReport(str(raw["punica"]), str(raw["device"]), int(raw["slot_bytes"])))
    return tuple(reports)


def read_pool_misses(folder: Path) -> Mapping[str, PoolMisses]:
    """The misses since each counting process began, by its file; empty for an engine that does not count."""
    found = {}
    for path in engine_folder(folder).glob("*.misses"):
        with contextlib.suppress(OSError, struct.error):
            found[path.name] = PoolMisses(*_MISSES.unpack(path.read_bytes()))
    return found


def forget_engine_reports(folder: Path) -> None:
    """Delete what an earlier engine's processes wrote; errors of the disk are ignored."""
    shutil.rmtree(engine_folder(folder), ignore_errors=True)


def is_engine_folder(path: Path) -> bool:
    """Whether this entry of the reports' folder has the reports of processes, in place of an adapter's."""
    return path.name == _FOLDER


def engine_folder(folder: Path) -> Path:
    """The folder of what an engine's processes write, and what is offered to them; deleted before each start."""
    return folder / _FOLDER
