"""Adapters that this worker can see in its folder (`lora_path`), hashed once and again when they change."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from lorafleet.service.files import mode_of
from orchestrator.wire import checked_lora_id
from workers.core.errors import SourceError
from workers.core.manifest import CONFIG_NAME, AdapterRules, Manifest, is_adapter_file
from workers.storage.verify import read_manifest

log = structlog.get_logger()

_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """One adapter of the folder: its manifest, or why it cannot be served."""

    lora_id: str
    path: Path
    manifest: Manifest | None
    error: str | None = None


class LocalAdapters:
    """One folder. Every subfolder with an `adapter_config.json` is an adapter; its path below is its lora_id."""

    def __init__(self, folder: Path | None, rules: AdapterRules) -> None:
        self.folder = folder
        self.rules = rules
        self.revision = 0  # grows with every scan that found a change
        self._seen: dict[str, tuple[_Stamp, LocalAdapter]] = {}
        self._is_stopping = False
        self.has_scanned = asyncio.Event()
        """Set after the first scan, which reads every adapter."""
        if folder is None:
            self.has_scanned.set()

    def stop(self) -> None:
        """Whatever has not been read yet is not read any more: this process ends."""
        self._is_stopping = True

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]:
        return tuple(shelved for _, shelved in self._seen.values())

    def find(self, lora_id: str) -> LocalAdapter | None:
        """The adapter as the last scan found it."""
        found = self._seen.get(lora_id)
        return None if found is None else found[1]

    def path(self, lora_id: str) -> Path | None:
        """The adapter's folder, also of one that was put there after the last scan."""
        if self.folder is None:
            return None
        path = self.folder / lora_id
        return path if (path / CONFIG_NAME).is_file() else None

    async def scan(self) -> bool:
        """Look again; whether anything changed. New and changed adapters are read through once."""
        if self.folder is None:
            return False
        try:
            found = await asyncio.to_thread(self._scan, self.folder)
        finally:
            self.has_scanned.set()
        if self._is_stopping:
            return False
        changed = found != self._seen
        self._seen = found
        self.revision += changed
        return changed

    def _scan(self, root: Path) -> dict[str, tuple[_Stamp, LocalAdapter]]:
        found: dict[str, tuple[_Stamp, LocalAdapter]] = {}
        for folder, subfolders, names in os.walk(root):
            if self._is_stopping:
                break
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            if CONFIG_NAME not in names or Path(folder) == root:
                continue
            path = Path(folder)
            lora_id = path.relative_to(root).as_posix()
            try:
                stamp = _stamp(path)
            except OSError as exc:
                # Going away, or not ours to read: the next look tells which. It costs no other adapter its place.
                log.warning("adapter in lora_path left out", lora_id=lora_id, error=str(exc))
                continue
            known = self._seen.get(lora_id)
            found[lora_id] = known if known and known[0] == stamp else (stamp, self._read_adapter(lora_id, path))
        return found

    def _read_adapter(self, lora_id: str, path: Path) -> LocalAdapter:
        try:
            checked_lora_id(lora_id)
            return LocalAdapter(lora_id, path, read_manifest(path, self.rules))
        except (SourceError, ValueError, OSError) as exc:
            log.warning("adapter in lora_path cannot be served", lora_id=lora_id, error=str(exc))
            return LocalAdapter(lora_id, path, None, str(exc))


def _stamp(path: Path) -> _Stamp:
    rows = []
    for file in sorted(path.iterdir()):
        if is_adapter_file(file.name) and mode_of(file):
            status = file.stat()
            rows.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(rows)
