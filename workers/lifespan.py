"""What runs beside an agent's routes, from its start to its stop."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

import httpx
import structlog

from lorafleet.keys.own_key import OwnKey
from lorafleet.service.loops import forever
from lorafleet.service.network.transport import DirectTransport
from workers.agent.agent import WorkerAgent
from workers.agent.heartbeat import HeartbeatSender
from workers.agent.lora_manager import DynamoLoraManager
from workers.agent.supervisor import Supervisor
from workers.core.errors import WorkerError
from workers.metrics import WorkerMetrics
from workers.sources.plugins import start_downloader

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def running(
    agent: WorkerAgent, supervisor: Supervisor, *, own: OwnKey, rng: Random, locks: Sequence[int]
) -> AsyncIterator[None]:
    """Remove leftovers, then run the supervisor, background loops and heartbeats during the block.

    At the end: send a last heartbeat, save unwritten state and counts, stop the engine and free the state folder.

    locks  file descriptors of the folders' locks
    """
    context = agent.context
    settings, metrics = context.settings, context.metrics
    await asyncio.to_thread(context.cache.folder.remove_leftovers)
    await context.cache.list_held()
    await context.cache.update_free_bytes()
    if context.downloader is not None:
        start_downloader(context.downloader, DynamoLoraManager(agent))
    async with httpx.AsyncClient(transport=DirectTransport(tls=context.tls), trust_env=False) as client:
        tasks = [
            asyncio.create_task(supervisor.run()),
            asyncio.create_task(_repeat_step("scrape", agent.engine.scrape, settings.scrape_s, metrics)),
            asyncio.create_task(_repeat_step("tidy", agent.run_maintenance, settings.tidy_s, metrics)),
            asyncio.create_task(_repeat_step("look", agent.reconcile, settings.scan_s, metrics)),
            asyncio.create_task(_repeat_step("foreign", agent.read_foreign_files, settings.scan_s, metrics)),
        ]
        try:
            async with _send_heartbeats(agent, client, own=own, rng=rng):
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.installed.retry_writes()
            agent.usage.save()
            await agent.engine.close_ledgers()
            await supervisor.stop()
            for lock in locks:  # last: another agent may now use the folders
                os.close(lock)


@contextlib.asynccontextmanager
async def _send_heartbeats(
    agent: WorkerAgent, client: httpx.AsyncClient, *, own: OwnKey, rng: Random
) -> AsyncIterator[None]:
    """Send heartbeats during the block, and a last one at its end, before the engine stops. None without a fleet."""
    if agent.context.fleet is None:
        yield
        return
    sender = HeartbeatSender(agent, client, own=own, rng=rng, agents=agent.context.fleet.agents)
    beating = asyncio.create_task(sender.run())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await sender.send_last()


async def _repeat_step(
    name: str, step: Callable[[], Awaitable[object]], every_s: float, metrics: WorkerMetrics
) -> None:
    """Run a background step every `every_s` seconds until cancelled; its errors are logged and do not end the loop."""

    async def step_once() -> None:
        """Run the step; a WorkerError is logged at debug level."""
        try:
            await step()
        except WorkerError as exc:
            # The engine is down: the supervisor logs that once.
            log.debug("loop step failed", loop=name, error=str(exc))

    await forever(step_once, name=name, every_s=every_s, on_failure=metrics.loop_failures.labels(name).inc)
