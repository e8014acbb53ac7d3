"""record: what an attempt, and a request's end, mean for load, quotas, circuits, poison books, traces and traffic."""

from http import HTTPStatus
from typing import NamedTuple

import structlog

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from orchestrator.model.usage import Spent
from router.core.errors import (
    AdapterFailed,
    DeadlineExceeded,
    RateLimited,
    RouterError,
    RoutingOutcome,
)
from router.core.failover.circuit_breaker import is_fault
from router.core.failover.verdict import VERDICTS, reasons_blaming
from router.core.resolve import RequestTarget
from router.fleet.traffic import add_error, add_first_token, add_tokens, add_whole
from router.protocols.routes import Route
from router.protocols.usage import EngineUsage
from router.request.dispatched import compare_usage, end_dispatched, record_death, record_whole_answer, suspects
from router.request.engine_attempt import EngineAttempt, says_dead
from router.request.parsed_request import makes_many_sequences
from router.request.record import DispatchedRequest
from router.request.run import RequestRun
from router.request.services import Services
from router.request.stages import fair_weight
from router.telemetry.trace import AttributeValue

log = structlog.get_logger()

# Larger bodies are not sent again to probe an engine's tokenizer.
_MAX_PROBE_BYTES = 256 * 1024
_CLIENT_GONE = 499
_BLAMING_REQUEST = reasons_blaming("request")


def record_usage(run: RequestRun, dispatched: DispatchedRequest, answer: EngineAttempt) -> None:
    """Keep the usage of an answer that is over; update the accuracy of cache predictions and the trace with it."""
    dispatched.usage = usage = answer.usage()
    if usage is not None:
        is_one_of_many = makes_many_sequences(run.request)
        agrees = compare_usage(run.services, dispatched, usage, is_one_of_many=is_one_of_many)
        if not is_one_of_many and dispatched.prompt.made_by:
            _record_evidence(run, dispatched, usage, agrees)
    if run.trace is not None:
        run.trace.attributes |= _trace_attributes(run.request.route, dispatched)


def _record_evidence(run: RequestRun, dispatched: DispatchedRequest, usage: EngineUsage, agrees: bool | None) -> None:
    """Count an answer for or against our token ids of its prompt; polls workers whose engines are to be probed again.

    agrees  whether the cached tokens are as predicted; None: that says nothing
    """
    request, tokens, services = run.request, dispatched.prompt, run.services
    contradicts = agrees is False or usage.prompt_tokens != len(tokens.ids or ())
    if tokens.ids is None or (not contradicts and agrees is None):
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


def record_error(run: RequestRun, exc: RouterError | HttpError) -> None:
    """Set `run.outcome` to what this error counts for its adapter.

    An adapter that failed its checks is counted at once: the request has no target.
    """
    run.outcome = (exc.outcome if isinstance(exc, RouterError) else "error") or "uncounted"
    if isinstance(exc, DeadlineExceeded) and run.is_held:
        run.outcome = "not_loaded"
    elif isinstance(exc, AdapterFailed) and run.target is None:
        run.services.metrics.adapters.of(exc.lora_id).outcomes["error"] += 1


def _record_outcome(run: RequestRun, lora_id: str, answer: EngineAttempt | None) -> None:
    """Count the request under its adapter, and the latency of a whole answer."""
    outcome = run.outcome or _routing_outcome(run, answer)
    if outcome is None or outcome == "uncounted":
        return
    counts = run.services.metrics.adapters.of(lora_id)
    counts.outcomes[outcome] += 1
    if outcome == "success" and answer is not None and answer.status < 400 and answer.is_whole:
        counts.observe_latency(run.services.clock() - run.request.read_at)


def _routing_outcome(run: RequestRun, answer: EngineAttempt | None) -> RoutingOutcome | None:
    """The outcome of a request without an error of ours; None: its client left before it was routed."""
    if answer is not None:
        return "error" if is_fault(answer.status) or answer.fault else "success"
    if run.is_held:
        return "not_loaded"
    return None if run.dispatched is None else "success"


def record(run: RequestRun) -> None:
    """End the request: release its load entry, quota and connection. An engine that still computes it aborts.

    A background response goes on instead, and is ended by `Background`. Poison books are updated where engines died.

    Its adapter's metrics count it. The key is charged for the tokens that the engine counted; without usage, for the
    prompt and the events sent on.
    """
    answer, dispatched, services = run.answer, run.dispatched, run.services
    services.pauses.running.discard(run)
    if services.pauses.awaited:
        services.pauses.settle(run)
    if run.target is not None and run.target.adapter is not None:
        _record_outcome(run, run.target.adapter.lora_id, answer)
    if run.is_in_background:
        if dispatched is not None and _hand_to_background(run, dispatched):
            return
        run.is_in_background = False
        services.background.leave(run.caller.tenant or "")
    is_error, output_tokens = False, 0
    # A request whose client left before its answer began was computed all the same.
    is_served = dispatched is not None or _is_too_large(run)
    if answer is not None:
        is_broken = answer.is_broken
        is_error = answer.status >= 500 or is_broken
        is_served = answer.status < 400 and (answer.status > 0 or answer.failure is None)
        output_tokens = answer.events
        has_suspects = services.poison_requests.suspects or services.poison_adapters.suspects
        if dispatched is not None and (has_suspects or is_broken):
            _record_survival(run, answer, dispatched)
        answer.close()
    usage = None
    if dispatched is not None:
        usage = dispatched.usage
        if usage is not None:
            output_tokens = usage.completion_tokens or 0
        dispatched.is_computed = is_served
        decode_s = end_dispatched(services, dispatched, is_error=is_error, output_tokens=output_tokens)
        if decode_s and is_served and services.scheduler.queue:
            record_decode_time(services, run.caller, dispatched.target, decode_s)
    if run.granted is not None:
        services.quotas.settle(
            run.granted,
            services.clock(),
            completion_tokens=output_tokens,
            prompt_tokens=usage.prompt_tokens if usage else (None if is_served else 0),
        )


def _is_too_large(run: RequestRun) -> bool:
    """Whether an engine has computed an answer that the client does not get, because it is too large."""
    return any(failed.reason == "answer_too_large" for failed in run.failures.values())


def _hand_to_background(run: RequestRun, dispatched: DispatchedRequest) -> bool:
    """Hand a response that its engine goes on with to `Background`, which ends the request later. Closes the attempt.

    False, with nothing done, if no engine goes on: none has the request, its usage is known, or the engine refused it.
    """
    answer, granted, services, caller = run.answer, run.granted, run.services, run.caller
    response_id = "" if run.attempt is None else run.attempt.message.response_id
    if not response_id or dispatched.usage is not None or (answer is not None and answer.status >= 400):
        return False
    if answer is not None:
        answer.close()

    # Without `run`, which holds the whole body.
    def on_over(usage: EngineUsage | None, shown_tokens: int) -> None:
        """End the request with the usage that `Background` has found: release its load, and settle its quota."""
        output_tokens = shown_tokens
        if usage is not None:
            output_tokens = usage.completion_tokens or 0
            if dispatched.first_data_s is None:
                record_whole_answer(services, dispatched)
            compare_usage(services, dispatched, usage)
        decode_s = end_dispatched(services, dispatched, output_tokens=output_tokens)
        _count_background(services, caller, dispatched, usage)
        record_decode_time(services, caller, dispatched.target, decode_s)
        if granted is not None:
            prompt_tokens = usage.prompt_tokens if usage else None
            services.quotas.settle(
                granted, services.clock(), completion_tokens=output_tokens, prompt_tokens=prompt_tokens
            )

    services.background.follow(
        response_id,
        dispatched.replica.incarnation,
        caller.tenant or "",
        on_over,
        shown_tokens=answer.events if answer is not None else 0,
    )
    return True


def _record_survival(run: RequestRun, answer: EngineAttempt, dispatched: DispatchedRequest) -> None:
    """Update the poison books: a death where the engine died in the middle; a whole answer clears the suspects."""
    is_lost = answer.loss_reason in _BLAMING_REQUEST and not answer.is_done_sent
    if is_lost or says_dead(answer.fault):
        record_death(run.services, run.request, run.caller, dispatched)
    elif answer.is_whole:
        for book, suspect in suspects(run.services, run.request, dispatched):
            book.clear(suspect)


def record_decode_time(services: Services, caller: Caller, target: RequestTarget, decode_s: float) -> None:
    """Charge the tenant, in fair order, for the seconds that its engine decoded a finished answer."""
    waiting, adapter = services.scheduler.queue, target.adapter
    if decode_s and waiting:
        waiting.charge_answer(caller.tenant or "", adapter.lora_id if adapter else "", fair_weight(adapter), decode_s)


def _trace_attributes(route: Route, dispatched: DispatchedRequest) -> dict[str, AttributeValue]:
    """A request's attributes in its trace, by the names of OpenTelemetry's conventions where they have one."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": route.operation,
        "gen_ai.request.model": dispatched.target.asked,
        "lorafleet.request_id": dispatched.request_id,
        "lorafleet.worker": dispatched.replica.id,
        "lorafleet.adapter": dispatched.decision.request.engine_name or "base",
        "lorafleet.cached_tokens": dispatched.predicted_tokens,
        "lorafleet.waited_s": dispatched.waited_s,
    }
    usage = dispatched.usage
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        if usage.completion_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return attributes


def count_refusal(services: Services, exchange: HttpExchange, status: int, code: str, limit: str) -> None:
    """Count an answer to a request that had no run: it was refused before its model was known."""
    key, tenant = sender_names(exchange)
    counts = services.usage.counts_of(services.clock(), tenant=tenant, key=key)
    add_error(counts, _code_text(status, code, limit))


class SenderNames(NamedTuple):
    """The key and the tenant of a request's sender; empty: none."""

    key_id: str
    tenant: str


def sender_names(exchange: HttpExchange) -> SenderNames:
    """The names of the caller, also where its body was not read."""
    caller, refusal = exchange.caller, exchange.refusal
    if caller is not None:
        return SenderNames(caller.key_id, caller.tenant or "")
    return SenderNames(refusal.key_id, refusal.tenant) if isinstance(refusal, RateLimited) else SenderNames("", "")


def count_run(run: RequestRun, status: int, code: str, limit: str = "") -> None:
    """Count a request that was recorded, with its times and tokens; `status` and `code` are those of its answer."""
    caller, target, dispatched = run.caller, run.target, run.dispatched
    now, read_at = run.services.clock(), run.request.read_at
    counts = run.services.usage.counts_of(
        now,
        base_model="" if target is None else target.base_model,
        adapter="" if target is None or target.adapter is None else target.adapter.lora_id,
        version="" if target is None else target.version,
        worker=(run.last_failed_worker or "") if dispatched is None else dispatched.replica.id,
        tenant=caller.tenant or "",
        key=caller.key_id,
    )
    is_whole = status < 400 and not code
    if is_whole:
        counts.requests += 1
        add_whole(counts, now - read_at)
    else:
        add_error(counts, _code_text(status, code, limit))
    if run.cold_s:
        counts.cold_starts += 1
        counts.cold_s += run.cold_s
    is_error, output_tokens, work_s = False, 0, 0.0
    if dispatched is None:
        counts.sent += run.last_failed_worker is not None
    else:
        counts.waited_s += dispatched.waited_s
        # One that its engine goes on with is counted as sent by `_count_background`.
        usage = dispatched.usage
        cached_tokens = None if usage is None else dispatched.cached_tokens
        if dispatched.load.ended:
            counts.sent += 1
            is_error, output_tokens = dispatched.is_error, dispatched.output_tokens
            if dispatched.is_computed:
                work_s = dispatched.load.work_s
                counts.work_s += work_s
                counts.decode_work_s += dispatched.load.decode_s
                usage = usage or _predicted_usage(dispatched)
        add_tokens(counts, usage, output_tokens, dispatched.predicted_tokens, cached_tokens)
        tokens = output_tokens + (0 if usage is None else usage.prompt_tokens)
        _spend(run.services, caller, tokens, work_s)
        if dispatched.lost_tokens is not None:
            counts.sampled_tokens += dispatched.decision.request.prompt_tokens
            counts.lost_tokens += dispatched.lost_tokens
        sent_s, answer = dispatched.first_data_s, run.attempt
        if sent_s is not None and run.stage == "relay" and answer is not None and answer.streamed:
            first_token_at = dispatched.load.began_at + sent_s
            add_first_token(counts, first_token_at - read_at, sent_s)
            # Of several sequences the first tokens are not counted one by one: roughly one each.
            decode_tokens = output_tokens - run.request.sequences
            if is_whole and decode_tokens > 0:
                counts.decode_s += max(0.0, now - first_token_at)
                counts.decode_tokens += decode_tokens
    if is_error or (run.failures and _blames_adapter(run)):
        counts.engine_errors += 1


def _predicted_usage(dispatched: DispatchedRequest) -> EngineUsage:
    """The usage of a request whose engine did not get to report it: its client left, or its stream broke off."""
    return EngineUsage(dispatched.decision.request.prompt_tokens, None, dispatched.predicted_tokens)


def _blames_adapter(run: RequestRun) -> bool:
    """Whether an engine failed the request, maybe for its adapter, before another one was tried."""
    return any("adapter" in VERDICTS[failed.reason].blames for failed in run.failures.values())


def _count_background(
    services: Services, caller: Caller, dispatched: DispatchedRequest, usage: EngineUsage | None
) -> None:
    """Count what has become known of a response in the background, which was counted when its client had an answer."""
    target = dispatched.target
    counts = services.usage.counts_of(
        services.clock(),
        base_model=target.base_model,
        adapter="" if target.adapter is None else target.adapter.lora_id,
        version=target.version,
        worker=dispatched.replica.id,
        tenant=caller.tenant or "",
        key=caller.key_id,
    )
    counts.sent += 1
    counts.work_s += dispatched.load.work_s
    counts.decode_work_s += dispatched.load.decode_s
    add_tokens(counts, usage, dispatched.output_tokens, 0, None)
    tokens = dispatched.output_tokens + (0 if usage is None else usage.prompt_tokens)
    _spend(services, caller, tokens, dispatched.load.work_s)


def _spend(services: Services, caller: Caller, tokens: int, work_s: float) -> None:
    """Charge an ended request to the caller's budgets, as it was counted just now for the ledger.

    Refuses requests that wait where a budget is exhausted by it.
    """
    if (limited := caller.limited) and services.budgets.charge(
        limited, Spent(tokens=tokens, engine_s=work_s), services.clock()
    ):
        services.queue.refuse_exhausted()


def _code_text(status: int, code: str, limit: str) -> str:
    """`<status> <code>`; of an engine's own error without one `<status> engine`; of a client that left `499`.

    Of 429 with the limit that was reached: `429 rate_limited concurrent_requests`.
    """
    if status == _CLIENT_GONE:
        return str(status)
    text = f"{status} {code or 'engine'}"
    return f"{text} {limit}" if limit and status == HTTPStatus.TOO_MANY_REQUESTS else text
