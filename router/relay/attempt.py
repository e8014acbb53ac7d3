"""open -> relay: one attempt at one replica, and its bytes to the client."""

import asyncio
from collections import deque
from dataclasses import dataclass

import msgspec

from router.core.errors import ReplicaUnreachable, StreamBroken
from router.relay.events import MAX_EVENT_BYTES, Renamed, event_error, has_first_event
from router.relay.front import Exchange
from router.relay.refusals import enveloped
from router.relay.upstream import Connection, EngineLost, Headers, Origin, Pool
from router.surface.routes import Route, is_begun_only
from router.surface.usage import EngineUsage, HiddenUsage, usage_of, usage_of_events

# vLLM 0.32 answers so, with 500, while SIGTERM waits for requests in flight (seen running).
_SHUTTING_DOWN = b"cannot schedule new futures after shutdown"
# vLLM 0.32 v1/engine/exceptions.py EngineDeadError.
_DEAD = b"EngineCore encountered an issue"
# SGLang 0.5.23 managers/tokenizer_manager.py _resolve_lora_path: it has no 404.
_NOT_LOADED = (b"Got LoRA adapter that has never been loaded", b"Failed to implicitly load LoRA adapter")
_EVENT_STREAM = b"text/event-stream"
# The event with an answer's usage is the last but `[DONE]`, and each may come in a chunk of its own; a third for what
# an engine sends without a closing blank line.
_TAIL_CHUNKS = 3
# Sooner than an engine can have looked at a request that would kill it.
_AT_ONCE_S = 0.05
_LOST = {
    "connection": "no connection",
    "no_answer": "it broke off before its answer began",
    "no_answer_in_time": "no answer in time",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and bytes that bound one attempt."""

    first_data_s: float
    idle_s: float
    answer_bytes: int


class Call(msgspec.Struct, frozen=True):
    """What is sent. `engine_model` is the name in it; `has_adapter`: that name is an adapter's."""

    route: Route
    origin: Origin
    request: bytes
    engine_model: str
    has_adapter: bool
    replica: str
    streamed: bool


class Attempt(msgspec.Struct, eq=False):
    """An answer as it comes. Nothing has gone to the client until `relay` or until `first` has been taken.

    status, content_type, retry_after, first   of the answer: its first events, or all of it
    streamed        whether more follows `first`: the engine has the last word on that
    in_band_error   a stream whose first event was an error: `status` and `first` are that error's
    """

    _loop: asyncio.AbstractEventLoop
    _connection: Connection | None
    _call: Call
    _limits: Limits
    streamed: bool
    _decided: asyncio.Future[None]
    _ended: asyncio.Future[None] | None = None
    _exchange: Exchange | None = None
    _echo: Renamed | None = None
    _hidden: HiddenUsage | None = None
    _got: list[bytes] = []
    _size: int = 0
    _lost: Exception | None = None
    _tail: deque[bytes] | None = None
    status: int = 0
    content_type: bytes = b"application/json"
    retry_after: bytes | None = None
    first: bytes = b""
    in_band_error: bool = False

    async def decided(self) -> "Attempt":
        """Sent, and the first `data:` event is there, or the whole body. Raises EngineLost."""
        connection = self._connection
        assert connection is not None
        connection.deadline = self._loop.time() + self._limits.first_data_s
        connection.send(self._call.request, self)
        try:
            await self._decided
        except BaseException:
            self.close()
            raise
        return self

    async def relay(self, exchange: Exchange, echo: Renamed, *, hidden: HiddenUsage | None = None) -> None:
        """Send a stream's bytes on as they come, until it ends; raises StreamBroken when the engine leaves.

        hidden  takes out the event with the usage, where we asked for it and the client did not
        """
        self._echo, self._hidden = echo, hidden
        self._tail = deque(maxlen=_TAIL_CHUNKS)
        self._exchange = exchange
        self._ended = self._loop.create_future()
        exchange.on_pause, exchange.on_resume = self._pause, self._resume
        try:
            self.data(b"".join(self._got))
            self._got = []
            if self._connection is not None:
                await self._ended
            if self._lost is None:
                self._send(echo.end())
            if hidden is not None:
                exchange.send(hidden.end())
            if self._lost is not None:
                raise self._lost
        finally:
            exchange.on_pause = exchange.on_resume = None

    @property
    def is_broken(self) -> bool:
        """Whether the engine broke off in the middle of what it was streaming."""
        return self._lost is not None

    def usage(self) -> EngineUsage | None:
        """The engine's usage, once all of the answer is there; None where it has told none. Parses at each call."""
        kind = self._call.route.usage
        return usage_of(kind, self.first) if self._tail is None else usage_of_events(kind, b"".join(self._tail))

    def close(self) -> None:
        """Free the connection; one whose answer was not read to its end is closed, and the engine aborts."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # What the connection calls.

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.content_type = headers.get(b"content-type", self.content_type)
        self.retry_after = headers.get(b"retry-after")
        # The engine has the last word on whether it streams: it takes `"stream": "true"` and 1 for true as well.
        self.streamed = status == 200 and (self.streamed or self.content_type.startswith(_EVENT_STREAM))

    def data(self, data: bytes) -> None:
        if self._echo is not None:
            connection = self._connection
            if connection is not None:
                connection.heard_at = now = self._loop.time()
                connection.deadline = now + self._limits.idle_s
            try:
                ready = self._echo.chunk(data)
            except StreamBroken as exc:
                self.close()
                self._break(exc)
            else:
                self._send(ready)
            return
        self._got.append(data)
        self._size += len(data)
        if self._decided.done():
            return  # `relay` is about to begin
        if not self.streamed:
            if self._size > self._limits.answer_bytes:
                self._fail("answer_too_large", f"an answer of over {self._limits.answer_bytes} bytes")
            return
        got = data if len(self._got) == 1 else b"".join(self._got)
        if has_first_event(got) and not is_begun_only(self._call.route, got):
            self._got = [got]
            self._begin_stream(got)
        elif self._size > MAX_EVENT_BYTES:
            self._fail("answer_too_large", f"no event within {MAX_EVENT_BYTES} bytes")

    def end(self) -> None:
        self._connection = None
        if self._ended is not None:
            if not self._ended.done():
                self._ended.set_result(None)
        elif not self._decided.done():
            if self.streamed:
                self.lost(EngineLost("no_answer", "the stream ended before its first event"))
                return
            self.first = b"".join(self._got)
            self._decided.set_result(None)

    def lost(self, exc: EngineLost) -> None:
        self._connection = None
        if not self._decided.done():
            self._decided.set_exception(exc)
            return
        self._break(StreamBroken(f"replica {self._call.replica} broke off in the middle of its answer"), exc)

    def _begin_stream(self, got: bytes) -> None:
        failure = event_error(got)
        if failure is not None:
            self.status, self.first = failure
            self.content_type = b"application/json"
            self.in_band_error, self.streamed = True, False
        self._decided.set_result(None)

    def _send(self, ready: bytes) -> None:
        if not ready:
            return
        assert self._tail is not None
        assert self._exchange is not None
        self._tail.append(ready)
        if self._hidden is not None:
            ready = self._hidden.events(ready)
        self._exchange.send(ready)

    def _fail(self, reason: str, what: str) -> None:
        self.close()
        self._decided.set_exception(ReplicaUnreachable(f"replica {self._call.replica}: {what}", reason=reason))

    def _break(self, broken: StreamBroken, cause: Exception | None = None) -> None:
        broken.__cause__ = cause
        self._lost = broken
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()


async def open_attempt(pool: Pool, call: Call, limits: Limits) -> Attempt:
    """Send one request and wait for its first `data:` event, or its whole body.

    vLLM sends a streamed 200 head long before its first token, so the head decides nothing.

    raises  ReplicaUnreachable when another replica may do better: no connection, 502, 503, an adapter that the
            replica had reported but no longer knows, an engine shutting down, an error in place of the first event
    """
    try:
        attempt = await _decided(pool, call, limits)
    except EngineLost as exc:
        # Its message names addresses, which are the log's to tell.
        raise ReplicaUnreachable(f"replica {call.replica}: {_LOST[exc.reason]}", reason=exc.reason) from exc
    if attempt.status != 200:
        reason = _retry_reason(attempt, call)
        if reason is not None:
            attempt.close()
            raise ReplicaUnreachable(f"replica {call.replica}: {attempt.status} {attempt.first[:200]!r}", reason=reason)
        attempt.first = enveloped(attempt.status, attempt.first)
    return attempt


async def _decided(pool: Pool, call: Call, limits: Limits) -> Attempt:
    """The attempt once it is decided. Raises EngineLost.

    An engine may close an idle connection just as it is used again, which says nothing about the engine and nothing
    about the request: where a connection that was used before breaks off at once, a new one is tried.
    """
    connection = pool.idle(call.origin)
    if connection is None:
        return await _begun(await pool.connect(call.origin), call, limits).decided()
    attempt = _begun(connection, call, limits)
    sent_at = attempt._loop.time()
    try:
        return await attempt.decided()
    except EngineLost as exc:
        is_unheard = not attempt.status and connection.said_nothing
        if exc.reason != "no_answer" or not is_unheard or attempt._loop.time() - sent_at > _AT_ONCE_S:
            raise
        try:
            connection = await pool.connect(call.origin)
        except EngineLost:
            raise exc from None  # it died
    return await _begun(connection, call, limits).decided()


def _begun(connection: Connection, call: Call, limits: Limits) -> Attempt:
    loop = asyncio.get_running_loop()
    return Attempt(loop, connection, call, limits, call.streamed, loop.create_future())


def _retry_reason(attempt: Attempt, call: Call) -> str | None:
    """Why another replica may do better, or None: the answer is the client's, error or not."""
    status, first = attempt.status, attempt.first
    if status in (502, 503):
        return "engine_unavailable"
    # An engine names the model that it does not know; any other 404 (a route that it does not serve) is the client's.
    if status == 404 and call.has_adapter and call.engine_model.encode() in first:
        return "adapter_missing"
    if status == 400 and call.has_adapter and any(said in first for said in _NOT_LOADED):
        return "adapter_missing"
    if status == 500 and _SHUTTING_DOWN in first:
        return "engine_draining"
    if status == 500 and _DEAD in first:
        return "engine_dead"
    if attempt.in_band_error and status >= 500:
        return "first_event_error"
    return None
