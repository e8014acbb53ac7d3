"""One request from its target to an answer that has begun: resolve, authorise, tokenize, match, decide and open.

The last three stages run again, at another replica, while that may help.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec
import structlog

from lorafleet.engine.agentless import has_start_time
from lorafleet.http_server.batches import leave_batch, next_stage
from lorafleet.keys.roles import Caller
from router.core.errors import (
    AdapterFailed,
    AdapterInspecting,
    AnswerTooLarge,
    ModelNotFound,
    NoAnswerInTime,
    NoReplica,
    ReplicaUnreachable,
    RoutingOutcome,
)
from router.core.failover.circuit_breaker import is_fault
from router.core.failover.exclusions import AttemptFailure, excluded_incarnations
from router.core.failover.verdict import MAX_DEATHS, VERDICTS
from router.core.fleet import Excluded, Incarnation, RouterFleet
from router.core.kv.index import WorkerId
from router.core.queue.quota import QuotaGrant
from router.core.resolve import RequestTarget
from router.protocols import sglang_generate
from router.protocols.aborted import aborted_answer
from router.request.dispatched import end_dispatched, record_death
from router.request.engine_attempt import AttemptLimits, EngineAttempt, EngineReach
from router.request.engine_request import engine_message, new_response_id
from router.request.parsed_request import TIMEOUT_HEADER, ParsedRequest, request_digest
from router.request.queue import Displaced
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.request.stages import (
    dispatch,
    hash_prompt,
    keeper_of_previous,
    prefill_tokens,
    resolve_target,
    servable_now,
    tokenize,
    wait_for_adapter,
    wait_for_inspection,
)
from router.telemetry.trace import Trace
from router.tokenizing.tokens import Tokens

log = structlog.get_logger()

Stage = Literal["resolve", "tokenize", "decide", "open", "relay"]
"""The stages in which a request may end once it was read."""


class Gateway(EngineReach, Protocol):
    """The gateway that sends a request to the engine that is picked: once, and to no engine but those it allows."""

    def barred(self, fleet: RouterFleet) -> Excluded:
        """The replicas that the gateway does not allow."""


class _HeldByPause(Exception):
    """A pause began while the request waited for an engine: it has not started."""


# While a whole answer takes longer than usual: seconds between two checks that its engine works on it.
_PROGRESS_CHECK_S = 5.0
# Finding an adapter that is loaded takes microseconds, its load tenths of a second.
_LEAST_COLD_S = 0.005
_NO_FAILURES: Mapping[Incarnation, AttemptFailure] = MappingProxyType({})


class RequestRun(msgspec.Struct, eq=False):
    """One request on its way to an answer: its attempts and failures. Call `accounting.record` however it ends.

    Each stage takes the result of the one before (RequestTarget, Tokens, HashedRequest, DispatchedRequest,
    EngineAttempt) and returns its own. Here is what the end of a request counts, whichever stage it has reached.

    stage                  the stage under way, or the one in which it ended
    target                 of the stage resolve; None before
    dispatched, attempt    of the attempt under way, or of the one that was answered
    attempts               how many there were, the one under way included
    failures               the last failed attempt of each replica, the latest one last
    excluded               the replicas among them that may not get this request now
    deaths                 engines that may have died of this request
    is_held                it waits for its adapter, or did so when it ended
    cold_s                 seconds that it has waited for its adapter to be loaded
    away_s                 seconds that it has waited for a replica of its base model to come back
    paused_s               seconds that it has waited for the end of a pause
    queued_s               seconds that it has waited for room, before the attempt under way
    failed_s               seconds of its failed attempts
    outcome                of an error of ours, for the metrics of the adapter; "uncounted": it does not count there.
                           None: there was none
    is_in_background       its engine goes on after our answer, and without its client; it has a place in `Background`
    is_aborted             a pause ends it
    gateway                sends the request to its engine; None: the router itself does
    """

    services: Services
    limits: AttemptLimits
    caller: Caller
    request: ParsedRequest
    trace: Trace | None = None
    cumulative: sglang_generate.CumulativeStream | None = None
    granted: QuotaGrant | None = None
    stage: Stage = "resolve"
    target: RequestTarget | None = None
    dispatched: DispatchedRequest | None = None
    attempt: EngineAttempt | None = None
    attempts: int = 0
    failures: Mapping[Incarnation, AttemptFailure] = _NO_FAILURES
    excluded: Excluded = frozenset()
    deaths: int = 0
    is_held: bool = False
    cold_s: float = 0.0
    away_s: float = 0.0
    paused_s: float = 0.0
    queued_s: float = 0.0
    failed_s: float = 0.0
    outcome: RoutingOutcome | Literal["uncounted"] | None = None
    is_in_background: bool = False
    is_aborted: bool = False
    gateway: Gateway | None = None

    @property
    def answer(self) -> EngineAttempt | None:
        """The attempt that was answered; None: none was yet."""
        return self.attempt if self.stage == "relay" else None

    @property
    def last_failed_worker(self) -> WorkerId | None:
        """The worker of the last failed attempt."""
        return list(self.failures)[-1][0] if self.failures else None

    async def reach_engine(self) -> tuple[DispatchedRequest, EngineAttempt]:
        """Run the stages up to an engine's answer, with retries. The client has got no part of it.

        After deaths, one such request runs at a time on an engine. raises  RouterError
        """
        services, request, trace = self.services, self.request, self.trace
        if services.pauses.in_force and request.route.computes and services.pauses.must_wait(self):
            await self._wait_for_pause()
        if services.discovery.is_starting_up:
            await leave_batch()
            await services.discovery.wait_for_first_worker()
        if trace is not None:
            trace.begin_stage("resolve")
        try:
            target = resolve_target(services, self.caller, request)
        except (ModelNotFound, AdapterFailed):
            if not services.discovery.can_refresh_catalog:
                raise
            await leave_batch()
            if not await services.discovery.refresh_catalog():
                raise
            target = await self._resolve_inspected()
        except AdapterInspecting:
            await leave_batch()
            target = await self._resolve_inspected()
        self.target = target
        if services.poison_requests.suspects or services.poison_adapters.suspects:
            self._check_poison(target)
        if request.route.state == "makes":
            target = self.target = self._enter_stored_response(target)
        self.stage = "tokenize"
        if trace is not None:
            trace.begin_stage("tokenize")
        tokens = await tokenize(services, self.caller, target, request)
        if self.granted is not None:
            needed = prefill_tokens(services.discovery.fleet.roster(target.base_model), request, tokens)
            services.quotas.charge(self.granted, needed, services.clock())
        await next_stage()
        return await self._try_replicas(target, tokens)

    async def _try_replicas(self, target: RequestTarget, tokens: Tokens) -> tuple[DispatchedRequest, EngineAttempt]:
        """Decide and open until a replica has answered, or none may be tried any more. Raises RouterError."""
        # A request that continues another goes to the engine that has it, and does not wait for others.
        services, may_wait, last_error = self.services, target.only is None, ""
        while True:
            self.attempts += 1
            self.stage = "decide"
            try:
                if may_wait:
                    if self.trace is not None:
                        self.trace.begin_stage("warm")
                    excluded = self._excluded_now()
                    found = servable_now(services, target, self.request, tokens, excluded)
                    if found is None:
                        target = await self._servable(target, tokens)
                    else:
                        self.target, self.excluded, target = found, excluded, found
                if self.trace is not None:
                    self.trace.begin_stage("decide")
                if self.deaths:
                    return await self._open_alone(target, tokens)
                dispatched = await self._decide(target, tokens)
                return dispatched, await self._open(dispatched)
            except _HeldByPause:
                target = await self._resolve_after_pause(target)
            except ReplicaUnreachable as exc:
                self._check_retry(exc, target)
                may_wait, last_error = VERDICTS[exc.reason].may_wait, str(exc)
            except NoReplica as exc:
                if not last_error:
                    raise
                message = f"{exc}; the last attempt: {last_error}"
                raise NoReplica(message, retry_after_s=exc.retry_after_s or 1.0) from exc

    # --- pauses ---------------------------------------------------------------------------------------------------

    async def _wait_for_pause(self) -> None:
        """Wait until no pause holds the request. Raises Saturated, DeadlineExceeded."""
        began_at = self.services.clock()
        try:
            await self.services.pauses.wait(self.caller, self.request.size_bytes, self.request.deadline_at)
        finally:
            self.paused_s += self.services.clock() - began_at

    async def _resolve_after_pause(self, target: RequestTarget) -> RequestTarget:
        """Give back what the request has at a replica, wait until its pause is over, and resolve its name anew.

        A pause is mostly made for new weights: those under this name now are what the client wants. Where the name is
        gone, the request keeps its target. Raises Saturated, DeadlineExceeded.
        """
        self.stage = "decide"
        if self.dispatched is not None:
            self.queued_s += self.dispatched.waited_s
            end_dispatched(self.services, self.dispatched)
            self.dispatched = None
        self.attempts -= 1
        await self._wait_for_pause()
        if self.request.route.state == "none":
            with suppress(ModelNotFound, AdapterFailed):
                found = resolve_target(self.services, self.caller, self.request)
                if found.base_model == target.base_model:  # its tokens are those of the base model
                    self.target = target = found
        return target

    def abort(self) -> None:
        """End the request at its engine, because of a pause: the client gets an answer that ends with `abort`.

        A request between two attempts ends with its next one.
        """
        self.is_aborted = True
        request, dispatched, attempt = self.request, self.dispatched, self.attempt
        if dispatched is None or attempt is None:
            return
        attempt.abort(
            aborted_answer(
                request.route.path,
                request.fields,
                answer_id=request.request_id,
                model=attempt.message.engine_model,
                choices=request.sequences,
                prompt_tokens=dispatched.decision.request.prompt_tokens,
            )
        )

    # --- resolve --------------------------------------------------------------------------------------------------

    async def _resolve_inspected(self) -> RequestTarget:
        """resolve, once more; an adapter whose base model is not known yet is waited for.

        raises  what `resolve_target` and a cold start raise
        """
        services = self.services
        try:
            return resolve_target(services, self.caller, self.request)
        except AdapterInspecting as exc:
            lora_id = exc.lora_id
        self.is_held, began_at = True, services.clock()
        try:
            await wait_for_inspection(services, self.caller, lora_id, self.request)
        finally:
            self.cold_s += services.clock() - began_at
        self.is_held = False
        return resolve_target(services, self.caller, self.request)

    def _check_poison(self, target: RequestTarget) -> None:
        """Raise HeldBack while this request or adapter is held back as poison.

        Later it is tried alone: `deaths` is set.
        """
        requests, adapters = self.services.poison_requests, self.services.poison_adapters
        if requests.suspects and requests.check_held(request_digest(self.request), self.services.clock()):
            self.deaths = 1
        if adapters.suspects and target.adapter is not None:
            self.deaths |= adapters.check_held(target.adapter.engine_name, self.services.clock())

    def _enter_stored_response(self, target: RequestTarget) -> RequestTarget:
        """For a response that its engine will keep: take a background one's place, and find its predecessor's engine.

        raises  Saturated, ResponseNotFound
        """
        if self.request.decoded.get("background"):
            self.services.background.enter(self.caller.tenant or "")
            self.is_in_background = True
        keeper = keeper_of_previous(self.services, self.caller, self.request, target)
        return target if keeper is None else msgspec.structs.replace(target, only=keeper)

    # --- the wait for an adapter ----------------------------------------------------------------------------------

    async def _servable(self, target: RequestTarget, tokens: Tokens, *, is_displaced: bool = False) -> RequestTarget:
        """The target, once a replica may serve it; sets `excluded`.

        A request whose adapter is deleted meanwhile, or fails, goes on with what its name points at now.
        """
        while True:
            try:
                self.target = found = await self._wait_for_adapter(target, tokens, is_displaced=is_displaced)
            except (ModelNotFound, AdapterFailed):
                renamed = await self._follow_name(target)
                if renamed is None:
                    raise
                self.target = target = renamed
            else:
                self.excluded = self._excluded_now()
                return found

    async def _follow_name(self, target: RequestTarget) -> RequestTarget | None:
        """The adapter that the request's name points at now, where that is another one than the target's.

        A version is deleted when its name has left it, and so it may be while a request waits for it to be loaded.
        """
        services = self.services
        if target.adapter is None or target.only is not None:
            return None
        if services.discovery.can_refresh_catalog:
            await services.discovery.refresh_catalog()
        with suppress(ModelNotFound, AdapterFailed, AdapterInspecting):
            found = resolve_target(services, self.caller, self.request)
            # Its tokens are those of the base model.
            is_other = found.adapter is not None and found.adapter.lora_id != target.adapter.lora_id
            if is_other and found.base_model == target.base_model:
                return found
        return None

    async def _wait_for_adapter(self, target: RequestTarget, tokens: Tokens, *, is_displaced: bool) -> RequestTarget:
        """The target, once a replica may serve it, see `wait_for_adapter`; counts the wait."""
        self.is_held, began_at = target.adapter is not None, self.services.clock()
        try:
            servable = await wait_for_adapter(
                self.services,
                self.caller,
                target,
                self.request,
                tokens,
                self._excluded_now,
                is_displaced=is_displaced,
            )
        finally:
            waited_s = self.services.clock() - began_at
            if waited_s > _LEAST_COLD_S:
                if self.is_held:
                    self.cold_s += waited_s
                else:
                    self.away_s += waited_s
        self.is_held = False
        return servable

    def _excluded_now(self) -> Excluded:
        """The replicas that failed this request for a reason that is not over, or that its gateway does not allow."""
        if self.gateway is not None:
            return self.excluded | self.gateway.barred(self.services.discovery.fleet)
        if not self.failures:
            return self.excluded
        fleet, breaker = self.services.discovery.fleet, self.services.scheduler.breaker
        return excluded_incarnations(self.failures, fleet.replicas, breaker.last_success_at)

    # --- decide and open ------------------------------------------------------------------------------------------

    async def _decide(self, target: RequestTarget, tokens: Tokens) -> DispatchedRequest:
        """hash, match and decide: the request at a replica, as soon as one has room.

        Where every replica went away while the request was queued, decides again; raises NoReplica after `max_tries`.
        """
        services, request = self.services, self.request
        most = services.config.max_tries
        for _ in range(most):
            hashed = hash_prompt(services, self.caller, target, request, tokens, self.excluded)
            await next_stage()
            began_at, is_again = services.clock(), self.attempts > 1
            try:
                dispatched = await dispatch(
                    services, self.caller, target, request, hashed, tokens, began_at, is_again=is_again
                )
            except Displaced as exc:
                self.queued_s += services.clock() - began_at
                log.info("displaced while waiting", request_id=request.request_id, why=str(exc))
                target = await self._servable(target, tokens, is_displaced=True)
            except BaseException:
                self.queued_s += services.clock() - began_at
                raise
            else:
                self.dispatched, self.stage = dispatched, "open"
                return dispatched
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    async def _open(self, dispatched: DispatchedRequest) -> EngineAttempt:
        """open: send the request, wait until its attempt is decided, and record the answer.

        Raises ReplicaUnreachable, and _HeldByPause where a pause began before the request started.
        """
        await next_stage()
        services, request = self.services, self.request
        if request.route.computes:
            if services.pauses.in_force and services.pauses.must_wait(self):
                raise _HeldByPause
            services.pauses.running.add(self)
        if self.trace is not None:
            self.trace.begin_stage("open", **{"lorafleet.worker": dispatched.replica.id})
        response_id = ""
        if request.route.state == "makes":
            response_id = new_response_id(request, dispatched.replica, self.caller.tenant)
        message = engine_message(services, request, dispatched, response_id)
        await next_stage()
        self.attempt = attempt = EngineAttempt(message, self._attempt_limits(dispatched), message.streamed)
        if self.is_aborted:
            self.abort()
        await attempt.open(services.pool if self.gateway is None else self.gateway)
        self.stage = "relay"
        if not self.is_aborted:
            self._record_answer(attempt, dispatched)
        return attempt

    def _record_answer(self, attempt: EngineAttempt, dispatched: DispatchedRequest) -> None:
        """Report an answer to the replica's circuit: a success below 400, a failure for an engine's fault."""
        scheduler, now, sent_at = self.services.scheduler, self.services.clock(), dispatched.load.began_at
        if attempt.status < 400:
            scheduler.record_success(dispatched.replica, now, sent_at)
        elif is_fault(attempt.status):
            scheduler.record_failure(dispatched.replica, "engine_error", now, sent_at=sent_at)

    async def _open_alone(self, target: RequestTarget, tokens: Tokens) -> tuple[DispatchedRequest, EngineAttempt]:
        """decide and open a request that an engine may have died of: one such request at a time at each engine.

        So they do not take down the next engine together, and the one that did it is known. While it waits for the
        others it is not counted at its replica. Raises NoReplica after `max_tries`.
        """
        services, most = self.services, self.services.config.max_tries
        await leave_batch()
        for _ in range(most):
            engine = target.only
            if engine is None:
                hashed = hash_prompt(services, self.caller, target, self.request, tokens, self.excluded)
                engine = services.scheduler.decide(hashed, services.clock()).replica.incarnation
            async with services.alone(engine):
                try:
                    dispatched = await self._decide(msgspec.structs.replace(target, only=engine), tokens)
                except NoReplica:
                    continue  # the replica went away while others had their turn
                return dispatched, await self._open(dispatched)
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    # --- failed attempts ------------------------------------------------------------------------------------------

    def _check_retry(self, exc: ReplicaUnreachable, target: RequestTarget) -> None:
        """Record a failed attempt, exclude its replica; return where another may follow (`core.failover.verdict`).

        raises  NoReplica, NoAnswerInTime, AnswerTooLarge: it gets none
        """
        dispatched, verdict = self.dispatched, VERDICTS[exc.reason]
        if dispatched is None:
            raise exc
        replica, services = dispatched.replica, self.services
        now, sent_at = services.clock(), dispatched.load.began_at
        self.queued_s += dispatched.waited_s
        self.failed_s += now - sent_at
        self.deaths += verdict.retry == "alone"
        self._record_failure(exc, dispatched)
        self.dispatched, self.attempt, self.stage = None, None, "decide"
        failure = AttemptFailure(exc.reason, services.clock(), has_start_time(replica.engine_boot_id))
        others = {incarnation: old for incarnation, old in self.failures.items() if incarnation != replica.incarnation}
        self.excluded |= {replica.incarnation}
        self.failures = {**others, replica.incarnation: failure}
        if verdict.retry == "never":
            if exc.reason == "answer_too_large":
                raise AnswerTooLarge(str(exc)) from exc
            if not dispatched.is_trial:
                raise no_answer_in_time(exc) from exc
        # A second engine that dies of it says more about the request than about the engine.
        most_tries = services.config.max_tries if self.gateway is None else 1
        is_hopeless = self.deaths >= MAX_DEATHS or self.attempts >= most_tries
        may_retry = not verdict.costs_budget or services.scheduler.try_take_retry(
            replica, services.clock(), sent_at=sent_at
        )
        if is_hopeless or not may_retry:
            message = f"{self.attempts} attempts failed before an answer began; the last: {exc}"
            raise NoReplica(message, retry_after_s=1.0)
        if target.only is not None:
            raise NoReplica(f"only worker {replica.id!r} keeps the earlier response: {exc}") from exc

    def _record_failure(self, exc: ReplicaUnreachable, dispatched: DispatchedRequest) -> None:
        """End the dispatched request of a failed attempt, and report the failure to circuit, poison books and metrics.

        Also polls the worker now. Where the request is held back from now on, as poison, `deaths` says so.
        """
        services, verdict, replica = self.services, VERDICTS[exc.reason], dispatched.replica
        end_dispatched(services, dispatched, is_error="adapter" in verdict.blames)
        if "request" in verdict.blames and record_death(services, self.request, self.caller, dispatched):
            self.deaths = MAX_DEATHS
        log.warning(
            "attempt failed",
            request_id=self.request.request_id,
            worker=replica.id,
            reason=exc.reason,
            error=str(exc),
            cause=str(exc.__cause__ or ""),
            attempt=self.attempts,
        )
        if self.trace is not None:
            self.trace.fail_stage(exc.reason)
        services.metrics.retries.labels(exc.reason).inc()
        services.scheduler.record_failure(replica, exc.reason, services.clock(), sent_at=dispatched.load.began_at)
        services.discovery.poll_now(replica.id)

    # --- limits ---------------------------------------------------------------------------------------------------

    def _attempt_limits(self, dispatched: DispatchedRequest) -> AttemptLimits:
        """The limits of this attempt: longer for whole answers and client deadlines, shorter for a trial."""
        limits, config, request = self.limits, self.services.config, self.request
        first_data_s, longer = limits.first_data_s, None
        if not request.streamed:
            # A whole answer arrives all at once, which may take long where all is well.
            first_data_s, longer = self._first_data_s(), partial(self._deadline_at_work, dispatched)
        elif dispatched.is_trial:
            first_data_s = min(first_data_s, config.trial_timeout_s)
        elif request.deadline_at is None:
            return limits
        else:
            first_data_s = self._first_data_s()
        return AttemptLimits(first_data_s, limits.idle_s, limits.answer_bytes, longer)

    def _first_data_s(self) -> float:
        """Seconds to wait for the first token, or the whole answer: more where the client waits longer, in bounds."""
        usual_s, deadline_at = self.limits.first_data_s, self.request.deadline_at
        if deadline_at is None:
            return usual_s
        return max(usual_s, min(self.services.config.max_answer_s, deadline_at - self.services.clock()))

    def _deadline_at_work(self, dispatched: DispatchedRequest, now: float) -> float:
        """The next deadline of a whole answer: later where its engine is seen to work on it; `now` where it is not."""
        config, replica = self.services.config, self.services.discovery.fleet.replicas.get(dispatched.replica.id)
        if replica is None or replica.incarnation != dispatched.replica.incarnation:
            return now
        if not replica.is_at_work(now, fresh_s=config.unreachable_after_s, still_s=config.breaker_silent_s):
            return now
        return min(now + _PROGRESS_CHECK_S, dispatched.load.began_at + config.max_answer_s)


def no_answer_in_time(exc: ReplicaUnreachable) -> NoAnswerInTime:
    """The error for a client whose answer took too long: sent again it would take as long."""
    return NoAnswerInTime(
        f"{exc}: it took longer than first_data_timeout_s allows, or its engine was not seen to work on it; stream it,"
        f" ask for less, or say in {TIMEOUT_HEADER} how long you wait"
    )
