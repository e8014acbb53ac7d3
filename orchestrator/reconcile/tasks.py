"""Work that goes on beside the passes, each piece in a task of its own."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Starts coroutines and can wait for, or drop, all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def done(self) -> None:
        """Until nothing is under way, including what was started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Everything under way ends as soon as it can, and not before it has begun.

        A task that is cancelled in the turn of the loop that made it never runs, nor does what it would do at its end.
        """
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            loop.call_soon(task.cancel)

    async def drop(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = list(self._tasks)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
