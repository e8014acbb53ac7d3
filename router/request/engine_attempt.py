"""open and relay: one HTTP exchange with one engine, what fails it, and its bytes to the client."""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import msgspec

from lorafleet.engine.vllm_errors import ENGINE_DEAD, SHUTTING_DOWN
from lorafleet.http_server.batches import Signal, leave_batch
from lorafleet.http_server.exchange import HttpExchange
from router.core.errors import EndedByPause, ReplicaUnreachable, StreamBroken
from router.core.failover.circuit_breaker import is_fault
from router.http.engine_connection import EngineConnection, EngineLost, Headers
from router.http.engine_pool import EnginePool
from router.http.error_shapes import enveloped
from router.http.sse import (
    MAX_EVENT_BYTES,
    AnswerRewriter,
    end_of_events,
    event_error,
    has_finish_reason,
    has_first_event,
    is_plain,
    last_error,
    last_type,
    says_done,
)
from router.protocols.aborted import AbortedAnswer
from router.protocols.routes import has_only_early_events
from router.protocols.usage import EngineUsage, UsageFilter, usage_of, usage_of_events
from router.request.engine_request import EngineRequest

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
_NOT_LOADED = (
    b"Got LoRA adapter that has never been loaded",
    b"Failed to implicitly load LoRA adapter",
    b"requested LoRA adapters are not loaded",
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


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Seconds and bytes that bound one attempt.

    longer  called when `first_data_s` has passed, for the next deadline by the event loop's clock; None: no longer
    """

    first_data_s: float
    idle_s: float
    answer_bytes: int
    longer: Callable[[float], float] | None = None


class EngineAttempt(msgspec.Struct, eq=False):
    """One request at an engine, and its answer as it comes. The client gets no part of it before `relay`.

    An attempt is decided when its first `data:` event has come, or its whole body, or when it has failed.

    notify          called when the attempt is decided; during `relay`, when that is over
    status, content_type, retry_after  of the answer
    first           the answer's whole body; of a stream nothing
    metadata        header that describes an answer of bytes (vLLM 0.32)
    streamed        the answer is a stream: the engine decides that
    in_band_error   a stream whose first event was an error: `status` and `first` are that error's
    events          events of a stream that were sent on: about one a token
    failure         why there is no answer, or no more of it
    fault           the engine's own error, of a fault of its, that ended a stream in the middle; the client has it
    is_stale        the engine closed an idle connection just as it was used again. That says nothing about engine or
                    request: it is sent once more, on a new connection
    """

    _request: EngineRequest
    _limits: AttemptLimits
    notify: Callable[[], None]
    streamed: bool
    connection: EngineConnection | None = None
    _sent_at: float = 0.0
    _is_decided: bool = False
    _exchange: HttpExchange | None = None
    _rewriter: AnswerRewriter | None = None
    _hidden: UsageFilter | None = None
    _relays_as_is: bool = False
    _got: list[bytes] = []
    _size: int = 0
    _tail: deque[bytes] | None = None
    _has_ended: bool = False
    status: int = 0
    content_type: bytes = b"application/json"
    retry_after: bytes | None = None
    metadata: bytes | None = None
    first: bytes = b""
    in_band_error: bool = False
    events: int = 0
    failure: Exception | None = None
    fault: bytes = b""
    is_stale: bool = False

    def begin(self, connection: EngineConnection) -> None:
        """Send the request, on a connection fresh from the pool, and start the deadline of the answer's first data."""
        self.connection = connection
        self._sent_at = now = connection.loop.time()
        connection.deadline = now + self._limits.first_data_s
        connection.longer = self._limits.longer
        connection.send(self._request.request, self)

    def can_move(self, served_elsewhere: Container[str]) -> bool:
        """Whether another replica may answer instead.

        It serves the adapter, nothing of the answer has arrived, and no stored response is involved.

        served_elsewhere  engine names of the adapters on the other replicas
        """
        request = self._request
        is_served = not request.engine_name or request.engine_name in served_elsewhere
        return is_served and not self._is_decided and request.route.state == "none"

    def check(self) -> None:
        """Return where a decided attempt has the client's answer; `first` of an error gets its route's envelope then.

        Closes the connection where it raises because of the answer's status.
        raises  ReplicaUnreachable where another replica may do better, see `retry_reason` and core.failover.verdict
        """
        failure, request = self.failure, self._request
        if failure is not None:
            # The engine may break off in the read that decided the attempt: the client has got nothing then.
            lost = failure.__cause__ if isinstance(failure, StreamBroken) else failure
            raise unreachable(request, lost) if isinstance(lost, EngineLost) else failure
        if self.status != 200:
            reason = retry_reason(self.status, self.first, request, in_band_error=self.in_band_error)
            if reason is not None:
                self.close()
                what = f"replica {request.replica}: {self.status} {self.first[:200]!r}"
                if reason == "engine_unauthorized":
                    what += "; it does not take this router's key (see engine_key, of engines without an agent)"
                raise ReplicaUnreachable(what, reason=reason)
            self.first = enveloped(self.status, self.first, request.route.errors)

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
        self._relays_as_is = not self._request.route.final_events
        self._tail = deque(maxlen=_TAIL_CHUNKS)
        self._exchange = exchange
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

    @property
    def is_done_sent(self) -> bool:
        """Whether the last event of the stream was sent on, so that the client lacks nothing."""
        return self._has_ended

    def usage(self) -> EngineUsage | None:
        """The usage in a complete answer; None: it has none. Parses at each call."""
        kind = self._request.route.usage
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

    def abort(self, answer: AbortedAnswer | None) -> None:
        """End the answer with this, and close the engine's connection: the engine aborts the request.

        Does nothing for an answer that is whole. None: the client gets an error instead.
        """
        is_relayed = self._exchange is not None
        if self.connection is None or (self._is_decided and not is_relayed and not self.streamed):
            return
        self.connection.close()
        self.connection = None
        error = EndedByPause("a pause with mode abort ended this request; send it again")
        if is_relayed:
            self._abort_relay(answer, error)
            return
        if self._is_decided:  # a stream whose relay is about to begin
            got = b"".join(self._got)
            self._got = [got[: end_of_events(got)] + (b"" if answer is None else answer.events)]
            if answer is None:
                self._break(StreamBroken(str(error)), error)
            return
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
        rewriter.drop_rest()
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
        if self._is_decided:
            return  # the relay is about to begin
        if not self.streamed:
            if self._size > self._limits.answer_bytes:
                self._fail(
                    "answer_too_large",
                    f"an answer of over {self._limits.answer_bytes} bytes; stream it, or ask for less",
                )
            return
        got = data if len(self._got) == 1 else b"".join(self._got)
        if has_first_event(got) and not has_only_early_events(self._request.route, got):
            self._got = [got]
            self._begin_stream(got)
        elif self._size > MAX_EVENT_BYTES:
            self._fail("answer_too_large", f"no event within {MAX_EVENT_BYTES} bytes; ask for less, or without stream")

    def end(self) -> None:
        """The body is complete: decide a whole answer, end a relay. A stream without an event is lost.

        Lets go of the connection.
        """
        self.connection = None
        if self._exchange is not None:
            self._end_relay()
        elif not self._is_decided:
            if self.streamed:
                self.lost(EngineLost("no_answer", "the stream ended before its first event"))
                return
            got = self._got
            self.first = got[0] if len(got) == 1 else b"".join(got)
            self._decide()

    def lost(self, exc: EngineLost) -> None:
        """The connection is lost: fail an undecided attempt, which may be stale; break off a relay.

        Behind the last event the relay just ends.
        """
        connection, self.connection = self.connection, None
        if self._has_ended:
            self._end_relay()
            return
        if self._is_decided:
            how = "broke off"
            if exc.reason == "no_answer_in_time":
                how = f"paused for {self._limits.idle_s:g} s (idle_timeout_s), and was given up,"
            self._break(StreamBroken(f"replica {self._request.replica} {how} in the middle of its answer"), exc)
            return
        if exc.reason == "no_answer" and self._has_only_begun():
            exc = EngineLost("begun_only", str(exc))
        self.failure = exc
        self.is_stale = (
            exc.reason == "no_answer"
            and not self.status
            and connection is not None
            and connection.was_idle
            and connection.is_silent
            and connection.loop.time() - self._sent_at <= STALE_WITHIN_S
        )
        self._decide()

    def _has_only_begun(self) -> bool:
        """Whether a stream broke off behind events that come before any work: that says little of the engine.

        vLLM 0.32 breaks off so for a schema that it can't take, and behind the head alone for `"truncation": null`.
        """
        if not (self.streamed and self.status == 200 and self._request.route.early_events):
            return False
        return not self._got or has_only_early_events(self._request.route, b"".join(self._got))

    def _decide(self) -> None:
        """Mark the attempt as decided, and wake its waiter."""
        self._is_decided = True
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
        is_usual = self._relays_as_is and not self._has_ended and (hidden is None or not hidden.pending)
        if is_usual and is_plain(ready):
            # Most events by far: `_send` without what it does about usage and ends.
            tail.append(ready)
            self.events += ready.count(b"\n\n")
            exchange.relay(ready)
            return
        self._send(ready)
        if self._has_ended:
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
        ends = self._request.route.final_events
        self._has_ended = says_done(ready) or (bool(ends) and (self._has_ended or last_type(ready) in ends))
        if self._hidden is not None:
            ready = self._hidden.events(ready)
        exchange.send(ready)

    def _fail(self, reason: str, what: str) -> None:
        """Close the connection, and decide the attempt as failed because of its answer."""
        self.close()
        self.failure = ReplicaUnreachable(f"replica {self._request.replica}: {what}", reason=reason)
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
        route, last = self._request.route, b"".join(self._tail or ())
        if (found := last_error(last)) is not None:
            self.fault = found[1] if is_fault(found[0]) else b""
        elif not (self._has_ended or not route.streams or has_finish_reason(last)):
            self.failure = StreamBroken(f"replica {self._request.replica} ended its stream in the middle of its answer")

    def _detach_client(self) -> None:
        """Let go of the client's exchange: nothing more is sent on it, and its pauses have no effect here."""
        assert self._exchange is not None
        self._exchange.on_pause = self._exchange.on_resume = None
        self._exchange = None

    def _pause(self) -> None:
        """Stop reading from the engine, because the client reads too slowly."""
        if self.connection is not None:
            self.connection.pause()

    def _resume(self) -> None:
        """Read from the engine again."""
        if self.connection is not None:
            self.connection.resume()


def _ignore_begin(_: EngineAttempt) -> None:
    """Do nothing with an attempt that begins."""


async def open_attempt(
    pool: EnginePool,
    request: EngineRequest,
    limits: AttemptLimits,
    on_begin: Callable[[EngineAttempt], None] = _ignore_begin,
) -> EngineAttempt:
    """Send one request and wait until it is decided; once more, on a new connection, where an idle one was stale.

    Leaves the batch where it must connect. vLLM sends a streamed 200 head long before its first token, so the head
    decides nothing.
    on_begin  called with each attempt whose request was sent
    raises  ReplicaUnreachable, see EngineAttempt.check
    """
    lost: EngineLost | None = None
    connection = pool.take_idle(request.origin)
    if connection is not None:
        attempt = await _attempt_on(connection, request, limits, on_begin)
        if not attempt.is_stale:
            attempt.check()
            return attempt
        assert isinstance(attempt.failure, EngineLost)
        lost = attempt.failure
    await leave_batch()
    try:
        connection = await pool.connect(request.origin)
    except EngineLost as exc:
        # An engine that has just broken off and no longer listens has died.
        why = lost if lost is not None and exc.reason == "connection" else exc
        raise unreachable(request, why) from why
    attempt = await _attempt_on(connection, request, limits, on_begin)
    attempt.check()
    return attempt


async def _attempt_on(
    connection: EngineConnection,
    request: EngineRequest,
    limits: AttemptLimits,
    on_begin: Callable[[EngineAttempt], None],
) -> EngineAttempt:
    """Send the request on this connection, and return the attempt once it is decided.

    Closed where the wait is cancelled.
    """
    decided = Signal()
    attempt = EngineAttempt(request, limits, decided.set, request.streamed)
    attempt.begin(connection)
    on_begin(attempt)
    try:
        await decided
    except BaseException:
        attempt.close()
        raise
    return attempt


def unreachable(request: EngineRequest, lost: EngineLost) -> ReplicaUnreachable:
    """The failure of an attempt whose engine was lost before the client got anything."""
    # The message of the loss names addresses, which only the log may have.
    failure = ReplicaUnreachable(f"replica {request.replica}: {LOSS_MESSAGES[lost.reason]}", reason=lost.reason)
    failure.__cause__ = lost
    return failure


def retry_reason(status: int, first: bytes, request: EngineRequest, *, in_band_error: bool) -> str | None:
    """Why another replica may do better (a reason of core.failover.verdict); None: the client gets this answer."""
    if status in (502, 503):
        return "engine_unavailable"
    if status in _KEY_REFUSALS and not in_band_error and _ROUTE_IS_OFF not in first:
        return "engine_unauthorized"
    # A 404 for an unknown model names the model; any other (a route that the engine lacks) is the client's.
    if status == 404 and request.engine_name and request.engine_model.encode() in first:
        return "adapter_missing"
    if status == 400 and request.engine_name and any(said in first for said in _NOT_LOADED):
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
