"""An event loop with a virtual clock, on which each simulated process has a queue of its own.

Within a process callbacks run in the order in which they were registered, as asyncio promises. Which process runs next,
how long a callback takes and how late a timer fires follow from the seed.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.determinism import SimulatedClock, running_node

if TYPE_CHECKING:
    from tests.simulation.network import Network
    from tests.simulation.nodes import Node

# A callback of a service takes 5 to 60 us of a core; a timer of a busy process fires up to some milliseconds late.
_CALLBACK_S = (5e-6, 60e-6)
_LATE_S = 0.002
# Work of other threads: reading a file, a hash.
_THREAD_S = (0.0002, 0.004)
_MOST_IN_A_ROW = 8
_MOST_TIMERS = 2000


class Deadlock(Exception):
    """Nothing is left to run, and the run has not ended."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop. Raises `Deadlock` from `run_until_complete` when no callback and no timer is left."""

    network: "Network"

    def __init__(self, clock: SimulatedClock, chance: Random) -> None:
        super().__init__()
        self._clock = clock
        self.chance = chance
        self._queues: dict[Node | None, deque[asyncio.Handle]] = {None: deque()}
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.callbacks = 0
        self.set_task_factory(_make_task)
        self.on_batch: Callable[[], None] | None = None

    def time(self) -> float:
        return self._clock.now

    def add_node(self, node: "Node") -> None:
        self._queues[node] = deque()

    def drop_node(self, node: "Node") -> list[asyncio.Handle]:
        """Forget all that a process would still do; returned so that nothing of it is finalised, which runs code."""
        timers = [handle for handle in self._scheduled if _node_of(handle) is node]  # type: ignore[attr-defined]
        return [*self._queues.pop(node, ()), *timers]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if running_node.get() is not None:
            when += self.chance.random() ** 4 * _LATE_S
        return super().call_at(when, callback, *args, context=context)

    def call_exactly_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """`call_at` without lateness: for the network, which keeps the order of a connection's bytes."""
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run the function in one go a moment later. As in a thread, a cancellation of the caller does not stop it."""
        del executor
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as exc:  # noqa: BLE001  (handed to the caller)
                if not future.done():
                    future.set_exception(exc)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.chance.uniform(*_THREAD_S), run)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self._readers[fd] = callback, args

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def wake_reader(self, fd: int) -> None:
        """Call what waits for this simulated socket to become readable, if anything does."""
        if (reader := self._readers.get(fd)) is not None:
            reader[0](*reader[1])

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Simulated processes get no signals."""

    def remove_signal_handler(self, sig: int) -> bool:
        del sig
        return False

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        del more
        return await self.network.connect(protocol_factory, host, int(port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        del more
        return self.network.listen(protocol_factory, host, int(port))

    async def getaddrinfo(self, host: Any, port: Any, **_more: Any) -> Any:
        import socket

        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    def _write_to_self(self) -> None:
        """Nothing blocks in a selector that would have to be woken."""

    def _process_events(self, event_list: object) -> None:
        del event_list

    def _run_once(self) -> None:
        """Run a few callbacks of one process that has some, or move the clock to the next timer."""
        self._sort_ready()
        runnable = [(node, queue) for node, queue in self._queues.items() if queue and not (node and node.is_paused)]
        if not runnable:
            self._move_to_next_timer()
            return
        node, queue = runnable[0] if len(runnable) == 1 else self.chance.choice(runnable)
        for _ in range(self.chance.randint(1, _MOST_IN_A_ROW)):
            if not queue or (node is not None and not node.may_run):
                break
            handle = queue.popleft()
            if handle.cancelled():
                continue
            slowness = 0.0 if node is None else node.slowness
            self._clock.now += self.chance.uniform(*_CALLBACK_S) * slowness
            self.callbacks += 1
            handle._run()
            if node is not None:
                node.count_callback()
            self._sort_ready()
        if self.on_batch is not None:
            self.on_batch()

    def _sort_ready(self) -> None:
        """Put due timers and new callbacks into their processes' queues; drop those of dead processes."""
        timers, ready, now = self._scheduled, self._ready, self._clock.now  # type: ignore[attr-defined]
        while timers and timers[0]._when <= now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        while ready:
            handle = ready.popleft()
            if not handle.cancelled() and (queue := self._queues.get(_node_of(handle))) is not None:
                queue.append(handle)

    def _move_to_next_timer(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and (timers[0].cancelled() or _node_of(timers[0]) not in self._queues):
            heapq.heappop(timers)._scheduled = False
        if self._stopping:  # type: ignore[attr-defined]
            return
        if len(timers) > _MOST_TIMERS and sum(timer.cancelled() for timer in timers) > len(timers) // 2:
            timers[:] = [timer for timer in timers if not timer.cancelled()]
            heapq.heapify(timers)
        if not timers:
            raise Deadlock("no callback and no timer is left")
        self._clock.now = max(self._clock.now, timers[0]._when)


async def run_in_loop(func: Callable[..., Any], *args: Any, **_options: Any) -> Any:
    """`anyio.to_thread.run_sync` without its threads."""
    return await asyncio.get_running_loop().run_in_executor(None, func, *args)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> asyncio.Task[Any]:
    """A task, which its process knows."""
    task = asyncio.Task(coroutine, loop=loop, context=context)
    node = running_node.get() if context is None else context.get(running_node)
    if node is not None:
        node.tasks.add(task)
    return task


def _node_of(handle: asyncio.Handle) -> "Node | None":
    """The process whose code the handle is."""
    return handle._context.get(running_node)  # type: ignore[attr-defined,no-any-return]
