"""Tokens -> chained block hashes, salted with everything that the engine salts its prefix cache with."""

from array import array
from collections.abc import Sequence
from typing import NewType

from xxhash import xxh3_64_intdigest

BlockHash = NewType("BlockHash", int)

# Token ids travel as unsigned 32-bit integers; no tokenizer has more.
_UINT32 = "I"


def root_hash(base_model: str, engine_name: str = "", cache_salt: str = "") -> BlockHash:
    """The start of a chain: same tokens under another adapter or salt never share a block.

    engine_name  `lora_id@digest12`, or empty for the base model
    source       vLLM 0.32 v1/core/kv_cache_utils.py generate_block_hash_extra_keys: lora name and cache salt
    """
    digest = bytearray()
    for part in (base_model, engine_name, cache_salt):
        data = part.encode()
        # Length first: without it ("ab", "c") and ("a", "bc") would share a cache.
        digest += len(data).to_bytes(4, "big") + data
    return BlockHash(xxh3_64_intdigest(bytes(digest)))


def block_hashes(tokens: Sequence[int], *, block_size: int, root: BlockHash) -> list[BlockHash]:
    """Chain one hash per full block of the prompt.

    tokens   [n] token ids, chat template already applied
    root     root_hash(...), or the hash of the block before tokens[0]
    returns  [n // block_size] hashes; the partial tail block is left out
    raises   OverflowError or TypeError for ids that are not unsigned 32-bit integers
    source   vLLM 0.32 v1/core/kv_cache_utils.py hash_block_tokens: only full blocks are cached
    """
    # One copy into packed bytes, then slices of it: hashing from a list costs twice as much.
    packed = memoryview(array(_UINT32, tokens)).cast("B")
    step = block_size * array(_UINT32).itemsize
    hashes = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = BlockHash(xxh3_64_intdigest(packed[start : start + step], parent))
        hashes.append(parent)
    return hashes
