"""Placement rules on one clock, with adapters that are each asked for rarely, beside one that knows the future."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any

from rich.table import Table

from benchmarks.placement.measure import OURS, TAIL_PEERS, p99, placer_of
from benchmarks.placement.peers import Lazy
from benchmarks.placement.workload import PlacementRequest, Scenario, requests_of
from benchmarks.placement.world import Copy, World
from benchmarks.report import ReportRow, console

BEST = "knows the future"
CONTENDERS = (OURS, *(peer.name for peer in TAIL_PEERS))
HOT = 10
"""The adapters most asked for in a run are its hot ones."""
BASE = Scenario(
    name="", adapters=10_000, workers=4, slots=12, work_s=0.2, answer_s=2.0, turns=1, lasts_s=150, warm_s=40
)
_LOADS = ((0.03, 8.0), (0.3, 8.0), (3.0, 1.5))
"""Seconds of a load, from page cache, disk and far away, and a rate of requests that one can bear with them."""


def scenes(*, is_quick: bool) -> Sequence[Scenario]:
    """Zipf and uniform demand with three costs of a load; agents, a greedy tenant, many workers, a burst."""
    found = [
        replace(BASE, name=f"{shape}, loads of {load_s:g} s", zipf=zipf, load_s=load_s, stall_s=load_s / 3, rate=rate)
        for (shape, zipf), (load_s, rate) in product((("Zipf 0.9", 0.9), ("Zipf 1.2", 1.2), ("uniform", 0.0)), _LOADS)
    ]
    middle = replace(BASE, zipf=0.9, load_s=0.3, stall_s=0.1, rate=8.0)
    found += [
        replace(middle, name="agents of 40 turns, loads of 0.3 s", turns=40, lasts_s=400, warm_s=200),
        replace(middle, name="a greedy tenant, loads of 0.3 s", rate=4.0, greedy=(500, 6.0)),
        replace(middle, name="Zipf 0.9 on 64 workers, loads of 0.3 s", workers=64, rate=128.0, lasts_s=60, warm_s=20),
    ]
    burst = replace(BASE, name="1,000 first requests at once, loads of 0.3 s", workers=8, slots=16, load_s=0.3)
    found.append(replace(burst, stall_s=0.1, rate=0.2, burst=(60.0, 1000)))
    return [replace(scene, lasts_s=60, warm_s=20) for scene in found[:1]] if is_quick else found


@dataclass(frozen=True, slots=True)
class TailFigures:
    """Seconds to the first token and loads, in one run after its warm-up.

    cold      of requests that found their adapter ready nowhere; `hot` of those for the `HOT` most asked adapters
    others    of all but a greedy tenant's
    misses    share of requests that found their adapter ready nowhere
    fairness  Jain's index of the adapters' mean waits, each adapter a tenant: 1 is equal
    """

    mean_s: float
    cold_mean_s: float
    cold_p99_s: float
    hot_p99_s: float
    others_mean_s: float
    last_s: float
    answers_a_s: float
    misses: float
    fairness: float
    loads: int
    unserved: int


def simulated_rows(seeds: Iterable[int], *, is_quick: bool) -> Iterator[ReportRow]:
    """Print a table of all contenders; the rows are ours beside the best other."""
    table = Table(title="the long tail; first tokens in seconds")
    columns = ("mean", "cold", "cold p99", "hot p99", "others", "last", "answers/s", "misses", "fairness", "loads")
    for column in ("scene", "contender", *columns, "unserved"):
        table.add_column(column)
    rows: list[ReportRow] = []
    for scene in scenes(is_quick=is_quick):
        found = {name: _mean_of([_run(name, scene, seed) for seed in seeds]) for name in (*CONTENDERS, BEST)}
        for name, figures in found.items():
            times = (figures.mean_s, figures.cold_mean_s, figures.cold_p99_s, figures.hot_p99_s, figures.others_mean_s)
            shares = (figures.last_s, figures.answers_a_s, figures.misses, figures.fairness)
            counts = (str(figures.loads), str(figures.unserved or ""))
            table.add_row(scene.name, name, *(f"{number:.2f}" for number in (*times, *shares)), *counts)
        rows += _rows(scene, found)
    console().print(table)
    yield from rows


def _rows(scene: Scenario, found: dict[str, TailFigures]) -> Iterator[ReportRow]:
    ours = found[OURS]
    columns: dict[str, tuple[Callable[[TailFigures], float], float]] = {
        "mean first token": (lambda figures: figures.mean_s, 1.1 if scene.load_s < 0.1 else 1.05),
        "first token p99, hot adapters": (lambda figures: figures.hot_p99_s, 1.1),
    }
    if scene.greedy is not None:
        columns["mean first token of the others"] = (lambda figures: figures.others_mean_s, 1.05)
    if scene.burst is not None:
        columns = {"last of the burst": (lambda figures: figures.last_s, 1.3)}
    for what, (figure, goal) in columns.items():
        rival = min((peer.name for peer in TAIL_PEERS), key=lambda name: figure(found[name]))
        yield ReportRow(f"{scene.name}: {what}", figure(ours), "s", None, rival, figure(found[rival]), goal)
    if scene.burst is None:
        yield ReportRow(
            f"{scene.name}: mean first token, beside", ours.mean_s, "s", None, BEST, found[BEST].mean_s, 1.2
        )


def _run(contender: str, scene: Scenario, seed: int) -> TailFigures:
    """Simulate; the same seed gives every contender the same requests."""
    requests = requests_of(scene, seed)
    world = World(scene, requests, seed)
    world.run(Foresight(world) if contender == BEST else placer_of(contender, world))
    counted = [request for request in requests if request.at >= scene.warm_s]
    served = [request for request in counted if request.first_token >= 0]
    times = dict[int, int]()
    for request in requests:
        times[request.adapter] = times.get(request.adapter, 0) + 1
    hottest = set(sorted(times, key=lambda adapter: (-times[adapter], adapter))[:HOT])
    cold = _waits(request for request in served if request.has_waited)
    hot = _waits(request for request in served if request.adapter in hottest)
    every = _waits(served)
    others = _waits(request for request in served if request.adapter < scene.first_greedy)
    by_adapter = dict[int, list[float]]()
    for request in served:
        by_adapter.setdefault(request.adapter, []).append(request.first_token - request.at)
    return TailFigures(
        mean_s=mean(every),
        cold_mean_s=mean(cold),
        cold_p99_s=p99(cold),
        hot_p99_s=p99(hot),
        others_mean_s=mean(others),
        last_s=every[-1],
        answers_a_s=len(served) / (scene.lasts_s - scene.warm_s),
        misses=len(cold) / max(1, len(served)) if any(request.has_waited for request in served) else 0.0,
        fairness=_jain([mean(waits) for waits in by_adapter.values()]),
        loads=sum(at >= scene.warm_s for at, _, _ in world.loads),
        unserved=len(counted) - len(served),
    )


def _jain(waits: Sequence[float]) -> float:
    """Jain's index: the square of the sum by the sum of squares, and by their number."""
    squares = sum(wait * wait for wait in waits)
    return sum(waits) ** 2 / (len(waits) * squares) if squares else 1.0


def _waits(requests: Iterable[PlacementRequest]) -> list[float]:
    return sorted(request.first_token - request.at for request in requests) or [0.0]


def _mean_of(runs: Sequence[TailFigures]) -> TailFigures:
    def of(name: str) -> Any:
        return mean(getattr(figures, name) for figures in runs)

    return TailFigures(
        mean_s=of("mean_s"),
        cold_mean_s=of("cold_mean_s"),
        cold_p99_s=of("cold_p99_s"),
        hot_p99_s=of("hot_p99_s"),
        last_s=of("last_s"),
        others_mean_s=of("others_mean_s"),
        answers_a_s=of("answers_a_s"),
        misses=of("misses"),
        fairness=of("fairness"),
        loads=round(of("loads")),
        unserved=sum(figures.unserved for figures in runs),
    )


class Foresight(Lazy):
    """Belady's rule: of the copies that nobody uses, the one that is asked for again last makes room.

    Like the other contenders it hears of wants at once and needs no drain.
    """

    name = BEST

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._coming: dict[int, deque[float]] = {}
        for request in world.requests:
            self._coming.setdefault(request.adapter, deque()).append(request.at)

    def _eviction_rank(self, adapter: int, copy: Copy) -> float:
        """Minus the time at which the adapter is asked for next."""
        del copy
        coming = self._coming[adapter]
        while coming and coming[0] < self.world.now:
            coming.popleft()
        return -coming[0] if coming else float("-inf")
