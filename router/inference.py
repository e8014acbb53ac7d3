"""The inference routes: from a client's request to its answer, relayed or an error."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import structlog

from lorafleet.auth import Caller
from lorafleet.http import HttpError, envelope, error_headers
from router.core.errors import (
    DeadlineExceeded,
    NoReplica,
    RateLimited,
    ReplicaUnreachable,
    RouterError,
    StreamBroken,
    without_addresses,
)
from router.core.index import WorkerId
from router.dress import FORWARDED_HEADERS
from router.journey import Begun, Journey, door_of, header_lines
from router.parts import Parts
from router.relay.attempt import Attempt, Call, Limits, open_attempt
from router.relay.events import Echo, Growing, Renamed, Undated, error_event
from router.relay.front import Exchange, Handler
from router.stages import TIMEOUT_HEADER, Question, read, request_id, shown_cached_tokens
from router.surface import generate
from router.surface.routes import ROUTES, ErrorShape, Route, find, response_id_of
from router.surface.stored import gone, worker_of
from router.surface.usage import HiddenUsage
from router.tracing import Trace

log = structlog.get_logger()

_TIMEOUT = TIMEOUT_HEADER.encode()
_GENERATE = Route(path=generate.PATH, summary="Texts continued, in SGLang's native form", generates=True)
_ITEM = ROUTES["POST", generate.ITEM_PATH]
_PATHS = {path for _, path in ROUTES} | {generate.PATH}
# Of one call to /generate; the others of it wait their turn.
_ITEMS_AT_ONCE = 64


class Inference:
    """What answers each inference route."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        config = parts.config
        self._limits = Limits(config.first_data_timeout_s, config.idle_timeout_s, config.max_answer_bytes)
        self._session_header = config.session_header.lower().encode()
        self._handlers: dict[tuple[str, str], Handler] = {
            key: partial(self._handle, route) for key, route in ROUTES.items()
        }
        self._handlers["POST", generate.PATH] = partial(self._handle, _GENERATE)

    def route(self, method: str, path: str) -> Handler | None:
        """What answers this, or None: it is not an inference route."""
        handler = self._handlers.get((method, path))
        if handler is not None:
            return handler
        route = find(method, path)
        if route is not None:
            return self._handlers[route.method, route.path]
        return self._wrong_method if path in _PATHS else None

    async def _handle(self, route: Route, exchange: Exchange) -> None:
        """One request, from its first stage to its answer or error."""
        headers = exchange.headers
        answer = _Answer(exchange, request_id(_text(headers, b"x-request-id")), route.errors)
        parts, tracer = self._parts, self._parts.tracer
        trace = None
        if tracer is not None:
            trace = tracer.begin(route.path, exchange.received_at, headers.get(b"traceparent"), method=route.method)
        try:
            if trace is not None:
                trace.stage("authenticate")
            caller = parts.keys.caller(_authorization(headers))
            if route.state == "needs":
                await self._serve_stored(route, caller, answer)
            elif route is _GENERATE:
                await self._serve_batch(caller, answer)
            else:
                await self._serve(route, caller, answer, trace)
        except (RouterError, HttpError) as exc:
            if isinstance(exc, RateLimited):
                parts.metrics.rate_limited.labels(exc.limit).inc()
            answer.fail(exc)
        except asyncio.CancelledError:
            if exchange.status is not None and not exchange.is_over:
                # Not by the client, who is still there. One whose answer had not begun is told by the front.
                answer.fail(HttpError(503, "stopping", "the router stopped before this answer was whole; ask again"))
            raise
        except Exception as exc:
            log.exception("unexpected error", path=route.path, request_id=answer.request_id)
            answer.fail(
                HttpError(500, "internal_error", f"internal error ({type(exc).__name__}); see the router's log")
            )
        finally:
            status = exchange.status or 499
            parts.metrics.requests.labels(route.path, status, answer.code).inc()
            if trace is not None:
                trace.end(status, answer.code)

    async def _wrong_method(self, exchange: Exchange) -> None:
        methods = " or ".join(sorted(method for method, path in self._handlers if path == exchange.path))
        answer = _Answer(exchange, request_id(None))
        answer.more = f"allow: {methods}\r\n"
        answer.fail(HttpError(405, "method_not_allowed", f"{exchange.path} takes {methods}, found {exchange.method}"))
        self._parts.metrics.requests.labels(exchange.path, 405, answer.code).inc()

    async def _serve(self, route: Route, caller: Caller, answer: "_Answer", trace: Trace | None) -> None:
        exchange = answer.exchange
        if trace is not None:
            trace.stage("read")
        question = self._question(route, answer, exchange.body, trace)
        journey = Journey(self._parts, self._limits, caller, question, trace)
        if question.deadline_at is None:
            await self._travelled(journey, answer)
            return
        async with self._in_time(question):
            await self._travelled(journey, answer)

    @asynccontextmanager
    async def _in_time(self, question: Question) -> AsyncIterator[None]:
        """For as long as its client waits; raises DeadlineExceeded then."""
        left_s = None if question.deadline_at is None else question.deadline_at - self._parts.clock()
        try:
            async with asyncio.timeout(left_s):
                yield
        except TimeoutError as exc:
            raise DeadlineExceeded(f"there was no whole answer within the time that {TIMEOUT_HEADER} allows") from exc

    def _question(
        self, route: Route, answer: "_Answer", body: bytes, trace: Trace | None = None, name: str = ""
    ) -> Question:
        headers = answer.exchange.headers
        if trace is not None:
            forwarded = trace.headers(headers.get(b"tracestate"))
        elif FORWARDED_HEADERS.isdisjoint(headers):
            forwarded = b""
        else:
            found = sorted(FORWARDED_HEADERS.intersection(headers))
            forwarded = b"".join([header + b": " + headers[header] + b"\r\n" for header in found])
        return read(
            self._parts,
            name or answer.request_id,
            route,
            body,
            session=_text(headers, self._session_header),
            timeout=_text(headers, _TIMEOUT),
            forwarded=forwarded,
        )

    async def _travelled(self, journey: Journey, answer: "_Answer") -> None:
        try:
            begun = await journey.begun()
            try:
                await self._relay(begun, journey, answer)
            finally:
                begun.close()
        finally:
            journey.settle()

    async def _relay(self, begun: Begun, journey: Journey, answer: "_Answer") -> None:
        """The answer's bytes to the client, and what they teach."""
        parts, attempt, flight, question = self._parts, begun.attempt, begun.flight, journey.question
        if journey.trace is not None:
            journey.trace.stage("relay")
        if attempt.status < 400:
            # What the engine refuses was never prefilled, and is not in its cache.
            flight.first_token()
        parts.metrics.first_data.labels(flight.target.base_model).observe(parts.clock() - question.read_at)
        about = _about(begun, shown_cached_tokens(parts, journey.caller, flight)) + journey.limit_headers()
        echo: Renamed = Echo(begun.model, flight.target.asked if question.route.echoes_model else begun.model)
        if journey.grows is not None and attempt.streamed:
            echo = Growing(journey.grows.events)
        if attempt.streamed:
            hidden = HiddenUsage(parts.signatures, flight.replica.id) if question.hides_usage else None
            await self._streamed(attempt, about, echo, answer, hidden)
        else:
            answer.whole(attempt.status, about, echo.whole(attempt.first))
        journey.learn(begun)

    async def _streamed(
        self, attempt: Attempt, about: str, echo: Renamed, answer: "_Answer", hidden: HiddenUsage | None = None
    ) -> None:
        answer.begin(attempt.status, about)
        try:
            await attempt.relay(answer.exchange, echo, hidden=hidden)
        except StreamBroken as exc:
            log.warning("stream broken", request_id=answer.request_id, error=str(exc), cause=str(exc.__cause__ or ""))
            answer.fail(exc)
        else:
            answer.exchange.finish()

    async def _serve_stored(self, route: Route, caller: Caller, answer: "_Answer") -> None:
        """Ask the engine that keeps a response for it."""
        parts, exchange = self._parts, answer.exchange
        response_id = response_id_of(exchange.path)
        worker = worker_of(response_id, tenant=caller.tenant, param="id")
        replica = parts.discovery.fleet.replicas.get(WorkerId(worker))
        if replica is None:
            raise gone(response_id, worker, param="id")
        target = exchange.path.encode() + (b"?" + exchange.query if exchange.query else b"")
        timeout = _text(exchange.headers, _TIMEOUT)
        question = read(parts, answer.request_id, route, b"", target=target, timeout=timeout)
        door = door_of(replica, parts.config.engine_key)
        call = Call(route, door.origin, door.request(question, b""), "", False, worker, False)
        async with self._in_time(question):
            await self._relay_stored(call, answer)

    async def _relay_stored(self, call: Call, answer: "_Answer") -> None:
        try:
            attempt = await open_attempt(self._parts.pool, call, self._limits)
        except ReplicaUnreachable as exc:
            raise NoReplica(str(exc)) from exc
        try:
            about = _content(attempt) + f"x-lorafleet-worker: {call.replica}\r\n"
            if attempt.streamed:
                await self._streamed(attempt, about, Undated(), answer)
            else:
                answer.whole(attempt.status, about, Undated().whole(attempt.first))
        finally:
            attempt.close()

    async def _serve_batch(self, caller: Caller, answer: "_Answer") -> None:
        """`/generate`: each of its items is a completion of its own."""
        parts = self._parts
        batch = generate.split(answer.exchange.body)
        journeys = [
            Journey(parts, self._limits, caller, self._question(_ITEM, answer, item, name=f"{answer.request_id}-{i}"))
            for i, item in enumerate(batch.items)
        ]
        async with self._in_time(journeys[0].question):
            if batch.is_streamed:
                (journey,) = journeys
                journey.grows = generate.Growing(batch.names[0])
                await self._travelled(journey, answer)
            else:
                await self._serve_items(batch, journeys, answer)

    async def _serve_items(self, batch: generate.Batch, journeys: Sequence[Journey], answer: "_Answer") -> None:
        at_once = asyncio.Semaphore(_ITEMS_AT_ONCE)
        tasks = [asyncio.create_task(self._item(journey, at_once)) for journey in journeys]
        try:
            bodies = await asyncio.gather(*tasks)
        except _ItemRefused as exc:
            answer.whole(exc.status, "content-type: application/json\r\n", exc.body)
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answer.whole(200, "content-type: application/json\r\n", generate.join(batch, bodies))

    async def _item(self, journey: Journey, at_once: asyncio.Semaphore) -> bytes:
        """One item's whole answer; raises _ItemRefused with the engine's own error."""
        async with at_once:
            try:
                begun = await journey.begun()
                try:
                    if begun.attempt.status >= 400:
                        raise _ItemRefused(begun.attempt.status, begun.attempt.first)
                    begun.flight.first_token()
                    journey.learn(begun)
                    return begun.attempt.first
                finally:
                    begun.close()
            finally:
                journey.settle()


class _ItemRefused(Exception):
    """One item of a batch was refused by its engine, so the batch is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class _Answer(msgspec.Struct, eq=False):
    """The client's side of one request: a head, pieces, an end; or one error.

    more   further header lines
    """

    exchange: Exchange
    request_id: str
    errors: ErrorShape = "openai"
    code: str = ""
    more: str = ""

    def whole(self, status: int, about: str, body: bytes) -> None:
        """An answer that is complete."""
        self.exchange.respond(status, self._headers(about), body)

    def begin(self, status: int, about: str) -> None:
        """The head of a stream; the exchange's `send` and `finish` follow."""
        self.exchange.begin(status, self._headers(about + "cache-control: no-cache\r\n"))

    def fail(self, exc: RouterError | HttpError) -> None:
        """One error answer; the last event of a stream that has begun."""
        self.code = exc.code
        body: dict[str, object] = envelope(exc.status, exc.code, without_addresses(str(exc)), exc.param)
        if self.errors == "anthropic":
            body["type"] = "error"
        if self.exchange.status is not None:
            self.exchange.finish(error_event(body, self.errors))
            return
        headers = {"content-type": "application/json"} | error_headers(exc.status, exc.retry_after_s)
        if isinstance(exc, RateLimited):
            headers |= exc.headers
        self.whole(exc.status, header_lines(headers), msgspec.json.encode(body))

    def _headers(self, about: str) -> bytes:
        return f"x-request-id: {self.request_id}\r\n{about}{self.more}".encode("latin-1")


def _about(begun: Begun, cached_tokens: int) -> str:
    flight = begun.flight
    adapter = flight.target.adapter
    return (
        f"{_content(begun.attempt)}"
        f"x-lorafleet-worker: {flight.replica.id}\r\n"
        f"x-lorafleet-adapter: {(adapter.engine_name or adapter.lora_id) if adapter else 'base'}\r\n"
        f"x-lorafleet-cached-tokens: {cached_tokens}\r\n"
    )


def _content(attempt: Attempt) -> str:
    lines = f"content-type: {attempt.content_type.decode('latin-1')}\r\n"
    return lines if attempt.retry_after is None else f"{lines}retry-after: {attempt.retry_after.decode('latin-1')}\r\n"


def _authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    found = headers.get(b"authorization")
    if found is None:
        # As Anthropic's clients send it.
        key = headers.get(b"x-api-key")
        return None if key is None else b"Bearer " + key
    return found


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    found = headers.get(name)
    return None if found is None else found.decode("latin-1")
