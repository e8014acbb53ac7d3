"""A small GET over the pool: the whole body, or an error that says why not."""

import asyncio

import pytest

from router.relay.fetch import Refused, fetch
from router.relay.upstream import EngineLost, Pool
from tests.router.relay.wires import Engine, finished, until


@pytest.fixture
async def pool():
    made = Pool(connect_s=2.0)
    yield made
    await made.close()


def answering(raw, *, closes=False):
    """To each GET these bytes; none: nothing."""

    async def script(engine, reader, writer):
        while True:
            engine.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(raw)
            await writer.drain()
            if closes:
                return await finished(writer)

    return Engine(script)


async def test_the_body_comes_whole_and_the_connection_is_used_again(pool):
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody") as agent:
        for _ in range(3):
            assert await fetch(pool, f"{agent.url}/agent", "/metadata", token="key", timeout_s=5) == b"body"
        assert agent.connections == 1
        assert agent.requests[0].startswith(b"GET /agent/metadata HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nauthorization: Bearer key\r\n" in agent.requests[0]


async def test_another_status_than_200_is_refused_with_what_was_answered(pool):
    async with answering(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 6\r\n\r\nno key") as agent:
        with pytest.raises(Refused, match="/metadata: 401 b'no key'"):
            await fetch(pool, agent.url, "/metadata", timeout_s=5)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbo", "closed"),
        (b"not HTTP\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + b"x" * 99, "over 50 bytes"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(pool, raw, why):
    async with answering(raw, closes=True) as agent:
        with pytest.raises(EngineLost, match=why):
            await fetch(pool, agent.url, "/metadata", timeout_s=5, most_bytes=50)
        assert not pool.connections


async def test_an_answer_that_does_not_come_is_given_up(pool):
    async with answering(b"") as agent:
        with pytest.raises(EngineLost) as lost:
            await fetch(pool, agent.url, "/metadata", timeout_s=0.1)
        assert lost.value.reason == "no_answer_in_time"


async def test_one_that_is_cancelled_leaves_no_connection(pool):
    async with answering(b"") as agent:
        waiting = asyncio.create_task(fetch(pool, agent.url, "/metadata", timeout_s=5))
        await until(lambda: agent.requests)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not pool.connections
