"""How all houses call one another and their engines: httpx' transport, with one fault of the libraries below it told as
what it is, and answers and connections that are gone as soon as nobody has them."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from typing import cast

import httpx

_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)  # httpx' own


class DirectTransport(httpx.AsyncHTTPTransport):
    """Environment and netrc have no say.

    raises  httpx.HTTPError alone, whatever the peer does
    """

    def __init__(self, *, limits: httpx.Limits = _LIMITS) -> None:
        super().__init__(verify=_trust(), trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer = await super().handle_async_request(request)
        except AttributeError as exc:
            # Who is killed resets what waits to be accepted. Under uvloop such a connection may be closed before the
            # next turn of the loop, and anyio 4.16 asks it for its peer's name (abc/_sockets.py extra_attributes).
            raise httpx.ConnectError("closed by the peer as soon as it was open", request=request) from exc
        except BaseException:
            await self._close_orphans()
            raise
        answer.stream = _ResponseBody(answer)
        return answer

    async def _close_orphans(self) -> None:
        """Close the connections that are nobody's: where a call is cancelled between connecting and sending, httpcore
        1.0 keeps what it had connected for ever, and its descriptor (_async/http11.py handle_async_request).
        """
        pool = self._pool
        # A request is in the pool for as long as its answer is not closed.
        had = {id(request.connection) for request in pool._requests}
        orphans = [c for c in pool.connections if id(c) not in had and not c.is_idle() and not c.is_closed()]
        for orphan in orphans:
            pool._connections.remove(orphan)
        for orphan in orphans:
            await orphan.aclose()


@functools.cache
def _trust() -> ssl.SSLContext:
    """The authorities that all clients of a process trust. Reading them takes 25 ms (certifi 2026, measured)."""
    return httpx.create_ssl_context(trust_env=False)


class _ResponseBody(httpx.AsyncByteStream):
    """An answer's body, which takes itself out of a circle once it is read.

    The client wraps it into a stream that has the answer, and gives that to the answer (httpx 0.28 _client.py
    BoundAsyncStream). So every answer would stay, with all its bytes, until the collector comes by: in a router, which
    has it come seldom, hundreds of whole catalogs.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self._answer: httpx.Response | None = answer
        self._stream = cast("httpx.AsyncByteStream", answer.stream)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            try:
                # In a task of its own: one that is cancelled half-way has freed nothing, and is not begun again.
                await asyncio.shield(asyncio.ensure_future(self._stream.aclose()))
            finally:
                answer.stream = self._stream = httpx.ByteStream(b"")
