"""Calls fail as httpx says they do."""

import asyncio
import socket
import struct
import time

import httpx
import uvloop

from lorafleet.transport import Transport

_TIMES = 50


def test_a_connection_that_is_reset_as_soon_as_it_is_open_is_an_error_of_the_network():
    assert uvloop.run(_refusals()) <= {httpx.ConnectError, httpx.ReadError}


async def _refusals() -> set[type[Exception]]:
    """What came of calls to somebody who resets each connection, in a loop that has more to do."""
    busy = asyncio.create_task(_keep_busy())
    failures: set[type[Exception]] = set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        resetting = asyncio.create_task(asyncio.to_thread(_reset, server))
        async with httpx.AsyncClient(transport=Transport()) as client:
            for _ in range(_TIMES):
                try:
                    await client.get(f"http://127.0.0.1:{server.getsockname()[1]}/")
                except Exception as exc:  # noqa: BLE001  (which one is the question)
                    failures.add(type(exc))
        await resetting
    busy.cancel()
    return failures


def _reset(server: socket.socket) -> None:
    for _ in range(_TIMES):
        connection, _address = server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def _keep_busy() -> None:
    while True:
        time.sleep(0.002)  # noqa: ASYNC251  (a turn of the loop takes longer than the peer)
        await asyncio.sleep(0)
