"""A new worker becomes ready once its adapters are loaded, or after a deadline."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lorafleet.local.tiny_model import make_adapters, make_model
from tests.patience import within
from tests.serving import serving
from tests.workers.running import SIM, RunningWorker, code, loaded, post

SQL = "sql-expert/v1"


@dataclass
class StubOrchestrator:
    """Accepts heartbeats and answers as the test sets."""

    is_warm: bool | None = False  # None: an orchestrator without warming
    interval_s: float = 1.0
    reports: list[dict] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    key: str | None = None  # of the last heartbeat
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async def register(request: Request) -> JSONResponse:
            self.key = request.headers.get("authorization")
            heartbeat = await request.json()
            self.incidents += [incident["kind"] for incident in heartbeat["incidents"]]
            self.reports.append(heartbeat["metadata"])
            self.news.set()
            answer = {} if self.is_warm is None else {"is_warm": self.is_warm}
            return JSONResponse({"epoch": 1, "revision": 1, "interval_s": self.interval_s} | answer)

        routes = [Route("/v1/workers/register", register, methods=["POST"])]
        async with serving(Starlette(routes=routes)) as url:
            yield url

    async def until(self, holds) -> dict:
        """Wait for the first report for which the condition holds."""
        async with within(20):
            while not (found := [report for report in self.reports if holds(report)]):
                self.news.clear()
                await self.news.wait()
        return found[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    adapters = tmp_path_factory.mktemp("adapters")
    make_adapters(adapters)
    return make_model(tmp_path_factory.mktemp("model")), adapters


@pytest.fixture
def worker(folders: tuple[Path, Path], tmp_path: Path) -> RunningWorker:
    return RunningWorker(*folders, tmp_path, *SIM)


async def test_new_worker_accepts_loads_while_warming_and_then_becomes_ready(worker) -> None:
    orchestrator = StubOrchestrator()
    async with (
        orchestrator.serving() as url,
        worker.together("--orchestrator-url", url, until_ready=False) as client,
    ):
        waiting = await orchestrator.until(lambda report: report["is_warming"])
        assert waiting["state"] == "starting"
        not_yet = await client.get("/ready")
        assert (not_yet.status_code, code(not_yet)) == (503, "not_ready")
        assert "share of the hot adapters" in not_yet.json()["error"]["message"]
        assert (await post(client, "load_lora", lora_id=SQL, epoch=1)).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        orchestrator.is_warm = True
        ready = await orchestrator.until(lambda report: report["state"] == "ready")
        assert not ready["is_warming"]
        assert (await client.get("/ready")).status_code == 200
        assert await loaded(client) == {SQL}
    # A worker that had adapters before is not new.
    orchestrator.is_warm = False
    async with orchestrator.serving() as url, worker.together("--orchestrator-url", url) as client:
        assert await loaded(client) == {SQL}


async def test_worker_becomes_ready_after_the_warm_deadline(worker) -> None:
    orchestrator = StubOrchestrator()
    async with (
        orchestrator.serving() as url,
        worker.together("--orchestrator-url", url, "--warm-deadline-s", "0.3"),
    ):
        assert (await orchestrator.until(lambda report: report["state"] == "ready"))["lora"]["loaded_loras"] == []


@pytest.mark.parametrize("is_there", [True, False], ids=["of an older version", "away"])
async def test_worker_is_ready_at_once_without_an_orchestrator_that_warms(worker, is_there) -> None:
    orchestrator = StubOrchestrator(is_warm=None)
    async with orchestrator.serving() as url:
        flags = ("--orchestrator-url", url if is_there else "http://127.0.0.1:9", "--warm-deadline-s", "600")
        async with worker.together(*flags, until_ready=False) as client:
            await worker.ready(client, within_s=10)


@pytest.mark.parametrize(("interval_s", "flags"), [(0.05, ()), (60.0, ("--heartbeat-s", "0.05"))])
async def test_heartbeats_come_as_often_as_the_orchestrator_says_unless_the_worker_says_so(worker, interval_s, flags):
    orchestrator = StubOrchestrator(is_warm=True, interval_s=interval_s)
    async with orchestrator.serving() as url, worker.together("--orchestrator-url", url, *flags):
        orchestrator.reports.clear()
        began_at = asyncio.get_running_loop().time()
        await orchestrator.until(lambda _: len(orchestrator.reports) == 20)
        # At one a second they would take 16 s at least.
        assert asyncio.get_running_loop().time() - began_at < 12.0


@pytest.mark.slow
async def test_changed_key_file_is_used_by_the_next_heartbeats(worker, tmp_path) -> None:
    orchestrator, file = StubOrchestrator(is_warm=True), tmp_path / "token"
    file.write_text("one")
    async with (
        orchestrator.serving() as url,
        worker.running("--orchestrator-url", url, "--heartbeat-s", "0.1", "--token-file", str(file)),
    ):
        await orchestrator.until(lambda _: orchestrator.key == "Bearer one")
        file.write_text("another")
        orchestrator.reports.clear()
        await orchestrator.until(lambda _: orchestrator.key == "Bearer another")


@pytest.mark.fleet
@pytest.mark.parametrize(("profile", "is_incident"), [("auto", True), ("cpu", False)])
async def test_kernels_for_another_device_than_the_engines_are_an_incident(worker, profile, is_incident) -> None:
    orchestrator = StubOrchestrator(is_warm=True)
    says = f'echo "INFO Using PunicaWrapperCPU."; exec {sys.executable} -P -m lorafleet.sim "$@"'
    command = ("--device-profile", profile, "--", "sh", "-c", says, "sim")
    async with orchestrator.serving() as url, worker.inside("--orchestrator-url", url, *command):
        report = await orchestrator.until(lambda report: report["state"] == "ready")
        await orchestrator.until(lambda _: "engine_started" in orchestrator.incidents)
    assert report["lora"]["punica"] == "PunicaWrapperCPU"
    assert ("lora_kernels_missing" in orchestrator.incidents) is is_incident


async def test_what_a_call_of_the_orchestrator_changes_is_told_by_its_answer_and_not_by_a_heartbeat_of_its_own(worker):
    orchestrator = StubOrchestrator(is_warm=True, interval_s=60.0)
    async with orchestrator.serving() as url, worker.together("--orchestrator-url", url) as client:
        await orchestrator.until(lambda report: report["state"] == "ready")
        assert (await post(client, "load_lora", lora_id=SQL, epoch=1)).status_code == 200
        assert (await post(client, "load_lora", lora_id="python-expert/v1")).status_code == 200
        both = {SQL, "python-expert/v1"}
        await orchestrator.until(lambda report: _lora_ids(report) == both)
        assert {frozenset(_lora_ids(report)) for report in orchestrator.reports} == {frozenset(), frozenset(both)}


def _lora_ids(report: dict) -> set[str]:
    return {lora["lora_id"] for lora in report["lora"]["loaded_loras"]}
