"""One engine's cached blocks: its KV events in, changes of our own block hashes out.

What an event says is accepted only when it is exact; everything else is counted by reason, never guessed. The rule of
every doubt: a block that we miss costs a prefill, a block that we only believe in sends requests to the wrong replica.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from lorafleet.identity import TIERS, BlockHash, Tier, block_hashes, root_hash
from lorafleet.kv.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    ExtraKeys,
    KvEventBatch,
    KvEventDecoder,
    UndecodableBatch,
)

# vLLM 0.32 says GPU (on the CPU too), CPU and STORAGE, its Mooncake store "cpu". SGLang 0.5.23 says GPU, CPU_PINNED,
# DISK, and EXTERNAL for a pool that all share (disaggregation/kv_events.py StorageMedium); that one and any other is
# counted as `medium`.
_TIER_OF: Mapping[str, Tier] = {
    "GPU": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "STORAGE": "storage",
    "DISK": "storage",
}
_DEVICE = ("GPU", None)
# Groups whose blocks are all needed and kept from the first to the last token (vLLM 0.32 v1/kv_cache_interface.py
# KVCacheSpecKind). Sliding windows, Mamba and chunks keep a tail only: a prefix match there means something else.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# How many blocks are kept after missed removals, in those that the engine has. More than once as many are there then,
# and which of them are gone nobody knows: to drop the oldest at once would drop the prefixes that everybody shares.
KEPT_TIMES = 2
# Engine hashes are kept as integers of 60 bits: 16 bytes less for each than 64 bits take in CPython. By chance two of
# a million blocks are then one with a probability of 4e-7.
_NAME_BITS = (1 << 60) - 1
_NAME_BYTES, _HASH_BYTES = 32, 48
_ROOTS_KEPT = 4096


class LedgerSink(Protocol):
    """Who hears of changes, in order. A block is only added where it was not, and only dropped where it was."""

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None: ...

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None: ...

    def clear(self) -> None:
        """Everything is gone, at every tier."""


@dataclass(frozen=True, slots=True)
class KvEventTraits:
    """How one engine's events differ from the next one's."""

    group: int = 0
    """The KV group that is indexed; others are counted as `group`."""
    forgets_on_load: bool = False
    """A load of an adapter starts afresh, and nothing announces that its former blocks are unreachable."""


TRAITS: Mapping[str, KvEventTraits] = {
    "vllm": KvEventTraits(),
    # Adapter hashes are seeded anew at every load, and an unload publishes nothing (SGLang 0.5.23, seen running).
    "sglang": KvEventTraits(forgets_on_load=True),
}


@dataclass(slots=True)
class _MediumBlocks:
    """One medium: engine hash -> our hash, and copies beyond the first (nearly always none)."""

    tier: Tier
    blocks: dict[int, BlockHash] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)


class BlockLedger:
    """The blocks of one engine rank."""

    def __init__(
        self,
        base_model: str,
        block_size: int,
        sink: LedgerSink,
        traits: KvEventTraits = TRAITS["vllm"],
        *,
        most_blocks: int = 0,
    ) -> None:
        """most_blocks  how many may be kept of the device's at most, whatever removals are missed; 0: any number."""
        self.base_model = base_model
        self.block_size = block_size
        self.accepted: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._told: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._decode = KvEventDecoder().decode
        self._sink = sink
        self._traits = traits
        self._most_blocks = most_blocks
        self._shelves = {medium: _MediumBlocks(tier) for medium, tier in _TIER_OF.items()}
        self._device = self._shelves["GPU"]
        # Our hash -> how many engine hashes stand for it: two, where the engine salts with what its events do not say.
        self._held: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in TIERS}
        # Only where a load forgets: whose each block is.
        self._adapter_of: dict[int, str] = {}
        self._roots: dict[tuple[str, str], BlockHash] = {}
        self._repeats = False

    def __len__(self) -> int:
        """How many of our blocks are at the device."""
        return len(self._held["device"])

    def blocks(self, tier: Tier) -> Iterable[BlockHash]:
        """Everything at a tier now, in no order."""
        return self._held[tier].keys()

    def size_bytes(self) -> int:
        """About how much memory the ledger takes: tables, and the integers in them. Costs microseconds."""
        names = sum(len(shelf.blocks) for shelf in self._shelves.values())
        tables = [shelf.blocks for shelf in self._shelves.values()] + [shelf.more for shelf in self._shelves.values()]
        sizes = sum(map(sys.getsizeof, tables)) + sum(map(sys.getsizeof, self._held.values()))
        sizes += sys.getsizeof(self._adapter_of)
        return sizes + names * _NAME_BYTES + sum(map(len, self._held.values())) * _HASH_BYTES

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """What was `accepted` and `rejected` since the last call, for metrics that only grow."""
        before, self._told = self._told, (self.accepted.copy(), self.rejected.copy())
        return self.accepted - before[0], self.rejected - before[1]

    def expect_repeats(self, expected: bool) -> None:
        """Say whether a store of a known block may be a repetition instead of another copy.

        In report mode `full` the engine announces reused blocks again, in events that nothing tells from those of a
        real copy. While that may happen no store adds a copy, and what had several counts as one: then we may drop a
        block while the engine still has a copy, but never believe in one that is gone.

        source  vLLM 0.32 v1/core/block_pool.py emit_cached_block_events, _build_block_stored_event
        """
        self._repeats = expected
        if expected:
            for shelf in self._shelves.values():
                shelf.more.clear()

    def read(self, payload: bytes) -> tuple[float, str]:
        """Apply a batch as its engine sent it. Returns the engine's time, 0.0 where it cannot be read, and what is
        missed because it could not be read, or nothing.
        """
        try:
            batch = self._decode(payload)
        except UndecodableBatch:
            self.rejected["undecodable"] += 1
            return 0.0, "a batch of events"
        self.apply(batch)
        return batch.ts, "a removal" if batch.has_lost_removal else ""

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the events of one step, in order."""
        if batch.rejected:
            self.rejected.update(batch.rejected)
        removed: list[BlocksRemoved] = []
        for event in batch.events:
            # Engines remove block by block: the sink hears of a run of removals in one call.
            if isinstance(event, BlocksRemoved):
                removed.append(event)
                continue
            if removed:
                self._remove(removed)
                removed = []
            if isinstance(event, BlocksStored):
                reason = self._store(event)
                if reason is None:
                    self.accepted["BlockStored"] += 1
                else:
                    self.rejected[reason] += 1
            else:
                assert isinstance(event, BlocksCleared)
                self.clear()
                self.accepted["AllBlocksCleared"] += 1
        if removed:
            self._remove(removed)

    def clear(self) -> None:
        """Forget everything, at every tier.

        AllBlocksCleared says neither what was cleared nor where. vLLM 0.32 sends it when the device's cache is reset,
        the connector's (host, storage) is reset in the same call if asked to, and its managers say nothing then
        (v1/core/sched/scheduler.py reset_prefix_cache, v1/kv_offload/cpu/manager.py reset_cache); simple_kv_offload's
        own pool sends the same event for the host. So nothing that is kept could be relied on.
        """
        for shelf in self._shelves.values():
            shelf.blocks, shelf.more = {}, {}
        self._held = {tier: {} for tier in TIERS}
        self._adapter_of = {}
        self._sink.clear()

    def forget_adapter(self, engine_name: str) -> None:
        """An adapter was loaded afresh: its blocks are unreachable from now on, at every tier.

        Only for engines whose trait is `forgets_on_load`; others keep what they stored under the name.
        """
        names = [name for name, adapter in self._adapter_of.items() if adapter == engine_name]
        for shelf in self._shelves.values():
            gone: list[BlockHash] = []
            for name in names:
                shelf.more.pop(name, None)
                self._take(shelf, name, gone)
            if gone:
                self._sink.drop(shelf.tier, gone)

    # --- stores --------------------------------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> str | None:
        """Take a store into the ledger, or say why not."""
        shelf = self._device if event.medium in _DEVICE else self._shelf(event.medium)
        if shelf is None:
            return "medium"
        if event.group_idx not in (None, self._traits.group):
            return "group"
        if shelf is not self._device:
            return self._copy(shelf, event.block_hashes)
        names = _names(event.block_hashes)
        distinct = set(names)
        reason = self._misshapen(event, len(names), len(distinct))
        if reason is not None:
            return reason
        ours = self._hashed(event)
        if isinstance(ours, str):
            return ours
        held = self._held["device"]
        if shelf.blocks.keys().isdisjoint(distinct) and held.keys().isdisjoint(ours):
            shelf.blocks.update(zip(names, ours, strict=True))
            held.update(dict.fromkeys(ours, 1))
            self._sink.add("device", ours)
        elif any(shelf.blocks.get(name, block) != block for name, block in zip(names, ours, strict=True)):
            return "conflict"
        elif self._repeats or not self._is_report(event, names):
            self._put(shelf, names, ours)
        if self._most_blocks and len(shelf.blocks) > self._most_blocks:
            self._overflow(shelf)
        if self._traits.forgets_on_load and event.lora_name:
            self._adapter_of.update(dict.fromkeys(names, event.lora_name))
        return None

    def _is_report(self, event: BlocksStored, names: Sequence[int]) -> bool:
        """Whether a store is what report mode `full` says of reused blocks, instead of copies of them.

        Nothing tells the two apart for certain, but such a report begins with the prompt's first block and says nothing
        new, and of a prompt that is cached an engine computes no more than the last block again. Whole prompts that
        skip the cache (`prompt_logprobs`) are taken for reports: then a block is dropped while a copy is left.

        source  vLLM 0.32 v1/core/kv_cache_manager.py get_computed_blocks; tests/recordings
        """
        return event.parent_block_hash is None and len(names) > 1 and all(map(self._device.blocks.__contains__, names))

    def _misshapen(self, event: BlocksStored, blocks: int, distinct: int) -> str | None:
        """Why a store's blocks cannot be told one by one; None when they can."""
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX or event.kv_cache_spec_sliding_window:
            return "attention"
        if event.block_size != self.block_size:
            return "block_size"
        if not blocks or distinct != blocks or len(event.token_ids) != blocks * self.block_size:
            return "shape"
        return None

    def _hashed(self, event: BlocksStored) -> list[BlockHash] | str:
        """Our hashes of a store's blocks, or why they cannot be known."""
        adapter = event.lora_name or ""
        salt, extra = event.cache_salt or "", None
        # Nearly always every block has the adapter's name and nothing else: one comparison in C.
        plain = [adapter] if adapter else None
        keys = event.extra_keys
        if keys is not None and keys.count(plain) != len(event.block_hashes):
            read = extra_of(keys, adapter, is_start=event.parent_block_hash is None)
            if read is None or len(keys) != len(event.block_hashes):
                return "extra_keys"
            salt, extra = read
        if event.parent_block_hash is None:
            parent: BlockHash | None = self._root(adapter, salt)
        else:
            parent = self._known(_name(event.parent_block_hash))
        if parent is None:
            return "unknown_parent"
        try:
            return block_hashes(event.token_ids, block_size=self.block_size, root=parent, extra=extra)
        except (TypeError, OverflowError):
            return "shape"

    def _copy(self, shelf: _MediumBlocks, hashes: Sequence[EngineHash]) -> str | None:
        """Another medium has blocks: only those that we know by name; connectors leave out tokens, adapter or keys.

        source  vLLM 0.32 kv_connector/v1/offloading/events.py _placeholder_stored; mooncake/store/worker.py
        """
        names = _names(hashes)
        known = [(name, block) for name in names if (block := self._known(name)) is not None]
        self._put(shelf, [name for name, _ in known], [block for _, block in known])
        if len(known) == len(names):
            return None if names else "shape"
        # The event is counted once, as what part of it was not taken.
        return "unknown_block"

    def _put(self, shelf: _MediumBlocks, names: Sequence[int], ours: Sequence[BlockHash]) -> None:
        """One more copy of each block on this shelf."""
        held = self._held[shelf.tier]
        added: list[BlockHash] = []
        for name, block in zip(names, ours, strict=True):
            known = shelf.blocks.get(name)
            if known is None:
                shelf.blocks[name] = block
                count = held.get(block, 0)
                held[block] = count + 1
                if not count:
                    added.append(block)
            elif not self._repeats:
                shelf.more[name] = shelf.more.get(name, 0) + 1
            elif self._most_blocks:
                # Heard of last, so the last to go when there are too many; see _overflow.
                shelf.blocks[name] = shelf.blocks.pop(name)
        if added:
            self._sink.add(shelf.tier, added)

    def _overflow(self, shelf: _MediumBlocks) -> None:
        """Drop those heard of longest ago: so many are there only after removals that we missed.

        Some more at once than must go, because a dict's front is slow to find where much has been taken from it.
        """
        too_many = len(shelf.blocks) - self._most_blocks + self._most_blocks // 64
        gone: list[BlockHash] = []
        for name in list(islice(shelf.blocks, too_many)):
            shelf.more.pop(name, None)
            self._take(shelf, name, gone)
        if gone:
            self._sink.drop(shelf.tier, gone)
        self.rejected["overflow"] += 1

    # --- removals ------------------------------------------------------------------------------------------------

    def _remove(self, events: Iterable[BlocksRemoved]) -> None:
        gone: list[BlockHash] = []
        last = self._device
        for event in events:
            shelf = self._device if event.medium in _DEVICE else self._shelf(event.medium)
            if shelf is None:
                self.rejected["medium"] += 1
                continue
            if event.group_idx not in (None, self._traits.group):
                self.rejected["group"] += 1
                continue
            if shelf is not last and gone:
                self._sink.drop(last.tier, gone)
                gone = []
            last = shelf
            unknown = sum(not self._take(shelf, _name(engine_hash), gone) for engine_hash in event.block_hashes)
            if unknown:
                self.rejected["unknown_block"] += 1
            else:
                self.accepted["BlockRemoved"] += 1
        if gone:
            self._sink.drop(last.tier, gone)

    def _take(self, shelf: _MediumBlocks, name: int, gone: list[BlockHash]) -> bool:
        """One copy less; false when there was none. A block with no copy left at the tier goes to `gone`."""
        more = shelf.more.get(name)
        if more is not None:
            if more == 1:
                del shelf.more[name]
            else:
                shelf.more[name] = more - 1
            return True
        block = shelf.blocks.pop(name, None)
        if block is None:
            return False
        held = self._held[shelf.tier]
        count = held[block]
        if count == 1:
            del held[block]
            gone.append(block)
        else:
            held[block] = count - 1
        if self._adapter_of and self._known(name) is None:
            self._adapter_of.pop(name, None)
        return True

    # --- small questions -----------------------------------------------------------------------------------------

    def _shelf(self, medium: str | None) -> _MediumBlocks | None:
        return self._shelves.get((medium or "GPU").upper())

    def _known(self, name: int) -> BlockHash | None:
        block = self._device.blocks.get(name)
        if block is not None:
            return block
        found = (shelf.blocks.get(name) for shelf in self._shelves.values())
        return next((block for block in found if block is not None), None)

    def _root(self, adapter: str, salt: str) -> BlockHash:
        root = self._roots.get((adapter, salt))
        if root is None:
            if len(self._roots) >= _ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[adapter, salt] = root_hash(self.base_model, adapter, salt)
        return root


def extra_of(keys: ExtraKeys, adapter: str, *, is_start: bool) -> tuple[str, dict[int, bytes] | None] | None:
    """(cache salt or "", block number -> what else that block is hashed with), or None when a key is not understood.

    keys      per block: nil, or [adapter's name][(multimodal id, offset)...][salt, block 0 only][prompt embeddings]
    is_start  whether the first of these blocks is the prompt's first
    source    vLLM 0.32 v1/core/kv_cache_utils.py generate_block_hash_extra_keys, to_event_extra_keys
    """
    salt, extra = "", {}
    for number, of_block in enumerate(keys):
        rest = list(of_block or ())
        if adapter:
            if rest[:1] != [adapter]:
                return None
            del rest[0]
        if rest and is_start and number == 0 and isinstance(rest[-1], str):
            salt = rest.pop()
        if rest:
            packed = media_key(rest)
            if packed is None:
                return None
            extra[number] = packed
    return salt, extra or None


def media_key(items: Iterable[Any]) -> bytes | None:
    """The bytes that a block with these multimodal items is hashed with; None when one is not (id, offset).

    offset  the item's first token relative to the block's, negative in a block that continues it
    """
    packed = bytearray()
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            return None
        identifier, offset = item
        if not isinstance(identifier, str) or not isinstance(offset, int) or abs(offset) >= 1 << 62:
            return None
        data = identifier.encode("utf-8", "surrogatepass")
        # Length first, so that no two lists of items are packed alike.
        packed += len(data).to_bytes(4, "big") + data + offset.to_bytes(8, "big", signed=True)
    return bytes(packed)


def _names(hashes: Sequence[EngineHash]) -> list[int]:
    try:
        return [engine_hash & _NAME_BITS for engine_hash in hashes]  # type: ignore[operator]
    except TypeError:
        return [_name(engine_hash) for engine_hash in hashes]


def _name(engine_hash: EngineHash) -> int:
    if isinstance(engine_hash, bytes):
        # The last 64 bits are what vLLM's own integers are (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
        engine_hash = int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _NAME_BITS
