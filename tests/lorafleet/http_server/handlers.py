"""Handlers of a listener under test, and what tests of slow readers do to its connections."""

import asyncio
import contextlib

from lorafleet.http_server.batches import Signal, leave_batch
from lorafleet.http_server.intake import ClientLimits
from tests.patience import until
from tests.wires import HOT, length, listening, post

# More than the sockets between a client that does not read and the listener hold.
LARGE = 4_000_000
CHUNKED = b"Transfer-Encoding: chunked"


class Work:
    """A handler that waits until the test sets `go_on`, and counts requests that were cancelled."""

    def __init__(self, answer=length):
        self.answer = answer
        self.begun = 0
        self.cancelled = 0
        self.go_on = asyncio.Event()
        self.exchanges = []

    async def __call__(self, exchange):
        self.begun += 1
        self.exchanges.append(exchange)
        try:
            await leave_batch()
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await self.answer(exchange)


class Calls:
    """A handler that waits, without a task, until the test calls `answer`; `gone`: requests that were ended."""

    def __init__(self):
        self.exchanges = []
        self.gone = 0
        self._signals = []

    async def __call__(self, exchange):
        self.exchanges.append(exchange)
        answered = Signal()
        self._signals.append(answered)
        try:
            await answered
        except GeneratorExit:
            self.gone += 1
            exchange.respond(503, b"", b"stopping")
            raise

    def answer(self, number, body=b""):
        """Answer one of the requests, by its place in `exchanges`."""
        self.exchanges[number].respond(200, b"", body)
        self._signals[number].set()


async def say_last(exchange) -> None:
    exchange.finish(b"last")


async def failing(_exchange) -> None:
    """A handler that waits, and fails when it is ended."""
    try:
        await Signal()
    finally:
        raise RuntimeError("a defect")


def large_of(served):
    """An app's answer that is in the transport as a whole, and pauses nothing."""

    async def answer(send) -> None:
        (connection,) = served.listener.connections
        connection.transport.set_write_buffer_limits(2 * LARGE)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": b"x" * LARGE})

    return answer


def look_later(connection) -> None:
    """The watch over clients that read nothing, long from now: one look to note what is unsent, and one to compare."""
    for _ in range(2):
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)


@contextlib.asynccontextmanager
async def queued_behind_a_large_answer():
    """(server, client, connection, calls) while one of two pipelined requests waits until a large answer is read."""
    calls = Calls()
    async with listening(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges and served.listener.intake.room.held_bytes == 6)
        calls.answer(0, b"x" * LARGE)
        (connection,) = served.listener.connections
        assert (connection.current, len(connection.queue)) == (None, 1)
        yield served, client, connection, calls


async def assert_both_are_answered(client, calls):
    assert len((await client.answer())[2]) == LARGE
    await until(lambda: len(calls.exchanges) == 2)
    calls.answer(1, b"next")
    assert (await client.answer())[2] == b"next"
