"""A client's connection: answering its requests in order, its deadlines, refusals, and how it closes.

Reading from a client is never paused while a hot route answers it: its FIN would not be seen, and engines would go on
with its requests. So the bytes that a client may send ahead are bounded: one that sends more is answered so far, and
then its connection is closed.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from lorafleet.http_server.batches import Stepper
from lorafleet.http_server.exchange import CLOSE, JSON, HttpExchange
from lorafleet.http_server.framing import RefusedMessage, body_too_slow
from lorafleet.http_server.intake import NOT_BEGUN, RequestIntake
from lorafleet.http_server.request_reader import BODY, HEAD, NEVER, ReadingProtocol
from lorafleet.service.http import error_headers

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

# Seconds that a client's bytes are read and thrown away after its last response, so that a reset does not take it.
_LINGER_S = 2.0
HIGH_WATER_BYTES = 64 * 2**10
"""Unsent bytes from which a client reads too slowly, as of asyncio's plain transport."""


class ClientConnection(ReadingProtocol):
    """One client's connection.

    opened_at         loop.time() at which the client connected
    socket_transport  the socket's own: `transport`, or the one beneath its TLS
    is_write_paused   the client reads too slowly: unsent bytes are above the transport's high-water mark
    unsent_bytes      when the write deadline was restarted; where as many are unsent at it, the client is cut off
    """

    __slots__ = (
        "_final_error",
        "_on_close",
        "_on_open",
        "_socket_bytes",
        "opened_at",
        "socket_transport",
        "unsent_bytes",
    )

    def __init__(
        self,
        intake: RequestIntake,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
        *,
        on_open: "Callable[[ClientConnection], None]",
        on_close: "Callable[[ClientConnection], None]",
    ) -> None:
        super().__init__(intake, config, server_state, app_state, loop)
        self._on_open, self._on_close = on_open, on_close
        self._final_error = b""  # a refusal that waits behind responses still to come
        self.unsent_bytes = self._socket_bytes = 0

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: report it as open, and start the deadline of its first head."""
        super().connection_made(transport)
        self.socket_transport = transport
        self.opened_at = self.loop.time()
        self.read_deadline = self.opened_at + self.limits.head_s
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: report it, end its work, and release the bodies that it holds."""
        self._on_close(self)
        self._drop_work()
        self.forget_message()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client has closed its half: end the work for it and abort, or, where none is under way, let it read on.

        uvicorn takes this for a client that has left, too. Without the abort a response that nobody reads would keep
        the connection, and its work, until it is sent.
        """
        if self.current is not None or self.is_app_busy():
            self.hang_up()
        else:
            self.restart_write_deadline()

    def pause_writing(self) -> None:
        """The client reads too slowly: start the write deadline, and call the exchange's `on_pause`."""
        self.is_write_paused = True
        self.restart_write_deadline()
        super().pause_writing()
        if self.current is not None and self.current.on_pause is not None:
            self.current.on_pause()

    def resume_writing(self) -> None:
        """The client has read on: end the write deadline, call `on_resume`, or start the next exchange."""
        self.is_write_paused = False
        if not self.transport.is_closing():
            self.write_deadline = NEVER
        super().resume_writing()
        if self.current is not None:
            if self.current.on_resume is not None:
                self.current.on_resume()
        elif self.queue:
            self.start(self.queue.popleft())

    # Responses.

    def write(self, data: bytes) -> None:
        """Send these bytes, at the latest at the end of the event loop's tick."""
        self.outbox.write(self.transport, data, self.loop)

    def start(self, exchange: HttpExchange) -> None:
        """Make this the exchange being answered, and queue its handler for the next batch."""
        self.current = exchange
        intake, loop = self.intake, self.loop
        batches = intake.batches
        exchange.stepper = stepper = Stepper(intake.answer(exchange), batches, loop, self.tasks, len(exchange.body))
        batches.begin(stepper, loop)

    def _end_work(self, exchange: HttpExchange) -> None:
        """End the handler of a request.

        One that has not begun is answered with 503, if its client is still connected.
        """
        stepper, exchange.stepper = exchange.stepper, None
        if stepper is None:
            return
        stepper.close()
        if not stepper.is_begun:
            exchange.send_error(503, "stopping", NOT_BEGUN)

    def can_stay_open(self) -> bool:
        """Whether the connection stays open behind this response: for another response, or another request."""
        if not (self.is_stopping or self.ignores_input or self.intake.is_draining):
            return True
        return bool(self.queue) or bool(self._final_error)

    def release(self, exchange: HttpExchange) -> None:
        """End an exchange: it writes no more, its body is no longer counted, and `current` is None."""
        exchange.connection = None
        self.intake.release_body(exchange)
        self.current = None

    def record_error(self, exchange: HttpExchange, status: int, code: str, message: str) -> bytes:
        """Log and keep a request that its handler left unanswered, and count a 503; returns the error's body."""
        return self.intake.record_error(exchange, status, code, message)

    def on_answered(self, exchange: HttpExchange) -> None:
        """The response is written: release its exchange.

        Then start the next one (flushes the outbox), wait for a request or its body, or close.
        """
        self.release(exchange)
        if self.queue:
            self.outbox.flush()  # so that it is known whether this answer fits
            if not self.is_write_paused:
                self.start(self.queue.popleft())
        elif self.ignores_input or self.is_stopping or not exchange.keeps_connection:
            self._finish_connection()
        elif self.phase:
            if self.expects_continue:
                self.send_continue()
        else:
            self.read_deadline = self.loop.time() + self.limits.idle_s

    # Closing.

    def _finish_connection(self) -> None:
        """Send the refusal that waits, if any, and close."""
        if self._final_error:
            self.linger(self._final_error)
        elif self.drained_bytes:
            self.linger(b"")
        else:
            self.close_when_sent()

    def close_when_sent(self) -> None:
        """Ignore further input, and close after the unsent bytes; the client must read them by the write deadline.

        Flushes the outbox. Does nothing on a closing connection.
        """
        if self.transport.is_closing():
            return
        self.outbox.flush()
        self.ignores_input = True
        self.read_deadline = NEVER
        self.restart_write_deadline()
        self.transport.close()
        self._close_socket_when_sent()

    def _close_socket_when_sent(self) -> None:
        """Close the socket of a closing TLS connection behind its last bytes, at the latest at a check of deadlines.

        TLS itself would wait for the client's own close, and many a client reads nothing while its connection is idle.
        """
        if self.socket_transport is self.transport:
            return
        if self.transport.get_write_buffer_size():  # TLS has not passed all on
            self.read_deadline = self.loop.time()
        else:
            self.read_deadline = NEVER
            self.socket_transport.close()

    def linger(self, last: bytes) -> None:
        """Send these last bytes and FIN, and ignore further input, but read and drop it for `_LINGER_S` more.

        A close with unread bytes would reset the connection, and the client would lose the last response. Does nothing
        on a closing connection. TLS ends in place of FIN: it sends its own close, and drops what comes.
        """
        if self.transport.is_closing():
            return
        self.outbox.flush()
        self.ignores_input = True
        self._final_error = b""
        if last:
            self.transport.write(last)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self.restart_write_deadline()
        self.read_deadline = self.loop.time() + _LINGER_S

    @property
    def is_in_head(self) -> bool:
        """Whether a part of a head has come, and no more."""
        return self.phase == HEAD

    @property
    def is_without_request(self) -> bool:
        """Whether no request of this connection is being answered, waits, or has its head complete."""
        if self.ignores_input or self.phase == BODY or self.current is not None or self.queue or self.is_app_busy():
            return False
        return not self._unsent_now()

    def make_room(self, refusal: RefusedMessage) -> None:
        """Close a connection without a request at once; a client that has sent a part of a head gets the refusal.

        Not as `refuse`, which waits for the client and keeps the descriptor.
        """
        if self.is_in_head:
            body = self.intake.error_body(refusal.status, refusal.code, str(refusal), "")
            self.transport.write(_error_response(refusal, self.message_id(), b"", body))
        self.ignores_input = True
        if self._unsent_now():
            self.hang_up()
        else:
            self.transport.close()
            self.socket_transport.close()

    def hang_up(self) -> None:
        """Abort the connection without sending unsent bytes, and end all work for this client."""
        self._drop_work()
        self.outbox.flush()
        self.transport.abort()

    def _drop_work(self) -> None:
        """End the current handler, drop queued requests, report a disconnect to the app, and ignore further input."""
        self.ignores_input = True
        exchange = self.current
        if exchange is not None:
            self.release(exchange)
            self._end_work(exchange)
        self._drop_queue()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _drop_queue(self) -> None:
        """Drop the requests that wait behind the one being answered.

        Where there are any, `current` is None afterwards.
        """
        while self.queue:
            self.release(self.queue.popleft())

    def shutdown(self) -> None:
        """The server stops: close after the requests being received or answered; at once where there are none."""
        self.is_stopping = True
        if self.is_app_busy():
            self.cycle.keep_alive = False
        elif self.current is None and not self.queue and not self.phase:
            self.close_when_sent()

    def stop(self) -> None:
        """End the current request's handler now.

        Queued requests were never begun: they get no response, and may be sent again.
        """
        exchange = self.current
        self._drop_queue()
        if exchange is not None:
            self._end_work(exchange)

    # Refusals and deadlines.

    def refuse(self, refusal: RefusedMessage) -> None:
        """Refuse the message being read: count the refusal, send an error after all responses before it, and close.

        Behind a response of the app, or within it, no error is sent.
        """
        is_for_app = self.phase == BODY and self._reading is None
        caller = None if self.phase != BODY or self._reading is None else self._reading.caller
        path, name = self.url.partition(b"?")[0].decode("latin-1"), self.message_id()
        method = (self.parser.get_method() or b"").decode("latin-1") if path else ""
        self.intake.refusals[refusal.code] += 1
        self.intake.log_refusal(
            name, method, path, refusal.status, refusal.code, str(refusal), caller=caller, client=self.client
        )
        body = self.intake.error_body(refusal.status, refusal.code, str(refusal), path)
        response = _error_response(refusal, name, self._extra_headers(), body)
        self.ignore_further_input()
        if is_for_app:
            self._refuse_app_request(response)
        elif self.is_app_busy():
            self.cycle.keep_alive = False
        elif self.current is not None or self.queue:
            self._final_error = response
        else:
            self.linger(response)

    def _extra_headers(self) -> bytes:
        """CORS header lines of the response to the message being read; empty without CORS or an Origin."""
        cors_headers = self.intake.cors_headers
        if cors_headers is None:
            return b""
        if self.phase == BODY:
            return b"" if self._reading is None else self._reading.extra_headers
        origin = dict(self.headers).get(b"origin")
        return b"" if origin is None else cors_headers(origin)

    def _refuse_app_request(self, response: bytes) -> None:
        """End the app's work on this message, send `response`, and close.

        Where the app has begun to respond, only close.
        """
        is_unanswered, is_done = not self.cycle.response_started, self.cycle.response_complete
        self._drop_work()
        if is_unanswered or is_done:
            self.linger(response if is_unanswered else b"")
        else:
            self.hang_up()

    def restart_write_deadline(self) -> None:
        """Restart the write deadline: the client must read some of the bytes unsent now within `send_stall_s`."""
        self.unsent_bytes = self._unsent_now()
        self._socket_bytes = self.socket_transport.get_write_buffer_size()
        self.write_deadline = self.loop.time() + self.limits.send_stall_s

    def _unsent_now(self) -> int:
        """Bytes that the kernel has not taken yet; those that TLS has passed on are in its socket's transport."""
        size = self.transport.get_write_buffer_size()
        return size if self.socket_transport is self.transport else size + self.socket_transport.get_write_buffer_size()

    def _is_stalled(self) -> bool:
        """Whether the client has read nothing since the write deadline was restarted.

        Over TLS bytes may be added while the socket's transport is full: that one only shrinks then.
        """
        is_socket_stalled = self.socket_transport.get_write_buffer_size() >= self._socket_bytes
        return is_socket_stalled and self._unsent_now() >= self.unsent_bytes

    def _watch_socket(self) -> None:
        """Do for an open TLS connection what its transport does not report.

        A large write is in the socket's transport as a whole, and pauses nothing. uvloop takes a FIN for the end of
        TLS, and drops all further writes in silence.
        """
        if self.socket_transport.is_closing():
            if self.current is not None or self.is_app_busy():
                self.hang_up()
        elif self.is_write_paused:
            return
        elif self.write_deadline == NEVER:
            if self.socket_transport.get_write_buffer_size() > HIGH_WATER_BYTES:
                self.restart_write_deadline()
        elif not self._unsent_now():
            self.write_deadline = NEVER

    def check_deadlines(self, now: float) -> None:
        """Hang up on a client that read nothing by the write deadline; refuse or close at the read deadline.

        A client that has read something gets another write deadline.
        """
        if self.socket_transport is not self.transport and not self.transport.is_closing():
            self._watch_socket()
        if now > self.write_deadline:
            if self._is_stalled():
                self.hang_up()
                return
            self.restart_write_deadline()
        if now > self.read_deadline:
            self._on_read_deadline()

    def _on_read_deadline(self) -> None:
        """Refuse (408) a head or body that came too slowly, or close an idle connection.

        One that still reads its last response gets the write deadline first.
        """
        if self.transport.is_closing():
            self._close_socket_when_sent()
        elif self.phase == HEAD:
            self.refuse(RefusedMessage(408, "request_timeout", f"no whole head within {self.limits.head_s:g} s"))
        elif self.phase == BODY and self.upload_bytes:
            if self.flow.read_paused:  # the app has not taken yet what came
                self.read_deadline = self.loop.time() + self.limits.body_s
            else:
                message = f"no byte of the body within {self.limits.body_s:g} s"
                self.refuse(RefusedMessage(408, "request_timeout", message))
        elif self.phase == BODY:
            self.refuse(body_too_slow(self.limits.body_s))
        elif self._unsent_now():
            # Idle, but still reading its last answer: the write deadline decides.
            if self.write_deadline == NEVER:
                self.restart_write_deadline()
            self.read_deadline = self.write_deadline
        else:
            self.close_when_sent()


def _error_response(refusal: RefusedMessage, name: str, extra_headers: bytes, body: bytes) -> bytes:
    """The bytes of a refusal, which closes the connection. `name`: the request's id."""
    extra = {"x-request-id": name} | error_headers(refusal.status, refusal.retry_after_s)
    lines = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in extra.items())
    close = CLOSE if refusal.status != 426 else b"connection: close, upgrade\r\n"  # RFC 9110, 7.8
    head = STATUS_LINE[refusal.status] + JSON + lines + extra_headers + b"content-length: %d\r\n" % len(body) + close
    return head + b"\r\n" + body
