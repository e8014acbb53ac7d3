"""One error envelope for every house: `{"error": {"message", "type", "param", "code"}}`, as OpenAI has it."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.service.json_count import VALUES, has_more
from lorafleet.service.settings import what_is_wrong

log = structlog.get_logger()

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_MOST_SHOWN = 80  # of what a caller sent, in a message
_MOST_FINDINGS = 10  # of a body, in a message
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class HttpError(Exception):
    """An answer that is an error. A house's own error tree has the same attributes and need not derive from this."""

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


def said_wrong(errors: Sequence[Any]) -> str:
    """Pydantic's findings as one line: where, what is allowed there, and what was found."""
    said = [f"{_where(error['loc'])}: {what_is_wrong(error)}{_found(error)}" for error in errors[:_MOST_FINDINGS]]
    more = len(errors) - _MOST_FINDINGS
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)


def _where(loc: Sequence[object]) -> str:
    return _short(".".join(str(part) for part in loc if part != "body")) or "body"


def _found(error: Any) -> str:
    found = error.get("input")
    if error["type"] in ("missing", "json_invalid") or not isinstance(found, str | int | float | bool | None):
        return ""
    return f", found {_short(ascii(found))}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def error_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """`Retry-After` in whole seconds, rounded up so that nobody comes back early; `WWW-Authenticate` on 401. On 504 the
    clients of OpenAI and Anthropic are told not to send again: what took too long would take as long.
    """
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if status == 504:
        headers["x-should-retry"] = "false"
    return headers | ({"www-authenticate": "Bearer"} if status == 401 else {})


def error_response(exc: Any) -> JSONResponse:
    """The answer for an exception that has `status`, `code` and perhaps `param` and `retry_after_s`."""
    retry_after_s = getattr(exc, "retry_after_s", None)
    body = envelope(exc.status, exc.code, str(exc), getattr(exc, "param", None))
    return JSONResponse(body, exc.status, error_headers(exc.status, retry_after_s))


class HostCheckMiddleware:
    """ASGI middleware: `check`, if there is one, looks at each request's `Host` first, and may raise HttpError."""

    def __init__(self, app: ASGIApp, *, check: Callable[[str], None] | None) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._check is not None and scope["type"] == "http":
            try:
                self._check(Request(scope).headers.get("host", ""))
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class JsonBodyMiddleware:
    """ASGI middleware: a body of JSON is read whole, and goes on only if all would read it so.

    Python's own reader takes NaN, Infinity and halves of surrogate pairs: what cannot be said again in any answer, and
    poisons the sums and lists that it gets into.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        may_send: Callable[[str | None], None] = lambda _: None,
        most_values: int,
        larger: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        may_send     raises HttpError for an `Authorization` of which no body is read: 16 MiB of JSON take a process
                     seconds, in which it does nothing else
        most_values  texts, objects, lists and commas that a body may have
        larger       path -> the same, of bodies that are larger than others
        """
        self._app = app
        self._may_send = may_send
        self._most_values = most_values
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers if scope["type"] == "http" else {}
        if "json" not in headers.get("content-type", "").lower():
            await self._app(scope, receive, send)
            return
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            try:
                self._may_send(headers.get("authorization"))
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
        parts, is_more = [], True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # whoever sent it has left, or has been refused
            parts.append(message.get("body", b""))
            is_more = message.get("more_body", False)
        body = b"".join(parts)
        try:
            if body:
                _check_json(body, self._larger.get(scope["path"], self._most_values))
        except HttpError as exc:
            await error_response(exc)(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, again, send)


def _check_json(body: bytes, most_values: int) -> None:
    if has_more(body, most_values, VALUES):
        message = (
            f"the body has more than {most_values} texts, objects, lists and commas; send what it holds in several"
        )
        raise HttpError(413, "body_too_large", message)
    try:
        from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as exc:
        raise HttpError(400, "invalid_request", f"the body is not JSON: {exc}") from exc


def _no_route(request: Request, exc: HTTPException) -> str:
    path = request.url.path
    shown = ascii(_short(path))[1:-1]
    if exc.status_code == 405:
        return f"{shown} takes {Headers(exc.headers).get('allow', 'another method')}, found {request.method}"
    begins_well = path.startswith("/v1/") and not path.startswith("/v1/v1/")
    why = "" if begins_well else ": paths of the API begin with /v1, once"
    return f"there is no {shown} here{why}; GET /docs shows what there is"


def add_routes(to: FastAPI | APIRouter, *parts: APIRouter) -> None:
    """Serve the routes of `parts`, as they are.

    `include_router` makes each route anew, 1.5 ms of processor time each (fastapi 0.136 routing.py; measured), and a
    router within a router twice. Prefixes and the outer router's dependencies, which that is for, no house has.
    """
    to.routes.extend(route for part in parts for route in part.routes)


def install_error_handlers(app: FastAPI, *trees: type[Exception]) -> None:
    """Answer every error of these trees, and the framework's own, in the envelope; never a bare 500."""

    async def ours(_request: Request, exc: Exception) -> JSONResponse:
        return error_response(exc)

    async def framework(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, HTTPException)
        code = _CODES.get(exc.status_code, "http_error")
        message = _no_route(request, exc) if code in ("not_found", "method_not_allowed") else str(exc.detail)
        return JSONResponse(envelope(exc.status_code, code, message), exc.status_code, exc.headers)

    async def invalid(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        if isinstance(first.get("input"), bytes):  # a body that was left as it came
            found = request.headers.get("content-type") or "missing"
            message = f"the header content-type is {found}, expected application/json"
            return JSONResponse(envelope(400, "invalid_request", message, "content-type"), 400)
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = said_wrong(exc.errors())
        return JSONResponse(envelope(400, "invalid_request", message, where or None), 400)

    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        log.error("unexpected error", path=request.url.path, exc_info=exc)
        message = f"{request.url.path}: internal error ({type(exc).__name__}); the log has the traceback"
        return JSONResponse(envelope(500, "internal_error", message), 500)

    both: tuple[type[Exception], ...] = (HttpError, *trees)
    for tree in both:
        app.add_exception_handler(tree, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)
