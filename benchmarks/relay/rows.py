"""The rows of the table: what each measures, what we hold ourselves to, and the peers' best."""

import asyncio
import json
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tokenizers import Tokenizer

from benchmarks.relay.bench import RelayBench
from benchmarks.relay.client import LoadClient, first_chunks_s
from benchmarks.relay.contenders import EXACT, RELAY, Running, Stage
from benchmarks.relay.machine import cpu_ns, resident_mb
from benchmarks.relay.prompts import PACE_PER_S, ChatKind, long_new, long_seen, short, short_new
from benchmarks.report import ReportRow

# One core of a 2-core AMD EPYC, medians; what the rows fall back to where no peer is installed.
_RECORDED = {
    "short": ("sglang-router 0.3.2", 74.0),
    "long": ("sglang-router 0.3.2", 128.0),
    "new": ("Dynamo 1.6.1, 5k tokens", 2600.0),
    "relay": ("nginx", 22.0),
    "burst": ("sglang-router 0.3.2", 5.9),
    "paced": ("sglang-router 0.3.2", 25.0),
    "p50": ("sglang-router 0.3.2", 0.17),
    "first": ("sglang-router 0.3.2", 5.6),
    "rss": ("sglang-router 0.3.2", 96.0),
}
_SHORT_CONNECTIONS, _LONG_CONNECTIONS = 32, 16


@dataclass(frozen=True, slots=True)
class RunningContenders:
    """Contenders that run, in front of two engines, and the bench they are measured on."""

    bench: RelayBench
    stage: Stage
    runnings: tuple[Running, ...]

    @property
    def routers(self) -> list[Running]:
        return [running for running in self.runnings if running.kind != "direct"]

    def named(self, *names: str) -> list[Running]:
        return [running for running in self.runnings if running.name in names]

    def but(self, *names: str) -> list[Running]:
        return [running for running in self.routers if running.name not in names]

    def medians(self, found: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {name: self.bench.middle(values) for name, values in found.items() if values}

    def compared(
        self, what: str, found: Mapping[str, float], unit: str, reach: float, recorded: str, *, ours: str = EXACT
    ) -> list[ReportRow]:
        """Our row beside the best peer's, then each other contender's own.

        Peers that route blindly are no yardstick for a router that looks into caches, and are for one that does not.
        """
        kinds = {running.name: running.kind for running in self.runnings}
        able = ("by cache", "blind") if ours == RELAY else ("by cache",)
        peers = {name: value for name, value in found.items() if kinds[name] in able}
        if peers:
            best = min(peers, key=peers.__getitem__)
            baseline: tuple[str | None, float | None] = best, peers[best]
        else:
            baseline = _recorded(recorded) if recorded else (None, None)
        rows = [ReportRow(what, found[ours], unit, reach, *baseline)] if ours in found else []
        said = re.sub(r" \(stretch .*?\)", "", what)
        return rows + [
            ReportRow(f"{said}: {name}", value, unit)
            for name, value in found.items()
            if kinds[name] in ("by cache", "blind")
        ]


# --- CPU of a request -------------------------------------------------------------------------------------------------


async def short_rows(scene: RunningContenders) -> list[ReportRow]:
    """Both of ours: with exact routing, and the relay alone."""
    bench = scene.bench
    found = scene.medians(await bench.costs(scene.routers, short(), _SHORT_CONNECTIONS))
    ours = {name: value for name, value in found.items() if name != RELAY}
    rows = scene.compared("short chat, ~1 KB (stretch 100)", ours, "us", 150, "short")
    if RELAY in found:
        alone = {name: value for name, value in found.items() if name != EXACT}
        what = "relay alone, round_robin, no tokenization, ~1 KB (stretch 25)"
        rows.append(scene.compared(what, alone, "us", 45, "relay", ours=RELAY)[0])
    new = scene.medians(await bench.costs(scene.named(EXACT), short_new(), _SHORT_CONNECTIONS))
    rows += [ReportRow("short chat, ~1 KB, all of it new text", value, "us") for value in new.values()]
    idle = await bench.idle(scene.named(EXACT))
    return rows + [ReportRow("with nothing to do, 2 replicas", value * 1e3, "ms a second") for value in idle.values()]


async def long_rows(scene: RunningContenders) -> list[ReportRow]:
    found = scene.medians(await scene.bench.costs(scene.but(RELAY), long_seen(), _LONG_CONNECTIONS))
    return scene.compared("32 KB prompt, prefix seen before (stretch 200)", found, "us", 350, "long")


async def new_rows(scene: RunningContenders) -> list[ReportRow]:
    """A new prompt costs its encoding, which is looked at by itself, and little else."""
    bench, ours = scene.bench, scene.named(EXACT)
    if not ours:
        return []
    alone_us, tokenization_us = _tokenization_us(bench)
    rows = [
        ReportRow(
            "tokenization of a new 32 KB prompt",
            tokenization_us / alone_us,
            "x of encode_batch_fast",
            1.1,
            "encode_batch_fast alone, us",
            alone_us,
        )
    ]
    [found] = scene.medians(await bench.costs(ours, long_new(), _LONG_CONNECTIONS)).values()
    rows.append(ReportRow("32 KB prompt, new", found, "us", 1.1 * alone_us + 100, *_recorded("new")))
    lag = await _health_s(bench, ours[0], long_new())
    rest = await _health_s(bench, ours[0], None)
    rows.append(
        ReportRow(
            "event-loop lag, p99: /health beside 32 KB prompts", lag * 1e3, "ms", 5, "with nothing to do", rest * 1e3
        )
    )
    return rows


def _tokenization_us(bench: RelayBench) -> tuple[float, float]:
    """CPU microseconds of encode_batch_fast of a whole prompt, and of cutting it and joining its pieces' ids.

    Ours knows its words by then, as it does of texts in a language that it was asked in before.
    """
    whole = Tokenizer.from_file(str(bench.model_dir / "tokenizer.json"))
    alone, ours = [], []
    for number in range(bench.size.rounds * 20):
        text, special = bench.tokenizer.prompt_text(json.loads(long_new().numbered("m", 10**9 + number)))
        began = time.thread_time()
        [encoding] = whole.encode_batch_fast([text], add_special_tokens=special)
        middle = time.thread_time()
        ids = array("I")
        for piece in bench.tokenizer.pieces(text, add_special_tokens=special):
            quick = bench.tokenizer.quick_ids(piece, add_special_tokens=special)
            ids += bench.tokenizer.encode_pieces([piece], add_special_tokens=special)[0] if quick is None else quick
        ours.append(time.thread_time() - middle)
        alone.append(middle - began)
        assert ids.tolist() == encoding.ids, "cut into pieces, a prompt has other ids"
    return median(alone) * 1e6, median(ours) * 1e6


async def _health_s(bench: RelayBench, running: Running, beside: ChatKind | None) -> float:
    """p99 of GET /health; beside it two connections that always have a request under way, or nothing."""
    client, over = LoadClient(running.name, running.port), asyncio.Event()
    probing = asyncio.create_task(client.get("/health", every_s=0.005, until=over))
    began = time.perf_counter()
    while time.perf_counter() - began < bench.size.seconds * 2:
        if beside is None:
            await asyncio.sleep(0.1)
        else:
            await client.run(bench.requests(beside, running), total=20, connections=2)
    over.set()
    taken = sorted(await probing)
    client.close()
    return taken[len(taken) * 99 // 100]


# --- streams ----------------------------------------------------------------------------------------------------------


async def chunk_rows(scene: RunningContenders) -> list[ReportRow]:
    bench, size = scene.bench, scene.bench.size
    routers = scene.but(RELAY)
    streams = size.streams // 8
    burst = await bench.slopes(routers, short(8), short(520), streams, streams * 4)
    paced = await bench.slopes(routers, _paced(2), _paced(42), size.streams, size.streams)
    return [
        *scene.compared("streamed chunk, burst (stretch 4)", scene.medians(burst), "us", 6, "burst"),
        *scene.compared(
            f"streamed chunk, paced, {size.streams} streams (stretch 20)", scene.medians(paced), "us", 25, "paced"
        ),
    ]


async def first_rows(scene: RunningContenders) -> list[ReportRow]:
    """Streams that begin at once, by a client that is none of ours."""
    bench = scene.bench

    async def first_chunk_times(_client: LoadClient, running: Running) -> list[float]:
        return await first_chunks_s(running.port, bench.requests(_paced(8), running), streams=64, turns=4)

    found = await bench.latencies([r for r in scene.runnings if r.name != RELAY], first_chunk_times)
    what = "first chunk p50 over direct, 64 paced streams, aiohttp (stretch 1)"
    rows = scene.compared(what, _over_direct(scene, found, 0.5), "ms", 3, "first")
    return [*rows, ReportRow("first chunk p50, direct", median(t[len(t) // 2] for t in found["direct"]) * 1e3, "ms")]


async def latency_rows(scene: RunningContenders) -> list[ReportRow]:
    """One request at a time."""
    bench = scene.bench

    async def answer_times(client: LoadClient, running: Running) -> list[float]:
        requests = bench.requests(short(), running)
        return (await client.run(requests, total=bench.size.calls, connections=1)).latencies_s

    found = await bench.latencies([r for r in scene.runnings if r.name != RELAY], answer_times)
    p50, p99 = (_over_direct(scene, found, share) for share in (0.5, 0.99))
    return [
        *scene.compared("added latency, 1 connection, p50 (stretch 0.2)", p50, "ms", 0.3, "p50"),
        *scene.compared("added latency, 1 connection, p99 (stretch 1)", p99, "ms", 2, ""),
        ReportRow("latency, 1 connection, p50, direct", median(t[len(t) // 2] for t in found["direct"]) * 1e3, "ms"),
    ]


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


async def open_rows(scene: RunningContenders) -> list[ReportRow]:
    """Thousands of streams at once: whether all are answered in whole, when, and what memory that takes."""
    bench, size = scene.bench, scene.bench.size
    what = f"{size.open_streams:,} open streams, {PACE_PER_S} chunks/s each"
    ideal_s = (size.open_chunks - 1) / PACE_PER_S
    rows = []
    for running in scene.but(RELAY):
        client = LoadClient(running.name, running.port)
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
        is_ours = running.kind == "ours"
        name = "" if is_ours else f": {running.name}"
        if outcome.failures:
            print(f"{running.name}, {what}: {outcome.failures[0]}")
        rows += [
            ReportRow(f"{what}, not answered in whole{name}", len(outcome.failures), "streams", 0 if is_ours else None),
            ReportRow(f"{what}, most resident memory{name}", peak_mb, "MB", 250 if is_ours else None),
            ReportRow(f"{what}, share of the core{name}", cpu_share * 100, "%"),
        ]
        if outcome.latencies_s:
            taken_s = median(outcome.latencies_s)
            rows.append(ReportRow(f"{what}, a stream's time{name}", taken_s, "s", None, "the engine's pace", ideal_s))
    return rows


def _paced(chunks: int) -> ChatKind:
    return short(chunks, is_paced=True)


# --- memory and growth ------------------------------------------------------------------------------------------------


async def memory_rows(scene: RunningContenders) -> list[ReportRow]:
    """Idle: nothing was asked yet. Loaded: blocks are known and requests were answered."""
    bench, blocks = scene.bench, scene.bench.size.blocks
    rows = []
    with bench.fleet(2) as stage, bench.router(stage, "idle") as running:
        rows.append(ReportRow("resident memory, idle", resident_mb(running.pid), "MB", 90, *_recorded("rss")))
    with bench.fleet(8, blocks=blocks) as stage, bench.router(stage, "loaded") as running:
        for ask in (short(), long_seen()):
            await bench.costs([running], ask, _LONG_CONNECTIONS)
        loaded_mb = resident_mb(running.pid)
    rows.append(ReportRow(f"resident memory, loaded, {blocks:,} blocks known", loaded_mb, "MB", 130, *_recorded("rss")))
    peers = [running for running in scene.routers if running.kind != "ours"]
    return rows + [
        ReportRow(f"resident memory, as this run left it: {r.name}", resident_mb(r.pid), "MB") for r in peers
    ]


async def growth_rows(scene: RunningContenders) -> list[ReportRow]:
    """The short chat again, in front of small and large fleets that take turns."""
    bench = scene.bench
    rows = []
    with bench.fleet(1) as few, bench.fleet(64) as many:
        rows += await _growth(bench, "1 -> 64 replicas", (few, 10), (many, 10))
    with bench.fleet(8) as few, bench.fleet(8, adapters=10_000, resident=64) as many:
        rows += await _growth(bench, "10 -> 10,000 adapters, 8 replicas", (few, 10), (many, 64))
    return rows


async def _growth(bench: RelayBench, what: str, few: tuple[Stage, int], many: tuple[Stage, int]) -> list[ReportRow]:
    with (
        bench.router(few[0], "few", adapters=few[1]) as small,
        bench.router(many[0], "many", adapters=many[1]) as large,
    ):
        found = await bench.costs([small, large], short(), _SHORT_CONNECTIONS)
        idle = (await bench.idle([large]))["many"]
    ratio = bench.middle([b / a for a, b in zip(found["few"], found["many"], strict=True)])
    return [
        ReportRow(f"short chat, {what}", ratio, "x", 1.3, "before, us", median(found["few"])),
        ReportRow(f"with nothing to do, {what}", idle * 1e3, "ms a second"),
    ]


def _recorded(name: str) -> tuple[str, float]:
    who, value = _RECORDED[name]
    return f"{who}, recorded", value


GROUPS = {
    "short": short_rows,
    "long": long_rows,
    "new": new_rows,
    "chunk": chunk_rows,
    "latency": latency_rows,
    "first": first_rows,
    "open": open_rows,
    "memory": memory_rows,
    "growth": growth_rows,
}
