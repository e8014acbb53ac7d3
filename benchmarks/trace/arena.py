"""Policies on scenes: each run a process's task, and one table a scene."""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import isinf
from statistics import mean

from rich.table import Table

from benchmarks.report import console
from benchmarks.trace.measure import TraceFigures, figures, replay
from benchmarks.trace.scenes import SCENES
from benchmarks.trace.workload import TraceLine
from router.core.schedule.cost_settings import CostSettings

_COLUMNS = (
    ("first token", "ttft_mean_s", ".3f"), ("p50", "ttft_p50_s", ".2f"), ("p99", "ttft_p99_s", ".2f"),
    ("p99 gap, ms", "inter_token_p99_s", ".0f"), ("good", "good_share", ".3f"), ("load wait", "load_wait_s", ".3f"),
    ("completion", "completion_mean_s", ".1f"), ("p95", "completion_p95_s", ".1f"),
    ("computed again", "again_share", ".3f"), ("Jain", "jain", ".3f"), ("failed", "failed", ".0f"),
    ("loads", "loads", ".0f"), ("off p50", "off_p50", ".3f"), ("p90", "off_p90", ".3f"),
)  # fmt: skip

_shared: list[tuple[list[TraceLine], argparse.Namespace]] = []


def begin(lines: list[TraceLine], options: argparse.Namespace) -> None:
    """In each process: what all of its runs share."""
    _shared.append((lines, options))


def play(scene: str, policy: str, seed: int) -> TraceFigures:
    """One run, after `begin`."""
    lines, options = _shared[0]
    requests, setting = SCENES[scene].draw(lines, seed)
    costs = replace(CostSettings(), **dict(options.cost))
    fleet = replay(
        policy,
        requests,
        setting,
        seed,
        late_binding_s=options.late_binding,
        costs=costs,
        fairness=options.fairness,
    )
    return figures(requests, fleet)


def show_scenes(lines: list[TraceLine], options: argparse.Namespace) -> None:
    """Run all scenes that were asked for and print a table for each; with `--json`, write the figures of each run."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.processes, initializer=begin, initargs=(lines, options)) as pool:
        runs = {
            (scene, policy, seed): pool.submit(play, scene, policy, seed)
            for scene in options.scenes
            for policy in options.policies
            for seed in seeds
        }
        for scene in options.scenes:
            found = {policy: [runs[scene, policy, seed].result() for seed in seeds] for policy in options.policies}
            _print(scene, found)
            rows += [
                {"scene": scene, "policy": policy, "seed": seed} | {name: _number(run, name) for _, name, _ in _COLUMNS}
                for policy, of_policy in found.items()
                for seed, run in zip(seeds, of_policy, strict=True)
            ]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


def _print(scene: str, found: Mapping[str, Sequence[TraceFigures]]) -> None:
    table = Table(title=f"{scene}: {SCENES[scene].about}")
    for column in ("policy", *(title for title, _, _ in _COLUMNS)):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in sorted(found, key=lambda name: mean(run.ttft_mean_s for run in found[name])):
        cells = [mean(_number(run, name) for run in found[policy]) for _, name, _ in _COLUMNS]
        table.add_row(policy, *[format(cell, form) for cell, (_, _, form) in zip(cells, _COLUMNS, strict=True)])
    console().print(table)


def _number(run: TraceFigures, name: str) -> float:
    """A figure as it is printed: gaps in milliseconds, and -1 for a percentile among requests that failed."""
    value = float(getattr(run, name))
    return -1.0 if isinf(value) else value * 1000 if name == "inter_token_p99_s" else value
