"""Connections to engines: which answers are taken, which connections are used again, and how each failure is told."""

import asyncio
import os
import socket
import ssl

import pytest

from lorafleet.service.network.sockets import KEEP_ALIVE
from lorafleet.service.network.tls import Tls, TlsFiles
from router.http.engine_connection import EngineConnection, EngineLost, Origin
from router.http.engine_pool import EnginePool
from tests.patience import patience, until
from tests.wires import RawEngine, RecordingSink, finished, saying

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# Of an answer that comes.
WITHIN_S = patience(5)


async def ask(
    pool: EnginePool, url: str, body: bytes = b"hello", *, within_s: float = WITHIN_S, sink: RecordingSink | None = None
):
    """(connection, what was heard) once the answer has ended or is lost."""
    connection, sink = await begin(pool, url, body, within_s=within_s, sink=sink)
    await asyncio.wait_for(sink.done.wait(), patience(10))
    return connection, sink


async def begin(pool, url, body=b"hello", *, within_s=WITHIN_S, sink=None):
    origin = Origin.parse(url)
    connection = pool.take_idle(origin) or await pool.connect(origin)
    connection.deadline = asyncio.get_running_loop().time() + within_s
    sink = sink or RecordingSink()
    connection.send(
        b"POST /x HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n%b" % (origin.host_header, len(body), body), sink
    )
    return connection, sink


@pytest.fixture
async def pool(monkeypatch):
    connected, connection_made = [], EngineConnection.connection_made

    def and_note(connection, transport):
        connected.append(connection)
        connection_made(connection, transport)

    monkeypatch.setattr(EngineConnection, "connection_made", and_note)
    made = EnginePool(connect_s=patience(2), keepalive_s=6000.0)
    yield made
    await made.close()
    assert not made.connections
    assert all(each.is_closed for each in connected)


# Answers that end as HTTP/1.1 says


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (OK, b"abc"),
        (OK.replace(b"3\r\n\r\nabc", b"0\r\n\r\n"), b""),
        (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", b"abcde"),
        (CHUNKED + b"3\r\nabc\r\n0\r\nTrailer: x\r\n\r\n", b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 503 \r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    ],
)
@pytest.mark.parametrize("cut", [None, 1, 7])
async def test_a_whole_answer_is_heard_and_its_connection_is_used_again(pool, raw, body, cut):
    pieces = [raw] if cut is None else [raw[at : at + cut] for at in range(0, len(raw), cut)]
    async with RawEngine(saying(*pieces)) as engine:
        for turn in range(3):
            connection, heard = await ask(pool, engine.url, b"ask %d" % turn)
            assert (heard.ended, heard.failure, heard.body) == (True, None, body)
            assert heard.status == int(raw.split(b" ")[1])
            assert all(name == name.lower() for name in heard.headers)
            assert b"trailer" not in heard.headers
            assert connection.answers == turn + 1
        assert engine.connections == pool.connections == 1
        assert engine.requests == [b"ask 0", b"ask 1", b"ask 2"]


async def test_all_chunks_of_one_read_come_in_one_piece(pool):
    async with RawEngine(saying(CHUNKED + b"3\r\nabc\r\n" * 100 + b"0\r\n\r\n")) as engine:
        _, heard = await ask(pool, engine.url)
        assert heard.calls == ["head", "data"]
        assert heard.body == b"abc" * 100


async def test_large_requests_and_answers_come_through_whole(pool):
    body = bytes(range(256)) * 20_000
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with RawEngine(saying(raw)) as engine:
        for _ in range(2):
            _, heard = await ask(pool, engine.url, body)
            assert heard.body == body
        assert engine.requests == [body, body]
        assert engine.connections == 1


# Answers after which a connection is not used again


@pytest.mark.parametrize(
    ("raw", "then", "body"),
    [
        (OK.replace(b"Content-Type", b"Connection: close\r\nContent-Type"), "stay", b"abc"),
        (OK.replace(b"HTTP/1.1", b"HTTP/1.0"), "stay", b"abc"),
        (OK.replace(b"200 OK", b"500 Oh"), "stay", b"abc"),  # uvicorn closes it, without a word in the head
        (OK.replace(b"Content-Length: 3\r\n", b""), "close", b"abc"),
        (OK.replace(b"Content-Length: 3\r\n", b""), "half_close", b"abc"),
        (OK + b"\r\nmore", "stay", b"abc"),
        (OK + OK, "stay", b"abc"),
        (OK + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "stay", b"abc"),
        (OK + b"HTTP", "stay", b"abc"),
        (OK + b"\x00", "stay", b"abc"),
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + OK, "stay", b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n" + OK, "stay", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, "stay", b"abc"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3 + OK, "stay", b"abc"),
    ],
)
@pytest.mark.parametrize("cut", [None, 1])
async def test_connection_with_an_odd_answer_is_closed_with_its_leftover_bytes(pool, raw, then, body, cut):
    pieces = [raw] if cut is None else [raw[at : at + cut] for at in range(0, len(raw), cut)]
    async with RawEngine(saying(*pieces, then=then)) as engine:
        first, heard = await ask(pool, engine.url)
        assert (heard.ended, heard.failure, heard.body) == (True, None, body)
        assert heard.status in (200, 204, 500)
        assert b"link" not in heard.headers
        # With the odd bytes in a read of their own the connection may have been idle for a moment.
        await until(lambda: not pool.connections)
        second, heard = await ask(pool, engine.url)
        assert second is not first
        assert heard.body == body
        assert engine.connections == 2


async def test_bytes_that_come_while_a_connection_is_idle_close_it(pool):
    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(OK)
        await go_on.wait()
        writer.write(OK)
        await reader.read()

    go_on = asyncio.Event()
    async with RawEngine(script) as engine:
        await ask(pool, engine.url)
        assert pool.connections == 1
        go_on.set()
        await until(lambda: not pool.connections)
        assert pool.take_idle(Origin.parse(engine.url)) is None


async def test_what_comes_before_a_request_has_gone_out_is_not_its_answer(pool):
    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(OK)
        said.set_result(writer.get_extra_info("socket"))
        await reader.read()

    def ask_again():
        loop.remove_reader(ours)
        assert pool.take_idle(origin) is connection
        connection.send(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n2", second)

    loop = asyncio.get_running_loop()
    said, second = loop.create_future(), RecordingSink()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with RawEngine(script) as engine:
            origin = Origin.parse(engine.url)
            connection, _ = await ask(pool, engine.url)
            loop.add_reader(ours, ask_again)
            await asyncio.sleep(0)  # uvloop looks at it from its next turn on
            # The loop finds both at once: the next request begins, and its connection has bytes for it already.
            theirs.send(b"x")
            os.write((await said).fileno(), b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 3\r\n\r\nabc")
            await asyncio.wait_for(second.done.wait(), patience(5))
            assert (second.calls, second.failure.reason) == ([], "no_answer")
            assert connection.is_silent  # so it goes out again, on another
            assert engine.requests == [b"hello"]
            assert not pool.connections


async def test_an_answer_that_comes_before_the_request_was_read_closes_the_connection(pool):
    async def script(engine, reader, writer):
        writer.transport.pause_reading()
        writer.write(OK)
        await writer.drain()
        await go_on.wait()

    go_on = asyncio.Event()
    async with RawEngine(script) as engine:
        _, heard = await ask(pool, engine.url, b"x" * 30_000_000)
        assert heard.body == b"abc"
        assert not pool.connections
        go_on.set()


# Failures


async def test_an_engine_that_is_not_there_is_lost_before_anything_was_sent(pool):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(EngineLost) as caught:
            await pool.connect(Origin.parse(url))
    assert caught.value.reason == "connection"
    assert url in str(caught.value)
    for odd in ("http://no.such.host.invalid:1", "http://[::1]:1", f"http://{'a' * 64}.b:1"):
        with pytest.raises((EngineLost, ValueError)):
            await pool.connect(Origin.parse(odd))
    assert not pool.connections


async def test_a_connection_that_takes_too_long_is_given_up():
    pool = EnginePool(connect_s=0.1)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        lost = []
        for _ in range(4):  # the backlog's own places connect
            try:
                await pool.connect(Origin.parse(url))
            except EngineLost as exc:
                lost.append(exc.reason)
        assert lost[-1] == "connection"
    await pool.close()
    assert not pool.connections


WHOLE = CHUNKED + b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"


@pytest.mark.parametrize("then", ["close", "reset", "half_close"])
@pytest.mark.parametrize("size", [0, 1, 9, 20, len(CHUNKED) - 1, len(CHUNKED), len(CHUNKED) + 4, len(WHOLE) - 1])
async def test_answer_broken_off_at_any_byte_is_lost(pool, then, size):
    async with RawEngine(saying(*([WHOLE[:size]] if size else []), then=then)) as engine:
        connection, heard = await ask(pool, engine.url)
        assert not heard.ended
        assert heard.failure.reason == "no_answer"
        assert engine.url in str(heard.failure)
        assert (heard.status is not None) == (size >= len(CHUNKED))
        assert b"abcdef".startswith(heard.body)
        assert not pool.connections
        assert not connection.is_usable(0)


@pytest.mark.parametrize("size", [len(OK) - 3, len(OK) - 1])
async def test_a_body_shorter_than_its_length_is_lost(pool, size):
    async with RawEngine(saying(OK[:size], then="close")) as engine:
        _, heard = await ask(pool, engine.url)
        assert heard.failure.reason == "no_answer"


@pytest.mark.parametrize(
    "raw",
    [
        b"what?\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 X\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"Content-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5000 + OK,
    ],
)
async def test_answer_that_is_not_http_is_lost(pool, raw):
    async with RawEngine(saying(raw)) as engine:
        _, heard = await ask(pool, engine.url)
        assert heard.failure is not None, heard
        assert (heard.failure.reason, heard.calls) == ("no_answer", [])
        assert not pool.connections
        await until(lambda: not engine.open)


@pytest.mark.parametrize(
    "chunk", [b"x\r\n", b"3 \r\nabc\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"10000000000000003\r\nabc\r\n"]
)
async def test_a_bad_chunk_loses_the_answer_after_what_was_good(pool, chunk):
    async with RawEngine(saying(CHUNKED + b"2\r\nok\r\n" + chunk)) as engine:
        _, heard = await ask(pool, engine.url)
        assert (heard.status, heard.failure.reason) == (200, "no_answer")
        assert heard.body.startswith(b"ok")
        assert not pool.connections


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED + b"1\r\na\r\n0\r\nX: ", CHUNKED + b"1;x="])
async def test_a_head_or_trailer_without_end_is_lost(pool, start):
    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(start)
        while True:
            writer.write(b"a" * 1000)
            await writer.drain()

    async with RawEngine(script) as engine:
        _, heard = await ask(pool, engine.url)
        assert heard.failure.reason == "no_answer"
        assert not pool.connections


@pytest.mark.parametrize("said", [[], [b"HTTP/1.1 200 OK\r\n"], [CHUNKED], [CHUNKED + b"3\r\nabc\r\n"]])
async def test_an_engine_that_hangs_is_given_up_at_the_deadline_and_notices(pool, said):
    async with RawEngine(saying(*said)) as engine:
        _, heard = await ask(pool, engine.url, within_s=0.05)
        assert heard.failure.reason == "no_answer_in_time"
        await until(lambda: not engine.open)
        assert not pool.connections


async def test_slow_answer_goes_on_while_its_deadline_is_moved(pool):
    class Patient(RecordingSink):
        def data(self, data):
            super().data(data)
            connection.deadline = loop.time() + pause_s * 5

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(CHUNKED)
        for _ in range(10):
            writer.write(b"1\r\na\r\n")
            await asyncio.sleep(pause_s)
        await engine.request(reader)

    # Ten pauses are two deadlines.
    loop, pause_s = asyncio.get_running_loop(), patience(0.03)
    async with RawEngine(script) as engine:
        connection, heard = await begin(pool, engine.url, within_s=pause_s * 5, sink=Patient())
        await asyncio.wait_for(heard.done.wait(), patience(10))
        assert heard.body == b"a" * 10
        assert heard.failure.reason == "no_answer_in_time"


async def test_stream_survives_any_number_of_separately_read_chunk_sizes(pool):
    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(CHUNKED)
        for _ in range(14):
            writer.write(b"1;x=%b\r\n" % (b"y" * 5000))
            await until(lambda: connection.read_bytes > 5000)
            writer.write(b"a\r\n")
            await until(lambda: not connection.read_bytes)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with RawEngine(script) as engine:
        connection, heard = await begin(pool, engine.url)
        await asyncio.wait_for(heard.done.wait(), patience(10))
        assert (heard.body, heard.ended) == (b"a" * 14, True)


# Closing, pausing


@pytest.mark.parametrize("after", ["send", "head", "data"])
async def test_closed_connection_is_seen_by_the_engine_and_silent(pool, after):
    class Leaving(RecordingSink):
        def head(self, status, headers):
            super().head(status, headers)
            if after == "head":
                connection.close()

        def data(self, data):
            super().data(data)
            connection.close()

    async with RawEngine(saying(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n")) as engine:
        connection, heard = await begin(pool, engine.url, sink=Leaving())
        if after == "send":
            connection.close()
        await asyncio.wait_for(engine.closed.wait(), patience(5))
        assert not heard.done.is_set()
        assert heard.calls == {"send": [], "head": ["head"], "data": ["head", "data"]}[after]
        assert not pool.connections


async def test_a_paused_connection_holds_the_engine_back_and_little_is_read(pool):
    loop, sent = asyncio.get_running_loop(), 0

    async def script(engine, reader, writer):
        nonlocal sent
        await engine.request(reader)
        writer.write(CHUNKED)
        for _ in range(300):
            writer.write(b"%x\r\n%b\r\n" % (50_000, b"x" * 50_000))
            await writer.drain()
            sent += 50_000
        writer.write(b"0\r\n\r\n")
        await reader.read()

    class SlowSink(RecordingSink):
        def data(self, data):
            super().data(data)
            if len(self.pieces) == 1:
                connection.pause()
                connection.pause()

    async with RawEngine(script) as engine:
        connection, heard = await begin(pool, engine.url, sink=SlowSink())
        await asyncio.wait_for(heard.news.wait(), patience(5))
        connection.deadline = loop.time() + 0.1
        await until(lambda: loop.time() > connection.deadline)
        before = sent
        # Past its deadline, for longer than it takes to look: a client that reads slowly is not the engine's fault.
        await until(lambda: loop.time() > connection.deadline + 0.3)
        assert sent == before < 300 * 50_000
        assert len(heard.body) <= 2 * 256 * 1024
        assert not heard.done.is_set()
        connection.resume()
        connection.resume()
        connection.deadline = loop.time() + patience(10)
        await asyncio.wait_for(heard.done.wait(), patience(10))
        assert heard.ended
        assert len(heard.body) == 300 * 50_000


async def test_a_deadline_has_as_much_left_after_a_pause_as_before(pool):
    loop = asyncio.get_running_loop()
    async with RawEngine(saying(CHUNKED + b"3\r\nabc\r\n")) as engine:
        connection, heard = await begin(pool, engine.url, within_s=patience(0.3))
        await until(lambda: heard.body)
        deadline, before_pause = connection.deadline, loop.time()
        connection.pause()
        after_pause = loop.time()
        await until(lambda: loop.time() > deadline)
        connection.pause()
        before_resume = loop.time()
        connection.resume()
        rounding_s = 1e-6
        assert connection.deadline >= before_resume + (deadline - after_pause) - rounding_s
        assert connection.deadline <= loop.time() + (deadline - before_pause) + rounding_s
        assert not heard.done.is_set()


async def test_connection_paused_at_its_end_reads_for_the_next_request(pool):
    class Pausing(RecordingSink):
        def data(self, data):
            super().data(data)
            connection.pause()

    async with RawEngine(saying(OK)) as engine:
        connection, heard = await begin(pool, engine.url, sink=Pausing())
        await asyncio.wait_for(heard.done.wait(), patience(5))
        again, heard = await ask(pool, engine.url)
        assert again is connection
        assert heard.body == b"abc"


# The pool


async def test_idle_connections_are_bounded_in_time_and_number():
    pool = EnginePool(connect_s=2.0, keepalive_s=0.3, max_idle=3)
    async with RawEngine(saying(OK)) as engine:
        origin = Origin.parse(engine.url)
        await asyncio.gather(*(ask(pool, engine.url) for _ in range(10)))
        assert engine.connections == 10
        await until(lambda: pool.connections == 3)
        await until(lambda: pool.connections == 0)
        assert pool.take_idle(origin) is None
        assert not pool.idle_connections
    await pool.close()


async def test_expired_idle_connection_is_not_reused(pool):
    pool.keepalive_s = 0.0
    async with RawEngine(saying(OK)) as engine:
        for _ in range(3):
            await ask(pool, engine.url)
        assert engine.connections == 3


async def test_the_connection_used_last_is_used_first(pool):
    async with RawEngine(saying(OK)) as engine:
        await asyncio.gather(*(ask(pool, engine.url) for _ in range(5)))
        used = {(await ask(pool, engine.url))[0] for _ in range(5)}
        assert len(used) == 1


async def test_an_engine_that_closed_an_idle_connection_is_asked_on_another(pool):
    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(OK)
        await finished(writer)

    async with RawEngine(script) as engine:
        for turn in range(3):
            _, heard = await ask(pool, engine.url)
            assert heard.body == b"abc"
            await until(lambda: not pool.connections)
            assert engine.connections == turn + 1


async def test_a_connection_that_closed_between_pool_and_request_is_told_later(pool):
    async with RawEngine(saying(OK)) as engine:
        await ask(pool, engine.url)
        connection = pool.take_idle(Origin.parse(engine.url))
        connection.close()
        heard = RecordingSink()
        connection.send(b"", heard)
        assert not heard.done.is_set()
        await asyncio.wait_for(heard.done.wait(), patience(5))
        assert heard.failure.reason == "no_answer"


async def test_a_connection_that_was_lost_before_its_first_request_was_none(pool):
    async def script(engine, reader, writer):
        await finished(writer)

    async with RawEngine(script) as engine:
        connection = await pool.connect(Origin.parse(engine.url))
        await until(lambda: not pool.connections)
        heard = RecordingSink()
        connection.send(b"", heard)
        await asyncio.wait_for(heard.done.wait(), patience(5))
        assert heard.failure.reason == "connection"  # nothing went out: its engine died of nothing of ours


async def test_a_sink_may_ask_again_from_within_the_end_of_an_answer(pool):
    class Again(RecordingSink):
        def end(self):
            super().end()
            self.connection = pool.take_idle(origin)
            self.connection.send(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n2", second)

    second = RecordingSink()
    async with RawEngine(saying(OK)) as engine:
        origin = Origin.parse(engine.url)
        connection, first = await begin(pool, engine.url, sink=Again())
        await asyncio.wait_for(second.done.wait(), patience(5))
        assert (first.body, second.body, first.connection) == (b"abc", b"abc", connection)


async def test_a_caller_that_leaves_while_connecting_leaves_no_connection(pool):
    pool.connect_s = 0.2
    async with RawEngine(saying(OK)) as engine:
        for turns in range(6):
            task = asyncio.create_task(pool.connect(Origin.parse(engine.url)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (made,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(made, EngineConnection):
                made.close()
        await until(lambda: not pool.connections and not engine.open)


async def test_closing_the_pool_tells_who_waits_and_leaves_nothing():
    pool = EnginePool(connect_s=2.0)
    async with RawEngine(saying(OK)) as engine, RawEngine(saying()) as silent:
        await ask(pool, engine.url)
        _, heard = await begin(pool, silent.url)
        await until(lambda: silent.requests)
        await pool.close()
        assert heard.failure.reason == "no_answer"
        assert not pool.connections
        assert pool.take_idle(Origin.parse(engine.url)) is None
        with pytest.raises(EngineLost):
            await pool.connect(Origin.parse(engine.url))
        await until(lambda: not engine.open and not silent.open)
        assert not pool.is_sweeping


async def test_a_connection_that_is_made_as_the_pool_closes_is_closed(pool):
    async with RawEngine(saying(OK)) as engine:
        connecting = asyncio.create_task(pool.connect(Origin.parse(engine.url)))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(EngineLost):
            await connecting
        assert not pool.connections
        await until(lambda: engine.connections and not engine.open)


@pytest.mark.parametrize("crowds", [8, pytest.param(40, marks=pytest.mark.thorough)])
async def test_many_requests_given_up_leave_nothing(pool, crowds):
    async def one(n):
        connection, _ = await begin(pool, engine.url)
        await asyncio.sleep(0.001 * (n % 5))
        connection.close()

    async with RawEngine(saying(CHUNKED + b"3\r\nabc\r\n")) as engine:
        for _ in range(crowds):
            await asyncio.gather(*(one(n) for n in range(50)))
        await until(lambda: not engine.open)
        assert not pool.connections


async def test_requests_are_sent_without_delay(pool):
    async with RawEngine(saying(OK)) as engine:
        connection, _ = await ask(pool, engine.url)
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Where engines are


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a", ("a", 80, False, b"", b"a")),
        ("http://a:8100/", ("a", 8100, False, b"", b"a:8100")),
        ("https://a", ("a", 443, True, b"", b"a")),
        ("https://a:8443/engine/0/", ("a", 8443, True, b"/engine/0", b"a:8443")),
        ("http://[::1]:8100", ("::1", 8100, False, b"", b"[::1]:8100")),
        ("http://[::1]", ("::1", 80, False, b"", b"[::1]")),
        ("http://MIXED:1/Path", ("mixed", 1, False, b"/Path", b"mixed:1")),
        ("http://bücher.example:1", ("xn--bcher-kva.example", 1, False, b"", b"xn--bcher-kva.example:1")),
        ("http://a_b:1/a b", ("a_b", 1, False, b"/a%20b", b"a_b:1")),
    ],
)
def test_a_url_says_where_an_engine_is(url, said):
    origin = Origin.parse(url)
    assert (origin.host, origin.port, origin.tls, origin.prefix, origin.host_header) == said
    assert Origin.parse(url) is origin


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http:///x", "http://a:x", "http://a:99999", "http://a b", "http://a?x=1",
            "http://a..b", "unix:///x", "http://a\\b"]
)  # fmt: skip
def test_a_url_that_says_no_place_is_refused(url):
    with pytest.raises(ValueError):  # noqa: PT011  (urllib's own among them)
        Origin.parse(url)


async def test_an_engine_may_listen_on_ipv6(pool):
    engine = RawEngine(saying(OK))
    server = await asyncio.start_server(engine.serve, "::1", 0)
    async with server:
        _, heard = await ask(pool, f"http://[::1]:{server.sockets[0].getsockname()[1]}")
        assert heard.body == b"abc"
        await pool.close()
        await until(lambda: not engine.open)


async def test_an_engine_may_speak_tls_and_is_checked(certificate):
    key, cert = certificate
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    engine = RawEngine(saying(OK))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=theirs)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    pool = EnginePool(connect_s=2.0, tls=Tls(TlsFiles(ca=cert)))
    async with server:
        for _ in range(2):
            _, heard = await ask(pool, url)
            assert heard.body == b"abc"
        assert engine.connections == 1
        strict = EnginePool(connect_s=2.0)
        with pytest.raises(EngineLost) as caught:
            await strict.connect(Origin.parse(url))
        assert caught.value.reason == "connection"
        await strict.close()
        await pool.close()
        await until(lambda: not engine.open)
    assert not strict.connections


async def test_a_connection_to_an_engine_is_kept_alive(pool):
    async with RawEngine([saying(OK)]) as engine:
        connection = await pool.connect(Origin.parse(engine.url))
        sock = connection.transport.get_extra_info("socket")
        assert [sock.getsockopt(level, name) for level, name, _ in KEEP_ALIVE] == [value for _, _, value in KEEP_ALIVE]
        connection.close()
