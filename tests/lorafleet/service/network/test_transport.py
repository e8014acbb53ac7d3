"""Calls raise httpx's errors only, and leave no answers or connections."""

import asyncio
import contextlib
import gc
import random
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from lorafleet.service.network.transport import DirectTransport, why_no_answer
from tests.patience import within
from tests.serving import serving

_TIMES = 50


def test_a_connection_reset_at_once_is_a_network_error():
    assert uvloop.run(_refusals()) <= {httpx.ConnectError, httpx.ReadError}


async def _refusals() -> set[type[Exception]]:
    """Outcomes of calls to a peer that resets each connection, on a busy event loop."""
    busy = asyncio.create_task(_keep_busy())
    failures: set[type[Exception]] = set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        resetting = asyncio.create_task(asyncio.to_thread(_reset, server))
        async with httpx.AsyncClient(transport=DirectTransport()) as client:
            for _ in range(_TIMES):
                try:
                    await client.get(f"http://127.0.0.1:{server.getsockname()[1]}/")
                except Exception as exc:  # noqa: BLE001  (which one is the question)
                    failures.add(type(exc))
        await resetting
    busy.cancel()
    return failures


def _reset(server: socket.socket) -> None:
    for _ in range(_TIMES):
        connection, _address = server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def _keep_busy() -> None:
    while True:
        time.sleep(0.002)  # noqa: ASYNC251  (a turn of the loop takes longer than the peer)
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["read", "left", "streamed"])
async def test_a_dropped_answer_is_freed_without_the_collector(how):
    async with (
        serving(Starlette(routes=[Route("/", _long)])) as url,
        httpx.AsyncClient(transport=DirectTransport()) as client,
    ):
        gc.collect()
        gc.disable()
        try:
            kept = weakref.ref(await _answer(client, url, how))
            assert kept() is None
        finally:
            gc.enable()


async def test_an_answer_is_read_whole_and_says_how_long_it_took():
    async with (
        serving(Starlette(routes=[Route("/", _long)])) as url,
        httpx.AsyncClient(transport=DirectTransport()) as client,
    ):
        answer = await client.get(url)
        assert (answer.content, answer.is_closed) == (b"x" * 100_000, True)
        assert answer.elapsed.total_seconds() > 0
        await answer.aclose()
        with pytest.raises(httpx.StreamConsumed):
            [part async for part in answer.aiter_raw()]


async def _answer(client: httpx.AsyncClient, url: str, how: str) -> httpx.Response:
    if how == "read":
        return await client.get(url)
    async with client.stream("GET", url) as answer:
        if how == "streamed":
            assert len(b"".join([part async for part in answer.aiter_bytes()])) == 100_000
        return answer


async def _long(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * 100_000)


@pytest.mark.parametrize("when", ["connection.connect_tcp.complete", "http11.response_closed.started"])
async def test_a_cancelled_call_leaves_no_connection(when):
    async def answer(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("x")

    async def trace(name: str, _info: dict[str, object]) -> None:
        if name == when:
            task.cancel()

    transport = DirectTransport()
    async with serving(Starlette(routes=[Route("/", answer)])) as url, httpx.AsyncClient(transport=transport) as client:
        task = asyncio.create_task(client.get(url, extensions={"trace": trace}))
        with pytest.raises(asyncio.CancelledError):
            await task
        async with within(5):
            while not transport.is_idle:
                await asyncio.sleep(0)
        assert (await client.get(url)).text == "x"


async def test_a_client_that_is_closed_leaves_no_connection_of_a_call_that_was_connecting():
    async with serving(Starlette(routes=[Route("/", _long)])) as url:
        outcomes = {type(outcome) for turns in range(20) for outcome in [await _closed_after(url, turns)]}
        gc.collect()  # a connection that is left open warns, and a warning is an error here
    assert outcomes <= {httpx.Response, httpx.ReadError, RuntimeError}
    assert httpx.ReadError in outcomes


async def _closed_after(url: str, turns: int) -> object:
    """Outcome of a call whose client is closed so many turns of the loop after the call began."""
    client = httpx.AsyncClient(transport=DirectTransport())
    call = asyncio.create_task(client.get(url))
    for _ in range(turns):
        await asyncio.sleep(0)
    async with within(10):
        await client.aclose()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
    return outcome


@pytest.mark.parametrize("ends", ["call", "client"])
async def test_a_cancellation_leaves_no_idle_connection_open(ends):
    """Idle connections are closed before the next call, as they have expired, or with the client."""

    async def cancel_after(turns: int, url: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=4, keepalive_expiry=0.0 if ends == "call" else None)
        client = httpx.AsyncClient(transport=DirectTransport(limits=limits))
        await asyncio.gather(*(client.get(url) for _ in range(4)))
        task = asyncio.create_task(client.get(url) if ends == "call" else client.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()

    async with serving(Starlette(routes=[Route("/", _long)])) as url:
        for turns in range(8):
            await cancel_after(turns, url)
        gc.collect()  # a connection that is left open warns, and a warning is an error here


@pytest.mark.parametrize("seed", range(3))
async def test_a_client_leaves_no_connection_whatever_is_cancelled(seed):
    rng = random.Random(seed)
    routes = [Route("/quick", _quick), Route("/long", _long), Route("/parts", _parts)]
    async with serving(Starlette(routes=routes)) as url:
        for _ in range(20):
            await _use_and_close(url, rng)
        gc.collect()  # a connection that is left open warns, and a warning is an error here


async def _use_and_close(url: str, rng: random.Random) -> None:
    """Some calls of one client, of which some time out or are cancelled, while the client is closed."""
    limits = httpx.Limits(
        max_connections=rng.choice([2, 50]),
        max_keepalive_connections=rng.choice([1, 4]),
        keepalive_expiry=rng.choice([0.0, 0.005, 2.0]),
    )
    client = httpx.AsyncClient(transport=DirectTransport(limits=limits))

    async def call(path: str, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError, httpx.HTTPError, RuntimeError):
            async with asyncio.timeout(timeout_s):
                await client.get(url + path)

    tasks = []
    for _ in range(rng.randrange(3, 20)):
        path, timeout_s = rng.choice(["/quick", "/long", "/parts"]), rng.choice([None, 0.002, 0.01, 0.02])
        tasks.append(asyncio.create_task(call(path, timeout_s)))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    closing = asyncio.create_task(client.aclose())
    for _ in range(rng.randrange(6)):
        await asyncio.sleep(0)
    for task in [closing, *tasks]:
        if rng.random() < 0.4:
            task.cancel()
    async with within(20):
        await asyncio.gather(closing, *tasks, return_exceptions=True)
        await client.aclose()  # a task that is cancelled in its first turn has not begun


async def _quick(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("x")


async def _parts(_request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000
            await asyncio.sleep(0.001)

    return StreamingResponse(parts())


def test_certificate_authorities_are_read_once_a_process(monkeypatch):
    reads = []
    create = httpx.create_ssl_context
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **options: reads.append(options) or create(**options))
    for _ in range(3):
        DirectTransport()
    assert len(reads) <= 1  # none where an earlier test has created one


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (httpx.ReadTimeout(""), "no answer in time"),
        (httpx.ConnectTimeout(""), "no connection in time"),
        (httpx.ConnectError("refused"), "ConnectError('refused')"),
    ],
)
def test_a_message_says_in_words_why_no_answer_came(exc, said):
    assert why_no_answer(exc) == said
