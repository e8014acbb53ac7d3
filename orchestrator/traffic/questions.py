"""Questions to routers, which fetch them: no router need be reachable, and none gets a caller's key.

A router waits at the orchestrator for questions, and posts each answer. So the console reads decisions behind one
forwarded port, and from routers behind NAT.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from orchestrator.model.questions import RouterQuestion, RouterReply

_MOST_WAITING = 100
"""Questions that wait for one router."""
LISTENING_S = 40.0
"""A router that has not asked for questions for so long gets none: twice the longest wait of one call."""

QuestionKind = Literal["decisions", "requests", "route", "replay", "ask"]


class RouterMailbox:
    """Questions that wait for routers, and callers that wait for answers. One writer: the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[RouterQuestion]] = {}
        self._asked_at: dict[str, float] = {}
        self._arrived: dict[str, asyncio.Event] = {}
        self._answers: dict[tuple[str, str], asyncio.Future[RouterReply]] = {}
        self._is_closed = False
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)

    def listening(self) -> list[str]:
        """Routers that fetch questions, the one that asked last first."""
        now = self._clock()
        for router_id in [name for name, at in self._asked_at.items() if now - at > LISTENING_S]:
            del self._asked_at[router_id]
            self._waiting.pop(router_id, None)
            self._arrived.pop(router_id, None)
        return sorted(self._asked_at, key=lambda name: -self._asked_at[name])

    async def fetch(self, router_id: str, wait_s: float) -> tuple[RouterQuestion, ...]:
        """The questions for a router, as soon as there is one; after `wait_s` none."""
        self._asked_at[router_id] = self._clock()
        arrived = self._arrived.setdefault(router_id, asyncio.Event())
        waiting = self._waiting.setdefault(router_id, deque(maxlen=_MOST_WAITING))
        if not waiting and not self._is_closed:
            arrived.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await arrived.wait()
            except TimeoutError:
                return ()
        questions = tuple(waiting)
        waiting.clear()
        self._asked_at[router_id] = self._clock()
        return questions

    def close(self) -> None:
        """End every wait for questions, now and later: this orchestrator stops."""
        self._is_closed = True
        for arrived in self._arrived.values():
            arrived.set()

    async def ask(
        self, router_id: str, kind: QuestionKind, body: Mapping[str, Any], *, tenant: str | None, within_s: float
    ) -> RouterReply | None:
        """A router's reply; None if it does not come in time."""
        question = RouterQuestion(id=f"{self._prefix}-{next(self._numbers)}", kind=kind, body=dict(body), tenant=tenant)
        key = router_id, question.id
        self._answers[key] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(router_id, deque(maxlen=_MOST_WAITING)).append(question)
        if router_id in self._arrived:
            self._arrived[router_id].set()
        try:
            async with asyncio.timeout(within_s):
                return await self._answers[key]
        except TimeoutError:
            return None
        finally:
            del self._answers[key]

    def answer(self, reply: RouterReply) -> None:
        """Give a reply to the caller that waits for it; one that nobody waits for any more is dropped."""
        future = self._answers.get((reply.router_id, reply.id))
        if future is not None and not future.done():
            future.set_result(reply)
