"""Both ends of a wire: clients that send raw bytes to a listener, engines that answer with raw bytes."""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from dataclasses import dataclass, field

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.http_server.intake import ClientLimits, RequestIntake
from lorafleet.http_server.listener import HttpListener
from lorafleet.keys.roles import ANYONE
from lorafleet.service.network.tls import Tls, TlsFiles
from router.http.engine_connection import EngineLost
from router.http.error_shapes import error_body
from tests.patience import until, within
from tests.serving import close_listeners, serving

HOT, COLD, UPLOAD = "/hot", "/cold", "/upload"
# A path whose clients know another form of errors.
MESSAGES = "/v1/messages"
LIMIT_S = 10.0
# The system would let the buffers of a connection grow to tens of megabytes, which a slow reader's answer must exceed.
_SOCKET_BYTES = 2**18


_over_tls: list[TlsFiles] = []


@contextlib.contextmanager
def over_tls(files: TlsFiles):
    """Listeners of `listening` speak TLS during the block, and so do their clients."""
    _over_tls.append(files)
    try:
        yield
    finally:
        _over_tls.pop()


def tls_of_server() -> Tls | None:
    return Tls(_over_tls[-1]) if _over_tls else None


def tls_of_client() -> dict[str, object]:
    """Arguments of `open_connection`."""
    if not _over_tls:
        return {}
    return {"ssl": ssl.create_default_context(cafile=_over_tls[-1].ca), "server_hostname": "localhost"}


@dataclass
class Served:
    """A listener under test: what its handler and its app were asked, and what they still do."""

    port: int
    listener: HttpListener
    app: "AsgiApp"
    seen: list[tuple[str, bytes]]
    server: object = None

    async def client(self) -> "RawClient":
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return RawClient(*await asyncio.open_connection(sock=sock, **tls_of_client()))

    async def response_to(self, raw: bytes) -> bytes:
        """All bytes of the answers to these bytes, until the connection closes."""
        async with await self.client() as client:
            client.send(raw)
            return await client.rest()


@dataclass
class RawClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    was_reset: bool = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def rest(self) -> bytes:
        """All until EOF; what came before a reset is not lost to the test."""
        got = []
        async with within(LIMIT_S):
            try:
                while data := await self.reader.read(65536):
                    got.append(data)
            except ConnectionError:
                self.was_reset = True
        return b"".join(got)

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body) of the next answer, whose framing must be plain."""
        async with within(LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, headers = parsed_head(head)
            if headers.get(b"transfer-encoding") == b"chunked":
                pieces = []
                while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
                    pieces.append((await self.reader.readexactly(size + 2))[:-2])
                assert await self.reader.readexactly(2) == b"\r\n"
                return status, headers, b"".join(pieces)
            return status, headers, await self.reader.readexactly(int(headers.get(b"content-length", 0)))


def parsed_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first.startswith(b"HTTP/1.1 "), head  # nothing is left of the answer before it
    pairs = [line.split(b": ", 1) for line in lines]
    assert len({name for name, _ in pairs}) == len(pairs), head
    return int(first.split(b" ")[1]), dict(pairs)


def error_of(said: bytes) -> tuple[int, str]:
    """(status, code) of an answer that is an error in the envelope and nothing else."""
    head, _, body = said.partition(b"\r\n\r\n")
    status, headers = parsed_head(head)
    assert int(headers[b"content-length"]) == len(body), said
    assert headers[b"connection"] == (b"close, upgrade" if status == 426 else b"close")
    assert headers[b"content-type"] == b"application/json"
    error = json.loads(body)["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return status, error["code"]


class AsgiApp:
    """The ASGI app behind the listener: answers with the length of the body, and notes it."""

    def __init__(self, seen):
        self.seen = seen
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.left = asyncio.Event()
        self.read_body = True
        self.headers = []  # of the request that it answered last
        self.answer = None  # in place of the body's length: is given `send`
        self.upload = None  # the app of UPLOAD

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        if scope["path"] == UPLOAD and self.upload is not None:
            await self.upload(scope, receive, send)
            return
        body, more = b"", self.read_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append((scope["path"], body))
        self.headers = scope["headers"]
        await self.go_on.wait()
        if self.answer is not None:
            await self.answer(send)
            return
        said = str(len(body)).encode()
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})


async def length(exchange: HttpExchange) -> None:
    """A handler that answers with the length of the body."""
    exchange.respond(200, b"content-type: text/plain\r\n", str(len(exchange.body)).encode())


@contextlib.asynccontextmanager
async def listening(handler=length, *, caller_of=lambda _: ANYONE, cors_headers=None, upload_bytes=0, **limits):
    """A server with `handler` on HOT and MESSAGES for POST, GET and HEAD, and an app on every other path.

    upload_bytes  most bytes of a body for UPLOAD
    """
    seen: list[tuple[str, bytes]] = []

    async def noted(exchange: HttpExchange) -> None:
        seen.append((exchange.path, exchange.body))
        answering = handler(exchange)
        if answering is not None:
            await answering

    intake = RequestIntake(
        lambda method, path: noted if path in (HOT, MESSAGES) and method in ("POST", "GET", "HEAD") else None,
        ClientLimits(**limits),
        caller_of,
        cors_headers,
        error_body=error_body,
        upload_bytes=lambda method, path: upload_bytes if (method, path) == ("PUT", UPLOAD) else 0,
    )
    made = HttpListener(intake)
    app = AsgiApp(seen)
    unexpected: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unexpected.append(context))
    async with serving(app, http=made, send_buffer_bytes=_SOCKET_BYTES, tls=tls_of_server()) as url:
        yield Served(int(url.rsplit(":", 1)[1]), made, app, seen)
    assert intake.room.held_bytes == 0
    assert not made.connections
    assert not unexpected


def post(path: str, body: bytes, *lines: bytes) -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"Host: a", b"Content-Length: %d" % len(body), *lines))
    return b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path.encode(), head, body)


class RawEngine:
    """An engine that says raw bytes. `script` is called with each connection's streams and the number of it."""

    def __init__(self, script):
        self.script = script
        self.connections = 0
        self.open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}  # each connection and the script that serves it
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()  # a connection was seen to close

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1000)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, failure, *_):
        await close_listeners(self.server)
        for writer, script in list(self.open.items()):
            writer.transport.abort()
            if failure:  # the script may wait for what the test now never does
                script.cancel()
        await until(lambda: not self.open)
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.connections += 1
        self.open[writer] = asyncio.current_task()
        try:
            await self.script(self, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            del self.open[writer]
            self.closed.set()
            writer.transport.abort()

    async def request(self, reader) -> bytes:
        """The next request's body, empty without a length; raises IncompleteReadError when the router has closed."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length or 0))
        self.requests.append(body)
        return body


def saying(*pieces: bytes, then: str = "stay"):
    """A script: to each request these pieces, in writes of their own; then stay, close, reset or half_close."""

    async def script(engine, reader, writer):
        while True:
            await engine.request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if then == "close":
                return await finished(writer)
            if then == "half_close":
                writer.write_eof()
            if then == "reset":
                for _ in range(10):
                    await asyncio.sleep(0)  # so that the bytes are read before the reset comes
                return reset(writer)

    return script


def reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side sees a reset, not an end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def finished(writer) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class RecordingSink:
    """A sink that keeps what it hears; `after` may act on each call."""

    status: int | None = None
    headers: list = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False
    failure: EngineLost | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[str] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def head(self, status, headers):
        assert not self.calls
        self.calls.append("head")
        self.status, self.headers = status, headers
        self.news.set()

    def data(self, data):
        assert self.calls[0] == "head"
        assert not self.done.is_set()
        self.calls.append("data")
        self.pieces.append(data)
        self.news.set()

    def end(self):
        assert not self.done.is_set()
        self.ended = True
        self.done.set()

    def lost(self, exc):
        assert not self.done.is_set()
        self.failure = exc
        self.done.set()
