"""Token ids of prompt pieces seen before: a system prompt or a conversation so far is tokenized once."""

import sys
from array import array
from collections import OrderedDict

# The dict entry, the key's tuple and the two objects' heads. Measured with sys.getsizeof on CPython 3.11.
_ENTRY_BYTES = 300


class PieceCache:
    """(base model, piece of text) -> its ids; the least recently used go first. The event loop is its only user.

    A piece is held as text, not as a digest: equal text is the only thing that surely has equal ids.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._held: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, base_model: str, piece: str) -> "array[int] | None":
        """The ids, to be read only; None when they are not held."""
        key = (base_model, piece)
        ids = self._held.get(key)
        if ids is not None:
            self._held.move_to_end(key)
        return ids

    def put(self, base_model: str, piece: str, ids: "array[int]") -> None:
        """Hold `ids`, in place of older pieces if need be; a piece larger than a quarter of the whole is not held."""
        size_bytes = _size_bytes(piece, ids)
        if size_bytes > self.max_bytes // 4 or (base_model, piece) in self._held:
            return
        self._held[base_model, piece] = ids
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            (_, oldest), dropped = self._held.popitem(last=False)
            self.size_bytes -= _size_bytes(oldest, dropped)


def _size_bytes(piece: str, ids: "array[int]") -> int:
    return sys.getsizeof(piece) + len(ids) * ids.itemsize + _ENTRY_BYTES
