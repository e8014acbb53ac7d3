"""Files of adapters that other workers and fleets read from this worker: how many at a time, and how fast."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workers.core.errors import WorkerBusy
from workers.metrics import WorkerMetrics

_BUSY_RETRY_S = 1.0
_BURST_S = 0.25
"""Seconds of the rate that may go out at once: the pause between two pieces is shorter than a reader notices."""


class FileUploads:
    """The bounds of uploads, which share the machine's network with the engine's answers."""

    def __init__(
        self,
        *,
        most: int,
        bytes_per_s: int,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        most         files at a time; more are refused
        bytes_per_s  of all together; 0: no limit
        """
        self._most = most
        self._rate = bytes_per_s
        self._metrics = metrics
        self._clock = clock
        self._count = 0
        self._free_at = clock()

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Count one upload during the block. Raises WorkerBusy `files_busy` beyond the limit."""
        if self._count >= self._most:
            self._metrics.uploads_refused.inc()
            message = f"{self._count} files are being sent already; ask another worker, or again later"
            raise WorkerBusy("files_busy", message, retry_after_s=_BUSY_RETRY_S)
        self._count += 1
        self._metrics.uploads.set(self._count)
        try:
            yield
        finally:
            self._count -= 1
            self._metrics.uploads.set(self._count)

    async def wait_turn(self, size_bytes: int) -> None:
        """Wait until this many bytes may go out by the rate, and count them."""
        self._metrics.uploaded_bytes.inc(size_bytes)
        if not self._rate:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
