"""KV cache events in vLLM 0.32's wire format (vllm/distributed/kv_events.py): msgpack maps with a `type`."""

from typing import Any

import msgspec

BlockHash = int | bytes
"""A block's hash in an event: the low 64 bits of vLLM's hash, or all 32 bytes."""

MEDIUM = "GPU"
"""vLLM also uses GPU on the CPU."""


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One change of the cache."""


class BlockStored(KVEvent):
    """`block_hashes` are now cached; `token_ids` has their tokens in order, `block_size` each."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KVEvent):
    """One copy of each of `block_hashes` was evicted."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """The whole cache was cleared."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one engine step. `ts` is Unix time."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None
