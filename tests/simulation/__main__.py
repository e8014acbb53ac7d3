"""Runs fleets in simulated time.

seed   one seed, with the log of every service
seeds  many seeds; of each that breaks a promise the shortest history that still breaks it
keep   write the history of a seed into `regressions/`, to be run by each `make test`
kept   run all that were kept
"""

import os
import sys

from tests.simulation.determinism import install

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts
    words = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
    os.execve(sys.executable, words, os.environ | {"PYTHONHASHSEED": "0"})

_REPLACED, _CLOCK = install(0)

import argparse  # noqa: E402  (everything else is imported with simulated time and chance)
import gc  # noqa: E402
import pickle  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from pathlib import Path  # noqa: E402

import anyio.to_thread  # noqa: E402
import msgspec  # noqa: E402

from lorafleet.local.tiny_model import make_adapter, make_model  # noqa: E402
from tests.simulation import disk  # noqa: E402
from tests.simulation.build_once import share_type_adapters  # noqa: E402
from tests.simulation.draw import MODEL, draw_scenario  # noqa: E402
from tests.simulation.event_loop import run_in_loop  # noqa: E402
from tests.simulation.regressions import Regression, keep, kept_regressions  # noqa: E402
from tests.simulation.run import RunResult, run_scenario  # noqa: E402
from tests.simulation.scenario import MOST_CONTENTS, FaultScenario, without  # noqa: E402
from tests.simulation.server import serve  # noqa: E402

# In memory, where there is some: SQLite flushes each commit, and no run has to wait for a real disk.
_MEMORY = Path("/dev/shm")
_FOLDER = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
_BASE = _FOLDER / f"lorafleet-simulation-{os.getuid()}"
_SHRINK_RUNS = 60


def main() -> int:
    """0: every promise held."""
    parser = argparse.ArgumentParser(prog="make seed", description=__doc__)
    calls = parser.add_subparsers(dest="call", required=True)
    one = calls.add_parser("seed", help="run one seed and show its log")
    one.add_argument("seed", type=int)
    one.add_argument("--without", default="", metavar="1,5", help="leave these events out, by number")
    one.add_argument("--quiet", action="store_true", help="show no log")
    many = calls.add_parser("seeds", help="run many seeds")
    many.add_argument("count", type=int)
    many.add_argument("--from", dest="first", type=int, default=None, help="the first; default: a fresh one")
    kept = calls.add_parser("keep", help="keep the history of a seed")
    kept.add_argument("seed", type=int)
    kept.add_argument("name", help="of its file")
    kept.add_argument("--without", default="", metavar="1,5", help="leave these events out, by number")
    kept.add_argument("--showed", required=True, help="the fault, in a sentence")
    kept.add_argument("--mended", required=True, help="the commit of its mend")
    calls.add_parser("kept", help="run all histories that were kept")
    given_ones = calls.add_parser("scenario", help="run the scenario in a JSON file")
    given_ones.add_argument("file", type=Path)
    served = calls.add_parser("serve", help="run the tests that pytest names")
    served.add_argument("descriptor", type=int, help="of the connection to pytest")
    many.add_argument("--only", default="", metavar="7,9", help="these seeds, instead of COUNT")
    many.add_argument("--no-shrink", action="store_true", help="do not look for the shortest history")
    many.add_argument("--first-broken", action="store_true", help="end at the first that breaks a promise")
    given = parser.parse_args()
    anyio.to_thread.run_sync = run_in_loop  # type: ignore[assignment]
    disk.install()
    share_type_adapters()
    _make_files()
    gc.freeze()  # what is imported is never searched again
    if given.call == "serve":
        serve(Connection(given.descriptor), _REPLACED, model=_BASE / "model", base=_BASE)
        return 0
    if given.call == "seed":
        return run_one(given.seed, _numbers(given.without), is_quiet=given.quiet)
    if given.call == "keep":
        scenario = without(draw_scenario(given.seed), _numbers(given.without))
        print(keep(given.name, Regression(showed=given.showed, mended=given.mended, model=MODEL, scenario=scenario)))
        return 0
    if given.call == "kept":
        return run_kept()
    if given.call == "scenario":
        return run_given(msgspec.json.decode(given.file.read_bytes(), type=FaultScenario))
    first = given.first if given.first is not None else int(_CLOCK() * 1000) % 10**9
    seeds = _numbers(given.only) or range(first, first + given.count)
    return run_many(seeds, shrinks=not given.no_shrink, is_first_enough=given.first_broken)


def run_one(seed: int, dropped: Sequence[int], *, is_quiet: bool) -> int:
    scenario = draw_scenario(seed)
    show(scenario, dropped)
    return run_given(without(scenario, dropped), is_quiet=is_quiet)


def run_given(scenario: FaultScenario, *, is_quiet: bool = False) -> int:
    """Run one scenario in this process."""
    result = _run(scenario, (lambda _line: None) if is_quiet else print)
    for broken in result.broken:
        print(f"BROKEN {broken.guarantee}: {broken.how}")
    print(_summary(result))
    return 1 if result.broken else 0


def run_kept() -> int:
    """Run all kept histories, each in a process of its own."""
    failed = 0
    for name, regression in kept_regressions():
        result = run_apart(regression.scenario)
        print(f"{name}: {_summary(result)}", flush=True)
        for broken in result.broken:
            print(f"  it showed: {regression.showed}\n  BROKEN {broken.guarantee}: {broken.how}")
        failed += bool(result.broken)
    return 1 if failed else 0


def run_many(seeds: Sequence[int], *, shrinks: bool, is_first_enough: bool) -> int:
    """Run each seed in a process of its own, and shrink those that break a promise."""
    began, failed = _CLOCK(), 0
    for number, seed in enumerate(seeds, start=1):
        result = run_apart(draw_scenario(seed))
        spent_s = _CLOCK() - began
        print(f"seed {seed}: {_summary(result)}; {number * 60 / spent_s:.1f} seeds a minute", flush=True)
        if result.broken:
            failed += 1
            report(seed, result, shrinks=shrinks and not is_first_enough)
            if is_first_enough:
                return 1
    print(f"{len(seeds)} seeds, {failed} broke a promise")
    return 1 if failed else 0


def report(seed: int, result: RunResult, *, shrinks: bool) -> None:
    """What broke, by the shortest history that still breaks the same promise, and the command that repeats it."""
    scenario, dropped = draw_scenario(seed), list[int]()
    if shrinks:
        dropped, result = shrink(scenario, result)
    for broken in result.broken:
        print(f"  BROKEN {broken.guarantee}: {broken.how}")
    show(scenario, dropped)
    more = f" WITHOUT={','.join(map(str, dropped))}" if dropped else ""
    print(f"  repeat it: make seed SEED={seed}{more}", flush=True)


def shrink(scenario: FaultScenario, result: RunResult) -> tuple[list[int], RunResult]:
    """(numbers of events that are not needed, the result without them): halves first, then ever smaller parts."""
    guarantees = {each.guarantee for each in result.broken}
    dropped: list[int] = []
    size, runs = max(1, len(scenario.events) // 2), 0
    while size:
        left = [number for number in range(len(scenario.events)) if number not in dropped]
        for start in range(0, len(left), size):
            if runs >= _SHRINK_RUNS:
                return sorted(dropped), result
            runs += 1
            tried = [*dropped, *left[start : start + size]]
            found = run_apart(without(scenario, tried))
            if guarantees & {each.guarantee for each in found.broken}:
                dropped, result = tried, found
        size //= 2
    return sorted(dropped), result


def show(scenario: FaultScenario, dropped: Sequence[int]) -> None:
    print(f"seed {scenario.seed}: {scenario.fleet}")
    for number, event in enumerate(scenario.events):
        if number not in dropped:
            print(f"  {number:3} {event}")


def run_apart(scenario: FaultScenario) -> RunResult:
    """Run a scenario in a child: a run uses its process up."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = _run(scenario, lambda _line: None)
            with os.fdopen(writing, "wb") as out:
                pickle.dump(result, out)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as out:
        found = out.read()
    os.waitpid(child, 0)
    if not found:
        raise RuntimeError(f"the run of seed {scenario.seed} itself failed: make seed SEED={scenario.seed} shows why")
    return pickle.loads(found)


def _run(scenario: FaultScenario, show_line: Callable[[str], None]) -> RunResult:
    return run_scenario(
        scenario,
        _REPLACED,
        model=_BASE / "model",
        contents=_BASE / "contents",
        folder=_BASE / f"run-{os.getpid()}",
        show=show_line,
    )


def _numbers(words: str) -> list[int]:
    return [int(each) for each in words.split(",") if each]


def _make_files() -> None:
    """The model and the adapters of all runs, made once."""
    make_model(_BASE / "model")
    for number in range(MOST_CONTENTS):
        make_adapter(_BASE / "contents", f"content-{number}", rank=1, seed=number)


def _summary(result: RunResult) -> str:
    return (
        f"{'BROKEN' if result.broken else 'held'}, {result.virtual_s:.0f} s simulated, {result.operations} operations,"
        f" {result.callbacks} callbacks, log {result.log_digest[:16]}"
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
