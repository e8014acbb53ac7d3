"""No adapter is ready whose modules the engine ignores: the engine is asked, or its answers are compared."""

import json

import httpx
import pytest
from pydantic import TypeAdapter

from tests.patience import patience, until
from tests.workers.changed_adapters import adapter_of_zeros
from tests.workers.running import RunningWorker, code, metadata_of, post
from workers.wire import WorkerAdapter

ADAPTER = "sql-expert/v1"
LAYERS = 4
NO_MODULE = ("--lora-target-modules", "embed_tokens")
PATIENT = ("--canary-timeout-s", str(patience(2)))
WITHOUT_MLP = ("--lora-target-modules", "o_proj", "qkv_proj", "q_proj")


async def loaded(client: httpx.AsyncClient, lora_id: str = ADAPTER) -> WorkerAdapter:
    (found,) = [lora for lora in (await metadata_of(client)).lora.loaded_loras if lora.lora_id == lora_id]
    return found


async def engine_list(client: httpx.AsyncClient) -> list[str]:
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(timeout=patience(10)) as engine:
        return [model["id"] for model in (await engine.get(f"{url}/v1/models")).json()["data"] if model["parent"]]


async def metric(client: httpx.AsyncClient, line: str) -> float:
    page = (await client.get("/metrics")).text
    return sum(float(found.rpartition(" ")[2]) for found in page.splitlines() if found.startswith(line))


def engine_args(*words: str) -> tuple[str, str]:
    return ("--engine-args", json.dumps(words))


# --- the engine reports ------------------------------------------------------------------------------------------


@pytest.mark.fleet
async def test_adapter_of_which_the_engine_has_no_module_is_refused_and_unloaded(worker):
    async with worker.inside(*engine_args(*NO_MODULE)) as client:
        refused = await post(client, "load_lora", lora_id=ADAPTER)
        assert (refused.status_code, code(refused)) == (422, "adapter_no_effect")
        message = refused.json()["error"]["message"]
        assert f"the engine has 0 of its {7 * LAYERS} modules" in message
        assert "model.layers.0.mlp.down_proj" in message
        assert "docs/engines.md" in message
        assert (await loaded(client)).state == "failed"
        assert await engine_list(client) == []
        assert await metric(client, 'lorafleet_workers_effect_checks_total{by="report",found="none"}') == 1


@pytest.mark.fleet
async def test_partial_effect_is_listed_with_the_adapter_counted_and_kept_over_restarts(worker):
    for _ in range(2):
        async with worker.inside(*engine_args(*WITHOUT_MLP)) as client:
            answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
            for found in (answer, TypeAdapter(WorkerAdapter).dump_python(await loaded(client), mode="json")):
                assert found["ignored_modules"]["count"] == 3 * LAYERS
                assert found["ignored_modules"]["names"][0] == "model.layers.0.mlp.down_proj"
                assert found["effect"] == "applied"
                assert "the engine ignores 12 of its 28 modules" in found["note"]
            await until(lambda: metric(client, "lorafleet_workers_partial_adapters "), what="the gauge is set")


@pytest.mark.fleet
async def test_policy_refuse_takes_no_part_of_an_adapter_and_a_request_may_say_otherwise(worker):
    async with worker.inside(*engine_args(*WITHOUT_MLP), "--ignored-modules", "refuse") as client:
        refused = await post(client, "load_lora", lora_id=ADAPTER)
        assert (refused.status_code, code(refused)) == (422, "modules_ignored")
        assert "the engine has 16 of its 28 modules" in refused.json()["error"]["message"]
        accepted = await post(client, "load_lora", lora_id=ADAPTER, ignored_modules="accept")
        assert accepted.raise_for_status().json()["state"] == "ready"


@pytest.mark.fleet
async def test_whole_adapter_is_applied_and_needs_no_canary(worker):
    async with worker.inside() as client:
        answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert (answer["effect"], answer["note"], answer["ignored_modules"]) == ("applied", "", None)
        assert await metric(client, "lorafleet_workers_canary_seconds_count") == 0
    assert [path.name for path in (worker.state_dir / "lora-reports").iterdir()] == ["engine"]


@pytest.mark.fleet
async def test_restarted_engine_that_ignores_an_adapter_gets_it_no_longer(worker):
    async with worker.inside() as client:
        (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status()
        (await post(client, "load_lora", lora_id="legal/v2")).raise_for_status()
    async with worker.inside(*engine_args(*NO_MODULE)) as client:
        loras = {lora.lora_id: lora for lora in (await metadata_of(client)).lora.loaded_loras}
        assert {name: lora.state for name, lora in loras.items()} == {ADAPTER: "failed", "legal/v2": "failed"}
        assert await engine_list(client) == []
        assert "0 of its 28 modules" in (loras[ADAPTER].error or "")


@pytest.mark.fleet
async def test_modules_that_never_run_are_ignored_and_an_adapter_of_them_alone_is_refused(worker):
    async with worker.inside(*engine_args("--sim-uncalled", "o_proj")) as client:
        answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert (answer["effect"], answer["ignored_modules"]["count"]) == ("applied", LAYERS)
        assert "runs this layer past what adapters change in it" in answer["note"]
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    async with worker.inside(*engine_args("--sim-uncalled", *every)) as client:
        assert (await loaded(client)).state == "failed", "the engine is another one after its restart"
        refused = await post(client, "load_lora", lora_id="legal/v2")
        assert (refused.status_code, code(refused)) == (422, "adapter_no_effect")
        assert f"the engine uses 0 of its {7 * LAYERS} modules" in refused.json()["error"]["message"]
        assert await engine_list(client) == []


# --- the answers are compared ------------------------------------------------------------------------------------


async def test_canary_refuses_an_adapter_that_does_not_change_the_answers(worker):
    async with worker.together(engine=NO_MODULE) as client:
        refused = await post(client, "load_lora", lora_id=ADAPTER)
        assert (refused.status_code, code(refused)) == (422, "adapter_no_effect")
        assert "the base model's to the last bit" in refused.json()["error"]["message"]
        assert await engine_list(client) == []
        assert await metric(client, 'lorafleet_workers_effect_checks_total{by="canary",found="none"}') == 1


async def test_canary_sees_an_adapter_and_asks_the_base_model_once(worker):
    async with worker.together() as client:
        before = await metric(client, "lorafleet_workers_kv_events_total")
        for lora_id, requests in ((ADAPTER, 3), ("legal/v2", 1)):
            asked = await requests_of(client)
            answer = (await post(client, "load_lora", lora_id=lora_id)).raise_for_status().json()
            assert (answer["effect"], answer["note"]) == ("seen", "")
            assert await requests_of(client) - asked <= requests + 3
        assert await metric(client, "lorafleet_workers_kv_events_total") == before, "its prompts are cached nowhere"
        assert await metric(client, "lorafleet_workers_canary_seconds_count") == 2


async def requests_of(client: httpx.AsyncClient) -> float:
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(timeout=patience(10)) as engine:
        page = (await engine.get(f"{url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith("vllm:request_success"))


@pytest.mark.parametrize("flags", [(), NO_MODULE], ids=["used", "ignored"])
async def test_scores_or_embeddings_of_a_model_that_pools_are_compared(worker, flags):
    async with worker.together(*PATIENT, engine=("--runner", "pooling", *flags)) as client:
        answer = await post(client, "load_lora", lora_id=ADAPTER)
        if flags:
            assert code(answer) == "adapter_no_effect"
        else:
            assert answer.raise_for_status().json()["effect"] == "seen"


async def test_adapter_of_zeros_is_ready_with_a_note(agent_model, agent_adapters, tmp_path, worker):
    adapter_of_zeros(agent_adapters / ADAPTER, tmp_path / "adapters" / "fresh")
    fresh = RunningWorker(agent_model, tmp_path / "adapters", tmp_path / "fresh", "--engine", "sim")
    async with fresh.together(engine=NO_MODULE) as client:
        answer = (await post(client, "load_lora", lora_id="fresh")).raise_for_status().json()
        assert (answer["state"], answer["effect"]) == ("ready", "zero")
        assert "all zero" in answer["note"]


async def test_canary_may_warn_or_be_off(worker):
    async with worker.together("--canary", "warn", *PATIENT, engine=NO_MODULE) as client:
        answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert answer["effect"] == "unknown"
        assert "to the last bit" in answer["note"]
        await until(lambda: metric(client, "lorafleet_workers_unproved_adapters "), what="the gauge is set")
    async with worker.together("--canary", "off", engine=NO_MODULE) as client:
        answer = (await post(client, "load_lora", lora_id="legal/v2")).raise_for_status().json()
        assert (answer["effect"], answer["note"]) == ("", "")


async def test_engine_too_busy_for_the_canary_keeps_the_adapter_until_it_is_idle(worker):
    slow = ("--sim-prefill-tokens-per-s", "60", *NO_MODULE)  # a canary's prompt takes 0.2 s
    async with worker.together("--canary-timeout-s", "0.05", engine=slow) as client:
        answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert (answer["state"], answer["effect"]) == ("ready", "unknown")
        assert "did not answer within 0.05 s" in answer["note"]
        assert (await loaded(client)).state == "ready"


async def test_idle_engine_is_asked_again_about_an_unproved_adapter(worker):
    async with worker.together("--canary", "off", engine=NO_MODULE) as client:
        (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status()
    async with worker.together(engine=NO_MODULE) as client:

        async def is_refused() -> bool:
            return (await loaded(client)).state == "failed"

        await until(is_refused, what="the adapter without effect is found")
        assert await engine_list(client) == []
