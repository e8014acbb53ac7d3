"""Bodies that a route of the app reads in pieces: larger than others, held by nobody, and each piece in time."""

import asyncio

import pytest

from tests.patience import until
from tests.wires import COLD, UPLOAD, error_of, listening, parsed_head, post

LARGE = 30_000_000


def put(path: str, size_bytes: int) -> bytes:
    return post(path, b"").replace(b"POST", b"PUT").replace(b"Content-Length: 0", b"Content-Length: %d" % size_bytes)


class UploadCounter:
    """An app that counts a body without keeping it, and waits for `go_on` before each piece."""

    def __init__(self, status=200):
        self.received = 0
        self.most = 0
        self.status = status
        self.reads = True
        self.is_gone = False
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send):
        more = self.reads
        while more:
            await self.go_on.wait()
            message = await receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                return
            self.received += len(message["body"])
            self.most = max(self.most, len(message["body"]))
            more = message["more_body"]
        said = b"%d" % self.received
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-length", b"%d" % len(said))]}
        )
        await send({"type": "http.response.body", "body": said})


@pytest.fixture
async def served():
    async with listening(upload_bytes=LARGE, body_bytes=1000, body_s=0.5) as made:
        counting = UploadCounter()
        made.app.upload = counting
        yield made


async def test_an_upload_may_be_larger_than_other_bodies_and_is_held_by_nobody(served):
    async with await served.client() as client:
        client.send(put(UPLOAD, LARGE))
        for _ in range(30):
            client.send(bytes(LARGE // 30))
            await client.writer.drain()
        assert (await client.answer())[2] == b"%d" % LARGE
        client.send(put(COLD, 3) + b"abc")  # the connection serves on
        assert (await client.answer())[2] == b"3"
    assert served.app.upload.most < 2_000_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upload_above_its_own_limit_is_refused(served, chunked):
    async with await served.client() as client:
        if chunked:
            client.send(put(UPLOAD, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            client.send(b"%x\r\n" % (LARGE + 1) + bytes(LARGE + 1))
        else:
            client.send(put(UPLOAD, LARGE + 1))
        assert error_of(await client.rest()) == (413, "body_too_large")
    assert served.app.upload.received <= LARGE


async def test_an_upload_may_take_longer_than_a_body_but_not_a_piece_of_it(served):
    async with await served.client() as client:
        client.send(put(UPLOAD, 100))
        deadlines = []
        for sent in range(1, 9):
            client.send(b"x")
            await until(lambda sent=sent: served.app.upload.received == sent)
            (connection,) = served.listener.connections
            deadlines.append(connection.read_deadline)
            assert connection.read_deadline <= connection.loop.time() + 0.5
        assert deadlines == sorted(deadlines)
        assert deadlines[-1] > deadlines[0]  # pieces begin it anew
        connection.check_deadlines(connection.read_deadline + 0.1)
        assert error_of(await client.rest()) == (408, "request_timeout")
        await until(lambda: served.app.upload.is_gone)


async def test_a_client_is_not_late_while_the_app_takes_nothing(served):
    served.app.upload.go_on.clear()
    async with await served.client() as client:
        client.send(put(UPLOAD, LARGE) + bytes(LARGE))
        await until(lambda: any(each.flow.read_paused for each in served.listener.connections))
        (connection,) = served.listener.connections
        connection.check_deadlines(connection.read_deadline + 0.1)
        served.app.upload.go_on.set()
        assert (await client.answer())[2] == b"%d" % LARGE


async def test_an_upload_that_the_app_refuses_is_answered_and_not_read_to_its_end(served):
    served.app.upload.reads, served.app.upload.status = False, 403
    async with await served.client() as client:
        client.send(put(UPLOAD, LARGE) + bytes(1_000_000))
        said = await client.rest()
        assert parsed_head(said.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")[0] == 403
        assert not client.was_reset
