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
from starlette.types import ASGIApp

from lorafleet.http_server.limits import ClientLimits
from lorafleet.http_server.listener import listener_for_app
from lorafleet.service import signals
from lorafleet.service.sockets import bound

log = structlog.get_logger()

# Called with uvicorn's config, server_state, app_state and _loop, by name.
ProtocolFactory = Callable[..., asyncio.Protocol]

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
    """uvicorn's settings for every service. `http` makes protocols, for a service with hot routes or own limits."""
    return uvicorn.Config(
        app,
        http=http or listener_for_app(ClientLimits(body_bytes=_MOST_BODY_BYTES)),  # type: ignore[arg-type]  # anything that makes protocols will do
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(grace_s)),
        timeout_keep_alive=75,
    )


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
