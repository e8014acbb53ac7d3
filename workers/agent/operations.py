"""Operations under way, and how one is called off: until the engine has been asked for it, a load can be."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from workers.core.errors import AgentRequestError, EngineError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _AdapterOperation:
    """`is_committed`: the engine is being asked; what it does is not undone by not waiting for it."""

    task: "asyncio.Task[Any]"
    digest: str | None
    is_committed: bool = False
    is_cancelled: bool = False

    def call_off(self) -> bool:
        """Whether it was not too late."""
        if not self.is_committed:
            self.is_cancelled = True
            self.task.cancel()
        return not self.is_committed


class OperationsInProgress:
    """By adapter. The event loop is the only writer."""

    def __init__(self) -> None:
        self._operations: dict[str, list[_AdapterOperation]] = {}
        self._is_stopping = False

    async def run(self, lora_id: str, digest: str | None, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises RequestError `cancelled` when somebody called it off, EngineError `draining`."""
        task = asyncio.create_task(work)
        operation = _AdapterOperation(task, digest)
        self._operations.setdefault(lora_id, []).append(operation)
        try:
            return await task
        except asyncio.CancelledError:
            if not operation.is_cancelled:
                raise  # whoever waits here was cancelled, and with it the work
            if self._is_stopping:
                raise EngineError("draining", "this agent is stopping; load on another one", retry_after_s=30) from None
            message = f"adapter {lora_id!r}: this load was called off, because an unload was asked for meanwhile"
            raise AgentRequestError("cancelled", message) from None
        finally:
            self._operations[lora_id].remove(operation)
            if not self._operations[lora_id]:
                del self._operations[lora_id]

    def commit(self, lora_id: str) -> None:
        """The operation that calls this can be called off no more."""
        for operation in self._operations.get(lora_id, ()):
            operation.is_committed |= operation.task is asyncio.current_task()

    async def cancel(self, lora_id: str, digest: str | None) -> bool:
        """Call off what is under way for an adapter, or a version of it, and wait for its end; was there any?"""
        going = [
            operation
            for operation in self._operations.get(lora_id, ())
            if digest in {None, operation.digest} and operation.call_off()
        ]
        if going:
            await asyncio.wait({operation.task for operation in going})
        return bool(going)

    def stop(self) -> None:
        """Call off everything: this process ends, and nobody shall wait for a source until then."""
        self._is_stopping = True
        for operation in [operation for operations in self._operations.values() for operation in operations]:
            operation.call_off()
