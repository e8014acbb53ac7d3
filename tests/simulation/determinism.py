"""Replaces time, chance, threads and file locks of this process by simulated ones; before our packages are imported.

The services run unchanged, and so do the libraries below them: httpx, uvicorn, structlog and pydantic read the same
simulated clock. That is why these are replaced where Python has them, and not by arguments of each service.
"""

import concurrent.futures
import contextvars
import fcntl
import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.nodes import Node

# Before all files that a run makes, so that no file is old enough to be swept.
_EPOCH = 1_767_225_600.0

running_node: "contextvars.ContextVar[Node | None]" = contextvars.ContextVar("running_node", default=None)
"""The simulated process whose code runs; None: the simulation itself."""


class SimulatedClock:
    """The time of all simulated machines: `now` in seconds since the start. Only the event loop moves it."""

    def __init__(self) -> None:
        self.now = 1000.0  # a machine that has run for a while: nothing of ours may take 0 for "never"

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        """Unix time, as the clock of the running node's machine shows it."""
        node = running_node.get()
        return _EPOCH + self.now + (node.clock_offset_s if node is not None else 0.0)


class Replaced:
    """What stands in Python's place: the clock, and the chance of everything that asks for it without a seed."""

    def __init__(self, seed: int) -> None:
        self.clock = SimulatedClock()
        self.chance = random.Random(seed)

    def random_bytes(self, size: int) -> bytes:
        return self.chance.randbytes(size)


def install(seed: int) -> tuple[Replaced, Callable[[], float]]:
    """Replace time, chance, threads, file locks, `os.kill` and `os.close` in this process.

    Call once, before other imports.

    returns  what stands in their place, and the real clock
    """
    replaced, real_clock = Replaced(seed), time.monotonic
    _replace_time(replaced.clock)
    _replace_chance(replaced)
    threading.Thread = _LoopThread  # type: ignore[misc,assignment]
    concurrent.futures.ThreadPoolExecutor = _LoopExecutor  # type: ignore[misc,assignment]
    os.kill = _kill
    socket.gethostname = _host_name
    fcntl.flock = _recorded_flock(fcntl.flock)
    os.close = _recorded_close(os.close)
    sqlite3.connect = _recorded_connect(sqlite3.connect)
    return replaced, real_clock


def _host_name() -> str:
    """The running process's name, as that of a pod."""
    node = running_node.get()
    return "simulation" if node is None else node.name


def _replace_time(clock: SimulatedClock) -> None:
    time.monotonic = time.perf_counter = clock.monotonic
    time.thread_time = time.process_time = clock.monotonic
    time.time = clock.wall
    time.monotonic_ns = time.perf_counter_ns = lambda: int(clock.now * 1e9)
    time.time_ns = lambda: int(clock.wall() * 1e9)

    def no_sleep(seconds: float) -> None:
        clock.now += seconds

    time.sleep = no_sleep


def _replace_chance(replaced: Replaced) -> None:
    chance = replaced.chance
    os.urandom = replaced.random_bytes
    random._urandom = replaced.random_bytes  # type: ignore[attr-defined]  # of SystemRandom, and so of `secrets`
    random.seed(chance.getrandbits(64))
    plain = random.Random

    class SeededRandom(plain):  # type: ignore[valid-type,misc]
        """`Random`; without a seed of its own it takes one from the simulation's."""

        def __new__(cls, x: object = None) -> Any:
            return plain.__new__(cls, chance.getrandbits(64) if x is None else x)

        def __init__(self, x: Any = None) -> None:
            super().__init__(chance.getrandbits(64) if x is None else x)

    random.Random = SeededRandom  # type: ignore[misc]


class _LoopThread:
    """A thread's work, run by the simulated event loop a moment after the thread's start."""

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", daemon: bool | None = None
    ) -> None:
        self._run = lambda: target(*args)
        self.name = name
        self.daemon = daemon
        self._has_ended = False

    def start(self) -> None:
        import asyncio

        def run() -> None:
            self._run()
            self._has_ended = True

        asyncio.get_running_loop().call_later(0.001, run)

    def join(self, timeout: float | None = None) -> None:
        if not self._has_ended and timeout is None:
            raise RuntimeError(f"thread {self.name!r} is waited for, but threads of the simulation run in its loop")

    def is_alive(self) -> bool:
        return not self._has_ended


class _LoopExecutor(concurrent.futures.Executor):
    """A pool of threads whose work the simulated event loop does: see `SimulatedLoop.run_in_executor`."""

    def __init__(self, *_settings: object, **_more: object) -> None:
        """Nothing is started."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as exc:  # noqa: BLE001  (handed to the caller)
                done.set_exception(exc)

        _LoopThread(target=run).start()
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What has been submitted is done all the same."""


def _kill(pid: int, _signal: int) -> None:
    """A service that sends itself a signal ends; no other process is ever signalled."""
    node = running_node.get()
    if pid != os.getpid() or node is None:
        raise ProcessLookupError(f"no process {pid} in the simulation")
    node.end_itself()


def _recorded_flock(flock: Callable[[Any, int], object]) -> Callable[[Any, int], None]:
    """`flock`, which notes the files that the system would close if the node's process were killed."""

    def lock(file: Any, operation: int) -> None:
        flock(file, operation)
        if (node := running_node.get()) is not None and file not in node.locks:
            node.locks.append(file)

    return lock


def _recorded_close(close: Callable[[int], None]) -> Callable[[int], None]:
    """`os.close`, after which a node holds no lock by this descriptor: its number is soon another file's."""

    def close_and_note(descriptor: int) -> None:
        close(descriptor)
        if (node := running_node.get()) is not None and descriptor in node.locks:
            node.locks.remove(descriptor)

    return close_and_note


def _recorded_connect(connect: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    """`sqlite3.connect`, which notes the connections that end with the node's process."""

    def connect_and_note(*args: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*args, **named)
        if (node := running_node.get()) is not None:
            node.databases.append(connection)
            if node.disk is not None and node.disk.is_full:
                connection.execute("PRAGMA max_page_count = 1")
        return connection

    return connect_and_note
