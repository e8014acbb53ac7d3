"""Which worker holds which blocks: a radix tree, kept flat.

A chained block hash names its whole prefix, so the tree's edges need not be stored: one dict from block
hash to a bit mask of holders is the tree, and walking a prompt's hashes while and-ing the masks gives
every worker's contiguous prefix depth in one pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType, TypeVar

from lorafleet.kv.blocks import BlockHash, block_hashes

WorkerId = NewType("WorkerId", str)
EngineHash = int | bytes
K = TypeVar("K")

Rejection = Literal["shape", "unknown_parent", "unknown_block"]


@dataclass(slots=True)
class _Worker:
    bit: int
    blocks: dict[EngineHash, BlockHash] = field(default_factory=dict)
    # Copies beyond the first; both are nearly always empty.
    more_copies: dict[EngineHash, int] = field(default_factory=dict)
    more_holds: dict[BlockHash, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that count as stored for a while, though no engine has said so; given back with `release`."""

    worker: WorkerId
    owner: object
    hashes: tuple[BlockHash, ...]


class KvIndex:
    """The blocks of one base model at one block size, over all workers. One writer: the event loop."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._holders: dict[BlockHash, int] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_bit: dict[int, WorkerId] = {}

    def __len__(self) -> int:
        """How many distinct blocks somebody holds."""
        return len(self._holders)

    def workers(self) -> Mapping[WorkerId, int]:
        """Engine blocks known per worker."""
        return {worker: len(entry.blocks) for worker, entry in self._workers.items()}

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Contiguous prefix depth in blocks of every worker that holds at least the first block."""
        depths: dict[WorkerId, int] = {}
        holders = self._holders.get
        alive = holders(hashes[0], 0) if hashes else 0
        depth = 0
        for depth, block in enumerate(hashes):
            still = alive & holders(block, 0)
            if still != alive:
                for worker in self._members(alive & ~still):
                    depths[worker] = depth
                alive = still
                if not alive:
                    return depths
        for worker in self._members(alive):
            depths[worker] = depth + 1
        return depths

    def store(
        self,
        worker: WorkerId,
        engine_hashes: Sequence[EngineHash],
        tokens: Sequence[int],
        *,
        parent: EngineHash | None,
        root: BlockHash,
    ) -> Rejection | None:
        """Note that a worker cached these consecutive blocks, one more copy of each.

        engine_hashes  [n] the engine's own names for the blocks
        tokens         [n * block_size] their token ids
        parent         engine hash of the block before, or None: then the chain starts at `root`
        returns        None, or why nothing was stored: a guess here would be a wrong hit later
        """
        if not engine_hashes or len(tokens) != len(engine_hashes) * self.block_size:
            return "shape"
        entry = self._entry(worker)
        before = root if parent is None else entry.blocks.get(parent)
        if before is None:
            return "unknown_parent"
        blocks = block_hashes(tokens, block_size=self.block_size, root=before)
        for engine_hash, block in zip(engine_hashes, blocks, strict=True):
            known = entry.blocks.get(engine_hash)
            if known is None:
                entry.blocks[engine_hash] = block
                self._hold(entry, block)
            else:
                entry.more_copies[engine_hash] = entry.more_copies.get(engine_hash, 0) + 1
        return None

    def remove(self, worker: WorkerId, engine_hashes: Sequence[EngineHash]) -> int:
        """Note that a worker dropped one copy of each block; returns how many it was not known to hold."""
        entry = self._workers.get(worker)
        if entry is None:
            return len(engine_hashes)
        unknown = 0
        for engine_hash in engine_hashes:
            if not _count_down(entry.more_copies, engine_hash):
                block = entry.blocks.pop(engine_hash, None)
                if block is None:
                    unknown += 1
                else:
                    self._let_go(entry, block)
        return unknown

    def hold(self, worker: WorkerId, hashes: Sequence[BlockHash]) -> Hold:
        """Count these blocks as stored until `release`: a prompt just sent will be cached in a moment."""
        entry = self._entry(worker)
        for block in hashes:
            self._hold(entry, block)
        return Hold(worker, entry, tuple(hashes))

    def release(self, hold: Hold) -> None:
        """Give a hold back; one taken before the worker was forgotten or cleared is already gone."""
        entry = self._workers.get(hold.worker)
        if entry is not None and entry is hold.owner:
            for block in hold.hashes:
                self._let_go(entry, block)

    def forget(self, worker: WorkerId) -> None:
        """Drop everything that a worker holds: it is gone, restarted, or said that its cache is empty."""
        entry = self._workers.pop(worker, None)
        if entry is None:
            return
        del self._by_bit[entry.bit]
        for block in [block for block, mask in self._holders.items() if mask & entry.bit]:
            self._clear_bit(block, entry.bit)

    def _entry(self, worker: WorkerId) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            bit = 1
            while bit in self._by_bit:
                bit <<= 1
            entry = self._workers[worker] = _Worker(bit)
            self._by_bit[bit] = worker
        return entry

    def _hold(self, entry: _Worker, block: BlockHash) -> None:
        mask = self._holders.get(block, 0)
        if mask & entry.bit:
            entry.more_holds[block] = entry.more_holds.get(block, 0) + 1
        else:
            self._holders[block] = mask | entry.bit

    def _let_go(self, entry: _Worker, block: BlockHash) -> None:
        if not _count_down(entry.more_holds, block):
            self._clear_bit(block, entry.bit)

    def _clear_bit(self, block: BlockHash, bit: int) -> None:
        mask = self._holders[block] & ~bit
        if mask:
            self._holders[block] = mask
        else:
            del self._holders[block]

    def _members(self, mask: int) -> Iterator[WorkerId]:
        while mask:
            bit = mask & -mask
            yield self._by_bit[bit]
            mask ^= bit


def _count_down(counts: dict[K, int], key: K) -> bool:
    """Take one from a count that is only kept while above zero; returns whether there was one to take."""
    count = counts.get(key)
    if count is None:
        return False
    if count == 1:
        del counts[key]
    else:
        counts[key] = count - 1
    return True
