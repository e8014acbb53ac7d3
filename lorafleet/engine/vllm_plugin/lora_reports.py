"""Reports of an engine's processes: which modules of an adapter they really have. Files that an agent reads.

The agent makes a folder for an adapter before the load. Each process of the engine that loads it writes one file there;
without that folder it writes none. So the number of files is bounded, and an engine that nobody asks writes nothing.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lorafleet.engine.vllm_plugin.engine_reports import is_engine_folder
from lorafleet.engine.vllm_plugin.module_calls import CallsSeen

REPORTS_VARIABLE = "LORAFLEET_LORA_REPORTS"
"""Environment variable of the engine that names the reports' folder; without it nothing is reported."""

_LARGEST_BYTES = 16 << 20  # 100,000 module names
_WEAKEST_FIRST: Sequence[CallsSeen] = ("no", "not yet", "yes")


@dataclass(frozen=True, slots=True)
class LoraReport:
    """What one process of an engine did with an adapter.

    rank, world_size  the process among those that hold parts of one copy of the base model
    modules, experts  number of modules in the adapter's file, and of those that belong to experts
    ignored           those that this process did not take, by their names in the file; a process of another pipeline
                      stage or of other experts may have taken them
    lora_int_id       the engine's number of the adapter
    host_bytes        of the copy in this process's host memory
    uncalled          those that this process took, and whose layers do not run with an adapter's weights
    calls_seen        whether the process has seen which layers run; until then `uncalled` is empty
    """

    rank: int
    world_size: int
    modules: int
    ignored: tuple[str, ...]
    experts: int = 0
    lora_int_id: int | None = None
    host_bytes: int = 0
    uncalled: tuple[str, ...] = ()
    calls_seen: CallsSeen = "no"


@dataclass(frozen=True, slots=True)
class LoadedModules:
    """How many modules an adapter has, how many of experts, and those that no process of the engine has, sorted.

    host_bytes  of its copies in the host memory of all processes
    uncalled    those that a process has, and that run in none; sorted
    calls_seen  whether all processes have seen which layers run
    """

    modules: int
    ignored: tuple[str, ...]
    experts: int = 0
    lora_int_id: int | None = None
    host_bytes: int = 0
    uncalled: tuple[str, ...] = ()
    calls_seen: CallsSeen = "no"


def is_of_experts(module: str) -> bool:
    """Whether a module of this name belongs to the experts of a mixture of experts."""
    return ".experts" in module


def loaded_modules(reports: Iterable[LoraReport]) -> LoadedModules | None:
    """What all processes of an engine have of an adapter; None if one of them has not reported.

    A module is ignored if every process ignored it, and not called if it runs in none of them.
    """
    found = list(reports)
    if not found or not set(range(max(report.world_size for report in found))) <= {report.rank for report in found}:
        return None
    ignored = frozenset(found[0].ignored).intersection(*(report.ignored for report in found[1:]))
    idle = frozenset.intersection(*(frozenset((*report.ignored, *report.uncalled)) for report in found))
    modules, experts = max((report.modules, report.experts) for report in found)
    seen = {report.calls_seen for report in found}
    return LoadedModules(
        modules,
        tuple(sorted(ignored)),
        experts,
        found[0].lora_int_id,
        sum(each.host_bytes for each in found),
        tuple(sorted(idle - ignored)),
        next(each for each in _WEAKEST_FIRST if each in seen),
    )


def ask_for_reports(folder: Path, engine_name: str) -> None:
    """Make the engine's processes report on their next load of this adapter; older reports on it are deleted.

    raises  OSError if the folder cannot be made
    """
    forget_reports(folder, engine_name)
    _reports_folder(folder, engine_name).mkdir(parents=True)


def write_report(folder: Path, engine_name: str, report: LoraReport) -> None:
    """Write a process's report on an adapter, atomically; no-op unless it was asked for. Raises OSError."""
    place = _reports_folder(folder, engine_name)
    if not place.is_dir():
        return
    partial = place / f"{os.getpid()}.partial"
    partial.write_text(json.dumps(asdict(report)))
    partial.replace(place / f"{os.getpid()}.json")


def read_reports(folder: Path, engine_name: str) -> Sequence[LoraReport]:
    """The reports on an adapter so far; a file that is no report is left out."""
    reports = []
    for path in sorted(_reports_folder(folder, engine_name).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, StopIteration):
            if path.stat().st_size <= _LARGEST_BYTES:
                raw = json.loads(path.read_bytes())
                ignored, uncalled = (tuple(str(name) for name in raw[key]) for key in ("ignored", "uncalled"))
                rank, world_size, modules, experts, host_bytes = (
                    int(raw[name]) for name in ("rank", "world_size", "modules", "experts", "host_bytes")
                )
                number = raw["lora_int_id"]
                int_id = None if number is None else int(number)
                seen = next(each for each in _WEAKEST_FIRST if each == raw["calls_seen"])
                reports.append(
                    LoraReport(rank, world_size, modules, ignored, experts, int_id, host_bytes, uncalled, seen)
                )
    return reports


def forget_reports(folder: Path, engine_name: str) -> None:
    """Delete an adapter's reports, so that no further ones are written; errors of the disk are ignored."""
    shutil.rmtree(_reports_folder(folder, engine_name), ignore_errors=True)


def forget_all_reports(folder: Path) -> None:
    """Delete the reports on all adapters, of loads that failed or were cut short; errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not is_engine_folder(path):
                shutil.rmtree(path, ignore_errors=True)


def _reports_folder(folder: Path, engine_name: str) -> Path:
    """The folder of an adapter's reports. Its name is a hash, because an engine name may have any characters."""
    return folder / hashlib.sha256(engine_name.encode()).hexdigest()[:32]
