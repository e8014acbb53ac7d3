"""The client's side: HTTP/1.1 where hot routes are answered without an ASGI scope, and an ASGI app has every other.

A subclass of uvicorn's own protocol, so that one server has all connections: its keep-alive, its count of them and its
graceful end. httptools parses; what it lets through that two parsers might read differently is refused here, for every
route. Source of what the base does: uvicorn 0.54 protocols/http/httptools_impl.py.

Reading from a client is never paused on a hot route: its FIN would not be seen, and engines would work for nobody. So
what a client may send ahead is bounded, and one that sends more is answered so far and then closed.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lorafleet.http_server.batches import Batches, Stepper
from lorafleet.http_server.framing import RefusedMessage, checked_head, checked_target, head_without_upgrade, parser_of
from lorafleet.http_server.outbox import Outbox
from lorafleet.service.auth import OPEN, Caller
from lorafleet.service.http import envelope, error_headers

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

_NEVER = float("inf")
# What is still read (and thrown away) of a client after its last answer, so that a reset does not take that answer from
# it, and for how long: most clients send all of a body that is too large before they read why it was refused.
_LINGER_BYTES = 64 * 2**20
_LINGER_HEAD_BYTES = 2**20  # behind a head that is too large: no client means one of megabytes
_LINGER_S = 2.0
_CLOSE = b"connection: close\r\n"
_JSON = b"content-type: application/json\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_NOT_BEGUN = "this server stopped before this request was begun; send it again"
_HOLDS = "this server holds as many bytes"

# What is being read of a client: nothing yet of the next message, its head, its body.
_IDLE, _HEAD, _BODY = range(3)

_METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}

# Answers a request: a coroutine that is stepped in batches until it calls `leave_batch`. It is closed, or its task is
# cancelled, when the client leaves or the server stops.
Handler = Callable[["HttpExchange"], Coroutine[Any, Any, None]]
Route = Callable[[str, str], Handler | None]
Sender = Callable[[Mapping[bytes, bytes]], Caller | None]
Told = Callable[[bytes], bytes]
# (status, code, message, path) -> the body of an error, as JSON.
ErrorBody = Callable[[int, str, str, str], bytes]


def plain_error(status: int, code: str, message: str, _path: str) -> bytes:
    """An error's body in the envelope, whatever the path."""
    return msgspec.json.encode(envelope(status, code, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """What one client may take.

    head_bytes     request line and headers, and trailers
    body_bytes     one request's body; more: 413
    held_bytes     all bodies of all connections that are not answered yet; more: 429 `saturated`
    tenant_bytes   of those, the bodies of one tenant; None: no bound
    head_s         to send a whole head, from its first byte (or from connecting); more: 408
    body_s         to send a whole body; more: 408
    send_stall_s   how long a client may read nothing of what waits for it
    idle_s         between two requests
    pipelined      requests that may wait behind the one being answered
    """

    head_bytes: int = 64 * 2**10
    body_bytes: int = 32 * 2**20
    held_bytes: int = 2**30
    tenant_bytes: int | None = None
    head_s: float = 15.0
    body_s: float = 60.0
    send_stall_s: float = 60.0
    idle_s: float = 75.0
    pipelined: int = 16


def front(
    route: Route,
    limits: FrontLimits,
    sender: Sender = lambda _: OPEN,
    told: Told | None = None,
    outbox: Outbox | None = None,
    error_body: ErrorBody = plain_error,
) -> "Front":
    """What makes the protocols, for `uvicorn.Config(http=...)`.

    route   (method, path) -> who answers it, or None: the ASGI app does. The path is as sent, without its query.
    sender  headers -> who sends this; None: who may not, and whose body is thrown away as it comes
    told    a page's origin -> header lines for the answer to it; None: to answer none. What a browser asks before
            (OPTIONS) is for the ASGI app
    outbox  whatever else is written by what answers requests goes through it, too
    error_body  what a client of that path is told of a refusal
    """
    return Front(route, limits, sender, told, outbox or Outbox(), error_body)


def front_of_app(limits: FrontLimits) -> "Front":
    """The same where no route is hot: the ASGI app answers all that keeps to the limits."""
    return front(lambda _method, _path: None, limits)


class Front:
    """All clients' connections, and what they hold together.

    refused      how many requests got which code before any handler saw them
    is_draining  every answer says that its connection ends with it: clients and proxies that keep some open have moved
                 to another router when this one hangs up, instead of sending into that moment
    has_stopped  nothing is begun any more
    outbox       what is to be sent at the end of the loop's turn
    batches      the requests that are being worked on
    """

    def __init__(
        self,
        route: Route,
        limits: FrontLimits,
        sender: Sender,
        told: Told | None,
        outbox: Outbox,
        error_body: ErrorBody,
    ) -> None:
        self.route = route
        self.limits = limits
        self.sender = sender
        self.told = told
        self.error_body = error_body
        self.connections: set[_Connection] = set()
        self.held_bytes = 0
        self._held_of: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.is_draining = False
        self.has_stopped = False
        self.outbox = outbox
        self.batches = Batches(outbox)
        shortest = min(limits.head_s, limits.body_s, limits.send_stall_s, limits.idle_s)
        self._sweep_every_s = min(1.0, max(0.02, shortest / 4))
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_at = 0.0
        self._was_late = False

    def __call__(
        self,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """A new connection's protocol; the names are uvicorn's."""
        return _Connection(self, config, server_state, app_state, _loop)

    def hold(self, caller: Caller, size_bytes: int) -> None:
        """So much more of a body is held, until it is let go; raises Refused when that is too much."""
        limits = self.limits
        self.held_bytes += size_bytes
        if limits.tenant_bytes is not None:
            self._held_of[caller.tenant or ""] += size_bytes
        if self.held_bytes > limits.held_bytes:
            raise RefusedMessage(429, "saturated", f"{_HOLDS} of requests as it may", retry_after_s=1.0)
        if limits.tenant_bytes is not None and self._held_of[caller.tenant or ""] > limits.tenant_bytes:
            raise RefusedMessage(429, "saturated", f"{_HOLDS} of your requests as it may", retry_after_s=1.0)

    def let_go(self, caller: Caller, size_bytes: int) -> None:
        """So much of a body is held no longer."""
        self.held_bytes -= size_bytes
        if self.limits.tenant_bytes is not None:
            tenant = caller.tenant or ""
            self._held_of[tenant] -= size_bytes
            if not self._held_of[tenant]:
                del self._held_of[tenant]

    def add(self, connection: "_Connection") -> None:
        self.connections.add(connection)
        if self._timer is None:
            self._sweep_later(connection.loop)

    def stop(self) -> None:
        """End the work on every request: the time to finish is over."""
        self.has_stopped = True
        for connection in list(self.connections):
            connection.stop()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer looks at all deadlines: none is made per request or chunk."""
        now = loop.time()
        # So late, this process stood still (a container that was frozen, say). A loop runs its timers before it reads,
        # and what clients have sent meanwhile is not late. Never twice in a row: some loops are always late.
        self._was_late = now - self._sweep_at > self._sweep_every_s and not self._was_late
        if not self._was_late:
            for connection in list(self.connections):
                connection.check(now)
        self._timer = None
        if self.connections:
            self._sweep_later(loop)

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep_at = loop.time() + self._sweep_every_s
        self._timer = loop.call_at(self._sweep_at, self._sweep, loop)


class HttpExchange(msgspec.Struct, eq=False):
    """One request, complete, and its answer.

    headers  by their names in lower case; of one that came more than once, the first
    caller   who sent it, in whose room the body is; None: who may not, and the body was thrown away
    status   the answer's, once its head is on its way

    `on_pause` and `on_resume` are called when the client reads too slowly, and again; set them before the first `send`.
    After the client has gone everything here does nothing.
    """

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    _connection: "_Connection | None"
    _handler: Handler
    _chunked: bool
    _keep: bool
    caller: Caller | None
    body: bytes = b""
    received_at: float = 0.0
    status: int | None = None
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None
    _told: bytes = b""
    _head: bytes = b""
    _stepper: Stepper | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing written here arrives any more: it is answered, or the client has gone."""
        return self._connection is None

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly already: `on_pause` will not say so again."""
        return self._connection is not None and self._connection.is_write_paused

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """The whole answer. `headers` is a block of `name: value\\r\\n` lines, without what frames the message."""
        connection = self._connection
        if connection is None:
            return
        line = STATUS_LINE[status]
        self.status = status
        if self._told:
            headers += self._told
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        if self.method == "HEAD":
            body = b""
        if self._keep and connection.stays_open():
            connection.write(b"%b%b%b\r\n%b" % (line, headers, length, body))
        else:
            self._keep = False
            connection.write(b"%b%b%b%b\r\n%b" % (line, headers, length, _CLOSE, body))
        connection.answered(self)

    def begin(self, status: int, headers: bytes) -> None:
        """The head of an answer that comes in pieces; it goes out with the first of them."""
        connection = self._connection
        if connection is None:
            return
        self.status = status
        if self._keep and not connection.stays_open():
            self._keep = False
            connection.hear_no_more()
        self._head = b"%b%b%b%b\r\n" % (
            STATUS_LINE[status],
            headers + self._told,
            b"transfer-encoding: chunked\r\n" if self._chunked else b"",
            b"" if self._keep else _CLOSE,
        )

    def send(self, data: bytes) -> None:
        """One piece."""
        connection = self._connection
        if connection is None or not data:
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        connection.write(data)

    def finish(self, last: bytes = b"") -> None:
        """The end of an answer that came in pieces, in one write with its last piece."""
        connection = self._connection
        if connection is None:
            return
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        connection.write(self._head + last)
        connection.answered(self)

    def abort(self) -> None:
        """Close the client's connection in the middle, so that it cannot take what it has for a whole answer."""
        connection = self._connection
        if connection is not None:
            connection.let_go(self)
            connection.hang_up()


class _Connection(HttpToolsProtocol):
    """One client. A hot message is `_current`, or waits in `_queue`; any other is uvicorn's `cycle`."""

    # All of ours, and of the base's, which has its own dict, what every request touches: where that has more than 30
    # names, CPython 3.11 looks for a method in it first.
    __slots__ = (
        "_bare_bytes",
        "_body",
        "_body_bytes",
        "_current",
        "_deaf",
        "_drained_bytes",
        "_expects",
        "_front",
        "_incoming",
        "_last_words",
        "_later",
        "_limits",
        "_linger_bytes",
        "_phase",
        "_plain_head",
        "_queue",
        "_read_by",
        "_read_bytes",
        "_stopping",
        "_timed",
        "_unread_bytes",
        "_unsent_bytes",
        "_write_by",
        "cycle",
        "headers",
        "is_write_paused",
        "loop",
        "parser",
        "tasks",
        "transport",
        "url",
    )

    def __init__(
        self,
        shared: Front,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._front = shared
        self._limits = shared.limits
        self.is_write_paused = False
        self._current: HttpExchange | None = None
        self._queue: deque[HttpExchange] = deque()
        self._stopping = False
        self._deaf = False  # what comes now is thrown away: the last answer is decided
        self._drained_bytes = 0
        self._linger_bytes = _LINGER_BYTES
        self._last_words = b""  # an error that waits behind answers still to come
        self._later = b""  # what came behind an answer of the app's that is not over
        # The message being read
        self.url = b""
        self._plain_head = b""  # of a message that asked for an Upgrade, to be read in its place
        self._phase = _IDLE
        self._timed = _IDLE
        self._read_by = _NEVER
        self._read_bytes = 0  # of this read
        self._unread_bytes = 0  # of this read, 0 once there was body in it
        self._bare_bytes = 0  # of the reads since the message's begin, or its last body byte
        self._incoming: HttpExchange | None = None  # None: a message for the app
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._expects = False
        # What is being written
        self._write_by = _NEVER
        self._unsent_bytes = 0

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._read_by = self.loop.time() + self._limits.head_s
        self._front.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections.discard(self)
        self._leave()
        self._forget_message()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # As uvicorn does it: a client that says no more has left. Without the abort, an answer that nobody reads would
        # keep the connection, and what works for it, for as long as it takes to send.
        if self._current is not None or self._is_cold_busy():
            self.hang_up()
        else:
            self._watch_sending()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._drained_bytes += len(data)
            if self._drained_bytes > self._linger_bytes:
                self.hang_up()
            return
        if not self._phase and self._is_cold_busy():
            self._keep_for_later(data)
            return
        self._read_bytes = self._unread_bytes = len(data)
        if not self._is_read(data):
            return
        if self._phase:
            self._count_unfinished()

    def _keep_for_later(self, data: bytes) -> None:
        """A client may have all of an answer before its app says that it is all (`content-length`), and go on."""
        self._later += data
        if len(self._later) > self._limits.head_bytes:
            self.flow.pause_reading()

    def _is_read(self, data: bytes) -> bool:
        """Parse it; False when nothing more is read of this client."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                # The parser stops behind the head, as if another protocol began there: a new one reads that head
                # without its Upgrade, and then the body or whatever follows it.
                self.parser = parser_of(self)
                data = self._plain_head + data[exc.args[0] :]
                self._plain_head = b""
            except httptools.HttpParserError as exc:
                self._stop_reading(exc)
                return False
            else:
                return True

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._watch_sending()
        super().pause_writing()
        if self._current is not None and self._current.on_pause is not None:
            self._current.on_pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if not self.transport.is_closing():
            self._write_by = _NEVER
        super().resume_writing()
        if self._current is not None:
            if self._current.on_resume is not None:
                self._current.on_resume()
        elif self._queue:
            self._start(self._queue.popleft())

    # The parser's calls

    def on_message_begin(self) -> None:
        if self._deaf or self._is_cold_busy() or (self._queue and len(self._queue) >= self._limits.pipelined):
            raise _EnoughError
        self._phase = _HEAD
        if not self.is_write_paused:
            self._write_by = _NEVER  # it was idle, and read too slowly; that is over
        self.url = b""
        if self.headers is None or self.headers:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade():
            self._plain_head = head_without_upgrade(parser, self.url, self.headers)
            return
        headers, limits, shared = self.headers, self._limits, self._front
        fields = dict(headers)
        is_1_1, content_length, expects = checked_head(parser, headers, fields)
        path, query = checked_target(self.url)
        if self._bare_bytes + self._read_bytes > limits.head_bytes:
            self._check_head_size()
        if content_length > limits.body_bytes:
            raise self._body_too_large()
        name = parser.get_method()
        method = _METHODS.get(name) or name.decode("ascii")
        handler, told = shared.route(method, path), shared.told
        if handler is None or (told is not None and _asks_before(method, fields)):
            self._incoming = None
            self._begin_cold(expects)
        else:
            keep = is_1_1 and parser.should_keep_alive()
            exchange = HttpExchange(method, path, query, fields, self, handler, is_1_1, keep, shared.sender(fields))
            if told is not None and b"origin" in fields:
                exchange._told = told(fields[b"origin"])
            self._incoming = exchange
            if expects:
                self._expects = True
                self._say_continue()
        self._phase = _BODY
        # Trailers, which mean nothing to anybody, go into a list of their own; they are bounded with the head.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = self._bare_bytes = 0
        size = len(body)
        self._body_bytes += size
        exchange = self._incoming
        caller = None if exchange is None else exchange.caller
        if caller is not None:
            self._front.hold(caller, size)
        if self._body_bytes > self._limits.body_bytes:
            raise self._body_too_large()
        if exchange is None:
            super().on_body(body)
        elif caller is None:
            return
        elif not self._body:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                # Two copies however many pieces come; a list of tiny ones would take 30 times their bytes.
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        if self._plain_head:
            return  # it is to be read again
        self._phase = self._timed = _IDLE
        self._unread_bytes = self._bare_bytes = self._body_bytes = 0
        exchange = self._incoming
        if exchange is None:
            self._read_by = self.loop.time() + self._limits.idle_s if self.cycle.response_complete else _NEVER
            super().on_message_complete()
            if not self.parser.should_keep_alive():
                self.cycle.keep_alive = False
            if self.cycle.response_complete and (self._stopping or not self.cycle.keep_alive):
                self._close()
            return
        self._read_by = _NEVER
        self._expects = False
        self._incoming = None  # its body is not to outlive its answer
        body, self._body = self._body, b""
        exchange.body = body if isinstance(body, bytes) else bytes(body)
        exchange.received_at = self.loop.time()
        if not exchange._keep or not self.parser.should_keep_alive():  # a trailer may say close
            exchange._keep = False
            self._deaf = True
        if self._current is None and not self.is_write_paused:
            self._start(exchange)
        else:
            self._queue.append(exchange)

    # Answers

    def write(self, data: bytes) -> None:
        """Send it, at the end of the loop's turn."""
        self._front.outbox.write(self.transport, data, self.loop)

    def _start(self, exchange: HttpExchange) -> None:
        self._current = exchange
        batches, loop = self._front.batches, self.loop
        exchange._stepper = stepper = Stepper(self._answer(exchange), batches, loop, self.tasks, len(exchange.body))
        batches.begin(stepper, loop)

    async def _answer(self, exchange: HttpExchange) -> None:
        """Run the request's handler; answer with an error where it does not answer."""
        if self._front.has_stopped:
            _fail(exchange, 503, "stopping", _NOT_BEGUN)
            return
        try:
            await exchange._handler(exchange)
            if exchange._connection is not None:
                log.error("a handler ended without an answer", path=exchange.path, status=exchange.status)
                _fail(exchange, 500, "internal_error", "internal error: the request was not answered")
        except (asyncio.CancelledError, GeneratorExit):
            if exchange._connection is not None:  # the client is still there: the time to finish is over
                _fail(exchange, 503, "stopping", "this server stopped before this request was done; send it again")
            raise
        except Exception as exc:  # noqa: BLE001  (answered with a 500, and logged)
            _fail_unexpectedly(exchange, exc)

    def _end_work(self, exchange: HttpExchange) -> None:
        """End the handler of a request whose client has left, or that is out of time because the server stops."""
        stepper, exchange._stepper = exchange._stepper, None
        if stepper is None:
            return
        stepper.close()
        if not stepper.is_begun:
            _fail(exchange, 503, "stopping", _NOT_BEGUN)

    def stays_open(self) -> bool:
        """Whether another request may follow the one being answered."""
        if not (self._stopping or self._deaf or self._front.is_draining):
            return True
        return bool(self._queue) or bool(self._last_words)

    def let_go(self, exchange: HttpExchange) -> None:
        """This exchange writes no more, and its body is no longer held."""
        exchange._connection = None
        if exchange.body:
            assert exchange.caller is not None
            self._front.let_go(exchange.caller, len(exchange.body))
        self._current = None

    def answered(self, exchange: HttpExchange) -> None:
        """The answer is written; the next one is begun, or waited for."""
        self.let_go(exchange)
        if self._queue:
            self._front.outbox.flush()  # so that it is known whether this answer fits
            if not self.is_write_paused:
                self._start(self._queue.popleft())
        elif self._deaf or self._stopping or not exchange._keep:
            self._end()
        elif self._phase:
            if self._expects:
                self._say_continue()
        else:
            self._read_by = self.loop.time() + self._limits.idle_s

    def hear_no_more(self) -> None:
        """Whatever comes now is thrown away: the last answer is decided, and the message being read is none."""
        self._deaf = True
        self._later = b""
        self._forget_message()

    def _end(self) -> None:
        """All is answered: say the last words, if any, and close."""
        if self._last_words:
            self._linger(self._last_words)
        elif self._drained_bytes:
            self._linger(b"")
        else:
            self._close()

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        self._front.outbox.flush()
        self._deaf = True
        self._read_by = _NEVER
        self._watch_sending()
        self.transport.close()

    def _linger(self, words: bytes) -> None:
        """Say them and no more, but read on for a moment: closed with bytes unread, they would be lost to a reset."""
        if self.transport.is_closing():
            return
        self._front.outbox.flush()
        self._deaf = True
        self._last_words = b""
        if words:
            self.transport.write(words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._watch_sending()
            self._read_by = self.loop.time() + _LINGER_S
        else:
            self._close()

    def hang_up(self) -> None:
        """Close without sending what is left; whoever works for this client is told."""
        self._leave()
        self._front.outbox.flush()
        self.transport.abort()

    def _leave(self) -> None:
        """The client has gone, in whatever phase: its work is cancelled."""
        self._deaf = True
        exchange = self._current
        if exchange is not None:
            self.let_go(exchange)
            self._end_work(exchange)
        self._drop_queue()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _drop_queue(self) -> None:
        while self._queue:
            self.let_go(self._queue.popleft())

    # Every other route

    def _begin_cold(self, expects: bool) -> None:
        if self._current is not None or self._queue:
            raise _EnoughError  # in order, after answers that are not done: it may come on a connection of its own
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers += headers  # the list that is in the scope
        self.expect_100_continue = expects
        super().on_headers_complete()
        if self._stopping or self._front.is_draining:
            self.cycle.keep_alive = False

    def _is_cold_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        """The app's answer is complete."""
        if self.transport.is_closing():
            self._watch_sending()
            return
        self.flow.resume_reading()
        if not self._phase:
            self._read_by = self.loop.time() + self._limits.idle_s
        if self._later:
            later, self._later = self._later, b""
            self.data_received(later)

    # Refusals and limits

    def _stop_reading(self, exc: httptools.HttpParserError) -> None:
        """Nothing more is read of this client: it sent what is refused, or more than may wait."""
        cause = exc.__context__
        if isinstance(cause, RefusedMessage):
            self.refuse(cause)
        elif isinstance(cause, _EnoughError):
            self._drained_bytes += self._read_bytes
            self.hear_no_more()
            if self._is_cold_busy():
                self.cycle.keep_alive = False
        elif isinstance(exc, httptools.HttpParserCallbackError):
            log.error("unexpected error", exc_info=cause)
            self.refuse(RefusedMessage(500, "internal_error", "internal error; the log has the traceback"))
        else:
            self.refuse(RefusedMessage(400, "invalid_http", f"not a valid HTTP/1.1 request: {exc}"))

    def refuse(self, refusal: RefusedMessage) -> None:
        """Answer the message being read with an error, after all that came before it, and close."""
        self._front.refused[refusal.code] += 1
        in_cold = self._phase == _BODY and self._incoming is None
        path = self.url.partition(b"?")[0].decode("latin-1")
        body = self._front.error_body(refusal.status, refusal.code, str(refusal), path)
        words = _error_answer(refusal, self._told(), body)
        self.hear_no_more()
        if in_cold:
            self._refuse_cold(words)
        elif self._is_cold_busy():
            self.cycle.keep_alive = False
        elif self._current is not None or self._queue:
            self._last_words = words
        else:
            self._linger(words)

    def _told(self) -> bytes:
        """What the answer to the message being read says besides, as `HttpExchange` has it."""
        told = self._front.told
        if told is None:
            return b""
        if self._phase == _BODY:
            return b"" if self._incoming is None else self._incoming._told
        origin = dict(self.headers).get(b"origin")
        return b"" if origin is None else told(origin)

    def _refuse_cold(self, words: bytes) -> None:
        """The app has the message already, perhaps has begun to answer it: then there is no room for another."""
        is_unanswered, is_done = not self.cycle.response_started, self.cycle.response_complete
        self._leave()
        if is_unanswered or is_done:
            self._linger(words if is_unanswered else b"")
        else:
            self.hang_up()

    def _forget_message(self) -> None:
        """Drop what was read of an unfinished message."""
        exchange = self._incoming
        if exchange is not None and exchange.caller is not None and self._phase == _BODY:
            self._front.let_go(exchange.caller, self._body_bytes)
        self._phase = _IDLE
        self._read_by = _NEVER
        self._body = b""
        self._body_bytes = 0
        self._expects = False

    def _count_unfinished(self) -> None:
        """After a read that ended inside a message: its deadline, and its bytes that are not body."""
        if self._timed != self._phase:
            self._timed = self._phase
            limit_s = self._limits.head_s if self._phase == _HEAD else self._limits.body_s
            self._read_by = self.loop.time() + limit_s
        if self._unread_bytes:
            self._bare_bytes += self._unread_bytes
            if self._bare_bytes > self._limits.head_bytes:
                self.refuse(self._head_too_large())

    def _check_head_size(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> RefusedMessage:
        most = self._limits.head_bytes
        self._linger_bytes = _LINGER_HEAD_BYTES
        return RefusedMessage(431, "head_too_large", f"the request's head is larger than {most} bytes")

    def _body_too_large(self) -> RefusedMessage:
        most = self._limits.body_bytes
        return RefusedMessage(413, "body_too_large", f"the request's body is larger than {most} bytes")

    def _say_continue(self) -> None:
        """Ask for the body, once the answers before it are out."""
        if self._current is None and not self._queue and not self._body_bytes:
            self._expects = False
            self.write(_CONTINUE)

    def _watch_sending(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_by = self.loop.time() + self._limits.send_stall_s

    def check(self, now: float) -> None:
        """Whether one of the deadlines has passed; called about once a second."""
        if now > self._write_by:
            if self.transport.get_write_buffer_size() >= self._unsent_bytes:
                self.hang_up()
                return
            self._watch_sending()
        if now > self._read_by:
            self._is_late()

    def _is_late(self) -> None:
        if self._phase == _HEAD:
            self.refuse(RefusedMessage(408, "request_timeout", f"no whole head within {self._limits.head_s:g} s"))
        elif self._phase == _BODY:
            self.refuse(RefusedMessage(408, "request_timeout", f"no whole body within {self._limits.body_s:g} s"))
        elif self.transport.get_write_buffer_size():
            # Idle, but still reading its last answer: the watch over that decides.
            if self._write_by == _NEVER:
                self._watch_sending()
            self._read_by = self._write_by
        else:
            self._close()

    def shutdown(self) -> None:
        """The server is stopping: what has begun to come or is being answered is finished, then closed."""
        self._stopping = True
        if self._is_cold_busy():
            self.cycle.keep_alive = False
        elif self._current is None and not self._queue and not self._phase:
            self._close()

    def stop(self) -> None:
        """The router goes now: what waits behind the request being answered was never begun, and may be sent again."""
        exchange = self._current
        self._drop_queue()
        if exchange is not None:
            self._end_work(exchange)


class _EnoughError(Exception):
    """Stops the parser: nothing more is read of this client, and nothing is wrong with what came before."""


def _asks_before(method: str, fields: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks whether a page of another origin may ask."""
    return method == "OPTIONS" and b"access-control-request-method" in fields


def _fail(exchange: HttpExchange, status: int, code: str, message: str) -> None:
    """An error for an answer, or a broken connection if one has begun."""
    connection = exchange._connection
    if connection is None:
        return
    if exchange.status is not None:
        exchange.abort()
        return
    headers = _JSON + b"retry-after: 1\r\n" if status == 503 else _JSON
    exchange.respond(status, headers, connection._front.error_body(status, code, message, exchange.path))


def _fail_unexpectedly(exchange: HttpExchange, exc: Exception) -> None:
    log.error("unexpected error", path=exchange.path, exc_info=exc)
    message = f"{exchange.path}: internal error ({type(exc).__name__}); the log has the traceback"
    _fail(exchange, 500, "internal_error", message)


def _error_answer(refusal: RefusedMessage, told: bytes, body: bytes) -> bytes:
    extra = error_headers(refusal.status, refusal.retry_after_s)
    lines = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in extra.items())
    head = STATUS_LINE[refusal.status] + _JSON + lines + told + b"content-length: %d\r\n" % len(body) + _CLOSE
    return head + b"\r\n" + body
