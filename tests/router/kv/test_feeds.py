"""The index as it is fed: from agents' ledgers, from engines themselves, and from one after the other."""

import asyncio
import contextlib
import errno
import time
from dataclasses import replace

import msgspec
import pytest
import zmq
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorafleet.identity import KV_HASHING, block_hashes, root_hash
from lorafleet.service.network.sockets import bind_socket
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.schedule.request import PrefixMatch
from router.http.engine_pool import EnginePool
from router.kv.feed import KvSource, member_name
from router.kv.feeds import KvFeeds
from router.telemetry.metrics import RouterMetrics
from tests.kv import CLEARED, KvAgent, KvEngine, chain, ours, removed, stored
from tests.patience import patience, until, within
from tests.serving import serving
from workers.wire import (
    KvChange,
    KvFrame,
    KvRank,
    KvSnapshot,
    LoraInfo,
    Metadata,
    ModelCard,
    RuntimeConfig,
    Transport,
    WorkerAdapter,
    pack_hashes,
)


def depth(feeds, tokens, *, worker="w0"):
    return feeds.index("m", 2).match(ours(tokens)).get(worker, 0)


def value(metric, *labels):
    return metric.labels(*labels).value


def source(*engines, agent_url="", ledger=0, boot="boot"):
    return KvSource(
        worker="w0",
        base_model="m",
        block_size=2,
        events=tuple(engine.events for engine in engines),
        replay=tuple(engine.replay for engine in engines),
        topic=engines[0].topic.decode() if engines else "",
        engine_boot_id=boot,
        agent_url=agent_url,
        ledger=ledger,
    )


@contextlib.asynccontextmanager
async def following(*engines, agents=True, tail_poll_s=60.0, follow=True):
    """(feeds, trust) that follow these engines' sockets, one a rank."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        trust = PredictionAccuracy()
        feeds = KvFeeds(RouterMetrics(), tail_poll_s, trust)
        if agents:
            feeds.pool = EnginePool(connect_s=patience(2))
            stack.push_async_callback(feeds.pool.close)
        stack.push_async_callback(feeds.close)
        if follow:
            feeds.follow(source(*engines))
            await until(lambda: trust.state("w0") != "estimate")
        yield feeds, trust


# --- the engine itself -----------------------------------------------------------------------------------------------


async def test_what_the_engine_still_knows_is_replayed_and_what_comes_follows():
    engine = KvEngine()
    for event in chain(5):
        engine.batches.append(msgspec.msgpack.encode([0.0, [event], None]))
    async with following(engine) as (feeds, trust):
        assert depth(feeds, range(10)) == 5
        assert trust.state("w0") == "exact"

        async def is_heard() -> bool:
            await engine.publish(*chain(6, 5))
            return depth(feeds, range(12)) >= 6

        await until(is_heard)  # a subscription takes a moment, and there is no event for it
        feeds.maintain()
        assert value(feeds.metrics.kv_events, "w0", "BlockStored") >= 6
        assert value(feeds.metrics.kv_blocks, "w0") == 6
        assert value(feeds.metrics.kv_feeds, "engine") == 1
        assert value(feeds.metrics.kv_degraded, "w0") == 0


async def test_a_hole_that_nothing_can_bridge_keeps_what_is_known_and_says_degraded():
    engine = KvEngine()
    engine.batches.append(msgspec.msgpack.encode([0.0, chain(1), None]))
    async with following(engine, tail_poll_s=0.05) as (feeds, trust):
        assert depth(feeds, range(16)) == 1
        for event in chain(4, 1):
            await engine.publish(event, lost=True)
            engine.kept_from = len(engine.batches)
        await engine.publish(chain(5, 4)[0], lost=True)
        await engine.publish(stored([101], [100, 101]), lost=True)
        await until(lambda: depth(feeds, [100, 101]) == 1)
        assert depth(feeds, range(16)) == 1
        assert trust.state("w0") == "degraded"
        assert value(feeds.metrics.kv_degraded, "w0") == 1
        assert value(feeds.metrics.kv_gaps, "w0", "lost") == 1
        feeds.maintain()
        assert value(feeds.metrics.kv_rejected, "w0", "unknown_parent") == 1
        assert feeds.may_repeat("w0")


async def test_an_engine_whose_removals_are_missed_is_never_believed_to_hold_many_times_what_it_can():
    engine = KvEngine()
    for event in chain(100):
        engine.batches.append(msgspec.msgpack.encode([0.0, [event], None]))
    async with following(engine, follow=False) as (feeds, trust):
        feeds.follow(replace(source(engine), total_blocks=20))
        await until(lambda: trust.state("w0") != "estimate")
        await until(lambda: feeds.index("m", 2).blocks("w0", "device") > 0)
        feeds.maintain()
        assert feeds.index("m", 2).blocks("w0", "device") <= 40
        assert value(feeds.metrics.kv_rejected, "w0", "overflow") > 0


async def test_repetitions_are_no_copies_while_degraded_and_are_again_later():
    engine = KvEngine()
    engine.batches.append(msgspec.msgpack.encode([0.0, chain(1), None]))
    async with following(engine, tail_poll_s=0.05) as (feeds, trust):
        trust.record_lost_events("w0")
        feeds.maintain()
        await engine.publish(*chain(2), lost=True)
        await engine.publish(removed(1), lost=True)
        await engine.publish(stored([9], [50, 51]), lost=True)
        await until(lambda: depth(feeds, [50, 51]) == 1)
        assert depth(feeds, range(4)) == 0


async def test_an_engine_that_started_again_starts_its_worker_afresh():
    old, new = KvEngine("kv@1"), KvEngine("kv@2")
    old.batches.append(msgspec.msgpack.encode([0.0, chain(3), None]))
    async with following(old) as (feeds, trust), new.running():
        assert depth(feeds, range(6)) == 3
        new.batches.append(msgspec.msgpack.encode([0.0, [stored([9], [50, 51])], None]))
        trust.record_lost_events("w0")
        feeds.follow(source(new, boot="2"))
        assert depth(feeds, range(6)) == 0
        await until(lambda: depth(feeds, [50, 51]) == 1)
        await until(lambda: trust.state("w0") == "exact")  # set when the replay ends, after its batches
        feeds.forget("w0")
        assert feeds.index("m", 2).block_counts() == {}


async def test_sockets_that_could_not_be_opened_are_tried_again(monkeypatch):
    engine = KvEngine()
    engine.batches.append(msgspec.msgpack.encode([0.0, chain(3), None]))
    monkeypatch.setattr("router.kv.feed._SOCKETS_AGAIN_S", 0.0)

    def out_of_descriptors(_kind):
        raise zmq.ZMQError(errno.EMFILE)

    async with following(follow=False) as (feeds, _trust), engine.running():
        with monkeypatch.context() as patched:
            patched.setattr(feeds.hub(), "socket", out_of_descriptors)
            feeds.follow(source(engine))
            assert feeds.running["w0"].kind == "none"
            feeds.maintain()
            assert feeds.running["w0"].kind == "none"
        feeds.maintain()
        await until(lambda: depth(feeds, range(6)) == 3)


@pytest.mark.parametrize("has_agent", [True, False])
async def test_an_engine_that_started_again_under_one_boot_id_has_none_of_its_former_blocks(has_agent):
    engine = KvEngine()
    agent = KvAgent(engine)

    async def hear(number: int, tokens: list[int]) -> None:
        """Publish a block until it is known: a subscription takes a moment, and there is no event for it."""

        async def is_heard() -> bool:
            await engine.publish(stored([number], tokens))
            return depth(feeds, tokens) == 1

        await until(is_heard)

    async with contextlib.AsyncExitStack() as stack:
        feeds, trust = await stack.enter_async_context(following(follow=False))
        async with engine.running():
            url = await stack.enter_async_context(agent.running()) if has_agent else ""
            feeds.follow(source(engine, agent_url=url, ledger=KV_HASHING if has_agent else 0))
            await until(lambda: trust.state("w0") != "estimate")
            await hear(1009, [1050, 1051])
            for event in chain(100):
                await engine.publish(event)
            await until(lambda: depth(feeds, range(200)) == 100)
        engine.batches.clear()
        async with engine.running():
            await hear(1008, [1060, 1061])
            assert depth(feeds, range(200)) == 0
            await until(lambda: trust.state("w0") == "exact")  # set when the replay ends, after its batches


async def test_undecodable_batches_are_counted_and_passed_over_and_may_have_held_removals():
    engine = KvEngine()
    engine.batches += [b"\xc1", msgspec.msgpack.encode([0.0, chain(2), None])]
    async with following(engine) as (feeds, trust):
        assert depth(feeds, range(4)) == 2
        assert trust.state("w0") == "degraded"
        feeds.maintain()
        assert value(feeds.metrics.kv_rejected, "w0", "undecodable") == 1
        assert value(feeds.metrics.kv_degraded, "w0") == 1


UNREADABLE = {
    "a removal": (removed(1) | {"block_hashes": "1"}, "degraded"),
    "a removal from nowhere": (removed(1) | {"medium": 7}, "degraded"),
    "a removal as an array": (["BlockRemoved", 1, "GPU"], "degraded"),
    "a store": (stored([1], [0, 1]) | {"block_hashes": 1}, "exact"),
    "another kind": ({"type": "BlockMoved", "block_hashes": [1]}, "exact"),
    "no event": (7, "exact"),
}


@pytest.mark.parametrize(("event", "state"), UNREADABLE.values(), ids=UNREADABLE)
async def test_a_removal_that_cannot_be_read_is_a_loss_and_what_takes_nothing_away_is_none(event, state):
    engine = KvEngine()
    batches = [chain(2), [event, stored([3], [4, 5], 2)]]
    engine.batches += [msgspec.msgpack.encode([0.0, events, None]) for events in batches]
    async with following(engine) as (feeds, trust):
        assert trust.state("w0") == state
        assert depth(feeds, range(6)) == 3


async def test_a_flood_of_garbage_stops_nothing_and_once_it_is_over_agreements_heal():
    engine = KvEngine()
    engine.batches += [b"\xc1" * (n % 9) for n in range(2000)]
    engine.batches.append(msgspec.msgpack.encode([0.0, chain(2), None]))
    async with following(engine) as (feeds, trust):
        assert depth(feeds, range(4)) == 2
        for now in range(30):
            trust.record_comparison("w0", 100, 100, 100, float(now))
        assert trust.state("w0") == "exact"


# --- several ranks ---------------------------------------------------------------------------------------------------


async def test_the_best_rank_of_a_worker_counts_and_is_named_where_it_matters():
    engines = KvEngine(), KvEngine()
    for engine, events in zip(engines, ([*chain(1)], [*chain(3)]), strict=True):
        engine.batches.append(msgspec.msgpack.encode([0.0, events, None]))
    async with following(*engines) as (feeds, _trust):
        await until(lambda: len(feeds.index("m", 2).block_counts()) == 2)
        await until(lambda: feeds.match("m", 2, ours(range(6))) == PrefixMatch({"w0": 3}, {}, {"w0": 1}))
        assert feeds.match("m", 2, ours(range(2))) == PrefixMatch(
            {"w0": 1}, {}, {}
        )  # both have it: the engine may choose
        assert feeds.match("m", 2, ours([7, 7])) == PrefixMatch({}, {}, {})
        index = feeds.index("m", 2)
        assert index.match(ours(range(6))) == {member_name("w0", 0, 2): 1, member_name("w0", 1, 2): 3}
        index.add_pending(feeds.member_name("w0", 0), ours(range(8)))
        assert feeds.match("m", 2, ours(range(8))) == PrefixMatch({"w0": 4}, {}, {"w0": 0})
        held = index.add_pending(feeds.member_name("w0", None), ours(range(10)))
        assert feeds.match("m", 2, ours(range(10))) == PrefixMatch(
            {"w0": 5}, {}, {}
        )  # some rank has it, nobody knows which
        index.remove_pending(held)
        feeds.forget("w0")
        assert feeds.index("m", 2).block_counts() == {}


# --- agents' ledgers -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def beside(engine, **more):
    """(feeds, trust, agent) of a router that follows the agent beside this engine."""
    async with following(engine, follow=False) as (feeds, trust), contextlib.AsyncExitStack() as stack:
        agent = KvAgent(engine, **more)
        agent.port = stack.enter_context(bind_socket("127.0.0.1", 0)).getsockname()[1]
        agent.stop = contextlib.AsyncExitStack()
        agent.url = await agent.stop.enter_async_context(agent.running(port=agent.port))
        stack.push_async_callback(agent.stop.aclose)
        feeds.follow(source(engine, agent_url=agent.url, ledger=1))
        await until(lambda: trust.state("w0") == "exact")
        stack.push_async_callback(feeds.close)
        yield feeds, trust, agent


async def filled(engine, agent, *events):
    """Have the agent's ledger know these events."""
    before = agent.ledgers.seq
    await engine.publish(*events, lost=True)  # found by asking, so that nothing depends on when a subscription begins
    agent.ledgers.hub.poll_tails_now()
    await until(lambda: agent.ledgers.seq > before)


async def test_a_router_that_starts_late_knows_everything_though_the_engine_has_forgotten_it():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        await filled(engine, agent, *chain(4), stored([77], [], block_size=0, medium="CPU"))
        engine.kept_from = len(engine.batches)
        late = KvFeeds(RouterMetrics(), 60.0, PredictionAccuracy(), pool=feeds.pool)
        try:
            late.follow(source(engine, agent_url=agent.url, ledger=1))
            await until(lambda: depth(late, range(8)) == 4)
            assert late.accuracy.state("w0") == "exact"
            assert not late.may_repeat("w0")
            late.maintain()
            assert value(late.metrics.kv_feeds, "ledger") == 1
        finally:
            await late.close()
        assert trust.state("w0") == "exact"


async def test_changes_follow_the_snapshot():
    engine = KvEngine()
    async with beside(engine) as (feeds, _trust, agent):
        await filled(engine, agent, *chain(3))
        await until(lambda: depth(feeds, range(6)) == 3)
        await filled(engine, agent, stored([1], [], block_size=0, medium="CPU"), removed(1))
        await until(lambda: depth(feeds, range(6)) == 0)
        assert feeds.match("m", 2, ours(range(2))).lower == {"w0": (1, 0)}
        await filled(engine, agent, CLEARED, stored([9], [50, 51]))
        await until(lambda: depth(feeds, [50, 51]) == 1)
        assert len(feeds.index("m", 2).block_counts()) == 1
        assert feeds.index("m", 2).block_counts()["w0"] == 1
        feeds.maintain()
        assert value(feeds.metrics.kv_changed_blocks, "w0", "added") == 5
        assert value(feeds.metrics.kv_snapshots, "w0") == 1


async def test_an_agent_that_restarts_is_followed_again_and_meanwhile_what_is_known_stays():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        await filled(engine, agent, *chain(3))
        await until(lambda: depth(feeds, range(6)) == 3)
        first = agent.ledgers.epoch
        await agent.stop.aclose()
        assert depth(feeds, range(6)) == 3
        async with agent.running(port=agent.port):
            assert agent.ledgers.epoch != first
            await until(lambda: value(feeds.metrics.kv_snapshots, "w0") == 2)
            assert depth(feeds, range(6)) == 3
            await filled(engine, agent, *chain(5, 3))
            await until(lambda: depth(feeds, range(10)) == 5)
            assert trust.state("w0") == "exact"
            # Another boot of the engine, as the next metadata says it.
            feeds.follow(source(engine, agent_url=agent.url, ledger=1, boot="later"))
            assert depth(feeds, range(10)) == 0
            await until(lambda: depth(feeds, range(10)) == 5)
            await feeds.close()


async def test_an_agent_that_stays_away_is_replaced_by_the_engine_itself_and_taken_back():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        feeds.fall_back_after_s = 0.2
        await filled(engine, agent, *chain(2))
        await until(lambda: depth(feeds, range(4)) == 2)
        feeds.index("m", 2).add("w0", ours([90, 91]))  # of which the engine says nothing
        await agent.stop.aclose()
        await engine.publish(*chain(4, 2), lost=True)
        await until(lambda: depth(feeds, range(8)) == 4)
        assert depth(feeds, [90, 91]) == 0
        feeds.maintain()
        assert value(feeds.metrics.kv_feeds, "engine") == 1
        assert trust.state("w0") == "degraded"
        assert feeds.may_repeat("w0")
        async with agent.running(port=agent.port):
            await until(lambda: trust.state("w0") == "exact")
            feeds.maintain()
            assert value(feeds.metrics.kv_feeds, "ledger") == 1
            assert depth(feeds, range(8)) == 4
            await feeds.close()


async def test_a_loss_that_the_agent_tells_of_degrades_and_repetitions_may_be_asked_for():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        await filled(engine, agent, *chain(1))
        await engine.publish(*chain(2, 1), lost=True)
        engine.kept_from = len(engine.batches)
        await filled(engine, agent, stored([9], [50, 51]))
        await until(lambda: depth(feeds, [50, 51]) == 1)
        await until(lambda: trust.state("w0") == "degraded")
        assert depth(feeds, range(4)) == 1
        assert feeds.may_repeat("w0")
        await filled(engine, agent, *chain(2), *chain(2))
        await until(lambda: depth(feeds, range(4)) == 2)
        # Repetitions, not copies: with one removal the block is gone.
        await filled(engine, agent, removed(2))
        await until(lambda: depth(feeds, range(4)) == 1)


async def test_a_router_that_was_too_slow_takes_a_snapshot_again():
    engine = KvEngine()
    async with beside(engine, ring_bytes=1) as (feeds, trust, agent):
        await filled(engine, agent, *chain(1))
        await until(lambda: depth(feeds, range(2)) == 1)
        feed = feeds.running["w0"]
        feed.last_seq -= 1  # as if the last frame had not come: the next one is not the one after
        await filled(engine, agent, *chain(2, 1))
        await until(lambda: depth(feeds, range(4)) == 2)
        await until(lambda: value(feeds.metrics.kv_snapshots, "w0") == 2)  # counted once all of it is in
        assert trust.state("w0") == "exact"


async def test_a_whole_ledger_that_answers_contradict_is_taken_again():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        await filled(engine, agent, *chain(2))
        await until(lambda: depth(feeds, range(4)) == 2)
        feeds.index("m", 2).drop("w0", ours(range(4)))
        trust.record_lost_events("w0")
        feeds.running["w0"].snapshot_at = -100.0
        feeds.maintain()
        await until(lambda: trust.state("w0") == "exact")
        assert depth(feeds, range(4)) == 2


async def test_repetitions_that_may_still_come_are_no_copies_when_the_engine_is_followed_once_more():
    engine = KvEngine()
    async with beside(engine) as (feeds, trust, agent):
        feeds.fall_back_after_s = 0.2
        feed = feeds.running["w0"]
        await filled(engine, agent, *chain(2))
        await agent.stop.aclose()
        await until(lambda: feed.kind == "engine")
        feeds.maintain()
        async with agent.running(port=agent.port):
            await until(lambda: trust.state("w0") == "exact")
        feeds.maintain()
        await until(lambda: feed.kind == "engine")
        feeds.maintain()
        await engine.publish(*chain(1), *chain(1), removed(1), stored([9], [50, 51]), lost=True)

        def is_told():
            feed.subscribers[0].received_at = -1e9
            feed.subscribers[0].poll_tail(0.0)  # asks nothing while it looks back
            return depth(feeds, [50, 51]) == 1

        await until(is_told)
        assert depth(feeds, range(2)) == 0
        await feeds.close()


BLOCKS = ours(range(6))
CUT_OFF = KvFrame(2, 0.0, changes=(KvChange(0, "device", b"123", b""),))
OF_A_LATER_AGENT = {"seq": 2, "at": 0.0, "changes": [[0, "remote", pack_hashes(BLOCKS[1:2]), b""]]}


@pytest.mark.parametrize("bad", [CUT_OFF, OF_A_LATER_AGENT], ids=["cut off", "of a later agent"])
async def test_after_a_frame_that_cannot_be_read_all_is_taken_again(bad):
    frames = [KvFrame(1, 0.0, changes=(KvChange(0, "device", pack_hashes(BLOCKS[1:2]), b""),)), bad]
    since = []

    async def snapshot(_request):
        seq = 2 if since else 0
        blocks = pack_hashes(BLOCKS if since else BLOCKS[:1])
        return Response(msgspec.msgpack.encode(KvSnapshot("e.1", seq, "m", 2, (KvRank(0, blocks),))))

    async def stream(request):
        since.append(int(request.query_params["since"]))

        async def told():
            for frame in map(msgspec.msgpack.encode, frames[since[-1] :]):
                yield len(frame).to_bytes(4, "big") + frame
            await asyncio.Event().wait()

        return StreamingResponse(told())

    app = Starlette(routes=[Route("/v1/kv/snapshot", snapshot), Route("/v1/kv/stream", stream)])
    async with serving(app) as url, following(follow=False) as (feeds, trust):
        feeds.follow(source(agent_url=url, ledger=KV_HASHING))
        await until(lambda: since == [0, 2])
        assert depth(feeds, range(6)) == 3
        assert value(feeds.metrics.kv_snapshots, "w0") == 2
        assert value(feeds.metrics.loop_failures, "kv_ledger") == 1
        assert trust.state("w0") == "exact"
        await feeds.close()


async def test_snapshots_that_no_readable_frame_follows_are_taken_less_and_less_often():
    asked_at = []

    async def snapshot(_request):
        asked_at.append(time.monotonic())
        return Response(msgspec.msgpack.encode(KvSnapshot("e.1", 0, "m", 2, (KvRank(0, pack_hashes(BLOCKS)),))))

    async def stream(_request):
        frame = msgspec.msgpack.encode(OF_A_LATER_AGENT)
        return Response(len(frame).to_bytes(4, "big") + frame)

    app = Starlette(routes=[Route("/v1/kv/snapshot", snapshot), Route("/v1/kv/stream", stream)])
    async with serving(app) as url, following(follow=False) as (feeds, _trust):
        feeds.follow(source(agent_url=url, ledger=KV_HASHING))
        await until(lambda: len(asked_at) == 3)
        assert depth(feeds, range(6)) == 3
        await feeds.close()
    assert asked_at[2] - asked_at[1] >= 0.99  # the first pause is drawn between 1 and 2 s


async def test_while_a_snapshot_is_taken_again_what_was_known_before_counts():
    many = [number << 20 for number in range(1, 10_001)]
    snapshots = [pack_hashes([*many, *BLOCKS]), pack_hashes([*many, *BLOCKS[:2]])]
    go_on = asyncio.Event()

    async def snapshot(_request):
        return Response(msgspec.msgpack.encode(KvSnapshot("e.1", 0, "m", 2, (KvRank(0, snapshots.pop(0)),))))

    async def stream(_request):
        async def told():
            await go_on.wait()
            go_on.clear()
            yield b"\0\0\0\1\xc1"  # no frame: a snapshot is taken

        return StreamingResponse(told())

    app = Starlette(routes=[Route("/v1/kv/snapshot", snapshot), Route("/v1/kv/stream", stream)])
    async with serving(app) as url, following(follow=False) as (feeds, _trust):
        feeds.follow(source(agent_url=url, ledger=KV_HASHING))
        await until(lambda: value(feeds.metrics.kv_snapshots, "w0") == 1)
        go_on.set()
        depths = set()
        async with within(20):
            while value(feeds.metrics.kv_snapshots, "w0") < 2:
                depths.add(depth(feeds, range(6)))
                await asyncio.sleep(0)
        assert depths == {3}
        assert depth(feeds, range(6)) == 2
        await feeds.close()


async def test_a_worker_that_goes_while_its_snapshot_is_taken_leaves_nothing():
    many = pack_hashes([number << 20 for number in range(1, 10_001)])

    async def snapshot(_request):
        return Response(msgspec.msgpack.encode(KvSnapshot("e.1", 0, "m", 2, (KvRank(0, many),))))

    async with (
        serving(Starlette(routes=[Route("/v1/kv/snapshot", snapshot)])) as url,
        following(follow=False) as (feeds, _),
    ):
        feeds.follow(source(agent_url=url, ledger=KV_HASHING))
        index = feeds.index("m", 2)
        while not len(index):
            await asyncio.sleep(0)
        assert not index.block_counts()
        feeds.forget("w0")
        await feeds.close()
        while index.sweep(1000):
            pass
        assert not len(index)


async def test_a_ledger_of_another_base_model_or_hashing_is_not_believed():
    engine = KvEngine()
    engine.batches.append(msgspec.msgpack.encode([0.0, chain(2), None]))
    async with following(engine, follow=False) as (feeds, _trust), KvAgent(engine).running() as url:
        feeds.fall_back_after_s = 0.0
        feeds.follow(KvSource("w0", "other", 2, (engine.events,), (engine.replay,), "kv@boot", agent_url=url, ledger=1))
        root = root_hash("other")
        index = feeds.index("other", 2)
        await until(lambda: index.match(block_hashes(range(4), block_size=2, root=root)) == {"w0": 2})
        assert depth(feeds, range(4)) == 0


async def test_a_snapshot_of_16000_blocks_takes_less_than_a_second_of_cpu():
    engine = KvEngine()
    async with beside(engine) as (feeds, _trust, agent):
        events = [stored([p << 20 | i for i in range(200)], [p, *range(399)]) for p in range(80)]
        await filled(engine, agent, *events)
        late = KvFeeds(RouterMetrics(), 60.0, PredictionAccuracy(), pool=feeds.pool)
        try:
            began = time.process_time()
            late.follow(source(engine, agent_url=agent.url, ledger=1))
            await until(lambda: late.index("m", 2).block_counts().get("w0") == 16_000)
            assert time.process_time() - began < patience(1)
        finally:
            await late.close()


# --- what the metadata says ------------------------------------------------------------------------------------------


def metadata(transport, *, boot="boot", loaded=(), agent_url=""):
    shape = RuntimeConfig(block_size=2, total_kv_blocks=9, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    return Metadata(
        instance_id="w0",
        agent_url=agent_url,
        model=ModelCard(name="m", base_model="m", runtime_config=shape),
        transport=transport,
        lora=LoraInfo(loaded_loras=tuple(loaded)),
        agent_boot_id="a",
        engine_boot_id=boot,
    )


async def test_an_engine_that_publishes_nothing_is_an_estimate_once_a_boot():
    feeds = KvFeeds(RouterMetrics(), 60.0)
    feeds.update_worker("w0", "m", 2, metadata(Transport(engine_url="")))
    assert feeds.accuracy.state("w0") == "estimate"
    feeds.index("m", 2).add("w0", ours([1, 2]))
    feeds.update_worker("w0", "m", 2, metadata(Transport(engine_url="")))
    assert depth(feeds, [1, 2]) == 1
    feeds.update_worker("w0", "m", 2, metadata(Transport(engine_url=""), boot="another"))
    assert depth(feeds, [1, 2]) == 0
    feeds.maintain()
    assert value(feeds.metrics.kv_feeds, "estimate") == 1


async def test_a_worker_that_is_still_starting_is_not_followed():
    feeds = KvFeeds(RouterMetrics(), 60.0)
    transport = Transport(engine_url="", kv_events=("ipc://@nobody",), kv_replay=("ipc://@nobody",))
    feeds.update_worker("w0", "m", 0, metadata(transport))
    feeds.update_worker("w0", "m", 2, metadata(transport, boot=""))
    assert not feeds.followed_workers


@pytest.mark.parametrize(("dialect", "left"), [("sglang", 0), ("vllm", 1)])
async def test_an_adapter_that_was_loaded_afresh_has_no_blocks_where_loads_start_afresh(dialect, left):
    engine = KvEngine()
    event = stored([1], [1, 2], lora_name="sql@1")
    engine.batches.append(msgspec.msgpack.encode([0.0, [event], None]))
    async with following(engine, follow=False) as (feeds, _trust):
        transport = Transport(
            engine_url="", dialect=dialect, kv_events=(engine.events,), kv_replay=(engine.replay,), kv_topic="kv@boot"
        )

        def hear(loaded_at):
            lora = WorkerAdapter(
                lora_id="sql", digest="", engine_name="sql@1", state="ready", location="device", loaded_at=loaded_at
            )
            loaded = [lora] if loaded_at else []
            feeds.update_worker("w0", "m", 2, metadata(transport, loaded=loaded, agent_url="http://an.older.agent"))

        def held():
            return len(feeds.index("m", 2).match(ours([1, 2], name="sql@1")))

        hear("1")
        await until(lambda: held() == 1)
        for loaded_at in ("1", "", "1", ""):
            hear(loaded_at)
            assert held() == 1
        hear("2")
        assert held() == left


async def test_a_workers_versions_of_long_ago_are_forgotten_with_their_blocks():
    engine = KvEngine()
    event = stored([1], [1, 2], lora_name="sql@0")
    engine.batches.append(msgspec.msgpack.encode([0.0, [event], None]))
    async with following(engine, follow=False) as (feeds, _trust):
        transport = Transport(
            engine_url="", dialect="sglang", kv_events=(engine.events,), kv_replay=(engine.replay,), kv_topic="kv@boot"
        )

        def hear(*numbers):
            loaded = [
                WorkerAdapter(
                    lora_id=f"sql/{number}", digest="", engine_name=f"sql@{number}", state="ready", location="device",
                    loaded_at="1",
                )
                for number in numbers
            ]  # fmt: skip
            feeds.update_worker("w0", "m", 2, metadata(transport, loaded=loaded, agent_url="http://an.older.agent"))

        def held():
            return len(feeds.index("m", 2).match(ours([1, 2], name="sql@0")))

        hear(0)
        await until(lambda: held() == 1)
        for number in range(1, 1000):
            hear(number)
        assert (len(feeds._loaded["w0"]), held()) == (1000, 1)
        hear(0)
        for number in range(1000, 1999):
            hear(number)
        assert held() == 1, "it was loaded again meanwhile"
        hear(1999)
        assert (len(feeds._loaded["w0"]), held()) == (1000, 0)
        hear(*range(1200))
        assert len(feeds._loaded["w0"]) == 1200, "all that are loaded now are remembered"


async def test_a_name_with_another_path_under_it_at_an_engine_without_an_agent_has_none_of_the_former_ones_blocks():
    engine = KvEngine()
    before = [stored([n + 1], [2 * n, 2 * n + 1], n or None, lora_name="sql") for n in range(3)]
    engine.batches.append(msgspec.msgpack.encode([0.0, [*before, stored([9], [1, 2])], None]))
    async with following(engine, follow=False, tail_poll_s=0.05) as (feeds, trust):
        transport = Transport(
            engine_url="", kv_events=(engine.events,), kv_replay=(engine.replay,), kv_topic=engine.topic.decode()
        )

        def hear(path, boot):
            lora = WorkerAdapter(
                lora_id="sql", digest="", engine_name="sql", state="ready", location="device", path=path
            )
            feeds.update_worker("w0", "m", 2, metadata(transport, loaded=[lora] if path else [], boot=boot))

        def held():
            return feeds.index("m", 2).match(ours(range(8), name="sql")).get("w0", 0)

        hear("/v1", "100.00")
        await until(lambda: held() == 3)
        hear("", "100.00")
        hear("/v1", "100.00")
        assert held() == 3
        await until(lambda: trust.state("w0") == "exact")
        trust.record_lost_events("w0")
        hear("/v2", "100.00+1")
        assert held() == 0
        # What it says from now on is of the new one; nothing is read a second time.
        await engine.publish(stored([21], [0, 1], lora_name="sql"))
        await until(lambda: held() == 1)
        assert depth(feeds, [1, 2]) == 1
        assert trust.state("w0") == "degraded"
        hear("/v2", "200.00")
        assert held() == 0
