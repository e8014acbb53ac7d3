"""A standby knows the same workers as the leader, so that it can take over at once.

Agents send heartbeats to one orchestrator only. A standby reads the leader's catalog and asks the agents of workers
that it does not know; from then on it probes silent workers as the leader does.
"""

import httpx
import structlog
from pydantic import ValidationError

from lorafleet.keys.own_key import OwnKey
from orchestrator.core.errors import WorkerFailed
from orchestrator.leadership.leadership import Leadership
from orchestrator.model.catalog import Catalog
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler

log = structlog.get_logger()


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
        answer = await self._client.get(url, headers=headers, timeout=self._timeout_s)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        answer.raise_for_status()
        catalog = Catalog.model_validate_json(answer.content)
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
