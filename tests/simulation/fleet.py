"""A fleet for tests that are written by hand: one more simulated process, which calls the others and waits for them.

async def test_name_that_is_deleted_answers_404(simulation):
    fleet = await simulation.fleet(workers=2, routers=2)
    await fleet.register("sql/v1", simulation.adapter("sql/v1"))
    assert (await fleet.ask("sql/v1")).status_code == 200
    fleet.kill("engine0", away_s=60)
    await until(fleet.is_whole, what="the engine is back")
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from lorafleet.keys.key_edits import add_key
from lorafleet.local.tiny_model import make_adapter
from tests.simulation import programs
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.nodes import Node
from tests.simulation.processes import FleetProcesses
from tests.simulation.programs import EngineFlags
from tests.simulation.world import SERVICE
from tests.simulation.zmq_sockets import EventBus

MODEL = "tiny-qwen"
MOST_WAIT_S = 1800.0
"""The longest that a test waits for one answer, in the fleet's time."""
URL = "http://{}:{}".format(*SERVICE)
_SCOPES = ("admin", "export", "register", "load", "worker", "agent", "agent-load", "infer")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


async def until(holds: Callable[[], Any], *, within_s: float = 120.0, every_s: float = 1.0, what: str = "") -> Any:
    """Look again and again, in the fleet's time: at first often, in the end `every_s`.

    holds    a function, or a function that gives an awaitable; an error of a connection counts as false
    returns  its first true answer
    raises   TimeoutError with `what` when no answer was true in time
    """
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + within_s, 0.01
    while True:
        with suppress(httpx.TransportError):
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
        if loop.time() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what or holds}")
        await asyncio.sleep(pause_s)
        pause_s = min(every_s, pause_s * 1.5)


class SimulationFleet:
    """A running fleet. `http` calls its orchestrators by their shared address, `routers` and `agents` the others.

    keys     scope or tenant -> key; the clients have the admin's
    agents   by the worker's name; `engines`, too
    """

    def __init__(self, simulation: "Simulation", paths: programs.Paths) -> None:
        self.paths, self.keys = paths, paths.keys
        self.processes = FleetProcesses(simulation.loop, paths, slowness=1.0, on_surprise=simulation.end_by_surprise)
        self.http = self.client_of(URL)
        self.routers: list[httpx.AsyncClient] = []
        self.agents: dict[str, httpx.AsyncClient] = {}
        self.engines: dict[str, httpx.AsyncClient] = {}
        self._simulation = simulation

    # Its processes.

    def add_orchestrator(self, **settings: Any) -> None:
        """Start one more orchestrator, on the same store."""
        addresses = self._simulation.loop.network.shared.setdefault(SERVICE, [])
        number = len(addresses)
        host, port = "10.0.0.1", programs.ORCHESTRATOR_PORT + number
        addresses.append((host, port))
        main = programs.orchestrator(self.paths, self.processes.services, port=port, **settings)
        self.processes.add(f"orch{number}", host, main)

    def add_worker(self, flags: EngineFlags, *, has_reports: bool = False, **settings: Any) -> str:
        """Start one more engine and its agent; its name."""
        number = len(self.agents)
        name, host, services = f"w{number}", f"10.0.1.{number + 1}", self.processes.services
        engine = programs.engine(self.paths, services, self._simulation.bus, flags, has_reports=has_reports)
        self.processes.add(f"engine{number}", host, engine)
        slots = {"max_loras": flags.max_loras, "max_cpu_loras": flags.max_cpu_loras}
        agent = programs.agent(self.paths, services, **{"orchestrator_url": URL, **slots, **settings})
        self.processes.add(name, host, agent)
        self.agents[name] = self.client_of(f"http://{host}:{programs.AGENT_PORT}")
        self.engines[name] = self.client_of(f"http://{host}:{programs.ENGINE_PORT}")
        return name

    def add_router(self, **settings: Any) -> None:
        """Start one more router."""
        number = len(self.routers)
        host = f"10.0.2.{number + 1}"
        main = programs.router(self.paths, self.processes.services, **{"orchestrator_url": URL, **settings})
        self.processes.add(f"router{number}", host, main)
        self.routers.append(self.client_of(f"http://{host}:{programs.ROUTER_PORT}"))

    def kill(self, name: str, *, away_s: float | None, in_callbacks: int = 0) -> None:
        """SIGKILL, now or before the so-manieth callback; it starts again after `away_s`, or with None at `start`."""
        self.processes.kill(name, away_s=away_s, in_callbacks=in_callbacks)

    def stop(self, name: str, *, away_s: float | None) -> None:
        """SIGTERM; the process starts again so long after its end, or with None at `start`."""
        self.processes.stop(name, away_s=away_s)

    def pause(self, name: str, *, for_s: float) -> None:
        self.processes.pause(name, for_s)

    def start(self, name: str) -> None:
        """Start a process again that has ended."""
        self.processes.start(name)

    def files_of(self, name: str) -> Path:
        """The folder of the files of a process's machine: `state` and `cache` of an agent."""
        return self.paths.of(self.processes.nodes[name].host)

    async def is_whole(self) -> bool:
        """Whether every process runs, and every worker and router is ready."""
        if not all(node.may_run for node in self.processes.nodes.values()):
            return False
        answer = await self.http.get("/v1/workers")
        states = [worker["state"] for worker in answer.json()["data"]] if answer.is_success else []
        return states == ["ready"] * len(self.agents) and all([await is_ready(router) for router in self.routers])

    # What users and operators do.

    def client_of(self, url: str) -> httpx.AsyncClient:
        """A client with the admin's key."""
        headers = self.as_("admin")
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=MOST_WAIT_S, verify=False, trust_env=False)

    def as_(self, who: str) -> dict[str, str]:
        """Headers with the key of a scope or a tenant; empty: without a key."""
        return {"authorization": f"Bearer {key}" if (key := self.keys.get(who, "")) else ""}

    async def register(self, lora_id: str, source: Path | str, **more: Any) -> None:
        """Register an adapter of a folder, or of a source's URL."""
        spec = {"lora_id": lora_id, "source": f"file://{source}" if isinstance(source, Path) else source, **more}
        (await self.http.post("/v1/adapters", json=spec)).raise_for_status()

    async def adapter(self, lora_id: str) -> Any:
        return (await self.http.get(f"/v1/adapters/{lora_id}")).json()

    async def ensure(self, lora_id: str, *, replicas: int = 1, wait_s: float = 120.0) -> list[str]:
        """Have an adapter placed, and wait until this many workers have it; the workers that do."""
        body = {"replicas": replicas, "wait_s": wait_s}
        answer = await self.http.post(f"/v1/adapters/{lora_id}/ensure", json=body)
        return sorted(answer.raise_for_status().json()["ready"])

    async def set_policy(self, **changes: Any) -> None:
        (await self.http.patch("/v1/policy", json=changes)).raise_for_status()

    async def ask(
        self, name: str, *, router: int = 0, headers: Mapping[str, str] = _NOTHING, **more: Any
    ) -> httpx.Response:
        """A completion of four tokens; with `messages` a chat completion."""
        path, body = _completion(name, more)
        return await self.routers[router].post(path, json=body, headers=headers)

    async def answered_by(self, name: str, *, router: int = 0, **more: Any) -> str | int:
        """The adapter that answers a request for this name, by its id; the status where none does."""
        answer = await self.ask(name, router=router, **more)
        return adapter_of(answer) if answer.is_success else answer.status_code

    async def answered_everywhere(self, name: str, **more: Any) -> list[str | int]:
        """`answered_by` at each router at the same moment."""
        return await asyncio.gather(
            *(self.answered_by(name, router=number, **more) for number in range(len(self.routers)))
        )

    @asynccontextmanager
    async def streaming(
        self, name: str, *, router: int = 0, headers: Mapping[str, str] = _NOTHING, **more: Any
    ) -> AsyncIterator["StreamedAnswer"]:
        """`ask`, streamed: its first event is there."""
        path, body = _completion(name, {"ignore_eos": True, "stream": True, **more})
        async with self.routers[router].stream("POST", path, json=body, headers=headers) as response:
            answer = StreamedAnswer(response, aiter(response.aiter_lines()))
            answer.events.append(await answer.next_event())
            yield answer

    async def models(self) -> list[list[str]]:
        """The names in /v1/models of every router."""
        answers = await asyncio.gather(*(router.get("/v1/models") for router in self.routers))
        return [[card["id"] for card in answer.json()["data"]] for answer in answers]

    async def figure(self, router: int, name: str) -> float:
        """The sum of a metric's samples at a router."""
        lines = (await self.routers[router].get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def ready_on(self, worker: str) -> set[str]:
        """Adapters that a worker's agent reports as ready."""
        loras = (await self.agents[worker].get("/v1/admin/loras")).json()["loaded_loras"]
        return {lora["lora_id"] for lora in loras if lora["state"] == "ready"}

    async def engine_models(self, worker: str) -> set[str]:
        """What a worker's engine itself lists."""
        return {card["id"] for card in (await self.engines[worker].get("/v1/models")).json()["data"]}

    async def script_loads(self, worker: str, name: str, path: Path) -> None:
        """Load an adapter at one worker's engine, as a script does that knows no fleet."""
        body = {"lora_name": name, "lora_path": str(path)}
        (await self.engines[worker].post("/v1/load_lora_adapter", json=body)).raise_for_status()


@dataclass(slots=True)
class StreamedAnswer:
    """A stream under way, with its `data:` lines so far."""

    response: httpx.Response
    _lines: AsyncIterator[str]
    events: list[str] = field(default_factory=list)

    async def next_event(self) -> str:
        async for line in self._lines:
            if line.startswith("data: "):
                return line.removeprefix("data: ")
        raise EOFError("the stream has ended")

    async def rest(self) -> list[str]:
        """All events, from the first one on, once the stream has ended."""
        self.events += [line.removeprefix("data: ") async for line in self._lines if line.startswith("data: ")]
        return self.events


def _completion(name: str, more: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a completion, or with `messages` of a chat completion."""
    body = {"model": name, "max_tokens": 4, "temperature": 0, **more}
    return ("/v1/chat/completions", body) if "messages" in more else ("/v1/completions", {"prompt": "a", **body})


def adapter_of(answer: httpx.Response) -> str:
    """The id of the adapter that answered, without its digest."""
    return answer.headers["x-lorafleet-adapter"].partition("@")[0]


class Simulation:
    """What a test is given: folders, and fleets of one line.

    shelf   the folder whose adapters workers may read
    folder  another folder of the test's own
    """

    def __init__(self, loop: SimulatedLoop, bus: EventBus, test: Node, *, model: Path, folder: Path) -> None:
        self.loop, self.bus, self.model = loop, bus, model
        self.folder, self.shelf = folder / "own", folder / "shelf"
        self.surprise = ""
        """A process that ended although nothing was to end it, and how."""
        self._test, self._root = test, folder
        self.folder.mkdir()
        self.shelf.mkdir()

    def end_by_surprise(self, node: Node) -> None:
        """End the test, because a process has ended that nothing was to end."""
        self.surprise = f"{node.name} at {self.loop.time():.3f}: {node.failure!r}"
        node.away_s = None
        assert self._test.main is not None
        self._test.main.cancel()

    def adapter(self, name: str, *, seed: int = 0, rank: int = 8, beside: bool = False, **more: Any) -> Path:
        """A new adapter's folder on the shelf; `beside`: where no worker may read."""
        return make_adapter(self.folder if beside else self.shelf, name, rank=rank, seed=seed, **more)

    def serve(self, name: str, host: str, app: Any, *, port: int = programs.AGENT_PORT) -> str:
        """Serve an ASGI app by a process of its own; its URL."""

        async def main(node: Node) -> None:
            async with programs.serving(app, node, port):
                await node.stop.wait()

        Node(self.loop, name, host).start(main)
        return f"http://{host}:{port}"

    async def fleet(
        self,
        *,
        workers: int = 1,
        routers: int = 1,
        orchestrators: int = 1,
        engine: EngineFlags | None = None,
        tenants: Sequence[str] = (),
        adopt: str | None = "none",
        has_keys: bool = True,
        has_reports: bool = False,
        agent: Mapping[str, Any] = _NOTHING,
        router: Mapping[str, Any] = _NOTHING,
        **settings: Any,
    ) -> SimulationFleet:
        """A ready fleet; every timer has its default.

        tenants      each has a key with scopes infer and register, in `keys` by its name
        adopt        the policy's: by default `shelf` is no more than where specs point at; None: the policy's default
        has_reports  the engines report to their agents, and take their offers
        agent        further settings of each agent; `router` of each router, `settings` of each orchestrator
        """
        key_file = self._root / "keys.yaml"
        keys = {scope: add_key(key_file, None, [scope]) if has_keys else "" for scope in _SCOPES}
        keys |= {tenant: add_key(key_file, tenant, ["infer", "register"]) for tenant in tenants}
        fleet = SimulationFleet(
            self,
            programs.Paths(
                model=self.model,
                shelf=self.shelf,
                state=self._root / "state",
                key_file=key_file if has_keys else None,
                keys=keys,
            ),
        )
        for _ in range(orchestrators):
            fleet.add_orchestrator(**settings)
        if orchestrators:
            await until(lambda: is_ready(fleet.http), what="an orchestrator leads")
        if adopt is not None:
            await fleet.set_policy(adopt=adopt)
        for _ in range(workers):
            fleet.add_worker(engine or EngineFlags(), has_reports=has_reports, **agent)
        for _ in range(routers):
            fleet.add_router(**router)
        if orchestrators:
            await until(fleet.is_whole, what="the fleet is ready")
        return fleet


async def is_ready(service: httpx.AsyncClient) -> bool:
    """Whether a service says that it is ready."""
    return (await service.get("/ready")).is_success
