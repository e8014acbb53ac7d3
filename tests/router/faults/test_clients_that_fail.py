"""Clients that leave at any moment, send nonsense, too much or too slowly, before a whole router."""

import asyncio
import gzip
import json
import socket
import struct

import pytest

from tests.patience import patience, until
from tests.router.doubles import BASE
from tests.router.faults.faulty_fleet import (
    CHAT,
    COMPLETIONS,
    EVENTS,
    STREAM_HEAD,
    WHOLE,
    error_of,
    faulty_fleet,
    pieces,
    saying,
)

AT_ONCE = 200


def request(body: bytes, path: str = COMPLETIONS) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" % path.encode()
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def asking(prompt: str, **more) -> bytes:
    return request(json.dumps({"model": BASE, "prompt": prompt, **more}).encode())


@pytest.mark.parametrize("leave", ["end", "reset"])
@pytest.mark.parametrize("aborts", [600, pytest.param(5000, marks=pytest.mark.thorough)])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(leave, aborts):
    """Before, in the middle of and after their request, and after the first event."""
    begun = saying(STREAM_HEAD + pieces(EVENTS[0]), "hang")
    async with faulty_fleet(2) as router:
        router.play.usual = begun
        loop = asyncio.get_running_loop()
        whole = asking("gone", stream=True)
        cuts = {"in the head": 40, "before the body": whole.index(b"\r\n\r\n") + 4, "in the body": len(whole) - 10}
        moments = [*cuts, "after the request", "after the first event"]

        async def abort(number: int) -> None:
            moment = moments[number % len(moments)]
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", router.port))
                await loop.sock_sendall(sock, whole[: cuts.get(moment, len(whole))])
                if moment == "after the first event":
                    await loop.sock_recv(sock, 65536)
                if leave == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        for first in range(0, aborts, AT_ONCE):
            await asyncio.gather(*(abort(number) for number in range(first, first + AT_ONCE)))
        assert router.play.asked["gone"] >= aborts // len(moments)
        router.play.usual = saying(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE))
        assert (await router.ask("still here")).content == WHOLE
        await until(router.is_idle)


async def test_a_client_that_says_no_more_has_left_and_its_engine_stops():
    async with faulty_fleet(1) as router:
        router.play.usual = saying(STREAM_HEAD + pieces(EVENTS[0]), "hang")
        async with await router.raw() as client:
            client.send(asking("half", stream=True))
            await client.reader.readuntil(EVENTS[0])
            client.writer.write_eof()
            await asyncio.wait_for(router.engines[0].closed.wait(), patience(5))
            assert not router.engines[0].open


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        (b"POST", "/generate", "/generate"),
        (b"GET", "/v1/responses/resp_1", "/v1/responses/{id}"),
        (b"POST", "/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
    ],
)
async def test_client_leaving_before_its_work_begins_is_counted(method, path, route):
    async with faulty_fleet(1) as router, await router.raw() as client:
        await until(lambda: router.listener.connections)
        (connection,) = router.listener.connections
        connection.data_received(request(b'{"text": "gone"}', path).replace(b"POST", method))
        connection.loop.call_soon(connection.hang_up)  # behind the batch, before the task's first step
        await client.rest()
        assert router.parts.metrics.requests.labels(route, 499, "").value == 1
        assert not router.play.asked


INVALID = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'{"model": "tiny-qwen"',
    b'\xff\xfe{"model": "tiny-qwen"}',
    b'{"model": "\\ud800"}',
    b'{"model": 3, "prompt": "x"}',
    b'{"model": {"a": 1}}',
    b'{"model": "tiny-qwen", "lora_id": [1]}',
    b'{"model": "' + b"a" * 100_000 + b'"}',
    b"a" * 1000,
    '{"model": "tiny-qwen"}'.encode("utf-16"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate", "/v1/messages", "/v1/responses", "/v1/route"])
async def test_invalid_body_is_refused_and_reaches_no_engine(path):
    async with faulty_fleet(1) as router:
        for body in INVALID:
            answer = await router.client.post(path, content=body)
            assert 400 <= answer.status_code < 500, (body[:50], answer.text)
            assert {"message", "type", "param", "code"} == answer.json()["error"].keys()
        assert not router.play.asked


@pytest.mark.parametrize("value", [b'"\xff\xfe"', b'"\x00"', b"nul", b"[1", b'"\\ud800"'])
async def test_bad_json_in_an_unread_field_reaches_the_engine(value):
    refusal = b'{"error": {"message": "no"}}'

    async def strict(engine, reader, writer):
        await engine.request(reader)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(refusal), refusal))

    async with faulty_fleet(1) as router:
        router.engines[0].script = strict
        for field, path in ((b"prompt", COMPLETIONS), (b"messages", CHAT), (b"user", CHAT), (b"x", CHAT)):
            answer = await router.client.post(path, content=b'{"model": "tiny-qwen", "%b": %b}' % (field, value))
            assert answer.status_code == 400, (field, answer.text)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("size", "small", "large"),
    [
        (5_000_000, {"max_body_bytes": 4 * 2**20}, {}),
        pytest.param(50_000_000, {}, {"max_body_bytes": 64 * 2**20}, marks=pytest.mark.thorough),
    ],
)
async def test_a_large_body_is_refused_or_reaches_its_engine_whole(chunked, size, small, large):
    prompt = "a" * size
    body, as_json = json.dumps({"model": BASE, "prompt": prompt}).encode(), {"content-type": "application/json"}

    async def parts():
        for at in range(0, len(body), 10**6):
            yield body[at : at + 10**6]

    async with faulty_fleet(1, **small) as router:
        answer = await router.client.post(COMPLETIONS, content=parts() if chunked else body, headers=as_json)
        assert error_of(answer) == (413, "body_too_large")
        assert not router.play.asked
    async with faulty_fleet(1, **large) as router:
        answer = await router.client.post(COMPLETIONS, content=parts() if chunked else body, headers=as_json)
        assert (answer.status_code, answer.content) == (200, WHOLE)
        assert len(router.engines[0].requests[0]) >= len(prompt)


async def test_clients_that_send_too_slowly_are_ended_and_delay_nobody():
    async with faulty_fleet(1) as router:
        whole = asking("slow")
        halves = [whole[:20], whole[:-5]]  # in the head, in the body

        async def slow(number: int) -> bytes:
            async with await router.raw() as client:
                client.send(halves[number % 2])
                for _ in range(4):
                    await asyncio.sleep(0)
                    client.send(b"x")
                return await client.rest()

        def half_sent() -> list:
            return [connection for connection in router.listener.connections if connection.phase]

        slow_ones = [asyncio.create_task(slow(number)) for number in range(200)]
        quick = [await router.ask(f"quick {number}") for number in range(20)]
        assert [answer.status_code for answer in quick] == [200] * 20
        await until(lambda: len(half_sent()) == 200)
        for connection in half_sent():
            connection.check_deadlines(connection.loop.time() + 10**6)
        said = await asyncio.gather(*slow_ones)
        assert {answer.split(b"\r\n", 1)[0] for answer in said} == {b"HTTP/1.1 408 Request Timeout"}
        assert router.play.asked["slow"] == 0
        assert router.listener.intake.refusals["request_timeout"] == 200


async def test_client_reading_nothing_is_cut_off_and_its_engine_stops():
    event = b"data: " + b"a" * 60_000 + b"\n\n"
    async with faulty_fleet(1, send_timeout_s=0.3) as router:
        router.play.usual = saying(STREAM_HEAD + pieces(EVENTS[0]) + pieces(event) * 1000, "hang")
        async with await router.raw() as client:
            client.writer.transport.pause_reading()
            client.send(asking("greedy", stream=True))
            await asyncio.wait_for(router.engines[0].closed.wait(), patience(10))
            await until(router.is_idle)


@pytest.mark.parametrize("path", [COMPLETIONS, "/generate"])
async def test_a_compressed_body_is_refused_as_such_and_a_plain_one_is_not(path):
    body = json.dumps({"text": "x"} if path == "/generate" else {"model": BASE, "prompt": "x"}).encode()
    headers = {"content-type": "application/json"}
    async with faulty_fleet(1) as router:
        sent = headers | {"content-encoding": "gzip"}
        refused = await router.client.post(path, content=gzip.compress(body), headers=sent)
        assert error_of(refused) == (400, "invalid_request_body")
        assert "content-encoding is 'gzip'" in refused.json()["error"]["message"]
        for coding in ("identity", "utf-8"):
            taken = await router.client.post(path, content=b" " + body, headers=headers | {"content-encoding": coding})
            assert "content-encoding" not in taken.text
