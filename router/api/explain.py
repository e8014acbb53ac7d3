"""Decisions as REST models, for `/v1/route` and `/v1/decisions`, and decisions replayed from records."""

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from router.core.errors import BadBody, NoReplica
from router.core.fleet import Roster, rejection
from router.core.kv.index import WorkerId
from router.core.schedule.cost import ReplicaScore
from router.core.schedule.policies import POLICIES
from router.core.schedule.policies.kv_lora import KvLoraPolicy, within_slots
from router.core.schedule.policy import Decision
from router.core.schedule.record import record_of, replay_decision
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import length_rejection
from router.core.sessions.book import SessionState
from router.request.record import DispatchedRequest
from router.tokenizing.tokens import Source
from router.wire import RejectedItem, ReplayBody, RouteAnswer, ScoreItem

# Errors that a malformed record raises in the core, which does not validate it.
_RECORD_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)


def dispatched_answer(dispatched: DispatchedRequest, trust: Callable[[WorkerId], str]) -> RouteAnswer:
    """The decision of a dispatched request, and its outcome. `trust`: see `decision_answer`."""
    return decision_answer(
        dispatched.decision,
        trust,
        request_id=dispatched.request_id,
        at=dispatched.at,
        tokens_from=dispatched.tokens_from,
        winner_trust=dispatched.trust,
        engine_cached_tokens=dispatched.cached_tokens,
        waited_s=dispatched.waited_s,
        first_token_s=dispatched.load.predicted_s,
        first_data_s=dispatched.first_data_s,
        session=dispatched.load.session,
    )


def decision_answer(
    decision: Decision,
    trust: Callable[[WorkerId], str],
    *,
    request_id: str,
    at: float,
    tokens_from: Source,
    winner_trust: str | None,
    engine_cached_tokens: int | None = None,
    waited_s: float = 0.0,
    first_token_s: float | None = None,
    first_data_s: float | None = None,
    session: SessionState | None = None,
    note: str | None = None,
) -> RouteAnswer:
    """A decision with every replica's cost terms, the filter that each other replica failed, and the outcome.

    trust         accuracy of each worker's predictions now; `winner_trust`: the winner's at the decision
    session       of which the request is a turn; None: none is known
    """
    request, snapshot = decision.request, decision.snapshot
    passed_over_ids, name = _without_slot(decision), request.engine_name
    holders = [replica for replica in snapshot.roster.replicas if name is not None and name in replica.residents]
    acceptance = {replica.id: replica.residents[str(name)].acceptance for replica in holders}
    return RouteAnswer(
        request_id=request_id,
        at=_iso_time(at),
        base_model=request.base_model,
        adapter=request.engine_name or "base",
        policy=decision.policy,
        worker_id=decision.replica.id,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=decision.score.cached_tokens,
        engine_cached_tokens=engine_cached_tokens,
        tokens_from=tokens_from,
        trust=winner_trust,
        waited_s=waited_s,
        first_token_s=decision.score.first_token_s if first_token_s is None else first_token_s,
        first_data_s=first_data_s,
        next_turn_s=None if session is None else session.habit.usual_gap_s(),
        kappa=decision.kappa,
        rho=snapshot.rho,
        scores=tuple(
            score_item(
                score,
                is_winner=score.worker_id == decision.replica.id,
                is_passed_over=score.worker_id in passed_over_ids,
                trust="estimate" if request.is_approximate else trust(score.worker_id),
                acceptance=acceptance.get(score.worker_id, ""),
            )
            for score in decision.scores
        ),
        rejected=tuple(RejectedItem(worker_id=worker, reason=why) for worker, why in decision.rejected.items()),
        record=record_of(decision),
        note=note,
    )


def score_item(
    score: ReplicaScore,
    *,
    is_winner: bool,
    is_passed_over: bool = False,
    trust: str = "estimate",
    acceptance: str = "",
) -> ScoreItem:
    """One replica's cost terms."""
    terms = msgspec.structs.asdict(score)
    return ScoreItem(**terms, winner=is_winner, passed_over=is_passed_over, trust=trust, acceptance=acceptance)


def tenants_answer(answer: RouteAnswer, *, has_adapter_alone: bool) -> RouteAnswer:
    """A decision as a tenant's key may see it: without the record, which names all that workers hold.

    Of an adapter that it shares, or of the base model, without scores, predicted time and cached tokens: what is
    cached of a prompt there would disclose other tenants' prompts.

    has_adapter_alone  whether the adapter is that tenant's alone
    """
    rejected = tuple(item.model_copy(update={"reason": "not able"}) for item in answer.rejected)
    shown = answer.model_copy(update={"record": None, "rejected": rejected})
    if has_adapter_alone:
        return shown
    note = "; ".join(filter(None, (answer.note, "scores are shown for adapters of your tenant alone")))
    hidden = {
        "scores": (),
        "cached_tokens": 0,
        "engine_cached_tokens": None,
        "first_token_s": None,
        "next_turn_s": None,
    }
    return shown.model_copy(update={**hidden, "note": note})


def undecided_answer(
    request: RoutingRequest, *, request_id: str, at: float, adapter: str, tokens_from: Source, roster: Roster, note: str
) -> RouteAnswer:
    """The answer where no replica can take the request now, with the filter that each one failed."""
    return RouteAnswer(
        request_id=request_id,
        at=_iso_time(at),
        base_model=request.base_model,
        adapter=adapter,
        worker_id=None,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=0,
        tokens_from=tokens_from,
        kappa=1.0,
        rho=0.0,
        scores=(),
        rejected=tuple(
            RejectedItem(worker_id=replica.id, reason=_failed_filter(roster, position, request) or "able")
            for position, replica in enumerate(roster.replicas)
        ),
        note=note,
    )


def _failed_filter(roster: Roster, position: int, request: RoutingRequest) -> str | None:
    """The filter that this replica fails; None: it passes all."""
    name = request.engine_name
    return rejection(roster.replicas[position], name) or length_rejection(roster, position, request)


def replay_answer(body: ReplayBody) -> RouteAnswer:
    """A decision made again from its record, with every term; raises BadBody for a malformed record."""
    record = body.record if body.policy is None else body.record | {"policy": body.policy}
    policy = str(record.get("policy"))
    if policy not in POLICIES:
        raise BadBody(
            f"{policy[:100]!r} is no policy of this router; there are {', '.join(sorted(POLICIES))}", param="policy"
        )
    # The accuracy of predictions does not affect decisions, so records do not have it.
    trust = {WorkerId(score.worker_id): score.trust for score in body.scores}
    try:
        decision = replay_decision(record)
        return decision_answer(
            decision,
            lambda worker: trust.get(worker, "unknown"),
            request_id=body.request_id,
            at=body.at.timestamp() if body.at else 0.0,
            tokens_from=body.tokens_from,
            winner_trust=trust.get(decision.replica.id),
            note="made again from its record; nothing was sent",
        )
    except NoReplica as exc:
        raise BadBody(f"nothing can be chosen from this record: {exc}", param="record") from exc
    except _RECORD_ERRORS as exc:
        raise BadBody(
            f"this is no whole record of a decision ({type(exc).__name__}: {exc}); send the `record` of an item of"
            " GET /v1/decisions, as it is",
            param="record",
        ) from exc


def _without_slot(decision: Decision) -> frozenset[WorkerId]:
    """Replicas that were passed over because this adapter would exceed their slots."""
    if decision.policy != KvLoraPolicy.name:
        return frozenset()
    able = decision.snapshot.able(decision.request)
    fits = within_slots(decision.request, decision.snapshot, able)
    return frozenset(decision.snapshot.roster.replicas[i].id for i in set(able) - set(fits))


def _iso_time(at: float) -> str:
    """A Unix time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat()
