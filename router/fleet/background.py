"""Background responses: answered as queued at once, and computed by their engine until it reports their end.

The router polls for that end: first soon, then ever more slowly. vLLM 0.32 (openai/responses/serving.py, seen running)
says `queued` until a response is stored whole, with its usage, or is cancelled, without. It says so for ever of a
response that it refused after queueing, such as for a schema that it cannot take. A client may leave the stream of a
background response: the engine goes on.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from statistics import median

import msgspec
import structlog

from lorafleet.service.decoding import DECODE_ERRORS
from router.core.errors import Saturated
from router.core.fleet import Incarnation, Replica
from router.core.kv.index import WorkerId
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from router.protocols.usage import EngineUsage, usage_of

log = structlog.get_logger()

OnOver = Callable[[EngineUsage | None, int], None]

_UNDER_WAY = frozenset({"queued", "in_progress"})
# The pause between two polls: this, and a quarter of the time so far, by which an end is seen late at most.
_FIRST_PAUSE_S = 0.5
_LATE_SHARE = 0.25
_MAX_PAUSE_S = 10.0
# A worker that moves to another address, or whose agent restarts, is absent for a moment.
_ABSENT_S = 10.0
# Retry-After where too many are under way and none has ended yet: a guess.
_FIRST_RETRY_S = 10.0
# Ended responses whose duration is remembered.
_MEASURED = 50


class _ResponseState(msgspec.Struct):
    status: str = ""


_decode = msgspec.json.Decoder(_ResponseState).decode


@dataclass(slots=True, eq=False)
class _FollowedResponse:
    """One response that is followed.

    engine        computes it
    shown_tokens  that clients have been sent
    """

    response_id: str
    engine: Incarnation
    tenant: str
    on_over: OnOver
    shown_tokens: int
    began_at: float
    task: "asyncio.Task[None] | None" = None


class Background:
    """Follows responses until they end, their engine ends or a timeout passes; then calls `on_over`, once."""

    def __init__(
        self,
        ask: Callable[[Replica, str], Awaitable[bytes]],
        replica_of: Callable[[WorkerId], Replica | None],
        *,
        most: int,
        tenant_share: float,
        timeout_s: float,
        idle_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        ask           gets the response of this id from a replica's engine; may raise EngineLost and FetchRefused
        most          responses under way at once; `tenant_share` is the part of one tenant
        timeout_s     after which a response is no longer counted
        idle_s        an engine that reports no work for so long has ended the response: vLLM 0.32 counts running
                      requests when a step has ended, and a long prefill or a load takes seconds
        """
        self._ask = ask
        self._replica_of = replica_of
        self._most = most
        self._most_of_tenant = max(1, int(most * tenant_share))
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=_MEASURED)
        self._running: dict[str, _FollowedResponse] = {}
        self.places: Counter[str] = Counter()
        self._is_closed = False

    def __len__(self) -> int:
        """Followed responses."""
        return len(self._running)

    def enter(self, tenant: str) -> None:
        """Take a place for one more response, until `leave` or the end that `follow` finds. Raises Saturated."""
        whose, found, most, limit = "", self.places.total(), self._most, "max_background_responses"
        if found < most:
            whose, found, most, limit = " of yours", self.places[tenant], self._most_of_tenant, "tenant_share"
        if found >= most:
            raise Saturated(
                f"{found} responses{whose} are under way in the background, and at most {most} may be; try again when"
                " one is over",
                limit=limit,
                retry_after_s=self._until_one_ends_s(found),
            )
        self.places[tenant] += 1

    def _until_one_ends_s(self, under_way: int) -> float:
        """Seconds until one of so many responses should be over, from how long the last ones took."""
        return median(self._durations_s) / under_way if self._durations_s else _FIRST_RETRY_S

    def leave(self, tenant: str) -> None:
        """Give back the place of a response that is over, or was never begun."""
        self.places[tenant] -= 1
        if not self.places[tenant]:
            del self.places[tenant]

    def follow(
        self, response_id: str, engine: Incarnation, tenant: str, on_over: OnOver, *, shown_tokens: int = 0
    ) -> None:
        """Start a task that follows a response until it ends; then give back the place of `enter` and call `on_over`.

        At once if closed. `on_over` gets the usage (None: unknown) and shown tokens.

        response_id  unique among followed responses
        """
        if self._is_closed:
            self.leave(tenant)
            on_over(None, shown_tokens)
            return
        running = self._running[response_id] = _FollowedResponse(
            response_id, engine, tenant, on_over, shown_tokens, self._clock()
        )
        running.task = asyncio.create_task(self._until_over(running))

    def end_if_over(self, response_id: str, body: bytes) -> None:
        """End following a response if a body shown to a client says that it is over."""
        running = self._running.get(response_id)
        if running is not None and _is_over(body):
            self._end(running, usage_of("responses", body))

    def record_shown_tokens(self, response_id: str, tokens: int) -> None:
        """Keep the most tokens of a response that a client has been sent; ignored unless it is followed."""
        running = self._running.get(response_id)
        if running is not None:
            running.shown_tokens = max(running.shown_tokens, tokens)

    async def close(self) -> None:
        """Stop following: end all responses without usage, and wait until their cancelled tasks are over."""
        self._is_closed = True
        found = list(self._running.values())
        for running in found:
            self._end(running, None)
        await asyncio.gather(*(running.task for running in found if running.task), return_exceptions=True)

    def _end(self, running: _FollowedResponse, usage: EngineUsage | None) -> None:
        """End following: give the place back, cancel the task that polls, and call `on_over`."""
        del self._running[running.response_id]
        self.leave(running.tenant)
        self._durations_s.append(self._clock() - running.began_at)
        assert running.task is not None
        if running.task is not asyncio.current_task():
            running.task.cancel()
        running.on_over(usage, running.shown_tokens)

    async def _until_over(self, running: _FollowedResponse) -> None:
        """Follow one response until it ends or the timeout, then end it. Failures are logged."""
        usage = None
        try:
            async with asyncio.timeout(self._timeout_s):
                usage = await self._usage_at_end(running)
        except TimeoutError:
            log.warning(
                "a response in the background is not over, and counts no longer",
                response_id=running.response_id,
                worker=running.engine[0],
                after_s=self._timeout_s,
            )
        except Exception:  # its key and its worker must not count it for ever
            log.exception("a response in the background could not be followed", response_id=running.response_id)
        self._end(running, usage)

    async def _usage_at_end(self, running: _FollowedResponse) -> EngineUsage | None:
        """Poll until the response has ended; its usage, or None where its engine or the response is gone."""
        clock = asyncio.get_running_loop().time
        began_at, idle_at, absent_at = clock(), inf, inf
        while True:
            await asyncio.sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S + _LATE_SHARE * (clock() - began_at)))
            replica = self._replica_of(running.engine[0])
            if replica is None or not replica.engine_url:  # an agent that restarts has not found its engine yet
                absent_at = min(absent_at, clock())
                if clock() - absent_at > _ABSENT_S:
                    return None
                continue
            absent_at = inf
            if replica.incarnation != running.engine:
                return None
            try:
                body = await self._ask(replica, running.response_id)
            except FetchRefused as exc:
                if exc.status == 404:
                    return None
                continue
            except EngineLost:
                if replica.state == "unreachable":
                    return None
                continue
            if _is_over(body):
                return usage_of("responses", body)
            report = replica.report
            is_idle = report.at > began_at and not report.running + report.waiting
            idle_at = min(idle_at, report.at) if is_idle else inf
            if report.at - idle_at > self._idle_s:
                return None


def _is_over(body: bytes) -> bool:
    """Whether this body is a response that is no longer under way; False for any other body."""
    try:
        status = _decode(body).status
    except DECODE_ERRORS:
        return False
    return bool(status) and status not in _UNDER_WAY
