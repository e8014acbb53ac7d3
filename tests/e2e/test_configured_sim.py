"""What an attached engine had at its start is served, by `lora_id` and `model`."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import ORCHESTRATOR_WAITS, patience
from tests.serving import client_of, serving
from tests.workers.running import RunningWorker, sim_inside

pytestmark = pytest.mark.fleet

SLOTS = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("configured-model") / "model")


@pytest.mark.parametrize("loads", ["1", "0"])
async def test_what_an_attached_engine_had_at_its_start_is_served_whether_or_not_it_loads_anything_else(
    tmp_path: Path, model: Path, loads: str
) -> None:
    own = make_adapter(tmp_path / "folders", "own", rank=8)
    (tmp_path / "empty").mkdir()
    settings = OrchestratorSettings(store=tmp_path / "store.db", settle_s=0.2, **ORCHESTRATOR_WAITS)
    worker = RunningWorker(model, tmp_path / "empty", tmp_path, *SLOTS)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": loads}
    async with (
        sim_inside(model, *SLOTS, modules={"own": own}, environment=environment) as engine,
        serving(build_orchestrator(settings).app) as url,
        client_of(url) as operator,
    ):
        app, parts = build_router(RouterSettings(orchestrator_url=url))
        async with (
            serving(app, http=app.state.http) as router_url,
            client_of(router_url) as router,
            worker.inside("--engine-url", engine, "--orchestrator-url", url),
        ):
            assert await parts.discovery.changes.until(lambda: parts.discovery.fleet.replicas, timeout_s=patience(20))
            for field in ("lora_id", "model"):
                body = {field: "own", "prompt": "hello", "max_tokens": 2}
                answer = await router.post("/v1/completions", json=body, timeout=patience(30))
                assert answer.status_code == 200, answer.text
            registered = (await operator.get("/v1/adapters")).json()["data"]
            assert [item["lora_id"] for item in registered] == (["own"] if loads == "1" else [])
            assert (await operator.get("/v1/orphans")).json()["data"] == []
