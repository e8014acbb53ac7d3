"""Connections to engines: one request at a time on each, a pool of idle ones per origin.

A connection goes back to the pool only after an answer that ended exactly as HTTP/1.1 says it must. After anything odd
(interim answers, a body that ends with the connection, unexpected bytes) it is closed: leftover bytes could be taken
for the answer to the next request.
"""

import asyncio
import errno
import functools
import re
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import httptools

from lorafleet.http_server.outbox import Outbox

_MAX_HEAD_BYTES = 64 * 2**10
# Deadlines are checked this often: no timer is made per request or chunk.
_SWEEP_EVERY_S = 0.25
_NEVER = float("inf")
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
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
        return _origin(url)


@functools.lru_cache(maxsize=4096)
def _origin(url: str) -> Origin:
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").encode("idna").decode()
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: expected http://host[:port][/path] or https://host[:port][/path]")
    tls = parts.scheme == "https"
    usual = 443 if tls else 80
    port = parts.port or usual
    shown = f"[{host}]" if ":" in host else host
    host_header = shown if port == usual else f"{shown}:{port}"
    prefix = urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~-._")
    return Origin(url, host, port, tls, prefix.encode(), host_header.encode())


class EngineConnection(asyncio.Protocol):
    """One connection to an engine.

    deadline  loop.time() at which the request on it is lost; the sender of the request moves it. It does not pass while
              reading is paused, because then the client is slow and not the engine.
    longer    called when the deadline has passed, for the next one; a time in the past loses the request
    answers   complete answers so far: an engine may close a connection just as it is used again
    heard_at  loop.time() of the last bytes of a stream; set by the sink, which knows the time anyway
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
        "_sink",
        "_status",
        "answers",
        "deadline",
        "heard_at",
        "http_version",
        "is_closed",
        "longer",
        "loop",
        "origin",
        "read_bytes",
        "transport",
    )

    def __init__(self, pool: "EnginePool", origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.deadline = _NEVER
        self.answers = 0
        self.heard_at = -_NEVER
        self._pool = pool
        self.loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self._sink: ResponseSink | None = None
        self.is_closed = False
        self._paused_at: float | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._fields: Headers = {}
        self._pieces: list[bytes] = []
        self._odd = False
        self._sent_after = -1
        self.http_version = ""  # of its first answer
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._has_head = self._new_head = self._interim = self._complete = False
        self._framed = self._keep = False
        self.read_bytes = self._bare_bytes = 0
        self.longer: Callable[[float], float] | None = None

    # Called by the router.

    def send(self, request: bytes, sink: ResponseSink) -> None:
        """Send one request, head and body; `sink` receives the answer. Only on a connection fresh from the pool."""
        assert self._sink is None
        if self.is_closed or self.transport.is_closing():
            # Closed since it left the pool. The sink hears of it later, as of every other loss.
            self._sink = sink
            reason = "no_answer" if self.answers else "connection"
            self.loop.call_soon(self._lose, reason, "closed before the request was sent")
            return
        self._sink = sink
        outbox = self._pool._outbox
        self._sent_after = outbox.flushed
        outbox.write(self.transport, request, self.loop)

    def pause(self) -> None:
        """Stop reading; at most one read's bytes (256 KiB) still come."""
        if self._paused_at is None and not self.is_closed:
            self._paused_at = self.loop.time()
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused_at is not None:
            self.deadline += self.loop.time() - self._paused_at
            self._paused_at = None
            if not self.is_closed:
                self.transport.resume_reading()

    def dismiss(self, *, within_s: float) -> None:
        """Drop the rest of the answer, so that the connection can serve again; close it if that takes longer."""
        if self._sink is not None:
            self._sink = _DROPPING_SINK
            self.resume()
            self.deadline = self.loop.time() + within_s

    def close(self) -> None:
        """Close at once, so that the engine aborts the request. The sink receives nothing more."""
        self._sink = None
        if not self.is_closed:
            self.is_closed = True
            self._pool.forget(self)
            if self.transport is not None:
                self.transport.abort()

    def leave(self, sink: ResponseSink) -> None:
        """Close, if this sink still waits for its answer: afterwards the connection may have another request."""
        if self._sink is sink:
            self.close()

    @property
    def said_nothing(self) -> bool:
        """Whether no byte has come since the last answer."""
        return not self.read_bytes and not self._bare_bytes

    @property
    def is_paused(self) -> bool:
        """Whether reading is paused."""
        return self._paused_at is not None

    def is_usable(self, now: float) -> bool:
        """Whether this idle connection may be used."""
        return not self.is_closed and now < self.deadline and not self.transport.is_closing()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if self.is_closed:
            transport.abort()  # closed while it was connecting
        else:
            self._pool._add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("no_answer", "the engine closed the connection" if exc is None else f"{type(exc).__name__}: {exc}")
        # A reference cycle: the parser holds methods of this object.
        self._parser = None  # type: ignore[assignment]

    def eof_received(self) -> None:
        if self._sink is not None and self._has_head and not self._framed and not self._complete:
            self._complete, self._odd = True, True
            self._finish()
        else:
            self._lose("no_answer", "the engine closed the connection")

    def data_received(self, data: bytes) -> None:
        """Parse bytes of an answer, and give them to the sink."""
        sink = self._sink
        if sink is None:
            self.close()  # bytes without a request
            return
        if self._sent_after == self._pool._outbox.flushed:
            # The request is not sent yet: these bytes answer the one before, or none (a proxy's 408 when idle).
            if self.answers:
                self._lose("no_answer", "it answered before the request was sent")
                return
            self._odd = True  # on a new connection there was no other request
        self.read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            if not self._complete:
                self._deliver(sink)
                self._lose("no_answer", f"not HTTP: {exc}")
                return
            self._odd = True  # bytes behind the end of the answer
        if not self._complete and self.read_bytes:
            # A read without body bytes: a head, a trailer or a chunk's extension, which httptools does not bound.
            self._bare_bytes += self.read_bytes
            if self._bare_bytes > _MAX_HEAD_BYTES:
                self._lose("no_answer", f"a head of over {_MAX_HEAD_BYTES} bytes")
                return
        if self._new_head or self._pieces:
            self._deliver(sink)
        if self._complete and self._sink is not None:
            self._finish()

    def _deliver(self, sink: ResponseSink) -> None:
        """Give the sink the head and body of this read; after parsing, so that the sink may close the connection."""
        if self._new_head and self._sink is sink:
            self._new_head = False
            sink.head(self._status, self._fields)
        pieces = self._pieces
        if pieces and self._sink is sink:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            sink.data(data)

    def _finish(self) -> None:
        """End a complete answer: give the connection back to the pool, or close it where anything was odd."""
        sink = self._sink
        assert sink is not None
        transport = self.transport
        self.answers += 1
        # An engine that answers before it has read the request leaves the rest of it in our buffer.
        if self._keep and not self._odd and not transport.is_closing() and not transport.get_write_buffer_size():
            self._sink = None
            if self._paused_at is not None:
                self.resume()
            self._reset()
            self._pool.release(self)
        else:
            self.close()
        sink.end()

    def _lose(self, reason: str, message: str) -> None:
        """Close the connection, and tell its sink that the answer is lost."""
        sink = self._sink
        self.close()
        if sink is not None:
            sink.lost(EngineLost(reason, f"{self.origin.url}: {message}"))

    def expire(self) -> None:
        """Act on a deadline that has passed: lose the request, unless `longer` names a later deadline."""
        now = self.loop.time()
        if self.longer is not None and (deadline := self.longer(now)) > now:
            self.deadline = deadline
            return
        self._lose("no_answer_in_time", "no answer in time")

    def is_overdue(self, now: float) -> bool:
        return now > self.deadline and self._paused_at is None

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            self._odd = True
        else:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of an answer is there: check its framing."""
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
        if not self._complete:
            self.read_bytes = 0
            self._bare_bytes = 0
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self._complete = True


class _DroppingSink:
    """A sink that drops an answer."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def lost(self, exc: EngineLost) -> None: ...


_DROPPING_SINK = _DroppingSink()


def _check_head_size(headers: list[tuple[bytes, bytes]]) -> None:
    # Called after a large read only, which may be large because of its body.
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > _MAX_HEAD_BYTES:
        raise httptools.HttpParserError(f"a head of over {_MAX_HEAD_BYTES} bytes")


class EnginePool:
    """Idle connections by origin, and every other one until it is closed.

    connect_s    seconds to open a connection, names and TLS included
    keepalive_s  an idle connection is kept so long; vLLM 0.32 closes after 5 s, and a request sent just then is lost
    max_idle     idle connections per origin; more are closed when their answer is complete
    outbox       for all writes; by default one of the pool's own
    """

    def __init__(
        self,
        *,
        connect_s: float,
        keepalive_s: float = 4.0,
        max_idle: int = 512,
        tls: ssl.SSLContext | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.connect_s = connect_s
        self.keepalive_s = keepalive_s
        self._max_idle = max_idle
        self._tls = tls
        self.open_connections: set[EngineConnection] = set()
        self._idle: dict[Origin, list[EngineConnection]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._outbox = outbox or Outbox()

    @property
    def connections(self) -> int:
        """Open connections, idle or not."""
        return len(self.open_connections)

    @property
    def idle_connections(self) -> int:
        """Open connections without a request."""
        return sum(map(len, self._idle.values()))

    def has_idle(self, origin: Origin) -> bool:
        """Whether there is an idle connection to this origin."""
        return bool(self._idle.get(origin))

    @property
    def is_sweeping(self) -> bool:
        """Whether a timer checks the deadlines of open connections."""
        return self._timer is not None

    def heard_at(self) -> dict[str, float]:
        """Engine URL -> loop.time() of the last bytes of a stream; engines that stream to this router only."""
        last: dict[str, float] = {}
        for connection in self.open_connections:
            url = connection.origin.url
            if connection.heard_at > last.get(url, -_NEVER):
                last[url] = connection.heard_at
        return last

    def idle(self, origin: Origin) -> EngineConnection | None:
        """The idle connection that was used last, ready for `send`; None: there is none."""
        waiting = self._idle.get(origin)
        if not waiting:
            return None
        assert self._loop is not None
        now = self._loop.time()
        while waiting:
            connection = waiting.pop()
            if connection.is_usable(now):
                connection.deadline = _NEVER
                return connection
            connection.close()
        return None

    async def connect(self, origin: Origin) -> EngineConnection:
        """A new connection, ready for `send`; raises EngineLost, "connection" or "no_descriptors"."""
        loop = self._loop = asyncio.get_running_loop()
        self._require_open(origin)
        tls = self._tls_context() if origin.tls else None
        connection = EngineConnection(self, origin, loop)
        try:
            async with asyncio.timeout(self.connect_s):
                await loop.create_connection(lambda: connection, origin.host, origin.port, ssl=tls)
        except TimeoutError as exc:
            raise EngineLost("connection", f"{origin.url}: not connected in {self.connect_s} s") from exc
        except (OSError, UnicodeError) as exc:  # ssl.SSLError is an OSError; a host name may be no name at all
            is_ours = isinstance(exc, OSError) and exc.errno in _NO_DESCRIPTORS
            raise EngineLost("no_descriptors" if is_ours else "connection", f"{origin.url}: {exc}") from exc
        except BaseException:
            connection.close()  # uvloop may have connected it already, or may be about to
            raise
        self._require_open(origin)  # closed meanwhile: this connection was among those closed
        connection.deadline = _NEVER
        return connection

    def give_up(self, url: str, may_go: Callable[[ResponseSink], bool]) -> None:
        """Lose the requests at this engine whose sinks `may_go` to another one: the engine hangs."""
        for connection in [each for each in self.open_connections if each.origin.url == url]:
            if connection._sink is not None and may_go(connection._sink):
                connection._lose("hung", "the engine hangs")

    async def close(self) -> None:
        """Close all connections: requests that wait for answers are lost."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self.open_connections):
            connection._lose("no_answer", "the router is stopping")
        self._idle.clear()
        await asyncio.sleep(0)  # the event loop calls connection_lost in its next tick

    def _require_open(self, origin: Origin) -> None:
        if self._closed:
            raise EngineLost("connection", f"{origin.url}: the pool is closed")

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _add(self, connection: EngineConnection) -> None:
        """Enter a new connection."""
        assert self._loop is not None
        if self._closed:
            connection.close()
            return
        self.open_connections.add(connection)
        # Until `connect` returns it: if its caller is cancelled at that moment, the sweep closes it.
        connection.deadline = self._loop.time() + self.connect_s
        if self._timer is None:
            self._timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep)

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection as idle, or close it where there are enough."""
        waiting = self._idle.get(connection.origin)
        if waiting is None:
            waiting = self._idle[connection.origin] = []
        if self._closed or len(waiting) >= self._max_idle:
            connection.close()
            return
        connection.deadline = connection.loop.time() + self.keepalive_s
        waiting.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Drop a closed connection."""
        self.open_connections.discard(connection)

    def _sweep(self) -> None:
        """Expire connections whose deadline has passed; by timer, while there are any."""
        assert self._loop is not None
        now = self._loop.time()
        for connection in [each for each in self.open_connections if each.is_overdue(now)]:
            connection.expire()
        for origin, waiting in list(self._idle.items()):
            kept = [each for each in waiting if each.is_usable(now)]
            if kept:
                waiting[:] = kept
            else:
                del self._idle[origin]
        self._timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep) if self.open_connections else None
