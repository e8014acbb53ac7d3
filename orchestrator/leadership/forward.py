"""Any orchestrator takes any request: what it does not answer itself goes on to the one that leads.

Reads too, as long as there is a leader to ask, so that whoever wrote through one orchestrator reads it back through
another. Without one, reads of what is stored are answered from the store; everything else is refused with
`not_leading` and a time to come back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.service.http import error_response
from lorafleet.service.loops import watched
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable
from orchestrator.core.lease import LeaseRecord
from orchestrator.leadership.leadership import Leadership
from orchestrator.metrics import OrchestratorMetrics

LOCAL = frozenset({"/ui", "/health", "/ready", "/metrics", "/docs", "/redoc", "/openapi.json"})
"""About this very process."""
LEADERS = frozenset({"/v1/catalog", "/v1/events"})
"""Reads whose revisions are one orchestrator's own: two of them would confuse whoever follows."""
FORWARDED = "x-lorafleet-forwarded-by"
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"})
# A browser's words for where a page is from: held against our own address already, and the leader has another.
_OF_PAGES = frozenset({"origin", "sec-fetch-site"})
_LOOK_EVERY_S = 0.2
# What is nearly done may still be done; what waits for an adapter would be cut off later, with less to say.
_LOOKS_WHEN_STOPPING = 10


class _ServiceStopping(Exception):
    """We are told to end, and the leader takes its time."""


class LeaderForwarding:
    """ASGI middleware in front of all routes.

    refresh      reads the store again, before a read is answered from it
    is_stopping  whether this process is told to end: streams of events, which have none, end then, and so do calls that
                 wait
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        leadership: Leadership,
        client: httpx.AsyncClient,
        metrics: OrchestratorMetrics,
        refresh: Callable[[], None],
        is_stopping: Callable[[], bool],
        connect_timeout_s: float,
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._leadership = leadership
        self._client = client
        self._metrics = metrics
        self._refresh = refresh
        self._is_stopping = is_stopping
        self._timeout = httpx.Timeout(None, connect=connect_timeout_s)
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._refreshed_at: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in LOCAL and self._leadership.is_late:
            await self._leadership.looked(self._retry_after_s)
        if scope["type"] != "http" or scope["path"] in LOCAL or self._leadership.is_leading:
            await self._app(scope, receive, send)
            return
        answer = await self._elsewhere(Request(scope, receive))
        if answer is None:
            try:
                self._refresh_the_store()
            except OrchestratorError as exc:
                answer = error_response(exc)
        await (self._app if answer is None else answer)(scope, receive, send)

    async def _elsewhere(self, request: Request) -> Response | None:
        """The leader's answer, or a refusal; None for a read that we may answer, as nobody leads."""
        leader = self._leadership.other_holder
        trouble = self._leadership.trouble
        why = "this orchestrator does not lead, and knows of none that does" + (f": {trouble}" if trouble else "")
        if FORWARDED in request.headers:
            why = "this orchestrator does not lead, and the request has been forwarded already"
        elif leader is not None and leader.url:
            try:
                return await self._asked(leader, request)
            except _ServiceStopping:
                self._metrics.forwarded.labels("refused").inc()
                why = "this orchestrator stops, and the one that leads has not answered yet; ask again"
                return error_response(
                    OrchestratorUnavailable(why, code="not_leading", retry_after_s=self._retry_after_s)
                )
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
                self._metrics.forwarded.labels("unreachable").inc()
                why = f"the orchestrator that leads, {leader.url}, does not answer ({exc!r})"
        if request.method == "GET" and request.url.path not in LEADERS and FORWARDED not in request.headers:
            self._metrics.forwarded.labels("answered_here").inc()
            return None
        self._metrics.forwarded.labels("refused").inc()
        return error_response(OrchestratorUnavailable(why, code="not_leading", retry_after_s=self._retry_after_s))

    async def _asked(self, leader: LeaseRecord, request: Request) -> Response:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(k, v) for k, v in request.headers.items() if k not in _HOP_BY_HOP | _OF_PAGES]
        upstream = self._client.build_request(
            request.method,
            leader.url.rstrip("/") + target,
            headers=[*headers, (FORWARDED, self._leadership.holder)],
            content=await request.body(),
            timeout=self._timeout,
        )
        answer = await self._while_it_leads(leader, self._client.send(upstream, stream=True))
        self._metrics.forwarded.labels("ok").inc()
        kept = {k: v for k, v in answer.headers.items() if k not in _HOP_BY_HOP}
        return StreamingResponse(self._body(leader, answer), status_code=answer.status_code, headers=kept)

    async def _while_it_leads(self, leader: LeaseRecord, sending: Awaitable[httpx.Response]) -> httpx.Response:
        """Its answer. Some calls wait for minutes, so what ends the wait is that it leads no longer: TimeoutError. Or
        that we end: _Stopping.
        """
        looks_left = _LOOKS_WHEN_STOPPING

        def look() -> None:
            nonlocal looks_left
            looks_left -= self._is_stopping()
            if not looks_left:
                raise _ServiceStopping
            if not self._leads(leader):
                raise TimeoutError("it leads no longer")

        return await watched(sending, look, every_s=_LOOK_EVERY_S)

    def _leads(self, leader: LeaseRecord) -> bool:
        now = self._leadership.other_holder
        return now is not None and now.holder == leader.holder

    async def _body(self, leader: LeaseRecord, answer: httpx.Response) -> AsyncIterator[bytes]:
        """As it comes; the connection to the leader ends with it, however that ends."""
        is_events = answer.headers.get("content-type", "").startswith("text/event-stream")
        pieces = answer.aiter_raw()
        try:
            async for piece in self._until_its_end(leader, pieces) if is_events else pieces:
                yield piece
        finally:
            await answer.aclose()

    async def _until_its_end(self, leader: LeaseRecord, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Or ours, or that of its term: one that hangs says nothing of it."""
        coming = asyncio.ensure_future(anext(pieces, None))
        try:
            while not self._is_stopping() and self._leads(leader):
                if (await asyncio.wait([coming], timeout=_LOOK_EVERY_S))[0]:
                    try:
                        piece = coming.result()
                    except httpx.HTTPError:
                        return  # it died: who follows comes again
                    if piece is None:
                        return
                    yield piece
                    coming = asyncio.ensure_future(anext(pieces, None))
        finally:
            coming.cancel()
            await asyncio.wait([coming])

    def _refresh_the_store(self) -> None:
        now = self._clock()
        if self._refreshed_at is None or now - self._refreshed_at >= 1.0:
            self._refreshed_at = now
            self._refresh()
