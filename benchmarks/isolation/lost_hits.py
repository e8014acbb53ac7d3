"""The hits of a trace that are lost where cached prompts are a tenant's own: one cache, evicted by age."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from benchmarks.trace.workload import BLOCK, TraceLine, key, session_of

ZIPF = 0.9


def hit_share(lines: Sequence[TraceLine], *, capacity: int, owners: int, seed: int = 1) -> float:
    """The share of prompt tokens that are found cached, where each session belongs to one of so many owners.

    capacity  blocks of all engines together, which are evicted by age
    owners    1: everyone shares
    """
    cache: OrderedDict[int, None] = OrderedDict()
    owner_of = _owners(lines, owners, Random(seed))
    found = asked = 0
    for line in lines:
        owner = owner_of[_session(line)]
        keys = [key(owner, block) for block in line.ids[: line.prompt_tokens // BLOCK]]
        found += BLOCK * next((depth for depth, one in enumerate(keys) if one not in cache), len(keys))
        asked += line.prompt_tokens
        for one in reversed(keys):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found / asked


def with_common_beginning(lines: Sequence[TraceLine], blocks: int) -> list[TraceLine]:
    """The trace with so many blocks before each prompt, which are the same in all."""
    common = tuple(range(-blocks, 0))
    return [
        replace(line, prompt_tokens=line.prompt_tokens + blocks * BLOCK, ids=(*common, *line.ids)) for line in lines
    ]


def _owners(lines: Sequence[TraceLine], owners: int, rng: Random) -> dict[int, int]:
    """Session -> owner, some of whom have many sessions and most of whom few."""
    weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(owners)))
    sessions = dict.fromkeys(map(_session, lines))
    return dict(zip(sessions, rng.choices(range(owners), cum_weights=weights, k=len(sessions)), strict=True))


def _session(line: TraceLine) -> int:
    """The line's conversation, whatever blocks were put before it."""
    own = [block for block in line.ids if block >= 0]
    return session_of(replace(line, ids=tuple(own)))
