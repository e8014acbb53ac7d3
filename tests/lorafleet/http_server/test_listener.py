"""The connections of a service without hot routes, such as orchestrator and agent: each has its limits."""

import asyncio
import contextlib
import json

import pytest

from lorafleet.http_server import serve
from lorafleet.http_server.intake import ClientLimits
from lorafleet.http_server.listener import HttpListener, listener_for_app
from tests.lorafleet.test_serve import length
from tests.patience import within
from tests.wires import RawClient, error_of

SOON = ClientLimits(head_s=0.05, body_s=0.05, idle_s=0.05)


@contextlib.asynccontextmanager
async def served(limits: ClientLimits | None = None):
    """Clients of an app that is served in a service's own way."""
    sock = serve.bind("127.0.0.1", 0)
    config = serve.uvicorn_config(length, grace_s=1.0, http=listener_for_app(limits) if limits else None)
    server = serve.DrainingServer(config, None)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([sock])

    async def client() -> RawClient:
        return RawClient(*await asyncio.open_connection(*sock.getsockname()))

    try:
        yield client
    finally:
        await server.shutdown([sock])


def test_a_service_has_the_http_servers_limits_by_default():
    http = serve.uvicorn_config(length, grace_s=1.0).http
    assert isinstance(http, HttpListener)
    assert http.intake.limits == ClientLimits(body_bytes=16 * 2**20)
    assert (http.intake.limits.head_s, http.intake.limits.body_s, http.intake.limits.idle_s) == (15.0, 60.0, 75.0)


async def test_a_silent_connection_is_closed():
    async with served(SOON) as client, await client() as silent:
        assert await silent.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET",
        b"GET /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: ",
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab",
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
async def test_half_a_message_is_answered_408_and_closed(sent):
    async with served(SOON) as client, await client() as slow:
        slow.send(sent)
        assert error_of(await slow.rest()) == (408, "request_timeout")


async def test_an_idle_connection_is_closed_after_its_answer():
    async with served(SOON) as client, await client() as idle:
        idle.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await idle.answer())[2] == b"0"
        assert await idle.rest() == b""


@pytest.mark.parametrize("zeros", [17, 4299, 4300, 5000, 60_000])
async def test_a_content_length_of_many_zeros_is_refused_and_not_a_traceback(zeros, caplog):
    async with served() as client, await client() as odd:
        odd.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %b200\r\n\r\n" % (b"0" * zeros))
        odd.send(b"b" * 200)
        if zeros <= 17:
            assert (await odd.answer())[2] == b"200"
        else:
            assert error_of(await odd.rest()) == (400, "invalid_http")
    assert "Traceback" not in caplog.text


async def test_a_head_that_is_too_large_is_answered_in_the_envelope():
    async with served() as client, await client() as large:
        large.send(b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"y" * 70_000))
        assert error_of(await large.rest()) == (431, "head_too_large")


async def test_an_upgrade_is_ignored_and_its_body_is_read():
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    head += b"Upgrade: h2c\r\nHTTP2-Settings: A\r\n"
    async with served() as client, await client() as java:
        for body in (b"{}", b"b" * 100_000):
            java.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert (await java.answer())[2] == b"%d" % len(body)


async def test_invalid_http_is_answered_in_the_error_envelope():
    async with served() as client, await client() as odd:
        odd.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        async with within(10):
            said = await odd.rest()
        assert error_of(said) == (400, "invalid_http")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
