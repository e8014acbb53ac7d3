"""Small HTTP requests over the engine pool, answered whole or as a stream.

They cost a twentieth of the CPU that an HTTP client takes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lorafleet.engine.agentless import StatusRefused
from lorafleet.service.http.known_fields import WIRE_HEADER
from router.http.engine_connection import EngineConnection, EngineLost, Headers, Origin
from router.http.engine_pool import EnginePool

# Unread bytes of a stream, above which reading is paused.
_MAX_UNREAD_BYTES = 1 << 20


class FetchRefused(StatusRefused):
    """An answer that is not 200, with its body. Status 0: it was 200, and its content was refused."""

    def __init__(self, message: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(message, status)
        self.body = body


@dataclass(frozen=True, slots=True)
class FetchedAnswer:
    """A whole answer, whatever its status. Headers: names in lower case, the last value of each."""

    status: int
    headers: Headers
    body: bytes


class _AnswerCollector:
    """A ResponseSink that collects a whole answer."""

    def __init__(self, connection: EngineConnection, request: str, max_bytes: int) -> None:
        self.done: asyncio.Future[FetchedAnswer] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._request = request
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: Headers = {}
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def head(self, status: int, headers: Headers) -> None:
        """Keep the status and headers."""
        self._status = status
        self._headers = headers

    def data(self, data: bytes) -> None:
        """Keep these bytes; over `max_bytes` close the connection and fail."""
        self._pieces.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > self._max_bytes:
            self._connection.close()
            self.lost(EngineLost("no_answer", f"{self._request}: an answer of over {self._max_bytes} bytes"))

    def end(self) -> None:
        """Resolve `done` with the answer."""
        if not self.done.done():
            self.done.set_result(FetchedAnswer(self._status, self._headers, b"".join(self._pieces)))

    def lost(self, exc: EngineLost) -> None:
        """Fail `done` with this error, unless it is done already."""
        if not self.done.done():
            self.done.set_exception(exc)


class FetchedStream:
    """An answer as it comes: a ResponseSink, and an iterator over the bytes of each read. Raises EngineLost."""

    def __init__(self, connection: EngineConnection, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[int] = self._loop.create_future()
        self.connection = connection
        self._idle_s = idle_s
        self.unread = bytearray()
        self._news = asyncio.Event()
        self.has_ended = False
        self._lost: EngineLost | None = None

    @property
    def status(self) -> int:
        """The status of its head."""
        return self.begun.result()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield unread bytes as they come, and resume a paused connection. Raises the EngineLost of a lost stream."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self.unread:
                data = bytes(self.unread)
                self.unread.clear()
                if not self.has_ended:  # then the connection may have another request
                    self.connection.resume()
                yield data
            if self._lost is not None:
                raise self._lost
            if self.has_ended and not self.unread:
                return

    def head(self, status: int, _headers: Headers) -> None:
        """Resolve `begun` with the status."""
        if not self.begun.done():
            self.begun.set_result(status)

    def data(self, data: bytes) -> None:
        """Keep these bytes for the iterator, and move the deadline; pause the connection where too many are unread."""
        self.connection.deadline = self._loop.time() + self._idle_s
        self.unread += data
        if len(self.unread) > _MAX_UNREAD_BYTES:
            self.connection.pause()
        self._news.set()

    def end(self) -> None:
        """Let the iterator end behind the unread bytes."""
        self.has_ended = True
        self._news.set()

    def lost(self, exc: EngineLost) -> None:
        """Have the iterator raise this error after the unread bytes, and `begun` unless it is done."""
        self._lost = exc
        if not self.begun.done():
            self.begun.set_exception(exc)
        self._news.set()

    def close(self) -> None:
        """Close the connection, unless the answer has ended."""
        self.connection.leave(self)


async def fetch(
    pool: EnginePool,
    url: str,
    path: str,
    *,
    token: str = "",
    body: bytes | None = None,
    timeout_s: float,
    max_bytes: int = 64 * 2**20,
) -> bytes:
    """Send a GET of `path` below `url`, or with `body` (JSON) a POST of it; the answer's body.

    Must be safe to repeat, see `exchange`.
    raises  EngineLost, FetchRefused, and ValueError for a bad URL
    """
    origin = Origin.parse(url)
    method = "GET" if body is None else "POST"
    request, name = _encoded_request(method, origin, path, token, body), f"{method} {url}{path}"
    answer = await exchange(pool, origin, request, name=name, timeout_s=timeout_s, max_bytes=max_bytes)
    if answer.status != 200:
        raise FetchRefused(f"{name}: {answer.status} {answer.body[:200]!r}", answer.status, answer.body)
    return answer.body


async def exchange(
    pool: EnginePool, origin: Origin, request: bytes, *, name: str, timeout_s: float | None, max_bytes: int
) -> FetchedAnswer:
    """Send these bytes of a request; its whole answer.

    Sent once more, on a new connection, where the peer closes an idle one instead of answering. So the request must be
    safe to repeat.

    name       of the request, for errors
    timeout_s  for the whole answer, once it is connected; None: no limit
    raises     EngineLost
    """

    async def send_on(connection: EngineConnection) -> FetchedAnswer:
        """Send the request on this connection, and wait for the answer; close it when cancelled."""
        collector = _AnswerCollector(connection, name, max_bytes)
        if timeout_s is not None:
            connection.deadline = asyncio.get_running_loop().time() + timeout_s
        connection.send(request, collector)
        try:
            return await collector.done
        except asyncio.CancelledError:
            connection.leave(collector)
            raise

    idle = pool.take_idle(origin)
    if idle is not None:
        try:
            return await send_on(idle)
        except EngineLost as exc:
            if exc.reason != "no_answer" or not idle.is_silent:
                raise
    return await send_on(await pool.connect(origin))


@asynccontextmanager
async def stream(
    pool: EnginePool, url: str, path: str, *, token: str = "", idle_s: float
) -> AsyncIterator[FetchedStream]:
    """Send a GET of `path` below `url`; yields the answer once its head is read. Nothing for `idle_s`: it is lost.

    The stream is closed at the end of the block.
    raises  EngineLost, and ValueError for a bad URL
    """
    origin = Origin.parse(url)
    connection = pool.take_idle(origin) or await pool.connect(origin)
    answer = FetchedStream(connection, idle_s)
    connection.deadline = asyncio.get_running_loop().time() + idle_s
    connection.send(_encoded_request("GET", origin, path, token), answer)
    try:
        await answer.begun
        yield answer
    finally:
        answer.close()


def _encoded_request(method: str, origin: Origin, path: str, token: str, body: bytes | None = None) -> bytes:
    """The bytes of one request, head and body."""
    lines = [f"{path} HTTP/1.1", f"host: {origin.host_header.decode()}", "accept-encoding: identity"]
    if token:
        lines.append(f"authorization: Bearer {token}")
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}", f"{WIRE_HEADER}: 1"]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return b"%b %b%b%b" % (method.encode(), origin.prefix, head, body or b"")
