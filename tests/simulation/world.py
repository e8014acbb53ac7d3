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
from tests.simulation.clients import MOST_WAIT_S, Clients
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.guarantees import Broken, check_leaders, check_run
from tests.simulation.history import History, Outcome
from tests.simulation.nodes import Node
from tests.simulation.processes import FleetProcesses
from tests.simulation.scenario import CALLS, Event, FaultScenario
from tests.simulation.zmq_sockets import EventBus

SERVICE = ("10.0.0.100", programs.ORCHESTRATOR_PORT)
"""The address of whichever orchestrator takes calls."""
_READY_S = 120.0
# The longest that a fleet takes to be whole again after the last fault: a lease that ends, backoffs, an engine's start.
_SETTLE_S = 300.0
_POLL_S = 1.0
_CHECK_LEADERS_EVERY = 20
# A router that was cut off finds the orchestrator again within its loops' longest pause, and reads the catalog.
_CATCH_UP_S = 10.0
# A change waits `confirm_wait_s`, two seconds, for a router.
_WAITED_FOR_S = 1.5

log = structlog.get_logger()


class FleetWorld:
    """The simulated fleet, its clients, and what happened."""

    def __init__(self, scenario: FaultScenario, loop: SimulatedLoop, bus: EventBus, paths: programs.Paths) -> None:
        self.scenario, self.loop, self.bus, self.paths = scenario, loop, bus, paths
        self.contents = [paths.shelf / f"content-{number}" for number in range(scenario.fleet.contents)]
        self.processes = FleetProcesses(loop, slowness=scenario.fleet.slowness, on_surprise=self._on_surprise)
        self.nodes, self.services = self.processes.nodes, self.processes.services
        self.history = History()
        self.broken: list[Broken] = []
        self.cut_off: dict[int, list[tuple[float, float]]] = {}
        """Router -> times for which it could not hear of the orchestrators' changes, or stood still."""
        self.clients: Clients
        self._calls: list[asyncio.Task[Any]] = []
        self._batches = count(1)
        self._had_two_leaders = False

    async def run(self) -> None:
        """The whole run; what was broken is in `broken`."""
        plan = self.scenario.fleet
        self.loop.network.weather.delay_s = plan.delay_s
        self.loop.network.distance_s[frozenset(("10.0.0.1", f"10.0.2.{plan.routers}"))] = plan.far_s
        self._start_fleet()
        nodes = [Node(self.loop, f"client{number}", f"10.0.3.{number + 1}") for number in range(plan.clients)]
        self.clients = Clients(
            nodes,
            routers=[(f"10.0.2.{number + 1}", programs.ROUTER_PORT) for number in range(plan.routers)],
            orchestrator=SERVICE,
            key=self.paths.keys["admin"],
            contents=self.contents,
            answers=ExpectedAnswers(self.paths.model, self.contents),
            history=self.history,
        )
        self.loop.on_batch = self._check_leaders
        if await self._until(self._is_ready, _READY_S, "the fleet is ready"):
            await self._let_happen()
            await self._ask_everything()
        self.broken += check_run(self.history, self.scenario, self.cut_off)

    # The fleet.

    def _start_fleet(self) -> None:
        """Start every process."""
        plan, paths, services, add = self.scenario.fleet, self.paths, self.services, self.processes.add
        url = "http://{}:{}".format(*SERVICE)
        ports = [programs.ORCHESTRATOR_PORT + number for number in range(plan.orchestrators)]
        self.loop.network.shared[SERVICE] = [("10.0.0.1", port) for port in ports]
        for number, port in enumerate(ports):
            add(f"orch{number}", "10.0.0.1", programs.orchestrator(paths, services, port=port))
        slots = {"max_loras": plan.engine.max_loras, "max_cpu_loras": plan.engine.max_cpu_loras}
        for number in range(plan.workers):
            host = f"10.0.1.{number + 1}"
            add(f"engine{number}", host, programs.engine(paths, services, self.bus, plan.engine))
            add(f"w{number}", host, programs.agent(paths, services, orchestrator_url=url, **slots))
        for number in range(plan.routers):
            add(f"router{number}", f"10.0.2.{number + 1}", programs.router(paths, services, orchestrator_url=url))

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
            call = getattr(self.clients, event.kind)(**event.about)
            self._calls.append(self.clients.as_client(event.about["client"], call))
        else:
            getattr(self, f"_{event.kind}")(**event.about)

    def _kill(self, *, node: str, in_callbacks: int, away_s: float) -> None:
        self.processes.kill(node, in_callbacks=in_callbacks, away_s=away_s)

    def _stop(self, *, node: str, away_s: float) -> None:
        self.processes.stop(node, away_s=away_s)

    def _pause(self, *, node: str, for_s: float) -> None:
        self.processes.pause(node, for_s)
        self._note_cut_off(for_s, node)

    def _partition(self, *, node: str, other: str, for_s: float) -> None:
        one, two = self.nodes[node].host, self.nodes[other].host
        if one != two:
            self.loop.network.partition(one, two)
            if "orch" in node + other:
                self._note_cut_off(for_s, node, other)
            self.processes.after(for_s, lambda: self.loop.network.heal(one, two))

    def _note_cut_off(self, for_s: float, *nodes: str) -> None:
        """Remember which routers are behind for so long, and for a moment after it; a change waits for short ones."""
        if for_s < _WAITED_FOR_S:
            return
        now = self.loop.time()
        for node in nodes:
            if node.startswith("router"):
                number = int(node.removeprefix("router"))
                self.cut_off.setdefault(number, []).append((now, now + for_s + _CATCH_UP_S))

    def _loss(self, *, loss: float, for_s: float) -> None:
        weather = self.loop.network.weather
        weather.loss = loss

        def clear_up() -> None:
            weather.loss = 0.0

        self.processes.after(for_s, clear_up)

    def _reset(self, *, node: str) -> None:
        for stream in list(self.nodes[node].streams):
            stream.reset()

    def _clock(self, *, node: str, by_s: float) -> None:
        """The wall clock of the machine is set."""
        host = self.nodes[node].host
        for each in self.nodes.values():
            if each.host == host:
                each.clock_offset_s += by_s

    def _events(self, *, share: float, for_s: float) -> None:
        self.bus.lost_share = share

        def end() -> None:
            self.bus.lost_share = 0.0

        self.processes.after(for_s, end)

    def _drain(self, *, worker: int, for_s: float) -> None:
        path = f"/v1/workers/w{worker}"
        self._calls.append(self.clients.as_client(0, self.clients.orchestrator("POST", f"{path}/drain", body={})))

        def undrain() -> None:
            self._calls.append(self.clients.as_client(0, self._uncordon(path)))

        self.processes.after(for_s, undrain)

    async def _uncordon(self, path: str) -> None:
        """End a drain, as an operator does who looks whether it worked."""
        for _ in range(60):
            status, _ = await self.clients.orchestrator("POST", f"{path}/uncordon", body={})
            if 200 <= status < 300:
                return
            await asyncio.sleep(5.0)

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

    async def _answers(self, router: int, name: str) -> bool:
        """Whether a request for the name is answered: by its bytes, or by 404."""
        ask = self.clients.ask(client=0, router=router, name=name, is_final=True)
        return (await self.clients.as_client(0, ask)).outcome is Outcome.OK

    async def _until(self, holds: Callable[[], Coroutine[Any, Any, bool]], within_s: float, what: str) -> bool:
        deadline = self.loop.time() + within_s
        while not await holds():
            if self.loop.time() > deadline:
                self.broken.append(Broken("the fleet comes to rest", f"not within {within_s:g} s: {what}"))
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
