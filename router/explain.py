"""Why this replica: decisions in words, for `/v1/route` and `/v1/decisions`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from router.core.fleet import Replica
from router.core.policy import Ask, rejection
from router.stages import Routed
from router.tokens import Tokens
from router.wire import RejectedItem, RouteAnswer, ScoreItem


def explained(routed: Routed) -> RouteAnswer:
    """A decision with every replica's terms and every filter that one failed."""
    decision = routed.decision
    return RouteAnswer(
        request_id=routed.request_id,
        at=_iso(routed.at),
        base_model=routed.ask.base_model,
        adapter=routed.ask.engine_name or "base",
        worker_id=decision.replica.id,
        prompt_tokens=routed.ask.prompt_tokens,
        cached_tokens=decision.score.cached_tokens,
        tokens_from=routed.tokens.source,
        kappa=decision.kappa,
        rho=decision.rho,
        scores=tuple(
            ScoreItem(
                worker_id=score.replica,
                winner=score is decision.score,
                depth_blocks=score.depth_blocks,
                cached_tokens=score.cached_tokens,
                prefill_s=score.prefill_s,
                adapter_s=score.adapter_s,
                queue_s=score.queue_s,
                harm_s=score.harm_s,
                cost_s=score.cost_s,
            )
            for score in decision.scores
        ),
        rejected=tuple(RejectedItem(worker_id=worker, reason=why) for worker, why in decision.rejected.items()),
    )


def undecided(
    ask: Ask, *, request_id: str, at: float, adapter: str, tokens: Tokens, replicas: Sequence[Replica], note: str
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
        tokens_from=tokens.source,
        kappa=1.0,
        rho=0.0,
        scores=(),
        rejected=tuple(RejectedItem(worker_id=r.id, reason=rejection(ask, r) or "able") for r in replicas),
        note=note,
    )


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
