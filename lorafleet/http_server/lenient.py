"""HEAD is answered as GET without the body, and slashes at a path's end are dropped.

FastAPI answers HEAD with 405 on every route, and a route that takes names with slashes takes the empty name, too.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def trimmed(path: str) -> str:
    """This path without slashes at its end."""
    return path.rstrip("/") or "/"


class Lenient:
    """ASGI middleware: the app gets a GET for each HEAD, and no path that ends in a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the app without trailing slashes. A HEAD goes as GET, and only its head is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith("/"):
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
