"""One request on a client's connection, and its response."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from lorafleet.http_server.batches import Stepper
from lorafleet.http_server.outbox import Outbox
from lorafleet.keys.roles import Caller
from lorafleet.service.http import envelope
from lorafleet.telemetry.request_log import ID_HEADER, request_id

log = structlog.get_logger()

CLOSE = b"connection: close\r\n"
JSON = b"content-type: application/json\r\n"

# Answers a request: a coroutine that is stepped in batches until it calls `leave_batch`. It is closed, or its task is
# cancelled, when the client leaves or the server stops.
Handler = Callable[["HttpExchange"], Coroutine[Any, Any, None]]
# (status, code, message, path) -> an error's body as JSON.
ErrorBody = Callable[[int, str, str, str], bytes]


def plain_error(status: int, code: str, message: str, _path: str) -> bytes:
    """An error's body in the envelope, whatever the path."""
    return msgspec.json.encode(envelope(status, code, message))


class ExchangeConnection(Protocol):
    """What an exchange needs of its client's connection.

    is_write_paused  the client reads too slowly
    """

    transport: asyncio.Transport
    outbox: Outbox
    is_write_paused: bool

    def write(self, data: bytes) -> None:
        """Send these bytes, at the latest at the end of the event loop's tick."""

    def can_stay_open(self) -> bool:
        """Whether the connection stays open behind this response."""

    def ignore_further_input(self) -> None:
        """Throw away all further bytes: the last response is decided."""

    def on_answered(self, exchange: "HttpExchange") -> None:
        """The response is written: release its exchange, and go on."""

    def release(self, exchange: "HttpExchange") -> None:
        """End an exchange: it writes no more, and its body is no longer counted."""

    def record_error(self, exchange: "HttpExchange", status: int, code: str, message: str) -> bytes:
        """Log an error in place of a response; returns the error's body."""

    def hang_up(self) -> None:
        """Abort the connection without sending unsent bytes."""


class HttpExchange(msgspec.Struct, eq=False):
    """One request, complete, and its response.

    headers        names in lower case; of a name that came twice, the first value
    caller         its body is held on the caller's account; None: no access now, and the body was thrown away
    refusal        why; what the handler is to answer
    client         address and port
    request_id     the request's name, once `name` was called, or as the handler found it
    status         of the response, once its head is on its way
    extra_headers  header lines that every response to this request has
    on_pause, on_resume  called when the client reads too slowly, and when it reads again; set them before `send`
    stepper        drives the handler's coroutine

    After the client has gone all methods do nothing.
    """

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    connection: "ExchangeConnection | None"
    handler: Handler
    chunked: bool
    keeps_connection: bool
    caller: Caller | None
    client: tuple[str, int] | None = None
    refusal: Exception | None = None
    request_id: str = ""
    body: bytes = b""
    received_at: float = 0.0
    status: int | None = None
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None
    extra_headers: bytes = b""
    stepper: Stepper | None = None
    _head: bytes = b""

    def name(self) -> str:
        """The request's id: the client's own where it is valid, else a new one. Sets `request_id` at the first call."""
        if not self.request_id:
            given = self.headers.get(ID_HEADER)
            self.request_id = request_id(None if given is None else given.decode("latin-1"))
        return self.request_id

    @property
    def is_over(self) -> bool:
        """Whether nothing written here arrives any more: it is answered, or the client has gone."""
        return self.connection is None

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly already, so that `on_pause` will not be called."""
        return self.connection is not None and self.connection.is_write_paused

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send the whole response, and end the exchange. Does nothing if the client has left.

        A connection that cannot stay open gets `connection: close`.

        `headers`: lines of `name: value\\r\\n`, without those that frame it.
        """
        connection = self.connection
        if connection is None:
            return
        line = STATUS_LINE[status]
        self.status = status
        if self.extra_headers:
            headers += self.extra_headers
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        if self.method == "HEAD":
            body = b""
        if self.keeps_connection and connection.can_stay_open():
            connection.write(b"%b%b%b\r\n%b" % (line, headers, length, body))
        else:
            self.keeps_connection = False
            connection.write(b"%b%b%b%b\r\n%b" % (line, headers, length, CLOSE, body))
        connection.on_answered(self)

    def begin(self, status: int, headers: bytes) -> None:
        """Prepare the head of a response in pieces: it goes out with the first one. Not if the client has left.

        Ignores further input if it must close.
        """
        connection = self.connection
        if connection is None:
            return
        self.status = status
        if self.keeps_connection and not connection.can_stay_open():
            self.keeps_connection = False
            connection.ignore_further_input()
        self._head = b"%b%b%b%b\r\n" % (
            STATUS_LINE[status],
            headers + self.extra_headers,
            b"transfer-encoding: chunked\r\n" if self.chunked else b"",
            b"" if self.keeps_connection else CLOSE,
        )

    def send(self, data: bytes) -> None:
        """Send one piece of the response, the first one behind its head; not if it is empty or the client has left."""
        connection = self.connection
        if connection is None or not data:
            return
        if self.chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        connection.write(data)

    def relay(self, data: bytes) -> None:
        """`send`, for data just read from another socket.

        Written to the transport directly: uvloop sends what is written while it reads sockets when all are read, so the
        outbox would save nothing, and cost a call and a turn of the loop for each event of a stream.
        """
        connection = self.connection
        if connection is None:
            return
        transport = connection.transport
        if not self.chunked or self._head or connection.outbox.is_due or transport.is_closing():
            self.send(data)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self, last: bytes = b"") -> None:
        """End a response in pieces, and the exchange, in one write with its last piece; not if the client has left."""
        connection = self.connection
        if connection is None:
            return
        if self.chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        connection.write(self._head + last)
        connection.on_answered(self)

    def send_error(self, status: int, code: str, message: str) -> None:
        """Respond with an error, a 503 with Retry-After; break the connection off where a response has begun.

        Does nothing if the client has left.
        """
        connection = self.connection
        if connection is None:
            return
        if self.status is not None:
            self.abort()
            return
        body = connection.record_error(self, status, code, message)
        headers = b"%b%b: %b\r\n" % (JSON, ID_HEADER, self.name().encode())
        if status == 503:
            headers += b"retry-after: 1\r\n"
        self.respond(status, headers, body)

    def send_unexpected(self, exc: Exception) -> None:
        """Log an exception that no handler expected, and respond with 500."""
        log.error("unexpected error", path=self.path, request_id=self.name(), exc_info=exc)
        message = f"{self.path}: internal error ({type(exc).__name__}); the log has the traceback"
        self.send_error(500, "internal_error", message)

    def abort(self) -> None:
        """Break the connection off, so that the client cannot take a part for the whole response."""
        connection = self.connection
        if connection is not None:
            connection.release(self)
            connection.hang_up()
