"""Error answers, event streams and route helpers of every service's REST API.

The error envelope is OpenAI's: `{"error": {"message", "type", "param", "code"}}`.
"""

import math
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.service.http.known_fields import unknown_fields_text
from lorafleet.service.http.openapi import change_document, describe_errors
from lorafleet.service.settings import finding_message, is_unknown_field
from lorafleet.telemetry.request_log import NOTES, RequestNotes, cause_of

log = structlog.get_logger()

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_MAX_SHOWN_CHARS = 80  # of a caller's value in a message
# (path, status, body) -> the body of an error in the form that clients of the path know.
ErrorShape = Callable[[str, int, dict[str, Any]], dict[str, Any]]
_MAX_FINDINGS = 10  # findings about one body in a message
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class HttpError(Exception):
    """An error answer. A service's own errors have the same attributes and need not derive from this class."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def envelope(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error answer."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "service_unavailable_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def validation_message(errors: Sequence[Any]) -> str:
    """Pydantic's first findings as one line (field, rule, value found), and how many more there are."""
    findings = [
        f"{_field_path(error['loc'])}: {finding_message(error)}{_found_text(error)}" for error in errors[:_MAX_FINDINGS]
    ]
    omitted = len(errors) - _MAX_FINDINGS
    return "; ".join([*findings, f"and {omitted} more"] if omitted > 0 else findings)


def _field_path(loc: Sequence[object]) -> str:
    """A finding's field, such as `policy.loading`; `body` if it is the whole body."""
    return _shortened_text(".".join(str(part) for part in loc if part != "body")) or "body"


def _found_text(error: Any) -> str:
    """`, found VALUE` for an error message; empty if the value is missing or a container."""
    found = error.get("input")
    if error["type"] in ("missing", "json_invalid") or not isinstance(found, str | int | float | bool | None):
        return ""
    return f", found {_shortened_text(ascii(found))}"


def _shortened_text(text: str) -> str:
    """The text, cut to 80 characters."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def error_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """Headers of an error answer: `Retry-After` in whole seconds, rounded up, and `WWW-Authenticate` on 401.

    On 426 the protocol that is served (RFC 9110, 15.5.22).
    On 504 also `x-should-retry: false` for OpenAI's and Anthropic's clients: the request would take as long again.
    """
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if status == 504:
        headers["x-should-retry"] = "false"
    if status == 426:
        headers["upgrade"] = "HTTP/1.1"
    return headers | ({"www-authenticate": "Bearer"} if status == 401 else {})


class ErrorResponse(JSONResponse):
    """An error in the envelope. When it is sent, its code and cause are noted for the request's line in the log."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        cause: str = "",
        shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body,
    ) -> None:
        super().__init__(shape(envelope(status, code, message, param)), status, headers)
        self._code = code
        self._cause = cause or message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes = scope.get(NOTES)
        if isinstance(notes, RequestNotes):
            notes.code, notes.cause = self._code, self._cause
        await super().__call__(scope, receive, send)


def error_response(exc: Any, message: str | None = None) -> ErrorResponse:
    """The answer for an exception that has `status`, `code` and perhaps `param` and `retry_after_s`.

    message  in place of the exception's own, which the log has in any case
    """
    headers = error_headers(exc.status, getattr(exc, "retry_after_s", None))
    return ErrorResponse(
        exc.status,
        exc.code,
        str(exc) if message is None else message,
        param=getattr(exc, "param", None),
        headers=headers,
        cause=cause_of(exc),
    )


STREAM_HEADERS: Mapping[str, str] = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of every event stream: proxies keep nothing of it, and nginx passes each event on as it comes."""


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterable[str | bytes], status_code: int = 200) -> None:
        super().__init__(content, status_code, STREAM_HEADERS)


class HostCheckMiddleware:
    """ASGI middleware that checks each request's `Host` header by `check`, which may raise HttpError."""

    def __init__(self, app: ASGIApp, *, check: Callable[[str], None] | None) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request with a refused Host by the check's error; pass all others to the app."""
        if self._check is not None and scope["type"] == "http":
            try:
                self._check(Request(scope).headers.get("host", ""))
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def no_route(path: str) -> tuple[str, str]:
    """The error's code and message for a path without a route."""
    shown = shown_path(path)
    begins_well = path.startswith("/v1/") and not path.startswith("/v1/v1/")
    why = "" if begins_well else ": paths of the API begin with /v1, once"
    return "not_found", f"there is no {shown} here{why}; GET /docs shows what there is"


def shown_path(path: str) -> str:
    """A caller's path for a message: short, and in ASCII."""
    return ascii(_shortened_text(path))[1:-1]


def add_routes(to: FastAPI | APIRouter, *parts: APIRouter) -> None:
    """Add the routes of `parts` to an app or router.

    `include_router` builds each route again, which takes 1.5 ms each (fastapi 0.136 routing.py). It is needed for
    prefixes and outer dependencies only, which no service has.
    """
    to.routes.extend(route for part in parts for route in part.routes)


def install_error_handlers(
    app: FastAPI,
    *trees: type[Exception],
    unknown_path: Callable[[str], tuple[str, str]] = no_route,
    shape: ErrorShape = lambda _path, _status, body: body,
    shown: Callable[[Request, str], str] = lambda _request, text: text,
) -> None:
    """Answer every error of these trees, and the framework's own, in the error envelope; never a bare 500.

    The app's OpenAPI document then has these answers.

    unknown_path  (code, message) for a path without a route
    shape         makes the body for clients of the path
    shown         the message of an error of these trees as the request's caller may see it; the log has the whole
    """

    async def on_error(request: Request, exc: Exception) -> JSONResponse:
        """The answer for an error of one of the trees."""
        return error_response(exc, shown(request, str(exc)))

    async def on_http_exception(request: Request, exc: Exception) -> JSONResponse:
        """The answer for Starlette's errors, such as an unknown path."""
        assert isinstance(exc, HTTPException)
        path, code, message = request.url.path, _CODES.get(exc.status_code, "http_error"), str(exc.detail)
        if code == "not_found":
            code, message = unknown_path(path)
        elif code == "method_not_allowed":
            methods = Headers(exc.headers).get("allow", "another method")
            message = f"{shown_path(path)} takes {methods}, found {request.method}"
        return ErrorResponse(
            exc.status_code, code, message, headers=exc.headers, shape=partial(shape, path, exc.status_code)
        )

    async def on_invalid_request(request: Request, exc: Exception) -> JSONResponse:
        """The answer 400 for a request that does not fit its model."""
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        if isinstance(first.get("input"), bytes):  # the body was not parsed
            found = request.headers.get("content-type") or "missing"
            message = f"the header content-type is {found}, expected application/json"
            return ErrorResponse(400, "invalid_request", message, param="content-type")
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        unknown = unknown_fields_text(request.scope.get("route"), exc.errors())
        others = [error for error in exc.errors() if not is_unknown_field(error)]
        message = "; ".join(filter(None, (unknown, validation_message(others))))
        return ErrorResponse(400, "invalid_request", message, param=field or None)

    async def on_unexpected_error(request: Request, exc: Exception) -> JSONResponse:
        """Log an unexpected error; the answer 500."""
        name = request.headers.get("x-request-id", "")
        log.error("unexpected error", path=request.url.path, request_id=name, exc_info=exc)
        message = f"{request.url.path}: internal error ({type(exc).__name__}); the log has the traceback"
        return ErrorResponse(500, "internal_error", message, cause=repr(exc))

    all_trees: tuple[type[Exception], ...] = (HttpError, *trees)
    for tree in all_trees:
        app.add_exception_handler(tree, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_unexpected_error)
    change_document(app, describe_errors)
