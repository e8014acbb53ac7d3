"""Start a house's server: uvloop, a bound socket before anything else, and an orderly end on SIGTERM."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp

log = structlog.get_logger()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises OSError when the port is taken. Port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind((host, port))
    sock.listen(2048)
    return sock


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    port_file: Path | None = None,
    grace_s: float = 30.0,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then `on_stop`, finish what is in flight for up to `grace_s`, and return."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(grace_s)),
        timeout_keep_alive=75,
    )
    server = _Server(config, on_stop)
    if port_file is not None:
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(sock.getsockname()[1]))
        partial.replace(port_file)
    await server.serve(sockets=[sock])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the base's signature)
        # The base remembers the signal and raises it again when all is served: an orderly end would exit with 143.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop is not None:
            self._on_stop()
        await super().shutdown(sockets)


def run(main: Callable[[], "asyncio.Future[None] | object"]) -> None:
    """Run an async main under uvloop; Ctrl-C ends it without a traceback."""
    import uvloop  # noqa: PLC0415  (only servers need it)

    try:
        uvloop.run(main())  # type: ignore[arg-type]
    except KeyboardInterrupt:
        log.info("stopped")
