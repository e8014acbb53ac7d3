"""Decodes engines' KV event batches: maps or positional arrays, int or bytes hashes.

source  vLLM 0.32 distributed/kv_events.py: msgpack [ts, events, data_parallel_rank]; an event is a map with a `type`
        since June 2026 and a positional array with its type in front before. SGLang 0.5.23
        disaggregation/kv_events.py: the same, with maps; older ones send arrays.
"""

from collections import Counter
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from lorafleet.service.decoding import DECODE_ERRORS

EngineHash: TypeAlias = int | bytes
ExtraKeys: TypeAlias = list[list[Any] | None]


class BlocksStored(Struct, gc=False, tag="BlockStored"):
    """`block_hashes` are now cached, with `block_size` of `token_ids` each. Every copy has its own event.

    `cache_salt` is SGLang's field; vLLM has the salt in `extra_keys`.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None


class BlocksRemoved(Struct, gc=False, tag="BlockRemoved"):
    """One copy of each of `block_hashes` was removed from `medium`."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class BlocksCleared(Struct, gc=False, tag="AllBlocksCleared"):
    """The prefix cache was reset."""


Event: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


class KvEventBatch(Struct, gc=False):
    """Events of one engine step, in order. `rejected` counts unreadable events by reason.

    has_lost_removal  whether an unreadable event removed blocks
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    rejected: Counter[str] | None = None
    has_lost_removal: bool = False


class UndecodableBatch(Exception):
    """The payload is not a batch of events. Its removals are lost."""


# msgspec distinguishes union members by tag, but not maps from arrays. So there is a second, derived set for arrays.
# Unknown fields are skipped in both.
class _StoredArray(BlocksStored, gc=False, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlocksRemoved, gc=False, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(BlocksCleared, gc=False, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapBatch(Struct, gc=False, array_like=True):
    ts: float
    events: list[BlocksStored | BlocksRemoved | BlocksCleared]
    rank: int | None = None


class _ArrayBatch(Struct, gc=False, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    rank: int | None = None


class _MixedBatch(Struct, gc=False, array_like=True):
    ts: float
    events: list[Any]
    rank: Any = None


class KvEventDecoder:
    """Decodes one feed's batches. The encoding of the last batch is tried first."""

    def __init__(self) -> None:
        maps, arrays = msgspec.msgpack.Decoder(_MapBatch).decode, msgspec.msgpack.Decoder(_ArrayBatch).decode
        self._typed: list[Any] = [maps, arrays]
        self._mixed = msgspec.msgpack.Decoder(_MixedBatch)

    def decode(self, payload: bytes) -> KvEventBatch:
        """The batch in `payload`; raises UndecodableBatch. An unreadable event is counted and the others are kept."""
        for decode in self._typed:
            try:
                batch = decode(payload)
            except msgspec.ValidationError:
                continue
            except DECODE_ERRORS as exc:
                raise UndecodableBatch(str(exc)) from exc
            if decode is not self._typed[0]:
                self._typed.reverse()
            return KvEventBatch(batch.ts, batch.events, batch.rank)
        return self._decode_each(payload)

    def _decode_each(self, payload: bytes) -> KvEventBatch:
        """Decode a batch event by event, because one of them is malformed. Those are left out and counted by reason.

        Raises UndecodableBatch if the batch itself cannot be decoded.
        """
        try:
            batch = self._mixed.decode(payload)
        except DECODE_ERRORS as exc:
            raise UndecodableBatch(str(exc)) from exc
        events: list[Event] = []
        rejected: Counter[str] = Counter()
        has_lost_removal = False
        for raw in batch.events:
            read = _decode_event(raw)
            if isinstance(read, str):
                rejected[read] += 1
                has_lost_removal = has_lost_removal or _event_type(raw) in _REMOVALS
            else:
                events.append(read)
        rank = batch.rank if isinstance(batch.rank, int) else None
        return KvEventBatch(batch.ts, events, rank, rejected, has_lost_removal)


_REMOVALS = frozenset({"BlockRemoved", "AllBlocksCleared"})
_MAPS: dict[str, Any] = {"BlockStored": BlocksStored, "BlockRemoved": BlocksRemoved, "AllBlocksCleared": BlocksCleared}
_ARRAYS: dict[str, Any] = {
    "BlockStored": _StoredArray,
    "BlockRemoved": _RemovedArray,
    "AllBlocksCleared": _ClearedArray,
}


def _decode_event(raw: Any) -> Event | str:
    """One event, or the reason if it cannot be read."""
    kind = _event_type(raw)
    if kind is None:
        return "shape"
    if kind not in _MAPS:
        return "unknown_type"
    try:
        event: Event = msgspec.convert(raw, (_MAPS if isinstance(raw, dict) else _ARRAYS)[kind])
    except msgspec.ValidationError:
        return "shape"
    return event


def _event_type(raw: Any) -> str | None:
    """An event's type; "" if it is not a string, None if the value is not an event."""
    if isinstance(raw, dict):
        kind = raw.get("type")
    elif isinstance(raw, list) and raw:
        kind = raw[0]
    else:
        return None
    return kind if isinstance(kind, str) else ""
