"""How workers are found that send this process no heartbeat: in EndpointSlices, and in the leader's catalog.

A standby knows the same workers as the leader, so that it can take over at once. Agents send heartbeats to one
orchestrator only. A standby reads the leader's catalog and asks the agents of workers that it does not know; from then
on it probes silent workers as the leader does.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import httpx
import structlog
from pydantic import ValidationError

from lorafleet.keys.own_key import OwnKey
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.slices import DiscoveredWorker, workers_by_agent_name
from lorafleet.service.loops import forever
from lorafleet.service.network.transport import ROLE
from orchestrator.core.errors import WorkerFailed
from orchestrator.leadership.leadership import Leadership
from orchestrator.model.catalog import Catalog
from orchestrator.model.changes import reader_of
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.reconcile.worker_reports import WorkerReports
from workers.wire import Metadata

log = structlog.get_logger()

_AT_ONCE = 128
"""Agents asked at the same time. A guess: a fleet of 1,000 is known within a second or two."""


class KubeWorkerFinder:
    """Follows EndpointSlices and asks the agents of workers that have not reported from there."""

    def __init__(
        self,
        slices: SliceWatch,
        *,
        reports: WorkerReports,
        agents: AgentClient,
        on_report: Callable[[Metadata], object],
        request_pass: Callable[[], object],
        timeout_s: float,
        again_s: float,
    ) -> None:
        self._slices = slices
        self._reports = reports
        self._agents = agents
        self._on_report = on_report
        self._request_pass = request_pass
        self._timeout_s = timeout_s
        self._again_s = again_s
        self._due = asyncio.Event()
        self._own_names: dict[tuple[str, str], str] = {}
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Follow EndpointSlices and ask the agents of new workers, until cancelled."""
        follow = partial(self._slices.run, self._on_slices)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever(follow, name="slices", every_s=self._again_s))
            tasks.create_task(forever(self._ask_new_workers, name="found", every_s=self._again_s, poke=self._due))

    def agentless_engines(self) -> list[DiscoveredWorker]:
        """Workers whose Service has no port `agent`."""
        return [worker for worker in self._slices.workers.values() if worker.agent_url is None]

    def _on_slices(self) -> None:
        """Pass changed EndpointSlices to the reports, and request a pass if they differ, and a round of asking agents.

        Own names of workers that are no longer listed are forgotten.
        """
        listed = {(worker.id, worker.agent_url or "") for worker in self._slices.workers.values()}
        self._own_names = {key: name for key, name in self._own_names.items() if key in listed}
        if self._reports.set_kube_workers(self._workers_by_name()):
            self._request_pass()
        self._due.set()

    def _workers_by_name(self) -> dict[str, DiscoveredWorker]:
        """The listed workers by the names their agents report."""
        entries = self._reports.workers
        owners = {entry.report.agent_url.rstrip("/"): name for name, entry in entries.items()}
        return workers_by_agent_name(self._slices.workers, self._own_names, ids=entries, owners=owners)

    async def _ask_new_workers(self) -> None:
        """Ask the agents of all workers that have not reported from their present address, and record their reports."""
        known = len(self._own_names)
        unknown = [worker for name, worker in self._workers_by_name().items() if self._is_new(name, worker)]
        await asyncio.gather(*(self._ask_agent(worker) for worker in unknown))
        if len(self._own_names) > known:
            self._reports.set_kube_workers(self._workers_by_name())

    def _is_new(self, name: str, worker: DiscoveredWorker) -> bool:
        """Whether the worker has an agent and it has not reported from this address."""
        entry = self._reports.workers.get(name)
        if worker.agent_url is None:
            return False
        return entry is None or (entry.reach != "heard" and entry.report.agent_url.rstrip("/") != worker.agent_url)

    async def _ask_agent(self, worker: DiscoveredWorker) -> None:
        """Ask the agent for its report and pass it to `on_report`; a silent agent is asked again later.

        Another worker id in it is remembered.
        """
        assert worker.agent_url is not None
        async with self._free:
            try:
                report = await self._agents.metadata(worker.agent_url, timeout_s=self._timeout_s)
            except WorkerFailed:
                return  # starting or terminating; asked again while slices list it
        if report.instance_id != worker.id:
            self._own_names[worker.id, worker.agent_url] = report.instance_id
        log.info("worker found", worker_id=report.instance_id, agent_url=worker.agent_url)
        self._on_report(report)


class StandbyFollower:
    """Follows the leader's catalog; does nothing while we lead, or while no leader is known."""

    def __init__(
        self,
        *,
        leadership: Leadership,
        reconciler: Reconciler,
        agents: AgentClient,
        own_key: OwnKey,
        client: httpx.AsyncClient,
        timeout_s: float,
    ) -> None:
        self._leadership = leadership
        self._reconciler = reconciler
        self._agents = agents
        self._own_key = own_key
        self._client = client
        self._timeout_s = timeout_s
        self._etag = ""

    async def sync_workers(self) -> None:
        """Read the leader's catalog, ask the agents of unknown workers and record their reports.

        Keeps the catalog's ETag unless an agent did not answer. Does nothing for an unchanged catalog, while we lead,
        or if no leader is known. Raises httpx.HTTPError, ValidationError.
        """
        leader = self._leadership.other_holder
        if leader is None or not leader.url:
            return
        url, headers = (
            f"{leader.url.rstrip('/')}/v1/catalog",
            self._own_key.headers | {"if-none-match": self._etag},
        )
        answer = await self._client.get(
            url, headers=headers, timeout=self._timeout_s, extensions={ROLE: "orchestrator"}
        )
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        answer.raise_for_status()
        catalog: Catalog = reader_of(Catalog).validate_json(answer.content, extra="ignore")
        missed = 0
        for worker in catalog.workers:
            if worker.id not in self._reconciler.reports.workers and worker.state != "lost" and worker.agent_url:
                missed += not await self._ask_agent(worker.agent_url)
        self._etag = "" if missed else answer.headers.get("etag", "")

    async def _ask_agent(self, agent_url: str) -> bool:
        """Ask the agent for its report and record it; returns whether it answered."""
        try:
            self._reconciler.monitor.record_heartbeat(await self._agents.metadata(agent_url, timeout_s=self._timeout_s))
        except (WorkerFailed, ValidationError) as exc:
            log.info("agent not reached yet", agent_url=agent_url, error=str(exc))
            return False
        return True
