"""Background tasks with one owner, who ends all of them when a service stops."""

import asyncio
from collections.abc import Coroutine
from typing import Any


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
