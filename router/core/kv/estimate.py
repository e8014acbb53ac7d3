"""Estimated cache contents of engines that publish no KV events, from the prompts that they served.

An engine evicts the longest unused block, and of one prompt the last block first. So each worker's estimate is a list
of prompts in order of last use, each without what a later prompt shares with it, cut off by age and by size. That is
the order block by block, because a prompt's blocks were last used together, or its first ones later. Where answers
carry the engine's `cached_tokens` the age is learned: a block that was gone tells how long this engine keeps one.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter

from lorafleet.identity import BlockHash
from router.core.kv.chains import BLOCK_BYTES, SEGMENT_BYTES, Blocks, common_length
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
    """The predicted hit of one prompt when it was sent.

    last_used  (end, time) of each stretch of its cached first blocks that was last used at one time
    """

    worker: WorkerId
    began_at: float
    last_used: tuple[tuple[int, float], ...]

    @property
    def blocks(self) -> int:
        """How many of the prompt's first blocks were predicted to be cached."""
        return self.last_used[-1][0] if self.last_used else 0


@dataclass(slots=True, eq=False)
class _UsedSegment:
    """The blocks of one prompt that no later prompt has used, with the time of that prompt."""

    blocks: Blocks
    last_used: float


@dataclass(slots=True)
class _UsedPrompts:
    """One worker's prompts in order of last use.

    order     longest unused first
    by_first  each segment by its first block
    """

    ttl_s: float
    blocks: int = 0
    order: OrderedDict[_UsedSegment, None] = field(default_factory=OrderedDict)
    by_first: dict[BlockHash, _UsedSegment] = field(default_factory=dict)

    def use(self, chain: Blocks, now: float) -> tuple[Blocks, list[tuple[int, float]]]:
        """Mark a prompt as used last; returns it, and (end, last use) of each known stretch of its first blocks.

        The returned prompt has the integers of earlier prompts where they are equal: each is kept once.
        """
        known: list[tuple[int, float]] = []
        blocks: Blocks = ()
        while len(blocks) < len(chain):
            position = len(blocks)
            segment = self.by_first.get(chain[position])
            if segment is None:
                break
            length = common_length(segment.blocks, 0, chain, position)
            blocks += segment.blocks[:length]
            known.append((len(blocks), segment.last_used))
            self.keep(segment, length, None)
        blocks += chain[len(blocks) :]
        if blocks:
            used = self.by_first[blocks[0]] = _UsedSegment(blocks, now)
            self.order[used] = None
            self.blocks += len(blocks)
        return blocks, known

    def keep(self, segment: _UsedSegment, start: int, end: int | None) -> None:
        """Keep only the blocks [start, end) of a segment, in its place; without any it is removed."""
        before, left = segment.blocks, segment.blocks[start:end]
        self.blocks -= len(before) - len(left)
        if (start or not left) and self.by_first.get(before[0]) is segment:
            del self.by_first[before[0]]
        if left:
            segment.blocks = left
            self.by_first[left[0]] = segment
        else:
            del self.order[segment]


class CacheEstimate:
    """Estimated cache contents of one base model's workers without KV events, written into its index."""

    def __init__(self, index: KvIndex, ttl_s: float = TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._workers: dict[WorkerId, _UsedPrompts] = {}

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
        entry = self._workers.get(worker)
        if entry is None:
            entry = self._workers[worker] = _UsedPrompts(self._ttl_s)
        chain, known = entry.use(tuple(hashes), now)
        self._index.add_estimated(worker, chain)
        self._evict(worker, entry, unused_since=now - entry.ttl_s, most_blocks=most_blocks)
        return PredictedCache(worker, began_at, tuple(takewhile(lambda stretch: stretch[1] <= began_at, known)))

    def correct_estimate(self, guess: PredictedCache, cached_blocks: int) -> None:
        """Correct the worker's estimate by an answer's `cached_tokens`: drop evicted blocks, and adapt the kept age.

        Does nothing if the worker is no longer estimated.
        cached_blocks  the engine's `cached_tokens` in whole blocks
        """
        entry = self._workers.get(guess.worker)
        if entry is None:
            return
        predicted = guess.blocks
        if cached_blocks > predicted:
            entry.ttl_s = min(self._ttl_s, entry.ttl_s * _REGROWTH)
        # One block less says nothing: an engine always computes a prompt's last token, and its block with it.
        elif cached_blocks < predicted - 1:
            gone = guess.last_used[bisect_right(guess.last_used, cached_blocks, key=itemgetter(0))][1]
            entry.ttl_s = max(_LEAST_TTL_S, min(entry.ttl_s, guess.began_at - gone))
            self._evict(guess.worker, entry, unused_since=gone)

    def expire(self, now: float) -> None:
        """Drop blocks that were unused for longer than their engine keeps one; call every second or so."""
        for worker, entry in self._workers.items():
            self._evict(worker, entry, unused_since=now - entry.ttl_s)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker with its estimate, also in the index: it is gone, or its engine restarted."""
        if self._workers.pop(worker, None) is not None:
            self._index.forget(worker)

    def size_bytes(self) -> int:
        """Estimated memory in bytes, without the index."""
        return sum(
            [
                sys.getsizeof(entry.by_first)
                + sys.getsizeof(entry.order)
                + len(entry.order) * SEGMENT_BYTES
                + entry.blocks * BLOCK_BYTES
                for entry in self._workers.values()
            ]
        )

    def _evict(
        self, worker: WorkerId, entry: _UsedPrompts, *, unused_since: float, most_blocks: int | None = None
    ) -> None:
        """Drop the longest unused blocks, also in the index: last used by `unused_since`, or beyond `most_blocks`."""
        while entry.order:
            segment = next(iter(entry.order))
            kept = 0
            if segment.last_used > unused_since:
                over = 0 if most_blocks is None else entry.blocks - most_blocks
                if over <= 0:
                    return
                kept = max(0, len(segment.blocks) - over)
            self._index.drop_estimated(worker, segment.blocks, kept)
            entry.keep(segment, 0, kept)
