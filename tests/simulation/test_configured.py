"""Fleets as the first design starts them: what a worker's settings name is served at once, by `lora_id` and `model`."""

import shutil

from tests.simulation.fleet import is_ready, until
from tests.simulation.programs import AGENT_PORT, ENGINE_PORT, EngineFlags
from tests.workers.broken import BROKEN

PRELOADED, ON_DISK, FAULTY = "sql/v1", "legal/v2", "deep"
SETTINGS = {"preload_loras": PRELOADED}


def fill(simulation):
    """Two good adapters and a faulty one."""
    for lora_id in (PRELOADED, ON_DISK):
        simulation.adapter(lora_id)
    next(case for case in BROKEN if case.name == "more-layers").write(simulation.folder / "faulty")
    (config,) = (simulation.folder / "faulty").rglob("adapter_config.json")
    shutil.copytree(config.parent, simulation.shelf / FAULTY)


async def assert_served(fleet, lora_id, *, router=0):
    for names in ({"lora_id": lora_id}, {"model": lora_id}):
        answer = await fleet.routers[router].post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **names})
        assert answer.status_code == 200, (names, answer.text)
        assert answer.json()["model"] == lora_id


async def assert_failed(fleet, lora_id):
    answer = await fleet.routers[0].post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "lora_id": lora_id})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "adapter_failed"), answer.text
    assert "layer" in error["message"], "the cause is there"


async def test_a_worker_with_an_orchestrator_serves_what_its_settings_name_as_soon_as_it_is_ready(simulation):
    fill(simulation)
    fleet = await simulation.fleet(adopt=None, agent=SETTINGS, routers=0)
    fleet.add_router()
    await until(lambda: is_ready(fleet.routers[0]), within_s=20, every_s=0.02, what="the router is ready")
    for lora_id in (PRELOADED, ON_DISK):
        await assert_served(fleet, lora_id)
    await assert_failed(fleet, FAULTY)
    stored = (await fleet.http.get("/v1/adapters")).json()["data"]
    assert [item["spec"]["tenants"] for item in stored] == [None] * 3
    told = (await fleet.http.get("/v1/history", params={"kind": "adapter_adopted"})).json()
    assert {entry["subject"] for entry in told["data"]} == {PRELOADED, ON_DISK, FAULTY}


async def test_a_router_without_an_orchestrator_serves_what_the_settings_of_an_agent_name(simulation):
    fill(simulation)
    fleet = await simulation.fleet(has_keys=False, orchestrators=0, adopt=None, workers=0, routers=0)
    fleet.add_worker(EngineFlags(), orchestrator_url="", **SETTINGS)
    await until(lambda: is_ready(fleet.agents["w0"]), every_s=0.05, what="the worker is ready")
    fleet.add_router(orchestrator_url="", engines=(f"http://10.0.1.1:{AGENT_PORT}",))
    await until(lambda: is_ready(fleet.routers[0]), within_s=20, every_s=0.02, what="the router is ready")
    for lora_id in (PRELOADED, ON_DISK):
        await assert_served(fleet, lora_id)
    await assert_failed(fleet, FAULTY)

    fleet.add_router(orchestrator_url="", engines=(f"http://10.0.1.1:{ENGINE_PORT}",))
    await until(lambda: is_ready(fleet.routers[1]), every_s=0.02, what="the router is ready")
    await assert_served(fleet, PRELOADED, router=1)
    unknown = await fleet.ask("no/v1", router=1)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
