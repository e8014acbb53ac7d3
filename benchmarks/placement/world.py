"""A fleet on one simulated clock: engines that serve in order, loads that take seconds and stall them, a router.

The router is the same for every contender and knows each queue as it is: what differs is where adapters are. A request
goes to the shortest queue among the workers where its adapter is ready, and waits when there is none. As our router
does, it gives an engine nothing more while that has a second of work before it; the rest waits in line, and the oldest
goes to whichever worker with its adapter has room. An engine works off its requests in order; a first token comes when
the work of its request is done. The largest rank among an engine's requests lengthens that work. A load takes what
loads from remote storage were measured to take, or what the scene says, at the end of which its engine stands still.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import log
from random import Random
from typing import Protocol

from benchmarks.placement.workload import LOAD_SIGMA, PlacementRequest, Scenario, padding
from orchestrator.config import OrchestratorSettings

BIND_S = 1.0
"""Work that an engine is given ahead, the default of the router's `late_binding_s`."""


def sure_after_s(settings: OrchestratorSettings, probe_s: float) -> float:
    """From a worker's last heartbeat until the orchestrator is sure of its loss, when a probe fails after `probe_s`."""
    asked_s = settings.probe_after_s
    while asked_s + probe_s < settings.lost_after_s:
        asked_s += settings.probe_after_s
    return asked_s + probe_s


_DEFAULTS = OrchestratorSettings.model_construct()
# A host that is gone answers nothing: the agent is asked, its engine a third of a deadline later, both in vain.
LOST_AFTER_S = max(sure_after_s(_DEFAULTS, 0.0), sure_after_s(_DEFAULTS, _DEFAULTS.probe_timeout_s * 4 / 3))
"""From a worker's loss until whoever places adapters is sure of it, at worst. The router goes around it at once."""


@dataclass(slots=True, eq=False)
class Copy:
    """An adapter on a worker: loading, ready or draining."""

    state: str
    since: float
    last_used: float
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One engine. `loading`: adapters in the order in which they will be loaded, the first under way."""

    name: str
    slots: int
    is_up: bool = True
    free_at: float = 0.0
    copies: dict[int, Copy] = field(default_factory=dict)
    queued: list[PlacementRequest] = field(default_factory=list)
    loads: int = 0
    is_looked_at: bool = False


class Placer(Protocol):
    """Whoever decides where adapters are."""

    name: str

    def wanted(self, adapter: int) -> None:
        """A request waits for an adapter that is ready nowhere."""

    def loaded(self, worker: SimulatedWorker) -> None:
        """A load there has ended."""

    def lost(self, worker: SimulatedWorker) -> None: ...

    def joined(self) -> None: ...

    def second(self) -> None:
        """A second has passed."""


class World:
    """The clock and all on it."""

    def __init__(self, scene: Scenario, requests: list[PlacementRequest], seed: int) -> None:
        self.scene = scene
        self.requests = requests
        self.rng = Random(seed)
        self.now = 0.0
        self.workers = {f"w{n}": SimulatedWorker(f"w{n}", scene.slots) for n in range(scene.workers)}
        self.known = dict(self.workers)
        """Those that placement believes to be there."""
        self.waiting: dict[int, list[PlacementRequest]] = {}
        """Of adapters that are ready nowhere."""
        self.line: dict[int, deque[PlacementRequest]] = {}
        """Of adapters that are ready where there is no room, each one's oldest first."""
        self.lost: frozenset[int] = frozenset()
        """What the worker held that went."""
        self.sent: dict[tuple[int, str], tuple[int, float]] = {}
        """(adapter, worker) -> requests and work sent there since the beginning"""
        self.loads: list[tuple[float, int, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self, placer: Placer) -> None:
        self.placer = placer
        for request in self.requests:
            self.at(request.at, lambda request=request: self._arrived(request))
        for second in range(1, int(self.scene.lasts_s) + 60):
            self.at(float(second), placer.second)
            self.at(float(second), self.strand)
        if self.scene.lost is not None:
            self.at(self.scene.lost, self._lose)
        if self.scene.back is not None:
            self.at(self.scene.back, self._join)
        while self._events and self._events[0][0] <= self.scene.lasts_s + 60:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _arrived(self, request: PlacementRequest) -> None:
        able = [
            worker
            for worker in self.workers.values()
            if (copy := worker.copies.get(request.adapter)) is not None and copy.state == "ready"
        ]
        if not able:
            self.waiting.setdefault(request.adapter, []).append(request)
            self.placer.wanted(request.adapter)
            return
        worker = min(able, key=lambda worker: (max(worker.free_at, self.now), worker.name))
        if request.adapter in self.line or not self._has_room(worker):
            self.line.setdefault(request.adapter, deque()).append(request)
        else:
            self._send(request, worker)

    def _has_room(self, worker: SimulatedWorker) -> bool:
        return worker.free_at - self.now <= BIND_S

    def _serve_line(self, worker: SimulatedWorker) -> None:
        """Send it the oldest that wait, as far as it has room; look again when it has."""
        while worker.is_up and self._has_room(worker):
            ready = [a for a, copy in worker.copies.items() if copy.state == "ready" and a in self.line]
            if not ready:
                return
            oldest = min(ready, key=lambda adapter: (self.line[adapter][0].at, adapter))
            request = self.line[oldest].popleft()
            if not self.line[oldest]:
                del self.line[oldest]
            self._send(request, worker)

    def _send(self, request: PlacementRequest, worker: SimulatedWorker) -> None:
        copy = worker.copies[request.adapter]
        copy.last_used = self.now
        copy.in_flight += 1
        worker.queued.append(request)
        takes_s = request.work_s * padding(max(self.scene.rank_of(there.adapter) for there in worker.queued))
        worker.free_at = max(worker.free_at, self.now) + takes_s
        request.first_token = worker.free_at
        requests, work_s = self.sent.get((request.adapter, worker.name), (0, 0.0))
        self.sent[request.adapter, worker.name] = (requests + 1, work_s + takes_s)
        self.at(request.first_token + self.scene.answer_s, lambda: self._answered(worker, copy, request))
        self._look_at(worker)

    def _look_at(self, worker: SimulatedWorker) -> None:
        """Serve the line when the worker has room, now or later."""
        if self._has_room(worker):
            self._serve_line(worker)
        elif not worker.is_looked_at:
            worker.is_looked_at = True
            self.at(worker.free_at - BIND_S, lambda: self._looked_at(worker))

    def _looked_at(self, worker: SimulatedWorker) -> None:
        worker.is_looked_at = False
        self._look_at(worker)

    def _answered(self, worker: SimulatedWorker, copy: Copy, request: PlacementRequest) -> None:
        copy.in_flight -= 1
        if worker.is_up and request in worker.queued:
            worker.queued.remove(request)

    def load(self, adapter: int, worker: SimulatedWorker) -> None:
        """Begin a load; the slot is taken from now on. The caller sees to slots and to how many at once."""
        worker.copies[adapter] = Copy("loading", self.now, self.now)
        worker.loads += 1
        self.loads.append((self.now, adapter, worker.name))
        takes_s = self.rng.lognormvariate(log(self.scene.load_s), LOAD_SIGMA)
        self.at(self.now + max(0.0, takes_s - self.scene.stall_s), lambda: self._stall(worker))
        self.at(self.now + takes_s, lambda: self._loaded(worker, adapter))

    def _stall(self, worker: SimulatedWorker) -> None:
        worker.free_at = max(worker.free_at, self.now) + self.scene.stall_s

    def _loaded(self, worker: SimulatedWorker, adapter: int) -> None:
        worker.loads -= 1
        if not worker.is_up:
            return
        copy = worker.copies[adapter]
        copy.state, copy.since, copy.last_used = "ready", self.now, self.now
        for request in self.waiting.get(adapter, ()):
            request.has_waited = True
        self.release(adapter)
        self.placer.loaded(worker)

    def release(self, adapter: int) -> None:
        """Send what waits for an adapter that is ready somewhere."""
        for request in self.waiting.pop(adapter, ()):
            self._arrived(request)
        for worker in self.workers.values():
            if adapter in worker.copies:
                self._look_at(worker)

    def strand(self) -> None:
        """Who waits in line for what is ready nowhere any more waits for a load."""
        ready = {a for worker in self.workers.values() for a, copy in worker.copies.items() if copy.state == "ready"}
        for adapter in [adapter for adapter in self.line if adapter not in ready]:
            for request in self.line.pop(adapter):
                self._arrived(request)

    def ready_on(self, adapter: int) -> list[SimulatedWorker]:
        """Where it is ready, as far as anybody knows."""
        return [
            worker
            for worker in self.known.values()
            if (copy := worker.copies.get(adapter)) is not None and copy.state == "ready"
        ]

    def _lose(self) -> None:
        """The worker with most to do goes."""
        worker = max(self.workers.values(), key=lambda worker: (worker.free_at, worker.name))
        worker.is_up = False
        self.lost = frozenset(worker.copies)
        del self.workers[worker.name]
        again = [request for request in worker.queued if request.first_token > self.now]
        self.at(self.now + LOST_AFTER_S, lambda: self._is_sure(worker))
        for request in again:
            self._arrived(request)
        self.strand()

    def _is_sure(self, worker: SimulatedWorker) -> None:
        del self.known[worker.name]
        self.placer.lost(worker)
        for adapter in list(self.waiting):
            self.placer.wanted(adapter)

    def _join(self) -> None:
        worker = SimulatedWorker(f"w{len(self.workers) + 1}", self.scene.slots, free_at=self.now)
        self.workers[worker.name] = self.known[worker.name] = worker
        self.placer.joined()
