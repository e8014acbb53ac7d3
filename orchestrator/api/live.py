"""Routes for the console: routers, and the fleet as it changes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.service.http import EventStream
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.api.traffic import COMING_S
from orchestrator.core.demand import ROUTER_LIVE_S
from orchestrator.core.traffic import GRAINS
from orchestrator.model.traffic import FleetNow, RouterItem, RouterList
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.traffic.book import RouterSeen, TrafficBook

# Between two messages, with and without a change in the catalog.
_LIVE_EVERY_S = 2.0
_LEAST_PAUSE_S = 0.3


def live_routes(
    keys: ApiKeys,
    reconciler: Reconciler,
    book: TrafficBook,
    workers_by_state: Callable[[], Mapping[str, int]],
    is_stopping: Callable[[], bool],
    wall: Callable[[], float],
) -> APIRouter:
    """The routes that read routers, and the fleet now. They need scope `view`."""
    api = APIRouter(tags=["traffic"])
    seen_by = Annotated[TenantView, Depends(tenant_view_of(reconciler.store))]

    @api.get("/v1/routers", dependencies=[Depends(requires(keys, "view", is_for_fleet=True))])
    async def routers() -> RouterList:
        """Routers that have reported within the last hour."""
        now = wall()
        items = (_router_item(router_id, seen, now) for router_id, seen in sorted(book.routers.items()))
        return RouterList(data=tuple(items))

    @api.get("/v1/live", response_class=EventStream, dependencies=[Depends(requires(keys, "view"))])
    async def live(seen: seen_by) -> EventStream:
        """The fleet now as server-sent events: after a change, and every two seconds. A tenant's key sees its part."""

        async def messages() -> AsyncIterator[str]:
            """One message at least, until this orchestrator stops or leads no longer."""
            while True:
                yield f"event: now\ndata: {_shown_to(seen.tenant, fleet_now()).model_dump_json()}\n\n"
                await asyncio.sleep(_LEAST_PAUSE_S)
                if is_stopping() or not reconciler.leadership.has_term:
                    return
                await reconciler.catalog.changed.wait(_LIVE_EVERY_S)

        return EventStream(messages())

    def fleet_now() -> FleetNow:
        """The fleet as it is now."""
        now = wall()
        seen = live_routers(book, now)
        circuits: dict[str, str] = {}
        for router in seen:
            for worker, state in router.now.circuits.items() if router.now else ():
                circuits[worker] = "open" if "open" in (state, circuits.get(worker)) else state
        return FleetNow(
            at=now,
            revision=reconciler.catalog.revision,
            epoch=reconciler.store.epoch,
            workers=dict(workers_by_state()),
            routers=len(seen),
            in_flight=sum(router.now.in_flight for router in seen if router.now),
            waiting=_by_tenant(router.now.waiting for router in seen if router.now),
            held=_by_tenant(router.now.held for router in seen if router.now),
            paused=_by_tenant(router.now.paused for router in seen if router.now),
            circuits=circuits,
            slice_at=GRAINS[0].start_of(now - COMING_S),
        )

    return api


def _shown_to(tenant: str | None, now: FleetNow) -> FleetNow:
    """The message as a caller of this tenant may see it: what waits of its own requests; None: everything."""
    if tenant is None:
        return now
    counts = {"waiting": now.waiting, "held": now.held, "paused": now.paused}
    own = {field: {name: n for name, n in part.items() if name == tenant} for field, part in counts.items()}
    return now.model_copy(update={"workers": {}, "routers": 0, "in_flight": 0, "circuits": {}, **own})


def live_routers(book: TrafficBook, now: float) -> list[RouterSeen]:
    """Routers that reported within `ROUTER_LIVE_S` and have not ended."""
    return [seen for seen in book.routers.values() if not seen.has_ended and now - seen.seen_at < ROUTER_LIVE_S]


def _by_tenant(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by tenant, summed over routers."""
    whole: dict[str, int] = {}
    for part in parts:
        for tenant, count in part.items():
            whole[tenant] = whole.get(tenant, 0) + count
    return whole


def _router_item(router_id: str, seen: RouterSeen, now: float) -> RouterItem:
    """A router as wire model."""
    is_live = now - seen.seen_at < ROUTER_LIVE_S
    return RouterItem(
        id=router_id,
        state="ended" if seen.has_ended else "live" if is_live else "silent",
        age_s=round(max(0.0, now - seen.seen_at), 1),
        revision_seen=seen.revision_seen,
        now=seen.now,
    )
