"""The client's side: answers, order, limits, and what becomes of a request whose client leaves."""

import asyncio
import contextlib
import gc
import json
import socket
import struct
import time
import weakref

import pytest
from structlog.testing import capture_logs

from lorafleet import serve
from lorafleet.auth import Caller
from router.relay.front import FrontLimits, front
from router.relay.turn import Turn
from tests.patience import patience, until
from tests.router.relay.wires import COLD, HOT, MESSAGES, App, Client, error_of, fronted, length, parsed_head, post

# More than the sockets between a client that does not read and the front hold.
LARGE = 20_000_000
CHUNKED = b"Transfer-Encoding: chunked"


class Work:
    """A handler that waits to be told to go on, and notes who left."""

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
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await self.answer(exchange)


async def say_last(exchange) -> None:
    exchange.finish(b"last")


def large_of(served):
    """An app's answer that is in the transport as a whole, and pauses nothing."""

    async def answer(send) -> None:
        (connection,) = served.front.connections
        connection.transport.set_write_buffer_limits(2 * LARGE)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": b"x" * LARGE})

    return answer


def reset(client: Client) -> None:
    sock = client.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


async def test_a_handler_sees_the_request_as_it_was_sent():
    seen = []

    async def keep(exchange):
        seen.append(exchange)
        exchange.respond(200, b"", b"")

    async with fronted(keep) as served, await served.client() as client:
        client.send(post("/hot?a=%20b", b"{}", b"X-Two: 1", b"x-two: 2", b"Accept: */*"))
        await client.answer()
    (exchange,) = seen
    assert (exchange.method, exchange.path, exchange.query, exchange.body) == ("POST", "/hot", b"a=%20b", b"{}")
    assert exchange.headers == {b"host": b"a", b"content-length": b"2", b"x-two": b"1", b"accept": b"*/*"}
    assert exchange.status == 200


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 3_000_000])
async def test_bodies_of_any_size_arrive_whole_in_reads_of_any_size(size):
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with fronted() as served, await served.client() as client:
        for path in (HOT, COLD, HOT):
            client.send(post(path, body))
            assert (await client.answer())[2] == str(size).encode()
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[at : at + 999] for at in range(0, size, 999)))
        client.send(b"POST /hot HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
        assert (await client.answer())[2] == str(size).encode()
        assert {seen[1] for seen in served.seen} == {body}


async def test_an_answer_in_pieces_is_chunked_and_the_connection_goes_on():
    async def pieces(exchange):
        exchange.begin(200, b"content-type: text/event-stream\r\n")
        for piece in (b"one", b"", b"t" * 5000):
            exchange.send(piece)
            await asyncio.sleep(0)
        exchange.finish(exchange.body)

    async with fronted(pieces) as served, await served.client() as client:
        for last in (b"", b"last"):
            client.send(post(HOT, last))
            status, headers, body = await client.answer()
            assert (status, body) == (200, b"one" + b"t" * 5000 + last)
            assert headers == {b"content-type": b"text/event-stream", b"transfer-encoding": b"chunked"}
        said = await served.said(b"POST /hot HTTP/1.0\r\nContent-Length: 4\r\n\r\nlast")
        head, _, body = said.partition(b"\r\n\r\n")
        assert parsed_head(head)[1] == {b"content-type": b"text/event-stream", b"connection": b"close"}
        assert body == b"one" + b"t" * 5000 + b"last"


async def test_an_empty_answer_in_pieces_still_has_its_head():
    async def nothing(exchange):
        exchange.begin(200, b"")
        exchange.finish()

    async with fronted(nothing) as served, await served.client() as client:
        client.send(post(HOT, b""))
        assert (await client.answer())[::2] == (200, b"")


async def test_a_204_has_no_length():
    async def none(exchange):
        exchange.respond(204, b"", b"")

    async with fronted(none) as served, await served.client() as client:
        client.send(post(HOT, b""))
        assert await client.answer() == (204, {}, b"")


async def test_an_answer_to_head_tells_of_a_body_that_does_not_come_and_the_next_one_follows_its_head():
    async with fronted() as served, await served.client() as client:
        client.send(b"HEAD /hot HTTP/1.1\r\nHost: a\r\n\r\n" + post(HOT, b"abc"))
        status, headers = parsed_head(await client.reader.readuntil(b"\r\n\r\n"))
        assert (status, headers[b"content-length"]) == (200, b"1")
        assert (await client.answer())[::2] == (200, b"3")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("raises", [False, True])
async def test_a_handler_that_fails_is_a_500_or_a_broken_stream_never_silence(begun, raises):
    async def bad(exchange):
        if begun:
            exchange.begin(200, b"")
            exchange.send(b"some")
        if raises:
            raise RuntimeError("secret")

    with capture_logs() as logs:
        async with fronted(bad) as served, await served.client() as client:
            client.send(post(HOT, b"x", b"Connection: close"))
            said = await client.rest()
    if begun:
        assert said.endswith(b"\r\n\r\n4\r\nsome\r\n")
    else:
        assert error_of(said) == (500, "internal_error")
        assert b"retry-after" not in said
    assert b"secret" not in said
    assert [each["event"] for each in logs] == ["unexpected error" if raises else "a handler ended without an answer"]


async def test_of_a_handler_that_answers_nothing_is_logged():
    with capture_logs() as logs:
        async with fronted() as served, await served.client() as client:
            client.send(post(HOT, b"x"))
            await client.answer()
    assert not logs


async def test_the_app_serves_every_other_path_on_the_same_connection():
    async with fronted() as served, await served.client() as client:
        for path in (HOT, COLD, HOT, HOT, COLD, COLD, HOT):
            client.send(post(path, path.encode()))
            assert (await client.answer())[2] == b"%d" % len(path)
        assert [path for path, _ in served.seen] == [HOT, COLD, HOT, HOT, COLD, COLD, HOT]


async def test_both_ends_send_without_delay():
    async with fronted(work := Work()) as served, await served.client() as client:
        client.send(post(HOT, b""))
        await until(lambda: work.begun)
        (connection,) = served.front.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        work.go_on.set()
        await client.answer()


# Order


async def test_pipelined_requests_are_answered_in_order_one_at_a_time():
    most, running = 0, 0

    async def slow_first(exchange):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02 if exchange.body == b"0" else 0)
        running -= 1
        exchange.respond(200, b"", exchange.body)

    async with fronted(slow_first) as served, await served.client() as client:
        client.send(b"".join(post(HOT, b"%d" % n) for n in range(10)))
        assert [(await client.answer())[2] for _ in range(10)] == [b"%d" % n for n in range(10)]
        assert most == 1
        raw = b"".join(post(HOT, b"%d" % n) for n in range(5))
        for at in range(0, len(raw), 7):
            client.send(raw[at : at + 7])
            await asyncio.sleep(0)
        assert [(await client.answer())[2] for _ in range(5)] == [b"%d" % n for n in range(5)]


async def test_too_much_ahead_is_answered_so_far_and_closed():
    work = Work()
    async with fronted(work, pipelined=3) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 50)
        await until(lambda: work.begun)
        client.send(post(HOT, b"abc") * 50)
        await asyncio.sleep(0.05)
        work.go_on.set()
        for n in range(4):
            status, headers, body = await client.answer()
            assert (status, body, headers.get(b"connection")) == (200, b"3", None if n < 3 else b"close")
        assert await client.rest() == b""
        assert work.begun == 4


@pytest.mark.parametrize("paths", [(HOT, COLD), (COLD, HOT), (COLD, COLD)])
async def test_an_apps_request_is_never_answered_out_of_order(paths):
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        served.app.go_on.clear()
        client.send(b"".join(post(path, b"x" * (1 + n)) for n, path in enumerate(paths)))
        await until(lambda: served.seen)
        await asyncio.sleep(0.02)
        work.go_on.set()
        served.app.go_on.set()
        _, headers, body = await client.answer()
        assert (headers[b"connection"], body) == (b"close", b"1")
        assert await client.rest() == b""
        assert served.seen == [(paths[0], b"x")]


@pytest.mark.parametrize("good", [1, 2])
async def test_a_bad_request_behind_good_ones_is_refused_after_their_answers(good):
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * good + b"GET / HTTP/1.1\r\nHost : a\r\n\r\n")
        await until(lambda: work.begun and served.front.refused)
        work.go_on.set()
        for _ in range(good):
            assert await client.answer() == (200, {b"content-type": b"text/plain", b"content-length": b"1"}, b"3")
        assert error_of(await client.rest()) == (400, "invalid_http")


async def test_what_is_queued_behind_a_large_answer_is_begun_when_most_of_that_is_read():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        (connection,) = served.front.connections
        assert (connection._current, len(connection._queue)) == (None, 1)
        assert len((await client.answer())[2]) == LARGE
        await until(lambda: len(calls.exchanges) == 2)
        calls.exchanges[1].respond(200, b"", b"next")
        assert (await client.answer())[2] == b"next"


async def test_an_apps_request_behind_what_is_queued_behind_a_large_answer_is_not_answered_before_it():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        (connection,) = served.front.connections
        assert (connection._current, len(connection._queue)) == (None, 1)
        client.send(post(COLD, b"abc"))
        await until(lambda: connection._drained_bytes or connection.cycle)
        assert len((await client.answer())[2]) == LARGE
        await until(lambda: len(calls.exchanges) == 2)
        calls.exchanges[1].respond(200, b"", b"next")
        assert (await client.answer())[2] == b"next"
        assert await client.rest() == b""
        assert served.seen == [(HOT, b"abc")] * 2


async def test_a_bad_request_behind_what_is_queued_behind_a_large_answer_is_refused_after_it():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        client.send(b"GET / HTTP/1.1\r\nHost : a\r\n\r\n")
        await until(lambda: served.front.refused)
        (connection,) = served.front.connections
        assert (connection._current, len(connection._queue)) == (None, 1)
        assert len((await client.answer())[2]) == LARGE
        await until(lambda: len(calls.exchanges) == 2)
        calls.exchanges[1].respond(200, b"", b"next")
        assert (await client.answer())[2] == b"next"
        assert error_of(await client.rest()) == (400, "invalid_http")


async def test_a_body_is_asked_for_when_a_client_waits_to_be_asked():
    async with fronted() as served, await served.client() as client:
        for path in (HOT, COLD, HOT):
            head, body = post(path, b"abc", b"Expect: 100-continue").split(b"abc")[0], b"abc"
            client.send(head)
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(body)
            assert (await client.answer())[2] == b"3"
        # Sent at once: nobody waits.
        client.send(post(HOT, b"abc", b"Expect: 100-continue") + post(HOT, b"abcd"))


async def test_a_body_is_asked_for_only_after_the_answers_before_it():
    work = Work()
    async with fronted(work) as served, await served.client() as client:
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
async def test_no_body_is_asked_for_that_nobody_waits_to_send(begun, rest):
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        client.send(post(HOT, b"x") + post(HOT, b"abc", b"Expect: 100-continue") + begun)
        await until(lambda: served.front.held_bytes == 8 - len(rest))
        work.go_on.set()
        assert [(await client.answer())[::2] for _ in range(2)] == [(200, b"1"), (200, b"3")]
        client.send(rest)
        assert (await client.answer())[::2] == (200, b"4")


async def test_a_body_is_asked_for_behind_what_is_queued_behind_a_large_answer():
    def large_for_one(exchange):
        exchange.respond(200, b"", b"x" * LARGE if exchange.body == b"1" else exchange.body)

    async with fronted(large_for_one) as served, await served.client() as client:
        client.send(post(HOT, b"1"))
        await until(lambda: any(each.is_write_paused for each in served.front.connections))
        client.send(post(HOT, b"2") + EXPECTING[:-4])
        (connection,) = served.front.connections
        await until(lambda: connection._expects)
        assert len((await client.answer())[2]) == LARGE
        assert (await client.answer())[::2] == (200, b"2")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"next")
        assert (await client.answer())[::2] == (200, b"next")


# Leaving


async def test_a_client_that_leaves_before_its_turn_is_not_worked_for(monkeypatch):
    work, late = Work(), []
    async with fronted(work) as served:
        monkeypatch.setattr(Turn, "begin", lambda _self, exchange, _loop: late.append(exchange))
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: late)
        await until(lambda: not served.front.connections)
        assert late[0].begin_answer() is None
        assert late[0].is_over
        assert not work.begun


class Calls:
    """A handler that answers by plain calls, and notes who left."""

    def __init__(self):
        self.exchanges = []
        self.gone = 0

    def __call__(self, exchange):
        self.exchanges.append(exchange)
        exchange.on_gone = self.leave

    def leave(self):
        self.gone += 1
        for exchange in self.exchanges:
            exchange.respond(503, b"", b"stopping")


async def test_a_handler_without_a_task_answers_when_it_likes_and_goes_on_in_one_if_it_must():
    calls, work = Calls(), Work()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges)
        calls.exchanges[0].respond(200, b"", b"one")
        assert (await client.answer())[2] == b"one"
        await until(lambda: len(calls.exchanges) == 2)
        calls.exchanges[1].go_on(work(calls.exchanges[1]))
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
    assert not calls.gone


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
async def test_a_handler_without_a_task_is_told_once_that_its_client_left(leave):
    calls = Calls()
    async with fronted(calls) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: calls.exchanges)
            if leave == "half_close":
                client.writer.write_eof()
            else:
                client.writer.close() if leave == "close" else reset(client)
            await until(lambda: calls.gone)
        await until(lambda: not served.front.connections)
    assert calls.gone == 1
    (exchange,) = calls.exchanges
    assert exchange.is_over
    # Whatever is said to it now goes nowhere, and does no harm.
    exchange.respond(200, b"", b"late")
    exchange.begin(200, b"")
    exchange.send(b"late")
    exchange.finish(b"late")
    exchange.go_on(length(exchange))
    exchange.abort()
    assert not exchange.is_paused


def failing(exchange) -> None:
    """A handler that cannot be told that its client left."""

    def fail():
        raise RuntimeError("a defect")

    exchange.on_gone = fail


@pytest.mark.parametrize("in_task", [False, True])
async def test_who_breaks_an_answer_off_is_not_told_to_end(in_task):
    told, done = [], asyncio.Event()

    def cut_off(exchange):
        exchange.on_gone = lambda: told.append(exchange)
        exchange.begin(200, b"")
        exchange.send(b"some")
        exchange.abort()

    async def work(exchange):
        cut_off(exchange)
        await asyncio.sleep(0)
        done.set()

    async with fronted(work if in_task else cut_off) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
        if in_task:
            await asyncio.wait_for(done.wait(), patience(5))
        await until(lambda: not served.front.connections)
        assert len(served.seen) == 1
    assert not told


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_handler_that_fails_when_it_is_told_that_its_client_left_holds_on_to_nothing(leave):
    with capture_logs() as logs:
        async with fronted(failing) as served:
            async with await served.client() as client:
                client.send(post(HOT, b"abc") * 3 + post(HOT, b"abc")[:-1])
                await until(lambda: served.front.held_bytes == 11)
                if leave == "reset":
                    reset(client)
            await until(lambda: not served.front.connections)
            assert served.front.held_bytes == 0
    assert [each["event"] for each in logs] == ["unexpected error"]


async def test_a_handler_that_fails_when_it_is_told_of_a_stop_keeps_no_other_from_being_told():
    def handler(exchange):
        failing(exchange) if exchange.body == b"fail" else calls(exchange)

    calls = Calls()
    async with fronted(handler) as served, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await served.client()) for _ in range(5)]
        for client in clients[1:]:
            client.send(post(HOT, b"fail"))
        clients[0].send(post(HOT, b"abc"))
        await until(lambda: len(served.seen) == 5)
        served.front.stop()
        assert [(await client.answer())[0] for client in clients] == [503, 500, 500, 500, 500]


async def test_a_client_that_leaves_before_its_task_begins_is_told_of_all_the_same(recwarn):
    calls, work = Calls(), Work()
    async with fronted(calls) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: calls.exchanges)
            (exchange,) = calls.exchanges
            exchange.go_on(work(exchange))
            exchange._connection.hang_up()
        await until(lambda: not served.front.connections)
    assert (calls.gone, work.begun) == (1, 0)
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


async def test_what_is_answered_without_a_task_ends_when_the_router_stops():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: calls.exchanges)
        served.front.stop()
        assert (await client.answer())[0::2] == (503, b"stopping")
    assert calls.gone == 1


async def test_a_stop_ends_what_is_at_work_whoever_else_is_connected():
    calls = Calls()
    async with fronted(calls) as served, contextlib.AsyncExitStack() as idle, await served.client() as client:
        for _ in range(4):
            await idle.enter_async_context(await served.client())
        client.send(post(HOT, b"abc"))
        await until(lambda: calls.exchanges and len(served.front.connections) == 5)
        served.front.stop()
        assert (await client.answer())[0::2] == (503, b"stopping")
    assert calls.gone == 1


async def test_what_is_queued_when_the_router_stops_is_not_begun():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"def"))
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        (connection,) = served.front.connections
        connection.shutdown()
        served.front.stop()
        status, headers, _ = await client.answer()
        assert (status, headers[b"connection"]) == (503, b"close")
        assert await client.rest() == b""  # never begun, and no word of it: it may be sent again
        assert served.front.held_bytes == 0
    assert len(calls.exchanges) == 1


@pytest.mark.parametrize(("path", "word"), [(HOT, "service_unavailable_error"), (MESSAGES, "overloaded_error")])
async def test_what_has_come_when_the_router_stops_is_told_that_it_was_not_begun(path, word):
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        await until(lambda: served.front.connections)
        (connection,) = served.front.connections
        connection.data_received(post(path, b"abc"))
        served.front.stop()
        status, headers, body = await client.answer()
        assert (status, b'"stopping"' in body, headers[b"retry-after"]) == (503, True, b"1")
        assert json.loads(body)["error"]["type"] == word
        assert served.front.held_bytes == 0
    assert not calls.exchanges


async def test_a_task_that_has_not_begun_when_the_router_stops_never_does():
    begun = []

    async def work(exchange):
        begun.append(exchange)

    def handler(exchange):
        exchange.on_gone = lambda: exchange.respond(503, b"", b"stopping")
        return work(exchange)

    with capture_logs() as logs:
        async with fronted(handler) as served, await served.client() as client:
            await until(lambda: served.front.connections)
            (connection,) = served.front.connections
            connection.data_received(post(HOT, b"abc"))
            served.front.turn._work(connection.loop)
            served.front.stop()
            assert (await client.answer())[0::2] == (503, b"stopping")
            assert not connection.tasks
    assert not begun
    assert not logs


async def test_a_handler_that_raises_is_answered_for(caplog):
    def broken(_exchange):
        raise RuntimeError("a defect")

    async with fronted(broken) as served, await served.client() as client:
        for _ in range(2):
            client.send(post(HOT, b"abc"))
            status, _, body = await client.answer()
            assert (status, b"RuntimeError" in body, b"a defect" in body) == (500, True, False)
        assert not served.front.refused


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_the_work_for_it_at_once(leave, begun):
    work = Work()

    async def stream(exchange):
        if begun:
            exchange.begin(200, b"")
            exchange.send(b"x")
        await work(exchange)

    async with fronted(stream) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await until(lambda: work.begun)
            if leave == "half_close":
                client.writer.write_eof()
            else:
                client.writer.close() if leave == "close" else reset(client)
            await until(lambda: work.cancelled)
        await until(lambda: not served.front.connections)
        (exchange,) = work.exchanges
        exchange.respond(200, b"", b"to nobody")
        exchange.send(b"to nobody")
        exchange.finish()
        exchange.abort()


async def test_a_client_that_leaves_with_much_unread_ends_the_work_for_it_at_once():
    work = Work()

    async def much(exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * 20_000_000)
        await work(exchange)

    async with fronted(much) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        client.writer.write_eof()
        await until(lambda: work.cancelled and not served.front.connections)


async def test_a_client_that_leaves_takes_what_it_had_queued_with_it():
    work = Work()
    async with fronted(work) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc") * 5)
            await until(lambda: work.begun and served.front.held_bytes == 15)
        await until(lambda: work.cancelled)
        assert served.front.held_bytes == 0
        assert work.begun == 1


async def test_work_that_has_answered_is_not_ended_by_the_client_leaving():
    done = asyncio.Event()
    go_on = asyncio.Event()

    async def afterwards(exchange):
        exchange.respond(200, b"", b"")
        await go_on.wait()
        done.set()

    async with fronted(afterwards) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc"))
            await client.answer()
        await until(lambda: not served.front.connections)
        go_on.set()
        await asyncio.wait_for(done.wait(), patience(5))


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_two_thousand_clients_that_leave_leave_nothing_behind(leave):
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
                reset(client)

    async with fronted(work) as served:
        for n in range(0, 2000, 100):
            await asyncio.gather(*(one(n + each) for each in range(100)))
        await until(lambda: not served.front.connections)
        await until(lambda: work.cancelled == work.begun)
        assert work.begun > 200
        assert served.front.held_bytes == 0
        async with await served.client() as client:
            work.go_on.set()
            client.send(post(HOT, b"abc"))
            assert (await client.answer())[0] == 200
    await until(lambda: len(asyncio.all_tasks()) <= before)


# Limits


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_a_413_that_the_client_can_read(path, chunked):
    async with fronted(body_bytes=100_000) as served:
        body = b"x" * 2_000_000
        raw = post(path, body)
        if chunked:
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
            raw = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        async with await served.client() as client:
            client.send(raw)
            await client.writer.drain()
            assert error_of(await client.rest()) == (413, "body_too_large")
            assert not client.was_reset
        assert not served.seen
        assert served.front.held_bytes == 0
        async with await served.client() as client:
            client.send(post(path, body[:100_000]))
            assert (await client.answer())[2] == b"100000"


async def test_a_client_that_was_refused_and_never_closes_is_hung_up_on_after_a_while():
    async with fronted(body_bytes=1000) as served, await served.client() as client:
        await until(lambda: served.front.connections)
        (connection,) = served.front.connections
        now = connection.loop.time()
        client.send(post(HOT, b"x" * 1001))
        assert error_of(await client.rest()) == (413, "body_too_large")
        connection.check(now + 1)
        client.send(b"more")  # it may still be sending what was refused
        await until(lambda: connection._drained_bytes)
        assert served.front.connections
        connection.check(now + 5)
        await until(lambda: not served.front.connections)


async def test_an_answer_of_the_apps_that_has_begun_when_its_message_is_refused_is_cut_off():
    async def begin(send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        begun.set()
        await served.app.left.wait()

    begun = asyncio.Event()
    async with fronted(body_bytes=1000) as served, await served.client() as client:
        served.app.read_body, served.app.answer = False, begin
        client.send(post(COLD, b"x" * 10).split(b"\r\n\r\n")[0].replace(b"Content-Length: 10", CHUNKED) + b"\r\n\r\n")
        await asyncio.wait_for(begun.wait(), patience(5))
        client.send(b"fff\r\n" + b"x" * 0xFFF)
        said = await client.rest()
        assert not served.front.connections  # at once: nothing that is left of it is sent
        served.app.left.set()
    assert said.endswith(b"\r\n\r\nbegun") or not said
    assert said.count(b"HTTP/1.1") <= 1


async def test_a_client_that_waits_to_be_asked_is_told_at_once_that_its_body_is_too_large():
    async with fronted(body_bytes=1000) as served:
        head = post(HOT, b"x" * 1001, b"Expect: 100-continue").split(b"\r\n\r\n")[0] + b"\r\n\r\n"
        assert error_of(await served.said(head)) == (413, "body_too_large")


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens?beta=true", HOT, COLD])
@pytest.mark.parametrize(
    ("more", "body", "status", "word"),
    [
        (b"Content-Length: 1001\r\n", b"", 413, "request_too_large"),
        (b"Transfer-Encoding: chunked\r\n", b"3e9\r\n" + b"x" * 1001, 413, "request_too_large"),
        (b"Expect: more\r\n", b"", 417, "invalid_request_error"),
    ],
)
async def test_what_anthropics_clients_ask_is_refused_in_their_own_form(path, more, body, status, word):
    async with fronted(body_bytes=1000) as served:
        said = await served.said(b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n%b" % (path.encode(), more, body))
    assert error_of(said)[0] == status
    told = json.loads(said.partition(b"\r\n\r\n")[2])
    found = (told.get("type"), told["error"]["type"])
    assert found == (("error", word) if "messages" in path else (None, "invalid_request_error"))


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("start", ["line", "header", "headers", "trailer", "trailers", "extension"])
async def test_a_head_without_end_is_cut_off(path, start):
    head = b"POST %b HTTP/1.1\r\nHost: a\r\n" % path.encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    raw, piece = {
        "line": (b"GET /", b"a" * 1000),
        "header": (head + b"x: ", b"a" * 1000),
        "headers": (head, b"x: " + b"a" * 1000 + b"\r\n"),
        "trailer": (chunked + b"1\r\na\r\n0\r\nx: ", b"a" * 1000),
        "trailers": (chunked + b"0\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        "extension": (chunked + b"1;x=", b"a" * 1000),
    }[start]
    async with fronted() as served, await served.client() as client:
        client.send(raw)
        rest = asyncio.create_task(client.rest())
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):
                client.send(piece)
                await client.writer.drain()
                if rest.done():
                    break
        assert error_of(await rest) == (431, "head_too_large")
        assert not served.seen


async def test_a_large_head_in_one_read_is_refused_and_one_that_fits_is_served():
    async with fronted() as served, await served.client() as client:
        client.send(post(HOT, b"x" * 200_000, *(b"x-%d: %b" % (n, b"v" * 100) for n in range(300))))
        assert (await client.answer())[0] == 200
        client.send(post(HOT, b"x", *(b"x-%d: %b" % (n, b"v" * 1000) for n in range(66))))
        assert error_of(await client.rest()) == (431, "head_too_large")


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 431)])
async def test_a_head_may_be_as_large_as_that_and_no_larger_in_one_read_or_before_its_end_has_come(size, status):
    async with fronted(head_bytes=1000) as served:
        async with await served.client() as client:
            # Target and headers are counted: "/hot", "Host: a", "Content-Length: 0" and "X: xx...", 4 more for each.
            client.send(post(HOT, b"", b"X: " + b"x" * (size - 4 - 9 - 19 - 5)))
            assert (await client.answer())[0] == status
        async with await served.client() as client:
            head = post(HOT, b"", b"X: ").removesuffix(b"\r\n\r\n").ljust(size, b"x")
            client.send(head[:500])
            await until(lambda: any(each._bare_bytes == 500 for each in served.front.connections))
            client.send(head[500:])
            await until(lambda: any(each._bare_bytes == size for each in served.front.connections))
            client.send(b"\r\n\r\n")
            assert (await client.answer())[0] == status


async def test_all_bodies_together_are_bounded_and_the_next_one_is_told_to_come_back():
    work = Work()
    async with fronted(work, held_bytes=10_000) as served, await served.client() as first:
        first.send(post(HOT, b"x" * 9000))
        await until(lambda: work.begun)
        said = await served.said(post(HOT, b"x" * 1001))
        assert error_of(said) == (429, "saturated")
        assert b"retry-after: 1\r\n" in said
        assert served.front.held_bytes == 9000
        async with await served.client() as second:
            second.send(post(HOT, b"x" * 1000))
            await until(lambda: work.begun == 2)
            work.go_on.set()
            assert (await first.answer())[0] == (await second.answer())[0] == 200
        assert served.front.held_bytes == 0


async def test_one_tenants_bodies_are_bounded_and_it_has_their_room_again_when_each_is_answered():
    calls = Calls()

    def asking(tenant, size):
        return post(HOT, b"x" * size, b"Tenant: %b" % tenant)

    def sender(headers):
        return Caller(headers[b"tenant"].decode(), frozenset())

    async with fronted(calls, sender=sender, tenant_bytes=1000) as served, contextlib.AsyncExitStack() as stack:
        first, second, third, other = [await stack.enter_async_context(await served.client()) for _ in range(4)]
        first.send(asking(b"a", 600))
        second.send(asking(b"a", 400))
        other.send(asking(b"b", 1000))
        await until(lambda: len(calls.exchanges) == 3)
        assert error_of(await served.said(asking(b"a", 1))) == (429, "saturated")
        (answered,) = [each for each in calls.exchanges if len(each.body) == 400]
        answered.respond(200, b"", b"")
        await second.answer()
        assert error_of(await served.said(asking(b"a", 401))) == (429, "saturated")
        third.send(asking(b"a", 400))
        await until(lambda: len(calls.exchanges) == 4)
        for exchange in calls.exchanges:
            exchange.respond(200, b"", b"")
        assert [(await each.answer())[0] for each in (first, third, other)] == [200] * 3
        assert not served.front._held_of  # nor what there once was of a tenant


async def test_of_what_is_answered_nothing_is_kept_while_its_client_says_no_more():
    class Kept:
        def answer(self, exchange):
            exchange.on_gone = exchange.on_pause = exchange.on_resume = self.leave
            exchange.respond(200, b"", b"")

        def leave(self): ...

    kept = []

    def handler(exchange):
        one = Kept()
        kept.append(weakref.ref(one))
        one.answer(exchange)

    async with fronted(handler) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await client.answer()
        assert served.front.connections
        gc.collect()
        assert kept[0]() is None


async def test_nothing_of_a_request_whose_client_left_waits_for_the_garbage_collector():
    kept = []

    class Kept:
        async def answer(self, exchange):
            kept.append(weakref.ref(self))
            self.exchange = exchange
            await asyncio.Event().wait()

    gc.disable()
    try:
        async with fronted(lambda exchange: Kept().answer(exchange)) as served:
            async with await served.client() as client:
                client.send(post(HOT, b"abc"))
                await until(lambda: kept)
            await until(lambda: not served.front.connections)
            await until(lambda: kept[0]() is None)
    finally:
        gc.enable()


async def test_a_client_that_goes_on_and_on_behind_its_last_request_is_hung_up_on():
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.send(bytes(2**20))
                await client.writer.drain()
        await until(lambda: work.cancelled)


async def test_what_a_client_sends_behind_its_last_request_does_not_take_the_answer_from_it():
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun)
        (connection,) = served.front.connections
        client.send(b"more")
        await until(lambda: connection._drained_bytes == 4)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
        client.send(b"and more")
        await until(lambda: connection._drained_bytes == 12)  # what is not read comes back as a reset
        assert await client.rest() == b""
        assert not client.was_reset


@pytest.mark.parametrize("more", [b"more", post(HOT, b"more")])
async def test_what_comes_with_the_last_request_in_one_read_is_not_answered_and_takes_no_answer_away(more):
    async with fronted() as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close") + more)
        assert (await client.answer())[2] == b"3"
        assert await client.rest() == b""
        assert not client.was_reset
        assert served.seen == [(HOT, b"abc")]
        assert not served.front.refused


async def test_what_is_too_much_ahead_does_not_take_the_answers_before_it_away():
    work = Work()
    async with fronted(work, pipelined=1) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 3)
        await until(lambda: work.begun)
        (connection,) = served.front.connections
        work.go_on.set()
        assert [(await client.answer())[2] for _ in range(2)] == [b"3", b"3"]
        drained_bytes = connection._drained_bytes
        client.send(b"more")
        await until(lambda: connection._drained_bytes == drained_bytes + 4)
        assert await client.rest() == b""
        assert not client.was_reset


async def test_a_message_that_is_refused_when_it_is_answered_already_has_no_second_answer():
    async with fronted(body_bytes=1000) as served, await served.client() as client:
        served.app.read_body = False
        client.send(b"POST /cold HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        assert (await client.answer())[0] == 200
        (connection,) = served.front.connections
        client.send(b"3e8\r\n" + b"x" * 1000)
        assert await client.rest() == b""
        assert served.front.refused == {"body_too_large": 1}
        client.send(b"more")  # read on: a reset would take the answer from a client that has not read it
        await until(lambda: connection._drained_bytes == 4)


async def test_the_app_is_told_at_once_that_what_it_reads_is_refused():
    async with fronted(body_bytes=1000) as served, await served.client() as client:
        client.send(b"POST /cold HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: any(each._is_cold_busy() for each in served.front.connections))
        client.send(b"3e8\r\n" + b"x" * 1000)
        assert error_of(await client.rest()) == (413, "body_too_large")
        await asyncio.wait_for(served.app.left.wait(), patience(5))
        assert served.front.connections  # it may still be sending what was refused


async def test_a_page_is_told_of_a_refusal_where_the_app_does_not_have_its_request_already():
    def told(origin):
        return b"x-for: %b\r\n" % origin

    async with fronted(told=told, body_bytes=1000) as served:
        for path, is_told in ((HOT, True), (COLD, False)):
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nOrigin: page\r\n%b\r\n\r\n" % (path.encode(), CHUNKED)
            said = await served.said(head + b"fff\r\n" + b"x" * 0xFFF)
            assert (error_of(said), b"x-for: page\r\n" in said) == ((413, "body_too_large"), is_told)
        for lines, is_told in ((b"", False), (b"Origin: page\r\nHost: a\r\n", True)):
            said = await served.said(b"GET / HTTP/1.1\r\n%bX : a\r\n\r\n" % lines)
            assert (error_of(said), b"x-for: page\r\n" in said) == ((400, "invalid_http"), is_told)


async def test_only_what_a_browser_asks_before_is_for_the_app():
    async with fronted(told=lambda _origin: b"") as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Origin: page", b"Access-Control-Request-Method: POST"))
        assert (await client.answer())[1][b"content-type"] == b"text/plain"  # which the app's has not


async def test_what_nobody_thought_of_is_a_500_and_closes_its_connection():
    def sender(_headers):
        raise RuntimeError("secret")

    with capture_logs() as logs:
        async with fronted(sender=sender) as served:
            said = await served.said(post(HOT, b"abc"))
            assert error_of(said) == (500, "internal_error")
            assert not served.seen
    assert b"secret" not in said
    assert [each["event"] for each in logs] == ["unexpected error"]


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_client_that_sends_its_request_too_slowly_gets_a_408(path):
    raw = post(path, b"abc" * 1000)
    async with fronted(head_s=0.15, body_s=0.15) as served:
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
        assert await served.said(b"") == b""
        assert await served.said(b"\r\n") == b""


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize(("left", "limit_s"), [(20, FrontLimits().head_s), (1, FrontLimits().body_s)])
async def test_a_head_and_a_body_have_each_their_own_time(left, limit_s, path):
    async with fronted() as served, await served.client() as client:
        await until(lambda: served.front.connections)
        (connection,) = served.front.connections
        began_at = connection.loop.time()
        client.send(post(path, b"abc")[:-left])
        await until(lambda: connection._phase)
        connection.check(began_at + limit_s - 1)
        assert not served.front.refused
        connection.check(connection.loop.time() + limit_s + 1)
        assert error_of(await client.rest()) == (408, "request_timeout")


async def test_a_request_that_comes_too_slowly_takes_no_answer_from_the_one_before_it():
    work = Work()
    async with fronted(work) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"next")[:-1])
        await until(lambda: work.begun and served.front.held_bytes == 6)
        (connection,) = served.front.connections
        for _ in range(2):
            connection.check(connection.loop.time() + FrontLimits().body_s + 1)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
        assert error_of(await client.rest()) == (408, "request_timeout")


async def test_of_one_who_may_not_ask_and_leaves_half_way_nothing_was_held():
    async with fronted(sender=lambda _: None) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"abc")[:-1])
            await until(lambda: any(each._body_bytes == 2 for each in served.front.connections))
        await until(lambda: not served.front.connections)
        assert served.front.held_bytes == 0


async def test_a_connection_without_requests_is_closed_after_a_while_and_one_at_work_is_not():
    work = Work()
    async with fronted(work, idle_s=0.15, head_s=0.15, body_s=0.15) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await asyncio.sleep(0.4)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
        assert await client.rest() == b""
        async with await served.client() as other:
            served.app.go_on.clear()
            other.send(post(COLD, b"abc"))
            await asyncio.sleep(0.4)
            served.app.go_on.set()
            assert (await other.answer())[2] == b"3"
            assert await other.rest() == b""


async def test_a_loop_that_is_always_late_closes_what_is_idle_all_the_same():
    async with fronted(idle_s=0.1, head_s=0.1, body_s=0.1) as served, await served.client() as client:
        rest = asyncio.create_task(client.rest())
        for _ in range(20):
            time.sleep(0.1)  # noqa: ASYNC251  (that is the point)
            await asyncio.sleep(0)
            if rest.done():
                break
        assert rest.done()


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_connection_is_kept_for_a_while_after_its_last_answer(path):
    async with fronted() as served, await served.client() as client:
        client.send(post(path, b"abc"))
        await client.answer()
        (connection,) = served.front.connections
        connection.check(connection.loop.time() + FrontLimits().idle_s - 1)
        assert not connection.transport.is_closing()
        connection.check(connection.loop.time() + FrontLimits().idle_s + 1)
        assert await client.rest() == b""


async def test_a_connection_whose_last_message_was_answered_before_it_was_whole_is_closed_after_a_while_too():
    async with fronted() as served, await served.client() as client:
        served.app.read_body = False
        client.send(post(COLD, b"abc")[:-1])
        await client.answer()
        (connection,) = served.front.connections
        client.send(b"c")
        await until(lambda: not connection._phase)
        connection.check(connection.loop.time() + FrontLimits().idle_s - 1)
        assert not connection.transport.is_closing()
        connection.check(connection.loop.time() + FrontLimits().idle_s + 1)
        assert await client.rest() == b""


async def test_a_message_of_the_apps_that_was_answered_before_it_was_whole_is_to_be_whole_in_time_all_the_same():
    async with fronted() as served, await served.client() as client:
        served.app.read_body = False
        client.send(post(COLD, b"abc")[:-1])
        await client.answer()
        (connection,) = served.front.connections
        connection.check(connection.loop.time() + FrontLimits().body_s + 1)
        assert await client.rest() == b""
        assert served.front.refused == {"request_timeout": 1}


# Pace


async def test_a_client_that_reads_slowly_pauses_the_work_and_little_is_held_for_it():
    paused, events = asyncio.Event(), []
    may_send = asyncio.Event()
    may_send.set()
    piece, total, most = b"x" * 50_000, 0, 0

    async def fast(exchange):
        nonlocal total, most

        def on_pause():
            events.append("pause")
            may_send.clear()
            paused.set()

        def on_resume():
            events.append("resume")
            may_send.set()

        exchange.on_pause, exchange.on_resume = on_pause, on_resume
        exchange.begin(200, b"")
        (connection,) = served.front.connections
        for _ in range(600):
            await may_send.wait()
            exchange.send(piece)
            total += len(piece)
            most = max(most, connection.transport.get_write_buffer_size())
            await asyncio.sleep(0)
        exchange.finish()

    async with fronted(fast) as served:
        client = await served.client()  # whose reader stops at 128 KiB until it is asked
        client.send(post(HOT, b""))
        await asyncio.wait_for(paused.wait(), patience(5))
        await asyncio.sleep(0.05)
        assert total < 600 * len(piece)
        assert len((await client.answer())[2]) == 600 * len(piece)
        await client.__aexit__()
    assert most < 2**16 + 2 * len(piece)
    assert events[:2] == ["pause", "resume"]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_stops_reading_is_closed_and_one_that_reads_slowly_is_not(whole):
    cancelled = asyncio.Event()

    async def much(exchange):
        if whole:
            exchange.respond(200, b"", b"x" * 20_000_000)
            return
        exchange.begin(200, b"")
        exchange.send(b"x" * 20_000_000)
        try:
            await asyncio.sleep(0 if exchange.body == b"read" else 30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        exchange.finish()

    async with fronted(much, send_stall_s=0.5, idle_s=0.3) as served:
        async with await served.client() as client:
            client.send(post(HOT, b"stop"))
            await until(lambda: served.front.connections)
            await until(lambda: not served.front.connections)
            assert whole or cancelled.is_set()
        async with await served.client() as client:
            client.send(post(HOT, b"read", b"Connection: close"))
            got = 0
            while data := await client.reader.read(2_000_000):
                got += len(data)
                await asyncio.sleep(0.01)  # 1.6 s in all
            assert got > 20_000_000


async def test_what_comes_as_a_large_answer_is_written_is_told_that_its_client_reads_slowly():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"large"))
        await until(lambda: calls.exchanges)
        (connection,) = served.front.connections
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        connection.data_received(post(HOT, b"next"))
        await until(lambda: len(calls.exchanges) == 2 and calls.exchanges[1].is_paused)


def look_later(connection) -> None:
    """The watch over clients that read nothing, long from now: one look to note what is unsent, and one to compare."""
    for _ in range(2):
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + 1)


async def test_a_client_that_asks_on_and_reads_nothing_of_what_waits_for_it_is_closed():
    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: any(each.is_write_paused for each in served.front.connections))
        client.send(post(HOT, b"next"))
        await until(lambda: served.front.held_bytes == 4)
        (connection,) = served.front.connections
        look_later(connection)
        await until(lambda: not served.front.connections)
        assert served.seen == [(HOT, b"abc")]


async def test_a_client_that_reads_nothing_is_closed_though_ever_more_is_sent_to_it():
    work = Work()

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await work(exchange)

    async with fronted(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun and work.exchanges[0].is_paused)
        (connection,) = served.front.connections
        work.exchanges[0].send(b"x" * LARGE)
        await until(lambda: connection.transport.get_write_buffer_size() > LARGE)
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + 1)
        await until(lambda: not served.front.connections)
        await until(lambda: work.cancelled)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_reads_again_is_no_longer_watched_though_its_answer_is_its_last(version):
    work, paused, resumed = Work(say_last), asyncio.Event(), asyncio.Event()

    async def stream(exchange):
        exchange.on_pause, exchange.on_resume = paused.set, resumed.set
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await resumed.wait()
        await work(exchange)

    async with fronted(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close").replace(b"1.1", version))
        await asyncio.wait_for(paused.wait(), patience(5))
        reading = asyncio.create_task(client.reader.read())
        await until(lambda: work.begun)
        look_later(work.exchanges[0]._connection)
        work.go_on.set()
        assert b"last" in (await reading)[-20:]


@pytest.mark.parametrize("more", [b"", b"more"])
async def test_a_client_that_reads_is_not_closed_for_what_was_added_to_its_last_answer_after_it_was_paused(more):
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
    async with fronted(stream) as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Connection: close"))
        await until(lambda: work.begun and work.exchanges[0].is_paused)
        connection = work.exchanges[0]._connection
        client.send(more)
        await until(lambda: connection._drained_bytes == len(more))
        work.go_on.set()
        await until(lambda: work.exchanges[0].is_over)
        unsent = connection.transport.get_write_buffer_size()
        await client.reader.readexactly(LARGE // 4)
        await until(lambda: connection.transport.get_write_buffer_size() < unsent)
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + 1)
        assert len(await client.reader.read()) > LARGE


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("line", [b"Connection: close", b"Connection: keep-alive"])
async def test_a_client_that_does_not_read_its_last_answer_is_closed_though_nothing_was_paused_for_it(line, path):
    def is_closed():
        # Kept, it is idle first.
        more_s = FrontLimits().idle_s if line == b"Connection: keep-alive" else 1
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + more_s)
        return not served.front.connections

    async def large(exchange):
        exchange._connection.transport.set_write_buffer_limits(2 * LARGE)
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large) as served, await served.client() as client:
        served.app.answer = large_of(served)
        client.send(post(path, b"abc", line))
        await until(lambda: served.seen)
        (connection,) = served.front.connections
        await until(connection.transport.get_write_buffer_size)
        await until(is_closed)
        assert len(await client.rest()) < LARGE


async def test_a_client_that_reads_some_of_its_answer_and_then_no_more_is_closed():
    def is_closed():
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + 1)
        return not served.front.connections

    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: any(each.is_write_paused for each in served.front.connections))
        (connection,) = served.front.connections
        unsent = connection.transport.get_write_buffer_size()
        await client.reader.readexactly(LARGE // 4)
        await until(lambda: connection.transport.get_write_buffer_size() < unsent)
        assert not is_closed()
        await until(is_closed)


async def test_a_client_that_says_its_last_and_reads_nothing_of_what_waits_for_it_is_closed():
    async def large(exchange):
        exchange._connection.transport.set_write_buffer_limits(2 * LARGE)
        exchange.respond(200, b"", b"x" * LARGE)

    def is_closed():
        connection.check(connection.loop.time() + FrontLimits().send_stall_s + 1)
        return not served.front.connections

    async with fronted(large, idle_s=10**6) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: served.seen)
        (connection,) = served.front.connections
        await until(connection.transport.get_write_buffer_size)
        client.writer.write_eof()
        await until(is_closed)
        assert len(await client.rest()) < LARGE


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_client_that_says_its_last_when_it_is_answered_may_still_read_all_of_it(path):
    def large(exchange):
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large) as served, await served.client() as client:
        served.app.answer = large_of(served)
        client.send(post(path, b"abc"))
        await until(lambda: served.seen)
        (connection,) = served.front.connections
        await until(connection.transport.get_write_buffer_size)
        client.writer.write_eof()
        await until(connection.transport.is_closing)
        assert len((await client.answer())[2]) == LARGE
        assert await client.rest() == b""


async def test_the_app_waits_for_a_client_that_reads_too_slowly_and_goes_on_when_it_reads():
    pieces, sent = [b"x" * 2**20] * 64, 0

    async def stream(send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (64 << 20))]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b""})

    async with fronted() as served, await served.client() as client:
        served.app.answer = stream
        client.send(post(COLD, b"abc"))
        await until(lambda: sent and any(connection.is_write_paused for connection in served.front.connections))
        assert sent < 64
        assert (await client.answer())[2] == b"".join(pieces)


async def test_a_client_that_stops_half_way_through_its_last_answer_is_hung_up_on():
    async def large(exchange) -> None:
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large, send_stall_s=0.3) as served, await served.client() as client:
        await until(lambda: served.front.connections)
        (connection,) = served.front.connections
        connection.transport.set_write_buffer_limits(LARGE // 2, LARGE // 2)
        client.send(post(HOT, b"", b"Connection: close"))
        await until(lambda: connection.is_write_paused)
        while connection.is_write_paused:
            await client.reader.read(65536)
        await until(lambda: not served.front.connections)


async def test_an_answer_whose_handler_minds_no_slow_reader_comes_whole():
    exchanges, go_on = [], asyncio.Event()

    async def pieces(exchange) -> None:
        exchanges.append(exchange)
        exchange.begin(200, b"")
        exchange.send(b"x" * LARGE)
        await go_on.wait()
        exchange.finish(b"y")

    async with fronted(pieces) as served, await served.client() as client:
        client.send(post(HOT, b""))
        await until(lambda: exchanges and exchanges[0].is_paused)
        reading = asyncio.create_task(client.answer())
        await until(lambda: not exchanges[0].is_paused)
        go_on.set()
        assert (await reading)[2] == b"x" * LARGE + b"y"


async def test_a_client_that_was_watched_while_idle_is_not_at_its_next_request():
    work = Work(say_last)

    async def large_then_slow(exchange):
        if work.exchanges:
            exchange.begin(200, b"")
            exchange.send(b"first")
            await work(exchange)
            return
        work.exchanges.append(exchange)
        exchange._connection.transport.set_write_buffer_limits(2 * LARGE)  # never paused
        exchange.respond(200, b"", b"x" * LARGE)

    async with fronted(large_then_slow, idle_s=10.0) as served, await served.client() as client:
        client.send(post(HOT, b"abc"))
        await until(lambda: work.exchanges)
        (connection,) = served.front.connections
        await until(connection.transport.get_write_buffer_size)
        for reads in (False, True):
            connection.check(connection.loop.time() + 11)
            if not reads:
                await client.answer()
        client.send(post(HOT, b"abc"))
        await until(lambda: work.begun)
        look_later(connection)
        work.go_on.set()
        assert (await client.answer())[2] == b"firstlast"


# The end


@contextlib.asynccontextmanager
async def ending(handler):
    """A server in the hands of uvicorn, and what ends it as SIGTERM does."""
    sock = serve.bind("127.0.0.1", 0)
    made = front(lambda method, path: handler if path == HOT else None, FrontLimits())
    app = App([])
    server = serve._Server(serve.configured(app, grace_s=5.0, http=made), None)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    clients = []

    async def client() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
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


async def test_at_the_end_requests_in_flight_are_finished_and_then_closed():
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


async def test_while_it_drains_every_answer_ends_its_connection_and_new_ones_are_still_taken():
    async with fronted() as served:
        for path in (HOT, COLD):
            async with await served.client() as kept:
                kept.send(post(path, b"abc"))
                assert b"connection" not in (await kept.answer())[1]
                served.front.is_draining = True
                async with await served.client() as new:
                    for client in (kept, new):
                        client.send(post(path, b"abc"))
                        status, headers, body = await client.answer()
                        assert (status, headers[b"connection"], body) == (200, b"close", b"3")
                        assert await client.rest() == b""
            served.front.is_draining = False


async def test_after_an_answer_that_ends_its_connection_nothing_more_is_begun():
    async with fronted(lambda exchange: exchange.respond(200, b"", b"")) as served, await served.client() as client:
        served.front.is_draining = True
        client.send(post(HOT, b"abc"))
        assert (await client.answer())[1][b"connection"] == b"close"
        client.send(post(HOT, b"abc"))
        assert await client.rest() == b""
        assert len(served.seen) == 1


@pytest.mark.parametrize("came_before", [0, -1])
async def test_after_the_head_of_a_stream_that_ends_its_connection_nothing_more_is_worked_for(came_before):
    work = Work(say_last)

    async def stream(exchange):
        exchange.begin(200, b"")
        exchange.send(b"first")
        await work(exchange)

    async with fronted(stream) as served, await served.client() as client:
        served.front.is_draining = True
        following = post(HOT, b"next")
        client.send(post(HOT, b"one") + following[:came_before])
        await until(lambda: work.begun)
        assert served.front.held_bytes == 3
        (connection,) = served.front.connections
        assert not connection._body
        connection.check(connection.loop.time() + FrontLimits().body_s + 1)  # what was dropped is not waited for
        client.send(following[came_before:])
        await asyncio.sleep(0.02)
        work.go_on.set()
        status, headers, body = await client.answer()
        assert (status, headers[b"connection"], body) == (200, b"close", b"firstlast")
        assert await client.rest() == b""
        assert work.begun == 1


async def test_at_the_end_what_is_queued_behind_a_large_answer_is_finished_too():
    calls = Calls()
    async with fronted(calls) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        (connection,) = served.front.connections
        assert (connection._current, len(connection._queue)) == (None, 1)
        connection.shutdown()
        assert len((await client.answer())[2]) == LARGE
        await until(lambda: len(calls.exchanges) == 2)
        calls.exchanges[1].respond(200, b"", b"next")
        assert (await client.answer())[2] == b"next"
        assert await client.rest() == b""


async def test_a_message_of_the_apps_that_is_answered_before_it_is_whole_does_not_hold_up_the_end():
    async with ending(length) as (client, end, _, app), await client() as early:
        app.read_body = False
        early.send(post(COLD, b"abc")[:-1])
        await early.answer()
        task = end()
        await asyncio.sleep(0)
        early.send(b"c")
        assert await early.rest() == b""
        await asyncio.wait_for(task, patience(3))


async def test_at_the_end_nothing_is_begun_behind_a_message_that_was_answered_before_it_was_whole():
    async with fronted() as served, await served.client() as client:
        served.app.read_body, served.app.answer = False, large_of(served)
        client.send(post(COLD, b"abc")[:-1])
        await until(lambda: served.seen)
        (connection,) = served.front.connections
        await until(lambda: connection.transport.get_write_buffer_size() and not connection._is_cold_busy())
        connection.shutdown()
        client.send(b"c" + post(HOT, b"next"))
        await until(connection.transport.is_closing)
        assert len((await client.answer())[2]) == LARGE
        assert await client.rest() == b""
        assert served.seen == [(COLD, b"")]


async def test_at_the_end_what_is_half_here_behind_the_last_answer_is_waited_for_no_more():
    calls = Calls()
    async with fronted(calls, body_s=10.0) as served, await served.client() as client:
        client.send(post(HOT, b"abc") + post(HOT, b"half")[:-1])
        await until(lambda: calls.exchanges and served.front.held_bytes == 6)
        (connection,) = served.front.connections
        connection.shutdown()
        calls.exchanges[0].respond(200, b"", b"x" * LARGE)
        assert connection.transport.is_closing()
        connection.check(connection.loop.time() + 11)
        assert not served.front.refused
        assert len((await client.answer())[2]) == LARGE


async def test_what_is_not_done_when_the_time_to_end_is_over_is_told_so():
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
