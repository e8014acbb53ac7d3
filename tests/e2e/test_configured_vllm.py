"""A real vLLM that was started with `--lora-modules`, as people run it today, and then got an agent and a fleet."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.engines import RunningEngine, start_engine
from tests.patience import ORCHESTRATOR_WAITS, patience, until
from tests.serving import client_of, serving
from tests.workers.running import RunningWorker, loaded

pytestmark = [pytest.mark.vllm, pytest.mark.fleet]

BASE, OWN, LATE = "tiny-qwen", "own", "late"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configured-vllm")
    make_model(folder / "model")
    for name in (OWN, LATE):
        make_adapter(folder / "adapters", name)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RunningEngine]:
    flags = ("--lora-modules", f"{OWN}={folder / 'adapters' / OWN}", "--max-loras", "2", "--max-cpu-loras", "4")
    running = start_engine("vllm", folder / "model", flags=flags)
    yield running
    running.stop()


async def ask(client: httpx.AsyncClient, **names: str) -> httpx.Response:
    body = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, **names}
    return await client.post("/v1/completions", json=body, timeout=patience(30))


async def test_a_real_vllms_own_lora_modules_are_served_through_the_fleet_at_once(
    engine: RunningEngine, folder: Path, tmp_path: Path
) -> None:
    settings = OrchestratorSettings(store=tmp_path / "store.db", settle_s=0.2, **ORCHESTRATOR_WAITS)
    slots = ("--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16")
    worker = RunningWorker(folder / "model", folder / "empty", tmp_path, *slots)
    async with serving(build_orchestrator(settings).app) as url, client_of(url) as operator:
        app, parts = build_router(RouterSettings(orchestrator_url=url))
        async with (
            serving(app, http=app.state.http) as router_url,
            client_of(router_url) as router,
            client_of(engine.url) as direct,
            worker.inside("--engine-url", engine.url, "--orchestrator-url", url) as agent,
        ):
            assert await parts.discovery.changes.until(lambda: parts.discovery.fleet.replicas, timeout_s=patience(20))
            by_lora_id, by_model = await ask(router, lora_id=OWN), await ask(router, model=OWN)
            assert (by_lora_id.status_code, by_model.status_code) == (200, 200), by_lora_id.text
            engines_own = await ask(direct, model=OWN)
            text = engines_own.json()["choices"][0]["text"]
            assert by_lora_id.json()["choices"][0]["text"] == by_model.json()["choices"][0]["text"] == text
            assert (await ask(router, model=BASE)).json()["choices"][0]["text"] != text
            (entry,) = (await operator.get("/v1/adapters")).json()["data"]
            assert (entry["lora_id"], entry["spec"]["tenants"], len(entry["spec"]["digest"])) == (OWN, None, 64)

            body = {"lora_name": LATE, "lora_path": str(folder / "adapters" / LATE)}
            (await direct.post("/v1/load_lora_adapter", json=body, timeout=patience(30))).raise_for_status()

            async def is_seen() -> bool:
                return LATE in await loaded(agent)

            await until(is_seen, what="the agent sees the client's load")
            assert (await ask(router, model=LATE)).status_code == 404, "nobody who may has named it"
            assert (await ask(direct, model=OWN)).is_success, "clients of the engine itself are served on"
