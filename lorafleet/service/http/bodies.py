"""JSON bodies of requests: read whole, and checked before the app gets them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fastapi import Request
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.service.http.answers import HttpError, error_response
from lorafleet.service.http.json_count import VALUES, has_more
from lorafleet.service.http.known_fields import WIRE_HEADER, unknown_fields

JSON_BODY = "lorafleet.json_body"  # in a scope: the JSON body that was read and checked


class JsonBodyMiddleware:
    """ASGI middleware that reads JSON bodies whole and refuses invalid ones.

    Python's own parser accepts NaN, Infinity and half surrogate pairs, which cannot be sent in an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        may_send: Callable[[Scope], bool],
        most_values: int,
        larger: Mapping[str, int] = MappingProxyType({}),
        route_of: Callable[[Scope], object] = lambda _scope: None,
    ) -> None:
        """
        route_of     the route that takes a request, whose model knows its body's fields; None: any field is taken
        may_send     raises HttpError for a caller whose body must not be read: parsing 16 MiB of JSON blocks a process
                     for seconds. False: no route takes the request, and the app says so without its body
        most_values  limit for strings, objects, lists and commas in a body
        larger       path -> another such limit
        """
        self._app = app
        self._may_send = may_send
        self._most_values = most_values
        self._larger = larger
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a JSON body whole and check it before the app gets it; a refused caller or body gets the error.

        Other requests pass as they are. If the client leaves meanwhile, the app is not called.
        """
        headers = Request(scope).headers if scope["type"] == "http" else {}
        if "json" not in headers.get("content-type", "").lower():
            await self._app(scope, receive, send)
            return
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            try:
                is_taken = self._may_send(scope)
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
            if not is_taken:
                await self._app(scope, receive, send)
                return
        parts, is_more = [], True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # the client has left, or has been refused
            parts.append(message.get("body", b""))
            is_more = message.get("more_body", False)
        body = b"".join(parts)
        try:
            if body:
                _check_json(body, self._larger.get(scope["path"], self._most_values))
                if WIRE_HEADER not in headers:
                    _check_fields(self._route_of(scope), body)
        except HttpError as exc:
            await error_response(exc)(scope, receive, send)
            return
        scope[JSON_BODY] = body
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            """The body that was read, then the client's next message."""
            return waiting.pop() if waiting else await receive()

        await self._app(scope, receive_body, send)


def _check_json(body: bytes, most_values: int) -> None:
    """Raises HttpError for a body that is not JSON or has too many values."""
    if has_more(body, most_values, VALUES):
        message = (
            f"the body has more than {most_values} strings, objects, lists and commas; split it into several requests"
        )
        raise HttpError(413, "body_too_large", message)
    try:
        from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as exc:
        raise HttpError(400, "invalid_request", f"the body is not JSON: {exc}") from exc


def _check_fields(route: object, body: bytes) -> None:
    """Raises HttpError for a body with a field that the route does not know."""
    found = unknown_fields(route, body)
    if found is not None:
        param, message = found
        raise HttpError(400, "invalid_request", message, param=param)
