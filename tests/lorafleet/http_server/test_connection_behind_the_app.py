"""What a client sends once it has all of an app's answer, before the app has said that it was all."""

import asyncio

import pytest

from tests.patience import until
from tests.wires import COLD, HOT, listening, post


@pytest.mark.parametrize("path", [HOT, COLD])
@pytest.mark.parametrize("size", [3, 300_000])
async def test_a_request_behind_an_answer_that_is_all_there_is_served(path, size):
    over = asyncio.Event()

    async def answer(send) -> None:
        served.app.answer = None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"all!", "more_body": True})
        await over.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with listening() as served, await served.client() as client:
        served.app.answer = answer
        client.send(post(COLD, b"first"))
        assert (await client.answer())[2] == b"all!"
        client.send(post(path, b"x" * size))
        (connection,) = served.listener.connections
        await until(lambda: connection.kept_input)
        assert len(served.seen) == 1
        over.set()
        assert (await client.answer())[2] == b"%d" % size
        client.send(post(path, b"last"))
        assert (await client.answer())[2] == b"4"


async def test_what_comes_behind_an_answer_that_ends_the_connection_is_not_served():
    over = asyncio.Event()

    async def answer(send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"all!", "more_body": True})
        await over.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with listening() as served, await served.client() as client:
        served.app.answer = answer
        client.send(post(COLD, b"first", b"Connection: close"))
        await client.answer()
        client.send(post(COLD, b"second"))
        over.set()
        assert await client.rest() == b""
        assert served.seen == [(COLD, b"first")]
