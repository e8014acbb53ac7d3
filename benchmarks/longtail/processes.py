"""A fleet on this machine, and the same engines alone: known adapters, each asked for once a round.

The engines are sims, or real vLLM on the CPU, where every answer must be the one that the adapter gives alone.

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

from benchmarks.local_fleets import cpu_ms, engine_urls, local_fleet
from benchmarks.report import ReportRow
from lorafleet.identity import rendezvous_score
from lorafleet.local.tiny_model import make_adapter

AT_ONCE, LOAD_S = 8, 0.03
_CHAT, _LOAD, _UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Ask = Callable[[str], Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One measurement: its engines, the number of adapters, and the requests for each.

    slots   adapters that an engine holds; `device_slots`: that it computes with at a time
    engine_flags  more flags of each engine
    """

    engine: str
    workers: int
    device_slots: int
    slots: int
    adapters: int
    rounds: int
    engine_flags: tuple[str, ...] = ()

    @property
    def case(self) -> str:
        """The setting in words."""
        slots = f"{self.workers * self.slots} slots"
        if self.device_slots < self.slots:
            slots = f"{self.workers} workers with {self.device_slots} device and {self.slots} host slots"
        loads = f", loads of {LOAD_S:g} s" if self.engine == "sim" else ""
        return f"{self.adapters} adapters once each, {AT_ONCE} at a time, {slots}{loads}"


@dataclass(slots=True)
class _Engine:
    """An engine that is asked without a fleet; `loaded`: adapter -> nothing, the least recently used first."""

    url: str
    slots: int
    loaded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    swaps: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Round:
    """One round: answers a second, the seconds of each answer, and each adapter's text."""

    rate: float
    waits_s: list[float]
    texts: dict[str, str]


def process_rows(*, is_quick: bool) -> Iterator[ReportRow]:
    """The rows of sims. Starts a fleet of them, and leaves nothing running."""
    adapters, rounds = (16, 1) if is_quick else (48, 5)
    flags = ("--max-loras", "4", "--max-cpu-loras", "4", "--sim-load-s", str(LOAD_S))
    setting = _Setting("sim", 3, 4, 4, adapters, rounds, flags)
    fleet, alone, spent = _run(setting)
    yield from _rows(setting, fleet, alone)
    for service, ms in spent.items():
        yield ReportRow(f"CPU of a swap and its answer: {service}", ms, "ms")


def vllm_rows(*, is_quick: bool) -> Iterator[ReportRow]:
    """The rows of real vLLM on the CPU. Starts a fleet of it, and leaves nothing running."""
    flags = ("--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "16", "--dtype", "float32")
    setting = _Setting("vllm", 2, 4, 16, 40 if is_quick else 200, 1, flags)
    fleet, alone, _ = _run(setting)
    texts = alone[0].texts
    wrong = sum(text != texts[name] for each in fleet for name, text in each.texts.items())
    yield ReportRow(f"answers that are not those of the adapter alone, {setting.case}", wrong, "answers", 0)
    yield ReportRow(f"different answers of the adapters alone, of {setting.adapters}", len({*texts.values()}), "texts")
    yield from _rows(setting, fleet, alone)


def _run(setting: _Setting) -> tuple[list[_Round], list[_Round], dict[str, float]]:
    """Rounds of a fleet and of its engines alone, and the CPU milliseconds a request by service."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "adapters"
        names = [f"a{number}/v1" for number in range(setting.adapters)]
        paths = {name: make_adapter(root, name, seed=number) for number, name in enumerate(names)}
        options = ["--adapters", str(root)]
        with local_fleet(
            Path(folder) / "state", setting.engine, *setting.engine_flags, workers=setting.workers, options=options
        ) as (urls, up):
            return asyncio.run(_measured(urls, up.pid, paths, setting))


def _rows(setting: _Setting, fleet: list[_Round], alone: list[_Round]) -> Iterator[ReportRow]:
    """Answers a second and the time to an answer, beside the engines alone."""
    ours, theirs = (median(each.rate for each in runs) for runs in (fleet, alone))
    yield ReportRow(f"answers, {setting.case}", ours, "answers/s", None, "the engines alone", theirs, 0.5)
    for what, of in (("mean", mean), ("longest", max)):
        value, beside = (median(of(each.waits_s) for each in runs) for runs in (fleet, alone))
        yield ReportRow(f"{what} time to an answer, {setting.case}", value, "s", None, "the engines alone", beside)


async def _measured(
    urls: Mapping[str, str], up: int, paths: Mapping[str, Path], setting: _Setting
) -> tuple[list[_Round], list[_Round], dict[str, float]]:
    """Rounds through the router, rounds at the engines alone, and the CPU milliseconds a request by service."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        engines = [_Engine(url, setting.slots) for url in await engine_urls(client, urls["orchestrator"])]

        async def by_router(name: str) -> str:
            return await _chat(client, urls["router"], name)

        async def alone(name: str) -> str:
            engine = max(engines, key=lambda each: rendezvous_score(name, each.url))
            await _swapped_in(client, engine, name, paths[name])
            return await _chat(client, engine.url, f"alone-{name}", content=_content(name))

        await _round(by_router, paths)  # inspects the adapters, opens connections
        before = cpu_ms(up)
        fleet = [await _round(by_router, paths) for _ in range(setting.rounds)]
        after = cpu_ms(up)
        await _emptied(client, engines)
        found = [await _round(alone, paths) for _ in range(setting.rounds)]
    requests = setting.rounds * len(paths)
    return fleet, found, {name: (after[name] - before[name]) / requests for name in after}


async def _round(ask: Ask, names: Iterable[str]) -> _Round:
    """Ask for each adapter once, `AT_ONCE` at a time."""
    places, waits_s = asyncio.Semaphore(AT_ONCE), list[float]()
    texts = dict[str, str]()

    async def timed(name: str) -> None:
        async with places:
            began = time.perf_counter()
            texts[name] = await ask(name)
            waits_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(timed, names))
    return _Round(len(waits_s) / (time.perf_counter() - began), waits_s, texts)


async def _chat(client: httpx.AsyncClient, url: str, model: str, content: str = "") -> str:
    """The text of a model's answer to its own message, or to this one."""
    body: dict[str, Any] = {"model": model, "max_tokens": 4, "temperature": 0}
    body["messages"] = [{"role": "user", "content": content or _content(model)}]
    answer = (await client.post(f"{url}{_CHAT}", json=body)).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def _content(name: str) -> str:
    return f"hello {name}"


async def _swapped_in(client: httpx.AsyncClient, engine: _Engine, name: str, path: Path) -> None:
    """Load the adapter at this engine, unless it is loaded; the least recently used one makes room."""
    async with engine.swaps:
        if name not in engine.loaded:
            if len(engine.loaded) >= engine.slots:
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
