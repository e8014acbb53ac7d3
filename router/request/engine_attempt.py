"""open -> relay: one attempt at one replica, and its bytes to the client."""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import msgspec

from lorafleet.engine.vllm_errors import DEAD, SHUTTING_DOWN
from lorafleet.http_server.batches import Signal, leave_batch
from lorafleet.http_server.exchange import HttpExchange
from router.core.errors import ReplicaUnreachable, StreamBroken
from router.core.failover.circuit_breaker import is_fault
from router.http.engine_pool import EngineConnection, EngineLost, EnginePool, Headers
from router.http.error_shapes import enveloped
from router.http.sse import (
    MAX_EVENT_BYTES,
    AnswerRewriter,
    event_error,
    has_first_event,
    is_finished,
    last_type,
    says_done,
)
from router.protocols.routes import has_only_early_events
from router.protocols.usage import EngineUsage, UsageFilter, usage_of, usage_of_events
from router.request.engine_request import EngineRequest

_SHUTTING_DOWN, _DEAD = SHUTTING_DOWN.encode(), tuple(map(str.encode, DEAD))
# SGLang 0.5.23 managers/tokenizer_manager.py _resolve_lora_path: it has no 404.
_NOT_LOADED = (b"Got LoRA adapter that has never been loaded", b"Failed to implicitly load LoRA adapter")
# No client's key goes to an engine, so these are about the router's: vLLM's --api-key, or a mesh or proxy in front.
_NOT_OUR_KEY = frozenset({401, 403, 407})
_EVENT_STREAM = b"text/event-stream"
# The event with an answer's usage is the last but `[DONE]`, and each may come in a chunk of its own; a third for what
# an engine sends without a closing blank line.
_TAIL_CHUNKS = 3
# From an answer's last event to the end of its body, which comes with it: later, and the connection is closed.
_LINGER_S = 1.0
# Sooner than an engine can have looked at a request that would kill it.
_AT_ONCE_S = 0.05
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

    longer  asked when `first_data_s` has passed: until when to wait on, by the loop's clock; None: no longer
    """

    first_data_s: float
    idle_s: float
    answer_bytes: int
    longer: Callable[[float], float] | None = None


class EngineAttempt(msgspec.Struct, eq=False):
    """One request at an engine, and its answer as it comes; nothing has gone to the client until `relay` or `first`.

    tell            called when it is decided, which means that its first `data:` event is there, or the whole body, or
                    that it has failed
    status, content_type, retry_after, first   of the answer: its first events, or all of it
    metadata        of an answer that is bytes and no JSON: vLLM 0.32 tells in a header what they are
    streamed        whether more follows `first`: the engine has the last word on that
    in_band_error   a stream whose first event was an error: `status` and `first` are that error's
    events          of a stream, that were sent on: about one a token
    failure         why there is no answer, or no more of it
    is_stale        it failed because the engine closed an idle connection just as it was used again, which says nothing
                    about the engine and nothing about the request: it may go out once more, on a new connection
    """

    _call: EngineRequest
    _limits: AttemptLimits
    tell: Callable[[], None]
    streamed: bool
    _connection: EngineConnection | None = None
    _sent_at: float = 0.0
    _is_decided: bool = False
    _exchange: HttpExchange | None = None
    _rewriter: AnswerRewriter | None = None
    _hidden: UsageFilter | None = None
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
    is_stale: bool = False

    def begin(self, connection: EngineConnection) -> None:
        """Send it, on a connection fresh from the pool."""
        self._connection = connection
        self._sent_at = now = connection.loop.time()
        connection.deadline = now + self._limits.first_data_s
        connection.longer = self._limits.longer
        connection.send(self._call.request, self)

    def may_move(self, served: Container[str]) -> bool:
        """Whether nothing of its answer is there, and others, which serve these adapters, may as well give it. What
        follows up on something that an engine keeps is that engine's.
        """
        call = self._call
        is_served = not call.engine_name or call.engine_name in served
        return is_served and not self._is_decided and call.route.state == "none"

    def check(self) -> None:
        """Once it is decided: whether the answer is the client's, error or not.

        raises  ReplicaUnreachable when another replica may do better: no connection, 502, 503, a key that it does not
                take, an adapter that the replica had reported but no longer knows, an engine shutting down, an error in
                place of the first event
        """
        failure, call = self.failure, self._call
        if failure is not None:
            # It may break off in the very read that decided it: nothing has gone to the client then.
            lost = failure.__cause__ if isinstance(failure, StreamBroken) else failure
            raise _unreachable(call, lost) if isinstance(lost, EngineLost) else failure
        if self.status != 200:
            reason = _retry_reason(self, call)
            if reason is not None:
                self.close()
                what = f"replica {call.replica}: {self.status} {self.first[:200]!r}"
                if reason == "engine_unauthorized":
                    what += "; it does not take this router's key (see engine_key, of engines without an agent)"
                raise ReplicaUnreachable(what, reason=reason)
            self.first = enveloped(self.status, self.first)

    def start_relay(
        self,
        exchange: HttpExchange,
        rewriter: AnswerRewriter,
        on_over: Callable[[], None],
        *,
        hidden: UsageFilter | None = None,
    ) -> None:
        """As `relay`, and call `on_over` when the stream is over, perhaps at once."""
        self._rewriter, self._hidden, self.tell = rewriter, hidden, on_over
        self._tail = deque(maxlen=_TAIL_CHUNKS)
        self._exchange = exchange
        exchange.on_pause, exchange.on_resume = self._pause, self._resume
        if exchange.is_paused:
            self._pause()  # by an answer that was written in the turn in which this request came
        got, self._got = self._got, []
        self.data(b"".join(got))
        if self._connection is None:
            self._over()

    async def relay(
        self, exchange: HttpExchange, rewriter: AnswerRewriter, *, hidden: UsageFilter | None = None
    ) -> None:
        """Send a stream's bytes on as they come, until it is over; `failure` says how, where it did not end well.

        hidden  takes out the event with the usage, where we asked for it and the client did not
        """
        over = Signal()
        self.start_relay(exchange, rewriter, over.set, hidden=hidden)
        await over

    @property
    def is_broken(self) -> bool:
        """Whether the engine broke off in the middle of what it was streaming."""
        return isinstance(self.failure, StreamBroken)

    @property
    def lost_by(self) -> str:
        """How its engine was lost, by EngineLost's reasons; empty where it was not."""
        cause = self.failure.__cause__ if isinstance(self.failure, StreamBroken) else self.failure
        return cause.reason if isinstance(cause, EngineLost) else ""

    @property
    def is_whole(self) -> bool:
        """Whether all of an answer has come."""
        return self._connection is None and self.failure is None

    @property
    def has_said_done(self) -> bool:
        """Whether the last event of its stream was sent on: its client lacks nothing, whatever comes behind it."""
        return self._has_ended

    def usage(self) -> EngineUsage | None:
        """The engine's usage, once all of the answer is there; None where it has told none. Parses at each call."""
        kind = self._call.route.usage
        if self._tail is None:
            return usage_of(kind, self.first if self.metadata is None else self.metadata)
        return usage_of_events(kind, b"".join(self._tail))

    def close(self) -> None:
        """Free the connection, and tell no more; one whose answer was not read to its end is closed, and the engine
        aborts.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._exchange is not None:
            self._let_go()

    # What the connection calls.

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.content_type = content_type = headers.get(b"content-type", self.content_type)
        self.retry_after = headers.get(b"retry-after")
        self.metadata = headers.get(b"metadata")
        # The engine has the last word on whether it streams: it takes `"stream": "true"` and 1 for true as well.
        self.streamed = status == 200 and (self.streamed or content_type.startswith(_EVENT_STREAM))

    def data(self, data: bytes) -> None:
        if self._rewriter is not None:
            self._pass_on(data, self._rewriter)
            return
        self._got.append(data)
        self._size += len(data)
        if self._is_decided:
            return  # `relay` is about to begin
        if not self.streamed:
            if self._size > self._limits.answer_bytes:
                self._fail("answer_too_large", f"an answer of over {self._limits.answer_bytes} bytes")
            return
        got = data if len(self._got) == 1 else b"".join(self._got)
        if has_first_event(got) and not has_only_early_events(self._call.route, got):
            self._got = [got]
            self._begin_stream(got)
        elif self._size > MAX_EVENT_BYTES:
            self._fail("answer_too_large", f"no event within {MAX_EVENT_BYTES} bytes")

    def end(self) -> None:
        self._connection = None
        if self._exchange is not None:
            self._over()
        elif not self._is_decided:
            if self.streamed:
                self.lost(EngineLost("no_answer", "the stream ended before its first event"))
                return
            got = self._got
            self.first = got[0] if len(got) == 1 else b"".join(got)
            self._decide()

    def lost(self, exc: EngineLost) -> None:
        connection, self._connection = self._connection, None
        if self._has_ended:
            self._over()
            return
        if self._is_decided:
            how = "broke off"
            if exc.reason == "no_answer_in_time":
                how = f"paused for {self._limits.idle_s:g} s (idle_timeout_s), and was given up,"
            self._break(StreamBroken(f"replica {self._call.replica} {how} in the middle of its answer"), exc)
            return
        if exc.reason == "no_answer" and self._has_only_begun():
            exc = EngineLost("begun_only", str(exc))
        self.failure = exc
        self.is_stale = (
            exc.reason == "no_answer"
            and not self.status
            and connection is not None
            and connection.answers > 0
            and connection.said_nothing
            and connection.loop.time() - self._sent_at <= _AT_ONCE_S
        )
        self._decide()

    def _has_only_begun(self) -> bool:
        """Whether what came says little of the engine: so vLLM 0.32 breaks off a response whose schema it can't take;
        and behind the head alone one that it can't tell of, such as of `"truncation": null`.
        """
        if not (self.streamed and self.status == 200 and self._call.route.early_events):
            return False
        return not self._got or has_only_early_events(self._call.route, b"".join(self._got))

    def _decide(self) -> None:
        self._is_decided = True
        self.tell()

    def _begin_stream(self, got: bytes) -> None:
        failure = event_error(got)
        if failure is not None:
            self.status, self.first = failure
            self.content_type = b"application/json"
            self.in_band_error, self.streamed = True, False
        self._decide()

    def _pass_on(self, data: bytes, rewriter: AnswerRewriter) -> None:
        connection = self._connection
        if connection is not None:
            connection.heard_at = now = connection.loop.time()
            connection.deadline, connection.longer = now + self._limits.idle_s, None
        try:
            ready = rewriter.chunk(data)
        except StreamBroken as exc:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._break(exc)
        else:
            self._send(ready)
            if self._has_ended:
                self._dismiss(ready)

    def _dismiss(self, ready: bytes) -> None:
        """The last event was sent on: an engine that does not end its body keeps neither client nor quota."""
        connection = self._connection
        if connection is None:
            return
        if says_done(ready):
            # Nothing comes after this one in any dialect.
            self._connection = None
            connection.dismiss(within_s=_LINGER_S)
            self._over()
        else:
            connection.deadline = connection.loop.time() + _LINGER_S

    def _send(self, ready: bytes) -> None:
        exchange = self._exchange
        if not ready or exchange is None:
            return
        assert self._tail is not None
        self._tail.append(ready)
        self.events += ready.count(b"\n\n")
        ends = self._call.route.final_events
        self._has_ended = says_done(ready) or (bool(ends) and (self._has_ended or last_type(ready) in ends))
        if self._hidden is not None:
            ready = self._hidden.events(ready)
        exchange.send(ready)

    def _fail(self, reason: str, what: str) -> None:
        self.close()
        self.failure = ReplicaUnreachable(f"replica {self._call.replica}: {what}", reason=reason)
        self._decide()

    def _break(self, broken: StreamBroken, cause: Exception | None = None) -> None:
        broken.__cause__ = cause
        self.failure = broken
        self._over()

    def _over(self) -> None:
        """What is relayed has ended, well or not."""
        exchange = self._exchange
        if exchange is None:
            return  # `relay` has not begun, or it is told already
        assert self._rewriter is not None
        if self.failure is None:
            try:
                self._send(self._rewriter.end())
            except StreamBroken as exc:
                self.failure = exc
        if self.failure is None and not self._is_complete():
            self.failure = StreamBroken(f"replica {self._call.replica} ended its stream in the middle of its answer")
        if self._hidden is not None:
            exchange.send(self._hidden.end())
        self._let_go()
        self.tell()

    def _is_complete(self) -> bool:
        """Whether a stream that its engine has ended is all of the answer: its last events say so."""
        route = self._call.route
        return self._has_ended or not route.streams or is_finished(b"".join(self._tail or ()))

    def _let_go(self) -> None:
        assert self._exchange is not None
        self._exchange.on_pause = self._exchange.on_resume = None
        self._exchange = None

    def _pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()


async def open_attempt(pool: EnginePool, call: EngineRequest, limits: AttemptLimits) -> EngineAttempt:
    """Send one request and wait until it is decided.

    vLLM sends a streamed 200 head long before its first token, so the head decides nothing.

    raises  ReplicaUnreachable, see EngineAttempt.check
    """
    lost: EngineLost | None = None
    connection = pool.idle(call.origin)
    if connection is not None:
        attempt = await _sent(connection, call, limits)
        if not attempt.is_stale:
            attempt.check()
            return attempt
        assert isinstance(attempt.failure, EngineLost)
        lost = attempt.failure
    await leave_batch()
    try:
        connection = await pool.connect(call.origin)
    except EngineLost as exc:
        # Where an engine that has just broken off does not listen any more, it died.
        why = lost if lost is not None and exc.reason == "connection" else exc
        raise _unreachable(call, why) from why
    attempt = await _sent(connection, call, limits)
    attempt.check()
    return attempt


async def _sent(connection: EngineConnection, call: EngineRequest, limits: AttemptLimits) -> EngineAttempt:
    """The attempt, once it is decided."""
    decided = Signal()
    attempt = EngineAttempt(call, limits, decided.set, call.streamed)
    attempt.begin(connection)
    try:
        await decided
    except BaseException:
        attempt.close()
        raise
    return attempt


def _unreachable(call: EngineRequest, lost: EngineLost) -> ReplicaUnreachable:
    # The message of the loss names addresses, which are the log's to tell.
    unreachable = ReplicaUnreachable(f"replica {call.replica}: {LOSS_MESSAGES[lost.reason]}", reason=lost.reason)
    unreachable.__cause__ = lost
    return unreachable


def _retry_reason(attempt: EngineAttempt, call: EngineRequest) -> str | None:
    """Why another replica may do better, or None: the answer is the client's, error or not."""
    status, first = attempt.status, attempt.first
    if status in (502, 503):
        return "engine_unavailable"
    if status in _NOT_OUR_KEY and not attempt.in_band_error:
        return "engine_unauthorized"
    # An engine names the model that it does not know; any other 404 (a route that it does not serve) is the client's.
    if status == 404 and call.engine_name and call.engine_model.encode() in first:
        return "adapter_missing"
    if status == 400 and call.engine_name and any(said in first for said in _NOT_LOADED):
        return "adapter_missing"
    if status == 500 and _SHUTTING_DOWN in first:
        return "engine_draining"
    if status == 500 and any(said in first for said in _DEAD):
        return "engine_dead"
    if attempt.in_band_error and is_fault(status):
        return "first_event_error"
    return None
