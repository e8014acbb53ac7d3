"""Block hash -> bit mask of its holders, with consecutive blocks of equal holders kept as one run.

One dict from block to mask costs a cache miss a block in a large index: 90 us for 512 blocks among a million. Blocks
come in chains that are stored and dropped in long pieces. So a piece with one mask is a *run*: a walk looks up its
first block and compares the others, which lie side by side (7 us). Blocks that came one by one (decoding) or mixed (an
agent's changes or snapshot) are plain entries until a prompt's walk passes them.

Answers are exact in any case, because runs are compared in full.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import eq

from lorafleet.identity import BlockHash
from router.core.kv.chains import Blocks, common_length

# A shorter run costs more memory than it saves time; a longer one costs more time whenever it is cut.
_SHORTEST, _LONGEST = 4, 512
# Plain entries of one mask become a run from so many on: making a run takes as long as a few walks.
_MIN_NEW_RUN = 8
# A run of at most so many blocks is compared whole, which is mostly how a walk leaves it; in a longer one the end is
# searched.
_SHORT_RUN = 64
# What CPython 3.11 allocates for an integer of 60 to 90 bits, and for a run besides its blocks.
_HASH_BYTES, _RUN_BYTES = 48, 200


@dataclass(slots=True)
class _BlockRun:
    mask: int
    blocks: Blocks


class BlockHolders:
    """The holders of every block at one tier. Blocks given to `set` and `clear` must be unique."""

    def __init__(self, interned: Callable[[int], int]) -> None:
        """interned  returns one object for equal masks; called for every kept mask."""
        self._interned = interned
        # Each block's mask, or the negative number of its run. All values are integers, so that the garbage collector
        # never walks this dict.
        self._at: dict[BlockHash, int] = {}
        self._runs: dict[int, _BlockRun] = {}
        self._next_run = -1

    def __len__(self) -> int:
        """How many blocks have a holder."""
        return len(self._at)

    def size_bytes(self) -> int:
        """Estimated memory in bytes."""
        tables = sys.getsizeof(self._at) + sys.getsizeof(self._runs)
        return tables + len(self._at) * (_HASH_BYTES + 8) + len(self._runs) * _RUN_BYTES

    @property
    def runs(self) -> list[Blocks]:
        """The blocks of each run."""
        return [run.blocks for run in self._runs.values()]

    def masks(self, hashes: Blocks) -> list[int]:
        """The mask of each block; 0 without holders."""
        values = map(self._at.get, hashes, repeat(0))
        return [value if value >= 0 else self._runs[value].mask for value in values]

    def mask(self, block: BlockHash) -> int:
        """The mask of one block; 0 without holders."""
        value = self._at.get(block, 0)
        return value if value >= 0 else self._runs[value].mask

    def walk(self, hashes: Blocks) -> list[tuple[int, int]]:
        """(end, mask) of each stretch of equal masks, from the first of these blocks to the first without holders.

        Stores long stretches of plain entries as runs, which changes no mask.
        """
        found: list[tuple[int, int]] = []
        position, count, get, runs = 0, len(hashes), self._at.get, self._runs
        while position < count:
            value = get(hashes[position], 0)
            if value < 0:
                run = runs[value]
                mask, blocks = run.mask, run.blocks
                end = position + len(blocks)
                if len(blocks) <= _SHORT_RUN and hashes[position:end] == blocks:
                    position = end
                else:
                    position = self._leave_at(run, _position_in(run, hashes[position]), hashes, position)
            elif value:
                mask = value
                position = self._end_of_stretch(hashes, position, mask)
            else:
                break
            found.append((position, mask))
        return found

    def _end_of_stretch(self, hashes: Blocks, start: int, mask: int) -> int:
        """The end of a stretch of plain entries with this mask. Stores a long stretch as a run, for the next walk."""
        end = start + 1
        for value in map(self._at.get, hashes[end : start + _LONGEST], repeat(0)):
            if value is not mask:
                break
            end += 1
        blocks = hashes[start:end]
        if len(blocks) >= _MIN_NEW_RUN and len(set(blocks)) == len(blocks):
            self._store(blocks, mask)
        return end

    def set(self, hashes: Blocks, bit: int, *, is_chain: bool = False) -> int:
        """Set a bit in the masks of these blocks; returns how many had it.

        is_chain  the blocks follow one another in a prompt: plain entries become a run
        """
        at = self._at
        # Two shortcuts that run in C, for the usual events: no block has a holder yet, or none is in a run.
        if at.keys().isdisjoint(hashes):
            if is_chain:
                self._store(hashes, bit)
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
        """`set` for blocks of which some are stored: one run or stretch of equal masks at a time."""
        had = position = 0
        while position < len(hashes):
            block = hashes[position]
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                start = _position_in(run, block)
                after = self._leave_at(run, start, hashes, position)
                if run.mask & bit:
                    had += after - position
                else:
                    self._set_run_mask(value, start, start + after - position, run.mask | bit)
            else:
                after = self._end_of_alike(hashes, position, value) if is_chain else position + 1
                if value & bit:
                    had += after - position
                if is_chain or not value & bit:
                    self._store(hashes[position:after], value | bit)
            position = after
        return had

    def clear(self, hashes: Blocks, bit: int) -> int:
        """Clear a bit in the masks of these blocks; returns how many did not have it."""
        without_bit = position = 0
        while position < len(hashes):
            block = hashes[position]
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                start = _position_in(run, block)
                after = self._leave_at(run, start, hashes, position)
                if run.mask & bit:
                    self._set_run_mask(value, start, start + after - position, run.mask ^ bit)
                else:
                    without_bit += after - position
                position = after
            else:
                if not value & bit:
                    without_bit += 1
                elif value == bit:
                    del self._at[block]
                else:
                    self._at[block] = self._interned(value ^ bit)
                position += 1
        return without_bit

    def sweep(self, kept: int) -> Iterator[None]:
        """Take every bit that is not among `kept` out of every mask, about one block a step.

        Blocks stored between two steps are not visited: no such bit may be set meanwhile.
        """
        for block in list(self._at):
            value = self._at.get(block, 0)
            if value < 0:
                run = self._runs[value]
                self._set_run_mask(value, 0, len(run.blocks), run.mask & kept)
            elif value & kept:
                self._at[block] = self._interned(value & kept)
            elif value:
                del self._at[block]
            yield

    def _end_of_alike(self, hashes: Blocks, position: int, value: int) -> int:
        """The end of a stretch of plain entries with one mask."""
        if not value and self._at.keys().isdisjoint(hashes[position:]):
            return len(hashes)
        for after in range(position + 1, len(hashes)):
            if self._at.get(hashes[after], 0) != value:
                return after
        return len(hashes)

    @staticmethod
    def _leave_at(run: _BlockRun, start: int, hashes: Blocks, position: int) -> int:
        """The position at which a walk leaves a run that it entered at the run's block `start`."""
        blocks = run.blocks
        length = common_length(blocks, start, hashes, position)
        if hashes[position : position + length] == blocks[start : start + length]:
            return position + length
        # At least one of the two is not a chain.
        ours, theirs = hashes[position : position + length], blocks[start : start + length]
        return position + list(map(eq, ours, theirs)).index(False)

    def _set_run_mask(self, number: int, start: int, end: int, mask: int) -> None:
        """Give the blocks [start, end) of a run another mask; 0 removes them."""
        run = self._runs[number]
        if start == 0 and end == len(run.blocks):
            if mask:
                run.mask = self._interned(mask)
            else:
                del self._runs[number]
                self._store(run.blocks, 0)
            return
        parts = [(run.blocks[:start], run.mask), (run.blocks[start:end], mask), (run.blocks[end:], run.mask)]
        # A removed part is never the longest.
        parts.sort(key=lambda part: len(part[0]) if part[1] else 0)
        longest, longest_mask = parts[-1]
        if len(longest) >= _SHORTEST:
            # The run becomes its longest part, whose blocks then need no new number.
            run.blocks, run.mask = longest, self._interned(longest_mask)
            parts.pop()
        else:
            del self._runs[number]
        for blocks, part_mask in parts:
            if blocks:
                self._store(blocks, part_mask)

    def _store(self, blocks: Blocks, mask: int) -> None:
        """Give blocks that are in no run this mask: as a run if they are enough, else as plain entries; 0 removes."""
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


def _position_in(run: _BlockRun, block: BlockHash) -> int:
    """The position of a block in its run. Tries front and back first, where engines store and evict."""
    if run.blocks[0] == block:
        return 0
    return len(run.blocks) - 1 if run.blocks[-1] == block else run.blocks.index(block)
