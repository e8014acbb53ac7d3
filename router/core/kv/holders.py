"""Block hash -> bit mask of its holders, where neighbours with the same holders share one entry of work.

The simplest shape, one dict from block to mask, costs a cache miss a block once it is larger than the
processor's caches: 22 us for 512 blocks among a thousand, 90 us among a million (5 and 7 us here). Blocks come
in chains, and chains are held, stored and dropped in long pieces, so pieces with one mask are kept as *runs*:
a prompt's walk looks up one block a run and compares the rest, which lie side by side. Only what is known to be
a chain becomes a run; blocks that came one by one (decoding) or mixed (an agent's changes, a snapshot) are plain
entries until a prompt goes over them.

For the answers it does not matter: a run is compared in full, so any blocks in any order are exact.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import eq

from lorafleet.identity import BlockHash

Blocks = tuple[BlockHash, ...]

# A shorter run costs more memory than it saves time; a longer one more time whenever it is cut. A match of 512 blocks
# among a million took 1.47 times what it took among a thousand with at most 256 in a run, 1.33 times with 512, and
# 1.37 times with 1,024 (medians of three).
_SHORTEST, _LONGEST = 4, 512
# Plain entries become a run where a walk finds at least so many of them: making one takes as long as a few walks.
_WORTH_A_RUN = 8
# What CPython 3.11 allocates for an integer of 60 to 90 bits, and for a run besides its blocks.
_HASH_BYTES, _RUN_BYTES = 48, 200


@dataclass(slots=True)
class _BlockRun:
    mask: int
    blocks: Blocks


class BlockHolders:
    """The masks of one tier. Lists of blocks given to `set` and `clear` hold no block twice."""

    def __init__(self, interned: Callable[[int], int]) -> None:
        """interned  returns one object for equal masks; called for every mask that is kept."""
        self._interned = interned
        # A mask, or for a block inside a run that run's number, which is negative. All values are integers,
        # so that the garbage collector never has to walk this dict.
        self._at: dict[BlockHash, int] = {}
        self._runs: dict[int, _BlockRun] = {}
        self._next_run = -1

    def __len__(self) -> int:
        return len(self._at)

    def size_bytes(self) -> int:
        """About how much memory this takes."""
        tables = sys.getsizeof(self._at) + sys.getsizeof(self._runs)
        return tables + len(self._at) * (_HASH_BYTES + 8) + len(self._runs) * _RUN_BYTES

    def masks(self, hashes: Blocks) -> list[int]:
        """The mask of every block, 0 where nobody holds it."""
        values = map(self._at.get, hashes, repeat(0))
        return [value if value >= 0 else self._runs[value].mask for value in values]

    def mask(self, block: BlockHash) -> int:
        """Who holds it."""
        value = self._at.get(block, 0)
        return value if value >= 0 else self._runs[value].mask

    def walk(self, hashes: Blocks) -> list[tuple[int, int]]:
        """Stretches of one mask each, from the first of these blocks to the first that nobody holds: [(end, mask)]."""
        found: list[tuple[int, int]] = []
        position, count, get, runs = 0, len(hashes), self._at.get, self._runs
        while position < count:
            value = get(hashes[position], 0)
            if value < 0:
                run = runs[value]
                mask = run.mask
                position = self._leave(run, _place(run, hashes[position]), hashes, position)
            elif value:
                mask = value
                position = self._stretch(hashes, position, mask)
            else:
                break
            found.append((position, mask))
        return found

    def _stretch(self, hashes: Blocks, start: int, mask: int) -> int:
        """Where a stretch of plain entries with this mask ends. A long one becomes a run, so that the next prompt that
        goes over it does so at once.
        """
        end = start + 1
        for value in map(self._at.get, hashes[end : start + _LONGEST], repeat(0)):
            if value is not mask:
                break
            end += 1
        blocks = hashes[start:end]
        if len(blocks) >= _WORTH_A_RUN and len(set(blocks)) == len(blocks):
            self._keep(blocks, mask)
        return end

    def set(self, hashes: Blocks, bit: int, *, is_chain: bool = False) -> int:
        """Set a bit in the masks of these blocks; returns how many had it.

        is_chain  they follow one another in a prompt: those that are no run yet become one
        """
        at = self._at
        # Two shortcuts that run in C, for what engines nearly always say: blocks that nobody holds yet, and blocks of
        # which none is in a run.
        if at.keys().isdisjoint(hashes):
            if is_chain:
                self._keep(hashes, bit)
            else:
                at.update(dict.fromkeys(hashes, self._interned(bit)))
            return 0
        if not is_chain:
            values = list(map(at.get, hashes, repeat(0)))
            if min(values) >= 0:
                becomes = {value: self._interned(value | bit) for value in set(values)}
                at.update(zip(hashes, map(becomes.__getitem__, values), strict=True))
                return sum([1 for value in values if value & bit])
        return self._set_by_stretches(hashes, bit, is_chain=is_chain)

    def _set_by_stretches(self, hashes: Blocks, bit: int, *, is_chain: bool) -> int:
        had = position = 0
        while position < len(hashes):
            block = hashes[position]
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                start = _place(run, block)
                after = self._leave(run, start, hashes, position)
                if run.mask & bit:
                    had += after - position
                else:
                    self._change(value, start, start + after - position, run.mask | bit)
            else:
                after = self._alike(hashes, position, value) if is_chain else position + 1
                if value & bit:
                    had += after - position
                if is_chain or not value & bit:
                    self._keep(hashes[position:after], value | bit)
            position = after
        return had

    def clear(self, hashes: Blocks, bit: int) -> int:
        """Clear a bit in the masks of these blocks; returns how many had it not."""
        had_not = position = 0
        while position < len(hashes):
            block = hashes[position]
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                start = _place(run, block)
                after = self._leave(run, start, hashes, position)
                if run.mask & bit:
                    self._change(value, start, start + after - position, run.mask ^ bit)
                else:
                    had_not += after - position
                position = after
            else:
                if not value & bit:
                    had_not += 1
                elif value == bit:
                    del self._at[block]
                else:
                    self._at[block] = self._interned(value ^ bit)
                position += 1
        return had_not

    def sweep(self, kept: int) -> Iterator[None]:
        """Take every bit that is not among `kept` out of every mask, about a block a step.

        A block stored between two steps is not visited, so nobody may set such a bit meanwhile.
        """
        for block in list(self._at):
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                self._change(value, 0, len(run.blocks), run.mask & kept)
            elif value & kept:
                self._at[block] = self._interned(value & kept)
            elif value:
                del self._at[block]
            yield

    def _alike(self, hashes: Blocks, position: int, value: int) -> int:
        """Where a stretch of plain entries with one mask ends; of blocks that nobody holds nearly always the end."""
        if not value and self._at.keys().isdisjoint(hashes[position:]):
            return len(hashes)
        for after in range(position + 1, len(hashes)):
            if self._at.get(hashes[after], 0) != value:
                return after
        return len(hashes)

    @staticmethod
    def _leave(run: _BlockRun, start: int, hashes: Blocks, position: int) -> int:
        """The position at which a walk that meets a run at its block `start` is no longer in it."""
        blocks = run.blocks
        length = min(len(blocks) - start, len(hashes) - position)
        if hashes[position + length - 1] != blocks[start + length - 1]:
            # Where two chains have parted, they never meet again: so their parting is found without a look at each.
            same = 1
            while length - same > 1:
                middle = (same + length) // 2
                if hashes[position + middle - 1] == blocks[start + middle - 1]:
                    same = middle
                else:
                    length = middle
            length = same
        if hashes[position : position + length] == blocks[start : start + length]:
            return position + length
        # At least one of the two is no chain.
        ours, theirs = hashes[position : position + length], blocks[start : start + length]
        return position + list(map(eq, ours, theirs)).index(False)

    def _change(self, number: int, start: int, end: int, mask: int) -> None:
        """Give the blocks [start, end) of a run another mask; 0 means that they go."""
        run = self._runs[number]
        if start == 0 and end == len(run.blocks):
            if mask:
                run.mask = self._interned(mask)
            else:
                del self._runs[number]
                self._keep(run.blocks, 0)
            return
        parts = [(run.blocks[:start], run.mask), (run.blocks[start:end], mask), (run.blocks[end:], run.mask)]
        # Of a part that goes the length does not count: it is never the longest.
        parts.sort(key=lambda part: len(part[0]) if part[1] else 0)
        longest, longest_mask = parts[-1]
        if len(longest) >= _SHORTEST:
            # The run goes on as its longest part, whose blocks then need no new number.
            run.blocks, run.mask = longest, self._interned(longest_mask)
            parts.pop()
        else:
            del self._runs[number]
        for blocks, part_mask in parts:
            if blocks:
                self._keep(blocks, part_mask)

    def _keep(self, blocks: Blocks, mask: int) -> None:
        if not mask:
            for block in blocks:
                del self._at[block]
        elif len(blocks) == 1:
            self._at[blocks[0]] = self._interned(mask)
        elif len(blocks) < _SHORTEST:
            self._at.update(dict.fromkeys(blocks, self._interned(mask)))
        else:
            for start in range(0, len(blocks), _LONGEST):
                part = blocks[start : start + _LONGEST]
                self._runs[self._next_run] = _BlockRun(self._interned(mask), part)
                self._at.update(dict.fromkeys(part, self._next_run))
                self._next_run -= 1


def _place(run: _BlockRun, block: BlockHash) -> int:
    """Where in a run a block is; engines add from the front and evict from the back."""
    if run.blocks[0] == block:
        return 0
    return len(run.blocks) - 1 if run.blocks[-1] == block else run.blocks.index(block)
