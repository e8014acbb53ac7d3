"""TLS of a server: a new connection's handshake, before its protocol has it.

Handshakes are ours and not the event loop's server's: each takes the certificate that is in force when it begins, their
number and time are bounded, and a client that speaks plain HTTP is told so.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from lorafleet.http_server.connection import HIGH_WATER_BYTES, ClientConnection
from lorafleet.http_server.exchange import CLOSE, JSON, plain_error
from lorafleet.service.network.tls import PEER, Tls, peer_names
from lorafleet.service.tasks import BackgroundTasks

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

HANDSHAKE_S = 10.0
"""From connecting to the end of the handshake. asyncio gives 60 s, by which a slow client holds a descriptor."""
MOST_HANDSHAKES = 1024
"""Handshakes under way. Beyond it the oldest one is cut off: a client's own takes a few round trips."""
# Whether a client still reads its last answer is for its connection to see, which knows what is unsent.
_CLOSE_S = 86400.0
# RFC 8446, 5.1: the first byte of a record with a handshake. No HTTP method begins with it.
_HANDSHAKE_RECORD = 0x16
_SPEAK_TLS = "this port speaks TLS, and the request came in plain HTTP: use https://"


class TlsListener:
    """Makes the protocol of each new connection, as HttpListener does, behind a TLS handshake.

    make        the protocol of a connection whose handshake is done; called as uvicorn would
    handshakes  those under way, the oldest first
    """

    def __init__(
        self,
        make: Callable[..., asyncio.Protocol],
        tls: Tls,
        *,
        handshake_s: float = HANDSHAKE_S,
        most_handshakes: int = MOST_HANDSHAKES,
    ) -> None:
        self._make = make
        self.tls = tls
        self.handshake_s = handshake_s
        self._most_handshakes = most_handshakes
        self.handshakes: dict[_Handshake, None] = {}
        self.tasks = BackgroundTasks()

    def __call__(
        self,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """The protocol of a new connection. The parameters are uvicorn's."""

        def make(names: object) -> asyncio.Protocol:
            state = app_state if names is None else {**app_state, PEER: names}
            return self._make(config=config, server_state=server_state, app_state=state, _loop=_loop)

        return _Handshake(self, make)

    def add(self, handshake: "_Handshake") -> None:
        """Enter a new handshake; cut off the oldest where there are too many."""
        self.handshakes[handshake] = None
        if len(self.handshakes) > self._most_handshakes:
            next(iter(self.handshakes)).abort("too many handshakes at a time")

    def close(self) -> None:
        """Cut off the handshakes under way: the server stops."""
        for handshake in list(self.handshakes):
            handshake.abort("the server stops")


class _Handshake(asyncio.Protocol):
    """A new connection until its handshake is done. Then the transport has another protocol, and this one is gone."""

    def __init__(self, listener: TlsListener, make: Callable[[object], asyncio.Protocol]) -> None:
        self._listener = listener
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._early = b""
        self._is_begun = self._is_cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: start the handshake's deadline."""
        self._transport = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._listener.handshake_s, self.abort, "no handshake in time")
        self._listener.add(self)

    def data_received(self, data: bytes) -> None:
        """The first bytes of a client: begin the handshake with them, or answer plain HTTP.

        Decrypted bytes that come before `connection_made` of the next protocol are kept for it.
        """
        if self._is_begun:
            self._early += data
            return
        assert self._transport is not None
        self._is_begun = True
        if data[0] != _HANDSHAKE_RECORD:
            self._answer_plain_http(self._transport)
            return
        loop = asyncio.get_running_loop()
        self._transport.pause_reading()
        self._listener.tasks.spawn(self._shake_hands(self._transport))
        # Behind the task's first step, which queues the start of the handshake: so the bytes come just after it, and
        # before any read.
        loop.call_soon(loop.call_soon, _feed, self._transport, data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (the base's signature)
        """The client has gone before its handshake."""
        self._end()

    def abort(self, why: str) -> None:
        """Cut the connection off."""
        log.debug("TLS handshake cut off", why=why)
        self._end()
        self._is_cut_off = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        """The handshake is over, however."""
        self._listener.handshakes.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _answer_plain_http(self, transport: asyncio.Transport) -> None:
        """Tell a client that speaks no TLS what to do, and close."""
        self._end()
        body = plain_error(400, "tls_required", _SPEAK_TLS, "")
        transport.write(STATUS_LINE[400] + JSON + b"content-length: %d\r\n" % len(body) + CLOSE + b"\r\n" + body)
        transport.close()

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        """Do the handshake, and hand the connection to its protocol. A failure is logged; the connection is closed."""
        tls, loop = self._listener.tls, asyncio.get_running_loop()
        context = tls.server_context
        assert context is not None, "a TLS listener has a certificate"
        if plain.is_closing():
            return
        try:
            transport = await loop.start_tls(
                plain,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._listener.handshake_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except (OSError, EOFError) as exc:  # ssl.SSLError is one
            log.debug("TLS handshake failed", error=str(exc) or repr(exc))
            return
        finally:
            self._end()
        if self._is_cut_off or transport is None or transport.is_closing():
            return
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)  # asyncio's own for TLS is eight times as much
        protocol = self._make(peer_names(transport.get_extra_info("peercert")))
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if isinstance(protocol, ClientConnection):
            protocol.socket_transport = plain
        if self._early:
            protocol.data_received(self._early)


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Give bytes that were read from a transport to the protocol that has it now, that of TLS."""
    protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
    rest = memoryview(data)
    with contextlib.suppress(OSError):
        while rest and not transport.is_closing():
            buffer = memoryview(cast("bytearray", protocol.get_buffer(len(rest))))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            protocol.buffer_updated(size)
            rest = rest[size:]
