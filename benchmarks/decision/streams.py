"""Decisions while 64 replicas stream their KV events: requests, engines or agents, and router in three processes.

A request is a datagram with the time it was sent, so a decision's time is what a client would see of it: the wait for
the event loop, resolve, hash, match, cost, pick. The router's feeds are the real ones, over real sockets.

python -m benchmarks.decision.streams engines|agents|requests ... is one of the other processes.
"""

import asyncio
import json
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from socket import AF_INET, SOCK_DGRAM, socket
from statistics import median

import msgspec
import zmq
from aiohttp import web

from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow
from benchmarks.scenes import (
    BASE,
    BLOCK_SIZE,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    a_fleet,
    decide,
    engine_name,
    lora_id,
    some_tokens,
    worker_id,
)
from lorafleet.identity import KV_HASHING, block_hashes, root_hash
from router.core.scheduler import Scheduler
from router.http.engine_pool import EnginePool
from router.kv.feed import KvSource
from router.kv.feeds import KvFeeds
from router.request.stages import match
from router.telemetry.metrics import RouterMetrics
from workers.wire import KvChange, KvFrame, KvRank, KvSnapshot, pack_hashes

_REPLICAS, _ADAPTERS, _PROMPTS = 64, 1_000, 64
_EVENTS_PER_S, _TICK_S, _REQUESTS_PER_S = 30_000, 0.02, 200
# Blocks of which each replica stores one and evicts another, in turn, for as long as it is asked to.
_RING = 1_024


def streaming(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of what requests see while events stream, and while none do; both ways that events can come."""
    return asyncio.run(_rows(size.stream_s, size.stream_turns))


async def _rows(seconds: float, turns: int) -> list[ReportRow]:
    found = []
    for kind, name in (("agents", "agents' changes"), ("engines", "engines' own events")):
        async with _process(kind) as feeding, _router(json.loads(await _line(feeding)), kind) as router:
            quiet, busy = [], []
            for _ in range(turns):
                quiet.append(await router.measured(seconds))
                _tell(feeding, "on")
                await router.filled()
                busy.append(await router.measured(seconds))
                _tell(feeding, "off")
                await router.drained()
        pairs = list(zip(quiet, busy, strict=True))
        share = median(b.core_share - q.core_share for q, b in pairs)
        taken = median(b.blocks_per_s for b in busy)
        where = f"while 64 replicas stream {_EVENTS_PER_S:,} one-block events/s ({name})"
        for percent, goal in ((50, 1.5), (99, 2.0)):
            at_rest = median(q.at(percent) for q in quiet)
            streaming = median(b.at(percent) for b in busy)
            found.append(ReportRow(f"decision p{percent} {where}", streaming, "us", None, "quiet, us", at_rest, goal))
        found += [
            ReportRow(f"events taken in {where}", taken, "events/s"),
            ReportRow(f"share of a core that they take, {name}", 100 * max(share, 1e-4), "%"),
        ]
    return found


@dataclass(frozen=True, slots=True)
class _Spell:
    """Some seconds of requests: microseconds from sending each to its decision, CPU time, events that came."""

    times_us: list[float]
    core_share: float
    blocks_per_s: float

    def at(self, percent: int) -> float:
        return self.times_us[len(self.times_us) * percent // 100]


class _Router(asyncio.DatagramProtocol):
    """A router without its clients' side: feeds, mind, and a decision for every datagram."""

    def __init__(self, feeds: KvFeeds) -> None:
        self._feeds = feeds
        self._fleet = a_fleet(_REPLICAS, _ADAPTERS)
        self._scheduler = Scheduler(roster=self._fleet.roster, match=partial(match, feeds), rng=Random(1))
        rng = Random(3)
        self._prompts = [some_tokens(rng, PROMPT_TOKENS) for _ in range(_PROMPTS)]
        self._asked = 0
        self._times_us: list[float] = []
        self._port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002  (the protocol's signature)
        number = self._asked % _PROMPTS
        self._asked += 1
        decide(self._fleet, self._scheduler, lora_id(number), self._prompts[number])
        self._times_us.append((time.monotonic_ns() - int.from_bytes(data, "big")) / 1e3)

    async def measured(self, seconds: float) -> _Spell:
        """What requests see for so long."""
        self._times_us = []
        async with _process("requests", str(self._port), str(seconds)) as asking:
            await _line(asking)
            began, cpu, changed = time.monotonic(), time.process_time(), self.changed_blocks()
            await asking.wait()
        wall = time.monotonic() - began
        rate = (self.changed_blocks() - changed) / wall
        return _Spell(sorted(self._times_us), (time.process_time() - cpu) / wall, rate)

    async def filled(self) -> None:
        """Wait until every feed has begun, which empties its replica; then give each a share of each prompt."""
        index = self._feeds.index(BASE, BLOCK_SIZE)
        while len([blocks for blocks in index.block_counts().values() if blocks]) < _REPLICAS:  # noqa: ASYNC110  (polls)
            await asyncio.sleep(0.05)
        for number, tokens in enumerate(self._prompts):
            root = root_hash(BASE, engine_name(number))
            hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=root)
            for i in range(_REPLICAS):
                share = hashes[: PROMPT_BLOCKS * ((i + number) % _REPLICAS) // _REPLICAS]
                index.add(worker_id(i), share, is_chain=True)

    async def drained(self) -> None:
        """Wait until nothing more comes."""
        before = -1.0
        while before != (before := self.changed_blocks()):  # noqa: ASYNC110  (polls)
            await asyncio.sleep(0.3)

    def changed_blocks(self) -> float:
        """Blocks that feeds have added and dropped so far."""
        self._feeds.maintain()
        (metric,) = self._feeds.metrics.kv_changed_blocks.collect()
        return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


@asynccontextmanager
async def _router(addresses: list[str], kind: str) -> AsyncIterator[_Router]:
    pool = EnginePool(connect_s=5.0)
    feeds = KvFeeds(RouterMetrics(), tail_poll_s=60.0, pool=pool)
    router = _Router(feeds)
    for number, address in enumerate(addresses):
        where = {"events": (address,)} if kind == "engines" else {"agent_url": address, "ledger": KV_HASHING}
        feeds.follow(KvSource(worker_id(number), BASE, BLOCK_SIZE, engine_boot_id="1", **where))
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: router, local_addr=("127.0.0.1", 0))
    await asyncio.sleep(1.0)  # PUB says nothing about who is there: a second for 64 subscriptions on loopback
    yield router
    transport.close()
    await feeds.close()
    await pool.close()


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "benchmarks.decision.streams", *arguments, stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


def _tell(process: Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word.encode() + b"\n")


# --- the other processes ----------------------------------------------------------------------------------------------


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "requests":
        requests(int(rest[0]), float(rest[1]))
    else:
        asyncio.run(engines() if kind == "engines" else agents())


def requests(port: int, seconds: float) -> None:
    """Poisson arrivals of datagrams that say when they were sent."""
    print("ready", flush=True)
    rng, until = Random(), time.monotonic() + seconds
    with socket(AF_INET, SOCK_DGRAM) as sending:
        while time.monotonic() < until:
            time.sleep(rng.expovariate(_REQUESTS_PER_S))
            sending.sendto(time.monotonic_ns().to_bytes(8, "big"), ("127.0.0.1", port))


async def engines() -> None:
    """64 engines' event sockets; each step of 20 ms tells what it stored and removed in one message."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(_REPLICAS)]
    ports = [publisher.bind_to_random_port("tcp://127.0.0.1") for publisher in sockets]
    rings = [_Ring(number) for number in range(_REPLICAS)]
    seqs = [0] * _REPLICAS

    def step(number: int, events: int) -> None:
        batch = [time.time(), [rings[number].event() for _ in range(events)], 0]
        sockets[number].send_multipart([b"", seqs[number].to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
        seqs[number] += 1

    print(json.dumps([f"tcp://127.0.0.1:{port}" for port in ports]), flush=True)
    await _steps(step)


async def agents() -> None:
    """64 agents' snapshots and streams of changes, on one port."""
    rings = [_Ring(number) for number in range(_REPLICAS)]
    seqs = [0] * _REPLICAS
    streams: dict[int, web.StreamResponse] = {}

    async def snapshot(_: web.Request) -> web.Response:
        taken = KvSnapshot("1.1", 0, BASE, BLOCK_SIZE, (KvRank(0),))
        return web.Response(body=msgspec.msgpack.encode(taken))

    async def stream(request: web.Request) -> web.StreamResponse:
        number = int(request.match_info["number"])
        streams[number] = answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(_framed(KvFrame(seqs[number], time.time())))
            await asyncio.sleep(1.0)

    waiting: set[asyncio.Task[None]] = set()

    def step(number: int, events: int) -> None:
        seqs[number] += 1
        frame = _framed(KvFrame(seqs[number], time.time(), (), (rings[number].change(events),)))
        writing = asyncio.ensure_future(streams[number].write(frame))
        waiting.add(writing)
        writing.add_done_callback(waiting.discard)

    app = web.Application()
    app.add_routes([web.get("/{number}/v1/kv/snapshot", snapshot), web.get("/{number}/v1/kv/stream", stream)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps([f"http://127.0.0.1:{port}/{number}" for number in range(_REPLICAS)]), flush=True)
    await _steps(step)


async def _steps(step: Callable[[int, int], None]) -> None:
    """Every 20 ms a step of each replica while `on`, spread evenly, with as many events as make the rate."""
    is_on = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            (is_on.set if line.strip() == "on" else is_on.clear)()

    threading.Thread(target=listen, daemon=True).start()
    number, owed, at = 0, 0.0, time.monotonic()
    while True:
        at = max(at + _TICK_S / _REPLICAS, time.monotonic() - 1.0)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        if is_on.is_set():
            owed += _EVENTS_PER_S / _REPLICAS * _TICK_S
            step(number, int(owed))
            owed -= int(owed)
            number = (number + 1) % _REPLICAS


class _Ring:
    """One engine's cache: it stores a block and evicts the one that was stored half a ring ago, in turn."""

    def __init__(self, number: int) -> None:
        rng = Random(number)
        self._names = [rng.getrandbits(64) for _ in range(_RING)]
        self._tokens = [some_tokens(rng, BLOCK_SIZE).tolist() for _ in range(_RING)]
        self._at = 0

    def _next(self) -> tuple[int, bool]:
        """The next block, and whether it is stored."""
        turn, is_removal = divmod(self._at, 2)
        self._at += 1
        if is_removal and turn < _RING // 2:
            # Nothing to evict yet.
            return self._next()
        return (turn - is_removal * _RING // 2) % _RING, not is_removal

    def event(self) -> dict[str, object]:
        number, is_stored = self._next()
        if not is_stored:
            return {"type": "BlockRemoved", "block_hashes": [self._names[number]], "medium": "GPU", "group_idx": 0}
        return {
            "type": "BlockStored",
            "block_hashes": [self._names[number]],
            "parent_block_hash": None,
            "token_ids": self._tokens[number],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
        }

    def change(self, events: int) -> KvChange:
        came: list[int] = []
        went: list[int] = []
        for _ in range(events):
            number, is_stored = self._next()
            (came if is_stored else went).append(self._names[number])
        return KvChange(0, "device", pack_hashes(came), pack_hashes(went))


def _framed(frame: KvFrame) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "big") + data


if __name__ == "__main__":
    main()
