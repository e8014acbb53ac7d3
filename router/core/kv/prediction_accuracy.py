"""How far each worker's predicted hits can be believed: exact, degraded or estimate.

A closed loop: what was predicted for a prompt is compared with what the engine says it had cached, and each worker has
a bucket of doubt. A disagreement pours `_POUR` in, an agreement lets 1 out; full means degraded, empty means exact
again. Single disagreements happen to a perfect index (a block evicted, or a neighbour's prompt stored, between decision
and start), so what counts is whether the bucket fills faster than it drains: it does from one disagreement in
`_POUR + 1` on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Literal

from router.core.kv.index import WorkerId

TrustState = Literal["exact", "degraded", "estimate"]
FeedMode = Literal["exact", "estimate"]

# Reasoned, then simulated (tests/router/test_trust.py repeats it; nothing was measured on a fleet). With one
# disagreement in ten, which is a crowded cache, a worker is degraded by chance once in about 46,000 comparisons and
# exact again 26 later; with one in two it is degraded after 17 and stays so. Six in a row degrade; eighteen agreements
# in a row heal.
_POUR = 3
_FULL = 18
# A share of the prompt. Less does not change which replica wins, and a wrong tail block is not a wrong index.
_TOLERANCE = 0.1
# Seconds over which the error figure is weighted: a guess, nothing measured.
_HORIZON_S = 300.0


@dataclass(slots=True)
class _WorkerAccuracy:
    mode: FeedMode
    doubt: int = 0
    is_degraded: bool = False
    tokens_off: float = 0.0
    prompt_tokens: float = 0.0
    at: float = 0.0

    def disagrees(self) -> None:
        self.doubt = min(_FULL, self.doubt + _POUR)
        self.is_degraded = self.is_degraded or self.doubt == _FULL

    def agrees(self) -> None:
        self.doubt -= 1
        self.is_degraded = self.is_degraded and self.doubt > 0


class PredictionAccuracy:
    """The state of every worker that has been opened; of others nothing is kept."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _WorkerAccuracy] = {}

    def record_feed_start(self, worker: WorkerId, mode: FeedMode) -> None:
        """A feed begins, at a new engine boot or from a new source: what was held against the former is void."""
        self._workers[worker] = _WorkerAccuracy(mode)

    def record_lost_events(self, worker: WorkerId) -> None:
        """Events are missing that nothing can bring back: degraded, until predictions agree again."""
        entry = self._workers.get(worker)
        if entry is not None and entry.mode == "exact":
            entry.doubt = _FULL
            entry.is_degraded = True

    def record_comparison(
        self, worker: WorkerId, predicted_tokens: int, cached_tokens: int, prompt_tokens: int, now: float
    ) -> None:
        """Learn from one answer; one that comes after `forget` changes nothing.

        predicted_tokens  the hit that the decision counted with, as the engine counts it: see `hit_tokens`
        cached_tokens     the engine's own word; an answer without it is not to be compared
        """
        entry = self._workers.get(worker)
        if entry is None or prompt_tokens <= 0:
            return
        off = abs(predicted_tokens - cached_tokens)
        kept = exp(min(0.0, entry.at - now) / _HORIZON_S)
        entry.tokens_off = entry.tokens_off * kept + off
        entry.prompt_tokens = entry.prompt_tokens * kept + prompt_tokens
        entry.at = now
        if entry.mode == "exact":
            tolerated = _TOLERANCE * prompt_tokens
            if off > tolerated:  # one of the two saw that much
                entry.disagrees()
            # Where neither side saw much, agreement proves nothing: a deaf index agrees on every new prompt.
            elif entry.doubt and (predicted_tokens > tolerated or cached_tokens > tolerated):
                entry.agrees()

    def state(self, worker: WorkerId) -> TrustState:
        """What the worker's predictions are; `estimate` where no feed was ever opened."""
        entry = self._workers.get(worker)
        if entry is None or entry.mode == "estimate":
            return "estimate"
        return "degraded" if entry.is_degraded else "exact"

    def error_share(self, worker: WorkerId) -> float:
        """Tokens off per prompt token, exponentially weighted over 300 s of answers; 0.0 before the first."""
        entry = self._workers.get(worker)
        return entry.tokens_off / entry.prompt_tokens if entry is not None and entry.prompt_tokens else 0.0

    def error_shares(self) -> Iterator[tuple[WorkerId, float]]:
        """`error_share` of every worker that has been compared with."""
        for worker, entry in self._workers.items():
            if entry.prompt_tokens:
                yield worker, self.error_share(worker)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that is gone."""
        self._workers.pop(worker, None)


def hit_tokens(depth_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """What vLLM reports as `cached_tokens` for a prompt of which it holds so many first blocks.

    source  vLLM 0.32 v1/core/kv_cache_manager.py get_computed_blocks: the last token is computed always, and with it
            its whole block. Holds for every request of tests/recordings, where a prompt that ends with a block tells
            this apart from prompt_tokens - 1.
    """
    if not block_size:  # an engine that does not tell it: nothing of it is matched
        return 0
    return min(depth_blocks, max(0, prompt_tokens - 1) // block_size) * block_size
