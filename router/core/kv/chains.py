"""Prompt -> bit mask of its holders, by segments of its block hashes, without an entry for each block.

A chained block hash names its whole prefix. So where one block of two prompts is equal, all blocks before it are, and
the end of what they share is found by bisection. A prompt's new blocks are one *segment*, found by its first block; it
is split where prompts part. A prompt of 8,192 blocks that was seen before is compared in two steps.

For holders whose blocks come and go with whole prompts: estimated caches, and prompts just sent. What an engine reports
comes and goes in any block, see `holders.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lorafleet.identity import BlockHash

Blocks = tuple[BlockHash, ...]

# What CPython 3.11 allocates for a segment besides its blocks, and for a block: a place in a tuple, and an integer of
# 60 to 90 bits.
SEGMENT_BYTES, BLOCK_BYTES = 250, 8 + 48


@dataclass(slots=True)
class _ChainSegment:
    """Consecutive blocks of a chain with equal holders.

    more  how often a holder holds them beyond its first time, by its bit; None: nobody does
    """

    blocks: Blocks
    mask: int
    more: dict[int, int] | None = None


class ChainHolders:
    """The holders of every prompt, each of which holds a chain from its first block on.

    Blocks that do not come in chains (two prompts with equal hashes by chance) give wrong depths there, and no error.
    """

    def __init__(self, interned: Callable[[int], int]) -> None:
        """interned  returns one object for equal masks; called for every kept mask."""
        self._interned = interned
        self._segments: dict[BlockHash, _ChainSegment] = {}
        self._blocks = 0
        self._unswept: list[_ChainSegment] = []

    def __len__(self) -> int:
        """How many blocks have a holder."""
        return self._blocks

    @property
    def segments(self) -> list[Blocks]:
        """The blocks of each segment."""
        return [segment.blocks for segment in self._segments.values()]

    def size_bytes(self) -> int:
        """Estimated memory in bytes, without the integers, which are those of the prompts that were given."""
        return sys.getsizeof(self._segments) + self._blocks * 8 + len(self._segments) * SEGMENT_BYTES

    def walk(self, hashes: Blocks) -> list[tuple[int, int]]:
        """(end, mask) of each stretch of equal masks, from the first of these blocks to the first without holders."""
        found: list[tuple[int, int]] = []
        position, count, get = 0, len(hashes), self._segments.get
        while position < count:
            segment = get(hashes[position])
            if segment is None:
                break
            position += common_length(segment.blocks, 0, hashes, position)
            found.append((position, segment.mask))
        return found

    def add(self, chain: Blocks, bit: int) -> int:
        """Add a holder of this whole chain; returns how many of its blocks it did not hold.

        Consecutive segments that it alone holds become one, so that a conversation's turns do not add up.
        """
        covered, new = self._cover(chain, is_new=True), 0
        for segment in covered:
            if not segment.mask & bit:
                segment.mask = self._interned(segment.mask | bit)
                new += len(segment.blocks)
        if len(covered) > 1 and len(set(map(id, filter(self._is_stored, covered)))) == len(covered):
            self._join(chain, covered, bit)
        return new

    def drop(self, part: Blocks, bit: int, start: int = 0) -> int:
        """Drop a holder of the blocks from `start` on, which are the last that it holds; returns how many it held.

        part  of a chain that was added; its first block is the chain's, or follows the end of another added chain
        """
        held = 0
        for segment in self._cover(part, start=start):
            if segment.mask & bit:
                held += len(segment.blocks)
                self._clear(segment, bit)
        return held

    def hold(self, chain: Blocks, bit: int) -> None:
        """Add a holder of this whole chain, counted: each `hold` needs one `release`."""
        for segment in self._cover(chain, is_new=True):
            if segment.mask & bit:
                segment.more = segment.more or {}
                segment.more[bit] = segment.more.get(bit, 0) + 1
            else:
                segment.mask = self._interned(segment.mask | bit)

    def release(self, chain: Blocks, bit: int) -> None:
        """Undo one `hold` of this chain."""
        for segment in self._cover(chain):
            times = segment.more.get(bit, 0) if segment.more else 0
            if times > 1:
                assert segment.more
                segment.more[bit] = times - 1
            elif times:
                assert segment.more
                del segment.more[bit]
            elif segment.mask & bit:
                self._clear(segment, bit)

    def sweep(self, kept: int) -> Iterator[None]:
        """Take every bit that is not among `kept` out of every mask, one segment a step.

        Of the segments made between two steps only parts of others are visited: no such bit may be set meanwhile.
        """
        self._unswept = list(self._segments.values())
        while self._unswept:
            segment = self._unswept.pop()
            if self._is_stored(segment):
                if segment.more:
                    segment.more = {bit: times for bit, times in segment.more.items() if bit & kept}
                self._clear(segment, segment.mask & ~kept)
            yield

    def _cover(self, chain: Blocks, start: int = 0, *, is_new: bool = False) -> list[_ChainSegment]:
        """The segments of the blocks from `start` on; those that reach beyond them are split.

        is_new  blocks that nobody holds become a segment without holders, to which the caller adds one
        """
        covered: list[_ChainSegment] = []
        position = 0
        while position < len(chain):
            segment = self._segments.get(chain[position])
            if segment is None:
                if is_new:
                    covered.append(self._store(chain[position:], 0))
                break
            length = common_length(segment.blocks, 0, chain, position)
            if length < len(segment.blocks):
                self._split(segment, length)
            if position < start < position + length:
                segment = self._split(segment, start - position)
            position += length
            if position > start:
                covered.append(segment)
        return covered

    def _join(self, chain: Blocks, covered: list[_ChainSegment], bit: int) -> None:
        """Make one segment of consecutive ones that this holder alone holds; together they cover the chain."""
        begin = 0
        for is_alone, group in groupby(covered, lambda segment: segment.mask == bit and not segment.more):
            first, *others = group
            end = begin + len(first.blocks) + sum([len(segment.blocks) for segment in others])
            if is_alone and others:
                for segment in others:
                    del self._segments[segment.blocks[0]]
                first.blocks = chain[begin:end]
            begin = end

    def _split(self, segment: _ChainSegment, at: int) -> _ChainSegment:
        """Split a segment before its block `at`; returns the second part, a segment of its own."""
        rest = segment.blocks[at:]
        if self._is_stored(segment):
            self._blocks -= len(rest)
        segment.blocks = segment.blocks[:at]
        second = self._store(rest, segment.mask, dict(segment.more) if segment.more else None)
        if self._unswept:
            self._unswept.append(second)
        return second

    def _store(self, blocks: Blocks, mask: int, more: dict[int, int] | None = None) -> _ChainSegment:
        """A new segment, found by its first block."""
        displaced = self._segments.get(blocks[0])
        if displaced is not None:  # no chains: see the class
            self._blocks -= len(displaced.blocks)
        segment = self._segments[blocks[0]] = _ChainSegment(blocks, mask, more)
        self._blocks += len(blocks)
        return segment

    def _is_stored(self, segment: _ChainSegment) -> bool:
        """Whether the segment is found by its first block: always, where blocks come in chains."""
        return self._segments.get(segment.blocks[0]) is segment

    def _clear(self, segment: _ChainSegment, bits: int) -> None:
        """Clear bits in a segment's mask; one without holders is removed."""
        left = segment.mask & ~bits
        segment.mask = self._interned(left) if left else 0
        if not left and self._is_stored(segment):
            del self._segments[segment.blocks[0]]
            self._blocks -= len(segment.blocks)


def common_length(ours: Sequence[BlockHash], start: int, theirs: Sequence[BlockHash], begin: int) -> int:
    """How many blocks two chains share from `ours[start]` and `theirs[begin]` on, which are equal.

    Chains that have parted never meet again: where one block is equal, all before it are.
    """
    length = min(len(ours) - start, len(theirs) - begin)
    if ours[start + length - 1] == theirs[begin + length - 1]:
        return length
    same = 1
    while length - same > 1:
        middle = (same + length) // 2
        if ours[start + middle - 1] == theirs[begin + middle - 1]:
            same = middle
        else:
            length = middle
    return same


def joined_walks(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Two walks over one prompt as one: at each block the holders of either."""
    if not ours or not theirs:
        return ours or theirs
    if len(ours) == len(theirs) == 1 and ours[0][0] == theirs[0][0]:  # a prompt of one segment in either: the usual one
        return [(ours[0][0], ours[0][1] | theirs[0][1])]
    found, i, k = [], 0, 0
    while i < len(ours) and k < len(theirs):
        our_end, their_end = ours[i][0], theirs[k][0]
        end = min(our_end, their_end)
        found.append((end, ours[i][1] | theirs[k][1]))
        i += our_end == end
        k += their_end == end
    return found + ours[i:] + theirs[k:]
