"""Routes for routers: catalog, events, usage reports, ensure; and pauses, under which routers hold requests."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response

from lorafleet.keys.auth import ApiKeys, AuthFirstRoute, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import EventStream
from lorafleet.service.times import utc_text
from orchestrator.api.tenancy import Actor, TenantView, tenant_view_of
from orchestrator.api.views import WireViews
from orchestrator.core.demand import ENSURE_REPEAT_S
from orchestrator.core.errors import NotFound, OrchestratorRequestError, StateConflict
from orchestrator.core.failures import FINAL_CODES
from orchestrator.core.pauses import PauseProgress
from orchestrator.intent import owners
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.adapter_documents import EnsureAnswer, EnsureRequest
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.catalog import Catalog
from orchestrator.model.names import LoraId
from orchestrator.model.pauses import PauseItem, PauseLease, PauseList, PauseSpec
from orchestrator.model.usage import UsageAnswer, UsageReport
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.ledger import Ledger
from orchestrator.traffic.book import TrafficBook

_READS_REFRESH_EVERY_S = 0.1
"""Routers' reads look for changes that no event told at most this often, all routers together."""


ENSURE_EXAMPLE = {"replicas": 1, "wait_s": 10.0, "tenants": ["acme"]}
USAGE_EXAMPLE = {
    "router_id": "router-0",
    "boot_id": "7c1e",
    "seq": 12,
    "revision_seen": 1794900000000,
    "batches": [
        {
            "number": 3,
            "age_s": 0.5,
            "rows": [
                {
                    "adapter": "sql-expert/v1",
                    "version": "3f9a1c2b77aa",
                    "base_model": "Qwen/Qwen2.5-Coder-7B",
                    "worker": "w0",
                    "tenant": "acme",
                    "key": "8b1d0c55e2f4",
                    "counts": {
                        "requests": 12,
                        "sent": 11,
                        "codes": {"429 saturated": 1},
                        "prompt_tokens": 14400,
                        "output_tokens": 2700,
                        "first_token": {"25": 9, "27": 2},
                        "first_token_sum_s": 1.2,
                        "work_s": 1.1,
                    },
                }
            ],
        }
    ],
    "in_flight": {"w0": {"sql-expert/v1@3f9a1c2b77aa": 2}},
    "waiting": {"legal/v2": 2},
    "asked_age_s": {"sql-expert/v1": 0.5, "legal/v2": 240.0},
    "waits_s": {"w0": 1.8},
    "now": {"version": "0.1.0", "policy": "kv_lora", "in_flight": 2, "waiting": {"acme": 1}},
}


def router_routes(
    keys: ApiKeys,
    registry: AdapterRegistry,
    reconciler: Reconciler,
    views: WireViews,
    book: TrafficBook,
    ledger: Ledger,
    *,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
) -> APIRouter:
    """The routes for routers: read the catalog and events, report usage, request replicas."""
    api = APIRouter(tags=["routers"])
    load = [Depends(requires(keys, "load"))]
    follow = [Depends(requires(keys, "load", "view", is_for_fleet=True))]
    ensures = [Depends(requires(keys, "load", "operate", "tenant-admin"))]
    catalog, settings = reconciler.catalog, reconciler.settings
    seen_by = Annotated[TenantView, Depends(tenant_view_of(reconciler.store))]

    @api.get("/v1/catalog", dependencies=follow, response_model=Catalog)
    async def get_catalog(
        request: Request,
        since: Annotated[int | None, Query(description="answer with the changes after this revision")] = None,
        router_id: Annotated[str, Query(max_length=256, description="the router that reads")] = "",
        revision_seen: Annotated[int | None, Query(description="the revision that the router has in force")] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """The catalog at one revision, or with `since` its changes; 304 when the ETag still matches.

        `router_id` and `revision_seen` confirm what is in force there: changes of intent are answered after that.
        """
        if router_id and request.state.caller.may("load"):  # others may read, and are not waited for
            reconciler.confirmations.record_read(router_id, revision_seen)
        # Changes of intent are in it already.
        reconciler.queries.refresh_catalog(unless_within_s=_READS_REFRESH_EVERY_S if router_id else 0.0)
        headers = {"etag": f'"{catalog.revision}"', "cache-control": "no-cache"}
        seen = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if headers["etag"] in seen:
            return Response(status_code=304, headers=headers)
        body = catalog.catalog_json()[1] if since is None else catalog.changes_json(since)
        return Response(body, media_type="application/json", headers=headers)

    @api.get("/v1/events", dependencies=[Depends(requires(keys, "load", "view"))], response_class=EventStream)
    async def events(
        seen: seen_by,
        since: Annotated[int | None, Query(description="last known revision")] = None,
        changes: Annotated[bool, Query(description="only events after which the catalog reads otherwise")] = False,
        last_event_id: Annotated[int | None, Header()] = None,
    ) -> EventStream:
        """Events after a revision, as SSE; 410 when they are no longer kept: read the catalog and follow from there."""
        reconciler.queries.refresh_catalog()
        start = catalog.position_of(since) if last_event_id is None else last_event_id
        catalog.events_since(start)
        stream = catalog.event_stream(
            start,
            keep_alive_s=settings.keep_alive_s,
            is_stopping=lambda: is_stopping() or not reconciler.leadership.has_term,
            shown=seen.event,
            only_changes=changes,
        )
        return EventStream(stream)

    @api.post("/v1/usage", dependencies=load)
    async def usage(report: Annotated[UsageReport, Body(examples=[USAGE_EXAMPLE])]) -> UsageAnswer:
        """A router's usage report. It is answered once its batches are in the ledger.

        `seq` tells repeated and late reports, of which only batches count that are not in the ledger yet.
        """
        now, limits = clock(), None
        progress = reconciler.demand.record_report(report, now)
        if progress is not None:
            limits = reconciler.demand.limits.record(report, now)
            book.add_batches(progress.batches)
            reconciler.confirmations.record_report(report.router_id, is_last=report.is_last)
            reconciler.incidents.record_circuits(report.router_id, report.now.circuits, is_last=report.is_last)
            reconciler.act_on_report(report)
        reconciler.pauses.reported.notify()
        await ledger.add_counts(report.boot_id, report.batches)
        return UsageAnswer(
            accepted=progress is not None,
            revision=catalog.revision,
            limits=limits,
            spent=await ledger.spent(report.budgets, reconciler.store.epoch),  # with its batches
        )

    @api.post("/v1/adapters/{lora_id:path}/ensure", dependencies=ensures)
    async def ensure(
        lora_id: LoraId,
        request: Request,
        actor: Actor,
        seen: seen_by,
        ask: Annotated[EnsureRequest, Body(examples=[ENSURE_EXAMPLE])] = EnsureRequest(),  # noqa: B008
    ) -> EnsureAnswer:
        """Ask for replicas of the adapter. Answers when they are ready, or after `wait_s` with the state of then.

        If the client leaves, the wait ends and its demand counts as abandoned.
        """
        seen.require_adapter(lora_id)
        if seen.tenant is not None:
            ask = ask.model_copy(update={"tenants": (seen.tenant,)})
        asking = asyncio.create_task(
            _wait_for_replicas(
                lora_id,
                ask,
                actor,
                registry=registry,
                reconciler=reconciler,
                views=views,
                is_stopping=is_stopping,
                clock=clock,
            )
        )
        gone = asyncio.ensure_future(request.receive())  # the body has been read: the next message is the disconnect
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return seen.ensured(await asking)
        finally:
            asking.cancel()
            gone.cancel()
        reconciler.demand.mark_abandoned(lora_id)
        return views.ensure_answer(registry.adapter(lora_id), 1)  # the client has gone

    return api


def _only_tenant(adapter: RegisteredAdapter) -> tuple[str, ...]:
    """The adapter's tenant if it has exactly one: then the waiting requests are that tenant's."""
    return adapter.tenants if adapter.tenants is not None and len(adapter.tenants) == 1 else ()


async def _wait_for_replicas(
    lora_id: str,
    ask: EnsureRequest,
    actor: str,
    *,
    registry: AdapterRegistry,
    reconciler: Reconciler,
    views: WireViews,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
) -> EnsureAnswer:
    """Request replicas, repeatedly, until they are ready, the wait is over, no worker can load it now, or we stop.

    Raises NotFound for an adapter that is being deleted, StateConflict for one that somebody has to mend.
    """
    replicas, deadline = reconciler.allowed_replicas(lora_id, ask.replicas or 1), clock() + ask.wait_s
    while True:
        adapter = registry.adapter(lora_id)
        if adapter.is_deleting:
            raise NotFound(f"adapter {lora_id!r} is being deleted", param="lora_id")
        if (why := reconciler.queries.quarantine_reason(lora_id)) is not None:
            raise StateConflict(f"{lora_id!r} failed: {why}", code="adapter_failed", param="lora_id")
        failure = reconciler.queries.failure_everywhere(lora_id)
        if failure is not None and failure.code in FINAL_CODES:
            raise StateConflict(
                f"{lora_id!r} failed: {failure.code}: {failure.message}; mend its source, or register other files under"
                f" another lora_id, then: lorafleet adapters retry {lora_id}",
                code="adapter_failed",
                param="lora_id",
            )
        left_s = deadline - clock()
        if len(reconciler.queries.ready_workers(lora_id)) >= replicas or is_stopping():
            return views.ensure_answer(adapter, replicas)
        reconciler.ensure_replicas(lora_id, replicas, actor, ask.tenants or _only_tenant(adapter))
        if left_s <= 0 or failure is not None or reconciler.queries.fits_nowhere(lora_id):
            return views.ensure_answer(adapter, replicas)
        # Also checked at intervals: a replica that an agent reports need not cause an event.
        await reconciler.catalog.changed.wait(min(left_s, reconciler.settings.pass_interval_s, ENSURE_REPEAT_S))


PAUSE_EXAMPLE = {"mode": "keep", "lease_s": 60}


def pause_routes(keys: ApiKeys, reconciler: Reconciler, is_stopping: Callable[[], bool]) -> APIRouter:
    """The routes that begin, list and end pauses. They need scope `register`."""
    api = APIRouter(tags=["pauses"], route_class=AuthFirstRoute)
    registers = Annotated[Caller, Depends(requires(keys, "register"))]
    reads = Annotated[Caller, Depends(requires(keys, "view", "register"))]
    resumes = Annotated[Caller, Depends(requires(keys, "register", "operate"))]
    pauses, settings = reconciler.pauses, reconciler.settings

    @api.post("/v1/pauses")
    async def pause(
        caller: registers,
        spec: Annotated[PauseSpec, Body(examples=[PAUSE_EXAMPLE])] = PauseSpec(),  # noqa: B008
    ) -> PauseItem:
        """Pause the caller's tenant, or the whole fleet, or renew that. 200 once every live router holds new requests.

        With mode `wait` also nothing of the scope runs then; with mode `abort` what ran was ended.
        """
        lease_s = settings.pause_lease_s if spec.lease_s is None else spec.lease_s
        if lease_s > settings.pause_max_lease_s:
            raise OrchestratorRequestError(
                f"lease_s may be at most {settings.pause_max_lease_s:g} (pause_max_lease_s), found {lease_s:g};"
                " repeat the call to go on",
                param="lease_s",
            )
        lease, progress = await pauses.pause(owners.pause_scope(caller), spec.mode, caller.name, lease_s, is_stopping)
        return _pause_item(lease, progress)

    @api.get("/v1/pauses")
    async def list_pauses(caller: reads) -> PauseList:
        """The pauses in force: all of them for an operator, else those that hold the caller's requests."""
        own = (None, caller.only_tenant)
        seen = [lease for lease in pauses.in_force() if caller.only_tenant is None or lease.tenant in own]
        return PauseList(data=tuple(_pause_item(lease, pauses.progress(lease)) for lease in seen))

    @api.delete("/v1/pauses")
    async def resume(
        caller: resumes,
        tenant: Annotated[str | None, Query(description="another's pause, for an operator; empty: the fleet's")] = None,
        namespace: Annotated[str, Query(description="of that pause")] = "",
    ) -> PauseList:
        """End the caller's own pause: the pauses that were ended, none where nothing was paused.

        An operator, with scope `operate` or `admin`, may end any pause: `GET /v1/pauses` names them.
        """
        if tenant is None:
            scope = owners.pause_scope(caller, "operate")
        else:
            scope = owners.named_pause_scope(caller, tenant, namespace)
        ended = await pauses.end(scope)
        return PauseList(data=() if ended is None else (_pause_item(ended, PauseProgress(0, 0)),))

    return api


def _pause_item(lease: PauseLease, progress: PauseProgress) -> PauseItem:
    """The pause as wire model."""
    return PauseItem(
        scope=lease.scope.text,
        tenant=lease.tenant,
        namespace=lease.namespace,
        mode=lease.mode,
        owner=lease.owner,
        began_at=utc_text(datetime.fromtimestamp(lease.began_at, UTC)),
        expires_at=utc_text(datetime.fromtimestamp(lease.expires_at, UTC)),
        running=progress.running,
        routers_behind=progress.behind,
    )
