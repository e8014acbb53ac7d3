"""The processes of a simulated fleet and their machines: what runs where, and when a process ends and starts again."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import structlog

from tests.simulation.disk import JOURNAL_S, Disk, limit_databases
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.nodes import Main, Node
from tests.simulation.programs import Paths, RunningServices

# A process that has failed, as one whose disk is full, is not started again at once: nobody's supervisor does that.
_AGAIN_S = 1.0

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

    def __init__(
        self, loop: SimulatedLoop, paths: Paths, *, slowness: float, on_surprise: Callable[[Node], None]
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.services = RunningServices()
        self.pending = 0
        """Things that are still to be done later: starts after an end, ends of pauses."""
        self._loop, self._paths, self._slowness, self._on_surprise = loop, paths, slowness, on_surprise
        self._disks: dict[str, Disk] = {}
        self._programs: dict[str, Program] = {}

    def add(self, name: str, host: str, main: Main) -> None:
        """Define a process and start it."""
        self._programs[name] = Program(host, main)
        self._disks.setdefault(host, Disk(self._paths.of(host)))
        self.start(name)

    def start(self, name: str) -> None:
        """Start a process, for the first time or again. It has its machine's clock."""
        program = self._programs[name]
        disk = self._disks[program.host]
        node = Node(self._loop, name, program.host, slowness=self._slowness, disk=disk)
        if name in self.nodes:
            node.clock_offset_s = self.nodes[name].clock_offset_s
        node.on_end = self._on_end
        self.nodes[name] = node
        self.services.orchestrators.pop(name, None)
        node.start(program.main)

    def kill(self, name: str, *, away_s: float | None, in_callbacks: int = 1) -> None:
        """SIGKILL before the so-manieth callback from now; 0: at once.

        It starts again after `away_s`; None: not by itself.
        """
        node = self.nodes[name]
        node.may_end, node.away_s = True, away_s
        if in_callbacks:
            node.kill_in(in_callbacks)
        else:
            node.kill()

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

    def of_machine(self, name: str) -> list[Node]:
        """All processes on the machine of this one."""
        host = self.nodes[name].host
        return [each for each in self.nodes.values() if each.host == host]

    def lose_power(self, name: str, *, away_s: float | None) -> None:
        """End all processes of this one's machine; what its disk has not kept is lost. Needs `keep_journals` before."""
        here = [each for each in self.of_machine(name) if each.is_alive]
        databases = list(chain.from_iterable(each.databases for each in here))
        with self._disks[self.nodes[name].host].losing_power(databases, self._loop.chance):
            for node in here:
                node.may_end, node.away_s = True, away_s
                node.kill()

    def fill_disk(self, name: str, for_s: float) -> None:
        """Let nothing more be written on the machine of this process."""
        disk = self._disks[self.nodes[name].host]

        def set_full(is_full: bool) -> None:
            disk.is_full = is_full
            for node in self.of_machine(name):
                limit_databases(node.databases, is_full=is_full)

        set_full(True)
        self.after(for_s, lambda: set_full(False))

    def keep_journals(self) -> None:
        """Let all machines' file systems commit their journals, now and every few seconds."""
        for disk in self._disks.values():
            disk.commit_journal()
        self._loop.call_exactly_at(self._loop.time() + JOURNAL_S, self.keep_journals)

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
            away_s = node.away_s if node.failure is None else max(node.away_s, _AGAIN_S)
            self.after(away_s, lambda: self.start(node.name))
