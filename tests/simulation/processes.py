"""The processes of a simulated fleet: what runs on which machine, and when a process ends and starts again."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.nodes import Main, Node
from tests.simulation.programs import RunningServices

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs, and on which machine."""

    host: str
    main: Main


class FleetProcesses:
    """The processes by name; of each the latest node.

    on_surprise  called with a process that has ended although nothing was to end it
    """

    def __init__(self, loop: SimulatedLoop, *, slowness: float, on_surprise: Callable[[Node], None]) -> None:
        self.nodes: dict[str, Node] = {}
        self.services = RunningServices()
        self.pending = 0
        """Things that are still to be done later: starts after an end, ends of pauses."""
        self._loop, self._slowness, self._on_surprise = loop, slowness, on_surprise
        self._programs: dict[str, Program] = {}

    def add(self, name: str, host: str, main: Main) -> None:
        """Define a process and start it."""
        self._programs[name] = Program(host, main)
        self.start(name)

    def start(self, name: str) -> None:
        """Start a process, for the first time or again. It has its machine's clock."""
        program = self._programs[name]
        node = Node(self._loop, name, program.host, slowness=self._slowness)
        if name in self.nodes:
            node.clock_offset_s = self.nodes[name].clock_offset_s
        node.on_end = self._on_end
        self.nodes[name] = node
        self.services.orchestrators.pop(name, None)
        node.start(program.main)

    def kill(self, name: str, *, away_s: float | None, in_callbacks: int = 1) -> None:
        """SIGKILL before the so-manieth callback from now. It starts again after `away_s`; None: not by itself."""
        node = self.nodes[name]
        node.may_end, node.away_s = True, away_s
        node.kill_in(in_callbacks)

    def stop(self, name: str, *, away_s: float | None) -> None:
        """SIGTERM. It starts again so long after its end; None: not by itself."""
        node = self.nodes[name]
        node.may_end, node.away_s = True, away_s
        node.stop.set()

    def pause(self, name: str, for_s: float) -> None:
        """Let a process stand still, as SIGSTOP does."""
        node = self.nodes[name]
        node.is_paused = True

        def resume() -> None:
            node.is_paused = False

        self.after(for_s, resume)

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do something later, whatever becomes of any process."""
        self.pending += 1

        def run() -> None:
            self.pending -= 1
            act()

        self._loop.call_exactly_at(self._loop.time() + delay_s, run)

    def _on_end(self, node: Node) -> None:
        """Start a process again that has ended."""
        log.info("process ended", process=node.name, failure=repr(node.failure))
        if not node.may_end:
            self._on_surprise(node)
        if node.away_s is not None:
            self.after(node.away_s, lambda: self.start(node.name))
