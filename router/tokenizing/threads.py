"""Threads for long prompts, with a bound on the prompts that wait for one."""

import asyncio
import contextlib
import os
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Of the threads: they get a third of the event loop's share of a core that both want.
_THREAD_NICENESS = 5
# Prompts that may wait for a thread; further ones get an approximate prompt. A guess, nothing measured.
_MAX_WAITING = 64


class ThreadsBusy(Exception):
    """Too many prompts wait for a thread."""


class TokenizerThreads:
    """A few threads, and a bound on the work that waits for one."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_lower_thread_priority)
        self._max_in_use = threads + _MAX_WAITING
        self._in_use = 0

    async def run(self, work: "Callable[[], list[array[int]]]") -> "list[array[int]]":
        """Run `work` in a thread and return its result; raises ThreadsBusy if too many wait, and its own errors."""
        if self._in_use >= self._max_in_use:
            raise ThreadsBusy
        self._in_use += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._in_use -= 1

    def close(self) -> None:
        """Cancel waiting work, and let the threads end after what they run; does not wait."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _lower_thread_priority() -> None:
    """Lower this thread's priority, so that the event loop comes first on a shared core."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has a niceness for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
