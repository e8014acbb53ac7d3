"""The inference routes: from a client's request to its answer, relayed or an error."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec
import structlog

from lorafleet.http_server.batches import leave_batch, next_stage
from lorafleet.http_server.connection import Handler, HttpExchange
from lorafleet.http_server.cross_site import site_check
from lorafleet.http_server.lenient import trimmed
from lorafleet.service.auth import Caller, check_scope, host_check
from lorafleet.service.http import HttpError, envelope, error_headers
from router.core.errors import (
    BadBody,
    DeadlineExceeded,
    NoReplica,
    RateLimited,
    ReplicaUnreachable,
    RouterError,
    StreamBroken,
    without_addresses,
)
from router.core.kv.index import WorkerId
from router.http.error_shapes import shaped
from router.http.sse import Echo, GrowingEcho, Renamed, Undated, error_event, refusal_event
from router.protocols import sglang_generate
from router.protocols.bodies import check_items
from router.protocols.routes import ROUTES, Route, find_route, response_id_of
from router.protocols.stored_responses import worker_gone_error, worker_of_response
from router.protocols.usage import UsageFilter
from router.request.dispatched import DispatchedRequest
from router.request.engine_attempt import AttemptLimits, EngineAttempt, EngineRequest, open_attempt
from router.request.engine_body import FORWARDED_HEADERS
from router.request.run import RequestRun, door_of, header_lines, late
from router.request.services import Services
from router.request.stages import TIMEOUT_HEADER, ParsedRequest, read, request_id, shown_cached_tokens
from router.telemetry.trace import Trace

log = structlog.get_logger()

Work = Callable[[], Coroutine[Any, Any, None]]

_TIMEOUT = TIMEOUT_HEADER.encode()
_GENERATE = Route(path=sglang_generate.PATH, summary="Texts continued, in SGLang's native form", generates=True)
_ITEM = ROUTES["POST", sglang_generate.ITEM_PATH]
_PATHS = {path for _, path in ROUTES} | {sglang_generate.PATH}
# What FastAPI answers, of the router itself, at a path that is an inference route's, too.
_OWN = frozenset({("GET", "/v1/decisions")})
# A comment, which clients of event streams pass over.
_WAITING = b": waiting\n\n"
# Of JSON: some 50 ms at worst.
_QUICKLY_READ_BYTES = 2**19
# Of one call to /generate; the others of it wait their turn.
_ITEMS_AT_ONCE = 64
# And so many in one call: each is read, and a task, before the first is sent; about 30 us of the loop.
_MOST_ITEMS = 10_000
# Of two timers for one deadline that of the wait under way is to be first: it says what was waited for, and counts it.
_LAST_S = 0.02


class InferenceHandler:
    """What answers each inference route."""

    def __init__(self, services: Services) -> None:
        self._services = services
        config = services.config
        self._limits = AttemptLimits(config.first_data_timeout_s, config.idle_timeout_s, config.max_answer_bytes)
        self._keep_alive_s = config.stream_keep_alive_s
        self._session_header = config.session_header.lower().encode()
        self._check_host = host_check(services.keys, allow_open=config.allow_open)
        self._check_site = site_check(config.allowed_origins, trusts_asked=True)
        self._handlers: dict[tuple[str, str], Handler] = {
            key: partial(self._handle, route) for key, route in ROUTES.items()
        }
        self._handlers["POST", sglang_generate.PATH] = partial(self._handle, _GENERATE)

    def sender(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Who sends this; None for who may not."""
        try:
            if self._check_host is not None:
                self._check_host(headers.get(b"host", b""))
            caller = self._services.keys.caller(_authorization(headers))
        except HttpError:
            return None
        return caller if caller.may("infer") else None

    def route(self, method: str, path: str) -> Handler | None:
        """What answers this, or None: it is not an inference route."""
        handler = self._handlers.get((method, path))
        if handler is not None:
            return handler
        route = find_route(method, path)
        if route is not None:
            return self._handlers[route.method, route.path]
        if path.endswith("/") and path != "/":
            handler = self.route(method, trimmed(path))
            return None if handler is None else partial(_answer_at, trimmed(path), handler)
        if ("GET" if method == "HEAD" else method, path) in _OWN:
            return None
        return self._wrong_method if self._offered(path) else None

    def _offered(self, path: str) -> dict[str, str]:
        """Method -> path as its route has it, of all that may be asked for there."""
        if path in _PATHS:
            return {method: known for method, known in (*self._handlers, *_OWN) if known == path}
        found = {method: find_route(method, path) for method in ("GET", "POST")}
        return {method: route.path for method, route in found.items() if route is not None}

    async def _handle(self, route: Route, exchange: HttpExchange) -> None:
        """Answer one request, or say why not."""
        trace = None
        if self._services.tracer is not None:
            traceparent = exchange.headers.get(b"traceparent")
            trace = self._services.tracer.begin(route.path, exchange.received_at, traceparent, method=route.method)
        named = request_id(_text(exchange.headers, b"x-request-id"))
        answer = _Answer(self._services, exchange, route, named, trace)
        try:
            caller = self._authenticate(route, exchange, trace)
            if route.state == "needs":
                await leave_batch()
                await self._serve_stored(caller, answer)
            elif route is _GENERATE:
                await leave_batch()
                await self._serve_batch(caller, answer)
            else:
                await self._serve(caller, answer)
        except (asyncio.CancelledError, GeneratorExit):
            if not exchange.is_over:  # the client is still there: the router stops
                answer.fail(_stopping())
            raise
        except Exception as exc:  # noqa: BLE001  (its client's, as an error)
            answer.refuse(exc)
        finally:
            answer.close()

    def _authenticate(self, route: Route, exchange: HttpExchange, trace: Trace | None) -> Caller:
        """Who sends this. Raises HttpError for who may not, and RateLimited for a key that has had all that it may."""
        headers = exchange.headers
        if trace is not None:
            trace.begin_stage("authenticate")
        if b"origin" in headers or b"sec-fetch-site" in headers:
            self._check_site(exchange.method, headers)
        caller = exchange.caller or self._refused(headers)
        # Before its body is read: a large one takes a fifth of a second, and a key's limits are to bound that. A
        # batch is told when there is enough for all its items, which are in its body: one that is quickly read is.
        if caller.limits is not None and route.has_body and not _is_quickly_read_batch(route, exchange.body):
            self._services.quotas.check(caller.key_id, caller.limits, self._services.clock())
        return caller

    async def _serve(self, caller: Caller, answer: "_Answer") -> None:
        """One request to its engine, and its answer to the client."""
        trace = answer.trace
        if trace is not None:
            trace.begin_stage("read")
        question = self._question(answer, answer.exchange.body)
        answer.journey = RequestRun(self._services, self._limits, caller, question, trace)
        if self._keep_alive_s and question.streamed:
            answer.keep_alive(self._keep_alive_s)
        await next_stage()
        await answer.travelled()

    def _refused(self, headers: Mapping[bytes, bytes]) -> NoReturn:
        """Raises HttpError that says why this has no caller."""
        if self._check_host is not None:
            self._check_host(headers.get(b"host", b""))
        check_scope(self._services.keys.caller(_authorization(headers)), "infer")
        raise HttpError(401, "invalid_api_key", "this API key was not known when the request began; send it again")

    async def _wrong_method(self, exchange: HttpExchange) -> None:
        offered = self._offered(exchange.path)
        methods = " or ".join(sorted(offered))
        route = Route(path=min(offered.values()), summary="")
        answer = _Answer(self._services, exchange, route, request_id(None), more=f"allow: {methods}\r\n")
        answer.refuse(HttpError(405, "method_not_allowed", f"{route.path} takes {methods}, found {exchange.method}"))
        answer.close()

    def _question(self, answer: "_Answer", body: bytes, *, route: Route | None = None, name: str = "") -> ParsedRequest:
        headers = answer.exchange.headers
        if headers.get(b"content-type") != b"application/json":
            _check_media_type(headers)
        if answer.trace is not None:
            forwarded = answer.trace.headers(headers.get(b"tracestate"))
        elif FORWARDED_HEADERS.isdisjoint(headers):
            forwarded = b""
        else:
            found = sorted(FORWARDED_HEADERS.intersection(headers))
            forwarded = b"".join([header + b": " + headers[header] + b"\r\n" for header in found])
        question = read(
            self._services,
            name or answer.request_id,
            route or answer.route,
            body,
            session=_text(headers, self._session_header),
            timeout=_text(headers, _TIMEOUT),
            forwarded=forwarded,
        )
        own = question.decoded.get("request_id")
        if own is None or name or question.route.state != "none" or b"x-request-id" in headers:
            return question
        # vLLM names its answer by the header first, and ours is always there.
        if isinstance(own, str) and request_id(own) == own:
            answer.request_id = own
        return msgspec.structs.replace(question, request_id=answer.request_id)

    async def _serve_stored(self, caller: Caller, answer: "_Answer") -> None:
        """Ask the engine that keeps a response for it."""
        services, exchange, route = self._services, answer.exchange, answer.route
        response_id = response_id_of(exchange.path)
        worker = worker_of_response(response_id, tenant=caller.tenant, param="id")
        await services.discovery.wait_for_first_worker()
        replica = services.discovery.fleet.replicas.get(WorkerId(worker))
        if replica is None:
            raise worker_gone_error(response_id, worker, param="id")
        if not replica.engine_url:
            raise NoReplica(f"worker {worker!r}, which keeps this response, is starting", retry_after_s=1.0)
        target = exchange.path.encode() + (b"?" + exchange.query if exchange.query else b"")
        timeout = _text(exchange.headers, _TIMEOUT)
        question = read(services, answer.request_id, route, b"", target=target, timeout=timeout)
        door = door_of(replica, services.config.engine_key)
        call = EngineRequest(route, door.origin, door.request(question, b""), "", "", worker, False)
        relay = partial(self._relay_stored, call, answer, Undated(replica.model_name, replica.base_model))
        await _in_time(services, question, relay)

    async def _relay_stored(self, call: EngineRequest, answer: "_Answer", echo: Renamed) -> None:
        background, response_id = self._services.background, response_id_of(answer.exchange.path)
        try:
            attempt = await open_attempt(self._services.pool, call, self._limits)
        except ReplicaUnreachable as exc:
            raise late(exc) if exc.reason == "no_answer_in_time" else NoReplica(str(exc)) from exc
        try:
            about = _content(attempt) + f"x-lorafleet-worker: {call.replica}\r\n"
            if attempt.streamed:
                answer.begin(attempt.status, about)
                await attempt.relay(answer.exchange, echo)
                answer.finish(attempt)
            else:
                answer.whole(attempt.status, about, echo.whole(attempt.first))
                background.seen(response_id, attempt.first)
        finally:
            attempt.close()
            background.shown(response_id, attempt.events)

    async def _serve_batch(self, caller: Caller, answer: "_Answer") -> None:
        """`/generate`: each of its items is a completion of its own."""
        services, limits = self._services, caller.limits
        check_items(answer.exchange.body, services.config.max_body_items)
        batch = sglang_generate.split_batch(answer.exchange.body)
        if len(batch.items) > _MOST_ITEMS:
            raise BadBody(f"{len(batch.items)} items are more than {_MOST_ITEMS}: send several calls", param="text")
        a_minute = None if limits is None else limits.requests_per_minute
        if a_minute is not None and len(batch.items) > a_minute:
            raise BadBody(f"{len(batch.items)} items are more than the {a_minute:g} requests a minute of this API key")
        journeys = []
        for i, item in enumerate(batch.items):
            question = self._question(answer, item, route=_ITEM, name=f"{answer.request_id}-{i}")
            journeys.append(RequestRun(services, self._limits, caller, question))
        if batch.is_streamed:
            (journey,) = journeys
            journey.grows = sglang_generate.CumulativeStream(batch.names[0])
            if self._keep_alive_s:
                answer.keep_alive(self._keep_alive_s)
            answer.journey = journey
            await answer.travelled()
        else:
            serve = partial(self._serve_granted, batch, journeys, caller, answer)
            await _in_time(services, journeys[0].question, serve)

    async def _serve_granted(
        self, batch: sglang_generate.GenerateBatch, journeys: Sequence[RequestRun], caller: Caller, answer: "_Answer"
    ) -> None:
        """As one before the limits of its key: refused half-way, what it had come to would be computed for nothing."""
        services = self._services
        if caller.limits is None:
            await self._serve_items(batch, journeys, answer, _ITEMS_AT_ONCE)
            return
        granted = services.quotas.take_batch(
            caller.key_id, caller.limits, services.clock(), len(journeys), at_once=_ITEMS_AT_ONCE
        )
        try:
            for journey, item in zip(journeys, granted.items, strict=True):
                journey.granted = item
            await self._serve_items(batch, journeys, answer, granted.at_once)
        finally:
            services.quotas.end_batch(granted, services.clock())

    async def _serve_items(
        self, batch: sglang_generate.GenerateBatch, journeys: Sequence[RequestRun], answer: "_Answer", at_once: int
    ) -> None:
        turns = asyncio.Semaphore(at_once)
        tasks = [asyncio.create_task(_item(journey, turns)) for journey in journeys]
        try:
            bodies = await asyncio.gather(*tasks)
        except _ItemRefused as exc:
            answer.whole(exc.status, "content-type: application/json\r\n", exc.body)
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answer.whole(200, "content-type: application/json\r\n", sglang_generate.join_answers(batch, bodies))


def _answer_at(path: str, handler: Handler, exchange: HttpExchange) -> Coroutine[Any, Any, None]:
    """As if it had been sent to that path."""
    exchange.path = path
    return handler(exchange)


async def _item(journey: RequestRun, turns: asyncio.Semaphore) -> bytes:
    """One item's whole answer; raises _ItemRefused with the engine's own error."""
    async with turns:
        try:
            await journey.reach_engine()
            attempt, flight = journey.attempt, journey.flight
            assert attempt is not None
            assert flight is not None
            if attempt.status >= 400:
                raise _ItemRefused(attempt.status, attempt.first)
            flight.whole()
            journey.learn()
            return attempt.first
        finally:
            journey.end()


class _ItemRefused(Exception):
    """One item of a batch was refused by its engine, so the batch is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class _Answer(msgspec.Struct, eq=False):
    """The client's side of one request: a head, pieces, an end; or one error. Then `close`.

    A journey that need not wait for anything but its engine is answered by plain calls, as what the engine says comes:
    a task for each costs more than routing does. Any other is `travelled` in a task.

    code       of the error
    more       further header lines
    said_next  when it is next said that a stream's first event is waited for
    """

    services: Services
    exchange: HttpExchange
    route: Route
    request_id: str
    trace: Trace | None = None
    code: str = ""
    more: str = ""
    journey: RequestRun | None = None
    said_next: asyncio.TimerHandle | None = None

    async def travelled(self) -> None:
        """Answer, within the time that the client waits."""
        journey = self.journey
        assert journey is not None
        await _in_time(self.services, journey.question, partial(self._travelled, journey))

    async def _travelled(self, journey: RequestRun) -> None:
        await journey.reach_engine()
        attempt = journey.attempt
        assert attempt is not None
        await next_stage()
        echo, hidden = self._begun(journey, attempt)
        if attempt.streamed:
            await attempt.relay(self.exchange, echo, hidden=hidden)
            self.finish(attempt)
        else:
            await next_stage()
        journey.learn()

    def _begun(self, journey: RequestRun, attempt: EngineAttempt) -> tuple[Renamed, UsageFilter | None]:
        """There is an answer: all of it goes out, or the head of a stream, and how the rest of it is to be shown."""
        services, flight, question, call = self.services, journey.flight, journey.question, journey.call
        assert flight is not None
        assert call is not None
        if self.trace is not None:
            self.trace.begin_stage("relay")
        # What the engine refuses was never prefilled, and is not in its cache; what it only queued is not yet.
        is_prefilled = attempt.status < 400 and (attempt.streamed or not journey.background_id)
        if is_prefilled and attempt.streamed:
            flight.first_token()
        elif is_prefilled:
            flight.whole()
        if self.said_next is not None:
            self.said_next.cancel()
        target = flight.target
        services.metrics.first_data.labels(target.base_model).observe(services.clock() - question.read_at)
        # Asked again, a prompt that its tenant never had in the cache would tell whether a neighbour has.
        cached_tokens = shown_cached_tokens(services, journey.caller, flight) if is_prefilled else 0
        about = _about(attempt, flight, cached_tokens) + journey.limit_headers()
        model = call.engine_model
        echo: Renamed = Echo(model, target.asked if question.route.echoes_model else model)
        if attempt.metadata is not None:
            about += f"metadata: {echo.whole(attempt.metadata).decode('latin-1')}\r\n"
        if not attempt.streamed:
            self.whole(attempt.status, about, echo.whole(attempt.first))
            return echo, None
        if journey.grows is not None:
            echo = GrowingEcho(journey.grows.events)
        self.begin(attempt.status, about)
        return echo, UsageFilter(services.signatures, flight.replica.id) if question.hides_usage else None

    # What goes to the client.

    def keep_alive(self, every_s: float) -> None:
        """Say so often that a stream's first event is waited for. With the first such word the answer has begun."""
        self.said_next = asyncio.get_running_loop().call_later(every_s, self._say_waiting, every_s)

    def _say_waiting(self, every_s: float) -> None:
        self.begin(200, "content-type: text/event-stream; charset=utf-8\r\n")
        self.exchange.send(_WAITING)
        self.keep_alive(every_s)

    def whole(self, status: int, about: str, body: bytes) -> None:
        """An answer that is complete."""
        if self.exchange.status is not None:
            self.exchange.finish(refusal_event(status, body, self.route.errors))
            return
        self.exchange.respond(status, self._headers(about), body)

    def begin(self, status: int, about: str) -> None:
        """The head of a stream, unless it has gone already; the exchange's `send` and then `finish` follow."""
        if self.exchange.status is None:
            self.exchange.begin(status, self._headers(about + "cache-control: no-cache\r\n"))

    def finish(self, attempt: EngineAttempt) -> None:
        """The end of a stream, or an error in its place."""
        broken = attempt.failure
        if isinstance(broken, StreamBroken):
            log.warning(
                "stream broken", request_id=self.request_id, error=str(broken), cause=str(broken.__cause__ or "")
            )
            self.fail(broken)
        else:
            self.exchange.finish()

    def refuse(self, exc: Exception) -> None:
        """Answer with whatever went wrong."""
        if isinstance(exc, RouterError | HttpError):
            if isinstance(exc, RateLimited):
                self.services.metrics.rate_limited.labels(exc.limit).inc()
            self.fail(exc)
            return
        log.error("unexpected error", path=self.route.path, request_id=self.request_id, exc_info=exc)
        self.fail(HttpError(500, "internal_error", f"internal error ({type(exc).__name__}); see the router's log"))

    def fail(self, exc: RouterError | HttpError) -> None:
        """One error answer; the last event of a stream that has begun, unless that has its last one already."""
        journey = self.journey
        if journey is not None and journey.attempt is not None and journey.attempt.has_said_done:
            self.exchange.finish()
            return
        self.code = exc.code
        errors = self.route.errors
        body = shaped(envelope(exc.status, exc.code, without_addresses(str(exc)), exc.param), exc.status, errors)
        if self.exchange.status is not None:
            self.exchange.finish(error_event(body, errors))
            return
        headers = {"content-type": "application/json"} | error_headers(exc.status, exc.retry_after_s)
        if isinstance(exc, RateLimited):
            headers |= exc.headers
        self.whole(exc.status, header_lines(headers), msgspec.json.encode(body))

    def close(self) -> None:
        """It is over, however it ended."""
        exchange, journey = self.exchange, self.journey
        if self.said_next is not None:
            self.said_next.cancel()
        if journey is not None:
            self.journey = None
            journey.end()
        status = exchange.status or 499
        self.services.metrics.requests.labels(self.route.path, status, self.code).inc()
        if self.trace is not None:
            self.trace.end(status, self.code)

    def _headers(self, about: str) -> bytes:
        return f"x-request-id: {self.request_id}\r\n{about}{self.more}".encode("latin-1")


def _stopping() -> HttpError:
    return HttpError(503, "stopping", "the router stopped before this answer was whole; ask again", retry_after_s=1.0)


async def _in_time(services: Services, question: ParsedRequest, work: Work) -> None:
    """Do it while its client waits; raises DeadlineExceeded then, where no wait with a deadline of its own has."""
    if question.deadline_at is None:
        await work()
        return
    await leave_batch()
    try:
        async with asyncio.timeout(question.deadline_at - services.clock() + _LAST_S):
            await work()
    except TimeoutError as exc:
        raise DeadlineExceeded(f"there was no whole answer within the time that {TIMEOUT_HEADER} allows") from exc


def _is_quickly_read_batch(route: Route, body: bytes) -> bool:
    return route is _GENERATE and len(body) < _QUICKLY_READ_BYTES


def _about(attempt: EngineAttempt, flight: DispatchedRequest, cached_tokens: int) -> str:
    adapter = flight.target.adapter
    return (
        f"{_content(attempt)}"
        f"x-lorafleet-worker: {flight.replica.id}\r\n"
        f"x-lorafleet-adapter: {(adapter.engine_name or adapter.lora_id) if adapter else 'base'}\r\n"
        f"x-lorafleet-cached-tokens: {cached_tokens}\r\n"
    )


def _content(attempt: EngineAttempt) -> str:
    lines = f"content-type: {attempt.content_type.decode('latin-1')}\r\n"
    return lines if attempt.retry_after is None else f"{lines}retry-after: {attempt.retry_after.decode('latin-1')}\r\n"


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    """As vLLM: what a page of another origin may send without asking first (forms, plain text) is never computed."""
    given = _text(headers, b"content-type") or ""
    if given.partition(";")[0].strip().lower() != "application/json":
        said = f"content-type is {given!r}" if given else "no content-type is given"
        raise BadBody(f"{said}; a body is taken as application/json only")


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
