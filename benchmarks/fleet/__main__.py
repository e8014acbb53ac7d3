"""Routers as processes before the same sim engines. `python -m benchmarks.fleet --help`."""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.fleet.engines import EngineFleet
from benchmarks.fleet.figures import absent, figures, rows_of
from benchmarks.fleet.replay import replay
from benchmarks.fleet.workload import SCALE, FleetRequest, chats, engine_flags, thinned
from benchmarks.local_fleets import engine_urls, local_fleet
from benchmarks.relay.contenders import (
    CONTENDERS,
    EXACT,
    HOW_TO_ADD,
    PEER_PACKAGES,
    SGLANG,
    SMG,
    VLLM,
    VLLM_BLIND,
    Contender,
    NotStarted,
    Stage,
    environment,
    start_router,
)
from benchmarks.relay.machine import cpu_ns, described
from benchmarks.relay.prompts import BASE
from benchmarks.report import ReportRow, add_arguments, show
from benchmarks.row_runner import RowRunner
from benchmarks.trace.engine import Hardware
from benchmarks.trace.measure import GOOD
from benchmarks.trace.workload import VARIABLE, WHERE_FROM, asked_lines
from lorafleet.local.processes import ProcessGuard, clean_environment
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer

# Ours gets requests for the base model here, as the peers do.
OURS = Contender(EXACT, "ours", lambda _: "here", lambda me, stage: start_router(stage, me.name, (BASE,)))
FLEET_CONTENDERS = (OURS, *(each for each in CONTENDERS if each.name in (SGLANG, VLLM, VLLM_BLIND, SMG)))
LOAD_1_RATE = 3.4 / 8
"""Requests a second for each engine of the trace as it was recorded, with eight engines."""
REQUESTS, QUICK_REQUESTS = 360, 24
LOAD, QUICK_LOAD = 2.0, 8.0
ENGINES, QUICK_ENGINES = 4, 2
_START_S, _ENDS_S, _INSTALL_S = 15.0, 15.0, 600.0


@dataclass(frozen=True, slots=True)
class FleetBench:
    """One run: what is sent, through which contenders, to which engines, and where contenders are started."""

    requests: Sequence[FleetRequest]
    engines: EngineFleet
    stage: Stage

    async def measure(self, contender: Contender) -> list[ReportRow]:
        """A contender's rows; a single one with the reason where it is not installed or does not start."""
        name = "" if contender is OURS else contender.name
        if contender.found(self.stage.peers) is None:
            return [absent(name, "not installed")]
        try:
            running = contender.start(contender, self.stage)
        except NotStarted as exc:
            print(exc, file=sys.stderr, flush=True)
            reason = str(exc).removeprefix(f"{contender.name}: ").partition(";")[0]
            return [absent(name, f"not started: {reason}")]
        try:
            await self.engines.clear()
            counted, spent_ns = await self.engines.counts(), cpu_ns(running.pid)
            outcomes = await replay(running.url, self.requests)
            spent_s = (cpu_ns(running.pid) - spent_ns) / 1e9
            counts = (await self.engines.counts()).since(counted)
        finally:
            running.stop()
        if failures := [each.failure for each in outcomes if each.failure]:
            print(f"{contender.name}: {len(failures)} failed; the first: {failures[0]}", file=sys.stderr, flush=True)
        return list(rows_of(figures(self.requests, outcomes, counts, spent_s), name))


def main() -> None:
    options = _options()
    if options.install:
        _install(options.peers)
    contenders = [each for each in FLEET_CONTENDERS if any(each.name.startswith(name) for name in options.contenders)]
    print("\n".join(f"{each.name}: {each.found(options.peers) or 'not installed'}" for each in contenders), flush=True)
    runner = RowRunner([], {}, options.json)
    with tempfile.TemporaryDirectory(prefix="lorafleet-fleet-") as folder:
        scratch, mark = Path(folder), uuid.uuid4().hex
        tokenizer = ChatTokenizer.from_dir(make_model(scratch / "model"))
        lines = thinned(asked_lines(options.trace, is_quick=options.quick), options.requests, options.seed)
        requests = chats(lines, options.load * LOAD_1_RATE * options.engines, tokenizer, options.seed)
        lasts_s, tokens = requests[-1].at_s, sum(request.prompt_tokens for request in requests)
        print(
            f"{len(requests)} requests in {lasts_s:.0f} s, {tokens / 1e6:.1f} M tokens of the trace in their prompts,"
            f" {options.engines} engines, one token for {SCALE} of the trace",
            flush=True,
        )
        runner.names = [each.name for each in contenders]
        runner.about_s = dict.fromkeys(runner.names, lasts_s + _START_S + _ENDS_S)
        guard = ProcessGuard(mark, scratch)
        try:
            stage = Stage(scratch, environment(clean_environment(mark)), None, (), 0, peers=options.peers)
            with (
                local_fleet(
                    scratch / "state",
                    "sim",
                    *engine_flags(Hardware()),
                    workers=options.engines,
                    environment={"VLLM_SERVER_DEV_MODE": "1"},
                ) as (urls, _),
                runner.interruptible(),
            ):
                asyncio.run(_measure(contenders, requests, stage, urls["orchestrator"], runner))
        finally:
            guard.release()
    print(described())
    print(f"Good: {GOOD}, in tokens of the trace.")
    show("fleet", runner.rows, options.json)
    sys.exit(runner.status)


async def _measure(
    contenders: Sequence[Contender],
    requests: Sequence[FleetRequest],
    stage: Stage,
    orchestrator: str,
    runner: RowRunner,
) -> None:
    """Measure the contenders one after the other, each before the same engines with empty caches."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        engines = EngineFleet(client, await engine_urls(client, orchestrator))
        ports = tuple(_port(url) for url in engines.urls)
        bench = FleetBench(requests, engines, replace(stage, engines=ports, control=_port(orchestrator)))
        for contender in contenders:
            with runner.measuring(contender.name) as rows:
                rows.extend(await bench.measure(contender))


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None, url
    return port


def _install(folder: Path) -> None:
    """A virtual environment with the peers, where there is none. Raises CalledProcessError."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *PEER_PACKAGES], check=True, timeout=_INSTALL_S)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=f"{__doc__}\nFive contenders take ten minutes. The trace is no part of this:\n{WHERE_FROM}.",
        epilog=HOW_TO_ADD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--trace", metavar="FILE", help=f"the trace; else the variable {VARIABLE}; a quick run needs none"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="virtual environment that has the peers")
    parser.add_argument("--install", action="store_true", help="install them there first, from the package index")
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="how their names begin: " + ", ".join(each.name for each in FLEET_CONTENDERS),
    )
    parser.add_argument("--requests", type=int, help="about so many, in whole sessions")
    parser.add_argument("--load", type=float, help="times the trace's own speed, for each engine")
    parser.add_argument("--engines", type=int)
    parser.add_argument("--seed", type=int, default=1, help="draws sessions and jitter")
    options = parser.parse_args()
    if options.install and options.peers is None:
        parser.error("--install: name the folder, --peers DIR")
    options.requests = options.requests or (QUICK_REQUESTS if options.quick else REQUESTS)
    options.load = options.load or (QUICK_LOAD if options.quick else LOAD)
    options.engines = options.engines or (QUICK_ENGINES if options.quick else ENGINES)
    options.peers = options.peers and options.peers.resolve()
    return options


if __name__ == "__main__":
    main()
