"""How long a read of the orchestrator's REST takes with 10,000 adapters, of a real server on loopback."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.report import ReportRow, arguments, show

ADAPTERS = 10_000
REACH_MS = 50.0
READS = {
    "list, a page of 100": "/v1/adapters?limit=100",
    "list, a page of 1,000": "/v1/adapters",
    "list, from far behind": "/v1/adapters?limit=100&cursor=team-99/a05",
    "list by prefix": "/v1/adapters?prefix=team-42/",
    "list by state": "/v1/adapters?state=registered&limit=100",
    "list by tenant": "/v1/adapters?tenant=team-42&limit=100",
    "list by base model, none there": "/v1/adapters?base_model=llama",
    "list, quarantined": "/v1/adapters?quarantined=true",
    "show": "/v1/adapters/team-42/a12",
    "history, a page of 100": "/v1/history",
}


def main() -> None:
    args = arguments(__doc__ or "")
    count, calls = (2000, 5) if args.quick else (ADAPTERS, 30)
    with (
        tempfile.TemporaryDirectory() as folder,
        _orchestrator(Path(folder)) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        register_s = _register(client, count)
        rows = [
            ReportRow(f"{what} (median of {calls})", _median_ms(client, path, calls), "ms", reach=REACH_MS)
            for what, path in READS.items()
        ]
    rows.append(ReportRow("register, in batches of 1,000", count / register_s, "adapters a second"))
    show(f"REST with {count:,} adapters", rows, args.json)


def _register(client: httpx.Client, count: int) -> float:
    specs = [
        {
            "lora_id": f"team-{number % 100:02}/a{number // 100:02}",
            "source": f"s3://adapters/{number}",
            "base_model": "qwen",
            "tenants": [f"team-{number % 100:02}"],
        }
        for number in range(count)
    ]
    began = time.perf_counter()
    for start in range(0, count, 1000):
        client.post("/v1/adapters:batch", json={"adapters": specs[start : start + 1000]}).raise_for_status()
    return time.perf_counter() - began


def _median_ms(client: httpx.Client, path: str, calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        client.get(path).raise_for_status()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


@contextmanager
def _orchestrator(folder: Path) -> Iterator[str]:
    port_file = folder / "port"
    command = [sys.executable, "-P", "-m", "orchestrator", "--port", "0", "--settle-s", "0", "--log-level", "warning"]
    process = subprocess.Popen([*command, "--store", str(folder / "store.db"), "--port-file", str(port_file)])
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise SystemExit(f"the orchestrator ended with status {process.returncode}")
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        while httpx.get(f"{url}/ready", trust_env=False).status_code != 200:
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
