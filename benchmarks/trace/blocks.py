"""The KV blocks of one engine, for a simulation that counts in blocks: references, copies, LRU, net changes.

The rules are those of lorafleet/sim/blocks.py (after vLLM 0.32 v1/core/block_pool.py); a test holds the two
together. This one is told the blocks' keys instead of hashing tokens, and says only which keys came and went.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Blocks:
    """A pool of `size` blocks, all usable. A freed block can be found until somebody needs the room."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.references = [0] * size
        self.key: list[int | None] = [None] * size
        self.free = OrderedDict[int, None].fromkeys(range(size))  # first out first
        self.first: dict[int, int] = {}
        """The block that is found under a key; `others` are further copies, which are rare."""
        self.others: dict[int, list[int]] = {}
        self.changes: list[tuple[int, bool]] = []
        """Keys of which the first copy came (True) or the last one went (False), in order."""

    @property
    def usage(self) -> float:
        """Share of the blocks in use by requests; cached but free ones do not count."""
        return 1.0 - len(self.free) / self.size

    def take_changes(self) -> list[tuple[int, bool]]:
        """The changes since the last call, oldest first."""
        changes, self.changes = self.changes, []
        return changes

    def match(self, keys: Sequence[int], most: int) -> list[int]:
        """Blocks that hold the longest cached prefix, of at most `most` blocks."""
        found = []
        find = self.first.get
        for key in keys[:most]:
            index = find(key)
            if index is None:
                break
            found.append(index)
        return found

    def room_for(self, hits: Sequence[int], blocks: int) -> bool:
        """Whether `blocks` new ones can be had beside `hits`, some of which may be free themselves."""
        spare = len(self.free) - blocks
        if spare >= len(hits):
            return True
        references = self.references
        return spare >= sum(not references[hit] for hit in hits)

    def hold(self, hits: Sequence[int]) -> None:
        """One more reference to each of `hits`."""
        references, free = self.references, self.free
        for hit in hits:
            if not references[hit]:
                del free[hit]
            references[hit] += 1

    def allocate(self, blocks: int) -> list[int]:
        """`blocks` blocks to write into; what they held is forgotten. Ask `room_for` first."""
        taken = []
        for _ in range(blocks):
            index, _none = self.free.popitem(last=False)
            if self.key[index] is not None:
                self._forget(index)
            self.references[index] = 1
            taken.append(index)
        return taken

    def store(self, keys: Sequence[int], table: Sequence[int]) -> None:
        """Make blocks findable: `table[i]` holds what is called `keys[i]`."""
        for key, index in zip(keys, table, strict=True):
            self.key[index] = key
            if key in self.first:
                self.others.setdefault(key, []).append(index)
            else:
                self.first[key] = index
                self.changes.append((key, True))

    def release(self, table: Sequence[int]) -> None:
        """Give a request's blocks back, tail first: a long prompt loses its end before its beginning."""
        references, free, key = self.references, self.free, self.key
        emptied = []
        for index in reversed(table):
            references[index] -= 1
            if references[index]:
                continue
            if key[index] is None:
                emptied.append(index)
            else:
                free[index] = None
        for index in reversed(emptied):  # nothing to lose in these: used again first, in this order
            free[index] = None
            free.move_to_end(index, last=False)

    def clear(self) -> None:
        """Forget what all blocks hold; none may be in use."""
        for index, key in enumerate(self.key):
            if key is not None:
                self._forget(index)

    def _forget(self, index: int) -> None:
        key = self.key[index]
        assert key is not None
        self.key[index] = None
        copies = self.others.get(key)
        if copies is None:
            del self.first[key]
            self.changes.append((key, False))
            return
        if self.first[key] == index:
            self.first[key] = copies.pop(0)
        else:
            copies.remove(index)
        if not copies:
            del self.others[key]
