"""Swaps: a new adapter takes the slot of one on which requests run, and all of them are answered whole."""

import asyncio
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet
from tests.patience import patience

pytestmark = pytest.mark.fleet

TOKENS = 60
STREAM_S = 22.0
SLOTS = ("--max-loras", "2", "--max-cpu-loras", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("swaps-model") / "model")


async def test_an_adapter_takes_a_slot_on_which_a_stream_runs_and_the_stream_ends_whole(tmp_path: Path, model: Path):
    """The streams outlast the ten seconds in which a new orchestrator may not have heard every router."""
    shelf = tmp_path / "shelf"
    names = ("a/v1", "b/v1", "c/v1")
    for seed, name in enumerate(names):
        make_adapter(shelf, name, rank=8, seed=seed)
    engine = ("--sim-decode-tokens-per-s", str(TOKENS / STREAM_S), *SLOTS)
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, routers=1, engine=engine, agent=SLOTS) as fleet:
        for name in names:
            spec = {"lora_id": name, "source": f"file://{shelf}/{name}"}
            (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()
        for name in names[:2]:
            assert (await fleet.ensure(name)).json()["ready"] == ["w0"]
        router = fleet.routers[0]

        async def stream(name: str) -> list[str]:
            body = {"model": name, "prompt": "select", "ignore_eos": True, "stream": True, "max_tokens": TOKENS}
            async with router.stream("POST", "/v1/completions", json=body, timeout=patience(60)) as answer:
                return [line async for line in answer.aiter_lines() if line.startswith("data: ")]

        streams = [asyncio.create_task(stream(name)) for name in names[:2]]
        assert (await fleet.ensure("c/v1")).json()["ready"] == ["w0"], "though both slots are in use"
        assert not any(task.done() for task in streams)
        for events in await asyncio.gather(*streams):
            assert events[-1] == "data: [DONE]"
            assert len(events) >= TOKENS - 1
        answer = await router.post("/v1/completions", json={"model": "c/v1", "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        held = (await fleet.http.get("/v1/workers/w0")).json()["adapters"]
        assert len(held) == len(names) - 1, "nothing is loaded that nobody asks for"
        assert "c/v1" in held
