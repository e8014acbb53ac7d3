"""Real vLLM in float32 computes every request of a mixed batch as transformers and PEFT do, also behind a router."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from router.app import build
from router.config import RouterSettings
from tests.contract.conftest import unload_all
from tests.contract.numerics import (
    MODULES_OF_RANK,
    TOLERANCE,
    AnsweredText,
    RunningReference,
    ask_logprobs,
    make_partial_adapter,
    make_prompt,
    running_reference,
)
from tests.engines import Kind, RunningEngine, start_engine
from tests.patience import patience
from tests.serving import client_of, serving

pytestmark = pytest.mark.vllm

BASE = "tiny-qwen"
MANY = 120
LARGE = ("--dtype", "float32", "--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "64")


@dataclass(slots=True)
class ComparedEngine:
    """An engine with adapters, beside the reference of its model."""

    engine: RunningEngine
    client: httpx.AsyncClient
    reference: RunningReference
    adapters: Mapping[str, Path]
    max_loras: int

    def in_one_batch(self) -> list[str]:
        """The base model, as "", and as many adapters as run in one batch."""
        return ["", *list(self.adapters)[: self.max_loras]]

    def check(self, answers: list[AnsweredText]) -> None:
        """Fails if an answer differs from the reference; also if the check could not tell adapters apart."""
        found = self.reference.differences(answers, self.adapters)
        assert max(found) < TOLERANCE, sorted(zip(found, (each.adapter for each in answers), strict=True))[-3:]
        names = [*self.adapters, ""]
        others = [names[(names.index(each.adapter) + 1) % len(names)] for each in answers]
        swapped = [AnsweredText(other, each.tokens, each.logprobs) for each, other in zip(answers, others, strict=True)]
        assert min(self.reference.differences(swapped, self.adapters)) > 100 * TOLERANCE


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[RunningReference]:
    with running_reference(model_dir) as reference:
        yield reference


@pytest.fixture(
    scope="module",
    params=[
        "shared",
        pytest.param("large", marks=pytest.mark.thorough),
        pytest.param("tensor parallel", marks=pytest.mark.thorough),
    ],
)
def started(
    request: pytest.FixtureRequest, engine_of: Callable[[Kind], RunningEngine], model_dir: Path
) -> Iterator[tuple[RunningEngine, int]]:
    """An engine and its `--max-loras`; the shared one has ranks of up to 16."""
    if request.param == "shared":
        yield engine_of("vllm"), 2
        return
    ranks = ("--tensor-parallel-size", "2") if request.param == "tensor parallel" else ()
    engine = start_engine("vllm", model_dir, flags=(*LARGE, *ranks))
    yield engine, 4
    assert engine.stop() == 0


@pytest.fixture
def loaded(started: tuple[RunningEngine, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Adapters of each rank that the engine takes, one more than run in one batch; all are loaded."""
    engine, max_loras = started
    ranks = [rank for rank in MODULES_OF_RANK if max_loras > 2 or rank <= 16]
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {}
    for index in range(max_loras + 1):
        rank = ranks[index % len(ranks)]
        name = f"rank{rank}-{index}"
        adapters[name] = make_partial_adapter(folder, name, rank=rank, modules=MODULES_OF_RANK[rank])
    with httpx.Client(base_url=engine.url, timeout=patience(20)) as client:
        unload_all(client)
        for name, path in adapters.items():
            body = {"lora_name": name, "lora_path": str(path)}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        yield adapters
        unload_all(client)


@pytest.fixture
async def compared(
    started: tuple[RunningEngine, int], loaded: dict[str, Path], reference: RunningReference
) -> AsyncIterator[ComparedEngine]:
    engine, max_loras = started
    async with client_of(engine.url, timeout=patience(60)) as caller:
        yield ComparedEngine(engine, caller, reference, loaded, max_loras)


async def test_each_request_of_a_mixed_batch_has_the_logprobs_of_its_own_adapter(compared: ComparedEngine) -> None:
    names = compared.in_one_batch()
    prompt = make_prompt(1, 75)
    async with AsyncExitStack() as stack:
        for name in names:  # one long answer each: in every step's batch until we leave
            body = {"model": name or BASE, "prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "stream": True}
            stream = await stack.enter_async_context(compared.client.stream("POST", "/v1/completions", json=body))
            await anext(stream.aiter_lines())
        async with asyncio.TaskGroup() as group:
            asks = [
                group.create_task(ask_logprobs(compared.client, name or BASE, prompt, adapter=name, with_prompt=True))
                for name in names
            ]
    compared.check([ask.result() for ask in asks])


async def test_concurrent_requests_through_a_router_have_the_logprobs_of_their_adapters(
    compared: ComparedEngine,
) -> None:
    app, parts = build(RouterSettings(engines=(f"e0={compared.engine.url}",), metadata_poll_s=0.1))
    names = ["", *compared.adapters]
    # Each prompt for every adapter, and twice: blocks of one adapter must not be reused for another.
    asked = [(name, seed) for seed in range(2) for name in names] * 2
    random.Random(1).shuffle(asked)
    async with serving(app, http=app.state.http) as url, client_of(url, timeout=patience(60)) as client:
        assert await parts.discovery.changes.until(
            lambda: parts.discovery.is_synced() and compared.adapters.keys() <= parts.discovery.fleet.adapters.keys(),
            timeout_s=patience(20),
        )
        async with asyncio.TaskGroup() as group:
            asks = [
                group.create_task(ask_logprobs(client, name or BASE, make_prompt(seed, 75 + seed), adapter=name))
                for name, seed in asked
            ]
    compared.check([ask.result() for ask in asks])


@pytest.mark.thorough
@pytest.mark.parametrize("started", ["large"], indirect=True)
async def test_120_adapters_in_turn_through_four_slots_have_the_logprobs_of_their_own(
    compared: ComparedEngine, tmp_path: Path
) -> None:
    """All are registered at once: vLLM keeps 16 in memory, and reads the least recently used from disk again."""
    kinds = list(MODULES_OF_RANK.items())
    adapters = {}
    for index in range(MANY):
        rank, modules = kinds[index % len(kinds)]
        adapters[f"many-{index}"] = make_partial_adapter(tmp_path, f"many-{index}", rank=rank, modules=modules)
    for name, path in adapters.items():
        body = {"lora_name": name, "lora_path": str(path)}
        (await compared.client.post("/v1/load_lora_adapter", json=body)).raise_for_status()
    # Eight at a time, first in order, so that each misses the LRU, then in any order.
    asked = [*adapters, *random.Random(2).sample(list(adapters), MANY)]
    prompt, free = make_prompt(3, 40), asyncio.Semaphore(8)

    async def ask(name: str) -> AnsweredText:
        async with free:
            return await ask_logprobs(compared.client, name, prompt, adapter=name, max_tokens=4)

    answers = await asyncio.gather(*map(ask, asked))
    compared.adapters = adapters
    compared.check(answers)
