"""Middleware around the routes of every service: checks of Host, site, HEAD and slashes, and headers of pages."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence

import structlog
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.http_server.cross_site import CheckSite, SiteCheck, site_check
from lorafleet.keys.auth import ApiKeys, host_check
from lorafleet.keys.runs import RunPaths
from lorafleet.service.http import HostCheckMiddleware, HttpError, error_response
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


# Web libraries drop some of them from a URL: then `a\nb` would be `ab`.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def trimmed(path: str) -> str:
    """This path without slashes at its end."""
    return path.rstrip("/") or "/"


def ends_in_a_name(routes: Sequence[BaseRoute], path: str) -> bool:
    """Whether the path, without slashes at its end, ends in a name that may have slashes: `x/` is then not `x`.

    A route that takes such names ends in `{...:path}`. Another may take the same path: one that ends in `…/ensure`.
    """
    plain = trimmed(path)
    taken = [route.path for route in routes if isinstance(route, Route) and route.path_regex.match(plain)]
    return bool(taken) and all(route.startswith("/v1/") and route.endswith(":path}") for route in taken)


class Lenient:
    """ASGI middleware: the app gets a GET for each HEAD, and no path that ends in a slash.

    is_kept  whether a path keeps the slashes at its end, because they belong to a name
    """

    def __init__(self, app: ASGIApp, *, is_kept: Callable[[str], bool]) -> None:
        self._app = app
        self._is_kept = is_kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the app without trailing slashes, but for a name's.

        A HEAD goes as GET, and only its head is answered. A path with a control character is answered 400.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _CONTROL.search(scope["path"]) is not None:
            message = f"the path {ascii(scope['path'])[:200]} has a control character; no name and no route has one"
            await error_response(HttpError(400, "invalid_request", message))(scope, receive, send)
            return
        if scope["path"].endswith("/") and not self._is_kept(scope["path"]):
            raw_path = scope.get("raw_path") or b"/"
            scope = {**scope, "path": trimmed(scope["path"]), "raw_path": raw_path.rstrip(b"/") or b"/"}
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def send_head(message: Message) -> None:
            """Send the first message, the response's head, with an empty body; drop all later messages."""
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                await send(message)
                # End the response at once: an event stream has no end. The app learns next that its client has left.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class FollowIssuers:
    """ASGI middleware: the signing keys of the key files' issuers are fetched as long as the app runs."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the loop around the app's lifespan; pass requests on."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        following = asyncio.create_task(self._keys.signing_keys.follow())
        try:
            await self._app(scope, receive, send)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


_HEADERS = {
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class HtmlHeaders:
    """ASGI middleware that adds these headers to answers in HTML, unless the route has set them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer back with the headers."""

        async def send_with_headers(message: Message) -> None:
            """Send a message of the answer."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").lower().startswith("text/html"):
                    for name, value in _HEADERS.items():
                        headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def guard(
    app: FastAPI,
    keys: ApiKeys,
    *,
    allow_open: bool,
    may_ask: SiteCheck | None = None,
    requests: RequestLog,
    has_runs: bool = False,
) -> None:
    """Add the checks as the outermost middleware: they run before all middleware that the app has so far.

    allow_open  accept any Host on a server without keys, because something else guards the server
    may_ask     decides which cross-site requests pass; None: those that change nothing
    requests    logs what the app answers; the app's answers have `x-request-id`
    has_runs    take every path below `/runs/NAME`, too
    """
    app.add_middleware(FollowIssuers, keys=keys)
    app.add_middleware(HtmlHeaders)
    app.add_middleware(Lenient, is_kept=lambda path: ends_in_a_name(app.routes, path))
    if has_runs:
        app.add_middleware(RunPaths)
    app.add_middleware(CheckSite, check=may_ask or site_check())
    app.add_middleware(HostCheckMiddleware, check=host_check(keys, allow_open=allow_open))
    track_requests(app, requests)
