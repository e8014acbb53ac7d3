"""What TLS changes for a connection: unsent bytes are in two buffers, and its end waits for the other side's."""

import asyncio
import os
import socket

import pytest

from lorafleet.http_server.batches import leave_batch
from lorafleet.http_server.connection import HIGH_WATER_BYTES
from lorafleet.http_server.framing import RefusedMessage
from lorafleet.http_server.intake import ClientLimits
from tests.lorafleet.http_server.handlers import LARGE, Work
from tests.patience import until
from tests.wires import HOT, error_of, length, listening, over_tls, post


@pytest.fixture(autouse=True)
def speaks_tls(tls_files):
    with over_tls(tls_files):
        yield


def large(exchange):
    exchange.respond(200, b"", b"x" * LARGE + b"last")


class LargePiece(Work):
    """A handler that sends a large piece, and waits."""

    async def __call__(self, exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await super().__call__(exchange)


def unsent_of(connection) -> int:
    return connection.socket_transport.get_write_buffer_size()


def look_past(connection, seconds: float) -> None:
    connection.check_deadlines(connection.loop.time() + seconds + 1)


async def test_little_is_held_for_a_slow_reader_and_its_bytes_come_in_order():
    pieces = [b"%d," % number * 8_000 for number in range(200)]
    may_send, most, pauses = asyncio.Event(), 0, 0
    may_send.set()

    def on_pause():
        nonlocal pauses
        pauses += 1
        may_send.clear()

    async def stream(exchange):
        nonlocal most
        await leave_batch()
        exchange.on_pause, exchange.on_resume = on_pause, may_send.set
        exchange.begin(200, b"")
        (connection,) = served.listener.connections
        for piece in pieces:
            await may_send.wait()
            exchange.send(piece)
            await asyncio.sleep(0)
            most = max(most, connection.transport.get_write_buffer_size() + unsent_of(connection))
        exchange.finish()

    async with listening(stream) as served, await served.client() as client:
        client.send(post(HOT, b""))
        await until(lambda: pauses)
        assert (await client.answer())[2] == b"".join(pieces)
    assert most < 2 * HIGH_WATER_BYTES + 3 * len(pieces[-1])


@pytest.mark.parametrize("line", [b"Connection: close", b"Connection: keep-alive"])
async def test_a_slow_reader_gets_its_whole_answer_however_long_it_takes(line):
    stall_s, idle_s = ClientLimits().send_stall_s, ClientLimits().idle_s
    async with listening(large) as served, await served.client() as client:
        client.send(post(HOT, b"abc", line))
        await until(lambda: any(unsent_of(each) for each in served.listener.connections))
        (connection,) = served.listener.connections
        connection.check_deadlines(connection.loop.time())
        read, checks = b"", 0
        while unsent_of(connection):
            before = unsent_of(connection)
            read += await client.reader.read(2**16)
            if unsent_of(connection) < before:
                look_past(connection, idle_s if not checks and b"keep" in line else stall_s)
                checks += 1
        assert checks > 5
        while not read.endswith(b"last"):
            read += await client.reader.read(2**16)
        assert read.partition(b"\r\n\r\n")[2] == b"x" * LARGE + b"last"


async def test_a_client_that_reads_nothing_of_a_large_piece_is_closed_and_its_work_is_cancelled():
    work = LargePiece()
    async with listening(work, send_stall_s=0.2) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        await until(lambda: not served.listener.connections)
        assert work.cancelled == 1


async def test_work_ends_for_a_client_that_has_sent_fin_and_reads_nothing():
    work = LargePiece()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        # As a client whose process has ended: without the end of TLS.
        with socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_WR)
        await until(lambda: work.cancelled)
        await until(lambda: not served.listener.connections)


async def test_an_idle_connection_closes_at_once_though_its_client_reads_nothing():
    async with listening() as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        assert (await client.answer())[2] == b"3"
        client.writer.transport.pause_reading()
        (connection,) = served.listener.connections
        connection.shutdown()
        await until(lambda: not served.listener.connections, within_s=5.0)
        client.writer.transport.resume_reading()
        assert await client.rest() == b""


async def test_a_connection_that_makes_room_frees_its_descriptor_at_once():
    async with listening() as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await client.answer()
        client.writer.transport.pause_reading()
        (connection,) = served.listener.connections
        sock = connection.transport.get_extra_info("socket")
        connection.make_room(RefusedMessage(503, "no_descriptors", "no room"))
        await until(lambda: sock.fileno() == -1, within_s=5.0)


async def test_a_refusal_arrives_though_the_client_sends_on():
    async with listening(length, body_bytes=1000) as served, await served.client() as client:
        client.send(post(HOT, b"x" * 1000).replace(b"1000", b"900000"))
        await until(lambda: served.listener.intake.refusals)
        for _ in range(8):
            client.send(b"x" * 50_000)
            await asyncio.sleep(0)
        assert error_of(await client.rest()) == (413, "body_too_large")
        await until(lambda: not served.listener.connections, within_s=10.0)
