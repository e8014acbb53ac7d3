"""Routes for the console: past traffic, by series and by shares; the routers; the fleet as it changes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.service.http import EventStream
from lorafleet.telemetry.histogram import percentile_s
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.core.errors import Forbidden, OrchestratorRequestError
from orchestrator.core.routers import ROUTER_LIVE_S, KnownRouter
from orchestrator.core.traffic import (
    GRAINS,
    OTHER,
    SHARED,
    GaugeSums,
    Grain,
    SeriesKind,
    SeriesSums,
    ShareBy,
    ShareKind,
    Shares,
)
from orchestrator.model.traffic import (
    FleetNow,
    RouterItem,
    RouterList,
    TrafficPoints,
    TrafficSeries,
    TrafficShares,
    TrafficTotal,
    TrafficTotals,
)
from orchestrator.model.usage import RequestCounts, RouterNow, sum_into
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.traffic.book import TrafficBook, routers_now

_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_MOST_RANGE_S = 48 * 3600
# A batch comes up to two seconds after its end: until then its slice would look like a fall.
COMING_S = 2.0
_LEAST_SPAN_S = 5.0
Range = Annotated[float, Query(ge=60, le=_MOST_RANGE_S, description="seconds up to now")]
Kind = Annotated[SeriesKind, Query(description="what is counted")]


def traffic_routes(keys: ApiKeys, reconciler: Reconciler, book: TrafficBook, wall: Callable[[], float]) -> APIRouter:
    """The routes that read traffic. They need scope `view`."""
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
        points = _traffic_points(grain, found, known.keys(), now, range_s)
        whole = sum_into(SeriesSums(), (sums for at, sums in found.items() if at >= now - range_s))
        total = traffic_total(name, whole.counts, range_s, gauges=whole.gauges, shows_lost=seen.is_whole)
        return TrafficSeries(kind=kind, name=name, range_s=range_s, step_s=grain.step_s, total=total, points=points)

    @api.get("/v1/traffic/totals", dependencies=view)
    async def totals(seen: seen_by, kind: Kind = "adapter", range_s: Range = 3600.0) -> TrafficTotals:
        """Every series of a kind that the caller may read, summed over a range."""
        found = await book.totals(kind, range_s)
        rows = [
            traffic_total(name, sums.counts, range_s, gauges=sums.gauges, shows_lost=seen.is_whole)
            for name, sums in found.items()
            if seen.sees_traffic(kind, name)
        ]
        rows.sort(key=lambda row: (-row.requests, row.name))
        return TrafficTotals(kind=kind, range_s=range_s, data=tuple(rows))

    @api.get("/v1/traffic/shares", dependencies=view)
    async def shares(
        seen: seen_by, name: str, by: ShareBy, kind: ShareKind = "adapter", range_s: Range = 3600.0
    ) -> TrafficShares:
        """One adapter's traffic by worker or tenant, or one worker's by adapter or tenant; whole minutes.

        A tenant's key reads those of adapters that are its tenant's alone, by worker; else 403.
        """
        if (kind, by) not in SHARED:
            known = ", ".join(f"kind={of} by={part}" for of, part in SHARED)
            raise OrchestratorRequestError(f"kind={kind} by={by}: no such shares are kept; known: {known}", param="by")
        if not seen.sees_traffic(kind, name) or (by == "tenant" and not seen.is_whole):
            raise Forbidden(
                f"a key of tenant {seen.tenant!r} reads shares of adapters that no other tenant may use, by worker",
                code="fleet_key_needed",
                param="kind",
            )
        found = await book.shares((kind, name, by), range_s)
        return TrafficShares(kind=kind, name=name, by=by, range_s=range_s, data=_share_items(found, range_s))

    return api


def traffic_total(
    name: str,
    counts: RequestCounts,
    range_s: float,
    *,
    gauges: Mapping[str, GaugeSums] = MappingProxyType({}),
    share: float | None = None,
    shows_lost: bool = False,
) -> TrafficTotal:
    """The counts of a range as wire model.

    share       of the series that it is a part of
    shows_lost  whether the reader may learn how much of its prompts others' caches hold: a tenant would learn by that
                what another has asked
    """
    return TrafficTotal(
        name=name,
        requests=counts.requests,
        share=share,
        requests_per_s=round(counts.requests / range_s, 4),
        errors=counts.errors,
        refusals=counts.refusals,
        codes=counts.codes,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        hit_predicted=_share_of_whole(counts.predicted_tokens, counts.compared_tokens),
        hit_real=_share_of_whole(counts.cached_tokens, counts.compared_tokens),
        hit_lost=_share_of_whole(counts.lost_tokens, counts.sampled_tokens) if shows_lost else None,
        waited_s=_share_of_whole(counts.waited_s, counts.requests),
        cold_starts=counts.cold_starts,
        cold_s=_share_of_whole(counts.cold_s, counts.cold_starts),
        first_token_s=_histogram_percentiles(counts.first_token),
        whole_s=_histogram_percentiles(counts.whole),
        token_s=_share_of_whole(counts.decode_s, counts.decode_tokens),
        gauges={quantity: round(read.mean, 4) for quantity, read in gauges.items()},
    )


def _share_items(shares: Shares, range_s: float) -> tuple[TrafficTotal, ...]:
    """The shares as wire models, the one with the most requests first, and `OTHER` last."""
    whole = sum(part.requests for part in shares.values())
    items = [
        traffic_total(name, part, range_s, share=_share_of_whole(part.requests, whole) or 0.0)
        for name, part in shares.items()
    ]
    return tuple(sorted(items, key=lambda item: (item.name == OTHER, -item.requests, item.name)))


def _histogram_percentiles(counts: Mapping[int, int]) -> dict[str, float | None]:
    """The percentiles of a histogram."""
    return {label: _rounded_seconds(percentile_s(counts, share)) for label, share in _SHARES.items()}


def _traffic_points(
    grain: Grain, found: Mapping[int, SeriesSums], known: Iterable[int], now: float, range_s: float
) -> TrafficPoints:
    """The columns of a series: each slice of the range that is whole, or nearly so.

    known  slices in which a series without a row had no traffic; in others nothing is known
    """
    step_s, nothing, recorded = grain.step_s, SeriesSums(), frozenset(known)
    starts = range(grain.start_of(now - range_s) + step_s, int(now - COMING_S - _LEAST_SPAN_S) + 1, step_s)
    # The present slice of a coarse grain counts up to now.
    spans = {at: min(float(step_s), max(_LEAST_SPAN_S, now - COMING_S - at)) for at in starts}
    ats = [at for at in starts if grain is not GRAINS[0] or at + step_s <= now - COMING_S]
    rows = [found.get(at, nothing if at in recorded else None) for at in ats]

    def column(value: Callable[[RequestCounts, float], float | None]) -> tuple[float | None, ...]:
        """One value of every slice."""
        return tuple(None if row is None else value(row.counts, spans[at]) for at, row in zip(ats, rows, strict=True))

    def rate(count: Callable[[RequestCounts], float]) -> tuple[float | None, ...]:
        """A count by second."""
        return column(lambda row, span_s: round(count(row) / span_s, 4))

    def percentiles(counts: Callable[[RequestCounts], Mapping[int, int]]) -> dict[str, tuple[float | None, ...]]:
        """The percentiles of a histogram."""
        return {
            label: column(lambda row, _, share=share: _rounded_seconds(percentile_s(counts(row), share)))  # type: ignore[misc]
            for label, share in _SHARES.items()
        }

    codes = sorted({code for row in rows if row is not None for code in row.counts.codes})
    gauges = sorted({name for row in rows if row is not None for name in row.gauges})
    cold_starts = tuple(None if row is None else row.counts.cold_starts for row in rows)
    return TrafficPoints(
        at=tuple(ats),
        requests_per_s=rate(lambda row: row.requests),
        errors_per_s=rate(lambda row: row.errors),
        refusals_per_s=rate(lambda row: row.refusals),
        prompt_tokens_per_s=rate(lambda row: row.prompt_tokens),
        output_tokens_per_s=rate(lambda row: row.output_tokens),
        waited_s=column(lambda row, _: _share_of_whole(row.waited_s, row.requests)),
        cold_starts=cold_starts,
        hit_predicted=column(lambda row, _: _share_of_whole(row.predicted_tokens, row.compared_tokens)),
        hit_real=column(lambda row, _: _share_of_whole(row.cached_tokens, row.compared_tokens)),
        first_token_s=percentiles(lambda row: row.first_token),
        whole_s=percentiles(lambda row: row.whole),
        codes={code: rate(lambda row, code=code: row.codes.get(code, 0)) for code in codes},  # type: ignore[misc]
        gauges={
            name: tuple(
                None if row is None or name not in row.gauges else round(row.gauges[name].mean, 4) for row in rows
            )
            for name in gauges
        },
    )


def _share_of_whole(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return round(part / whole, 5) if whole else None


def _rounded_seconds(seconds: float | None) -> float | None:
    """Seconds with four digits after the point."""
    return None if seconds is None else round(seconds, 4)


# Between two messages, with and without a change in the catalog.
_LIVE_EVERY_S = 2.0
_LEAST_PAUSE_S = 0.3


def live_routes(
    keys: ApiKeys,
    reconciler: Reconciler,
    workers_by_state: Callable[[], Mapping[str, int]],
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> APIRouter:
    """The routes that read routers, and the fleet now. They need scope `view`."""
    api = APIRouter(tags=["traffic"])
    seen_by = Annotated[TenantView, Depends(tenant_view_of(reconciler.store))]

    @api.get("/v1/routers", dependencies=[Depends(requires(keys, "view", is_for_fleet=True))])
    async def routers() -> RouterList:
        """Routers that have reported within the last hour."""
        now = clock()
        items = (_router_item(router, now) for _, router in sorted(reconciler.demand.routers.by_id.items()))
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
        now, live = wall(), reconciler.demand.routers.live(clock())
        return FleetNow(
            at=now,
            revision=reconciler.catalog.revision,
            epoch=reconciler.store.epoch,
            workers=dict(workers_by_state()),
            routers=len(live),
            now=routers_now(router.report.now for router in live),
            slice_at=GRAINS[0].start_of(now - COMING_S),
        )

    return api


def _shown_to(tenant: str | None, now: FleetNow) -> FleetNow:
    """The message as a caller of this tenant may see it: what waits of its own requests; None: everything."""
    if tenant is None:
        return now
    waiting, held, paused = (
        {name: count for name, count in counts.items() if name == tenant}
        for counts in (now.now.waiting, now.now.held, now.now.paused)
    )
    own = RouterNow(waiting=waiting, held=held, paused=paused)
    return now.model_copy(update={"workers": {}, "routers": 0, "now": own})


def _router_item(router: KnownRouter, now: float) -> RouterItem:
    """A router as wire model."""
    report, silent_s = router.report, now - router.reported_at
    return RouterItem(
        id=report.router_id,
        state="ended" if report.is_last else "live" if silent_s < ROUTER_LIVE_S else "silent",
        age_s=round(max(0.0, silent_s), 1),
        revision_seen=report.revision_seen,
        now=report.now,
    )
