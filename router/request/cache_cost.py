"""What private caches cost: the part of a prompt that other callers' caches hold, and its own caller's does not.

It says what others have asked, so that only callers above tenants may see it, or sums of it.
"""

from collections.abc import Sequence

from lorafleet.identity import BlockHash, block_hashes, root_hash
from lorafleet.kv.pictures import picture_blocks
from router.core.schedule.request import HashedRequest
from router.request.cache_salt import is_own_salt
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.tokenizing.tokens import Tokens

# Of one sample: tokens hashed, however many salts there are, in less than a millisecond.
_MOST_SAMPLED_TOKENS = 32_768
_MOST_SAMPLED_SALTS = 16
# Of one answer to an operator.
MOST_EXPLAINED_SALTS = 64


def record_cache_cost(services: Services, hashed: HashedRequest, tokens: Tokens, dispatched: DispatchedRequest) -> None:
    """Note the salt of a request that is sent now; of some requests, count what their caller's own cache costs them."""
    ask, caches = hashed.request, services.private_caches
    if not is_own_salt(hashed.cache_salt):
        return
    caches.record_use(ask.base_model, ask.engine_name, hashed.cache_salt)
    if not tokens.ids or not hashed.chains or not caches.take_sample(services.clock()):
        return
    most = min(_MOST_SAMPLED_SALTS, _MOST_SAMPLED_TOKENS // len(tokens.ids))
    dispatched.lost_tokens = lost = tokens_in_other_caches(services, hashed, tokens, most=most)
    services.metrics.sampled_tokens.value += len(tokens.ids)
    services.metrics.lost_tokens.value += lost


def tokens_in_other_caches(services: Services, hashed: HashedRequest, tokens: Tokens, *, most: int) -> int:
    """Tokens of this prompt beyond those found cached that a replica has under another salt.

    most  salts to look under, those used last
    """
    ask = hashed.request
    own = longest = max([_longest(services, ask.base_model, *each) for each in hashed.chains.items()], default=0)
    for salt in services.private_caches.others(ask.base_model, ask.engine_name, hashed.cache_salt, most=most):
        root = root_hash(ask.base_model, ask.engine_name, salt)
        for size in hashed.chains:
            extra = picture_blocks(tokens.pictures, size) if tokens.pictures else None
            chain = block_hashes(tokens.ids or (), block_size=size, root=root, extra=extra)
            longest = max(longest, _longest(services, ask.base_model, size, chain))
    return longest - own


def _longest(services: Services, base_model: str, block_size: int, chain: Sequence[BlockHash]) -> int:
    """Tokens of these blocks that the replica with the most of them has, in any tier."""
    found = services.feeds.match(base_model, block_size, chain)
    blocks = [depth + sum(found.lower.get(worker, ())) for worker, depth in found.depths.items()]
    return block_size * max(blocks, default=0)
