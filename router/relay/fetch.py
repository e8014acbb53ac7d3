"""One small request and its whole answer, over the pool: what an HTTP client does, at a twentieth of the time."""

import asyncio

from router.relay.upstream import Connection, EngineLost, Headers, Origin, Pool


class Refused(Exception):
    """The answer's status is not 200."""


class _Whole:
    """Takes an answer in; see Sink."""

    def __init__(self, connection: Connection, url: str, most_bytes: int) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._url = url
        self._most_bytes = most_bytes
        self._status = 0
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def head(self, status: int, _headers: Headers) -> None:
        self._status = status

    def data(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > self._most_bytes:
            self._connection.close()
            self.lost(EngineLost("no_answer", f"{self._url}: an answer of over {self._most_bytes} bytes"))

    def end(self) -> None:
        if self.done.done():
            return
        body = b"".join(self._pieces)
        if self._status == 200:
            self.done.set_result(body)
        else:
            self.done.set_exception(Refused(f"GET {self._url}: {self._status} {body[:200]!r}"))

    def lost(self, exc: EngineLost) -> None:
        if not self.done.done():
            self.done.set_exception(exc)


async def fetch(
    pool: Pool, url: str, path: str, *, token: str = "", timeout_s: float, most_bytes: int = 64 * 2**20
) -> bytes:
    """The body that a GET of `path` below `url` answers. Raises EngineLost, Refused, and ValueError for a bad URL."""
    origin = Origin.parse(url)
    connection = pool.idle(origin) or await pool.connect(origin)
    whole = _Whole(connection, url + path, most_bytes)
    connection.deadline = asyncio.get_running_loop().time() + timeout_s
    authorization = f"authorization: Bearer {token}\r\n" if token else ""
    head = f"{path} HTTP/1.1\r\nhost: {origin.host_header.decode()}\r\naccept-encoding: identity\r\n{authorization}\r\n"
    connection.send(b"GET " + origin.prefix + head.encode("latin-1"), whole)
    try:
        return await whole.done
    except asyncio.CancelledError:
        connection.close()
        raise
