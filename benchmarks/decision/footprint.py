"""What blocks cost in memory: run in a process of its own by `benchmarks.decision`, prints the growth in bytes.

python -m benchmarks.decision.footprint WHAT BLOCKS, where WHAT is index-1 or index-8 (holders a block), or ledgers
(64 of them, as a router keeps them for engines without an agent; engine hashes differ from worker to worker)
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from lorafleet.identity import BlockHash, Tier, block_hashes, root_hash
from lorafleet.kv.events import BlocksStored, KvEventBatch
from lorafleet.kv.ledger import BlockLedger
from router.core.kv.index import KvIndex, WorkerId

_WORKERS, _PROMPT_BLOCKS, _EVENT_BLOCKS, _BLOCK_SIZE = 64, 512, 16, 16


def main() -> None:
    what, blocks = sys.argv[1], int(sys.argv[2])
    rng = Random(1)
    gc.collect()
    before = _resident_bytes()
    kept = _ledgers(blocks, rng) if what == "ledgers" else _index(blocks, int(what.removeprefix("index-")), rng)
    gc.collect()
    after = _resident_bytes()
    assert sum(map(len, kept)) == blocks
    print(after - before)


def _index(blocks: int, holders: int, rng: Random) -> list[KvIndex]:
    index = KvIndex(_BLOCK_SIZE)
    for number, start in enumerate(range(0, blocks, _PROMPT_BLOCKS)):
        length = min(_PROMPT_BLOCKS, blocks - start)
        tokens = [number, *(rng.randrange(150_000) for _ in range(length - 1))]
        chain = block_hashes(tokens, block_size=1, root=root_hash("m"))
        for holder in range(holders):
            index.add(WorkerId(f"w{(number + holder) % _WORKERS}"), chain, is_chain=True)
    return [index]


def _ledgers(blocks: int, rng: Random) -> list[BlockLedger]:
    ledgers = [BlockLedger("m", _BLOCK_SIZE, _Nobody()) for _ in range(_WORKERS)]
    for number, start in enumerate(range(0, blocks, _EVENT_BLOCKS)):
        length = min(_EVENT_BLOCKS, blocks - start)
        event = BlocksStored(
            block_hashes=[rng.getrandbits(64) for _ in range(length)],
            parent_block_hash=None,
            token_ids=[number, *(rng.randrange(150_000) for _ in range(length * _BLOCK_SIZE - 1))],
            block_size=_BLOCK_SIZE,
        )
        ledgers[number % _WORKERS].apply(KvEventBatch(0.0, [event]))
    return ledgers


class _Nobody:
    """Hears of changes and keeps nothing."""

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None: ...

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None: ...

    def clear(self) -> None: ...


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
