"""Start a house's server: uvloop, a bound socket before anything else, and an orderly end on SIGTERM."""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorafleet import signals
from lorafleet.http import envelope
from lorafleet.sockets import bound

log = structlog.get_logger()

# Called with uvicorn's config, server_state, app_state and _loop, by name.
ProtocolFactory = Callable[..., asyncio.Protocol]

# Request line and headers together; nginx and Apache take about as much.
_MOST_HEAD_BYTES = 64 * 2**10
_LOOK_EVERY_S = 0.1
# A router's report with a hundred thousand (worker, adapter) is 10 MB, and 70 MB of JSON kept a process busy for 15 s:
# longer than a lease lasts.
_MOST_BODY_BYTES = 16 * 2**20


class PortInUse(OSError):
    """Somebody else listens there; the message says what to do."""


class PortNotTold(OSError):
    """The port file cannot be written; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises OSError, which says what to do, when it cannot be had."""
    sock = claim(host, port)
    try:
        sock.listen(2048)
    except OSError as exc:  # bound beside somebody else's: only one of the two may listen
        sock.close()
        raise _cannot_have(host, port, exc) from exc
    return sock


def claim(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that has the port and does not listen yet. Raises OSError, which says what to do.

    shared  with all others on the port that ask for the same
    """
    try:
        return bound(host, port, shared=shared)
    except OSError as exc:
        raise _cannot_have(host, port, exc) from exc


def _cannot_have(host: str, port: int, exc: OSError) -> OSError:
    if exc.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} of {host} is in use by another process: choose another with --port (0 picks a free one)"
        )
    return OSError(f"port {port} of {host} cannot be had ({exc.strerror}): choose others with --host and --port")


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    http: ProtocolFactory | None = None,
    port_file: Path | None = None,
    drain_s: float = 0.0,
    grace_s: float = 30.0,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT; then `on_stop`, finish what is in flight for up to `grace_s`, and return.

    drain_s  after SIGTERM go on serving for so long first: load balancers hear of it seconds later
    """
    server = _Server(configured(app, grace_s=grace_s, http=http), on_stop, drain_s)
    if port_file is not None:
        tell_port(port_file, sock.getsockname()[1])
    if signal.SIGHUP in signals.stopping():  # uvicorn itself heeds the others alone
        signal.signal(signal.SIGHUP, server.handle_exit)
    await server.serve(sockets=[sock])


def tell_port(port_file: Path, port: int) -> None:
    """Put the port into a file, whole or not at all, for whoever started us; raises PortNotTold."""
    partial = port_file.with_suffix(".partial")
    try:
        partial.write_text(str(port))
        partial.replace(port_file)
    except OSError as exc:
        raise PortNotTold(f"port file {port_file}: {exc.strerror}; name one that can be written") from exc


def configured(app: ASGIApp, *, grace_s: float, http: ProtocolFactory | None = None) -> uvicorn.Config:
    """How every house serves; `http` makes its protocols, where it has some of its own."""
    return uvicorn.Config(
        app if http else _BoundedBody(app),
        http=http or _BoundedHead,  # type: ignore[arg-type]  # anything that makes protocols will do
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(grace_s)),
        timeout_keep_alive=75,
    )


class _BoundedHead(HttpToolsProtocol):
    """uvicorn's own protocol, with a bound on what it keeps of a request before anybody is asked for a key.

    Source: httptools 0.9 has no limit of its own; 100 MB of headers were taken (seen running).
    """

    _is_head = False
    _head_bytes = 0
    _messages = 0

    def data_received(self, data: bytes) -> None:
        before = self._messages
        super().data_received(data)
        # What a head shares with the end of another message is one read at most, and is not counted.
        if self._is_head and self._messages == before:
            self._count(len(data))

    def on_message_begin(self) -> None:
        self._is_head, self._head_bytes = True, 0
        self._messages += 1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if not self._is_head:  # a trailer
            self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._is_head = False
        super().on_headers_complete()

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is larger than {_MOST_HEAD_BYTES} bytes.")


class _BoundedBody:
    """The app, with a bound on what it is given of a body: FastAPI takes all of it before anybody is asked for a key.

    Beyond it the caller has its answer, and the app a caller that has left.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        taken = int(declared) if declared.isdigit() and int(declared) > _MOST_BODY_BYTES else 0
        is_answered = is_refused = False

        async def bounded_receive() -> Message:
            nonlocal taken, is_refused
            if taken <= _MOST_BODY_BYTES:
                message = await receive()
                taken += len(message.get("body", b""))
                if taken <= _MOST_BODY_BYTES:
                    return message
            if not is_answered:
                is_refused = True
                why = f"the request's body is larger than {_MOST_BODY_BYTES} bytes; send what it holds in several"
                await JSONResponse(envelope(413, "body_too_large", why), 413)(scope, receive, send)
            return {"type": "http.disconnect"}

        async def bounded_send(message: Message) -> None:
            nonlocal is_answered
            if not is_refused:
                is_answered = True
                await send(message)

        await self._app(scope, bounded_receive, bounded_send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None] | None, drain_s: float = 0.0) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the base's signature)
        # The base remembers the signal and raises it again when all is served: an orderly end would exit with 143.
        self.force_exit = self.should_exit
        self.should_exit = True
        if sig == signal.SIGINT:
            self._drain_s = 0.0  # a person at a terminal, behind no load balancer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop is not None:
            self._on_stop()
        until = time.monotonic() + self._drain_s
        # A second signal ends the wait: it only sets a flag, which uvicorn itself looks at as often.
        while not self.force_exit and self._drain_s and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(min(_LOOK_EVERY_S, self._drain_s))
        await super().shutdown(sockets)


def _allow_descriptors() -> None:
    """Take all file descriptors that we may have.

    Shells and systemd start programs with 1,024, for the sake of those that call select(): of a router's requests each
    takes two. Engines inherit it, and vLLM 0.32 raises it itself (utils/system_utils.py set_ulimit).
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems say infinite and mean less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(main: Callable[[], "asyncio.Future[None] | object"]) -> None:
    """Run an async main under uvloop, with as many connections as may be; Ctrl-C ends it without a traceback."""
    import uvloop  # noqa: PLC0415  (only servers need it)

    _allow_descriptors()
    try:
        uvloop.run(main())  # type: ignore[arg-type]
    except KeyboardInterrupt:
        log.info("stopped")
