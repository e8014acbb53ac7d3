"""open and relay: one HTTP exchange with one engine, what fails it, and its bytes to the client."""

from collections import deque
from collections.abc import Callable, Container
from typing import Literal, Protocol

import msgspec

from lorafleet.engine.errors import ENGINE_DEAD, SHUTTING_DOWN
from lorafleet.http_server.batches import Signal, leave_batch
from lorafleet.http_server.exchange import HttpExchange
from router.core.errors import EndedByPause, ReplicaUnreachable, StreamBroken
from router.core.failover.circuit_breaker import is_fault
from router.http.engine_connection import EngineConnection, EngineLost, Headers, Origin
from router.http.error_shapes import enveloped
from router.http.sse import (
    MAX_EVENT_BYTES,
    AnswerRewriter,
    end_of_events,
    event_error,
    has_finish_reason,
    has_first_event,
    is_plain,
    last_event_error,
    last_type,
    says_done,
)
from router.protocols.aborted import AbortedAnswer
from router.protocols.routes import has_only_early_events
from router.protocols.usage import EngineUsage, UsageFilter, usage_of, usage_of_events
from router.request.engine_request import EngineMessage

_EVENT_STREAM = b"text/event-stream"
# The usage event is the last but `[DONE]`, and each may come in a chunk of its own; a third chunk for an event without
# a closing blank line.
_TAIL_CHUNKS = 3
# Seconds from an answer's last event to the end of its body; then the connection is closed.
_LINGER_S = 1.0
# A loss this early closed an idle connection: no engine can have read a request that kills it.
STALE_WITHIN_S = 0.05
_SHUTTING_DOWN, _DEAD = SHUTTING_DOWN.encode(), tuple(map(str.encode, ENGINE_DEAD))
# SGLang 0.5.23 managers/tokenizer_manager.py _resolve_lora_path, and sgl-jax lora/lora_registry.py: they have no 404.
# The last one is vLLM 0.32's (entrypoints/openai/models/serving.py resolve_lora), for an adapter offered to it.
_NOT_LOADED = (
    b"Got LoRA adapter that has never been loaded",
    b"Failed to implicitly load LoRA adapter",
    b"requested LoRA adapters are not loaded",
    b"was found but could not be loaded",
)
# Engines get no client's key, so these refuse the router's: vLLM's --api-key, or a mesh or proxy in front of it.
_KEY_REFUSALS = frozenset({401, 403, 407})
# vLLM 0.32 scale_out/factories.py: a 403 at a route that its command line leaves off. The message says what to do.
_ROUTE_IS_OFF = b"--enable-scale-out"
LOSS_MESSAGES = {
    "connection": "no connection",
    "no_descriptors": "no connection, because this router has no file descriptor left",
    "no_answer": "it broke off before its answer began",
    "begun_only": "it broke off when its answer had begun and nothing more",
    "no_answer_in_time": "no answer in time",
    "hung": "its engine hangs, by its agent's word",
}


def _ignore_notice() -> None:
    """Do nothing: nobody waits yet."""


class AttemptLimits(msgspec.Struct, frozen=True):
    """Seconds and bytes that bound one attempt.

    longer  called when `first_data_s` has passed, for the next deadline by the event loop's clock; None: no longer
    """

    first_data_s: float
    idle_s: float
    answer_bytes: int
    longer: Callable[[float], float] | None = None


class EngineReach(Protocol):
    """What reaches engines: a pool of connections, or a gateway that sends the request itself."""

    def take_idle(self, origin: Origin) -> EngineConnection | None:
        """An open connection to this origin, ready for `send`; None: there is none."""

    async def connect(self, origin: Origin) -> EngineConnection:
        """A new connection to this origin, ready for `send`. Raises EngineLost."""


AttemptState = Literal["waiting", "decided", "relaying", "over"]
"""
waiting   nothing of the answer is decided: the engine may still turn out to be lost, or to refuse
decided   its first `data:` event has come, or its whole body, or it has failed; the client has no part of it
relaying  its events go to the client
over      the relay has ended, or the attempt is closed
"""


class EngineAttempt(msgspec.Struct, eq=False):
    """One request at an engine, and its answer as it comes. The client gets no part of it before `relay`.

    streamed        the answer is a stream: the engine decides that
    notify          called when the attempt is decided, or is to be sent again; during `relay`, when that is over
    status, content_type, retry_after  of the answer
    first           the answer's whole body; of a stream nothing
    metadata        header that describes an answer of bytes (vLLM 0.32)
    in_band_error   a stream whose first event was an error: `status` and `first` are that error's
    events          events of a stream that were sent on: about one a token
    failure         why there is no answer, or no more of it
    fault           the engine's own error, of a fault of its, that ended a stream in the middle; the client has it
    is_done_sent    the last event of the stream was sent on, so that the client lacks nothing
    """

    message: EngineMessage
    _limits: AttemptLimits
    streamed: bool
    notify: Callable[[], None] = _ignore_notice
    state: AttemptState = "waiting"
    connection: EngineConnection | None = None
    _sent_at: float = 0.0
    _exchange: HttpExchange | None = None
    _rewriter: AnswerRewriter | None = None
    _hidden: UsageFilter | None = None
    _got: list[bytes] = []
    _size: int = 0
    _tail: deque[bytes] | None = None
    _ends: frozenset[bytes] = frozenset()
    status: int = 0
    content_type: bytes = b"application/json"
    retry_after: bytes | None = None
    metadata: bytes | None = None
    first: bytes = b""
    in_band_error: bool = False
    events: int = 0
    failure: Exception | None = None
    fault: bytes = b""
    is_done_sent: bool = False

    async def open(self, engines: EngineReach) -> None:
        """Send the request, and wait until it is decided; once more, on a new connection, where an idle one was stale.

        Leaves the batch where it must connect. vLLM sends a streamed 200 head long before its first token, so the head
        decides nothing.
        raises  ReplicaUnreachable, see `require_answer`
        """
        may_be_idle = True
        while self.state == "waiting":
            decided = Signal()
            self.notify = decided.set
            connection = engines.take_idle(self.message.origin) if may_be_idle else None
            may_be_idle = False
            if connection is None:
                connection = await self._connect(engines)
            if decided.is_set:  # a pause has ended it meanwhile
                connection.close()
            else:
                self.begin(connection)
            try:
                await decided
            except BaseException:
                self.close()
                raise
        self.require_answer()

    async def _connect(self, engines: EngineReach) -> EngineConnection:
        """A new connection to the engine. Raises ReplicaUnreachable."""
        await leave_batch()
        try:
            return await engines.connect(self.message.origin)
        except EngineLost as exc:
            stale = self.failure
            # An engine that has just broken off and no longer listens has died.
            why = stale if isinstance(stale, EngineLost) and exc.reason == "connection" else exc
            raise unreachable(self.message, why) from why

    def begin(self, connection: EngineConnection) -> None:
        """Send the request, on a connection fresh from the pool, and start the deadline of the answer's first data."""
        self.connection, self.failure = connection, None
        self._sent_at = now = connection.loop.time()
        connection.deadline = now + self._limits.first_data_s
        connection.longer = self._limits.longer
        connection.send(self.message.data, self)

    def can_move(self, served_elsewhere: Container[str]) -> bool:
        """Whether another replica may answer instead.

        It serves the adapter, nothing of the answer has arrived, and no stored response is involved.

        served_elsewhere  engine names of the adapters on the other replicas
        """
        message = self.message
        is_served = not message.engine_name or message.engine_name in served_elsewhere
        return is_served and self.state == "waiting" and message.route.state == "none"

    def require_answer(self) -> None:
        """Return where a decided attempt has the client's answer; `first` of an error gets its route's envelope then.

        Closes the connection where it raises because of the answer's status.
        raises  ReplicaUnreachable where another replica may do better, see `retry_reason` and core.failover.verdict
        """
        failure, message = self.failure, self.message
        if failure is not None:
            # The engine may break off in the read that decided the attempt: the client has got nothing then.
            lost = failure.__cause__ if isinstance(failure, StreamBroken) else failure
            raise unreachable(message, lost) if isinstance(lost, EngineLost) else failure
        if self.status != 200:
            reason = retry_reason(self.status, self.first, message, in_band_error=self.in_band_error)
            if reason is not None:
                self.close()
                what = f"replica {message.replica}: {self.status} {self.first[:200]!r}"
                if reason == "engine_unauthorized":
                    what += "; it does not take this router's key (see engine_key, of engines without an agent)"
                raise ReplicaUnreachable(what, reason=reason)
            self.first = enveloped(self.status, self.first, message.route.errors)

    def start_relay(
        self,
        exchange: HttpExchange,
        rewriter: AnswerRewriter,
        on_over: Callable[[], None],
        *,
        hidden: UsageFilter | None = None,
    ) -> None:
        """Relay the stream from its first byte on, and call `on_over` when it is over, perhaps at once.

        The client's pauses then pause the engine's connection.

        hidden  see `relay`
        """
        self._rewriter, self._hidden, self.notify = rewriter, hidden, on_over
        self._tail = deque(maxlen=_TAIL_CHUNKS)
        self._ends = self.message.route.final_events
        self._exchange, self.state = exchange, "relaying"
        exchange.on_pause, exchange.on_resume = self._pause, self._resume
        if exchange.is_paused:
            self._pause()  # because of a response written in the tick in which this request came
        got, self._got = self._got, []
        self.data(b"".join(got))
        if self.connection is None:
            self._end_relay()

    async def relay(
        self, exchange: HttpExchange, rewriter: AnswerRewriter, *, hidden: UsageFilter | None = None
    ) -> None:
        """Send a stream's events to the client until it is over. Where it broke off, `failure` says why.

        hidden  removes the usage event, where the router asked for it and the client did not
        """
        over = Signal()
        self.start_relay(exchange, rewriter, over.set, hidden=hidden)
        await over

    @property
    def is_broken(self) -> bool:
        """Whether the engine broke off in the middle of a stream, or ended it with an error of its own."""
        return isinstance(self.failure, StreamBroken) or bool(self.fault)

    @property
    def loss_reason(self) -> str:
        """How the engine was lost, by EngineLost's reasons; empty: it was not."""
        cause = self.failure.__cause__ if isinstance(self.failure, StreamBroken) else self.failure
        return cause.reason if isinstance(cause, EngineLost) else ""

    @property
    def is_whole(self) -> bool:
        """Whether the answer has come to its end, and not to an error of the engine's."""
        return self.connection is None and self.failure is None and not self.fault

    def usage(self) -> EngineUsage | None:
        """The usage in a complete answer; None: it has none. Parses at each call."""
        kind = self.message.route.usage
        if self._tail is None:
            return usage_of(kind, self.first if self.metadata is None else self.metadata)
        assert self._rewriter is not None
        # The kept events are rewritten ones.
        return usage_of_events(self._rewriter.usage or kind, b"".join(self._tail))

    def close(self) -> None:
        """Release the connection and the client's exchange. An answer not at its end is cut off: the engine aborts."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._exchange is not None:
            self._detach_client()
        self.state = "over"

    def abort(self, answer: AbortedAnswer | None) -> None:
        """End the answer with this, and close the engine's connection: the engine aborts the request.

        Does nothing for an answer that is whole. One that was not sent is not sent any more.
        None: the client gets an error instead.
        """
        connection, state = self.connection, self.state
        if state == "over" or (state == "decided" and (connection is None or not self.streamed)):
            return
        if connection is not None:
            connection.close()
            self.connection = None
        error = EndedByPause("a pause with mode abort ended this request; send it again")
        if state == "relaying":
            self._abort_relay(answer, error)
        elif state == "decided":  # a stream whose relay is about to begin
            got = b"".join(self._got)
            self._got = [got[: end_of_events(got)] + (b"" if answer is None else answer.events)]
            if answer is None:
                self._break(StreamBroken(str(error)), error)
        else:
            if answer is None:
                self.failure = error
            else:
                self.status, self.first = 200, b"" if self.streamed else answer.body
                self.content_type = _EVENT_STREAM if self.streamed else b"application/json"
                self._got = [answer.events] if self.streamed else []
            self._decide()

    def _abort_relay(self, answer: AbortedAnswer | None, error: EndedByPause) -> None:
        """End a relay with this answer's last events, or break it off with an error."""
        exchange, rewriter = self._exchange, self._rewriter
        assert exchange is not None
        assert rewriter is not None
        if answer is None:
            self._break(StreamBroken(str(error)), error)
            return
        rewriter.discard_partial_event()
        if self._hidden is not None:
            exchange.send(self._hidden.end())
        self._send(rewriter.rewrite(answer.events))
        self._detach_client()
        self.notify()

    # Called by the connection.

    def head(self, status: int, headers: Headers) -> None:
        """Keep the status and headers; a 200 is a stream where one was asked for or its content type says so."""
        self.status = status
        self.content_type = content_type = headers.get(b"content-type", self.content_type)
        self.retry_after = headers.get(b"retry-after")
        self.metadata = headers.get(b"metadata")
        # The engine decides whether it streams: it takes `"stream": "true"` and 1 for true as well.
        self.streamed = status == 200 and (self.streamed or content_type.startswith(_EVENT_STREAM))

    def data(self, data: bytes) -> None:
        """Collect bytes until the attempt is decided, or fail it where they are too many; afterwards relay them."""
        if self._rewriter is not None:
            self._relay_chunk(data, self._rewriter)
            return
        self._got.append(data)
        self._size += len(data)
        if self.state != "waiting":
            return  # the relay is about to begin
        if not self.streamed:
            if self._size > self._limits.answer_bytes:
                self._fail(
                    "answer_too_large",
                    f"an answer of over {self._limits.answer_bytes} bytes; stream it, or ask for less",
                )
            return
        got = data if len(self._got) == 1 else b"".join(self._got)
        if has_first_event(got) and not has_only_early_events(self.message.route, got):
            self._got = [got]
            self._begin_stream(got)
        elif self._size > MAX_EVENT_BYTES:
            self._fail("answer_too_large", f"no event within {MAX_EVENT_BYTES} bytes; ask for less, or without stream")

    def end(self) -> None:
        """The body is complete: decide a whole answer, end a relay. A stream without an event is lost.

        Lets go of the connection.
        """
        self.connection = None
        if self.state == "relaying":
            self._end_relay()
        elif self.state == "waiting":
            if self.streamed:
                self.lost(EngineLost("no_answer", "the stream ended before its first event"))
                return
            got = self._got
            self.first = got[0] if len(got) == 1 else b"".join(got)
            self._decide()

    def lost(self, exc: EngineLost) -> None:
        """The connection is lost: fail an attempt that waits, unless it is to be sent again; break off a relay.

        Behind the last event the relay just ends.
        """
        connection, self.connection = self.connection, None
        if self.is_done_sent:
            self._end_relay()
            return
        if self.state != "waiting":
            how = "broke off"
            if exc.reason == "no_answer_in_time":
                how = f"paused for {self._limits.idle_s:g} s (idle_timeout_s), and was given up,"
            self._break(StreamBroken(f"replica {self.message.replica} {how} in the middle of its answer"), exc)
            return
        if exc.reason == "no_answer" and self._has_only_begun():
            exc = EngineLost("begun_only", str(exc))
        self.failure = exc
        if connection is not None and not self.status and self._is_stale(connection, exc):
            self.notify()  # still waiting: `open` sends it again
        else:
            self._decide()

    def _is_stale(self, connection: EngineConnection, exc: EngineLost) -> bool:
        """Whether the engine closed an idle connection just as it was used again: it can't have read the request."""
        return (
            exc.reason == "no_answer"
            and connection.was_idle
            and connection.is_silent
            and connection.loop.time() - self._sent_at <= STALE_WITHIN_S
        )

    def _has_only_begun(self) -> bool:
        """Whether a stream broke off behind events that come before any work: that says little of the engine.

        vLLM 0.32 breaks off so for a schema that it can't take, and behind the head alone for `"truncation": null`.
        """
        if not (self.streamed and self.status == 200 and self.message.route.early_events):
            return False
        return not self._got or has_only_early_events(self.message.route, b"".join(self._got))

    def _decide(self) -> None:
        """Mark the attempt as decided, and wake its waiter."""
        self.state = "decided"
        self.notify()

    def _begin_stream(self, got: bytes) -> None:
        """Decide a stream by its first event. An error event becomes a whole JSON answer with the error's status."""
        failure = event_error(got)
        if failure is not None:
            self.status, self.first = failure
            self.content_type = b"application/json"
            self.in_band_error, self.streamed = True, False
        self._decide()

    def _relay_chunk(self, data: bytes, rewriter: AnswerRewriter) -> None:
        """Send the events that this chunk completes, and restart the deadline; end a relay that is broken or done.

        A broken one closes the engine's connection.
        """
        connection = self.connection
        if connection is not None:
            connection.last_data_at = now = connection.loop.time()
            connection.deadline, connection.longer = now + self._limits.idle_s, None
        try:
            ready = rewriter.rewrite(data)
        except StreamBroken as exc:
            if self.connection is not None:
                self.connection.close()
                self.connection = None
            self._break(exc)
            return
        exchange, tail, hidden = self._exchange, self._tail, self._hidden
        if exchange is None or tail is None or not ready:
            return
        is_usual = not self._ends and not self.is_done_sent and (hidden is None or not hidden.pending)
        if is_usual and is_plain(ready):
            # Most events by far: `_send` without what it does about usage and ends.
            tail.append(ready)
            self.events += ready.count(b"\n\n")
            exchange.relay(ready)
            return
        self._send(ready)
        if self.is_done_sent:
            self._end_behind_last_event(ready)

    def _end_behind_last_event(self, ready: bytes) -> None:
        """End the relay behind the last event: an engine that does not end its body holds neither client nor quota.

        Where a dialect may send more, only the deadline is shortened.
        """
        connection = self.connection
        if connection is None:
            return
        if says_done(ready):
            # No dialect has an event behind this one.
            self.connection = None
            connection.dismiss(within_s=_LINGER_S)
            self._end_relay()
        else:
            connection.deadline = connection.loop.time() + _LINGER_S

    def _send(self, ready: bytes) -> None:
        """Send these events to the client, count them, keep the last ones for `usage`, and note a last event.

        Nothing is sent without a client.
        """
        exchange = self._exchange
        if not ready or exchange is None:
            return
        assert self._tail is not None
        self._tail.append(ready)
        self.events += ready.count(b"\n\n")
        ends = self._ends
        self.is_done_sent = says_done(ready) or (bool(ends) and (self.is_done_sent or last_type(ready) in ends))
        if self._hidden is not None:
            ready = self._hidden.events(ready)
        exchange.send(ready)

    def _fail(self, reason: str, what: str) -> None:
        """Close the connection, and decide the attempt as failed because of its answer."""
        self.close()
        self.failure = ReplicaUnreachable(f"replica {self.message.replica}: {what}", reason=reason)
        self._decide()

    def _break(self, broken: StreamBroken, cause: Exception | None = None) -> None:
        """Set this failure, and end the relay, if there is one."""
        broken.__cause__ = cause
        self.failure = broken
        self._end_relay()

    def _end_relay(self) -> None:
        """End the relay: send the rest, set `failure` where the stream is not complete, and call `notify`.

        Lets go of the client. Does nothing if no relay is under way.
        """
        exchange = self._exchange
        if exchange is None:
            return  # the relay has not begun, or is over
        assert self._rewriter is not None
        if self.failure is None:
            try:
                self._send(self._rewriter.end())
            except StreamBroken as exc:
                self.failure = exc
        if self.failure is None:
            self._check_end()
        if self._hidden is not None:
            exchange.send(self._hidden.end())
        self._detach_client()
        self.notify()

    def _check_end(self) -> None:
        """Set `fault` where an ended stream's last event is an error, and `failure` where it is not complete."""
        route, last = self.message.route, b"".join(self._tail or ())
        if (found := last_event_error(last)) is not None:
            self.fault = found[1] if is_fault(found[0]) else b""
        elif not (self.is_done_sent or not route.streams or has_finish_reason(last)):
            self.failure = StreamBroken(f"replica {self.message.replica} ended its stream in the middle of its answer")

    def _detach_client(self) -> None:
        """Let go of the client's exchange: nothing more is sent on it, and its pauses have no effect here."""
        if self._exchange is not None:
            self._exchange.on_pause = self._exchange.on_resume = None
        self._exchange, self.state = None, "over"

    def _pause(self) -> None:
        """Stop reading from the engine, because the client reads too slowly."""
        if self.connection is not None:
            self.connection.pause()

    def _resume(self) -> None:
        """Read from the engine again."""
        if self.connection is not None:
            self.connection.resume()


async def open_attempt(engines: EngineReach, message: EngineMessage, limits: AttemptLimits) -> EngineAttempt:
    """Send one message and wait until its attempt is decided. Raises ReplicaUnreachable, see `require_answer`."""
    attempt = EngineAttempt(message, limits, message.streamed)
    await attempt.open(engines)
    return attempt


def unreachable(message: EngineMessage, lost: EngineLost) -> ReplicaUnreachable:
    """The failure of an attempt whose engine was lost before the client got anything."""
    # The message of the loss names addresses, which only the log may have.
    failure = ReplicaUnreachable(f"replica {message.replica}: {LOSS_MESSAGES[lost.reason]}", reason=lost.reason)
    failure.__cause__ = lost
    return failure


def retry_reason(status: int, first: bytes, message: EngineMessage, *, in_band_error: bool) -> str | None:
    """Why another replica may do better (a reason of core.failover.verdict); None: the client gets this answer."""
    if status in (502, 503):
        return "engine_unavailable"
    if status in _KEY_REFUSALS and not in_band_error and _ROUTE_IS_OFF not in first:
        return "engine_unauthorized"
    # A 404 for an unknown model names the model; any other (a route that the engine lacks) is the client's.
    if status == 404 and message.engine_name and message.engine_model.encode() in first:
        return "adapter_missing"
    if status == 400 and message.engine_name and any(said in first for said in _NOT_LOADED):
        return "adapter_missing"
    if status == 500 and _SHUTTING_DOWN in first:
        return "engine_draining"
    if status == 500 and says_dead(first):
        return "engine_dead"
    if in_band_error and is_fault(status):
        return "first_event_error"
    return None


def says_dead(error: bytes) -> bool:
    """Whether this error of an engine says that the engine has died."""
    return any(said in error for said in _DEAD)
