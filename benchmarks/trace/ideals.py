"""What any cache could save of a run's prompt tokens, told its requests in order: shared LRU, Belady's MIN, all."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.trace.workload import BLOCK, TraceRequest


@dataclass(frozen=True, slots=True)
class Ideals:
    """Cached share of the prompt tokens: of one LRU over all replicas' blocks, of MIN, and without a limit.

    lru_answers  the LRU when answers take room in it too, as they do in an engine's cache
    """

    lru: float
    lru_answers: float
    belady: float
    unlimited: float


def ideals(requests: Sequence[TraceRequest], blocks: int) -> Ideals:
    """The bounds for a cache of `blocks` blocks in which nothing is ever in use.

    LRU is what one engine with all the memory would do, and no bound: MIN is. A prompt's last token is always computed
    (vLLM 0.32), so that a prompt of whole blocks saves one block less.
    """
    tokens = sum(request.prompt_tokens for request in requests)
    chains = [request.keys for request in requests]
    most = [(request.prompt_tokens - 1) // BLOCK for request in requests]
    return Ideals(
        lru=sum(_lru(chains, most, blocks)) * BLOCK / tokens,
        lru_answers=sum(_lru([_with_answer(request) for request in requests], most, blocks)) * BLOCK / tokens,
        belady=sum(_belady(chains, most, blocks)) * BLOCK / tokens,
        unlimited=sum(_lru(chains, most, 1 << 60)) * BLOCK / tokens,
    )


def _with_answer(request: TraceRequest) -> list[int]:
    """Its blocks and those that its answer fills or begins; nobody else's, and so below zero."""
    blocks = -(-(request.prompt_tokens + request.output_tokens) // BLOCK)
    return request.keys + [-(request.number << 12) - i - 1 for i in range(blocks - len(request.keys))]


def _lru(chains: Sequence[Sequence[int]], most: Sequence[int], blocks: int) -> list[int]:
    held = OrderedDict[int, None]()
    hits = []
    for chain, limit in zip(chains, most, strict=True):
        depth = 0
        while depth < limit and chain[depth] in held:
            depth += 1
        hits.append(depth)
        for key in reversed(chain):  # its end goes before its beginning
            held[key] = None
            held.move_to_end(key)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits


def _belady(chains: Sequence[Sequence[int]], most: Sequence[int], blocks: int) -> list[int]:
    """Whoever is used again latest goes first, and is not even let in. A prefix is never used after what follows it,
    so that what is kept is a set of prefixes.
    """
    never = len(chains)
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for position in range(len(chains) - 1, -1, -1):
        next_uses.append([following.get(key, never) for key in chains[position]])
        for key in chains[position]:
            following[key] = position
    next_uses.reverse()
    held: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []
    hits = []
    for chain, limit, uses in zip(chains, most, next_uses, strict=True):
        depth = 0
        while depth < limit and chain[depth] in held:
            depth += 1
        hits.append(depth)
        for place, (key, use) in enumerate(zip(chain, uses, strict=True)):
            held[key] = use
            heapq.heappush(latest, (-use, -place, key))
        while len(held) > blocks:
            use, _, key = heapq.heappop(latest)
            if held.get(key) == -use:
                del held[key]
    return hits
