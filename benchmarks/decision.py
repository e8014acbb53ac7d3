"""Time and memory of the scheduler: hash, match, decide and KV events, by replicas, blocks and adapters."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from random import Random
from statistics import median

import msgspec

from benchmarks import streams
from benchmarks.contenders import DynamoTree, FlatMap, GallopingMap, dynamo_version
from benchmarks.report import ReportRow, arguments, medians_us, quantiles_us, show
from benchmarks.scenes import (
    BASE,
    BLOCK_SIZE,
    EVENT_BLOCKS,
    NOW,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    a_fleet,
    decide,
    digest,
    engine_name,
    lora_id,
    some_tokens,
    worker_id,
)
from lorafleet.identity import BlockHash, Tier, block_hashes, root_hash
from lorafleet.kv.events import KvEventDecoder
from lorafleet.kv.ledger import BlockLedger
from orchestrator.wire import Catalog, CatalogAdapter
from router.core.fleet import RouterFleet
from router.core.kv.index import KvIndex, WorkerId
from router.core.resolve import resolve
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, PrefixMatch
from router.core.scheduler import Scheduler
from router.fleet.catalog import adapters_and_aliases
from workers.wire import KvChange, KvFrame, pack_hashes, unpack_hashes


@dataclass(frozen=True, slots=True)
class DecisionBenchSize:
    """The amount of work that each row measures. A larger amount gives steadier figures and a longer run.

    rounds   measurements of each row
    calls    calls in each measurement
    prompts  different prompts
    blocks   blocks in the index
    events   KV events that are applied
    """

    rounds: int
    calls: int
    prompts: int
    blocks: int
    events: int


FULL = DecisionBenchSize(rounds=15, calls=200, prompts=200, blocks=1_000_000, events=65_536)
QUICK = DecisionBenchSize(rounds=3, calls=20, prompts=20, blocks=50_000, events=2_048)


def main() -> None:
    options = arguments(__doc__ or "")
    size = QUICK if options.quick else FULL
    print(f"ai-dynamo-runtime: {dynamo_version()}; xxhash {version('xxhash')}, msgspec {version('msgspec')}")
    rows = [
        *matching(8, 100.0, size),
        *matching(64, 150.0, size),
        *deciding(size),
        *events(size),
        *growth(size),
        *memory(size),
        *adopting(size),
        *streams.rows(seconds=0.5 if options.quick else 5.0, turns=1 if options.quick else 5),
    ]
    show("decision", rows, options.json)


# --- hash and match ---------------------------------------------------------------------------------------------------


def matching(replicas: int, reach_us: float, size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of hash and match, where replica i has a share i / n of the prompt: as many depths as replicas."""
    tokens = some_tokens(Random(7), PROMPT_TOKENS)
    root = root_hash(BASE, engine_name(7))
    hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=root)
    index, flat, galloping = KvIndex(BLOCK_SIZE), FlatMap(), GallopingMap()
    for i in range(replicas):
        share = hashes[: len(hashes) * (i + 1) // replicas]
        index.add(worker_id(i), share, is_chain=True)
        flat.add(i, share)
        galloping.add(i, share)

    def matched() -> object:
        return index.match(block_hashes(tokens, block_size=BLOCK_SIZE, root=root))

    contenders: dict[str, Callable[[], object]] = {
        "hash": partial(block_hashes, tokens, block_size=BLOCK_SIZE, root=root),
        "match": lambda: index.match(list(hashes)),
        "hash + match": matched,
        flat.name: lambda: flat.match(list(hashes)),
        galloping.name: lambda: galloping.match(list(hashes)),
    }
    if dynamo_version() != "not installed":
        tree, listed = DynamoTree(), list(tokens)
        theirs = tree.hash(listed, BLOCK_SIZE)
        for i in range(replicas):
            tree.apply(i, tree.event(theirs[: len(theirs) * (i + 1) // replicas]))
        contenders |= {
            "Dynamo hash": lambda: tree.hash(listed, BLOCK_SIZE),
            "Dynamo match": lambda: tree.match(theirs),
        }
    found = medians_us(contenders, rounds=size.rounds, calls=size.calls)
    if "Dynamo hash" in found:
        found["Dynamo hash + match"] = found["Dynamo hash"] + found["Dynamo match"]
    where = f"{PROMPT_TOKENS} tokens, {replicas} replicas"
    rows = [
        ReportRow(
            f"{what}, {where}",
            found[what],
            "us",
            reach_us if what == "hash + match" else None,
            DynamoTree.name if f"Dynamo {what}" in found else None,
            found.get(f"Dynamo {what}"),
        )
        for what in ("hash", "match", "hash + match")
    ]
    _, p99 = quantiles_us([matched], rounds=size.rounds * size.calls)
    rows.append(ReportRow(f"hash + match p99, {where}", p99, "us"))
    rows += [ReportRow(f"match, {where}: {other.name}", found[other.name], "us") for other in (flat, galloping)]
    return rows


# --- the whole decision -----------------------------------------------------------------------------------------------


def deciding(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of whole decisions: resolve, hash, match, cost, pick. Each has another prompt and adapter."""
    few, some, many = (a_router(adapters, size) for adapters in (10, 1_000, 10_000))
    p50, p99 = quantiles_us(some, rounds=size.rounds)
    # Alternating, so that drift affects both alike.
    turns = [(quantiles_us(few, rounds=1)[0], quantiles_us(many, rounds=1)[0]) for _ in range(size.rounds)]
    few_us, many_us = (median(times) for times in zip(*turns, strict=True))
    where = f"{PROMPT_TOKENS} tokens, 64 replicas"
    return [
        ReportRow(f"whole decision p50, {where}, 1,000 adapters", p50, "us", 250.0),
        ReportRow(f"whole decision p99, {where}, 1,000 adapters", p99, "us"),
        ReportRow(
            "whole decision, 10,000 adapters known", many_us / few_us, "x of 10 adapters", 1.2, "10 adapters", few_us
        ),
    ]


def a_router(adapters: int, size: DecisionBenchSize) -> list[Callable[[], Decision]]:
    """Decisions to time, all by one scheduler over 64 able replicas."""
    rng = Random(7)
    fleet, index = a_fleet(64, adapters), KvIndex(BLOCK_SIZE)

    def matched(prompt: HashedRequest) -> PrefixMatch:
        chain = prompt.chains[BLOCK_SIZE]
        depths = index.match(chain)
        return PrefixMatch(depths, index.lower_tiers(chain, depths))

    scheduler = Scheduler(roster=fleet.roster, match=matched, rng=rng)
    for replica in fleet.replicas.values():
        scheduler.load.apply_report(replica)
    asks = []
    for number in range(size.prompts):
        adapter = number % adapters
        tokens = some_tokens(rng, PROMPT_TOKENS)
        hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=root_hash(BASE, engine_name(adapter)))
        for i in range(64):
            index.add(worker_id(i), hashes[: PROMPT_BLOCKS * ((i + number) % 64) // 64], is_chain=True)
        asks.append(partial(decide, fleet, scheduler, lora_id(adapter), tokens))
    # Requests in flight at every replica, so that no cost term is zero.
    for ask in islice(asks * 64, 64):
        scheduler.record_dispatch(ask(), NOW)
    return asks


# --- events -----------------------------------------------------------------------------------------------------------


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
            30_000.0,
            *dynamo(),
        ),
        ReportRow(f"{named[0]}: an engine's own, removals", per_second(engine.apply, removals), "events/s"),
        ReportRow(
            f"{named[0]}: an agent's changes, 20 ms a frame", 9 * per_second(agent.apply, frames), "events/s", 30_000.0
        ),
        ReportRow(
            f"events applied, 1 block each: an engine's own, {named[1]}", per_second(one.apply, singles), "events/s"
        ),
    ]
    # All events were applied.
    assert not engine.refused()
    assert not one.refused()
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

    def refused(self) -> int:
        """Events that a ledger rejected."""
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
        began = time.perf_counter()
        for worker, payload in window:
            apply(worker, payload)
        rates.append(len(window) / (time.perf_counter() - began))
    return median(rates)


def dynamo() -> tuple[str, float] | tuple[None, None]:
    """(name, events a second) of Dynamo's tree for hashed stores of 16 blocks; (None, None) if not installed."""
    if dynamo_version() == "not installed":
        return None, None
    tree, rng, payloads = DynamoTree(), Random(5), []
    parents: list[int | None] = [None] * 64
    for number in range(8_192):
        hashes = [rng.getrandbits(64) for _ in range(EVENT_BLOCKS)]
        payloads.append((number % 64, tree.event(hashes, parents[number % 64])))
        parents[number % 64] = hashes[-1] if number // 64 % 32 != 31 else None
    return DynamoTree.name, per_second(tree.apply, payloads)


# --- growth and memory ------------------------------------------------------------------------------------------------


def growth(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of matches of 512 blocks in small and in large indexes."""
    rng = Random(11)
    prompts = [
        [BlockHash(rng.getrandbits(64)) for _ in range(PROMPT_BLOCKS)] for _ in range(size.blocks // PROMPT_BLOCKS)
    ]
    asked = [prompts[rng.randrange(len(prompts))] for _ in range(size.calls * 5)]
    pauses = []

    def ours(chains: Sequence[list[BlockHash]], *, is_chain: bool) -> KvIndex:
        index = KvIndex(BLOCK_SIZE)
        for number, chain in enumerate(chains):
            for start in range(0, PROMPT_BLOCKS, EVENT_BLOCKS):
                began = time.perf_counter()
                index.add(worker_id(number % 64), chain[start : start + EVENT_BLOCKS])
                pauses.append(time.perf_counter() - began)
            if is_chain:
                # As the request that stored them does.
                index.remove_pending(index.add_pending(worker_id(number % 64), chain))
        return index

    def flat(kind: type[FlatMap], chains: Sequence[list[BlockHash]]) -> FlatMap:
        holders = kind()
        for number, chain in enumerate(chains):
            holders.add(number % 64, chain)
        return holders

    def p50(match: Callable[[list[BlockHash]], object], chains: Sequence[list[BlockHash]]) -> float:
        times = []
        for chain in chains:
            # New integer objects, as a request's own hashes are.
            hashes = [BlockHash(block + 1 - 1) for block in chain]
            began = time.perf_counter()
            match(hashes)
            times.append((time.perf_counter() - began) * 1e6)
        return median(times)

    few = prompts[:2]
    small, large = ours(few, is_chain=True), ours(prompts, is_chain=True)
    small_us, large_us = p50(small.match, few * size.calls), p50(large.match, asked)
    name = f"match among {size.blocks:,} blocks"
    rows = [
        ReportRow(name, large_us, "us", None, "among 1,024", small_us),
        ReportRow(f"{name}, growth", large_us / small_us, "x of 1,024 blocks", 1.5),
        ReportRow("longest pause of one store on the way there", max(pauses) * 1e3, "ms"),
        *forgetting(large, size),
    ]
    del small, large
    mixed_us = p50(ours(prompts, is_chain=False).match, asked)
    rows.append(ReportRow(f"{name}, which no prompt has gone over yet", mixed_us, "us"))
    for kind in (FlatMap, GallopingMap):
        small_us, large_us = p50(flat(kind, few).match, few * size.calls), p50(flat(kind, prompts).match, asked)
        rows.append(ReportRow(f"{name}: {kind.name}", large_us, "us", None, "among 1,024", small_us))
    return rows


def forgetting(index: KvIndex, size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of forgetting a worker, and of each step of the sweep after it."""
    steps = []
    began = time.perf_counter()
    index.forget(worker_id(0))
    forgotten = time.perf_counter() - began
    is_more = True
    while is_more:
        began = time.perf_counter()
        is_more = index.sweep(1000)
        steps.append(time.perf_counter() - began)
    return [
        ReportRow(f"forget a worker among {size.blocks:,} blocks", forgotten * 1e6, "us"),
        ReportRow("longest step of the sweep after it, 1,000 blocks a step", max(steps) * 1e3, "ms"),
        ReportRow("its usual step", median(steps) * 1e3, "ms"),
    ]


def memory(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of memory, each of a fresh process."""
    rows = []
    for what, name, reach in (
        ("index-1", "index, one holder each", 150.0),
        ("index-8", "index, 8 holders each", 200.0),
        ("ledgers", "64 ledgers, of engines without an agent", None),
    ):
        command = [sys.executable, "-P", "-m", "benchmarks.footprint", what, str(size.blocks)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        megabytes = json.loads(ended.stdout) / 1e6
        rows.append(ReportRow(f"memory for {size.blocks:,} blocks: {name}", megabytes, "MB", reach))
    return rows


# --- adapters ---------------------------------------------------------------------------------------------------------


def adopting(size: DecisionBenchSize) -> list[ReportRow]:
    """The row of a catalog of 10,000 adapters: parsed, and its last adapter resolved."""
    adapters = tuple(
        CatalogAdapter(lora_id=lora_id(n), digest=digest(n), base_model=BASE, source="file:///a", state="ready")
        for n in range(10_000)
    )
    body = Catalog(revision=1, adapters=adapters).model_dump_json().encode()

    def adopt() -> object:
        known, aliases = adapters_and_aliases(Catalog.model_validate_json(body))
        fleet = RouterFleet(1, a_few, known, aliases)
        return resolve(fleet, model=lora_id(9_999), lora_id=None, visible=lambda _: True, rng=Random(1))

    a_few = a_fleet(64, 8).replicas
    p50, _ = quantiles_us([adopt], rounds=size.rounds)
    return [ReportRow("a catalog of 10,000 adapters, from its bytes to the first one resolved", p50 / 1e6, "s", 2.0)]


if __name__ == "__main__":
    main()
