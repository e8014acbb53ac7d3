"""Readings of the fleet for the console: load, slots and KV use of each worker, queues of the routers."""

from collections.abc import Iterable, Iterator, Mapping

from orchestrator.core.traffic import SeriesKey
from orchestrator.model.usage import RouterNow
from orchestrator.reconcile.worker_reports import WorkerReports


def fleet_readings(
    reports: WorkerReports, routers: Iterable[RouterNow], states: Mapping[str, int]
) -> Iterator[tuple[SeriesKey, str, float]]:
    """(series, quantity, value) of everything that is read every few seconds.

    routers  the live routers
    states   worker state -> number of workers
    """
    for worker_id, entry in reports.workers.items():
        load, capacity = entry.report.load, entry.report.lora.capacity
        series: SeriesKey = ("worker", worker_id)
        for name, value in (
            ("running", load.running),
            ("waiting", load.waiting),
            ("waiting_for_slot", load.waiting_for_slot),
            ("kv_usage", load.kv_usage),
            ("loaded", capacity.loaded_count),
        ):
            yield series, name, float(value)
    waiting = held = in_flight = 0
    tenants: dict[str, int] = {}
    for router in routers:
        in_flight += router.in_flight
        waiting += sum(router.waiting.values())
        held += sum(router.held.values())
        for counts in (router.waiting, router.held):
            for tenant, count in counts.items():
                tenants[tenant] = tenants.get(tenant, 0) + count
    fleet: SeriesKey = ("fleet", "")
    yield fleet, "in_flight", float(in_flight)
    yield fleet, "waiting", float(waiting)
    yield fleet, "held", float(held)
    for state, count in states.items():
        yield fleet, f"workers_{state}", float(count)
    for tenant, count in tenants.items():
        yield ("tenant", tenant), "waiting", float(count)
