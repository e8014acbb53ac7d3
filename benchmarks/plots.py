"""Plots of what `benchmarks.trace` wrote as JSON: first token over load, and hits over cache size.

python -m benchmarks.plots trace.json --into docs draws trace-first-token.svg and trace-hits.svg there. The same rows
give the same bytes. Needs matplotlib, which the extra `dev` has.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROW = re.compile(r"C=(?P<capacity>\d+) load=(?P<load>\S+) \S+ \S+ (?P<policy>.+): (?P<what>[^:]+)")
OURS = "kv_lora"
Lines = Mapping[str, Mapping[float, float]]
"""Contender -> x -> y"""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot: the row that it draws, the variable of its x axis, and the labels."""

    file: str
    row: str
    over: str
    x_label: str
    y_label: str
    is_log: bool = False

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> Lines:
        """Of each contender, at the first value of the variable that is not drawn over."""
        points: dict[str, dict[str, dict[float, float]]] = {}
        for row in rows:
            found = _ROW.fullmatch(row["what"])
            if found is not None and found["what"] == self.row and row["value"] >= 0:
                other = found["capacity" if self.over == "load" else "load"]
                of_case = points.setdefault(other, {})
                of_case.setdefault(found["policy"], {})[float(found[self.over])] = float(row["value"])
        return next(iter(points.values()), {})

    def draw(self, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Write the SVG. Raises ImportError without matplotlib."""
        from matplotlib import rc_context  # noqa: PLC0415  (only this function needs it)
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel=self.x_label, ylabel=self.y_label, yscale="log" if self.is_log else "linear")
        for name, line in sorted(self.lines(rows).items()):
            width = 2.4 if name == OURS else 1.0
            axes.plot(sorted(line), [line[x] for x in sorted(line)], label=name, linewidth=width, marker=".")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize="small", ncols=2)
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.file}):
            figure.savefig(folder / self.file, metadata={"Date": None})


PLOTS = (
    Plot("trace-first-token.svg", "mean TTFT", "load", "load, x the trace's own", "mean first token, s", is_log=True),
    Plot("trace-hits.svg", "hits of central LRU", "capacity", "blocks of 512 tokens an engine", "hits, x one LRU's"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what benchmarks.trace wrote by --json")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text())
    for plot in PLOTS:
        plot.draw(rows, options.into)


if __name__ == "__main__":
    main()
