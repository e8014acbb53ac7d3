"""Long prompts: threads that encode them, their turns on the event loop, and a bound on how many there are at once."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from lorafleet.service.process import release_free_memory
from lorafleet.tokenizer.encoding import ThreadWork

# Of the threads: they get a third of the event loop's share of a core that both want.
_THREAD_NICENESS = 5
# Prompts that may wait for a thread or a turn; further ones get an approximate prompt. A guess, nothing measured.
_MAX_WAITING = 64
# The library takes some 200 bytes for a character until a text is encoded: not worth releasing for shorter texts.
_RELEASE_CHARS = 65_536


class TooManyLongPrompts(Exception):
    """Too many prompts are being encoded, or wait for it."""


class TokenizerThreads:
    """A few threads, and a bound on the prompts that use them."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_lower_thread_priority)
        self._max_in_use = threads + _MAX_WAITING
        self._in_use = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a prompt until it is encoded; raises TooManyLongPrompts."""
        if self._in_use >= self._max_in_use:
            raise TooManyLongPrompts
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1

    async def run(self, work: ThreadWork) -> list[bytes]:
        """Run an admitted prompt's work in a thread and return its result; raises its errors."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, _run_and_release, work)

    def close(self) -> None:
        """Cancel waiting work, and let the threads end after what they run; does not wait."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class SliceTurns:
    """Turns on the event loop: however many prompts take their steps there, one step runs between two rounds of it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until it is this prompt's turn, and everything else that was ready has run."""
        async with self._lock:
            await asyncio.sleep(0)


def _run_and_release(work: ThreadWork) -> list[bytes]:
    """Run this thread's work; what a very long text took is given back to the system."""
    try:
        return work.run()
    finally:
        if work.chars > _RELEASE_CHARS:
            release_free_memory()


def _lower_thread_priority() -> None:
    """Lower this thread's priority, so that the event loop comes first on a shared core."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has a niceness for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
