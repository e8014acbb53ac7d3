"""An agent attached to the shared engine: its adapters' answers, and kill -9 of the agent."""

import asyncio
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from lorafleet.identity import block_hashes, root_hash
from lorafleet.local.tiny_model import make_adapter
from tests.contract.conftest import EngineUnderTest
from tests.patience import patience, within
from tests.workers.kills import SLOTS, new_kill_trial
from tests.workers.running import RunningWorker, post
from workers.wire import KvSnapshot, unpack_hashes

pytestmark = pytest.mark.fleet

PROMPT = list(range(600, 600 + 4 * 32 + 5))  # four blocks


@pytest.fixture
def empty(bench: EngineUnderTest):
    """The engine without adapters; a test's adapters are unloaded after it."""

    def unload_all() -> None:
        for model in bench.client.get("/v1/models").json()["data"]:
            if model.get("parent"):
                bench.unload(model["id"])

    unload_all()
    yield bench
    unload_all()


def answer(bench: EngineUnderTest, model: str) -> tuple[str, int]:
    """An adapter's answer to PROMPT, and its cached tokens."""
    message = bench.complete(PROMPT, model=model, max_tokens=12)
    return message["choices"][0]["text"], message["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_new_bytes_of_a_lora_id_never_reuse_the_old_kv_cache(empty, model_dir, tmp_path):
    old, new = (
        make_adapter(tmp_path / name, name, section=section) for name, section in (("o", "sql"), ("n", "legal"))
    )
    expected = {}
    for name, folder in (("clean-old", old), ("clean-new", new)):
        empty.load(name, folder)
        expected[name] = answer(empty, name)
        empty.unload(name)
    assert expected["clean-old"][0] != expected["clean-new"][0]
    assert expected["clean-new"][1] == 0  # the answer of a clean engine

    place = tmp_path / "lora_path" / "same" / "v1"
    shutil.copytree(old, place)
    flags = ("--engine-url", empty.engine.url, "--max-loras", "2", "--max-cpu-loras", str(SLOTS))
    worker = RunningWorker(model_dir, tmp_path / "lora_path", tmp_path, *flags)
    async with worker.running() as client:

        async def loaded() -> str:
            return (await post(client, "load_lora", lora_id="same/v1", source=str(place))).json()["engine_name"]

        first = await loaded()
        for cached in (0, 4 * 32):
            assert await asyncio.to_thread(answer, empty, first) == (expected["clean-old"][0], cached)
        for file in new.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
        await post(client, "unload_lora", lora_id="same/v1")
        second = await loaded()
        assert second != first
        assert await asyncio.to_thread(answer, empty, second) == expected["clean-new"]
        # The agent knows the blocks from the engine's events, although it did not start it.
        async with within(10):
            while not (cached := await blocks(client)) >= ledger_hashes(first) | ledger_hashes(second):
                await asyncio.sleep(0.05)
        assert not cached & ledger_hashes("same/v1")


async def blocks(client: httpx.AsyncClient) -> set[int]:
    """Our hashes of the device blocks in the agent's ledger."""
    snapshot = msgspec.msgpack.decode((await client.get("/v1/kv/snapshot")).content, type=KvSnapshot)
    return {each for rank in snapshot.ranks for each in unpack_hashes(rank.device)}


def ledger_hashes(name: str) -> set[int]:
    """The hashes of the prompt's full blocks under an adapter."""
    return set(block_hashes(PROMPT, block_size=32, root=root_hash("tiny-qwen", name)))


async def test_engine_state_folder_and_disk_agree_after_ten_operations_with_agent_kills(
    empty: EngineUnderTest, tmp_path: Path
) -> None:
    async with new_kill_trial(empty.engine.kind, tmp_path, seed=3, engine=empty.engine, may_kill_engine=False) as it:
        found = await it.run(10, per_round=5)
    assert found.violations == []
    assert (found.operations, found.kills) == (10, {"agent": 2})
    assert max(found.agreed_s) < patience(20), found
