"""One request from its target to an answer that has begun: resolve, authorise, tokenize, match, decide and open.

The last three stages run again, at another replica, while that may help.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType

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
from router.core.failover.exclusions import FailedAttempt, excluded_incarnations
from router.core.failover.verdict import MAX_DEATHS, VERDICTS
from router.core.fleet import Excluded, Incarnation
from router.core.queue.quota import QuotaGrant
from router.core.resolve import RequestTarget
from router.core.schedule.request import HashedRequest
from router.protocols import sglang_generate
from router.protocols.aborted import AbortedAnswer, aborted_answer
from router.protocols.stored_responses import adapter_gone_error, worker_gone_error, worker_of_response
from router.protocols.usage import EngineUsage
from router.request.accounting import record_answer, record_failure
from router.request.dispatched import DispatchedRequest
from router.request.engine_attempt import AttemptLimits, EngineAttempt, open_attempt
from router.request.engine_request import EngineRequest, engine_request, new_response_id
from router.request.parsed_request import TIMEOUT_HEADER, ParsedRequest, request_digest
from router.request.queue import Displaced
from router.request.services import Services
from router.request.stages import (
    dispatch,
    hash_prompt,
    prefill_tokens,
    resolve_target,
    tokenize,
    wait_for_adapter,
    wait_for_inspection,
)
from router.telemetry.trace import Trace
from router.tokenizing.tokens import Tokens

log = structlog.get_logger()


class _HeldByPause(Exception):
    """A pause began while the request waited for an engine: it has not started."""


# While a whole answer takes longer than usual: seconds between two checks that its engine works on it.
_PROGRESS_CHECK_S = 5.0
# Finding an adapter that is loaded takes microseconds, its load tenths of a second.
_LEAST_COLD_S = 0.005
_NO_FAILURES: Mapping[Incarnation, FailedAttempt] = MappingProxyType({})


class RequestRun(msgspec.Struct, eq=False):
    """One request and what its stages have found. Call `accounting.record` when it is over, however it ended.

    target, tokens, hashed        of the stages resolve, tokenize and hash; None before
    keeper                        the engine that keeps the earlier response which this request continues
    failures                      the last failed attempt of each replica
    excluded                      the replicas among them that may not get this request now
    attempts                      how many there were, the one under way included
    deaths                        engines that may have died of this request
    dispatched, engine_request    of the attempt under way, or of the one that was answered
    attempt                       the attempt that was answered
    is_held                       it waits for its adapter, or did so when it ended
    cold_s                        seconds that it has waited for its adapter to be loaded
    away_s                        seconds that it has waited for a replica of its base model to come back
    paused_s                      seconds that it has waited for the end of a pause
    queued_s                      seconds that it has waited for room, before the attempt under way
    failed_s                      seconds of its failed attempts
    has_failed                    it ends in an error of ours
    outcome                       of that error, for the metrics of the adapter; None: it does not count there
    background_id                 a response that its engine goes on with after our answer, or without its client
    is_computed                   an engine has computed an answer that the client does not get
    last_worker                   of the last failed attempt
    is_aborted                    a pause ends it
    is_trial                      the attempt tries a replica whose circuit is half-open
    """

    services: Services
    limits: AttemptLimits
    caller: Caller
    request: ParsedRequest
    trace: Trace | None = None
    cumulative: sglang_generate.CumulativeStream | None = None
    granted: QuotaGrant | None = None
    target: RequestTarget | None = None
    tokens: Tokens | None = None
    hashed: HashedRequest | None = None
    keeper: Incarnation | None = None
    excluded: Excluded = frozenset()
    failures: Mapping[Incarnation, FailedAttempt] = _NO_FAILURES
    attempts: int = 0
    deaths: int = 0
    dispatched: DispatchedRequest | None = None
    engine_request: EngineRequest | None = None
    attempt: EngineAttempt | None = None
    usage: EngineUsage | None = None
    is_held: bool = False
    cold_s: float = 0.0
    away_s: float = 0.0
    paused_s: float = 0.0
    queued_s: float = 0.0
    failed_s: float = 0.0
    has_failed: bool = False
    outcome: RoutingOutcome | None = None
    background_id: str = ""
    is_computed: bool = False
    is_trial: bool = False
    is_in_background: bool = False
    is_aborted: bool = False
    last_worker: str = ""
    _may_wait: bool = True
    _last_failure: str = ""
    _opening: EngineAttempt | None = None

    async def reach_engine(self) -> None:
        """Run the stages up to an engine's answer, then in `attempt`, with retries. The client has got no part of it.

        The results of the stages are set on this run. After deaths, one such request runs at a time on an engine.
        raises  RouterError
        """
        if self._must_wait_for_pause():
            await self._wait_at_gate()
        await self._resolve()
        await self._tokenize()
        await next_stage()
        while True:
            try:
                await self._wait_for_adapter()
                if self.deaths:
                    await self._open_alone()
                else:
                    await self._decide()
                    await self._open()
            except _HeldByPause:
                await self._wait_for_pause()
            except ReplicaUnreachable as exc:
                self._check_retry(exc)
            except NoReplica as exc:
                if not self._last_failure:
                    raise
                message = f"{exc}; the last attempt: {self._last_failure}"
                raise NoReplica(message, retry_after_s=exc.retry_after_s or 1.0) from exc
            else:
                return

    def _must_wait_for_pause(self) -> bool:
        """Whether a pause holds this request. A route that takes no slot at an engine is never held."""
        return self.request.route.computes and self.services.pauses.must_wait(self)

    async def _wait_at_gate(self) -> None:
        """Wait until no pause holds the request. Raises Saturated, DeadlineExceeded."""
        began_at = self.services.clock()
        try:
            await self.services.pauses.wait(self.caller, self.request.size_bytes, self.request.deadline_at)
        finally:
            self.paused_s += self.services.clock() - began_at

    async def _wait_for_pause(self) -> None:
        """Give back what the request has at a replica, wait until its pause is over, and resolve its name anew.

        A pause is mostly made for new weights: those under this name now are what the client wants. Where the name is
        gone, the request keeps its target. Raises Saturated, DeadlineExceeded.
        """
        if self.dispatched is not None:
            self.queued_s += self.dispatched.record.waited_s
            self.dispatched.end()
        self.dispatched = self.engine_request = self.hashed = None
        self.attempts -= 1
        await self._wait_at_gate()
        assert self.target is not None
        if self.request.route.state == "none":
            with suppress(ModelNotFound, AdapterFailed):
                target = resolve_target(self.services, self.caller, self.request)
                if target.base_model == self.target.base_model:  # its tokens are those of the base model
                    self.target = target

    def abort(self) -> None:
        """End the request at its engine, because of a pause: the client gets an answer that ends with `abort`.

        A request between two attempts ends with its next one.
        """
        self.is_aborted = True
        attempt = self.attempt or self._opening
        if attempt is not None:
            attempt.abort(self._answer_to_abort())

    def _answer_to_abort(self) -> AbortedAnswer | None:
        """The end of the answer after an abort; None: its format has no word for that, or the request was not sent."""
        request, dispatched = self.request, self.dispatched
        if dispatched is None or self.engine_request is None:
            return None
        return aborted_answer(
            request.route.path,
            request.fields,
            answer_id=request.request_id,
            model=self.engine_request.engine_model,
            choices=request.sequences,
            prompt_tokens=dispatched.hashed.request.prompt_tokens,
        )

    def _begin_attempt(self, attempt: EngineAttempt) -> None:
        """Note the attempt under way; end it at once where a pause has ended the request meanwhile."""
        self._opening = attempt
        if self.is_aborted:
            self.abort()

    async def _resolve(self) -> None:
        """resolve and authorise: set `target`.

        Waits for the fleet where this router has just started, and for the inspection of an adapter whose base model
        it shows. Asks the orchestrator about a name that is unknown here.
        For a response that its engine keeps, see `_prepare_stored_response`.

        raises  HeldBack, and what `resolve_target`, `_prepare_stored_response` and a cold start raise
        """
        trace, services = self.trace, self.services
        discovery = services.discovery
        if discovery.is_starting_up:
            await leave_batch()
            await discovery.wait_for_first_worker()
        if trace is not None:
            trace.begin_stage("resolve")
        try:
            try:
                target = resolve_target(services, self.caller, self.request)
            except (ModelNotFound, AdapterFailed):
                if not discovery.can_refresh_catalog:
                    raise
                await leave_batch()
                if not await discovery.refresh_catalog():
                    raise
                target = resolve_target(services, self.caller, self.request)
        except AdapterInspecting as exc:
            await leave_batch()
            self.is_held, began_at = True, services.clock()
            try:
                await wait_for_inspection(services, self.caller, exc.lora_id, self.request)
            finally:
                self.cold_s += services.clock() - began_at
            self.is_held = False
            target = resolve_target(services, self.caller, self.request)
        self.target = target
        self._check_poison(target)
        if self.request.route.state == "makes":
            self._prepare_stored_response(target)

    def _check_poison(self, target: RequestTarget) -> None:
        """Raise HeldBack while this request or adapter is held back as poison.

        Later it is tried alone: `deaths` is set.
        """
        services = self.services
        requests, adapters = services.poison_requests, services.poison_adapters
        if requests.suspects and requests.check_held(request_digest(self.request), services.clock()):
            self.deaths = 1
        if adapters.suspects and target.adapter is not None:
            self.deaths |= adapters.check_held(target.adapter.engine_name, services.clock())

    def _prepare_stored_response(self, target: RequestTarget) -> None:
        """For a response that its engine will keep: take a background one's place, and find its predecessor's engine.

        A request with a predecessor may go only to that engine, and does not wait for others.
        raises  Saturated, ResponseNotFound
        """
        if self.request.decoded.get("background"):
            self.services.background.enter(self.caller.tenant or "")
            self.is_in_background = True
        self.keeper = self._keeper_of_previous(target)
        self._may_wait = self.keeper is None

    def _keeper_of_previous(self, target: RequestTarget) -> Incarnation | None:
        """The engine that keeps the earlier response, read from `previous_response_id`; None: the request names none.

        raises  ResponseNotFound: no router made the id, it is another tenant's, or its worker or adapter is gone
        """
        previous = self.request.decoded.get("previous_response_id")
        if not isinstance(previous, str):
            return None  # none, or one that its engine refuses
        worker = worker_of_response(previous, tenant=self.caller.tenant, param="previous_response_id")
        for replica in self.services.discovery.fleet.roster(target.base_model).replicas:
            if replica.id == worker:
                adapter = target.adapter
                if adapter is not None and adapter.engine_name and adapter.engine_name not in replica.residents:
                    # Nothing loads the adapter there for this request, so that sending it again would not help.
                    raise adapter_gone_error(str(previous), worker, adapter.lora_id, param="previous_response_id")
                return replica.incarnation
        raise worker_gone_error(str(previous), worker, param="previous_response_id")

    async def _tokenize(self) -> None:
        """tokenize: set `tokens`, and charge the caller's key for the prompt. Raises RateLimited."""
        if self.trace is not None:
            self.trace.begin_stage("tokenize")
        assert self.target is not None
        self.tokens = tokens = await tokenize(self.services, self.target, self.request)
        if self.granted is not None:
            roster = self.services.discovery.fleet.roster(self.target.base_model)
            needed = prefill_tokens(roster, self.request, tokens)
            self.services.quotas.charge(self.granted, needed, self.services.clock())

    async def _wait_for_adapter(self) -> None:
        """Begin and count an attempt: wait until a replica that may get this request holds the adapter."""
        self.attempts += 1
        if self._may_wait:
            if self.trace is not None:
                self.trace.begin_stage("warm")
            await self._wait_until_servable()
        if self.trace is not None:
            self.trace.begin_stage("decide")

    async def _wait_until_servable(self, *, is_displaced: bool = False) -> None:
        """Wait until a replica may serve the request.

        Where its target or exclusions have changed, set them, and clear `hashed`, so that it is hashed again. A request
        whose adapter is deleted meanwhile, or fails, goes on with what its name points at now.
        """
        while True:
            try:
                await self._wait_for_target(is_displaced=is_displaced)
            except (ModelNotFound, AdapterFailed):
                if not await self._follow_name():
                    raise
            else:
                return

    async def _follow_name(self) -> bool:
        """Set the target to the adapter that the request's name points at now; whether that is another one.

        A version is deleted when its name has left it, and so it may be while a request waits for it to be loaded.
        """
        services, target = self.services, self.target
        if target is None or target.adapter is None or self.keeper is not None:
            return False
        if services.discovery.can_refresh_catalog:
            await services.discovery.refresh_catalog()
        with suppress(ModelNotFound, AdapterFailed, AdapterInspecting):
            found = resolve_target(services, self.caller, self.request)
            # Its tokens are those of the base model.
            is_other = found.adapter is not None and found.adapter.lora_id != target.adapter.lora_id
            if is_other and found.base_model == target.base_model:
                self.target, self.hashed = found, None
                return True
        return False

    async def _wait_for_target(self, *, is_displaced: bool) -> None:
        """Wait until a replica may serve the request's target, see `_wait_until_servable`."""
        target = self.target
        assert target is not None
        self.is_held, began_at = target.adapter is not None, self.services.clock()
        try:
            servable = await wait_for_adapter(
                self.services,
                self.caller,
                target,
                self.request,
                self._excluded_now,
                tokens=self.tokens,
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
        excluded_now = self._excluded_now()
        if servable is not target or excluded_now != self.excluded:
            self.target, self.excluded, self.hashed = servable, excluded_now, None

    def _excluded_now(self) -> Excluded:
        """The replicas that failed this request for a reason that is not over."""
        if not self.failures:
            return self.excluded
        fleet, breaker = self.services.discovery.fleet, self.services.scheduler.breaker
        return excluded_incarnations(self.failures, fleet.replicas, breaker.last_success_at)

    async def _decide(self) -> None:
        """hash, match and decide: set `dispatched`, as soon as a replica has room.

        Where every replica went away while the request was queued, decides again; raises NoReplica after `max_tries`.
        """
        services, request, tokens = self.services, self.request, self.tokens
        assert tokens is not None
        most = services.config.max_tries
        for _ in range(most):
            hashed = self.hashed
            if hashed is None:
                hashed = self.hashed = self._hash(self.keeper)
            assert self.target is not None
            await next_stage()
            began_at, is_again = services.clock(), self.attempts > 1
            try:
                self.dispatched = await dispatch(
                    services, self.caller, self.target, request, hashed, tokens.source, began_at, is_again=is_again
                )
            except Displaced as exc:
                self.queued_s += services.clock() - began_at
                log.info("displaced while waiting", request_id=request.request_id, why=str(exc))
                await self._wait_until_servable(is_displaced=True)
            except BaseException:
                self.queued_s += services.clock() - began_at
                raise
            else:
                self.dispatched.record.tenant = self.caller.tenant or ""
                return
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    def _hash(self, only: Incarnation | None = None) -> HashedRequest:
        """The hashed request for the replicas that are not excluded, or for `only` one. `hashed` stays as it is."""
        assert self.target is not None
        assert self.tokens is not None
        return hash_prompt(self.services, self.target, self.request, self.tokens, self.excluded, only)

    async def _open(self) -> None:
        """open: send the request, wait until its `attempt` is decided, and record the answer.

        Sets `engine_request`, `attempt` and, for a background response, its id. Raises ReplicaUnreachable, and
        _HeldByPause where a pause began before the request started.
        """
        dispatched, tokens = self.dispatched, self.tokens
        assert dispatched is not None
        assert tokens is not None
        await next_stage()
        if self.request.route.computes and not self.services.pauses.start(self):
            raise _HeldByPause
        if self.trace is not None:
            self.trace.begin_stage("open", **{"lorafleet.worker": dispatched.replica.id})
        response_id = ""
        if self.request.route.state == "makes":
            response_id = new_response_id(self.request, dispatched.replica, self.caller.tenant)
            if self.request.decoded.get("background"):
                self.background_id = response_id
        outgoing = engine_request(self.services, self.request, dispatched, tokens, response_id)
        self.engine_request = outgoing
        await next_stage()
        limits = self._attempt_limits(dispatched)
        self.attempt = await open_attempt(self.services.pool, outgoing, limits, self._begin_attempt)
        if not self.is_aborted:
            record_answer(self.services, self.attempt, dispatched)

    async def _open_alone(self) -> None:
        """decide and open a request that an engine may have died of: one such request at a time at each engine.

        So they do not take down the next engine together, and the one that did it is known. While it waits for the
        others it is not counted at its replica. Raises NoReplica after `max_tries`.
        """
        services, most = self.services, self.services.config.max_tries
        await leave_batch()
        for _ in range(most):
            engine = self.keeper or services.scheduler.decide(self._hash(), services.clock()).replica.incarnation
            async with services.alone(engine):
                self.hashed = self._hash(engine)
                try:
                    await self._decide()
                except NoReplica:
                    continue  # the replica went away while others had their turn
                await self._open()
                return
        raise NoReplica(f"every replica went while this waited, {most} times", retry_after_s=1.0)

    def _check_retry(self, exc: ReplicaUnreachable) -> None:
        """Record a failed attempt, exclude its replica; return where another may follow (`core.failover.verdict`).

        raises  NoReplica, NoAnswerInTime, AnswerTooLarge: it gets none
        """
        dispatched, verdict = self.dispatched, VERDICTS[exc.reason]
        if dispatched is None:
            raise exc
        replica, services = dispatched.replica, self.services
        self.queued_s += dispatched.record.waited_s
        self.failed_s += services.clock() - dispatched.load.began_at
        self.deaths += verdict.retry == "alone"
        if record_failure(self, exc, dispatched):
            self.deaths = MAX_DEATHS
        self.dispatched = self.engine_request = self.attempt = self.hashed = None
        self.last_worker = replica.id
        failure = FailedAttempt(exc.reason, services.clock(), has_start_time(replica.engine_boot_id))
        self.excluded |= {replica.incarnation}
        self.failures = {**self.failures, replica.incarnation: failure}
        self._last_failure = str(exc)
        self._may_wait = verdict.may_wait
        if verdict.retry == "never":
            if exc.reason == "answer_too_large":
                self.is_computed = True
                raise AnswerTooLarge(str(exc)) from exc
            if not self.is_trial:
                raise no_answer_in_time(exc) from exc
        # A second engine that dies of it says more about the request than about the engine.
        is_hopeless = self.deaths >= MAX_DEATHS or self.attempts >= services.config.max_tries
        now, sent_at = services.clock(), dispatched.load.began_at
        may_retry = not verdict.costs_budget or services.scheduler.take_retry(replica, now, sent_at=sent_at)
        if is_hopeless or not may_retry:
            message = f"{self.attempts} attempts failed before an answer began; the last: {exc}"
            raise NoReplica(message, retry_after_s=1.0)
        if self.keeper is not None:
            raise NoReplica(f"only worker {replica.id!r} keeps the earlier response: {exc}") from exc

    def _attempt_limits(self, dispatched: DispatchedRequest) -> AttemptLimits:
        """The limits of this attempt: longer for whole answers and client deadlines, shorter for a trial.

        Sets `is_trial`.
        """
        limits, config, request = self.limits, self.services.config, self.request
        self.is_trial = self.services.scheduler.breaker.is_trial(dispatched.replica, dispatched.load)
        # A whole answer arrives all at once, which may take long where all is well.
        if not request.streamed:
            return replace(
                limits, first_data_s=self._first_data_s(), longer=partial(self._deadline_at_work, dispatched)
            )
        if self.is_trial:
            return replace(limits, first_data_s=min(limits.first_data_s, config.trial_timeout_s))
        return limits if request.deadline_at is None else replace(limits, first_data_s=self._first_data_s())

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
