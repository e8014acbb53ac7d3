"""Parsing what a client sends: heads, bodies, and the limits on both.

A subclass of uvicorn's own protocol, so that one server has all connections: its keep-alive, its count of them and its
graceful end. httptools parses; a message that two parsers might read differently is refused, for every route.
uvicorn_parts.py lists the parts of uvicorn that are in use.
"""

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.http_server.framing import (
    RefusedMessage,
    body_too_large,
    checked_head,
    checked_target,
    head_without_upgrade,
    parser_of,
)
from lorafleet.http_server.intake import RequestIntake
from lorafleet.keys.roles import Caller
from lorafleet.telemetry.request_log import put_request_id

if TYPE_CHECKING:
    import asyncio
    from typing import Any

    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

NEVER = float("inf")
# Bytes that are read and thrown away behind a head that is too large: no client means one of megabytes.
_MAX_LINGERING_HEAD_BYTES = 2**20
# And behind any other last response, so that a reset does not take it from the client: most clients send all of a body
# that is too large before they read why it was refused.
_MAX_LINGERING_BYTES = 64 * 2**20

# The part of a message that is being read: none yet, its head, its body.
IDLE, HEAD, BODY = range(3)

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}


class ReadingProtocol(HttpToolsProtocol):
    """The reading half of a client's connection. A message for a hot route becomes an HttpExchange.

    Any other message is the ASGI app's: uvicorn reads and answers it, as its `cycle`.

    app_request_id   the id of the message that the app answers
    current, queue   the exchange being answered, and complete ones that wait behind it
    phase            the part of a message that is being read
    body_bytes       of the message being read
    bare_bytes       bytes without body since the message began, or since its last body byte
    drained_bytes    bytes thrown away behind the last request
    read_deadline    loop.time() by which the client must have sent more
    ignores_input    all further bytes are thrown away: the last response is decided
    kept_input       bytes behind a response of the app that is not over
    expects_continue the client waits for `100 Continue` before it sends the body
    upload_bytes     most bytes of the app's message, where its route reads the body in pieces; else 0
    """

    # All of ours, and those of the base that every request touches: in CPython 3.11 a method call on an object with
    # more than 30 names in its dict looks there first.
    __slots__ = (
        "_max_lingering_bytes",
        "_new_bare_bytes",
        "_plain_head",
        "_read_bytes",
        "_reading",
        "_timed_phase",
        "app_request_id",
        "bare_bytes",
        "body",
        "body_bytes",
        "current",
        "cycle",
        "drained_bytes",
        "expects_continue",
        "headers",
        "ignores_input",
        "intake",
        "is_stopping",
        "is_write_paused",
        "kept_input",
        "limits",
        "loop",
        "outbox",
        "parser",
        "phase",
        "queue",
        "read_deadline",
        "tasks",
        "transport",
        "upload_bytes",
        "url",
        "write_deadline",
    )

    def __init__(
        self,
        intake: RequestIntake,
        config: "Config",
        server_state: "ServerState",
        app_state: "dict[str, Any]",
        loop: "asyncio.AbstractEventLoop | None",
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.intake = intake
        self.outbox = intake.outbox
        self.limits = intake.limits
        self.current: HttpExchange | None = None
        self.queue: deque[HttpExchange] = deque()
        self.is_stopping = False
        self.is_write_paused = False
        self.ignores_input = False
        self.drained_bytes = 0
        self.write_deadline = NEVER
        self.read_deadline = NEVER
        self._max_lingering_bytes = _MAX_LINGERING_BYTES
        self.kept_input = b""
        # The message being read.
        self.url = b""
        self.app_request_id = ""
        self._plain_head = b""  # of a message that asked for an Upgrade: read once more, without it
        self.phase = self._timed_phase = IDLE
        self._read_bytes = 0  # of this read
        self._new_bare_bytes = 0  # of this read; 0 once there was body in it
        self.bare_bytes = 0
        self._reading: HttpExchange | None = None  # None: a message for the app
        self.body: bytes | bytearray = b""
        self.body_bytes = 0
        self.upload_bytes = 0
        self.expects_continue = False

    # Implemented by the writing half.

    def start(self, exchange: HttpExchange) -> None:
        """Make this the exchange being answered, and have its handler run."""
        raise NotImplementedError

    def refuse(self, refusal: RefusedMessage) -> None:
        """Refuse the message being read: count the refusal, send an error after all responses before it, and close."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Abort the connection without sending unsent bytes, and end all work for this client."""
        raise NotImplementedError

    def close_when_sent(self) -> None:
        """Ignore further input, and close after the unsent bytes; the client must read them by the write deadline."""
        raise NotImplementedError

    def linger(self, last: bytes) -> None:
        """Send these last bytes and FIN, and drop further input for a short time."""
        raise NotImplementedError

    def restart_write_deadline(self) -> None:
        """Restart the write deadline: the client must read some of the bytes unsent now within `send_stall_s`."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send these bytes, at the latest at the end of the event loop's tick."""
        raise NotImplementedError

    # Called by the transport.

    def data_received(self, data: bytes) -> None:
        """Parse these bytes, which calls the methods below.

        Drops them where input is ignored, and keeps them while the app ends its response. Hangs up on a client that
        sends too many to drop.
        """
        if self.ignores_input:
            self.drained_bytes += len(data)
            if self.drained_bytes > self._max_lingering_bytes:
                self.hang_up()
            return
        if self.cycle is not None and not self.phase and self.is_app_busy():
            self._keep_for_later(data)
            return
        self._read_bytes = self._new_bare_bytes = len(data)
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                # The parser stops behind the head, as if another protocol began there: a new one reads that head
                # without its Upgrade, and then the bytes behind it.
                self.parser = parser_of(self)
                data = self._plain_head + data[exc.args[0] :]
                self._plain_head = b""
            except httptools.HttpParserError as exc:
                self._stop_reading(exc)
                return
            else:
                break
        if self.phase:
            self._count_unfinished()

    def _keep_for_later(self, data: bytes) -> None:
        """Keep bytes that come before the app has ended its response; above `head_bytes` pause reading.

        The client has all of that response already (`content-length`).
        """
        self.kept_input += data
        if len(self.kept_input) > self.limits.head_bytes:
            self.flow.pause_reading()

    # Called by the parser.

    def on_message_begin(self) -> None:
        """A message begins: forget the last one's head, and a write deadline.

        Raises StopReading where no message may wait.
        """
        is_app_busy = self.cycle is not None and self.is_app_busy()
        if self.ignores_input or is_app_busy or (self.queue and len(self.queue) >= self.limits.pipelined):
            raise StopReading
        self.phase = HEAD
        if not self.is_write_paused:
            self.write_deadline = NEVER  # it was idle, and read too slowly; that is over
        self.url = b""
        if self.headers is None or self.headers:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header of the head, or of the trailers."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: check it, and make its exchange or give it to the app.

        A head that asks for an upgrade is kept, to be read again without it. Raises RefusedMessage and StopReading.
        """
        parser = self.parser
        if parser.should_upgrade():
            self._plain_head = head_without_upgrade(parser, self.url, self.headers)
            return
        headers, limits, intake = self.headers, self.limits, self.intake
        fields = dict(headers)
        is_1_1, content_length, expects = checked_head(parser, headers, fields)
        path, query = checked_target(self.url)
        if self.bare_bytes + self._read_bytes > limits.head_bytes:
            self._check_head_size()
        name = parser.get_method()
        method = _METHODS.get(name) or name.decode("ascii")
        if content_length > limits.body_bytes:
            self._check_upload_size(content_length, intake.upload_bytes(method, path))
        handler, cors_headers = intake.find_handler(method, path), intake.cors_headers
        if handler is None or (cors_headers is not None and _is_preflight(method, fields)):
            self._reading = None
            self.upload_bytes = intake.upload_bytes(method, path)
            self._begin_app_request(expects)
        else:
            keep = is_1_1 and parser.should_keep_alive()
            caller = intake.caller_of(fields)
            exchange = HttpExchange(
                method,
                path,
                query,
                fields,
                self,  # type: ignore[arg-type]  # a ClientConnection: this is its reading half
                handler,
                is_1_1,
                keep,
                caller if isinstance(caller, Caller) else None,
                self.client,
            )
            if isinstance(caller, Exception):
                exchange.refusal = caller
            if cors_headers is not None and b"origin" in fields:
                exchange.extra_headers = cors_headers(fields[b"origin"])
            self._reading = exchange
            if expects:
                self.expects_continue = True
                self.send_continue()
        self.phase = BODY
        # Trailers are ignored: they go into a list of their own, and are bounded with the head.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """Count and keep a piece of the body; drop it for a caller without access.

        Raises RefusedMessage for a large body.
        """
        self._new_bare_bytes = self.bare_bytes = 0
        size = len(body)
        self.body_bytes += size
        exchange = self._reading
        caller = None if exchange is None else exchange.caller
        if caller is not None and not self.intake.hold_body(caller, size):
            assert exchange is not None
            raise self.intake.no_room(caller, exchange, self.body_bytes, self.loop.time())
        if self.body_bytes > self.limits.body_bytes:
            self._check_upload_size(self.body_bytes, 0 if exchange is not None else self.upload_bytes)
        if exchange is None:
            super().on_body(body)
        elif caller is None:
            return
        elif not self.body:
            self.body = body
        else:
            if isinstance(self.body, bytes):
                # Two copies however many pieces come; a list of tiny ones would take 30 times their bytes.
                self.body = bytearray(self.body)
            self.body += body

    def on_message_complete(self) -> None:
        """The message is complete: start its exchange, queue it, or end the app's input.

        Ends the read deadline, or starts the idle one. Where the connection is to close, further input is ignored.
        """
        if self._plain_head:
            return  # it is to be read again
        self.phase = self._timed_phase = IDLE
        self._new_bare_bytes = self.bare_bytes = self.body_bytes = 0
        exchange = self._reading
        if exchange is None:
            self.read_deadline = self.loop.time() + self.limits.idle_s if self.cycle.response_complete else NEVER
            super().on_message_complete()
            if not self.parser.should_keep_alive():
                self.cycle.keep_alive = False
            if self.cycle.response_complete and (self.is_stopping or not self.cycle.keep_alive):
                self.close_when_sent()
            return
        self.read_deadline = NEVER
        self.expects_continue = False
        self._reading = None  # its body is not to outlive its answer
        body, self.body = self.body, b""
        exchange.body = body if isinstance(body, bytes) else bytes(body)
        exchange.received_at = self.loop.time()
        if not exchange.keeps_connection or not self.parser.should_keep_alive():  # a trailer may say close
            exchange.keeps_connection = False
            self.ignores_input = True
        if self.current is None and not self.is_write_paused:
            self.start(exchange)
        else:
            self.queue.append(exchange)

    # The app's messages.

    def _begin_app_request(self, expects: bool) -> None:
        """Give uvicorn the head of a message for the app. Raises StopReading while other exchanges are not answered.

        While the server stops or drains, the connection closes after it.
        """
        if self.current is not None or self.queue:
            raise StopReading  # in order, after answers that are not done: it may come on a connection of its own
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers += headers  # the list that is in the scope
        self.app_request_id = put_request_id(self.headers)
        self.expect_100_continue = expects
        super().on_headers_complete()
        if self.is_stopping or self.intake.is_draining:
            self.cycle.keep_alive = False

    def is_app_busy(self) -> bool:
        """Whether the app is answering a message."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        """The app's response is complete: read on, with the bytes kept for later first, under the idle deadline.

        On a closing connection only the write deadline begins anew. An upload whose body has not come whole closes.
        """
        if self.transport.is_closing():
            self.restart_write_deadline()
            return
        self.flow.resume_reading()
        if self.phase == BODY and self.upload_bytes:
            self.linger(b"")  # refused or broken off: the rest of so large a body is not waited for
            return
        if not self.phase:
            self.read_deadline = self.loop.time() + self.limits.idle_s
        if self.kept_input:
            later, self.kept_input = self.kept_input, b""
            self.data_received(later)

    def message_id(self) -> str:
        """The id of the message being read: the client's own where it has come, and is valid. The same at each call."""
        if self.phase == BODY:
            return self.app_request_id if self._reading is None else self._reading.name()
        if not self.headers:
            self.headers = []
        return put_request_id(self.headers)

    # Limits.

    def _stop_reading(self, exc: httptools.HttpParserError) -> None:
        """The parser failed: refuse the message, or ignore further input where the client sent more than may wait.

        An unexpected error is logged and refused with 500.
        """
        cause = exc.__context__
        if isinstance(cause, RefusedMessage):
            self.refuse(cause)
        elif isinstance(cause, StopReading):
            self.drained_bytes += self._read_bytes
            self.ignore_further_input()
            if self.is_app_busy():
                self.cycle.keep_alive = False
        elif isinstance(exc, httptools.HttpParserCallbackError):
            log.error("unexpected error", request_id=self.message_id(), exc_info=cause)
            self.refuse(RefusedMessage(500, "internal_error", "internal error; the log has the traceback"))
        else:
            self.refuse(RefusedMessage(400, "invalid_http", f"not a valid HTTP/1.1 request: {exc}"))

    def ignore_further_input(self) -> None:
        """Throw away all kept and further bytes, and the message being read: the last response is decided."""
        self.ignores_input = True
        self.kept_input = b""
        self.forget_message()

    def forget_message(self) -> None:
        """Drop a message that is not complete: its body is no longer counted, and its deadline ends."""
        exchange = self._reading
        if exchange is not None and exchange.caller is not None and self.phase == BODY:
            self.intake.drop_body(exchange.caller, self.body_bytes)
        self.phase = IDLE
        self.read_deadline = NEVER
        self.body = b""
        self.body_bytes = 0
        self.expects_continue = False

    def _count_unfinished(self) -> None:
        """After a read that ends inside a message: set its deadline; refuse it where too many bytes are not body."""
        if self._timed_phase != self.phase:
            self._timed_phase = self.phase
            limit_s = self.limits.head_s if self.phase == HEAD else self.limits.body_s
            self.read_deadline = self.loop.time() + limit_s
        elif self.phase == BODY and self.upload_bytes:
            self.read_deadline = self.loop.time() + self.limits.body_s  # large bodies: each piece has that time
        if self._new_bare_bytes:
            self.bare_bytes += self._new_bare_bytes
            if self.bare_bytes > self.limits.head_bytes:
                self.refuse(self._head_too_large())

    def _check_head_size(self) -> None:
        """Raise RefusedMessage for a head of over `head_bytes`."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.head_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> RefusedMessage:
        """The 431 for a head that is too large; from now on, fewer bytes behind it are read and dropped."""
        most = self.limits.head_bytes
        self._max_lingering_bytes = _MAX_LINGERING_HEAD_BYTES
        return RefusedMessage(431, "head_too_large", f"the request's head is larger than {most} bytes")

    def _check_upload_size(self, size_bytes: int, upload_bytes: int) -> None:
        """Raise RefusedMessage 413 for a body of over `body_bytes`, unless its route takes so many as an upload."""
        if size_bytes > upload_bytes:
            raise body_too_large(max(upload_bytes, self.limits.body_bytes))

    def send_continue(self) -> None:
        """Send `100 Continue`, unless other responses come first or the body has begun."""
        if self.current is None and not self.queue and not self.body_bytes:
            self.expects_continue = False
            self.write(_CONTINUE)


class StopReading(Exception):
    """Nothing more is read of this client, and the messages before are well."""


def _is_preflight(method: str, fields: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks if a page of another origin may send a request."""
    return method == "OPTIONS" and b"access-control-request-method" in fields
