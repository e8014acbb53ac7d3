"""Event batches as engines send them, old and new."""

import msgspec
import pytest

from lorafleet.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, KvEventDecoder, UndecodableBatch

# vLLM 0.32's own bytes for a store, a removal and a clearing.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f7261"
    "5f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da347505581a4747970"
    "65b0416c6c426c6f636b73436c656172656400"
)
STORED = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "sql@1",
    "extra_keys": [["sql@1", ["image", 0], "salt"]],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


def decoded(*events, rank=0, decoder=None):
    return (decoder or KvEventDecoder()).decode(msgspec.msgpack.encode([1.5, list(events), rank]))


def test_vllms_own_bytes_are_decoded():
    batch = KvEventDecoder().decode(GOLDEN)
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved, BlocksCleared]
    assert (batch.ts, batch.rank, batch.rejected) == (1.5, 0, None)
    assert batch.events[0].token_ids == [1]


@pytest.mark.parametrize("name", [7, 2**64 - 1, -(2**63), b"\x07" * 32])
def test_maps_and_arrays_decode_alike_with_int_and_bytes_hashes(name):
    event = {**STORED, "block_hashes": [name]}
    decoder = KvEventDecoder()
    from_map = decoded(event, decoder=decoder).events[0]
    from_array = decoded(list(event.values()), decoder=decoder).events[0]
    assert isinstance(from_array, BlocksStored)
    for field in (*STORED.keys() - {"type"},):
        assert getattr(from_map, field) == getattr(from_array, field)
    assert from_map.block_hashes == [name]
    # And back again, as an engine may change its encoding.
    assert decoded(event, decoder=decoder).events[0] == from_map


@pytest.mark.parametrize("cut", [5, 7, 9])
def test_an_older_engines_shorter_array_is_decoded(cut):
    event = decoded(list(STORED.values())[:cut]).events[0]
    assert (event.block_hashes, event.group_idx) == ([7], None)


def test_unknown_fields_are_skipped():
    assert decoded({**STORED, "session_id": "s", "ownership": {"a": 1}}).events[0].block_hashes == [7]
    assert decoded([*STORED.values(), None, "LOCAL", {"a": 1}]).events[0].block_hashes == [7]
    assert decoded(STORED, rank=3).rank == 3
    raw = msgspec.msgpack.encode([1.0, [STORED], None, {"later": True}])
    assert KvEventDecoder().decode(raw).events[0].block_hashes == [7]


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown_type"),
        ({"type": "BlockStored", "block_hashes": [[1]], **{k: STORED[k] for k in list(STORED)[2:]}}, "shape"),
        ({**STORED, "token_ids": [[1, 2]]}, "shape"),
        ({**STORED, "lora_name": 7}, "shape"),
        ({"type": "BlockRemoved", "block_hashes": 7}, "shape"),
    ],
)
def test_an_invalid_event_is_counted_and_its_neighbours_are_decoded(odd, reason, as_array):
    def form(event):
        return list(event.values()) if as_array else event

    batch = decoded(form(STORED), form(odd), form({"type": "AllBlocksCleared"}))
    assert len(batch.events) == 2
    assert isinstance(batch.events[0], BlocksStored)
    assert isinstance(batch.events[1], BlocksCleared)
    assert batch.rejected == {reason: 1}


@pytest.mark.parametrize("odd", [7, None, [], "BlockStored", {"no": "type"}, {"type": 7}])
def test_values_that_are_no_events_are_counted(odd):
    batch = decoded(odd, STORED)
    assert len(batch.events) == 1
    assert sum(batch.rejected.values()) == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1, 2])]
)
def test_an_invalid_batch_is_refused(payload):
    with pytest.raises(UndecodableBatch):
        KvEventDecoder().decode(payload)
