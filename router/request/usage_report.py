"""Usage reports to the orchestrator: what this router has counted, and how it is now."""

from importlib.metadata import version

import httpx
from pydantic import TypeAdapter

from orchestrator.model.usage import RouterNow, UsageAnswer, UsageReport
from router.core.kv.index import WorkerId
from router.core.scheduler import Scheduler
from router.request.services import Services

_VERSION = version("lorafleet")
_REPORT = TypeAdapter(UsageReport)
_ANSWER = TypeAdapter(UsageAnswer)


def usage_report(services: Services, now: float, *, is_last: bool = False) -> UsageReport:
    """The next report: all counts that were not accepted yet, and how this router is. `is_last`: the router stops."""
    usage, scheduler, discovery = services.usage, services.scheduler, services.discovery
    in_flight: dict[str, dict[str, int]] = {}
    for worker, engine_name, count in scheduler.load.counts_by_name():
        in_flight.setdefault(worker, {})[engine_name] = count
    return UsageReport(
        router_id=usage.router_id,
        boot_id=usage.boot_id,
        seq=next(usage.numbers),
        revision_seen=discovery.fleet.revision,
        is_last=is_last,
        batches=usage.batches(now),
        in_flight=in_flight,
        waiting=scheduler.queue.waiting_by_adapter(),
        asked_age_s=usage.asked_ages_s(now, discovery.is_registered),
        waits_s={str(worker): round(wait_s, 3) for worker, wait_s in queue_waits_s(scheduler).items()},
        running_in_pause=services.pauses.running_counts(),
        now=router_now(services),
        limits=services.quotas.uses(now),
    )


async def send_usage(client: httpx.AsyncClient, url: str, services: Services, *, is_last: bool = False) -> None:
    """Send one report to the orchestrator, and go by the shares of limits in its answer.

    Raises httpx.HTTPError if it does not arrive, ValueError for an invalid answer.
    """
    report = usage_report(services, services.clock(), is_last=is_last)
    body = _REPORT.dump_json(report, exclude_defaults=True)
    answer = await client.post(f"{url}/v1/usage", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    services.usage.accept(report.batches)
    limits = _ANSWER.validate_json(answer.content).limits
    if limits is not None:
        services.quotas.set_shares(limits, services.clock())


def queue_waits_s(scheduler: Scheduler) -> dict[WorkerId, float]:
    """Seconds until the requests queued for each worker have been sent, at that worker's present rate."""
    waiting = scheduler.queue
    return {worker: work_s / waiting.rates.rate(worker) for worker, work_s in waiting.backlog.items()}


def router_now(services: Services) -> RouterNow:
    """How this router is now."""
    scheduler, now = services.scheduler, services.clock()
    states = {
        replica.id: scheduler.breaker.state(replica, now) for replica in services.discovery.fleet.replicas.values()
    }
    return RouterNow(
        version=_VERSION,
        policy=services.config.policy,
        in_flight=scheduler.load.total_in_flight,
        waiting={tenant: requests for tenant, (requests, _) in scheduler.queue.usage.tenants.items()},
        held={tenant: requests for tenant, (requests, _) in services.cold_starts.held.tenants.items()},
        paused={tenant: requests for tenant, (requests, _) in services.pauses.held.tenants.items()},
        circuits={worker: state for worker, state in states.items() if state != "closed"},
    )
