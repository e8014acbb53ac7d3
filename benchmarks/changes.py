"""How soon three routers go by a registered adapter, a moved alias and a deletion; and the cost of spreading loads.

The routers, the orchestrator and the agents are real processes. The engines are sims.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.local_fleets import local_fleet, running, wait_until
from benchmarks.report import ReportRow, arguments, show

ROUTERS = 3
LOOPS = 200
LOAD_S = 0.3
"""The stall of an engine for one load, in the rows of loads."""
SPREADS = {"half of the workers first": 2.0, "all at once": 0.0}


class FleetUnderChange:
    """The client of an orchestrator, its routers' clients in turn, and a source that its workers may read."""

    def __init__(self, orchestrator: httpx.Client, routers: list[httpx.Client]) -> None:
        self.orchestrator = orchestrator
        self.routers = itertools.cycle(routers)
        self.source = orchestrator.get("/v1/adapters/sql-expert/v1").json()["spec"]["source"]

    def change(self, method: str, path: str, **body: Any) -> float:
        """Make a change that must succeed; the milliseconds until its answer."""
        began = time.perf_counter()
        self.orchestrator.request(method, f"/v1{path}", json=body or None).raise_for_status()
        return (time.perf_counter() - began) * 1e3

    def ask(self, name: str) -> tuple[int, str, float]:
        """The next router's status for a chat with this name, the adapter that answered, and the milliseconds."""
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        began = time.perf_counter()
        answer = next(self.routers).post("/v1/chat/completions", json=body)
        took_ms = (time.perf_counter() - began) * 1e3
        return answer.status_code, answer.headers.get("x-lorafleet-adapter", "").partition("@")[0], took_ms


def main() -> None:
    args = arguments(__doc__ or "")
    loops, publishes = (5, 2) if args.quick else (LOOPS, 20)
    rows: list[ReportRow] = []
    with _fleet(workers=2) as fleet:
        rows += registered(fleet, loops) + moved(fleet, loops)
    with _fleet("--sim-load-s", str(LOAD_S), workers=4) as fleet:
        rows += spread(fleet, publishes)
    show("changes of names", rows, args.json)


def registered(fleet: FleetUnderChange, loops: int) -> list[ReportRow]:
    """Rows of an adapter that is registered, asked for, deleted and asked for again, each time at another router."""
    wrong, late, posts, firsts, deletes = 0, 0, [], [], []
    for loop in range(loops):
        name = f"run/v{loop}"
        posts.append(fleet.change("POST", "/adapters", lora_id=name, source=fleet.source))
        status, answered, took_ms = fleet.ask(name)
        wrong += (status, answered) != (200, name)
        firsts.append(took_ms)
        deletes.append(fleet.change("DELETE", f"/adapters/{name}"))
        late += fleet.ask(name)[0] != 404
    return [
        ReportRow(f"register, then ask at another router: not answered, of {loops}", wrong, "requests", reach=0),
        *_times("register: until the orchestrator answers", posts),
        *_times("the first answer of an adapter just registered", firsts),
        ReportRow(f"delete, then ask at another router: answered, of {loops}", late, "requests", reach=0),
        *_times("delete: until the orchestrator answers", deletes),
    ]


def moved(fleet: FleetUnderChange, loops: int) -> list[ReportRow]:
    """Rows of an alias that is moved and asked for at another router."""
    for name in ("old/v0", "old/v1"):
        fleet.change("POST", "/adapters", lora_id=name, source=fleet.source)
        fleet.ask(name)
    old, moves = 0, []
    for loop in range(loops):
        to = f"old/v{loop % 2}"
        moves.append(fleet.change("PUT", "/aliases/old", targets=[{"lora_id": to}], place_s=0))
        old += fleet.ask("old")[:2] != (200, to)
    return [
        ReportRow(f"move an alias, then ask at another router: old answers, of {loops}", old, "requests", reach=0),
        *_times("move an alias: until the orchestrator answers", moves),
    ]


def spread(fleet: FleetUnderChange, publishes: int) -> list[ReportRow]:
    """Rows of an adapter that is loaded onto four workers, each of which stalls for 0.3 s; both ways in turn."""
    took: dict[str, list[float]] = {how: [] for how in SPREADS}
    pauses: dict[str, list[float]] = {how: [] for how in SPREADS}
    numbers = itertools.count()
    for _ in range(publishes):
        for how, spread_s in SPREADS.items():
            fleet.change("PATCH", "/policy", load_spread_s=spread_s)
            name = f"all/v{next(numbers)}"
            policy = {"loading": "eager", "min_replicas": 4}
            began = time.perf_counter()
            fleet.change("POST", "/adapters", lora_id=name, source=fleet.source, policy=policy)
            slowest = 0.0
            while fleet.orchestrator.get(f"/v1/adapters/{name}").json()["status"]["replicas"]["ready"] < 4:
                slowest = max(slowest, fleet.ask("tiny-qwen")[2])
            took[how].append((time.perf_counter() - began) * 1e3)
            pauses[how].append(slowest)
            fleet.change("DELETE", f"/adapters/{name}")
    return [
        row
        for how in SPREADS
        for row in (
            ReportRow(f"ready on four workers, {how} (median)", median(took[how]), "ms"),
            ReportRow(f"slowest request of the base model meanwhile, {how} (median)", median(pauses[how]), "ms"),
        )
    ]


def _times(what: str, times_ms: list[float]) -> list[ReportRow]:
    return [ReportRow(f"{what} (median)", median(times_ms), "ms"), ReportRow(f"{what} (most)", max(times_ms), "ms")]


@contextmanager
def _fleet(*engine: str, workers: int) -> Iterator[FleetUnderChange]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        urls, up = stack.enter_context(local_fleet(Path(folder) / "state", "sim", *engine, workers=workers))
        routers = [urls["router"]]
        for number in range(1, ROUTERS):
            port_file = Path(folder) / f"router-{number}"
            flags = ["--orchestrator-url", urls["orchestrator"], "--port", "0", "--port-file", str(port_file)]
            process = stack.enter_context(running(["router", *flags, "--log-level", "warning"]))
            wait_until(port_file.exists, process)
            routers.append(f"http://127.0.0.1:{port_file.read_text().strip()}")
        clients = [
            stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
            for url in (urls["orchestrator"], *routers)
        ]
        for client in clients:
            wait_until(lambda ready=client.get: ready("/ready").status_code == 200, up)
        yield FleetUnderChange(clients[0], clients[1:])


if __name__ == "__main__":
    main()
