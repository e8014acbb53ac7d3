"""Why this replica: decisions in words, for `/v1/route` and `/v1/decisions`."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from router.core.decision import Ask, Decision
from router.core.fleet import Replica, rejection
from router.core.index import WorkerId
from router.core.policies.kv_lora import KvLora, within_slots
from router.core.record import record_of
from router.core.trust import TrustState
from router.stages import Record
from router.tokens import Source
from router.wire import RejectedItem, RouteAnswer, ScoreItem


def explained(record: Record, trust: Callable[[WorkerId], TrustState], *, note: str | None = None) -> RouteAnswer:
    """A decision with every replica's terms, every filter that one failed, and what came of it.

    trust   how far each worker's predictions are to be believed now; the record has the winner's as it was
    """
    decision = record.decision
    ask, scene = decision.ask, decision.scene
    guarded = _guarded(decision)
    return RouteAnswer(
        request_id=record.request_id,
        at=_iso(record.at),
        base_model=ask.base_model,
        adapter=ask.engine_name or "base",
        policy=decision.policy,
        worker_id=decision.replica.id,
        prompt_tokens=ask.prompt_tokens,
        cached_tokens=decision.score.cached_tokens,
        engine_cached_tokens=record.cached_tokens,
        tokens_from=record.tokens_from,
        trust=record.trust,
        waited_s=record.waited_s,
        first_data_s=record.first_data_s,
        kappa=scene.kappa,
        rho=scene.rho,
        scores=tuple(
            ScoreItem(
                worker_id=score.replica,
                winner=score.replica == decision.replica.id,
                passed_over=score.replica in guarded,
                trust=trust(score.replica),
                depth_blocks=score.depth_blocks,
                cached_tokens=score.cached_tokens,
                prefill_s=score.prefill_s,
                adapter_s=score.adapter_s,
                slot_s=score.slot_s,
                queue_s=score.queue_s,
                harm_s=score.harm_s,
                cost_s=score.cost_s,
            )
            for score in decision.scores
        ),
        rejected=tuple(RejectedItem(worker_id=worker, reason=why) for worker, why in decision.rejected.items()),
        record=record_of(decision),
        note=note,
    )


def undecided(
    ask: Ask, *, request_id: str, at: float, adapter: str, tokens_from: Source, replicas: Sequence[Replica], note: str
) -> RouteAnswer:
    """No replica can take it now: which filter each one failed, and what a real request would do."""
    return RouteAnswer(
        request_id=request_id,
        at=_iso(at),
        base_model=ask.base_model,
        adapter=adapter,
        worker_id=None,
        prompt_tokens=ask.prompt_tokens,
        cached_tokens=0,
        tokens_from=tokens_from,
        kappa=1.0,
        rho=0.0,
        scores=(),
        rejected=tuple(RejectedItem(worker_id=r.id, reason=rejection(r, ask.engine_name) or "able") for r in replicas),
        note=note,
    )


def _guarded(decision: Decision) -> frozenset[WorkerId]:
    """Those that the working-set guard passed over: this adapter would be one more than their slots."""
    if decision.policy != KvLora.name:
        return frozenset()
    able = decision.scene.able(decision.ask)
    fits = within_slots(decision.ask, decision.scene, able)
    return frozenset(decision.scene.roster.replicas[i].id for i in set(able) - set(fits))


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
