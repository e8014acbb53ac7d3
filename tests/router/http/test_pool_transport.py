"""httpx over the engine pool: answers as httpx gives them, and httpx's errors only."""

import asyncio
import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.engine_pool import EnginePool
from router.http.pool_transport import PoolTransport
from tests.patience import patience
from tests.serving import serving


@contextlib.asynccontextmanager
async def _client(**more):
    pool = EnginePool(connect_s=patience(2))
    async with httpx.AsyncClient(transport=PoolTransport(pool), **more) as client:
        yield client, pool
    await pool.close()


async def _echo(request: Request) -> Response:
    if request.headers.get("if-none-match") == '"1"':
        return Response(status_code=304, headers={"etag": '"1"'})
    told = {"method": request.method, "query": request.url.query, "body": (await request.body()).decode()}
    return JSONResponse(told | {"key": request.headers.get("authorization")}, headers={"etag": '"1"'})


async def _refuse(_request: Request) -> Response:
    return JSONResponse({"error": "no"}, status_code=503)


async def _never(_request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


APP = Starlette(
    routes=[
        Route("/echo", _echo, methods=["GET", "POST"]),
        Route("/refuse", _refuse),
        Route("/never", _never),
    ]
)


async def test_answers_have_status_headers_and_body_and_share_a_connection():
    async with serving(APP) as url, _client() as (client, pool):
        got = await client.get(f"{url}/echo", params={"since": "a b"}, headers={"authorization": "Bearer k"})
        assert got.json() == {"method": "GET", "query": "since=a+b", "body": "", "key": "Bearer k"}
        posted = await client.post(f"{url}/echo", json={"a": "ä"})
        assert posted.json()["body"] == '{"a":"ä"}'
        assert posted.headers["etag"] == '"1"'
        unchanged = await client.get(f"{url}/echo", headers={"if-none-match": '"1"'})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        refused = await client.get(f"{url}/refuse")
        with pytest.raises(httpx.HTTPStatusError):
            refused.raise_for_status()
        assert pool.connections == 1


async def test_a_peer_that_does_not_answer_is_a_timeout_and_one_that_is_away_a_connect_error():
    async with serving(APP) as url, _client(timeout=0.1) as (client, _pool):
        with pytest.raises(httpx.ReadTimeout) as timed_out:
            await client.get(f"{url}/never")
        assert str(timed_out.value.request.url) == f"{url}/never"
    async with _client() as (client, _pool):
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/echo")


@pytest.mark.parametrize("said", [b"", b"not HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_half_an_answer_is_a_read_error(said):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, _client() as (client, pool):
        with pytest.raises(httpx.ReadError):
            await client.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        assert pool.connections == 0


async def test_a_cancelled_call_closes_its_connection():
    async with serving(APP) as url, _client() as (client, pool):
        call = asyncio.create_task(client.get(f"{url}/never"))
        while not pool.connections:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pool.connections == 0
