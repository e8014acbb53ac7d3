import asyncio
import contextlib
import uuid

import msgspec
import pytest
import zmq
import zmq.asyncio

from lorafleet.kv.blocks import block_hashes, root_hash
from router.core.index import KvIndex
from router.kv_events import Feeds, Source, apply_event, cache_salt
from router.metrics import Metrics
from tests.router.doubles import until

# vLLM 0.32's own bytes for a store, a removal and a clearing.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f7261"
    "5f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da347505581a4747970"
    "65b0416c6c426c6f636b73436c656172656400"
)
SOURCE = Source("w0", "m", 2, "", "", "kv")


def stored(hashes, tokens, parent=None, **more):
    fields = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | more
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, **fields}


def depth(index, tokens, *, name="", salt=""):
    return index.match(block_hashes(tokens, block_size=2, root=root_hash("m", name, salt))).get("w0", 0)


def test_vllms_own_bytes_are_understood():
    index = KvIndex(2)
    _, events, _rank = msgspec.msgpack.decode(GOLDEN)
    assert [e["type"] for e in events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert apply_event(index, SOURCE, events[0]) == ("BlockStored", "block_size")
    assert apply_event(index, SOURCE, events[1]) == ("BlockRemoved", "unknown_block")
    assert apply_event(index, SOURCE, events[2]) == ("AllBlocksCleared", None)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("as_array", [False, True])
def test_maps_and_arrays_with_int_and_bytes_hashes_mean_the_same(as_bytes, as_array):
    def name(number):
        return number.to_bytes(32, "big") if as_bytes else number

    def encoded(event):
        return list(event.values()) if as_array else event

    index = KvIndex(2)
    assert apply_event(index, SOURCE, encoded(stored([name(1), name(2)], [1, 2, 3, 4]))) == ("BlockStored", None)
    assert apply_event(index, SOURCE, encoded(stored([name(3)], [5, 6], name(2)))) == ("BlockStored", None)
    assert depth(index, [1, 2, 3, 4, 5, 6]) == 3
    removed = {"type": "BlockRemoved", "block_hashes": [name(3)], "medium": "GPU"}
    assert apply_event(index, SOURCE, encoded(removed)) == ("BlockRemoved", None)
    assert depth(index, [1, 2, 3, 4, 5, 6]) == 2
    assert apply_event(index, SOURCE, encoded({"type": "AllBlocksCleared"})) == ("AllBlocksCleared", None)
    assert len(index) == 0


def test_an_adapters_blocks_and_a_salts_blocks_are_their_own():
    index = KvIndex(2)
    sql = stored([1, 2], [1, 2, 3, 4], lora_name="sql@1", extra_keys=[["sql@1"], ["sql@1"]])
    salted = stored([3, 4], [1, 2, 3, 4], lora_name="sql@1", extra_keys=[["sql@1", "pepper"], ["sql@1"]])
    assert apply_event(index, SOURCE, sql) == apply_event(index, SOURCE, salted) == ("BlockStored", None)
    found = {(n, s): depth(index, [1, 2, 3, 4], name=n, salt=s) for n in ("", "sql@1", "sql@2") for s in ("", "pepper")}
    assert found == {
        ("", ""): 0,
        ("", "pepper"): 0,
        ("sql@1", ""): 2,
        ("sql@1", "pepper"): 2,
        ("sql@2", ""): 0,
        ("sql@2", "pepper"): 0,
    }


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1, 2], [1, 2]), "shape"),
        (stored([], []), "shape"),
        (stored([1], [1, "x"]), "shape"),
        (stored([1], [1, -1]), "shape"),
        (stored([2], [1, 2], parent=77), "unknown_parent"),
        (stored([1], [1, 2], block_size=4), "block_size"),
        (stored([1], [1, 2], medium="CPU"), "medium"),
        (stored([1], [1, 2], group_idx=1), "group"),
        (stored([1], [1, 2], extra_keys=[[["image", 0]]]), "extra_keys"),
        ({"type": "BlockMoved"}, "unknown_type"),
        ({"type": "BlockStored", "block_size": 2}, "shape"),
        ([], "unknown_type"),
        (7, "unknown_type"),
    ],
)
def test_what_is_not_exact_is_not_accepted_and_says_why(event, reason):
    index = KvIndex(2)
    assert apply_event(index, SOURCE, event)[1] == reason
    assert len(index) == 0


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        (None, "", ""),
        ([None, None], "", ""),
        ([["salt"], None], "", "salt"),
        ([["sql@1", "salt"], ["sql@1"]], "sql@1", "salt"),
        ([["salt"], ["salt"]], "", None),
        ([["other@1", "salt"]], "sql@1", None),
        ("salt", "", None),
    ],
)
def test_a_salt_is_told_from_the_adapters_name_and_from_what_is_not_indexed(keys, name, expected):
    assert cache_salt(keys, name) == expected


class Engine:
    """An engine's two sockets, which can be told to lose messages on the way."""

    def __init__(self, topic="kv@boot"):
        self.topic = topic.encode()
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        # Abstract (`@`): no file is left, and pytest's folders are too long for a socket's path.
        self.events, self.replay = (f"ipc://@{uuid.uuid4().hex}" for _ in range(2))
        self.pub.bind(self.events)
        self.router.bind(self.replay)
        self.batches: list[bytes] = []
        self.kept_from = 0
        self.skip: set[int] = set()
        self.replays = 0

    @property
    def source(self):
        return Source("w0", "m", 2, self.events, self.replay, self.topic.decode())

    async def publish(self, *events, lost=False):
        payload = msgspec.msgpack.encode([0.0, list(events), None])
        self.batches.append(payload)
        if not lost:
            await self.pub.send_multipart([self.topic, (len(self.batches) - 1).to_bytes(8, "big"), payload])

    async def answer(self):
        while True:
            client, _, start = await self.router.recv_multipart()
            self.replays += 1
            for seq in range(max(self.kept_from, int.from_bytes(start, "big")), len(self.batches)):
                if seq not in self.skip:
                    frames = [client, b"", self.topic, seq.to_bytes(8, "big"), self.batches[seq]]
                    await self.router.send_multipart(frames)
            self.skip.clear()
            await self.router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


@contextlib.asynccontextmanager
async def feeding(engine, *, tail_poll_s=60.0):
    feeds = Feeds(Metrics(), tail_poll_s)
    answering = asyncio.create_task(engine.answer())
    try:
        feeds.follow(engine.source)
        yield feeds, feeds.index("m", 2)
    finally:
        await feeds.close()
        answering.cancel()
        engine.context.destroy(linger=0)


def chain(n, start=0):
    """Events that store blocks `start` to `n` of one growing prompt, one a batch."""
    return [stored([i + 1], [2 * i, 2 * i + 1], i or None) for i in range(start, n)]


async def test_what_was_cached_before_we_came_is_replayed():
    engine = Engine()
    for event in chain(5):
        await engine.publish(event)
    async with feeding(engine) as (_, index):
        await until(lambda: depth(index, range(10)) == 5)


async def test_live_events_follow_and_a_hole_is_filled_from_the_replay_socket():
    engine = Engine()
    async with feeding(engine) as (feeds, index):
        await until(lambda: engine.replays == 1)
        events = chain(6)
        await engine.publish(events[0])
        await until(lambda: depth(index, range(12)) == 1)
        await engine.publish(events[1], lost=True)
        await engine.publish(events[2], lost=True)
        await engine.publish(events[3])
        await until(lambda: depth(index, range(12)) == 4)
        assert feeds.metrics.kv_gaps.labels("w0", "replayed")._value.get() == 1
        assert feeds.metrics.kv_degraded.labels("w0")._value.get() == 0


async def test_a_replay_with_a_hole_in_it_is_asked_for_again():
    engine = Engine()
    for event in chain(6):
        await engine.publish(event)
    engine.skip = {3}
    async with feeding(engine) as (feeds, index):
        await until(lambda: depth(index, range(12)) == 6)
        assert feeds.metrics.kv_degraded.labels("w0")._value.get() == 0


async def test_a_hole_that_nothing_can_bridge_keeps_what_is_known_and_says_degraded():
    engine = Engine()
    events = chain(8)
    async with feeding(engine) as (feeds, index):
        await until(lambda: engine.replays == 1)
        await engine.publish(events[0])
        await until(lambda: depth(index, range(16)) == 1)
        for event in events[1:4]:
            await engine.publish(event, lost=True)
        engine.kept_from = 4
        await engine.publish(events[4])
        await engine.publish(stored([101], [100, 101]))
        await until(lambda: depth(index, [100, 101]) == 1)
        assert depth(index, range(16)) == 1
        assert feeds.metrics.kv_degraded.labels("w0")._value.get() == 1
        assert feeds.metrics.kv_rejected.labels("w0", "unknown_parent")._value.get() == 1


async def test_a_loss_at_the_tail_is_found_by_asking():
    engine = Engine()
    async with feeding(engine, tail_poll_s=0.05) as (_, index):
        await until(lambda: engine.replays >= 1)
        await engine.publish(chain(1)[0], lost=True)
        await until(lambda: depth(index, range(2)) == 1)


async def test_an_engine_that_started_again_starts_its_worker_afresh():
    old, new = Engine("kv@1"), Engine("kv@2")
    await old.publish(*chain(3))
    async with feeding(old) as (feeds, index):
        await until(lambda: depth(index, range(6)) == 3)
        answering = asyncio.create_task(new.answer())
        await new.publish(stored([9], [50, 51]))
        feeds.follow(new.source)
        assert depth(index, range(6)) == 0
        await until(lambda: depth(index, [50, 51]) == 1)
        feeds.forget("w0")
        assert len(index) == 0
        answering.cancel()
        new.context.destroy(linger=0)


async def test_undecodable_batches_are_counted_and_passed_over():
    engine = Engine()
    async with feeding(engine) as (feeds, index):
        await until(lambda: engine.replays == 1)
        engine.batches.append(b"\xc1")
        await engine.pub.send_multipart([engine.topic, (0).to_bytes(8, "big"), b"\xc1"])
        await engine.publish(*chain(2))
        await until(lambda: depth(index, range(4)) == 2)
        assert feeds.metrics.kv_rejected.labels("w0", "undecodable")._value.get() == 1


@pytest.mark.parametrize(
    "odd",
    [
        stored([[1]], [1, 2]),
        stored([1], [1, 2], lora_name=7),
        stored([1], [1, 2], extra_keys=[7]),
        stored([1], [1, 2], parent=[1]),
        {"type": "BlockRemoved", "block_hashes": [[1]], "medium": "GPU"},
    ],
)
def test_an_event_of_another_shape_is_rejected_by_name_and_breaks_nothing(odd):
    index = KvIndex(2)
    assert apply_event(index, SOURCE, odd)[1] in ("shape", "extra_keys")
    assert len(index) == 0
