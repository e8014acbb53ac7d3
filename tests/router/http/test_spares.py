"""Unused connections that are kept open for the next burst: how many, how long, and what an engine makes of them."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.engine_connection import Origin
from router.http.engine_pool import EnginePool
from router.http.spares import SpareBook
from tests.patience import patience, until
from tests.router.http.test_engine_pool import OK
from tests.wires import RawEngine, RecordingSink, finished, saying

ORIGINS = [Origin.parse(f"http://127.0.0.1:{port}") for port in (1, 2, 3)]
COUNTS = st.fixed_dictionaries({origin: st.integers(0, 9) for origin in ORIGINS})


@given(st.lists(st.tuples(st.floats(0, 90), COUNTS, COUNTS), min_size=1, max_size=12), st.integers(0, 6))
def test_as_many_are_asked_for_as_the_most_in_use_of_the_last_minute_leave_missing(seconds, most):
    book, now, seen = SpareBook(most), 0.0, []
    for pause_s, used, spare in seconds:
        now += pause_s
        seen.append((now, used))
        book.record_used(used, now)
        asked = Counter(book.missing(used, spare, now, at_most=100))
        for origin in ORIGINS:
            recent = max(counts[origin] for at, counts in seen if now - at <= book.keep_s)
            ever = max(counts[origin] for _, counts in seen)
            assert asked[origin] >= max(0, min(used[origin], most) - used[origin] - spare[origin])
            assert asked[origin] <= max(0, min(ever, most) - used[origin] - spare[origin])
            if recent == used[origin]:
                assert asked[origin] == 0 or ever > recent
        assert sum(Counter(book.missing(used, spare, now, at_most=2)).values()) == min(2, sum(asked.values()))


def test_after_a_minute_without_such_a_burst_none_is_asked_for():
    book, (origin, *_) = SpareBook(64), ORIGINS
    book.record_used({origin: 10}, 0.0)
    book.record_used({}, 1.0)
    assert list(book.missing({}, {origin: 4}, 1.0, at_most=100)) == [origin] * 6
    book.record_used({}, 61.5)
    assert not list(book.missing({}, {}, 61.5, at_most=100))


def test_an_engine_that_closes_an_unused_connection_gets_none_for_a_minute():
    book, (origin, other, *_) = SpareBook(64), ORIGINS
    book.record_used({origin: 2, other: 1}, 0.0)
    book.record_closed(origin, 1.0, 60.0)
    book.record_closed(other, 60.1, 60.0)  # its time was up
    assert list(book.missing({}, {}, 2.0, at_most=100)) == [other]
    book.record_used({origin: 2}, 61.5)
    assert list(book.missing({}, {}, 61.5, at_most=100)).count(origin) == 2


@pytest.fixture
async def pool():
    made = EnginePool(connect_s=patience(2), keepalive_s=0.3, max_spare=4)
    yield made
    await made.close()
    assert not made.connections


async def _burst(pool, url, count):
    """Send so many requests at once, and wait for their answers; the connections that they had."""
    origin = Origin.parse(url)
    connections = [pool.take_idle(origin) or await pool.connect(origin) for _ in range(count)]
    sinks = [RecordingSink() for _ in connections]
    for connection, sink in zip(connections, sinks, strict=True):
        connection.deadline = asyncio.get_running_loop().time() + patience(5)
        connection.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", sink)
    await asyncio.gather(*(asyncio.wait_for(sink.done.wait(), patience(10)) for sink in sinks))
    assert not [sink.failure for sink in sinks if sink.failure]
    return set(connections)


async def test_behind_a_burst_as_many_unused_connections_wait_for_the_next(pool):
    async with RawEngine(saying(OK)) as engine:
        first = await _burst(pool, engine.url, 4)
        await until(lambda: all(each.is_closed for each in first) and pool.idle_connections == 4)
        connections = engine.connections
        second = await _burst(pool, engine.url, 4)
        assert not first & second
        assert engine.connections == connections


async def test_a_used_connection_is_taken_before_an_unused_one(pool):
    async with RawEngine(saying(OK)) as engine:
        first = await _burst(pool, engine.url, 2)
        await until(lambda: all(each.is_closed for each in first) and pool.idle_connections == 2)
        (used,) = await _burst(pool, engine.url, 1)
        assert used.answers == 1
        again = pool.take_idle(Origin.parse(engine.url))
        assert again is used
        again.close()


async def test_without_the_setting_no_unused_connection_is_kept():
    pool = EnginePool(connect_s=patience(2), keepalive_s=0.3)
    async with RawEngine(saying(OK)) as engine:
        await _burst(pool, engine.url, 3)
        await until(lambda: not pool.is_sweeping)
        assert engine.connections == 3
    await pool.close()


async def test_an_engine_that_closes_unused_connections_is_not_connected_again_and_again(pool):
    opened = []

    async def answer_or_close(reader, writer):
        opened.append(writer)
        try:
            async with asyncio.timeout(0.05):
                await reader.readuntil(b"hello")
            writer.write(OK)
            await reader.read()
        except TimeoutError:
            pass  # as a server does that waits briefly for a request
        finally:
            await finished(writer)

    server = await asyncio.start_server(answer_or_close, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await _burst(pool, url, 4)
        await until(lambda: not pool.is_sweeping)
        assert len(opened) <= 8
