"""The cache folder, which agents may share: leases, deletion of unused adapters, downloads, leftovers of crashes.

    <digest>/                 an installed adapter, never changed
    <digest>/.users/<agent>   that agent's lease, renewed while it wants the adapter; contains its engine's URL
    <digest>/.kept            never deleted: the fleet has these bytes nowhere else
    <digest>/.dropped         deleted once nobody uses it
    .disk-id                  names this folder, the same for all agents that share it
    .partial-<agent>-…/       a download in progress
    .partial-<agent>-again-…  a download that can be resumed, also after a restart
    .gone-<agent>-…/          an adapter that is being deleted

Times are the file system's (the mtime of a file touched now): agents on several machines share no other clock.
"""

import contextlib
import fcntl
import functools
import glob
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog

from lorafleet.service.files import write_atomically
from workers.core.eviction import CachedAdapter, adapters_to_delete
from workers.storage import leases
from workers.verification.adapter_files import is_adapter_file

log = structlog.get_logger()

PARTIAL = ".partial-"
UPLOAD_NOTE = ".files"
"""In a `.partial-` folder: it has what a client has sent."""
_GONE = ".gone-"
_AGAIN = re.compile(r"\.partial-.+-again-[0-9a-f]{24}")
_KEPT, _DROPPED, _DISK_ID = ".kept", ".dropped", ".disk-id"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ABANDONED_S = 3600.0
"""A download of another agent, or a resumable one of ours, is deleted after this long without growth (a guess)."""
_LOCK_S = 5.0


class CacheUsage(NamedTuple):
    """Total bytes and number of the installed adapters."""

    size_bytes: int
    adapters: int


class CacheDeletion(NamedTuple):
    """The deleted digests, and the bytes that are still missing."""

    digests: list[str]
    missing_bytes: int


class CacheFolder:
    """One agent's view of the cache folder. All methods block: call them in threads."""

    def __init__(
        self,
        folder: Path,
        *,
        agent_id: str,
        max_bytes: int = 0,
        grace_s: float,
        lease_s: float,
        engine_outlives_s: float = 0.0,
        served_digests: leases.ServedDigests = lambda _: (),
    ) -> None:
        """
        agent_id           this agent's name, unique among the agents that share the folder
        max_bytes          limit for installed adapters; 0: none
        grace_s            an adapter is kept so long after its last use
        lease_s            other agents' leases expire so long after their last renewal
        engine_outlives_s  our engine may run so much longer than this agent: our leases last so much longer
        served_digests     lists the digests that the engine at a URL serves; empty if it does not answer
        """
        self.folder = folder.resolve()
        self._create_folder()
        self.max_bytes = max_bytes
        self._agent_id = agent_id
        self._grace_s = grace_s
        self._lease_s = lease_s
        self._engine_outlives_s = engine_outlives_s
        self._open_downloads: set[Path] = set()
        self._sizes: dict[str, int] = {}  # of installed adapters, which never change
        self._served_digests = served_digests
        self.engine_url = ""
        """URL of this agent's engine, stored in its leases."""

    # --- installed adapters --------------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        """The folder of the adapter with this digest, installed or not."""
        return self.folder / digest

    def adapters(self, wanted: frozenset[str]) -> list[CachedAdapter]:
        """All installed adapters; in use are those `wanted` by this agent, leased by another one, or kept."""
        now = self._now()
        adapters = []
        for digest in self._digests():
            with contextlib.suppress(OSError):  # on its way out
                adapters.append(self._cached_adapter(digest, wanted, now))
        return adapters

    def usage(self) -> CacheUsage:
        """Total bytes and number of the installed adapters; forgets the sizes of deleted ones."""
        sizes = {}
        for digest in self._digests():
            with contextlib.suppress(OSError):  # on its way out
                sizes[digest] = self._size(digest)
        self._sizes = sizes
        return CacheUsage(sum(sizes.values()), len(sizes))

    def free_bytes(self) -> int:
        """Free bytes of the cache folder's file system."""
        return shutil.disk_usage(self.folder).free

    # --- leases --------------------------------------------------------------------------------------------------

    def claim(self, digest: str) -> bool:
        """Take this agent's lease on an adapter, so that no agent deletes it; False if it is not installed.

        The adapter is no longer dropped: somebody loads it again. A lease that cannot be written is only logged.
        """
        return self._lease(digest, is_renewal=False)

    def _lease(self, digest: str, *, is_renewal: bool) -> bool:
        """As `claim`. A renewal leaves an adapter dropped: its copy is loaded still, and goes."""
        with self._try_locked():
            try:
                leases.renew(
                    self.path(digest),
                    self._agent_id,
                    engine_url=self.engine_url,
                    engine_outlives_s=self._engine_outlives_s,
                )
                if not is_renewal:
                    (self.path(digest) / _DROPPED).unlink(missing_ok=True)
            except FileNotFoundError:
                return False
            except OSError as exc:  # the disk is full, or the folder is another user's: it can still be read
                log.warning("no lease on an adapter of the cache", digest=digest, error=str(exc))
                return self.path(digest).is_dir()
            return True

    def renew_leases(self, wanted: Iterable[str]) -> list[str]:
        """Renew the leases on wanted adapters and drop others after the grace; returns wanted digests not installed."""
        names = frozenset(wanted)
        missing = [digest for digest in sorted(names) if not self._lease(digest, is_renewal=True)]
        now = self._now()
        for lease in self.folder.glob(f"*/{leases.USERS}/{self._agent_id}"):
            with contextlib.suppress(OSError):
                if (
                    lease.parent.parent.name not in names
                    and now + self._engine_outlives_s - lease.stat().st_mtime > self._grace_s
                ):
                    lease.unlink()
        return missing

    def replace_adapter(self, digest: str, new_folder: Path) -> None:
        """Replace a damaged or missing adapter by `new_folder`, keeping its leases and its mark; takes our own lease.

        Raises OSError. The old folder is moved aside, not deleted, because an engine may have its files open.
        """
        with self._try_locked():
            old = self.path(digest)
            if old.exists():
                for name in (leases.USERS, _KEPT):
                    if (old / name).exists():
                        (old / name).rename(new_folder / name)
                old.rename(self._aside())
            new_folder.rename(old)
            self._sizes.pop(digest, None)
        self.claim(digest)

    # --- kept adapters -------------------------------------------------------------------------------------------

    @functools.cached_property
    def disk_id(self) -> str:
        """The name of this folder, drawn when it is read first, and kept in it. Blocking. Raises OSError."""
        file = self.folder / _DISK_ID
        self._create_folder()
        with self._try_locked():
            if not file.exists():
                write_atomically(file, uuid.uuid4().hex.encode(), mode=0o644)
        return file.read_text()

    def held(self) -> dict[str, bool]:
        """The digests of all installed adapters, and whether each is kept."""
        return {digest: (self.path(digest) / _KEPT).exists() for digest in self._digests()}

    def keep(self, digest: str) -> bool:
        """Mark an adapter as kept; False if it is not installed. Raises OSError."""
        with self._try_locked():
            if not self.path(digest).is_dir():
                return False
            (self.path(digest) / _DROPPED).unlink(missing_ok=True)
            (self.path(digest) / _KEPT).touch()
            return True

    def release(self, digest: str, *, is_dropped: bool) -> None:
        """Take the mark off an adapter; `is_dropped`: it goes at the next `delete_dropped` that finds it unused.

        Nothing happens if it is not installed. Raises OSError.
        """
        with self._try_locked():
            if self.path(digest).is_dir():
                (self.path(digest) / _KEPT).unlink(missing_ok=True)
                if is_dropped:
                    (self.path(digest) / _DROPPED).touch()

    def dropped(self) -> list[str]:
        """Digests of dropped adapters."""
        return [path.parent.name for path in self.folder.glob(f"*/{_DROPPED}")]

    def delete_dropped(self, wanted: frozenset[str]) -> list[str]:
        """Delete dropped adapters that nobody uses and whose grace has passed; returns their digests."""
        return [
            name
            for name in self.dropped()
            if name not in wanted and self._is_past_grace(name) and self._delete(name, wanted)
        ]

    def _is_past_grace(self, digest: str) -> bool:
        """Whether an adapter's grace has passed; False if it is gone."""
        with contextlib.suppress(OSError):
            return self._now() - leases.last_used_at(self.path(digest)) >= self._grace_s
        return False

    # --- deletion ------------------------------------------------------------------------------------------------

    def has_room(self, need_bytes: int) -> bool:
        """Whether `need_bytes` more are within `max_bytes`; always without that limit. Measures the folder."""
        return not self.max_bytes or self.usage().size_bytes + need_bytes <= self.max_bytes

    def make_room(self, need_bytes: int, wanted: frozenset[str]) -> CacheDeletion:
        """Delete adapters until `need_bytes` more are within `max_bytes`; returns deleted digests and missing bytes.

        If `need_bytes` cannot be freed, nothing is deleted. With 0, as much of the excess as possible is.
        Without `max_bytes` there is no limit.
        """
        if not self.max_bytes:
            return CacheDeletion([], 0)
        folders = self.adapters(wanted)
        excess = sum(folder.size_bytes for folder in folders) + need_bytes - self.max_bytes
        missing = adapters_to_delete(folders, excess_bytes=excess, now=self._now(), grace_s=self._grace_s).missing_bytes
        if need_bytes and missing:
            return CacheDeletion([], missing)
        return self.delete_until_freed(folders, excess, wanted)

    def delete_half_of_idle(self, wanted: frozenset[str]) -> list[str]:
        """Delete half of the unused bytes, oldest first: for a disk that is full below `max_bytes`."""
        folders = self.adapters(wanted)
        idle = sum(folder.size_bytes for folder in folders if not folder.is_in_use)
        return self.delete_until_freed(folders, (idle + 1) // 2, wanted).digests

    def delete_until_freed(
        self, folders: list[CachedAdapter], excess_bytes: int, wanted: frozenset[str]
    ) -> CacheDeletion:
        """Delete the least recently used of `folders` until `excess_bytes` are freed.

        wanted   digests that are kept; so are those used within the grace, and those that another agent has leased
        returns  the deleted digests, and the bytes that are still missing
        """
        now = self._now()
        chosen, missing = adapters_to_delete(folders, excess_bytes=excess_bytes, now=now, grace_s=self._grace_s)
        deleted = []
        for folder in chosen:
            if self._delete(folder.digest, wanted):
                deleted.append(folder.digest)
            else:
                missing += folder.size_bytes
        return CacheDeletion(deleted, missing)

    def _delete(self, digest: str, wanted: frozenset[str]) -> bool:
        """Rename an adapter aside and delete it; False if it is in use, or after an error, which is logged."""
        if engine_url := leases.engine_using(self.path(digest), self._agent_id, self._served_digests):
            log.info("adapter kept in the cache: another agent's engine uses it", digest=digest, engine_url=engine_url)
            return False
        aside = self._aside()
        try:
            with self._try_locked():
                if not self._is_idle(digest, wanted):
                    return False
                self.path(digest).rename(aside)
                # On a file system without locks another agent may have taken a lease meanwhile.
                if self._has_other_user(aside, self._now()):
                    with contextlib.suppress(OSError):
                        aside.rename(self.path(digest))
                    return False
        except OSError as exc:
            log.warning("adapter not deleted from the cache", digest=digest, error=str(exc))
            return False
        else:
            log.info("adapter deleted from the cache", digest=digest)
            return True
        finally:
            _remove_tree(aside)

    # --- downloads -----------------------------------------------------------------------------------------------

    def remove_leftovers(self, *, is_full: bool = False) -> bool:
        """Delete this agent's leftovers of a crash, and any agent's downloads without growth for an hour.

        Our resumable downloads are kept so long, too, unless `is_full`; and what clients have sent, in any case.
        Returns whether anything was deleted.
        """
        now, found = self._now(), False
        for path in [*self.folder.glob(f"{PARTIAL}*"), *self.folder.glob(f"{_GONE}*")]:
            kind = PARTIAL if path.name.startswith(PARTIAL) else _GONE
            is_ours = path.name.startswith(f"{kind}{self._agent_id}-")
            is_kept = is_resumable_download(path) and (not is_full or (path / UPLOAD_NOTE).exists())
            is_useless = is_ours and not is_kept
            if path not in self._open_downloads and (is_useless or now - _newest_mtime(path) > _ABANDONED_S):
                _remove_tree(path)
                found = True
        return found

    def resumable_folder(self, resume_key: str) -> Path:
        """Where the files of a resumable download or upload are, whether or not there are any."""
        return self.folder / f"{PARTIAL}{self._agent_id}-again-{hashlib.sha256(resume_key.encode()).hexdigest()[:24]}"

    def upload_notes(self) -> list[Path]:
        """The notes of this agent's uploads."""
        return list(self.folder.glob(f"{PARTIAL}{glob.escape(self._agent_id)}-again-*/{UPLOAD_NOTE}"))

    @contextlib.contextmanager
    def download_folder(self, resume_key: str = "") -> Iterator[Path]:
        """A folder for a download during the block; it is left to the caller to delete it. Raises OSError.

        resume_key  of a resumable download: the folder has the files of an earlier download with this key; "": none
        """
        path = self.resumable_folder(resume_key)
        self._create_folder()
        if not resume_key or path in self._open_downloads:
            path = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{self._agent_id}-", dir=self.folder))
        self._open_downloads.add(path)
        try:
            path.mkdir(exist_ok=True)
            yield path
        finally:
            self._open_downloads.discard(path)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _digests(self) -> list[str]:
        """The digests of all installed adapters. Whatever else is in the folder is not ours, and stays."""
        return [name for name in os.listdir(self.folder) if _DIGEST.fullmatch(name)]  # noqa: PTH208  (names alone)

    def _aside(self) -> Path:
        """Where to rename an adapter before it is deleted. Not created: a full disk takes no new folder."""
        return self.folder / f"{_GONE}{self._agent_id}-{uuid.uuid4().hex[:12]}"

    def _cached_adapter(self, digest: str, wanted: frozenset[str], now: float) -> CachedAdapter:
        """Size, last use and users of an installed adapter. Raises OSError."""
        path = self.path(digest)
        size = self._size(digest)
        is_in_use = digest in wanted or (path / _KEPT).exists() or self._has_other_user(path, now)
        return CachedAdapter(digest, size, leases.last_used_at(path), is_in_use)

    def _size(self, digest: str) -> int:
        """Size of an installed adapter's files, cached as they never change. Raises OSError if its folder is gone."""
        size_bytes = self._sizes.get(digest)
        if size_bytes is None:
            files = [file for file in self.path(digest).iterdir() if is_adapter_file(file.name)]
            size_bytes = self._sizes[digest] = sum(file.stat().st_size for file in files)
        return size_bytes

    def _has_other_user(self, path: Path, now: float) -> bool:
        """Whether another agent has an unexpired lease on the adapter in this folder."""
        return leases.has_other_user(path, self._agent_id, now=now, lease_s=self._lease_s)

    def _is_idle(self, digest: str, wanted: frozenset[str]) -> bool:
        """Whether no agent wants the adapter and its grace has passed. Raises OSError if it is gone."""
        now = self._now()
        folder = self._cached_adapter(digest, wanted, now)
        return not folder.is_in_use and now - folder.used_at >= self._grace_s

    def _create_folder(self) -> None:
        """Create the folder if it does not exist: a user may have deleted it as a cache. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def _now(self) -> float:
        """The file system's time: touches a file and reads its mtime; on a full disk this machine's time."""
        clock = self.folder / f".clock-{self._agent_id}"
        try:
            clock.touch()
            return clock.stat().st_mtime
        except OSError:  # a full disk
            return time.time()

    @contextlib.contextmanager
    def _try_locked(self) -> Iterator[None]:
        """Hold the folder's lock during the block if it can be had: then no other agent claims or deletes. Blocking.

        After 5 s, or where there are no file locks, the block runs without the lock. Raises OSError if the folder
        cannot be made.
        """
        self._create_folder()
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + _LOCK_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.005)
                except OSError:
                    break
            yield
        finally:
            os.close(handle)


@functools.cache
def boot_id() -> str:
    """The machine's boot id, or "": files written before a crash of the machine may have holes despite their size."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def is_resumable_download(path: Path) -> bool:
    """Whether a `.partial-` folder is a resumable download."""
    return _AGAIN.fullmatch(path.name) is not None


def _newest_mtime(path: Path) -> float:
    """The newest modification time of a folder and everything below it; 0 if it is gone."""
    newest = 0.0
    for folder, _, names in os.walk(path):
        for entry in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118  (thousands of them)
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(entry).st_mtime)
    return newest


def _remove_tree(path: Path) -> None:
    """Delete a folder with everything below it; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)
