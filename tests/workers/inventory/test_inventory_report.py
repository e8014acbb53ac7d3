"""A report marks the adapters that the operator's settings name, and no others."""

import shutil

from lorafleet.local.tiny_model import make_adapter
from tests.patience import until
from tests.serving import client_of
from tests.workers.broken import BROKEN
from tests.workers.running import RunningWorker, metadata_of, post, sim_inside
from workers.wire import AvailableLoras, WorkerAdapter

SLOTS = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")


async def configured(client, limit: int = 1000) -> dict[str, WorkerAdapter]:
    """The adapters that the operator's settings name, read page by page."""
    items: dict[str, WorkerAdapter] = {}
    cursor = ""
    while True:
        answer = await client.get("/v1/metadata/loras", params={"configured": True, "limit": limit, "cursor": cursor})
        page = AvailableLoras.model_validate(answer.json())
        items |= {item.lora_id: item for item in page.data}
        if page.next is None:
            return items
        cursor = page.next


async def marked(client) -> dict[str, bool]:
    """Engine name -> whether the report marks it, of all adapters in the engine."""
    loaded = (await metadata_of(client)).lora.loaded_loras
    return {lora.engine_name: lora.is_configured for lora in loaded if lora.state == "ready"}


async def load_at_engine(url, name, folder) -> None:
    async with client_of(url) as engine:
        answer = await engine.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
        assert answer.is_success, answer.text


async def test_preloads_folders_and_faulty_folders_are_configured_and_what_a_request_named_is_not(
    agent_model, agent_adapters, tmp_path
):
    shelf, elsewhere = tmp_path / "shelf", make_adapter(tmp_path / "elsewhere", "asked/v1")
    shutil.copytree(agent_adapters / "legal", shelf / "legal")
    shutil.copytree(agent_adapters / "extra", shelf / "extra")
    next(case for case in BROKEN if case.name == "more-layers").write(shelf / "deep")
    worker = RunningWorker(
        agent_model, shelf, tmp_path, *SLOTS, "--preload-loras", "legal/v2", "--lora-roots", str(tmp_path)
    )
    async with worker.together() as client:
        found = await configured(client, limit=1)
        (deep,) = found.keys() - {"legal/v2", "extra/v1"}
        assert (found[deep].state, found[deep].digest) == ("failed", "")
        assert "layer" in (found[deep].error or "")
        assert found["legal/v2"].digest
        assert found["extra/v1"].digest
        assert found["extra/v1"].source == str(shelf / "extra/v1")

        before = (await metadata_of(client)).lora.configured_digest
        asked = (await post(client, "load_lora", lora_id="asked/v1", source=str(elsewhere))).json()
        assert (await metadata_of(client)).lora.configured_digest == before != ""
        marks = await marked(client)
        assert {name.partition("@")[0]: mark for name, mark in marks.items()} == {"legal/v2": True, "asked/v1": False}
        assert marks[asked["engine_name"]] is False

        make_adapter(shelf, "late/v1")

        async def is_new() -> bool:
            return (await metadata_of(client)).lora.configured_digest != before

        await until(is_new, what="the report has another digest")
        assert "late/v1" in await configured(client)


async def test_a_worker_whose_settings_name_nothing_has_no_digest_of_configured_adapters(agent_model, tmp_path):
    (tmp_path / "empty").mkdir()
    worker = RunningWorker(agent_model, tmp_path / "empty", tmp_path, *SLOTS)
    async with worker.together() as client:
        assert ((await metadata_of(client)).lora.configured_digest, await configured(client)) == ("", {})


async def test_what_an_engine_had_at_its_start_is_configured_and_what_a_script_loads_is_not_even_after_a_restart(
    agent_model, tmp_path
):
    (tmp_path / "empty").mkdir()
    own, script = (make_adapter(tmp_path / "folders", name) for name in ("own", "script"))
    worker = RunningWorker(agent_model, tmp_path / "empty", tmp_path, *SLOTS)
    async with sim_inside(agent_model, *SLOTS, modules={"own": own}) as url:
        async with worker.inside("--engine-url", url) as client:
            assert await marked(client) == {"own": True}
            item = (await configured(client))["own"]
            assert (item.digest, bool(item.files_digest), item.source) == ("", True, own.as_uri())
            await load_at_engine(url, "script", script)

            async def is_seen() -> bool:
                return "script" in await marked(client)

            await until(is_seen, what="the script's load is seen")
            assert await marked(client) == {"own": True, "script": False}
            record = worker.state_dir / "adapters"  # an engine that starts again has its own by its settings
            await until(lambda: [path.name for path in record.glob("*.json")] == ["script.json"])
        async with worker.inside("--engine-url", url) as client:
            assert await marked(client) == {"own": True, "script": False}
            assert (await configured(client)).keys() == {"own"}


async def test_an_engine_that_loads_nothing_while_it_runs_serves_what_it_had_and_refuses_loads_with_the_reason(
    agent_model, agent_adapters, tmp_path
):
    own = make_adapter(tmp_path / "folders", "own")
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *SLOTS, "--preload-loras", "legal/v2")
    async with (
        sim_inside(agent_model, *SLOTS, environment={}, modules={"own": own}) as url,
        worker.inside("--engine-url", url) as client,
    ):
        assert await marked(client) == {"own": True}
        lora = (await metadata_of(client)).lora
        assert (lora.enabled, lora.capacity.available_slots, lora.refusal) == (False, 0, "")
        refused = await post(client, "load_lora", lora_id="legal/v2")
        assert refused.status_code == 409
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in refused.text
