"""Adapters that another client loaded into the engine: their files are read, verified and kept, for an adoption."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from workers.agent.foreign_files import ForeignFiles, source_of
from workers.agent.inventory import Inventory
from workers.core.errors import WorkerError
from workers.sources.base import Source
from workers.wire import AvailableLora, InspectRequest

log = structlog.get_logger()

_RETRY_S = 60.0


class ForeignFilesReader:
    """Reads the files of adapters that another client loaded, one adapter at a time."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        inspect: Callable[..., Awaitable[AvailableLora]],
        reader_of: Callable[[Path], Source],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        inspect    copies, verifies and installs an adapter with `reader`, without loading it; may raise WorkerError
        reader_of  a source for one folder: the engine has read it already, so it need not be below `lora_roots`
        """
        self._inventory = inventory
        self._inspect = inspect
        self._reader_of = reader_of
        self._clock = clock

    async def read_new(self) -> None:
        """Read the files of every foreign adapter that is new or has another path; failures again after a minute.

        The files are installed as those of an adapter with the same name, so that an adoption finds them on this
        disk whatever happens to the folder. Changes the inventory. A failure is recorded, never raised.
        """
        foreign = self._inventory.foreign_paths()
        for name in self._inventory.foreign_files.keys() - foreign.keys():
            del self._inventory.foreign_files[name]
        for name, path in foreign.items():
            known = self._inventory.foreign_files.get(name)
            is_due = known is None or known.path != path
            if known is not None and known.problem and self._clock() - known.read_at >= _RETRY_S:
                is_due = True
            if is_due:
                found = await self._read(name, path)
                if name in self._inventory.foreign_paths():
                    self._inventory.foreign_files[name] = found
                    self._inventory.mark_changed()
                    log.warning(
                        "the engine has an adapter that another client loaded",
                        engine_name=name,
                        path=path,
                        digest=found.digest,
                        problem=found.problem,
                    )

    async def _read(self, name: str, path: str) -> ForeignFiles:
        """The files of one adapter at a path that the engine names."""
        source = source_of(path)
        now = self._clock()
        if not source.startswith("file://"):
            # Not downloaded before somebody adopts it.
            problem = "" if source else f"the engine names {path!r} as its folder; expected an absolute path"
            return ForeignFiles(path=path, source=source, problem=problem, read_at=now)
        try:
            ask = InspectRequest(lora_id=name, source=source)
            found = await self._inspect(ask, reader=self._reader_of(Path(path)))
        except WorkerError as exc:
            return ForeignFiles(path=path, source=source, problem=f"{exc.code}: {exc}", read_at=now)
        return ForeignFiles(
            path=path,
            source=source,
            digest=found.digest,
            base_model=found.base_model,
            rank=found.rank,
            size_bytes=found.size_bytes,
            read_at=now,
        )
