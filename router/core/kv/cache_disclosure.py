"""Cache disclosure: a tenant is told only of cached blocks that it sent itself, never of other tenants' prompts."""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from lorafleet.identity import BlockHash

# 3 M tokens at 16 a block, about 30 MB. A forgotten block is shown as not cached.
_MOST_BLOCKS = 200_000


class CacheDisclosure:
    """The newest blocks of answered prompts, by tenant; bounded over all tenants."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._sent: OrderedDict[int, None] = OrderedDict()

    def record_prompt(self, tenant: str, hashes: Sequence[BlockHash]) -> None:
        """Add the blocks of an answered prompt to the tenant's. Beyond the bound, forgets the oldest of all tenants."""
        salt = _tenant_salt(tenant)
        # Backwards, so that a prompt's first blocks, without which the others are useless, are forgotten last.
        for block in reversed(hashes):
            self._sent[block ^ salt] = None
            self._sent.move_to_end(block ^ salt)
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)

    def disclosed_depth(self, tenant: str, hashes: Sequence[BlockHash]) -> int:
        """First blocks of a prompt that this tenant has sent before, in blocks."""
        salt = _tenant_salt(tenant)
        for depth, block in enumerate(hashes):
            if block ^ salt not in self._sent:
                return depth
        return len(hashes)


def _tenant_salt(tenant: str) -> int:
    """A tenant's number, mixed into its block hashes to keep them apart from other tenants'."""
    return xxh3_64_intdigest(tenant.encode())
