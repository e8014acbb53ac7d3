"""Operations in progress per adapter, and the order of fetches. A load can be cancelled until the engine is called."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from workers.core.errors import AgentRequestError, EngineError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _RunningOperation:
    """One load or inspection. Once committed, the engine has been called: cancelling would not undo the load."""

    task: "asyncio.Task[Any]"
    digest: str | None
    state: Literal["running", "committed", "cancelled"] = "running"

    def try_cancel(self) -> bool:
        """Cancel the task unless it is committed; returns whether it was cancelled."""
        if self.state == "committed":
            return False
        self.state = "cancelled"
        self.task.cancel()
        return True


class AgentOperations:
    """The operations in progress of one agent, by lora_id. The event loop is the only writer."""

    def __init__(self) -> None:
        self._operations: dict[str, list[_RunningOperation]] = {}
        self._is_stopping = False

    async def run(self, lora_id: str, digest: str | None, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation as a task that `cancel` can end, and return its result.

        raises  AgentRequestError `cancelled` after `cancel`, EngineError `draining` after `cancel_all`
        """
        task = asyncio.create_task(work)
        operation = _RunningOperation(task, digest)
        self._operations.setdefault(lora_id, []).append(operation)
        try:
            return await task
        except asyncio.CancelledError:
            if operation.state != "cancelled":
                raise  # the caller itself was cancelled, and with it the operation
            if self._is_stopping:
                raise EngineError("draining", "this agent is stopping; load on another one", retry_after_s=30) from None
            message = f"adapter {lora_id!r}: this load was cancelled by an unload"
            raise AgentRequestError("cancelled", message) from None
        finally:
            self._operations[lora_id].remove(operation)
            if not self._operations[lora_id]:
                del self._operations[lora_id]

    def commit(self, lora_id: str) -> None:
        """Mark the operation that calls this as no longer cancellable; operations of other tasks stay as they are."""
        for operation in self._operations.get(lora_id, ()):
            if operation.task is asyncio.current_task() and operation.state == "running":
                operation.state = "committed"

    async def cancel(self, lora_id: str, digest: str | None) -> bool:
        """Cancel an adapter's (or one version's) operations and wait for their end; False if none was cancelled."""
        cancelled = [
            operation
            for operation in self._operations.get(lora_id, ())
            if digest in {None, operation.digest} and operation.try_cancel()
        ]
        if cancelled:
            await asyncio.wait({operation.task for operation in cancelled})
        return bool(cancelled)

    def cancel_all(self) -> None:
        """Cancel all operations that are not committed, and refuse new ones, because the process stops.

        Does not wait for their end.
        """
        self._is_stopping = True
        for operation in [operation for operations in self._operations.values() for operation in operations]:
            operation.try_cancel()


class FetchOrder:
    """Which fetches may begin: those of loads at once, those ahead of loads one at a time and while no load fetches."""

    def __init__(self) -> None:
        self._load_fetches = 0
        self._no_load_fetches = asyncio.Event()
        self._no_load_fetches.set()
        self._ahead = asyncio.Lock()

    @contextmanager
    def for_load(self) -> Iterator[None]:
        """A load fetches its files during the block."""
        self._load_fetches += 1
        self._no_load_fetches.clear()
        try:
            yield
        finally:
            self._load_fetches -= 1
            if not self._load_fetches:
                self._no_load_fetches.set()

    @asynccontextmanager
    async def ahead_of_load(self) -> AsyncIterator[None]:
        """Wait for its turn; then files are fetched during the block that no load needs yet."""
        async with self._ahead:
            await self._no_load_fetches.wait()
            yield
