"""The long tail, simulated and with real processes. `python -m benchmarks.longtail --help`."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.longtail.processes import process_rows, vllm_rows
from benchmarks.longtail.simulated import simulated_rows
from benchmarks.report import ReportRow, show

PARTS = ("processes", "simulated", "vllm")


def main() -> None:
    """Run what was asked for, print the table."""
    parser = argparse.ArgumentParser(
        description="Adapters that are each asked for rarely. `processes`: a fleet of sims on this machine beside the"
        " same engines alone; `simulated`: placement rules on one clock, beside what knows the future; `vllm`, not by"
        " default: as `processes` with real vLLM on the CPU, where every answer must be the adapter's own."
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=PARTS,
        default=("processes", "simulated"),
        metavar="PART",
        help="of " + ", ".join(PARTS),
    )
    parser.add_argument("--quick", action="store_true", help="small and without meaning; to see that it works")
    parser.add_argument("--seeds", type=int, default=3, help="of each simulated scene")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args()
    show("long tail", list(_rows(options)), options.json)


def _rows(options: argparse.Namespace) -> Iterable[ReportRow]:
    if "processes" in options.rows:
        yield from process_rows(is_quick=options.quick)
    if "vllm" in options.rows:
        yield from vllm_rows(is_quick=options.quick)
    if "simulated" in options.rows:
        yield from simulated_rows(range(1, 1 + (1 if options.quick else options.seeds)), is_quick=options.quick)


if __name__ == "__main__":
    main()
