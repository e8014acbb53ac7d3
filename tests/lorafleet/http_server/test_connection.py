"""Clients that leave: their work is ended, their requests are dropped, and nothing of them is kept."""

import asyncio
import gc
import weakref

import pytest
from structlog.testing import capture_logs

from lorafleet.http_server.batches import Batches, leave_batch, next_stage
from tests.lorafleet.http_server.handlers import LARGE, Calls, Work, failing
from tests.patience import patience, until
from tests.wires import HOT, listening, post, reset


async def test_no_work_begins_for_a_client_that_left_before_its_turn(monkeypatch):
    work, late = Work(), []
    async with listening(work) as served:
        monkeypatch.setattr(Batches, "begin", lambda _self, stepper, _loop: late.append(stepper))
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: late)
        await until(lambda: not served.listener.connections)
        assert not late[0].step()
        assert not work.begun


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
async def test_a_handler_without_a_task_hears_once_that_its_client_left(leave):
    calls = Calls()
    async with listening(calls) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: calls.exchanges)
            if leave == "half_close":
                client.writer.write_eof()
            else:
                client.writer.close() if leave == "close" else reset(client.writer)
            await until(lambda: calls.gone)
        await until(lambda: not served.listener.connections)
    assert calls.gone == 1
    (exchange,) = calls.exchanges
    assert exchange.is_over
    # Whatever is said to it now goes nowhere, and does no harm.
    exchange.respond(200, b"", b"late")
    exchange.begin(200, b"")
    exchange.send(b"late")
    exchange.finish(b"late")
    exchange.abort()
    assert not exchange.is_paused


@pytest.mark.parametrize("in_task", [False, True])
async def test_on_gone_is_not_called_for_an_answer_its_handler_aborted(in_task):
    ended, done = [], asyncio.Event()

    async def cut_off(exchange):
        try:
            if in_task:
                await leave_batch()
            exchange.begin(200, b"")
            exchange.send(b"some")
            exchange.abort()
            await next_stage()
            if in_task:
                await asyncio.sleep(0)
            done.set()
        except (asyncio.CancelledError, GeneratorExit):
            ended.append(exchange)
            raise

    async with listening(cut_off) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
        await asyncio.wait_for(done.wait(), patience(5))
        await until(lambda: not served.listener.connections)
        assert len(served.seen) == 1
    assert not ended


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_failing_on_gone_is_logged_and_leaves_no_bytes_held(leave):
    with capture_logs() as logs:
        async with listening(failing) as served:
            async with await served.client() as client:
                client.send(post(HOT, b"abc") * 3 + post(HOT, b"abc")[:-1])
                await until(lambda: served.listener.intake.room.held_bytes == 11)
                if leave == "reset":
                    reset(client.writer)
            await until(lambda: not served.listener.connections)
            assert served.listener.intake.room.held_bytes == 0
    assert [each["event"] for each in logs] == ["unexpected error"]


async def test_on_gone_is_called_for_a_task_that_has_not_begun(recwarn):
    gone, work = [], Work()

    async def handler(exchange):
        (connection,) = served.listener.connections
        connection.loop.call_soon(connection.hang_up)  # before the task's first step
        try:
            await leave_batch()
            await work(exchange)
        except asyncio.CancelledError:
            gone.append(exchange)
            raise

    async with listening(handler) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: gone)
        await until(lambda: not served.listener.connections)
    assert (len(gone), work.begun) == (1, 0)
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("begun", [False, True])
async def test_work_is_cancelled_when_its_client_leaves(leave, begun):
    work = Work()

    async def stream(exchange):
        if begun:
            exchange.begin(200, b"")
            exchange.send(b"x")
        await work(exchange)

    async with listening(stream) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: work.begun)
            if leave == "half_close":
                client.writer.write_eof()
            else:
                client.writer.close() if leave == "close" else reset(client.writer)
            await until(lambda: work.cancelled)
        await until(lambda: not served.listener.connections)
        (exchange,) = work.exchanges
        exchange.respond(200, b"", b"to a client that left")
        exchange.send(b"to a client that left")
        exchange.finish()
        exchange.abort()


async def test_work_is_cancelled_when_a_client_leaves_with_much_unread():
    work = Work()

    async def much(exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await work(exchange)

    async with listening(much) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        client.writer.write_eof()
        await until(lambda: work.cancelled and not served.listener.connections)


async def test_queued_requests_are_dropped_when_their_client_leaves():
    work = Work()
    async with listening(work) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc") * 5)
            await until(lambda: work.begun and served.listener.intake.room.held_bytes == 15)
        await until(lambda: work.cancelled)
        assert served.listener.intake.room.held_bytes == 0
        assert work.begun == 1


async def test_work_after_its_answer_is_not_cancelled_when_the_client_leaves():
    done = asyncio.Event()
    go_on = asyncio.Event()

    async def afterwards(exchange):
        exchange.respond(200, b"", b"")
        await leave_batch()
        await go_on.wait()
        done.set()

    async with listening(afterwards) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await client.answer()
        await until(lambda: not served.listener.connections)
        go_on.set()
        await asyncio.wait_for(done.wait(), patience(5))


async def test_a_client_without_a_key_holds_no_bytes():
    async with listening(caller_of=lambda _: PermissionError("no key")) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc")[:-1])
            await until(lambda: any(each.body_bytes == 2 for each in served.listener.connections))
        await until(lambda: not served.listener.connections)
        assert served.listener.intake.room.held_bytes == 0


async def test_nothing_of_an_answered_request_is_kept_on_an_idle_connection():
    class KeptHandler:
        def answer(self, exchange):
            exchange.on_pause = exchange.on_resume = self.leave
            exchange.respond(200, b"", b"")

        def leave(self): ...

    kept = []

    def handler(exchange):
        one = KeptHandler()
        kept.append(weakref.ref(one))
        one.answer(exchange)

    async with listening(handler) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await client.answer()
        assert served.listener.connections
        gc.collect()
        assert kept[0]() is None


async def test_a_request_whose_client_left_is_freed_without_the_garbage_collector():
    kept = []

    class KeptCoroutineHandler:
        async def answer(self, exchange):
            kept.append(weakref.ref(self))
            self.exchange = exchange
            await leave_batch()
            await asyncio.Event().wait()

    gc.disable()
    try:
        async with listening(lambda exchange: KeptCoroutineHandler().answer(exchange)) as served:
            async with await served.client() as client:
                client.send(post(HOT, b"abc"))
                await until(lambda: kept)
            await until(lambda: not served.listener.connections)
            await until(lambda: kept[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.thorough)])
async def test_many_clients_that_leave_leave_nothing_behind(leave, count):
    work = Work()
    before = len(asyncio.all_tasks())

    async def one(n):
        async with await served.client() as client:
            raw = post(HOT, b"abc" * n)
            client.send(raw if n % 4 else raw[: n % len(raw)])
            if n % 3:
                await asyncio.sleep(0)
            if n % 4 and n % 5 == 0:
                await until(lambda: any(len(exchange.body) == 3 * n for exchange in work.exchanges))
            if leave == "reset":
                reset(client.writer)

    async with listening(work) as served:
        for n in range(0, count, 100):
            await asyncio.gather(*(one(n + each) for each in range(100)))
        await until(lambda: not served.listener.connections)
        await until(lambda: work.cancelled == work.begun)
        assert work.begun > count // 10
        assert served.listener.intake.room.held_bytes == 0
        async with await served.client() as client:
            work.go_on.set()
            client.send(post(HOT, b"abc"))
            assert (await client.answer())[0] == 200
    await until(lambda: len(asyncio.all_tasks()) <= before)
