"""What runs beside the requests: discovery, the queue, and periodic tasks."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING

import httpx
import structlog

from lorafleet.http_server.listener import HttpListener
from lorafleet.service.loops import forever
from lorafleet.service.tasks import BackgroundTasks
from router.api.questions import answer_questions
from router.core.fleet import Replica
from router.core.scheduler import Scheduler
from router.fleet.discovery import Discovery
from router.fleet.health_probe import HealthProbes
from router.http.engine_pool import EnginePool
from router.kv.feeds import KvFeeds
from router.processes.aggregate import WorkerProcesses
from router.request.engine_attempt import EngineAttempt
from router.request.services import Services
from router.request.usage_report import note_reached_lines, send_usage
from router.telemetry.metrics import RouterMetrics

if TYPE_CHECKING:
    from router.gateway.server import PickerServer

log = structlog.get_logger()

USAGE_EVERY_S = 1.0
_WATCH_EVERY_S = 1.0
_FIRST_REPORT_S = 1.0  # nor does it delay a start by more
_LAST_REPORT_S = 1.0  # an orchestrator that does not answer delays a stop by this
# A tokenizing thread gives the GIL back to the event loop within this time; Python's default is 5 ms.
_SWITCH_EVERY_S = 0.001
# Objects made and not freed between two garbage collections: mostly of requests in flight and kept decisions.
_COLLECT_EVERY = 50_000
# Blocks of forgotten workers are swept from the indexes in steps of a millisecond or two.
_SWEEP_EVERY_S = 0.1
_SWEEP_BLOCKS = 5_000


@asynccontextmanager
async def run_services(
    services: Services,
    control: httpx.AsyncClient,
    agents: EnginePool,
    probes: HealthProbes,
    learning: BackgroundTasks,
    *,
    clients: HttpListener,
    processes: WorkerProcesses | None,
    picker: "PickerServer | None" = None,
) -> AsyncIterator[None]:
    """Run everything beside the requests, from the app's start to its end, and then close it in order.

    Sets this process's garbage collection and thread switching.

    picker  answers gateways; None: no port for them
    """
    discovery, metrics = services.discovery, services.metrics
    async with control:
        running = [
            asyncio.create_task(discovery.run()),
            asyncio.create_task(services.queue.run()),
            asyncio.create_task(_sweep_indexes(services.feeds, metrics)),
            asyncio.create_task(_check_engines(services, discovery, metrics)),
            asyncio.create_task(_note_budgets(services)),
        ]
        if url := services.config.orchestrator_url.rstrip("/"):
            await _lease_first_shares(control, url, services)
            running.append(asyncio.create_task(_report_usage(control, url, services)))
            router_id = services.usage.router_id
            running.append(asyncio.create_task(answer_questions(control, url, router_id, services)))
        for task in running:
            task.add_done_callback(lambda task: _on_task_end(services, task))
        if processes is not None:
            await processes.start()
        if picker is not None:
            await picker.start()
        _tune_garbage_collection()
        sys.setswitchinterval(_SWITCH_EVERY_S)
        try:
            yield
        finally:
            if picker is not None:
                await picker.close()
            clients.stop()
            await services.background.close()
            await probes.close()
            if processes is not None:
                await processes.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await learning.cancel_and_wait()
            await services.feeds.close()
            await services.pool.close()
            if services.config.orchestrator_url:
                await _send_last_usage(control, services)
            await agents.close()
            services.tokenizers.close()
            if services.tracer is not None:
                await services.tracer.close()


def _on_task_end(services: Services, task: asyncio.Task[None]) -> None:
    """When a background task ends early: log it, mark the router as failed and send it SIGTERM.

    Without the task, the router would serve an outdated fleet. Does nothing for a cancelled task.
    """
    if task.cancelled():
        return
    services.has_failed = True
    log.critical("a background task ended; the router stops", task=repr(task.get_coro()), exc_info=task.exception())
    os.kill(os.getpid(), signal.SIGTERM)


def _tune_garbage_collection() -> None:
    """Collect now, then rarely, and never search what exists (index, tokenizers): garbage in cycles is rare here."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 50)


async def _sweep_indexes(feeds: KvFeeds, metrics: RouterMetrics) -> None:
    """Sweep forgotten workers' blocks from all indexes, step by step, until cancelled."""

    async def step() -> None:
        """Sweep each index by one step."""
        for index in (*feeds.indexes.values(), *feeds.approximate.values()):
            index.sweep(_SWEEP_BLOCKS)

    await forever(step, name="sweep", every_s=_SWEEP_EVERY_S, on_failure=metrics.loop_failures.labels("sweep").inc)


async def _check_engines(services: Services, discovery: Discovery, metrics: RouterMetrics) -> None:
    """Check once a second for engines that hang, until cancelled."""
    scheduler, pool = services.scheduler, services.pool

    async def step() -> None:
        """Update the load book by streams, check all engines, move requests from hung ones, and forget old poison."""
        replicas = list(discovery.fleet.replicas.values())
        last_data_at = pool.last_data_at()  # by the loop's clock, which is time.monotonic
        for replica in replicas:
            scheduler.load.record_data(replica.id, last_data_at.get(replica.engine_url, -inf))
        now = time.monotonic()
        scheduler.check_engines(replicas, now)
        services.poison_requests.forget(now)
        services.poison_adapters.forget(now)
        for replica in replicas:
            if replica.is_suspect:
                _move_requests_from(replica, scheduler, pool, now)

    await forever(step, name="watch", every_s=_WATCH_EVERY_S, on_failure=metrics.loop_failures.labels("watch").inc)


async def _note_budgets(services: Services) -> None:
    """Note once a second which lines of budgets were reached, until cancelled."""

    async def step() -> None:
        """Count and log them."""
        note_reached_lines(services)

    on_failure = services.metrics.loop_failures.labels("budgets").inc
    await forever(step, name="budgets", every_s=USAGE_EVERY_S, on_failure=on_failure)


def _move_requests_from(hung: Replica, scheduler: Scheduler, pool: EnginePool, now: float) -> None:
    """Lose the requests at a hung engine that another replica can serve: they are sent again. The others wait on."""
    others = [
        replica
        for replica in scheduler.healthy_replicas(hung.base_model, now)
        if replica.max_model_len >= hung.max_model_len
    ]
    if others:
        served_elsewhere = {name for replica in others for name in replica.residents if name not in replica.draining}
        pool.give_up(hung.engine_url, lambda sink: isinstance(sink, EngineAttempt) and sink.can_move(served_elsewhere))


async def _lease_first_shares(client: httpx.AsyncClient, url: str, services: Services) -> None:
    """Have shares of the limits before the first request comes; gives up after a second and raises nothing."""
    with suppress(Exception):  # the reports that follow have them
        async with asyncio.timeout(_FIRST_REPORT_S):
            await send_usage(client, url, services)


async def _send_last_usage(client: httpx.AsyncClient, services: Services) -> None:
    """Tell the orchestrator that this router has no requests any more; gives up after a second and raises nothing."""
    url = services.config.orchestrator_url.rstrip("/")
    with suppress(Exception):  # the orchestrator then takes the router for a silent one
        async with asyncio.timeout(_LAST_REPORT_S):
            await send_usage(client, url, services, is_last=True)


async def _report_usage(client: httpx.AsyncClient, url: str, services: Services) -> None:
    """Send usage to the orchestrator each second, and at once when it waits to hear of something, until cancelled.

    That is a confirmation, or a first request for a pool that may be at zero.
    """

    async def step() -> None:
        """Send one usage report."""
        await send_usage(client, url, services)

    await forever(
        step,
        name="usage",
        every_s=USAGE_EVERY_S,
        poke=services.discovery.confirmation_due,
        on_failure=services.metrics.loop_failures.labels("usage").inc,
    )
