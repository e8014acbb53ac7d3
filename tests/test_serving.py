"""The tests' own servers leave nothing open."""

import asyncio
import contextlib
import socket

import pytest

from tests.patience import within
from tests.serving import serving


async def no_app(scope, receive, send):
    """An app without routes."""
    assert scope["type"] == "lifespan"
    for _ in range(2):
        await send({"type": (await receive())["type"] + ".complete"})


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_accepted_as_the_server_stops_is_closed(turns: int) -> None:
    with socket.socket() as client:
        client.setblocking(False)
        async with serving(no_app) as url:
            with contextlib.suppress(BlockingIOError):
                client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            for _ in range(turns):
                await asyncio.sleep(0)
        async with within(5):
            with contextlib.suppress(ConnectionResetError):  # not accepted any more
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
