"""Real servers on loopback, in the test's own loop."""

import contextlib
from collections.abc import AsyncIterator

import uvicorn

from lorafleet.serve import bind


@contextlib.asynccontextmanager
async def serving(app, *, http=None, port: int = 0) -> AsyncIterator[str]:
    """The app's URL while it serves; it stops without waiting for open streams."""
    sock = bind("127.0.0.1", port)
    config = uvicorn.Config(
        app, http=http or "httptools", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    # Not `serve()`: that looks for its end ten times a second, and a test starts and stops several servers.
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([sock])
    if server.should_exit:
        raise RuntimeError("the app did not start; see its log")
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await server.shutdown([sock])
