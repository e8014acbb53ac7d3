"""One inference route as an ASGI app: the stages in order, retries before the first byte, and the answer."""

import asyncio
import itertools
from collections.abc import Mapping

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from lorafleet.auth import Caller
from lorafleet.http import HttpError, envelope, error_headers
from router.core.errors import NoReplica, ReplicaUnreachable, RouterError, StreamBroken
from router.core.fleet import Excluded, Replica
from router.core.resolve import Target
from router.dress import dress_vllm
from router.flight import Flight
from router.parts import Parts, Routed
from router.proxy import Call, Echo, Limits, Opened, error_event, open_answer, relay
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
_FORWARDED_HEADERS = ("traceparent", "tracestate")


class Inference:
    """One OpenAI route as an ASGI app: read -> authenticate -> resolve -> authorise -> tokenize -> hash -> match ->
    decide -> open -> relay -> record."""

    def __init__(self, parts: Parts, path: str) -> None:
        self._parts = parts
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answer = _Answer(send, request_id(headers))
        work: asyncio.Task[None] | None = None
        gone: asyncio.Task[None] | None = None
        try:
            caller = self._parts.keys.caller(headers.get("authorization"))
            question = await read(self._parts, answer.request_id, headers, receive)
            work = asyncio.create_task(self._serve(caller, question, headers, answer))
            # The client's leaving is watched throughout: a stopped read would lose its FIN, and the engine would
            # go on computing for nobody.
            gone = asyncio.create_task(_disconnected(receive))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        except (RouterError, HttpError) as exc:
            await answer.fail(exc)
        except Exception as exc:
            log.exception("unexpected error", path=self._path, request_id=answer.request_id)
            await answer.fail(
                HttpError(500, "internal_error", f"internal error ({type(exc).__name__}); see the router's log")
            )
        finally:
            for task in (work, gone):
                if task is not None and not task.done():
                    task.cancel()
            await asyncio.gather(*(task for task in (work, gone) if task is not None), return_exceptions=True)
            self._parts.metrics.requests.labels(self._path, answer.status or 499, answer.code).inc()

    async def _serve(self, caller: Caller, question: Question, headers: Mapping[str, str], answer: "_Answer") -> None:
        parts = self._parts
        target = resolve_target(parts, caller, question)
        tokens = await tokenize(parts, target, question)
        excluded: Excluded = frozenset()
        is_refused = False
        deaths = 0
        for attempt in itertools.count(1):
            if not is_refused:
                target = await warm(parts, target, excluded)
            flight = await self._begun(caller, target, question, tokens, excluded)
            routed = flight.routed
            target = routed.target
            try:
                opened = await self._open(routed, question, headers)
            except ReplicaUnreachable as exc:
                flight.end()
                replica = routed.decision.replica
                excluded |= {replica.incarnation}
                # An engine that is up and says no will not be another one soon; one that died may be.
                is_refused = exc.reason == "engine_unavailable"
                deaths += exc.reason in _DEATHS
                self._note_failure(exc, replica, attempt, deaths)
                continue
            except BaseException:
                flight.end()
                raise
            try:
                await self._relay(opened, routed, caller, question, flight, answer)
                flight.compare(opened.usage)
            finally:
                opened.close()
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

    async def _open(self, routed: Routed, question: Question, headers: Mapping[str, str]) -> Opened:
        parts, config, replica = self._parts, self._parts.config, routed.decision.replica
        sent = {"content-type": "application/json", "accept-encoding": "identity", "x-request-id": question.request_id}
        sent |= {name: headers[name] for name in _FORWARDED_HEADERS if name in headers}
        rank = routed.decision.rank
        if rank is not None:
            sent["x-data-parallel-rank"] = str(rank)
        call = Call(
            url=replica.engine_url + self._path,
            body=dress_vllm(
                question.fields,
                routed.engine_model,
                ask_usage=question.hides_usage,
                report_full=parts.trust.state(replica.id) == "degraded" and parts.feeds.may_repeat(replica.id),
            ),
            headers=sent,
            engine_model=routed.engine_model,
            has_adapter=routed.target.adapter is not None,
            replica=replica.id,
        )
        limits = Limits(
            config.connect_timeout_s, config.first_data_timeout_s, config.idle_timeout_s, config.max_answer_bytes
        )
        return await open_answer(self._parts.session, call, limits, streamed=question.streamed)

    async def _relay(
        self, opened: Opened, routed: Routed, caller: Caller, question: Question, flight: "Flight", answer: "_Answer"
    ) -> None:
        parts = self._parts
        if opened.status < 400:
            # What the engine refuses was never prefilled, and is not in its cache.
            flight.first_token()
        about = _about(opened, routed, shown_cached_tokens(parts, caller, routed))
        parts.metrics.first_data.labels(routed.target.base_model).observe(parts.clock() - question.read_at)
        echo = Echo(routed.engine_model, routed.target.asked)
        if not opened.streamed:
            await answer.whole(opened.status, about, echo.whole(opened.first))
            return
        await answer.begin(opened.status, about)
        try:
            await relay(opened, echo, answer.send, hide_usage=question.hides_usage)
        except StreamBroken as exc:
            log.warning("stream broken", request_id=question.request_id, error=str(exc))
            answer.code = exc.code
            await answer.send(error_event(envelope(exc.status, exc.code, str(exc))))
        await answer.finish()

    def _note_failure(self, exc: ReplicaUnreachable, replica: Replica, attempt: int, deaths: int) -> None:
        parts = self._parts
        log.warning("attempt failed", worker=replica.id, reason=exc.reason, error=str(exc), attempt=attempt)
        parts.metrics.retries.labels(exc.reason).inc()
        parts.discovery.look_now(replica.id)
        # A second engine that dies of it, or one too slow for it, says more about the request than about the engine.
        is_hopeless = deaths >= _MAX_DEATHS or exc.reason == "no_answer_in_time"
        if is_hopeless or attempt >= parts.config.max_tries:
            raise NoReplica(f"{attempt} attempts failed before an answer began; the last: {exc}", retry_after_s=1.0)


class _Answer:
    """The client's side of one request: a head, pieces, an end; or one error, if nothing has been sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None
        self.code = ""

    async def whole(self, status: int, about: Mapping[str, str], body: bytes) -> None:
        """An answer that is complete."""
        await self._head(status, {**about, "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, status: int, about: Mapping[str, str]) -> None:
        """The head of a stream; `send` and `finish` follow."""
        await self._head(status, {**about, "cache-control": "no-cache"})

    async def send(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, exc: RouterError | HttpError) -> None:
        """One error answer; silent when a head is out already."""
        if self.status is not None:
            return
        self.code = exc.code
        body = msgspec.json.encode(envelope(exc.status, exc.code, str(exc), exc.param))
        await self._head(
            exc.status,
            {"content-type": "application/json", "content-length": str(len(body))}
            | error_headers(exc.status, exc.retry_after_s),
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        named = {"x-request-id": self.request_id, **headers}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
            }
        )


def _about(opened: Opened, routed: Routed, cached_tokens: int) -> dict[str, str]:
    adapter = routed.target.adapter
    return {
        "content-type": opened.content_type,
        "x-lorafleet-worker": routed.decision.replica.id,
        "x-lorafleet-adapter": (adapter.engine_name or adapter.lora_id) if adapter else "base",
        "x-lorafleet-cached-tokens": str(cached_tokens),
    }


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
