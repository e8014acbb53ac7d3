"""Not leading, yet ready to: knows the same workers as the leader, from their own mouths.

Agents send their heartbeats to one orchestrator. So a standby learns from the leader's catalog who there is, and asks
those whom it has not heard itself; from then on it asks whoever is silent, as a leader does.
"""

import httpx
import structlog
from pydantic import ValidationError

from orchestrator.core.errors import WorkerFailed
from orchestrator.leadership.leadership import Leadership
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.wire import Catalog

log = structlog.get_logger()


class StandbyFollower:
    """Follows the leader; does nothing while we lead ourselves, or nobody does."""

    def __init__(
        self,
        *,
        leadership: Leadership,
        reconciler: Reconciler,
        agents: AgentClient,
        client: httpx.AsyncClient,
        timeout_s: float,
    ) -> None:
        self._leadership = leadership
        self._reconciler = reconciler
        self._agents = agents
        self._client = client
        self._timeout_s = timeout_s
        self._etag = ""

    async def step(self) -> None:
        """One look at the leader's catalog. Raises httpx.HTTPError, ValidationError."""
        leader = self._leadership.other_holder
        if leader is None or not leader.url:
            return
        url, headers = f"{leader.url.rstrip('/')}/v1/catalog", self._agents.own.headers | {"if-none-match": self._etag}
        answer = await self._client.get(url, headers=headers, timeout=self._timeout_s)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        answer.raise_for_status()
        catalog = Catalog.model_validate_json(answer.content)
        missed = 0
        for worker in catalog.workers:
            if worker.id not in self._reconciler.fleet.entries and worker.state != "lost" and worker.agent_url:
                missed += not await self._meet(worker.agent_url)
        self._etag = "" if missed else answer.headers.get("etag", "")

    async def _meet(self, agent_url: str) -> bool:
        try:
            self._reconciler.hear(await self._agents.metadata(agent_url, timeout_s=self._timeout_s))
        except (WorkerFailed, ValidationError) as exc:
            log.info("worker not met yet", agent_url=agent_url, error=str(exc))
            return False
        return True
