"""A request that asks for another protocol is served in this one, whole."""

import pytest

from tests.lorafleet.http_server.test_framing import H2C, SMUGGLED, TE
from tests.wires import COLD, HOT, error_of, length, listening, parsed_head, post

BODY = b"b" * 300_000


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_a_large_body_behind_an_upgrade_arrives_whole(path):
    whole = post(path, BODY, *H2C.splitlines())
    async with listening() as served, await served.client() as client:
        for _ in range(3):
            client.send(whole)
            assert (await client.answer())[2] == b"300000"
        assert served.seen == [(path, BODY)] * 3


async def test_pipelined_upgrades_with_bodies_are_answered_in_order():
    async with listening() as served, await served.client() as client:
        client.send(b"".join(post(HOT, b"x" * size, *H2C.splitlines()) for size in range(10)))
        assert [(await client.answer())[2] for _ in range(10)] == [b"%d" % size for size in range(10)]


async def test_a_handler_sees_neither_the_upgrade_nor_its_settings():
    seen = []

    async def keep(exchange):
        seen.append(exchange.headers)
        await length(exchange)

    async with listening(keep) as served, await served.client() as client:
        client.send(post(HOT, b"{}", *H2C.splitlines(), b"Authorization: Bearer a"))
        await client.answer()
        client.send(post(COLD, b"{}", *H2C.splitlines()))
        await client.answer()
        connection = b"Upgrade, HTTP2-Settings"
        assert seen[0].pop(b"connection") == dict(served.app.headers).pop(b"connection") == connection
    assert seen == [{b"host": b"a", b"content-length": b"2", b"authorization": b"Bearer a"}]


@pytest.mark.parametrize("path", [HOT, COLD])
async def test_an_upgrade_that_says_close_is_the_last_on_its_connection(path):
    async with listening() as served:
        said = await served.response_to(post(path, b"abc", b"Connection: close, Upgrade", b"Upgrade: h2c") + SMUGGLED)
        status, headers = parsed_head(said.partition(b"\r\n\r\n")[0])
        assert (status, headers[b"connection"]) == (200, b"close")
        assert served.seen == [(path, b"abc")]


@pytest.mark.parametrize(
    ("limits", "more", "expected"),
    [
        ({"body_bytes": 1000}, b"Content-Length: 1001\r\n\r\n", (413, "body_too_large")),
        ({"head_bytes": 1024}, b"X: " + b"y" * 2000 + b"\r\n\r\n", (431, "head_too_large")),
        ({"body_s": 0.1}, TE + b"\r\n3\r\nab", (408, "request_timeout")),
    ],
)
@pytest.mark.parametrize("path", [HOT, COLD])
async def test_limits_hold_for_a_request_that_asks_for_an_upgrade(path, limits, more, expected):
    async with listening(**limits) as served:
        said = await served.response_to(b"POST %b HTTP/1.1\r\nHost: a\r\n%b%b" % (path.encode(), H2C, more))
        assert error_of(said) == expected
        assert not served.seen


async def test_client_waiting_for_100_continue_gets_it_once():
    async with listening() as served, await served.client() as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: a\r\n%bExpect: 100-continue\r\n" % (HOT.encode(), H2C))
        client.send(b"Content-Length: 3\r\n\r\n")
        assert (await client.answer())[0] == 100
        client.send(b"abc")
        assert (await client.answer())[2] == b"3"


WEBSOCKET = (b"Upgrade: WebSocket", b"Connection: keep-alive, Upgrade", b"Sec-WebSocket-Version: 13")


@pytest.mark.parametrize("path", [HOT, COLD, "/v1/realtime"])
async def test_a_websocket_is_answered_with_426_and_what_to_do_instead(path):
    lines = [b"GET %b HTTP/1.1" % path.encode(), b"Host: a", *WEBSOCKET, b"Sec-WebSocket-Key: x", b"", b""]
    async with listening() as served:
        said = await served.response_to(b"\r\n".join(lines))
        status, headers = parsed_head(said.partition(b"\r\n\r\n")[0])
        assert (status, headers[b"upgrade"], error_of(said)) == (426, b"HTTP/1.1", (426, "upgrade_required"))
        assert b"send an HTTP request" in said
        assert served.seen == []
