"""Records the wire of a release: `python -m tests.wire.record`, once when a release is made.

Run it on the commit that gets the release's tag, after the version and the changelog were changed, and commit what it
writes with them. It starts an orchestrator, an agent on a sim engine and a router in this process, has them say to each
other all that they say, and writes `tests/wire/last_release/`. Then empty `tests/wire/agreed.py`: what was agreed on is
what is recorded now.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from lorafleet.http_server.serve import bind
from lorafleet.identity import fleet_source
from lorafleet.local.tiny_model import make_adapters, make_model
from orchestrator.app import OrchestratorService
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from router.request.services import Services
from tests.patience import patience, until
from tests.serving import client_of, serving
from tests.wire.recorder import OPERATOR, WireRecorder, agents_peer, orchestrators_peer
from tests.wire.session import CONVERSATIONS, Exchange, save_session
from tests.wire.wire_types import LAST_RELEASE, save_snapshot, todays_snapshot
from tests.workers.running import RunningWorker, sim_inside
from workers.config import AgentTimers

SQL, PYTHON = "sql-expert/v1", "python-expert/v1"
KEPT = "kept/v1"
"""An adapter whose files only the fleet has."""

BASE, WORKER = "tiny-qwen", "w0"
PROMPT = list(range(300, 396))
"""Token ids: whole blocks, whose hashes are in the recorded KV snapshot."""

SLOTS = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16", "--max-model-len", "2048")
# Placeholders of the recorded texts.
AGENT, ENGINE, SHELF, QUOTED_SHELF, FOLDER = "${agent}", "${engine}", "${shelf}", "${quoted_shelf}", "${folder}"


def quoted(folder: Path) -> str:
    """The folder as it stands in a URL's query."""
    return quote(str(folder), safe="")


@dataclass(slots=True)
class RecordedFleet:
    """The services under recording. `operator` calls the orchestrator, `client` the router."""

    shelf: Path
    orchestrator: WireRecorder
    agent: WireRecorder
    operator: httpx.AsyncClient
    client: httpx.AsyncClient
    router: Services
    orchestrator_stack: contextlib.AsyncExitStack
    settings: OrchestratorSettings
    texts: dict[str, str]

    async def register(self, lora_id: str) -> None:
        """Register an adapter, after a dry run, and wait until a worker has inspected it."""
        await self._register(lora_id, f"file://{self.shelf}/{lora_id}")

    async def keep(self, lora_id: str) -> None:
        """Register KEPT with the files of an adapter that the worker has, and wait until they are kept."""
        digest = (await self.operator.get(f"/v1/adapters/{lora_id}")).json()["spec"]["digest"]
        await self._register(KEPT, fleet_source(digest))
        await until(lambda: 204 in self.agent.statuses("/v1/admin/mark_files"), what="the worker keeps the files")

    async def _register(self, lora_id: str, source: str) -> None:
        spec = {"lora_id": lora_id, "source": source, "base_model": BASE}
        (await self.operator.post("/v1/adapters?dry_run=1", json=spec)).raise_for_status()
        (await self.operator.post("/v1/adapters", json=spec)).raise_for_status()

        async def has_digest() -> bool:
            return (await self.operator.get(f"/v1/adapters/{lora_id}")).json()["spec"]["digest"] is not None

        await until(has_digest, what=f"{lora_id} is inspected")

    async def worker_state(self, state: str) -> bool:
        """Whether the worker has this state by the orchestrator's list."""
        return (await self.operator.get(f"/v1/workers/{WORKER}")).json()["state"] == state

    async def is_asked_for_decisions(self) -> bool:
        """Ask the router, by way of the orchestrator, for its last decision; whether it has answered."""
        answer = await self.operator.get("/v1/decisions?limit=1")
        return answer.status_code == 200 and len(answer.json()["data"]) == 1

    async def ask(self, model: str) -> httpx.Response:
        """One completion of PROMPT through the router."""
        answer = await self.client.post("/v1/completions", json={"model": model, "prompt": PROMPT, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        return answer


@contextlib.asynccontextmanager
async def recorded_fleet(folder: Path) -> AsyncIterator[RecordedFleet]:
    """One worker, an orchestrator and a router in this process, each peer's calls recorded."""
    model, shelf = make_model(folder / "model"), folder / "adapters"
    make_adapters(shelf)
    # A silent worker is asked for its metadata, and these heartbeats are rare enough for that.
    settings = OrchestratorSettings(
        store=folder / "store.db", settle_s=0.2, probe_after_s=0.3, pass_interval_s=0.2, heartbeat_interval_s=0.2,
        lease_renew_s=0.2, lease_duration_s=patience(2),
    )  # fmt: skip
    recorders: list[WireRecorder] = []

    def record_agent(app):
        recorders.append(WireRecorder(app, agents_peer))
        return recorders[-1]

    async with contextlib.AsyncExitStack() as stack:
        orchestrator_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        url, _, orchestrator = await orchestrator_stack.enter_async_context(recorded_orchestrator(settings))
        engine = await stack.enter_async_context(sim_inside(model, *SLOTS))
        worker = RunningWorker(model, shelf, folder, "--engine", "sim", *SLOTS, "--instance-id", WORKER)
        flags = ("--engine-url", engine, "--orchestrator-url", url, "--heartbeat-s", "1")
        agent = await stack.enter_async_context(
            worker.inside(*flags, timers=AgentTimers(quiet_s=0.1), through=record_agent)
        )
        router_settings = RouterSettings(
            orchestrator_url=url, metadata_poll_s=0.2, catalog_poll_s=0.2, cold_start_timeout_s=patience(20)
        )
        client, parts = await stack.enter_async_context(started_router(router_settings))
        operator = await stack.enter_async_context(
            client_of(url, timeout=patience(30), headers={"user-agent": OPERATOR})
        )
        # Longer texts first: the folder is a part of others.
        texts = {
            str(shelf): SHELF,
            quoted(shelf): QUOTED_SHELF,
            str(agent.base_url).rstrip("/"): AGENT,
            engine: ENGINE,
            str(folder): FOLDER,
        }
        yield RecordedFleet(
            shelf, orchestrator, recorders[0], operator, client, parts, orchestrator_stack, settings, texts
        )


@contextlib.asynccontextmanager
async def recorded_orchestrator(
    settings: OrchestratorSettings,
) -> AsyncIterator[tuple[str, OrchestratorService, WireRecorder]]:
    """The URL of an orchestrator, the service, and what is asked of it."""
    sock = bind("127.0.0.1", 0)
    service = build_orchestrator(settings, url=f"http://127.0.0.1:{sock.getsockname()[1]}")
    recorder = WireRecorder(service.app, orchestrators_peer)
    async with serving(recorder, sock=sock) as url:
        try:
            yield url, service, recorder
        finally:
            service.stop()


@contextlib.asynccontextmanager
async def started_router(settings: RouterSettings) -> AsyncIterator[tuple[httpx.AsyncClient, Services]]:
    """A client of a router that knows the fleet, and its parts."""
    app, parts = build_router(settings)
    async with serving(app, http=app.state.http) as url, client_of(url, timeout=patience(30)) as client:
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(10))
        yield client, parts


async def converse(fleet: RecordedFleet) -> None:
    """Have the services say to each other all that they say."""
    # What the worker's settings name needs no inspection; registered by calls, it does.
    (await fleet.operator.patch("/v1/policy", json={"adopt": "none"})).raise_for_status()
    await fleet.register(SQL)
    alias = {"targets": [{"lora_id": SQL, "weight": 1.0}], "place_s": 0}
    (await fleet.operator.put("/v1/aliases/sql", json=alias)).raise_for_status()
    await fleet.ask(SQL)

    async def is_cached() -> bool:
        return int((await fleet.ask(SQL)).headers["x-lorafleet-cached-tokens"]) > 0

    await until(is_cached, what="the router knows the prompt's blocks")
    await until(fleet.is_asked_for_decisions, what="the router answers a question of the console")
    usage_reports = len(fleet.orchestrator.statuses("/v1/usage"))
    await until(
        lambda: len(fleet.orchestrator.statuses("/v1/usage")) > usage_reports + 1, what="the router reports its use"
    )
    await until(lambda: _metadata_reads(fleet.agent), what="the orchestrator reads the metadata of a silent worker")
    (await fleet.operator.post(f"/v1/workers/{WORKER}/drain", json={"deadline_s": 0})).raise_for_status()
    await until(lambda: 200 in fleet.agent.statuses("/v1/admin/drain"), what="the worker is drained")
    (await fleet.operator.post(f"/v1/workers/{WORKER}/uncordon")).raise_for_status()
    await until(lambda: 200 in fleet.agent.statuses("/v1/admin/undrain"), what="the worker is in use again")
    await until(lambda: fleet.worker_state("ready"), what="the orchestrator knows that it is in use")
    await fleet.register(PYTHON)
    await fleet.keep(SQL)
    marked = len(fleet.agent.statuses("/v1/admin/mark_files"))
    (await fleet.operator.delete("/v1/aliases/sql")).raise_for_status()
    for lora_id in (SQL, KEPT):
        (await fleet.operator.delete(f"/v1/adapters/{lora_id}")).raise_for_status()
    await until(lambda: 200 in fleet.agent.statuses("/v1/admin/unload_lora"), what="the adapter is unloaded")
    await until(
        lambda: len(fleet.agent.statuses("/v1/admin/mark_files")) > marked, what="the adapter's files are released"
    )
    await until(lambda: SQL not in fleet.router.discovery.fleet.adapters, what="the router knows of the deletion")
    # Last, because a drain waits for every router that has reported lately.
    async with started_router(fleet.router.config):
        await until(lambda: len(fleet.agent.statuses("/v1/kv/snapshot")) > 1, what="a late router reads the snapshot")
    await _hand_over(fleet)
    # Without an orchestrator the router has the adapter loaded itself.
    await fleet.ask(PYTHON)


async def _hand_over(fleet: RecordedFleet) -> None:
    """End the orchestrator's term. The next leader claims the worker, and ends too."""
    async with recorded_orchestrator(fleet.settings) as (_, standby, _):
        await until(lambda: WORKER in standby.reconciler.reports.workers, what="the standby knows the worker")
        await fleet.orchestrator_stack.aclose()
        await until(lambda: 200 in fleet.agent.statuses("/v1/admin/claim"), what="the next leader claims the worker")


def _metadata_reads(agent: WireRecorder) -> bool:
    return any(call.conversation == "orchestrator-to-agent" and call.path == "/metadata" for call in agent.calls)


def texts_of(fleet: RecordedFleet) -> dict[str, str]:
    """Volatile text of this run -> what is recorded in its place."""
    replica = next(iter(fleet.router.discovery.followed.values()))
    metadata = replica.metadata
    assert metadata is not None
    ports = {endpoint: f"ipc://@{number}" for number, endpoint in enumerate(metadata.transport.kv_events)}
    ports |= {endpoint: f"ipc://@{number}-replay" for number, endpoint in enumerate(metadata.transport.kv_replay)}
    usage = fleet.router.usage
    boots = {
        metadata.agent_boot_id: "agent-boot",
        metadata.engine_boot_id: "engine-boot",
        usage.boot_id: "router-boot",
        usage.router_id: "router-0",
    }
    return {**ports, **boots, **fleet.texts}


def without_file_contents(exchanges: list[Exchange]) -> list[Exchange]:
    """The exchanges, in which each of the model's files is the placeholder of its name."""
    for exchange in exchanges:
        if exchange.route.answers == "ModelFiles":
            exchange.answer["files"] = {name: f"${{file:{name}}}" for name in exchange.answer["files"]}
    return exchanges


async def record(into: Path) -> None:
    """Record every conversation and the types, and write them to a folder."""
    with tempfile.TemporaryDirectory(prefix="wire-") as name:
        async with recorded_fleet(Path(name)) as fleet:
            await converse(fleet)
            texts = texts_of(fleet)
        exchanges = without_file_contents(fleet.orchestrator.exchanges(texts) + fleet.agent.exchanges(texts))
    _save(exchanges, into)


def _save(exchanges: list[Exchange], into: Path) -> None:
    """Write each conversation and the types to a folder."""
    into.mkdir(exist_ok=True)
    for conversation in CONVERSATIONS:
        save_session(conversation, [one for one in exchanges if one.conversation == conversation], folder=into)
    save_snapshot(todays_snapshot(), into)


def main() -> None:
    """Record, and name what was written with its size."""
    asyncio.run(record(LAST_RELEASE))
    for file in sorted(LAST_RELEASE.iterdir()):
        print(f"{file}: {file.stat().st_size} bytes")  # noqa: T201  (what it prints is its answer)


if __name__ == "__main__":
    main()
