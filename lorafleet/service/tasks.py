"""Background tasks with one owner, who ends all of them when a service stops; work that outlives a cancellation."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Starts coroutines as tasks, and waits for or cancels all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine as a task, and keep the task until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_all(self) -> None:
        """Wait until no task is left, including those that are started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel_all(self) -> None:
        """Cancel all tasks, from the next tick on.

        A task that is cancelled in the tick that made it never runs, not even its `finally` blocks.
        """
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            loop.call_soon(task.cancel)

    async def cancel_and_wait(self) -> None:
        """Cancel all tasks and wait for their end."""
        tasks = list(self._tasks)
        self.cancel_all()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish_even_if_cancelled(operation: Awaitable[T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Await `operation` to its end even if the caller is cancelled; then raise the cancellation.

    For work in a thread, and for what would leak if only its first half were done. A cancelled caller does not get the
    operation's result or error.

    on_cancel  called at a cancellation, to end the operation soon
    """
    task = asyncio.ensure_future(operation)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        raise
