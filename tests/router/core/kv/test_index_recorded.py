"""Real vLLM's events, recorded with its own word on every hit, through ledger and index: predictions must be its word.

`tests/recordings/record.py` says what is in the recording. Nothing here needs vLLM.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from lorafleet.identity import block_hashes, root_hash
from lorafleet.kv.events import KvEventDecoder
from lorafleet.kv.ledger import BlockLedger
from router.core.kv.index import KvIndex, WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy, hit_tokens
from tests.recordings.recording import RecordedEngineRequest, RecordedEvent, load

RECORDING = load()
BLOCK_SIZE = RECORDING.block_size
W = WorkerId("w0")
# Positions of the array encoding, from vLLM before its events became maps.
ARRAYS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass
class Mind:
    """What a router knows of the recorded engine."""

    index: KvIndex = field(default_factory=lambda: KvIndex(BLOCK_SIZE))

    def __post_init__(self):
        self.decoder = KvEventDecoder()
        self.ledger = BlockLedger("m", BLOCK_SIZE, self, most_blocks=2 * RECORDING.total_blocks)

    def add(self, tier, hashes):
        assert self.index.add(W, hashes, tier) == len(hashes)

    def drop(self, tier, hashes):
        assert self.index.drop(W, hashes, tier) == 0

    def clear(self):
        self.index.replace(W, {})

    def hear(self, payload):
        self.ledger.apply(self.decoder.decode(payload))

    def predicted_tokens(self, asked):
        depth = self.index.match(hashes_of(asked)).get(W, 0)
        return hit_tokens(depth, BLOCK_SIZE, len(asked.ids))


def hashes_of(asked):
    root = root_hash("m", asked.engine_name, asked.cache_salt)
    return block_hashes(asked.ids, block_size=BLOCK_SIZE, root=root)


def predictions(scheduler, entries, *, without=(), encode=bytes):
    """(request, tokens predicted) in order, having heard all messages but those with these sequence numbers."""
    for entry in entries:
        if isinstance(entry, RecordedEngineRequest):
            yield entry, scheduler.predicted_tokens(entry)
        elif entry.seq not in without:
            scheduler.hear(encode(entry.payload))


def events(entries):
    for entry in entries:
        if isinstance(entry, RecordedEvent):
            yield from msgspec.msgpack.decode(entry.payload)[1]


def as_arrays(payload):
    ts, batch, rank = msgspec.msgpack.decode(payload)
    arrays = [[event["type"], *(event.get(name) for name in ARRAYS[event["type"]])] for event in batch]
    return msgspec.msgpack.encode([ts, arrays, rank])


def with_bytes_hashes(payload):
    """As with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: 32 bytes, the integer being their last 64 bits."""
    ts, batch, rank = msgspec.msgpack.decode(payload)

    def wide(engine_hash):
        return engine_hash if engine_hash is None else b"\xa5" * 24 + (engine_hash % 2**64).to_bytes(8, "big")

    for event in batch:
        if "block_hashes" in event:
            event["block_hashes"] = [wide(engine_hash) for engine_hash in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = wide(event["parent_block_hash"])
    return msgspec.msgpack.encode([ts, batch, rank])


def test_the_recording_has_what_is_hard():
    heard = [entry for entry in RECORDING.entries if isinstance(entry, RecordedEvent)]
    assert [entry.seq for entry in heard] == list(range(len(heard)))
    kinds, stored, copies = Counter(), Counter(), 0
    for event in events(RECORDING.part("incremental")):
        kinds[event["type"]] += 1
        for engine_hash in event["block_hashes"]:
            if event["type"] == "BlockRemoved":
                stored[engine_hash] -= 1
            else:
                copies += stored[engine_hash] > 0
                stored[engine_hash] += 1
    assert min(stored.values()) == 0  # every removal was of something stored
    assert sum(stored.values()) <= RECORDING.total_blocks
    assert kinds["BlockRemoved"] > 5 * RECORDING.total_blocks
    assert copies > 10
    asked = [entry for entry in RECORDING.part("incremental") if isinstance(entry, RecordedEngineRequest)]
    assert len({(entry.engine_name, entry.cache_salt) for entry in asked}) == 5
    hits = [entry for entry in asked if entry.cached_tokens]
    assert 0.3 * len(asked) < len(hits) < 0.9 * len(asked)
    assert any(len(entry.ids) - entry.cached_tokens == BLOCK_SIZE for entry in hits)  # all cached, the last recomputed
    assert {event["type"] for event in events(RECORDING.part("after"))} >= {"AllBlocksCleared", "BlockRemoved"}


@pytest.mark.parametrize("encode", [bytes, as_arrays, with_bytes_hashes])
def test_every_prediction_is_the_engines_own_word(encode):
    scheduler = Mind()
    compared = list(predictions(scheduler, RECORDING.part("incremental"), encode=encode))
    assert len(compared) > 100
    assert [(predicted, asked.cached_tokens) for asked, predicted in compared if predicted != asked.cached_tokens] == []
    assert not scheduler.ledger.rejected
    assert len(scheduler.ledger) <= RECORDING.total_blocks


def test_reports_of_reused_blocks_disturb_no_prediction_then_or_later():
    scheduler, wrong = Mind(), []
    for name in RECORDING.parts:
        scheduler.ledger.expect_repeats(name == "full")
        for entry in RECORDING.part(name):
            if isinstance(entry, RecordedEvent):
                scheduler.hear(entry.payload)
                # A repetition taken for a copy would stay when the block goes: more than there is room for.
                assert len(scheduler.ledger) <= RECORDING.total_blocks
            elif scheduler.predicted_tokens(entry) != entry.cached_tokens:
                wrong.append(entry)
    assert wrong == []


def test_reports_that_nobody_said_were_asked_for_disturb_no_prediction_either():
    scheduler = Mind()
    for entry in RECORDING.entries:
        if isinstance(entry, RecordedEvent):
            scheduler.hear(entry.payload)
        else:
            assert scheduler.predicted_tokens(entry) == entry.cached_tokens


# --- gaps ------------------------------------------------------------------------------------------------------------

INCREMENTAL = [entry.seq for entry in RECORDING.part("incremental") if isinstance(entry, RecordedEvent)]


def gap(start, size):
    return frozenset(INCREMENTAL[start : start + size])


def blocks_told(without):
    """Our hashes of every block that the messages with these sequence numbers tell of."""
    ours, told = {}, set()
    for entry in RECORDING.entries:
        for event in events([entry]):
            if event["type"] == "BlockStored":
                salt = next((keys[-1] for keys in event["extra_keys"] if keys and keys[-1] == "acme"), "")
                root = root_hash("m", event["lora_name"] or "", salt)
                parent = event["parent_block_hash"]
                chain = block_hashes(
                    event["token_ids"], block_size=BLOCK_SIZE, root=root if parent is None else ours[parent]
                )
                ours |= zip(event["block_hashes"], chain, strict=True)
            if entry.seq in without:
                told |= {ours[engine_hash] for engine_hash in event.get("block_hashes", ())}
    return told


@pytest.mark.parametrize("start", range(0, 320, 40))
def test_after_a_gap_every_prompt_that_the_gap_did_not_tell_of_is_predicted_exactly(start):
    missing = gap(start, 30)
    told = blocks_told(missing)
    untouched = touched_wrong = 0
    for asked, predicted in predictions(Mind(), RECORDING.part("incremental"), without=missing):
        if told.isdisjoint(hashes_of(asked)):
            untouched += 1
            assert predicted == asked.cached_tokens
        else:
            touched_wrong += predicted != asked.cached_tokens
    assert untouched > 60
    assert touched_wrong  # or the gap took nothing that anybody asked for, and this test saw nothing


def after_gap(missing, payload_of):
    """(trust's states as they change, wrong predictions by part) of a router that lost these messages."""
    scheduler, trust, states, wrong = Mind(), PredictionAccuracy(), ["exact"], Counter()
    trust.record_feed_start(W, "exact")
    now = 0.0
    for part in RECORDING.parts:
        for entry in RECORDING.part(part):
            scheduler.ledger.expect_repeats(part == "full" or trust.state(W) == "degraded")
            if isinstance(entry, RecordedEngineRequest):
                predicted = scheduler.predicted_tokens(entry)
                wrong[part] += predicted != entry.cached_tokens
                now += 1
                trust.record_comparison(W, predicted, entry.cached_tokens, len(entry.ids), now)
            elif entry.seq not in missing:
                scheduler.hear(payload_of(entry))
            elif entry.seq == min(missing):
                trust.record_lost_events(W)
            if trust.state(W) != states[-1]:
                states.append(trust.state(W))
    return states, wrong


def test_without_a_gap_no_worker_is_ever_doubted():
    states, wrong = after_gap(frozenset(), lambda entry: entry.payload)
    assert states == ["exact"]
    assert not wrong.total()


@pytest.mark.parametrize(("start", "size"), [(30, 40), (100, 40), (200, 1), (200, 40), (250, 40), (300, 30), (330, 8)])
def test_a_gap_degrades_a_worker_until_predictions_agree_again(start, size):
    states, wrong = after_gap(gap(start, size), lambda entry: entry.payload)
    assert states == ["exact", "degraded", "exact"]
    assert wrong["after"] == 0


def payloads_without_repetitions():
    """By sequence number: the messages as if nobody had asked for reports of reused blocks."""
    held, payloads = Counter(), {}
    reporting = {entry.seq for entry in RECORDING.part("full") if isinstance(entry, RecordedEvent)}
    for entry in RECORDING.entries:
        if isinstance(entry, RecordedEngineRequest):
            continue
        ts, batch, rank = msgspec.msgpack.decode(entry.payload)
        kept = []
        for event in batch:
            hashes = event.get("block_hashes", ())
            is_store = event["type"] == "BlockStored"
            is_start = is_store and event["parent_block_hash"] is None
            if not (entry.seq in reporting and is_start and all(held[engine_hash] for engine_hash in hashes)):
                kept.append(event)
                for engine_hash in hashes:
                    held[engine_hash] += 1 if is_store else -1
        payloads[entry.seq] = msgspec.msgpack.encode([ts, kept, rank])
    return payloads


def test_reports_of_reused_blocks_bring_back_what_a_gap_took():
    silent = payloads_without_repetitions()
    reported, unreported = Counter(), Counter()
    for start in range(240, 330, 12):
        reported += after_gap(gap(start, 60), lambda entry: entry.payload)[1]
        unreported += after_gap(gap(start, 60), lambda entry: silent[entry.seq])[1]
    assert reported["full"] < unreported["full"] / 2
