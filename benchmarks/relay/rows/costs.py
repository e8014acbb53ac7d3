"""CPU of a request: short, long, new, and at engines without KV events."""

import asyncio
import json
import time
from array import array
from statistics import median

from tokenizers import Tokenizer

from benchmarks.relay.bench import RelayBench
from benchmarks.relay.client import LoadClient
from benchmarks.relay.contenders import NGINX, RELAY, SGLANG, VLLM_BLIND, Running
from benchmarks.relay.fleet import Spec
from benchmarks.relay.prompts import ChatKind, long_new, long_seen, of_length, short, short_new
from benchmarks.relay.rows.scene import LONG_CONNECTIONS, SHORT_CONNECTIONS, RunningContenders, compared, of_ours
from benchmarks.report import ReportRow
from benchmarks.row_runner import RowFailed

_EVENTLESS_KB = (30, 300)


async def short_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """With exact routing, and the relay alone."""
    bench = scene.bench
    runnings = [one for one in scene.runnings if one.kind != "direct"]
    found = scene.medians(await bench.costs(runnings, short(), SHORT_CONNECTIONS))
    alone = {name: value for name, value in found.items() if name.startswith(RELAY)}
    routed = {name: value for name, value in found.items() if name not in alone}
    rows += compared("short chat, ~1 KB", routed, "us", beside=SGLANG, goal=1.5)
    if RELAY in alone:
        beside = {name: value for name, value in found.items() if name in (NGINX, VLLM_BLIND)}
        what = "relay alone, round_robin, no tokenization, ~1 KB"
        rows += compared(what, alone | beside, "us", beside=VLLM_BLIND, goal=1.25, ours=RELAY)
    new = scene.medians(await bench.costs(scene.ours, short_new(), SHORT_CONNECTIONS))
    rows += [of_ours("short chat, ~1 KB, all of it new text", name, value, "us") for name, value in new.items()]


async def long_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """A conversation that the engines have cached."""
    found = scene.medians(await scene.bench.costs(scene.routers, long_seen(), LONG_CONNECTIONS))
    rows += compared("32 KB prompt, prefix seen before", found, "us", beside=SGLANG, goal=1.75)


async def new_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """A new prompt costs its encoding, which is looked at by itself, and little else."""
    bench = scene.bench
    alone_us, tokenization_us = _tokenization_us(bench)
    library = "encode_batch_fast alone, us"
    rows.append(ReportRow("tokenization of a new 32 KB prompt", tokenization_us, "us", None, library, alone_us, 0.3))
    found = scene.medians(await bench.costs(scene.ours, long_new(), LONG_CONNECTIONS))
    for name, value in found.items():
        rows.append(of_ours("32 KB prompt, new", name, value, "us", (library, alone_us), 0.4))
    for running in scene.ours:
        rest = await health_s(bench, running, None)
        lag = await health_s(bench, running, long_new())
        what = "event-loop lag, p99: /health beside 32 KB prompts"
        rows.append(of_ours(what, running.name, lag * 1e3, "ms", ("with nothing to do, ms", rest * 1e3)))


async def eventless_rows(scene: RunningContenders, rows: list[ReportRow]) -> None:
    """The default for stock vLLM: what its cache holds is estimated from the prompts that it served."""
    bench = scene.bench
    with bench.fleet(Spec(2, has_events=False)) as stage, bench.ours(stage, has_events=False) as ours:
        for kilobytes in _EVENTLESS_KB:
            ask = of_length(kilobytes, is_new=False)
            routers = [*ours, *scene.peers_by_cache]
            found = scene.medians(await bench.costs(routers, ask, LONG_CONNECTIONS))
            _check_estimated(bench, ours[0], ask)
            what = f"{kilobytes} KB prompt, seen before, engines without KV events"
            rows += compared(what, found, "us", beside=SGLANG, goal=2.0)


def _check_estimated(bench: RelayBench, running: Running, ask: ChatKind) -> None:
    """Raise RowFailed unless the router takes the seen beginning for cached: else the row measures something else."""
    predicted, cached = bench.predicted_tokens(running, ask)
    if not isinstance(predicted, int) or predicted < cached // 2:
        raise RowFailed(
            f"{running.name} predicts {predicted} cached tokens of {ask.name}, of which {cached} are cached"
        )


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
            ids += bench.tokenizer.encode_pieces([piece], add_special_tokens=special)[0]
        ours.append(time.thread_time() - middle)
        alone.append(middle - began)
        assert ids.tolist() == encoding.ids, "cut into pieces, a prompt has other ids"
    return median(alone) * 1e6, median(ours) * 1e6


async def health_s(bench: RelayBench, running: Running, beside: ChatKind | None) -> float:
    """p99 of GET /health; beside it two connections that always have a request under way, or nothing."""
    client, over = LoadClient(running.name, running.port, running.tls), asyncio.Event()
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
