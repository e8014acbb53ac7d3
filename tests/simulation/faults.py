"""What goes wrong in a run, and what operators do: a method for each kind of event that is no client's call."""

from typing import TYPE_CHECKING

from tests.simulation.programs import EngineTrouble

if TYPE_CHECKING:
    from tests.simulation.world import FleetWorld

# A router that was cut off finds the orchestrator again within its loops' longest pause, and reads the catalog.
_CATCH_UP_S = 10.0
# A change waits `confirm_wait_s`, two seconds, for a router.
_WAITED_FOR_S = 1.5
# With as much loss a distant router's answers may take longer than that.
_CUTS_OFF_LOSS = 0.1


class Faults:
    """The faults of one fleet. Each ends by itself, and the run waits for that."""

    def __init__(self, world: "FleetWorld") -> None:
        self._world, self._processes, self._loop = world, world.processes, world.loop
        self.cut_off: dict[int, list[tuple[float, float]]] = {}
        """Router -> times for which it could not hear of the orchestrators' changes, or stood still."""

    # Processes.

    def kill(self, *, node: str, in_callbacks: int, away_s: float) -> None:
        """SIGKILL."""
        self._processes.kill(node, in_callbacks=in_callbacks, away_s=away_s)

    def stop(self, *, node: str, away_s: float) -> None:
        """SIGTERM."""
        self._processes.stop(node, away_s=away_s)

    def pause(self, *, node: str, for_s: float) -> None:
        """The process stands still."""
        self._processes.pause(node, for_s)
        self._note_cut_off(for_s, *(self._served_by(node) or [node]))

    def engine(self, *, node: str, how: str, path: str, for_s: float) -> None:
        """An engine hangs, refuses or is late: all of it, or the calls whose path begins so."""
        services = self._processes.services
        services.troubles[node] = trouble = EngineTrouble(how, path)

        def end() -> None:
            trouble.end()
            if services.troubles.get(node) is trouble:
                del services.troubles[node]

        self._processes.after(for_s, end)

    def api(self, *, how: str, for_s: float) -> None:
        """The API server hangs, refuses, is late, or forgets its watches and their history."""
        server = self._world.api_server
        assert server is not None, "give FleetPlan(has_api_server=True)"
        server.begin(how, self._loop.chance)
        self._processes.after(for_s, server.end)

    # Machines.

    def power(self, *, node: str, away_s: float) -> None:
        """The machine of this process loses its power, and with it what its disk has not kept."""
        self._processes.lose_power(node, away_s=away_s)

    def disk_full(self, *, node: str, for_s: float) -> None:
        """Nothing more can be written on the machine of this process."""
        self._processes.fill_disk(node, for_s)

    def clock(self, *, node: str, by_s: float) -> None:
        """The wall clock of the machine is set."""
        for each in self._processes.of_machine(node):
            each.clock_offset_s += by_s

    # The network.

    def partition(self, *, node: str, other: str, for_s: float) -> None:
        """Nothing passes between the machines of two processes."""
        network = self._loop.network
        one, two = self._processes.nodes[node].host, self._processes.nodes[other].host
        if one != two:
            network.partition(one, two)
            if "orch" in node + other:
                far = [] if "router" in node + other else self._served_by(node) or self._served_by(other)
                self._note_cut_off(for_s, node, other, *far)
            self._processes.after(for_s, lambda: network.heal(one, two))

    def _served_by(self, node: str) -> list[str]:
        """Routers that hear of changes by this process: of several orchestrators each may serve all of them."""
        fleet = self._world.scenario.fleet
        is_one_of_several = node.startswith("orch") and fleet.orchestrators > 1
        return [f"router{number}" for number in range(fleet.routers)] if is_one_of_several else []

    def _note_cut_off(self, for_s: float, *nodes: str) -> None:
        """Remember which routers are behind for so long, and for a moment after it; a change waits for short ones."""
        if for_s < _WAITED_FOR_S:
            return
        now = self._loop.time()
        for node in nodes:
            if node.startswith("router"):
                number = int(node.removeprefix("router"))
                self.cut_off.setdefault(number, []).append((now, now + for_s + _CATCH_UP_S))

    def loss(self, *, loss: float, for_s: float) -> None:
        """So many packets are lost, and sent again."""
        weather = self._loop.network.weather
        weather.loss = loss
        fleet = self._world.scenario.fleet
        if loss >= _CUTS_OFF_LOSS and fleet.far_s:
            self._note_cut_off(for_s, f"router{fleet.routers - 1}")

        def clear_up() -> None:
            weather.loss = 0.0

        self._processes.after(for_s, clear_up)

    def reset(self, *, node: str) -> None:
        """All connections of the process break."""
        for stream in list(self._processes.nodes[node].streams):
            stream.reset()

    def events(self, *, share: float, for_s: float) -> None:
        """So many KV events are lost."""
        bus = self._world.bus
        bus.lost_share = share

        def end() -> None:
            bus.lost_share = 0.0

        self._processes.after(for_s, end)

    # Operators.

    def drain(self, *, worker: int, for_s: float) -> None:
        """A worker is drained, and given back after so long."""
        clients, path = self._world.clients, f"/v1/workers/w{worker}"
        self._world.call(0, clients.orchestrator("POST", f"{path}/drain", body={}))
        self._processes.after(for_s, lambda: self._world.call(0, clients.end_drain(path)))
