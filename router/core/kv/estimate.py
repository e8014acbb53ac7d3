"""Estimated cache contents of engines that publish no KV events, from the prompts that they served.

An engine evicts the longest unused block. So each worker's estimate is a list of blocks in order of last use, cut off
by age and by size. Where answers carry the engine's `cached_tokens` the age is learned: a block that was gone tells how
long this engine keeps one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from lorafleet.identity import BlockHash
from router.core.kv.index import KvIndex, WorkerId

# Seconds for which a block is taken to stay, at most. A guess: busy engines keep blocks for less time, which their size
# and their answers show, and idle ones for more.
TTL_S = 600.0
# Factor on a shortened age when an engine had more than was predicted.
_REGROWTH = 2.0
# Least age, so that doubling can bring it back: a guess.
_LEAST_TTL_S = 0.01


@dataclass(frozen=True, slots=True)
class PredictedCache:
    """The predicted hit of one prompt when it was sent: when each of its cached first blocks was last used."""

    worker: WorkerId
    began_at: float
    last_used: tuple[float, ...]


@dataclass(slots=True)
class _EstimatedBlocks:
    ttl_s: float
    # Longest unused first.
    last_used: OrderedDict[BlockHash, float] = field(default_factory=OrderedDict)


class CacheEstimate:
    """Estimated cache contents of one base model's workers without KV events, written into its index."""

    def __init__(self, index: KvIndex, ttl_s: float = TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._workers: dict[WorkerId, _EstimatedBlocks] = {}

    def __len__(self) -> int:
        """Workers with an estimate."""
        return len(self._workers)

    def record_served(
        self, worker: WorkerId, hashes: Sequence[BlockHash], *, began_at: float, now: float, most_blocks: int
    ) -> PredictedCache:
        """Record a prompt whose first token has arrived: its blocks are cached, and evict the longest unused ones.

        Adds the blocks to the index; an unknown worker gets an entry.

        hashes       of the whole prompt
        began_at     when it was sent: blocks stored since then were no hit for it
        most_blocks  size of the engine's KV cache in blocks
        returns      the predicted hit, for `correct_estimate` when the answer reports what the engine had cached
        """
        entry = self._workers.setdefault(worker, _EstimatedBlocks(self._ttl_s))
        used = (entry.last_used.get(block, began_at + 1) for block in hashes)
        guess = PredictedCache(worker, began_at, tuple(takewhile(lambda at: at <= began_at, used)))
        # Backwards, so that a prompt's first blocks, without which the others are useless, go last.
        for block in reversed(hashes):
            entry.last_used[block] = now
            entry.last_used.move_to_end(block)
        self._index.add(worker, hashes)
        self._evict(worker, entry, unused_since=now - entry.ttl_s, most_blocks=most_blocks)
        return guess

    def correct_estimate(self, guess: PredictedCache, cached_blocks: int) -> None:
        """Correct the worker's estimate by an answer's `cached_tokens`: drop evicted blocks, and adapt the kept age.

        Does nothing if the worker is no longer estimated.
        cached_blocks  the engine's `cached_tokens` in whole blocks
        """
        entry = self._workers.get(guess.worker)
        if entry is None:
            return
        predicted = len(guess.last_used)
        if cached_blocks > predicted:
            entry.ttl_s = min(self._ttl_s, entry.ttl_s * _REGROWTH)
        # One block less says nothing: an engine always computes a prompt's last token, and its block with it.
        elif cached_blocks < predicted - 1:
            gone = guess.last_used[cached_blocks]
            entry.ttl_s = max(_LEAST_TTL_S, min(entry.ttl_s, guess.began_at - gone))
            self._evict(guess.worker, entry, unused_since=gone)

    def expire(self, now: float) -> None:
        """Drop blocks that were unused for longer than their engine keeps one; call every second or so."""
        for worker, entry in self._workers.items():
            self._evict(worker, entry, unused_since=now - entry.ttl_s)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's estimate and its blocks in the index: it is gone, or its engine restarted."""
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._index.drop(worker, entry.last_used)

    def _evict(
        self, worker: WorkerId, entry: _EstimatedBlocks, *, unused_since: float, most_blocks: int | None = None
    ) -> None:
        """Drop the longest unused blocks, also in the index: last used by `unused_since`, or beyond `most_blocks`."""
        used, gone = entry.last_used, []
        while used and (
            next(iter(used.values())) <= unused_since or (most_blocks is not None and len(used) > most_blocks)
        ):
            gone.append(used.popitem(last=False)[0])
        if gone:
            self._index.drop(worker, gone)
