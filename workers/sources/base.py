"""The interface of adapter sources, and helpers that all of them share."""

import asyncio
import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from workers.core.errors import SourceError
from workers.core.references import is_below, parse_reference, redacted, scheme
from workers.core.retry import RetryPolicy
from workers.verification.adapter_files import adapter_file_names
from workers.verification.beside import notes_on_files

T = TypeVar("T")

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""An OSError with one of these is about our disk; libraries raise OSErrors for network errors, too."""

PLUGIN_SCHEME = "plugin"
"""Scheme of the downloader plugin, also used for adapters without a source if a plugin is set."""

_PROGRESS_INTERVAL_S = 1.0


class TransferCancelled(Exception):
    """The fetch was cancelled; ends a library's download from within."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """Progress of a fetch; `total_bytes` is None until the source reports it."""

    done_bytes: int
    total_bytes: int | None


class Transfer:
    """Progress, cancellation and result of one fetch. Any thread may call it.

    pinned      the immutable reference of the files (a branch resolved to its commit); else the reference itself
    credential  used for this fetch in place of the worker's own; "" for none
    notes       what to know of the files beside the adapter's, by their names
    texts       the beginnings of those files beside them that are compared with the base model's, or carried
    served_by   URLs of the workers of the fleet that sent some of the bytes
    """

    def __init__(
        self, *, on_progress: Callable[[FetchProgress], None] = lambda _: None, every_s: float = _PROGRESS_INTERVAL_S
    ) -> None:
        """`on_progress` is called about every `every_s` seconds, in the thread that received the bytes."""
        self.pinned = ""
        self.credential = ""
        self.notes: tuple[str, ...] = ()
        self.texts: dict[str, bytes] = {}
        self.served_by: set[str] = set()
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._done_bytes = 0
        self._total_bytes: int | None = None
        self._every_s = every_s
        self._reported_at = time.monotonic()
        self._at_end: list[Callable[[], Awaitable[None]]] = []

    def at_end(self, call: Callable[[], Awaitable[None]]) -> None:
        """Have `finish` make this call: once the files are verified and installed, or refused. It raises nothing."""
        self._at_end.append(call)

    async def finish(self) -> None:
        """Make the calls of `at_end`, each once."""
        calls, self._at_end = self._at_end, []
        for call in calls:
            await call()

    @property
    def progress(self) -> FetchProgress:
        """The bytes received so far, and the total if it is known."""
        return FetchProgress(self._done_bytes, self._total_bytes)

    def choose_files(
        self, names: Collection[str], *, allow_pickle: bool, folders: Collection[str] = ()
    ) -> frozenset[str]:
        """The names of the adapter's files among those in its source folder; sets `notes`. Raises SourceError.

        See `adapter_file_names` and `notes_on_files`.
        """
        chosen = adapter_file_names(names, allow_pickle=allow_pickle, folders=folders)
        if chosen:
            self.notes = notes_on_files({*names} - chosen, folders)
        return chosen

    def expect(self, total_bytes: int) -> None:
        """Set the total number of bytes that the source reports."""
        self._total_bytes = total_bytes

    def advance(self, size_bytes: int) -> None:
        """Add received bytes; negative if some must be fetched again. Raises TransferCancelled after `cancel`.

        Calls `on_progress` if it is due.
        """
        if self._is_cancelled:
            raise TransferCancelled
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            is_due = now - self._reported_at >= self._every_s
            if is_due:
                self._reported_at = now
        if is_due:
            self._on_progress(self.progress)

    def cancel(self) -> None:
        """Make the next call of `advance` raise TransferCancelled."""
        self._is_cancelled = True


class Source(Protocol):
    """Fetches adapters of one scheme."""

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Fetch the files of the adapter at `ref`, see `Transfer.choose_files`, into the empty folder `into`.

        No other files may be left there; after an error the caller deletes them all. Count bytes in `transfer`, set
        `transfer.pinned` if the reference can be made immutable, and `transfer.texts` where there are any. Error
        messages name the reference by `redacted` and never quote libraries or servers, whose texts may contain
        addresses and signatures.

        raises  SourceError: not found, forbidden, too big, or not reachable
        """


@runtime_checkable
class ResumingSource(Source, Protocol):
    """A source that resumes: `into` may have files of an earlier fetch of the same `ref`.

    The source keeps what is still its current version and deletes everything else.
    """

    resumes: bool


@runtime_checkable
class CheckingSource(Source, Protocol):
    """A source that can refuse a forbidden reference without a fetch."""

    async def check(self, ref: str) -> None:
        """Raises SourceError `source_forbidden` or `source_invalid`; does not check that the adapter exists."""


Sources = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every source.

    max_bytes     of an adapter's files together
    timeout_s     without a byte; the caller limits the total time
    parts         parts of one file fetched at a time, if the source can
    allow_pickle  fetch `adapter_model.bin` if there are no safetensors
    """

    max_bytes: int
    timeout_s: float = 30.0
    parts: int = 4
    allow_pickle: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rng: Random = field(default_factory=Random)


def source_for(ref: str, sources: Sources, prefixes: tuple[str, ...] = ()) -> Source:
    """The source for a reference, after a check of the reference.

    raises  SourceError: unknown scheme, secrets in the reference, or outside the allowed `prefixes`
    """
    source = sources.get(scheme(ref))
    if source is None:
        known = ", ".join(f"{name}://" for name in sorted(sources))
        message = f"source {redacted(ref)}: scheme {scheme(ref)[:20]!r} is not known; known: {known} and plain paths"
        raise SourceError("source_unsupported", message)
    if scheme(ref) != "file":
        parse_reference(ref.partition("@")[0] if scheme(ref) == "hf" else ref)
        if prefixes and not is_below(ref, prefixes):
            allowed = ", ".join(prefixes)
            message = f"source {redacted(ref)}: outside the allowed ones ({allowed}); see source_prefixes"
            raise SourceError("source_forbidden", message)
    return source


class TransientSourceError(Exception):
    """An attempt failed and may be repeated. The message must not contain secrets."""

    def __init__(self, why: str, *, wait_s: float = 0.0, has_moved: bool = False) -> None:
        """`wait_s`: wait that the server requests. `has_moved`: bytes came, so attempts count from 0 again."""
        super().__init__(why)
        self.wait_s = wait_s
        self.has_moved = has_moved


async def with_retries(operation: Callable[[], Awaitable[T]], ref: str, limits: Limits) -> T:
    """Return the result of `operation`, which is repeated with backoff while it raises TransientSourceError.

    An attempt that got further starts the count anew.
    raises  SourceError `source_failed` after the last attempt
    """
    delays = limits.retry.delays_s(limits.rng)
    while True:
        try:
            return await operation()
        except TransientSourceError as exc:
            if exc.has_moved:
                delays = limits.retry.delays_s(limits.rng)
            delay_s = next(delays, None)
            if delay_s is None:
                message = f"source {redacted(ref)}: {exc}; tried {limits.retry.attempts} times"
                raise SourceError("source_failed", message, retry_after_s=30) from exc
            await asyncio.sleep(max(delay_s, min(exc.wait_s, limits.retry.max_s)))


async def run_in_daemon_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function in a daemon thread; return its result or raise its error. A cancellation does not end the thread.

    Unlike a thread of `asyncio.to_thread`, a hanging library does not block the process's end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        """Set the future's result or exception, in the event loop; not if it is cancelled."""
        if future.done():
            return  # cancelled meanwhile
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        """Call the function and pass its outcome to the event loop, unless that has ended."""
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001  (raised again by the future)
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="source").start()
    return await future


def clear_folder(folder: Path, kept: Collection[str]) -> None:
    """Delete everything in a folder except these names."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def too_big_error(ref: str, found_bytes: int, limits: Limits) -> SourceError:
    """A SourceError `source_too_big` for the adapter as a whole."""
    message = f"source {redacted(ref)}: {found_bytes} bytes or more, at most {limits.max_bytes} are allowed"
    return SourceError("source_too_big", f"{message}; see max_adapter_bytes")
