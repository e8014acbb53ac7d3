"""A fleet of sims on this machine, and the same engines alone: known adapters, each asked for once a round.

Alone, an adapter's home by rendezvous hashing gets its requests, and its least recently used adapter makes room. One
lock an engine keeps its swaps apart.
"""

import asyncio
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

from benchmarks.local_fleets import cpu_ms, local_fleet
from benchmarks.report import ReportRow
from lorafleet.identity import rendezvous_score
from lorafleet.local.tiny_model import make_adapter

WORKERS, SLOTS, AT_ONCE, LOAD_S = 3, 4, 8, 0.03
_CHAT, _LOAD, _UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Ask = Callable[[str], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Engine:
    """An engine that is asked without a fleet; `loaded`: adapter -> nothing, the least recently used first."""

    url: str
    loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    swaps: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Round:
    """One round: answers a second, and the seconds of each answer."""

    rate: float
    waits_s: list[float]


def process_rows(*, is_quick: bool) -> Iterator[ReportRow]:
    """The rows of this part. Starts a fleet of sims, and leaves nothing running."""
    adapters, rounds = (16, 1) if is_quick else (48, 5)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "adapters"
        paths = {f"a{number}/v1": make_adapter(root, f"a{number}/v1", seed=number) for number in range(adapters)}
        flags = ("--sim-load-s", str(LOAD_S))
        options = ("--adapters", str(root), "--max-loras", str(SLOTS))
        with local_fleet(Path(folder) / "state", "sim", *flags, workers=WORKERS, options=options) as (urls, up):
            fleet, alone, spent = asyncio.run(_measured(urls, up.pid, paths, rounds))
    case = f"{adapters} adapters once each, {AT_ONCE} at a time, {WORKERS * SLOTS} slots, loads of {LOAD_S:g} s"
    ours, theirs = (median(each.rate for each in runs) for runs in (fleet, alone))
    yield ReportRow(f"answers, {case}", ours, "answers/s", None, "the engines alone", theirs, 0.5)
    for what, of in (("mean", mean), ("longest", max)):
        pair = (median(of(each.waits_s) for each in runs) for runs in (fleet, alone))
        value, beside = pair
        yield ReportRow(f"{what} time to an answer, {case}", value, "s", None, "the engines alone", beside)
    for service, ms in spent.items():
        yield ReportRow(f"CPU of a swap and its answer: {service}", ms, "ms")


async def _measured(
    urls: Mapping[str, str], up: int, paths: Mapping[str, Path], rounds: int
) -> tuple[list[_Round], list[_Round], dict[str, float]]:
    """Rounds through the router, rounds at the engines alone, and the CPU milliseconds a request by service."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        engines = []
        for worker in (await client.get(f"{urls['orchestrator']}/v1/workers")).json()["data"]:
            metadata = (await client.get(f"{worker['agent_url']}/metadata")).json()
            engines.append(_Engine(metadata["transport"]["engine_url"]))

        async def by_router(name: str) -> None:
            await _chat(client, urls["router"], name)

        async def alone(name: str) -> None:
            engine = max(engines, key=lambda each: rendezvous_score(name, each.url))
            await _swapped_in(client, engine, name, paths[name])
            await _chat(client, engine.url, f"alone-{name}")

        await _round(by_router, paths)  # inspects the adapters, opens connections
        before = cpu_ms(up)
        fleet = [await _round(by_router, paths) for _ in range(rounds)]
        after = cpu_ms(up)
        await _emptied(client, engines)
        found = [await _round(alone, paths) for _ in range(rounds)]
    requests = rounds * len(paths)
    return fleet, found, {name: (after[name] - before[name]) / requests for name in after}


async def _round(ask: Ask, names: Iterable[str]) -> _Round:
    """Ask for each adapter once, `AT_ONCE` at a time."""
    places, waits_s = asyncio.Semaphore(AT_ONCE), []

    async def timed(name: str) -> None:
        async with places:
            began = time.perf_counter()
            await ask(name)
            waits_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(timed, names))
    return _Round(len(waits_s) / (time.perf_counter() - began), waits_s)


async def _chat(client: httpx.AsyncClient, url: str, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": f"hello {name}"}], "max_tokens": 4}
    (await client.post(f"{url}{_CHAT}", json=body)).raise_for_status()


async def _swapped_in(client: httpx.AsyncClient, engine: _Engine, name: str, path: Path) -> None:
    """Load the adapter at this engine, unless it is loaded; the least recently used one makes room."""
    async with engine.swaps:
        if name not in engine.loaded:
            if len(engine.loaded) >= SLOTS:
                victim, _ = engine.loaded.popitem(last=False)
                (await client.post(engine.url + _UNLOAD, json={"lora_name": f"alone-{victim}"})).raise_for_status()
            body = {"lora_name": f"alone-{name}", "lora_path": str(path)}
            (await client.post(engine.url + _LOAD, json=body)).raise_for_status()
            engine.loaded[name] = None
        engine.loaded.move_to_end(name)


async def _emptied(client: httpx.AsyncClient, engines: Iterable[_Engine]) -> None:
    """Unload what the fleet has left at the engines."""
    for engine in engines:
        for model in (await client.get(f"{engine.url}/v1/models")).json()["data"]:
            if model["parent"]:
                await client.post(engine.url + _UNLOAD, json={"lora_name": model["id"]})
