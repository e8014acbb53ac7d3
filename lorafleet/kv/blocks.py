"""Tokens -> chained block hashes, salted with everything that the engine salts its prefix cache with."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import NewType, cast

from xxhash import xxh3_64_intdigest

BlockHash = NewType("BlockHash", int)

# Token ids travel as unsigned 32-bit integers; no tokenizer has more.
_UINT32 = "I"


@lru_cache(maxsize=4096)
def root_hash(base_model: str, engine_name: str = "", cache_salt: str = "") -> BlockHash:
    """The start of a chain: same tokens under another adapter or salt never share a block.

    engine_name  `lora_id@digest12`, or empty for the base model
    source       vLLM 0.32 v1/core/kv_cache_utils.py generate_block_hash_extra_keys: lora name and cache salt
    """
    return BlockHash(xxh3_64_intdigest(_joined(base_model, engine_name, cache_salt)))


@lru_cache(maxsize=4096)
def adapter_salt(engine_name: str, cache_salt: str = "") -> str:
    """The `cache_salt` of a request at an engine whose KV connector knows a salt and no adapter.

    engine_name  empty for the base model. A client's salt is changed there, too: it could be an adapter's
    returns      64 hexadecimal digits; empty for the base model without a salt
    source       vLLM 0.32 entrypoints/generate/base/protocol.py validate_cache_salt: at most 128 characters, no `@`
                 and no `/`, both of which an engine's name for an adapter has; so a digest
    """
    if not engine_name and not cache_salt:
        return ""
    # Nobody may find another adapter's salt: block hashes, which only predict, do with less.
    return hashlib.sha256(_joined(engine_name, cache_salt)).hexdigest()


def _joined(*parts: str) -> bytes:
    joined = bytearray()
    for part in parts:
        data = part.encode()
        # Length first: without it ("ab", "c") and ("a", "bc") would share a cache.
        joined += len(data).to_bytes(4, "big") + data
    return bytes(joined)


def block_hashes(
    tokens: Sequence[int], *, block_size: int, root: BlockHash, extra: Mapping[int, bytes] | None = None
) -> list[BlockHash]:
    """Chain one hash per full block of the prompt.

    tokens   [n] token ids, chat template already applied; quickest as an array("I")
    root     root_hash(...), or the hash of the block before tokens[0]
    extra    block number in `tokens` -> what else tells that block apart, such as its multimodal items;
             several things in one block are the caller's to separate
    returns  [n // block_size] hashes; the partial tail block is left out
    raises   OverflowError or TypeError for ids that are not unsigned 32-bit integers
    source   vLLM 0.32 v1/core/kv_cache_utils.py hash_block_tokens: only full blocks are cached
    """
    ids = tokens if isinstance(tokens, array) and tokens.typecode == _UINT32 else array(_UINT32, tokens)
    whole = memoryview(ids)[: len(ids) - len(ids) % block_size]
    # Unpacked in one go, in C: a slice per block would cost as much as the hashing.
    blocks = _block_of(block_size * ids.itemsize).iter_unpack(whole)
    parent: int = root
    if not extra:
        return _typed([parent := xxh3_64_intdigest(block, parent) for (block,) in blocks])
    hashes = []
    for number, (block,) in enumerate(blocks):
        more = extra.get(number)
        # Its length too, so that no bytes at all differ from none said.
        data = block if more is None else block + len(more).to_bytes(4, "big") + more
        parent = xxh3_64_intdigest(data, parent)
        hashes.append(parent)
    return _typed(hashes)


def _typed(hashes: list[int]) -> list[BlockHash]:
    # Once a list: `BlockHash(...)` around each hash would nearly double the cost of the loop.
    return cast("list[BlockHash]", hashes)


@lru_cache(maxsize=16)
def _block_of(size_bytes: int) -> Struct:
    return Struct(f"{size_bytes}s")
