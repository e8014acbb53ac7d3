"""What engines that publish no events probably hold: the prompts served there of late, as the engine would keep them.

An engine keeps what was used last and evicts the longest unused, so each worker's guess is a list in order of last use,
cut off by age and by size. Where answers carry the engine's own `cached_tokens` the age is learned: a block that was
gone says how long this engine keeps one, and that everything unused for longer is gone too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from lorafleet.identity import BlockHash
from router.core.kv.index import KvIndex, WorkerId

# Seconds that a prompt is thought to stay, at most. A guess, nothing measured: busy engines keep less (their size says
# so, and their answers), idle ones more.
TTL_S = 600.0
# What a shortened age grows by when an engine had more than was predicted.
_REGROWTH = 2.0
# The least that an age is shortened to, so that doubling can bring it back: a guess.
_LEAST_TTL_S = 0.01


@dataclass(frozen=True, slots=True)
class PredictedCache:
    """What was thought to be cached of one prompt when it was sent: when each of its first blocks was last used."""

    worker: WorkerId
    began_at: float
    last_used: tuple[float, ...]


@dataclass(slots=True)
class _EstimatedBlocks:
    ttl_s: float
    # Longest unused first.
    last_used: OrderedDict[BlockHash, float] = field(default_factory=OrderedDict)


class CacheEstimate:
    """The guessed holdings of one base model's workers without events, written into its index."""

    def __init__(self, index: KvIndex, ttl_s: float = TTL_S) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._workers: dict[WorkerId, _EstimatedBlocks] = {}

    def record_served(
        self, worker: WorkerId, hashes: Sequence[BlockHash], *, began_at: float, now: float, most_blocks: int
    ) -> PredictedCache:
        """Note a prompt whose first token is there: the engine has all its blocks now.

        hashes       of the whole prompt
        began_at     when it was sent: what was stored meanwhile proves nothing about it
        most_blocks  the engine's KV blocks, all of them
        returns      to be given to `learn_from_answer` when the answer says what the engine had cached
        """
        entry = self._workers.setdefault(worker, _EstimatedBlocks(self._ttl_s))
        used = (entry.last_used.get(block, began_at + 1) for block in hashes)
        guess = PredictedCache(worker, began_at, tuple(takewhile(lambda at: at <= began_at, used)))
        # Backwards, so that a prompt's first blocks, without which the others count for nothing, are the last to go.
        for block in reversed(hashes):
            entry.last_used[block] = now
            entry.last_used.move_to_end(block)
        self._index.add(worker, hashes)
        self._evict(worker, entry, unused_since=now - entry.ttl_s, most_blocks=most_blocks)
        return guess

    def learn_from_answer(self, guess: PredictedCache, cached_blocks: int) -> None:
        """Learn from the engine's own word on a prompt: forget what it must have evicted, and how long it keeps things.

        cached_blocks  the engine's `cached_tokens` in whole blocks
        """
        entry = self._workers.get(guess.worker)
        if entry is None:
            return
        predicted = len(guess.last_used)
        if cached_blocks > predicted:
            entry.ttl_s = min(self._ttl_s, entry.ttl_s * _REGROWTH)
        # One block less is no news: an engine computes a prompt's last token always, and its block with it.
        elif cached_blocks < predicted - 1:
            gone = guess.last_used[cached_blocks]
            entry.ttl_s = max(_LEAST_TTL_S, min(entry.ttl_s, guess.began_at - gone))
            self._evict(guess.worker, entry, unused_since=gone)

    def expire(self, now: float) -> None:
        """Drop what has been unused for too long; to be called every second or so."""
        for worker, entry in self._workers.items():
            self._evict(worker, entry, unused_since=now - entry.ttl_s)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's guessed holdings: it is gone, or its engine started again."""
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._index.drop(worker, entry.last_used)

    def _evict(
        self, worker: WorkerId, entry: _EstimatedBlocks, *, unused_since: float, most_blocks: int | None = None
    ) -> None:
        """Drop the longest unused: all that were last used by then, and as many as are too many."""
        used, gone = entry.last_used, []
        while used and (
            next(iter(used.values())) <= unused_since or (most_blocks is not None and len(used) > most_blocks)
        ):
            gone.append(used.popitem(last=False)[0])
        if gone:
            self._index.drop(worker, gone)
