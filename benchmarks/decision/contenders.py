"""Other block indexes, measured beside `router.core.kv.index`.

Each match returns {worker: contiguous prefix depth in blocks}. `DynamoTree` is Dynamo's compiled tree, where it is
installed (`pip install ai-dynamo-runtime`).
"""

import json
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from itertools import repeat
from typing import Any

from lorafleet.identity import BlockHash


class FlatMap:
    """One dict from block hash to a mask of holders, read block by block: exact, with a cache miss a block."""

    name = "flat map"

    def __init__(self) -> None:
        self.holders: dict[BlockHash, int] = {}

    def add(self, worker: int, hashes: Sequence[BlockHash]) -> None:
        """Store these blocks for a worker."""
        for block in hashes:
            self.holders[block] = self.holders.get(block, 0) | 1 << worker

    def match(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """Depth of every worker with at least the first block."""
        depths: dict[int, int] = {}
        alive = before = -1
        for depth, mask in enumerate(map(self.holders.get, hashes, repeat(0))):
            if mask != before:
                before = mask
                still = alive & mask
                if depth and still != alive:
                    depths.update(dict.fromkeys(_members(alive & ~still), depth))
                alive = still
                if not alive:
                    return depths
        depths.update(dict.fromkeys(_members(alive), len(hashes)))
        return depths


class GallopingMap(FlatMap):
    """The flat map, searched by bisection: few look-ups, but exact only while every holder of a block holds its parent.

    Where an engine evicts a block before its children, predicted depths are too large.
    """

    name = "galloping flat map"

    def match(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """Depth of every worker with at least the first block, if no worker has a hole."""
        depths: dict[int, int] = {}
        if hashes:
            get, last = self.holders.get, len(hashes) - 1
            _gallop(get, hashes, (0, get(hashes[0], 0)), (last, get(hashes[last], 0)), depths)
            depths.update(dict.fromkeys(_members(get(hashes[last], 0)), len(hashes)))
        return depths


class DynamoTree:
    """Dynamo's compiled RadixTree, with its own hashing."""

    name = "Dynamo RadixTree"

    def __init__(self) -> None:
        """Raises ImportError where it is not installed."""
        core = import_module("dynamo._core")
        self._tree = core.RadixTree()
        self.hash: Callable[[list[int], int], list[int]] = core.compute_block_hash_for_seq
        self._events = 0

    def event(self, hashes: Sequence[int], parent: int | None = None) -> bytes:
        """A store event of these blocks in the tree's format."""
        self._events += 1
        blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes]
        stored = {"parent_hash": parent, "blocks": blocks}
        return json.dumps({"event_id": self._events, "data": {"stored": stored}}).encode()

    def apply(self, worker: int, event: bytes) -> None:
        """Apply an event."""
        self._tree.apply_event(worker, event)

    def match(self, hashes: list[int]) -> Any:
        """The tree's own result, not converted."""
        return self._tree.find_matches(hashes)


def dynamo_version() -> str:
    """The installed version of Dynamo's tree, or `not installed`."""
    try:
        import_module("dynamo._core")
        return metadata.version("ai-dynamo-runtime")
    except ImportError:
        return "not installed"


def _gallop(
    get: Callable[[BlockHash, int], int],
    hashes: Sequence[BlockHash],
    low: tuple[int, int],
    high: tuple[int, int],
    depths: dict[int, int],
) -> None:
    """Set the depths of workers whose blocks end between two (position, mask)."""
    if low[1] == high[1]:
        return
    if high[0] - low[0] == 1:
        depths.update(dict.fromkeys(_members(low[1] & ~high[1]), high[0]))
        return
    position = (low[0] + high[0]) // 2
    middle = position, get(hashes[position], 0)
    _gallop(get, hashes, low, middle, depths)
    _gallop(get, hashes, middle, high, depths)


def _members(mask: int) -> list[int]:
    found = []
    while mask > 0:
        bit = mask & -mask
        found.append(bit.bit_length() - 1)
        mask ^= bit
    return found
