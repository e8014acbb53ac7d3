"""What an answer to an orchestrator says of the worker's reports."""

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.epochs import EPOCH_HEADER
from workers.inventory.inventory import is_answered
from workers.wire import REPORT_HEADER

_NOT_LET_IN = frozenset({401, 403})


class ReportHeaderMiddleware:
    """ASGI middleware for calls with a leader's epoch: their answers, errors too, name the report that they are as of.

    What such a call changes is told by its answer, and waits for no heartbeat. Callers without a key that may make the
    call get no header.
    """

    def __init__(self, app: ASGIApp, *, as_of: Callable[[], str]) -> None:
        """`as_of`: the header's value now. It is read as an answer begins, when the call has had its effect."""
        self._app = app
        self._as_of = as_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on; add the header to the head of its answer."""
        if scope["type"] != "http" or EPOCH_HEADER not in Headers(scope=scope):
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            """Send a part of the answer, the head with the header."""
            if message["type"] == "http.response.start" and message["status"] not in _NOT_LET_IN:
                MutableHeaders(scope=message)[REPORT_HEADER] = self._as_of()
            await send(message)

        token = is_answered.set(True)
        try:
            await self._app(scope, receive, send_with_header)
        finally:
            is_answered.reset(token)
