"""What the run measures on one engine: kernels, slots, loads beside streams, first tokens, and answers against PEFT."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx

from benchmarks.report import ReportRow
from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, punica_names, read_engine_reports
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE, ask_for_reports, loaded_modules, read_reports
from tests.contract.numerics import (
    MODULES_OF_RANK,
    AnsweredText,
    ask_logprobs,
    make_partial_adapter,
    make_prompt,
    running_reference,
)
from tests.engines import start_engine
from tests.gpu.models import make_adapter_for

# In bfloat16 the engine rounds where the reference does not. Another adapter's weights differ by 7 and more.
BF16_GOAL = 0.5


@dataclass(frozen=True)
class MeasuredEngine:
    """A running vLLM, its model, and the folder in which its processes report."""

    url: str
    model: Path
    folder: Path

    @property
    def processes(self) -> tuple[EngineProcessReport, ...]:
        """What its processes run adapters with."""
        return read_engine_reports(self.folder / "reports")

    @property
    def kernels(self) -> str:
        """Its Punica wrapper and its device, in words."""
        return f"{punica_names(self.processes)} on {', '.join({each.device for each in self.processes})}"

    def client(self) -> httpx.AsyncClient:
        """A client of it; the caller closes it."""
        return httpx.AsyncClient(base_url=self.url, timeout=120)

    async def load(self, client: httpx.AsyncClient, name: str, folder: Path) -> float:
        """Load an adapter; returns the seconds that took."""
        ask_for_reports(self.folder / "reports", name)
        began = time.perf_counter()
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        return time.perf_counter() - began


@contextmanager
def measured_engine(folder: Path, model: Path, *flags: str) -> Iterator[MeasuredEngine]:
    """A vLLM with these flags, which ends with the block."""
    (folder / "reports").mkdir(parents=True)
    # Tests on the CPU have the model in the API server's process, which then sends tokens in bursts.
    environment = {REPORTS_VARIABLE: str(folder / "reports"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engine = start_engine("vllm", model, flags=flags, environment=environment)
    try:
        yield MeasuredEngine(engine.url, model, folder)
    finally:
        engine.stop()


# --- memory -----------------------------------------------------------------------------------------------------------


async def memory_rows(engine: MeasuredEngine, *, max_rank: int, ranks: Sequence[int]) -> list[ReportRow]:
    """Bytes of a device slot, and of an adapter's copy in host memory, by rank."""
    slot = sum(process.slot_bytes for process in engine.processes)
    rows = [ReportRow(f"a device slot, max_lora_rank {max_rank}", slot / 1e6, "MB")]
    async with engine.client() as client:
        for rank in ranks:
            name = f"memory-{rank}"
            adapter = make_adapter_for(engine.model, engine.folder / "adapters", name, rank=rank)
            await engine.load(client, name, adapter)
            loaded = loaded_modules(read_reports(engine.folder / "reports", name))
            assert loaded is not None, "vLLM's plug-in has not reported: is lorafleet installed beside vLLM?"
            file_mb = (adapter / "adapter_model.safetensors").stat().st_size / 1e6
            what = f"an adapter of rank {rank} in host memory"
            rows.append(ReportRow(what, loaded.host_bytes / 1e6, "MB", baseline="its file", baseline_value=file_mb))
            await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    return rows


# --- time -------------------------------------------------------------------------------------------------------------


async def first_token_s(client: httpx.AsyncClient, model: str, prompt: Sequence[int]) -> float:
    """Seconds to the first token of a streamed completion."""
    began = time.perf_counter()
    async with _stream(client, model, prompt, 2) as answer:
        await anext(answer.aiter_raw())
        return time.perf_counter() - began


async def first_token_rows(engine: MeasuredEngine, *, rank: int, rounds: int) -> list[ReportRow]:
    """The first token of an adapter in a slot, of one in host memory, and of one that is loaded for the request."""
    warm, cold, moved = [], [], []
    async with engine.client() as client:
        await first_token_s(client, "tiny-qwen", make_prompt(rank + 1000, 64))  # warms up
        for number in range(rounds):
            names = [f"first-{rank}-{number}-{which}" for which in range(3)]
            loads = []
            for name in names:
                folder = make_adapter_for(engine.model, engine.folder / "adapters", name, rank=rank)
                loads.append(await engine.load(client, name, folder))
            prompt = make_prompt(number, 64)
            cold.append(loads[2] + await first_token_s(client, names[2], make_prompt(number + 100, 64)))
            warm.append(await first_token_s(client, names[2], prompt))
            moved.append(await first_token_s(client, names[0], prompt))  # two slots: the third load took this one's
            for name in names:
                await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    base = median(warm) * 1e3
    beside = {"baseline": "in a slot", "baseline_value": base}
    return [
        ReportRow(f"first token, rank {rank}, in a slot", base, "ms"),
        ReportRow(f"first token, rank {rank}, from host memory", median(moved) * 1e3, "ms", **beside),
        ReportRow(f"first token, rank {rank}, cold: loaded from disk first", median(cold) * 1e3, "ms", **beside),
    ]


async def stall_rows(engine: MeasuredEngine, *, rank: int, streams: int, tokens: int, loads: int) -> list[ReportRow]:
    """The longest gap between two tokens of running streams, without and with loads beside them."""
    async with engine.client() as client:
        folders = [
            make_adapter_for(engine.model, engine.folder / "adapters", f"stall-{number}", rank=rank)
            for number in range(loads)
        ]
        await _gaps(client, streams, tokens, asyncio.Event())  # warms up
        quiet = await _gaps(client, streams, tokens, asyncio.Event())
        begun = asyncio.Event()

        async def load_all() -> None:
            await begun.wait()
            for number, folder in enumerate(folders):
                await engine.load(client, f"stall-{number}", folder)
                await client.post("/v1/unload_lora_adapter", json={"lora_name": f"stall-{number}"})

        busy, _ = await asyncio.gather(_gaps(client, streams, tokens, begun), load_all())
    alone = median(quiet) * 1e3
    return [
        ReportRow(f"inter-token time of {streams} streams, median", alone, "ms"),
        ReportRow(f"its longest without loads, {streams} streams", max(quiet) * 1e3, "ms"),
        ReportRow(
            f"its longest while {loads} adapters of rank {rank} are loaded",
            max(busy) * 1e3,
            "ms",
            baseline="without",
            baseline_value=max(quiet) * 1e3,
        ),
    ]


async def _gaps(client: httpx.AsyncClient, streams: int, tokens: int, begun: asyncio.Event) -> list[float]:
    """Seconds between two pieces of an answer, of all streams of the base model together; sets `begun` at the first."""

    async def one(seed: int) -> list[float]:
        times = []
        async with _stream(client, "tiny-qwen", make_prompt(seed, 32), tokens) as answer:
            async for _ in answer.aiter_raw():
                times.append(time.perf_counter())
                begun.set()
        return [later - earlier for earlier, later in pairwise(times)]

    return [gap for found in await asyncio.gather(*map(one, range(streams))) for gap in found]


@asynccontextmanager
async def _stream(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], tokens: int
) -> AsyncIterator[httpx.Response]:
    """The stream of an answer of this many tokens."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread())[:500]
        yield answer


# --- answers ----------------------------------------------------------------------------------------------------------


async def peft_rows(engine: MeasuredEngine, *, words: str, answers: int) -> list[ReportRow]:
    """How far answers of a batch of mixed ranks are from PEFT's in float32; beside it the next adapter's weights."""
    folders = {
        f"rank-{rank}": make_partial_adapter(engine.folder / "peft", f"rank-{rank}", rank=rank, modules=modules)
        for rank, modules in MODULES_OF_RANK.items()
    }
    async with engine.client() as client:
        for name, folder in folders.items():
            await engine.load(client, name, folder)
        names = [*folders, ""]
        asked = [(names[number % len(names)], make_prompt(number, 40)) for number in range(answers)]
        found = await asyncio.gather(
            *(ask_logprobs(client, name or "tiny-qwen", prompt, adapter=name) for name, prompt in asked)
        )
        for name in folders:
            await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    following = {name: names[(index + 1) % len(names)] for index, name in enumerate(names)}
    swapped = [AnsweredText(following[each.adapter], each.tokens, each.logprobs) for each in found]
    with running_reference(engine.model) as reference:
        largest = max(reference.differences(found, folders))
        other = min(reference.differences(swapped, folders))
    what = f"largest difference of a log-probability from PEFT in float32, {words}, {answers} answers"
    return [
        ReportRow(what, largest, "nats", reach=BF16_GOAL, baseline="another adapter's weights", baseline_value=other)
    ]
