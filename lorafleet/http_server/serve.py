"""Start a service's HTTP server: uvloop, a bound socket before anything else, and an orderly end on SIGTERM."""

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
from starlette.types import ASGIApp

from lorafleet.http_server.descriptors import descriptor_limit, listen_backlog
from lorafleet.http_server.intake import ClientLimits, UploadBytes
from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.tls_handshake import TlsListener
from lorafleet.service.network.sockets import bind_socket
from lorafleet.service.network.tls import Tls
from lorafleet.service.process import stop_signals
from lorafleet.telemetry.request_log import RequestLog

log = structlog.get_logger()

# Makes the protocol of a connection. Called with uvicorn's config, server_state, app_state and _loop, by name.
ProtocolFactory = Callable[..., asyncio.Protocol]

_SIGNAL_CHECK_S = 0.1
# A router's report with 100,000 (worker, adapter) pairs is 10 MB. 70 MB of JSON keep a process busy for 15 s, longer
# than a lease lasts.
DEFAULT_LIMITS = ClientLimits(body_bytes=16 * 2**20)


class PortInUse(OSError):
    """Another process listens on the port; the message says what to do."""


class PortFileError(OSError):
    """The port file cannot be written; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises OSError, whose message says what to do."""
    sock = bind_only(host, port)
    try:
        sock.listen(listen_backlog(descriptor_limit()))
    except OSError as exc:  # two sockets may be bound to one port, but only one of them may listen
        sock.close()
        raise _port_error(host, port, exc) from exc
    return sock


def bind_only(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that has the port and does not listen yet. Raises OSError, whose message says what to do.

    shared  other sockets with this flag may have the port, too
    """
    try:
        return bind_socket(host, port, shared=shared)
    except OSError as exc:
        raise _port_error(host, port, exc) from exc


def _port_error(host: str, port: int, exc: OSError) -> OSError:
    """The error for a port that cannot be bound; its message says what to do."""
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
    requests: RequestLog | None = None,
    upload_bytes: UploadBytes = lambda _method, _path: 0,
    tls: Tls | None = None,
) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT; then call `on_stop`, finish requests for up to `grace_s`, and return.

    Writes the port file first. Raises PortFileError.

    drain_s   seconds to serve on after SIGTERM: load balancers learn of it late
    requests  logs the requests that the app never gets; with `http` its listener does
    upload_bytes  as in HttpListener; with `http` its listener has it
    tls       speak TLS, where it has a certificate
    """
    http = http or listener_for_app(DEFAULT_LIMITS, requests, upload_bytes)
    handshakes = TlsListener(http, tls) if tls is not None and tls.files.cert is not None else None
    config = uvicorn_config(app, grace_s=grace_s, http=handshakes or http)
    server = DrainingServer(config, on_stop, drain_s, handshakes)
    if port_file is not None:
        write_port_file(port_file, sock.getsockname()[1])
    if signal.SIGHUP in stop_signals():  # uvicorn itself handles the others
        signal.signal(signal.SIGHUP, server.handle_exit)
    await server.serve(sockets=[sock])


def write_port_file(port_file: Path, port: int) -> None:
    """Write the port into a file, whole or not at all, for the process that started us. Raises PortFileError."""
    partial = port_file.with_suffix(".partial")
    try:
        partial.write_text(str(port))
        partial.replace(port_file)
    except OSError as exc:
        raise PortFileError(f"port file {port_file}: {exc.strerror}; name one that can be written") from exc


def uvicorn_config(app: ASGIApp, *, grace_s: float, http: ProtocolFactory | None = None) -> uvicorn.Config:
    """uvicorn's settings for every service. `http` makes protocols, for a service with hot routes or own limits."""
    return uvicorn.Config(
        app,
        http=http or listener_for_app(DEFAULT_LIMITS),  # type: ignore[arg-type]  # uvicorn calls it as it would a class
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(grace_s)),
        timeout_keep_alive=75,
        backlog=listen_backlog(descriptor_limit()),
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that serves on for a while after SIGTERM, and then ends in order."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_stop: Callable[[], None] | None,
        drain_s: float = 0.0,
        handshakes: TlsListener | None = None,
    ) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._drain_s = drain_s
        self._handshakes = handshakes

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the base's signature)
        """Note a signal to stop. The second one forces the exit; SIGINT skips the time to serve on."""
        # The base class keeps the signal and raises it again at the end: an orderly end would exit with 143.
        self.force_exit = self.should_exit
        self.should_exit = True
        if sig == signal.SIGINT:
            self._drain_s = 0.0  # Ctrl-C at a terminal: there is no load balancer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `on_stop`, serve on for `drain_s`, and shut down."""
        if self._on_stop is not None:
            self._on_stop()
        until = time.monotonic() + self._drain_s
        # A second signal ends the wait. It sets a flag, which uvicorn itself checks as often.
        while not self.force_exit and self._drain_s and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(min(_SIGNAL_CHECK_S, self._drain_s))
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit.

    Shells and systemd start programs with 1,024, because of programs that call select(). Each request of a router
    takes two. Engines inherit the limit, and vLLM 0.32 raises it itself (utils/system_utils.py set_ulimit).
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems say infinite and mean less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(main: Callable[[], "asyncio.Future[None] | object"]) -> None:
    """Raise the limit of open files, and run an async main under uvloop. Ctrl-C ends it with a log line only."""
    import uvloop  # noqa: PLC0415  (only servers need it)

    _raise_descriptor_limit()
    try:
        uvloop.run(main())  # type: ignore[arg-type]
    except KeyboardInterrupt:
        log.info("stopped")
