"""Batches are delivered once and in order, though sockets lose messages."""

import asyncio
import contextlib
import resource
import uuid
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from lorafleet.kv.subscribe import RankEndpoint, SubscriberHub
from tests.kv import KvEngine
from tests.patience import until, within


class RecordedBatches:
    """The calls of one subscriber."""

    def __init__(self):
        self.numbers: list[int] = []
        self.losses: list[tuple[int, int]] = []
        self.holes_filled = self.bad = self.openings = self.restarts = 0

    def on_batch(self, payload):
        if payload == b"fault":
            raise RuntimeError("a listener's own fault")
        self.numbers.append(msgspec.msgpack.decode(payload)[1][0])

    def on_drained(self):
        pass

    def on_opened(self):
        self.openings += 1

    def on_bridged(self):
        self.holes_filled += 1

    def on_lost(self, first, last):
        self.losses.append((first, last))

    def on_restarted(self):
        self.restarts += 1

    def on_malformed(self):
        self.bad += 1


@contextlib.asynccontextmanager
async def following(engine, *, tail_poll_s=60.0, replay=True):
    async with engine.running():
        hub = SubscriberHub(tail_poll_s=tail_poll_s)
        recorded = RecordedBatches()
        try:
            hub.follow(RankEndpoint(engine.events, engine.replay if replay else "", engine.topic.decode()), recorded)
            await until(lambda: recorded.openings)
            yield recorded, hub
        finally:
            await hub.close()


async def connected(engine, recorded):
    """Publish until a message arrives, since messages before the subscription are lost."""
    before = len(recorded.numbers)
    while len(recorded.numbers) == before:
        await engine.publish(len(engine.batches))
        with contextlib.suppress(TimeoutError):
            await until(lambda: len(recorded.numbers) > before, within_s=0.2)
    return len(engine.batches)


async def test_buffered_batches_come_first_then_live_ones_in_order():
    engine = KvEngine()
    for number in range(5):
        engine.batches.append(msgspec.msgpack.encode([0.0, [number], None]))
    async with following(engine) as (recorded, _hub):
        assert recorded.numbers == [0, 1, 2, 3, 4]
        count = await connected(engine, recorded)
        for number in range(count, count + 500):
            await engine.publish(number)
        await until(lambda: len(recorded.numbers) == count + 500)
        assert recorded.numbers == list(range(count + 500))
        assert not recorded.losses


async def test_a_gap_is_filled_from_the_replay_socket():
    engine = KvEngine()
    async with following(engine) as (recorded, _hub):
        count = await connected(engine, recorded)
        for number in range(count, count + 3):
            await engine.publish(number, lost=True)
        await engine.publish(count + 3)
        await until(lambda: len(recorded.numbers) == count + 4)
        assert recorded.numbers == list(range(count + 4))
        assert not recorded.losses
        await until(lambda: recorded.holes_filled, what="the replay has ended, after its last batch")


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_replay_with_a_gap_is_requested_again(has_topic):
    engine = KvEngine()
    engine.has_topic_in_replay = has_topic
    for number in range(6):
        engine.batches.append(msgspec.msgpack.encode([0.0, [number], None]))
    engine.skip = {3}
    async with following(engine) as (recorded, _hub):
        assert recorded.numbers == list(range(6))
        assert not recorded.losses
        assert engine.replays == 2


async def test_a_gap_that_cannot_be_filled_is_reported_and_skipped():
    engine = KvEngine()
    async with following(engine) as (recorded, _hub):
        count = await connected(engine, recorded)
        for number in range(count, count + 4):
            await engine.publish(number, lost=True)
        engine.kept_from = count + 3
        await engine.publish(count + 4)
        await until(lambda: recorded.numbers[-1] == count + 4)
        assert recorded.losses == [(count, count + 2)]
        assert recorded.numbers == [*range(count), count + 3, count + 4]


async def test_without_a_replay_socket_a_gap_is_a_loss():
    engine = KvEngine()
    async with following(engine, replay=False) as (recorded, _hub):
        count = await connected(engine, recorded)
        earlier = len(recorded.losses)
        await engine.publish(count, lost=True)
        await engine.publish(count + 1)
        await until(lambda: recorded.numbers[-1] == count + 1)
        assert recorded.losses[earlier:] == [(count, count)]


async def test_a_loss_of_the_last_batch_is_found_by_polling():
    engine = KvEngine()
    async with following(engine, tail_poll_s=0.05) as (recorded, _hub):
        await engine.publish(0, lost=True)
        await until(lambda: recorded.numbers == [0])
        assert not recorded.losses


async def test_a_late_subscriber_gets_the_buffered_batches():
    engine = KvEngine()
    for number in range(9):
        engine.batches.append(msgspec.msgpack.encode([0.0, [number], None]))
    engine.kept_from = 4
    async with following(engine) as (recorded, _hub):
        assert recorded.numbers == [4, 5, 6, 7, 8]
        assert recorded.losses == [(0, 3)]


async def test_malformed_messages_and_listener_errors_stop_nothing_else():
    engine = KvEngine()
    async with following(engine) as (recorded, hub):
        count = await connected(engine, recorded)
        await engine.pub.send_multipart([engine.topic, b"short"])
        await engine.pub.send_multipart([engine.topic, b"short", b""])
        await engine.pub.send_multipart([engine.topic + b"-longer", (count).to_bytes(8, "big"), b"another topic"])
        await engine.send(b"fault")
        await engine.publish(count + 1)
        await until(lambda: recorded.numbers[-1] == count + 1)
        assert recorded.bad == 2
        assert hub.waiting == 0


async def test_many_engines_share_one_hub_and_a_stopped_one_is_silent():
    engines = [KvEngine(f"kv@{number}") for number in range(8)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        hub = SubscriberHub(tail_poll_s=60)
        stack.push_async_callback(hub.close)
        recorded = [RecordedBatches() for _ in engines]
        followers = [
            hub.follow(RankEndpoint(e.events, e.replay, e.topic.decode()), t)
            for e, t in zip(engines, recorded, strict=True)
        ]
        await until(lambda: all(each.openings for each in recorded))
        counts = [await connected(engine, each) for engine, each in zip(engines, recorded, strict=True)]
        hub.forget(followers[0])
        for engine, count in zip(engines, counts, strict=True):
            for number in range(count, count + 100):
                await engine.publish(number)
        await until(lambda: all(len(t.numbers) == c + 100 for t, c in zip(recorded[1:], counts[1:], strict=True)))
        assert all(each.numbers == list(range(len(each.numbers))) for each in recorded)
        assert len(recorded[0].numbers) == counts[0]


async def test_a_fleet_of_over_a_thousand_ranks_is_followed(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    hub = SubscriberHub(tail_poll_s=60.0)
    recorded = [RecordedBatches() for _ in range(1100)]
    try:
        for number, each in enumerate(recorded):
            hub.follow(RankEndpoint(f"ipc://{tmp_path}/{number}", "", "kv"), each)
        await until(lambda: all(each.openings for each in recorded))
    finally:
        await hub.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_an_endpoint_that_cannot_be_connected_to_is_refused():
    hub = SubscriberHub(tail_poll_s=60)
    try:
        with pytest.raises(zmq.ZMQError):
            hub.follow(RankEndpoint("tcp://*:5557", "", "kv"), RecordedBatches())
    finally:
        await hub.close()


class DroppingProxy:
    """Forwards connections to an address. `drop` silences those that are open: neither side is told."""

    def __init__(self, host, port):
        self._target = host, port
        self._open: set[asyncio.Event] = set()

    async def serve(self, reader, writer):
        dropped = asyncio.Event()
        self._open.add(dropped)
        there = await asyncio.open_connection(*self._target)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(self._pipe(reader, there[1], dropped), self._pipe(there[0], writer, dropped))
        there[1].close()
        writer.close()

    async def _pipe(self, reader, writer, dropped):
        while data := await reader.read(65_536):
            if not dropped.is_set():
                writer.write(data)
        writer.close()

    def drop(self):
        for each in self._open:
            each.set()


async def test_a_connection_that_the_network_has_dropped_is_made_again(monkeypatch):
    monkeypatch.setattr("lorafleet.kv.subscribe._HEARTBEAT_MS", 50)
    monkeypatch.setattr("lorafleet.kv.subscribe._HEARTBEAT_TIMEOUT_MS", 500)
    engine = KvEngine()
    engine.events = "tcp://127.0.0.1:*"
    hub = SubscriberHub(tail_poll_s=60.0)
    recorded = RecordedBatches()
    try:
        async with engine.running():
            proxy = DroppingProxy("127.0.0.1", urlsplit(engine.pub.getsockopt_string(zmq.LAST_ENDPOINT)).port)
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            hub.follow(RankEndpoint(address, "", engine.topic.decode()), recorded)
            await until(lambda: recorded.openings)
            await connected(engine, recorded)
            proxy.drop()
            async with within(20):
                count = await connected(engine, recorded)
            assert recorded.numbers[-1] == count - 1
            assert recorded.restarts == 0
            server.close()
    finally:
        await hub.close()


async def test_a_restarted_engine_is_followed_again():
    engine = KvEngine(f"kv@{uuid.uuid4().hex}")
    hub = SubscriberHub(tail_poll_s=0.1)
    recorded = RecordedBatches()
    try:
        async with engine.running():
            hub.follow(RankEndpoint(engine.events, engine.replay, engine.topic.decode()), recorded)
            await until(lambda: recorded.openings)
            count = await connected(engine, recorded)
        async with engine.running():
            await engine.publish(count, lost=True)
            await until(lambda: len(recorded.numbers) == count + 1)
            assert not recorded.losses
    finally:
        await hub.close()


@pytest.mark.parametrize("replay", [True, False])
async def test_an_engine_whose_numbers_begin_anew_is_followed_from_its_first_batch(replay):
    engine = KvEngine()
    hub = SubscriberHub(tail_poll_s=60.0)
    recorded = RecordedBatches()
    try:
        async with engine.running():
            hub.follow(RankEndpoint(engine.events, engine.replay if replay else "", engine.topic.decode()), recorded)
            await until(lambda: recorded.openings)
            await connected(engine, recorded)
            while len(engine.batches) < 100:
                await engine.publish(len(engine.batches))
            await until(lambda: recorded.numbers[-1] == 99)
        engine.batches.clear()
        recorded.numbers.clear()
        recorded.losses.clear()
        async with engine.running():
            count = await connected(engine, recorded)
            await until(lambda: recorded.numbers[-1] == count - 1)
            assert recorded.restarts == 1
            first = 0 if replay else recorded.numbers[0]
            assert recorded.numbers == list(range(first, count))
            assert recorded.losses == ([] if not first else [(0, first - 1)])
    finally:
        await hub.close()
