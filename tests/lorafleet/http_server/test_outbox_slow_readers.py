"""Clients that read slowly or not at all: work that pauses, answers that come whole, connections that are closed."""

import asyncio

import pytest

from lorafleet.http_server.batches import leave_batch
from lorafleet.http_server.intake import ClientLimits
from tests.lorafleet.http_server.handlers import LARGE, Calls, Work, large_of, look_later, say_last
from tests.patience import patience, until
from tests.wires import COLD, HOT, listening, post


async def test_a_slow_reader_pauses_the_work_and_little_is_held_for_it():
    paused, events = asyncio.Event(), []
    may_send = asyncio.Event()
    may_send.set()
    piece, total, most = b"x" * 50_000, 0, 0
    whole = LARGE // len(piece) * len(piece)

    async def fast(exchange):
        nonlocal total, most

        def on_pause():
            events.append("pause")
            may_send.clear()
            paused.set()

        def on_resume():
            events.append("resume")
            may_send.set()

        await leave_batch()
        exchange.on_pause, exchange.on_resume = on_pause, on_resume
        exchange.begin(200, b"")
        (connection,) = served.listener.connections
        for _ in range(whole // len(piece)):
            await may_send.wait()
            exchange.send(piece)
            total += len(piece)
            most = max(most, connection.transport.get_write_buffer_size())
            await asyncio.sleep(0)
        exchange.finish()

    async with listening(fast) as served:
        client = await served.client()  # whose reader stops at 128 KiB until it is asked
        client.send(post(HOT, b""))
        await asyncio.wait_for(paused.wait(), patience(5))
        for _ in range(100):
            await asyncio.sleep(0)
        assert total < whole
        assert len((await client.answer())[2]) == whole
        await client.__aexit__()
    assert most < 2**16 + 2 * len(piece)
    assert events[:2] == ["pause", "resume"]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_stalled_reader_is_closed_and_its_work_is_cancelled(whole):
    work = Work()

    async def much(exchange):
        if whole:
            exchange.respond(200, b"", b"x" * LARGE)
            return
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await work(exchange)

    async with listening(much, send_stall_s=0.2, idle_s=0.2) as served, await served.client() as client:
        client.send(post(HOT, b"stop"))
        await until(lambda: served.seen)
        await until(lambda: not served.listener.connections)
        assert work.cancelled == work.begun == (0 if whole else 1)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_slow_reader_is_not_closed_while_it_reads(whole):
    work = Work(say_last)

    async def much(exchange):
        if whole:
            exchange.respond(200, b"", b"x" * LARGE + b"last")
            return
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await work(exchange)

    async with listening(much) as served, await served.client() as client:
        client.send(post(HOT, b"read", b"Connection: close"))
        await until(lambda: any(each.is_write_paused for each in served.listener.connections))
        (connection,) = served.listener.connections
        checks = 0
        while connection.is_write_paused:
            assert await client.reader.read(2**16)
            if connection.transport.get_write_buffer_size() < connection.unsent_bytes:
                connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)
                checks += 1
        assert checks > 5
        work.go_on.set()
        assert (await client.rest()).rstrip(b"\r\n0").endswith(b"last")


async def test_a_request_behind_a_large_unread_answer_begins_paused():
    calls = Calls()
    async with listening(calls) as served, await served.client() as client:
        client.send(post(HOT, b"large"))
        await until(lambda: calls.exchanges)
        (connection,) = served.listener.connections
        calls.answer(0, b"x" * LARGE)
        connection.data_received(post(HOT, b"next"))
        await until(lambda: len(calls.exchanges) == 2 and calls.exchanges[1].is_paused)


async def test_a_client_that_asks_more_and_reads_nothing_is_closed():
    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: any(each.is_write_paused for each in served.listener.connections))
        client.send(post(HOT, b"next"))
        await until(lambda: served.listener.intake.room.held_bytes == 4)
        (connection,) = served.listener.connections
        look_later(connection)
        await until(lambda: not served.listener.connections)
        assert served.seen == [(HOT, b"abc")]


async def test_a_client_that_reads_nothing_is_closed_though_more_is_sent():
    work = Work()

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await work(exchange)

    async with listening(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun and work.exchanges[0].is_paused)
        (connection,) = served.listener.connections
        work.exchanges[0].send(b"x" * LARGE)
        await until(lambda: connection.transport.get_write_buffer_size() > LARGE)
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)
        await until(lambda: not served.listener.connections)
        await until(lambda: work.cancelled)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_reads_its_last_answer_again_is_not_closed(version):
    work, paused, resumed = Work(say_last), asyncio.Event(), asyncio.Event()

    async def stream(exchange):
        exchange.on_pause, exchange.on_resume = paused.set, resumed.set
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await leave_batch()
        await resumed.wait()
        await work(exchange)

    async with listening(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close").replace(b"1.1", version))
        await asyncio.wait_for(paused.wait(), patience(5))
        reading = asyncio.create_task(client.reader.read())
        await until(lambda: work.begun)
        look_later(work.exchanges[0].connection)
        work.go_on.set()
        assert b"last" in (await reading)[-20:]


@pytest.mark.parametrize("more", [b"", b"more"])
async def test_a_reader_is_not_closed_for_bytes_added_to_its_last_answer(more):
    work = Work(say_last)

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        work.go_on.clear()
        await work(exchange)

    async def add(exchange):
        exchange.send(b"x" * LARGE)
        exchange.finish()

    work.answer = add
    async with listening(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun and work.exchanges[0].is_paused)
        connection = work.exchanges[0].connection
        client.send(more)
        await until(lambda: connection.drained_bytes == len(more))
        work.go_on.set()
        await until(lambda: work.exchanges[0].is_over)
        unsent = connection.transport.get_write_buffer_size()
        await client.reader.readexactly(LARGE // 4)
        await until(lambda: connection.transport.get_write_buffer_size() < unsent)
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)
        assert len(await client.reader.read()) > LARGE


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("line", [b"Connection: close", b"Connection: keep-alive"])
async def test_a_client_with_an_unread_answer_is_closed_though_nothing_was_paused(line, path):
    def is_closed():
        # Kept, it is idle first.
        more_s = ClientLimits().idle_s if line == b"Connection: keep-alive" else 1
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + more_s)
        return not served.listener.connections

    async def large(exchange):
        exchange.connection.transport.set_write_buffer_limits(2 * LARGE)
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large) as served, await served.client() as client:
        served.app.answer = large_of(served)
        client.send(post(path, b"abc", line))
        await until(lambda: served.seen)
        (connection,) = served.listener.connections
        await until(connection.transport.get_write_buffer_size)
        await until(is_closed)
        assert len(await client.rest()) < LARGE


async def test_a_client_that_reads_part_of_its_answer_and_stops_is_closed():
    def is_closed():
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)
        return not served.listener.connections

    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: any(each.is_write_paused for each in served.listener.connections))
        (connection,) = served.listener.connections
        unsent = connection.transport.get_write_buffer_size()
        await client.reader.readexactly(LARGE // 4)
        await until(lambda: connection.transport.get_write_buffer_size() < unsent)
        assert not is_closed()
        await until(is_closed)


async def test_a_half_closed_client_that_reads_nothing_is_closed():
    async def large(exchange):
        exchange.connection.transport.set_write_buffer_limits(2 * LARGE)
        exchange.respond(200, b"", b"x" * LARGE)

    def is_closed():
        connection.check_deadlines(connection.loop.time() + ClientLimits().send_stall_s + 1)
        return not served.listener.connections

    async with listening(large, idle_s=10**6) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: served.seen)
        (connection,) = served.listener.connections
        await until(connection.transport.get_write_buffer_size)
        client.writer.write_eof()
        await until(is_closed)
        assert len(await client.rest()) < LARGE


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_half_closed_client_may_still_read_its_whole_answer(path):
    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large) as served, await served.client() as client:
        served.app.answer = large_of(served)
        client.send(post(path, b"abc"))
        await until(lambda: served.seen)
        (connection,) = served.listener.connections
        await until(connection.transport.get_write_buffer_size)
        client.writer.write_eof()
        await until(connection.transport.is_closing)
        assert len((await client.answer())[2]) == LARGE
        assert await client.rest() == b""


async def test_the_app_waits_for_a_slow_reader_and_then_goes_on():
    pieces, sent = [b"x" * 2**16] * 64, 0

    async def stream(send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (64 << 16))]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b""})

    async with listening() as served, await served.client() as client:
        served.app.answer = stream
        client.send(post(COLD, b"abc"))
        await until(lambda: sent and any(connection.is_write_paused for connection in served.listener.connections))
        assert sent < 64
        assert (await client.answer())[2] == b"".join(pieces)


async def test_a_client_that_stops_inside_its_last_answer_is_closed():
    async def large(exchange) -> None:
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large, send_stall_s=0.3) as served, await served.client() as client:
        await until(lambda: served.listener.connections)
        (connection,) = served.listener.connections
        connection.transport.set_write_buffer_limits(LARGE // 2, LARGE // 2)
        client.send(post(HOT, b"", b"Connection: close"))
        await until(lambda: connection.is_write_paused)
        while connection.is_write_paused:
            await client.reader.read(65536)
        await until(lambda: not served.listener.connections)


async def test_an_answer_comes_whole_though_its_handler_ignores_pauses():
    exchanges, go_on = [], asyncio.Event()

    async def pieces(exchange) -> None:
        exchanges.append(exchange)
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await leave_batch()
        await go_on.wait()
        exchange.finish(b"y")

    async with listening(pieces) as served, await served.client() as client:
        client.send(post(HOT, b""))
        await until(lambda: exchanges and exchanges[0].is_paused)
        reading = asyncio.create_task(client.answer())
        await until(lambda: not exchanges[0].is_paused)
        go_on.set()
        assert (await reading)[2] == b"x" * LARGE + b"y"


async def test_a_client_watched_while_idle_is_not_closed_at_its_next_request():
    work = Work(say_last)

    async def large_then_slow(exchange):
        if work.exchanges:
            exchange.begin(200, b"")
            exchange.send(b"first")
            await work(exchange)
            return
        work.exchanges.append(exchange)
        exchange.connection.transport.set_write_buffer_limits(2 * LARGE)  # never paused
        exchange.respond(200, b"", b"x" * LARGE)

    async with listening(large_then_slow, idle_s=10.0) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.exchanges)
        (connection,) = served.listener.connections
        await until(connection.transport.get_write_buffer_size)
        for reads in (False, True):
            connection.check_deadlines(connection.loop.time() + 11)
            if not reads:
                await client.answer()
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        look_later(connection)
        work.go_on.set()
        assert (await client.answer())[2] == b"firstlast"
