"""What `lorafleet top` shows at one moment, from the orchestrator's answers."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorafleet.cli.client import RestClient
from lorafleet.service.failure import CommandFailed

Answer = Mapping[str, Any]
# Adapters' states change slowly, and thousands of them are a large answer.
_ADAPTERS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLine:
    """Traffic of the fleet, a worker or an adapter over the range; None where nothing was measured."""

    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    refusals_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None
    hit_share: float | None = None
    hit_share_predicted: float | None = None
    waited_s: float | None = None
    cold_starts: int = 0
    codes: Mapping[str, int] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """A worker. `running`, `waiting` and `kv_usage` are means over the range; `circuit` is "" while it is closed."""

    id: str
    state: str
    adapters: int
    free_slots: int | None
    running: float | None
    waiting: float | None
    kv_usage: float | None
    circuit: str
    traffic: TrafficLine


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLine:
    """An adapter, or a base model's own requests (`base:NAME`, without replicas)."""

    name: str
    state: str = ""
    ready: int | None = None
    desired: int | None = None
    error: str = ""
    traffic: TrafficLine


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSnapshot:
    """The fleet at one moment.

    waiting, held  requests in all routers that wait for room, and for an adapter; by tenant, "" for none
    routers        None where they could not be read
    note           why there is no traffic; empty if there is
    """

    at: float
    range_s: float
    workers: tuple[WorkerLine, ...]
    adapters: tuple[AdapterLine, ...]
    fleet: TrafficLine = field(default_factory=TrafficLine)
    routers: int | None = None
    in_flight: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


def traffic_line(total: Answer | None, range_s: float) -> TrafficLine:
    """The traffic of one total of `GET /v1/traffic` or `/v1/traffic/totals`; zeros for a series without any."""
    if total is None:
        return TrafficLine()
    return TrafficLine(
        requests_per_s=total["requests"] / range_s,
        errors_per_s=total["errors"] / range_s,
        refusals_per_s=total["refusals"] / range_s,
        prompt_tokens_per_s=total["prompt_tokens"] / range_s,
        output_tokens_per_s=total["output_tokens"] / range_s,
        first_token_p50_s=total["first_token_s"].get("p50"),
        first_token_p95_s=total["first_token_s"].get("p95"),
        hit_share=total["hit_real"],
        hit_share_predicted=total["hit_predicted"],
        waited_s=total["waited_s"],
        cold_starts=total["cold_starts"],
        codes=total["codes"],
        gauges=total["gauges"],
    )


def snapshot_of(
    workers: Sequence[Answer],
    adapters: Sequence[Answer],
    traffic: Mapping[str, Answer],
    *,
    at: float,
    range_s: float,
    note: str = "",
) -> TopSnapshot:
    """The snapshot that these answers make.

    traffic  kind -> `GET /v1/traffic` for "fleet", `/v1/traffic/totals` for "worker", "adapter" and "base", and
             `/v1/routers` for "routers"; kinds that could not be read are left out
    """

    def totals(kind: str) -> dict[str, Answer]:
        """The totals of a kind by name."""
        return {total["name"]: total for total in traffic.get(kind, {}).get("data", ())}

    live = [router["now"] or {} for router in traffic.get("routers", {}).get("data", ()) if router["state"] == "live"]
    circuits: dict[str, str] = {}
    for now in live:
        for worker, state in now.get("circuits", {}).items():
            circuits[worker] = "open" if "open" in (state, circuits.get(worker)) else state
    by_worker, by_adapter = totals("worker"), totals("adapter")
    lines = [_adapter_line(item, traffic_line(by_adapter.get(item["lora_id"]), range_s)) for item in adapters]
    # Traffic of adapters that were deleted meanwhile, and of base models.
    known = {item["lora_id"] for item in adapters}
    gone = [(name, total) for name, total in by_adapter.items() if name and name not in known]
    lines += [AdapterLine(name=name, state="gone", traffic=traffic_line(total, range_s)) for name, total in gone]
    bases = totals("base").items()
    lines += [AdapterLine(name=f"base:{name}", traffic=traffic_line(total, range_s)) for name, total in bases]
    return TopSnapshot(
        at=at,
        range_s=range_s,
        workers=tuple(_worker_line(item, by_worker.get(item["id"]), circuits, range_s) for item in workers),
        adapters=tuple(lines),
        fleet=traffic_line(traffic.get("fleet", {}).get("total"), range_s),
        routers=len(live) if "routers" in traffic else None,
        in_flight=sum(now.get("in_flight", 0) for now in live),
        waiting=_summed_counts(now.get("waiting", {}) for now in live),
        held=_summed_counts(now.get("held", {}) for now in live),
        note=note,
    )


def _worker_line(item: Answer, total: Answer | None, circuits: Mapping[str, str], range_s: float) -> WorkerLine:
    """A worker with its traffic and load."""
    traffic = traffic_line(total, range_s)
    return WorkerLine(
        id=item["id"],
        state=item["state"],
        adapters=len(item["adapters"]),
        free_slots=item["capacity"].get("available_slots"),
        running=traffic.gauges.get("running"),
        waiting=traffic.gauges.get("waiting"),
        kv_usage=traffic.gauges.get("kv_usage"),
        circuit=circuits.get(item["id"], ""),
        traffic=traffic,
    )


def _adapter_line(item: Answer, traffic: TrafficLine) -> AdapterLine:
    """A registered adapter with its traffic."""
    status = item["status"]
    return AdapterLine(
        name=item["lora_id"],
        state=status["state"],
        ready=status["replicas"]["ready"],
        desired=status["replicas"]["desired"],
        error=status.get("error") or "",
        traffic=traffic,
    )


def _summed_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by name, summed."""
    whole: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            whole[name] = whole.get(name, 0) + count
    return whole


class TopReader:
    """Reads snapshots from an orchestrator. Not thread-safe: one read at a time."""

    def __init__(self, api: RestClient, range_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._range_s = range_s
        self._clock = clock
        self._adapters: list[dict[str, Any]] = []
        self._adapters_at: float | None = None

    def read(self) -> TopSnapshot:
        """One snapshot of a few requests. Without the right to read traffic it has a note instead.

        Raises CommandFailed when workers or adapters cannot be read.
        """
        workers = self._api.list_all("/v1/workers")
        if self._adapters_at is None or self._clock() - self._adapters_at >= _ADAPTERS_EVERY_S:
            self._adapters = self._api.list_all("/v1/adapters")
            self._adapters_at = self._clock()
        traffic: dict[str, Answer] = {}
        note = ""
        try:
            traffic["fleet"] = self._api.call("GET", "/v1/traffic", kind="fleet", range_s=self._range_s)
            for kind in ("worker", "adapter", "base"):
                traffic[kind] = self._api.call("GET", "/v1/traffic/totals", kind=kind, range_s=self._range_s)
            traffic["routers"] = self._api.call("GET", "/v1/routers")
        except CommandFailed as exc:
            note = f"no traffic: {exc}"
        return snapshot_of(workers, self._adapters, traffic, at=time.time(), range_s=self._range_s, note=note)
