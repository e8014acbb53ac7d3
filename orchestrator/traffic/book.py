"""Collects traffic: routers' batches and readings of the fleet in, slices of every grain out, to a file and to readers.

One writer: the event loop. Reads of the file run in a thread; slices that are not over are added to them here.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lorafleet.service.loops import forever
from orchestrator.core.traffic import (
    GRAINS,
    Grain,
    SeriesKey,
    SeriesKind,
    TrafficSums,
    grain_for,
    summed,
)
from orchestrator.core.traffic_shares import (
    SHARE_GRAINS,
    ShareBy,
    Shares,
    SharesKey,
    add_shares,
    count_shares,
    share_grain_for,
    share_of,
)
from orchestrator.core.traffic_slice import TrafficSlice
from orchestrator.model.usage import RouterNow, TrafficBatch, TrafficRow
from orchestrator.traffic.file import TrafficFile

READ_EVERY_S = 5.0
_LATE_S = 15.0
"""A slice is closed so long after its end: a router's batch is up to 5 s old, and a lost report is repeated."""
_REWRITE_S = 60.0
_TRIM_S = 60.0
_MOST_NAMES = 1000
"""Series of one kind in one slice; the others are one."""
_SILENT_S = 30.0
_OLDEST_S = 600.0
"""An older batch counts as of then: the finest grain is kept a little longer."""
_MOST_ROUTERS = 1000
_FORGET_ROUTER_S = 3600.0
_CACHED_S = 4.0
_MOST_CACHED = 32
_SHARED_STEPS = frozenset(grain.step_s for grain in SHARE_GRAINS)

Reading = tuple[SeriesKey, str, float]
"""A quantity's name and its value now, in a series."""


@dataclass(slots=True)
class RouterSeen:
    """A router by its last report. `batch`: the last batch that was counted since its boot."""

    boot_id: str
    seen_at: float
    revision_seen: int
    now: RouterNow | None = None
    batch: int = -1
    has_ended: bool = False


class TrafficBook:
    """Traffic of the last two days, by fleet, adapter, base model, worker, tenant and key, and shares of it.

    routers   router_id -> its last report
    readings  the fleet now, read every `READ_EVERY_S` while this orchestrator leads
    """

    def __init__(
        self, file: TrafficFile, *, readings: Callable[[], Iterable[Reading]], wall: Callable[[], float] = time.time
    ) -> None:
        self.file = file
        self.routers: OrderedDict[str, RouterSeen] = OrderedDict()
        self._readings = readings
        self._wall = wall
        self._open: dict[Grain, dict[int, TrafficSlice]] = {grain: {} for grain in GRAINS}
        self._as_written: set[tuple[Grain, int]] = set()  # nothing was counted since their write began
        self._changed_at = float("-inf")
        self._written_at = self._trimmed_at = wall()
        self._cache: dict[tuple[SeriesKind, float], tuple[float, dict[str, TrafficSums]]] = {}

    # -- what comes in ---------------------------------------------------------------------------------------

    def record_report(
        self,
        router_id: str,
        boot_id: str,
        revision_seen: int,
        batches: Iterable[TrafficBatch],
        now: RouterNow | None,
        *,
        is_last: bool = False,
    ) -> None:
        """Record a router's report that was accepted. Batches that were counted before change nothing."""
        wall = self._wall()
        router = self.routers.get(router_id)
        if router is None or router.boot_id != boot_id:
            router = self.routers[router_id] = RouterSeen(boot_id, wall, revision_seen)
        self.routers.move_to_end(router_id)
        router.seen_at, router.revision_seen, router.now, router.has_ended = wall, revision_seen, now, is_last
        for batch in batches:
            if batch.number > router.batch:
                router.batch = batch.number
                self._add_batch(batch, wall)
        oldest = next(iter(self.routers.values()))
        if len(self.routers) > _MOST_ROUTERS or wall - oldest.seen_at > _FORGET_ROUTER_S:
            self.routers.popitem(last=False)

    def read_now(self) -> None:
        """Take one reading of every quantity."""
        readings = list(self._readings())
        for _, found in self._slices_at(self._wall()):
            for series, name, value in readings:
                found.series_of(series).read_gauge(name, value)

    def _add_batch(self, batch: TrafficBatch, wall: float) -> None:
        """Add a batch's rows to the slices of its time."""
        table: dict[SeriesKey, TrafficSums] = {}
        slices = self._slices_at(wall - min(batch.age_s, _OLDEST_S))
        divided = [found.shares for grain, found in slices if grain.step_s in _SHARED_STEPS]
        for row in batch.rows:
            sums = _sums_of(row)
            for series in _series_of(row):
                table.setdefault(series, TrafficSums()).add(sums)
            part = share_of(sums)
            parts: dict[ShareBy, str] = {"adapter": row.adapter, "worker": row.worker, "tenant": row.tenant}
            for shares in divided:
                count_shares(shares, parts, part)
        for _, found in slices:
            for series, sums in table.items():
                found.series_of(series).add(sums)

    def _slices_at(self, at: float) -> list[tuple[Grain, TrafficSlice]]:
        """Each grain with its open slice at this time, begun where there is none.

        One that was closed is read from the file again. So is any after a silence: another process, or our own last
        life, may have begun it.
        """
        wall = self._wall()
        was_silent, self._changed_at = wall - self._changed_at > _SILENT_S, wall
        found = []
        for grain, slices in self._open.items():
            start = grain.start_of(at)
            if start not in slices:
                may_be_known = was_silent or start + grain.step_s + _LATE_S <= wall
                slices[start] = self.file.read_slice(grain, start) if may_be_known else TrafficSlice()
            self._as_written.discard((grain, start))
            found.append((grain, slices[start]))
        return found

    # -- what goes to the file -------------------------------------------------------------------------------

    async def run(self, is_leading: Callable[[], bool]) -> None:
        """Read the fleet and write closed slices, until cancelled. `is_leading`: whether our readings count."""

        async def step() -> None:
            """One reading, and the slices that are over."""
            if is_leading():
                self.read_now()
            await self.write_closed()

        await forever(step, name="traffic", every_s=READ_EVERY_S)

    async def write_closed(self) -> None:
        """Write slices that are over, open ones of coarse grains each minute, and drop what is too old."""
        wall = self._wall()
        is_due = wall - self._written_at >= _REWRITE_S
        work: list[tuple[Grain, int, bool]] = []
        for grain, slices in self._open.items():
            for start in sorted(slices):
                is_over = start + grain.step_s + _LATE_S <= wall
                if is_over or (is_due and grain is not GRAINS[0]):
                    work.append((grain, start, is_over))
        if is_due:
            self._written_at = wall
        for grain, start, is_over in work:
            written = self._open[grain][start].copied()
            self._as_written.add((grain, start))
            await asyncio.to_thread(self.file.write, grain, start, written.bounded(_MOST_NAMES) if is_over else written)
            # A late batch may have come meanwhile: then it is written again.
            if is_over and (grain, start) in self._as_written:
                del self._open[grain][start]
            self._as_written.discard((grain, start))
        if wall - self._trimmed_at >= _TRIM_S:
            self._trimmed_at = wall
            await asyncio.to_thread(self.file.trim, wall)

    def close(self) -> None:
        """Write every open slice, and close the file."""
        for grain, slices in self._open.items():
            for start, written in slices.items():
                self.file.write(grain, start, written.bounded(_MOST_NAMES))
        self.file.close()

    # -- what is read ----------------------------------------------------------------------------------------

    async def series(self, kind: SeriesKind, name: str, range_s: float) -> tuple[Grain, dict[int, TrafficSums]]:
        """The grain for a range up to now, and its slices by their beginning: those in which anything was counted."""
        grain, since = grain_for(range_s), self._wall() - range_s
        slices = dict(self._open[grain])  # one that is written meanwhile may not have been there for the read
        found = await asyncio.to_thread(self.file.read, grain, kind, name, grain.start_of(since))
        for start, held in slices.items():
            if start + grain.step_s > since and (kind, name) in held.series:
                found[start] = summed([held.series[kind, name]])
        return grain, found

    async def shares(self, key: SharesKey, range_s: float) -> Shares:
        """Name -> its part of a series, over a range up to now that is rounded up to whole slices."""
        grain = share_grain_for(range_s)
        since = grain.start_of(self._wall() - range_s)
        open_slices = [dict(slices) for of, slices in self._open.items() if of.step_s == grain.step_s]
        found = await asyncio.to_thread(self.file.read_shares, grain, key, since)
        for slices in open_slices:
            found |= {at: held.shares.get(key, {}) for at, held in slices.items() if at >= since}
        whole: Shares = {}
        for parts in found.values():
            add_shares(whole, parts)
        return whole

    async def totals(self, kind: SeriesKind, range_s: float) -> dict[str, TrafficSums]:
        """Name -> sums over a range up to now, of every series of a kind. Computed again after a few seconds."""
        wall = self._wall()
        cached = self._cache.get((kind, range_s))
        if cached is not None and wall - cached[0] < _CACHED_S:
            return cached[1]
        grain = grain_for(range_s)
        since = grain.start_of(wall - range_s)
        slices = dict(self._open[grain])
        found = await asyncio.to_thread(self._summed_file, grain, kind, since, frozenset(slices))
        for start, held in slices.items():
            if start >= since:
                for (of_kind, name), sums in held.series.items():
                    if of_kind == kind:
                        found.setdefault(name, TrafficSums()).add(sums)
        if len(self._cache) >= _MOST_CACHED:
            self._cache.clear()
        self._cache[kind, range_s] = wall, found
        return found

    def _summed_file(
        self, grain: Grain, kind: SeriesKind, since: float, is_open: frozenset[int]
    ) -> dict[str, TrafficSums]:
        """Name -> sums of the file's slices, without open ones, which are whole in memory alone."""
        found: dict[str, TrafficSums] = {}
        for name, at, sums in self.file.read_all(grain, kind, since):
            if at not in is_open:
                found.setdefault(name, TrafficSums()).add(sums)
        return found


def _series_of(row: TrafficRow) -> Iterable[SeriesKey]:
    """The series that a row counts in."""
    yield "fleet", ""
    if row.adapter:
        yield "adapter", row.adapter
    elif row.base_model:
        yield "base", row.base_model
    if row.worker:
        yield "worker", row.worker
    yield "tenant", row.tenant
    if row.key:
        yield "key", row.key


def _sums_of(row: TrafficRow) -> TrafficSums:
    """A row's counts."""
    return TrafficSums(
        requests=row.requests,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        predicted_tokens=row.predicted_tokens,
        cached_tokens=row.cached_tokens,
        compared_tokens=row.compared_tokens,
        waited_s=row.waited_s,
        cold_starts=row.cold_starts,
        cold_s=row.cold_s,
        codes=dict(row.codes),
        first_token=dict(row.first_token),
        whole=dict(row.whole),
        first_token_sum_s=row.first_token_sum_s,
        decode_s=row.decode_s,
        decode_tokens=row.decode_tokens,
    )
