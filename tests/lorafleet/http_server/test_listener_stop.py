"""How a listener ends: a stop ends the work at once, a shutdown lets requests in flight finish."""

import asyncio
import contextlib
import json

import pytest
from structlog.testing import capture_logs

from lorafleet.http_server import serve
from lorafleet.http_server.batches import leave_batch
from lorafleet.http_server.intake import ClientLimits, RequestIntake
from lorafleet.http_server.listener import HttpListener
from tests.lorafleet.http_server.handlers import (
    LARGE,
    Calls,
    Work,
    assert_both_are_answered,
    failing,
    large_of,
    queued_behind_a_large_answer,
    say_last,
)
from tests.patience import patience, until
from tests.wires import COLD, HOT, MESSAGES, AsgiApp, RawClient, error_of, length, listening, post


async def test_a_failing_on_gone_does_not_keep_a_stop_from_the_others():
    async def handler(exchange):
        await (failing(exchange) if exchange.body == b"fail" else calls(exchange))

    calls = Calls()
    async with listening(handler) as served, contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(capture_logs())
        clients = [await stack.enter_async_context(await served.client()) for _ in range(5)]
        for client in clients[1:]:
            client.send(post(HOT, b"fail"))
        clients[0].send(post(HOT, b"abc"))
        await until(lambda: len(served.seen) == 5)
        served.listener.stop()
        assert [(await client.answer())[0] for client in clients] == [503, 500, 500, 500, 500]
    assert [each["event"] for each in logs] == ["unexpected error"] * 4


async def test_a_stop_ends_requests_without_a_task():
    calls = Calls()
    async with listening(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: calls.exchanges)
        served.listener.stop()
        assert (await client.answer())[0::2] == (503, b"stopping")
    assert calls.gone == 1


async def test_a_stop_ends_work_though_idle_clients_are_connected():
    calls = Calls()
    async with listening(calls) as served, contextlib.AsyncExitStack() as idle, await served.client() as client:
        for _ in range(4):
            await idle.enter_async_context(await served.client())
        client.send(post(HOT, b"abc"))
        await until(lambda: calls.exchanges and len(served.listener.connections) == 5)
        served.listener.stop()
        assert (await client.answer())[0::2] == (503, b"stopping")
    assert calls.gone == 1


async def test_a_stop_drops_queued_requests_without_an_answer():
    calls = Calls()
    async with listening(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"def"))
        await until(lambda: calls.exchanges and served.listener.intake.room.held_bytes == 6)
        (connection,) = served.listener.connections
        connection.shutdown()
        served.listener.stop()
        status, headers, _ = await client.answer()
        assert (status, headers[b"connection"]) == (503, b"close")
        assert await client.rest() == b""  # never begun, and no word of it: it may be sent again
        assert served.listener.intake.room.held_bytes == 0
    assert len(calls.exchanges) == 1


@pytest.mark.parametrize(("path", "word"), [(HOT, "service_unavailable_error"), (MESSAGES, "overloaded_error")])
async def test_a_stop_answers_503_to_a_request_not_yet_begun(path, word):
    calls = Calls()
    async with listening(calls) as served, await served.client() as client:
        await until(lambda: served.listener.connections)
        (connection,) = served.listener.connections
        connection.data_received(post(path, b"abc"))
        served.listener.stop()
        status, headers, body = await client.answer()
        assert (status, b'"stopping"' in body, headers[b"retry-after"]) == (503, True, b"1")
        assert json.loads(body)["error"]["type"] == word
        assert served.listener.intake.room.held_bytes == 0
    assert not calls.exchanges


async def test_a_stop_keeps_a_task_from_beginning():
    begun = []

    async def handler(exchange):
        asyncio.get_running_loop().call_soon(served.listener.stop)  # before the task's first step
        try:
            await leave_batch()
            begun.append(exchange)
        except asyncio.CancelledError:
            exchange.respond(503, b"", b"stopping")
            raise

    with capture_logs() as logs:
        async with listening(handler) as served, await served.client() as client:
            await until(lambda: served.listener.connections)
            (connection,) = served.listener.connections
            client.send(post(HOT, b"abc"))
            assert (await client.answer())[0::2] == (503, b"stopping")
            await until(lambda: not connection.tasks)
    assert not begun
    assert not logs


@contextlib.asynccontextmanager
async def ending(handler):
    """A server in the hands of uvicorn, and what ends it as SIGTERM does."""
    sock = serve.bind("127.0.0.1", 0)
    made = HttpListener(RequestIntake(lambda method, path: handler if path == HOT else None, ClientLimits()))
    app = AsgiApp([])
    server = serve.DrainingServer(serve.uvicorn_config(app, grace_s=5.0, http=made), None)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    clients = []

    async def client() -> RawClient:
        clients.append(RawClient(*await asyncio.open_connection("127.0.0.1", port)))
        return clients[-1]

    port = sock.getsockname()[1]
    ended = []

    def end() -> asyncio.Task:
        ended.append(asyncio.create_task(server.shutdown([sock])))
        return ended[0]

    try:
        yield client, end, server, app
    finally:
        await asyncio.wait_for(ended[0] if ended else end(), patience(10))
        assert not made.connections
        assert not server.server_state.tasks
        for each in clients:
            await each.__aexit__()


async def test_a_shutdown_finishes_requests_in_flight_and_closes_idle_connections():
    work = Work()

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"first")
        await work(exchange)

    async def finish(exchange):
        exchange.finish(b"last")

    async def both(exchange):
        if exchange.body == b"stream":
            work.answer = finish
            await stream(exchange)
        else:
            await plain(exchange)

    plain = Work()
    async with ending(both) as (client, end, _, app):
        app.go_on.clear()
        streaming, waiting, queued, half_head, half_cold, half_body, idle, cold = [await client() for _ in range(8)]
        streaming.send(post(HOT, b"stream"))
        waiting.send(post(HOT, b"abc"))
        queued.send(post(HOT, b"abc") * 3)
        half_head.send(post(HOT, b"abc")[:30])
        half_cold.send(post(COLD, b"abc")[:30])
        half_body.send(post(HOT, b"abc")[:-1])
        cold.send(post(COLD, b"abc"))
        idle.send(post(HOT, b""))
        await until(lambda: work.begun == 1 and plain.begun == 3 and app.seen)
        plain.exchanges[-1].respond(200, b"", b"")
        await idle.answer()
        task = end()
        assert await idle.rest() == b""  # closed at once
        half_head.send(post(HOT, b"abc")[30:])
        half_cold.send(post(COLD, b"abc")[30:])
        half_body.send(b"c")
        await until(lambda: plain.begun == 5)
        assert not task.done()
        work.go_on.set()
        plain.go_on.set()
        app.go_on.set()
        assert (await streaming.answer())[2] == b"firstlast"
        for each in (waiting, half_head, half_cold, half_body, cold):
            status, headers, body = await each.answer()
            assert (status, headers[b"connection"], body) == (200, b"close", b"3")
        assert [(await queued.answer())[1].get(b"connection") for _ in range(3)] == [None, None, b"close"]
        for each in (streaming, waiting, queued, half_head, half_cold, half_body, cold):
            assert await each.rest() == b""
        await asyncio.wait_for(task, patience(5))


async def test_while_draining_each_answer_closes_its_connection_and_new_ones_are_taken():
    async with listening() as served:
        for path in (HOT, COLD):
            async with await served.client() as kept:
                kept.send(post(path, b"abc"))
                assert b"connection" not in (await kept.answer())[1]
                served.listener.intake.is_draining = True
                async with await served.client() as new:
                    for client in (kept, new):
                        client.send(post(path, b"abc"))
                        status, headers, body = await client.answer()
                        assert (status, headers[b"connection"], body) == (200, b"close", b"3")
                        assert await client.rest() == b""
            served.listener.intake.is_draining = False


async def test_no_request_begins_after_an_answer_that_closes_its_connection():
    async with listening(lambda exchange: exchange.respond(200, b"", b"")) as served, await served.client() as client:
        served.listener.intake.is_draining = True
        client.send(post(HOT, b"abc"))
        assert (await client.answer())[1][b"connection"] == b"close"
        client.send(post(HOT, b"abc"))
        assert await client.rest() == b""
        assert len(served.seen) == 1


@pytest.mark.parametrize("came_before", [0, -1])
async def test_no_request_begins_behind_a_stream_that_closes_its_connection(came_before):
    work = Work(say_last)

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"first")
        await work(exchange)

    async with listening(stream) as served, await served.client() as client:
        served.listener.intake.is_draining = True
        following = post(HOT, b"next")
        client.send(post(HOT, b"one") + following[:came_before])
        await until(lambda: work.begun)
        assert served.listener.intake.room.held_bytes == 3
        (connection,) = served.listener.connections
        assert not connection.body
        # What was dropped is not waited for.
        connection.check_deadlines(connection.loop.time() + ClientLimits().body_s + 1)
        drained_bytes = connection.drained_bytes
        client.send(following[came_before:])
        await until(lambda: connection.drained_bytes > drained_bytes)
        work.go_on.set()
        status, headers, body = await client.answer()
        assert (status, headers[b"connection"], body) == (200, b"close", b"firstlast")
        assert await client.rest() == b""
        assert work.begun == 1


async def test_a_shutdown_finishes_a_request_queued_behind_a_large_answer():
    async with queued_behind_a_large_answer() as (_served, client, connection, calls):
        connection.shutdown()
        await assert_both_are_answered(client, calls)
        assert await client.rest() == b""


async def test_a_message_answered_early_does_not_delay_a_shutdown():
    async with ending(length) as (client, end, _, app), await client() as early:
        app.read_body = False
        early.send(post(COLD, b"abc")[:-1])
        await early.answer()
        task = end()
        await asyncio.sleep(0)
        early.send(b"c")
        assert await early.rest() == b""
        await asyncio.wait_for(task, patience(3))


async def test_a_shutdown_begins_nothing_behind_a_message_answered_early():
    async with listening() as served, await served.client() as client:
        served.app.read_body, served.app.answer = False, large_of(served)
        client.send(post(COLD, b"abc")[:-1])
        await until(lambda: served.seen)
        (connection,) = served.listener.connections
        await until(lambda: connection.transport.get_write_buffer_size() and not connection.is_app_busy())
        connection.shutdown()
        client.send(b"c" + post(HOT, b"next"))
        await until(connection.transport.is_closing)
        assert len((await client.answer())[2]) == LARGE
        assert await client.rest() == b""
        assert served.seen == [(COLD, b"")]


async def test_a_shutdown_does_not_wait_for_a_half_sent_request():
    calls = Calls()
    async with listening(calls, body_s=10.0) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"half")[:-1])
        await until(lambda: calls.exchanges and served.listener.intake.room.held_bytes == 6)
        (connection,) = served.listener.connections
        connection.shutdown()
        calls.answer(0, b"x" * LARGE)
        assert connection.transport.is_closing()
        connection.check_deadlines(connection.loop.time() + 11)
        assert not served.listener.intake.refusals
        assert len((await client.answer())[2]) == LARGE


async def test_a_shutdown_past_its_deadline_answers_503_and_breaks_streams():
    work = Work()

    async def stream(exchange):
        if exchange.body == b"stream":
            exchange.begin(200, b"")
            exchange.send(b"first")
        await work(exchange)

    async with ending(stream) as (client, end, server, _):
        server.config.timeout_graceful_shutdown = 0.2
        streaming, waiting = await client(), await client()
        streaming.send(post(HOT, b"stream"))
        waiting.send(post(HOT, b"abc"))
        await until(lambda: work.begun == 2)
        await end()
        assert error_of(await waiting.rest()) == (503, "stopping")
        assert not (await streaming.rest()).endswith(b"0\r\n\r\n")
        assert work.cancelled == 2
