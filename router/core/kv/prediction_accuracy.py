"""Accuracy of predicted cache hits, by worker: exact, degraded or estimate.

Each prediction is compared with the `cached_tokens` that the engine reports. A leaky bucket a worker counts errors: a
disagreement adds `_ADDED`, an agreement takes 1 off; a full bucket means degraded, an empty one exact again. Single
disagreements happen to a perfect index, because blocks come and go between decision and start. So a worker is degraded
only from one disagreement in `_ADDED + 1` on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Literal

from router.core.kv.index import WorkerId

TrustState = Literal["exact", "degraded", "estimate"]
FeedMode = Literal["exact", "estimate"]

# Reasoned, then simulated (tests/router/core/kv/test_prediction_accuracy.py repeats it; nothing was measured on a
# fleet). With one disagreement in ten, which is a crowded cache, a worker is degraded by chance once in about 46,000
# comparisons and exact again 26 later; with one in two it is degraded after 17 and stays so. Six in a row degrade;
# eighteen agreements in a row heal.
_ADDED = 3
_FULL = 18
# A share of the prompt. Less does not change which replica wins, and a wrong tail block is not a wrong index.
_TOLERANCE = 0.1
# Seconds over which the error figure is weighted: a guess, nothing measured.
_HORIZON_S = 300.0


@dataclass(slots=True)
class _WorkerAccuracy:
    mode: FeedMode
    errors: int = 0
    is_degraded: bool = False
    tokens_off: float = 0.0
    prompt_tokens: float = 0.0
    at: float = 0.0

    def add_disagreement(self) -> None:
        """Add an error to the bucket; a full bucket makes the worker degraded."""
        self.errors = min(_FULL, self.errors + _ADDED)
        self.is_degraded = self.is_degraded or self.errors == _FULL

    def add_agreement(self) -> None:
        """Take one error off the bucket; an empty bucket makes the worker exact again."""
        self.errors -= 1
        self.is_degraded = self.is_degraded and self.errors > 0


class PredictionAccuracy:
    """Prediction accuracy of every worker whose feed has started."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _WorkerAccuracy] = {}

    def __len__(self) -> int:
        """Workers that are remembered."""
        return len(self._workers)

    def record_feed_start(self, worker: WorkerId, mode: FeedMode) -> None:
        """Reset a worker's accuracy to exact or estimate: it has a new feed, or its engine restarted."""
        self._workers[worker] = _WorkerAccuracy(mode)

    def record_lost_events(self, worker: WorkerId) -> None:
        """Record that KV events are lost for good: the worker is degraded until predictions agree again.

        Ignored for an unknown worker, and for one without an exact feed.
        """
        entry = self._workers.get(worker)
        if entry is not None and entry.mode == "exact":
            entry.errors = _FULL
            entry.is_degraded = True

    def record_comparison(
        self, worker: WorkerId, predicted_tokens: int, cached_tokens: int, prompt_tokens: int, now: float
    ) -> bool | None:
        """Compare one answer with its prediction, which may change the worker's state; without effect after `forget`.

        Returns whether they agree; None where the answer says nothing about the prompt's ids: both are small, the
        worker has no exact feed, or it is degraded already.

        predicted_tokens  the hit that the decision used, counted as the engine does: see `hit_tokens`
        cached_tokens     the engine's figure; an answer without it must not be compared
        """
        entry = self._workers.get(worker)
        if entry is None or prompt_tokens <= 0:
            return None
        off = abs(predicted_tokens - cached_tokens)
        kept = exp(min(0.0, entry.at - now) / _HORIZON_S)
        entry.tokens_off = entry.tokens_off * kept + off
        entry.prompt_tokens = entry.prompt_tokens * kept + prompt_tokens
        entry.at = now
        if entry.mode != "exact":
            return None
        tolerated, was_degraded = _TOLERANCE * prompt_tokens, entry.is_degraded
        if off > tolerated:
            entry.add_disagreement()
            return None if was_degraded else False
        # Small hits on both sides prove nothing: an empty index agrees on every new prompt.
        if predicted_tokens <= tolerated and cached_tokens <= tolerated:
            return None
        if entry.errors:
            entry.add_agreement()
        return True

    def state(self, worker: WorkerId) -> TrustState:
        """How accurate the worker's predictions are; `estimate` where no feed was ever started."""
        entry = self._workers.get(worker)
        if entry is None or entry.mode == "estimate":
            return "estimate"
        return "degraded" if entry.is_degraded else "exact"

    def error_share(self, worker: WorkerId) -> float:
        """Mispredicted tokens per prompt token, exponentially weighted over 300 s of answers; 0.0 before any."""
        entry = self._workers.get(worker)
        return entry.tokens_off / entry.prompt_tokens if entry is not None and entry.prompt_tokens else 0.0

    def error_shares(self) -> Iterator[tuple[WorkerId, float]]:
        """`error_share` of every worker with a compared answer."""
        for worker, entry in self._workers.items():
            if entry.prompt_tokens:
                yield worker, self.error_share(worker)

    def forget(self, worker: WorkerId) -> None:
        """Drop the accuracy of a worker that is gone."""
        self._workers.pop(worker, None)


def hit_tokens(depth_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """The `cached_tokens` that vLLM reports for a prompt of which it has cached the first `depth_blocks` blocks.

    source  vLLM 0.32 v1/core/kv_cache_manager.py get_computed_blocks: the last token is computed always, and with it
            its whole block. Holds for every request of tests/recordings, where a prompt that ends with a block tells
            this apart from prompt_tokens - 1.
    """
    if not block_size:  # not known: nothing is matched there
        return 0
    return min(depth_blocks, max(0, prompt_tokens - 1) // block_size) * block_size
