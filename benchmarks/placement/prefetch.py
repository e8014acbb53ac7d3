"""Prefetching, in simulated time: of the requests at a worker that has just joined, those whose files are there.

Eight workers have 2,000 adapters on their disks, of which 16 are in each engine's slots. A ninth joins with an empty
disk. Requests follow Zipf's law. Each file takes `FETCH_S`, one after another; a request whose adapter's files are not
there fetches them first.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

from benchmarks.report import ReportRow
from lorafleet.identity import rendezvous_score
from orchestrator.core.placement.warm_up import prefetches
from orchestrator.model.adapter_index import adapter_index
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.cards import AdapterCard
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    DemandSnapshot,
    FilesSnapshot,
    Intent,
    ObservedFleet,
    ObservedWorker,
    ReportedAdapter,
)

WORKERS, ADAPTERS, SLOTS = 8, 2000, 16
FETCH_S = 2.0
FOR_S = 900.0
NEW = f"w{WORKERS}"


def prefetch_rows(rates: tuple[float, ...] = (1.0, 4.0), exponent: float = 0.9) -> Iterator[ReportRow]:
    """A row for each rate of requests: the new worker's cold requests that wait for a fetch, in percent."""
    for rate in rates:
        waits = {is_on: _waiting_share(rate, exponent, is_prefetching=is_on) for is_on in (True, False)}
        yield ReportRow(
            what=f"a worker joins, {rate:g} requests a second: its cold requests that wait for a fetch, in 15 minutes",
            value=waits[True] * 100, unit="%", baseline="without prefetching", baseline_value=waits[False] * 100,
        )  # fmt: skip


def _waiting_share(rate: float, exponent: float, *, is_prefetching: bool) -> float:
    """The share of the new worker's cold requests that find no files there."""
    rng = Random(1)
    weights = [1 / (rank + 1) ** exponent for rank in range(ADAPTERS)]
    sums = list(accumulate(weights))
    names = [f"a{number}" for number in range(ADAPTERS)]
    habits = {name: rate * weight / sums[-1] for name, weight in zip(names, weights, strict=True)}
    workers = [f"w{number}" for number in range(WORKERS + 1)]
    homes = {name: max(workers, key=lambda worker: rendezvous_score(name, worker)) for name in names}
    adapters = {name: _adapter(name) for name in names}
    intent = Intent(adapters=adapters, known_index=adapter_index(adapters))
    served = {worker: [name for name in names if homes[name] == worker][:SLOTS] for worker in workers}
    observed = {worker: _worker(worker, served[worker]) for worker in workers}
    at_new = set(served[NEW])
    holders = {adapters[name].digest or "": {homes[name]} for name in names if homes[name] != NEW}
    fleet = ObservedFleet(workers=observed, files=FilesSnapshot(is_known=True, is_whole=True, holders=holders))
    cold = waiting = 0
    now = free_at = 0.0
    while now < FOR_S:
        now += rng.expovariate(rate)
        while is_prefetching and free_at + FETCH_S <= now:
            steps = prefetches(intent, fleet, DemandSnapshot(habits=habits), PlacementPolicy(), free_at)
            if not steps:
                break
            holders[adapters[steps[0].lora_id].digest or ""] = {NEW}
            free_at += FETCH_S
        (name,) = rng.choices(names, cum_weights=sums)
        if homes[name] != NEW or name in at_new:
            continue
        cold += 1
        if NEW not in holders.get(adapters[name].digest or "", ()):
            waiting += 1
            holders[adapters[name].digest or ""] = {NEW}
            free_at = max(free_at, now) + FETCH_S
    return waiting / cold if cold else 0.0


def _adapter(name: str) -> RegisteredAdapter:
    spec = AdapterSpec(lora_id=name, source="s3://a", base_model="m", digest=f"{int(name[1:]):064x}")
    return RegisteredAdapter(spec=spec, card=AdapterCard(rank=16, size_bytes=10**8))


def _worker(name: str, served: list[str]) -> ObservedWorker:
    held = {
        each: ReportedAdapter(lora_id=each, digest=f"{int(each[1:]):064x}", engine_name=each, state="ready", since=0.0)
        for each in served
    }
    return ObservedWorker(
        id=name, state="ready", base_model="m", slots=SLOTS, max_lora_rank=64, adapters=held, disk_room_bytes=10**12
    )
