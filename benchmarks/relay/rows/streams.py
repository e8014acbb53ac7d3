"""Streams and latencies: chunks, first chunks, one request at a time, thousands at once."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.relay.client import LoadClient, first_chunks_s, new_connections_s
from benchmarks.relay.contenders import EXACT, RELAY, SGLANG, VLLM, Running
from benchmarks.relay.machine import cpu_ns
from benchmarks.relay.prompts import PACE_PER_S, ChatKind, short
from benchmarks.relay.rows.scene import RunningContenders, compared
from benchmarks.report import ReportRow

_AT_ONCE = 64


async def chunk_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """The slope between short and long streams: the request's own cost is not in it."""
    bench, size = scene.bench, scene.bench.size
    streams = size.streams // 8
    burst = await bench.slopes(scene.routers, short(8), short(520), streams, streams * 4)
    rows += compared("streamed chunk, burst", scene.medians(burst), "us", beside=SGLANG, goal=1.0)
    for count, longer in ((size.streams, 42), (size.streams // 4, 82)):
        paced = await bench.slopes(scene.routers, _paced(2), _paced(longer), count, count)
        rows += compared(f"streamed chunk, paced, {count} streams", scene.medians(paced), "us", beside=SGLANG, goal=1.2)


async def first_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """Streams that begin at once, by a client that is none of ours."""
    bench = scene.bench

    async def first_chunk_times(_client: LoadClient, running: Running) -> list[float]:
        return await first_chunks_s(running.port, bench.requests(_paced(8), running), streams=_AT_ONCE, turns=4)

    found = await bench.latencies(_with_direct(scene), first_chunk_times)
    what = f"first chunk p50 over direct, {_AT_ONCE} paced streams, kept connections, aiohttp"
    rows += compared(what, _over_direct(scene, found, 0.5), "ms", beside=VLLM, goal=1.0)
    rows.append(ReportRow("first chunk p50, direct", _middle_ms(found["direct"]), "ms"))


async def burst_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """Streams that begin at once, each on a connection of its own: from the connect to the first event."""
    bench = scene.bench

    async def first_event_times(_client: LoadClient, running: Running) -> list[float]:
        requests, found = bench.requests(_paced(8), running), []
        for turn in range(5):
            taken = await new_connections_s(running.port, requests, streams=_AT_ONCE)
            found += taken if turn else []
        return found

    found = await bench.latencies(_with_direct(scene), first_event_times)
    for share, said in ((0.5, "p50"), (0.99, "p99")):
        what = f"first chunk {said} over direct, {_AT_ONCE} paced streams, new connections"
        rows += compared(what, _over_direct(scene, found, share), "ms", beside=VLLM, goal=1.0)
    rows.append(ReportRow("first chunk p50, new connections, direct", _middle_ms(found["direct"]), "ms"))


async def latency_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """One request at a time."""
    bench = scene.bench

    async def answer_times(client: LoadClient, running: Running) -> list[float]:
        requests = bench.requests(short(), running)
        return (await client.run(requests, total=bench.size.calls, connections=1)).latencies_s

    found = await bench.latencies(_with_direct(scene), answer_times)
    p50, p99 = (_over_direct(scene, found, share) for share in (0.5, 0.99))
    rows += compared("added latency, 1 connection, p50", p50, "ms", beside=SGLANG, goal=1.75)
    rows += compared("added latency, 1 connection, p99", p99, "ms", beside=SGLANG, goal=2.0)
    rows.append(ReportRow("latency, 1 connection, p50, direct", _middle_ms(found["direct"]), "ms"))


async def open_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """Thousands of streams at once: whether all are answered in whole, when, and what memory that takes."""
    bench, size = scene.bench, scene.bench.size
    what = f"{size.open_streams:,} open streams, {PACE_PER_S} chunks/s each"
    ideal_s = (size.open_chunks - 1) / PACE_PER_S
    for running in scene.routers:
        client = LoadClient(running.name, running.port, running.tls)
        before = cpu_ns(running.pid)
        run = asyncio.create_task(
            client.attempt(
                bench.requests(_paced(size.open_chunks), running),
                total=size.open_streams,
                connections=size.open_streams,
                over_s=size.open_streams / 1000,
            )
        )
        peak_mb = await bench.peak_mb(running, run)
        outcome = run.result()
        client.close()
        cpu_share = (cpu_ns(running.pid) - before) / 1e9 / outcome.wall_s
        is_held = running.name == EXACT
        if outcome.failures:
            print(f"{running.name}, {what}: {outcome.failures[0]}")
        figures = [
            ReportRow(f"{what}, not answered in whole", len(outcome.failures), "streams", 0 if is_held else None),
            ReportRow(f"{what}, most resident memory", peak_mb, "MB", 250 if is_held else None),
            ReportRow(f"{what}, share of the core", cpu_share * 100, "%"),
        ]
        if outcome.latencies_s:
            taken_s = median(outcome.latencies_s)
            figures.append(ReportRow(f"{what}, a stream's time", taken_s, "s", None, "engine's pace, s", ideal_s))
        rows += [replace(row, contender="" if is_held else running.name) for row in figures]


def _with_direct(scene: RunningContenders) -> list[Running]:
    return [one for one in scene.runnings if not one.name.startswith(RELAY)]


def _over_direct(scene: RunningContenders, found: Mapping[str, list[list[float]]], share: float) -> dict[str, float]:
    """Milliseconds over the engine asked directly, at this quantile, in the same round."""

    def at(times: Sequence[float]) -> float:
        return times[int(len(times) * share)] * 1e3

    over = {
        name: [at(times) - at(direct) for times, direct in zip(rounds, found["direct"], strict=True)]
        for name, rounds in found.items()
        if name != "direct"
    }
    return scene.medians(over)


def _middle_ms(rounds: Sequence[Sequence[float]]) -> float:
    """Median of the rounds' medians."""
    return median(times[len(times) // 2] for times in rounds) * 1e3


def _paced(chunks: int) -> ChatKind:
    return short(chunks, is_paced=True)
