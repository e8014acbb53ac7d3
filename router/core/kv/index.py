"""The KV index: which worker holds which blocks. A radix tree, stored flat.

A chained block hash names its whole prefix, so edges need not be stored: one dict from block hash to a bit mask of
holders is the tree. One walk over a prompt's hashes, and-ing the masks, gives every worker's contiguous prefix depth.
`holders.py` stores the masks; `benchmarks/decision/contenders.py` has other designs.

Each worker has a bit. Two kinds of blocks come and go with whole prompts, and are kept apart with the same bits, by
segments of a prompt instead of by blocks (`chains.py`): pending ones, of requests just sent, and those of workers
without KV events, whose caches are estimated. The bit of a worker that is gone is retired: matches ignore it at once,
`sweep` takes it out of the masks a few blocks at a time, and then another worker may get it.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from operator import or_
from typing import NamedTuple, NewType

import msgspec

from lorafleet.identity import TIERS, BlockHash, Tier
from router.core.kv.chains import ChainHolders, joined_walks
from router.core.kv.holders import BlockHolders

WorkerId = NewType("WorkerId", str)

# What CPython 3.11 allocates for a mask of up to 64 workers.
_MASK_BYTES = 48
# Unused masks are swept once there are so many more of them than blocks; and the workers of so many masks are cached.
_SPARE_MASKS = 4096


class Holders(NamedTuple):
    """Who has a block on the device, pending and estimated ones included, and who below it alone."""

    device: tuple[WorkerId, ...] = ()
    lower: tuple[WorkerId, ...] = ()


NOBODY = Holders()


class PendingBlocks(msgspec.Struct, eq=False):
    """A prompt that counts as stored on the device until `remove_pending`, although no KV event has reported it."""

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
    # Of an estimated cache.
    estimated_blocks: int = 0
    pending: set[PendingBlocks] = field(default_factory=set)


class KvIndex:
    """The blocks of one base model at one block size, over all workers. One writer: the event loop."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tiers = {tier: BlockHolders(self._interned) for tier in TIERS}
        self._device = self._tiers["device"]
        self._estimated, self._pending = ChainHolders(self._interned), ChainHolders(self._interned)
        # Whether any block was ever stored below the device: most engines have none there.
        self._has_lower = False
        self._workers: dict[WorkerId, _IndexedWorker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        # The workers of recent masks; cleared when a bit changes hands.
        self._worker_names: dict[int, tuple[WorkerId, ...]] = {}
        self._used_bits = 0
        # Equal masks are one object, which saves memory and compares by identity.
        self._masks: dict[int, int] = {}
        self._slots = 0
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """Blocks stored at all tiers, estimated and pending ones; those of retired workers count until swept."""
        return sum(map(len, self._tiers.values())) + len(self._estimated) + len(self._pending)

    def size_bytes(self) -> int:
        """Estimated memory of the index in bytes."""
        chains = self._estimated.size_bytes() + self._pending.size_bytes()
        masks = sys.getsizeof(self._masks) + len(self._masks) * _MASK_BYTES
        return masks + chains + sum(holders.size_bytes() for holders in self._tiers.values())

    @property
    def masks(self) -> Collection[int]:
        """The distinct holder masks in use, and those that no sweep has dropped yet."""
        return self._masks.keys()

    @property
    def device_runs(self) -> list[tuple[BlockHash, ...]]:
        """The runs of the device tier; see holders.py."""
        return self._device.runs

    def block_counts(self) -> Mapping[WorkerId, int]:
        """Stored and estimated blocks per worker, over its tiers; pending ones do not count."""
        return {worker: sum(entry.blocks.values()) + entry.estimated_blocks for worker, entry in self._workers.items()}

    def blocks(self, worker: WorkerId, tier: Tier) -> int:
        """Blocks that a worker has stored at a tier; estimated ones are on the device."""
        entry = self._workers.get(worker)
        if entry is None:
            return 0
        return entry.blocks[tier] + (entry.estimated_blocks if tier == "device" else 0)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Contiguous prefix depth in blocks of every worker with at least the first block; pending blocks count."""
        depths: dict[WorkerId, int] = {}
        blocks = tuple(hashes)
        walk = self._device.walk(blocks) if self._device else []
        for chains in (self._estimated, self._pending):
            if chains:
                walk = joined_walks(walk, chains.walk(blocks)) if walk else chains.walk(blocks)
        self._descend(self._used_bits, blocks, 0, walk, depths)
        return depths

    def _descend(
        self,
        workers: int,
        blocks: tuple[BlockHash, ...],
        depth: int,
        walk: Iterable[tuple[int, int]],
        depths: dict[WorkerId, int],
    ) -> None:
        """Set the depth of these workers, which have the first `depth` blocks; the walk begins there."""
        for end, mask in walk:
            still = workers & mask
            if still != workers:
                self._set_depths(workers ^ still, blocks, depth, depths)
                workers = still
            if not workers:
                return
            depth = end
        self._set_depths(workers, blocks, depth, depths)

    def _set_depths(self, workers: int, blocks: tuple[BlockHash, ...], depth: int, depths: dict[WorkerId, int]) -> None:
        """Set the depth of these workers, whose walk ends at `depth`; stored blocks beyond pending ones may follow."""
        if not depth:
            return
        if depth < len(blocks) and self._pending:
            beyond = workers & self._device.mask(blocks[depth])
            if beyond:
                # The walk over stored blocks ended before, where these workers have pending ones.
                workers ^= beyond
                walk = [(depth + end, mask) for end, mask in self._device.walk(blocks[depth:])]
                self._descend(beyond, blocks, depth, walk, depths)
        # Where replicas differ in depth, mostly one ends at a time.
        single = self._by_bit.get(workers)
        if single is not None:
            depths[single] = depth
        elif workers:
            depths.update(dict.fromkeys(self._worker_names.get(workers) or self._members(workers), depth))

    def holders(self, chain: tuple[BlockHash, ...], start: int, end: int) -> list[tuple[Holders, int]]:
        """The holders of a prompt's blocks from `start` to `end`, and how many blocks in a row have them."""
        blocks = chain[start:end]
        device = self._device.masks(blocks)
        for chains in (self._estimated, self._pending):
            at = 0
            for upto, mask in chains.walk(chain[:end]) if chains else ():
                for position in range(max(at, start), upto):
                    device[position - start] |= mask
                at = upto
        lower = map(or_, self._tiers["host"].masks(blocks), self._tiers["storage"].masks(blocks))
        used = self._used_bits
        pairs = ((on & used, below & ~on & used) for on, below in zip(device, lower, strict=True))
        return [
            (Holders(*(tuple(sorted(self._members(mask))) for mask in masks)), len(list(run)))
            for masks, run in groupby(pairs)
        ]

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
        """Drop these blocks of a worker at a tier; returns how many it had not: all for an unknown worker."""
        blocks = tuple(dict.fromkeys(hashes))
        entry = self._workers.get(worker)
        if entry is None:
            return len(blocks)
        unknown = self._tiers[tier].clear(blocks, entry.bit)
        entry.blocks[tier] -= len(blocks) - unknown
        return unknown

    def add_estimated(self, worker: WorkerId, chain: tuple[BlockHash, ...]) -> None:
        """Count a whole prompt as stored by a worker without KV events."""
        entry = self._entry(worker)
        entry.estimated_blocks += self._estimated.add(chain, entry.bit)

    def drop_estimated(self, worker: WorkerId, part: tuple[BlockHash, ...], start: int = 0) -> None:
        """Drop the blocks of a part from `start` on, the last that the worker has of an estimated prompt.

        Ignored for an unknown worker. Where a part may begin: see ChainHolders.drop.
        """
        entry = self._workers.get(worker)
        if entry is not None:
            entry.estimated_blocks -= self._estimated.drop(part, entry.bit, start)

    def replace(self, worker: WorkerId, tiers: Mapping[Tier, Iterable[BlockHash]]) -> None:
        """Replace all stored and estimated blocks of a worker; `{}` empties it. Pending blocks stay."""
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

        Clears the cached worker names.
        """
        entry = self._entry(worker)
        self._retire(entry)
        entry.bit, entry.blocks, entry.estimated_blocks = draft.bit, draft.blocks, 0
        self._assign_bit(draft.bit, worker)
        for added in entry.pending:
            self._pending.hold(added.hashes, entry.bit)

    def discard(self, draft: IndexDraft) -> None:
        """Drop a draft that will not be adopted; `sweep` removes its blocks."""
        self._retired.append(draft.bit)

    def add_pending(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> PendingBlocks:
        """Count a whole prompt as stored until `remove_pending`: it was just sent to the worker.

        Also its blocks that are stored there now: an engine evicts none that a request uses.
        """
        entry = self._entry(worker)
        added = PendingBlocks(worker, tuple(hashes))
        entry.pending.add(added)
        self._pending.hold(added.hashes, entry.bit)
        return added

    def remove_pending(self, added: PendingBlocks) -> None:
        """End the pending state of these blocks. Without effect after their worker was forgotten."""
        entry = self._workers.get(added.worker)
        if entry is not None and added in entry.pending:
            entry.pending.remove(added)
            self._pending.release(added.hashes, entry.bit)

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
        for chains in (self._estimated, self._pending):
            yield from chains.sweep(kept)
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

        Notes whether any block is below the device.
        """
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
        """Give a mask bit to a worker. Clears the cached worker names."""
        self._by_bit[bit] = worker
        self._worker_names.clear()
        self._used_bits |= bit

    def _retire(self, entry: _IndexedWorker) -> None:
        """Take an entry's bit out of use: matches ignore it, and `sweep` removes it. Clears the cached worker names."""
        del self._by_bit[entry.bit]
        self._worker_names.clear()
        self._used_bits ^= entry.bit
        self._retired.append(entry.bit)

    def _interned(self, mask: int) -> int:
        """The one object that stands for all equal masks; keeps it."""
        return self._masks.setdefault(mask, mask)

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
