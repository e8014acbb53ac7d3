"""HTTPS to public addresses only, because tenants choose the hosts: protects internal services from requests (SSRF)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ssl import SSLContext

import httpx

from lorafleet.service.network.transport import DirectTransport
from workers.core.addresses import Network, is_allowed
from workers.core.errors import SourceError

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class GuardedTransport(httpx.AsyncBaseTransport):
    """Resolves a host, checks its addresses and connects to a checked address (no DNS rebinding).

    Each redirect is checked, too. The host name stays in the Host header, in SNI and in the certificate check.
    """

    def __init__(self, verify: SSLContext, *, allowed: tuple[Network, ...], resolve: Resolve | None = None) -> None:
        # No keep-alive: the pool knows a connection only by address, and would reuse it for another host name.
        self._inner = DirectTransport(verify=verify, limits=httpx.Limits(max_keepalive_connections=0))
        self._allowed = allowed
        self._resolve = resolve or _resolve_host

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request to the first allowed address of its host that accepts the connection.

        raises  SourceError `source_address_forbidden` for another scheme than https or no allowed address,
                httpx.ConnectError
        """
        url = request.url
        if url.scheme != "https":
            message = f"redirected to {url.scheme}:// on {url.host!r}; only https:// is followed"
            raise SourceError("source_address_forbidden", message)
        for address in await self._allowed_addresses(url.host, url.port or 443):
            try:
                return await self._inner.handle_async_request(_request_to_address(address, request))
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                failed = exc
        raise failed

    async def aclose(self) -> None:
        """Close the inner transport with its connections."""
        await self._inner.aclose()

    async def _allowed_addresses(self, host: str, port: int) -> list[str]:
        """Resolve a host to its allowed addresses. Raises SourceError if it has none, httpx.ConnectError."""
        try:
            resolved = await self._resolve(host, port)
        except (OSError, UnicodeError) as exc:
            raise httpx.ConnectError(f"{host}: no address") from exc
        addresses = [address for address in resolved if is_allowed(address, self._allowed)]
        if not addresses:
            message = (
                f"host {host!r} is not on a public address; private, loopback, link-local and metadata addresses are"
                " called only where source_networks allows them"
            )
            raise SourceError("source_address_forbidden", message)
        return addresses


def _request_to_address(address: str, request: httpx.Request) -> httpx.Request:
    """The request with the address in place of the host, which stays in the Host header and SNI."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions=request.extensions | {"sni_hostname": request.url.host},
    )


async def _resolve_host(host: str, port: int) -> list[str]:
    """Look up all addresses of a host. Raises OSError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in entries))
