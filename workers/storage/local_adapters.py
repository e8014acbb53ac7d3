"""The adapters in the folder `lora_path`, verified once and again when their files change."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import JsonValue, TypeAdapter

from lorafleet.service.files import mode_of
from orchestrator.model.names import checked_lora_id
from workers.core.errors import SourceError, sendable
from workers.sources.file_system import FileSystemCalls
from workers.verification.adapter_files import is_adapter_file
from workers.verification.manifest import CONFIG_NAME, AdapterRules, Manifest
from workers.verification.verify import read_description, read_manifest

log = structlog.get_logger()

METADATA_NAME = "metadata.json"
_LARGEST_METADATA_BYTES = 64 << 10  # what follows is cut off, so that it is no JSON
_METADATA: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])

_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """One adapter in `lora_path`: its manifest, or the error why it cannot be served."""

    lora_id: str
    path: Path
    manifest: Manifest | None
    error: str | None = None
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the file `metadata.json` beside it holds; nothing of it is acted on."""


class LocalAdapters:
    """The adapters in one folder: every subfolder with an `adapter_config.json`; its relative path is the lora_id."""

    def __init__(self, folder: Path | None, rules: AdapterRules, *, calls: FileSystemCalls | None = None) -> None:
        """Scans nothing yet; without a folder, the first scan counts as done.

        calls  runs what asks the folder's file system, which may hang; default: for 30 s without progress
        """
        self._calls = calls or FileSystemCalls(timeout_s=30.0)
        self._progress = 0
        self._hangs = False
        self.folder = folder
        self.rules = rules
        self.revision = 0  # grows with every scan that finds a change
        self._scanned: dict[str, tuple[_Stamp, LocalAdapter]] = {}
        self._is_stopping = False
        self._is_stale = False
        self.has_scanned = asyncio.Event()
        """Set after the first scan, which verifies every adapter."""
        if folder is None:
            self.has_scanned.set()

    def use_rules(self, rules: AdapterRules) -> None:
        """Check the adapters by other rules from the next scan on."""
        self.rules, self._is_stale = rules, True

    def stop(self) -> None:
        """End a running scan without a result, because the process stops."""
        self._is_stopping = True

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]:
        """The adapters of the last scan."""
        return tuple(adapter for _, adapter in self._scanned.values())

    def find(self, lora_id: str) -> LocalAdapter | None:
        """The adapter in the last scan; None if that scan did not find it."""
        adapters = self._scanned.get(lora_id)
        return None if adapters is None else adapters[1]

    async def path(self, lora_id: str) -> Path | None:
        """The adapter's folder, not verified, even if it was added after the last scan; None without one.

        Raises SourceError `source_failed` if the file system hangs.
        """
        if self.folder is None:
            return None
        path = self.folder / lora_id
        return path if await self._calls.run((path / CONFIG_NAME).is_file, place=str(self.folder)) else None

    async def scan(self) -> bool:
        """Scan the folder, verify new and changed adapters and keep the result; returns whether anything changed.

        Also sets `has_scanned`. False without a folder, while stopping, or if the file system hangs: the last result
        stays then.
        """
        if self.folder is None:
            return False
        try:
            adapters = await self._calls.run(
                self._read_all, self.folder, place=str(self.folder), most_hanging=1, progress=lambda: self._progress
            )
        except SourceError as exc:
            if not self._hangs:
                log.warning("lora_path cannot be scanned", error=str(exc))
            self._hangs = True
            return False
        finally:
            self.has_scanned.set()
        if self._hangs:
            self._hangs = False
            log.info("lora_path is scanned again")
        if self._is_stopping:
            return False
        changed = adapters != self._scanned
        if len(adapters) != len(self._scanned):
            log.info("adapters in lora_path", found=len(adapters), before=len(self._scanned))
        self._is_stale = False
        self._scanned = adapters
        self.revision += changed
        return changed

    def _read_all(self, root: Path) -> dict[str, tuple[_Stamp, LocalAdapter]]:
        """Find and verify all adapters below the folder; unchanged ones keep their result. Blocking.

        An unreadable folder is logged and left out.
        """
        adapters: dict[str, tuple[_Stamp, LocalAdapter]] = {}
        for folder, subfolders, names in os.walk(root):
            if self._is_stopping:
                break
            self._advance(1)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            if CONFIG_NAME not in names or Path(folder) == root:
                continue
            path = Path(folder)
            lora_id = sendable(path.relative_to(root).as_posix())
            try:
                stamp = _folder_stamp(path)
            except OSError as exc:
                # The folder is being deleted or is unreadable; the other adapters are not affected.
                log.warning("adapter in lora_path left out", lora_id=lora_id, error=str(exc))
                continue
            last_result = self._scanned.get(lora_id)
            if last_result and last_result[0] == stamp:
                adapters[lora_id] = (stamp, self._checked_again(last_result[1])) if self._is_stale else last_result
            else:
                adapters[lora_id] = (stamp, self._read_adapter(lora_id, path))
        return adapters

    def _advance(self, amount: int) -> None:
        """Note that the scan got further, by a folder or some bytes."""
        self._progress += amount

    def _checked_again(self, adapter: LocalAdapter) -> LocalAdapter:
        """An unchanged adapter by other rules; its bytes are not read again. Blocking."""
        if adapter.manifest is None:
            return self._read_adapter(adapter.lora_id, adapter.path)
        try:
            read_description(adapter.path, self.rules)
        except (SourceError, ValueError, OSError) as exc:
            log.warning("adapter in lora_path cannot be served", lora_id=adapter.lora_id, error=str(exc))
            return replace(adapter, manifest=None, error=str(exc))
        return adapter

    def _read_adapter(self, lora_id: str, path: Path) -> LocalAdapter:
        """Verify an adapter; an error is logged and kept in the result."""
        try:
            checked_lora_id(lora_id)
            manifest = read_manifest(path, self.rules, advance=self._advance)
            return LocalAdapter(lora_id, path, manifest, metadata=_read_metadata(lora_id, path / METADATA_NAME))
        except (SourceError, ValueError, OSError) as exc:
            log.warning("adapter in lora_path cannot be served", lora_id=lora_id, error=str(exc))
            return LocalAdapter(lora_id, path, None, str(exc))


def _read_metadata(lora_id: str, path: Path) -> Mapping[str, JsonValue]:
    """The JSON object in an adapter's metadata.json; empty without one, and logged if it is none or too large."""
    if not mode_of(path):
        return {}
    try:
        with path.open("rb") as file:
            return _METADATA.validate_json(file.read(_LARGEST_METADATA_BYTES))
    except (OSError, ValueError) as exc:
        log.warning("metadata.json is not read", lora_id=lora_id, error=str(exc))
        return {}


def _folder_stamp(path: Path) -> _Stamp:
    """Names, sizes and modification times of an adapter's files. Raises OSError."""
    rows = []
    for file in sorted(path.iterdir()):
        if (is_adapter_file(file.name) or file.name == METADATA_NAME) and mode_of(file):
            status = file.stat()
            rows.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(rows)
