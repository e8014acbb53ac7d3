"""Plots of what `benchmarks.trace` wrote as JSON: first token over load, hits over cache size, programs over pauses.

python -m benchmarks.plots loads.json caches.json scenes.json --into docs draws trace-first-token.svg, trace-hits.svg
and trace-programs.svg there. The same rows give the same bytes. Needs matplotlib, which the extra `dev` has.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.trace.scenes import PAUSES

_ROW = re.compile(r"C=(?P<capacity>\d+) load=(?P<load>\S+) \S+ \S+ (?P<policy>.+): (?P<what>[^:]+)")
OURS = "kv_lora"
Lines = Mapping[str, Mapping[float, float]]
"""Contender -> x -> y"""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot: the figure that it draws, the variable of its x axis (load, capacity, pauses), and the labels."""

    file: str
    row: str
    over: str
    x_label: str
    y_label: str
    is_log: bool = False

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> Lines:
        """The line of each contender. Where the other variable differs, too, its value with most rows is drawn."""
        points: dict[str, dict[str, dict[float, list[float]]]] = {}
        for row in rows:
            if (point := self._point(row)) is not None:
                other, policy, x, y = point
                points.setdefault(other, {}).setdefault(policy, {}).setdefault(x, []).append(y)
        most = max(points.values(), key=lambda lines: sum(map(len, lines.values())), default={})
        return {policy: {x: mean(found) for x, found in line.items()} for policy, line in most.items()}

    def _point(self, row: Mapping[str, Any]) -> tuple[str, str, float, float] | None:
        """The other variable's value, the contender, x and y of a row; None for a row of something else."""
        if self.over == "pauses":
            is_ours = row.get("scene") in PAUSES and row[self.row] >= 0
            return ("", row["policy"], PAUSES[row["scene"]], row[self.row]) if is_ours else None
        found = _ROW.fullmatch(row.get("what", ""))
        if found is None or found["what"] != self.row or row["value"] < 0:
            return None
        other = found["capacity" if self.over == "load" else "load"]
        return other, found["policy"], float(found[self.over]), float(row["value"])

    def draw(self, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Write the SVG. Raises ImportError without matplotlib."""
        from matplotlib import rc_context  # noqa: PLC0415  (only this function needs it)
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        scales = {"yscale": "log" if self.is_log else "linear", "xscale": "linear" if self.over == "load" else "log"}
        axes = figure.add_subplot(xlabel=self.x_label, ylabel=self.y_label, **scales)
        lines = self.lines(rows)
        drawn = sorted({x for line in lines.values() for x in line})
        axes.set_xticks(drawn, [f"{x:g}" for x in drawn])
        axes.set_xticks([], minor=True)
        for name, line in sorted(lines.items()):
            width = 2.4 if name == OURS else 1.0
            axes.plot(sorted(line), [line[x] for x in sorted(line)], label=name, linewidth=width, marker=".")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize="small", ncols=2)
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.file}):
            figure.savefig(folder / self.file, metadata={"Date": None})


PLOTS = (
    Plot("trace-first-token.svg", "mean TTFT", "load", "load, x the trace's own", "mean first token, s", is_log=True),
    Plot("trace-hits.svg", "hits of central LRU", "capacity", "blocks of 512 tokens an engine", "hits, x one LRU's"),
    Plot("trace-programs.svg", "completion_mean_s", "pauses", "pauses, x the usual", "mean completion, s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="what benchmarks.trace wrote by --json")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    rows = [row for file in options.rows for row in json.loads(file.read_text())]
    for plot in PLOTS:
        plot.draw(rows, options.into)


if __name__ == "__main__":
    main()
