"""All client connections of one server, and what they hold together."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from lorafleet.http_server.batches import Batches
from lorafleet.http_server.body_room import BodyRoom
from lorafleet.http_server.connection import ClientConnection
from lorafleet.http_server.descriptors import DescriptorRoom
from lorafleet.http_server.exchange import ErrorBody, Handler, HttpExchange, plain_error
from lorafleet.http_server.framing import RefusedMessage
from lorafleet.http_server.limits import ClientLimits
from lorafleet.http_server.outbox import Outbox
from lorafleet.keys.roles import ANYONE, Caller
from lorafleet.telemetry.request_log import RequestLine, RequestLog

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

# For so long after a refusal for want of descriptors `/ready` says so, and no second line is logged.
_SHORT_S = 5.0
_NO_DESCRIPTORS = "no_descriptors"
# A connection without a byte counts as idle from this age on.
_NEW_S = 1.0
_SHORT = "this server has as many connections as its limit of open files allows; try again, or raise `ulimit -Hn`"
# (method, path) -> the handler of a hot route; None: the ASGI app answers. The path is as sent, without its query.
FindHandler = Callable[[str, str], Handler | None]
# (method, path) -> most bytes of a body that the app's route reads in pieces, as they come; 0 for any other route.
UploadBytes = Callable[[str, str], int]
# Headers -> the caller; or the error that the handler shall answer with, and the body is thrown away as it comes.
CallerOf = Callable[[Mapping[bytes, bytes]], Caller | Exception]
# Origin of a web page -> CORS header lines for the response to it.
CorsHeaders = Callable[[bytes], bytes]
# Code of a refusal -> the setting that it reached.
_LIMITS = {
    "head_too_large": "max_head_bytes",
    "body_too_large": "max_body_bytes",
    "saturated": "max_bodies_bytes",
}


class BodyMeter(Protocol):
    """Charges what callers with limits send, whatever becomes of their requests."""

    def charge_read(self, caller: Caller, size_bytes: int) -> None:
        """Charge bytes of a body that were read."""

    def charge_unfinished(self, caller: Caller) -> None:
        """Charge a request whose body ended early: it was refused, came too slowly, or its client left."""


class HttpListener:
    """Makes the protocol of each client connection, for `uvicorn.Config(http=...)`.

    refusals     requests that were refused before any handler had them, or not begun at a stop, by error code
    is_draining  every response closes its connection: clients and proxies have moved to another router by the time this
                 one closes its socket, and send nothing into that moment
    has_stopped  no request is begun any more
    room         the bodies of all requests
    outbox       writes of this tick
    batches      the requests that are being worked on
    connections  all of them, the oldest first
    descriptors  how many there may be
    """

    def __init__(
        self,
        find_handler: FindHandler,
        limits: ClientLimits,
        caller_of: CallerOf = lambda _: ANYONE,
        cors_headers: CorsHeaders | None = None,
        outbox: Outbox | None = None,
        error_body: ErrorBody = plain_error,
        *,
        requests: RequestLog | None = None,
        meter: BodyMeter | None = None,
        upload_bytes: UploadBytes = lambda _method, _path: 0,
        descriptors: DescriptorRoom | None = None,
    ) -> None:
        """
        cors_headers  None: no CORS. Preflight requests (OPTIONS) go to the ASGI app
        outbox        shared with other writers of the same event loop
        error_body    makes the body of a refusal, by the path
        meter         charges bodies of callers with limits; None: they cost nothing
        requests      logs the requests that no handler had; None: nothing does
        upload_bytes  such bodies may be larger than `body_bytes`; each piece must come within `body_s`
        """
        self.upload_bytes = upload_bytes
        self._find_handler = find_handler
        self.limits = limits
        self.caller_of = caller_of
        self.cors_headers = cors_headers
        self.error_body = error_body
        self._requests = requests
        self._meter = meter
        self.connections: dict[ClientConnection, None] = {}
        self.descriptors = descriptors or DescriptorRoom()
        self._refused_at = self._logged_at = -inf
        self.room = BodyRoom(limits.held_bytes, limits.tenant_bytes)
        self.refusals: Counter[str] = Counter()
        self.is_draining = False
        self.has_stopped = False
        self.outbox = outbox or Outbox()
        self.batches = Batches(self.outbox)
        shortest = min(limits.head_s, limits.body_s, limits.send_stall_s, limits.idle_s)
        self._sweep_every_s = min(1.0, max(0.02, shortest / 4))
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_at = 0.0
        self._was_late = False

    def __call__(
        self,
        config: "Config",
        server_state: "ServerState",
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """The protocol of a new connection. The parameters are uvicorn's."""
        return ClientConnection(self, config, server_state, app_state, _loop)

    def find_handler(self, method: str, path: str) -> Handler | None:
        """The handler of a hot route; None: the ASGI app answers. `/ready` is refused while clients are."""
        if path == "/ready" and self._refused_at > -inf:
            if asyncio.get_running_loop().time() - self._refused_at < _SHORT_S:
                return _not_ready
            self._refused_at = -inf
        return self._find_handler(method, path)

    def hold_body(self, caller: Caller, size_bytes: int) -> bool:
        """Count bytes of a body in `room`, and charge them to a caller with limits; whether there is room for them."""
        if caller.limits is not None and self._meter is not None:
            self._meter.charge_read(caller, size_bytes)
        return self.room.hold(caller.tenant or "", size_bytes)

    def drop_body(self, caller: Caller, size_bytes: int) -> None:
        """Count bytes no longer of a body that ended early, and charge its request to a caller with limits."""
        self.room.release(caller.tenant or "", size_bytes, is_answered=False)
        if caller.limits is not None and self._meter is not None:
            self._meter.charge_unfinished(caller)

    def no_room(self, caller: Caller, exchange: HttpExchange, body_bytes: int, now: float) -> RefusedMessage:
        """The 429 for a body beyond what the server may hold, with the seconds until there should be room for it.

        body_bytes  of the body that have come, and are held
        """
        declared = int(exchange.headers.get(b"content-length", b"0"))
        message, retry_s = self.room.refusal(caller.tenant or "", body_bytes, max(body_bytes, declared), now)
        return RefusedMessage(429, "saturated", message, retry_after_s=retry_s)

    def log_refusal(
        self,
        request_id: str,
        method: str,
        path: str,
        status: int,
        code: str,
        message: str,
        *,
        caller: Caller | None = None,
        client: tuple[str, int] | None = None,
    ) -> None:
        """Log and keep a request that was refused before a handler had it, or that its handler left unanswered."""
        if self._requests is None:
            return
        line = RequestLine(
            request_id=request_id,
            method=method,
            path=path,
            status=status,
            duration_s=0.0,
            code=code,
            cause=message,
            client=client[0] if client else "",
            key=caller.key_id if caller is not None else "",
            tenant=(caller.tenant or "") if caller is not None else "",
            limit=_LIMITS.get(code, ""),
            stage="read",
        )
        self._requests.record(line, is_failure=True)
        self._requests.keep(line)

    def add(self, connection: ClientConnection) -> None:
        """Enter a new connection, make room for it, and start the timer that checks all connections' deadlines."""
        if not self.connections:
            self.descriptors.measure(0)
        self.connections[connection] = None
        if self._timer is None:
            self._schedule_sweep(connection.loop)
        if len(self.connections) > self.descriptors.most_clients:
            self._make_room(connection)

    def _make_room(self, newest: ClientConnection) -> None:
        """Close connections without a request, those with a part of a head first. Without any, refuse `newest`.

        New connections without a byte stay. Closes some more than needed, so that not each new client has all others
        looked at. Connections that only wait for their client to read a last response do not count, but few may.
        """
        most, now = self.descriptors.most_clients, newest.loop.time()
        ending = [each for each in self.connections if each.ignores_input]
        for each in ending[: max(0, len(ending) - self.descriptors.most_ending)]:
            del self.connections[each]
            each.hang_up()
        excess = sum(not each.ignores_input for each in self.connections) - most
        if excess <= 0:
            return
        waiting = [each for each in self.connections if each.is_without_request]
        # Of a client that has just connected, the request may have come and not been read yet.
        waiting = [each for each in waiting if each.is_in_head or now - each.opened_at >= _NEW_S]
        waiting.sort(key=lambda each: not each.is_in_head)
        closed = waiting[: excess + most // 16]
        refusal = RefusedMessage(503, _NO_DESCRIPTORS, _SHORT, retry_after_s=1.0)
        for each in closed:
            # Its descriptor is free in the next turn of the event loop.
            del self.connections[each]
            self.refusals[_NO_DESCRIPTORS] += 1
            each.make_room(refusal)
        if not closed:
            self._refused_at = now
            newest.refuse(refusal)
        if now - self._logged_at > _SHORT_S:
            self._logged_at = now
            limit, clients = self.descriptors.limit, len(self.connections)
            log.warning("short of file descriptors", limit=limit, clients=clients, closed=len(closed), next=_SHORT)

    def stop(self) -> None:
        """End the work on every request, and let none begin any more: the time to finish is over."""
        self.has_stopped = True
        for connection in list(self.connections):
            connection.stop()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check all connections' deadlines, but not after a stall of the process.

        Schedules the next check while there are any.
        """
        now = loop.time()  # one timer for all: none is made per request or chunk
        # A timer this late means that the process stood still (a frozen container, say). A loop runs timers before it
        # reads, so bytes that clients have sent meanwhile are not late. Not twice in a row: some loops always are late.
        self._was_late = now - self._sweep_at > self._sweep_every_s and not self._was_late
        if not self._was_late:
            for connection in list(self.connections):
                connection.check_deadlines(now)
        self.room.advance(now)
        self.descriptors.measure(len(self.connections))
        self._timer = None
        if self.connections:
            self._schedule_sweep(loop)

    def _schedule_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the next check of all connections' deadlines, and note when it is due."""
        self._sweep_at = loop.time() + self._sweep_every_s
        self._timer = loop.call_at(self._sweep_at, self._sweep, loop)


async def _not_ready(exchange: HttpExchange) -> None:
    """Answer `/ready` while clients are refused for want of descriptors."""
    exchange.send_error(503, _NO_DESCRIPTORS, _SHORT)


def listener_for_app(
    limits: ClientLimits, requests: RequestLog | None = None, upload_bytes: UploadBytes = lambda _method, _path: 0
) -> HttpListener:
    """A listener without hot routes: the ASGI app answers all requests that keep to the limits."""
    return HttpListener(lambda _method, _path: None, limits, requests=requests, upload_bytes=upload_bytes)
