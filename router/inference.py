"""The inference routes: the stages in order, retries before the first byte, and the answer."""

import itertools
from functools import lru_cache, partial

import msgspec
import structlog

from lorafleet.auth import Caller
from lorafleet.http import HttpError, envelope, error_headers
from router.core.errors import NoReplica, ReplicaUnreachable, RouterError, StreamBroken
from router.core.fleet import Excluded, Replica
from router.core.resolve import Target
from router.dress import dress_vllm
from router.flight import Flight
from router.parts import Parts, Routed
from router.relay.attempt import Attempt, Call, Limits, open_attempt
from router.relay.events import Echo, error_event
from router.relay.front import Exchange, Handler
from router.relay.upstream import Origin
from router.stages import (
    Question,
    decided,
    read,
    request_id,
    resolve_target,
    shown_cached_tokens,
    tokenize,
    warm,
)
from router.tokens import Tokens
from router.waiting import Displaced

log = structlog.get_logger()

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
# Reasons that may mean that the engine died with the request in it.
_DEATHS = frozenset({"no_answer", "engine_dead", "first_event_error"})
_MAX_DEATHS = 2
# Another replica would do no better.
_HOPELESS = frozenset({"no_answer_in_time", "answer_too_large"})
_FORWARDED_HEADERS = (b"traceparent", b"tracestate")


class Inference:
    """The OpenAI routes: read -> authenticate -> resolve -> authorise -> tokenize -> hash -> match -> decide -> open
    -> relay -> record."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        config = parts.config
        self._limits = Limits(config.first_data_timeout_s, config.idle_timeout_s, config.max_answer_bytes)
        self._session_header = config.session_header.lower().encode()
        self._handlers: dict[str, Handler] = {path: partial(self._handle, path) for path in PATHS}

    def route(self, method: str, path: str) -> Handler | None:
        """What answers this, or None: it is not an inference route."""
        handler = self._handlers.get(path)
        return handler if handler is None or method == "POST" else self._wrong_method

    async def _wrong_method(self, exchange: Exchange) -> None:
        message = f"{exchange.path} takes POST, found {exchange.method}"
        _Answer(exchange, request_id(None)).fail(HttpError(405, "method_not_allowed", message))

    async def _handle(self, path: str, exchange: Exchange) -> None:
        answer = _Answer(exchange, request_id(_text(exchange.header(b"x-request-id"))))
        try:
            caller = self._parts.keys.caller(_text(exchange.header(b"authorization")))
            question = read(
                self._parts, answer.request_id, exchange.body, session=_text(exchange.header(self._session_header))
            )
            await self._serve(caller, question, path, answer)
        except (RouterError, HttpError) as exc:
            answer.fail(exc)
        except Exception as exc:
            log.exception("unexpected error", path=path, request_id=answer.request_id)
            answer.fail(
                HttpError(500, "internal_error", f"internal error ({type(exc).__name__}); see the router's log")
            )
        finally:
            self._parts.metrics.requests.labels(path, exchange.status or 499, answer.code).inc()

    async def _serve(self, caller: Caller, question: Question, path: str, answer: "_Answer") -> None:
        parts = self._parts
        target = resolve_target(parts, caller, question)
        tokens = await tokenize(parts, target, question)
        excluded: Excluded = frozenset()
        is_refused = False
        deaths = 0
        for number in itertools.count(1):
            if not is_refused:
                target = await warm(parts, target, excluded)
            flight = await self._begun(caller, target, question, tokens, excluded)
            try:
                attempt = await self._open(flight.routed, question, path, answer)
            except ReplicaUnreachable as exc:
                flight.end()
                replica = flight.routed.decision.replica
                excluded |= {replica.incarnation}
                # An engine that is up and says no will not be another one soon; one that died may be.
                is_refused = exc.reason == "engine_unavailable"
                deaths += exc.reason in _DEATHS
                self._note_failure(exc, replica, number, deaths)
                continue
            except BaseException:
                flight.end()
                raise
            try:
                await self._relay(attempt, caller, question, flight, answer)
            finally:
                attempt.close()
                flight.end()
            return

    async def _begun(
        self, caller: Caller, target: Target, question: Question, tokens: Tokens, excluded: Excluded
    ) -> Flight:
        """decide; again when what a request waited for went and its adapter, or its engine, is back."""
        tries = self._parts.config.max_tries
        for _ in range(tries):
            try:
                return await decided(self._parts, caller, target, question, tokens, excluded)
            except Displaced as exc:
                log.info("displaced while waiting", request_id=question.request_id, why=str(exc))
                target = await warm(self._parts, target, excluded, is_displaced=True)
        raise NoReplica(f"every replica went while this waited, {tries} times", retry_after_s=1.0)

    async def _open(self, routed: Routed, question: Question, path: str, answer: "_Answer") -> Attempt:
        parts, replica = self._parts, routed.decision.replica
        body = dress_vllm(
            question.fields,
            routed.engine_model,
            ask_usage=question.hides_usage,
            report_full=parts.trust.state(replica.id) == "degraded" and parts.feeds.may_repeat(replica.id),
        )
        origin, head = _request_head(replica.engine_url, path)
        more = b"x-request-id: %b\r\ncontent-length: %d\r\n" % (question.request_id.encode(), len(body))
        rank = routed.decision.rank
        if rank is not None:
            more += b"x-data-parallel-rank: %d\r\n" % rank
        for name in _FORWARDED_HEADERS:
            value = answer.exchange.header(name)
            if value is not None:
                more += name + b": " + value + b"\r\n"
        call = Call(
            origin=origin,
            request=head + more + b"\r\n" + body,
            engine_model=routed.engine_model,
            has_adapter=routed.target.adapter is not None,
            replica=replica.id,
            streamed=question.streamed,
        )
        return await open_attempt(parts.pool, call, self._limits)

    async def _relay(
        self, attempt: Attempt, caller: Caller, question: Question, flight: Flight, answer: "_Answer"
    ) -> None:
        parts, routed = self._parts, flight.routed
        if attempt.status < 400:
            # What the engine refuses was never prefilled, and is not in its cache.
            flight.first_token()
        about = _about(attempt, routed, shown_cached_tokens(parts, caller, routed))
        parts.metrics.first_data.labels(routed.target.base_model).observe(parts.clock() - question.read_at)
        echo = Echo(routed.engine_model, routed.target.asked)
        if not attempt.streamed:
            answer.whole(attempt.status, about, echo.whole(attempt.first))
        else:
            answer.begin(attempt.status, about)
            try:
                await attempt.relay(answer.exchange, echo, hide_usage=question.hides_usage)
            except StreamBroken as exc:
                log.warning("stream broken", request_id=question.request_id, error=str(exc), cause=repr(exc.__cause__))
                answer.code = exc.code
                answer.exchange.send(error_event(envelope(exc.status, exc.code, str(exc))))
            answer.exchange.finish()
        flight.compare(attempt.usage())

    def _note_failure(self, exc: ReplicaUnreachable, replica: Replica, attempt: int, deaths: int) -> None:
        parts = self._parts
        log.warning("attempt failed", worker=replica.id, reason=exc.reason, error=str(exc), attempt=attempt)
        parts.metrics.retries.labels(exc.reason).inc()
        parts.discovery.look_now(replica.id)
        # A second engine that dies of it, or one too slow for it, says more about the request than about the engine.
        is_hopeless = deaths >= _MAX_DEATHS or exc.reason in _HOPELESS
        if is_hopeless or attempt >= parts.config.max_tries:
            raise NoReplica(f"{attempt} attempts failed before an answer began; the last: {exc}", retry_after_s=1.0)


class _Answer:
    """The client's side of one request: a head, pieces, an end; or one error, if nothing has been sent."""

    __slots__ = ("code", "exchange", "request_id")

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        self.exchange = exchange
        self.request_id = request_id
        self.code = ""

    def whole(self, status: int, about: str, body: bytes) -> None:
        """An answer that is complete."""
        self.exchange.respond(status, self._headers(about), body)

    def begin(self, status: int, about: str) -> None:
        """The head of a stream; the exchange's `send` and `finish` follow."""
        self.exchange.begin(status, self._headers(about + "cache-control: no-cache\r\n"))

    def fail(self, exc: RouterError | HttpError) -> None:
        """One error answer; silent when a head is out already."""
        if self.exchange.status is not None:
            return
        self.code = exc.code
        headers = {"content-type": "application/json"} | error_headers(exc.status, exc.retry_after_s)
        about = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.whole(exc.status, about, msgspec.json.encode(envelope(exc.status, exc.code, str(exc), exc.param)))

    def _headers(self, about: str) -> bytes:
        return f"x-request-id: {self.request_id}\r\n{about}".encode("latin-1")


def _about(attempt: Attempt, routed: Routed, cached_tokens: int) -> str:
    adapter = routed.target.adapter
    about = (
        f"content-type: {attempt.content_type.decode('latin-1')}\r\n"
        f"x-lorafleet-worker: {routed.decision.replica.id}\r\n"
        f"x-lorafleet-adapter: {(adapter.engine_name or adapter.lora_id) if adapter else 'base'}\r\n"
        f"x-lorafleet-cached-tokens: {cached_tokens}\r\n"
    )
    if attempt.retry_after is not None:
        about += f"retry-after: {attempt.retry_after.decode('latin-1')}\r\n"
    return about


@lru_cache(maxsize=4096)
def _request_head(engine_url: str, path: str) -> tuple[Origin, bytes]:
    """What all requests of a route to one engine have in common."""
    origin = Origin.parse(engine_url)
    head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\n" % (origin.prefix, path.encode(), origin.host_header)
    return origin, head + b"content-type: application/json\r\naccept-encoding: identity\r\n"


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")
