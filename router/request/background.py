"""Responses in the background: answered as queued at once, and under way at their engine until it says that they are
over.

Nobody is told of that end, so it is asked for: at first soon, then ever more slowly. vLLM 0.32 (openai/responses/
serving.py, seen running) says `queued` until a response is stored whole, with its usage, or is cancelled, without; and
for ever of one that its engine refused after it was queued, such as one with a schema that it cannot take. A stream of
one may be left, and the engine goes on.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

import msgspec
import structlog

from router.core.errors import Saturated
from router.core.fleet import Incarnation, Replica
from router.core.kv.index import WorkerId
from router.http.engine_pool import EngineLost
from router.http.fetch import FetchRefused
from router.protocols.usage import EngineUsage, usage_of

log = structlog.get_logger()

Over = Callable[[EngineUsage | None, int], None]

_UNDER_WAY = frozenset({"queued", "in_progress"})
# Until it is asked again: so long, and a quarter of the time that it has taken so far, which is the most that an end
# can be seen late by.
_FIRST_LOOK_S = 0.5
_LATE_SHARE = 0.25
_MOST_PAUSE_S = 10.0
# A worker that is found at another address, or whose agent has started anew, is nowhere for a moment.
_ABSENT_S = 10.0
# How soon one of those that are under way may be over: a guess.
_RETRY_S = 10.0


class _State(msgspec.Struct):
    status: str = ""


_decode = msgspec.json.Decoder(_State).decode


@dataclass(slots=True, eq=False)
class _Running:
    response_id: str
    there: Incarnation
    tenant: str
    over: Over
    shown_tokens: int
    task: "asyncio.Task[None] | None" = None


class Background:
    """Follows each until it is over, its engine is gone, or it has taken too long; and says so exactly once."""

    def __init__(
        self,
        ask: Callable[[Replica, str], Awaitable[bytes]],
        replica_of: Callable[[WorkerId], Replica | None],
        *,
        most: int,
        tenant_share: float,
        timeout_s: float,
        idle_s: float = 30.0,
    ) -> None:
        """
        ask           the response of this id as a replica's engine tells it now; may raise EngineLost and Refused
        most          that are under way at once; `tenant_share` of them those of one tenant
        timeout_s     after which one counts no longer, whatever becomes of it
        idle_s        for how long its engine says that it has nothing to do before that is believed: vLLM 0.32 counts
                      what it runs when a step of it has ended, and a long prefill or a load takes seconds
        """
        self._ask = ask
        self._replica_of = replica_of
        self._most = most
        self._most_of_tenant = max(1, int(most * tenant_share))
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._running: dict[str, _Running] = {}
        self._tenants: Counter[str] = Counter()
        self._is_closed = False

    def __len__(self) -> int:
        """How many are followed."""
        return len(self._running)

    def enter(self, tenant: str) -> None:
        """One more is coming: it has its place until it leaves, or what is followed of it is over.

        raises  Saturated when it would be too many
        """
        whose, found, most = "", self._tenants.total(), self._most
        if found < most:
            whose, found, most = " of yours", self._tenants[tenant], self._most_of_tenant
        if found >= most:
            raise Saturated(
                f"{found} responses{whose} are under way in the background, and at most {most} may be; try again when"
                " one is over",
                retry_after_s=_RETRY_S,
            )
        self._tenants[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One that entered is over, or was never begun."""
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def follow(self, response_id: str, there: Incarnation, tenant: str, over: Over, *, shown_tokens: int = 0) -> None:
        """Tell `over` when this response, the only one of its id, is: its usage, or None where nobody knows it, and how
        many of its tokens a client has been sent. It has entered, and leaves then.
        """
        if self._is_closed:
            self.leave(tenant)
            over(None, shown_tokens)
            return
        running = self._running[response_id] = _Running(response_id, there, tenant, over, shown_tokens)
        running.task = asyncio.create_task(self._until_over(running))

    def seen(self, response_id: str, body: bytes) -> None:
        """A client was told this of a response, which may be its end."""
        running = self._running.get(response_id)
        if running is not None and _is_over(body):
            self._end(running, usage_of("responses", body))

    def shown(self, response_id: str, tokens: int) -> None:
        """A client was sent so many of its tokens."""
        running = self._running.get(response_id)
        if running is not None:
            running.shown_tokens = max(running.shown_tokens, tokens)

    async def close(self) -> None:
        """Follow none any more."""
        self._is_closed = True
        found = list(self._running.values())
        for running in found:
            self._end(running, None)
        await asyncio.gather(*(running.task for running in found if running.task), return_exceptions=True)

    def _end(self, running: _Running, usage: EngineUsage | None) -> None:
        del self._running[running.response_id]
        self.leave(running.tenant)
        assert running.task is not None
        if running.task is not asyncio.current_task():
            running.task.cancel()
        running.over(usage, running.shown_tokens)

    async def _until_over(self, running: _Running) -> None:
        usage = None
        try:
            async with asyncio.timeout(self._timeout_s):
                usage = await self._usage_at_end(running)
        except TimeoutError:
            log.warning(
                "a response in the background is not over, and counts no longer",
                response_id=running.response_id,
                worker=running.there[0],
                after_s=self._timeout_s,
            )
        except Exception:  # whatever it is: its key and its worker must not count it for ever
            log.exception("a response in the background could not be followed", response_id=running.response_id)
        self._end(running, usage)

    async def _usage_at_end(self, running: _Running) -> EngineUsage | None:
        clock = asyncio.get_running_loop().time
        began_at, idle_at, absent_at = clock(), inf, inf
        while True:
            await asyncio.sleep(min(_MOST_PAUSE_S, _FIRST_LOOK_S + _LATE_SHARE * (clock() - began_at)))
            replica = self._replica_of(running.there[0])
            if replica is None or not replica.engine_url:  # an agent that has just started has yet to find its engine
                absent_at = min(absent_at, clock())
                if clock() - absent_at > _ABSENT_S:
                    return None
                continue
            absent_at = inf
            if replica.incarnation != running.there:
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
    """Whether this is a response that is not under way any more; what is none says nothing."""
    try:
        status = _decode(body).status
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(status) and status not in _UNDER_WAY
