"""The workers that EndpointSlices name: a fresh orchestrator asks them who they are, before any of them has reported.

Slices say where a worker is and that it is ending; what it holds is its agent's word. That they no longer name one
means nothing by itself: it may have lost a label, or the API server everything. A worker is lost when neither its agent
nor its engine answers, as it is without Kubernetes.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.slices import DiscoveredWorker, workers_by_agent_name
from lorafleet.service.loops import forever
from orchestrator.core.errors import WorkerFailed
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.worker_reports import WorkerReports
from workers.wire import Metadata

log = structlog.get_logger()

_AT_ONCE = 128
"""Workers asked at the same time. A guess: a fleet of 1,000 that answers is met within a second or two."""


class KubeWorkerFinder:
    """Tells the fleet what slices say, and asks whoever has not been heard there. `poke` asks for a pass."""

    def __init__(
        self,
        slices: SliceWatch,
        *,
        fleet: WorkerReports,
        agents: AgentClient,
        hear: Callable[[Metadata], object],
        poke: Callable[[], object],
        timeout_s: float,
        again_s: float,
    ) -> None:
        self._slices = slices
        self._fleet = fleet
        self._agents = agents
        self._hear = hear
        self._poke = poke
        self._timeout_s = timeout_s
        self._again_s = again_s
        self._due = asyncio.Event()
        self._called: dict[tuple[str, str], str] = {}
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Follow until cancelled."""
        follow = partial(self._slices.run, self._take)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever(follow, name="slices", every_s=self._again_s))
            tasks.create_task(forever(self._meet, name="found", every_s=self._again_s, poke=self._due))

    def stock_engines(self) -> list[DiscoveredWorker]:
        """Those whose Service has no port `agent`: nobody reports for them."""
        return [worker for worker in self._slices.workers.values() if worker.agent_url is None]

    def _take(self) -> None:
        there = {(worker.id, worker.agent_url or "") for worker in self._slices.workers.values()}
        self._called = {key: name for key, name in self._called.items() if key in there}
        if self._fleet.place(self._by_name()):
            self._poke()
        self._due.set()

    def _by_name(self) -> dict[str, DiscoveredWorker]:
        entries = self._fleet.entries
        owners = {entry.report.agent_url.rstrip("/"): name for name, entry in entries.items()}
        return workers_by_agent_name(self._slices.workers, self._called, ids=entries, owners=owners)

    async def _meet(self) -> None:
        """Ask everybody who has not been heard where the slices have them now."""
        known = len(self._called)
        strangers = [worker for name, worker in self._by_name().items() if self._is_new(name, worker)]
        await asyncio.gather(*(self._ask(worker) for worker in strangers))
        if len(self._called) > known:
            self._fleet.place(self._by_name())

    def _is_new(self, name: str, worker: DiscoveredWorker) -> bool:
        entry = self._fleet.entries.get(name)
        if worker.agent_url is None:
            return False
        return entry is None or (entry.reach != "heard" and entry.report.agent_url.rstrip("/") != worker.agent_url)

    async def _ask(self, worker: DiscoveredWorker) -> None:
        assert worker.agent_url is not None
        async with self._free:
            try:
                report = await self._agents.metadata(worker.agent_url, timeout_s=self._timeout_s)
            except WorkerFailed:
                return  # it has not started yet, or not ended; asked again for as long as it is named
        if report.instance_id != worker.id:
            self._called[worker.id, worker.agent_url] = report.instance_id
        log.info("worker found", worker_id=report.instance_id, agent_url=worker.agent_url)
        self._hear(report)
