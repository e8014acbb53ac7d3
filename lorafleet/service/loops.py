"""Background loops that survive errors, delayed calls, and signals of changes."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import httpx
import structlog

from lorafleet.service.files import is_full

log = structlog.get_logger()

T = TypeVar("T")

# Errors of another service or the network: logged without a traceback.
_PEER_ERRORS = (OSError, TimeoutError, httpx.HTTPError)
# Statuses by which another service refuses our key.
_KEY_REFUSALS = frozenset({401, 403})
_FIRST_BACKOFF_S = 0.2
_GRAIN_S = 0.1
MOST_BACKOFF_S = 5.0
"""Longest pause of a loop whose steps fail, where the loop names no other."""
# Delayed calls are made in batches of this time.
_CALL_BATCH_S = 0.0005


def backoff_s(failures: int, first_s: float, most_s: float, rng: random.Random | None = None) -> float:
    """The pause after `failures` in a row (1 or more): doubles from `first_s` on, with jitter from half to all."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, 30)) * (rng or random).uniform(0.5, 1.0)


async def run_watched(work: Awaitable[T], check: Callable[[], object], *, every_s: float) -> T:
    """Await `work` and return its result; `check` is called every `every_s`, and its error cancels the work.

    Raises the error of either. Cancelling the call cancels the work.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=every_s))[0]:
            check()
        return task.result()
    finally:
        task.cancel()


async def forever(
    step: Callable[[], Awaitable[object]],
    *,
    name: str,
    every_s: float,
    poke: asyncio.Event | None = None,
    on_failure: Callable[[], object] = lambda: None,
    about: Mapping[str, object] = MappingProxyType({}),
    most_backoff_s: float = MOST_BACKOFF_S,
    rng: random.Random | None = None,
) -> None:
    """Run `step` repeatedly until cancelled: every `every_s`, or at once when `poke` is set.

    A cancellation that a step swallows ends the loop behind that step.

    A step that raises is tried again after a jittered, growing pause of at most `most_backoff_s`. The 1st, 10th and
    every 100th failure in a row is logged: network errors in one line, our own faults with a traceback.

    on_failure  called for our own faults, to count them
    about       further fields of the log lines
    """
    failures = 0
    while True:
        if poke is not None:
            poke.clear()
        try:
            await step()
            if failures:
                log.info("loop step works again", loop=name, **about, failures=failures)
            failures = 0
            pause_s = every_s
        except Exception as exc:  # the top of a loop: it logs, counts and continues
            failures += 1
            is_own_fault = not isinstance(exc, _PEER_ERRORS)
            if is_own_fault:
                on_failure()
            if failures in (1, 10) or failures % 100 == 0:
                error, then = repr(exc) + _url_suffix(exc), _next_step(exc, is_own_fault=is_own_fault)
                log.warning(
                    "loop step failed",
                    loop=name,
                    **about,
                    failures=failures,
                    error=error,
                    then=then,
                    exc_info=is_own_fault,
                )
            pause_s = backoff_s(failures, _FIRST_BACKOFF_S, most_backoff_s, rng)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # the step's own calls have swallowed it (Python 3.11)
        if poke is None or failures:
            await asyncio.sleep(pause_s)
        else:
            # A poke of our own at the end of the pause: a timeout would cancel the task, which costs as much as a step.
            timer = asyncio.get_running_loop().call_later(pause_s, poke.set)
            try:
                await poke.wait()
            finally:
                timer.cancel()


def _next_step(exc: Exception, *, is_own_fault: bool) -> str:
    """The next step for an operator, for the log line of a failed step. The loop repeats the step in any case."""
    if is_own_fault:
        return "it is tried again; report this, with the traceback"
    if isinstance(exc, OSError) and (exc.filename is not None or is_full(exc)):
        return "it is tried again; if that goes on, mend the file or the disk that the error names"
    status = exc.response.status_code if isinstance(exc, httpx.HTTPStatusError) else getattr(exc, "status", None)
    if status in _KEY_REFUSALS:
        return "it is tried again; if that goes on, mend this service's key (token_file, for agents agent_token_file)"
    return "it is tried again; if that goes on, bring the other service back, or mend its address"


def _url_suffix(exc: Exception) -> str:
    """` at http://host:port` for httpx's errors, which do not name it; no path, since a URL may hold a key."""
    if not isinstance(exc, httpx.TransportError):
        return ""
    try:
        url = exc.request.url
    except RuntimeError:  # raised without a request
        return ""
    return f" at {url.scheme}://{url.netloc.decode()}"


class DelayedCalls:
    """Calls made after a fixed delay, up to 0.1 s late: all calls of 0.1 s share two timers."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def add(self, call: Callable[..., object], *args: object) -> None:
        """Make a call after the delay; errors are logged."""
        if not self._calls:
            asyncio.get_running_loop().call_later(_GRAIN_S, self._start_delay)
        self._calls.append((call, args))

    def _start_delay(self) -> None:
        """Start the delay of all calls added so far."""
        calls, self._calls = self._calls, []
        asyncio.get_running_loop().call_later(self._delay_s, _make_calls, iter(calls))


def _make_calls(calls: Iterator[tuple[Callable[..., object], tuple[object, ...]]]) -> None:
    """Make calls for half a millisecond, then let other events run before the rest. Errors are logged."""
    until = time.perf_counter() + _CALL_BATCH_S
    for call, args in calls:
        try:
            call(*args)
        except Exception:
            log.exception("a delayed call failed")
        if time.perf_counter() > until:
            # Other events come first; then the remaining calls.
            asyncio.get_running_loop().call_soon(_make_calls, calls)
            return


class ChangeSignal:
    """A signal of changes for which any number of tasks may wait."""

    def __init__(self) -> None:
        self._next: asyncio.Event = asyncio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now; later ones wait for the next call."""
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change; false if none comes within `timeout_s`."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the change.
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, predicate: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until the predicate is true, calling it now and after every change; false if it is not in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not predicate():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or not await self.wait(left_s):
                return predicate()
        return True
