"""Simulated processes: each has a machine's address and clock, files, connections, and a life that may end anywhere."""

import asyncio
import contextlib
import os
import sqlite3
import weakref
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import IO, TYPE_CHECKING, Any

from tests.simulation.determinism import running_node

if TYPE_CHECKING:
    from tests.simulation.disk import Disk
    from tests.simulation.event_loop import SimulatedLoop
    from tests.simulation.network import SimulatedServer, Stream

Main = Callable[["Node"], Awaitable[None]]
"""A process's program. It runs until it is killed, or `node.stop` is set; then it ends in order."""


class Node:
    """One process at one address. A killed process loses its memory; its files stay.

    may_end         whether an event of the scenario ends it; after `away_s` it starts again
    clock_offset_s  how much the wall clock of its machine is ahead
    slowness        how much longer its callbacks take than on a quiet core
    disk            its machine's; None: a client's, which has none
    locks           files and descriptors by which it holds locks, or held them: a closed one is none of its own
    """

    def __init__(
        self, loop: "SimulatedLoop", name: str, host: str, *, slowness: float = 1.0, disk: "Disk | None" = None
    ) -> None:
        self.name, self.host, self.slowness, self.disk = name, host, slowness, disk
        self.clock_offset_s = 0.0
        self.is_paused = False
        self.is_alive = True
        self.locks: list[int | IO[Any]] = []
        self.databases: list[sqlite3.Connection] = []
        self.listeners: list[SimulatedServer] = []
        self.streams: dict[Stream, None] = {}
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.stop = asyncio.Event()
        self.main: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self.may_end = False
        self.away_s: float | None = 0.0
        self.on_end: Callable[[Node], None] = lambda _node: None
        self._kill_in: int | None = None
        self._loop = loop
        self._remains: list[Any] = []
        loop.add_node(self)

    def start(self, main: Main) -> None:
        """Run the program."""
        context = copy_context()
        context.run(running_node.set, self)

        async def run() -> None:
            await main(self)

        self.main = self._loop.create_task(run(), context=context, name=self.name)
        self.main.add_done_callback(self._on_main_end)

    @property
    def may_run(self) -> bool:
        return self.is_alive and not self.is_paused

    def kill_in(self, callbacks: int) -> None:
        """Kill the process before its so-manieth callback from now: in the midst of whatever it does then."""
        self._kill_in = callbacks

    def count_callback(self) -> None:
        """One callback of this process has run."""
        if self._kill_in is not None:
            self._kill_in -= 1
            if self._kill_in <= 0:
                self.kill()

    def end_itself(self) -> None:
        """The process has asked for its own end, as with a signal to itself."""
        self._loop.call_soon(self.kill)

    def kill(self) -> None:
        """End the process as SIGKILL does: nothing of it runs any more, and the kernel closes what it had open."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._kill_in = None
        tasks = list(self.tasks)
        # Kept, because a coroutine that is collected runs its `finally` blocks.
        self._remains += [*self._loop.drop_node(self), *tasks, list(self.streams)]
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for listener in self.listeners:
            listener.close()
        for stream in list(self.streams):
            stream.leave()
        for database in self.databases:
            with contextlib.suppress(sqlite3.Error):
                database.rollback()
                database.close()
        for file in list(self.locks):
            if isinstance(file, int):
                os.close(file)
            else:
                file.close()
        self.on_end(self)

    def _on_main_end(self, task: "asyncio.Task[None]") -> None:
        """The program has returned, or failed."""
        if not self.is_alive:
            return
        self.failure = None if task.cancelled() else task.exception()
        self.kill()
