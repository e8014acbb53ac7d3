"""Every policy on a conversation trace. `python -m benchmarks.trace --help`."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import mean

from benchmarks.trace.arena import show_scenes
from benchmarks.trace.engine import Hardware
from benchmarks.trace.fleet import SPEEDS
from benchmarks.trace.ideals import Ideals
from benchmarks.trace.measure import GOOD, TraceCase, TraceFigures, names
from benchmarks.trace.scenes import SCENES
from benchmarks.trace.table import by_case, show
from benchmarks.trace.tasks import Task, begin, do
from benchmarks.trace.workload import VARIABLE, WHERE_FROM, TraceLine, asked_lines
from router.core.schedule.cost_settings import CostSettings

CAPACITIES, LOADS, ROUTERS, REPORTS_S, SEEDS = (750, 2000), (0.5, 1.0, 1.5, 2.0, 3.0), (1, 4), (1.0, 5.0), 3


def main() -> None:
    """Run what was asked for, print the table."""
    options = _options()
    lines = asked_lines(options.trace, is_quick=options.quick)
    if options.scenes:
        show_scenes(lines, options)
        return
    cases = [
        TraceCase(capacity=c, load=load, routers=r, report_s=s)
        for c, r, s, load in product(options.capacity, options.routers, options.report_age, options.loads)
    ]
    seeds = range(1, options.seeds + 1)
    tasks = [Task("", case, seed) for case in _apart(cases) for seed in seeds]
    tasks += [Task(policy, case, seed) for case in cases for policy in options.policies for seed in seeds]
    found: dict[Task, TraceFigures | Ideals] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(options.processes, initializer=begin, initargs=(lines, options)) as pool:
        running = {pool.submit(do, task): task for task in tasks}
        for done in as_completed(running):
            task = running[done]
            if done.exception() is not None:
                pool.shutdown(cancel_futures=True)
            found[task] = done.result()
            left_s = (time.monotonic() - began) / len(found) * (len(tasks) - len(found))
            sys.stderr.write(f"\r{len(found)}/{len(tasks)} runs, about {left_s:.0f} s left   ")
    sys.stderr.write("\n")
    rows = []
    for case in cases:
        bounds = [found[Task("", next(other for other in _apart(cases) if _same(other, case)), s)] for s in seeds]
        bound = Ideals(*(mean(getattr(b, name) for b in bounds) for name in Ideals.__slots__))
        figures = {p: [found[Task(p, case, seed)] for seed in seeds] for p in options.policies}
        rows += by_case(case, bound, figures)  # type: ignore[arg-type]
    show(rows, GOOD, _what(options, lines), options.json)


def _apart(cases: Iterable[TraceCase]) -> list[TraceCase]:
    """One of the cases that have the same requests in the same order on the same blocks."""
    return list({(case.capacity, case.load): case for case in cases}.values())


def _same(one: TraceCase, other: TraceCase) -> bool:
    return (one.capacity, one.load) == (other.capacity, other.load)


def _what(options: argparse.Namespace, lines: Sequence[TraceLine]) -> str:
    file = options.trace or os.environ.get(VARIABLE)
    return (
        f"{Path(file).name if file else 'made-up trace'}: {len(lines)} requests, "
        f"{sum(line.prompt_tokens for line in lines) / 1e6:.1f} M prompt tokens; {len(options.speeds)} engines, "
        f"loads of adapters {options.load_s:g} s, {options.max_loras} device and {options.max_cpu_loras} host slots of "
        "100 adapters"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace",
        description="Simulated vLLM engines and real routing policies on a recorded trace. "
        f"The trace is not part of this repository: {WHERE_FROM}. One run of all of it takes 3 to 15 s.",
    )
    parser.add_argument("--trace", metavar="FILE", help=f"the trace; else the variable {VARIABLE}")
    parser.add_argument("--quick", action="store_true", help="end within a minute; without a trace a made-up one")
    parser.add_argument("--full", action="store_true", help="1 and 4 routers, reports up to 1 and 5 s old: hours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--policies", type=_names, help="comma-separated; all: " + ", ".join(names()))
    parser.add_argument("--capacity", type=_ints, help="blocks of 512 tokens an engine holds")
    parser.add_argument("--loads", type=_floats, help="times the trace's own speed")
    parser.add_argument("--routers", type=_ints, help="that share the arrivals at random and nothing else")
    parser.add_argument("--report-age", type=_floats, help="seconds from one report of an engine to the next")
    parser.add_argument("--seeds", type=int, help="how many; each draws jitter, adapters and chance anew")
    parser.add_argument("--first-seed", type=int, default=1, help="of --scenes")
    parser.add_argument("--scenes", type=_scenes, help="in place of loads and capacities: all, or " + ", ".join(SCENES))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--late-binding", type=float, default=1.0, metavar="S", help="of our policies; inf: none")
    parser.add_argument("--fairness", choices=("request", "program"), default="request", help="of ours in --scenes")
    parser.add_argument("--cost", type=_cost, action="append", default=[], metavar="NAME=X", help="a Costs field")
    parser.add_argument("--speeds", type=_floats, default=SPEEDS, help="of the engines, one each, around 1")
    parser.add_argument("--load-s", type=float, default=Hardware().load_s, help="median of an adapter's load")
    parser.add_argument("--max-loras", type=int, default=Hardware().max_loras)
    parser.add_argument("--max-cpu-loras", type=int, default=Hardware().max_cpu_loras)
    parser.add_argument("--max-num-batched-tokens", type=int, default=Hardware().max_num_batched_tokens)
    options = parser.parse_args()
    quick = options.quick
    options.policies = options.policies or names()
    options.capacity = options.capacity or ((150,) if quick else CAPACITIES)
    options.loads = options.loads or ((1.5,) if quick else LOADS)
    options.routers = options.routers or (ROUTERS if options.full else (1,))
    options.report_age = options.report_age or (REPORTS_S if options.full else (1.0,))
    options.seeds = options.seeds or (1 if quick else SEEDS)
    return options


def _names(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(asked) - set(names())):
        raise argparse.ArgumentTypeError(f"{unknown}: unknown; there are {', '.join(names())}")
    return asked


def _scenes(text: str) -> list[str]:
    asked = list(SCENES) if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := sorted(set(asked) - set(SCENES)):
        raise argparse.ArgumentTypeError(f"{unknown}: unknown; there are {', '.join(SCENES)}")
    return asked


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _cost(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in CostSettings.__slots__:
        raise argparse.ArgumentTypeError(
            f"{name!r}: no field of the costs; there are {', '.join(CostSettings.__slots__)}"
        )
    return name, float(value)


if __name__ == "__main__":
    main()
