"""Every orchestrator takes every request and forwards to the leader what it does not answer itself.

Reads are forwarded too while there is a leader, so that a write through one orchestrator is read back through another.
Without a leader, reads of stored intent are answered from the store; all else is refused with `not_leading` and
Retry-After.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.keys.peers import PEER_HEADER, peer_header
from lorafleet.keys.runs import RUN, path_in_run
from lorafleet.service.http import error_response
from lorafleet.service.http.openapi import DOCS_ASSETS
from lorafleet.service.loops import run_watched
from lorafleet.service.network.transport import ROLE, why_no_answer
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable
from orchestrator.core.lease import LeaseRecord
from orchestrator.leadership.leadership import Leadership
from orchestrator.metrics import OrchestratorMetrics

_LOCAL = ("/ui", "/health", "/ready", "/metrics", "/docs", DOCS_ASSETS, "/redoc", "/openapi.json")
LEADERS = frozenset({"/v1/catalog", "/v1/events"})
"""Reads whose revisions belong to one orchestrator: those of two would confuse followers."""
FORWARDED = "x-lorafleet-forwarded-by"
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"})
# Headers about a page's origin: checked against our own address already, and the leader has another.
_OF_PAGES = frozenset({"origin", "sec-fetch-site"})
_CHECK_EVERY_S = 0.2
# Calls that are nearly done may finish; a wait for an adapter is cut off with a clear error.
_CHECKS_WHEN_STOPPING = 10
# A standby reads the lease once in `lease_renew_s`; the rest of this wait is for the beginning of its term.
_SUCCESSOR_RENEWALS = 2


def _leaders_url(base_url: str, scope: Scope) -> httpx.URL:
    """The request's own path and query at the leader, byte for byte: a URL made from text would lose some of them."""
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    path = path_in_run(scope.get(RUN, ""), path.decode("latin-1")).encode("latin-1")
    query = b"?" + scope["query_string"] if scope.get("query_string") else b""
    base = httpx.URL(base_url)
    return base.copy_with(raw_path=base.raw_path.rstrip(b"/") + path.partition(b"?")[0] + query)


def _is_local(path: str) -> bool:
    """Whether a path is about this process itself: a local route, or a file below one."""
    return path in _LOCAL or path.startswith(tuple(f"{route}/" for route in _LOCAL))


class _ServiceStopping(Exception):
    """This process stops while the leader has not answered."""


class OwnCalls:
    """The calls that this process answers as the leader. One that is left when its term ends can write no more."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one call, for the time of the block."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._ended.set()

    async def wait_for_end(self, within_s: float) -> None:
        """Wait until no call is left, at most `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._count:
                    self._ended.clear()
                    await self._ended.wait()


class LeaderForwarding:
    """ASGI middleware that forwards requests to the leader. A leader that stops forwards them to the next one.

    refresh      reads the store again before a read is answered from it
    is_stopping  whether this process stops: then event streams and waiting calls end
    is_upload    whether the body of a request is passed on as it comes, by method and path
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        leadership: Leadership,
        own_calls: OwnCalls,
        client: httpx.AsyncClient,
        metrics: OrchestratorMetrics,
        refresh: Callable[[], None],
        is_stopping: Callable[[], bool],
        is_upload: Callable[[str, str], bool] = lambda _method, _path: False,
        connect_timeout_s: float,
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._leadership = leadership
        self._own_calls = own_calls
        self._client = client
        self._metrics = metrics
        self._refresh = refresh
        self._is_stopping = is_stopping
        self._is_upload = is_upload
        self._timeout = httpx.Timeout(None, connect=connect_timeout_s)
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._refreshed_at: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request in this process if it leads or the route is local; else forward it to the leader.

        Without a leader, a read is answered from the store, which is read again first.
        """
        if scope["type"] == "http" and not _is_local(scope["path"]) and self._leadership.is_late:
            await self._leadership.wait_for_check()
        if scope["type"] != "http" or _is_local(scope["path"]):
            await self._app(scope, receive, send)
            return
        if self._is_stopping():
            # We step down at once: what is not begun yet is the next leader's.
            await self._leadership.wait_for_successor(_SUCCESSOR_RENEWALS * self._retry_after_s)
        elif self._leadership.is_leading:
            with self._own_calls.counted():
                await self._app(scope, receive, send)
            return
        answer = await self._leader_response(Request(scope, receive))
        if answer is None:
            try:
                self._refresh_store()
            except OrchestratorError as exc:
                answer = error_response(exc)
        await (self._app if answer is None else answer)(scope, receive, send)

    async def _leader_response(self, request: Request) -> Response | None:
        """The response of the leader, to which the request is forwarded, or an error; counts the outcome.

        None for a read that may be answered without a leader.
        """
        leader = self._leadership.other_holder
        trouble, cause = self._leadership.trouble, None
        why = "this orchestrator does not lead, and knows of none that does" + (f": {trouble}" if trouble else "")
        if FORWARDED in request.headers:
            why = "this orchestrator does not lead, and the request has been forwarded already"
        elif leader is not None and leader.url:
            try:
                return await self._forward(leader, request)
            except _ServiceStopping:
                self._metrics.forwarded.labels("refused").inc()
                why = "this orchestrator stops, and the one that leads has not answered yet; ask again"
                return error_response(
                    OrchestratorUnavailable(why, code="not_leading", retry_after_s=self._retry_after_s)
                )
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
                self._metrics.forwarded.labels("unreachable").inc()
                # Its address stands in the log alone: it is none of a tenant's business.
                why, cause = "the orchestrator that leads does not answer; ask again", exc
        if request.method == "GET" and request.scope["path"] not in LEADERS and FORWARDED not in request.headers:
            self._metrics.forwarded.labels("answered_here").inc()
            return None
        self._metrics.forwarded.labels("refused").inc()
        refusal = OrchestratorUnavailable(why, code="not_leading", retry_after_s=self._retry_after_s)
        if cause is not None and leader is not None:
            refusal.__cause__ = OrchestratorError(f"{leader.url}: {why_no_answer(cause)}")
        answer = error_response(refusal)
        answer.headers["connection"] = "close"  # so that the next call may go to another orchestrator behind a Service
        return answer

    async def _forward(self, leader: LeaseRecord, request: Request) -> Response:
        """Send the request to the leader and return its response as a stream. Raises httpx.HTTPError, TimeoutError.

        Counts the forward.
        """
        headers = [(k, v) for k, v in request.headers.items() if k not in _HOP_BY_HOP | _OF_PAGES | {PEER_HEADER}]
        is_upload = self._is_upload(request.method, request.scope["path"])
        upstream = self._client.build_request(
            request.method,
            _leaders_url(leader.url, request.scope),
            headers=[*headers, (FORWARDED, self._leadership.holder), (PEER_HEADER, peer_header(request))],
            content=request.stream() if is_upload else await request.body(),
            timeout=self._timeout,
            extensions={ROLE: "orchestrator"},
        )
        answer = await self._while_leading(leader, self._client.send(upstream, stream=True))
        self._metrics.forwarded.labels("ok").inc()
        kept = {k: v for k, v in answer.headers.items() if k not in _HOP_BY_HOP}
        return StreamingResponse(self._body(leader, answer), status_code=answer.status_code, headers=kept)

    async def _while_leading(self, leader: LeaseRecord, sending: Awaitable[httpx.Response]) -> httpx.Response:
        """Wait for the leader's response without a deadline, as some calls take minutes.

        Raises TimeoutError when the leader changes, _ServiceStopping when this process stops.
        """
        checks_left = _CHECKS_WHEN_STOPPING

        def check() -> None:
            """Raise _ServiceStopping soon after a stop began, or TimeoutError if the leader leads no longer."""
            nonlocal checks_left
            checks_left -= self._is_stopping()
            if not checks_left:
                raise _ServiceStopping
            if not self._is_still_leading(leader):
                raise TimeoutError("it leads no longer")

        return await run_watched(sending, check, every_s=_CHECK_EVERY_S)

    def _is_still_leading(self, leader: LeaseRecord) -> bool:
        """Whether this process knows the same leader as before."""
        now = self._leadership.other_holder
        return now is not None and now.holder == leader.holder

    async def _body(self, leader: LeaseRecord, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The body's chunks as they come; closes the connection to the leader at the end.

        An event stream also ends with the leader's term or this process.
        """
        is_events = answer.headers.get("content-type", "").startswith("text/event-stream")
        pieces = answer.aiter_raw()
        try:
            async for piece in self._until_term_ends(leader, pieces) if is_events else pieces:
                yield piece
        finally:
            await answer.aclose()

    async def _until_term_ends(self, leader: LeaseRecord, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks of an event stream, until it, the leader's term or this process ends."""
        coming = asyncio.ensure_future(anext(pieces, None))
        try:
            while not self._is_stopping() and self._is_still_leading(leader):
                if (await asyncio.wait([coming], timeout=_CHECK_EVERY_S))[0]:
                    try:
                        piece = coming.result()
                    except httpx.HTTPError:
                        return  # the leader died; followers reconnect
                    if piece is None:
                        return
                    yield piece
                    coming = asyncio.ensure_future(anext(pieces, None))
        finally:
            coming.cancel()
            await asyncio.wait([coming])

    def _refresh_store(self) -> None:
        """Read the store again, at most once a second. Raises OrchestratorError where it has not been read."""
        now = self._clock()
        if self._refreshed_at is None or now - self._refreshed_at >= 1.0:
            self._refresh()
            self._refreshed_at = now
