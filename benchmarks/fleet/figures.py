"""One contender's run as figures, and as rows of the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isinf
from statistics import mean

from benchmarks.fleet.engines import PrefixCounts
from benchmarks.fleet.replay import TIMEOUT_S, FleetOutcome
from benchmarks.fleet.workload import FleetRequest
from benchmarks.report import ReportRow
from benchmarks.trace.measure import is_good, percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """Of one run. A request that failed counts as the timeout in the mean, and as infinite in percentiles."""

    requests: int
    failed: int
    first_mean_s: float
    first_p50_s: float
    first_p99_s: float
    gap_p99_s: float
    good_share: float
    hit_share: float
    """Prompt tokens that the engines found cached, of all that they looked up, by their own counters."""
    router_cpu_s: float
    """CPU seconds of the router's process, for each request."""


def figures(
    requests: Sequence[FleetRequest],
    outcomes: Sequence[FleetOutcome],
    counts: PrefixCounts,
    router_cpu_s: float,
) -> FleetFigures:
    """The figures of a run that is over. `counts`: of this run alone; `router_cpu_s`: of all requests together."""
    firsts = sorted(inf if each.failure or each.first_s is None else each.first_s for each in outcomes)
    gaps = sorted(gap for each in outcomes for gap in each.gaps_s) or [0.0]
    return FleetFigures(
        requests=len(requests),
        failed=sum(map(isinf, firsts)),
        first_mean_s=mean(TIMEOUT_S if isinf(first) else first for first in firsts),
        first_p50_s=percentile(firsts, 0.5),
        first_p99_s=percentile(firsts, 0.99),
        gap_p99_s=percentile(gaps, 0.99),
        good_share=sum(map(_is_good, requests, outcomes)) / len(requests),
        hit_share=counts.hits / counts.queries if counts.queries else 0.0,
        router_cpu_s=router_cpu_s / len(requests),
    )


def _is_good(request: FleetRequest, outcome: FleetOutcome) -> bool:
    if outcome.failure or outcome.first_s is None or outcome.last_s is None:
        return False
    rest_s = outcome.last_s - outcome.first_s
    return is_good(outcome.first_s, rest_s, request.prompt_tokens, request.output_tokens)


_ROWS = (
    ("first token, mean", "s", "first_mean_s", 1.0),
    ("first token, p50", "s", "first_p50_s", 1.0),
    ("first token, p99", "s", "first_p99_s", 1.0),
    ("gap between tokens, p99", "ms", "gap_p99_s", 1e3),
    ("goodput", "% of requests", "good_share", 100.0),
    ("cached prompt tokens, by the engines' counters", "% of all", "hit_share", 100.0),
    ("CPU of the router", "ms a request", "router_cpu_s", 1e3),
    ("requests that failed", "requests", "failed", 1.0),
)


def rows_of(found: FleetFigures, contender: str) -> Iterator[ReportRow]:
    """A row for each figure; an infinite percentile is -1, as in `benchmarks.trace`."""
    for what, unit, name, factor in _ROWS:
        value = float(getattr(found, name))
        yield ReportRow(what, -1.0 if isinf(value) else value * factor, unit, contender=contender)


def absent(contender: str, reason: str) -> ReportRow:
    """The row of a contender that did not run, with the reason."""
    return ReportRow(f"requests answered: none, {reason}", 0.0, "requests", contender=contender)
