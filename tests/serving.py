"""Real servers on loopback, in the test's own loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn

from lorafleet.serve import bind


@contextlib.asynccontextmanager
async def serving(app, *, port: int = 0) -> AsyncIterator[str]:
    """The app's URL while it serves; it stops without waiting for open streams."""
    sock = bind("127.0.0.1", port)
    config = uvicorn.Config(
        app, http="httptools", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server._serve([sock]))
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
