"""Time and memory of the scheduler: hash, match, decide, queue and KV events, by replicas, blocks and adapters."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.decision.contenders import dynamo_version
from benchmarks.decision.deciding import adopting, deciding
from benchmarks.decision.estimate import estimating
from benchmarks.decision.events import events
from benchmarks.decision.index import growth, matching, memory
from benchmarks.decision.size import FULL, QUICK, DecisionBenchSize
from benchmarks.decision.streams import streaming
from benchmarks.decision.waiting import waiting
from benchmarks.report import ReportRow, add_arguments, show
from benchmarks.row_runner import RowRunner


@dataclass(frozen=True, slots=True)
class DecisionRowGroup:
    """Rows that are measured together: how, what in a sentence, and the seconds that they take."""

    measure: Callable[[DecisionBenchSize], list[ReportRow]]
    what: str
    about_s: float


GROUPS = {
    "match": DecisionRowGroup(
        lambda size: [row for replicas in (8, 64) for row in matching(replicas, size)], "hash and match", 5
    ),
    "decide": DecisionRowGroup(deciding, "whole decisions", 15),
    "estimate": DecisionRowGroup(estimating, "workers without KV events", 6),
    "waiting": DecisionRowGroup(waiting, "a release while 64 prompts wait", 2),
    "events": DecisionRowGroup(events, "KV events applied", 15),
    "growth": DecisionRowGroup(growth, "matches among a million blocks", 60),
    "memory": DecisionRowGroup(memory, "memory of a million blocks", 15),
    "catalog": DecisionRowGroup(adopting, "a catalog of 10,000 adapters", 3),
    "streams": DecisionRowGroup(streaming, "decisions while 64 replicas stream 30,000 events/s", 130),
}


def main() -> None:
    options = _options()
    if options.peers is not None:
        # Last, so that nothing else is taken from there.
        sys.path += map(str, options.peers.glob("lib/python*/site-packages"))
    size = QUICK if options.quick else FULL
    names = options.rows or list(GROUPS)
    pace = 0.1 if options.quick else 1.0
    runner = RowRunner(names, {name: pace * GROUPS[name].about_s for name in names}, options.json)
    print(f"ai-dynamo-runtime: {dynamo_version()}; xxhash {version('xxhash')}, msgspec {version('msgspec')}")
    with runner.interruptible():
        for name in names:
            with runner.measuring(name) as rows:
                rows.extend(GROUPS[name].measure(size))
    show("decision", runner.rows, options.json)
    sys.exit(runner.status)


def _options() -> argparse.Namespace:
    width = max(map(len, GROUPS))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decision",
        description=__doc__,
        epilog="rows:\n" + "\n".join(f"  {name:{width}}  {group.what}" for name, group in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--rows", nargs="+", choices=GROUPS, metavar="NAME", help=f"of {', '.join(GROUPS)}; all by default"
    )
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="virtual environment that has ai-dynamo-runtime, for Dynamo's tree"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
