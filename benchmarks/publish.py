"""A publish to two workers, beyond the engine's own load of the same files: a trainer's wait, and the fleet's CPU.

python -m benchmarks.publish [--engine sim|vllm] [--before DIR] [--quick] [--json FILE]
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.local_fleets import ENGINE, SERVICES, cpu_ms, local_fleet
from benchmarks.report import ReportRow, show
from lorafleet.client import Fleet
from lorafleet.local.tiny_model import make_adapter

WORKERS = 2
PUBLISHES, IN_A_ROW = 100, 10
BEYOND_OWN_MS = 50.0
OF_BEFORE = 0.25
"""The goal for the services' CPU of a publish, as a share of the version before."""
BESIDE = {"sim": "the sim", "vllm": "vLLM on the CPU"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True, slots=True)
class PublishedTo:
    """A fleet's process, clients of its router and of its first engine, and the folder of what is published."""

    up: int
    router: httpx.Client
    engine: httpx.Client
    uploads: Fleet
    runs: Path

    def load_at_engine(self, adapter: Path) -> None:
        """The engine's own load, as `own`."""
        body = {"lora_name": "own", "lora_path": str(adapter)}
        self.engine.post(LOAD, json=body).raise_for_status()

    def unload_at_engine(self) -> None:
        self.engine.post(UNLOAD, json={"lora_name": "own"}).raise_for_status()

    def publish_path(self, adapter: Path) -> None:
        body = {"lora_name": "by-path", "lora_path": str(adapter), "load_inplace": True}
        self.router.post(LOAD, json=body).raise_for_status()

    def publish_upload(self, adapter: Path) -> None:
        self.uploads.publish("by-upload", adapter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=BESIDE, default="sim")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="checkout of another version, whose CPU is measured in turns"
    )
    parser.add_argument("--quick", action="store_true", help="fewer publishes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    args = parser.parse_args()
    if args.before is not None and not (args.before / "orchestrator" / "__main__.py").exists():
        parser.error(f"--before {args.before}: no checkout there (orchestrator/__main__.py)")
    count, in_a_row = (3, 2) if args.quick else (PUBLISHES, IN_A_ROW)
    with ExitStack() as stack:
        ours = stack.enter_context(fleet_of(args.engine))
        fleets = {"": ours}
        if args.before is not None:
            fleets["before"] = stack.enter_context(fleet_of(args.engine, {"PYTHONPATH": str(args.before.resolve())}))
        spent_ms = cpu_of_publishes(fleets, count, in_a_row)
        took_ms = measured(ours, count)
    found = [*rows(took_ms, args.engine), *cpu_rows(spent_ms, args.engine)]
    show(f"a publish to {WORKERS} workers", found, args.json)


@contextmanager
def fleet_of(engine: str, environment: Mapping[str, str] = {}) -> Iterator[PublishedTo]:
    """A fleet that publishes from a folder of its own; `environment` may name another checkout."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runs = Path(folder) / "runs"
        environment = {"LORAFLEET_WORKERS_LORA_ROOTS": json.dumps([str(runs)]), **environment}
        fleet = local_fleet(Path(folder) / "state", engine, workers=WORKERS, environment=environment)
        urls, up = stack.enter_context(fleet)
        workers = httpx.get(f"{urls['orchestrator']}/v1/workers", trust_env=False).json()["data"]
        metadata = httpx.get(f"{workers[0]['agent_url']}/metadata", trust_env=False).json()
        yield PublishedTo(
            up=up.pid,
            router=stack.enter_context(_client(urls["router"])),
            engine=stack.enter_context(_client(metadata["transport"]["engine_url"])),
            uploads=stack.enter_context(Fleet(urls["router"], client=_client(""))),
            runs=runs,
        )


def measured(fleet: PublishedTo, count: int) -> dict[str, list[float]]:
    """Milliseconds of each way, in turns; each publish is of other bytes."""
    seeds = itertools.count()
    ways: dict[str, Callable[[Path], None]] = {
        "own call": fleet.load_at_engine,
        "path": fleet.publish_path,
        "upload": fleet.publish_upload,
    }
    took_ms: dict[str, list[float]] = {way: [] for way in ways}
    for publish in range(-1, count):
        for way, act in ways.items():
            adapter = make_adapter(fleet.runs, f"step-{next(seeds)}", seed=next(seeds))
            began = time.perf_counter()
            act(adapter)
            if publish >= 0:  # the first of each way opens connections
                took_ms[way].append((time.perf_counter() - began) * 1e3)
            shutil.rmtree(adapter)
        fleet.unload_at_engine()
    return took_ms


def cpu_of_publishes(fleets: Mapping[str, PublishedTo], count: int, in_a_row: int) -> dict[str, dict[str, float]]:
    """Fleet -> CPU milliseconds of a publish by path by service, and of `WORKERS` own loads by `ENGINE`'s `own`.

    The fleets take turns of `in_a_row` publishes, so that what follows an answer is counted, too.
    """
    spent: dict[str, dict[str, float]] = {name: dict.fromkeys((*SERVICES, ENGINE, "own"), 0.0) for name in fleets}
    turns = max(1, count // in_a_row)
    for turn in range(-1, turns):
        for name, fleet in fleets.items():
            seeds = range(turn * in_a_row, (turn + 1) * in_a_row)
            adapters = [make_adapter(fleet.runs, f"cpu-{seed}", seed=10_000 + seed) for seed in seeds]
            began = cpu_ms(fleet.up)
            for adapter in adapters:
                fleet.publish_path(adapter)
            published = cpu_ms(fleet.up)
            for adapter in adapters:
                fleet.load_at_engine(adapter)
                fleet.unload_at_engine()
                shutil.rmtree(adapter)
            loaded = cpu_ms(fleet.up)
            if turn >= 0:  # the first turn opens connections
                for service in published:
                    spent[name][service] += (published[service] - began[service]) / (turns * in_a_row)
                spent[name]["own"] += (loaded[ENGINE] - published[ENGINE]) / (turns * in_a_row) * WORKERS
    return spent


def rows(took_ms: dict[str, list[float]], engine: str) -> Iterator[ReportRow]:
    """The medians, ours beyond the engine's own call, and the 90th percentiles."""
    count, own = len(took_ms["own call"]), median(took_ms["own call"])
    yield ReportRow(f"{BESIDE[engine]}'s own load of the files at one worker (median of {count})", own, "ms")
    for way in ("path", "upload"):
        beyond = median(took_ms[way]) - own
        what = f"publish to {WORKERS} workers by {way}, beyond the own call (median of {count})"
        yield ReportRow(what, beyond, "ms", BEYOND_OWN_MS, "own call", own)
        p90 = quantiles(took_ms[way], n=10)[-1] if count > 1 else took_ms[way][0]
        yield ReportRow(f"publish to {WORKERS} workers by {way}, in all (p90)", p90, "ms")


def cpu_rows(spent_ms: Mapping[str, Mapping[str, float]], engine: str) -> Iterator[ReportRow]:
    """CPU of a publish by path, by service and in all services, beside the version before where one was measured."""
    ours, before = spent_ms[""], spent_ms.get("before", {})
    what = f"CPU of a publish to {WORKERS} workers by path"
    services = {service: (ours[service], before.get(service)) for service in SERVICES}
    for service, (value, then) in services.items():
        yield ReportRow(f"{what}: {service}", value, "ms", None, "before" if before else None, then)
    total, total_before = sum(ours[name] for name in SERVICES), sum(before[name] for name in SERVICES if before)
    yield ReportRow(f"{what}: all services", total, "ms", None, "before", total_before or None, OF_BEFORE)
    if engine == "sim":
        yield ReportRow(f"{what}: both engines", ours[ENGINE], "ms", None, "their own loads alone", ours["own"])


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=120, trust_env=False)


if __name__ == "__main__":
    main()
