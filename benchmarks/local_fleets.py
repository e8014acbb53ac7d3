"""Fleets and processes that benchmarks start, and stop when they are done."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.relay.machine import family

SERVICES = ("orchestrator", "router", "workers")
ENGINE = "lorafleet.sim"
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@contextmanager
def local_fleet(
    state_dir: Path,
    engine: str,
    *flags: str,
    workers: int,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = _NO_VARIABLES,
) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A ready `lorafleet up`: the URLs of its `router` and `orchestrator`, and its process.

    flags    each engine's
    options  of `up` itself
    """
    command = ["lorafleet", "up", "--engine", engine, "--workers", str(workers), "--state-dir", str(state_dir)]
    command += ["--router-port", "0", "--orchestrator-port", "0", *options, *(("--", *flags) if flags else ())]
    with running(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as up:
        assert up.stdout is not None
        line = next((line for line in up.stdout if line.startswith("ready ")), None)
        if line is None:
            raise SystemExit(f"the fleet ended with status {up.wait()}")
        yield dict(word.split("=", 1) for word in line.split()[1:] if "=" in word), up


async def engine_urls(client: httpx.AsyncClient, orchestrator: str) -> list[str]:
    """The engines of a fleet, as its agents say."""
    workers = (await client.get(f"{orchestrator}/v1/workers")).raise_for_status().json()["data"]
    pages = [await client.get(f"{worker['agent_url']}/metadata") for worker in workers]
    return [page.raise_for_status().json()["transport"]["engine_url"] for page in pages]


@contextmanager
def running(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of `python -m COMMAND`, which gets SIGTERM in the end."""
    process = subprocess.Popen([sys.executable, "-P", "-m", *command], text=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll until the condition is true. Raises SystemExit if the process ends first."""
    while not is_true():
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with status {process.returncode}")
        time.sleep(0.05)


def cpu_ms(up: int) -> dict[str, float]:
    """Service or `ENGINE` -> CPU milliseconds of its processes so far, below this process of `lorafleet up`."""
    spent = dict.fromkeys((*SERVICES, ENGINE), 0.0)
    for pid in family(up):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        service = next((name for name in spent if name.encode() in words), None)
        if service is not None:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[service] += (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")
    return spent
