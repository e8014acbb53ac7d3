"""One request from what it names to an answer that has begun: decide -> open, again elsewhere while that may help."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from secrets import token_hex

import msgspec
import structlog

from lorafleet.auth import Caller
from router.core.errors import NoReplica, ReplicaUnreachable
from router.core.fleet import Excluded, Replica
from router.core.quota import Granted
from router.core.resolve import Target
from router.dress import Wishes, dialect_of, may_send_ids
from router.flight import Flight
from router.parts import Parts
from router.relay.attempt import Attempt, Call, Limits, open_attempt
from router.relay.upstream import Origin
from router.stages import Question, decided, resolve_target, tokenize, warm
from router.surface import generate
from router.surface.routes import Route
from router.surface.stored import gone, tagged_response_id, worker_of
from router.surface.usage import EngineUsage
from router.tokens import Tokens
from router.tracing import AttributeValue, Trace
from router.waiting import Displaced

log = structlog.get_logger()

# Reasons that may mean that the engine died with the request in it.
_DEATHS = frozenset({"no_answer", "engine_dead", "first_event_error"})
_MAX_DEATHS = 2
# What may be the doing of what ran; that nobody was there, or had no room or no such adapter, is the fleet's.
_FAULTS = _DEATHS | {"no_answer_in_time", "answer_too_large"}
# Another replica would do no better.
_HOPELESS = frozenset({"no_answer_in_time", "answer_too_large"})


class Begun(msgspec.Struct, eq=False):
    """An answer that has begun, nothing of which the client has seen; `close` it, however it ends.

    model  what the engine calls the thing that ran
    """

    flight: Flight
    attempt: Attempt
    model: str

    def close(self) -> None:
        """Free the connection and what the request counts for; an answer that is not over is aborted."""
        attempt = self.attempt
        attempt.close()
        self.flight.end(is_error=attempt.status >= 500 or attempt.is_broken, is_streamed=attempt.streamed)


class Journey(msgspec.Struct, eq=False):
    """What one request meets on its way."""

    parts: Parts
    limits: Limits
    caller: Caller
    question: Question
    trace: Trace | None = None
    grows: generate.Growing | None = None
    deaths: int = 0
    granted: Granted | None = None
    is_served: bool = False
    usage: EngineUsage | None = None

    async def begun(self) -> Begun:
        """The answer of whichever replica gives one; raises RouterError."""
        target, tokens = await self._prepared()
        excluded = self._all_but_holder(target)
        is_pinned = is_refused = bool(excluded)
        attempts = 0
        while True:
            attempts += 1
            if not is_refused:
                if self.trace is not None:
                    self.trace.stage("warm")
                target = await warm(self.parts, self.caller, target, self.question, excluded)
            flight = await self._decided(target, tokens, excluded)
            try:
                return await self._opened(flight, tokens)
            except ReplicaUnreachable as exc:
                flight.end(is_error=exc.reason in _FAULTS)
                replica = flight.replica
                excluded |= {replica.incarnation}
                # An engine that is up and says no will not be another one soon; one that died may be.
                is_refused = exc.reason == "engine_unavailable"
                self._failed(exc, flight, attempts)
                if is_pinned:
                    raise NoReplica(f"only worker {replica.id!r} keeps the earlier response: {exc}") from exc
            except BaseException:
                flight.end()
                raise

    def learn(self, begun: Begun) -> None:
        """Take what a whole answer says of itself."""
        self.usage = begun.attempt.usage()
        begun.flight.compare(self.usage)
        if self.trace is not None:
            self.trace.attributes |= _told(self.question.route, begun.flight, self.usage)

    def limit_headers(self) -> str:
        """Header lines: where the caller's key stands; empty for a key without limits."""
        return header_lines(self.parts.quotas.headers(self.granted, self.parts.clock())) if self.granted else ""

    def settle(self) -> None:
        """It is over, however it ended: the key is charged for what the engine counted."""
        if self.granted is None:
            return
        usage = self.usage
        self.parts.quotas.settle(
            self.granted,
            self.parts.clock(),
            completion_tokens=(usage.completion_tokens or 0) if usage else 0,
            prompt_tokens=usage.prompt_tokens if usage else (None if self.is_served else 0),
        )

    async def _prepared(self) -> tuple[Target, Tokens]:
        """resolve -> authorise -> tokenize, within the limits of the caller's key."""
        trace, parts, limits = self.trace, self.parts, self.caller.limits
        if limits is not None:
            self.granted = parts.quotas.take(self.caller.key_id, limits, parts.clock())
        if trace is not None:
            trace.stage("resolve")
        target = resolve_target(parts, self.caller, self.question)
        if trace is not None:
            trace.stage("tokenize")
        tokens = await tokenize(parts, target, self.question)
        if self.granted is not None:
            needed = self.question.size_bytes // 4 if tokens.ids is None else len(tokens.ids)
            parts.quotas.charge(self.granted, needed, parts.clock())
        return target, tokens

    def _all_but_holder(self, target: Target) -> Excluded:
        """Whom not to ask, where an earlier response is to be continued: everybody but the engine that keeps it."""
        earlier = self.question.decoded.get("previous_response_id") if self.question.route.state == "makes" else None
        if earlier is None:
            return frozenset()
        worker = worker_of(earlier, tenant=self.caller.tenant, param="previous_response_id")
        replicas = self.parts.discovery.fleet.roster(target.base_model).replicas
        if not any(replica.id == worker for replica in replicas):
            raise gone(str(earlier), worker, param="previous_response_id")
        return frozenset(replica.incarnation for replica in replicas if replica.id != worker)

    async def _decided(self, target: Target, tokens: Tokens, excluded: Excluded) -> Flight:
        """match -> decide; again when what it waited for went and its adapter, or its engine, is back."""
        if self.trace is not None:
            self.trace.stage("decide")
        tries = self.parts.config.max_tries
        for _ in range(tries):
            try:
                return await decided(self.parts, self.caller, target, self.question, tokens, excluded)
            except Displaced as exc:
                log.info("displaced while waiting", request_id=self.question.request_id, why=str(exc))
                target = await warm(self.parts, self.caller, target, self.question, excluded, is_displaced=True)
        raise NoReplica(f"every replica went while this waited, {tries} times", retry_after_s=1.0)

    async def _opened(self, flight: Flight, tokens: Tokens) -> Begun:
        if self.trace is not None:
            self.trace.stage("open", **{"lorafleet.worker": flight.replica.id})
        call = self._call(flight, tokens)
        limits = self.limits
        if self.parts.mind.breaker.is_trial(flight.replica, flight.load):
            limits = replace(limits, first_data_s=min(limits.first_data_s, self.parts.config.trial_timeout_s))
        if not self.deaths:
            attempt = await open_attempt(self.parts.pool, call, limits)
        else:
            # It may be what the engine died of: of such requests an engine gets one at a time, so that they do not
            # take the next one down together, and the one that did it is known.
            async with self.parts.alone(flight.replica.incarnation):
                attempt = await open_attempt(self.parts.pool, call, limits)
        replica, now, sent_at = flight.replica, self.parts.clock(), flight.load.began_at
        if attempt.status < 400:
            self.parts.mind.succeeded(replica, now, sent_at=sent_at)
        elif attempt.status >= 500:
            # The client's to have, and a word against the engine all the same.
            self.parts.mind.failed(replica, "engine_error", now, sent_at=sent_at)
        self.is_served = attempt.status < 400
        return Begun(flight, attempt, call.engine_model)

    def _call(self, flight: Flight, tokens: Tokens) -> Call:
        parts, question, ask = self.parts, self.question, flight.prompt.ask
        route, replica = question.route, flight.replica
        dialect = dialect_of(replica.dialect, engine_name=ask.engine_name)
        model = dialect.model(flight.target.base_model, ask.engine_name)
        sends_ids = (
            tokens.source == "local"
            and ask.prompt_tokens > _FEW_TOKENS
            and parts.config.send_prompt_ids != "off"
            and (route.prompt == "completion" or parts.config.send_prompt_ids == "all")
            and may_send_ids(
                route.prompt,
                question.fields,
                prompt_tokens=ask.prompt_tokens,
                max_model_len=replica.max_model_len,
            )
        )
        wishes = Wishes(
            question.hides_usage,
            route.generates and parts.trust.state(replica.id) == "degraded" and parts.feeds.may_repeat(replica.id),
            self._response_id(replica) if route.state == "makes" else "",
            route.prompt,
            tokens.ids if sends_ids else None,
        )
        door = door_of(replica, parts.config.engine_key)
        body = dialect.dress(question.fields, model, wishes=wishes)
        return Call(
            route,
            door.origin,
            door.request(question, body, flight.rank),
            model,
            flight.target.adapter is not None,
            replica.id,
            question.streamed,
        )

    def _response_id(self, replica: Replica) -> str:
        given = self.question.decoded.get("request_id")
        return tagged_response_id(given, token_hex(16), tenant=self.caller.tenant, worker=replica.id)

    def _failed(self, exc: ReplicaUnreachable, flight: Flight, attempt: int) -> None:
        """Note a failed attempt; raises NoReplica when another would not help, or may not be made."""
        parts, now = self.parts, self.parts.clock()
        replica, sent_at = flight.replica, flight.load.began_at
        log.warning(
            "attempt failed",
            request_id=self.question.request_id,
            worker=replica.id,
            reason=exc.reason,
            error=str(exc),
            cause=str(exc.__cause__ or ""),
            attempt=attempt,
        )
        if self.trace is not None:
            self.trace.stage_failed(exc.reason)
        parts.metrics.retries.labels(exc.reason).inc()
        is_trial = parts.mind.breaker.is_trial(replica, flight.load)
        parts.mind.failed(replica, exc.reason, now, sent_at=sent_at)
        parts.discovery.look_now(replica.id)
        self.deaths += exc.reason in _DEATHS
        # A second engine that dies of it, or one too slow for it, says more about the request than about the engine.
        is_hopeless = (
            self.deaths >= _MAX_DEATHS
            or (exc.reason in _HOPELESS and not is_trial)
            or attempt >= parts.config.max_tries
        )
        if is_hopeless or not parts.mind.may_retry(replica, now, sent_at=sent_at):
            raise NoReplica(f"{attempt} attempts failed before an answer began; the last: {exc}", retry_after_s=1.0)


def _told(route: Route, flight: Flight, usage: EngineUsage | None) -> dict[str, AttributeValue]:
    """A request's attributes in its trace, by the names of OpenTelemetry's conventions where they have one."""
    told: dict[str, AttributeValue] = {
        "gen_ai.operation.name": route.operation,
        "gen_ai.request.model": flight.target.asked,
        "lorafleet.request_id": flight.record.request_id,
        "lorafleet.worker": flight.replica.id,
        "lorafleet.adapter": flight.prompt.ask.engine_name or "base",
        "lorafleet.cached_tokens": flight.decision.score.cached_tokens,
        "lorafleet.waited_s": flight.record.waited_s,
    }
    if usage is not None:
        told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        if usage.completion_tokens is not None:
            told["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return told


def header_lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


# A text of a few hundred characters takes the engine less than its ids take us.
_FEW_TOKENS = 256


class Door(msgspec.Struct, frozen=True):
    """How one engine is reached, and what all requests to it have in common: `after` stands behind the path."""

    origin: Origin
    after: bytes

    def request(self, question: Question, body: bytes, rank: int | None = None) -> bytes:
        """The whole HTTP request."""
        wanted = b"" if rank is None else b"x-data-parallel-rank: %d\r\n" % rank
        return b"%b %b%b%bx-request-id: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
            question.route.method.encode(),
            self.origin.prefix,
            question.target,
            self.after,
            question.request_id.encode(),
            len(body),
            wanted,
            question.forwarded,
            body,
        )


def door_of(replica: Replica, engine_key: str) -> Door:
    """The way to a replica's engine. One beside an agent of ours is shown no key."""
    return _door(replica.engine_url, "" if replica.agent_url else engine_key)


@lru_cache(maxsize=4096)
def _door(engine_url: str, key: str) -> Door:
    origin = Origin.parse(engine_url)
    after = b" HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept-encoding: identity\r\n%b"
    return Door(origin, after % (origin.host_header, f"authorization: Bearer {key}\r\n".encode() if key else b""))
