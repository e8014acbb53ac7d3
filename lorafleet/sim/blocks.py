"""The KV cache: a pool of blocks with references, copies and LRU eviction, and its KV events.

source  vLLM 0.32 v1/core/block_pool.py, kv_cache_manager.py and kv_cache_utils.py
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lorafleet.sim.events import MEDIUM, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """Adapter and salt, which separate blocks of equal tokens. source  vLLM 0.32 `generate_block_hash_extra_keys`"""

    lora_id: int | None = None
    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None

    def extra_keys(self, block: int) -> tuple[str, ...] | None:
        """The extra keys of a block in events, or None. The adapter's path is hashed, too, but not in the event."""
        salted = (self.cache_salt,) if block == 0 and self.cache_salt else ()
        name = (self.lora_name,) if self.lora_name else ()
        return (name + salted) or None


@dataclass(slots=True)
class BlockChain:
    """A request's tokens so far, and the hashes of their full blocks."""

    tokens: list[int]
    root: ChainRoot
    block_size: int
    hashes: list[bytes] = field(default_factory=list)

    def update_hashes(self) -> list[bytes]:
        """Compute the hashes of new full blocks; returns all hashes."""
        for block in range(len(self.hashes), len(self.tokens) // self.block_size):
            start = block * self.block_size
            digest = hashlib.sha256(self.hashes[-1] if self.hashes else b"")
            salt = self.root.cache_salt if block == 0 else None
            # repr quotes and escapes, so ("ab", "c") and ("a", "bc") differ.
            digest.update(repr((self.root.lora_name, self.root.lora_path, salt)).encode("utf-8", "surrogatepass"))
            digest.update(array("q", self.tokens[start : start + self.block_size]).tobytes())
            self.hashes.append(digest.digest())
        return self.hashes


@dataclass(slots=True)
class PoolBlock:
    """One block of the pool; `hash` is set while its content can be reused."""

    references: int = 0
    hash: bytes | None = None


class BlockPool:
    """The blocks of one engine.

    A freed block keeps its content until it is allocated again, oldest first. Several blocks may have the same content,
    each with its own event. One of the `num_blocks` blocks is never used (vLLM's null block).
    """

    def __init__(self, num_blocks: int, block_size: int, *, int_hashes: bool = True) -> None:
        """`int_hashes`: 64-bit hashes in events instead of 32 bytes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).

        Raises ValueError for fewer than 2 blocks.
        """
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks can hold nothing: give at least 2 (one is never used)")
        self.block_size = block_size
        self.int_hashes = int_hashes
        self.blocks = [PoolBlock() for _ in range(num_blocks)]
        self.free = OrderedDict[int, None].fromkeys(range(1, num_blocks))  # first out first
        self.copies: dict[bytes, dict[int, None]] = {}
        self.events: list[KVEvent] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that requests use, 0 to 1; free cached blocks do not count."""
        return 1.0 - len(self.free) / (len(self.blocks) - 1)

    def take_events(self) -> list[KVEvent]:
        """Return and forget the events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    def cached_prefix(self, chain: BlockChain) -> list[int]:
        """Indexes of the blocks with the longest cached prefix of `chain`, without its last token."""
        hits = []
        for digest in chain.update_hashes()[: (len(chain.tokens) - 1) // self.block_size]:
            holders = self.copies.get(digest)
            if not holders:
                break
            hits.append(next(iter(holders)))
        return hits

    def has_room_for(self, hits: Sequence[int], blocks: int) -> bool:
        """Whether `blocks` new blocks can be allocated in addition to `hits`, some of which may be free."""
        return blocks + sum(not self.blocks[hit].references for hit in hits) <= len(self.free)

    def add_references(self, hits: Iterable[int]) -> None:
        """Add a request's reference to each of `hits` and take it from the free ones, so that none is evicted."""
        for hit in hits:
            if not self.blocks[hit].references:
                del self.free[hit]
            self.blocks[hit].references += 1

    def allocate(self, blocks: int) -> list[int]:
        """Allocate free blocks with one reference each, evicting their content with events.

        Check `has_room_for` first.
        """
        allocated = []
        for _ in range(blocks):
            index, _none = self.free.popitem(last=False)
            self._drop_content(index)
            self.blocks[index].references = 1
            allocated.append(index)
        return allocated

    def store(self, chain: BlockChain, table: Sequence[int], first: int, last: int) -> None:
        """Cache blocks `first` to `last` of `chain`, with an event; `table[i]` is the index of its i-th block.

        Does nothing for an empty range.
        """
        if first >= last:
            return
        hashes = chain.update_hashes()
        for index, digest in zip(table[first:last], hashes[first:last], strict=True):
            self.blocks[index].hash = digest
            self.copies.setdefault(digest, {})[index] = None
        self.announce(chain, first, last)

    def announce(self, chain: BlockChain, first: int, last: int) -> None:
        """Add a BlockStored event for blocks `first` to `last`; report mode `full` repeats events of cached blocks."""
        hashes = chain.update_hashes()
        self.events.append(
            BlockStored(
                block_hashes=[self._event_hash(digest) for digest in hashes[first:last]],
                parent_block_hash=self._event_hash(hashes[first - 1]) if first else None,
                token_ids=chain.tokens[first * self.block_size : last * self.block_size],
                block_size=self.block_size,
                lora_id=chain.root.lora_id,
                medium=MEDIUM,
                lora_name=chain.root.lora_name,
                extra_keys=[chain.root.extra_keys(block) for block in range(first, last)],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )

    def release(self, table: Sequence[int]) -> None:
        """Release a request's blocks, last block first, so that a long prompt's end is evicted before its start.

        Those without content are allocated first.
        """
        emptied = []
        for index in reversed(table):
            block = self.blocks[index]
            block.references -= 1
            if block.references:
                continue
            if block.hash is None:
                emptied.append(index)
            else:
                self.free[index] = None
        for index in reversed(emptied):  # without content, so allocated first, in this order
            self.free[index] = None
            self.free.move_to_end(index, last=False)

    def clear(self) -> bool:
        """Clear the cache, with an event; returns False without effect while a request uses blocks."""
        if len(self.free) != len(self.blocks) - 1:
            return False
        self.copies.clear()
        for block in self.blocks:
            block.hash = None
        self.events.append(AllBlocksCleared())
        return True

    def _drop_content(self, index: int) -> None:
        """Make a block's content unfindable, with a BlockRemoved event; a block without content stays as it is."""
        digest = self.blocks[index].hash
        if digest is None:
            return
        self.blocks[index].hash = None
        del self.copies[digest][index]
        if not self.copies[digest]:
            del self.copies[digest]
        self.events.append(BlockRemoved(block_hashes=[self._event_hash(digest)], medium=MEDIUM, group_idx=0))

    def _event_hash(self, digest: bytes) -> BlockHash:
        """A block's hash as events have it: the low 64 bits, or all bytes."""
        return int.from_bytes(digest[-8:], "big") if self.int_hashes else digest
