"""Where an adapter's files come from: one class a scheme, and what all of them share."""

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
from workers.core.references import is_below, scheme, shown, split
from workers.core.retry import RetryPolicy

T = TypeVar("T")

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""An OSError with one of these is our disk's, in the middle of a library that has network errors of that class too."""

PLUGIN = "plugin"
"""The scheme of a downloader plugin, where one is set; also for adapters that name no source."""

_TELL_EVERY_S = 1.0


class TransferCancelled(Exception):
    """Nobody waits for these bytes any more; ends a library's download from within."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is; `total_bytes` is None until the source has said it."""

    done_bytes: int
    total_bytes: int | None


class Transfer:
    """One fetch under way: how much may come, how much has, and whether anybody waits. Any thread may call it.

    pinned      what names these very bytes (a branch resolved to its commit); the reference itself where there is none
    credential  for this fetch alone, in place of the worker's own; "": none was named
    """

    def __init__(
        self, *, on_progress: Callable[[FetchProgress], None] = lambda _: None, every_s: float = _TELL_EVERY_S
    ) -> None:
        """`on_progress` is called about every so many seconds, from whatever thread has the bytes."""
        self.pinned = ""
        self.credential = ""
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._done_bytes = 0
        self._total_bytes: int | None = None
        self._every_s = every_s
        self._told_at = time.monotonic()

    @property
    def progress(self) -> FetchProgress:
        return FetchProgress(self._done_bytes, self._total_bytes)

    def expect(self, total_bytes: int) -> None:
        """What the source says that it will send in all."""
        self._total_bytes = total_bytes

    def advance(self, size_bytes: int) -> None:
        """So many bytes more, or fewer when some must come again. Raises TransferCancelled."""
        if self._is_cancelled:
            raise TransferCancelled
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            is_due = now - self._told_at >= self._every_s
            if is_due:
                self._told_at = now
        if is_due:
            self._on_progress(self.progress)

    def cancel(self) -> None:
        """Whoever still moves bytes for it stops at its next call of `advance`."""
        self._is_cancelled = True


class Source(Protocol):
    """Fetches adapters of one scheme."""

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Put `adapter_config.json` and `*.safetensors` of the adapter at `ref` into the empty folder `into`.

        Nothing else may be put there. What is left in `into` after an error is thrown away by the caller. Bytes are
        counted in `transfer`, and `transfer.pinned` is set where a reference can be made immutable. Messages name the
        reference by `shown`, and never repeat what a library or a server said: addresses and signatures are in it.

        raises  SourceError: not found, forbidden, too big, or not reachable
        """


@runtime_checkable
class ResumingSource(Source, Protocol):
    """One that goes on where it stopped: `into` may hold what its own earlier fetch of the same `ref` left there.

    It takes of that what is still the source's version, and clears away everything else.
    """

    resumes: bool


@runtime_checkable
class CheckingSource(Source, Protocol):
    """One that can tell before any fetch what this worker may never read."""

    def check(self, ref: str) -> None:
        """Raises SourceError `source_forbidden` or `source_invalid`. Whether there is anything is not looked at."""


Sources = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Limits:
    """What every source keeps to.

    timeout_s     without a byte; the time for all of them is the caller's
    parts         of one file that are fetched at the same time, where a source can
    allow_pickle  whether `adapter_model.bin` is fetched where there are no safetensors
    """

    max_bytes: int
    timeout_s: float = 30.0
    parts: int = 4
    allow_pickle: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rng: Random = field(default_factory=Random)


def source_for(ref: str, sources: Sources, prefixes: tuple[str, ...] = ()) -> Source:
    """The source that fetches this reference; with `prefixes`, only what is one of them or below one.

    raises  SourceError: no such scheme, something secret in the reference, or outside the allowed prefixes
    """
    found = sources.get(scheme(ref))
    if found is None:
        known = ", ".join(f"{name}://" for name in sorted(sources))
        message = f"source {shown(ref)}: scheme {scheme(ref)[:20]!r} is not known; known: {known} and plain paths"
        raise SourceError("source_unsupported", message)
    if scheme(ref) != "file":
        split(ref.partition("@")[0] if scheme(ref) == "hf" else ref)
        if prefixes and not is_below(ref, prefixes):
            allowed = ", ".join(prefixes)
            message = f"source {shown(ref)}: outside the allowed ones ({allowed}); see source_prefixes"
            raise SourceError("source_forbidden", message)
    return found


class TransientSourceError(Exception):
    """One attempt failed; another may do better. The message is ours, without anything secret."""

    def __init__(self, why: str, *, wait_s: float = 0.0, has_moved: bool = False) -> None:
        """`wait_s`: what the server asked for. `has_moved`: bytes came before it failed, so the count starts over."""
        super().__init__(why)
        self.wait_s = wait_s
        self.has_moved = has_moved


async def retried(step: Callable[[], Awaitable[T]], ref: str, limits: Limits) -> T:
    """What `step` returns, tried again for as long as it raises Transient; then SourceError `source_failed`."""
    delays = limits.retry.delays_s(limits.rng)
    while True:
        try:
            return await step()
        except TransientSourceError as exc:
            if exc.has_moved:
                delays = limits.retry.delays_s(limits.rng)
            delay_s = next(delays, None)
            if delay_s is None:
                message = f"source {shown(ref)}: {exc}; tried {limits.retry.attempts} times"
                raise SourceError("source_failed", message, retry_after_s=30) from exc
            await asyncio.sleep(max(delay_s, min(exc.wait_s, limits.retry.max_s)))


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As `asyncio.to_thread`, but in a thread that no end of a process waits for: a library may hang in it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # cancelled meanwhile
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001  (it is raised again, where it is waited for)
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="source").start()
    return await future


def clear(folder: Path, kept: Collection[str]) -> None:
    """Remove everything from a folder but these names."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


async def settled(step: Awaitable[T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """What `step` returns. Who is cancelled meanwhile waits for its end all the same: it is a thread, and quick.

    on_cancel  tells it to be
    """
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at: nobody else will
        raise


def too_big(ref: str, found_bytes: int, limits: Limits) -> SourceError:
    """More than the whole adapter may have."""
    message = f"source {shown(ref)}: {found_bytes} bytes or more, at most {limits.max_bytes} are allowed"
    return SourceError("source_too_big", f"{message}; see max_adapter_bytes")
