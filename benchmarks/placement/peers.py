"""What others do, by their rules as published, with everything else the same and in their favour.

They are told of wants and losses at once, evict the least recently used adapter that nobody uses at that moment, need
no drain and keep no slot in reserve. A worker loads one adapter after another.
"""

from collections import deque
from collections.abc import Callable
from math import ceil, exp
from typing import Any

from benchmarks.placement.world import Copy, SimulatedWorker, World
from lorafleet.identity import rendezvous_score

WINDOW_S = 60.0


class RequestRates:
    """Each adapter's requests a second, over a window that fades; `observe` is called each second."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[int, int] = {}
        self._rates: dict[int, float] = {}

    def observe(self) -> None:
        counts: dict[int, int] = {}
        for (adapter, _), (requests, _) in self._world.sent.items():
            counts[adapter] = counts.get(adapter, 0) + requests
        for adapter, requests in counts.items():
            fresh = requests - self._seen.get(adapter, 0)
            self._rates[adapter] = self._rates.get(adapter, 0.0) * exp(-1 / WINDOW_S) + fresh / WINDOW_S
        self._seen = counts

    def active(self) -> dict[int, float]:
        """The rates of adapters that are asked for."""
        return {adapter: rate for adapter, rate in sorted(self._rates.items()) if rate > 0.3 / WINDOW_S}


class Lazy:
    """On request, wherever there is a free slot or least in the queue; the least recently used makes room.

    llm-d's scheduler places so an adapter that is nowhere, by its scorers of LoRA affinity and of queues
    (pkg/plugins/scorer), and its engines load and evict by themselves.
    """

    name = "lazy, LRU (llm-d)"

    def __init__(self, world: World) -> None:
        self.world = world
        self.queues: dict[str, deque[int]] = {}

    def wanted(self, adapter: int) -> None:
        if not any(adapter in queue for queue in self.queues.values()) and not self._is_loading(adapter):
            self._ask(adapter, max(self.world.known.values(), key=self._choice(adapter)))

    def _is_loading(self, adapter: int) -> bool:
        return any(adapter in worker.copies for worker in self.world.known.values())

    def _ask(self, adapter: int, worker: SimulatedWorker) -> None:
        self.queues.setdefault(worker.name, deque()).append(adapter)
        self._go(worker)

    def _ask_once(self, adapter: int, worker: SimulatedWorker) -> None:
        """Let the worker load the adapter, unless it has it or is about to load it."""
        if adapter not in worker.copies and adapter not in self.queues.get(worker.name, ()):
            self._ask(adapter, worker)

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        """A key: the worker with the highest is chosen."""
        del adapter

        def key(worker: SimulatedWorker) -> tuple[object, ...]:
            waits = len(self.queues.get(worker.name, ()))
            return len(worker.copies) < worker.slots, -waits, -max(worker.free_at, self.world.now), worker.name

        return key

    def _go(self, worker: SimulatedWorker) -> None:
        queue = self.queues.get(worker.name)
        if not queue or worker.loads or not worker.is_up:
            return
        if len(worker.copies) >= worker.slots:
            spare = [
                (self._eviction_rank(adapter, copy), adapter)
                for adapter, copy in worker.copies.items()
                if copy.state == "ready" and not copy.in_flight and adapter not in self.world.line
            ]
            if not spare:
                return  # tried again each second
            del worker.copies[min(spare)[1]]
        adapter = queue.popleft()
        if adapter not in worker.copies:
            self.world.load(adapter, worker)

    def _eviction_rank(self, adapter: int, copy: Copy) -> float:
        """The idle copy with the least makes room."""
        del adapter
        return copy.last_used

    def loaded(self, worker: SimulatedWorker) -> None:
        self._go(worker)

    def lost(self, worker: SimulatedWorker) -> None:
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

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        size = len(self.ring)
        return lambda worker: -((self.ring.index(worker.name) - adapter) % size) if worker.name in self.ring else -size


class Home(Lazy):
    """Each adapter at its rendezvous home among the workers that are there."""

    name = "rendezvous home"

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        return lambda worker: rendezvous_score(str(adapter), worker.name)


class LeastAdapters(Lazy):
    """AIBrix's rule: the fewest adapters (pkg/controller/modeladapter/scheduling/least_adapters.go)."""

    name = "least adapters (AIBrix)"

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        del adapter
        return lambda worker: (-len(worker.copies) - len(self.queues.get(worker.name, ())), worker.name)


class OnDemand(Lazy):
    """LoRAX's rule: each replica loads what its requests ask for; a balancer in front spreads them without regard."""

    name = "on demand, spread (LoRAX)"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.asked = 0

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        del adapter
        self.asked += 1
        names = sorted(self.world.known)
        chosen = names[self.asked % len(names)]
        return lambda worker: worker.name == chosen


class Discard(Lazy):
    """S-LoRA's rule (arXiv 2311.03285): an adapter is on the device while requests use it, and is dropped then."""

    name = "dropped when idle (S-LoRA)"

    def second(self) -> None:
        for worker in self.world.known.values():
            self._drop_idle(worker)
        super().second()

    def _go(self, worker: SimulatedWorker) -> None:
        if self.queues.get(worker.name):
            self._drop_idle(worker)
        super()._go(worker)

    def _drop_idle(self, worker: SimulatedWorker) -> None:
        for adapter, copy in list(worker.copies.items()):
            if copy.state == "ready" and not copy.in_flight and adapter not in self.world.line:
                del worker.copies[adapter]


class Scored(Lazy):
    """Chameleon's rule (arXiv 2411.17741, 4.2): the least of 0.45 x frequency, 0.10 x recency and 0.45 x size goes.

    All adapters here have one size, and each part is a share of the largest seen.
    """

    name = "scored cache (Chameleon)"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.most = 1

    def _eviction_rank(self, adapter: int, copy: Copy) -> float:
        requests = sum(self.world.sent.get((adapter, name), (0, 0.0))[0] for name in self.world.known)
        self.most = max(self.most, requests)
        return 0.45 * requests / self.most + 0.10 * copy.last_used / max(1.0, self.world.now)


class Proportional(Home):
    """Dynamo's rule (lib/llm/src/lora/controller.rs): replicas in proportion to load, on the highest rendezvous claims.

    `ceil(share of the load x slots of the fleet)` copies of every adapter with load, at most one a worker; when that is
    more than there are slots, all are scaled down to them, none below 1, the largest remainders first. Down only after
    a cool-down of ticks. Dynamo loads nothing itself; here somebody does as its table says, each time that it is
    computed. How long its ticks are is a guess.
    """

    name = "proportional (Dynamo)"
    every_s = 10
    cool_ticks = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seconds = 0
        self.rates = RequestRates(world)
        self.replicas: dict[int, int] = {}
        self.cooling: dict[int, int] = {}

    def second(self) -> None:
        self.seconds += 1
        self.rates.observe()
        if self.seconds % self.every_s == 0:
            self._scale()
        super().second()

    def _due(self) -> dict[int, int]:
        active = self.rates.active()
        workers = len(self.world.known)
        slots = sum(worker.slots for worker in self.world.known.values())
        total = sum(active.values())
        counts = {adapter: float(min(workers, max(1, ceil(rate / total * slots)))) for adapter, rate in active.items()}
        if sum(counts.values()) > slots:
            scale = slots / sum(counts.values())
            counts = {adapter: max(1.0, count * scale) for adapter, count in counts.items()}
        due = {adapter: int(count) for adapter, count in counts.items()}
        left = max(0, slots - sum(due.values()))
        by_remainder = sorted(counts, key=lambda adapter: (due[adapter] - counts[adapter], adapter))
        for adapter in [adapter for adapter in by_remainder if counts[adapter] > due[adapter]][:left]:
            due[adapter] = min(workers, due[adapter] + 1)
        return due

    def _scale(self) -> None:
        due = self._due()
        workers = list(self.world.known.values())
        for adapter in sorted(due.keys() | self.replicas.keys()):
            before, now = self.replicas.get(adapter, 0), due.get(adapter, 1)
            if now < before:
                self.cooling[adapter] = self.cooling.get(adapter, 0) + 1
                now = before if self.cooling[adapter] <= self.cool_ticks else now
            else:
                self.cooling.pop(adapter, None)
            self.replicas[adapter] = now
            self._act(adapter, now, workers)

    def _act(self, adapter: int, count: int, workers: list[SimulatedWorker]) -> None:
        ranked = sorted(workers, key=lambda worker: -rendezvous_score(str(adapter), worker.name))
        there = [worker for worker in workers if adapter in worker.copies]
        if count < 2 and len(there) < 2:
            return
        for worker in ranked[:count]:
            self._ask_once(adapter, worker)
        ready = [worker for worker in ranked[:count] if worker.copies.get(adapter) is not None]
        for worker in there:
            copy = worker.copies.get(adapter)
            is_spare = worker not in ranked[:count] and len(ready) >= count
            if copy is not None and is_spare and copy.state == "ready" and not copy.in_flight:
                del worker.copies[adapter]
