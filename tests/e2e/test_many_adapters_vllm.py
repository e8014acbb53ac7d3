"""120 adapters through one real vLLM that holds 16 of them, and computes with 4 at a time: every answer is right."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_model
from tests.contract.numerics import (
    MODULES_OF_RANK,
    TOLERANCE,
    AnsweredText,
    ask_logprobs,
    make_partial_adapter,
    make_prompt,
    running_reference,
)
from tests.e2e.fleets import RunningFleet, running
from tests.patience import patience

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(900)]

MANY, HELD, AT_ONCE = 120, 16, 8


@dataclass(frozen=True)
class ManyAdapters:
    """A fleet of one vLLM, its model, and the folders of its adapters."""

    fleet: RunningFleet
    model: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyAdapters]:
    folder = tmp_path_factory.mktemp("many")
    model = make_model(folder / "tiny-qwen")
    kinds = list(MODULES_OF_RANK.items())
    adapters = {}
    for index in range(MANY):
        rank, modules = kinds[index % len(kinds)]
        adapters[f"many-{index}"] = make_partial_adapter(folder / "all", f"many-{index}", rank=rank, modules=modules)
    flags = ["--engine", "vllm", "--workers", "1", "--model", str(model), "--adapters", str(folder / "all")]
    engine = ["--", "--max-loras", "4", "--max-cpu-loras", str(HELD), "--max-lora-rank", "64", "--dtype", "float32"]
    with running(folder / "state", *flags, *engine, within_s=600) as fleet:
        # Else an adapter stays for as long as a fleet with room would keep it.
        policy = {"min_residency_s": 0.1, "reserve_slots": 0}
        assert fleet.http("PATCH", f"{fleet.orchestrator}/v1/policy", json=policy).status_code == 200
        yield ManyAdapters(fleet, model, adapters)


async def test_every_answer_has_the_logprobs_of_its_own_adapter_while_adapters_make_room_for_each_other(
    many: ManyAdapters,
) -> None:
    fleet, prompt = many.fleet, make_prompt(5, 40)
    # First in order, so that each is cold, then in any order.
    asked = [*many.adapters, *random.Random(4).sample(list(many.adapters), MANY // 2)]
    free = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=fleet.router, timeout=patience(120)) as client:

        async def ask(name: str) -> AnsweredText:
            async with free:
                return await ask_logprobs(client, name, prompt, adapter=name, max_tokens=4)

        answers = await asyncio.gather(*map(ask, asked))
    with running_reference(many.model) as reference:
        found = reference.differences(answers, many.adapters)
    assert max(found) < TOLERANCE, sorted(zip(found, asked, strict=True))[-3:]
    (worker,) = fleet.workers().values()
    assert worker["lora"]["capacity"]["loaded_count"] <= HELD
