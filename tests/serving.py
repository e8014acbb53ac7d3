"""Real servers on loopback, in the test's own loop."""

import asyncio
import contextlib
import queue
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorafleet.http_server.serve import bind
from lorafleet.http_server.tls_handshake import TlsListener
from lorafleet.service.network.tls import Tls
from tests.patience import patience

_GRACE_S = 0.2
_ACCEPTANCE_TURNS = 4


def client_of(url: str = "", **more) -> httpx.AsyncClient:
    """A patient client of servers on loopback. It reads no certificates: that takes 30 ms for each client."""
    return httpx.AsyncClient(**{"base_url": url, "timeout": patience(20), "verify": False, "trust_env": False, **more})


@contextlib.asynccontextmanager
async def serving(
    app,
    *,
    http=None,
    port: int = 0,
    host: str = "127.0.0.1",
    sock: socket.socket | None = None,
    send_buffer_bytes: int | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[str]:
    """The app's URL while it serves; it stops without waiting for open streams.

    sock               one that listens already; None: a new one at `host` and `port`
    send_buffer_bytes  of each connection; None: the system's own size
    tls                None: plain HTTP
    """
    sock = sock or bind(host, port)
    if send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    front = None if tls is None else TlsListener(http or HttpToolsProtocol, tls)
    config = uvicorn.Config(app, http=front or http or "httptools", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    # Not `serve()`: that looks for its end ten times a second, and a test starts and stops several servers.
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([sock])
    if server.should_exit:
        raise RuntimeError("the app did not start; see its log")
    try:
        yield f"{'http' if tls is None else 'https'}://{host}:{sock.getsockname()[1]}"
    finally:
        if front is not None:
            front.close()
        await _stop(server, sock)


@contextlib.contextmanager
def serving_in_thread(make_app: Callable[[], Any]) -> Iterator[str]:
    """As `serving`, for a test without an event loop; the app is made in the thread that serves it."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving(make_app()) as url:
            told.put(url)
            await over.wait()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run)
        ended.add_done_callback(lambda _: told.put(""))  # where it did not start
        url = told.get()
        try:
            if url:
                yield url
        finally:
            if url:
                loop.call_soon_threadsafe(over.set)
            ended.result()


async def close_listeners(*listeners: asyncio.Server) -> None:
    """Close listeners after they have handed every accepted connection on.

    CPython 3.11's own loop leaves a connection open that was accepted up to two turns before the listener is closed
    (asyncio base_events.py Server._attach). Services run in uvloop, which does not.
    """
    loop = asyncio.get_running_loop()
    for listener in listeners:
        for sock in listener.sockets:
            loop.remove_reader(sock)
    for _ in range(_ACCEPTANCE_TURNS):
        await asyncio.sleep(0)
    for listener in listeners:
        listener.close()


async def _stop(server: uvicorn.Server, sock: socket.socket) -> None:
    """As `Server.shutdown`, which sleeps for a tenth of a second at least: a test stops several servers."""
    await close_listeners(*server.servers)
    sock.close()
    state = server.server_state
    try:
        async with asyncio.timeout(_GRACE_S):
            while state.connections or state.tasks:
                for connection in list(state.connections):
                    connection.shutdown()
                await asyncio.sleep(0.002)
    except TimeoutError:
        for task in state.tasks:
            task.cancel()
        for connection in state.connections:
            connection.transport.abort()
    await server.lifespan.shutdown()
