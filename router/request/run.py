"""One request from what it names to an answer that has begun: decide -> open, again elsewhere while that may help."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from secrets import token_hex
from types import MappingProxyType

import msgspec
import structlog

from lorafleet.engine.agentless import tells_start
from lorafleet.http_server.batches import leave_batch, next_stage
from lorafleet.service.auth import Caller
from router.core.errors import (
    AdapterFailed,
    AnswerTooLarge,
    ModelNotFound,
    NoAnswerInTime,
    NoReplica,
    ReplicaUnreachable,
)
from router.core.failover.circuit_breaker import is_fault
from router.core.failover.exclusions import FailedAttempt, excluded
from router.core.failover.poison import PoisonRequests
from router.core.fleet import Excluded, Incarnation, Replica
from router.core.queue.fair_queue import HashedRequest
from router.core.queue.quota import QuotaGrant
from router.core.resolve import RequestTarget
from router.http.engine_pool import Origin
from router.protocols import sglang_generate
from router.protocols.routes import Route
from router.protocols.stored_responses import (
    adapter_gone_error,
    tagged_response_id,
    worker_gone_error,
    worker_of_response,
)
from router.protocols.usage import EngineUsage
from router.request.dispatched import DispatchedRequest
from router.request.engine_attempt import AttemptLimits, EngineAttempt, EngineRequest, open_attempt
from router.request.engine_body import EngineOptions, dialect_of, may_send_ids, salt_for
from router.request.queue import Displaced
from router.request.services import Services
from router.request.stages import (
    TIMEOUT_HEADER,
    ParsedRequest,
    answered,
    asked,
    digest_of,
    dispatch,
    is_one_of_many,
    resolve_target,
    sized,
    tokenize,
    warm,
)
from router.telemetry.trace import AttributeValue, Trace
from router.tokenizing.tokenizers import Tokens

log = structlog.get_logger()

# Reasons that may mean that the engine died with the request in it.
_DEATHS = frozenset({"no_answer", "begun_only", "engine_dead", "first_event_error", "hung"})
_MAX_DEATHS = 2
# How often it is looked whether an engine still works on a whole answer that takes longer than usual.
_LOOKED_AGAIN_S = 5.0
# Of these what an engine that lives does not say of a request that it can't take.
_KILLED = frozenset({"no_answer", "engine_dead", "hung"})
# What may be the doing of what ran; that nobody was there, or had no room or no such adapter, is the fleet's.
_FAULTS = _DEATHS | {"no_answer_in_time"}
# What an engine says that is up: waiting for it to start again, or loading an adapter elsewhere, would not help.
_REFUSALS = frozenset({"engine_unavailable", "engine_unauthorized", "first_event_error"})
_COMPUTED_NOTHING = "adapter_missing"
_NO_FAILURES: Mapping[Incarnation, FailedAttempt] = MappingProxyType({})


class RequestRun(msgspec.Struct, eq=False):
    """What one request meets on its way. `end` it, however that goes.

    target, tokens, prompt  what it asks for, once that is known
    only                    the engine that keeps the earlier response, where it follows up on one
    failures, excluded      how each replica failed it last, and those of them that must not get it again yet
    deaths                  how many replicas it may have killed
    flight, call, attempt   of the try under way, or of the one that was answered
    background_id           of a response that its engine goes on with when we have answered, or its client has left
    """

    services: Services
    limits: AttemptLimits
    caller: Caller
    question: ParsedRequest
    trace: Trace | None = None
    grows: sglang_generate.CumulativeStream | None = None
    granted: QuotaGrant | None = None
    target: RequestTarget | None = None
    tokens: Tokens | None = None
    prompt: HashedRequest | None = None
    only: Incarnation | None = None
    excluded: Excluded = frozenset()
    failures: Mapping[Incarnation, FailedAttempt] = _NO_FAILURES
    tries: int = 0
    deaths: int = 0
    flight: DispatchedRequest | None = None
    call: EngineRequest | None = None
    attempt: EngineAttempt | None = None
    usage: EngineUsage | None = None
    background_id: str = ""
    _is_refused: bool = False
    _is_computed: bool = False
    _is_trial: bool = False
    _is_in_background: bool = False
    _last_failure: str = ""

    async def reach_engine(self) -> None:
        """Run the stages up to the answer of an engine, which is then `attempt`; nothing of it has gone to the client.

        resolve -> authorise -> tokenize -> match -> decide -> open; the last three again, elsewhere, while that helps.

        raises  RouterError
        """
        await self._resolve()
        await self._tokenize()
        while True:
            try:
                await self._wait_for_adapter()
                if self.deaths:
                    await self._open_alone()
                else:
                    await self._decide()
                    await self._open()
            except ReplicaUnreachable as exc:
                self._failed(exc)
            except NoReplica as exc:
                if not self._last_failure:
                    raise
                message = f"{exc}; the last attempt: {self._last_failure}"
                raise NoReplica(message, retry_after_s=exc.retry_after_s or 1.0) from exc
            else:
                return

    def learn(self) -> None:
        """Take what a whole answer says of itself."""
        assert self.attempt is not None
        assert self.flight is not None
        self.usage = usage = self.attempt.usage()
        if usage is not None:
            self.flight.compare(usage, is_one_of_many=is_one_of_many(self.question))
        if self.trace is not None:
            self.trace.attributes |= _told(self.question.route, self.flight, usage)

    def limit_headers(self) -> str:
        """Header lines: where the caller's key stands; empty for a key without limits."""
        return header_lines(self.services.quotas.headers(self.granted, self.services.clock())) if self.granted else ""

    def end(self) -> None:
        """It is over, however it ended: what it counts for and its connection are free, an answer that is not whole is
        aborted, and the key is charged for what the engine counted; where it did not say, for the prompt and for each
        event that was sent on.
        """
        attempt, flight, usage, services = self.attempt, self.flight, self.usage, self.services
        if self.background_id and self._runs_on():
            return
        if self._is_in_background:
            self._is_in_background = False
            services.background.leave(self.caller.tenant or "")
        # One whose client left before its answer began was worked on all the same.
        is_served, output_tokens = flight is not None or self._is_computed, 0
        is_error = False
        if attempt is not None:
            status, is_broken = attempt.status, attempt.failure is not None and attempt.is_broken
            is_error = status >= 500 or is_broken
            is_served = status < 400 and (status > 0 or attempt.failure is None)
            output_tokens = attempt.events
            has_suspects = services.poison_requests.suspects or services.poison_adapters.suspects
            if flight is not None and (has_suspects or is_broken):
                self._tell_deadly(attempt, flight)
            attempt.close()
        if usage is not None:
            output_tokens = usage.completion_tokens or 0
        if flight is not None:
            if attempt is None:
                flight.end()
            else:
                decode_s = flight.end(is_error=is_error, is_streamed=attempt.streamed, output_tokens=output_tokens)
                answered(services, self.caller, flight.target, decode_s)
        if self.granted is not None:
            services.quotas.settle(
                self.granted,
                services.clock(),
                completion_tokens=output_tokens,
                prompt_tokens=usage.prompt_tokens if usage else (None if is_served else 0),
            )

    def _runs_on(self) -> bool:
        """Whether its engine goes on with it: then it is over when that says so, or is gone."""
        attempt, flight, granted, services, caller = self.attempt, self.flight, self.granted, self.services, self.caller
        if flight is None or self.usage is not None or (attempt is not None and attempt.status >= 400):
            return False
        if attempt is not None:
            attempt.close()

        # Without the journey, which has the whole body.
        def over(usage: EngineUsage | None, shown_tokens: int) -> None:
            output_tokens = shown_tokens
            if usage is not None:
                output_tokens = usage.completion_tokens or 0
                if flight.record.first_data_s is None:
                    flight.whole()
                flight.compare(usage)
            answered(services, caller, flight.target, flight.end(output_tokens=output_tokens))
            if granted is not None:
                prompt_tokens = usage.prompt_tokens if usage else None
                services.quotas.settle(
                    granted, services.clock(), completion_tokens=output_tokens, prompt_tokens=prompt_tokens
                )

        services.background.follow(
            self.background_id,
            flight.replica.incarnation,
            caller.tenant or "",
            over,
            shown_tokens=attempt.events if attempt is not None else 0,
        )
        return True

    def _take(self, attempt: EngineAttempt, flight: DispatchedRequest) -> None:
        """Tell the circuit breaker what an answer that is the client's says of its engine."""
        scheduler, status, sent_at = self.services.scheduler, attempt.status, flight.load.began_at
        if status < 400:
            scheduler.record_success(flight.replica, self.services.clock(), sent_at)
        elif is_fault(status):
            # The client's to have, and a word against the engine all the same.
            scheduler.record_failure(flight.replica, "engine_error", self.services.clock(), sent_at=sent_at)

    def _failed(self, exc: ReplicaUnreachable) -> None:
        """Note that the try failed; `begun` goes on with another.

        raises  NoReplica when another would not help, or may not be made
        """
        flight = self.flight
        if flight is None:
            raise exc
        flight.end(is_error=exc.reason in _FAULTS)
        if exc.reason in _KILLED:
            self._died(flight)
        self.flight = self.call = self.attempt = self.prompt = None
        there = flight.replica.incarnation
        failure = FailedAttempt(exc.reason, self.services.clock(), tells_start(flight.replica.engine_boot_id))
        self.excluded, self.failures = self.excluded | {there}, {**self.failures, there: failure}
        self._last_failure = str(exc)
        # An engine that is up and says no will not be another one soon; one that died may be.
        self._is_refused = exc.reason in _REFUSALS
        self._note(exc, flight)
        if self.only is not None:
            raise NoReplica(f"only worker {flight.replica.id!r} keeps the earlier response: {exc}") from exc

    def _tell_deadly(self, attempt: EngineAttempt, flight: DispatchedRequest) -> None:
        """What came of it, where engines have died of late, or its own has just now."""
        if attempt.lost_by in _KILLED and not attempt.has_said_done:
            self._died(flight)
        elif attempt.is_whole:
            for deadly, which in self._suspected(flight):
                deadly.clear(which)

    def _died(self, flight: DispatchedRequest) -> None:
        services, there, sent_at = self.services, flight.replica.incarnation, flight.load.began_at
        for deadly, which in self._suspected(flight):
            held_s = deadly.record_death(which, there, services.clock(), sent_at=sent_at)
            if held_s:
                self.deaths = _MAX_DEATHS
                log.warning(
                    "engines died while this was in them; it is held back",
                    what="adapter" if deadly is services.poison_adapters else "request",
                    request_id=self.question.request_id,
                    adapter=flight.prompt.request.engine_name or "base",
                    worker=there[0],
                    key=self.caller.name,
                    held_s=round(held_s, 1),
                )

    def _suspected(self, flight: DispatchedRequest) -> Iterator[tuple[PoisonRequests, Hashable]]:
        """What an engine may have died of, in which book."""
        yield self.services.poison_requests, digest_of(self.question)
        if flight.prompt.request.engine_name:
            yield self.services.poison_adapters, flight.prompt.request.engine_name

    async def _resolve(self) -> None:
        """resolve -> authorise, within the limits of the caller's key, in a fleet that this router has met.

        What the catalog refuses the orchestrator is asked about.

        raises  HeldBack, and what `resolve_target` raises
        """
        trace, services, limits, question = self.trace, self.services, self.caller.limits, self.question
        discovery = services.discovery
        if discovery.is_starting_up:
            await leave_batch()
            await discovery.wait_for_first_worker()
        if limits is not None and self.granted is None:
            self.granted = services.quotas.take(self.caller.key_id, limits, services.clock())
        if trace is not None:
            trace.begin_stage("resolve")
        try:
            target = resolve_target(services, self.caller, question)
        except (ModelNotFound, AdapterFailed):
            if not discovery.can_refresh_catalog:
                raise
            await leave_batch()
            if not await discovery.refresh_catalog():
                raise
            target = resolve_target(services, self.caller, question)
        self.target = target
        if services.poison_requests.suspects and services.poison_requests.check_held(
            digest_of(question), services.clock()
        ):
            self.deaths = 1
        if services.poison_adapters.suspects and target.adapter is not None:
            self.deaths |= services.poison_adapters.check_held(target.adapter.engine_name, services.clock())
        if question.route.state == "makes":
            if question.decoded.get("background"):
                services.background.enter(self.caller.tenant or "")
                self._is_in_background = True
            self.only = self._holder(target)
            self._is_refused = self.only is not None

    async def _tokenize(self) -> None:
        """tokenize, and charge the caller's key for the prompt."""
        if self.trace is not None:
            self.trace.begin_stage("tokenize")
        assert self.target is not None
        self.tokens = tokens = await tokenize(self.services, self.target, self.question)
        if self.granted is not None:
            needed = sized(self.services.discovery.fleet.roster(self.target.base_model), self.question, tokens)
            self.services.quotas.charge(self.granted, needed, self.services.clock())

    def _holder(self, target: RequestTarget) -> Incarnation | None:
        """The engine that keeps an earlier response that is to be continued."""
        earlier = self.question.decoded.get("previous_response_id")
        if not isinstance(earlier, str):
            return None  # none, or one that its engine refuses
        worker = worker_of_response(earlier, tenant=self.caller.tenant, param="previous_response_id")
        for replica in self.services.discovery.fleet.roster(target.base_model).replicas:
            if replica.id == worker:
                adapter = target.adapter
                if adapter is not None and adapter.engine_name and adapter.engine_name not in replica.residents:
                    # Nothing loads it there for this, so coming back would not help.
                    raise adapter_gone_error(str(earlier), worker, adapter.lora_id, param="previous_response_id")
                return replica.incarnation
        raise worker_gone_error(str(earlier), worker, param="previous_response_id")

    async def _wait_for_adapter(self) -> None:
        """Begin another try: wait until some replica holds the adapter, and may be given this request."""
        self.tries += 1
        if not self._is_refused:
            if self.trace is not None:
                self.trace.begin_stage("warm")
            await self._warm()
        if self.trace is not None:
            self.trace.begin_stage("decide")

    async def _decide(self) -> None:
        """match -> decide; again when what it waited for went and its adapter, or its engine, is back."""
        services, question, tokens = self.services, self.question, self.tokens
        assert tokens is not None
        most = services.config.max_tries
        for _ in range(most):
            prompt = self.prompt
            if prompt is None:
                prompt = self.prompt = self._asked(self.only)
            assert self.target is not None
            await next_stage()
            try:
                is_again = self.tries > 1
                self.flight = await dispatch(
                    services, self.caller, self.target, question, prompt, tokens.source, is_again=is_again
                )
            except Displaced as exc:
                log.info("displaced while waiting", request_id=question.request_id, why=str(exc))
                await self._warm(is_displaced=True)
            else:
                return
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    async def _open_alone(self) -> None:
        """As `_decide` and `_open`. It may be what an engine died of: of such requests an engine gets one at a time, so
        that they do not take the next one down together, and the one that did it is known. Until its turn it counts
        for nothing there.
        """
        services, most = self.services, self.services.config.max_tries
        await leave_batch()
        for _ in range(most):
            there = self.only or services.scheduler.decide(self._asked(), services.clock()).replica.incarnation
            async with services.alone(there):
                self.prompt = self._asked(there)
                try:
                    await self._decide()
                except NoReplica:
                    continue  # it went while others had their turn
                await self._open()
                return
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    async def _warm(self, *, is_displaced: bool = False) -> None:
        target = self.target
        assert target is not None
        warmed = await warm(
            self.services,
            self.caller,
            target,
            self.question,
            self._barred,
            tokens=self.tokens,
            is_displaced=is_displaced,
        )
        barred = self._barred()
        if warmed is not target or barred != self.excluded:
            self.target, self.excluded, self.prompt = warmed, barred, None

    def _barred(self) -> Excluded:
        """The replicas that failed it, for a reason that is not over: there may be nobody else to ask."""
        if not self.failures:
            return self.excluded
        return excluded(
            self.failures, self.services.discovery.fleet.replicas, self.services.scheduler.breaker.last_success_at
        )

    def _asked(self, only: Incarnation | None = None) -> HashedRequest:
        assert self.target is not None
        assert self.tokens is not None
        return asked(self.services, self.target, self.question, self.tokens, self.excluded, only)

    async def _open(self) -> None:
        flight, tokens, trace = self.flight, self.tokens, self.trace
        assert flight is not None
        assert tokens is not None
        await next_stage()
        if trace is not None:
            trace.begin_stage("open", **{"lorafleet.worker": flight.replica.id})
        call = self.call = self._call(flight, tokens)
        await next_stage()
        self.attempt = await open_attempt(self.services.pool, call, self._limits_of(flight))
        self._take(self.attempt, flight)

    def _limits_of(self, flight: DispatchedRequest) -> AttemptLimits:
        limits, config, question = self.limits, self.services.config, self.question
        self._is_trial = self.services.scheduler.breaker.is_trial(flight.replica, flight.load)
        # Of one that is not streamed nothing is heard until all of it is there, which may take long where all is well.
        if not question.streamed:
            return replace(limits, first_data_s=self._first_data_s(), longer=partial(self._works_until, flight))
        if self._is_trial:
            return replace(limits, first_data_s=min(limits.first_data_s, config.trial_timeout_s))
        return limits if question.deadline_at is None else replace(limits, first_data_s=self._first_data_s())

    def _first_data_s(self) -> float:
        """How long its first token, or whole answer, is waited for: longer where its client says so, within a bound."""
        usual_s, deadline_at = self.limits.first_data_s, self.question.deadline_at
        if deadline_at is None:
            return usual_s
        return max(usual_s, min(self.services.config.max_answer_s, deadline_at - self.services.clock()))

    def _works_until(self, flight: DispatchedRequest, now: float) -> float:
        """Until when to wait for a whole answer on which its engine is known to work."""
        config, replica = self.services.config, self.services.discovery.fleet.replicas.get(flight.replica.id)
        if replica is None or replica.incarnation != flight.replica.incarnation:
            return now
        is_at_work = replica.is_at_work(now, fresh_s=config.unreachable_after_s, still_s=config.breaker_silent_s)
        return min(now + _LOOKED_AGAIN_S, flight.load.began_at + config.max_answer_s) if is_at_work else now

    def _call(self, flight: DispatchedRequest, tokens: Tokens) -> EngineRequest:
        services, question, ask = self.services, self.question, flight.prompt.request
        route, replica = question.route, flight.replica
        dialect = dialect_of(replica.dialect, ask.engine_name, route.path)
        model = dialect.model(replica.model_name, ask.engine_name)
        sends_ids = (
            tokens.source == "local"
            and ask.prompt_tokens > _FEW_TOKENS
            and services.config.send_prompt_ids != "off"
            and (route.prompt == "completion" or services.config.send_prompt_ids == "all")
            and may_send_ids(
                route.prompt,
                question.fields,
                prompt_tokens=ask.prompt_tokens,
                max_model_len=replica.max_model_len,
            )
            and services.tokenizers.agrees(replica.incarnation, tokens)
        )
        wishes = EngineOptions(
            question.hides_usage,
            route.generates
            and services.accuracy.state(replica.id) == "degraded"
            and services.feeds.may_repeat(replica.id),
            self._response_id(replica) if route.state == "makes" else "",
            route.prompt,
            tokens.ids if sends_ids else None,
            salt_for(route, ask.engine_name, question.decoded.get("cache_salt")) if replica.is_salted else "",
        )
        door = door_of(replica, services.config.engine_key)
        body = dialect.dress(question.fields, model, wishes)
        return EngineRequest(
            route,
            door.origin,
            door.request(question, body, flight.decision.rank),
            model,
            ask.engine_name,
            replica.id,
            question.streamed,
        )

    def _response_id(self, replica: Replica) -> str:
        given = self.question.decoded.get("request_id")
        if given is not None and not isinstance(given, str):
            return ""  # for the engine to refuse
        is_background = self.question.decoded.get("background")
        if is_background and given is not None:
            # Of two with one id the engine keeps one, and its end would be taken for the other's.
            given = f"{given}-{token_hex(8)}"
        response_id = tagged_response_id(given, token_hex(16), tenant=self.caller.tenant, worker=replica.id)
        if is_background:
            self.background_id = response_id
        return response_id

    def _note(self, exc: ReplicaUnreachable, flight: DispatchedRequest) -> None:
        services, now = self.services, self.services.clock()
        replica, sent_at = flight.replica, flight.load.began_at
        log.warning(
            "attempt failed",
            request_id=self.question.request_id,
            worker=replica.id,
            reason=exc.reason,
            error=str(exc),
            cause=str(exc.__cause__ or ""),
            attempt=self.tries,
        )
        if self.trace is not None:
            self.trace.fail_stage(exc.reason)
        services.metrics.retries.labels(exc.reason).inc()
        services.scheduler.record_failure(replica, exc.reason, now, sent_at=sent_at)
        services.discovery.poll_now(replica.id)
        self.deaths += exc.reason in _DEATHS
        if exc.reason == "answer_too_large":
            self._is_computed = True
            raise AnswerTooLarge(f"{exc}; stream it, or ask for less") from exc
        if exc.reason == "no_answer_in_time" and not self._is_trial:
            raise late(exc) from exc
        # A second engine that dies of it says more about the request than about the engine.
        is_hopeless = self.deaths >= _MAX_DEATHS or self.tries >= services.config.max_tries
        # An engine that lacks the adapter has computed nothing: asking again doubles no load.
        may_retry = exc.reason == _COMPUTED_NOTHING or services.scheduler.take_retry(replica, now, sent_at=sent_at)
        if is_hopeless or not may_retry:
            raise NoReplica(f"{self.tries} attempts failed before an answer began; the last: {exc}", retry_after_s=1.0)


def _told(route: Route, flight: DispatchedRequest, usage: EngineUsage | None) -> dict[str, AttributeValue]:
    """A request's attributes in its trace, by the names of OpenTelemetry's conventions where they have one."""
    told: dict[str, AttributeValue] = {
        "gen_ai.operation.name": route.operation,
        "gen_ai.request.model": flight.target.asked,
        "lorafleet.request_id": flight.record.request_id,
        "lorafleet.worker": flight.replica.id,
        "lorafleet.adapter": flight.prompt.request.engine_name or "base",
        "lorafleet.cached_tokens": flight.predicted_tokens,
        "lorafleet.waited_s": flight.record.waited_s,
    }
    if usage is not None:
        told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        if usage.completion_tokens is not None:
            told["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return told


def late(exc: ReplicaUnreachable) -> NoAnswerInTime:
    """What a client is told whose answer took too long: sent again it would take as long."""
    return NoAnswerInTime(
        f"{exc}: it took longer than first_data_timeout_s allows, or its engine was not seen to work on it; stream it,"
        f" ask for less, or say in {TIMEOUT_HEADER} how long you wait"
    )


def header_lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


# A text of a few hundred characters takes the engine less than its ids take us.
_FEW_TOKENS = 256


class EngineEndpoint(msgspec.Struct, frozen=True):
    """How one engine is reached, and what all requests to it have in common: `after` stands behind the path."""

    origin: Origin
    after: bytes

    def request(self, question: ParsedRequest, body: bytes, rank: int | None = None) -> bytes:
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


def door_of(replica: Replica, engine_key: str) -> EngineEndpoint:
    """The way to a replica's engine. One beside an agent of ours is shown no key."""
    return _door(replica.engine_url, "" if replica.agent_url else engine_key)


@lru_cache(maxsize=4096)
def _door(engine_url: str, key: str) -> EngineEndpoint:
    origin = Origin.parse(engine_url)
    after = b" HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept-encoding: identity\r\n%b"
    return EngineEndpoint(
        origin, after % (origin.host_header, f"authorization: Bearer {key}\r\n".encode() if key else b"")
    )
