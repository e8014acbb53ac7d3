"""Usage reports to the orchestrator: what this router has counted, and how it is now."""

from functools import partial
from importlib.metadata import version

import httpx
import structlog
from pydantic import TypeAdapter

from lorafleet.service.times import unix_text
from orchestrator.model.usage import RouterNow, UsageAnswer, UsageReport
from router.core.kv.index import WorkerId
from router.core.scheduler import Scheduler
from router.request.services import Services

log = structlog.get_logger()

_VERSION = version("lorafleet")
_REPORT = TypeAdapter(UsageReport)
_ANSWER = TypeAdapter(UsageAnswer)


def usage_report(services: Services, now: float, *, is_last: bool = False) -> UsageReport:
    """The next report: all counts that were not accepted yet, and how this router is. `is_last`: the router stops."""
    usage, scheduler, discovery, cold = services.usage, services.scheduler, services.discovery, services.cold_starts
    services.budgets.follow(services.keys.budgeted, now)
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
        held_from_zero={name: held for name in cold.from_zero.start_s if (held := cold.held_at_zero(name))},
        asked_age_s=usage.asked_ages_s(now, discovery.is_registered),
        waits_s={str(worker): round(wait_s, 3) for worker, wait_s in queue_waits_s(scheduler).items()},
        running_in_pause=services.pauses.running_counts(),
        now=router_now(services),
        limits=services.quotas.uses(now),
        budgets=() if is_last else services.budgets.asked(),
    )


async def send_usage(client: httpx.AsyncClient, url: str, services: Services, *, is_last: bool = False) -> None:
    """Send one report to the orchestrator; go by the shares of limits, and by what was spent of budgets, in its answer.

    Raises httpx.HTTPError if it does not arrive, ValueError for an invalid answer.
    """
    report = usage_report(services, services.clock(), is_last=is_last)
    body = _REPORT.dump_json(report, exclude_defaults=True)
    answer = await client.post(f"{url}/v1/usage", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    services.usage.accept(report.batches)
    found, now = _ANSWER.validate_json(answer.content), services.clock()
    if found.limits is not None:
        services.quotas.set_shares(found.limits, now)
    if found.spent is not None:
        unaccepted = partial(services.usage.spent_unaccepted, now=now)
        if services.budgets.tell(report.budgets, found.spent, unaccepted, now):
            services.queue.refuse_exhausted()
    if report.budgets:
        if found.spent is None and services.budgets.has_ledger:
            log.warning("nobody tells what was spent of budgets", budgets=len(report.budgets))
        services.budgets.has_ledger = found.spent is not None


def note_reached_lines(services: Services) -> None:
    """Count and log the lines of budgets that were reached since the last call."""
    for reached in services.budgets.reached_lines(services.clock()):
        services.metrics.budget_lines.labels(reached.limit, reached.line).inc()
        budget = reached.spending.budget
        log.warning(
            "a budget has reached a line",
            account=reached.account,
            limit=reached.limit,
            line=reached.line,
            spent=round(reached.spending.spent, 3),
            soft=budget.soft,
            hard=budget.hard,
            resets_at=unix_text(reached.spending.ends_at),
        )


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
