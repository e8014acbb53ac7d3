"""Workers whose engine's KV connector separates adapters by salts, or not at all."""

import sys

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from lorafleet.kv.connectors import CONNECTORS
from tests.patience import patience
from tests.serving import serving
from tests.workers.running import SIM, RunningWorker, code, metadata_of, post
from workers.engines.kinds import engine_client

MODEL = "tiny-qwen"


def command_with_connector(name: str) -> tuple[str, ...]:
    config = f'{{"kv_connector": "{name}", "kv_role": "kv_both"}}'
    return ("--", sys.executable, "-P", "-m", "lorafleet.sim", "--kv-transfer-config", config)


async def completion(url: str, model: str) -> int:
    async with httpx.AsyncClient(timeout=patience(10)) as client:
        body = {"model": model, "prompt": "hello", "max_tokens": 1}
        return (await client.post(f"{url}/v1/completions", json=body)).status_code


async def assert_refuses(client: httpx.AsyncClient, reason: str) -> None:
    found = await metadata_of(client)
    assert (found.state, found.lora.enabled, found.lora.loaded_loras) == ("ready", False, ())
    assert found.lora.capacity.available_slots == 0
    assert reason in found.lora.refusal
    refused = await post(client, "load_lora", lora_id="legal/v2")
    assert (refused.status_code, code(refused)) == (409, "adapters_refused")
    assert found.lora.refusal in refused.json()["error"]["message"]
    assert await completion(found.transport.engine_url, MODEL) == 200


async def test_attached_engine_with_unknown_connector_serves_only_its_base_model(worker):
    connector = ("--kv-transfer-config", "{}")
    with capture_logs() as logs:
        async with worker.together("--preload-loras", "sql-expert/v1", engine=connector) as client:
            await assert_refuses(client, "engine_salt")
    assert {line["log_level"] for line in logs if line["event"] == "engine takes no adapters"} == {"error"}


async def test_adapters_are_restored_once_the_engine_accepts_adapters(worker):
    async with worker.together() as client:
        await post(client, "load_lora", lora_id="legal/v2")
    async with worker.together(engine=("--kv-transfer-config", "{}")) as client:
        await assert_refuses(client, "engine_salt")
    async with worker.together() as client:
        assert [lora.lora_id for lora in (await metadata_of(client)).lora.loaded_loras] == ["legal/v2"]


@pytest.mark.parametrize(
    ("setting", "refusal", "is_salted"),
    [("always", "", True), ("never", "", False), ("no_adapters", "engine_salt is no_adapters", False)],
)
async def test_setting_decides_for_an_attached_engine(worker, setting, refusal, is_salted):
    connector = ("--kv-transfer-config", "{}")
    async with worker.together("--engine-salt", setting, engine=connector) as client:
        found = (await metadata_of(client)).lora
        assert (found.refusal, found.is_salted) == (refusal, is_salted)
        assert (await post(client, "load_lora", lora_id="legal/v2")).status_code == (409 if refusal else 200)


@pytest.mark.fleet
@pytest.mark.parametrize("name", ["ExampleConnector", "LMCacheMPConnector", "OffloadingConnector"])
async def test_engine_that_the_agent_starts_is_judged_by_its_command(agent_model, agent_adapters, tmp_path, name):
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *SIM)
    async with worker.inside(*command_with_connector(name)) as client:
        separation = CONNECTORS[name].separation
        if separation == "refused":
            await assert_refuses(client, name)
            return
        assert (await post(client, "load_lora", lora_id="legal/v2")).status_code == 200
        found = (await metadata_of(client)).lora
        assert (found.refusal, found.is_salted) == ("", separation == "salted")


@pytest.mark.parametrize(
    ("arguments", "separation"),
    [
        ({}, "safe"),
        ({"enable_lmcache": False, "hicache_storage_backend": None}, "safe"),
        ({"enable_lmcache": True}, "refused"),
        ({"hicache_storage_backend": "file"}, "refused"),
    ],
)
async def test_sglangs_external_caches_count_as_unknown_connectors(arguments, separation):
    app = Starlette(routes=[Route("/server_info", lambda _: JSONResponse({"page_size": 16, **arguments}))])
    async with serving(app) as url:
        engine = engine_client("sglang", url)
        found = await engine.kv_connector()
        await engine.aclose()
    assert (found.separation, found.is_known) == (separation, separation == "safe")


@pytest.mark.fleet
async def test_salts_do_not_help_with_a_connector_that_ignores_them(agent_model, agent_adapters, tmp_path):
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *SIM, "--engine-salt", "always")
    async with worker.inside(*command_with_connector("ExampleConnector")) as client:
        await assert_refuses(client, "ExampleConnector")
