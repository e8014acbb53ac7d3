"""A small GET over the pool: the whole body, or an error that says why not."""

import asyncio
from math import inf

import pytest

from router.http.engine_connection import EngineLost, Origin
from router.http.engine_pool import EnginePool
from router.http.fetch import FetchRefused, fetch, stream
from tests.patience import patience, until, within
from tests.wires import RawEngine, finished


@pytest.fixture
async def pool():
    made = EnginePool(connect_s=2.0)
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

    return RawEngine(script)


async def test_the_body_comes_whole_and_the_connection_is_used_again(pool):
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody") as agent:
        for _ in range(3):
            assert await fetch(pool, f"{agent.url}/agent", "/metadata", token="key", timeout_s=patience(5)) == b"body"
        assert agent.connections == 1
        assert agent.requests[0].startswith(b"GET /agent/metadata HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nauthorization: Bearer key\r\n" in agent.requests[0]


async def test_another_status_than_200_is_refused_with_what_was_answered(pool):
    async with answering(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 6\r\n\r\nno key") as agent:
        with pytest.raises(FetchRefused, match="/metadata: 401 b'no key'") as refused:
            await fetch(pool, agent.url, "/metadata", timeout_s=patience(5))
        assert (refused.value.status, refused.value.body) == (401, b"no key")


async def test_a_body_is_posted(pool):
    posted = asyncio.Queue()

    async def script(engine, reader, writer):
        while True:
            posted.put_nowait(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody")

    async with RawEngine(script) as agent:
        for _ in range(2):
            assert await fetch(pool, agent.url, "/load", body=b"{}", timeout_s=patience(5)) == b"body"
        assert agent.connections == 1
        said = posted.get_nowait()
        assert said.startswith(b"POST /load HTTP/1.1\r\n")
        lines = (b"content-type: application/json", b"content-length: 2", b"x-lorafleet-wire: 1")
        assert said.endswith(b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n{}")


async def test_fetch_repeats_once_after_a_stale_connection_only(pool):
    asked = []

    async def script(engine, reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if len(asked) < 3:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody")
        if len(asked) == 1:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
        await finished(writer)

    async with RawEngine(script) as agent:
        assert await fetch(pool, agent.url, "/metadata", timeout_s=patience(5)) == b"body"
        with pytest.raises(EngineLost):
            await fetch(pool, agent.url, "/metadata", timeout_s=patience(5))
        assert agent.connections == 2
        assert len(asked) == 3


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
            await fetch(pool, agent.url, "/metadata", timeout_s=patience(5), max_bytes=50)
        assert not pool.connections


async def test_an_answer_that_does_not_come_is_given_up(pool):
    async with answering(b"") as agent:
        with pytest.raises(EngineLost) as lost:
            await fetch(pool, agent.url, "/metadata", timeout_s=0.1)
        assert lost.value.reason == "no_answer_in_time"


async def test_one_that_is_cancelled_leaves_no_connection(pool):
    async with answering(b"") as agent:
        waiting = asyncio.create_task(fetch(pool, agent.url, "/metadata", timeout_s=patience(5)))
        await until(lambda: agent.requests)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not pool.connections


async def test_fetch_cancelled_at_its_answer_closes_no_other_requests_connection(pool, monkeypatch):
    release, is_free = pool.release, asyncio.Event()

    def and_tell(connection):
        release(connection)
        is_free.set()  # the task that waits for this runs before the one that waits for the answer

    async def second():
        await is_free.wait()
        first.cancel()
        return await fetch(pool, agent.url, "/second", timeout_s=patience(5))

    monkeypatch.setattr(pool, "release", and_tell)
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody") as agent:
        first = asyncio.create_task(fetch(pool, agent.url, "/first", timeout_s=patience(5)))
        async with within(3):
            assert await second() == b"body"
        assert first.cancelled()
        assert agent.connections == 1


async def whole(pool, url):
    return await fetch(pool, url, "/metadata", timeout_s=patience(5))


async def streamed(pool, url):
    async with stream(pool, url, "/events", idle_s=patience(5)) as answer:
        return [data async for data in answer]


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_head_may_come_as_late_as_that_and_no_later(pool, ask):
    async with answering(b"") as agent:
        asking = asyncio.create_task(ask(pool, agent.url))
        await until(lambda: agent.requests)
        (connection,) = pool.open_connections
        assert 0 < connection.deadline <= connection.loop.time() + patience(5)
        connection.deadline = 0.0
        with pytest.raises(EngineLost) as lost:
            await asking
        assert lost.value.reason == "no_answer_in_time"


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("comes", ["its answer", "its end"])
async def test_answer_arriving_as_its_fetch_is_cancelled_is_dropped(pool, ask, comes):
    async with answering(b"") as agent:
        asking = asyncio.create_task(ask(pool, agent.url))
        await until(lambda: agent.requests)
        (connection,) = pool.open_connections
        asking.cancel()
        if comes == "its answer":
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody")
        else:
            connection.connection_lost(None)
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_answer_of_the_largest_size_and_empty_stream_are_allowed(pool):
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody") as agent:
        assert await fetch(pool, agent.url, "/metadata", timeout_s=patience(5), max_bytes=4) == b"body"
    async with (
        answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as agent,
        stream(pool, agent.url, "/events", idle_s=patience(5)) as answer,
    ):
        assert [data async for data in answer] == []


async def test_stream_arrives_as_sent_and_its_connection_is_reused(pool):
    more = asyncio.Event()

    async def script(engine, reader, writer):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            await more.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with RawEngine(script) as agent:
        for _ in range(2):
            got = []
            more.clear()
            async with stream(pool, agent.url, "/v1/kv/stream?since=1", idle_s=patience(5)) as answer:
                assert answer.status == 200
                async for data in answer:
                    got.append(data)
                    more.set()
            assert b"".join(got) == b"onetwo"
            assert got[0] == b"one"
        assert agent.connections == 1


async def test_stream_is_lost_by_idle_time_and_paused_by_unread_bytes(pool):
    more = asyncio.Event()

    async def script(engine, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await more.wait()
        writer.write(b"3\r\none\r\n")
        await reader.read()

    async with RawEngine(script) as agent, stream(pool, agent.url, "/events", idle_s=patience(5)) as answer:
        connection = answer.connection
        connection.deadline = inf
        more.set()
        await until(lambda: answer.unread)
        assert 0 < connection.deadline <= connection.loop.time() + patience(5)
        assert not connection.is_paused


async def test_abandoned_stream_is_closed_and_silent_stream_is_lost(pool):
    async with answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n") as agent:
        async with stream(pool, agent.url, "/events", idle_s=patience(5)) as answer:
            async for data in answer:
                assert data == b"one"
                break
        await until(lambda: not agent.open)
        assert not pool.connections
        async with stream(pool, agent.url, "/events", idle_s=0.1) as answer:
            with pytest.raises(EngineLost) as lost:
                _ = [data async for data in answer]
        assert lost.value.reason == "no_answer_in_time"


async def test_a_stream_that_nobody_reads_holds_its_sender_back(pool):
    sent = 0

    async def script(engine, reader, writer):
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1
        await reader.read()  # drained is not sent: an end now would take the last of it away

    async with RawEngine(script) as agent, stream(pool, agent.url, "/events", idle_s=patience(30)) as answer:
        await until(lambda: answer.connection.is_paused)
        # The kernel keeps some megabytes on the way, and more where it has many.
        assert sent < 64
        assert sum([len(data) async for data in answer]) == 64 << 20


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_stream_without_a_head_is_lost_when_its_sender_leaves(pool, said):
    async with answering(said, closes=True) as agent:
        with pytest.raises(EngineLost) as lost:
            async with within(5), stream(pool, agent.url, "/events", idle_s=patience(30)):
                pass
        assert lost.value.reason == "no_answer"
        assert not pool.connections


@pytest.mark.parametrize(("more", "reason"), [(b"HTTP/1.1 2", "no_answer"), (None, "no_answer_in_time")])
async def test_fetch_does_not_repeat_after_any_byte_or_timeout(pool, more, reason):
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"

    async def script(engine, reader, writer):
        engine.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(whole)
        engine.requests.append(await reader.readuntil(b"\r\n\r\n"))
        if more is None:
            await reader.read()
        else:
            writer.write(more)
            await finished(writer)

    async with RawEngine(script) as agent:
        assert await fetch(pool, agent.url, "/metadata", timeout_s=patience(5)) == b"body"
        with pytest.raises(EngineLost) as lost:
            await fetch(pool, agent.url, "/metadata", timeout_s=0.3 if more is None else patience(5))
        assert lost.value.reason == reason
        assert (agent.connections, len(agent.requests)) == (1, 2)
        assert not pool.connections


async def test_bytes_arriving_during_iteration_are_read_before_the_end(pool):
    more, got = asyncio.Event(), []

    async def script(engine, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        await reader.read()

    async with RawEngine(script) as agent, stream(pool, agent.url, "/events", idle_s=patience(5)) as answer:
        async for data in answer:
            got.append(data)
            more.set()
            await until(lambda: answer.has_ended)
    assert got == [b"one", b"two"]


async def test_reading_an_ended_stream_does_not_touch_its_connection(pool):
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none") as agent:
        async with stream(pool, agent.url, "/events", idle_s=patience(5)) as answer:
            await until(lambda: answer.has_ended)
            connection = pool.take_idle(Origin.parse(agent.url))
            connection.pause()
            assert [data async for data in answer] == [b"one"]
            assert connection.is_paused
        assert pool.connections == 1
        connection.close()
