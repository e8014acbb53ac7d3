import asyncio
import ssl

import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorafleet.service.network.tls import Tls, TlsFiles
from router.core.errors import ReplicaUnreachable
from router.http.engine_connection import Origin
from router.http.engine_pool import EnginePool
from router.http.sse import MAX_EVENT_BYTES, ModelRenamer
from router.protocols.routes import ROUTES
from router.protocols.usage import EngineUsage
from router.request import engine_attempt
from router.request.engine_attempt import AttemptLimits, EngineAttempt, open_attempt
from router.request.engine_request import EngineMessage
from tests.patience import patience, until
from tests.serving import serving
from tests.wires import RawEngine, finished

CHAT = ROUTES["POST", "/v1/chat/completions"]
LIMITS = AttemptLimits(first_data_s=patience(5), idle_s=patience(5), answer_bytes=2**20)
TOKEN = b'data: {"id":"1","choices":[{"delta":{"content":"a \\"usage\\": {} data: x"}}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
ZERO = b'{"prompt_tokens":40,"total_tokens":42,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}'
SOME = ZERO.replace(b'"cached_tokens":0', b'"cached_tokens":32,"created_cache_tokens":8')
BARE = b'{"prompt_tokens":40,"total_tokens":42,"completion_tokens":2}'
NULL = BARE.replace(b"}", b',"prompt_tokens_details":null}')
EMBEDDED = b'{"prompt_tokens":40,"total_tokens":40}'
SAID = [
    (SOME, EngineUsage(40, 2, 32)),
    (ZERO, EngineUsage(40, 2, 0)),
    (BARE, EngineUsage(40, 2, None)),
    (NULL, EngineUsage(40, 2, None)),
    (EMBEDDED, EngineUsage(40, None, None)),
    (b"null", None),
    (b'"lots"', None),
    (b'{"prompt_tokens":"many"}', None),
    (b"{}", None),
]


def event(usage: bytes) -> bytes:
    return b'data: {"id":"1","choices":[],"usage":%s,"system_fingerprint":"x"}\n\n' % usage


class RecordingClient:
    """What an answer is relayed to: keeps what it is sent."""

    on_pause = on_resume = None

    def __init__(self, *, is_paused=False):
        self.is_paused = is_paused
        self.sent = []

    def send(self, data):
        self.sent.append(data)

    relay = send


def call_to(url, *, streamed):
    origin = Origin.parse(url)
    request = b"POST /v1/x HTTP/1.1\r\nhost: %b\r\ncontent-length: 2\r\n\r\n{}" % origin.host_header
    return EngineMessage(CHAT, origin, request, engine_model="m", engine_name="", replica="w0", streamed=streamed)


async def usage_of(answer, *, streamed):
    """(what an engine's answer was relayed as, the usage that it left behind)."""

    async def complete(request):
        if not streamed:
            return Response(answer, media_type="application/json")

        async def pieces():
            for piece in answer:
                yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    exchange = RecordingClient()
    async with serving(Starlette(routes=[Route("/v1/x", complete, methods=["POST"])])) as url:
        pool = EnginePool(connect_s=patience(2))
        attempt = await open_attempt(pool, call_to(url, streamed=streamed), LIMITS)
        if streamed:
            await attempt.relay(exchange, ModelRenamer("m", "m"))
        else:
            exchange.send(attempt.first)
        attempt.close()
        await pool.close()
    return b"".join(exchange.sent), attempt.usage()


@pytest.mark.parametrize(("usage", "said"), SAID)
async def test_a_whole_answers_usage_is_what_the_engine_said_and_nothing_else(usage, said):
    body = b'{"id":"1","choices":[{"message":{"content":"\\"usage\\":{\\"prompt_tokens\\":1}"}}],"usage":%s,"x":0}'
    assert await usage_of(body % usage, streamed=False) == (body % usage, said)


async def test_an_answer_without_usage_tells_none():
    assert (await usage_of(b'{"id":"1","content":"usage"}', streamed=False))[1] is None
    assert (await usage_of(b'not JSON, but with a "usage"', streamed=False))[1] is None
    assert (await usage_of([TOKEN, DONE], streamed=True))[1] is None
    assert (await usage_of([b"data: x\n\n", b': "usage"\n\n'], streamed=True))[1] is None


@pytest.mark.parametrize(("usage", "said"), SAID)
async def test_a_streams_usage_is_read_from_its_end(usage, said):
    pieces = [TOKEN] * 20 + [event(usage), DONE]
    assert await usage_of(pieces, streamed=True) == (b"".join(pieces), said)


@pytest.mark.parametrize("size", [1, 7, 60, 200, 100_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_where_a_stream_is_cut_does_not_matter(size, line_end):
    whole = b"".join([TOKEN, TOKEN, event(BARE), event(SOME), DONE]).replace(b"\n", line_end)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert await usage_of(pieces, streamed=True) == (whole, EngineUsage(40, 2, 32))


async def test_the_last_of_many_usages_counts():
    pieces = [TOKEN, event(BARE), event(BARE), event(SOME), DONE]
    assert (await usage_of(pieces, streamed=True))[1] == EngineUsage(40, 2, 32)


async def test_a_stream_that_ends_without_a_blank_line_is_read_too():
    for end in (event(SOME).rstrip(b"\n"), event(SOME) + b"data: [DONE]"):
        assert (await usage_of([TOKEN, end], streamed=True))[1] == EngineUsage(40, 2, 32)


@pytest.mark.parametrize("then", ["answers", "dies"])
async def test_stale_connection_is_replaced_unless_the_engine_is_gone(then):
    async def script(engine, reader, writer):
        first = len(engine.requests) == 0
        await engine.request(reader)
        if first or (then == "answers" and engine.connections > 1):
            writer.write(OK)
            await writer.drain()
        if first:
            await engine.request(reader)
            if then == "dies":
                engine.server.close()
        await finished(writer)

    pool = EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            call = EngineMessage(CHAT, Origin.parse(engine.url), REQUEST, "m", False, "w0", False)
            (await open_attempt(pool, call, LIMITS)).close()
            if then == "answers":
                attempt = await open_attempt(pool, call, LIMITS)
                assert (attempt.status, len(engine.requests), engine.connections) == (200, 3, 2)
            else:
                with pytest.raises(ReplicaUnreachable) as lost:
                    await open_attempt(pool, call, LIMITS)
                assert lost.value.reason == "no_answer"
    finally:
        await pool.close()


@pytest.mark.parametrize(("works_s", "said"), [(0, OK[:4]), (0, OK[:-2]), (0, OK[:-1]), (0.1, b"")])
async def test_connection_lost_during_work_or_answer_is_not_replaced(works_s, said, monkeypatch):
    if works_s:
        monkeypatch.setattr(engine_attempt, "STALE_WITHIN_S", works_s / 2)

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(OK)
        await engine.request(reader)
        await asyncio.sleep(works_s)
        writer.write(said)
        await finished(writer)

    pool = EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            call = EngineMessage(CHAT, Origin.parse(engine.url), REQUEST, "m", False, "w0", False)
            (await open_attempt(pool, call, LIMITS)).close()
            with pytest.raises(ReplicaUnreachable) as lost:
                await open_attempt(pool, call, LIMITS)
            assert (lost.value.reason, len(engine.requests)) == ("no_answer", 2)
    finally:
        await pool.close()


async def test_a_new_connection_that_breaks_off_is_not_tried_again():
    async def script(engine, reader, writer):
        await engine.request(reader)
        await finished(writer)

    pool = EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            call = EngineMessage(CHAT, Origin.parse(engine.url), REQUEST, "m", False, "w0", False)
            with pytest.raises(ReplicaUnreachable):
                await open_attempt(pool, call, LIMITS)
            assert len(engine.requests) == 1
    finally:
        await pool.close()


async def test_first_event_and_later_events_have_their_own_time_limits():
    go_on, over = asyncio.Event(), asyncio.Event()

    async def script(engine, reader, writer):
        await engine.request(reader)
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"%b%x\r\n%b\r\n" % (head, len(TOKEN), TOKEN))
        await go_on.wait()
        writer.write(b"0\r\n\r\n")

    loop, pool = asyncio.get_running_loop(), EnginePool(connect_s=patience(2))
    async with RawEngine(script) as engine:
        limits = AttemptLimits(first_data_s=60, idle_s=600, answer_bytes=2**20)
        attempt = await open_attempt(pool, call_to(engine.url, streamed=True), limits)
        (connection,) = pool.open_connections
        assert loop.time() + 50 < connection.deadline <= loop.time() + 60
        attempt.start_relay(RecordingClient(), ModelRenamer("m", "m"), over.set)
        assert loop.time() + 500 < connection.deadline <= loop.time() + 600
        go_on.set()
        await asyncio.wait_for(over.wait(), patience(5))
        await pool.close()


async def test_relay_to_an_already_paused_client_begins_paused():
    go_on, over = asyncio.Event(), asyncio.Event()

    async def complete(_request):
        async def pieces():
            yield TOKEN
            await go_on.wait()
            yield DONE

        return StreamingResponse(pieces(), media_type="text/event-stream")

    exchange = RecordingClient(is_paused=True)
    async with serving(Starlette(routes=[Route("/v1/x", complete, methods=["POST"])])) as url:
        pool = EnginePool(connect_s=patience(2))
        attempt = await open_attempt(pool, call_to(url, streamed=True), LIMITS)
        attempt.start_relay(exchange, ModelRenamer("m", "m"), over.set)
        (connection,) = pool.open_connections
        assert connection.is_paused
        go_on.set()
        exchange.on_resume()
        await asyncio.wait_for(over.wait(), patience(5))
        await pool.close()
    assert b"".join(exchange.sent) == TOKEN + DONE


async def test_engine_breaking_off_right_behind_its_first_event_is_unreachable(certificate):
    key, cert = certificate
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # its end comes in one read with what was said before
    theirs.load_cert_chain(cert, key)

    async def script(engine, reader, writer):
        await engine.request(reader)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"%b%x\r\n%b\r\n" % (head, len(TOKEN), TOKEN))
        await finished(writer)

    engine = RawEngine(script)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=theirs)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    pool = EnginePool(connect_s=patience(2), tls=Tls(TlsFiles(ca=cert)))
    async with server:
        with pytest.raises(ReplicaUnreachable) as passed_over:
            await open_attempt(pool, call_to(url, streamed=True), LIMITS)
        assert passed_over.value.reason == "no_answer"
        await pool.close()
        await until(lambda: not engine.open)


async def test_a_first_event_without_end_is_given_up_and_its_engine_notices():
    piece = b"x" * 2**18

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"6\r\ndata: \r\n")
        for _ in range(4 * MAX_EVENT_BYTES // len(piece)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        await reader.read()

    pool = EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            with pytest.raises(ReplicaUnreachable) as given_up:
                await open_attempt(pool, call_to(engine.url, streamed=True), LIMITS)
            assert given_up.value.reason == "answer_too_large"
            await asyncio.wait_for(engine.closed.wait(), patience(5))
            assert not pool.connections
    finally:
        await pool.close()


async def test_stream_beginning_with_an_error_is_closed_at_once():
    refused = b'data: {"error":{"message":"no","code":500}}\n\n'

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(refused), refused))
        await reader.read()

    pool = EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            with pytest.raises(ReplicaUnreachable) as passed_over:
                await open_attempt(pool, call_to(engine.url, streamed=True), LIMITS)
            assert passed_over.value.reason == "first_event_error"
            assert not pool.connections
            await asyncio.wait_for(engine.closed.wait(), patience(2))
    finally:
        await pool.close()


@pytest.mark.parametrize("ends", ["well", "broken"])
async def test_bytes_before_the_relay_begins_are_sent_on_in_order(ends):
    more, decided, over = asyncio.Event(), [], asyncio.Event()

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN))
        await more.wait()
        writer.write(b"%x\r\n%b\r\n" % (len(DONE), DONE))
        writer.write(b"0\r\n\r\n" if ends == "well" else b"")
        await finished(writer)

    exchange, pool = RecordingClient(), EnginePool(connect_s=patience(2))
    try:
        async with RawEngine(script) as engine:
            call = call_to(engine.url, streamed=True)
            attempt = EngineAttempt(call, LIMITS, True, lambda: decided.append(attempt.status))
            attempt.begin(await pool.connect(call.origin))
            await until(lambda: decided)
            more.set()
            await until(lambda: attempt.connection is None)
            assert decided == [200]
            attempt.start_relay(exchange, ModelRenamer("m", "m"), over.set)
            await asyncio.wait_for(over.wait(), patience(5))
            assert (b"".join(exchange.sent), attempt.events) == (TOKEN + DONE, 2)
            assert attempt.is_broken == (ends == "broken")
    finally:
        await pool.close()


class Noting(ModelRenamer):
    """An echo that counts what it is given."""

    def __init__(self):
        super().__init__("m", "m")
        self.reads = 0

    def rewrite(self, chunk):
        self.reads += 1
        return super().rewrite(chunk)


async def test_a_streams_usage_is_kept_however_many_reads_its_last_event_takes():
    go_on, over, echo = asyncio.Semaphore(0), asyncio.Event(), Noting()
    end = [DONE[at : at + 3] for at in range(0, len(DONE), 3)]

    async def script(engine, reader, writer):
        await engine.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (TOKEN, event(SOME), *end):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await go_on.acquire()
        writer.write(b"0\r\n\r\n")

    exchange, pool = RecordingClient(), EnginePool(connect_s=patience(2))
    async with RawEngine(script) as engine:
        attempt = await open_attempt(pool, call_to(engine.url, streamed=True), LIMITS)
        attempt.start_relay(exchange, echo, over.set)
        for reads in range(1, 3 + len(end)):
            await until(lambda reads=reads: echo.reads == reads)
            go_on.release()
        await asyncio.wait_for(over.wait(), patience(5))
        await pool.close()
    assert b"".join(exchange.sent) == TOKEN + event(SOME) + DONE
    assert (attempt.usage(), attempt.events) == (EngineUsage(40, 2, 32), 3)


@pytest.mark.parametrize(
    ("path", "engine_name", "served", "moves"),
    [
        ("/v1/chat/completions", "", (), True),
        ("/v1/chat/completions", "sql/v1@abc", ("sql/v1@abc",), True),
        ("/v1/chat/completions", "sql/v1@abc", ("sql/v1@abd",), False),
        ("/v1/responses", "", (), False),  # it may follow up on one that only this engine has
        ("/v1/responses/{id}", "", (), False),
    ],
)
def test_what_waits_may_go_to_those_who_can_answer_it(path, engine_name, served, moves):
    route = next(route for route in ROUTES.values() if route.path == path)
    call = EngineMessage(route, Origin.parse("http://e"), b"", "m", engine_name, "w0", streamed=True)
    attempt = EngineAttempt(call, LIMITS, True)
    assert attempt.can_move(served) is moves
    attempt.head(200, {b"content-type": b"text/event-stream"})
    assert attempt.can_move(served) is moves  # vLLM sends that long before its first token
    attempt.data(b'data: {"choices":[]}\n\n')
    assert not attempt.can_move(served)
