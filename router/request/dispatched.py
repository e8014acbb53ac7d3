"""A request at a replica, from dispatch to end: its load, and its predicted cached tokens against the reported ones."""

from collections.abc import Hashable, Iterator
from time import time

import structlog

from lorafleet.keys.roles import Caller
from router.core.failover.poison import PoisonRequests
from router.core.kv.tree import SentPrompt
from router.core.resolve import RequestTarget
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest
from router.protocols.usage import EngineUsage
from router.request.cache_cost import record_cache_cost
from router.request.parsed_request import ParsedRequest, request_digest
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.tokenizing.tokens import NO_TOKENS, Tokens

log = structlog.get_logger()

# Seconds of queue: behind a shorter one the request began with the cache as it was when it was decided.
_PROMPT_START_S = 0.1


def begin_dispatched(  # noqa: PLR0917  (for each request, and names take time)
    services: Services,
    request_id: str,
    tenant: str,
    target: RequestTarget,
    hashed: HashedRequest,
    tokens: Tokens,
    asked_at: float,
    is_streamed: bool,
    decision: Decision,
) -> DispatchedRequest:
    """Count the request at its replica (load, pending blocks, metrics), and add its decision to those kept.

    asked_at  by Services.clock, when it was ready to be sent: since then it has waited
    """
    now = decision.snapshot.now
    replica, score, routing = decision.replica, decision.score, hashed.request
    worker, waited_s, scheduler = replica.id, now - asked_at, services.scheduler
    # First, because it runs the shadow policies: one that fails must leave nothing to give back.
    load = scheduler.record_dispatch(decision, now, hashed)
    load.is_streamed = is_streamed
    is_hashed, is_approximate = bool(hashed.chains), routing.is_approximate
    is_known = is_hashed and not is_approximate
    prompt_tokens = routing.prompt_tokens if is_known else 0
    dispatched = DispatchedRequest(
        request_id,
        tenant,
        target,
        decision,
        replica,
        time(),
        tokens.source,
        "estimate" if is_approximate else services.accuracy.state(worker),
        waited_s,
        load,
        scheduler.breaker.is_trial(replica, load),
        score.cached_tokens if is_known else 0,
        is_hashed,
        tokens,
        hashed.chain(worker, replica.block_size) if replica.caches_prefixes else (),
        hashed.cache_salt,
    )
    load.is_exact = is_known and dispatched.trust == "exact"
    services.decisions.add(dispatched, now)
    if hashed.cache_salt:
        record_cache_cost(services, hashed, tokens, dispatched)
    if dispatched.hashes:
        index = services.feeds.index(replica.base_model, replica.block_size, is_approximate=is_approximate)
        ranks = decision.snapshot.ranks
        member = services.feeds.member_name(worker, ranks.get(worker)) if ranks else worker
        dispatched.index, dispatched.pending = index, index.add_pending(member, dispatched.hashes)
        if is_known:
            sent = SentPrompt(replica.base_model, routing.engine_name, replica.block_size, dispatched.pending.hashes)
            services.sent_prompts.add(sent)
    metrics = services.metrics
    metrics.waited.observe(waited_s)
    metrics.live_cost.value += score.cost_s
    metrics.predicted_tokens.value += dispatched.predicted_tokens
    metrics.prompt_tokens.value += prompt_tokens
    return dispatched


def record_first_token(services: Services, dispatched: DispatchedRequest) -> None:
    """Record a stream's first token: end its prefill in the load book, and wake the queue.

    Also sets `first_data_s` and hands over the pending blocks, see `record_whole_answer`.
    """
    entry, now = dispatched.load, services.clock()
    if entry.predicted_s > 0:
        services.metrics.first_token_ratio.observe((now - entry.began_at) / entry.predicted_s)
    services.scheduler.load.record_first_token(entry, now)
    services.queue.poke()
    record_whole_answer(services, dispatched)


def record_whole_answer(services: Services, dispatched: DispatchedRequest) -> None:
    """Record that a whole answer has come; `end_dispatched` follows, which ends its prefill in the load book.

    Sets `first_data_s`, and has the pending blocks removed a little later: the engine's own events follow. For an
    estimated cache, or an approximate prompt, records the blocks as cached in the feeds.
    """
    now, began_at, feeds = services.clock(), dispatched.load.began_at, services.feeds
    dispatched.first_data_s = now - began_at
    replica, hashes, pending = dispatched.replica, dispatched.hashes, dispatched.pending
    is_approximate = dispatched.decision.request.is_approximate
    if dispatched.trust == "estimate" and not is_approximate:
        dispatched.estimate = feeds.record_served(replica.id, hashes, began_at=began_at, now=now)
    if pending is not None and dispatched.index is not None:
        if is_approximate:
            feeds.record_served_approximate(replica, pending.worker, hashes, began_at=began_at, now=now)
        services.speculations.add(dispatched.index.remove_pending, pending)
        dispatched.pending = None


def compare_usage(
    services: Services, dispatched: DispatchedRequest, usage: EngineUsage, *, is_one_of_many: bool = False
) -> bool | None:
    """Compare predicted cached tokens with those in the engine's usage: update accuracy, feed, metrics and record.

    Returns whether they agree; None if nothing follows for the prompt's ids. Nothing is compared if the engine
    reports none, or the prompt was not hashed; of an approximate one only the record changes.

    is_one_of_many  the engine prefilled the prompt several times, and reports one of them, not the first
    """
    cached, adapter, score = usage.cached_tokens, dispatched.target.adapter, dispatched.decision.score
    if cached is None:
        return None
    if adapter is not None and not is_one_of_many:
        services.metrics.adapters.of(adapter.lora_id).add_tokens(usage.prompt_tokens, cached)
    if not dispatched.is_hashed:
        return None
    is_approximate = dispatched.decision.request.is_approximate
    if not is_approximate:
        services.metrics.cached_tokens.value += cached
    if is_one_of_many:
        return None
    dispatched.cached_tokens = cached
    if is_approximate:
        # Shown only: blocks of an approximate prompt are not the engine's, so nothing was predicted.
        return None
    predicted, agrees = score.cached_tokens, None
    # Behind a queue a full cache may have lost the prefix by then: that says nothing about the index.
    if predicted <= cached or score.queue_s <= _PROMPT_START_S:
        agrees = services.accuracy.record_comparison(
            dispatched.replica.id, predicted, cached, usage.prompt_tokens, services.clock()
        )
    if dispatched.estimate is not None:
        services.feeds.correct_estimate(dispatched.estimate, cached // dispatched.replica.block_size)
    return agrees


def end_dispatched(
    services: Services,
    dispatched: DispatchedRequest,
    *,
    is_error: bool = False,
    output_tokens: int = 0,
) -> float:
    """Give back the load entry and pending blocks, and wake the queue. Safe to call twice.

    Returns the request's share of the engine's seconds of decoding.

    is_error       the engine failed the request
    output_tokens  generated tokens, as far as is known
    """
    load, first_data_s = dispatched.load, dispatched.first_data_s
    if load.ended:
        return 0.0
    dispatched.is_error, dispatched.output_tokens = is_error, output_tokens
    services.scheduler.load.remove(load, services.clock(), is_answered=first_data_s is not None)
    decode_s = load.decode_s
    if load.session is not None:
        load.session.program.service_s += decode_s
    services.queue.poke()
    if dispatched.pending is not None and dispatched.index is not None:
        dispatched.index.remove_pending(dispatched.pending)
    dispatched.prompt, dispatched.hashes, dispatched.pending, dispatched.estimate = NO_TOKENS, (), None, None
    return decode_s


def record_death(services: Services, request: ParsedRequest, caller: Caller, dispatched: DispatchedRequest) -> bool:
    """Record in the poison books that an engine died with this request, and log a hold; whether it is held back now."""
    engine, is_held_back = dispatched.replica.incarnation, False
    for book, suspect in suspects(services, request, dispatched):
        held_s = book.record_death(suspect, engine, services.clock(), sent_at=dispatched.load.began_at)
        if held_s:
            is_held_back = True
            log.warning(
                "engines died while this was in them; it is held back",
                what="adapter" if book is services.poison_adapters else "request",
                request_id=request.request_id,
                adapter=dispatched.decision.request.engine_name or "base",
                worker=engine[0],
                key=caller.name,
                held_s=round(held_s, 1),
            )
    return is_held_back


def suspects(
    services: Services, request: ParsedRequest, dispatched: DispatchedRequest
) -> Iterator[tuple[PoisonRequests, Hashable]]:
    """The request and its adapter, each with the book that has its kind."""
    yield services.poison_requests, request_digest(request)
    engine_name = dispatched.decision.request.engine_name
    if engine_name:
        yield services.poison_adapters, engine_name
