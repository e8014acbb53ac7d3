"""The response to one request: heads, events and errors in the shape of its route, keep-alives, and its line."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from lorafleet.http_server.batches import leave_batch, next_stage
from lorafleet.http_server.exchange import HttpExchange
from lorafleet.keys.roles import Caller
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.http import STREAM_HEADERS, HttpError, envelope, error_headers
from lorafleet.telemetry.request_log import RequestLine, cause_of
from router.core.errors import BadBody, DeadlineExceeded, RateLimited, RouterError, StreamBroken, without_addresses
from router.core.queue.quota import QuotaGrant
from router.http.error_shapes import shaped
from router.http.sse import (
    AnswerRewriter,
    ChatRewriter,
    CumulativeRewriter,
    ModelRenamer,
    WeightSigner,
    error_event,
    refusal_event,
)
from router.protocols.routes import Route
from router.protocols.usage import UsageFilter
from router.request.accounting import count_refusal, count_run, record, record_error, record_usage, sender_names
from router.request.cache_salt import is_own_salt
from router.request.dispatched import record_first_token, record_whole_answer
from router.request.engine_attempt import EngineAttempt
from router.request.engine_request import COMPLETION
from router.request.parsed_request import TIMEOUT_HEADER, ParsedRequest
from router.request.record import DispatchedRequest
from router.request.run import RequestRun
from router.request.services import Services
from router.telemetry.trace import Trace

log = structlog.get_logger()

# Code of a stream whose last event is the engine's own error: the status, 200, does not say it.
_ENGINE_ERROR = "engine_error"
# A comment, which clients of event streams skip.
_WAITING = b": waiting\n\n"
# Timers within the work fire at the deadline, too, and their errors say what was being waited for. So they come first.
_OUTER_DEADLINE_S = 0.02


class _EngineError(msgspec.Struct):
    type: str | None = None


class _EngineAnswer(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


class _Named(msgspec.Struct):
    model: str = ""
    lora_id: str = ""


_CLIENT_GONE = 499
# A longer body of a refused request is not read for its model's name: a flood of them must stay cheap.
_SHORT_BYTES = 2**14
_MOST_NAME_CHARS = 300
_decode_names = msgspec.json.Decoder(_Named).decode
_decode = msgspec.json.Decoder(_EngineAnswer).decode


class ClientResponse(msgspec.Struct, eq=False):
    """The response to one request: a head, pieces and an end, or one error. Then `close`.

    code            of the error; "": none
    cause           of it, for the log
    limit           that was reached, see RouterError; "": none
    granted         the quota of a request of a caller with limits; its run settles it, where it has one
    extra_headers   header lines of every answer
    next_keep_alive the timer of the next comment in a stream that has no event yet
    """

    services: Services
    exchange: HttpExchange
    route: Route
    trace: Trace | None = None
    code: str = ""
    cause: str = ""
    limit: str = ""
    extra_headers: str = ""
    run: RequestRun | None = None
    granted: QuotaGrant | None = None
    next_keep_alive: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        """The request's id, as its exchange has it."""
        return self.exchange.request_id

    def take_quota(self, caller: Caller) -> None:
        """Count the request against the limits of the caller's key and tenant, once.

        Raises RateLimited, also for an exhausted budget, and then it does not count.
        """
        if self.granted is None and (limited := caller.limited):
            now = self.services.clock()
            self.services.budgets.check(limited, now)
            self.granted = self.services.quotas.take(limited, now)

    @contextmanager
    def counting_wrong_body(self, caller: Caller) -> Iterator[None]:
        """Count the request where its body is found wrong. Raises RateLimited in place of BadBody where it may not."""
        try:
            yield
        except BadBody:
            self.take_quota(caller)
            raise

    def serve(self, run: RequestRun) -> Coroutine[Any, Any, None]:
        """The coroutine of this request's stages, up to the end of its answer or its deadline. `close` records the end.

        raises  RouterError
        """
        self.run = run
        work = self._serve(run)
        return work if run.request.deadline_at is None else within_deadline(self.services, run.request, work)

    async def _serve(self, run: RequestRun) -> None:
        """Run the stages from resolve to the end of the answer, and record its usage. Raises RouterError."""
        dispatched, answer = await run.reach_engine()
        await next_stage()
        if self.trace is not None:
            self.trace.begin_stage("relay")
        headers, rewriter = self._begin_answer(run, dispatched, answer)
        if answer.streamed:
            await self._relay(run, dispatched, answer, headers, rewriter)
        else:
            self.send_whole(answer.status, headers, rewriter.whole(answer.first))
        await next_stage()
        record_usage(run, dispatched, answer)

    def _begin_answer(
        self, run: RequestRun, dispatched: DispatchedRequest, answer: EngineAttempt
    ) -> tuple[str, AnswerRewriter]:
        """Record the first token, and stop keep-alives; the header lines of the answer, and what rewrites its body."""
        # An engine has not prefilled a request that it refuses, or only queued.
        is_prefilled = answer.status < 400 and (answer.streamed or not run.is_in_background)
        if is_prefilled and answer.streamed:
            record_first_token(self.services, dispatched)
        elif is_prefilled:
            record_whole_answer(self.services, dispatched)
        if self.next_keep_alive is not None:
            self.next_keep_alive.cancel()
        target, model = dispatched.target, answer.message.engine_model
        self.services.metrics.first_data.labels(target.base_model).observe(self.services.clock() - run.request.read_at)
        # Without the check a repeated prompt would tell its tenant whether a neighbour's is cached.
        cached_tokens = disclosed_cached_tokens(self.services, run.caller, dispatched) if is_prefilled else 0
        headers = _answer_headers(answer, dispatched, cached_tokens)
        if _may_see_predictions(run.caller, dispatched):
            headers += f"x-lorafleet-first-token-s: {dispatched.load.predicted_s:.4f}\r\n"
        if run.granted is not None:
            now = self.services.clock()
            headers += header_lines(
                self.services.quotas.headers(run.granted, now) | self.services.budgets.headers(run.caller.limited, now)
            )
        rewriter: AnswerRewriter = ModelRenamer(model, target.asked if run.request.route.echoes_model else model)
        if run.request.names_weights and run.request.route.signs:
            rewriter = WeightSigner(model, target.asked, target.weights)
        if answer.message.route is COMPLETION and run.request.route.prompt == "chat":
            rewriter = ChatRewriter(rewriter)
        if answer.metadata is not None:
            headers += f"metadata: {rewriter.whole(answer.metadata).decode('latin-1')}\r\n"
        return headers, rewriter

    async def _relay(
        self,
        run: RequestRun,
        dispatched: DispatchedRequest,
        answer: EngineAttempt,
        headers: str,
        rewriter: AnswerRewriter,
    ) -> None:
        """relay: send the engine's stream, event by event."""
        if run.cumulative is not None:
            run.cumulative.weights = dispatched.target.weights
            rewriter = CumulativeRewriter(run.cumulative.events)
        usage_filter = None
        if run.request.hides_usage:
            route = run.request.route
            # A signed stream has a fingerprint in each event already.
            is_signed = run.request.names_weights and route.signs
            usage_filter = UsageFilter(
                self.services.signatures if route.signs and not is_signed else None, dispatched.replica.id
            )
        self.send_head(answer.status, headers)
        await answer.relay(self.exchange, rewriter, hidden=usage_filter)
        self.finish_stream(answer)

    def keep_alive(self, every_s: float) -> None:
        """Send a comment every so many seconds until the first event. The first one commits status 200."""
        self.next_keep_alive = asyncio.get_running_loop().call_later(every_s, self._send_comment, every_s)

    def _send_comment(self, every_s: float) -> None:
        """Send a keep-alive comment, with the head where there is none yet, and schedule the next one."""
        self.send_head(200, "content-type: text/event-stream; charset=utf-8\r\n")
        self.exchange.send(_WAITING)
        self.keep_alive(every_s)

    def send_whole(self, status: int, headers: str, body: bytes) -> None:
        """Send a complete answer; as the last event, where a comment has begun a stream."""
        if self.exchange.status is not None:
            self.exchange.finish(refusal_event(status, body, self.route.errors))
            return
        self.exchange.respond(status, self._all_headers(headers), body)

    def send_head(self, status: int, headers: str) -> None:
        """Send the head of a stream, unless a comment has; the exchange's `send` and then `finish` follow."""
        if self.exchange.status is None:
            self.exchange.begin(status, self._all_headers(headers + _STREAM_LINES))

    def finish_stream(self, attempt: EngineAttempt) -> None:
        """End a stream, with an error event where its engine broke off. An engine's own error there sets `code`."""
        broken = attempt.failure
        if isinstance(broken, StreamBroken):
            self.send_error(broken)
            return
        if attempt.fault:
            self.code = _ENGINE_ERROR
            self.cause = f"the engine ended its stream with an error{error_type(attempt.fault)}"
        self.exchange.finish()

    def send_failure(self, exc: Exception) -> None:
        """Send the error for this exception, and count a rate limit. An unexpected one is sent as 500, and logged."""
        if isinstance(exc, RouterError | HttpError):
            if isinstance(exc, RateLimited):
                self.services.metrics.rate_limited.labels(exc.limit).inc()
            self.send_error(exc)
            return
        log.error("unexpected error", path=self.route.path, request_id=self.request_id, exc_info=exc)
        message = f"internal error ({type(exc).__name__}); see the router's log"
        self.send_error(HttpError(500, "internal_error", message))

    def send_error(self, exc: RouterError | HttpError) -> None:
        """Send an error in the route's shape, and set `code`.

        In a stream it is the last event. If the client has the stream's last event already, the answer is only ended.
        """
        run = self.run
        if run is not None and run.answer is not None and run.answer.is_done_sent:
            self.exchange.finish()
            return
        self.code, self.cause = exc.code, cause_of(exc)
        if isinstance(exc, RouterError):
            self.limit = exc.limit
        if run is not None:
            record_error(run, exc)
        errors = self.route.errors
        body = shaped(envelope(exc.status, exc.code, without_addresses(str(exc)), exc.param), exc.status, errors)
        if self.exchange.status is not None:
            self.exchange.finish(error_event(body, errors))
            return
        headers = {"content-type": "application/json"} | error_headers(exc.status, exc.retry_after_s)
        if isinstance(exc, RateLimited):
            headers |= exc.headers
        self.send_whole(exc.status, header_lines(headers), msgspec.json.encode(body))

    def send_stopping(self) -> None:
        """Send 503 `stopping` to a client that is still connected."""
        if not self.exchange.is_over:
            message = "the router stopped before this answer was whole; ask again"
            self.send_error(HttpError(503, "stopping", message, retry_after_s=1.0))

    def close(self) -> None:
        """End the request, however it ended: stop keep-alives, record it, and count it in the metrics and the trace."""
        if self.next_keep_alive is not None:
            self.next_keep_alive.cancel()
        run, self.run = self.run, None
        if run is not None:
            record(run)
        elif self.granted is not None:
            self.services.quotas.settle(self.granted, self.services.clock(), prompt_tokens=0)
        status = self.exchange.status or 499
        self.services.metrics.requests.labels(self.route.path, status, self.code).inc()
        if run is not None:
            count_run(run, status, self.code, self.limit)
        elif status >= 400 or self.code:
            count_refusal(self.services, self.exchange, status, self.code, self.limit)
        requests = self.services.requests
        if requests.keeps or requests.has_all or status >= 400 or self.code:
            record_line(self, run, status)
        if self.trace is not None:
            self.trace.end(status, self.code)

    def _all_headers(self, headers: str) -> bytes:
        """All header lines of the response: these, the request's id, and `extra_headers`."""
        return f"x-request-id: {self.exchange.request_id}\r\n{headers}{self.extra_headers}".encode("latin-1")


def header_lines(headers: Mapping[str, str]) -> str:
    """These headers as lines of a head."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


_STREAM_LINES = header_lines(STREAM_HEADERS)


def within_deadline(
    services: Services, request: ParsedRequest, work: Coroutine[Any, Any, None]
) -> Coroutine[Any, Any, None]:
    """This work, or with a deadline a coroutine that ends it then, and raises DeadlineExceeded. Await it at once.

    Without a deadline nothing is wrapped: each coroutine in between costs something at every step of a batch.
    """
    return work if request.deadline_at is None else _finish_by_deadline(services, request.deadline_at, work)


async def _finish_by_deadline(services: Services, deadline_at: float, work: Coroutine[Any, Any, None]) -> None:
    """Do this work in a task until the deadline. Raises DeadlineExceeded.

    A loop that was busy over the deadline runs all timers of that time in one turn. So this one gives the work, which a
    timer within may have ended, some turns more.
    """
    loop = asyncio.get_running_loop()
    try:
        await leave_batch()
        async with asyncio.timeout(None) as limit:
            timer = loop.call_later(
                deadline_at - services.clock() + _OUTER_DEADLINE_S,
                lambda: limit.reschedule(loop.time() + _OUTER_DEADLINE_S),
            )
            try:
                await work
            finally:
                timer.cancel()
    except TimeoutError as exc:
        raise DeadlineExceeded(f"there was no whole answer within the time that {TIMEOUT_HEADER} allows") from exc
    finally:
        work.close()  # where it was not begun


def disclosed_cached_tokens(services: Services, caller: Caller, dispatched: DispatchedRequest) -> int:
    """The predicted cached tokens that this caller may see: those of prefixes that its tenant has sent before.

    In a shared cache, records the prompt as sent by the tenant. A hit on another tenant's would disclose that prompt.
    """
    cached_tokens = dispatched.predicted_tokens
    if dispatched.decision.request.is_approximate or _may_see_predictions(caller, dispatched):
        return cached_tokens
    assert caller.tenant is not None, "others see predictions"
    own_blocks = services.cache_disclosure.disclosed_depth(caller.tenant, dispatched.hashes)
    services.cache_disclosure.record_prompt(caller.tenant, dispatched.hashes)
    return min(cached_tokens, own_blocks * dispatched.replica.block_size)


def _may_see_predictions(caller: Caller, dispatched: DispatchedRequest) -> bool:
    """Whether what is predicted for this request says nothing about other tenants' prompts."""
    return caller.tenant is None or is_own_salt(dispatched.cache_salt)


def content_headers(attempt: EngineAttempt) -> str:
    """Header lines about an engine's answer: its type, and its Retry-After."""
    lines = f"content-type: {attempt.content_type.decode('latin-1')}\r\n"
    return lines if attempt.retry_after is None else f"{lines}retry-after: {attempt.retry_after.decode('latin-1')}\r\n"


def _answer_headers(attempt: EngineAttempt, dispatched: DispatchedRequest, cached_tokens: int) -> str:
    """Header lines of an answer: the engine's, and which worker and adapter gave it."""
    adapter = dispatched.target.adapter
    return (
        f"{content_headers(attempt)}"
        f"x-lorafleet-worker: {dispatched.replica.id}\r\n"
        f"x-lorafleet-adapter: {(adapter.engine_name or adapter.lora_id) if adapter else 'base'}\r\n"
        f"x-lorafleet-cached-tokens: {cached_tokens}\r\n"
    )


def record_line(response: ClientResponse, run: RequestRun | None, status: int) -> None:
    """Log and keep the line of a request that is over, and was recorded. A client that left has not failed.

    run  its stages; None: it did not come so far, or it is a batch or a stored response
    """
    exchange, services = response.exchange, response.services
    now, requests, (key, tenant) = services.clock(), services.requests, sender_names(exchange)
    line = RequestLine(
        request_id=exchange.request_id,
        method=exchange.method,
        path=response.route.path,
        status=status,
        duration_s=max(0.0, now - exchange.received_at),
        code=response.code,
        cause=response.cause,
        client=exchange.client[0] if exchange.client else "",
        key=key,
        tenant=tenant,
        limit=response.limit,
        body_bytes=len(exchange.body),
    )
    is_failure = status != _CLIENT_GONE and (status >= 400 or bool(response.code))
    if run is not None:
        _add_stages(line, run, exchange.received_at, now)
    if is_failure or status == _CLIENT_GONE:
        line.stage = "read" if run is None else _last_stage(run)
        if run is None and len(exchange.body) <= _SHORT_BYTES:
            line.asked = _asked_for(exchange.body)
    if is_failure or requests.has_all:
        requests.record(line, is_failure=is_failure)
    if requests.keeps:
        requests.keep(line, None if run is None or run.dispatched is None else run.dispatched.decision.score)


def _add_stages(line: RequestLine, run: RequestRun, received_at: float, now: float) -> None:
    """Add what the stages found: adapter, worker, attempts, times and tokens; the cause of an engine's own error."""
    target, dispatched, answer = run.target, run.dispatched, run.answer
    line.read_s, line.streamed = max(0.0, run.request.read_at - received_at), run.request.streamed
    line.paused_s, line.queued_s, line.failed_s = run.paused_s, run.queued_s, run.failed_s
    line.held_s = run.cold_s + run.away_s
    if line.held_s:
        line.held_for = _held_for(run)
    if run.failures:
        line.failures = tuple([(worker, failed.reason) for (worker, _), failed in run.failures.items()])
    if target is not None:
        adapter, named = target.adapter, run.request.lora_id
        line.asked, line.base_model = named if isinstance(named, str) and named else target.asked, target.base_model
        line.adapter = "base" if adapter is None else adapter.engine_name or adapter.lora_id
    line.attempts = run.attempts
    line.worker = (run.last_failed_worker or "") if dispatched is None else dispatched.replica.id
    sent_at = now if dispatched is None else dispatched.load.began_at
    line.waited_s = max(0.0, sent_at - run.request.read_at)
    if dispatched is not None:
        line.first_data_s, line.queued_for = dispatched.first_data_s, dispatched.queued_for
        line.queued_s += dispatched.waited_s
        if dispatched.usage is not None:
            line.prompt_tokens = dispatched.usage.prompt_tokens
            line.completion_tokens = dispatched.usage.completion_tokens
            line.cached_tokens = dispatched.usage.cached_tokens
    if answer is not None and answer.status >= 400 and not line.code:
        line.cause = f"the engine answered {answer.status}{error_type(answer.first)}"


def _asked_for(body: bytes) -> str:
    """The name of the model in the body of a request that was refused before it was read; empty: it has none."""
    try:
        named = _decode_names(body)
    except DECODE_ERRORS:
        return ""
    return (named.lora_id or named.model)[:_MOST_NAME_CHARS]


def _last_stage(run: RequestRun) -> str:
    """The stage in which a request ended, or `hold`: the names are those of `router.request`."""
    is_held = run.is_held or (run.stage == "decide" and run.away_s and not run.queued_s)
    return "hold" if is_held else run.stage


def _held_for(run: RequestRun) -> str:
    """What a request was held for: its adapter, or a replica that has not failed it."""
    if run.failures:
        return "another worker than those that failed it"
    if not run.cold_s:
        return "a worker of the base model: each was starting, or had gone away"
    return "its adapter: no worker had it loaded, or could take this request"


def error_type(body: bytes) -> str:
    """` (BadRequestError)`: the type in an engine's error. Its message may quote the prompt, and is left out."""
    try:
        error_type = _decode(body).error.type
    except DECODE_ERRORS:
        return ""
    return f" ({error_type[:80]})" if error_type else ""
