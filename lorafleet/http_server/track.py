"""Every answer of an ASGI app has `x-request-id`, and every line that is logged meanwhile has the id, too."""

import time

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.telemetry.request_log import ID_HEADER, NOTES, RequestLine, RequestLog, RequestNotes, put_request_id

log = structlog.get_logger()

# Their 503 is an answer, and comes with each probe.
_PROBES = frozenset({"/health", "/ready", "/metrics"})


class TrackRequests:
    """ASGI middleware: name each request, send its id in the answer, and record the request in the log.

    The id is the client's own where it is valid. The app, and a service to which the app forwards, get it as header.
    """

    def __init__(self, app: ASGIApp, *, requests: RequestLog) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            self._requests.flush()
            return
        began_at = time.monotonic()
        headers = list(scope["headers"])
        name = put_request_id(headers)
        notes = RequestNotes()
        scope = {**scope, "headers": headers, NOTES: notes}
        # The task is this request's own, so that nothing needs to be unbound.
        structlog.contextvars.bind_contextvars(request_id=name)
        status, is_whole = 0, False

        async def send_named(message: Message) -> None:
            """Send the message, the head with the request's id."""
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                kept = [header for header in message.get("headers", ()) if header[0].lower() != ID_HEADER]
                message = {**message, "headers": [*kept, (ID_HEADER, name.encode())]}
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            if not is_whole:
                raise  # the server logs it, and breaks the connection off
        finally:
            if status:
                self._record(scope, name, status, notes, time.monotonic() - began_at)

    def _record(self, scope: Scope, name: str, status: int, notes: RequestNotes, duration_s: float) -> None:
        """Record a request that was answered. A failure is an error of ours, and not a probe's."""
        client = scope.get("client")
        line = RequestLine(
            request_id=name,
            method=scope["method"],
            path=scope["path"],
            status=status,
            duration_s=round(duration_s, 6),
            code=notes.code,
            cause=notes.cause,
            client=client[0] if client else "",
            key=notes.key,
            tenant=notes.tenant,
        )
        self._requests.record(line, is_failure=status >= 500 and scope["path"] not in _PROBES)


def track_requests(app: FastAPI, requests: RequestLog) -> None:
    """Have every answer of the app tracked, also those of FastAPI's outermost layer: its 500 for unexpected errors."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: TrackRequests(build(), requests=requests)  # type: ignore[method-assign]
