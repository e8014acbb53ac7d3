"""What the texts ask of one worker without an orchestrator: a folder of adapters, preloads, loads and unloads."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.founding.conftest import LEGAL, PYTHON, SQL
from tests.patience import patience, until
from tests.serving import client_of, serving
from tests.workers.running import SIM, RunningWorker, sim_inside
from workers.config import WorkerSettings
from workers.engines.launch import launch_command

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LOAD, UNLOAD, LIST = "/v1/admin/load_lora", "/v1/admin/unload_lora", "/v1/admin/loras"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("founding-model"))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with three adapters, one of them some levels deeper."""
    for lora_id, rank in ((SQL, 8), (PYTHON, 16), ("team/a/legal/v2", 8)):
        make_adapter(tmp_path / "shared" / "loras", lora_id, rank=rank)
    return tmp_path / "shared" / "loras"


@pytest.fixture
def worker(model: Path, shared: Path, tmp_path: Path) -> RunningWorker:
    return RunningWorker(model, shared, tmp_path, *SIM)


async def lora_of(client: httpx.AsyncClient) -> dict[str, Any]:
    lora: dict[str, Any] = (await client.get("/metadata")).json()["lora"]
    return lora


async def state_of(client: httpx.AsyncClient, lora_id: str) -> str:
    state: str = (await client.get(f"/v1/metadata/loras/{lora_id}")).json().get("state", "")
    return state


async def test_folder_of_adapters_is_found_with_the_path_below_it_as_name(worker: RunningWorker, shared: Path) -> None:
    (shared / SQL / "metadata.json").write_text(json.dumps({"owner": "the data team"}))
    assert {CONFIG, WEIGHTS} <= {path.name for path in (shared / SQL).iterdir()}
    async with worker.together() as client:
        lora = await lora_of(client)
        item = (await client.get(f"/v1/metadata/loras/{SQL}")).json()
    assert item["metadata"] == {"owner": "the data team"}
    found = {item["lora_id"]: item for item in lora["available_loras"]}
    assert (lora["available_count"], found.keys()) == (3, {SQL, PYTHON, "team/a/legal/v2"})
    assert {lora_id: item["path"] for lora_id, item in found.items()} == {name: str(shared / name) for name in found}
    assert {lora_id: item["rank"] for lora_id, item in found.items()} == {SQL: 8, PYTHON: 16, "team/a/legal/v2": 8}
    assert {(item["base_model"], item["state"]) for item in found.values()} == {("tiny-qwen", "on_disk")}


@pytest.mark.fleet
async def test_list_of_adapters_has_the_designed_parts(worker: RunningWorker) -> None:
    async with worker.inside() as client:
        assert (await client.post(LOAD, json={"lora_id": SQL})).status_code == 200
        listed = (await client.get("/v1/metadata/loras")).json()
        one = (await client.get(f"/v1/metadata/loras/{SQL}")).json()
        other = (await client.get(f"/v1/metadata/loras/{PYTHON}")).json()
    available = {item["lora_id"]: item for item in listed["available_loras"]}
    assert all({"path", "base_model", "rank", "state"} <= item.keys() for item in available.values())
    (loaded,) = listed["loaded_loras"]
    assert (loaded["lora_id"], loaded["state"], loaded["lora_int_id"]) == (SQL, "ready", one["lora_int_id"])
    capacity = listed["capacity"]
    assert (capacity["max_loras"], capacity["loaded_count"], capacity["available_slots"]) == (2, 1, 2)
    assert (one["loaded"], one["metadata"], one["lora_int_id"]) == (True, {}, 1)
    assert (other["loaded"], other["metadata"], other["lora_int_id"]) == (False, {}, None)


async def test_missing_folder_of_adapters_is_an_empty_list(model: Path, tmp_path: Path) -> None:
    worker = RunningWorker(model, tmp_path / "nowhere", tmp_path, *SIM)
    async with worker.together() as client:
        lora = await lora_of(client)
        assert (lora["available_loras"], lora["loaded_loras"]) == ([], [])
        assert (await client.get("/ready")).status_code == 200


async def test_states_of_an_adapter_are_the_designed_ones(worker: RunningWorker, shared: Path) -> None:
    weights = make_adapter(shared, LEGAL) / WEIGHTS
    async with worker.together(engine=("--sim-load-s", str(patience(0.3)))) as client:
        assert await state_of(client, SQL) == "on_disk"
        loading = asyncio.create_task(client.post(LOAD, json={"lora_id": SQL}))

        async def is_loading() -> bool:
            return await state_of(client, SQL) == "loading"

        await until(is_loading, what="the load has begun")
        assert (await loading).json()["state"] == "ready"
        assert await state_of(client, SQL) == "ready"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert (await client.post(LOAD, json={"lora_id": LEGAL})).is_client_error
        assert [each["state"] for each in (await lora_of(client))["loaded_loras"]] == ["ready", "failed"]

        async def is_failed() -> bool:
            return await state_of(client, LEGAL) == "failed"

        await until(is_failed, what="the folder is scanned again")
        missing = await client.post(LOAD, json={"lora_id": "nobody/v1"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_unknown")


async def test_loads_and_unloads_over_rest_answer_as_designed(worker: RunningWorker, shared: Path) -> None:
    body = {"lora_id": SQL, "lora_path": str(shared / SQL), "base_model": "tiny-qwen"}
    async with worker.together() as client:
        answers = [(await client.post(LOAD, json=body)).json() for _ in range(2)]
        assert [(each["status"], each["lora_id"], each["state"]) for each in answers] == [("success", SQL, "ready")] * 2
        assert all(each["message"] for each in answers)
        assert len({each["loaded_at"] for each in answers}) == 1, "the second load changes nothing"
        listed = (await client.get(LIST)).json()
        assert [(each["lora_id"], each["state"]) for each in listed["loaded_loras"]] == [(SQL, "ready")]
        capacity = listed["capacity"]
        assert (capacity["max_loras"], capacity["loaded_count"], capacity["available_slots"]) == (2, 1, 2)
        for _ in range(2):  # the second one finds nothing to unload, which is a success
            gone = (await client.post(UNLOAD, json={"lora_id": SQL})).json()
            assert (gone["status"], gone["lora_id"], bool(gone["message"])) == ("success", SQL, True)
        listed = (await client.get(LIST)).json()
        assert (listed["loaded_loras"], listed["capacity"]["loaded_count"]) == ([], 0)
        assert await state_of(client, SQL) == "on_disk"


@asynccontextmanager
async def recorded(engine_url: str, *, fails: str = "") -> AsyncIterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """The URL of a proxy to an engine, and the loads and unloads that it passed on, one at a time.

    fails  the path that it answers itself, with a 500
    """
    calls: list[tuple[str, dict[str, str]]] = []
    under_way: list[str] = []
    async with client_of(engine_url, timeout=patience(20)) as engine:

        async def forward(request: Request) -> Response:
            body = await request.body()
            is_change = request.url.path.endswith("_lora_adapter")
            if is_change:
                calls.append((request.url.path, json.loads(body)))
                assert not under_way, "another one is under way"
                under_way.append(request.url.path)
            if request.url.path == fails:
                return Response('{"error": {"message": "no"}}', 500, media_type="application/json")
            answer = await engine.request(
                request.method, request.url.path, params=str(request.query_params), content=body,
                headers={"content-type": request.headers.get("content-type", "application/json")},
            )  # fmt: skip
            if is_change:
                under_way.clear()
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

        async with serving(Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])) as url:
            yield url, calls


async def test_agent_loads_and_unloads_by_vllms_own_calls(worker: RunningWorker) -> None:
    async with (
        sim_inside(worker.model, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16") as sim,
        recorded(sim) as (url, calls),
        worker.inside("--engine-url", url) as client,
    ):
        item = (await client.post(LOAD, json={"lora_id": SQL})).json()
        assert (await client.post(LOAD, json={"lora_id": SQL})).status_code == 200
        assert (await client.post(UNLOAD, json={"lora_id": SQL})).status_code == 200
    assert calls == [
        ("/v1/load_lora_adapter", {"lora_name": item["engine_name"], "lora_path": item["path"]}),
        ("/v1/unload_lora_adapter", {"lora_name": item["engine_name"]}),
    ]


async def test_loads_that_are_asked_for_together_reach_the_engine_one_at_a_time(worker: RunningWorker) -> None:
    slots = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
    async with (
        sim_inside(worker.model, *slots, "--sim-load-s", "0.1") as sim,
        recorded(sim) as (url, calls),
        worker.inside("--engine-url", url) as client,
    ):
        asked = [client.post(LOAD, json={"lora_id": lora_id}) for lora_id in (SQL, PYTHON)]
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    assert len(calls) == 2


async def test_failed_unload_is_an_error_and_the_adapter_stays_listed(worker: RunningWorker) -> None:
    async with (
        sim_inside(worker.model, "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16") as sim,
        recorded(sim, fails="/v1/unload_lora_adapter") as (url, _),
        worker.inside("--engine-url", url) as client,
    ):
        assert (await client.post(LOAD, json={"lora_id": SQL})).status_code == 200
        failed = await client.post(UNLOAD, json={"lora_id": SQL})
        assert (failed.is_server_error, failed.json()["error"]["code"]) == (True, "engine_failed")
        assert [each["lora_id"] for each in (await client.get(LIST)).json()["loaded_loras"]] == [SQL]


def test_engine_is_started_with_adapters_enabled_and_its_limits() -> None:
    settings = WorkerSettings(model="/models/m", max_loras=4, max_lora_rank=64)
    started = launch_command(settings, port=8100, topic="kv@b")
    command = list(started.command)
    assert "--enable-lora" in command
    for flag, value in (("--max-loras", "4"), ("--max-lora-rank", "64")):
        assert command[command.index(flag) + 1] == value
    assert started.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.fleet
async def test_preloads_are_ready_at_the_start_and_the_log_has_each_load_failure_and_unload(
    worker: RunningWorker, shared: Path
) -> None:
    weights = make_adapter(shared, LEGAL) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    async with worker.running("--preload-loras", json.dumps([SQL, "nowhere/v1", PYTHON])) as client:
        states = {each["lora_id"]: each["state"] for each in (await lora_of(client))["loaded_loras"]}
        assert (states[SQL], states[PYTHON]) == ("ready", "ready")
        refused = (await client.post(LOAD, json={"lora_id": LEGAL})).json()["error"]
        assert (await client.post(UNLOAD, json={"lora_id": SQL})).status_code == 200
    lines = [json.loads(line) for line in (worker.folder / "agent.log").read_text().splitlines() if line[:1] == "{"]
    said = {(line["event"], line.get("lora_id")): line for line in lines}
    assert said["adapters in lora_path", None]["found"] == 4
    assert said["preload failed", "nowhere/v1"]["code"] == "adapter_unknown"
    assert {("lora_loaded", SQL), ("lora_loaded", PYTHON)} <= said.keys()
    failed = said["load failed", LEGAL]
    assert (failed["code"], failed["error"] in refused["message"]) == (refused["code"], True)
    assert said["lora_unloaded", SQL]["asked_by"]
