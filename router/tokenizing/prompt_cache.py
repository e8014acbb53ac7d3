"""What is kept of prompts seen before: a system prompt or a conversation so far is tokenized and hashed once."""

import sys
from array import array
from collections import OrderedDict

from xxhash import xxh3_64_intdigest

from lorafleet.identity import BlockHash, block_hashes

# The dict entry, the key's tuple and the two objects' heads. Measured with sys.getsizeof on CPython 3.11.
_ENTRY_BYTES = 300
# A shorter piece is as soon tokenized by its words once more, and of most there is no second time.
_HELD_AT_ONCE_CHARS = 4_096
# Pieces that are known to have been seen: a byte each.
_SEEN = 1 << 18
# A shorter beginning is hashed about as soon as looked up.
_SHORTEST_BLOCKS = 64


class PieceTokenCache:
    """(name of a tokenizer, piece of text) -> its ids; the least recently used go first. Only the event loop uses it.

    A piece is held as text, not as a digest: equal text is the only thing that surely has equal ids. A short one is
    held from the second time on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._held: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        # At the place that one half of a piece's hash names, a byte of the other half.
        self._seen = bytearray(_SEEN)

    def __len__(self) -> int:
        return len(self._held)

    def get(self, tokenizer: str, piece: str) -> "array[int] | None":
        """The ids, to be read only; None when they are not held."""
        key = (tokenizer, piece)
        ids = self._held.get(key)
        if ids is not None:
            self._held.move_to_end(key)
        return ids

    def put(self, tokenizer: str, piece: str, ids: "array[int]") -> None:
        """Hold `ids`, in place of older pieces if need be; a piece larger than a quarter of the whole is not held."""
        if len(piece) < _HELD_AT_ONCE_CHARS and not self._was_seen(piece):
            return
        size_bytes = _size_bytes(piece, ids)
        if size_bytes > self.max_bytes // 4 or (tokenizer, piece) in self._held:
            return
        self._held[tokenizer, piece] = ids
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            (_, oldest), dropped = self._held.popitem(last=False)
            self.size_bytes -= _size_bytes(oldest, dropped)

    def _was_seen(self, piece: str) -> bool:
        """Whether it was asked about before, of late; seldom True for one that was not."""
        key = hash(piece)
        place, mark = key % _SEEN, (key >> 32) % 255 + 1
        was_seen = self._seen[place] == mark
        self._seen[place] = mark
        return was_seen


def _size_bytes(piece: str, ids: "array[int]") -> int:
    return sys.getsizeof(piece) + len(ids) * ids.itemsize + _ENTRY_BYTES


class BlockHashCache:
    """The block hashes of long prompts' beginnings; the least recently used go first. The event loop is its only user.

    A beginning is known by a hash of its ids, as its blocks are.
    """

    def __init__(self, max_blocks: int = 65_536) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self._held: OrderedDict[tuple[int, int], tuple[BlockHash, ...]] = OrderedDict()

    def chain(
        self, ids: "array[int]", *, block_size: int, root: BlockHash, seen: int = 0, kept: int = 0
    ) -> tuple[BlockHash, ...]:
        """`block_hashes` of the ids, as a tuple.

        seen  so many of the first ids may have been kept by an earlier call
        kept  so many of the first ids the next prompt will begin with
        """
        beginning, known = seen // block_size, None
        if beginning >= _SHORTEST_BLOCKS:
            key = _key(ids, beginning, block_size, root)
            known = self._held.get(key)
        if known is None:
            chain = tuple(block_hashes(ids, block_size=block_size, root=root))
            if beginning >= _SHORTEST_BLOCKS:
                # Of several prompts: a system prompt, or a conversation that is asked about more than once.
                self._keep(key, chain[:beginning])
        else:
            self._held.move_to_end(key)
            rest = ids[len(known) * block_size :]
            chain = (*known, *block_hashes(rest, block_size=block_size, root=known[-1]))
        blocks = kept // block_size
        if blocks >= _SHORTEST_BLOCKS and blocks > beginning:
            self._keep(_key(ids, blocks, block_size, root), chain[:blocks])
        return chain

    def _keep(self, key: tuple[int, int], chain: tuple[BlockHash, ...]) -> None:
        self.blocks += len(chain) - len(self._held.pop(key, ()))
        self._held[key] = chain
        while self.blocks > self.max_blocks:
            _, dropped = self._held.popitem(last=False)
            self.blocks -= len(dropped)


def _key(ids: "array[int]", blocks: int, block_size: int, root: BlockHash) -> tuple[int, int]:
    return block_size, xxh3_64_intdigest(memoryview(ids)[: blocks * block_size], root)
