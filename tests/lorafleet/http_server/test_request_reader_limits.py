"""Bodies and heads that are too large: what is refused, in which form, and what is held meanwhile."""

import asyncio
import contextlib
import json
import re

import pytest

from lorafleet.keys.roles import Caller
from tests.lorafleet.http_server.handlers import CHUNKED, Calls, Work
from tests.patience import patience, until
from tests.wires import COLD, HOT, MESSAGES, error_of, listening, post


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_can_read_the_413_to_a_body_too_large(path, chunked):
    async with listening(body_bytes=100_000) as served:
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
        assert served.listener.intake.room.held_bytes == 0
        async with await served.client() as client:
            client.send(post(path, body[:100_000]))
            assert (await client.answer())[2] == b"100000"


async def test_an_app_answer_that_has_begun_breaks_when_its_message_is_refused():
    async def begin(send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        begun.set()
        await served.app.left.wait()

    begun = asyncio.Event()
    async with listening(body_bytes=1000) as served, await served.client() as client:
        served.app.read_body, served.app.answer = False, begin
        client.send(post(COLD, b"x" * 10).split(b"\r\n\r\n")[0].replace(b"Content-Length: 10", CHUNKED) + b"\r\n\r\n")
        await asyncio.wait_for(begun.wait(), patience(5))
        client.send(b"fff\r\n" + b"x" * 0xFFF)
        said = await client.rest()
        assert not served.listener.connections  # at once: nothing that is left of it is sent
        served.app.left.set()
    assert said.endswith(b"\r\n\r\nbegun") or not said
    assert said.count(b"HTTP/1.1") <= 1


async def test_the_app_sees_a_disconnect_when_its_message_is_refused():
    async with listening(body_bytes=1000) as served, await served.client() as client:
        client.send(b"POST /cold HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: any(each.is_app_busy() for each in served.listener.connections))
        client.send(b"3e8\r\n" + b"x" * 1000)
        assert error_of(await client.rest()) == (413, "body_too_large")
        await asyncio.wait_for(served.app.left.wait(), patience(5))
        assert served.listener.connections  # it may still be sending what was refused


async def test_a_client_that_expects_100_continue_gets_the_413_at_once():
    async with listening(body_bytes=1000) as served:
        head = post(HOT, b"x" * 1001, b"Expect: 100-continue").split(b"\r\n\r\n")[0] + b"\r\n\r\n"
        assert error_of(await served.response_to(head)) == (413, "body_too_large")


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens?beta=true", HOT, COLD])
@pytest.mark.parametrize(
    ("more", "body", "status", "word"),
    [
        (b"Content-Length: 1001\r\n", b"", 413, "request_too_large"),
        (b"Transfer-Encoding: chunked\r\n", b"3e9\r\n" + b"x" * 1001, 413, "request_too_large"),
        (b"Expect: more\r\n", b"", 417, "invalid_request_error"),
    ],
)
async def test_requests_of_anthropics_clients_are_refused_in_anthropics_form(path, more, body, status, word):
    async with listening(body_bytes=1000) as served:
        said = await served.response_to(b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n%b" % (path.encode(), more, body))
    assert error_of(said)[0] == status
    cors_headers = json.loads(said.partition(b"\r\n\r\n")[2])
    found = (cors_headers.get("type"), cors_headers["error"]["type"])
    assert found == (("error", word) if "messages" in path else (None, "invalid_request_error"))


async def test_a_refusal_has_the_pages_headers_unless_the_app_has_the_request():
    def cors_headers(origin):
        return b"x-for: %b\r\n" % origin

    async with listening(cors_headers=cors_headers, body_bytes=1000) as served:
        for path, is_told in ((HOT, True), (COLD, False)):
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nOrigin: page\r\n%b\r\n\r\n" % (path.encode(), CHUNKED)
            said = await served.response_to(head + b"fff\r\n" + b"x" * 0xFFF)
            assert (error_of(said), b"x-for: page\r\n" in said) == ((413, "body_too_large"), is_told)
        for lines, is_told in ((b"", False), (b"Origin: page\r\nHost: a\r\n", True)):
            said = await served.response_to(b"GET / HTTP/1.1\r\n%bX : a\r\n\r\n" % lines)
            assert (error_of(said), b"x-for: page\r\n" in said) == ((400, "invalid_http"), is_told)


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("start", ["line", "header", "headers", "trailer", "trailers", "extension"])
async def test_a_head_without_end_is_refused(path, start):
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
    async with listening() as served, await served.client() as client:
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


async def test_a_large_head_is_refused_and_one_that_fits_is_served():
    async with listening() as served, await served.client() as client:
        client.send(post(HOT, b"x" * 200_000, *(b"x-%d: %b" % (n, b"v" * 100) for n in range(300))))
        assert (await client.answer())[0] == 200
        client.send(post(HOT, b"x", *(b"x-%d: %b" % (n, b"v" * 1000) for n in range(66))))
        assert error_of(await client.rest()) == (431, "head_too_large")


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 431)])
async def test_a_head_of_the_limit_is_served_and_a_larger_one_refused(size, status):
    async with listening(head_bytes=1000) as served:
        async with await served.client() as client:
            # Target and headers are counted: "/hot", "Host: a", "Content-Length: 0" and "X: xx...", 4 more for each.
            client.send(post(HOT, b"", b"X: " + b"x" * (size - 4 - 9 - 19 - 5)))
            assert (await client.answer())[0] == status
        async with await served.client() as client:
            head = post(HOT, b"", b"X: ").removesuffix(b"\r\n\r\n").ljust(size, b"x")
            client.send(head[:500])
            await until(lambda: any(each.bare_bytes == 500 for each in served.listener.connections))
            client.send(head[500:])
            await until(lambda: any(each.bare_bytes == size for each in served.listener.connections))
            client.send(b"\r\n\r\n")
            assert (await client.answer())[0] == status


async def test_all_bodies_together_are_bounded_and_the_next_is_refused_429():
    work = Work()
    async with listening(work, held_bytes=10_000) as served, await served.client() as first:
        first.send(post(HOT, b"x" * 9000))
        await until(lambda: work.begun)
        said = await served.response_to(post(HOT, b"x" * 1001))
        assert error_of(said) == (429, "saturated")
        assert b"retry-after: 1\r\n" in said, "it has just begun: nothing says that it takes long"
        assert served.listener.intake.room.held_bytes == 9000
        served.listener.intake.room.advance(asyncio.get_running_loop().time() + 30.0)
        said = await served.response_to(post(HOT, b"x" * 8000))
        assert int(re.search(rb"retry-after: (\d+)\r\n", said)[1]) > 20, "it has been there for half a minute"
        async with await served.client() as second:
            second.send(post(HOT, b"x" * 1000))
            await until(lambda: work.begun == 2)
            work.go_on.set()
            assert (await first.answer())[0] == (await second.answer())[0] == 200
        assert served.listener.intake.room.held_bytes == 0


async def test_a_tenants_bodies_are_bounded_and_answers_give_their_room_back():
    calls = Calls()

    def asking(tenant, size):
        return post(HOT, b"x" * size, b"Tenant: %b" % tenant)

    def caller_of(headers):
        return Caller(headers[b"tenant"].decode(), frozenset())

    async with listening(calls, caller_of=caller_of, tenant_bytes=1000) as served, contextlib.AsyncExitStack() as stack:
        first, second, third, other = [await stack.enter_async_context(await served.client()) for _ in range(4)]
        first.send(asking(b"a", 600))
        second.send(asking(b"a", 400))
        other.send(asking(b"b", 1000))
        await until(lambda: len(calls.exchanges) == 3)
        assert error_of(await served.response_to(asking(b"a", 1))) == (429, "saturated")
        calls.answer([len(each.body) for each in calls.exchanges].index(400))
        await second.answer()
        assert error_of(await served.response_to(asking(b"a", 401))) == (429, "saturated")
        third.send(asking(b"a", 400))
        await until(lambda: len(calls.exchanges) == 4)
        for number in range(4):
            calls.answer(number)
        assert [(await each.answer())[0] for each in (first, third, other)] == [200] * 3
        assert not served.listener.intake.room.held_of_tenant  # nor what there once was of a tenant
