"""Whole small fleets in the test's process: a real orchestrator, agents, sim engines and routers on loopback."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.serve import DEFAULT_LIMITS
from lorafleet.keys.key_edits import add_key
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.patience import ORCHESTRATOR_WAITS, ROUTER_WAITS, patience, until
from tests.serving import client_of, serving
from tests.workers.running import SIM, RunningWorker, metadata_of
from workers.config import TIMERS

POLL_S = 1.0
"""The routers' `catalog_poll_s`: its default."""


@dataclass
class SmallFleet:
    """One fleet. `http` calls its orchestrator, `agents` its agents, `routers` its routers, all as operator.

    keys   scope -> key, and tenant -> key
    parts  worker, or `orchestrator` -> what stops it
    """

    url: str
    http: httpx.AsyncClient
    keys: dict[str, str]
    agents: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    routers: list[httpx.AsyncClient] = field(default_factory=list)
    parts: dict[str, contextlib.AsyncExitStack] = field(default_factory=dict)

    async def adapter(self, lora_id: str) -> Any:
        return (await self.http.get(f"/v1/adapters/{lora_id}")).json()

    async def ensure(self, lora_id: str, *, replicas: int = 1) -> httpx.Response:
        """Have an adapter placed, and wait until this many workers have it."""
        body = {"replicas": replicas, "wait_s": min(600.0, patience(20))}
        return await self.http.post(f"/v1/adapters/{lora_id}/ensure", json=body, timeout=body["wait_s"] + patience(10))

    async def models(self) -> list[list[str]]:
        """The names in /v1/models of every router."""
        answers = await asyncio.gather(*(router.get("/v1/models") for router in self.routers))
        return [[card["id"] for card in answer.json()["data"]] for answer in answers]

    async def cli(self, *words: str) -> tuple[int, str]:
        """`lorafleet ARGS` against this fleet: its exit status, and all that it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "lorafleet", "--orchestrator-url", self.url, "--token", self.keys["admin"],
            *words,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={"COLUMNS": "300", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async def script_loads(self, worker: str, name: str, path: Path) -> None:
        """Load an adapter at one worker's engine, as a script does that knows no fleet."""
        engine = (await metadata_of(self.agents[worker])).transport.engine_url
        async with client_of(engine) as client:
            answer = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            assert answer.is_success, answer.text


@contextlib.asynccontextmanager
async def small_fleet(
    folder: Path,
    model: Path,
    *,
    shelf: Path,
    workers: int = 1,
    routers: int = 0,
    engine: Sequence[str] = (),
    tenants: Sequence[str] = (),
    agent: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[SmallFleet]:
    """A ready fleet with keys, whose workers may read adapters below `shelf` alone, where specs point at them.

    engine    further flags of each sim
    tenants   each has a key with scopes infer and register, in `keys` by its name
    agent     further flags of each agent
    settings  the orchestrator's
    """
    folder.mkdir(parents=True)  # noqa: ASYNC240  (a test's own folder)
    key_file = folder / "keys.yaml"
    scopes = ("admin", "export", "register", "load", "worker", "agent", "agent-load")
    keys = {scope: add_key(key_file, None, [scope]) for scope in scopes}
    keys |= {tenant: add_key(key_file, tenant, ["infer", "register"]) for tenant in tenants}
    pace_s = 0.1 * max(2, workers)  # one loop has the work of all of them
    intent = OrchestratorSettings(
        store=folder / "store.db",
        settle_s=0.2,
        pass_interval_s=0.2,
        heartbeat_interval_s=pace_s,
        key_files=(key_file,),
        token=keys["load"],
        agent_token=keys["agent"],
        **{**ORCHESTRATOR_WAITS, **settings},
    )
    timers = replace(TIMERS, attached_s=patience(TIMERS.attached_s))
    parts: dict[str, contextlib.AsyncExitStack] = {}
    operator = {"authorization": f"Bearer {keys['admin']}"}
    async with contextlib.AsyncExitStack() as stack:

        async def part(name: str) -> contextlib.AsyncExitStack:
            parts[name] = await stack.enter_async_context(contextlib.AsyncExitStack())
            return parts[name]

        orchestrator = build_orchestrator(intent)
        listener = listener_for_app(DEFAULT_LIMITS, upload_bytes=orchestrator.upload_bytes)
        own = await part("orchestrator")
        url = await own.enter_async_context(serving(orchestrator.app, http=listener))
        http = await stack.enter_async_context(client_of(url, headers=operator))
        (await http.patch("/v1/policy", json={"adopt": "none"})).raise_for_status()
        fleet = SmallFleet(url, http, keys, parts=parts)
        for number in range(workers):
            name = f"w{number}"
            (folder / name).mkdir()
            flags = ("--instance-id", name, "--orchestrator-url", url, "--token", keys["worker"])
            flags += ("--key-files", str(key_file), "--warm-deadline-s", "0")
            flags += ("--scrape-s", str(pace_s), "--scan-s", str(pace_s), *agent)
            worker = RunningWorker(model, shelf, folder / name, *SIM, *flags)
            running = worker.together(engine=engine, timers=timers)
            client = await (await part(name)).enter_async_context(running)
            client.headers.update(operator)
            fleet.agents[name] = client
        for _ in range(routers):
            given = {"catalog_poll_s": POLL_S, **ROUTER_WAITS}
            app, services = build_router(
                RouterSettings(
                    orchestrator_url=url,
                    token=keys["load"],
                    agent_token=keys["agent-load"],
                    key_files=(key_file,),
                    **given,
                )
            )
            router = await stack.enter_async_context(serving(app, http=app.state.http))
            fleet.routers.append(await stack.enter_async_context(client_of(router, headers=operator)))
            assert await services.discovery.changes.until(services.discovery.is_synced, timeout_s=patience(10))

        async def has_all() -> bool:
            return len((await http.get("/v1/workers")).json()["data"]) == workers

        await until(has_all, what="all workers have registered")
        yield fleet
