"""KV events of 64 engines: their own messages, and agents' frames."""

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median

import msgspec

from benchmarks.decision.contenders import DynamoTree, dynamo_version
from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow
from benchmarks.scenes import BASE, BLOCK_SIZE, EVENT_BLOCKS, PROMPT_BLOCKS, engine_name, some_tokens, worker_id
from lorafleet.identity import BlockHash, Tier
from lorafleet.kv.events import KvEventDecoder
from lorafleet.kv.ledger import BlockLedger
from router.core.kv.index import KvIndex, WorkerId
from workers.wire import KvChange, KvFrame, pack_hashes, unpack_hashes


class _BenchSink:
    """Writes a ledger's changes into an index (a BlockSink)."""

    def __init__(self, index: KvIndex, worker: WorkerId) -> None:
        self._index, self._worker = index, worker

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self._index.add(self._worker, hashes, tier, is_chain=True)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self._index.drop(self._worker, hashes, tier)

    def clear(self) -> None:
        self._index.replace(self._worker, {})


def events(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of KV events by 64 engines, with msgpack decoding; medians of windows."""
    stores = list(engine_events(Random(5), size.events, EVENT_BLOCKS))
    removals = [(worker, removed(payload)) for worker, payload in stores]
    singles = list(engine_events(Random(6), size.events, 1))
    frames = list(agent_frames(Random(5), size.events))
    engine, agent, one = BenchEngineFeeds(), BenchAgentFeeds(), BenchEngineFeeds()
    named = ("events applied, 16 blocks each", "one event a message")
    rows = [
        ReportRow(
            f"{named[0]}: an engine's own, {named[1]}",
            per_second(engine.apply, stores),
            "events/s",
            None,
            f"{DynamoTree.name}, with its hash",
            dynamo(hashes_tokens=True),
            0.25,
        ),
        ReportRow(f"{named[0]}: an engine's own, removals", per_second(engine.apply, removals), "events/s"),
        ReportRow(
            f"{named[0]}: an agent's changes, 20 ms a frame",
            9 * per_second(agent.apply, frames),
            "events/s",
            None,
            DynamoTree.name,
            dynamo(hashes_tokens=False),
            1.0,
        ),
        ReportRow(
            f"events applied, 1 block each: an engine's own, {named[1]}", per_second(one.apply, singles), "events/s"
        ),
    ]
    # All events were applied.
    assert not engine.rejected_events()
    assert not one.rejected_events()
    assert len(engine.index) == 0
    assert len(agent.index) == size.events * EVENT_BLOCKS // (9 * EVENT_BLOCKS) * 9 * EVENT_BLOCKS
    return rows


class BenchEngineFeeds:
    """64 engines without agents: decoder and ledger each, one index."""

    def __init__(self) -> None:
        self.index = KvIndex(BLOCK_SIZE)
        self._decode = [KvEventDecoder().decode for _ in range(64)]
        self._ledgers = [BlockLedger(BASE, BLOCK_SIZE, _BenchSink(self.index, worker_id(i))) for i in range(64)]

    def apply(self, worker: int, payload: bytes) -> None:
        self._ledgers[worker].apply(self._decode[worker](payload))

    def rejected_events(self) -> int:
        """The number of events that the ledgers could not apply."""
        return sum(ledger.rejected.total() for ledger in self._ledgers)


class BenchAgentFeeds:
    """64 agents' streams, one index."""

    def __init__(self) -> None:
        self.index = KvIndex(BLOCK_SIZE)
        self._decode = msgspec.msgpack.Decoder(KvFrame).decode

    def apply(self, worker: int, payload: bytes) -> None:
        for change in self._decode(payload).changes:
            self.index.drop(worker_id(worker), unpack_hashes(change.dropped), change.tier)
            self.index.add(worker_id(worker), unpack_hashes(change.added), change.tier)


def engine_events(rng: Random, count: int, blocks: int) -> Iterator[tuple[int, bytes]]:
    """(worker, payload) of store events of `blocks` blocks each; a prompt has 512 blocks."""
    parents: list[int | None] = [None] * 64
    for number in range(count):
        worker = number % 64
        if number // 64 * blocks % PROMPT_BLOCKS == 0:
            parents[worker] = None
        names = [rng.getrandbits(64) for _ in range(blocks)]
        event = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parents[worker],
            "token_ids": some_tokens(rng, blocks * BLOCK_SIZE).tolist(),
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": engine_name(7),
            "extra_keys": [[engine_name(7)]] * blocks,
            "group_idx": 0,
        }
        parents[worker] = names[-1]
        yield worker, msgspec.msgpack.encode([0.0, [event], 0])


def removed(payload: bytes) -> bytes:
    """The removal of a store event's blocks."""
    (stored,) = KvEventDecoder().decode(payload).events
    event = {"type": "BlockRemoved", "block_hashes": stored.block_hashes, "medium": "GPU", "group_idx": 0}  # type: ignore[union-attr]
    return msgspec.msgpack.encode([0.0, [event], 0])


def agent_frames(rng: Random, stores: int) -> Iterator[tuple[int, bytes]]:
    """(worker, frame) of the same blocks from agents: at 30,000 events/s from 64 engines, 20 ms of one are 9 events."""
    for number in range(stores // 9):
        added = pack_hashes(rng.getrandbits(64) for _ in range(9 * EVENT_BLOCKS))
        yield number % 64, msgspec.msgpack.encode(KvFrame(number, 0.0, (), (KvChange(0, "device", added, b""),)))


def per_second(apply: Callable[[int, bytes], object], payloads: Sequence[tuple[int, bytes]]) -> float:
    """Median payloads a second, over 16 consecutive windows."""
    rates = []
    for start in range(0, len(payloads), len(payloads) // 16):
        window = payloads[start : start + len(payloads) // 16]
        began = time.process_time()
        for worker, payload in window:
            apply(worker, payload)
        rates.append(len(window) / (time.process_time() - began))
    return median(rates)


def dynamo(*, hashes_tokens: bool) -> float | None:
    """Events a second of Dynamo's tree for stores of 16 blocks; None if not installed.

    hashes_tokens  the tokens are hashed, too, as ours does for an engine's own events; else the events come with hashes
    """
    if dynamo_version() == "not installed":
        return None
    tree, rng, payloads = DynamoTree(), Random(5), []
    parents: list[int | None] = [None] * 64
    tokens = some_tokens(rng, EVENT_BLOCKS * BLOCK_SIZE).tolist()
    for number in range(8_192):
        hashes = [rng.getrandbits(64) for _ in range(EVENT_BLOCKS)]
        payloads.append((number % 64, tree.event(hashes, parents[number % 64])))
        parents[number % 64] = hashes[-1] if number // 64 % 32 != 31 else None

    def hash_and_apply(worker: int, event: bytes) -> None:
        tree.hash(tokens, BLOCK_SIZE)
        tree.apply(worker, event)

    return per_second(hash_and_apply if hashes_tokens else tree.apply, payloads)
