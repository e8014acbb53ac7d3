"""The agent's KV ledger, as routers read it."""

import asyncio
import contextlib
import os
import signal
import time

import httpx
import msgspec
import pytest

from lorafleet.identity import block_hashes, root_hash
from tests.kv import CLEARED, KvAgent, KvEngine, chain, ours, removed, stored
from tests.patience import patience, until, within
from tests.workers.running import code, metadata_of, post
from workers.wire import KvFrame, KvSnapshot, Metadata, unpack_hashes

SNAPSHOT = msgspec.msgpack.Decoder(KvSnapshot)


@contextlib.asynccontextmanager
async def serving_ledger(*engines, send_buffer_bytes=None, **more):
    """(client of the agent, agent)"""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        agent = KvAgent(*engines, **more)
        url = await stack.enter_async_context(agent.running(send_buffer_bytes=send_buffer_bytes))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(10)))
        await until(lambda: agent.ledgers.is_open)
        yield client, agent


async def snapshot(client) -> KvSnapshot:
    answer = await client.get("/v1/kv/snapshot")
    assert answer.status_code == 200, answer.text
    return SNAPSHOT.decode(answer.content)


def device_blocks(taken, rank=0):
    return set(unpack_hashes(taken.ranks[rank].device))


async def frames(client, epoch, since):
    """The stream's frames, one by one."""
    waiting = b""
    async with client.stream("GET", "/v1/kv/stream", params={"epoch": epoch, "since": since}) as answer:
        assert answer.status_code == 200
        async for data in answer.aiter_raw():
            waiting += data
            while len(waiting) >= 4 and len(waiting) >= 4 + int.from_bytes(waiting[:4], "big"):
                size = int.from_bytes(waiting[:4], "big")
                yield msgspec.msgpack.decode(waiting[4 : 4 + size], type=KvFrame)
                waiting = waiting[4 + size :]


async def test_snapshot_and_stream_give_all_blocks_of_the_engine():
    engine = KvEngine()
    for event in chain(3):
        engine.batches.append(msgspec.msgpack.encode([0.0, [event], None]))
    async with serving_ledger(engine) as (client, _agent):
        taken = await snapshot(client)
        assert (taken.base_model, taken.block_size, taken.hashing, taken.is_whole) == ("m", 2, 1, True)
        assert taken.epoch.startswith("boot.")
        assert device_blocks(taken) == set(ours(range(6)))
        known = device_blocks(taken)
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            first = await anext(stream)
            assert (first.seq, first.changes) == (taken.seq, ())  # a heartbeat at once
            await engine.publish(*chain(5, 3), removed(1), ts=time.time())
            while known != set(ours(range(10))[1:]):
                frame = await anext(stream)
                for change in frame.changes:
                    known -= set(unpack_hashes(change.dropped))
                    known |= set(unpack_hashes(change.added))
            assert time.time() - frame.at < patience(5)
            await engine.publish(CLEARED, stored([9], [50, 51]))
            frame = await anext(stream)
            assert frame.cleared == (0,)
            assert [unpack_hashes(change.added) for change in frame.changes] == [ours([50, 51])]
        assert device_blocks(await snapshot(client)) == set(ours([50, 51]))


async def test_block_added_and_dropped_within_a_frame_is_not_sent():
    engine = KvEngine()
    async with serving_ledger(engine) as (client, _agent):
        taken = await snapshot(client)
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            await anext(stream)
            await engine.publish(stored([1], [1, 2]), stored([2], [3, 4]), removed(1))
            frame = await anext(stream)
            while not frame.changes:
                frame = await anext(stream)
            assert [unpack_hashes(c.added) + unpack_hashes(c.dropped) for c in frame.changes] == [ours([3, 4])]


async def test_stream_sends_heartbeats_without_changes():
    async with serving_ledger(KvEngine()) as (client, _agent):
        taken = await snapshot(client)
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            assert [(await anext(stream)).seq for _ in range(2)] == [taken.seq] * 2


@pytest.mark.parametrize(("epoch", "since"), [("another", 0), (None, 99), (None, 0)])
async def test_position_outside_of_the_ring_is_gone(epoch, since):
    engine = KvEngine()
    async with serving_ledger(engine, ring_bytes=1) as (client, agent):
        for number in range(3):
            await engine.publish(stored([number], [number, 0]))
            await until(lambda number=number: agent.ledgers.seq > number)
        answer = await client.get("/v1/kv/stream", params={"epoch": epoch or agent.ledgers.epoch, "since": since})
        assert (answer.status_code, code(answer)) == (410, "events_gone")


async def test_reader_that_does_not_read_is_cut_off():
    engine = KvEngine()
    async with serving_ledger(engine, send_buffer_bytes=4096, ring_bytes=200_000) as (client, agent):
        taken = await snapshot(client)
        params = {"epoch": taken.epoch, "since": taken.seq}
        async with client.stream("GET", "/v1/kv/stream", params=params) as answer:
            received = answer.aiter_raw()
            size = len(await anext(received))
            for number in range(20):
                # 20,000 blocks of a prompt of its own: 160 kB a frame, 3 MB in all; these sockets buffer less.
                names = [number * 20_000 + i for i in range(20_000)]
                seq = agent.ledgers.seq
                await engine.publish(stored(names, [number] * 40_000))
                await until(lambda seq=seq: agent.ledgers.seq > seq)
                assert agent.ledgers.kept_bytes <= 200_000
            async for data in received:
                size += len(data)
            assert agent.metrics.registry.get_sample_value("lorafleet_workers_kv_readers_dropped_total") == 1
        assert size < 20 * 160_000
        assert device_blocks(await snapshot(client)) == set(agent.ledgers.ranks[0].ledger.blocks("device"))


async def test_lost_events_make_the_ledger_incomplete_for_good():
    engine = KvEngine()
    async with serving_ledger(engine) as (client, agent):
        while not agent.ledgers.seq:
            await engine.publish(stored([1], [1, 2]))
            await asyncio.sleep(0.05)
        taken = await snapshot(client)
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            await anext(stream)
            for _ in range(3):
                await engine.publish(stored([2], [3, 4]), lost=True)
            engine.kept_from = len(engine.batches)
            await engine.publish(stored([3], [5, 6]))
            frame = await anext(stream)
            while frame.is_whole:
                frame = await anext(stream)
        later = await snapshot(client)
        assert not later.is_whole
        assert device_blocks(later) == {*ours([1, 2]), *ours([5, 6])}


@pytest.mark.parametrize(
    "payload",
    [b"\xc1", msgspec.msgpack.encode([0.0, [removed(1) | {"medium": 7}], None])],
    ids=["no batch", "a removal"],
)
async def test_unreadable_event_makes_the_ledger_incomplete(payload):
    engine = KvEngine()
    engine.batches += [msgspec.msgpack.encode([0.0, [stored([1], [1, 2])], None]), payload]
    async with serving_ledger(engine) as (client, _):
        taken = await snapshot(client)
        assert not taken.is_whole
        assert device_blocks(taken) == set(ours([1, 2]))


async def test_forgotten_blocks_of_an_adapter_are_sent_at_once():
    engine = KvEngine()
    engine.batches.append(msgspec.msgpack.encode([0.0, [stored([1], [1, 2], lora_name="sql@1")], None]))
    async with serving_ledger(engine, dialect="sglang") as (client, agent):
        taken = await snapshot(client)
        assert device_blocks(taken) == set(ours([1, 2], name="sql@1"))
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            await anext(stream)
            agent.ledgers.forget_adapter("sql@1")
            frame = await anext(stream)
            assert frame.seq == taken.seq + 1
            assert set(unpack_hashes(frame.changes[0].dropped)) == set(ours([1, 2], name="sql@1"))


async def test_ranks_and_tiers_are_separate():
    engines = KvEngine("kv"), KvEngine("kv")
    batch = [stored([1], [1, 2]), stored([1], [], block_size=0, medium="CPU"), removed(1)]
    engines[1].batches.append(msgspec.msgpack.encode([0.0, batch, 1]))
    async with serving_ledger(*engines) as (client, _agent):
        taken = await snapshot(client)
        assert [rank.rank for rank in taken.ranks] == [0, 1]
        assert [(rank.device, unpack_hashes(rank.host)) for rank in taken.ranks] == [(b"", []), (b"", ours([1, 2]))]


async def test_snapshot_of_16000_blocks_takes_less_than_a_second():
    engine = KvEngine()
    for start in range(0, 16_000, 100):
        events = [stored([i], [i, i + 1]) for i in range(start, start + 100)]
        engine.batches.append(msgspec.msgpack.encode([0.0, events, None]))
    async with serving_ledger(engine) as (client, _agent):
        began = time.perf_counter()
        taken = await snapshot(client)
        assert len(device_blocks(taken)) == 16_000
        assert time.perf_counter() - began < patience(1)


# --- a real agent around a real (sim) engine -------------------------------------------------------------------------


async def complete(metadata: Metadata, prompt: list[int], model="tiny-qwen"):
    async with httpx.AsyncClient(timeout=patience(10)) as client:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = await client.post(f"{metadata.transport.engine_url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def wait_for_blocks(client, expected, *, within_s=10.0):
    async with within(within_s):
        while not expected <= device_blocks(await snapshot(client)):
            await asyncio.sleep(0.02)


@pytest.mark.fleet
async def test_agent_serves_blocks_of_prompts_and_a_new_epoch_after_restart(worker):
    async with worker.inside() as client:
        metadata = await metadata_of(client)
        assert metadata.transport.kv_ledger == 1
        block_size = metadata.model.runtime_config.block_size
        prompt = list(range(100, 100 + 4 * block_size))
        loaded = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()["engine_name"]
        expected = set()
        for name in ("", loaded):
            await complete(metadata, prompt, name or "tiny-qwen")
            root = root_hash(metadata.model.base_model, name)
            expected |= set(block_hashes(prompt, block_size=block_size, root=root))
        await wait_for_blocks(client, expected)
        before = await snapshot(client)
        assert before.epoch.startswith(metadata.engine_boot_id)
        page = (await client.get("/metrics")).text
        assert 'lorafleet_workers_kv_events_total{type="BlockStored"}' in page
        assert "lorafleet_workers_kv_rejected_total{" not in page
        os.kill(worker.engine_pid, signal.SIGKILL)

        async def of_the_next_engine() -> KvSnapshot | None:
            """The snapshot; None while there is none, or still that of before."""
            answer = await client.get("/v1/kv/snapshot")
            found = SNAPSHOT.decode(answer.content) if answer.is_success else None
            return None if found is None or found.epoch == before.epoch else found

        after = await until(of_the_next_engine, within_s=40, what="the next engine has a ledger")
        assert after.epoch.split(".")[0] not in {before.epoch.split(".")[0], ""}
        assert device_blocks(after).isdisjoint(expected)
        gone = await client.get("/v1/kv/stream", params={"epoch": before.epoch, "since": before.seq})
        assert (gone.status_code, code(gone)) == (410, "events_gone")


@pytest.mark.fleet
async def test_open_stream_does_not_delay_a_stopping_agent(worker):
    async with worker.running("--stop-grace-s", "600") as client:
        taken = await snapshot(client)
        async with contextlib.aclosing(frames(client, taken.epoch, taken.seq)) as stream:
            await anext(stream)
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(worker.process.wait(), patience(20))
