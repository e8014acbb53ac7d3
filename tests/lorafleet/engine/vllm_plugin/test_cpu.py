"""On the CPU no request of the base model gets an adapter's weights, and no process of vLLM waits in a busy loop."""

import asyncio
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from lorafleet.engine.vllm_plugin import cpu
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.engines import RunningEngine, start_engine
from tests.patience import patience

ROOT = Path(__file__).parents[4]
BASE, FIRST, LAST = "tiny-qwen", "first", "last"
PROMPT = "The customer wrote to the shop about an order that had not come. " * 6


def test_engine_processes_sleep_while_they_wait_for_each_other():
    looked = []
    queues, another = SimpleNamespace(sched_yield=lambda: looked.append(1)), SimpleNamespace()
    for each in (queues, another):
        cpu.sleep_while_waiting(each)
    began = time.monotonic()
    queues.sched_yield()
    assert time.monotonic() - began >= cpu.POLL_INTERVAL_S
    assert (looked, vars(another)) == ([], {})


@pytest.mark.vllm
def test_vllm_still_yields_where_it_waits_for_another_process():
    (folder,) = find_spec("vllm").submodule_search_locations
    text = (Path(folder) / "distributed" / "device_communicators" / "shm_broadcast.py").read_text()
    assert "            sched_yield()\n" in text


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("plugin")
    # As an installation has it, so that this stays true where ours is older than its pyproject.toml.
    found = folder / "plugin-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (found / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlorafleet = lorafleet.engine.vllm_plugin:register\n"
    )
    adapters = [make_adapter(folder, name) for name in (FIRST, LAST)]
    flags = ("--dtype", "float32", "--lora-modules", *(f"{path.name}={path}" for path in adapters))
    environment = {"PYTHONPATH": f"{ROOT}:{folder}"}
    running = start_engine("vllm", make_model(folder / "model"), flags=flags, environment=environment)
    yield running
    running.stop()


@pytest.mark.vllm
@pytest.mark.thorough
async def test_base_model_answers_alike_with_and_without_a_concurrent_adapter(engine):
    async with httpx.AsyncClient(base_url=engine.url, timeout=patience(40)) as client:

        async def ask(model: str, prompt: str = PROMPT, tokens: int = 12) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"]

        alone = [await ask(model) for model in (BASE, FIRST, LAST)]
        assert len(set(alone)) == 3
        for beside in (FIRST, LAST):
            async with client.stream(
                "POST",
                "/v1/completions",
                json={"model": beside, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True},
            ) as stream:
                lines = stream.aiter_lines()
                await anext(lines)  # it is in the batch, and stays there until we leave
                assert await asyncio.gather(*(ask(model) for model in (BASE, FIRST, LAST))) == alone
        assert [await ask(model) for model in (BASE, FIRST, LAST)] == alone
