"""Clients that send too slowly or nothing at all: deadlines of heads, bodies, idle and refused connections."""

import asyncio
import time

import pytest

from lorafleet.http_server.intake import ClientLimits
from tests.lorafleet.http_server.handlers import Work
from tests.patience import until
from tests.wires import COLD, HOT, error_of, listening, post


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_client_that_sends_its_request_too_slowly_gets_a_408(path):
    raw = post(path, b"abc" * 1000)
    async with listening(head_s=0.15, body_s=0.15) as served:
        for soon in (40, len(raw) - 20):
            async with await served.client() as client:
                rest = asyncio.create_task(client.rest())
                # A byte now and then moves no deadline.
                for at in range(len(raw)):
                    client.send(raw[at : at + 1])
                    if rest.done():
                        break
                    await asyncio.sleep(0.03 if at > soon else 0)
                assert error_of(await rest) == (408, "request_timeout")
        assert not served.seen
        # One that says nothing is closed without a word.
        assert await served.response_to(b"") == b""
        assert await served.response_to(b"\r\n") == b""


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize(("left", "limit_s"), [(20, ClientLimits().head_s), (1, ClientLimits().body_s)])
async def test_a_head_and_a_body_each_have_their_own_deadline(left, limit_s, path):
    async with listening() as served, await served.client() as client:
        await until(lambda: served.listener.connections)
        (connection,) = served.listener.connections
        began_at = connection.loop.time()
        client.send(post(path, b"abc")[:-left])
        await until(lambda: connection.phase)
        connection.check_deadlines(began_at + limit_s - 1)
        assert not served.listener.intake.refusals
        connection.check_deadlines(connection.loop.time() + limit_s + 1)
        assert error_of(await client.rest()) == (408, "request_timeout")


async def test_a_request_that_times_out_does_not_lose_the_answer_before_it():
    work = Work()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"next")[:-1])
        await until(lambda: work.begun and served.listener.intake.room.held_bytes == 6)
        (connection,) = served.listener.connections
        for _ in range(2):
            connection.check_deadlines(connection.loop.time() + ClientLimits().body_s + 1)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
        assert error_of(await client.rest()) == (408, "request_timeout")


async def test_a_refused_client_that_never_closes_is_cut_off_after_a_while():
    async with listening(body_bytes=1000) as served, await served.client() as client:
        await until(lambda: served.listener.connections)
        (connection,) = served.listener.connections
        now = connection.loop.time()
        client.send(post(HOT, b"x" * 1001))
        assert error_of(await client.rest()) == (413, "body_too_large")
        connection.check_deadlines(now + 1)
        client.send(b"more")  # it may still be sending what was refused
        await until(lambda: connection.drained_bytes)
        assert served.listener.connections
        connection.check_deadlines(now + 5)
        await until(lambda: not served.listener.connections)


async def test_an_idle_connection_is_closed_and_one_at_work_is_not():
    work = Work()

    def check_much_later() -> None:
        (connection,) = served.listener.connections
        connection.check_deadlines(connection.loop.time() + 10**6)

    async with listening(work) as served:
        served.app.go_on.clear()
        for path, go_on in ((HOT, work.go_on), (COLD, served.app.go_on)):
            async with await served.client() as client:
                client.send(post(path, b"abc"))
                await until(lambda path=path: (path, b"abc") in served.seen)
                check_much_later()
                go_on.set()
                assert (await client.answer())[2] == b"3"
                check_much_later()
                assert await client.rest() == b""
            await until(lambda: not served.listener.connections)


async def test_a_loop_that_is_always_late_still_closes_idle_connections():
    async with listening(idle_s=0.1, head_s=0.1, body_s=0.1) as served, await served.client() as client:
        rest = asyncio.create_task(client.rest())
        for _ in range(20):
            time.sleep(0.1)  # noqa: ASYNC251  (that is the point)
            await asyncio.sleep(0)
            if rest.done():
                break
        assert rest.done()


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_connection_stays_open_for_the_idle_time_after_its_answer(path):
    async with listening() as served, await served.client() as client:
        client.send(post(path, b"abc"))
        await client.answer()
        (connection,) = served.listener.connections
        connection.check_deadlines(connection.loop.time() + ClientLimits().idle_s - 1)
        assert not connection.transport.is_closing()
        connection.check_deadlines(connection.loop.time() + ClientLimits().idle_s + 1)
        assert await client.rest() == b""


async def test_a_connection_answered_early_is_closed_after_the_idle_time_too():
    async with listening() as served, await served.client() as client:
        served.app.read_body = False
        client.send(post(COLD, b"abc")[:-1])
        await client.answer()
        (connection,) = served.listener.connections
        client.send(b"c")
        await until(lambda: not connection.phase)
        connection.check_deadlines(connection.loop.time() + ClientLimits().idle_s - 1)
        assert not connection.transport.is_closing()
        connection.check_deadlines(connection.loop.time() + ClientLimits().idle_s + 1)
        assert await client.rest() == b""


async def test_a_message_answered_early_still_has_its_bodys_deadline():
    async with listening() as served, await served.client() as client:
        served.app.read_body = False
        client.send(post(COLD, b"abc")[:-1])
        await client.answer()
        (connection,) = served.listener.connections
        connection.check_deadlines(connection.loop.time() + ClientLimits().body_s + 1)
        assert await client.rest() == b""
        assert served.listener.intake.refusals == {"request_timeout": 1}
