"""The block index: hash and match, growth to a million blocks, and memory."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median

from benchmarks.decision.contenders import DynamoTree, FlatMap, GallopingMap, dynamo_version
from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow, medians_us, quantiles_us
from benchmarks.scenes import (
    BASE,
    BLOCK_SIZE,
    EVENT_BLOCKS,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    engine_name,
    some_tokens,
    worker_id,
)
from lorafleet.identity import BlockHash, block_hashes, root_hash
from router.core.kv.index import KvIndex


def matching(replicas: int, size: DecisionBenchSize) -> list[ReportRow]:
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
    # With as many depths as replicas a match returns as many results, which are Python's objects here and not there.
    goal = 0.75 if replicas <= 8 else 1.0
    rows = [
        ReportRow(
            f"{what}, {where}",
            found[what],
            "us",
            None,
            DynamoTree.name,
            found.get(f"Dynamo {what}"),
            goal if what == "hash + match" else None,
        )
        for what in ("hash", "match", "hash + match")
    ]
    _, p99 = quantiles_us([matched], rounds=size.rounds * size.calls)
    rows.append(ReportRow(f"hash + match p99, {where}", p99, "us"))
    rows += [ReportRow(f"match, {where}", found[other.name], "us", contender=other.name) for other in (flat, galloping)]
    return rows


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
                began = time.process_time()
                index.add(worker_id(number % 64), chain[start : start + EVENT_BLOCKS])
                pauses.append(time.process_time() - began)
            if is_chain:
                # As the next request with this prompt does.
                index.match(chain)
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
            began = time.process_time()
            match(hashes)
            times.append((time.process_time() - began) * 1e6)
        return median(times)

    few = prompts[:2]
    small, large = ours(few, is_chain=True), ours(prompts, is_chain=True)
    small_us, large_us = p50(small.match, few * size.calls), p50(large.match, asked)
    name = f"match among {size.blocks:,} blocks"
    rows = [
        ReportRow(name, large_us, "us", None, "among 1,024, us", small_us, 1.5),
        ReportRow("longest pause of one store on the way there", max(pauses) * 1e3, "ms"),
        *forgetting(large, size),
    ]
    del small, large
    mixed_us = p50(ours(prompts, is_chain=False).match, asked)
    rows.append(ReportRow(f"{name}, which no prompt has gone over yet", mixed_us, "us"))
    for kind in (FlatMap, GallopingMap):
        small_us, large_us = p50(flat(kind, few).match, few * size.calls), p50(flat(kind, prompts).match, asked)
        rows.append(ReportRow(name, large_us, "us", None, "among 1,024, us", small_us, contender=kind.name))
    return rows


def forgetting(index: KvIndex, size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of forgetting a worker, and of each step of the sweep after it."""
    steps = []
    began = time.process_time()
    index.forget(worker_id(0))
    forgotten = time.process_time() - began
    is_more = True
    while is_more:
        began = time.process_time()
        is_more = index.sweep(1000)
        steps.append(time.process_time() - began)
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
        command = [sys.executable, "-P", "-m", "benchmarks.decision.footprint", what, str(size.blocks)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        megabytes = json.loads(ended.stdout) / 1e6
        rows.append(ReportRow(f"memory for {size.blocks:,} blocks: {name}", megabytes, "MB", reach))
    return rows
