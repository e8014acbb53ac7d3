"""Adapters that another client loaded into the engine: recorded, and their files read, verified and kept.

So a restarted engine has them again, and the fleet may adopt them.
"""

import re
from dataclasses import replace
from pathlib import Path

import structlog

from orchestrator.model.cards import card_fields
from workers.agent.loader import Loader
from workers.core.errors import WorkerError
from workers.inventory.context import AgentContext
from workers.inventory.inventory import Inventory
from workers.sources.base import Source
from workers.sources.file_system import FileSystemCalls
from workers.sources.local import LocalSource
from workers.wire import InspectRequest, WorkerAdapter

log = structlog.get_logger()

_RETRY_S = 60.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ForeignFilesReader:
    """Reads the files of adapters that another client loaded, one adapter at a time."""

    def __init__(self, context: AgentContext, inventory: Inventory, loader: Loader) -> None:
        self._inventory = inventory
        self._installed = context.installed
        self._loader = loader
        self._settings = context.settings
        self._clock = context.clock
        self._calls = FileSystemCalls(timeout_s=context.settings.source_timeout_s)
        self._failed_at: dict[str, float] = {}

    async def read_new(self) -> None:
        """Record every foreign adapter, and read the files of those that are new or have another path.

        One that the engine does not list any longer is forgotten. Failures are tried again after a minute. The files
        are installed as those of an adapter with the same name, so that an adoption finds them on this disk whatever
        happens to the folder. Changes the inventory. A failure is recorded, never raised.
        """
        foreign = self._inventory.foreign_paths()
        for name in self._installed.foreign.keys() - foreign.keys():
            self._installed.forget_foreign(name)
            self._failed_at.pop(name, None)
        due = {name: path for name, path in foreign.items() if self._is_due(name, path)}
        for name, path in due.items():
            if name not in self._installed.foreign or self._installed.foreign[name].path != path:
                self._installed.store_foreign(self._unread(name, path))
        for name, path in due.items():
            adapter = await self._read(name, path)
            if name in self._inventory.foreign_paths():
                self._installed.store_foreign(adapter)
                self._inventory.mark_changed()
                about = {"engine_name": name, "path": path, "digest": adapter.files_digest, "problem": adapter.error}
                if name in self._inventory.engine_modules:
                    log.info("the engine has an adapter of its own", **about)
                else:
                    log.warning("the engine has an adapter that another client loaded", **about)

    def _is_due(self, name: str, path: str) -> bool:
        """Whether the files at a path are to be read: new ones, and after a failure a minute ago."""
        known = self._installed.foreign.get(name)
        if known is None or known.path != path:
            return True
        if name in self._failed_at:
            return self._clock() - self._failed_at[name] >= _RETRY_S
        return not known.files_digest and not known.source.startswith("hf://")

    def _unread(self, name: str, path: str) -> WorkerAdapter:
        """The adapter with this engine name, before its files at the path that the engine names are read.

        Not wanted where the engine's own settings name it: an engine that starts again has it, or no longer.
        """
        is_wanted = name not in self._inventory.engine_modules
        return WorkerAdapter(
            lora_id=name, digest="", engine_name=name, path=path, source=source_of(path), is_wanted=is_wanted
        )

    async def _read(self, name: str, path: str) -> WorkerAdapter:
        """The adapter with this engine name, with what is known of its files at the path that the engine names."""
        adapter = self._unread(name, path)
        if not adapter.source:
            return self._failed(adapter, f"the engine names {path!r} as its folder; expected an absolute path")
        if not adapter.source.startswith("file://"):
            return adapter  # not downloaded before somebody adopts it
        try:
            ask = InspectRequest(lora_id=name, source=adapter.source)
            found = await self._loader.inspect(ask, reader=self._source_at(Path(path)))
        except WorkerError as exc:
            return await self._refused(adapter, exc)
        self._failed_at.pop(name, None)
        card = card_fields(replace(found, digest="", source=adapter.source))
        return replace(adapter, **card, files_digest=found.digest)

    async def _refused(self, adapter: WorkerAdapter, refusal: WorkerError) -> WorkerAdapter:
        """The adapter with why its files are not accepted; it is unloaded where they spoil the answers of others."""
        if refusal.code == "weights_not_finite":
            name = adapter.engine_name
            try:
                await self._loader.unload_harmful(name)
            except WorkerError as exc:
                log.warning("an adapter that spoils the answers of others stays", engine_name=name, error=str(exc))
            else:
                log.error("an adapter that spoils the answers of others is unloaded", engine_name=name)
        return self._failed(adapter, f"{refusal.code}: {refusal}")

    def _source_at(self, folder: Path) -> Source:
        """A source for one folder: the engine has read it already, so it need not be below `lora_roots`."""
        settings = self._settings
        return LocalSource(
            [folder], max_bytes=settings.max_adapter_bytes, allow_pickle=settings.allow_pickle, calls=self._calls
        )

    def _failed(self, adapter: WorkerAdapter, error: str) -> WorkerAdapter:
        """The adapter with why its files are not known; they are read again in a minute."""
        self._failed_at[adapter.engine_name] = self._clock()
        return replace(adapter, error=error)


def source_of(path: str) -> str:
    """The reference of the folder or hub repository that an engine names as an adapter's path; "" for any other."""
    if path.startswith("/"):
        return Path(path).as_uri()
    return f"hf://{path}" if _HUB_NAME.fullmatch(path) else ""
