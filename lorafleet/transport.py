"""How all houses call one another and their engines: httpx' transport, with one fault of the libraries below it told as
what it is."""

import httpx

_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)  # httpx' own


class Transport(httpx.AsyncHTTPTransport):
    """Environment and netrc have no say.

    raises  httpx.HTTPError alone, whatever the peer does
    """

    def __init__(self, *, limits: httpx.Limits = _LIMITS) -> None:
        super().__init__(trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as exc:
            # Who is killed resets what waits to be accepted. Under uvloop such a connection may be closed before the
            # next turn of the loop, and anyio 4.16 asks it for its peer's name (abc/_sockets.py extra_attributes).
            raise httpx.ConnectError("closed by the peer as soon as it was open", request=request) from exc
