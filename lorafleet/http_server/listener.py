"""All client connections of one server: their deadlines, and room for new ones."""

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any

import structlog

from lorafleet.http_server.connection import ClientConnection
from lorafleet.http_server.descriptors import NO_DESCRIPTORS, SHORT, DescriptorRoom
from lorafleet.http_server.framing import RefusedMessage
from lorafleet.http_server.intake import ClientLimits, RequestIntake, UploadBytes
from lorafleet.telemetry.request_log import RequestLog

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = structlog.get_logger()

# For so long after a refusal for want of descriptors `/ready` says so, and no second line is logged.
_SHORT_S = 5.0
# A connection without a byte counts as idle from this age on.
_NEW_S = 1.0


class HttpListener:
    """Makes the protocol of each client connection, for `uvicorn.Config(http=...)`.

    intake       what the connections share
    connections  all of them, the oldest first
    descriptors  how many there may be
    """

    def __init__(self, intake: RequestIntake, descriptors: DescriptorRoom | None = None) -> None:
        limits = intake.limits
        self.intake = intake
        self.connections: dict[ClientConnection, None] = {}
        self.descriptors = descriptors or DescriptorRoom()
        self._logged_at = -inf
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
        return ClientConnection(
            self.intake, config, server_state, app_state, _loop, on_open=self.add, on_close=self.forget
        )

    def forget(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed."""
        self.connections.pop(connection, None)

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
        refusal = RefusedMessage(503, NO_DESCRIPTORS, SHORT, retry_after_s=1.0)
        for each in closed:
            # Its descriptor is free in the next turn of the event loop.
            del self.connections[each]
            self.intake.refusals[NO_DESCRIPTORS] += 1
            each.make_room(refusal)
        if not closed:
            self.intake.short_until = now + _SHORT_S
            newest.refuse(refusal)
        if now - self._logged_at > _SHORT_S:
            self._logged_at = now
            limit, clients = self.descriptors.limit, len(self.connections)
            log.warning("short of file descriptors", limit=limit, clients=clients, closed=len(closed), next=SHORT)

    def stop(self) -> None:
        """End the work on every request, and let none begin any more: the time to finish is over."""
        self.intake.has_stopped = True
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
        self.intake.room.advance(now)
        self.descriptors.measure(len(self.connections))
        self._timer = None
        if self.connections:
            self._schedule_sweep(loop)

    def _schedule_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the next check of all connections' deadlines, and note when it is due."""
        self._sweep_at = loop.time() + self._sweep_every_s
        self._timer = loop.call_at(self._sweep_at, self._sweep, loop)


def listener_for_app(
    limits: ClientLimits, requests: RequestLog | None = None, upload_bytes: UploadBytes = lambda _method, _path: 0
) -> HttpListener:
    """A listener without hot routes: the ASGI app answers all requests that keep to the limits."""
    return HttpListener(
        RequestIntake(lambda _method, _path: None, limits, requests=requests, upload_bytes=upload_bytes)
    )
