"""The httpx transport of all services, with fixes for an anyio error, leaked connections and kept answers."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import cast

import httpcore
import httpx

from lorafleet.service.network.sockets import KEEP_ALIVE
from lorafleet.service.network.tls import Tls, failure_text
from lorafleet.service.tasks import finish_even_if_cancelled

_WAITS: dict[type[Exception], str] = {
    httpx.ConnectTimeout: "no connection in time",
    httpx.PoolTimeout: "no free connection in time",
    httpx.WriteTimeout: "the body was not taken in time",
    httpx.ReadTimeout: "no answer in time",
    TimeoutError: "no answer in time",
}
ROLE = "lorafleet.role"
"""Extension of a request: the role of the service that it goes to, where that is not to be seen by its address."""
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)  # httpx' own


def why_no_answer(exc: Exception) -> str:
    """Why a call got no answer, for a message. httpx' own timeouts have no text."""
    return _WAITS.get(type(exc)) or repr(exc)


class DirectTransport(httpx.AsyncHTTPTransport):
    """A transport without the environment's proxies and netrc.

    raises  only httpx.HTTPError, whatever the peer does
    """

    def __init__(
        self,
        *,
        limits: httpx.Limits = _LIMITS,
        verify: ssl.SSLContext | bool = True,
        proxy: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """
        verify  the TLS context; True: one with certifi's authorities; False: no certificate is checked
        proxy   the URL of a proxy that all calls take
        tls     of this service: where it names authorities, they and its certificate count in place of `verify`
        """
        self._tls = tls if tls is not None and tls.files.ca is not None else None
        context = (self._tls and self._tls.client_context) or (_ssl_context() if verify is True else verify)
        super().__init__(verify=context, trust_env=False, limits=limits, proxy=proxy, socket_options=list(KEEP_ALIVE))
        self._unanswered: set[asyncio.Timeout] = set()
        # httpcore 1.0 drops the connections from its pool first and then closes each in turn; a cancellation between
        # two of them would leave the rest open (_async/connection_pool.py _close_connections).
        self._pool._close_connections = _close_all  # type: ignore[method-assign,assignment]

    async def aclose(self) -> None:
        """Close all connections, even if cancelled. Calls that have no answer yet raise httpx.ReadError.

        httpcore 1.0 alone would leave the connection of a call open that is connecting (_async/connection.py aclose).
        """
        await finish_even_if_cancelled(self._end_calls_and_close())

    async def _end_calls_and_close(self) -> None:
        """End the calls without an answer, then close the connections of the pool, which are all that are left."""
        now = asyncio.get_running_loop().time()
        for call in self._unanswered:
            call.reschedule(now)
        while self._unanswered:  # noqa: ASYNC110  (they end within some turns of the loop)
            await asyncio.sleep(0)
        await super().aclose()

    @property
    def is_idle(self) -> bool:
        """Whether no connection has a request."""
        return all(connection.is_idle() for connection in self._pool.connections)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer; after an error close connections without a request, and raise it.

        A connection that the peer closes at once is an httpx.ConnectError.
        """
        try:
            async with asyncio.timeout(None) as call:  # expires when the transport is closed
                self._unanswered.add(call)
                try:
                    answer = await self._send(request)
                finally:
                    self._unanswered.discard(call)
        except TimeoutError as exc:
            raise httpx.ReadError("the client was closed before the answer came", request=request) from exc
        answer.stream = _ResponseBody(answer)
        return answer

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """The answer, with a body that httpx made. Raises httpx.HTTPError."""
        tls = self._tls
        if tls is not None and request.url.scheme == "https":
            # A new connection takes the context of its pool, so it has the files of now.
            self._pool._ssl_context = tls.client_context
            host, port = request.url.host, request.url.port or 443
            name = request.extensions.get("sni_hostname") or tls.server_name(host, port, request.extensions.get(ROLE))
            request.extensions = {**request.extensions, "sni_hostname": name}
        try:
            return await super().handle_async_request(request)
        except httpx.ConnectError as exc:
            await self._close_orphans()
            name = request.extensions.get("sni_hostname", request.url.host)
            if tls is not None and (why := failure_text(exc, tls, name)):
                raise httpx.ConnectError(f"{request.url.copy_with(raw_path=b'/')}: {why}", request=request) from exc
            raise
        except AttributeError as exc:
            # A killed peer resets connections that it has not accepted. Under uvloop such a connection may be closed
            # before the next tick, and anyio 4.16 then fails to read its peer's name (abc/_sockets.py).
            raise httpx.ConnectError("closed by the peer as soon as it was open", request=request) from exc
        except BaseException:
            await self._close_orphans()
            raise

    async def _close_orphans(self) -> None:
        """Close connections without a request. If a call is cancelled between connecting and sending, httpcore 1.0
        keeps its connection for ever (_async/http11.py handle_async_request).
        """
        pool = self._pool
        # A request stays in the pool until its answer is closed.
        in_use = {id(request.connection) for request in pool._requests}
        orphans = [c for c in pool.connections if id(c) not in in_use and not c.is_idle() and not c.is_closed()]
        for orphan in orphans:
            pool._connections.remove(orphan)
        await _close_all(orphans)


async def _close_all(connections: Sequence[httpcore.AsyncConnectionInterface]) -> None:
    """Close all these connections, even if the caller is cancelled."""

    async def close_each() -> None:
        for connection in connections:
            await connection.aclose()

    if connections:
        await finish_even_if_cancelled(close_each())


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """The TLS context shared by all clients of a process. Creating it takes 25 ms."""
    return httpx.create_ssl_context(trust_env=False)


class _ResponseBody(httpx.AsyncByteStream):
    """An answer's body that breaks a reference cycle once it is closed.

    httpx wraps the body into a stream that refers to the answer, and the answer refers to the stream (httpx 0.28
    _client.py BoundAsyncStream). Each answer would stay in memory until a garbage collection, which the router runs
    rarely.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self._answer: httpx.Response | None = answer
        self._stream = cast("httpx.AsyncByteStream", answer.stream)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's chunks as they come."""
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        """Close the body, even if cancelled, and release it."""
        answer, self._answer = self._answer, None
        if answer is not None:
            try:
                # A cancelled close would free nothing and never be repeated.
                await finish_even_if_cancelled(self._stream.aclose())
            finally:
                answer.stream = self._stream = httpx.ByteStream(b"")
