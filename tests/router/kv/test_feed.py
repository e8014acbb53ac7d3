"""Changes of many workers' blocks leave the event loop to requests after each small part of them."""

import asyncio
from dataclasses import replace
from itertools import count

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorafleet.identity import KV_HASHING
from lorafleet.kv.turns import LoopTurns
from tests.patience import until
from tests.router.kv.test_feeds import following, source
from tests.serving import serving
from workers.wire import KvChange, KvFrame, KvRank, KvSnapshot, pack_hashes

_WORKERS, _BLOCKS = 8, 4_000
# A look at the clock, and a turn of work that has waited for long.
_READ_S, _MOST_S = 0.0001, 0.001


async def test_blocks_of_many_workers_that_change_at_once_come_a_few_hundred_in_a_turn_of_the_loop():
    hashes = [number << 20 for number in range(1, _BLOCKS + 1)]
    frame = msgspec.msgpack.encode(KvFrame(1, 0.0, changes=(KvChange(0, "device", pack_hashes(hashes), b""),)))
    go_on = asyncio.Event()

    async def snapshot(_request):
        return Response(msgspec.msgpack.encode(KvSnapshot("e.1", 0, "m", 2, (KvRank(0, b""),))))

    async def stream(_request):
        async def told():
            await go_on.wait()
            yield len(frame).to_bytes(4, "big") + frame
            await asyncio.Event().wait()

        return StreamingResponse(told())

    app = Starlette(routes=[Route("/v1/kv/snapshot", snapshot), Route("/v1/kv/stream", stream)])
    async with serving(app) as url, following(follow=False) as (feeds, _trust):
        ticks = count()
        # Each look at the clock takes a tenth of a millisecond, and there is one behind each step.
        feeds.turns = LoopTurns(lambda: next(ticks) * _READ_S)
        for number in range(_WORKERS):
            feeds.follow(replace(source(agent_url=url, ledger=KV_HASHING), worker=f"w{number}"))
        await until(lambda: all(feed.kind == "ledger" for feed in feeds.running.values()))
        index = feeds.index("m", 2)
        go_on.set()
        growth, known = [], 0
        while known < _WORKERS * _BLOCKS:
            await asyncio.sleep(0)
            before, known = known, sum(index.block_counts().values())
            growth.append(known - before)
        assert max(growth) <= 200 * (_MOST_S / _READ_S + 1)
        await feeds.close()
