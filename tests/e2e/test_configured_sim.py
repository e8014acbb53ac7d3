"""Fleets as the first design starts them: what a worker's settings name is served at once, by `lora_id` and `model`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import ORCHESTRATOR_WAITS, patience
from tests.service_process import ServiceProcess
from tests.serving import client_of, serving
from tests.workers.broken import BROKEN
from tests.workers.running import RunningWorker, sim_inside

pytestmark = pytest.mark.fleet

PRELOADED, ON_DISK, FAULTY = "sql/v1", "legal/v2", "deep"
SLOTS = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("configured-model") / "model")


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with two good adapters and a faulty one."""
    for lora_id in (PRELOADED, ON_DISK):
        make_adapter(tmp_path / "shelf", lora_id, rank=8)
    next(case for case in BROKEN if case.name == "more-layers").write(tmp_path / "faulty")
    (config,) = (tmp_path / "faulty").rglob("adapter_config.json")
    shutil.copytree(config.parent, tmp_path / "shelf" / FAULTY)
    return tmp_path / "shelf"


@pytest.fixture
def services() -> Iterator[list[ServiceProcess]]:
    """The services that a test starts, which are stopped at its end, the last one first."""
    started: list[ServiceProcess] = []
    yield started
    for service in reversed(started):
        service.stop()


def worker(folder: Path, model: Path, shelf: Path, *more: str) -> ServiceProcess:
    """A worker that is told which adapters to serve."""
    flags = (
        "--engine", "sim", "--model", str(model), "--served-model-name", "tiny-qwen", *SLOTS, "--instance-id", "w0",
        "--lora-path", str(shelf), "--preload-loras", PRELOADED, "--engine-port", "0",
        "--state-dir", str(folder / "state"), "--cache-dir", str(folder / "cache"), *more,
    )  # fmt: skip
    return ServiceProcess("workers", folder / "w0", flags)


def ask(router: ServiceProcess, **names: str) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 2, **names}
    return httpx.post(f"{router.url}/v1/completions", json=body, timeout=patience(30), trust_env=False)


def assert_served(router: ServiceProcess, lora_id: str) -> None:
    for field in ("lora_id", "model"):
        answer = ask(router, **{field: lora_id})
        assert answer.status_code == 200, (field, lora_id, answer.text)
        assert answer.json()["model"] == lora_id


def assert_failed(router: ServiceProcess, lora_id: str) -> None:
    answer = ask(router, lora_id=lora_id)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "adapter_failed"), answer.text
    assert "layer" in error["message"], "the cause is there"


def test_a_worker_with_an_orchestrator_serves_what_its_settings_name_as_soon_as_it_is_ready(
    tmp_path: Path, model: Path, shelf: Path, services: list[ServiceProcess]
) -> None:
    orchestrator = ServiceProcess("orchestrator", tmp_path / "o", ("--store", str(tmp_path / "store.db")))
    services.append(orchestrator)
    orchestrator.start()
    agent = worker(tmp_path, model, shelf, "--orchestrator-url", orchestrator.url)
    services.append(agent)
    agent.start()
    router = ServiceProcess("router", tmp_path / "r", ("--orchestrator-url", orchestrator.url, "--drain-s", "0"))
    services.append(router)
    router.start()
    for lora_id in (PRELOADED, ON_DISK):
        assert_served(router, lora_id)
    assert_failed(router, FAULTY)
    stored = httpx.get(f"{orchestrator.url}/v1/adapters", trust_env=False).json()["data"]
    assert [item["spec"]["tenants"] for item in stored] == [None] * 3
    told = httpx.get(f"{orchestrator.url}/v1/history", params={"kind": "adapter_adopted"}, trust_env=False).json()
    assert {entry["subject"] for entry in told["data"]} == {PRELOADED, ON_DISK, FAULTY}


def test_a_router_without_an_orchestrator_serves_what_the_settings_of_an_agent_name(
    tmp_path: Path, model: Path, shelf: Path, services: list[ServiceProcess]
) -> None:
    agent = worker(tmp_path, model, shelf)
    services.append(agent)
    agent.start()
    router = ServiceProcess("router", tmp_path / "r", ("--engines", agent.url, "--drain-s", "0"))
    services.append(router)
    router.start()
    for lora_id in (PRELOADED, ON_DISK):
        assert_served(router, lora_id)
    assert_failed(router, FAULTY)
    engine = httpx.get(f"{agent.url}/metadata", trust_env=False).json()["transport"]["engine_url"]

    alone = ServiceProcess("router", tmp_path / "alone", ("--engines", engine, "--drain-s", "0"))
    services.append(alone)
    alone.start()
    assert_served(alone, PRELOADED)
    unknown = ask(alone, lora_id="no/v1")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


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
