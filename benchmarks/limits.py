"""One key's limit over two routers on two addresses: what is allowed of three times as many requests.

python -m benchmarks.limits [--quick] [--json FILE]

An orchestrator, a sim engine, and routers on 127.0.0.2 and 127.0.0.3, each a process. The bucket of a minute's worth is
emptied first; then what is allowed is counted for two minutes.
"""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from benchmarks.local_fleets import running, wait_until
from benchmarks.report import ReportRow, arguments, show
from lorafleet.keys.key_edits import add_key
from lorafleet.local.tiny_model import make_model

PER_MINUTE = 600
TIMES = 3
"""Offered, in limits."""
HOSTS = ("127.0.0.2", "127.0.0.3")
NEAR_PERCENT = 3.0
_READY_S = 120.0
DEMANDS: Mapping[str, tuple[float, ...]] = {"even": (0.5, 0.5), "uneven": (0.9, 0.1)}
"""The routers' parts of what is offered. Of uneven ones the second asks for less than half of the limit."""


def main() -> None:
    args = arguments(__doc__)
    empty_s, measured_s = (2.0, 3.0) if args.quick else (75.0, 120.0)
    rows: list[ReportRow] = []
    with tempfile.TemporaryDirectory() as folder, two_routers(Path(folder)) as (urls, key):
        for demand, parts in DEMANDS.items():
            answers = asyncio.run(offer(urls, key, parts, empty_s, measured_s))
            rows += demand_rows(demand, parts, answers, measured_s)
    title = f"{PER_MINUTE} requests a minute allowed over {len(HOSTS)} routers, {TIMES} times that offered"
    show(f"{title}, {measured_s:g} s", rows, args.json)


@contextmanager
def two_routers(folder: Path) -> Iterator[tuple[list[str], str]]:
    """The URLs of ready routers, and a key with the limit."""
    key_file = folder / "keys.yaml"
    service = add_key(key_file, None, ["load"])
    key = add_key(key_file, "acme", ["infer"], limits={"requests_per_minute": PER_MINUTE})
    keys = ["--key-files", str(key_file), "--token", service, "--log-level", "error"]
    with ExitStack() as stack:

        def start(name: str, host: str, *flags: str) -> str:
            """The URL of a service, once it has its port."""
            port_file = folder / host
            words = [name, "--host", host, "--port", "0", "--port-file", str(port_file), *flags]
            process = stack.enter_context(running(words))
            wait_until(lambda: port_file.exists() and bool(port_file.read_text().strip()), process)
            return f"http://{host}:{port_file.read_text().strip()}"

        engine = f"http://127.0.0.1:{_free_port()}"
        flags = ["--model", str(make_model(folder / "model")), "--port", engine.rpartition(":")[2]]
        stack.enter_context(running(["lorafleet.sim", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        _wait_until_ready(f"{engine}/health")
        store = ["--store", str(folder / "store.db"), "--engines", engine]
        orchestrator = start("orchestrator", "127.0.0.1", *store, *keys)
        urls = [start("router", host, "--orchestrator-url", orchestrator, *keys) for host in HOSTS]
        for url in urls:
            _wait_until_ready(f"{url}/ready")
        yield urls, key


def _free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _wait_until_ready(url: str) -> None:
    """Poll until this URL answers 200. Raises SystemExit after two minutes."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise SystemExit(f"{url} is not ready after {_READY_S:g} s")


async def offer(
    urls: Sequence[str], key: str, parts: Sequence[float], empty_s: float, measured_s: float
) -> list[Counter[int]]:
    """For each router, answers by HTTP status; requests that began before `empty_s` are left out."""
    counts: list[Counter[int]] = [Counter() for _ in urls]
    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"},
        trust_env=False,
        timeout=60,
        limits=httpx.Limits(max_connections=256),
    ) as client:
        body = {"model": (await client.get(f"{urls[0]}/v1/models")).json()["data"][0]["id"]}
        body |= {"prompt": "late", "max_tokens": 1}

        began_at = time.monotonic()

        async def ask(place: int, *, is_counted: bool) -> None:
            """One request; its answer's status is counted."""
            answer = await client.post(f"{urls[place]}/v1/completions", json=body)
            counts[place][answer.status_code] += is_counted

        async def offer_to(place: int) -> None:
            """Requests at even intervals, whatever the answers take."""
            every_s = 60 / (PER_MINUTE * TIMES * parts[place])
            async with asyncio.TaskGroup() as tasks:
                for number in range(int((empty_s + measured_s) / every_s)):
                    at = began_at + number * every_s
                    await asyncio.sleep(max(0.0, at - time.monotonic()))
                    tasks.create_task(ask(place, is_counted=number * every_s >= empty_s))

        await asyncio.gather(*map(offer_to, range(len(urls))))
    return counts


def demand_rows(
    demand: str, parts: Sequence[float], answers: Sequence[Counter[int]], measured_s: float
) -> Iterator[ReportRow]:
    """Rows of the requests that were allowed: at each router, and at both routers together beside the limit."""
    limit = PER_MINUTE * measured_s / 60
    for host, part, counts in zip(HOSTS, parts, answers, strict=True):
        asked = f"{sum(counts.values())} asked, {part:.0%} of all"
        yield ReportRow(f"{demand} demand: allowed at {host} ({asked})", counts[200], "")
        others = sum(counts.values()) - counts[200] - counts[429]
        yield ReportRow(f"{demand} demand: other answers at {host} than 200 and 429", others, "", reach=0)
    allowed = sum(counts[200] for counts in answers)
    yield ReportRow(f"{demand} demand: allowed at both, of {limit:g}", allowed, "")
    distance = 100 * abs(allowed / limit - 1)
    yield ReportRow(f"{demand} demand: its distance from the limit", distance, "%", reach=NEAR_PERCENT)


if __name__ == "__main__":
    main()
