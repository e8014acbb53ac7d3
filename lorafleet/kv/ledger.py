"""The ledger of one engine's cached blocks: converts its KV events into changes of our own block hashes.

Only exact events are accepted; all others are counted by reason. In doubt a block is left out: a missing block costs a
prefill, but a block that is not there sends requests to the wrong replica.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lorafleet.identity import TIERS, BlockHash, Tier, block_hashes, root_hash
from lorafleet.kv.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KvEventBatch,
    KvEventDecoder,
    UndecodableBatch,
)
from lorafleet.kv.extra_keys import extra_hash_inputs
from lorafleet.kv.resume_points import LedgerSink, ResumePoints

# vLLM 0.32 has GPU (also on a CPU), CPU and STORAGE; its Mooncake store has "cpu". SGLang 0.5.23 has GPU, CPU_PINNED,
# DISK, and EXTERNAL for a shared pool (disaggregation/kv_events.py StorageMedium). EXTERNAL and unknown media are
# rejected as `medium`.
_TIER_OF: Mapping[str, Tier] = {
    "GPU": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "STORAGE": "storage",
    "DISK": "storage",
}
_DEVICE = ("GPU", None)
# Attention kinds that keep all blocks of a prefix (vLLM 0.32 v1/kv_cache_interface.py KVCacheSpecKind).
_PREFIX_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_FIRST_GROUP = 0  # of an engine whose events name no kind
# Most blocks kept, as a multiple of the engine's own. More than the engine has appear after missed removals; dropping
# the oldest at once would drop the prefixes that all requests share.
MAX_KEPT_RATIO = 2
# Engine hashes are kept as 60-bit integers, which take 16 bytes less each in CPython than 64-bit ones. Two of a million
# blocks collide with probability 4e-7.
_KEY_MASK = (1 << 60) - 1
_KEY_BYTES, _HASH_BYTES = 32, 48
_MAX_ROOTS = 4096


@dataclass(frozen=True, slots=True)
class KvEventTraits:
    """Differences between engines' events."""

    forgets_on_load: bool = False
    """Loading an adapter makes its former blocks unreachable without an event."""


TRAITS: Mapping[str, KvEventTraits] = {
    "vllm": KvEventTraits(),
    # SGLang seeds an adapter's hashes anew at every load, and an unload publishes no event (0.5.23, seen running).
    "sglang": KvEventTraits(forgets_on_load=True),
}


@dataclass(slots=True)
class _MediumBlocks:
    """Blocks of one medium: engine hash -> our hash, and the copies beyond the first (rarely any)."""

    tier: Tier
    blocks: dict[int, BlockHash] = field(default_factory=dict)
    extra_copies: dict[int, int] = field(default_factory=dict)


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
        """most_blocks  limit for the device's blocks, in case removals are missed; 0 for no limit"""
        self.base_model = base_model
        self.block_size = block_size
        self.accepted: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._counted: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._decode = KvEventDecoder().decode
        self._sink = sink
        self._traits = traits
        self._most_blocks = most_blocks
        self._media = {medium: _MediumBlocks(tier) for medium, tier in _TIER_OF.items()}
        self._device = self._media["GPU"]
        # Our hash -> number of engine hashes for it; two if the engine salts with a value that its events do not have.
        self._held: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in TIERS}
        # The adapter of each block, for engines with `forgets_on_load`.
        self._adapter_of: dict[int, str] = {}
        self._roots: dict[tuple[str, str], BlockHash] = {}
        self._expects_repeats = False
        self._group: int | None = None  # the KV group that is indexed: the first of a prefix kind
        # For a model with groups of other kinds, from the first batch with the indexed group on.
        self._resume: ResumePoints | None = None
        self._knows_groups = self._has_other_groups = False
        # Of this batch: blocks that other groups keep and whose own event is still to come (each group and its need);
        # and the blocks that are new on the device.
        self._kept_early: dict[int, list[tuple[int, int]]] = {}
        self._new: set[int] = set()

    def __len__(self) -> int:
        """Number of blocks on the device."""
        return len(self._held["device"])

    def blocks(self, tier: Tier) -> Iterable[BlockHash]:
        """All blocks at a tier now, in any order; of the device those that the sink has."""
        return self._resume.blocks() if self._resume is not None and tier == "device" else self._held[tier].keys()

    def size_bytes(self) -> int:
        """Approximate memory of the ledger in bytes: its tables and their integers. Takes microseconds."""
        keys = sum(len(medium.blocks) for medium in self._media.values())
        tables = [medium.blocks for medium in self._media.values()] + [
            medium.extra_copies for medium in self._media.values()
        ]
        sizes = sum(map(sys.getsizeof, tables)) + sum(map(sys.getsizeof, self._held.values()))
        sizes += sys.getsizeof(self._adapter_of) + (self._resume.size_bytes() if self._resume is not None else 0)
        return sizes + keys * _KEY_BYTES + sum(map(len, self._held.values())) * _HASH_BYTES

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Events accepted, by type, and rejected, by reason, since the last call; the next call counts from here."""
        before, self._counted = self._counted, (self.accepted.copy(), self.rejected.copy())
        return self.accepted - before[0], self.rejected - before[1]

    def expect_repeats(self, expected: bool) -> None:
        """Set whether a store of a known block may repeat an earlier event instead of adding a copy.

        In report mode `full` the engine announces reused blocks again, in events that look like those of real copies.
        While repeats are expected, no store adds a copy, and several copies count as one. So a block may be dropped
        while the engine still has a copy, but none is kept that is gone.

        source  vLLM 0.32 v1/core/block_pool.py emit_cached_block_events, _build_block_stored_event
        """
        self._expects_repeats = expected
        if expected:
            for medium in self._media.values():
                medium.extra_copies.clear()

    def read(self, payload: bytes) -> tuple[float, str]:
        """Decode a batch of events and apply it; an undecodable batch is counted.

        returns  the engine's time, 0.0 if unreadable; and what was lost because it was unreadable, or ""
        """
        try:
            batch = self._decode(payload)
        except UndecodableBatch:
            self.rejected["undecodable"] += 1
            return 0.0, "a batch of events"
        self.apply(batch)
        return batch.ts, "a removal" if batch.has_lost_removal else ""

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the events of one step, in order: change the ledger, call the sink, count each event."""
        if batch.rejected:
            self.rejected.update(batch.rejected)
        if not self._knows_groups:
            self._look_for_groups(batch)
        removed: list[BlocksRemoved] = []
        for event in batch.events:
            # Engines remove block by block; the sink gets a run of removals in one call.
            if isinstance(event, BlocksRemoved):
                removed.append(event)
                continue
            if removed:
                self._apply_removals(removed)
                removed = []
            if isinstance(event, BlocksStored):
                reason = self._apply_store(event)
                if reason is None:
                    self.accepted["BlockStored"] += 1
                else:
                    self.rejected[reason] += 1
            else:
                assert isinstance(event, BlocksCleared)
                self.clear()
                self.accepted["AllBlocksCleared"] += 1
        if removed:
            self._apply_removals(removed)
        self._kept_early.clear()
        self._new.clear()

    def _look_for_groups(self, batch: KvEventBatch) -> None:
        """Follow the resume points of a model with several kinds of KV groups, which all have events of each prompt."""
        kinds = {event.kv_cache_spec_kind for event in batch.events if isinstance(event, BlocksStored)}
        self._has_other_groups |= bool(kinds - _PREFIX_ATTENTION - {None})
        self._knows_groups = not kinds.isdisjoint({*_PREFIX_ATTENTION, None})
        if self._knows_groups and self._has_other_groups:
            self._resume = self._sink = ResumePoints(self._sink)

    def clear(self) -> None:
        """Drop all blocks at every tier, here and in the sink.

        AllBlocksCleared does not name a medium. vLLM 0.32 sends it when the device's cache is reset. The same call may
        reset the connector's caches (host, storage), which send no event (v1/core/sched/scheduler.py
        reset_prefix_cache, v1/kv_offload/cpu/manager.py reset_cache); simple_kv_offload sends the event for the host.
        """
        for medium in self._media.values():
            medium.blocks, medium.extra_copies = {}, {}
        self._held = {tier: {} for tier in TIERS}
        self._adapter_of = {}
        self._sink.clear()

    def forget_adapter(self, engine_name: str) -> None:
        """Drop an adapter's blocks at every tier, here and in the sink, after it was loaded again.

        Only for engines with `forgets_on_load`; others can still use the blocks.
        """
        keys = [key for key, adapter in self._adapter_of.items() if adapter == engine_name]
        for medium in self._media.values():
            dropped: list[BlockHash] = []
            for key in keys:
                medium.extra_copies.pop(key, None)
                self._drop_copy(medium, key, dropped)
            if dropped:
                self._sink.drop(medium.tier, dropped)

    # --- stores --------------------------------------------------------------------------------------------------

    def _apply_store(self, event: BlocksStored) -> str | None:
        """Apply a store event and call the sink; the reason if it is rejected, else None.

        May drop the oldest blocks.
        """
        medium = self._device if event.medium in _DEVICE else self._medium(event.medium)
        if medium is None:
            return "medium"
        if reason := self._group_problem(event):
            return None if reason == "attention" and self._keep(event) else reason
        return self._store(event) if medium is self._device else self._add_known_copies(medium, event.block_hashes)

    def _store(self, event: BlocksStored) -> str | None:
        """Add the blocks of the indexed group to the device; the reason if they are rejected, else None."""
        medium = self._device
        keys = _engine_hash_keys(event.block_hashes)
        distinct_keys = set(keys)
        if reason := self._shape_problem(event, len(keys), len(distinct_keys)):
            return reason
        our_hashes = self._our_hashes(event)
        if isinstance(our_hashes, str):
            return our_hashes
        if self._resume is not None:
            parent = event.parent_block_hash
            self._resume.link(None if parent is None else self._block_of(_engine_hash_key(parent)), our_hashes)
            self._new.update(distinct_keys - medium.blocks.keys())
        counts = self._held["device"]
        if medium.blocks.keys().isdisjoint(distinct_keys) and counts.keys().isdisjoint(our_hashes):
            medium.blocks.update(zip(keys, our_hashes, strict=True))
            counts.update(dict.fromkeys(our_hashes, 1))
            self._sink.add("device", our_hashes)
        elif any(medium.blocks.get(key, block) != block for key, block in zip(keys, our_hashes, strict=True)):
            return "conflict"
        elif self._expects_repeats or not self._is_reuse_report(event, keys):
            self._add_copies(medium, keys, our_hashes)
        if self._most_blocks and len(medium.blocks) > self._most_blocks:
            self._drop_oldest(medium)
        if self._traits.forgets_on_load and event.lora_name:
            self._adapter_of.update(dict.fromkeys(keys, event.lora_name))
        self._keep_early(keys, our_hashes)
        return None

    def _keep(self, event: BlocksStored) -> bool:
        """Note what a KV group with a window or with states keeps on the device; whether such groups are followed.

        The event comes before that of the same blocks in the indexed group, or behind it.
        """
        if self._resume is None or event.group_idx is None or event.medium not in _DEVICE:
            return False
        window = event.kv_cache_spec_sliding_window
        need = max(1, -(-(window - 1) // self.block_size)) if window else 1
        keys = _engine_hash_keys(event.block_hashes)
        # A report of reused blocks names all of a prompt's, and the group has those that the hit needed.
        if len(keys) > need and self._is_reuse_report(event, keys) and self._new.isdisjoint(keys):
            keys = keys[-need:]
        for key in keys:
            block = self._device.blocks.get(key)
            if block is None:
                self._kept_early.setdefault(key, []).append((event.group_idx, need))
            else:
                self._resume.keep(event.group_idx, need, [block])
        return True

    def _keep_early(self, keys: Sequence[int], our_hashes: Sequence[BlockHash]) -> None:
        """Note what other groups keep of these blocks, by events that came before the blocks' own."""
        if self._kept_early and self._resume is not None:
            for key, block in zip(keys, our_hashes, strict=True):
                for group, need in self._kept_early.pop(key, ()):
                    self._resume.keep(group, need, [block])

    def _is_reuse_report(self, event: BlocksStored, keys: Sequence[int]) -> bool:
        """Whether a store reports reused blocks (report mode `full`) instead of new copies.

        The two look alike. But such a report begins with the prompt's first block and has no new block, and of a cached
        prompt an engine computes only the last block again. A prompt that skips the cache (`prompt_logprobs`) is taken
        for a report as well; then a block may be dropped while a copy is left.

        source  vLLM 0.32 v1/core/kv_cache_manager.py get_computed_blocks; tests/recordings
        """
        return event.parent_block_hash is None and len(keys) > 1 and all(map(self._device.blocks.__contains__, keys))

    def _group_problem(self, event: BlocksStored) -> str | None:
        """Why a store's KV group is not indexed; None if it is. The first group of a prefix kind is, from then on.

        A window of a prefix kind is that of layers which keep all blocks all the same.

        source  vLLM 0.32 v1/core/kv_cache_utils.py unify_hybrid_kv_cache_specs, kv_cache_coordinator.py
        """
        kind = event.kv_cache_spec_kind
        if kind is not None:
            if kind not in _PREFIX_ATTENTION:
                return "attention"
            if self._group is None and event.block_size == self.block_size:
                self._group = event.group_idx
        return None if self._is_indexed(event.group_idx) else "group"

    def _is_indexed(self, group: int | None) -> bool:
        """Whether the blocks of a KV group are indexed; None: the engine, or its KV connector, has one group."""
        return group is None or group == (_FIRST_GROUP if self._group is None else self._group)

    def _shape_problem(self, event: BlocksStored, blocks: int, distinct_keys: int) -> str | None:
        """Why a store's blocks cannot be hashed one by one; None if they can."""
        if event.block_size != self.block_size:
            return "block_size"
        if event.lora_id and not event.lora_name:
            return "adapter"  # of an engine whose events number adapters, and do not name them
        if not blocks or distinct_keys != blocks or len(event.token_ids) != blocks * self.block_size:
            return "shape"
        return None

    def _our_hashes(self, event: BlocksStored) -> list[BlockHash] | str:
        """Our hashes of a store's blocks, or the reason if they cannot be computed."""
        adapter = event.lora_name or ""
        salt, extra = event.cache_salt or "", None
        # Usually every block has the adapter's name alone: one comparison in C.
        adapter_only = [adapter] if adapter else None
        keys = event.extra_keys
        if keys is not None and keys.count(adapter_only) != len(event.block_hashes):
            read = extra_hash_inputs(keys, adapter, is_start=event.parent_block_hash is None)
            if read is None or len(keys) != len(event.block_hashes):
                return "extra_keys"
            salt, extra = read
        if event.parent_block_hash is None:
            parent: BlockHash | None = self._root(adapter, salt)
        else:
            parent = self._block_of(_engine_hash_key(event.parent_block_hash))
        if parent is None:
            return "unknown_parent"
        try:
            return block_hashes(event.token_ids, block_size=self.block_size, root=parent, extra=extra)
        except (TypeError, OverflowError):
            return "shape"

    def _add_known_copies(self, medium: _MediumBlocks, hashes: Sequence[EngineHash]) -> str | None:
        """Add copies on another medium, of known blocks only; the reason if a block is unknown, else None.

        Connectors' events leave out tokens, adapter or keys.

        source  vLLM 0.32 kv_connector/v1/offloading/events.py _placeholder_stored; mooncake/store/worker.py
        """
        keys = _engine_hash_keys(hashes)
        known = [(key, block) for key in keys if (block := self._block_of(key)) is not None]
        self._add_copies(medium, [key for key, _ in known], [block for _, block in known])
        if len(known) == len(keys):
            return None if keys else "shape"
        # The event is counted once, by its rejected part.
        return "unknown_block"

    def _add_copies(self, medium: _MediumBlocks, keys: Sequence[int], our_hashes: Sequence[BlockHash]) -> None:
        """Add a copy of each block to a medium, and add blocks that are new at its tier to the sink."""
        counts = self._held[medium.tier]
        added: list[BlockHash] = []
        for key, block in zip(keys, our_hashes, strict=True):
            known = medium.blocks.get(key)
            if known is None:
                medium.blocks[key] = block
                count = counts.get(block, 0)
                counts[block] = count + 1
                if not count:
                    added.append(block)
            elif not self._expects_repeats:
                medium.extra_copies[key] = medium.extra_copies.get(key, 0) + 1
            elif self._most_blocks:
                # Moved to the end, so that it is dropped last; see _drop_oldest.
                medium.blocks[key] = medium.blocks.pop(key)
        if added:
            self._sink.add(medium.tier, added)

    def _drop_oldest(self, medium: _MediumBlocks) -> None:
        """Drop the blocks seen longest ago, here and in the sink, and count an overflow.

        There are too many only after missed removals. Drops some more than needed, since finding a dict's first entry
        is slow after many deletions.
        """
        too_many = len(medium.blocks) - self._most_blocks + self._most_blocks // 64
        dropped: list[BlockHash] = []
        for key in list(islice(medium.blocks, too_many)):
            medium.extra_copies.pop(key, None)
            self._drop_copy(medium, key, dropped)
        if dropped:
            self._sink.drop(medium.tier, dropped)
        self.rejected["overflow"] += 1

    # --- removals ------------------------------------------------------------------------------------------------

    def _apply_removals(self, events: Iterable[BlocksRemoved]) -> None:
        """Apply a run of removals: drop a copy of each block, call the sink, count each event.

        Events of an unknown medium, group or block are counted as rejected.
        """
        dropped: list[BlockHash] = []
        last = self._device
        for event in events:
            medium = self._device if event.medium in _DEVICE else self._medium(event.medium)
            if medium is None:
                self.rejected["medium"] += 1
                continue
            if not self._is_indexed(event.group_idx):
                if medium is self._device and self._lose(event):
                    self.accepted["BlockRemoved"] += 1
                else:
                    self.rejected["group"] += 1
                continue
            if medium is not last and dropped:
                self._sink.drop(last.tier, dropped)
                dropped = []
            last = medium
            unknown = sum(
                not self._drop_copy(medium, _engine_hash_key(engine_hash), dropped)
                for engine_hash in event.block_hashes
            )
            if unknown:
                self.rejected["unknown_block"] += 1
            else:
                self.accepted["BlockRemoved"] += 1
        if dropped:
            self._sink.drop(last.tier, dropped)

    def _lose(self, event: BlocksRemoved) -> bool:
        """Note what another KV group keeps no longer; whether that group is followed."""
        group = event.group_idx
        if self._resume is None or group is None or group not in self._resume.groups:
            return False
        known = map(self._device.blocks.get, _engine_hash_keys(event.block_hashes))
        self._resume.lose(group, [block for block in known if block is not None])
        return True

    def _drop_copy(self, medium: _MediumBlocks, key: int, dropped: list[BlockHash]) -> bool:
        """Drop one copy; false if there was none. A block without copies at its tier is appended to `dropped`.

        Forgets the adapter of a block without any copy.
        """
        extra_copies = medium.extra_copies.get(key)
        if extra_copies is not None:
            if extra_copies == 1:
                del medium.extra_copies[key]
            else:
                medium.extra_copies[key] = extra_copies - 1
            return True
        block = medium.blocks.pop(key, None)
        if block is None:
            return False
        counts = self._held[medium.tier]
        count = counts[block]
        if count == 1:
            del counts[block]
            dropped.append(block)
        else:
            counts[block] = count - 1
        if self._adapter_of and self._block_of(key) is None:
            self._adapter_of.pop(key, None)
        return True

    # --- small questions -----------------------------------------------------------------------------------------

    def _medium(self, medium: str | None) -> _MediumBlocks | None:
        """The blocks of a medium by the engine's name for it; None if unknown."""
        return self._media.get((medium or "GPU").upper())

    def _block_of(self, key: int) -> BlockHash | None:
        """Our hash of an engine hash, on the device or any other medium; None if it is unknown."""
        block = self._device.blocks.get(key)
        if block is not None:
            return block
        found = (medium.blocks.get(key) for medium in self._media.values())
        return next((block for block in found if block is not None), None)

    def _root(self, adapter: str, salt: str) -> BlockHash:
        """The parent hash of a prompt's first block with this adapter and salt, from a cache; a full one is cleared."""
        root = self._roots.get((adapter, salt))
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[adapter, salt] = root_hash(self.base_model, adapter, salt)
        return root


def _engine_hash_keys(hashes: Sequence[EngineHash]) -> list[int]:
    """The dictionary keys of engine hashes."""
    try:
        return [engine_hash & _KEY_MASK for engine_hash in hashes]  # type: ignore[operator]
    except TypeError:
        return [_engine_hash_key(engine_hash) for engine_hash in hashes]


def _engine_hash_key(engine_hash: EngineHash) -> int:
    """The dictionary key of an engine hash: its last 60 bits."""
    if isinstance(engine_hash, bytes):
        # The last 64 bits, as in vLLM's integer hashes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
        engine_hash = int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _KEY_MASK
