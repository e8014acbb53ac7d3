"""Agentless engines found through Services without an agent port."""

from pathlib import Path

import pytest

from lorafleet.kube.client import connect
from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.engines import RunningEngine, start_engine
from tests.kube.places import SELECTOR, put_slice, slice_of
from tests.patience import patience, until
from tests.serving import client_of, serving

pytestmark = pytest.mark.fleet
DIGEST = "cd" * 32


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder, "sql")
    return folder


@pytest.fixture
def engine(kube, tmp_path) -> RunningEngine:
    running = start_engine("sim", make_model(tmp_path / "model"), host=kube.host)
    yield running
    running.stop()


async def first_answer(ask, holds):
    """The first answer for which it holds."""

    async def found():
        answer = await ask()
        return answer if holds(answer) else None

    return await until(found)


async def test_an_agentless_engine_of_a_slice_is_loaded_and_routed_to(kube, engine, shelf, tmp_path):
    named = slice_of("vllm-0", engine=engine.url, namespace=kube.namespace, zone="a", node="n1")
    await put_slice(kube, named)
    settings = {"kube_selector": SELECTOR, "kubeconfig": kube.kubeconfig}
    orchestrator = build_orchestrator(
        OrchestratorSettings(
            store=tmp_path / "store.db", settle_s=0.2, engine_slots=4, engine_roots=(shelf,), **settings
        ),
        kube=await connect(kube.kubeconfig),
    )
    async with serving(orchestrator.app) as url, client_of(url) as operator:

        async def workers():
            return (await operator.get("/v1/workers")).json()["data"]

        (worker,) = await first_answer(workers, lambda found: found and found[0]["state"] == "ready")
        assert (worker["id"], worker["agent_url"], worker["zone"], worker["node"]) == ("vllm-0", "", "a", "n1")
        spec = {"lora_id": "sql/v1", "source": f"file://{shelf}/sql", "base_model": "tiny-qwen", "digest": DIGEST}
        (await operator.post("/v1/adapters", json=spec)).raise_for_status()

        app, parts = build_router(RouterSettings(orchestrator_url=url, metadata_poll_s=0.1, zone="b", **settings))
        async with serving(app, http=app.state.http) as router, client_of(router) as client:
            assert await parts.discovery.changes.until(
                lambda: "vllm-0" in parts.discovery.fleet.replicas, timeout_s=patience(10)
            )
            body = {"lora_id": "sql/v1", "prompt": "hello", "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body, timeout=patience(30))  # cold: it is loaded first
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-lorafleet-worker"] == "vllm-0"
            assert parts.discovery.fleet.replicas["vllm-0"].is_far

        await put_slice(
            kube, slice_of("vllm-0", engine=engine.url, namespace=kube.namespace, terminating=True, zone="a", node="n1")
        )
        await first_answer(workers, lambda found: found[0]["state"] == "draining")
