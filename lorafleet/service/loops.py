"""Background loops that survive their worst round."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import httpx
import structlog

log = structlog.get_logger()

T = TypeVar("T")

# Somebody else is not there, or says no: nothing that a traceback of ours would explain.
_AWAY = (OSError, TimeoutError, httpx.HTTPError)
_FIRST_BACKOFF_S = 0.2
_GRAIN_S = 0.1
# Of calls that were put off, as many are made in one go as begin within this.
_AT_ONCE_S = 0.0005


def backoff_s(failures: int, first_s: float, most_s: float, rng: random.Random | None = None) -> float:
    """How long to wait after so many failures in a row, 1 or more: doubling from `first_s` on, and drawn between half
    of it and all, so that who failed together does not come back together.
    """
    return min(most_s, first_s * 2.0 ** min(failures - 1, 30)) * (rng or random).uniform(0.5, 1.0)


async def watched(work: Awaitable[T], look: Callable[[], object], *, every_s: float) -> T:
    """What `work` gives, however long it takes; `look` is called so often meanwhile, and calls it off by raising."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=every_s))[0]:
            look()
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
    most_backoff_s: float = 5.0,
    rng: random.Random | None = None,
) -> None:
    """Run `step` again and again until cancelled: every `every_s`, or at once when poked.

    A step that raises is tried again after a jittered, growing pause of at most `most_backoff_s`. The 1st, 10th and
    every 100th failure in a row is logged: in one line when the other side is away, with a traceback when the fault is
    ours.

    on_failure  called when the fault is ours, for a count of it; that somebody is away has figures of its own
    about       what else the log says of this loop: whom it follows
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
        except Exception as exc:  # the top of a loop: it logs, counts and goes on
            failures += 1
            is_ours = not isinstance(exc, _AWAY)
            if is_ours:
                on_failure()
            if failures in (1, 10) or failures % 100 == 0:
                said = repr(exc) + _asked(exc)
                log.warning("loop step failed", loop=name, **about, failures=failures, error=said, exc_info=is_ours)
            pause_s = backoff_s(failures, _FIRST_BACKOFF_S, most_backoff_s, rng)
        if poke is None or failures:
            await asyncio.sleep(pause_s)
        else:
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the poke.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await poke.wait()


def _asked(exc: Exception) -> str:
    """` at http://host:port` for httpx's errors, which do not say it; no more, because a URL may hold a key."""
    if not isinstance(exc, httpx.TransportError):
        return ""
    try:
        url = exc.request.url
    except RuntimeError:  # raised without a request
        return ""
    return f" at {url.scheme}://{url.netloc.decode()}"


class DelayedCalls:
    """Calls to be made after the same delay each, or up to a tenth of a second later: two timers for all that come in
    a tenth of a second.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def add(self, call: Callable[..., object], *args: object) -> None:
        """Make this call after the delay; what it raises is logged."""
        if not self._calls:
            asyncio.get_running_loop().call_later(_GRAIN_S, self._put_off)
        self._calls.append((call, args))

    def _put_off(self) -> None:
        calls, self._calls = self._calls, []
        asyncio.get_running_loop().call_later(self._delay_s, _make, iter(calls))


def _make(calls: Iterator[tuple[Callable[..., object], tuple[object, ...]]]) -> None:
    until = time.perf_counter() + _AT_ONCE_S
    for call, args in calls:
        try:
            call(*args)
        except Exception:
            log.exception("a call that was put off failed")
        if time.perf_counter() > until:
            # Whatever came meanwhile has its turn; then those that are left.
            asyncio.get_running_loop().call_soon(_make, calls)
            return


class ChangeSignal:
    """Something that changes and can be waited for; any number may wait."""

    def __init__(self) -> None:
        self._next: asyncio.Event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether a change came within this time."""
        try:
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the change.
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, predicate: Callable[[], bool], *, timeout_s: float) -> bool:
        """Whether the predicate came true in time; it is asked now and after every change."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not predicate():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or not await self.wait(left_s):
                return predicate()
        return True
