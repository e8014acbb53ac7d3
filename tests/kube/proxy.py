"""A proxy for a Service's address: each connection goes to one of its ready pods, as with kube-proxy."""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Sequence

from tests.serving import close_listeners

_PIECE = 2**16


class ServiceProxy:
    """`targets`: returns (address, port) of ready pods for new connections; open ones stay."""

    def __init__(self, address: str, port: int, targets: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self.address, self.port = address, port
        self._targets = targets
        self._server: asyncio.Server | None = None
        self._joined: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.address, self.port))
        self._server = await asyncio.start_server(self._accepted, sock=sock)

    async def stop(self) -> None:
        if self._server is not None:
            await close_listeners(self._server)
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        try:
            await self._joined_to_a_pod(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._joined.discard(task)

    async def _joined_to_a_pod(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets = self._targets()
        if not targets:
            return  # a real one refuses the connection; here it is closed before a byte
        there = await asyncio.open_connection(*random.choice(targets))
        try:
            ways = [asyncio.create_task(_copy(reader, there[1])), asyncio.create_task(_copy(there[0], writer))]
            try:
                await asyncio.gather(*ways)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            there[1].transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
