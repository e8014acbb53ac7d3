"""The stages fetch, verify and install: verified adapters in `<cache>/<digest>/`, written once, never changed.

vLLM 0.32 reads an adapter's files again, inside an engine step, whenever its host LRU dropped the adapter: missing or
changed files kill the engine. So a folder is complete before it gets its name, and its files are read-only.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeAlias

import structlog

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.engine.acceptance import MOST_BYTES as MOST_ACCEPTANCE_BYTES
from lorafleet.identity import fleet_source
from lorafleet.service.files import write_atomically
from lorafleet.service.tasks import finish_even_if_cancelled
from workers.core.errors import EngineError, SourceError
from workers.core.references import redacted
from workers.sources.base import (
    CheckingSource,
    ResumingSource,
    Source,
    Sources,
    Transfer,
    source_for,
)
from workers.storage.cache_folder import CacheFolder, boot_id
from workers.storage.held_files import HeldFilesLog
from workers.storage.pickled import convert_pickles
from workers.verification import manifest as manifests
from workers.verification.adapter_files import is_adapter_file
from workers.verification.beside import is_fleet_file, notes_on_texts
from workers.verification.manifest import AdapterDescription, AdapterRules, Manifest
from workers.verification.verify import read_description, read_file_entry, read_manifest

log = structlog.get_logger()

ListDigestsInUse: TypeAlias = Callable[[], Awaitable[frozenset[str]]]
"""Lists the digests whose files an engine may read; raises EngineError if the engine does not answer."""

_RECHECK_S = 60.0
"""Files of one adapter are read again at most this often: other workers may ask for it, and it takes seconds a GB."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class MissingDigests(NamedTuple):
    """Digests that are not installed: wanted ones, and others that are known."""

    wanted: list[str]
    known: list[str]


class AdapterCache:
    """The verified adapters of one cache folder, which agents may share."""

    def __init__(
        self,
        folder: CacheFolder,
        *,
        sources: Sources,
        rules: AdapterRules,
        fetch_deadline_s: float,
        source_prefixes: tuple[str, ...] = (),
        parallel_fetches: int = 4,
    ) -> None:
        self.folder = folder
        self.used_bytes, self.held_bytes, self.adapters = 0, 0, 0  # at the last sweep; held_bytes: in use
        self.free_bytes = 0  # at the last `update_free_bytes`
        self.rules = rules
        self._sources, self._prefixes = sources, source_prefixes
        self._fetch_deadline_s = fetch_deadline_s
        self.is_stopping = False
        """Set when the process stops: unfinished downloads are then kept for the next start."""
        self._fetch_slots = asyncio.Semaphore(parallel_fetches)
        self._verified: set[str] = set()
        self._damaged: set[str] = set()
        self._rechecked_at: dict[str, float] = {}
        self._disk_id = ""
        self.held = HeldFilesLog()
        """The digests on this disk, for heartbeats."""

    @asynccontextmanager
    async def fetch(
        self, ref: str, transfer: Transfer | None = None, *, source: Source | None = None
    ) -> AsyncIterator[Path]:
        """Fetch an adapter's files into a temporary folder, which exists during the block unless it is installed.

        source  fetches it; default: the one of its scheme
        `transfer` has the progress, and afterwards the immutable reference of the files. The files of a failed fetch
        are kept for the next one if the source can resume. Raises SourceError.
        """
        source = source or source_for(ref, self._sources, self._prefixes)
        transfer = transfer or Transfer()
        transfer.pinned = ref
        resume_key = f"{ref} {boot_id()}" if isinstance(source, ResumingSource) else ""
        is_kept = False
        try:
            with self.folder.download_folder(resume_key) as partial:
                try:
                    async with self._fetch_slots, asyncio.timeout(self._fetch_deadline_s):
                        await source.fetch(ref, partial, transfer)
                        if self.rules.allow_pickle:
                            await convert_pickles(partial)
                    yield partial
                except SourceError as exc:
                    is_kept = exc.code == "source_failed"
                    raise
                except TimeoutError as exc:
                    is_kept = True
                    message = (
                        f"source {redacted(ref)}: not fetched within {self._fetch_deadline_s:g} s; see fetch_deadline_s"
                    )
                    raise SourceError("source_failed", message, retry_after_s=5) from exc
                except asyncio.CancelledError:
                    is_kept = self.is_stopping
                    raise
                finally:
                    await finish_even_if_cancelled(transfer.finish())
                    if not (resume_key and is_kept):
                        await finish_even_if_cancelled(asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True))
        except OSError as exc:
            raise self._translated_disk_error(ref, exc) from exc

    async def check_source(self, ref: str) -> None:
        """Raises SourceError if this worker's settings forbid the source; fetches nothing."""
        source = source_for(ref, self._sources, self._prefixes)
        if isinstance(source, CheckingSource):
            await source.check(ref)

    def has_source(self, scheme: str) -> bool:
        """Whether this worker has a source for a scheme, such as `plugin`."""
        return scheme in self._sources

    async def verify(self, folder: Path, *, trust_base_model: bool = False, allow_any_rank: bool = False) -> Manifest:
        """Read an adapter's folder, and return its manifest; raises SourceError with the rule that it breaks.

        trust_base_model  do not compare the base model in its config: the caller has named it
        allow_any_rank    accept ranks above the engine's limit
        """
        rules = replace(self.rules, max_rank=None) if allow_any_rank else self.rules
        rules = replace(rules, base_check="off") if trust_base_model else rules
        return await asyncio.to_thread(read_manifest, folder, rules)

    async def notes_on_texts(self, texts: Mapping[str, bytes]) -> tuple[str, ...]:
        """What to know of the texts beside an adapter at its source. Raises SourceError `adapter_file_unsupported`."""
        return await asyncio.to_thread(notes_on_texts, texts, self.rules.tokenizer) if texts else ()

    def describe(self, folder: Path) -> AdapterDescription | None:
        """What the engine's table says of an adapter that was verified before; None if it cannot be read. Blocking."""
        try:
            return read_description(folder, replace(self.rules, max_rank=None, base_check="off", takes_unmatched=True))
        except (SourceError, OSError, ValueError):
            return None

    async def install(self, partial: Path, digest: str) -> Path:
        """Rename a verified folder to its digest, or use another agent's intact copy; returns the path.

        Raises OSError.
        """
        # Not cancellable: the cleanup of a cancelled fetch would delete files of the renamed folder.
        path = await finish_even_if_cancelled(asyncio.to_thread(self._install, partial, digest))
        self.held.put(digest, bool(self.held.is_kept(digest)))
        return path

    @property
    def room_bytes(self) -> int:
        """Bytes that further adapters may take before others are deleted for them, by the last measurements."""
        within_limit = self.folder.max_bytes - self.used_bytes if self.folder.max_bytes else self.free_bytes
        return max(0, min(self.free_bytes, within_limit))

    async def update_free_bytes(self) -> None:
        """Update `free_bytes`, in a thread because a network file system may hang."""
        with contextlib.suppress(OSError):
            self.free_bytes = await asyncio.to_thread(self.folder.free_bytes)

    def path(self, digest: str) -> Path:
        """The folder of the adapter with this digest, installed or not."""
        return self.folder.path(digest)

    async def files(self, digest: str) -> dict[str, int]:
        """name -> size of the files of an installed, intact adapter; empty without it. Takes a lease."""
        if not await self.has_intact(digest):
            return {}
        return await asyncio.to_thread(_file_sizes, self.path(digest))

    async def store_acceptance(self, digest: str, content: bytes) -> None:
        """Put an acceptance file beside an installed adapter, in place of another one; a disk's error is logged.

        One that is too large is cut, and refused when it is read: other workers still fetch it with the adapter.
        """
        path, content = self.path(digest) / ACCEPTANCE_NAME, content[: MOST_ACCEPTANCE_BYTES + 1]
        try:
            if await asyncio.to_thread(_file_digest, path) != hashlib.sha256(content).hexdigest():
                await asyncio.to_thread(write_atomically, path, content, mode=0o644)
        except OSError as exc:
            log.warning("acceptance file not kept", digest=digest, error=str(exc))

    async def acceptance_digest(self, digest: str) -> str:
        """The digest of the acceptance file beside an installed adapter; "" without one."""
        return await asyncio.to_thread(_file_digest, self.path(digest) / ACCEPTANCE_NAME)

    async def has_intact(self, digest: str, *, is_recheck: bool = False) -> bool:
        """Whether the adapter is installed and its files match the digest; they are read once per process.

        Takes a lease, so that no agent deletes the adapter.

        is_recheck  read them again, at most once a minute: another worker got other bytes from here
        """
        now = time.monotonic()
        if is_recheck and now - self._rechecked_at.get(digest, -inf) >= _RECHECK_S:
            self._rechecked_at = {name: at for name, at in self._rechecked_at.items() if now - at < _RECHECK_S}
            self._rechecked_at[digest] = now
            self._verified.discard(digest)
        is_whole = await asyncio.to_thread(self._check_intact, digest)
        if not is_whole and self.held.is_kept(digest) is not None:
            self.held.put(digest, None)
        return is_whole

    def _check_intact(self, digest: str) -> bool:
        """Take a lease on an adapter and check its files, as `has_intact`. Blocking."""
        if not self.folder.claim(digest):  # first, so that it is not deleted meanwhile
            return False
        if digest not in self._verified and is_intact(self.path(digest), digest):
            self._verified.add(digest)
            self._damaged.discard(digest)
        elif digest not in self._verified:
            self._damaged.add(digest)
        return digest in self._verified

    async def keep(self, digest: str) -> bool:
        """Mark an intact adapter as kept: no agent deletes it. False if it is not here. Raises SourceError."""
        if not await self.has_intact(digest):
            return False
        try:
            is_kept = await asyncio.to_thread(self.folder.keep, digest)
        except OSError as exc:
            raise self._translated_disk_error(fleet_source(digest), exc) from exc
        self.held.put(digest, True if is_kept else None)
        return is_kept

    async def release(self, digests: Collection[str], *, is_dropped: bool) -> None:
        """Let adapters be deleted again; `is_dropped`: delete them once nobody uses them. Raises SourceError."""
        for digest in digests:
            try:
                await asyncio.to_thread(self.folder.release, digest, is_dropped=is_dropped)
            except OSError as exc:
                raise self._translated_disk_error(fleet_source(digest), exc) from exc
            if self.held.is_kept(digest):
                self.held.put(digest, False)

    async def disk_id(self) -> str:
        """The name of the cache folder, which agents that share it share, too; "" while it cannot be read."""
        if not self._disk_id:
            with contextlib.suppress(OSError):
                self._disk_id = await asyncio.to_thread(lambda: self.folder.disk_id)
        return self._disk_id

    async def delete_half_of_idle(self, in_use: frozenset[str]) -> list[str]:
        """Delete half of the unused bytes, oldest first: for a disk that is full below its limit; returns digests."""
        deleted = await asyncio.to_thread(self.folder.delete_half_of_idle, in_use)
        self._forget_held(deleted)
        return deleted

    async def delete_unfinished(self) -> bool:
        """Delete downloads that a later fetch would continue, for a disk that is full; whether there were any."""
        return await asyncio.to_thread(self.folder.remove_leftovers, is_full=True)

    def _forget_held(self, digests: Collection[str]) -> None:
        """Record that digests are no longer on this disk."""
        for digest in digests:
            self.held.put(digest, None)
            self._verified.discard(digest)

    async def list_held(self) -> None:
        """Compare `held` with the folder: agents that share it delete and install, too."""
        revision = self.held.revision
        found = await asyncio.to_thread(self.folder.held)
        if self.held.revision == revision:  # otherwise what was installed meanwhile may be missing in the list
            self.held.replace({digest: is_kept for digest, is_kept in found.items() if digest not in self._damaged})

    async def make_room(self, digest: str, size_bytes: int, in_use: ListDigestsInUse) -> list[str]:
        """Delete adapters, least recently used first, until this one fits; returns the deleted digests.

        raises  SourceError `disk_full` if adapters in use leave no room, EngineError if `in_use` fails
        """
        if self.path(digest).exists() or await asyncio.to_thread(self.folder.has_room, size_bytes):
            return []
        deleted, missing = await asyncio.to_thread(self.folder.make_room, size_bytes, await in_use())
        self._forget_held(deleted)
        if missing and not self.path(digest).exists():  # another agent may have installed it meanwhile
            used, _ = await asyncio.to_thread(self.folder.usage)
            raise SourceError(
                "disk_full",
                f"the adapter has {size_bytes} bytes; max_disk_bytes is {self.folder.max_bytes}, of which"
                f" {used} are taken by adapters in use or kept: {missing} bytes too few. Unload some, or raise"
                " max_disk_bytes",
                retry_after_s=30,
            )
        return deleted

    async def maintain_folder(
        self, wanted: frozenset[str], known_digests: frozenset[str], in_use: ListDigestsInUse
    ) -> MissingDigests:
        """Remove leftovers, renew the wanted leases, delete adapters beyond the limit and update the figures.

        Returns the wanted and the other known digests that are not installed. Deletes none, and logs it, if the engine
        does not answer.
        """
        missing_wanted = await asyncio.to_thread(self._clean_and_renew, wanted)
        if not await asyncio.to_thread(self.folder.has_room, 0):
            try:
                await asyncio.to_thread(self.folder.make_room, 0, await in_use())
            except EngineError as exc:
                log.warning("nothing deleted from the cache: the engine does not answer", error=str(exc))
        if await asyncio.to_thread(self.folder.dropped):
            with contextlib.suppress(EngineError):  # the next sweep deletes them
                await asyncio.to_thread(self.folder.delete_dropped, await in_use())
        await self.list_held()
        folders = await asyncio.to_thread(self.folder.adapters, wanted)
        self.used_bytes, self.adapters = sum(folder.size_bytes for folder in folders), len(folders)
        self.held_bytes = sum(folder.size_bytes for folder in folders if folder.is_in_use)
        return MissingDigests(missing_wanted, await asyncio.to_thread(self._missing_digests, known_digests - wanted))

    def _missing_digests(self, digests: Collection[str]) -> list[str]:
        """Those of the digests that are not installed. Blocking."""
        return [digest for digest in digests if not self.path(digest).exists()]

    def _clean_and_renew(self, wanted: frozenset[str]) -> list[str]:
        """Remove leftovers and renew leases; returns wanted digests that are not installed."""
        self.folder.remove_leftovers()
        return self.folder.renew_leases(wanted)

    def _translated_disk_error(self, ref: str, exc: OSError) -> SourceError:
        """A SourceError for an OSError of the disk: `disk_full` or `source_failed`."""
        if exc.errno not in _FULL:
            return SourceError("source_failed", f"source {redacted(ref)}: {exc}", retry_after_s=30)
        used, free = self.folder.usage().size_bytes, self.folder.free_bytes()
        message = (
            f"source {redacted(ref)}: no space left in {self.folder.folder}: {free} bytes are free, {used} are taken by"
            " installed adapters; give it more room, or unload adapters"
        )
        return SourceError("disk_full", message, retry_after_s=30)

    def _install(self, partial: Path, digest: str) -> Path:
        """Make the files read-only, flush them and rename the folder; replaces a damaged copy. Returns the path.

        Blocking. The digest then counts as verified. Raises OSError.
        """
        target = self.path(digest)
        for file in partial.iterdir():
            file.chmod(0o444)
            _flush_to_disk(file)
        partial.chmod(0o755)
        if not self.folder.claim(digest):
            with contextlib.suppress(OSError):  # another agent was faster
                partial.rename(target)
            self.folder.claim(digest)
        if not is_intact(target, digest):
            self.folder.replace_adapter(digest, partial)
        _flush_to_disk(self.folder.folder)
        self._verified.add(digest)
        self._damaged.discard(digest)
        return target


def is_intact(folder: Path, digest: str) -> bool:
    """Whether an installed adapter's files match its digest; reads all of them."""
    try:
        return (
            manifests.digest(read_file_entry(path) for path in folder.iterdir() if is_adapter_file(path.name)) == digest
        )
    except (OSError, SourceError):
        return False


def _file_digest(path: Path) -> str:
    """The sha256 of a file; "" without one. Blocking."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _file_sizes(folder: Path) -> dict[str, int]:
    """name -> size of the files in an adapter's folder that other workers fetch; empty if it is gone."""
    try:
        return {path.name: path.stat().st_size for path in folder.iterdir() if is_fleet_file(path.name)}
    except OSError:
        return {}


def _flush_to_disk(path: Path) -> None:
    """Flush a file or folder to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
