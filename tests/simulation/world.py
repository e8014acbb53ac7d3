"""One run: the fleet of a scenario is started, its events happen, it is left alone, and then everything is asked."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import structlog

from tests.simulation import programs
from tests.simulation.answers import ExpectedAnswers
from tests.simulation.api_server import API_HOST, API_SERVER, SimulatedApiServer
from tests.simulation.clients import MOST_WAIT_S, Clients
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.faults import Faults
from tests.simulation.guarantees import Broken, check_leaders, check_run
from tests.simulation.history import History, Outcome
from tests.simulation.nodes import Node
from tests.simulation.processes import FleetProcesses
from tests.simulation.scenario import CALLS, Event, FaultScenario
from tests.simulation.zmq_sockets import EventBus

SERVICE = ("10.0.0.100", programs.ORCHESTRATOR_PORT)
"""The address of whichever orchestrator takes calls."""
SERVICES = ("orchestrator", "router", "agent")
"""Services that have settings."""
_READY_S = 120.0
# The longest that a fleet takes to be whole again after the last fault: a lease that ends, backoffs, an engine's start.
_SETTLE_S = 300.0
_POLL_S = 1.0
_CHECK_LEADERS_EVERY = 20

log = structlog.get_logger()


class FleetWorld:
    """The simulated fleet, its clients, and what happened."""

    def __init__(self, scenario: FaultScenario, loop: SimulatedLoop, bus: EventBus, paths: programs.Paths) -> None:
        self.scenario, self.loop, self.bus, self.paths = scenario, loop, bus, paths
        self.contents = [paths.shelf / f"content-{number}" for number in range(scenario.fleet.contents)]
        self.processes = FleetProcesses(loop, paths, slowness=scenario.fleet.slowness, on_surprise=self._on_surprise)
        self.nodes, self.services = self.processes.nodes, self.processes.services
        self.api_server = SimulatedApiServer() if scenario.fleet.has_api_server else None
        self.history = History()
        self.broken: list[Broken] = []
        self.faults = Faults(self)
        self.clients: Clients
        self._calls: list[asyncio.Task[Any]] = []
        self._batches = count(1)
        self._had_two_leaders = False

    async def run(self) -> None:
        """The whole run; what was broken is in `broken`."""
        plan = self.scenario.fleet
        self.loop.network.weather.delay_s = plan.delay_s
        for host in self._orchestrator_hosts():
            self.loop.network.distance_s[frozenset((host, f"10.0.2.{plan.routers}"))] = plan.far_s
        self._start_fleet()
        nodes = [Node(self.loop, f"client{number}", f"10.0.3.{number + 1}") for number in range(plan.clients)]
        self.clients = Clients(
            nodes,
            routers=[(f"10.0.2.{number + 1}", programs.ROUTER_PORT) for number in range(plan.routers)],
            orchestrator=SERVICE,
            keys=self.paths.keys,
            owners=plan.owners,
            contents=self.contents,
            answers=ExpectedAnswers(self.paths.model, self.contents),
            history=self.history,
        )
        self.loop.on_batch = self._check_leaders
        if await self._until(self._is_ready, _READY_S, "the fleet is ready"):
            await self._let_happen()
            await self._ask_everything()
        self.broken += check_run(self.history, self.scenario, self.faults.cut_off)

    # The fleet.

    def _orchestrator_hosts(self) -> list[str]:
        """The orchestrators' machines: those that share a file share its machine, too."""
        numbers = range(self.scenario.fleet.orchestrators)
        return [f"10.0.0.{number + 1 if self.api_server else 1}" for number in numbers]

    def _start_fleet(self) -> None:
        """Start every process."""
        plan, paths, services, add = self.scenario.fleet, self.paths, self.services, self.processes.add
        of_orchestrators, of_routers, of_agents = (plan.settings.get(service, {}) for service in SERVICES)
        url = "http://{}:{}".format(*SERVICE)
        if self.api_server is not None:
            add(API_SERVER, API_HOST, self.api_server.main)
            of_orchestrators = {**of_orchestrators, "api_server": self.api_server}
        addresses = [
            (host, programs.ORCHESTRATOR_PORT + number) for number, host in enumerate(self._orchestrator_hosts())
        ]
        self.loop.network.shared[SERVICE] = addresses
        for number, (host, port) in enumerate(addresses):
            add(f"orch{number}", host, programs.orchestrator(paths, services, port=port, **of_orchestrators))
        slots = {"max_loras": plan.engine.max_loras, "max_cpu_loras": plan.engine.max_cpu_loras}
        for number in range(plan.workers):
            host = f"10.0.1.{number + 1}"
            add(f"engine{number}", host, programs.engine(paths, services, self.bus, plan.engine))
            add(f"w{number}", host, programs.agent(paths, services, orchestrator_url=url, **slots, **of_agents))
        for number in range(plan.routers):
            main = programs.router(paths, services, orchestrator_url=url, **of_routers)
            add(f"router{number}", f"10.0.2.{number + 1}", main)
        if any(event.kind == "power" for event in self.scenario.events):
            self.processes.keep_journals()

    def _on_surprise(self, node: Node) -> None:
        """Where no event ended a process, its end is a fault of ours."""
        how = f"{node.name} at {self.loop.time():.3f}: {node.failure!r}"
        self.broken.append(Broken("no process ends by itself", how))

    # What happens.

    async def _let_happen(self) -> None:
        """Let all events happen, each at its time, and end all faults."""
        began = self.loop.time()
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, began + event.at_s - self.loop.time()))
            log.info("event", what=str(event))
            self._happen(event)
        while self.processes.pending:
            await asyncio.sleep(_POLL_S)

    def _happen(self, event: Event) -> None:
        if event.kind in CALLS:
            self.call(event.about["client"], getattr(self.clients, event.kind)(**event.about))
        else:
            getattr(self.faults, event.kind)(**event.about)

    def call(self, client: int, work: Coroutine[Any, Any, Any]) -> None:
        """Let a client do something; the run waits for its end."""
        self._calls.append(self.clients.as_client(client, work))

    # The end.

    async def _ask_everything(self) -> None:
        """Wait until all calls have ended and the fleet is whole, and ask for every name at every router."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_WAIT_S):
                await asyncio.gather(*self._calls)
        if not await self._until(self._is_ready, _SETTLE_S, "all workers and routers are ready again"):
            return
        for router in range(self.scenario.fleet.routers):
            for name in filter(None, self.history.names):
                answers = partial(self._answers, router, name)
                await self._until(answers, _SETTLE_S, f"router{router} answers for {name}")
        await self._until(self._is_clean, _SETTLE_S, "no worker holds what was deleted", "deleted bytes leave")

    async def _answers(self, router: int, name: str) -> bool:
        """Whether a request for the name is answered: by its bytes, or by 404."""
        ask = self.clients.ask(client=0, router=router, name=name, is_final=True)
        return (await self.clients.as_client(0, ask)).outcome is Outcome.OK

    async def _is_clean(self) -> bool:
        """Whether all that workers hold is registered."""
        status, found = await self.clients.as_client(0, self.clients.orchestrator("GET", "/v1/orphans"))
        return bool(status == 200 and not found["data"])

    async def _until(
        self,
        holds: Callable[[], Coroutine[Any, Any, bool]],
        within_s: float,
        what: str,
        guarantee: str = "the fleet comes to rest",
    ) -> bool:
        deadline = self.loop.time() + within_s
        while not await holds():
            if self.loop.time() > deadline:
                self.broken.append(Broken(guarantee, f"not within {within_s:g} s: {what}"))
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _is_ready(self) -> bool:
        """Whether every worker and every router is ready."""
        return await self.clients.as_client(0, self._look())

    async def _look(self) -> bool:
        status, found = await self.clients.orchestrator("GET", "/v1/workers")
        if status != 200 or [each["state"] for each in found["data"]].count("ready") < self.scenario.fleet.workers:
            return False
        routers = range(self.scenario.fleet.routers)
        return all([(await self.clients.router(number, "GET", "/ready"))[0] == 200 for number in routers])

    def _check_leaders(self) -> None:
        if next(self._batches) % _CHECK_LEADERS_EVERY == 0 and not self._had_two_leaders:
            found = check_leaders(self)
            self._had_two_leaders = bool(found)
            self.broken += found
