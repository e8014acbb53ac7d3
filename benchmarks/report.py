"""The rows that every benchmark prints and writes as JSON, and the table that joins the JSON of several runs.

python -m benchmarks.report NAME=FILE[,FILE...] ... prints a Markdown table with a column for each NAME: the median of
its files' figures. With two or more names another column has the last figure over the first. With `--contenders` the
table is that of one run, with a column for each contender. `--into PAGE` puts the table into a Markdown page instead,
between `<!-- figures: NAME -->` and `<!-- end of figures -->`, where NAME is the last one.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One figure, what it is compared with, and the goal for it.

    reach        the goal as a figure, where it holds on every machine (bytes, counts, multiples of another figure)
    baseline     what it is compared with in the same run: a peer, or another figure of ours
    baseline_value  that figure; None where the peer is not installed
    reach_ratio  the goal as a multiple of the baseline's figure, where both depend on the machine
    row          the name that `--rows` takes for it
    contender    whose figure it is; empty: ours
    """

    what: str
    value: float
    unit: str
    reach: float | None = None
    baseline: str | None = None
    baseline_value: float | None = None
    reach_ratio: float | None = None
    row: str = ""
    contender: str = ""

    @property
    def name(self) -> str:
        """The row's name, with the contender's where the figure is not ours."""
        return f"{self.what}: {self.contender}" if self.contender else self.what

    @property
    def ratio(self) -> float | None:
        """The figure as a multiple of its baseline's; None without one."""
        return self.value / self.baseline_value if self.baseline_value else None

    @property
    def ok(self) -> bool | None:
        """Whether the figure reaches its goal; None without a goal, or where its peer is not installed."""
        if self.reach is not None:
            return self._is_within(self.value, self.reach)
        if self.reach_ratio is not None and self.ratio is not None:
            return self._is_within(self.ratio, self.reach_ratio)
        return None

    @property
    def has_goal(self) -> bool:
        return self.reach is not None or self.reach_ratio is not None

    def _is_within(self, figure: float, goal: float) -> bool:
        """Whether the figure meets the goal: at least the goal for a rate, at most the goal for everything else."""
        return figure >= goal if self._is_rate else figure <= goal

    @property
    def _is_rate(self) -> bool:
        return self.unit.endswith("/s")

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """The row's cells as text: name, figure, baseline, ratio, goal, and whether the goal is reached."""
        sign = ">=" if self._is_rate else "<="
        goal = ""
        if self.reach is not None:
            goal = f"{sign} {self.reach:,g} {self.unit}"
        elif self.reach_ratio is not None:
            goal = f"{sign} {self.reach_ratio:g}x"
        theirs = "-" if self.baseline_value is None else said(self.baseline_value)
        return (
            self.name,
            f"{said(self.value)} {self.unit}",
            f"{self.baseline}: {theirs}" if self.baseline else "",
            f"{self.ratio:.2f}x" if self.ratio is not None else "-" if self.baseline else "",
            goal,
            {True: "yes", False: "NO", None: "-" if self.has_goal else ""}[self.ok],
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "ok": self.ok}


def said(figure: float) -> str:
    """A figure with about three significant digits, and no exponent."""
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"


COLUMNS = ("what", "figure", "beside", "ratio", "goal", "reached")


def arguments(description: str) -> argparse.Namespace:
    """`--quick` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--quick` and `--json FILE`."""
    parser.add_argument("--quick", action="store_true", help="small and without meaning; to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")


def medians_us(contenders: dict[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, float]:
    """Median over rounds of CPU microseconds a call; the contenders take turns, so that drift hits them alike.

    CPU time of this process, its threads included: other work on the machine hardly moves it.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            began = time.process_time()
            for _ in range(calls):
                call()
            found[name].append((time.process_time() - began) / calls * 1e6)
    return {name: median(times) for name, times in found.items()}


def quantiles_us(calls: Sequence[Callable[[], object]], *, rounds: int) -> tuple[float, float]:
    """(p50, p99) of CPU microseconds a call, over all calls of all rounds, each timed by itself.

    The garbage collector leaves out what was made before, as it does in a router that has started: a collection of the
    calls' own arguments took 9 ms of one call.
    """
    times = []
    gc.collect()
    gc.freeze()
    try:
        for _ in range(rounds):
            for call in calls:
                began = time.process_time()
                call()
                times.append((time.process_time() - began) * 1e6)
    finally:
        gc.unfreeze()
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def show(title: str, rows: Sequence[ReportRow], into: Path | None) -> None:
    """Print the table, and what it ran on; write the rows as JSON where a file is named."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column)
    for row in rows:
        table.add_row(*row.cells())
    console().print(table)
    console().print(
        f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}, one process"
    )
    write(rows, into)


def write(rows: Sequence[ReportRow], into: Path | None) -> None:
    """Write the rows as JSON where a file is named."""
    if into is not None:
        into.write_text(json.dumps([row.as_json() for row in rows], indent=1))


def console() -> Console:
    """The terminal, or enough columns for whole rows where there is none."""
    return Console(width=None if Console().is_terminal else 190)


# --- joining runs -----------------------------------------------------------------------------------------------------


def joined(runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> str:
    """A Markdown table of all rows, with a column for each name: the median of its runs' figures.

    A row that a run lacks is `-` there. Baseline, ratio and goal are those of the last name's last run.
    """
    found: dict[str, dict[str, list[float]]] = {}
    last: dict[str, ReportRow] = {}
    for name, files in runs.items():
        for rows in files:
            for fields in rows:
                row = _row(fields)
                found.setdefault(row.name, {}).setdefault(name, []).append(row.value)
                last[row.name] = row
    names = list(runs)
    compares = len(names) > 1
    heads = ["what", *names, *([f"{names[-1]} / {names[0]}"] if compares else []), *COLUMNS[2:]]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for what, figures in found.items():
        row = last[what]
        middle = {name: median(values) for name, values in figures.items()}
        shown = [f"{said(middle[name])} {row.unit}" if name in middle else "-" for name in names]
        if compares:
            first, latest = middle.get(names[0]), middle.get(names[-1])
            shown.append(f"{latest / first:.2f}x" if first and latest is not None else "-")
        lines.append(_line([what, *shown, *row.cells()[2:]]))
    return "\n".join(lines)


def by_contender(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of one run: a line for each figure of ours, and a column for each contender."""
    read = [_row(fields) for fields in rows]
    others = list(dict.fromkeys(row.contender for row in read if row.contender))
    figures: dict[str, dict[str, ReportRow]] = {}
    for row in read:
        figures.setdefault(row.what, {})[row.contender] = row
    heads = ["what", "ours", *others, "ratio", "goal", "reached"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for what, found in figures.items():
        ours = found.get("")
        unit = next(iter(found.values())).unit
        theirs = [said(found[name].value) if name in found else "" for name in others]
        compared = ["", "", "", ""] if ours is None else list(ours.cells()[2:])
        if ours is not None and ours.baseline not in others:
            # Not a contender's figure, so it has no column.
            compared[1] += "" if ours.baseline_value is None else f" of {said(ours.baseline_value)} ({ours.baseline})"
        lines.append(_line([f"{what}, {unit}", "" if ours is None else said(ours.value), *theirs, *compared[1:]]))
    return "\n".join(lines)


def put_into(page: str, name: str, table: str) -> str:
    """The page with the table in the place of this name. Raises ValueError where the page has no such place."""
    begin, end = f"<!-- figures: {name} -->", "<!-- end of figures -->"
    head, found, rest = page.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no {begin} with {end} behind it")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def _row(fields: Mapping[str, Any]) -> ReportRow:
    return ReportRow(**{field: fields[field] for field in ReportRow.__slots__})


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE[,FILE...]", help="what a benchmark wrote by --json")
    parser.add_argument("--contenders", action="store_true", help="of the last run: a column for each contender")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="Markdown page that gets the table")
    options = parser.parse_args()
    runs: dict[str, list[Any]] = {}
    for given in options.runs:
        name, equals, files = given.partition("=")
        if not equals:
            sys.exit(f"python -m benchmarks.report: {given!r} is not NAME=FILE[,FILE...], as in now=relay.json")
        runs[name] = [json.loads(Path(file).read_text()) for file in files.split(",")]
    name, files = list(runs.items())[-1]
    table = by_contender(files[0]) if options.contenders else joined(runs)
    if options.into is None:
        print(table)
        return
    try:
        options.into.write_text(put_into(options.into.read_text(), name, table))
    except ValueError as exc:
        sys.exit(f"python -m benchmarks.report: {options.into}: {exc}")


if __name__ == "__main__":
    main()
