"""Requests that mean what another one means: HEAD is a GET without the body, a slash behind a path means nothing.

FastAPI knows HEAD on no route of its own (405), and a route that takes names with slashes takes the empty name, too.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def trimmed(path: str) -> str:
    """A path without the slashes behind it."""
    return path.rstrip("/") or "/"


class Lenient:
    """ASGI middleware: the app sees a GET for a HEAD, and no path that ends in a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                await send(message)
                # At once: a stream of events has no end. Its app is told next that its client has left.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
