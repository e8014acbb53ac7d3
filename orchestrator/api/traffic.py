"""Routes for the console: past traffic, routers, and the fleet as it changes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from lorafleet.histogram import percentile_s
from lorafleet.service.auth import ApiKeys, requires
from orchestrator.api.routers import EventStream
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.core.demand import ROUTER_LIVE_S
from orchestrator.core.errors import Forbidden
from orchestrator.core.traffic import GRAINS, Grain, SeriesKind, TrafficSums, summed
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.traffic.book import RouterSeen, TrafficBook
from orchestrator.wire_traffic import (
    FleetNow,
    RouterItem,
    RouterList,
    TrafficPoints,
    TrafficSeries,
    TrafficTotal,
    TrafficTotals,
)

# Between two messages, with and without a change in the catalog.
_LIVE_EVERY_S = 2.0
_LEAST_PAUSE_S = 0.3
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_MOST_RANGE_S = 48 * 3600
# A batch comes up to two seconds after its end: until then its slice would look like a fall.
_COMING_S = 2.0
_LEAST_SPAN_S = 5.0
Range = Annotated[float, Query(ge=60, le=_MOST_RANGE_S, description="seconds up to now")]
Kind = Annotated[SeriesKind, Query(description="what is counted")]


def traffic_routes(
    keys: ApiKeys,
    reconciler: Reconciler,
    book: TrafficBook,
    workers_by_state: Callable[[], Mapping[str, int]],
    is_stopping: Callable[[], bool],
    wall: Callable[[], float],
) -> APIRouter:
    """The routes that read traffic, routers, and the fleet now."""
    api = APIRouter(tags=["traffic"])
    view = [Depends(requires(keys, "view"))]
    seen_by = Annotated[TenantView, Depends(tenant_view_of(reconciler.store))]

    @api.get("/v1/traffic", dependencies=view)
    async def traffic(seen: seen_by, kind: Kind = "fleet", name: str = "", range_s: Range = 3600.0) -> TrafficSeries:
        """One series over time, from 5 s a slice (15 minutes) to 10 minutes a slice (2 days).

        A tenant's key reads its tenant's, its own, and those of adapters that are its tenant's alone; else 403.
        """
        if not seen.sees_traffic(kind, name):
            raise Forbidden(
                f"a key of tenant {seen.tenant!r} reads traffic of kind tenant, of its own key, and of adapters that no"
                " other tenant may use",
                code="fleet_key_needed",
                param="kind",
            )
        now = wall()
        grain, found = await book.series(kind, name, range_s)
        # The fleet is read in every slice in which this orchestrator led: there no row means nothing, else not known.
        known = found if kind == "fleet" else (await book.series("fleet", "", range_s))[1]
        points = _points(grain, found, known.keys(), now, range_s)
        whole = [sums for at, sums in found.items() if at >= now - range_s]
        total = traffic_total(name, summed(whole), range_s)
        return TrafficSeries(kind=kind, name=name, range_s=range_s, step_s=grain.step_s, total=total, points=points)

    @api.get("/v1/traffic/totals", dependencies=view)
    async def totals(seen: seen_by, kind: Kind = "adapter", range_s: Range = 3600.0) -> TrafficTotals:
        """Every series of a kind that the caller may read, summed over a range."""
        found = await book.totals(kind, range_s)
        rows = [traffic_total(name, sums, range_s) for name, sums in found.items() if seen.sees_traffic(kind, name)]
        rows.sort(key=lambda row: (-row.requests, row.name))
        return TrafficTotals(kind=kind, range_s=range_s, data=tuple(rows))

    @api.get("/v1/routers", dependencies=[Depends(requires(keys, "view", is_for_fleet=True))])
    async def routers() -> RouterList:
        """Routers that have reported within the last hour."""
        now = wall()
        items = (_router_item(router_id, seen, now) for router_id, seen in sorted(book.routers.items()))
        return RouterList(data=tuple(items))

    @api.get("/v1/live", response_class=EventStream, dependencies=view)
    async def live(seen: seen_by) -> StreamingResponse:
        """The fleet now as server-sent events: after a change, and every two seconds. A tenant's key sees its part."""

        async def messages() -> AsyncIterator[str]:
            """One message at least, until this orchestrator stops or leads no longer."""
            while True:
                yield f"event: now\ndata: {_shown_to(seen.tenant, fleet_now()).model_dump_json()}\n\n"
                await asyncio.sleep(_LEAST_PAUSE_S)
                if is_stopping() or not reconciler.leadership.is_leading:
                    return
                await reconciler.catalog.changed.wait(_LIVE_EVERY_S)

        return StreamingResponse(messages(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

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
            circuits=circuits,
            slice_at=GRAINS[0].start_of(now - _COMING_S),
        )

    return api


def _shown_to(tenant: str | None, now: FleetNow) -> FleetNow:
    """The message as a caller of this tenant may see it: what waits of its own requests; None: everything."""
    if tenant is None:
        return now
    waiting, held = ({name: n for name, n in part.items() if name == tenant} for part in (now.waiting, now.held))
    return now.model_copy(
        update={"workers": {}, "routers": 0, "in_flight": 0, "waiting": waiting, "held": held, "circuits": {}}
    )


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


def traffic_total(name: str, sums: TrafficSums, range_s: float) -> TrafficTotal:
    """The sums of a range as wire model."""
    return TrafficTotal(
        name=name,
        requests=sums.requests,
        requests_per_s=round(sums.requests / range_s, 4),
        errors=sums.errors,
        refusals=sums.refusals,
        codes=sums.codes,
        prompt_tokens=sums.prompt_tokens,
        output_tokens=sums.output_tokens,
        hit_predicted=_share(sums.predicted_tokens, sums.compared_tokens),
        hit_real=_share(sums.cached_tokens, sums.compared_tokens),
        waited_s=_share(sums.waited_s, sums.requests),
        cold_starts=sums.cold_starts,
        cold_s=_share(sums.cold_s, sums.cold_starts),
        first_token_s={label: _rounded(percentile_s(sums.first_token, share)) for label, share in _SHARES.items()},
        whole_s={label: _rounded(percentile_s(sums.whole, share)) for label, share in _SHARES.items()},
        gauges={quantity: round(read.mean, 4) for quantity, read in sums.gauges.items()},
    )


def _points(
    grain: Grain, found: Mapping[int, TrafficSums], known: Iterable[int], now: float, range_s: float
) -> TrafficPoints:
    """The columns of a series: each slice of the range that is whole, or nearly so.

    known  slices in which a series without a row had no traffic; in others nothing is known
    """
    step_s, nothing, recorded = grain.step_s, TrafficSums(), frozenset(known)
    starts = range(grain.start_of(now - range_s) + step_s, int(now - _COMING_S - _LEAST_SPAN_S) + 1, step_s)
    # The present slice of a coarse grain counts up to now.
    spans = {at: min(float(step_s), max(_LEAST_SPAN_S, now - _COMING_S - at)) for at in starts}
    ats = [at for at in starts if grain is not GRAINS[0] or at + step_s <= now - _COMING_S]
    rows = [found.get(at, nothing if at in recorded else None) for at in ats]

    def column(value: Callable[[TrafficSums, float], float | None]) -> tuple[float | None, ...]:
        """One value of every slice."""
        return tuple(None if row is None else value(row, spans[at]) for at, row in zip(ats, rows, strict=True))

    def rate(count: Callable[[TrafficSums], float]) -> tuple[float | None, ...]:
        """A count by second."""
        return column(lambda row, span_s: round(count(row) / span_s, 4))

    def percentiles(counts: Callable[[TrafficSums], Mapping[int, int]]) -> dict[str, tuple[float | None, ...]]:
        """The percentiles of a histogram."""
        return {
            label: column(lambda row, _, share=share: _rounded(percentile_s(counts(row), share)))  # type: ignore[misc]
            for label, share in _SHARES.items()
        }

    codes = sorted({code for row in rows if row is not None for code in row.codes})
    gauges = sorted({name for row in rows if row is not None for name in row.gauges})
    cold_starts = tuple(None if row is None else row.cold_starts for row in rows)
    return TrafficPoints(
        at=tuple(ats),
        requests_per_s=rate(lambda row: row.requests),
        errors_per_s=rate(lambda row: row.errors),
        refusals_per_s=rate(lambda row: row.refusals),
        prompt_tokens_per_s=rate(lambda row: row.prompt_tokens),
        output_tokens_per_s=rate(lambda row: row.output_tokens),
        waited_s=column(lambda row, _: _share(row.waited_s, row.requests)),
        cold_starts=cold_starts,
        hit_predicted=column(lambda row, _: _share(row.predicted_tokens, row.compared_tokens)),
        hit_real=column(lambda row, _: _share(row.cached_tokens, row.compared_tokens)),
        first_token_s=percentiles(lambda row: row.first_token),
        whole_s=percentiles(lambda row: row.whole),
        codes={code: rate(lambda row, code=code: row.codes.get(code, 0)) for code in codes},  # type: ignore[misc]
        gauges={
            name: column(lambda row, _, name=name: round(row.gauges[name].mean, 4) if name in row.gauges else None)  # type: ignore[misc]
            for name in gauges
        },
    )


def _share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return round(part / whole, 5) if whole else None


def _rounded(seconds: float | None) -> float | None:
    """Seconds with four digits after the point."""
    return None if seconds is None else round(seconds, 4)
