"""What a process of the benchmark runs. Not in `__main__`: from Python 3.14 on a new process has nothing of that."""

import argparse
from dataclasses import dataclass, replace

from benchmarks.trace.engine import Hardware
from benchmarks.trace.ideals import Ideals, ideals
from benchmarks.trace.measure import TraceCase, TraceFigures, run
from benchmarks.trace.workload import TraceLine, requests_of
from router.core.schedule.cost_settings import CostSettings


@dataclass(frozen=True, slots=True)
class Task:
    """One run, or the ideals of one case where `policy` is empty."""

    policy: str
    case: TraceCase
    seed: int


_shared: list[tuple[list[TraceLine], argparse.Namespace]] = []


def begin(lines: list[TraceLine], options: argparse.Namespace) -> None:
    """In each process: what all of its tasks share."""
    _shared.append((lines, options))


def do(task: Task) -> TraceFigures | Ideals:
    """After `begin`."""
    lines, options = _shared[0]
    case = task.case
    if not task.policy:
        return ideals(
            requests_of(lines, seed=task.seed, load=case.load, routers=1), len(options.speeds) * case.capacity
        )
    figures, _, _ = run(
        task.policy,
        lines,
        case,
        task.seed,
        hardware=_hardware(options, case.capacity),
        speeds=options.speeds,
        late_binding_s=options.late_binding,
        costs=replace(CostSettings(), **dict(options.cost)),
    )
    return figures


def _hardware(options: argparse.Namespace, capacity: int) -> Hardware:
    return Hardware(
        blocks=capacity,
        load_s=options.load_s,
        max_loras=options.max_loras,
        max_cpu_loras=options.max_cpu_loras,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
