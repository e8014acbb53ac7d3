"""What every benchmark prints, and writes as JSON."""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One figure; `reach` is what we hold ourselves to (None: for comparison only)."""

    what: str
    value: float
    unit: str
    reach: float | None = None
    baseline: str | None = None
    baseline_value: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the figure is within reach: of rates more is better, of everything else less."""
        if self.reach is None:
            return None
        return self.value >= self.reach if self.unit.endswith("/s") else self.value <= self.reach


def arguments(description: str) -> argparse.Namespace:
    """`--quick` and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within a minute; for seeing that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    return parser.parse_args()


def medians_us(contenders: dict[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, float]:
    """Median over rounds of microseconds a call; the contenders take turns, so that drift hits them alike."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            began = time.perf_counter()
            for _ in range(calls):
                call()
            found[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: median(times) for name, times in found.items()}


def quantiles_us(calls: Sequence[Callable[[], object]], *, rounds: int) -> tuple[float, float]:
    """(p50, p99) of microseconds a call, over all calls of all rounds, each timed by itself."""
    times = []
    for _ in range(rounds):
        for call in calls:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def show(title: str, rows: Sequence[ReportRow], into: Path | None) -> None:
    """Print the table, and what it ran on."""
    table = Table(title=title)
    for column in ("what", "value", "reach", "baseline"):
        table.add_column(column)
    for row in rows:
        reach = "" if row.reach is None else f"{row.reach:g} {'yes' if row.ok else 'NO'}"
        baseline = "" if row.baseline is None else f"{row.baseline}: {row.baseline_value:.4g}"
        table.add_row(row.what, f"{row.value:.4g} {row.unit}", reach, baseline)
    console().print(table)
    console().print(
        f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}, one process"
    )
    if into is not None:
        into.write_text(json.dumps([asdict(row) | {"ok": row.ok} for row in rows], indent=1))


def console() -> Console:
    """The terminal, or enough columns for whole rows where there is none."""
    return Console(width=None if Console().is_terminal else 170)
