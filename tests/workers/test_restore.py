"""What an agent does after a start about an engine and a cache that are not as its record has them."""

import asyncio
import json
import shutil

from lorafleet.tiny import make_adapter
from tests.engines import start_engine
from tests.workers.kills import SlowCable, remote
from tests.workers.running import RunningWorker, loaded, post


async def test_files_that_are_lost_are_fetched_once_while_the_cache_is_swept(worker, tmp_path):
    folder, cable = make_adapter(tmp_path / "far", "far/v1"), SlowCable()
    size = sum(path.stat().st_size for path in folder.iterdir())
    flags = ("--source-networks", "127.0.0.0/8", "--cache-grace-s", "1")  # swept every half second
    async with remote({"far/v1": folder}, tmp_path, cable) as sources:
        async with worker.running(*flags) as client:
            item = (await post(client, "load_lora", lora_id="far/v1", source=sources["far/v1"])).json()
        shutil.rmtree(item["path"])
        cable.carried, cable.pause_s = 0, 0.3
        async with worker.running(*flags) as client:
            assert await loaded(client) == {"far/v1"}
        assert size < cable.carried < 1.5 * size


async def test_what_an_attached_engine_holds_and_the_record_forgot_is_wanted_again(
    agent_model, agent_adapters, tmp_path
):
    engine = start_engine("sim", agent_model)
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, "--engine-url", engine.url, "--max-lora-rank", "16")
    try:
        async with worker.running() as client:
            await post(client, "load_lora", lora_id="sql-expert/v1")
        # As an agent leaves it that is killed between the engine's yes and its own note.
        [path] = (worker.state_dir / "adapters").glob("*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"is_loaded": False}))
        async with worker.running() as client:
            assert await loaded(client) == {"sql-expert/v1"}
            assert json.loads(await asyncio.to_thread(path.read_text))["is_loaded"] is True
    finally:
        engine.stop()
