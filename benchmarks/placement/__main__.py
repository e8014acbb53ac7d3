"""Every contender on every scene, one table. `python -m benchmarks.placement --help`."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from benchmarks.placement.measure import CONTENDERS, OURS, PEERS, RESERVE, PlacementFigures, run
from benchmarks.placement.prefetch import prefetch_rows
from benchmarks.placement.workload import Scenario
from benchmarks.report import ReportRow, console, show

STEADY = Scenario(name="100 adapters")
CHANGING = Scenario(name="100 adapters, changing", change_s=600)
MANY = Scenario(name="500 adapters, changing", adapters=500, change_s=600, lasts_s=1800)
TROUBLE = Scenario(name="flash and loss", lasts_s=1800, flash=(600, 780, 2.0), lost=1020, back=1320)
CONSTANT = Scenario(name="constant", adapters=48, lasts_s=1800, is_regular=True, warm_s=900)
LONG_TAIL = Scenario(
    name="long tail", adapters=1000, workers=4, slots=12, work_s=0.2, answer_s=2.0, turns=1, lasts_s=150, warm_s=40
)
"""Requests for adapters that mostly come once, with loads from the page cache, from a disk, and from far away."""
TAILS = tuple(
    replace(LONG_TAIL, name=f"long tail, loads of {load_s:g} s", load_s=load_s, stall_s=min(0.5, load_s / 3), rate=rate)
    for load_s, rate in ((0.03, 8.0), (0.3, 8.0), (3.0, 1.5))
)
RANKS = Scenario(name="ranks 8 to 128", ranks=(8, 16, 32, 64, 128), work_s=0.4, lasts_s=1800)
"""Adapters of five ranks, whose batches cost what the largest rank in them costs."""
SCENES = (STEADY, CHANGING, MANY, TROUBLE, CONSTANT, RANKS, *TAILS)
BACK_S = 5.0
"""Within this time of a loss the last load of a hot adapter should have begun."""
Found = dict[tuple[str, str], list[PlacementFigures]]


def main() -> None:
    """Run what was asked for, print the table."""
    options = _options()
    scenes = [_quick(scene) for scene in (STEADY, TROUBLE, CONSTANT)] if options.quick else SCENES
    seeds = range(1, 2) if options.quick else range(1, options.seeds + 1)
    tasks = [(name, scene, seed) for scene, name, seed in product(scenes, CONTENDERS, seeds)]
    found: Found = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for (name, scene, _), figures in zip(tasks, pool.map(run, *zip(*tasks, strict=True)), strict=True):
            found.setdefault((scene.name, name), []).append(figures)
            sys.stderr.write(f"\r{sum(map(len, found.values()))}/{len(tasks)} runs   ")
    sys.stderr.write("\n")
    _compare(scenes, found)
    prefetched = () if options.quick else prefetch_rows()
    show(f"placement, {len(seeds)} seeds", [*_rows(scenes, found), *prefetched], options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="where adapters live: our placement against other rules, simulated")
    parser.add_argument("--quick", action="store_true", help="end within a minute; for seeing that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def _quick(scene: Scenario) -> Scenario:
    if scene.flash is not None:
        return replace(scene, lasts_s=400, warm_s=60, flash=(100, 160, 2.0), lost=200, back=300)
    return replace(scene, lasts_s=400, warm_s=200)


def _compare(scenes: Sequence[Scenario], found: Found) -> None:
    table = Table(title="requests that wait for a load and loads, x of one LRU over all slots; first tokens in seconds")
    for column in (
        "scene",
        "contender",
        "waits",
        "loads",
        "mean",
        "p50",
        "p99",
        "p99 in trouble",
        "hot ones back",
        "unserved",
    ):
        table.add_column(column)
    for scene, name in product(scenes, CONTENDERS):
        runs = found[scene.name, name]
        table.add_row(
            scene.name,
            name,
            "" if scene.is_regular else f"{_ratio(runs, 'waits', 'ideal_waits'):.2f}",
            f"{_per_hour(runs):.0f}/h" if scene.is_regular else f"{_ratio(runs, 'loads', 'ideal_loads'):.2f}",
            f"{mean(figures.mean_s for figures in runs):.2f}",
            f"{mean(figures.p50_s for figures in runs):.2f}",
            f"{mean(figures.p99_s for figures in runs):.1f}",
            _mean(figures.troubled_p99_s for figures in runs),
            "" if scene.lost is None else _back(runs),
            str(sum(figures.unserved for figures in runs) or ""),
        )
    console().print(table)


def _back(runs: Sequence[PlacementFigures]) -> str:
    times = [figures.back_s for figures in runs if figures.back_s is not None]
    never = len(runs) - len(times)
    return (f"{max(times):.1f}" if times else "") + (f" ({never} of {len(runs)} never)" if never else "")


def _rows(scenes: Sequence[Scenario], found: Found) -> Iterable[ReportRow]:
    peers = [peer.name for peer in PEERS]
    for scene, name in product(scenes, (OURS, RESERVE)):
        runs = found[scene.name, name]
        if scene.is_regular:
            yield ReportRow(f"{scene.name}: loads while demand stays the same, {name}", _per_hour(runs), "an hour", 0.0)
            continue
        if scene.turns == 1:
            rival = min(peers, key=lambda peer: mean(figures.mean_s for figures in found[scene.name, peer]))
            best, mean_s = (mean(figures.mean_s for figures in found[scene.name, who]) for who in (rival, name))
            yield ReportRow(f"{scene.name}: mean first token, {name}", mean_s, "s", 1.1 * best, rival, best)
            continue
        if scene.lost is not None:
            rival = min(peers, key=lambda peer: mean(f.troubled_p99_s or 0.0 for f in found[scene.name, peer]))
            best = mean(figures.troubled_p99_s or 0.0 for figures in found[scene.name, rival])
            p99_s = mean(figures.troubled_p99_s or 0.0 for figures in runs)
            yield ReportRow(f"{scene.name}: first token p99 in trouble, {name}", p99_s, "s", best, rival, best)
            begun_s = [figures.begun_s for figures in runs if figures.begun_s is not None]
            if begun_s:
                what = f"{scene.name}: until the last load of a hot one has begun, slowest seed, {name}"
                yield ReportRow(what, max(begun_s), "s", BACK_S)
            continue
        for what, ours, ideal in (
            ("requests that wait for a load", "waits", "ideal_waits"),
            ("loads", "loads", "ideal_loads"),
        ):
            rival = min(peers, key=lambda peer: _ratio(found[scene.name, peer], ours, ideal))
            value, best = _ratio(runs, ours, ideal), _ratio(found[scene.name, rival], ours, ideal)
            yield ReportRow(f"{scene.name}: {what}, {name}", value, "x of shared LRU", 1.1, rival, best)
            if name == RESERVE:
                value = _ratio(runs, ours, ideal.replace("ideal", "used"))
                yield ReportRow(f"{scene.name}: {what}, {name}", value, "x of LRU over the slots it fills", 1.1)
        if scene.adapters == STEADY.adapters:
            doubled = median(figures.doubled for figures in runs)
            yield ReportRow(f"{scene.name}: adapters with two replicas or more, {name}", doubled, "", 1.0)
            moves = sum(figures.unasked or 0 for figures in runs) / sum(figures.loads for figures in runs)
            yield ReportRow(f"{scene.name}: loads that nobody waited for, {name}", 100 * moves, "% of all")


def _ratio(runs: Sequence[PlacementFigures], ours: str, ideal: str) -> float:
    return sum(getattr(figures, ours) for figures in runs) / sum(getattr(figures, ideal) for figures in runs)


def _per_hour(runs: Sequence[PlacementFigures]) -> float:
    return sum(figures.loads for figures in runs) / sum(figures.hours for figures in runs)


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.1f}" if known else ""


if __name__ == "__main__":
    main()
