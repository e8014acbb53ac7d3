"""The data plane: what a request costs a router, beside its peers, on one core. `python -m benchmarks.relay --help`.

The routers run on one core; stub engines, a stub control plane and the clients on the other. CPU microseconds of the
router's process per request are the measure: they hardly move with the machine's noise, requests a second do.
"""

import argparse
import contextlib
import os
import pstats
import sys
import tempfile
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.relay.bench import FULL, QUICK, RelayBench
from benchmarks.relay.contenders import (
    BEFORE,
    CONTENDERS,
    EXACT,
    HOW_TO_ADD,
    NGINX,
    Contender,
    NotStarted,
    Stage,
    before,
    environment,
)
from benchmarks.relay.fleet import Spec
from benchmarks.relay.machine import busy_s, cores, described, own_s, stolen_s
from benchmarks.relay.rows import GROUPS
from benchmarks.relay.rows.scene import RunningContenders
from benchmarks.report import add_arguments, show
from benchmarks.row_runner import RowFailed, RowRunner
from lorafleet.local.authority import Authority
from lorafleet.local.processes import ProcessGuard, clean_environment
from lorafleet.local.tiny_model import make_model

_HOT_SPOTS = 25
TLS_ROWS = ("short", "long", "chunk")


def main() -> None:
    options = _options()
    router_core, other_core = cores()
    os.sched_setaffinity(0, {other_core})
    scratch = Path(tempfile.mkdtemp(prefix="lorafleet-relay-"))
    mark = uuid.uuid4().hex
    guard = ProcessGuard(mark, scratch)
    try:
        if options.profile is not None:
            options.profile.mkdir(parents=True, exist_ok=True)
        stage = Stage(
            scratch,
            environment(clean_environment(mark)),
            router_core,
            (),
            0,
            peers=options.peers.resolve() if options.peers else None,
            before=options.before.resolve() if options.before else None,
            profiles=options.profile.resolve() if options.profile else None,
            tls=Authority(scratch).issue("router", "127.0.0.1") if options.tls else None,
        )
        bench = RelayBench(stage, other_core, make_model(scratch / "model"), QUICK if options.quick else FULL)
        noise = Noise()
        chosen = _chosen(options)
        names = options.rows or list(TLS_ROWS if options.tls else GROUPS)
        routers = len(chosen) - 1
        pace = 0.1 if options.quick else 1.0
        runner = RowRunner(names, {name: pace * GROUPS[name].about_s(routers) for name in names}, options.json)
        with runner.interruptible():
            uvloop.run(_measure(bench, chosen, runner))
        print(f"{described()}; router on core {router_core}, engines and clients on core {other_core}")
        packages = ("uvloop", "httptools", "uvicorn", "aiohttp", "tokenizers")
        print(", ".join(f"{name} {version(name)}" for name in packages))
        print(noise.summary(bench))
        show("relay", runner.rows, options.json)
        if options.profile is not None:
            _print_hot_spots(options.profile)
    except RowFailed as exc:
        sys.exit(f"python -m benchmarks.relay: {exc}")
    finally:
        guard.release()
    sys.exit(runner.status)


class Noise:
    """What else the machine did while this ran, and how far rounds lie apart."""

    def __init__(self) -> None:
        self._before = time.monotonic(), busy_s() - own_s(), stolen_s()

    def summary(self, bench: RelayBench) -> str:
        """Other processes' CPU time since the start, the spread of the rounds, and the quietest round, as lines."""
        began, others_s, stolen = self._before
        cores_s = (time.monotonic() - began) * (os.cpu_count() or 1)
        others, lost = (busy_s() - own_s() - others_s) / cores_s, (stolen_s() - stolen) / cores_s
        lines = [f"noise: other processes took {max(0.0, others):.0%} of all cores, {lost:.1%} was stolen"]
        if bench.spreads:
            lines[0] += (
                f"; half the range of a figure's {bench.size.rounds} rounds is {median(bench.spreads):.0%} of it"
                f" in the middle, {max(bench.spreads):.0%} at most"
            )
        if bench.quietest:
            quietest = "; ".join(f"{name} {value:.0f}" for name, value in bench.quietest.items())
            lines.append(f"CPU us a request in the quietest round: {quietest}")
        return "\n".join(lines)


async def _measure(bench: RelayBench, chosen: list[Contender], runner: RowRunner) -> None:
    """Start the contenders in front of two engines, and measure the rows one after the other."""
    with bench.fleet(Spec(2)) as stage, contextlib.ExitStack() as running:
        started = []
        for contender in chosen:
            try:
                one = contender.start(contender, stage)
            except NotStarted as exc:
                if contender.kind == "ours":
                    raise
                print(f"left out: {exc}", flush=True)
                continue
            running.callback(one.stop)
            if one.name in (EXACT, BEFORE):
                bench.until_known(one, stage)
            started.append(one)
        if all(one.kind in ("ours", "direct") for one in started):
            print(HOW_TO_ADD)
        scene = RunningContenders(bench, stage, tuple(started))
        for name in runner.names:
            with runner.measuring(name) as rows:
                await GROUPS[name].measure(scene, rows)


def _chosen(options: argparse.Namespace) -> list[Contender]:
    """The contenders that are asked for and installed; their versions, and what is not installed, are printed."""
    named: list[str] | None = options.contenders
    if options.tls and named is None:
        named = ["lorafleet", NGINX]
    if named is None:
        wanted = [c for c in CONTENDERS if c.kind in ("ours", "direct") or not (options.quick or options.profile)]
    else:
        whole_names = {c.name for c in CONTENDERS}
        wanted = [
            c
            for c in CONTENDERS
            if c.kind == "direct"
            or any(c.name == name or (name not in whole_names and c.name.startswith(name)) for name in named)
        ]
    if options.before:
        wanted += [before(contender) for contender in wanted if contender.kind == "ours"]
    versions = {contender.name: contender.found(options.peers) for contender in wanted}
    print("\n".join(f"{name}: {found or 'not installed'}" for name, found in versions.items()), flush=True)
    return [contender for contender in wanted if versions[contender.name]]


def _print_hot_spots(folder: Path) -> None:
    for file in sorted(folder.glob("*.prof")):
        print(f"\n{file} (the times are those under a profiler; the main thread's alone)")
        pstats.Stats(str(file)).strip_dirs().sort_stats("tottime").print_stats(_HOT_SPOTS)


def _epilog() -> str:
    width = max(map(len, GROUPS))
    rows = "\n".join(f"  {name:{width}}  {group.what}" for name, group in GROUPS.items())
    return f"rows:\n{rows}\n\n{HOW_TO_ADD}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relay",
        description=__doc__,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--rows", "--only", nargs="+", choices=GROUPS, metavar="NAME", help=f"of {', '.join(GROUPS)}; all by default"
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help="names, or how they begin; direct is always among them"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="virtual environment that has the peers")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="checkout of another version, whose router takes turns with this one"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="run our routers under cProfile, leave DIR/NAME.prof and print where the time went; figures mean nothing",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help=f"clients speak TLS with ours and nginx, whose engines stay plain; rows {', '.join(TLS_ROWS)} alone",
    )
    options = parser.parse_args()
    if options.tls and not set(options.rows or ()) <= set(TLS_ROWS):
        parser.error(f"--tls: the rows are {', '.join(TLS_ROWS)}")
    if options.peers is not None and not (options.peers / "bin" / "python").exists():
        parser.error(f"--peers {options.peers}: no virtual environment there (bin/python). {HOW_TO_ADD}")
    if options.before is not None and not (options.before / "router" / "__main__.py").exists():
        parser.error(f"--before {options.before}: no checkout there (router/__main__.py)")
    return options


if __name__ == "__main__":
    main()
