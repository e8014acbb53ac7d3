"""HTTPS to public addresses only: what a tenant names must not make this machine call its neighbours."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ssl import SSLContext

import httpx

from workers.core.addresses import Network, is_allowed
from workers.core.errors import SourceError

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class GuardedTransport(httpx.AsyncBaseTransport):
    """Connects to an address that was judged, not to a name that may mean another one a moment later.

    Each hop of a redirect comes through here again. The name stays in the Host header, in SNI and in the check of the
    certificate.
    """

    def __init__(self, verify: SSLContext, *, allowed: tuple[Network, ...], resolve: Resolve | None = None) -> None:
        # A connection is known to the pool by its address alone, so it is never used for a second name: no keep-alive.
        self._inner = httpx.AsyncHTTPTransport(
            verify=verify, http2=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._allowed = allowed
        self._resolve = resolve or _resolve

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme != "https":
            message = f"redirected to {url.scheme}:// on {url.host!r}; only https:// is followed"
            raise SourceError("source_address_forbidden", message)
        for address in await self._addresses(url.host, url.port or 443):
            try:
                return await self._inner.handle_async_request(_to(address, request))
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                failed = exc
        raise failed

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError) as exc:
            raise httpx.ConnectError(f"{host}: no address") from exc
        addresses = [address for address in found if is_allowed(address, self._allowed)]
        if not addresses:
            message = (
                f"host {host!r} is not on a public address; private, loopback, link-local and metadata addresses are"
                " called only where source_networks allows them"
            )
            raise SourceError("source_address_forbidden", message)
        return addresses


def _to(address: str, request: httpx.Request) -> httpx.Request:
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions=request.extensions | {"sni_hostname": request.url.host},
    )


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in found))
