"""Routes that look closely: a worker's whole report, its agent's log, the keys of the fleet."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.roles import Caller
from lorafleet.keys.whoami import KeyList, key_item
from orchestrator.agentless.transport import agent_url_of
from orchestrator.core.errors import NotFound, OrchestratorUnavailable, WorkerFailed
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.worker_reports import KnownWorker, WorkerReports
from workers.wire import LogTail, Metadata

_LOG_WITHIN_S = 5.0


def inspection_routes(keys: ApiKeys, reports: WorkerReports, agents: AgentClient) -> APIRouter:
    """The routes that look closely. A tenant's key reads its own entry of `/v1/keys`, and nothing else here."""
    api = APIRouter(tags=["fleet"])
    view = [Depends(requires(keys, "view", is_for_fleet=True))]

    @api.get("/v1/workers/{worker_id}/report", dependencies=view)
    async def report(worker_id: str) -> Metadata:
        """The worker's last report, whole: what it holds and where, its rates, its engine."""
        return _known(reports, worker_id).report

    @api.get("/v1/workers/{worker_id}/log", dependencies=[Depends(requires(keys, "operate"))])
    async def log(worker_id: str, lines: Annotated[int, Query(ge=1, le=500)] = 200) -> LogTail:
        """The last lines of the agent's log, read from the agent now."""
        url = agent_url_of(_known(reports, worker_id).report)
        if not url.startswith("http"):
            raise NotFound(f"worker {worker_id!r} has no agent, and so no log here", code="worker_not_found")
        try:
            return await agents.log_tail(url, lines, timeout_s=_LOG_WITHIN_S)
        except WorkerFailed as exc:
            raise OrchestratorUnavailable(
                f"the agent of {worker_id!r} did not give its log: {exc}", code="agent_unreachable", retry_after_s=2.0
            ) from exc

    @api.get("/v1/keys")
    async def key_list(reader: Annotated[Caller, Depends(requires(keys, "view"))]) -> KeyList:
        """The keys of the key files by id: tenant, scopes, limits, expiry, note; no hash.

        A tenant's reader sees its own key, without the note: that is the operators' comment.
        """
        callers = keys.callers()
        if reader.only_tenant is not None:
            callers = [caller for caller in callers if caller == reader]
        return KeyList(data=tuple(key_item(caller, reader) for caller in callers))

    return api


def _known(reports: WorkerReports, worker_id: str) -> KnownWorker:
    """The worker's entry. Raises NotFound."""
    entry = reports.workers.get(worker_id)
    if entry is None:
        raise NotFound(
            f"worker {worker_id!r} has not registered; GET /v1/workers lists those that have", code="worker_not_found"
        )
    return entry
