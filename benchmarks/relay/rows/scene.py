"""The running contenders of a benchmark run, and their figures beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.relay.bench import RelayBench
from benchmarks.relay.contenders import BEFORE, EXACT, RELAY, Contender, NotStarted, Running, Stage
from benchmarks.report import ReportRow

SHORT_CONNECTIONS, LONG_CONNECTIONS = 32, 16


@dataclass(frozen=True, slots=True)
class RunningContenders:
    """Contenders that run, in front of two engines, and the bench they are measured on."""

    bench: RelayBench
    stage: Stage
    runnings: tuple[Running, ...]

    @property
    def routers(self) -> list[Running]:
        """All but the engines themselves and the relay alone."""
        return [one for one in self.runnings if one.kind != "direct" and not one.name.startswith(RELAY)]

    @property
    def ours(self) -> list[Running]:
        """This version, and the one before where there is one."""
        return self.named(EXACT, BEFORE)

    @property
    def peers(self) -> list[Running]:
        return [one for one in self.runnings if one.kind in ("by cache", "blind")]

    @property
    def peers_by_cache(self) -> list[Running]:
        """The peers that look into prompts, as ours does."""
        return [one for one in self.runnings if one.kind == "by cache"]

    def named(self, *names: str) -> list[Running]:
        return [one for one in self.runnings if one.name in names]

    def medians(self, found: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {name: self.bench.middle(values) for name, values in found.items() if values}

    @contextmanager
    def started(self, *contenders: Contender, stage: Stage) -> Iterator[list[Running]]:
        """These peers in front of another fleet; those that are not installed or do not start are left out."""
        with ExitStack() as stack:
            running = []
            for contender in contenders:
                if contender.found(stage.peers) is None:
                    continue
                try:
                    one = contender.start(contender, stage)
                except NotStarted as exc:
                    print(f"left out: {exc}", flush=True)
                    continue
                stack.callback(one.stop)
                running.append(one)
            yield running


def compared(
    what: str,
    found: Mapping[str, float],
    unit: str,
    *,
    beside: str,
    goal: float | None,
    ours: str = EXACT,
) -> list[ReportRow]:
    """Our row beside a peer's, then every other contender's own row.

    beside  the peer's name; where it did not run there is no ratio
    goal    our figure as a multiple of that peer's, at most; None: for comparison only
    """
    if ours not in found:
        return [ReportRow(what, value, unit, contender=name) for name, value in found.items()]
    rows = [ReportRow(what, found[ours], unit, None, beside, found.get(beside), goal)]
    return rows + [ReportRow(what, value, unit, contender=name) for name, value in found.items() if name != ours]


def of_ours(
    what: str, name: str, value: float, unit: str, beside: tuple[str, float] | None = None, goal: float | None = None
) -> ReportRow:
    """A row of this version, with the goal, or of the one before, without it."""
    baseline, baseline_value = beside or (None, None)
    if name == EXACT:
        return ReportRow(what, value, unit, None, baseline, baseline_value, goal)
    return ReportRow(what, value, unit, None, baseline, baseline_value, contender=name)
