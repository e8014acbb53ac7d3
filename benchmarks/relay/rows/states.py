"""Rows of the CPU that a router takes while requests wait, with many replicas or adapters, or at rest; and memory."""

import asyncio
from dataclasses import replace
from statistics import median

from benchmarks.relay.bench import RelayBench
from benchmarks.relay.client import LoadClient
from benchmarks.relay.contenders import CONTENDERS, EXACT, SGLANG, Running, Stage, queueing_peer
from benchmarks.relay.fleet import Spec
from benchmarks.relay.machine import resident_mb
from benchmarks.relay.prompts import long_seen, of_length, of_script, short, short_new
from benchmarks.relay.rows.scene import LONG_CONNECTIONS, SHORT_CONNECTIONS, RunningContenders, compared, of_ours
from benchmarks.report import ReportRow
from benchmarks.row_runner import RowFailed

# --- waiting ----------------------------------------------------------------------------------------------------------

_WAITING_CLIENTS, _WAITING_ENGINES = 64, 8
# A prompt of 1 KB takes an engine this long, and the router gives it one such prompt ahead: some 16 are at the engines.
_PREFILL_S = 0.02


async def queue_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """Most of 64 requests wait in the router; beside the same requests when all are sent at once."""
    bench, ask = scene.bench, short_new()
    tokens = bench.counted(ask).tokens
    spec = Spec(_WAITING_ENGINES, prefill_tokens_per_s=tokens / _PREFILL_S, answer_after_s=_PREFILL_S)
    with (
        bench.fleet(spec) as stage,
        bench.ours(stage, "--late-binding-s", str(_PREFILL_S)) as waiting,
        bench.ours(stage, "--late-binding-s", "1000000", name="all sent at once") as at_once,
        scene.started(queueing_peer(_WAITING_ENGINES * 2), stage=stage) as peers,
    ):
        waits = await _waits(bench, waiting[0])
        if not waits and bench.size.rounds > 1:
            raise RowFailed("no request waited in the router: the row measures something else")
        found = scene.medians(await bench.costs([*waiting, *at_once, *peers], ask, _WAITING_CLIENTS))
    sent_at_once_us = {name: found.pop(name) for name in [one.name for one in at_once]}
    what = f"{_WAITING_CLIENTS} requests of which most wait for room"
    rows += compared(what, found, "us", beside=SGLANG, goal=2.5)
    over = f"{what}, over the same sent at once"
    for router, other in zip(waiting, at_once, strict=True):
        beside = "sent at once, us", sent_at_once_us[other.name]
        rows.append(of_ours(over, router.name, found[router.name], "us", beside, 1.3))
    rows.append(ReportRow(f"{what}: waiting at a moment, middle", waits, "requests"))


async def _waits(bench: RelayBench, running: Running) -> float:
    """The number of requests that wait in the router while every client has sent one: the median of several looks."""
    client = LoadClient(running.name, running.port, running.tls)
    requests, looks = bench.requests(short_new(), running), []
    total = _WAITING_CLIENTS * 8
    run = asyncio.create_task(client.run(requests, total=total, connections=_WAITING_CLIENTS))
    while not run.done():
        await asyncio.wait([run], timeout=0.05)
        looks.append(await bench.waiting(running))
    client.close()
    run.result()
    return median(looks)


# --- many of something, and nothing to do -----------------------------------------------------------------------------


async def growth_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """The short chat again, in front of small and large fleets that take turns."""
    bench = scene.bench
    with bench.fleet(Spec(1)) as few, bench.fleet(Spec(64)) as many:
        rows.append(await _growth(bench, "64 replicas", "1 replica", (few, 10), (many, 10)))
    with bench.fleet(Spec(8)) as few, bench.fleet(Spec(8, adapters=10_000, resident=64)) as many:
        rows.append(await _growth(bench, "10,000 adapters, 8 replicas", "10 adapters", (few, 10), (many, 64)))


async def _growth(
    bench: RelayBench, what: str, beside: str, few: tuple[Stage, int], many: tuple[Stage, int]
) -> ReportRow:
    with (
        bench.router(few[0], "few", adapters=few[1]) as small,
        bench.router(many[0], "many", adapters=many[1]) as large,
    ):
        found = await bench.costs([small, large], short(), SHORT_CONNECTIONS)
    few_us, many_us = median(found["few"]), bench.middle(found["many"])
    return ReportRow(f"short chat, {what}", many_us, "us", None, f"{beside}, us", few_us, 1.3)


async def idle_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """CPU of routers that nobody asks, and as a multiple of what a short chat costs: a second, for each replica."""
    bench, replicas = scene.bench, 64
    able = [one for one in CONTENDERS if one.name in {peer.name for peer in scene.peers}]
    with (
        bench.fleet(Spec(replicas)) as stage,
        bench.ours(stage) as ours,
        scene.started(*able, stage=stage) as peers,
    ):
        chat_us = scene.medians(await bench.costs(ours[:1], short(), SHORT_CONNECTIONS))[EXACT]
        rounds = [await bench.idle([*ours, *peers]) for _ in range(bench.size.rounds)]
    found = scene.medians({name: [one[name] * 1e3 for one in rounds] for name in rounds[0]})
    what = f"with nothing to do, {replicas} replicas"
    rows += compared(what, found, "ms a second", beside=SGLANG, goal=None)
    each_us = found[EXACT] * 1e3 / replicas
    rows.append(ReportRow(f"{what}: a second of each replica", each_us, "us", None, "a short chat, us", chat_us, 1.3))


# --- memory -----------------------------------------------------------------------------------------------------------


# For all of them: a large prompt in Chinese takes the library most of a second on a busy machine.
_LARGE_PROMPTS_S = 600.0


async def memory_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """Idle: nothing was asked yet. Loaded: blocks are known and requests were answered. Then large prompts."""
    for ours in scene.ours:
        rows += await _of_version(scene.bench, ours.name)
    for peer in scene.peers:
        before_mb = resident_mb(peer.pid)
        rows.append(ReportRow("resident memory, as this run left it", before_mb, "MB", contender=peer.name))
        rows += await _after_large_prompts(scene.bench, peer, before_mb)


async def _of_version(bench: RelayBench, name: str) -> list[ReportRow]:
    """The memory of new routers of this version, or of the one before."""
    blocks, is_before = bench.size.blocks, name != EXACT
    with bench.fleet(Spec(2)) as stage, bench.router(stage, f"idle {name}", is_before=is_before) as running:
        idle_mb = resident_mb(running.pid)
    with (
        bench.fleet(Spec(8, blocks=blocks)) as stage,
        bench.router(stage, f"loaded {name}", is_before=is_before) as running,
    ):
        for ask in (short(), long_seen()):
            await bench.costs([running], ask, LONG_CONNECTIONS)
        loaded_mb = resident_mb(running.pid)
        large = await _after_large_prompts(bench, running, loaded_mb)
    found = [
        ReportRow("resident memory, idle", idle_mb, "MB", 90),
        ReportRow(f"resident memory, loaded, {blocks:,} blocks known", loaded_mb, "MB", 130),
        *large,
    ]
    return [replace(row, contender=name, reach=None, reach_ratio=None) if is_before else row for row in found]


async def _after_large_prompts(bench: RelayBench, running: Running, before_mb: float) -> list[ReportRow]:
    """The most while the largest prompts come, and what is kept of it when all are answered.

    English and Chinese in turn, since what a tokenizer keeps differs.
    """
    longest_kb, count = bench.size.lengths_kb[-1], bench.size.large_prompts
    kinds = of_length(longest_kb, is_new=True), of_script("Chinese", longest_kb * 1000 // 3)
    client, peak_mb = LoadClient(running.name, running.port, running.tls), 0.0
    for ask in kinds:
        requests = bench.requests(ask, running)
        run = asyncio.create_task(
            client.run(requests, total=count // 2, connections=LONG_CONNECTIONS, most_s=_LARGE_PROMPTS_S)
        )
        peak_mb = max(peak_mb, await bench.peak_mb(running, run))
        run.result()
    client.close()
    await bench.settle()
    what = f"resident memory, {count} new prompts of {longest_kb} KB"
    is_held = running.kind == "ours"
    name = "" if is_held else running.name
    return [
        ReportRow(
            f"{what}, {when}", value, "MB", None, "before, MB", before_mb, goal if is_held else None, contender=name
        )
        for when, value, goal in (("most", peak_mb, 2.5), ("kept", resident_mb(running.pid), 1.5))
    ]
