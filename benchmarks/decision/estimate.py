"""Workers without KV events: what a router takes for cached is estimated from the prompts that it sent."""

import asyncio
from array import array
from random import Random

from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow, medians_us, quantiles_us
from benchmarks.scenes import BASE, BLOCK_SIZE, NOW, some_tokens, worker_id
from lorafleet.identity import BlockHash, block_hashes, root_hash
from router.core.kv.index import WorkerId
from router.kv.feeds import KvFeeds
from router.telemetry.metrics import RouterMetrics
from workers.wire import Metadata, ModelCard, RuntimeConfig, Transport

_WORKERS = 8
# Blocks of a question behind a prompt that was seen before.
_QUESTION_BLOCKS = 12


def estimating(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of one request's estimate: of 842 blocks, as 30 KB have, and of 8,192; seen before and all new."""
    return asyncio.run(_estimating(size))


async def _estimating(size: DecisionBenchSize) -> list[ReportRow]:
    rows = []
    for blocks in (842, 8_192):
        calls = max(1, size.calls * 842 // blocks // 4)
        rows += await _of_length(blocks, size.rounds, calls)
    return rows


async def _of_length(blocks: int, rounds: int, calls: int) -> list[ReportRow]:
    rng, root = Random(9), root_hash(BASE)
    seen = some_tokens(rng, blocks * BLOCK_SIZE)
    one = array("I", seen)
    hash_us = medians_us(
        {"hash": lambda: block_hashes(one, block_size=BLOCK_SIZE, root=root)}, rounds=rounds, calls=calls
    )["hash"]
    rows = []
    for kind in ("seen before, and a new question", "all of it new, the cache full"):
        # Full after a few prompts: from then on each one evicts as many blocks as it brings.
        feeds = await _eventless(total_blocks=blocks * 6 if kind.startswith("all") else 100 * blocks + 10_000)
        try:
            chains = []
            for _ in range(rounds * calls):
                began = seen if kind.startswith("seen") else some_tokens(rng, blocks * BLOCK_SIZE)
                tokens = began + some_tokens(rng, _QUESTION_BLOCKS * BLOCK_SIZE)
                chains.append(block_hashes(tokens, block_size=BLOCK_SIZE, root=root))
            requests = [
                EstimatedRequest(feeds, worker_id(number % _WORKERS), chain, NOW + number / 100)
                for number, chain in enumerate(chains)
            ]
            for request in requests[: _WORKERS * 8]:
                request.serve()
            p50, p99 = quantiles_us([request.serve for request in requests], rounds=1)
        finally:
            await feeds.close()
        what = f"estimate at a worker without KV events, {blocks:,} blocks {kind}"
        rows += [
            ReportRow(f"{what}, p50", p50, "us", None, "hash of these blocks, us", hash_us, 0.5),
            ReportRow(f"{what}, p99", p99, "us", None, "hash of these blocks, us", hash_us),
        ]
    return rows


class EstimatedRequest:
    """CPU of the estimate for a request: match the prompt, record it at the first token, correct by `cached_tokens`."""

    def __init__(self, feeds: KvFeeds, worker: WorkerId, chain: list[BlockHash], now: float) -> None:
        self._feeds, self._worker, self._chain, self._now = feeds, worker, chain, now

    def serve(self) -> None:
        depths = self._feeds.match(BASE, BLOCK_SIZE, self._chain).depths
        guess = self._feeds.record_served(self._worker, self._chain, began_at=self._now, now=self._now + 0.001)
        assert guess is not None, "the worker's blocks are not estimated"
        self._feeds.correct_estimate(guess, depths.get(self._worker, 0))


async def _eventless(total_blocks: int) -> KvFeeds:
    """The feeds of a router, of workers that publish no KV events."""
    feeds = KvFeeds(RouterMetrics(), tail_poll_s=60.0)
    shape = RuntimeConfig(
        block_size=BLOCK_SIZE,
        total_kv_blocks=total_blocks,
        max_num_seqs=64,
        max_num_batched_tokens=65_536,
        max_model_len=1 << 20,
    )
    for number in range(_WORKERS):
        card = ModelCard(name=BASE, base_model=BASE, runtime_config=shape)
        metadata = Metadata(
            instance_id=worker_id(number),
            agent_url="http://a",
            model=card,
            transport=Transport(engine_url="http://e"),
            agent_boot_id="a",
            engine_boot_id="e",
        )
        feeds.update_worker(worker_id(number), BASE, BLOCK_SIZE, metadata)
    return feeds
