"""Time of a publish to two workers, by path and by upload, beyond the engine's own load of the same files.

python -m benchmarks.publish [--engine sim|vllm] [--quick] [--json FILE]
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import httpx

from benchmarks.local_fleets import local_fleet
from benchmarks.report import ReportRow, show
from lorafleet.client import Fleet
from lorafleet.local.tiny_model import make_adapter

WORKERS = 2
PUBLISHES = 100
BEYOND_OWN_MS = 50.0
BESIDE = {"sim": "the sim", "vllm": "vLLM on the CPU"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=BESIDE, default="sim")
    parser.add_argument("--quick", action="store_true", help="fewer publishes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    args = parser.parse_args()
    count = 3 if args.quick else PUBLISHES
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runs = Path(folder) / "runs"
        roots = {"LORAFLEET_WORKERS_LORA_ROOTS": json.dumps([str(runs)])}
        urls, _ = stack.enter_context(
            local_fleet(Path(folder) / "state", args.engine, workers=WORKERS, environment=roots)
        )
        router = stack.enter_context(_client(urls["router"]))
        workers = httpx.get(f"{urls['orchestrator']}/v1/workers", trust_env=False).json()["data"]
        metadata = httpx.get(f"{workers[0]['agent_url']}/metadata", trust_env=False).json()
        engine = stack.enter_context(_client(metadata["transport"]["engine_url"]))
        uploads = stack.enter_context(Fleet(urls["router"], client=_client("")))
        took_ms = measured(router, engine, uploads, runs, count)
    show(f"a publish to {WORKERS} workers", list(rows(took_ms, args.engine)), args.json)


def measured(
    router: httpx.Client, engine: httpx.Client, uploads: Fleet, runs: Path, count: int
) -> dict[str, list[float]]:
    """Milliseconds of each way, in turns; each publish is of other bytes."""
    seeds = itertools.count()

    def by_own_call(adapter: Path) -> None:
        engine.post(LOAD, json={"lora_name": "own", "lora_path": str(adapter)}).raise_for_status()

    def by_path(adapter: Path) -> None:
        body = {"lora_name": "by-path", "lora_path": str(adapter), "load_inplace": True}
        router.post(LOAD, json=body).raise_for_status()

    def by_upload(adapter: Path) -> None:
        uploads.publish("by-upload", adapter)

    ways: dict[str, Callable[[Path], None]] = {"own call": by_own_call, "path": by_path, "upload": by_upload}
    took_ms: dict[str, list[float]] = {way: [] for way in ways}
    for publish in range(-1, count):
        for way, act in ways.items():
            adapter = make_adapter(runs, f"step-{next(seeds)}", seed=next(seeds))
            began = time.perf_counter()
            act(adapter)
            if publish >= 0:  # the first of each way opens connections
                took_ms[way].append((time.perf_counter() - began) * 1e3)
            shutil.rmtree(adapter)
        engine.post(UNLOAD, json={"lora_name": "own"}).raise_for_status()
    return took_ms


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


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=120, trust_env=False)


if __name__ == "__main__":
    main()
