"""Answers that services of the last release gave, to today's services: each of them does its work with them."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapters, make_model
from lorafleet.service.http.known_fields import WIRE_HEADERS
from lorafleet.tokenizer.chat import read_files
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.config import RouterSettings
from router.core.kv.index import WorkerId
from tests.patience import patience, until
from tests.router.doubles import EngineDouble
from tests.serving import client_of, serving
from tests.wire.old_peers import OldAgent, OldOrchestrator, with_unknown_fields
from tests.wire.record import AGENT, BASE, ENGINE, PROMPT, PYTHON, SHELF, SLOTS, SQL, WORKER, started_router
from tests.wire.session import filled, load_session
from tests.workers.running import RunningWorker

RELEASES = pytest.mark.parametrize("is_newer", [False, True], ids=["last release", "later release"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wire-model"))


@pytest.fixture
async def old_agent(is_newer: bool, model: Path) -> AsyncIterator[OldAgent]:
    """An agent of the last release in front of an engine that answers everything."""
    files = {f"${{file:{name}}}": text for name, text in read_files(model).items()}
    agent = OldAgent(texts={SHELF: "/adapters", **files}, is_newer=is_newer)
    async with serving(EngineDouble(WORKER).app) as engine, serving(agent.app) as url:
        agent.texts |= {AGENT: url, ENGINE: engine}
        yield agent


@RELEASES
async def test_an_agent_works_with_an_orchestrator_of(is_newer: bool, model: Path, tmp_path: Path) -> None:
    make_adapters(tmp_path / "adapters")
    old = OldOrchestrator(texts={}, is_newer=is_newer)
    worker = RunningWorker(model, tmp_path / "adapters", tmp_path, "--engine", "sim", *SLOTS)
    async with serving(old.app) as url, worker.together("--orchestrator-url", url, "--heartbeat-s", "0.1") as client:
        epoch = load_session("agent-to-orchestrator")[-1].answer["epoch"]

        async def has_its_epoch() -> bool:
            return (await client.get("/metadata")).json()["epoch"] == epoch

        await until(has_its_epoch, what="the agent refuses older epochs than the orchestrator's")
        beats = len(old.calls("/v1/workers/register"))
        await until(lambda: len(old.calls("/v1/workers/register")) > beats, what="it goes on with its heartbeats")


@RELEASES
async def test_an_orchestrator_works_with_agents_of(old_agent: OldAgent, is_newer: bool, tmp_path: Path) -> None:
    service = build_orchestrator(
        OrchestratorSettings(store=tmp_path / "store.db", settle_s=0, pass_interval_s=0.1, probe_after_s=0.1)
    )
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(await stack.enter_async_context(serving(service.app))))
        stack.callback(service.stop)
        await until(lambda: service.leadership.is_leading, what="the orchestrator leads")
        (await client.patch("/v1/policy", json={"adopt": "none"})).raise_for_status()  # so that it inspects
        beat = {
            "metadata": filled(old_agent.metadata(), old_agent.texts),
            "files": {"disk_id": "d0", "since": 0, "upto": 0},
        }
        if is_newer:
            beat = with_unknown_fields(beat)
        headers = WIRE_HEADERS if is_newer else {}
        (await client.post("/v1/workers/register", json=beat, headers=headers)).raise_for_status()
        spec = {"lora_id": SQL, "source": f"file:///adapters/{SQL}", "base_model": BASE}
        (await client.post("/v1/adapters", json=spec)).raise_for_status()
        ensured = await client.post(
            f"/v1/adapters/{SQL}/ensure", json={"wait_s": min(600, patience(10))}, timeout=patience(12)
        )
        assert ensured.json()["ready"] == [WORKER], ensured.text

        (await client.post(f"/v1/workers/{WORKER}/drain", json={"deadline_s": 0})).raise_for_status()
        await until(lambda: old_agent.calls("/v1/admin/drain"), what="the worker is drained")
        (await client.post(f"/v1/workers/{WORKER}/uncordon")).raise_for_status()
        await until(lambda: old_agent.calls("/v1/admin/undrain"), what="the worker is in use again")
        (await client.delete(f"/v1/adapters/{SQL}")).raise_for_status()

        async def is_gone() -> bool:
            return (await client.get(f"/v1/adapters/{SQL}")).status_code == 404

        await until(is_gone, what="the adapter is unloaded and deleted")
        assert SQL not in old_agent.loaded
        verbs = ("claim", "inspect_lora", "load_lora", "drain", "undrain", "unload_lora")
        assert all(old_agent.calls(f"/v1/admin/{verb}") for verb in verbs), old_agent.asked


@RELEASES
async def test_a_router_works_with_orchestrators_and_agents_of(old_agent: OldAgent, is_newer: bool) -> None:
    old = OldOrchestrator(texts=old_agent.texts, is_newer=is_newer, agent=old_agent)
    async with serving(old.app) as url:
        settings = RouterSettings(
            orchestrator_url=url,
            metadata_poll_s=0.1,
            catalog_poll_s=0.1,
            cold_start_timeout_s=patience(10),
            router_id="r0",
        )
        async with started_router(settings) as (client, parts):
            index = parts.feeds.index(BASE, 16)
            await until(lambda: index.blocks(WorkerId(WORKER), "device"), what="the recorded KV blocks are indexed")
            asked = {"model": SQL, "prompt": PROMPT, "max_tokens": 1}
            cold = await client.post("/v1/completions", json=asked)
            assert cold.status_code == 200, cold.text
            assert cold.headers["x-lorafleet-worker"] == WORKER
            assert int(cold.headers["x-lorafleet-cached-tokens"]) > 0  # by the recorded snapshot: nothing was sent yet
            assert old.calls(f"/v1/adapters/{SQL}/ensure")
            by_alias = await client.post("/v1/completions", json={**asked, "model": "sql"})
            assert by_alias.headers["x-lorafleet-adapter"].startswith(SQL), by_alias.text
            await until(lambda: old.calls("/v1/usage"), what="the router reports its use")
            if old.serves("/v1/routers/questions"):
                await until(lambda: old.calls("/v1/routers/answers"), what="the router answers the recorded question")

            old.is_away = True
            at_home = await client.post("/v1/completions", json={**asked, "model": PYTHON})
            assert at_home.status_code == 200, at_home.text
            assert [body["lora_id"] for body in old_agent.calls("/v1/admin/load_lora")] == [PYTHON]
            assert old_agent.calls("/v1/model/files")
