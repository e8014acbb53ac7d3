"""Routes for workers: heartbeats, cordons, drains, a worker's report and its agent's log; and the keys of the fleet."""

import contextlib
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from lorafleet.identity import engine_name as name_in_engine
from lorafleet.identity import lora_id_of
from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.peers import check_own_worker, peer_of
from lorafleet.keys.roles import Caller
from lorafleet.keys.whoami import KeyList, key_item
from orchestrator.agentless.engine import allowed_path
from orchestrator.agentless.transport import SCHEME, agent_url_of
from orchestrator.api.tenancy import Actor, Cursor, Limit, TenantView, WhoCalls, page_after, tenant_view_of
from orchestrator.api.views import WireViews
from orchestrator.core.errors import (
    InvalidAdapter,
    LeaseLost,
    NotFound,
    OrchestratorUnavailable,
    StateConflict,
    WorkerFailed,
)
from orchestrator.intent import owners
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.agents import Heartbeat, HeartbeatAnswer
from orchestrator.model.names import HeldName
from orchestrator.model.offers import AdapterOffer
from orchestrator.model.policy import acceptance_mode
from orchestrator.model.snapshot import WorkerIntent
from orchestrator.model.workers import WorkerDrain, WorkerItem, WorkerList
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.reconcile.worker_reports import KnownWorker, WorkerReports
from workers.wire import LogTail, Metadata


def worker_routes(keys: ApiKeys, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that list workers and read one. They need scope `view`, or a router's `load`."""
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "view", "load"))])

    seen_by = Annotated[TenantView, Depends(tenant_view_of(reconciler.store))]

    @api.get("/v1/workers")
    async def workers(seen: seen_by, limit: Limit = 1000, cursor: Cursor = None) -> WorkerList:
        """All workers by id."""
        ids = list(reconciler.reports.workers)
        page, following = page_after(ids, limit, cursor)
        return WorkerList(data=tuple(seen.worker(views.worker(worker_id)) for worker_id in page), next=following)

    @api.get("/v1/workers/{worker_id}")
    async def worker(worker_id: str, seen: seen_by) -> WorkerItem:
        """One worker."""
        return seen.worker(views.worker(worker_id))

    return api


def heartbeat_routes(keys: ApiKeys, reconciler: Reconciler) -> APIRouter:
    """The route by which agents send heartbeats. It needs scope `worker`, which no publisher has."""
    api = APIRouter(tags=["fleet"])
    worker = Annotated[Caller, Depends(requires(keys, "worker"))]

    @api.post("/v1/workers/register")
    async def heartbeat(request: Request, body: Heartbeat, caller: worker) -> HeartbeatAnswer:
        """An agent's heartbeat; the answer says when to send the next.

        409 `worker_id_taken` while another agent has the worker id, and `worker_unproved` until the agent has proved
        its address.
        """
        report = body.metadata
        if keys.needs_certificates:
            check_own_worker(report.instance_id, peer_of(request))
        await reconciler.monitor.require_proof(report, caller.key_id)
        other = reconciler.reports.rival_agent_url(report, reconciler.settings.probe_after_s, may_move=keys.is_open)
        if other is not None:
            raise StateConflict(
                f"worker {report.instance_id!r} is at {other} and reports from there; give the one at"
                f" {report.agent_url} another --instance-id, or stop one of them",
                code="worker_id_taken",
                param="metadata.instance_id",
            )
        reconciler.monitor.record_heartbeat(report)
        agents, agents_digest = reconciler.monitor.agents_for(body.agents_digest)
        uses_number, uses = reconciler.demand.uses.untold(report.instance_id, body.uses_seen)
        return HeartbeatAnswer(
            epoch=reconciler.store.epoch,
            revision=reconciler.catalog.revision,
            interval_s=reconciler.settings.heartbeat_interval_s,
            is_warm=not report.is_warming or reconciler.queries.is_warm(report.instance_id),
            in_flight=reconciler.router_in_flight(report.instance_id),
            uses=uses,
            uses_number=uses_number,
            files_seen=reconciler.monitor.record_files(report, body.files),
            agents=agents,
            agents_digest=agents_digest,
            recorded=reconciler.audit.record_agent_operations(report, body.operations),
            recorded_incidents=reconciler.incidents.record_agent_incidents(report, body.incidents),
        )

    return api


def offer_routes(keys: ApiKeys, reconciler: Reconciler, clock: Callable[[], float]) -> APIRouter:
    """The route by which the plugin of an engine without an agent asks what it may load. It needs scope `worker`."""
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "worker"))])

    @api.get("/v1/workers/{worker_id}/offers")
    async def offer(worker_id: str, engine_name: Annotated[str, Query(max_length=400)]) -> AdapterOffer:
        """The adapter that an engine without an agent may load under this name, from a folder of its own disk.

        404 for any name that is not a registered adapter's for that worker.
        """
        known = reconciler.reports.workers.get(worker_id)
        adapter = reconciler.store.adapters.get(lora_id_of(engine_name))
        order = reconciler.store.workers.get(worker_id)
        failure = reconciler.operations.failures.by_pair.get((lora_id_of(engine_name), worker_id))
        path = None if adapter is None else allowed_path(adapter.source, reconciler.settings.engine_roots)
        is_agentless = known is not None and known.report.agent_url.startswith(SCHEME)
        if (
            known is None
            or adapter is None
            or path is None
            or adapter.digest is None
            or not (reconciler.settings.engine_offers and is_agentless)
            or engine_name != name_in_engine(adapter.lora_id, adapter.digest)
            or adapter.is_deleting
            or adapter.quarantine is not None
            or (failure is not None and failure.until > clock())
            or acceptance_mode(adapter.policy, reconciler.store.rules) == "require"  # nobody compares here
            or adapter.base_model not in {None, known.report.model.base_model}
            or adapter.lora_id in (order.kept_out if order is not None else ())
        ):
            raise NotFound(f"worker {worker_id!r} may load no adapter {engine_name!r}", param="engine_name")
        return AdapterOffer(engine_name, path, adapter.digest)

    return api


def fleet_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that cordon, uncordon and drain a worker. They need scope `operate`."""
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "operate"))])

    @api.post("/v1/workers/{worker_id}/cordon")
    async def cordon(worker_id: str, actor: Actor) -> WorkerItem:
        """Cordon: the worker keeps its adapters and gets no new ones."""
        return await _set_worker(worker_id, "cordoned", actor)

    @api.post("/v1/workers/{worker_id}/uncordon")
    async def uncordon(worker_id: str, actor: Actor) -> WorkerItem:
        """Use the worker again; takes back a cordon or a drain, also one that has reached the agent."""
        return await _set_worker(worker_id, None, actor)

    @api.post("/v1/workers/{worker_id}/drain")
    async def drain(
        worker_id: str,
        actor: Actor,
        body: Annotated[WorkerDrain, Body(examples=[{"deadline_s": 60}])] = WorkerDrain(),  # noqa: B008
    ) -> WorkerItem:
        """Move the worker's adapters elsewhere, make before break, then let it take no more requests.

        Without `deadline_s` the drain waits as long as the moves should take. A repeated call changes nothing.
        """
        return await _set_worker(worker_id, "draining", actor, deadline_s=body.deadline_s)

    async def _set_worker(
        worker_id: str, state: Literal["cordoned", "draining"] | None, actor: str, *, deadline_s: float | None = None
    ) -> WorkerItem:
        """Store the operator's order, start or take back a drain, publish the change; returns the worker."""
        is_changed = registry.set_worker(worker_id, state, deadline_s=deadline_s, actor=actor)
        if state != "draining":
            reconciler.runner.resume_worker(worker_id)
        elif is_changed:
            reconciler.runner.forget_drain(worker_id)
        await reconciler.publish_change(("workers", worker_id))
        return _shown_worker(worker_id, reconciler, views)

    return api


def copy_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that unload one copy from a worker, and let its adapter in again. They need scope `operate`."""
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "operate"))])

    @api.delete("/v1/workers/{worker_id}/adapters/{lora_id:path}", responses={202: {"description": "the copy drains"}})
    async def unload_copy(worker_id: str, lora_id: HeldName, response: Response, caller: WhoCalls) -> WorkerItem:
        """Unload one copy, and keep the adapter out of this worker until it is let in: 200 when it is not there.

        202 while it drains: it takes no new requests, and is unloaded when those on it have ended, or after
        `drain_deadline_s`. An engine name stands for a copy that another client loaded.
        """
        owners.require_copy_change(caller, lora_id)
        if registry.keep_out(worker_id, lora_id, caller.name):
            await reconciler.publish_change(("workers", worker_id))
        response.status_code = 202 if reconciler.queries.has_copy(worker_id, lora_id) else 200
        return _shown_worker(worker_id, reconciler, views)

    @api.post("/v1/workers/{worker_id}/adapters/{lora_id:path}")
    async def allow_copy(worker_id: str, lora_id: HeldName, caller: WhoCalls) -> WorkerItem:
        """Let an adapter in again that was kept out of this worker. Loads nothing; a copy that still drains stays."""
        owners.require_copy_change(caller, lora_id)
        if registry.allow(worker_id, lora_id, caller.name):
            await reconciler.publish_change(("workers", worker_id))
        return _shown_worker(worker_id, reconciler, views)

    return api


def _shown_worker(worker_id: str, reconciler: Reconciler, views: WireViews) -> WorkerItem:
    """The worker, of which only the orders may be known."""
    if worker_id in reconciler.reports.workers:
        return views.worker(worker_id)
    return _unknown_worker(worker_id, reconciler.store.workers.get(worker_id))


def _unknown_worker(worker_id: str, order: WorkerIntent | None) -> WorkerItem:
    """A worker with an operator's order that has not reported since our start, or was dropped."""
    return WorkerItem(
        id=worker_id,
        agent_url="",
        engine_url="",
        base_model="",
        state="lost",
        zone="",
        node="",
        capacity={},
        adapters=(),
        kept_out=() if order is None else order.kept_out,
    )


_LOG_WITHIN_S = 5.0
_REPORT_WITHIN_S = 2.0


def inspection_routes(keys: ApiKeys, reports: WorkerReports, agents: AgentClient) -> APIRouter:
    """The routes that look closely. A tenant's key reads its own entry of `/v1/keys`, and nothing else here."""
    api = APIRouter(tags=["fleet"])
    view = [Depends(requires(keys, "view", is_for_fleet=True))]

    @api.get("/v1/workers/{worker_id}/report", dependencies=view)
    async def report(worker_id: str) -> Metadata:
        """The worker's report, whole, read from its agent now: what it holds and where, its rates, its engine.

        Of a worker that does not answer, and of an engine without an agent, what is known of it.
        """
        known = _known_worker(reports, worker_id).report
        if url := agent_url_of(known):
            with contextlib.suppress(WorkerFailed, InvalidAdapter, LeaseLost):
                return await agents.metadata(url, timeout_s=_REPORT_WITHIN_S)
        return known

    @api.get("/v1/workers/{worker_id}/log", dependencies=[Depends(requires(keys, "operate"))])
    async def log(worker_id: str, lines: Annotated[int, Query(ge=1, le=500)] = 200) -> LogTail:
        """The last lines of the agent's log, read from the agent now."""
        url = agent_url_of(_known_worker(reports, worker_id).report)
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
        """The keys of the key files by id, then the tokens taken here: tenant, scopes, limits, expiry, note; no hash.

        A tenant sees its own key, without the note: that is the operators' comment.
        """
        callers = keys.callers()
        if reader.only_tenant is not None:
            callers = [caller for caller in callers if caller.key_id == reader.key_id]
        return KeyList(data=tuple(key_item(caller, reader) for caller in callers))

    return api


def _known_worker(reports: WorkerReports, worker_id: str) -> KnownWorker:
    """The worker's entry. Raises NotFound."""
    entry = reports.workers.get(worker_id)
    if entry is None:
        raise NotFound(
            f"worker {worker_id!r} has not registered; GET /v1/workers lists those that have", code="worker_not_found"
        )
    return entry
