"""One contender on one scene, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from benchmarks.placement.ideal import shared_lru
from benchmarks.placement.ours import LorafleetOrchestrator
from benchmarks.placement.papers import ByRank, Migrating, RankAware
from benchmarks.placement.peers import (
    Discard,
    Home,
    Lazy,
    LeastAdapters,
    OnDemand,
    Proportional,
    Scored,
    Static,
)
from benchmarks.placement.workload import PlacementRequest, Scenario, hottest, requests_of
from benchmarks.placement.world import LOST_AFTER_S, Placer, World
from orchestrator.model.policy import PlacementPolicy

OURS = "lorafleet"
RESERVE = "lorafleet, one slot in reserve"
PEERS = (Static, Lazy, Home, Proportional, LeastAdapters, Migrating, ByRank, RankAware)
TAIL_PEERS = (*PEERS, OnDemand, Discard, Scored)
"""And those whose rule is about one engine's slots, for fleets of many more adapters than slots."""
CONTENDERS = (OURS, RESERVE, *(peer.name for peer in PEERS))
HOT = 10
"""How many of the most asked for have to be back after a loss."""


@dataclass(slots=True)
class PlacementFigures:
    """Of one run. None where the scene has nothing to measure it by.

    waits, loads   after the warm-up; `ideal` those of one LRU over all slots, `used` over those that are filled at all
    mean_s, p50_s, p99_s  to the first token; `troubled_p99_s` of what came during and soon after the flash and the loss
    back_s         from the loss until each of the hottest that lost a copy has as many as before, or as are due
    begun_s        from the loss until the last of the loads that this took has begun
    doubled        adapters with two copies or more, the median over time; `unasked` loads that nobody waited for
    """

    waits: int
    loads: int
    ideal_waits: int
    ideal_loads: int
    used_waits: int
    used_loads: int
    hours: float
    mean_s: float
    p50_s: float
    p99_s: float
    troubled_p99_s: float | None = None
    back_s: float | None = None
    begun_s: float | None = None
    doubled: float = 0.0
    unasked: int | None = None
    frozen_s: int | None = None
    unserved: int = 0


@dataclass(slots=True)
class FleetSampler:
    """Looks at the fleet each second."""

    world: World
    hot: Sequence[int]
    lost_at: float | None
    target: Callable[[int], int]
    doubled: list[int] = field(default_factory=list)
    before: dict[int, int] = field(default_factory=dict)
    back_at: float | None = None

    def look(self) -> None:
        ready: dict[int, int] = {}
        for worker in self.world.workers.values():
            for adapter, copy in worker.copies.items():
                ready[adapter] = ready.get(adapter, 0) + (copy.state == "ready")
        if self.world.now >= self.world.scene.warm_s:
            self.doubled.append(sum(count > 1 for count in ready.values()))
        if self.lost_at is None:
            return
        if self.world.now < self.lost_at:
            self.before = {adapter: max(1, ready.get(adapter, 0)) for adapter in self.hot}
        elif self.back_at is None and self.world.now > self.lost_at + LOST_AFTER_S and self._is_back(ready):
            self.back_at = self.world.now

    def _is_back(self, ready: dict[int, int]) -> bool:
        before = {adapter: count for adapter, count in self.before.items() if adapter in self.world.lost}
        return all(ready.get(adapter, 0) >= min(count, self.target(adapter)) for adapter, count in before.items())


def run(contender: str, scene: Scenario, seed: int, rules: PlacementPolicy | None = None) -> PlacementFigures:
    """Simulate; the same seed gives every contender the same requests."""
    requests = requests_of(scene, seed)
    world = World(scene, requests, seed)
    placer = placer_of(contender, world, rules)
    target = placer.target if isinstance(placer, LorafleetOrchestrator) else lambda _: scene.workers
    watch = FleetSampler(world, () if scene.lost is None else hottest(requests, scene.lost, HOT), scene.lost, target)
    for tenth in range(1, int(scene.lasts_s * 2)):
        world.at(tenth / 2, watch.look)
    world.run(placer)
    counted = [request for request in requests if request.at >= scene.warm_s]
    served = sorted(request.first_token - request.at for request in counted if request.first_token >= 0)
    slots = scene.workers * scene.slots
    ideal_waits, ideal_loads = shared_lru(requests, slots, warm_s=scene.warm_s, takes_time=True, load_s=scene.load_s)
    used = slots - scene.workers if contender == RESERVE else slots
    used_waits, used_loads = shared_lru(requests, used, warm_s=scene.warm_s, takes_time=True, load_s=scene.load_s)
    loads = [load for load in world.loads if load[0] >= scene.warm_s]
    return PlacementFigures(
        waits=sum(request.has_waited for request in counted),
        loads=len(loads),
        ideal_waits=ideal_waits,
        ideal_loads=ideal_loads,
        used_waits=used_waits,
        used_loads=used_loads,
        hours=(scene.lasts_s - scene.warm_s) / 3600,
        mean_s=mean(served),
        p50_s=median(served),
        p99_s=p99(served),
        troubled_p99_s=_troubled(scene, requests),
        back_s=None if watch.back_at is None or scene.lost is None else watch.back_at - scene.lost,
        begun_s=_begun(scene, world, watch),
        doubled=median(watch.doubled),
        unasked=placer.unasked if isinstance(placer, LorafleetOrchestrator) else None,
        frozen_s=placer.frozen_s if isinstance(placer, LorafleetOrchestrator) else None,
        unserved=len(counted) - len(served),
    )


def placer_of(contender: str, world: World, rules: PlacementPolicy | None = None) -> Placer:
    """The contender of this name in this world. `rules`: ours; the default policy without them."""
    if contender in (OURS, RESERVE):
        rules = rules or PlacementPolicy()
        return LorafleetOrchestrator(world, replace(rules, reserve_slots=1) if contender == RESERVE else rules)
    return next(peer for peer in TAIL_PEERS if peer.name == contender)(world)


def _begun(scene: Scenario, world: World, watch: FleetSampler) -> float | None:
    if watch.back_at is None or scene.lost is None:
        return None
    begun = [
        at
        for at, adapter, _ in world.loads
        if adapter in watch.hot and adapter in world.lost and scene.lost < at < watch.back_at
    ]
    return max(begun) - scene.lost if begun else 0.0


def _troubled(scene: Scenario, requests: Sequence[PlacementRequest]) -> float | None:
    """p99 of what came during the flash and from the loss until the other worker came, and a minute after each."""
    spans = []
    if scene.flash is not None:
        spans.append((scene.flash[0], scene.flash[1] + 60))
    if scene.lost is not None:
        spans.append((scene.lost, (scene.back or scene.lost) + 60))
    if not spans:
        return None
    return p99(
        sorted(
            request.first_token - request.at
            for request in requests
            if request.first_token >= 0 and any(began <= request.at < ended for began, ended in spans)
        )
    )


def p99(times: Sequence[float]) -> float:
    """The 99th percentile of sorted times."""
    return times[min(len(times) - 1, len(times) * 99 // 100)]
