"""What a tenant may be told about the cache: the blocks that it sent itself, never what its neighbours did."""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from lorafleet.identity import BlockHash

# 3 M tokens at 16 a block, about 30 MB. What is forgotten is shown as not cached, which it may still be.
_MOST_BLOCKS = 200_000


class CacheDisclosure:
    """The blocks that each tenant's answered prompts had; the latest of them, over all tenants."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._sent: OrderedDict[int, None] = OrderedDict()

    def record_prompt(self, tenant: str, hashes: Sequence[BlockHash]) -> None:
        """Note a prompt that this tenant has had answered."""
        salt = _salt(tenant)
        # Backwards, so that a prompt's first blocks, without which the others count for nothing, are forgotten last.
        for block in reversed(hashes):
            self._sent[block ^ salt] = None
            self._sent.move_to_end(block ^ salt)
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)

    def disclosed_depth(self, tenant: str, hashes: Sequence[BlockHash]) -> int:
        """How many of a prompt's first blocks this tenant has sent before."""
        salt = _salt(tenant)
        for depth, block in enumerate(hashes):
            if block ^ salt not in self._sent:
                return depth
        return len(hashes)


def _salt(tenant: str) -> int:
    return xxh3_64_intdigest(tenant.encode())
