"""Caches of token ids and block hashes, so that a system prompt or an earlier turn is tokenized and hashed once."""

import sys
from array import array
from collections import OrderedDict

from xxhash import xxh3_64_intdigest

from lorafleet.identity import BlockHash, block_hashes

# The dict entry, the key tuple and two object headers, by sys.getsizeof on CPython 3.11.
_ENTRY_BYTES = 300
# A shorter piece is cached only when it comes a second time: most never do.
_CACHED_AT_ONCE_CHARS = 4_096
# Slots that remember pieces seen once, a byte each.
_SEEN_SLOTS = 1 << 18
# A shorter prefix is hashed about as fast as it is looked up.
_MIN_BLOCKS = 64


class PieceTokenCache:
    """An LRU cache from (tokenizer name and its owner, piece of text) to token ids. Used by the event loop alone.

    The key is the text itself, not a digest, so that a hash collision cannot return wrong ids. A short piece is cached
    when it comes a second time.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        # Slot by one half of a piece's hash, value by the other half.
        self._seen = bytearray(_SEEN_SLOTS)

    def __len__(self) -> int:
        """How many pieces are cached."""
        return len(self.entries)

    def get(self, tokenizer: str, piece: str) -> "array[int] | None":
        """The cached ids, not to be modified, marked as used last; None if the piece is not cached."""
        key = (tokenizer, piece)
        ids = self.entries.get(key)
        if ids is not None:
            self.entries.move_to_end(key)
        return ids

    def put(self, tokenizer: str, piece: str, ids: "array[int]") -> None:
        """Cache a piece's ids and evict older ones; not a short piece seen for the first time, nor a huge one."""
        if len(piece) < _CACHED_AT_ONCE_CHARS and not self._was_seen(tokenizer, piece):
            return
        size_bytes = _size_bytes(piece, ids)
        if size_bytes > self.max_bytes // 4 or (tokenizer, piece) in self.entries:
            return
        self.entries[tokenizer, piece] = ids
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            (_, oldest), dropped = self.entries.popitem(last=False)
            self.size_bytes -= _size_bytes(oldest, dropped)

    def _was_seen(self, tokenizer: str, piece: str) -> bool:
        """Whether the piece was seen recently, rarely true for one that was not; marks it as seen."""
        key = hash((tokenizer, piece))
        place, mark = key % _SEEN_SLOTS, (key >> 32) % 255 + 1
        was_seen = self._seen[place] == mark
        self._seen[place] = mark
        return was_seen


def _size_bytes(piece: str, ids: "array[int]") -> int:
    """Estimated memory of one cached piece, in bytes."""
    return sys.getsizeof(piece) + len(ids) * ids.itemsize + _ENTRY_BYTES


class BlockHashCache:
    """LRU cache of block hashes of long prompts' prefixes, keyed by a hash of the ids; for the event loop alone."""

    def __init__(self, max_blocks: int = 65_536) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.entries: OrderedDict[tuple[int, int], tuple[BlockHash, ...]] = OrderedDict()

    def chain(
        self, ids: "array[int]", *, block_size: int, root: BlockHash, seen: int = 0, kept: int = 0
    ) -> tuple[BlockHash, ...]:
        """`block_hashes` of the ids, as a tuple. Uses a cached prefix, and caches both prefixes named here.

        seen  length of the prefix that an earlier call may have cached
        kept  length of the prefix that the conversation's next prompt will have
        """
        seen_blocks, known = seen // block_size, None
        if seen_blocks >= _MIN_BLOCKS:
            key = _chain_key(ids, seen_blocks, block_size, root)
            known = self.entries.get(key)
        if known is None:
            chain = tuple(block_hashes(ids, block_size=block_size, root=root))
            if seen_blocks >= _MIN_BLOCKS:
                # A prefix of several prompts, such as a system prompt.
                self._store(key, chain[:seen_blocks])
        else:
            self.entries.move_to_end(key)
            new_ids = ids[len(known) * block_size :]
            chain = (*known, *block_hashes(new_ids, block_size=block_size, root=known[-1]))
        blocks = kept // block_size
        if blocks >= _MIN_BLOCKS and blocks > seen_blocks:
            self._store(_chain_key(ids, blocks, block_size, root), chain[:blocks])
        return chain

    def _store(self, key: tuple[int, int], chain: tuple[BlockHash, ...]) -> None:
        """Cache a prefix's hashes, and evict the longest unused ones beyond the bound."""
        self.blocks += len(chain) - len(self.entries.pop(key, ()))
        self.entries[key] = chain
        while self.blocks > self.max_blocks:
            _, dropped = self.entries.popitem(last=False)
            self.blocks -= len(dropped)


def _chain_key(ids: "array[int]", blocks: int, block_size: int, root: BlockHash) -> tuple[int, int]:
    """The cache key of a prefix of this many blocks: the block size, and a hash of its ids seeded with `root`."""
    return block_size, xxh3_64_intdigest(memoryview(ids)[: blocks * block_size], root)
