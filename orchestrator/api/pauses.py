"""Routes for pauses: a trainer holds its fleet's new requests for a while, and lets them go again."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query

from lorafleet.keys.auth import ApiKeys, AuthFirstRoute, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.times import utc_text
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.core.pauses import PauseLease, PauseProgress
from orchestrator.intent import owners
from orchestrator.model.pauses import PauseItem, PauseList, PauseSpec
from orchestrator.reconcile.reconciler import Reconciler

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
        return _item(lease, progress)

    @api.get("/v1/pauses")
    async def list_pauses(caller: reads) -> PauseList:
        """The pauses in force: all of them for an operator, else those that hold the caller's requests."""
        own = (None, caller.only_tenant)
        seen = [lease for lease in pauses.in_force() if caller.only_tenant is None or lease.tenant in own]
        return PauseList(data=tuple(_item(lease, pauses.progress(lease)) for lease in seen))

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
        return PauseList(data=() if ended is None else (_item(ended, PauseProgress(0, 0)),))

    return api


def _item(lease: PauseLease, progress: PauseProgress) -> PauseItem:
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
