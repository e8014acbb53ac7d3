"""A server that is short of file descriptors: what is served has its own, and others are told."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.http_server.descriptors import kept_free, listen_backlog, most_clients
from tests.patience import patience, until, within

LIMIT = 256
# As the services start: their own event loop and limits. A request for the app is answered once 20 wait, or at once.
SERVER = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from lorafleet.http_server import serve
from lorafleet.http_server.descriptors import DescriptorRoom
from lorafleet.http_server.intake import ClientLimits, RequestIntake
from lorafleet.http_server.listener import HttpListener

held = asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})
        return
    if scope["path"] == "/go":
        held.set()
    if scope["path"] == "/held":
        await held.wait()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def main():
    sock = serve.bind("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    listener = HttpListener(RequestIntake(lambda method, path: None, ClientLimits(head_s=600.0)), DescriptorRoom())
    await serve.serve(app, sock, http=listener)

serve.run(main)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server process that may have 256 descriptors."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(patience(20))
        process.stdout.close()


async def ask(port: int, path: str = "/") -> tuple[int, str]:
    """The status and body of a request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        return int(head.split(" ")[1]), body
    finally:
        writer.close()


async def half_head(port: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: ")
    await writer.drain()
    return writer


async def test_half_heads_take_no_descriptor_from_complete_requests(port: int) -> None:
    async with within(60):
        halves = [await half_head(port) for _ in range(400)]
        assert [await ask(port) for _ in range(19)] == [(200, "ok")] * 19
        assert await asyncio.gather(*[ask(port) for _ in range(12)]) == [(200, "ok")] * 12
        assert (await ask(port, "/ready"))[0] == 200
        for half in halves:
            half.close()


async def test_with_all_descriptors_at_work_a_client_is_refused_in_words_and_ready_says_so(port: int) -> None:
    async with within(60):
        waiting: list[asyncio.Task[tuple[int, str]]] = []
        while len(waiting) < LIMIT and (await ask(port))[0] == 200:
            waiting += [asyncio.create_task(ask(port, "/held")) for _ in range(4)]  # fewer than the backlog
        status, body = await ask(port, "/ready")
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_descriptors")
        # Those at work go on; once one of them has left, a client gets in.
        assert len(waiting) > LIMIT / 2
        waiting.pop().cancel()
        await until(lambda: is_let_in(port))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert answers.count((200, "ok")) > LIMIT / 2


async def is_let_in(port: int) -> bool:
    """Whether the request that ends those at work gets in."""
    with contextlib.suppress(OSError):
        return (await ask(port, "/go"))[0] == 200
    return False


@given(st.integers(64, 2**20), st.integers(0, 2**20), st.integers(1, 3))
def test_clients_others_and_a_whole_backlog_fit_into_the_limit(limit: int, others: int, each: int) -> None:
    most = most_clients(limit, others, each)
    assert most >= 1
    if most > 1:
        assert most * each + others + listen_backlog(limit) <= limit
        assert (most + 1) * each + others + kept_free(limit) > limit
    assert 1 <= listen_backlog(limit) <= kept_free(limit) / 2
