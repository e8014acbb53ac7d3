"""Extra keys of KV events: what an engine hashes into a block besides its tokens, as extra bytes for our block hash."""

from collections.abc import Iterable
from typing import Any

from lorafleet.kv.events import ExtraKeys


def extra_hash_inputs(keys: ExtraKeys, adapter: str, *, is_start: bool) -> tuple[str, dict[int, bytes] | None] | None:
    """The cache salt or "", and extra bytes by block number; None if a key is not understood.

    keys      per block: nil, or [adapter's name][(multimodal id, offset)...][salt, block 0 only][prompt embeddings]
    is_start  whether the first of these blocks is the prompt's first
    source    vLLM 0.32 v1/core/kv_cache_utils.py generate_block_hash_extra_keys, to_event_extra_keys
    """
    salt, extra = "", {}
    for number, of_block in enumerate(keys):
        unread = list(of_block or ())
        if adapter:
            if unread[:1] != [adapter]:
                return None
            del unread[0]
        if unread and is_start and number == 0 and isinstance(unread[-1], str):
            salt = unread.pop()
        if unread:
            packed = media_key(unread, adapter)
            if packed is None:
                return None
            extra[number] = packed
    return salt, extra or None


def media_key(items: Iterable[Any], adapter: str = "") -> bytes | None:
    """The extra bytes for a block with these multimodal items; None if an item is not (id, offset).

    offset   the item's first token relative to the block's, negative in a block that continues it
    adapter  left out before an item's id, where vLLM puts it for adapters of vision towers: our roots have it already
    """
    packed = bytearray()
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            return None
        identifier, offset = item
        if not isinstance(identifier, str) or not isinstance(offset, int) or abs(offset) >= 1 << 62:
            return None
        data = identifier.removeprefix(f"{adapter}:" if adapter else "").encode("utf-8", "surrogatepass")
        # Length first, so that different lists of items give different bytes.
        packed += len(data).to_bytes(4, "big") + data + offset.to_bytes(8, "big", signed=True)
    return bytes(packed)
