"""The cache folder, shared by any number of agents: who uses which adapter, what may go, what a crash left behind.

    <digest>/                an installed adapter, never changed
    <digest>/.users/<agent>  that agent's lease: renewed while its engine holds the adapter or should; says which engine
    .partial-<agent>-…/      a download under way
    .partial-<agent>-again-… one that can go on where it stopped, also after a restart
    .gone-<agent>-…/         renamed away, being deleted

Time is the file system's own (the mtime of a file touched now): agents on several machines share no other clock.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from workers.core.eviction import CachedAdapter, to_free
from workers.core.manifest import is_adapter_file
from workers.storage import leases

log = structlog.get_logger()

PARTIAL = ".partial-"
_GONE = ".gone-"
_AGAIN = re.compile(r"\.partial-.+-again-[0-9a-f]{24}")
_ABANDONED_S = 3600.0
"""A download in which no file has grown for this long, another agent's or an unfinished one of ours; a guess."""
_LOCK_S = 5.0


class CacheFolder:
    """Blocking calls, for threads. `user` names this agent: no other one that shares the folder may have its name."""

    def __init__(
        self,
        folder: Path,
        *,
        user: str,
        max_bytes: int = 0,
        grace_s: float,
        lease_s: float,
        outlives_s: float = 0.0,
        listed: leases.Listed = lambda _: (),
    ) -> None:
        """
        max_bytes   of installed adapters; 0 for as many as fit
        grace_s     after its last use an adapter stays so long
        lease_s     how long others count who have fallen silent
        outlives_s  how much longer our engine may go on without us; our leases reach so far into the future
        listed      digests that the engine at a URL serves; nothing where none answers
        """
        self.folder = folder.resolve()
        self._exist()
        self.max_bytes = max_bytes
        self._user = user
        self._grace_s = grace_s
        self._lease_s = lease_s
        self._outlives_s = outlives_s
        self._in_use: set[Path] = set()
        self._sizes: dict[str, int] = {}  # of installed adapters, which never change
        self._listed = listed
        self.engine_url = ""
        """Our engine, for those who wonder whether it still runs when we have fallen silent."""

    # --- what is here --------------------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def folders(self, wanted: frozenset[str]) -> list[CachedAdapter]:
        """Every installed adapter; what is `wanted` here, or leased by another agent, is held."""
        now = self._now()
        found = []
        for path in self.folder.iterdir():
            if not path.name.startswith("."):
                with contextlib.suppress(OSError):  # on its way out
                    found.append(self._look(path.name, wanted, now))
        return found

    def usage(self) -> tuple[int, int]:
        """Bytes and number of the installed adapters."""
        sizes = {}
        for name in os.listdir(self.folder):  # noqa: PTH208  (names alone, of thousands)
            if not name.startswith("."):
                with contextlib.suppress(OSError):  # on its way out
                    sizes[name] = self._size(name)
        self._sizes = sizes
        return sum(sizes.values()), len(sizes)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    # --- leases --------------------------------------------------------------------------------------------------

    def claim(self, digest: str) -> bool:
        """Whether the adapter is here; from now on nobody deletes it until the lease is over."""
        with self._locked():
            try:
                leases.renew(self.path(digest), self._user, engine_url=self.engine_url, outlives_s=self._outlives_s)
            except FileNotFoundError:
                return False
            except OSError as exc:  # a disk that is full, or another user's folder: it can be read all the same
                log.warning("no lease on an adapter of the cache", digest=digest, error=str(exc))
                return self.path(digest).is_dir()
            return True

    def renew(self, wanted: Iterable[str]) -> list[str]:
        """Keep the leases of what is wanted and give up the others; digests that are wanted and not here."""
        names = frozenset(wanted)
        lost = [digest for digest in sorted(names) if not self.claim(digest)]
        now = self._now()
        for lease in self.folder.glob(f"*/{leases.USERS}/{self._user}"):
            with contextlib.suppress(OSError):
                if (
                    lease.parent.parent.name not in names
                    and now + self._outlives_s - lease.stat().st_mtime > self._grace_s
                ):
                    lease.unlink()
        return lost

    def replace(self, digest: str, by: Path) -> None:
        """Put a whole folder in the place of a damaged or missing one; its leases stay. Raises OSError.

        The old one is moved aside, not deleted: an engine may have it open.
        """
        with self._locked():
            old = self.path(digest)
            if old.exists():
                if (old / leases.USERS).is_dir():
                    (old / leases.USERS).rename(by / leases.USERS)
                old.rename(Path(tempfile.mkdtemp(prefix=f"{_GONE}{self._user}-", dir=self.folder)) / digest)
            by.rename(old)
            self._sizes.pop(digest, None)
        self.claim(digest)

    # --- room ----------------------------------------------------------------------------------------------------

    def has_room(self, need_bytes: int) -> bool:
        """Whether so many bytes more stay within `max_bytes`."""
        return not self.max_bytes or self.usage()[0] + need_bytes <= self.max_bytes

    def make_room(self, need_bytes: int, wanted: frozenset[str]) -> tuple[list[str], int]:
        """Delete until `need_bytes` more stay within `max_bytes`: the digests that went, the bytes still missing."""
        if not self.max_bytes:
            return [], 0
        folders = self.folders(wanted)
        excess = sum(folder.size_bytes for folder in folders) + need_bytes - self.max_bytes
        missing = to_free(folders, excess_bytes=excess, now=self._now(), grace_s=self._grace_s)[1]
        if need_bytes and missing:
            return [], missing  # it would not do, so nobody loses anything
        return self._free(folders, excess, wanted)

    def free_half(self, wanted: frozenset[str]) -> list[str]:
        """Delete half the bytes that nobody uses, oldest first: for a disk that is full below any limit of ours."""
        folders = self.folders(wanted)
        idle = sum(folder.size_bytes for folder in folders if not folder.is_held)
        return self._free(folders, (idle + 1) // 2, wanted)[0]

    def _free(self, folders: list[CachedAdapter], excess_bytes: int, wanted: frozenset[str]) -> tuple[list[str], int]:
        now = self._now()
        going, missing = to_free(folders, excess_bytes=excess_bytes, now=now, grace_s=self._grace_s)
        gone = []
        for folder in going:
            if self._delete(folder.digest, wanted):
                gone.append(folder.digest)
            else:
                missing += folder.size_bytes
        return gone, missing

    def _delete(self, digest: str, wanted: frozenset[str]) -> bool:
        """Rename away, then delete; False when somebody has taken it into use meanwhile, or never stopped using it."""
        if engine_url := leases.serving(self.path(digest), self._user, self._listed):
            log.info("an engine without its agent keeps an adapter in the cache", digest=digest, engine_url=engine_url)
            return False
        aside = Path(tempfile.mkdtemp(prefix=f"{_GONE}{self._user}-", dir=self.folder))
        try:
            with self._locked():
                if not self._is_idle(digest, wanted):
                    return False
                self.path(digest).rename(aside / digest)
                # Where the file system knows no locks, somebody's lease may have come in between.
                if self._has_user(aside / digest, self._now()):
                    with contextlib.suppress(OSError):
                        (aside / digest).rename(self.path(digest))
                    return False
        except OSError as exc:
            log.warning("adapter not deleted from the cache", digest=digest, error=str(exc))
            return False
        else:
            log.info("adapter deleted from the cache", digest=digest)
            return True
        finally:
            _remove(aside)

    # --- downloads -----------------------------------------------------------------------------------------------

    def clean(self, *, is_full: bool = False) -> None:
        """Remove what a crash left, and downloads in which nothing has grown for an hour.

        Ours that can go on where they stopped are kept that long, unless the disk is full.
        """
        now = self._now()
        for path in [*self.folder.glob(f"{PARTIAL}*"), *self.folder.glob(f"{_GONE}*")]:
            kind = PARTIAL if path.name.startswith(PARTIAL) else _GONE
            is_ours = path.name.startswith(f"{kind}{self._user}-")
            is_done_for = is_ours and (is_full or not is_leftover(path))
            if path not in self._in_use and (is_done_for or now - _newest(path) > _ABANDONED_S):
                _remove(path)

    @contextlib.contextmanager
    def partial(self, again: str = "") -> Iterator[Path]:
        """A folder for a download, in use until the end of the block, which removes it or leaves it. Raises OSError.

        again  what names the bytes: the folder holds what an earlier download of the same left; empty for a new one
        """
        path = self.folder / f"{PARTIAL}{self._user}-again-{hashlib.sha256(again.encode()).hexdigest()[:24]}"
        self._exist()
        if not again or path in self._in_use:
            path = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{self._user}-", dir=self.folder))
        self._in_use.add(path)
        try:
            path.mkdir(exist_ok=True)
            yield path
        finally:
            self._in_use.discard(path)

    # --- small things --------------------------------------------------------------------------------------------

    def _look(self, digest: str, wanted: frozenset[str], now: float) -> CachedAdapter:
        path = self.path(digest)
        size = self._size(digest)
        is_held = digest in wanted or self._has_user(path, now)
        return CachedAdapter(digest, size, leases.used_at(path), is_held)

    def _size(self, digest: str) -> int:
        known = self._sizes.get(digest)
        if known is None:
            files = [each for each in self.path(digest).iterdir() if is_adapter_file(each.name)]
            known = self._sizes[digest] = sum(each.stat().st_size for each in files)
        return known

    def _has_user(self, path: Path, now: float) -> bool:
        return leases.has_other(path, self._user, now=now, lease_s=self._lease_s)

    def _is_idle(self, digest: str, wanted: frozenset[str]) -> bool:
        now = self._now()
        folder = self._look(digest, wanted, now)
        return not folder.is_held and now - folder.used_at >= self._grace_s

    def _exist(self) -> None:
        """Also after somebody deleted all of it, as caches are deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def _now(self) -> float:
        clock = self.folder / f".clock-{self._user}"
        try:
            clock.touch()
            return clock.stat().st_mtime
        except OSError:  # a full disk
            return time.time()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else claims or deletes; some network file systems know no locks, and go without."""
        self._exist()
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


def is_leftover(path: Path) -> bool:
    """Whether a download may go on in that folder."""
    return _AGAIN.fullmatch(path.name) is not None


def _newest(path: Path) -> float:
    newest = 0.0
    for folder, _, names in os.walk(path):
        for entry in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118  (thousands of them)
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(entry).st_mtime)
    return newest


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
