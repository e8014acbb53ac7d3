"""The table: one row a policy and case, figures as means over seeds with their spread."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from benchmarks.report import ReportRow, console
from benchmarks.trace.ideals import Ideals
from benchmarks.trace.measure import TraceCase, TraceFigures

OURS = "kv_lora"
REACH_HIT_SHARE, REACH_BEST = 0.95, 1.02
# A load is beyond saturation when even the best policy sheds or fails more than this share of the requests.
SATURATED = 0.001


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy in one case, over all seeds. `of_lru`: its hit ratio as a share of the central LRU's."""

    case: TraceCase
    policy: str
    bound: Ideals
    figures: tuple[TraceFigures, ...]

    @property
    def of_lru(self) -> float:
        """Mean over seeds."""
        return self.mean("hit_share") / self.bound.lru if self.bound.lru else 0.0

    @property
    def of_lru_answers(self) -> float:
        """The same, of an LRU that keeps answers as well."""
        return self.mean("hit_share") / self.bound.lru_answers if self.bound.lru_answers else 0.0

    def mean(self, name: str) -> float:
        """Mean over seeds."""
        return float(mean(getattr(figures, name) for figures in self.figures))


def by_case(case: TraceCase, bound: Ideals, figures: Mapping[str, Sequence[TraceFigures]]) -> list[PolicyRow]:
    """The lines of one case, the best mean TTFT first."""
    lines = [PolicyRow(case, policy, bound, tuple(found)) for policy, found in figures.items()]
    return sorted(lines, key=lambda line: line.mean("ttft_mean_s"))


def show(lines: Sequence[PolicyRow], good: str, what: str, into: Path | None) -> None:
    """Print the table and, with `into`, write its rows in the benchmarks' common format."""
    table = Table(title="trace")
    columns = (
        "policy",
        "hits of LRU",
        "with answers",
        "TTFT mean",
        "p50",
        "p99",
        "good",
        "gap p99",
        "shed+failed",
        "loads",
        "cold TTFT",
        "predicted off",
        "p90",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for case in dict.fromkeys(line.case for line in lines):
        of_case = [line for line in lines if line.case == case]
        bound = of_case[0].bound
        table.add_section()
        table.add_row(
            f"[b]C={case.capacity} load={case.load:g} routers={case.routers} reports {case.report_s:g} s[/b]",
            f"LRU {bound.lru:.3f}",
            f"{bound.lru_answers:.3f}",
            f"MIN {bound.belady:.3f}",
        )
        for line in of_case:
            table.add_row(line.policy, *_cells(line))
    out = console()
    out.print(table)
    out.print(f"{what}.")
    out.print(
        "Hits: cached share of prompt tokens, as a share of one LRU over all engines' blocks, told the prompts alone,\n"
        "and of one in which answers take room too, as in every engine here. Neither is a bound; MIN is, for prompts.\n"
        f"Good: {good}.\n"
        "Mean over seeds, +- half the range. Shed and failed requests count as 120 s in means, inf in percentiles."
    )
    out.print(f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}; simulated time")
    if into is not None:
        into.write_text(json.dumps(_rows(lines), indent=1))


def _cells(line: PolicyRow) -> tuple[str, ...]:
    means = [figures.ttft_mean_s for figures in line.figures]
    return (
        f"{line.of_lru:.3f}",
        f"{line.of_lru_answers:.3f}",
        f"{mean(means):.3f} +- {(max(means) - min(means)) / 2:.3f}",
        _seconds(median(figures.ttft_p50_s for figures in line.figures)),
        f"{_seconds(median(f.ttft_p99_s for f in line.figures))} +- {_spread([f.ttft_p99_s for f in line.figures])}",
        f"{line.mean('good_share'):.3f}",
        f"{line.mean('inter_token_p99_s'):.3f}",
        f"{line.mean('shed'):.0f}+{line.mean('failed'):.0f}",
        f"{line.mean('loads'):.0f}",
        f"{line.mean('cold_ttft_mean_s'):.2f}",
        *([f"{line.mean('off_p50'):.3f}", f"{line.mean('off_p90'):.3f}"] if line.mean("off_p50") else ["", ""]),
    )


def _rows(lines: Sequence[PolicyRow]) -> list[dict[str, object]]:
    """What is held to a reach is ours alone; the best other policy is the baseline."""
    rows = []
    for line in lines:
        case = line.case
        of_case = [other for other in lines if other.case == case]
        best = min(of_case, key=lambda other: other.mean("ttft_mean_s"))
        lost_share = (best.mean("shed") + best.mean("failed")) / best.mean("requests")
        is_ours = line.policy == OURS
        where = f"C={case.capacity} load={case.load:g} routers={case.routers} reports={case.report_s:g}s {line.policy}"
        others = [other for other in of_case if other is not line]
        rival = min(others, key=lambda other: other.mean("ttft_mean_s")) if others else None
        is_held = is_ours and lost_share <= SATURATED
        reach_s = REACH_BEST * rival.mean("ttft_mean_s") if is_held and rival is not None else None
        rows.append(
            ReportRow(
                f"{where}: mean TTFT",
                line.mean("ttft_mean_s"),
                "s",
                reach_s,
                rival.policy if rival else None,
                rival.mean("ttft_mean_s") if rival else None,
            )
        )
    found = [_plain(row, row.ok) for row in rows]
    for line in lines:
        case = line.case
        where = f"C={case.capacity} load={case.load:g} routers={case.routers} reports={case.report_s:g}s {line.policy}"
        reach = REACH_HIT_SHARE if line.policy == OURS else None
        # More is better here, so `ReportRow.ok` does not apply.
        row = ReportRow(
            f"{where}: hits of central LRU", line.of_lru, "share", reach, "MIN", line.bound.belady / line.bound.lru
        )
        found.append(_plain(row, None if reach is None else line.of_lru >= reach))
        kept = f"{where}: hits of central LRU that keeps answers"
        found.append(_plain(ReportRow(kept, line.of_lru_answers, "share"), None))
        for name, unit in _OTHER:
            value = line.mean(name)
            found.append(_plain(ReportRow(f"{where}: {name}", -1.0 if isinf(value) else value, unit), None))
    return found


_OTHER = (
    ("ttft_p99_s", "s"), ("good_share", "share"), ("inter_token_p99_s", "s"), ("shed", "requests"),
    ("failed", "requests"), ("loads", "loads"), ("cold_ttft_mean_s", "s"),
    ("off_p50", "of the measured"), ("off_p90", "of the measured"),
)  # fmt: skip


def _plain(row: ReportRow, ok: bool | None) -> dict[str, object]:
    return row.as_json() | {"ok": ok}


def _seconds(value: float) -> str:
    return "inf" if isinf(value) else f"{value:.2f}"


def _spread(values: Sequence[float]) -> str:
    return "inf" if any(map(isinf, values)) else f"{(max(values) - min(values)) / 2:.2f}"
