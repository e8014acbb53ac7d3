"""Calls on file systems that may hang for ever, such as a network file system whose server is gone."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from lorafleet.service.tasks import finish_even_if_cancelled
from workers.core.errors import SourceError
from workers.sources.base import run_in_daemon_thread

T = TypeVar("T")

_MOST_HANGING = 4
"""Threads of one place that may hang. Each stays until its file system answers: nothing ends a read that hangs."""
_GRACE_S = 5.0


class FileSystemCalls:
    """Runs each call in a thread of its own, and gives up one that makes no progress.

    A call that is given up keeps its thread. While `_MOST_HANGING` calls of one place do so, further ones there are
    refused at once.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s`: seconds without progress after which a call is given up."""
        self._timeout_s = timeout_s
        self._hanging: Counter[str] = Counter()

    async def run(
        self,
        function: Callable[..., T],
        *args: Any,
        place: str,
        most_hanging: int = _MOST_HANGING,
        progress: Callable[[], int] = lambda: 0,
        cancel: Callable[[], None] = lambda: None,
    ) -> T:
        """Call the function in a daemon thread; return its result or raise its error.

        A cancelled caller waits a moment for the thread, so that what comes next finds its files at rest.

        place         the folder whose file system is asked, for messages
        most_hanging  calls of the place that hang, from which on this one is refused
        progress      a number that grows as the call gets further
        cancel        has the call end at its next step
        raises        SourceError `source_failed` for a call that is given up, or refused because others hang
        """
        if self._hanging[place] >= most_hanging:
            message = f"{place}: {self._hanging[place]} read(s) there still wait for a file system that does not answer"
            raise SourceError("source_failed", f"{message}; bring it back, or unmount it by force", retry_after_s=30)
        call = asyncio.ensure_future(run_in_daemon_thread(function, *args))
        reached = progress()
        try:
            while not (await asyncio.wait({call}, timeout=self._timeout_s))[0]:
                if progress() == reached:
                    message = f"{place}: the file system has not answered for {self._timeout_s:g} s"
                    message += "; is its server up? See source_timeout_s"
                    raise SourceError("source_failed", message, retry_after_s=30)
                reached = progress()
            return call.result()
        except asyncio.CancelledError:
            cancel()
            await finish_even_if_cancelled(asyncio.wait({call}, timeout=_GRACE_S))
            raise
        finally:
            if not call.done():
                cancel()
                self._hanging[place] += 1
                call.add_done_callback(lambda _: self._forget(place))
            call.add_done_callback(_retrieve_error)

    def _forget(self, place: str) -> None:
        """Count a call that hung as one that has ended."""
        self._hanging[place] -= 1
        if not self._hanging[place]:
            del self._hanging[place]


def _retrieve_error(call: asyncio.Future[Any]) -> None:
    """Mark the error of a call as retrieved: its caller has gone, or has raised it."""
    if not call.cancelled():
        call.exception()
