"""How long a test waits: until the event, and where the event never comes, until a deadline.

A deadline costs time only in a test that fails. So deadlines are generous, and grow with the slowness of the machine
and with the number of processes that want its cores. The process that starts the tests measures the slowness once; the
workers of pytest-xdist read it from the environment. The processes of the last minute are counted at every wait.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

_VARIABLE = "LORAFLEET_TEST_SLOWNESS"
# CPython 3.11 on a quiet core of an AMD EPYC takes this long for one round. Only the order of magnitude matters.
_REFERENCE_S = 0.003
_ROUNDS = 80
# Tests share the machine with each other and with the servers that they start.
_MARGIN = 3.0
# Processes that want each core while tests run alone, two beside one another on each.
_OWN_PROCESSES = 3.0


def _slowness_now() -> float:
    """The time of a fixed computation on this machine now, divided by its time on a quiet reference core.

    The machine's other processes make the factor larger. It is at least 1 and at most 20.
    """
    began = time.monotonic()
    for _ in range(_ROUNDS):
        sum(number * number for number in range(20_000))
    return min(20.0, max(1.0, (time.monotonic() - began) / (_ROUNDS * _REFERENCE_S)))


if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = f"{_slowness_now():.1f}"
SLOWNESS = float(os.environ[_VARIABLE])


def patience(seconds: float) -> float:
    """Seconds to wait for what takes at most `seconds` on a quiet machine."""
    crowding = os.getloadavg()[0] / (len(os.sched_getaffinity(0)) * _OWN_PROCESSES)
    return seconds * max(SLOWNESS, min(20.0, crowding)) * _MARGIN


# Settings of an orchestrator and a router between real workers. On a quiet machine they are near the defaults.
ORCHESTRATOR_WAITS = {
    "lost_after_s": patience(1),
    "probe_timeout_s": patience(0.5),
    "lease_duration_s": patience(2),
}
ROUTER_WAITS = {"cold_start_timeout_s": patience(20), "publish_timeout_s": min(110.0, patience(20))}


def within(seconds: float) -> asyncio.Timeout:
    """`asyncio.timeout`, as patient as the machine is slow."""
    return asyncio.timeout(patience(seconds))


async def until(holds: Callable[[], Any], *, within_s: float = 20.0, what: str = "") -> Any:
    """Poll for a change that no event tells of.

    holds    a function, or a function that gives an awaitable
    returns  its first true answer
    raises   TimeoutError with `what` when no answer was true in time
    """
    pauses = _pauses(within_s, what or repr(holds))
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(next(pauses))


def wait_until(holds: Callable[[], Any], *, within_s: float = 20.0, what: str = "") -> Any:
    """`until` for a test without an event loop."""
    pauses = _pauses(within_s, what or repr(holds))
    while not (found := holds()):
        time.sleep(next(pauses))
    return found


def _pauses(within_s: float, what: str) -> Iterator[float]:
    """Seconds to sleep before each next look: 1 ms at first, 50 ms in the end."""
    limit_s = patience(within_s)
    deadline = time.monotonic() + limit_s
    pause_s = 0.001
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(0.05, pause_s * 1.3)
    raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
