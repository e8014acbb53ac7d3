"""record: what an attempt, and a request's end, mean for load, quotas, circuits, poison books, traces and traffic."""

from collections.abc import Hashable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

import structlog

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from router.core.errors import (
    AdapterFailed,
    DeadlineExceeded,
    RateLimited,
    ReplicaUnreachable,
    RouterError,
    RoutingOutcome,
)
from router.core.failover.circuit_breaker import is_fault
from router.core.failover.poison import PoisonRequests
from router.core.failover.verdict import VERDICTS, reasons_blaming
from router.core.resolve import RequestTarget
from router.fleet.traffic import EndedRequest
from router.protocols.routes import Route
from router.protocols.usage import EngineUsage
from router.request.dispatched import DispatchedRequest
from router.request.engine_attempt import EngineAttempt, says_dead
from router.request.parsed_request import makes_many_sequences, request_digest
from router.request.services import Services
from router.request.stages import fair_weight
from router.telemetry.trace import AttributeValue

if TYPE_CHECKING:
    from router.request.run import RequestRun

log = structlog.get_logger()

# Larger bodies are not sent again to probe an engine's tokenizer.
_MAX_PROBE_BYTES = 256 * 1024
_CLIENT_GONE = 499
_BLAMING_REQUEST = reasons_blaming("request")


def record_answer(services: Services, attempt: EngineAttempt, dispatched: DispatchedRequest) -> None:
    """Report an answer to the replica's circuit: a success below 400, a failure for an engine's fault."""
    scheduler, now, sent_at = services.scheduler, services.clock(), dispatched.load.began_at
    if attempt.status < 400:
        scheduler.record_success(dispatched.replica, now, sent_at)
    elif is_fault(attempt.status):
        scheduler.record_failure(dispatched.replica, "engine_error", now, sent_at=sent_at)


def record_failure(run: "RequestRun", exc: ReplicaUnreachable, dispatched: DispatchedRequest) -> bool:
    """End the dispatched request of a failed attempt, and report the failure to circuit, poison books, metrics and log.

    Also polls the worker now.

    returns  whether this request, or its adapter, is held back from now on, as poison
    """
    services, verdict = run.services, VERDICTS[exc.reason]
    replica, sent_at = dispatched.replica, dispatched.load.began_at
    dispatched.end(is_error="adapter" in verdict.blames)
    is_held_back = "request" in verdict.blames and _record_death(run, dispatched)
    log.warning(
        "attempt failed",
        request_id=run.request.request_id,
        worker=replica.id,
        reason=exc.reason,
        error=str(exc),
        cause=str(exc.__cause__ or ""),
        attempt=run.attempts,
    )
    if run.trace is not None:
        run.trace.fail_stage(exc.reason)
    services.metrics.retries.labels(exc.reason).inc()
    services.scheduler.record_failure(replica, exc.reason, services.clock(), sent_at=sent_at)
    services.discovery.poll_now(replica.id)
    return is_held_back


def record_usage(run: "RequestRun") -> None:
    """Set `run.usage` from an answer that is over; update the accuracy of cache predictions and the trace with it."""
    assert run.attempt is not None
    assert run.dispatched is not None
    run.usage = usage = run.attempt.usage()
    if usage is not None:
        is_one_of_many = makes_many_sequences(run.request)
        agrees = run.dispatched.compare(usage, is_one_of_many=is_one_of_many)
        if not is_one_of_many:
            _record_evidence(run, run.dispatched, usage, agrees)
    if run.trace is not None:
        run.trace.attributes |= _trace_attributes(run.request.route, run.dispatched, usage)


def _record_evidence(run: "RequestRun", dispatched: DispatchedRequest, usage: EngineUsage, agrees: bool | None) -> None:
    """Count an answer for or against our token ids of its prompt; polls workers whose engines are to be probed again.

    agrees  whether the cached tokens are as predicted; None: that says nothing
    """
    request, tokens, services = run.request, run.tokens, run.services
    if tokens is None or tokens.ids is None or not tokens.made_by:
        return
    contradicts = agrees is False or usage.prompt_tokens != len(tokens.ids)
    if not contradicts and agrees is None:
        return
    for worker in services.tokenizers.record_answer(
        dispatched.target.base_model,
        dispatched.replica.incarnation,
        tokens,
        request.decoded if request.size_bytes <= _MAX_PROBE_BYTES else None,
        kind=request.route.prompt,
        contradicts=contradicts,
    ):
        services.discovery.poll_now(worker)


def record_error(run: "RequestRun", exc: RouterError | HttpError) -> None:
    """Set `run.has_failed`, and `run.outcome` to what this error counts for its adapter.

    An adapter that failed its checks is counted at once: the request has no target.
    """
    run.has_failed = True
    run.outcome = exc.outcome if isinstance(exc, RouterError) else "error"
    if isinstance(exc, DeadlineExceeded) and run.is_held:
        run.outcome = "not_loaded"
    elif isinstance(exc, AdapterFailed) and run.target is None:
        run.services.metrics.adapters.of(exc.lora_id).outcomes["error"] += 1


def _record_outcome(run: "RequestRun") -> None:
    """Count the request under its adapter, and the latency of a whole answer."""
    target, attempt = run.target, run.attempt
    outcome = run.outcome if run.has_failed else _outcome(run)
    if target is None or target.adapter is None or outcome is None:
        return
    counts = run.services.metrics.adapters.of(target.adapter.lora_id)
    counts.outcomes[outcome] += 1
    if outcome == "success" and attempt is not None and attempt.status < 400 and attempt.is_whole:
        counts.observe_latency(run.services.clock() - run.request.read_at)


def _outcome(run: "RequestRun") -> RoutingOutcome | None:
    """The outcome of a request without an error of ours; None: its client left before it was routed."""
    if run.attempt is not None:
        return "error" if is_fault(run.attempt.status) or run.attempt.fault else "success"
    if run.is_held:
        return "not_loaded"
    return None if run.dispatched is None else "success"


def record(run: "RequestRun") -> None:
    """End the request: release its load entry, quota and connection. An engine that still computes it aborts.

    A background response goes on instead, and is ended by `Background`. Poison books are updated where engines died.

    Its adapter's metrics count it. The key is charged for the tokens that the engine counted; without usage, for the
    prompt and the events sent on.
    """
    attempt, dispatched, usage, services = run.attempt, run.dispatched, run.usage, run.services
    services.pauses.end(run)
    _record_outcome(run)
    if run.background_id and _hand_to_background(run):
        return
    if run.is_in_background:
        run.is_in_background = False
        services.background.leave(run.caller.tenant or "")
    # A request whose client left before its answer began was computed all the same.
    is_served, output_tokens = dispatched is not None or run.is_computed, 0
    is_error = False
    if attempt is not None:
        status, is_broken = attempt.status, attempt.is_broken
        is_error = status >= 500 or is_broken
        is_served = status < 400 and (status > 0 or attempt.failure is None)
        output_tokens = attempt.events
        has_suspects = services.poison_requests.suspects or services.poison_adapters.suspects
        if dispatched is not None and (has_suspects or is_broken):
            _record_survival(run, attempt, dispatched)
        attempt.close()
    if usage is not None:
        output_tokens = usage.completion_tokens or 0
    if dispatched is not None:
        is_streamed = attempt is not None and attempt.streamed
        decode_s = dispatched.end(is_error=is_error, is_streamed=is_streamed, output_tokens=output_tokens)
        record_decode_time(services, run.caller, dispatched.target, decode_s)
    if run.granted is not None:
        services.quotas.settle(
            run.granted,
            services.clock(),
            completion_tokens=output_tokens,
            prompt_tokens=usage.prompt_tokens if usage else (None if is_served else 0),
        )


def _hand_to_background(run: "RequestRun") -> bool:
    """Hand a response that its engine goes on with to `Background`, which ends the request later. Closes the attempt.

    False, with nothing done, if no engine goes on: none has the request, its usage is known, or the engine refused it.
    """
    attempt, dispatched, granted, services, caller = run.attempt, run.dispatched, run.granted, run.services, run.caller
    if dispatched is None or run.usage is not None or (attempt is not None and attempt.status >= 400):
        return False
    if attempt is not None:
        attempt.close()

    # Without `run`, which holds the whole body.
    def on_over(usage: EngineUsage | None, shown_tokens: int) -> None:
        """End the request with the usage that `Background` has found: release its load, and settle its quota."""
        output_tokens = shown_tokens
        if usage is not None:
            output_tokens = usage.completion_tokens or 0
            if dispatched.record.first_data_s is None:
                dispatched.record_whole_answer()
            dispatched.compare(usage)
        decode_s = dispatched.end(output_tokens=output_tokens)
        record_decode_time(services, caller, dispatched.target, decode_s)
        if granted is not None:
            prompt_tokens = usage.prompt_tokens if usage else None
            services.quotas.settle(
                granted, services.clock(), completion_tokens=output_tokens, prompt_tokens=prompt_tokens
            )

    services.background.follow(
        run.background_id,
        dispatched.replica.incarnation,
        caller.tenant or "",
        on_over,
        shown_tokens=attempt.events if attempt is not None else 0,
    )
    return True


def _record_survival(run: "RequestRun", attempt: EngineAttempt, dispatched: DispatchedRequest) -> None:
    """Update the poison books: a death where the engine died in the middle; a whole answer clears the suspects."""
    is_lost = attempt.loss_reason in _BLAMING_REQUEST and not attempt.is_done_sent
    if is_lost or says_dead(attempt.fault):
        _record_death(run, dispatched)
    elif attempt.is_whole:
        for book, suspect in _suspects(run, dispatched):
            book.clear(suspect)


def _record_death(run: "RequestRun", dispatched: DispatchedRequest) -> bool:
    """Record in the poison books that an engine died with this request, and log a hold; whether it is held back now."""
    services, engine, is_held_back = run.services, dispatched.replica.incarnation, False
    for book, suspect in _suspects(run, dispatched):
        held_s = book.record_death(suspect, engine, services.clock(), sent_at=dispatched.load.began_at)
        if held_s:
            is_held_back = True
            log.warning(
                "engines died while this was in them; it is held back",
                what="adapter" if book is services.poison_adapters else "request",
                request_id=run.request.request_id,
                adapter=dispatched.hashed.request.engine_name or "base",
                worker=engine[0],
                key=run.caller.name,
                held_s=round(held_s, 1),
            )
    return is_held_back


def _suspects(run: "RequestRun", dispatched: DispatchedRequest) -> Iterator[tuple[PoisonRequests, Hashable]]:
    """The request and its adapter, each with the book that has its kind."""
    yield run.services.poison_requests, request_digest(run.request)
    if dispatched.hashed.request.engine_name:
        yield run.services.poison_adapters, dispatched.hashed.request.engine_name


def record_decode_time(services: Services, caller: Caller, target: RequestTarget, decode_s: float) -> None:
    """Charge the tenant, in fair order, for the seconds that its engine decoded a finished answer."""
    waiting, adapter = services.scheduler.queue, target.adapter
    if decode_s and waiting:
        waiting.charge_answer(caller.tenant or "", adapter.lora_id if adapter else "", fair_weight(adapter), decode_s)


def _trace_attributes(
    route: Route, dispatched: DispatchedRequest, usage: EngineUsage | None
) -> dict[str, AttributeValue]:
    """A request's attributes in its trace, by the names of OpenTelemetry's conventions where they have one."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": route.operation,
        "gen_ai.request.model": dispatched.target.asked,
        "lorafleet.request_id": dispatched.record.request_id,
        "lorafleet.worker": dispatched.replica.id,
        "lorafleet.adapter": dispatched.hashed.request.engine_name or "base",
        "lorafleet.cached_tokens": dispatched.predicted_tokens,
        "lorafleet.waited_s": dispatched.record.waited_s,
    }
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        if usage.completion_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return attributes


def count_refusal(services: Services, exchange: HttpExchange, status: int, code: str, limit: str) -> None:
    """Count an answer to a request that had no run: it was refused before its model was known."""
    key, tenant = sender_of(exchange)
    ended = EndedRequest(code=_code_text(status, code, limit), tenant=tenant, key=key)
    services.usage.traffic.record_end(ended, services.clock())


def sender_of(exchange: HttpExchange) -> tuple[str, str]:
    """(key id, tenant) of the caller, also where its body was not read; empty: none."""
    caller, refusal = exchange.caller, exchange.refusal
    if caller is not None:
        return caller.key_id, caller.tenant or ""
    return (refusal.key_id, refusal.tenant) if isinstance(refusal, RateLimited) else ("", "")


def count_run(services: Services, run: "RequestRun", status: int, code: str, limit: str = "") -> None:
    """Count a request that was recorded, with its times and tokens; `status` and `code` are those of its answer."""
    caller, target, dispatched, usage = run.caller, run.target, run.dispatched, run.usage
    now, read_at = services.clock(), run.request.read_at
    ended = EndedRequest(tenant=caller.tenant or "", key=caller.key_id, cold_s=run.cold_s)
    if status >= 400 or code:
        ended.code = _code_text(status, code, limit)
    else:
        ended.whole_s = now - read_at
    if target is not None:
        ended.base_model = target.base_model
        if target.adapter is not None:
            ended.adapter = target.adapter.lora_id
    if dispatched is None:
        ended.worker = run.last_worker
    else:
        record = dispatched.record
        ended.worker, ended.waited_s = dispatched.replica.id, record.waited_s
        if record.first_data_s is not None and run.attempt is not None and run.attempt.streamed:
            ended.first_token_s = dispatched.load.began_at + record.first_data_s - read_at
    if usage is not None:
        ended.prompt_tokens, ended.output_tokens = usage.prompt_tokens, usage.completion_tokens or 0
        # Of several sequences the first tokens are not counted one by one: roughly one each.
        ended.decode_tokens = max(0, ended.output_tokens - run.request.sequences)
        if dispatched is not None and dispatched.record.cached_tokens is not None:
            ended.predicted_tokens, ended.cached_tokens = dispatched.predicted_tokens, dispatched.record.cached_tokens
    services.usage.traffic.record_end(ended, now)


def _code_text(status: int, code: str, limit: str) -> str:
    """`<status> <code>`; of an engine's own error without one `<status> engine`; of a client that left `499`.

    Of 429 with the limit that was reached: `429 rate_limited concurrent_requests`.
    """
    if status == _CLIENT_GONE:
        return str(status)
    text = f"{status} {code or 'engine'}"
    return f"{text} {limit}" if limit and status == HTTPStatus.TOO_MANY_REQUESTS else text
