"""Requests sent before the answers to those before them: the order of the answers, and what never gets one."""

import asyncio
import contextlib

import pytest

from lorafleet.http_server.batches import leave_batch
from tests.lorafleet.http_server.handlers import (
    LARGE,
    Work,
    assert_both_are_answered,
    queued_behind_a_large_answer,
)
from tests.patience import until
from tests.wires import COLD, HOT, error_of, listening, post


async def test_pipelined_requests_are_answered_in_order_one_at_a_time():
    most, running = 0, 0

    async def slow_first(exchange):
        nonlocal most, running
        running += 1
        most = max(most, running)
        if exchange.body == b"0":
            await leave_batch()
            await until(lambda: served.listener.intake.room.held_bytes == sent)
        running -= 1
        exchange.respond(200, b"", exchange.body)

    async with listening(slow_first) as served, await served.client() as client:
        sent = 10
        client.send(b"".join(post(HOT, b"%d" % n) for n in range(10)))
        assert [(await client.answer())[2] for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert most == 1
        sent = 5
        raw = b"".join(post(HOT, b"%d" % n) for n in range(5))
        for at in range(0, len(raw), 7):
            client.send(raw[at : at + 7])
            await asyncio.sleep(0)
        assert [(await client.answer())[2] for _ in range(5)] == [b"%d" % n for n in range(5)]


async def test_a_client_too_far_ahead_is_answered_so_far_and_closed():
    work = Work()
    async with listening(work, pipelined=3) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 50)
        await until(lambda: work.begun)
        (connection,) = served.listener.connections
        drained_bytes = connection.drained_bytes
        client.send(post(HOT, b"abc") * 50)
        await until(lambda: connection.drained_bytes > drained_bytes)
        work.go_on.set()
        for n in range(4):
            status, headers, body = await client.answer()
            assert (status, body, headers.get(b"connection")) == (200, b"3", None if n < 3 else b"close")
        assert await client.rest() == b""
        assert work.begun == 4


async def test_a_request_too_far_ahead_does_not_lose_the_answers_before_it():
    work = Work()
    async with listening(work, pipelined=1) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 3)
        await until(lambda: work.begun)
        (connection,) = served.listener.connections
        work.go_on.set()
        assert [(await client.answer())[2] for _ in range(2)] == [b"3", b"3"]
        drained_bytes = connection.drained_bytes
        client.send(b"more")
        await until(lambda: connection.drained_bytes == drained_bytes + 4)
        assert await client.rest() == b""
        assert not client.was_reset


@pytest.mark.parametrize("paths", [(HOT, COLD), (COLD, HOT), (COLD, COLD)])
async def test_requests_for_the_app_are_never_answered_out_of_order(paths):
    work = Work()
    async with listening(work) as served, await served.client() as client:
        served.app.go_on.clear()
        client.send(b"".join(post(path, b"x" * (1 + n)) for n, path in enumerate(paths)))
        await until(lambda: served.seen)
        (connection,) = served.listener.connections
        await until(lambda: connection.drained_bytes)  # the second one is thrown away
        work.go_on.set()
        served.app.go_on.set()
        _, headers, body = await client.answer()
        assert (headers[b"connection"], body) == (b"close", b"1")
        assert await client.rest() == b""
        assert served.seen == [(paths[0], b"x")]


@pytest.mark.parametrize("good", [1, 2])
async def test_a_bad_request_behind_good_ones_is_refused_after_their_answers(good):
    work = Work()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * good + b"GET / HTTP/1.1\r\nHost : a\r\n\r\n")
        await until(lambda: work.begun and served.listener.intake.refusals)
        work.go_on.set()
        for _ in range(good):
            assert await client.answer() == (200, {b"content-type": b"text/plain", b"content-length": b"1"}, b"3")
        assert error_of(await client.rest()) == (400, "invalid_http")


async def test_a_request_behind_a_large_answer_begins_once_most_is_read():
    async with queued_behind_a_large_answer() as (_served, client, _connection, calls):
        await assert_both_are_answered(client, calls)


async def test_an_app_request_never_overtakes_one_queued_behind_a_large_answer():
    async with queued_behind_a_large_answer() as (served, client, connection, calls):
        client.send(post(COLD, b"abc"))
        await until(lambda: connection.drained_bytes or connection.cycle)
        await assert_both_are_answered(client, calls)
        assert await client.rest() == b""
        assert served.seen == [(HOT, b"abc")] * 2


async def test_a_bad_request_is_refused_after_one_queued_behind_a_large_answer():
    async with queued_behind_a_large_answer() as (served, client, connection, calls):
        client.send(b"GET / HTTP/1.1\r\nHost : a\r\n\r\n")
        await until(lambda: served.listener.intake.refusals)
        assert (connection.current, len(connection.queue)) == (None, 1)
        await assert_both_are_answered(client, calls)
        assert error_of(await client.rest()) == (400, "invalid_http")


async def test_a_client_that_expects_100_continue_is_asked_for_its_body():
    async with listening() as served, await served.client() as client:
        for path in (HOT, COLD, HOT):
            head, body = post(path, b"abc", b"Expect: 100-continue").split(b"abc")[0], b"abc"
            client.send(head)
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(body)
            assert (await client.answer())[2] == b"3"
        # Sent at once: nobody waits.
        client.send(post(HOT, b"abc", b"Expect: 100-continue") + post(HOT, b"abcd"))


async def test_a_100_continue_comes_only_after_the_answers_before_it():
    work = Work()
    async with listening(work) as served, await served.client() as client:
        head = post(HOT, b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 3")
        client.send(post(HOT, b"x") + head)
        await until(lambda: work.begun)
        work.go_on.set()
        assert (await client.answer())[2] == b"1"
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert (await client.answer())[2] == b"3"


EXPECTING = post(HOT, b"next", b"Expect: 100-continue")


@pytest.mark.parametrize(("begun", "rest"), [(post(HOT, b"next")[:-4], b"next"), (EXPECTING[:-1], b"t")])
async def test_a_body_that_has_begun_to_come_gets_no_100_continue(begun, rest):
    work = Work()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"x") + post(HOT, b"abc", b"Expect: 100-continue") + begun)
        await until(lambda: served.listener.intake.room.held_bytes == 8 - len(rest))
        work.go_on.set()
        assert [(await client.answer())[::2] for _ in range(2)] == [(200, b"1"), (200, b"3")]
        client.send(rest)
        assert (await client.answer())[::2] == (200, b"4")


async def test_a_100_continue_comes_after_one_queued_behind_a_large_answer():
    def large_for_one(exchange):
        exchange.respond(200, b"", b"x" * LARGE if exchange.body == b"1" else exchange.body)

    async with listening(large_for_one) as served, await served.client() as client:
        client.send(post(HOT, b"1"))
        await until(lambda: any(each.is_write_paused for each in served.listener.connections))
        client.send(post(HOT, b"2") + EXPECTING[:-4])
        (connection,) = served.listener.connections
        await until(lambda: connection.expects_continue)
        assert len((await client.answer())[2]) == LARGE
        assert (await client.answer())[::2] == (200, b"2")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"next")
        assert (await client.answer())[::2] == (200, b"next")


async def test_a_client_that_keeps_sending_after_its_last_request_is_cut_off():
    work = Work()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.send(bytes(2**20))
                await client.writer.drain()
        await until(lambda: work.cancelled)


async def test_bytes_sent_after_the_last_request_do_not_lose_its_answer():
    work = Work()
    async with listening(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun)
        (connection,) = served.listener.connections
        client.send(b"more")
        await until(lambda: connection.drained_bytes == 4)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
        client.send(b"and more")
        await until(lambda: connection.drained_bytes == 12)  # what is not read comes back as a reset
        assert await client.rest() == b""
        assert not client.was_reset


@pytest.mark.parametrize("more", [b"more", post(HOT, b"more")])
async def test_bytes_read_with_the_last_request_are_ignored_and_lose_no_answer(more):
    async with listening() as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close") + more)
        assert (await client.answer())[2] == b"3"
        assert await client.rest() == b""
        assert not client.was_reset
        assert served.seen == [(HOT, b"abc")]
        assert not served.listener.intake.refusals


async def test_a_message_refused_after_its_answer_gets_no_second_answer():
    async with listening(body_bytes=1000) as served, await served.client() as client:
        served.app.read_body = False
        client.send(b"POST /cold HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        assert (await client.answer())[0] == 200
        (connection,) = served.listener.connections
        client.send(b"3e8\r\n" + b"x" * 1000)
        assert await client.rest() == b""
        assert served.listener.intake.refusals == {"body_too_large": 1}
        client.send(b"more")  # read on: a reset would take the answer from a client that has not read it
        await until(lambda: connection.drained_bytes == 4)
