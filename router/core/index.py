"""Which worker holds which blocks: a radix tree, kept flat.

A chained block hash names its whole prefix, so the tree's edges need not be stored: one dict from block
hash to a bit mask of holders is the tree, and walking a prompt's hashes while and-ing the masks gives
every worker's contiguous prefix depth in one pass. `holders.py` has how the masks are kept, and
`benchmarks/contenders.py` the designs that lost.

Each worker has a slot of two bits: one says that its engine stored the block, the other that a prompt just
sent will store it. A worker that goes only has its slot retired: no match sees it from then on, and `sweep`
takes its bits out of the masks a few blocks at a time, after which the slot may serve another worker.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NewType

from lorafleet.kv.blocks import BlockHash
from router.core.holders import Holders

WorkerId = NewType("WorkerId", str)
Tier = Literal["device", "host", "storage"]
TIERS: tuple[Tier, ...] = ("device", "host", "storage")

# What CPython 3.11 allocates for a mask of up to 64 workers.
_MASK_BYTES = 48
# Masks nobody uses any more are looked for once there are so many more of them than blocks; so many have their workers
# named.
_SPARE_MASKS = 4096
_NOTHING: tuple[tuple[BlockHash, ...], list[tuple[int, int]]] = ((), [])


@dataclass(slots=True, eq=False)
class Hold:
    """Blocks that count as stored on the device for a while, though no engine has said so; see `release`."""

    worker: WorkerId
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class _Worker:
    added: int
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    holds: set[Hold] = field(default_factory=set)
    # Holds of a block beyond its first.
    more_holds: dict[BlockHash, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return self.added << 1


class KvIndex:
    """The blocks of one base model at one block size, over all workers. One writer: the event loop."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tiers = {tier: Holders(self._interned) for tier in TIERS}
        self._device = self._tiers["device"]
        # Whether any block was ever stored below the device: most engines have nothing there.
        self._has_lower = False
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        # Of masks seen lately; until a slot changes hands.
        self._named: dict[int, tuple[WorkerId, ...]] = {}
        self._live = 0
        # The prompt walked last, and what was found; until something changes.
        self._walked: tuple[tuple[BlockHash, ...], list[tuple[int, int]]] = _NOTHING
        # Equal masks are one object: memory, and "did anything change?" is a comparison of pointers.
        self._masks: dict[int, int] = {}
        self._slots = 0
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """How many distinct blocks are kept, over all tiers; blocks of retired workers count until swept."""
        return sum(map(len, self._tiers.values()))

    def size_bytes(self) -> int:
        """About how much memory the index takes: tables, hashes and masks."""
        masks = sys.getsizeof(self._masks) + len(self._masks) * _MASK_BYTES
        return masks + sum(holders.size_bytes() for holders in self._tiers.values())

    def workers(self) -> Mapping[WorkerId, int]:
        """Blocks added per worker, over its tiers; what is only held does not count."""
        return {worker: sum(entry.blocks.values()) for worker, entry in self._workers.items()}

    def blocks(self, worker: WorkerId, tier: Tier) -> int:
        """How many blocks a worker has at a tier."""
        entry = self._workers.get(worker)
        return entry.blocks[tier] if entry else 0

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Contiguous prefix depth in blocks of every worker that has at least the first block on its device."""
        depths: dict[WorkerId, int] = {}
        walked, alive, depth = self._walk(tuple(hashes)), self._live, 0
        for end, mask in walked:
            still = alive & (mask | mask >> 1)
            if still != alive:
                if depth:
                    lost = alive ^ still
                    depths.update(dict.fromkeys(self._named.get(lost) or self._members(lost), depth))
                alive = still
            if not alive:
                return depths
            depth = end
        if depth:
            depths.update(dict.fromkeys(self._named.get(alive) or self._members(alive), depth))
        return depths

    def lower_tiers(
        self, hashes: Sequence[BlockHash], depths: Mapping[WorkerId, int]
    ) -> dict[WorkerId, tuple[int, int]]:
        """Blocks that follow each worker's device prefix without a gap, as (in its host memory, in its storage).

        depths   what `match(hashes)` answered
        returns  only workers with such blocks; a block that is in both counts as the host's
        """
        if not self._has_lower:
            return {}
        host, storage = self._tiers["host"], self._tiers["storage"]
        blocks = tuple(hashes)
        in_host, in_storage = host.masks(blocks), storage.masks(blocks)
        found = {}
        for worker, entry in self._workers.items():
            if entry.blocks["host"] or entry.blocks["storage"]:
                bit, start, from_host = entry.added, depths.get(worker, 0), 0
                end = start
                while end < len(hashes) and (in_host[end] | in_storage[end]) & bit:
                    from_host += in_host[end] & bit == bit
                    end += 1
                if end > start:
                    found[worker] = (from_host, end - start - from_host)
        return found

    def add(
        self, worker: WorkerId, hashes: Iterable[BlockHash], tier: Tier = "device", *, is_chain: bool = False
    ) -> int:
        """Note that a worker has these blocks at a tier; returns how many it was not known to have there.

        is_chain  they follow one another in a prompt, as those of one store do; makes matches faster, no more
        """
        entry = self._entry(worker)
        self._walked = _NOTHING
        blocks = tuple(dict.fromkeys(hashes))
        changed = len(blocks) - len(self._tiers[tier].set(blocks, entry.added, is_chain=is_chain))
        entry.blocks[tier] += changed
        self._has_lower |= changed > 0 and tier != "device"
        return changed

    def drop(self, worker: WorkerId, hashes: Iterable[BlockHash], tier: Tier = "device") -> int:
        """Note that a worker no longer has these blocks at a tier; returns how many it was not known to have."""
        self._walked = _NOTHING
        blocks = tuple(dict.fromkeys(hashes))
        entry = self._workers.get(worker)
        if entry is None:
            return len(blocks)
        unknown = len(self._tiers[tier].clear(blocks, entry.added))
        entry.blocks[tier] -= len(blocks) - unknown
        return unknown

    def replace(self, worker: WorkerId, tiers: Mapping[Tier, Iterable[BlockHash]]) -> None:
        """Put what a worker says it has in the place of what was known; `{}` empties it. Holds stay."""
        entry = self._entry(worker)
        self._retire(entry)
        entry.added = self._slot(worker)
        entry.blocks = dict.fromkeys(TIERS, 0)
        entry.more_holds.clear()
        for hold in entry.holds:
            self._hold(entry, hold.hashes)
        for tier, hashes in tiers.items():
            self.add(worker, hashes, tier)

    def hold(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> Hold:
        """Count a prompt's blocks as stored until `release`: it was just sent and will be cached in a moment.

        Those that the worker has, from the first on, are left out: they are stored as it is.
        """
        entry = self._entry(worker)
        blocks, stored = tuple(hashes), 0
        for end, mask in self._walk(blocks):
            if not mask & entry.added:
                break
            stored = end
        hold = Hold(worker, tuple(dict.fromkeys(blocks[stored:])))
        if hold.hashes:
            entry.holds.add(hold)
            self._hold(entry, hold.hashes)
        return hold

    def release(self, hold: Hold) -> None:
        """Give a hold back, once; one taken before its worker was forgotten is already gone."""
        entry = self._workers.get(hold.worker)
        if entry is None or hold not in entry.holds:
            return
        self._walked = _NOTHING
        entry.holds.remove(hold)
        last = hold.hashes
        if entry.more_holds:
            last = tuple(block for block in last if not _count_down(entry.more_holds, block))
        self._device.clear(last, entry.held)

    def forget(self, worker: WorkerId) -> None:
        """Drop everything that a worker has and holds: it is gone. Costs the same however much that is."""
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._retire(entry)

    def sweep(self, budget: int) -> bool:
        """Clean up after workers that went, at most `budget` blocks of it; returns whether there is more to do.

        Until it has answered False once, blocks of workers that went take memory, and their bits widen every
        mask. Beginning lists the blocks in one go: 3 to 9 ms for a million.
        """
        if self._sweep is None:
            if not self._retired and len(self._masks) <= 2 * len(self) + _SPARE_MASKS:
                return False
            self._sweep = self._sweeping()
        for _ in range(budget):
            if next(self._sweep, self) is self:
                self._sweep = None
                return bool(self._retired)
        return True

    def _sweeping(self) -> Iterator[None]:
        """One block a step. A block stored meanwhile needs no visit: nobody sets a retired bit."""
        retired, self._retired = self._retired, []
        # Whatever is still in use finds its way into the new table, here or by being stored.
        self._masks = {}
        kept = ~sum(bit | bit << 1 for bit in retired)
        for holders in self._tiers.values():
            yield from holders.sweep(kept)
        for bit in retired:
            heappush(self._free, bit)

    def _entry(self, worker: WorkerId) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            entry = self._workers[worker] = _Worker(self._slot(worker))
        return entry

    def _slot(self, worker: WorkerId) -> int:
        """A slot that no mask mentions, given to a worker: its lower bit."""
        if self._free:
            bit = heappop(self._free)
        else:
            bit = 1 << 2 * self._slots
            self._slots += 1
        self._by_bit[bit] = worker
        self._walked = _NOTHING
        self._named.clear()
        self._live |= bit
        return bit

    def _retire(self, entry: _Worker) -> None:
        del self._by_bit[entry.added]
        self._named.clear()
        self._live ^= entry.added
        self._retired.append(entry.added)

    def _hold(self, entry: _Worker, blocks: tuple[BlockHash, ...]) -> None:
        self._walked = _NOTHING
        for block in self._device.set(blocks, entry.held, is_chain=True):
            entry.more_holds[block] = entry.more_holds.get(block, 0) + 1

    def _interned(self, mask: int) -> int:
        return self._masks.setdefault(mask, mask)

    def _walk(self, blocks: tuple[BlockHash, ...]) -> list[tuple[int, int]]:
        """`Holders.walk` on the device; a prompt is matched and then held, mostly with nothing between."""
        if self._walked[0] is not blocks:
            self._walked = blocks, self._device.walk(blocks)
        return self._walked[1]

    def _members(self, mask: int) -> tuple[WorkerId, ...]:
        """The workers of these bits, which are live ones'; kept for the next time."""
        workers, left = [], mask
        while left:
            bit = left & -left
            workers.append(self._by_bit[bit])
            left ^= bit
        if len(self._named) >= _SPARE_MASKS:
            self._named.clear()
        named = self._named[mask] = tuple(workers)
        return named


def _count_down(counts: dict[BlockHash, int], key: BlockHash) -> bool:
    """Take one from a count that is only kept while above zero; returns whether there was one to take."""
    count = counts.get(key)
    if count is None:
        return False
    if count == 1:
        del counts[key]
    else:
        counts[key] = count - 1
    return True
