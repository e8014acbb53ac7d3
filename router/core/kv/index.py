"""Which worker holds which blocks: a radix tree, kept flat.

A chained block hash names its whole prefix, so the tree's edges need not be stored: one dict from block
hash to a bit mask of holders is the tree, and walking a prompt's hashes while and-ing the masks gives
every worker's contiguous prefix depth in one pass. `holders.py` has how the masks are kept, and
`benchmarks/contenders.py` the designs that lost.

Each worker has a bit in the masks. What a prompt just sent will store is kept apart, with the same bits: it is
little, comes and goes with every request, and matters only where what a worker has stored ends. A worker that goes
only has its bit retired: no match sees it from then on, and `sweep` takes it out of the masks a few blocks at a time,
after which it may serve another worker.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import repeat
from typing import NewType

import msgspec

from lorafleet.identity import TIERS, BlockHash, Tier
from router.core.kv.holders import BlockHolders

WorkerId = NewType("WorkerId", str)

# What CPython 3.11 allocates for a mask of up to 64 workers.
_MASK_BYTES = 48
# Masks nobody uses any more are looked for once there are so many more of them than blocks; so many have their workers
# named.
_SPARE_MASKS = 4096
_NOTHING: tuple[tuple[BlockHash, ...], list[tuple[int, int]]] = ((), [])


class PendingBlocks(msgspec.Struct, eq=False):
    """Blocks that count as stored on the device for a while, though no engine has said so; see `remove_pending`."""

    worker: WorkerId
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True, eq=False)
class IndexDraft:
    """What a worker says it has, put together a piece at a time; no match sees it until it is `adopt`ed."""

    bit: int
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


@dataclass(slots=True)
class _IndexedWorker:
    bit: int
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    holds: set[PendingBlocks] = field(default_factory=set)
    # Holds of a block beyond its first.
    more_holds: dict[BlockHash, int] = field(default_factory=dict)


class KvIndex:
    """The blocks of one base model at one block size, over all workers. One writer: the event loop."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tiers = {tier: BlockHolders(self._interned) for tier in TIERS}
        self._device = self._tiers["device"]
        # Masks of whom a block is held for.
        self._held: dict[BlockHash, int] = {}
        # Whether any block was ever stored below the device: most engines have nothing there.
        self._has_lower = False
        self._workers: dict[WorkerId, _IndexedWorker] = {}
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
        """How many blocks are kept at each tier and how many are held; those of retired workers count until swept."""
        return sum(map(len, self._tiers.values())) + len(self._held)

    def size_bytes(self) -> int:
        """About how much memory the index takes: tables, hashes and masks."""
        masks = sys.getsizeof(self._masks) + len(self._masks) * _MASK_BYTES + sys.getsizeof(self._held)
        return masks + sum(holders.size_bytes() for holders in self._tiers.values())

    def block_counts(self) -> Mapping[WorkerId, int]:
        """Blocks added per worker, over its tiers; what is only held does not count."""
        return {worker: sum(entry.blocks.values()) for worker, entry in self._workers.items()}

    def blocks(self, worker: WorkerId, tier: Tier) -> int:
        """How many blocks a worker has at a tier."""
        entry = self._workers.get(worker)
        return entry.blocks[tier] if entry else 0

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Contiguous prefix depth in blocks of every worker that has at least the first block on its device."""
        depths: dict[WorkerId, int] = {}
        blocks, alive, depth = tuple(hashes), self._live, 0
        for end, mask in self._walk(blocks):
            still = alive & mask
            if still != alive:
                self._stop(alive ^ still, blocks, depth, depths)
                alive = still
            if not alive:
                return depths
            depth = end
        self._stop(alive, blocks, depth, depths)
        return depths

    def _stop(self, workers: int, blocks: tuple[BlockHash, ...], depth: int, depths: dict[WorkerId, int]) -> None:
        """Note the depth of these workers, whose stored blocks end there; of some what they hold goes on."""
        if self._held and depth < len(blocks):
            held = self._held.get(blocks[depth], 0) & workers
            if held:
                workers ^= held
                self._go_on(held, blocks, depth, depths)
        if depth and workers:
            depths.update(dict.fromkeys(self._named.get(workers) or self._members(workers), depth))

    def _go_on(self, workers: int, blocks: tuple[BlockHash, ...], depth: int, depths: dict[WorkerId, int]) -> None:
        """Note how far these workers' blocks go from there on, stored or held."""
        same = -1
        for mask in map(self._held.get, blocks[depth:], repeat(0)):
            if mask is not same:
                same = mask
                lost = workers & ~mask
                if lost:
                    same = -1  # what is stored may be otherwise at the next block
                    lost &= ~self._device.mask(blocks[depth])
                    if lost:
                        depths.update(dict.fromkeys(self._members(lost), depth))
                        workers ^= lost
                        if not workers:
                            return
            depth += 1
        depths.update(dict.fromkeys(self._members(workers), depth))

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
                bit, start, from_host = entry.bit, depths.get(worker, 0), 0
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
        return self._add(self._entry(worker), hashes, tier, is_chain=is_chain)

    def drop(self, worker: WorkerId, hashes: Iterable[BlockHash], tier: Tier = "device") -> int:
        """Note that a worker no longer has these blocks at a tier; returns how many it was not known to have."""
        self._walked = _NOTHING
        blocks = tuple(dict.fromkeys(hashes))
        entry = self._workers.get(worker)
        if entry is None:
            return len(blocks)
        unknown = self._tiers[tier].clear(blocks, entry.bit)
        entry.blocks[tier] -= len(blocks) - unknown
        return unknown

    def replace(self, worker: WorkerId, tiers: Mapping[Tier, Iterable[BlockHash]]) -> None:
        """Put what a worker says it has in the place of what was known; `{}` empties it. Holds stay."""
        draft = self.new_draft()
        for tier, hashes in tiers.items():
            self.add_to(draft, hashes, tier)
        self.adopt(worker, draft)

    def new_draft(self) -> IndexDraft:
        """The begin of a `replace` that takes its time: `add_to` it, then `adopt` it or `discard` it."""
        return IndexDraft(self._new_bit())

    def add_to(self, draft: IndexDraft, hashes: Iterable[BlockHash], tier: Tier) -> None:
        """As `add`, unseen so far."""
        self._add(draft, hashes, tier)

    def adopt(self, worker: WorkerId, draft: IndexDraft) -> None:
        """Put it in the place of what was known of a worker. Holds stay."""
        entry = self._entry(worker)
        self._retire(entry)
        entry.bit, entry.blocks = draft.bit, draft.blocks
        self._put_in_use(draft.bit, worker)
        entry.more_holds.clear()
        for hold in entry.holds:
            self._hold(entry, dict.fromkeys(hold.hashes, entry.bit))

    def discard(self, draft: IndexDraft) -> None:
        """It is not to be adopted."""
        self._retired.append(draft.bit)

    def add_pending(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> PendingBlocks:
        """Count a prompt's blocks as stored until `remove_pending`: it was just sent and will be cached in a moment.

        Those that the worker has, from the first on, are left out: they are stored as it is.
        """
        entry = self._entry(worker)
        blocks, stored = tuple(hashes), 0
        for end, mask in self._walk(blocks):
            if not mask & entry.bit:
                break
            stored = end
        held = dict.fromkeys(blocks[stored:], entry.bit)
        hold = PendingBlocks(worker, tuple(held))
        if held:
            entry.holds.add(hold)
            self._hold(entry, held)
        return hold

    def remove_pending(self, hold: PendingBlocks) -> None:
        """Give a hold back, once; one taken before its worker was forgotten is already gone."""
        entry = self._workers.get(hold.worker)
        if entry is None or hold not in entry.holds:
            return
        entry.holds.remove(hold)
        held, bit, more = self._held, entry.bit, entry.more_holds
        for block in hold.hashes:
            if more and _count_down(more, block):
                continue
            mask = held[block]
            if mask == bit:
                del held[block]
            else:
                held[block] = self._interned(mask ^ bit)

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
        kept = ~sum(retired)
        for holders in self._tiers.values():
            yield from holders.sweep(kept)
        for block in list(self._held):
            mask = self._held.get(block, 0)
            if mask & kept:
                self._held[block] = self._interned(mask & kept)
            elif mask:
                del self._held[block]
            yield
        for bit in retired:
            heappush(self._free, bit)

    def _entry(self, worker: WorkerId) -> _IndexedWorker:
        entry = self._workers.get(worker)
        if entry is None:
            entry = self._workers[worker] = _IndexedWorker(self._new_bit())
            self._put_in_use(entry.bit, worker)
        return entry

    def _add(
        self, to: "_IndexedWorker | IndexDraft", hashes: Iterable[BlockHash], tier: Tier, *, is_chain: bool = False
    ) -> int:
        self._walked = _NOTHING
        blocks = tuple(dict.fromkeys(hashes))
        changed = len(blocks) - self._tiers[tier].set(blocks, to.bit, is_chain=is_chain)
        to.blocks[tier] += changed
        self._has_lower |= changed > 0 and tier != "device"
        return changed

    def _new_bit(self) -> int:
        """One that no mask mentions."""
        if self._free:
            return heappop(self._free)
        self._slots += 1
        return 1 << (self._slots - 1)

    def _put_in_use(self, bit: int, worker: WorkerId) -> None:
        self._by_bit[bit] = worker
        self._walked = _NOTHING
        self._named.clear()
        self._live |= bit

    def _retire(self, entry: _IndexedWorker) -> None:
        del self._by_bit[entry.bit]
        self._named.clear()
        self._live ^= entry.bit
        self._retired.append(entry.bit)

    def _hold(self, entry: _IndexedWorker, blocks: dict[BlockHash, int]) -> None:
        """blocks  each with the worker's bit"""
        held = self._held
        if held.keys().isdisjoint(blocks):
            held.update(blocks)
            return
        for block, bit in blocks.items():
            mask = held.get(block, 0)
            if mask & bit:
                entry.more_holds[block] = entry.more_holds.get(block, 0) + 1
            else:
                held[block] = self._interned(mask | bit)

    def _interned(self, mask: int) -> int:
        return self._masks.setdefault(mask, mask)

    def _walk(self, blocks: tuple[BlockHash, ...]) -> list[tuple[int, int]]:
        """`BlockHolders.walk` on the device; a prompt is matched and then held, mostly with no event between."""
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
