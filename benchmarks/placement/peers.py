"""What others do, by their rules as published, with everything else the same and in their favour.

They are told of wants and losses at once, evict the least recently used adapter that nobody uses at that moment, need
no drain and keep no slot in reserve. A worker loads one adapter after another.
"""

from collections import deque
from collections.abc import Callable
from math import ceil, exp
from typing import Any

from benchmarks.placement.world import Worker, World
from orchestrator.core.placement import rendezvous

WINDOW_S = 60.0


class Lazy:
    """On request, wherever there is a free slot or least in the queue; the least recently used makes room."""

    name = "lazy, LRU"

    def __init__(self, world: World) -> None:
        self.world = world
        self.queues: dict[str, deque[int]] = {}

    def wanted(self, adapter: int) -> None:
        if not any(adapter in queue for queue in self.queues.values()) and not self._is_loading(adapter):
            self._ask(adapter, max(self.world.known.values(), key=self._choice(adapter)))

    def _is_loading(self, adapter: int) -> bool:
        return any(adapter in worker.copies for worker in self.world.known.values())

    def _ask(self, adapter: int, worker: Worker) -> None:
        self.queues.setdefault(worker.name, deque()).append(adapter)
        self._go(worker)

    def _choice(self, adapter: int) -> Callable[[Worker], Any]:
        """A key: the worker with the highest is chosen."""
        del adapter

        def key(worker: Worker) -> tuple[object, ...]:
            waits = len(self.queues.get(worker.name, ()))
            return len(worker.copies) < worker.slots, -waits, -max(worker.free_at, self.world.now), worker.name

        return key

    def _go(self, worker: Worker) -> None:
        queue = self.queues.get(worker.name)
        if not queue or worker.loads or not worker.is_up:
            return
        if len(worker.copies) >= worker.slots:
            spare = [
                (copy.last_used, adapter)
                for adapter, copy in worker.copies.items()
                if copy.state == "ready" and not copy.in_flight
            ]
            if not spare:
                return  # tried again each second
            del worker.copies[min(spare)[1]]
        adapter = queue.popleft()
        if adapter not in worker.copies:
            self.world.load(adapter, worker)

    def loaded(self, worker: Worker) -> None:
        self._go(worker)

    def lost(self, worker: Worker) -> None:
        for adapter in self.queues.pop(worker.name, ()):
            self.wanted(adapter)

    def joined(self) -> None:
        pass

    def second(self) -> None:
        for worker in list(self.world.known.values()):
            self._go(worker)


class Static(Lazy):
    """Adapters spread over the workers there are at the start, for ever; the next one takes a lost one's."""

    name = "static spread"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ring = sorted(world.workers)

    def _choice(self, adapter: int) -> Callable[[Worker], Any]:
        size = len(self.ring)
        return lambda worker: -((self.ring.index(worker.name) - adapter) % size) if worker.name in self.ring else -size


class Home(Lazy):
    """Each adapter at its rendezvous home among the workers that are there."""

    name = "rendezvous home"

    def _choice(self, adapter: int) -> Callable[[Worker], Any]:
        return lambda worker: rendezvous(str(adapter), worker.name)


class LeastAdapters(Lazy):
    """AIBrix's default: the worker with the fewest adapters (pkg/controller/modeladapter, leastAdapters)."""

    name = "least adapters (AIBrix)"

    def _choice(self, adapter: int) -> Callable[[Worker], Any]:
        del adapter
        return lambda worker: (-len(worker.copies) - len(self.queues.get(worker.name, ())), worker.name)


class Proportional(Home):
    """Dynamo's rule (lib/llm, LoRA allocation): replicas in proportion to the load, on the highest rendezvous claims.

    Dynamo loads nothing itself; here somebody does as its table says, each time that it is computed anew.
    """

    name = "proportional (Dynamo)"
    every_s = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seconds = 0
        self.seen: dict[int, int] = {}
        self.rates: dict[int, float] = {}

    def second(self) -> None:
        self.seconds += 1
        counts: dict[int, int] = {}
        for (adapter, _), (requests, _) in self.world.sent.items():
            counts[adapter] = counts.get(adapter, 0) + requests
        fade = exp(-1 / WINDOW_S)
        for adapter, requests in counts.items():
            fresh = requests - self.seen.get(adapter, 0)
            self.rates[adapter] = self.rates.get(adapter, 0.0) * fade + fresh / WINDOW_S
        self.seen = counts
        if self.seconds % self.every_s == 0:
            self._scale()
        super().second()

    def _scale(self) -> None:
        total = sum(self.rates.values())
        workers = list(self.world.known.values())
        for adapter, rate in sorted(self.rates.items()):
            due = ceil(rate / total * len(workers)) if total else 0
            ranked = sorted(workers, key=lambda worker: -rendezvous(str(adapter), worker.name))
            there = [worker for worker in workers if adapter in worker.copies]
            if due < 2 and len(there) < 2:
                continue
            for worker in ranked[:due]:
                queue = self.queues.setdefault(worker.name, deque())
                if adapter not in worker.copies and adapter not in queue:
                    self._ask(adapter, worker)
            for worker in there:
                copy = worker.copies[adapter]
                is_enough = sum(adapter in other.copies for other in ranked[:due]) >= max(1, due)
                if worker not in ranked[: max(1, due)] and is_enough and copy.state == "ready" and not copy.in_flight:
                    del worker.copies[adapter]


PEERS = (Static, Lazy, Home, Proportional, LeastAdapters)
