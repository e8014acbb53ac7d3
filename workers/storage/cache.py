"""Adapters on this worker's disk: `<cache>/<digest>/`, written once, never changed. The stages fetch, verify, install.

vLLM reads an adapter's files again whenever its host LRU dropped it, inside the engine's step: files that vanish or
change there kill the engine (vLLM 0.32, seen running). So the folder is real, complete before it has its name, and
its files are read-only.
"""

import asyncio
import contextlib
import errno
import functools
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import structlog

from workers.core import manifest as manifests
from workers.core.errors import EngineError, SourceError
from workers.core.manifest import AdapterRules, Manifest, is_adapter_file
from workers.core.references import shown
from workers.sources.base import CheckingSource, ResumingSource, Sources, Transfer, settled, source_for
from workers.storage.cache_folder import CacheFolder
from workers.storage.pickled import unpickled
from workers.storage.verify import read_entry, read_manifest

log = structlog.get_logger()

InUse: TypeAlias = Callable[[], Awaitable[frozenset[str]]]
"""Digests whose files an engine may read; raises EngineError when nobody can say."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class AdapterCache:
    """The verified adapters of one folder, which several agents may share."""

    def __init__(
        self,
        disk: CacheFolder,
        *,
        sources: Sources,
        rules: AdapterRules,
        fetch_deadline_s: float,
        source_prefixes: tuple[str, ...] = (),
        parallel_fetches: int = 4,
    ) -> None:
        self.disk = disk
        self.used_bytes, self.held_bytes, self.adapters = 0, 0, 0  # at the last sweep; held: what cannot go
        self.free_bytes = 0  # at the last look
        self.rules = rules
        self._sources, self._prefixes = sources, source_prefixes
        self._fetch_deadline_s = fetch_deadline_s
        self.is_stopping = False
        """What is under way when the process ends is kept, for the next start to go on with."""
        self._turns = asyncio.Semaphore(parallel_fetches)
        self._verified: set[str] = set()

    @asynccontextmanager
    async def fetch(self, ref: str, transfer: Transfer | None = None) -> AsyncIterator[Path]:
        """A temporary folder holding the adapter's files as the source has them; gone afterwards unless installed.

        `transfer` tells how far it is while it runs, and afterwards the reference that names these very bytes. What a
        failing source has sent so far stays for the next fetch of the same, where the source can go on from there.
        """
        source = source_for(ref, self._sources, self._prefixes)
        transfer = transfer or Transfer()
        transfer.pinned = ref
        again = f"{ref} {_boot_id()}" if isinstance(source, ResumingSource) else ""
        is_kept = False
        try:
            with self.disk.partial(again) as partial:
                try:
                    async with self._turns, asyncio.timeout(self._fetch_deadline_s):
                        await source.fetch(ref, partial, transfer)
                        if self.rules.allow_pickle:
                            await unpickled(partial)
                    yield partial
                except SourceError as exc:
                    is_kept = exc.code == "source_failed"
                    raise
                except TimeoutError as exc:
                    is_kept = True
                    message = (
                        f"source {shown(ref)}: not fetched within {self._fetch_deadline_s:g} s; see fetch_deadline_s"
                    )
                    raise SourceError("source_failed", message, retry_after_s=5) from exc
                except asyncio.CancelledError:
                    is_kept = self.is_stopping
                    raise
                finally:
                    if not (again and is_kept):
                        await settled(asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True))
        except OSError as exc:
            raise self._disk_error(ref, exc) from exc

    async def check_source(self, ref: str) -> None:
        """Raises SourceError where this worker's settings forbid the source; nothing is fetched."""
        source = source_for(ref, self._sources, self._prefixes)
        if isinstance(source, CheckingSource):
            await asyncio.to_thread(source.check, ref)

    def has_source(self, scheme: str) -> bool:
        return scheme in self._sources

    async def verify(self, folder: Path, *, is_vouched_for: bool = False, is_any_rank: bool = False) -> Manifest:
        """The manifest of the adapter in a folder; raises SourceError naming the rule it breaks.

        is_vouched_for  it is of this worker's base model, whatever its own config says
        is_any_rank     also what is too large for this worker's engine
        """
        rules = replace(self.rules, max_rank=None) if is_any_rank else self.rules
        rules = replace(rules, base_check="off") if is_vouched_for else rules
        return await asyncio.to_thread(read_manifest, folder, rules)

    async def install(self, partial: Path, digest: str) -> Path:
        """Give a verified temporary folder its name. If another agent was faster, its copy is used once checked."""
        # Not left half-way, or whoever clears up after a cancelled fetch would take files from under the new name.
        return await settled(asyncio.to_thread(self._install, partial, digest))

    async def update_free_bytes(self) -> None:
        """See how much is free. In a thread, because a network file system may not answer."""
        with contextlib.suppress(OSError):
            self.free_bytes = await asyncio.to_thread(self.disk.free_bytes)

    def path(self, digest: str) -> Path:
        return self.disk.path(digest)

    async def has(self, digest: str) -> bool:
        """Whether the adapter is here with every byte as its digest says; read through once a process.

        It stays, too, for as long as it is wanted here or the grace lasts.
        """
        return await asyncio.to_thread(self._has, digest)

    def _has(self, digest: str) -> bool:
        if not self.disk.claim(digest):  # before it is looked at: what is claimed is not deleted meanwhile
            return False
        if digest not in self._verified and is_intact(self.path(digest), digest):
            self._verified.add(digest)
        return digest in self._verified

    async def make_room(self, manifest: Manifest, in_use: InUse) -> list[str]:
        """Digests that were deleted, least recently used first, to install this one within the limit.

        raises  SourceError `disk_full` when what is in use leaves no room, EngineError when nobody knows what that is
        """
        if self.path(manifest.digest).exists() or await asyncio.to_thread(self.disk.has_room, manifest.size_bytes):
            return []
        gone, missing = await asyncio.to_thread(self.disk.make_room, manifest.size_bytes, await in_use())
        if missing and not self.path(manifest.digest).exists():  # another agent may have been faster, meanwhile
            used, _ = await asyncio.to_thread(self.disk.usage)
            raise SourceError(
                "disk_full",
                f"the adapter has {manifest.size_bytes} bytes; max_disk_bytes is {self.disk.max_bytes}, of which {used}"
                f" are taken by adapters in use: {missing} bytes too few. Unload some, or raise max_disk_bytes",
                retry_after_s=30,
            )
        return gone

    async def sweep(self, wanted: frozenset[str], known: frozenset[str], in_use: InUse) -> tuple[list[str], list[str]]:
        """Renew our leases and keep the limit: what is wanted and not here, and what else is known and not here now."""
        lost = await asyncio.to_thread(self._renew, wanted)
        if not await asyncio.to_thread(self.disk.has_room, 0):
            try:
                await asyncio.to_thread(self.disk.make_room, 0, await in_use())
            except EngineError as exc:
                log.warning("nothing deleted from the cache: the engine cannot be asked what it uses", error=str(exc))
        folders = await asyncio.to_thread(self.disk.folders, wanted)
        self.used_bytes, self.adapters = sum(folder.size_bytes for folder in folders), len(folders)
        self.held_bytes = sum(folder.size_bytes for folder in folders if folder.is_held)
        return lost, await asyncio.to_thread(self._missing, known - wanted)

    def _missing(self, digests: Collection[str]) -> list[str]:
        return [digest for digest in digests if not self.path(digest).exists()]

    def _renew(self, wanted: frozenset[str]) -> list[str]:
        self.disk.clean()
        return self.disk.renew(wanted)

    def _disk_error(self, ref: str, exc: OSError) -> SourceError:
        if exc.errno not in _FULL:
            return SourceError("source_failed", f"source {shown(ref)}: {exc}", retry_after_s=30)
        used, free = self.disk.usage()[0], self.disk.free_bytes()
        message = (
            f"source {shown(ref)}: no space left in {self.disk.folder}: {free} bytes are free, {used} are taken by"
            " installed adapters; give it more room, or unload adapters"
        )
        return SourceError("disk_full", message, retry_after_s=30)

    def _install(self, partial: Path, digest: str) -> Path:
        target = self.path(digest)
        for file in partial.iterdir():
            file.chmod(0o444)
            _sync(file)
        partial.chmod(0o755)
        if not self.disk.claim(digest):
            with contextlib.suppress(OSError):  # another agent was faster
                partial.rename(target)
            self.disk.claim(digest)
        if not is_intact(target, digest):
            self.disk.replace(digest, partial)
        _sync(self.disk.folder)
        self._verified.add(digest)
        return target


def is_intact(folder: Path, digest: str) -> bool:
    """Whether an installed adapter has every byte that its digest says: reads all of them."""
    try:
        return manifests.digest(read_entry(path) for path in folder.iterdir() if is_adapter_file(path.name)) == digest
    except (OSError, SourceError):
        return False


@functools.cache
def _boot_id() -> str:
    """This boot of the machine. What was written before its crash may have holes that no size tells of."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
