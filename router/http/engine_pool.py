"""The pool of connections to engines: idle ones by origin, and deadlines of all."""

import asyncio
import errno
import functools
import ssl
from collections import Counter
from collections.abc import Callable

from lorafleet.http_server.outbox import Outbox
from lorafleet.service.network.tls import Tls, failure_text
from router.http.engine_connection import EngineConnection, EngineLost, Origin, ResponseSink
from router.http.spares import SpareBook

# Deadlines are checked this often: no timer is made per request or chunk.
_SWEEP_EVERY_S = 0.25
_NEVER = float("inf")
# Spare connections opened in one sweep, of all engines: 3 ms of CPU.
_SPARES_A_SWEEP = 32
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class EnginePool:
    """Idle connections by origin, and every other one until it is closed.

    connect_s    seconds to open a connection, names and TLS included
    keepalive_s  an idle connection is kept so long; vLLM 0.32 closes after 5 s, and a request sent just then is lost
    max_idle     idle connections per origin; more are closed when their answer is complete
    max_spare    connections per origin that are opened ahead of the next burst, see SpareBook
    tls          of this router; where it names no authorities, or is None, the system's are trusted
    outbox       for all writes; by default one of the pool's own
    """

    def __init__(
        self,
        *,
        connect_s: float,
        keepalive_s: float = 4.0,
        max_idle: int = 512,
        max_spare: int = 0,
        tls: Tls | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.connect_s = connect_s
        self.keepalive_s = keepalive_s
        self._max_idle = max_idle
        self._tls = tls
        self.open_connections: set[EngineConnection] = set()
        self._idle: dict[Origin, list[EngineConnection]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._spares = SpareBook(max_spare)
        self._opening: set[asyncio.Task[None]] = set()
        self.outbox = outbox or Outbox()

    @property
    def connections(self) -> int:
        """Open connections, idle or not."""
        return len(self.open_connections)

    @property
    def idle_connections(self) -> int:
        """Open connections without a request."""
        return sum(map(len, self._idle.values()))

    def has_idle(self, origin: Origin) -> bool:
        """Whether there is an idle connection to this origin."""
        return bool(self._idle.get(origin))

    @property
    def is_sweeping(self) -> bool:
        """Whether a timer checks the deadlines of open connections."""
        return self._timer is not None

    def last_data_at(self) -> dict[str, float]:
        """Engine URL -> loop.time() of the last bytes of any stream from it. Engines without a stream are left out."""
        last: dict[str, float] = {}
        for connection in self.open_connections:
            url = connection.origin.url
            if connection.last_data_at > last.get(url, -_NEVER):
                last[url] = connection.last_data_at
        return last

    def take_idle(self, origin: Origin) -> EngineConnection | None:
        """Take the idle connection that was used last, ready for `send`; close unusable ones. None: there is none."""
        waiting = self._idle.get(origin)
        if not waiting:
            return None
        assert self._loop is not None
        now = self._loop.time()
        while waiting:
            connection = waiting.pop()
            if connection.is_usable(now):
                connection.deadline = _NEVER
                connection.was_idle, connection.is_spare = True, False
                return connection
            connection.close()
        return None

    async def connect(self, origin: Origin) -> EngineConnection:
        """Open a connection within `connect_s`, ready for `send`.

        Raises EngineLost, "connection" or "no_descriptors".
        """
        loop = self._loop = asyncio.get_running_loop()
        self._require_open(origin)
        tls, name = (self._tls_context(), self._server_name(origin)) if origin.tls else (None, None)
        connection = EngineConnection(self, origin, loop)
        try:
            async with asyncio.timeout(self.connect_s):
                await loop.create_connection(
                    lambda: connection, origin.host, origin.port, ssl=tls, server_hostname=name
                )
        except TimeoutError as exc:
            connection.close()  # as below: the limit may pass in the moment in which it is connected
            raise EngineLost("connection", f"{origin.url}: not connected in {self.connect_s} s") from exc
        except (OSError, UnicodeError) as exc:  # ssl.SSLError is an OSError; a host name may be no name at all
            is_ours = isinstance(exc, OSError) and exc.errno in _NO_DESCRIPTORS
            why = failure_text(exc, self._tls, name or "") or exc
            raise EngineLost("no_descriptors" if is_ours else "connection", f"{origin.url}: {why}") from exc
        except BaseException:
            connection.close()  # uvloop may have connected it already, or may be about to
            raise
        self._require_open(origin)  # closed meanwhile: this connection was among those closed
        connection.deadline = _NEVER
        return connection

    def give_up(self, url: str, may_go: Callable[[ResponseSink], bool]) -> None:
        """Lose, as "hung", the requests at this engine for whose sink `may_go` says that another engine may answer."""
        for connection in [each for each in self.open_connections if each.origin.url == url]:
            if connection.sink is not None and may_go(connection.sink):
                connection.lose("hung", "the engine hangs")

    async def close(self) -> None:
        """Close all connections and the timer: requests that wait for answers are lost, and none is opened any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for opening in self._opening:
            opening.cancel()
        for connection in list(self.open_connections):
            connection.lose("no_answer", "the router is stopping")
        self._idle.clear()
        await asyncio.sleep(0)  # the event loop calls connection_lost in its next tick

    def _require_open(self, origin: Origin) -> None:
        """Raise EngineLost where the pool is closed."""
        if self._closed:
            raise EngineLost("connection", f"{origin.url}: the pool is closed")

    def _tls_context(self) -> ssl.SSLContext:
        """The TLS context for HTTP/1.1: the fleet's authorities where this router has them, else the system's."""
        return (self._tls and self._tls.client_context) or _system_context()

    def _server_name(self, origin: Origin) -> str:
        """The name that the origin's certificate must have."""
        return origin.host if self._tls is None else self._tls.server_name(origin.host, origin.port)

    def add(self, connection: EngineConnection) -> None:
        """Enter a connection that has just opened, and start the sweep; close it where the pool is closed."""
        self._loop = connection.loop
        if self._closed:
            connection.close()
            return
        self.open_connections.add(connection)
        # Until `connect` returns it: if its caller is cancelled at that moment, the sweep closes it.
        connection.deadline = self._loop.time() + self.connect_s
        if self._timer is None:
            self._timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep)

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection as idle for `keepalive_s`, or close it where there are enough."""
        waiting = self._idle.get(connection.origin)
        if waiting is None:
            waiting = self._idle[connection.origin] = []
        if self._closed or len(waiting) >= self._max_idle:
            connection.close()
            return
        connection.deadline = connection.loop.time() + self.keepalive_s
        waiting.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Remove a closed connection from the open ones. An engine that closes a spare one gets none for a while."""
        self.open_connections.discard(connection)
        if connection.is_spare:
            self._spares.record_closed(connection.origin, connection.loop.time(), connection.deadline)

    def _sweep(self) -> None:
        """Expire connections whose deadline has passed, and forget unusable idle ones; by timer, while any is open."""
        assert self._loop is not None
        now = self._loop.time()
        for connection in [each for each in self.open_connections if each.is_overdue(now)]:
            connection.expire()
        for origin, waiting in list(self._idle.items()):
            kept = [each for each in waiting if each.is_usable(now)]
            if kept:
                waiting[:] = kept
            else:
                del self._idle[origin]
        if self._spares.most:
            self._open_spares(now)
        self._timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep) if self.open_connections else None

    def _open_spares(self, now: float) -> None:
        """Begin to open the spare connections that the book asks for, unless some are being opened."""
        used, spare = Counter[Origin](), Counter[Origin]()
        for connection in self.open_connections:
            (spare if connection.is_spare else used)[connection.origin] += 1
        self._spares.record_used(used, now)
        if not self._opening:
            for origin in self._spares.missing(used, spare, now, at_most=_SPARES_A_SWEEP):
                task = asyncio.ensure_future(self._open_spare(origin))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def _open_spare(self, origin: Origin) -> None:
        """Open one connection, and keep it as a spare one; an engine that takes none gets none for a while."""
        try:
            connection = await self.connect(origin)
        except EngineLost:
            now = asyncio.get_running_loop().time()
            self._spares.record_closed(origin, now, now + self.connect_s)
            return
        now = connection.loop.time()
        if connection.is_closed:
            self._spares.record_closed(origin, now, now + self.connect_s)
            return
        connection.is_spare = True
        connection.deadline = now + self._spares.keep_s
        # Used last: the others are known to work.
        self._idle.setdefault(origin, []).insert(0, connection)


@functools.cache
def _system_context() -> ssl.SSLContext:
    """The TLS context that trusts the system's authorities. Made once, as it takes 25 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
