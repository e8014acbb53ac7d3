"""An attacker's guesses at another tenant's prompts, and the hits that caches of tenants' own cost.

python -m benchmarks.isolation [--engine sim|vllm] [--guesses N] [--trace FILE] [--quick] [--json FILE]

The first rows are of a real fleet. An area of 0.5 under the attacker's curve says that its guesses tell it nothing. The
last rows replay a trace; without one, a small one that is made up.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.isolation.attack import Guesses, attacked_fleet, guess, set_cache
from benchmarks.isolation.lost_hits import hit_share, with_common_beginning
from benchmarks.report import ReportRow, add_arguments, show
from benchmarks.trace.workload import BLOCK, WHERE_FROM, TraceLine, drawn, read

GUESSES, PREDICTIONS = 500, 200
NEAR = 0.03
"""Goal: with private caches the area under the curve differs from 0.5 by at most this."""
CAPACITY = 8 * 2000
OWNERS = (5, 20, 100)
COMMON_BLOCKS = (0, 7)
"""Blocks before the one that every request of the trace begins with: a longer system prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--guesses", type=int, default=GUESSES, help="right guesses, and as many wrong ones")
    parser.add_argument("--trace", type=Path, metavar="FILE", help=WHERE_FROM)
    add_arguments(parser)
    args = parser.parse_args()
    count = 10 if args.quick else args.guesses
    found: dict[str, Guesses] = {}
    with tempfile.TemporaryDirectory() as folder, attacked_fleet(args.engine, Path(folder)) as (router, orchestrator):
        for seed, cache in enumerate(("shared", "tenant")):
            set_cache(orchestrator, cache)
            found[cache] = guess(router, count, predictions=min(PREDICTIONS, count), seed=seed)
    lines = read(args.trace) if args.trace else drawn()
    what = f"{count} guesses at {args.engine}; {args.trace.name if args.trace else 'a made-up trace'}"
    show(what, [*attack_rows(found), *trace_rows(lines)], args.json)


def attack_rows(found: dict[str, Guesses]) -> Iterator[ReportRow]:
    """The areas under the attacker's curves, and the predictions for the victim."""
    for cache, guesses in found.items():
        for sign, area, reach in (
            ("cached_tokens", guesses.by_cached_tokens, 0.0),
            ("first-token time", guesses.by_first_token, NEAR),
        ):
            yield ReportRow(f"cache: {cache}, area under the curve by {sign}", area, "")
            if cache == "tenant":
                by_chance = f"by chance alone {guesses.standard_error:.3f}" if reach else "exactly"
                yield ReportRow(
                    f"cache: {cache}, its distance from 0.5 ({by_chance})", abs(area - 0.5), "", reach=reach
                )
        wrong = guesses.compared - guesses.exact
        yield ReportRow(f"cache: {cache}, wrong predictions of {guesses.compared}", wrong, "", reach=0)


def trace_rows(lines: Sequence[TraceLine]) -> Iterator[ReportRow]:
    """The share of prompt tokens found cached, by the number of owners of caches and the beginning that all share."""
    for common in COMMON_BLOCKS:
        longer = with_common_beginning(lines, common)
        shared = hit_share(longer, capacity=CAPACITY, owners=1)
        what = f"trace, all begin with {(1 + common) * BLOCK} tokens"
        yield ReportRow(f"{what}: found cached where everyone shares", 100 * shared, "%")
        for owners in OWNERS:
            share = hit_share(longer, capacity=CAPACITY, owners=owners)
            yield ReportRow(f"{what}: of these hits, lost by {owners} owners", 100 * (1 - share / shared), "%")


if __name__ == "__main__":
    main()
