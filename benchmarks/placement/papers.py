"""Rules of three papers that move adapters by load and by rank, with everything else as in `peers.py`.

Their systems also route. Here the router is everybody's, so what stays of each is where it has adapters. Facts are
theirs, the code is not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.placement.peers import Lazy, RequestRates
from benchmarks.placement.workload import PlacementRequest, padding
from benchmarks.placement.world import SimulatedWorker, World

LEAST_MOVED_S = 0.1
"""Less work than this moves nowhere."""


class Migrating(Lazy):
    """dLoRA's rule (OSDI 2024, section 5): adapters and their requests move from busy engines to idle ones.

    As in its artifact (LLMServe/dLoRA-artifact, vllm/engine/engine_manager.py), an adapter that no engine has goes to
    the engine with the fewest requests. Every 10 s, when an engine has more requests than a batch, an integer program
    (migration_ilp.py) places adapters and requests so that the engine that ends last ends first. `migrations` does the
    same greedily. Merging adapters into the base model is left out: engines here have no batches.
    """

    name = "migrating (dLoRA)"
    every_s = 10
    batch = 16

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seconds = 0

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        del adapter
        return lambda worker: (-len(worker.queued) - len(self.queues.get(worker.name, ())), worker.name)

    def second(self) -> None:
        self.seconds += 1
        if self.seconds % self.every_s == 0:
            self._migrate()
        super().second()

    def _migrate(self) -> None:
        requests = requests_left(self.world)
        if not any(len(of_worker) > self.batch for of_worker in requests.values()):
            return
        pending: dict[str, dict[int, float]] = {}
        for name, of_worker in requests.items():
            work = pending.setdefault(name, {})
            for request in of_worker:
                work[request.adapter] = work.get(request.adapter, 0.0) + request.work_s
        for adapter, name in migrations(pending, self.world.scene.load_s):
            self._ask_once(adapter, self.world.known[name])


def requests_left(world: World) -> dict[str, list[PlacementRequest]]:
    """Requests without a first token, by worker; those that wait in line count where their adapter is served first."""
    left = {name: [r for r in worker.queued if r.first_token > world.now] for name, worker in world.known.items()}
    ends = {name: max(worker.free_at, world.now) for name, worker in world.known.items()}
    for adapter, line in sorted(world.line.items()):
        holders = [worker.name for worker in world.ready_on(adapter)]
        for request in line if holders else ():
            soonest = min(holders, key=lambda name: (ends[name], name))
            ends[soonest] += request.work_s
            left[soonest].append(request)
    return left


def migrations(pending: Mapping[str, Mapping[int, float]], load_s: float) -> list[tuple[int, str]]:
    """The loads, as (adapter, worker), that let the worker which ends last end sooner.

    The busiest worker shares the adapter with most work to share with the idlest worker, so that both end at once after
    the load; again and again, until no share lets the busiest worker end sooner.

    pending  worker -> adapter -> seconds of work that its requests have left there
    """
    left = {name: dict(work) for name, work in pending.items()}
    loads: list[tuple[int, str]] = []
    while True:
        ends = {name: sum(left[name].values()) for name in sorted(left)}
        busiest, idlest = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
        gap_s = ends[busiest] - ends[idlest]
        prices_s = {adapter: 0.0 if adapter in left[idlest] else load_s for adapter in left[busiest]}
        shares_s = {a: min(work_s, (gap_s - prices_s[a]) / 2) for a, work_s in sorted(left[busiest].items())}
        if not shares_s or max(shares_s.values()) < LEAST_MOVED_S:
            return loads
        moved = max(shares_s, key=shares_s.__getitem__)
        if moved not in left[idlest]:
            loads.append((moved, idlest))
        left[busiest][moved] -= shares_s[moved]
        left[idlest][moved] = left[idlest].get(moved, 0.0) + shares_s[moved] + prices_s[moved]


class RankAware(Lazy):
    """The rule of Toppings (USENIX ATC 2025; CaraServe, arXiv 2401.11240): where a request of its rank adds least.

    Its scheduler predicts, from the ranks in each engine's batch, by how much a request would slow it, and sends the
    request where that time by the number of requests there is least. With padding kernels a batch costs what its
    largest rank costs (`added_s`). Its adapters wait in host memory, so each request may go anywhere: an adapter whose
    workers have no room is loaded where its next request costs least. Prefilling on the CPU during a load is left out,
    and so is the penalty for decoding later than promised: there is no decoding here.
    """

    name = "rank-aware (Toppings)"

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        scene, left = self.world.scene, requests_left(self.world)
        asked = (scene.work_s, scene.rank_of(adapter))

        def key(worker: SimulatedWorker) -> tuple[float, str]:
            there = [(request.work_s, scene.rank_of(request.adapter)) for request in left[worker.name]]
            queue = self.queues.get(worker.name, ())
            there += [(scene.work_s, scene.rank_of(other)) for other in queue]
            return -added_s(there, asked) * (len(there) + 1), worker.name

        return key

    def second(self) -> None:
        for adapter in sorted(self.world.line):
            worker = max(self.world.known.values(), key=self._choice(adapter))
            self._ask_once(adapter, worker)
        super().second()


def added_s(there: Sequence[tuple[float, int]], asked: tuple[float, int]) -> float:
    """Seconds by which one more request lengthens a batch, each as (seconds of work, rank)."""

    def takes_s(batch: Sequence[tuple[float, int]]) -> float:
        return sum(work_s for work_s, _ in batch) * padding(max((rank for _, rank in batch), default=0))

    return takes_s([*there, asked]) - takes_s(there)


class ByRank(Lazy):
    """LoRAServe's rule (arXiv 2511.22880): like ranks together, every engine with the same share of the load.

    An adapter's load is its demand over what an engine serves of its rank. Adapters in the order of their ranks fill
    one engine after the other up to an equal share (`shares_by_rank`); one that crosses a boundary is on both sides of
    it. Shares go to the engines that have most of them already, and a copy that moved is used no more. The paper's
    router divides a shared adapter's requests by the shares. How often it computes them anew is a guess.
    """

    name = "by rank (LoRAServe)"
    every_s = 60

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seconds = 0
        self.rates = RequestRates(world)
        self.homes: dict[int, set[str]] = {}

    def _choice(self, adapter: int) -> Callable[[SimulatedWorker], Any]:
        homes, idlest = self.homes.get(adapter, ()), super()._choice(adapter)
        return lambda worker: (worker.name in homes, idlest(worker))

    def second(self) -> None:
        self.seconds += 1
        self.rates.observe()
        if self.seconds % self.every_s == 0:
            self._place()
        self._leave()
        super().second()

    def _place(self) -> None:
        scene, workers = self.world.scene, self.world.known
        loads = {adapter: rate * padding(scene.rank_of(adapter)) for adapter, rate in self.rates.active().items()}
        shares = shares_by_rank(loads, {adapter: scene.rank_of(adapter) for adapter in loads}, len(workers))
        self.homes = {}
        free = sorted(workers)
        for share in shares:
            name = max(free, key=lambda name: len(share.keys() & workers[name].copies.keys()))
            free.remove(name)
            for adapter in sorted(share, key=lambda adapter: (-share[adapter], adapter))[: workers[name].slots]:
                self.homes.setdefault(adapter, set()).add(name)
                self._ask_once(adapter, workers[name])

    def _leave(self) -> None:
        """Use copies away from their homes no more once the homes are ready, and drop them when they are idle."""
        for adapter, homes in self.homes.items():
            ready = {worker.name for worker in self.world.ready_on(adapter)}
            for worker in self.world.known.values():
                copy = worker.copies.get(adapter)
                if copy is None or worker.name in homes or copy.state == "loading":
                    continue
                if copy.state == "ready" and homes <= ready:
                    copy.state = "draining"
                if copy.state == "draining" and not copy.in_flight:
                    del worker.copies[adapter]


def shares_by_rank(loads: Mapping[int, float], ranks: Mapping[int, int], workers: int) -> list[dict[int, float]]:
    """Each worker's part of each adapter's load, an equal sum for all workers, the largest ranks first."""
    fair = sum(loads.values()) / workers
    shares: list[dict[int, float]] = [{} for _ in range(workers)]
    number, room = 0, fair
    for adapter in sorted(loads, key=lambda adapter: (-ranks[adapter], -loads[adapter], adapter)):
        left = loads[adapter]
        while left > room and number < workers - 1:
            if room > 0:
                shares[number][adapter] = room
            left, number, room = left - room, number + 1, fair
        shares[number][adapter] = left
        room -= left
    return shares
