"""httpx over the engine pool, for calls to agents and the orchestrator: cheaper than httpx's own transport."""

import httpx

from router.http.engine_connection import EngineLost, Origin
from router.http.engine_pool import EnginePool
from router.http.fetch import exchange

# The tokenizer files of a base model are tens of megabytes.
_MAX_ANSWER_BYTES = 256 * 2**20
_ERRORS: dict[str, type[httpx.TransportError]] = {
    "connection": httpx.ConnectError,
    "no_descriptors": httpx.ConnectError,
    "no_answer_in_time": httpx.ReadTimeout,
}


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends requests over a pool's connections and returns whole answers. The pool is closed by its owner.

    A request is sent once more where the peer closes an idle connection instead of answering: all calls between our
    services may be repeated.

    raises  only httpx.HTTPError, whatever the peer does
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its answer with its whole body. httpx's read timeout bounds all of the answer."""
        url = request.url
        name = f"{request.method} {url.scheme}://{url.netloc.decode()}{url.path}"
        try:
            answer = await exchange(
                self._pool,
                Origin.parse(f"{url.scheme}://{url.netloc.decode()}"),
                _encoded_request(request, await request.aread()),
                name=name,
                timeout_s=request.extensions.get("timeout", {}).get("read"),
                max_bytes=_MAX_ANSWER_BYTES,
            )
        except EngineLost as exc:
            raise _ERRORS.get(exc.reason, httpx.ReadError)(str(exc), request=request) from exc
        except ValueError as exc:
            raise httpx.UnsupportedProtocol(str(exc), request=request) from exc
        return httpx.Response(answer.status, headers=list(answer.headers.items()), stream=httpx.ByteStream(answer.body))


def _encoded_request(request: httpx.Request, body: bytes) -> bytes:
    """The bytes of one request, head and body."""
    headers = [b"%b: %b\r\n" % header for header in request.headers.raw]
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method.encode(), request.url.raw_path, b"".join(headers), body)
