"""One connection to an engine: one request at a time, and how its answer is read.

A connection goes back to the pool only after an answer that ended exactly as HTTP/1.1 says it must. After anything odd
(interim answers, a body that ends with the connection, unexpected bytes) it is closed: leftover bytes could be taken
for the answer to the next request.
"""

import asyncio
import contextlib
import functools
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import httptools

from lorafleet.http_server.outbox import Outbox
from lorafleet.service.network.sockets import keep_alive
from lorafleet.service.network.tls import failure_text
from lorafleet.service.network.urls import bracketed

_MAX_HEAD_BYTES = 64 * 2**10
_NEVER = float("inf")
_HOST = re.compile(r"[A-Za-z0-9._~:%-]+")

Headers = Mapping[bytes, bytes]


class EngineLost(ConnectionError):
    """An engine that gave no answer, or half of one.

    reason  "connection" (never connected: nothing was sent), "no_descriptors" (not connected, because this process
            has no file descriptor left), "no_answer" (closed, reset, or not HTTP), "no_answer_in_time" (its deadline
            passed), "hung" (see EnginePool.give_up)
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ResponseSink(Protocol):
    """Receives an answer: head, data (any number), then end; or lost at any time. No method may raise."""

    def head(self, status: int, headers: Headers) -> None:
        """Status and headers: names in lower case, the last value of each. Not called for interim (1xx) answers."""

    def data(self, data: bytes) -> None:
        """All body bytes of one read, without chunk encoding."""

    def end(self) -> None:
        """The answer is complete; the connection is back in the pool, or closed."""

    def lost(self, exc: EngineLost) -> None:
        """The answer is lost: called instead of `end`."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: `parse` gives one object per URL
class Origin:
    """An engine's address.

    prefix  the URL's own path without its last slash: b"" or b"/engine"; goes before each request's path
    host_header  value of `Host`: without the scheme's own port, an IPv6 address in brackets
    """

    url: str
    host: str
    port: int
    tls: bool
    prefix: bytes
    host_header: bytes

    @staticmethod
    def parse(url: str) -> "Origin":
        """The origin of an `http://` or `https://` URL; ValueError for any other. Cached."""
        return _cached_origin(url)


@functools.lru_cache(maxsize=4096)
def _cached_origin(url: str) -> Origin:
    """`Origin.parse`, cached. Raises ValueError for any other form of URL."""
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").encode("idna").decode()
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: expected http://host[:port][/path] or https://host[:port][/path]")
    tls = parts.scheme == "https"
    usual = 443 if tls else 80
    port = parts.port or usual
    shown = bracketed(host)
    host_header = shown if port == usual else f"{shown}:{port}"
    prefix = urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~-._")
    return Origin(url, host, port, tls, prefix.encode(), host_header.encode())


class ConnectionOwner(Protocol):
    """The pool that a connection belongs to.

    outbox  for all writes to engines
    """

    outbox: Outbox

    def add(self, connection: "EngineConnection") -> None:
        """Enter a connection that has just opened."""

    def release(self, connection: "EngineConnection") -> None:
        """Take back a connection whose answer is complete."""

    def forget(self, connection: "EngineConnection") -> None:
        """Remove a closed connection."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine.

    deadline  loop.time() at which the request on it is lost; the sender of the request moves it. It does not pass while
              reading is paused, because then the client is slow and not the engine.
    longer    called when the deadline has passed, for the next one; a time in the past loses the request
    answers   complete answers so far
    was_idle  taken from the pool's idle ones: an engine may close such a connection just as it is used
    is_spare  idle, and never used
    last_data_at  loop.time() of the last bytes of a stream; set by the sink, which knows the time anyway
    """

    __slots__ = (
        "_bare_bytes",
        "_complete",
        "_fields",
        "_framed",
        "_has_head",
        "_headers",
        "_interim",
        "_keep",
        "_new_head",
        "_odd",
        "_parser",
        "_paused_at",
        "_pieces",
        "_pool",
        "_sent_after",
        "_status",
        "answers",
        "deadline",
        "http_version",
        "is_closed",
        "is_spare",
        "last_data_at",
        "longer",
        "loop",
        "origin",
        "read_bytes",
        "sink",
        "transport",
        "was_idle",
    )

    def __init__(self, pool: ConnectionOwner, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.deadline = _NEVER
        self.answers = 0
        self.last_data_at = -_NEVER
        self._pool = pool
        self.loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self.sink: ResponseSink | None = None
        self.is_closed = self.is_spare = self.was_idle = False
        self._paused_at: float | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._fields: Headers = {}
        self._pieces: list[bytes] = []
        self._odd = False
        self._sent_after = -1
        self.http_version = ""  # of its first answer
        self._reset()

    def _reset(self) -> None:
        """Forget the last answer and `longer`, so that the next one can be parsed."""
        self._status = 0
        self._has_head = self._new_head = self._interim = self._complete = False
        self._framed = self._keep = False
        self.read_bytes = self._bare_bytes = 0
        self.longer: Callable[[float], float] | None = None

    # Called by the router.

    def send(self, request: bytes, sink: ResponseSink) -> None:
        """Send one request, head and body; `sink` receives the answer. Only on a connection fresh from the pool.

        Goes out at the end of the tick. On a closed connection the sink is told of the loss in the next tick.
        """
        assert self.sink is None
        if self.is_closed or self.transport.is_closing():
            # Closed since it left the pool. The sink receives `lost` later, as of every other loss.
            self.sink = sink
            reason = "no_answer" if self.was_idle else "connection"
            self.loop.call_soon(self.lose, reason, "closed before the request was sent")
            return
        self.sink = sink
        outbox = self._pool.outbox
        self._sent_after = outbox.flushed
        outbox.write(self.transport, request, self.loop)

    def pause(self) -> None:
        """Stop reading, and note since when; at most one read's bytes (256 KiB) still come. Not if closed or paused."""
        if self._paused_at is None and not self.is_closed:
            self._paused_at = self.loop.time()
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on, and move the deadline by the time that reading was paused."""
        if self._paused_at is not None:
            self.deadline += self.loop.time() - self._paused_at
            self._paused_at = None
            if not self.is_closed:
                self.transport.resume_reading()

    def dismiss(self, *, within_s: float) -> None:
        """Drop the rest of the answer unseen by the sink, so that the connection can serve again.

        After `within_s` close it.
        """
        if self.sink is not None:
            self.sink = _DROPPING_SINK
            self.resume()
            self.deadline = self.loop.time() + within_s

    def close(self) -> None:
        """Close at once, and leave the pool; the engine aborts the request. The sink receives nothing more."""
        self.sink = None
        if not self.is_closed:
            self.is_closed = True
            self._pool.forget(self)
            if self.transport is not None:
                self.transport.abort()

    def leave(self, sink: ResponseSink) -> None:
        """Close the connection if it still serves this sink: afterwards it may have another request."""
        if self.sink is sink:
            self.close()

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come since the last answer, or since the last piece of a body."""
        return not self.read_bytes and not self._bare_bytes

    @property
    def is_paused(self) -> bool:
        """Whether reading is paused."""
        return self._paused_at is not None

    def is_usable(self, now: float) -> bool:
        """Whether this idle connection may get a request now: it is open, and its deadline has not passed."""
        return not self.is_closed and now < self.deadline and not self.transport.is_closing()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Connected: keep the transport and enter the pool, or abort where it was closed meanwhile."""
        self.transport = transport
        with contextlib.suppress(OSError):  # closed already, which the next call says
            keep_alive(transport.get_extra_info("socket"))
        if self.is_closed:
            transport.abort()  # closed while it was connecting
        else:
            self._pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: lose the request on it, and drop the parser."""
        why = "the engine closed the connection" if exc is None else failure_text(exc) or f"{type(exc).__name__}: {exc}"
        self.lose("no_answer", why)
        # A reference cycle: the parser holds methods of this object.
        self._parser = None  # type: ignore[assignment]

    def eof_received(self) -> None:
        """The engine has closed its half: this ends an answer without a length; otherwise lose the request.

        Such a connection is not reused.
        """
        if self.sink is not None and self._has_head and not self._framed and not self._complete:
            self._complete, self._odd = True, True
            self._finish()
        else:
            self.lose("no_answer", "the engine closed the connection")

    def data_received(self, data: bytes) -> None:
        """Parse bytes of an answer, and give them to the sink; end the request once it is complete.

        Loses a request whose answer is not HTTP, has too long a head, or came before it was sent. Closes without a
        request.
        """
        sink = self.sink
        if sink is None:
            self.close()  # bytes without a request
            return
        if self._sent_after == self._pool.outbox.flushed:
            # The request is not sent yet: these bytes answer the one before, or none (a proxy's 408 when idle).
            if self.was_idle:
                self.lose("no_answer", "it answered before the request was sent")
                return
            self._odd = True  # on a new connection there was no other request
        self.read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self._complete:
                self._deliver(sink)
                self.lose("no_answer", f"not HTTP: {exc}")
                return
            self._odd = True  # bytes behind the end of the answer
        if not self._complete and self.read_bytes:
            # A read without body bytes: a head, a trailer or a chunk's extension, which httptools does not bound.
            self._bare_bytes += self.read_bytes
            if self._bare_bytes > _MAX_HEAD_BYTES:
                self.lose("no_answer", f"a head of over {_MAX_HEAD_BYTES} bytes")
                return
        pieces = self._pieces
        if len(pieces) == 1 and not self._new_head:
            sink.data(pieces.pop())  # one event of a stream: most reads by far
        elif pieces or self._new_head:
            self._deliver(sink)
        if self._complete and self.sink is not None:
            self._finish()

    def _deliver(self, sink: ResponseSink) -> None:
        """Give the sink the head and body of this read; after parsing, so that the sink may close the connection."""
        if self._new_head and self.sink is sink:
            self._new_head = False
            sink.head(self._status, self._fields)
        pieces = self._pieces
        if pieces and self.sink is sink:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            sink.data(data)

    def _finish(self) -> None:
        """End a complete answer: back to the pool with the connection, or close it where anything was odd.

        Calls the sink's `end`.
        """
        sink = self.sink
        assert sink is not None
        transport = self.transport
        self.answers += 1
        # An engine that answers before it has read the request leaves the rest of it in our buffer.
        if self._keep and not self._odd and not transport.is_closing() and not transport.get_write_buffer_size():
            self.sink = None
            if self._paused_at is not None:
                self.resume()
            self._reset()
            self._pool.release(self)
        else:
            self.close()
        sink.end()

    def lose(self, reason: str, message: str) -> None:
        """Close the connection, and report the loss to its sink, if it serves one."""
        sink = self.sink
        self.close()
        if sink is not None:
            sink.lost(EngineLost(reason, f"{self.origin.url}: {message}"))

    def expire(self) -> None:
        """Act on a passed deadline: lose the request, unless `longer` names a later one, which becomes the deadline."""
        now = self.loop.time()
        if self.longer is not None and (deadline := self.longer(now)) > now:
            self.deadline = deadline
            return
        self.lose("no_answer_in_time", "no answer in time")

    def is_overdue(self, now: float) -> bool:
        """Whether the deadline has passed; never while reading is paused."""
        return now > self.deadline and self._paused_at is None

    # Called by the parser.

    def on_message_begin(self) -> None:
        """A message begins. One behind a complete answer is odd: the connection will be closed."""
        if self._complete:
            self._odd = True
        else:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header of the head; trailers are dropped."""
        if not self._has_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of an answer is complete: keep status and headers. Raises HttpParserError for bad framing.

        An interim (1xx) head is skipped.
        """
        if self._complete:
            return
        parser = self._parser
        status = parser.get_status_code()
        if not 200 <= status <= 599:
            if not 101 < status < 200 and status != 100:
                raise httptools.HttpParserError(f"status {status}")
            self._interim = self._odd = True
            return
        headers = self._headers
        if self._bare_bytes + self.read_bytes > _MAX_HEAD_BYTES:
            _check_head_size(headers)
        if not self.answers:
            self.http_version = parser.get_http_version()
            if self.http_version not in ("1.1", "1.0"):
                raise httptools.HttpParserError(f"HTTP/{self.http_version}")
        self._fields = fields = dict(headers)
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or self.http_version != "1.1"):
            raise httptools.HttpParserError("a transfer encoding other than chunked")
        self._framed = coding is not None or b"content-length" in fields
        self._status = status
        # uvicorn closes the connection behind a 500 of an error that nobody caught, and does not say so in the head.
        self._keep = parser.should_keep_alive() and status != 500
        self._has_head = self._new_head = True

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body for the sink, and restart the count of bytes without body; not behind the end."""
        if not self._complete:
            self.read_bytes = 0
            self._bare_bytes = 0
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The answer is complete, or an interim (1xx) one is over."""
        if self._interim:
            self._interim = False
        else:
            self._complete = True


class _DroppingSink:
    """A sink that drops an answer: its methods do nothing."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def lost(self, exc: EngineLost) -> None: ...


_DROPPING_SINK = _DroppingSink()


def _check_head_size(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise HttpParserError for headers of over `_MAX_HEAD_BYTES`."""
    # Called after a large read only, which may be large because of its body.
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > _MAX_HEAD_BYTES:
        raise httptools.HttpParserError(f"a head of over {_MAX_HEAD_BYTES} bytes")
