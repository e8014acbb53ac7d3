"""HEAD is answered as GET without the body, and slashes at a path's end are dropped, unless a name ends there.

FastAPI answers HEAD with 405 on every route, and a route that takes names with slashes takes the empty name, too. A
path with a control character is refused.
"""

import re
from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.service.http import HttpError, error_response

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
