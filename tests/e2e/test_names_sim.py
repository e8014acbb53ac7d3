"""One base model under several names: the fleet's, what its engines serve it as, and what trainers called it."""

import contextlib
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import ORCHESTRATOR_WAITS, patience, until
from tests.serving import serving
from tests.workers.running import SIM, RunningWorker

pytestmark = pytest.mark.fleet

BASE, SERVED = "tiny", {"w0": "tiny-small", "w1": "acme/tiny-large"}


async def test_workers_that_serve_one_base_model_under_other_names_answer_for_it_and_its_adapters(tmp_path: Path):
    model, shelf = make_model(tmp_path / "model"), tmp_path / "adapters"
    make_adapter(shelf, "sql/v1", base_model="Hub/Tiny")
    orchestrator = build_orchestrator(
        OrchestratorSettings(store=tmp_path / "store.db", settle_s=0.2, **ORCHESTRATOR_WAITS)
    )
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(orchestrator.app))
        for name, served in SERVED.items():
            (tmp_path / name).mkdir()
            names = ("--instance-id", name, "--served-model-name", served, "--base-model", BASE)
            worker = RunningWorker(model, shelf, tmp_path / name, *SIM, *names, "--orchestrator-url", url)
            await stack.enter_async_context(worker.inside())
        settings = RouterSettings(
            orchestrator_url=url, metadata_poll_s=0.2, catalog_poll_s=0.2, policy="round_robin", max_tries=1
        )
        app, parts = build_router(settings)
        router = await stack.enter_async_context(serving(app, http=app.state.http))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router, timeout=patience(30)))
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(10))
        # Without a base model, as `lorafleet adapters add` does.
        spec = {"lora_id": "sql/v1", "source": f"file://{shelf}/sql/v1"}
        (await client.post(f"{url}/v1/adapters", json=spec)).raise_for_status()
        (
            await client.post(
                f"{url}/v1/adapters/sql/v1/ensure", json={"replicas": 2, "wait_s": min(600, patience(20))}
            )
        ).raise_for_status()
        assert (await client.get(f"{url}/v1/adapters/sql/v1")).json()["spec"]["base_model"] == BASE
        assert await parts.discovery.changes.until(
            lambda: len(parts.discovery.fleet.holding(parts.discovery.fleet.adapters["sql/v1"].engine_name)) == 2,
            timeout_s=patience(10),
        )

        await until(lambda: parts.tokenizers.knows(BASE))  # which needs an engine that agrees with it

        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert listed == [BASE, "sql/v1"]
        for model_name in (BASE, "sql/v1"):
            answered = set()
            for path, prompt in (
                ("/v1/completions", {"prompt": "hello"}),
                ("/v1/completions", {"prompt": "hello"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ):
                answer = await client.post(path, json={"model": model_name, "max_tokens": 2, **prompt})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == model_name
                answered.add((path, answer.headers["x-lorafleet-worker"]))
            assert len(answered) == 4
