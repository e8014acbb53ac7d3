"""Each error of vLLM's own loading is met by the agent before the engine sees the adapter, with a code of ours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.contract.conftest import EngineUnderTest, unload_all
from tests.workers.broken import BROKEN
from tests.workers.running import RunningWorker, code, loaded, post

pytestmark = pytest.mark.fleet

SLOTS = 2
# adapter of the corpus -> our status and code; what vLLM 0.32 says, None: it takes it, and answers from the base model
SCENARIOS = {
    "bias": (422, "bias_unsupported", "Adapter bias is not supported"),
    "lora-bias": (422, "bias_unsupported", "vLLM does not support LoRA bias"),
    "dora": (422, "dora_unsupported", "vLLM does not yet support DoRA"),
    "whole-head": (422, "modules_to_save_unsupported", "Unsupported modules_to_save"),
    "rank-32": (422, "rank_too_big", "LoRA rank 32 is greater than max_lora_rank 16"),
    "no-such-module": (422, "module_unknown", "expected target modules in"),
    "no-matching-module": (422, "modules_unmatched", None),
    "no-config": (404, "source_not_found", "No adapter found"),
    "no-weights": (422, "adapter_incomplete", "doesn't contain tensors"),
}
CASES = [case for case in BROKEN if case.name in SCENARIOS]


@pytest.fixture
def empty(bench: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """The engine without adapters; a test's adapters are unloaded after it."""
    unload_all(bench.client)
    yield bench
    unload_all(bench.client)


async def test_agent_refuses_with_its_code_what_the_engine_refuses_or_serves_wrongly(empty, model_dir, tmp_path):
    folders = {case.name: case.write(tmp_path / "broken") for case in CASES}
    make_adapter(tmp_path / "good", "fine/v1")
    if empty.engine.kind == "vllm":
        for name, (_, _, words) in SCENARIOS.items():
            body = {"lora_name": name, "lora_path": str(folders[name])}
            answer = empty.client.post("/v1/load_lora_adapter", json=body)
            assert (answer.status_code == 200) == (words is None), answer.text
            assert (words or "") in answer.text
        unload_all(empty.client)
    flags = ("--engine-url", empty.engine.url, "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16")
    worker = RunningWorker(model_dir, tmp_path / "good", tmp_path, *flags, "--lora-roots", f'["{tmp_path}"]')
    async with worker.running() as client:
        for case in CASES:
            answer = await post(client, "load_lora", lora_id=case.name, source=str(folders[case.name]))
            assert (answer.status_code, code(answer)) == SCENARIOS[case.name][:2]
        assert await loaded(client) == set()
        assert (await post(client, "load_lora", lora_id="fine/v1")).status_code == 200
    assert [card["id"] for card in empty.client.get("/v1/models").json()["data"] if card.get("parent")]


async def test_load_without_a_free_slot_is_refused_before_the_engine_drops_another_adapter(
    empty, model_dir, tmp_path: Path
) -> None:
    for index in range(SLOTS + 1):
        make_adapter(tmp_path / "good", f"a{index}/v1")
    flags = ("--engine-url", empty.engine.url, "--max-loras", "2", "--max-cpu-loras", str(SLOTS))
    worker = RunningWorker(model_dir, tmp_path / "good", tmp_path, *flags)
    async with worker.running() as client:
        for index in range(SLOTS):
            assert (await post(client, "load_lora", lora_id=f"a{index}/v1")).status_code == 200
        refused = await post(client, "load_lora", lora_id=f"a{SLOTS}/v1")
        assert (refused.status_code, code(refused)) == (409, "no_free_slot")
        assert await loaded(client) == {"a0/v1", "a1/v1"}
        in_its_place = await post(client, "load_lora", lora_id=f"a{SLOTS}/v1", evict="a0/v1")
        assert in_its_place.status_code == 200
        assert await loaded(client) == {"a1/v1", f"a{SLOTS}/v1"}
