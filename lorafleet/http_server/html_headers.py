"""Headers of every page that a service answers: no other page may show it in a frame of its own."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
