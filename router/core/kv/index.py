"""The KV index: which worker holds which blocks. A radix tree, stored flat.

A chained block hash names its whole prefix, so edges need not be stored: one dict from block hash to a bit mask of
holders is the tree. One walk over a prompt's hashes, and-ing the masks, gives every worker's contiguous prefix depth.
`holders.py` stores the masks; `benchmarks/decision/contenders.py` has other designs.

Each worker has a bit. Pending blocks, which a request just sent will store, are kept apart with the same bits: they are
few, change with every request, and matter only where a worker's stored blocks end. The bit of a worker that is gone is
retired: matches ignore it at once, `sweep` takes it out of the masks a few blocks at a time, and then another worker
may get it.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
# Unused masks are swept once there are so many more of them than blocks; and the workers of so many masks are cached.
_SPARE_MASKS = 4096
_NO_WALK: tuple[tuple[BlockHash, ...], list[tuple[int, int]]] = ((), [])


class PendingBlocks(msgspec.Struct, eq=False):
    """Blocks that count as stored on the device until `remove_pending`, although no KV event has reported them."""

    worker: WorkerId
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True, eq=False)
class IndexDraft:
    """A worker's new snapshot, filled a piece at a time; matches ignore it until `adopt`."""

    bit: int
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


@dataclass(slots=True)
class _IndexedWorker:
    bit: int
    blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    pending: set[PendingBlocks] = field(default_factory=set)
    # How often a block is pending beyond its first time.
    more_pending: dict[BlockHash, int] = field(default_factory=dict)


class KvIndex:
    """The blocks of one base model at one block size, over all workers. One writer: the event loop."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tiers = {tier: BlockHolders(self._interned) for tier in TIERS}
        self._device = self._tiers["device"]
        # Masks of the workers for which a block is pending.
        self._pending: dict[BlockHash, int] = {}
        # Whether any block was ever stored below the device: most engines have none there.
        self._has_lower = False
        self._workers: dict[WorkerId, _IndexedWorker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        # The workers of recent masks; cleared when a bit changes hands.
        self._worker_names: dict[int, tuple[WorkerId, ...]] = {}
        self._used_bits = 0
        # The last walk: its blocks and its result; void after any change.
        self._walked: tuple[tuple[BlockHash, ...], list[tuple[int, int]]] = _NO_WALK
        # Equal masks are one object, which saves memory and compares by identity.
        self._masks: dict[int, int] = {}
        self._slots = 0
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """Blocks stored at all tiers, and pending ones; those of retired workers count until swept."""
        return sum(map(len, self._tiers.values())) + len(self._pending)

    def size_bytes(self) -> int:
        """Estimated memory of the index in bytes."""
        masks = sys.getsizeof(self._masks) + len(self._masks) * _MASK_BYTES + sys.getsizeof(self._pending)
        return masks + sum(holders.size_bytes() for holders in self._tiers.values())

    @property
    def masks(self) -> Collection[int]:
        """The distinct holder masks in use, and those that no sweep has dropped yet."""
        return self._masks.keys()

    @property
    def device_runs(self) -> list[tuple[BlockHash, ...]]:
        """The runs of the device tier; see holders.py."""
        return self._device.runs

    def block_counts(self) -> Mapping[WorkerId, int]:
        """Stored blocks per worker, over its tiers; pending ones do not count."""
        return {worker: sum(entry.blocks.values()) for worker, entry in self._workers.items()}

    def blocks(self, worker: WorkerId, tier: Tier) -> int:
        """Blocks that a worker has stored at a tier."""
        entry = self._workers.get(worker)
        return entry.blocks[tier] if entry else 0

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Contiguous prefix depth in blocks of every worker with at least the first block; pending blocks count."""
        depths: dict[WorkerId, int] = {}
        blocks, alive, depth = tuple(hashes), self._used_bits, 0
        for end, mask in self._walk(blocks):
            still = alive & mask
            if still != alive:
                self._set_depths(alive ^ still, blocks, depth, depths)
                alive = still
            if not alive:
                return depths
            depth = end
        self._set_depths(alive, blocks, depth, depths)
        return depths

    def _set_depths(self, workers: int, blocks: tuple[BlockHash, ...], depth: int, depths: dict[WorkerId, int]) -> None:
        """Set the depth of these workers, whose stored blocks end at `depth`; pending blocks may continue some."""
        if self._pending and depth < len(blocks):
            pending = self._pending.get(blocks[depth], 0) & workers
            if pending:
                workers ^= pending
                self._follow_pending(pending, blocks, depth, depths)
        if depth and workers:
            depths.update(dict.fromkeys(self._worker_names.get(workers) or self._members(workers), depth))

    def _follow_pending(
        self, workers: int, blocks: tuple[BlockHash, ...], depth: int, depths: dict[WorkerId, int]
    ) -> None:
        """Set the depth of these workers, counting stored and pending blocks from `depth` on."""
        same = -1
        for mask in map(self._pending.get, blocks[depth:], repeat(0)):
            if mask is not same:
                same = mask
                lost = workers & ~mask
                if lost:
                    same = -1  # the next block may be stored by others
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
        """(blocks in host memory, blocks in storage) that follow each worker's device prefix without a gap.

        depths   the result of `match(hashes)`
        returns  workers with such blocks; a block that is in both counts for the host
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
        """Store these blocks for a worker at a tier; returns how many the worker did not have at that tier.

        is_chain  the blocks follow one another in a prompt, as in one store event; makes later matches faster
        """
        return self._add(self._entry(worker), hashes, tier, is_chain=is_chain)

    def drop(self, worker: WorkerId, hashes: Iterable[BlockHash], tier: Tier = "device") -> int:
        """Drop these blocks of a worker at a tier; returns how many were not stored there (all for an unknown worker).

        Clears the cached walk.
        """
        self._walked = _NO_WALK
        blocks = tuple(dict.fromkeys(hashes))
        entry = self._workers.get(worker)
        if entry is None:
            return len(blocks)
        unknown = self._tiers[tier].clear(blocks, entry.bit)
        entry.blocks[tier] -= len(blocks) - unknown
        return unknown

    def replace(self, worker: WorkerId, tiers: Mapping[Tier, Iterable[BlockHash]]) -> None:
        """Replace all stored blocks of a worker; `{}` empties it. Pending blocks stay."""
        draft = self.new_draft()
        for tier, hashes in tiers.items():
            self.add_to(draft, hashes, tier)
        self.adopt(worker, draft)

    def new_draft(self) -> IndexDraft:
        """A new snapshot of a worker, to be filled with `add_to`, then `adopt`ed or `discard`ed."""
        return IndexDraft(self._new_bit())

    def add_to(self, draft: IndexDraft, hashes: Iterable[BlockHash], tier: Tier) -> None:
        """Add blocks to a draft; matches ignore them until `adopt`."""
        self._add(draft, hashes, tier)

    def adopt(self, worker: WorkerId, draft: IndexDraft) -> None:
        """Replace a worker's stored blocks by those of a draft; `sweep` removes the old ones. Pending blocks stay.

        Clears the cached walk and worker names.
        """
        entry = self._entry(worker)
        self._retire(entry)
        entry.bit, entry.blocks = draft.bit, draft.blocks
        self._assign_bit(draft.bit, worker)
        entry.more_pending.clear()
        for added in entry.pending:
            self._mark_pending(entry, dict.fromkeys(added.hashes, entry.bit))

    def discard(self, draft: IndexDraft) -> None:
        """Drop a draft that will not be adopted; `sweep` removes its blocks."""
        self._retired.append(draft.bit)

    def add_pending(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> PendingBlocks:
        """Count a prompt's blocks as stored until `remove_pending`: the prompt was just sent to the worker.

        The prefix that the worker has stored already is left out.
        """
        entry = self._entry(worker)
        blocks, stored = tuple(hashes), 0
        for end, mask in self._walk(blocks):
            if not mask & entry.bit:
                break
            stored = end
        pending = dict.fromkeys(blocks[stored:], entry.bit)
        added = PendingBlocks(worker, tuple(pending))
        if pending:
            entry.pending.add(added)
            self._mark_pending(entry, pending)
        return added

    def remove_pending(self, added: PendingBlocks) -> None:
        """End the pending state of these blocks. Without effect after their worker was forgotten."""
        entry = self._workers.get(added.worker)
        if entry is None or added not in entry.pending:
            return
        entry.pending.remove(added)
        pending, bit, more = self._pending, entry.bit, entry.more_pending
        for block in added.hashes:
            if more and _count_down(more, block):
                continue
            mask = pending[block]
            if mask == bit:
                del pending[block]
            else:
                pending[block] = self._interned(mask ^ bit)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker with its stored and pending blocks: hidden at once, removed by `sweep`."""
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._retire(entry)

    def sweep(self, budget: int) -> bool:
        """Remove the blocks of forgotten workers, at most `budget` blocks; returns whether there is more to do.

        Until then their blocks take memory, and their bits widen every mask. The first step lists all blocks: 3 to 9 ms
        for a million.
        """
        if self._sweep is None:
            if not self._retired and len(self._masks) <= 2 * len(self) + _SPARE_MASKS:
                return False
            self._sweep = self._sweep_steps()
        for _ in range(budget):
            if next(self._sweep, self) is self:
                self._sweep = None
                return bool(self._retired)
        return True

    def _sweep_steps(self) -> Iterator[None]:
        """Remove retired bits from every mask, stored and pending, one block a step, and free the bits at the end.

        Begins a new table of shared masks. Blocks stored meanwhile need no visit, because retired bits are never set.
        """
        retired, self._retired = self._retired, []
        # Masks in use enter the new table here, or when they are stored.
        self._masks = {}
        kept = ~sum(retired)
        for holders in self._tiers.values():
            yield from holders.sweep(kept)
        for block in list(self._pending):
            mask = self._pending.get(block, 0)
            if mask & kept:
                self._pending[block] = self._interned(mask & kept)
            elif mask:
                del self._pending[block]
            yield
        for bit in retired:
            heappush(self._free, bit)

    def _entry(self, worker: WorkerId) -> _IndexedWorker:
        """The worker's entry; adds one with a new bit where there is none."""
        entry = self._workers.get(worker)
        if entry is None:
            entry = self._workers[worker] = _IndexedWorker(self._new_bit())
            self._assign_bit(entry.bit, worker)
        return entry

    def _add(
        self, to: "_IndexedWorker | IndexDraft", hashes: Iterable[BlockHash], tier: Tier, *, is_chain: bool = False
    ) -> int:
        """Store blocks for a worker or draft, and count them; returns how many were new.

        Clears the cached walk. Notes whether any block is below the device.
        """
        self._walked = _NO_WALK
        blocks = tuple(dict.fromkeys(hashes))
        changed = len(blocks) - self._tiers[tier].set(blocks, to.bit, is_chain=is_chain)
        to.blocks[tier] += changed
        self._has_lower |= changed > 0 and tier != "device"
        return changed

    def _new_bit(self) -> int:
        """Take a bit that is in no mask, freed or new."""
        if self._free:
            return heappop(self._free)
        self._slots += 1
        return 1 << (self._slots - 1)

    def _assign_bit(self, bit: int, worker: WorkerId) -> None:
        """Give a mask bit to a worker. Clears the cached walk and worker names."""
        self._by_bit[bit] = worker
        self._walked = _NO_WALK
        self._worker_names.clear()
        self._used_bits |= bit

    def _retire(self, entry: _IndexedWorker) -> None:
        """Take an entry's bit out of use: matches ignore it, and `sweep` removes it. Clears the cached worker names."""
        del self._by_bit[entry.bit]
        self._worker_names.clear()
        self._used_bits ^= entry.bit
        self._retired.append(entry.bit)

    def _mark_pending(self, entry: _IndexedWorker, blocks: dict[BlockHash, int]) -> None:
        """Mark blocks as pending for a worker; each comes with its bit.

        Those pending there already are counted in its entry.
        """
        pending = self._pending
        if pending.keys().isdisjoint(blocks):
            pending.update(blocks)
            return
        for block, bit in blocks.items():
            mask = pending.get(block, 0)
            if mask & bit:
                entry.more_pending[block] = entry.more_pending.get(block, 0) + 1
            else:
                pending[block] = self._interned(mask | bit)

    def _interned(self, mask: int) -> int:
        """The one object that stands for all equal masks; keeps it."""
        return self._masks.setdefault(mask, mask)

    def _walk(self, blocks: tuple[BlockHash, ...]) -> list[tuple[int, int]]:
        """`BlockHolders.walk` on the device. Keeps the last tuple's result: a prompt is matched, then made pending."""
        if self._walked[0] is not blocks:
            self._walked = blocks, self._device.walk(blocks)
        return self._walked[1]

    def _members(self, mask: int) -> tuple[WorkerId, ...]:
        """The workers of these bits, all of which are in use; caches their names."""
        workers, left = [], mask
        while left:
            bit = left & -left
            workers.append(self._by_bit[bit])
            left ^= bit
        if len(self._worker_names) >= _SPARE_MASKS:
            self._worker_names.clear()
        named = self._worker_names[mask] = tuple(workers)
        return named


def _count_down(counts: dict[BlockHash, int], key: BlockHash) -> bool:
    """Decrement a count, and delete it at zero; returns whether there was one."""
    count = counts.get(key)
    if count is None:
        return False
    if count == 1:
        del counts[key]
    else:
        counts[key] = count - 1
    return True
