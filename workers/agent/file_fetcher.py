"""Adapter files by digest from other workers: fetched from each in turn, and kept where the fleet wants copies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.identity import fleet_source
from workers.core.errors import SourceError, WrongBytes
from workers.core.fetch_ways import FetchWay
from workers.core.references import redacted, scheme
from workers.inventory.context import AgentContext
from workers.inventory.inventory import Inventory
from workers.metrics import source_kind
from workers.sources.base import Source, Transfer
from workers.storage.cache import is_intact

log = structlog.get_logger()

T = TypeVar("T")


class FileFetcher:
    """Fetches into the cache's temporary folders, and counts what came from where."""

    def __init__(
        self, context: AgentContext, inventory: Inventory, *, digests_in_use: Callable[[], Awaitable[frozenset[str]]]
    ) -> None:
        """`digests_in_use`: as in `Installer`."""
        self._cache = context.cache
        self._inventory = inventory
        self._metrics = context.metrics
        self._fleet = context.fleet
        self._digests_in_use = digests_in_use

    @asynccontextmanager
    async def files_of(
        self, place: str, transfer: Transfer, reader: Source | None, way: FetchWay, digest: str | None
    ) -> AsyncIterator[Path]:
        """A folder with the files during the block, fetched unless they are on this disk; counts the bytes received.

        Raises SourceError.
        """
        if way == "disk":
            yield self._cache.path(digest or "")
            return
        reader = self._fleet if way == "fleet" else reader
        try:
            with self._metrics.timed("fetch"):
                async with self._cache.fetch(place, transfer, source=reader) as folder:
                    yield folder
        finally:
            kind = source_kind(scheme(place)) if way == "source" else way
            self._metrics.source_bytes.labels(kind).inc(max(0, transfer.progress.done_bytes))

    async def from_neighbours(
        self, fetch: Callable[..., Coroutine[Any, Any, T]], lora_id: str, digest: str, neighbours: Sequence[str]
    ) -> T:
        """Install from the named agents. One that sends other bytes is dropped, told to check its own, and logged.

        Raises SourceError.
        """
        assert self._fleet is not None, "a worker without an orchestrator has no neighbours"
        left, wrong = [url.rstrip("/") for url in neighbours], None
        for _ in range(len(left) + 1):
            try:
                return await fetch(way="neighbours", reader=self._fleet.at(left))
            except WrongBytes as exc:
                log.warning(
                    "wrong bytes from other workers", lora_id=lora_id, digest=digest, urls=sorted(exc.served_by)
                )
                self._metrics.neighbour_failures.labels("digest").inc()
                for url in exc.served_by:
                    await self._fleet.recheck(url, digest)
                # Where an earlier download had left all of them here, nobody is dropped: they are gone now.
                left = [url for url in left if url not in exc.served_by]
                wrong = exc
                if not left:
                    break
            except SourceError as exc:
                if exc.code == "source_failed":
                    self._metrics.neighbour_failures.labels("silent").inc()
                elif exc.code == "source_not_found":
                    self._metrics.neighbour_failures.labels("missing").inc()
                raise
        assert wrong is not None, "the loop ends by wrong bytes alone"
        raise wrong

    async def keep(self, digest: str, neighbours: Sequence[str]) -> None:
        """Keep the files of a digest on this disk, fetched from other workers if needed. Raises SourceError.

        May delete idle adapters.
        """
        if await self._cache.keep(digest):
            return
        if self._fleet is None:
            raise no_way_error(fleet_source(digest))
        fetch = partial(self._fetch_copy, digest)
        try:
            await self.from_neighbours(fetch, "", digest, neighbours)
        except SourceError as exc:
            if not is_about_source(exc):
                raise
            await fetch(way="fleet")
        await self._cache.keep(digest)

    async def _fetch_copy(self, digest: str, *, way: FetchWay, reader: Source | None = None) -> None:
        """Fetch the files of a digest and install them, for whichever adapter they are. Raises SourceError.

        Nothing but the digest is compared: a copy may be of another base model.
        """
        transfer = Transfer()
        async with self.files_of(fleet_source(digest), transfer, reader, way, digest) as folder:
            with self._metrics.timed("verify"):
                if not await asyncio.to_thread(is_intact, folder, digest):
                    raise WrongBytes(f"digest {digest}: other workers sent other bytes", transfer.served_by)
            with self._metrics.timed("install"):
                size_bytes = await asyncio.to_thread(_stored_bytes, folder)
                self._metrics.fetched_bytes.inc(size_bytes)
                self._inventory.forget_deleted(await self._cache.make_room(digest, size_bytes, self._digests_in_use))
                await self._cache.install(folder, digest)
        if ACCEPTANCE_NAME in transfer.texts:
            await self._cache.store_acceptance(digest, transfer.texts[ACCEPTANCE_NAME])

    async def acceptance_from(self, neighbours: Sequence[str], digest: str, file: str) -> bytes:
        """The acceptance file with the digest `file` beside an adapter's files at one of these agents; b"" at none."""
        return await self._fleet.read_acceptance(neighbours, digest, file) if self._fleet is not None else b""


def is_about_source(exc: SourceError) -> bool:
    """Whether other bytes, from another place, may still be right."""
    return exc.code.startswith("source_") or exc.code in {"digest_mismatch", "adapter_incomplete"}


def no_way_error(source: str) -> SourceError:
    """The error of a source that no way leads to: the fleet's own bytes, without an orchestrator."""
    message = f"source {redacted(source)}: this worker has no orchestrator to fetch it through: orchestrator_url"
    return SourceError("source_unsupported", message)


def _stored_bytes(folder: Path) -> int:
    """Size of an adapter's files. Blocking."""
    return sum(path.stat().st_size for path in folder.iterdir())
