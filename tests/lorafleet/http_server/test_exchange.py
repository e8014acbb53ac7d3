"""What a handler is given and what its client gets: requests, whole answers, answers in pieces, errors."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from lorafleet.http_server.batches import leave_batch
from tests.lorafleet.http_server.handlers import Calls, Work
from tests.patience import until
from tests.wires import COLD, HOT, error_of, listening, parsed_head, post


async def test_a_handler_sees_the_request_as_it_was_sent():
    seen = []

    async def keep(exchange):
        seen.append(exchange)
        exchange.respond(200, b"", b"")

    async with listening(keep) as served, await served.client() as client:
        client.send(post("/hot?a=%20b", b"{}", b"X-Two: 1", b"x-two: 2", b"Accept: */*"))
        await client.answer()
    (exchange,) = seen
    assert (exchange.method, exchange.path, exchange.query, exchange.body) == ("POST", "/hot", b"a=%20b", b"{}")
    assert exchange.headers == {b"host": b"a", b"content-length": b"2", b"x-two": b"1", b"accept": b"*/*"}
    assert exchange.status == 200


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 3_000_000])
async def test_bodies_of_any_size_arrive_whole_in_reads_of_any_size(size):
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with listening() as served, await served.client() as client:
        for path in (HOT, COLD, HOT):
            client.send(post(path, body))
            assert (await client.answer())[2] == str(size).encode()
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[at : at + 999] for at in range(0, size, 999)))
        client.send(b"POST /hot HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
        assert (await client.answer())[2] == str(size).encode()
        assert {seen[1] for seen in served.seen} == {body}


async def test_an_answer_in_pieces_is_chunked_and_the_connection_stays_open():
    async def pieces(exchange):
        await leave_batch()
        exchange.begin(200, b"content-type: text/event-stream\r\n")
        for piece in (b"one", b"", b"t" * 5000):
            exchange.send(piece)
            await asyncio.sleep(0)
        exchange.finish(exchange.body)

    async with listening(pieces) as served, await served.client() as client:
        for last in (b"", b"last"):
            client.send(post(HOT, last))
            status, headers, body = await client.answer()
            assert (status, body) == (200, b"one" + b"t" * 5000 + last)
            assert headers == {b"content-type": b"text/event-stream", b"transfer-encoding": b"chunked"}
        said = await served.response_to(b"POST /hot HTTP/1.0\r\nContent-Length: 4\r\n\r\nlast")
        head, _, body = said.partition(b"\r\n\r\n")
        assert parsed_head(head)[1] == {b"content-type": b"text/event-stream", b"connection": b"close"}
        assert body == b"one" + b"t" * 5000 + b"last"


async def test_an_empty_answer_in_pieces_still_has_its_head():
    async def nothing(exchange):
        exchange.begin(200, b"")
        exchange.finish()

    async with listening(nothing) as served, await served.client() as client:
        client.send(post(HOT, b""))
        assert (await client.answer())[::2] == (200, b"")


async def test_a_204_has_no_length():
    async def none(exchange):
        exchange.respond(204, b"", b"")

    async with listening(none) as served, await served.client() as client:
        client.send(post(HOT, b""))
        assert await client.answer() == (204, {}, b"")


async def test_an_answer_to_head_has_a_length_and_no_body():
    async with listening() as served, await served.client() as client:
        client.send(b"HEAD /hot HTTP/1.1\r\nHost: a\r\n\r\n" + post(HOT, b"abc"))
        status, headers = parsed_head(await client.reader.readuntil(b"\r\n\r\n"))
        assert (status, headers[b"content-length"]) == (200, b"1")
        assert (await client.answer())[::2] == (200, b"3")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("raises", [False, True])
async def test_a_failing_handler_is_answered_500_or_its_stream_is_broken(begun, raises):
    async def bad(exchange):
        if begun:
            exchange.begin(200, b"")
            exchange.send(b"some")
        if raises:
            raise RuntimeError("secret")

    with capture_logs() as logs:
        async with listening(bad) as served, await served.client() as client:
            client.send(post(HOT, b"x", b"Connection: close"))
            said = await client.rest()
    if begun:
        assert said.endswith(b"\r\n\r\n4\r\nsome\r\n")
    else:
        assert error_of(said) == (500, "internal_error")
        assert b"retry-after" not in said
    assert b"secret" not in said
    assert [each["event"] for each in logs] == ["unexpected error" if raises else "a handler ended without an answer"]


async def test_a_handler_that_answers_logs_nothing():
    with capture_logs() as logs:
        async with listening() as served, await served.client() as client:
            client.send(post(HOT, b"x"))
            await client.answer()
    assert not logs


async def test_a_handler_that_raises_without_a_task_is_answered_500():
    def broken(_exchange):
        raise RuntimeError("a defect")

    with capture_logs() as logs:
        async with listening(broken) as served, await served.client() as client:
            for _ in range(2):
                client.send(post(HOT, b"abc"))
                status, _, body = await client.answer()
                assert (status, b"RuntimeError" in body, b"a defect" in body) == (500, True, False)
            assert not served.listener.intake.refusals
    assert [each["event"] for each in logs] == ["unexpected error"] * 2


async def test_an_unexpected_error_is_a_500_and_closes_its_connection():
    def caller_of(_headers):
        raise RuntimeError("secret")

    with capture_logs() as logs:
        async with listening(caller_of=caller_of) as served:
            said = await served.response_to(post(HOT, b"abc"))
            assert error_of(said) == (500, "internal_error")
            assert not served.seen
    assert b"secret" not in said
    assert [each["event"] for each in logs] == ["unexpected error"]


async def test_a_handler_without_a_task_may_answer_later_or_start_one():
    calls, work = Calls(), Work()

    async def handler(exchange):
        if not calls.exchanges:
            await calls(exchange)
        else:
            await work(exchange)

    async with listening(handler) as served, await served.client() as client:
        client.send(post(HOT, b"abc") * 2)
        await until(lambda: calls.exchanges)
        calls.answer(0, b"one")
        assert (await client.answer())[2] == b"one"
        await until(lambda: work.begun)
        work.go_on.set()
        assert (await client.answer())[2] == b"3"
    assert not calls.gone


async def test_the_app_serves_every_other_path_on_the_same_connection():
    async with listening() as served, await served.client() as client:
        for path in (HOT, COLD, HOT, HOT, COLD, COLD, HOT):
            client.send(post(path, path.encode()))
            assert (await client.answer())[2] == b"%d" % len(path)
        assert [path for path, _ in served.seen] == [HOT, COLD, HOT, HOT, COLD, COLD, HOT]


async def test_a_post_with_preflight_headers_is_not_for_the_app():
    async with listening(cors_headers=lambda _origin: b"") as served, await served.client() as client:
        client.send(post(HOT, b"abc", b"Origin: page", b"Access-Control-Request-Method: POST"))
        assert (await client.answer())[1][b"content-type"] == b"text/plain"  # which the app's has not


async def test_a_clients_connection_sends_without_delay():
    async with listening(work := Work()) as served, await served.client() as client:
        client.send(post(HOT, b""))
        await until(lambda: work.begun)
        (connection,) = served.listener.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        work.go_on.set()
        await client.answer()
