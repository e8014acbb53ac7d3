"""Collects traffic: routers' batches and readings of the fleet in, slices of every grain out, to a file and to readers.

One writer: the event loop. Reads of the file run in a thread; slices that are not over are added to them here.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from lorafleet.service.loops import forever
from orchestrator.core.traffic import (
    GRAINS,
    SHARE_GRAINS,
    Grain,
    SeriesKey,
    SeriesKind,
    SeriesSums,
    Shares,
    SharesKey,
    TrafficSlice,
    add_shares,
    count_shares,
    grain_for,
    series_of,
    share_grain_for,
)
from orchestrator.model.usage import CircuitState, CountBatch, RequestCounts, RouterNow, sum_into
from orchestrator.traffic.file import TrafficFile
from workers.wire import Metadata

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
_CACHED_S = 4.0
_MOST_CACHED = 32
_SHARED_STEPS = frozenset(grain.step_s for grain in SHARE_GRAINS)

Reading = tuple[SeriesKey, str, float]
"""A quantity's name and its value now, in a series."""


class TrafficBook:
    """Traffic of the last two days, by fleet, adapter, base model, worker, tenant and key, and shares of it.

    readings  the fleet now, read every `READ_EVERY_S` while this orchestrator leads
    """

    def __init__(
        self, file: TrafficFile, *, readings: Callable[[], Iterable[Reading]], wall: Callable[[], float] = time.time
    ) -> None:
        self.file = file
        self._readings = readings
        self._wall = wall
        self._open: dict[Grain, dict[int, TrafficSlice]] = {grain: {} for grain in GRAINS}
        self._as_written: set[tuple[Grain, int]] = set()  # nothing was counted since their write began
        self._changed_at = float("-inf")
        self._written_at = self._trimmed_at = wall()
        self._cache: dict[tuple[SeriesKind, float], tuple[float, dict[str, SeriesSums]]] = {}

    # -- what comes in ---------------------------------------------------------------------------------------

    def add_batches(self, batches: Iterable[CountBatch]) -> None:
        """Add routers' counts to the slices of their times. Each batch must come once."""
        wall = self._wall()
        for batch in batches:
            self._add_batch(batch, wall)

    def read_now(self) -> None:
        """Take one reading of every quantity."""
        readings = list(self._readings())
        for _, found in self._slices_at(self._wall()):
            for series, name, value in readings:
                found.series_of(series).read_gauge(name, value)

    def _add_batch(self, batch: CountBatch, wall: float) -> None:
        """Add a batch's rows to the slices of its time."""
        table: dict[SeriesKey, RequestCounts] = {}
        slices = self._slices_at(wall - min(batch.age_s, _OLDEST_S))
        divided = [found.shares for grain, found in slices if grain.step_s in _SHARED_STEPS]
        for row in batch.rows:
            for series in series_of(row):
                table.setdefault(series, RequestCounts()).add(row.counts)
            for shares in divided:
                count_shares(shares, row)
        for _, found in slices:
            for series, counts in table.items():
                found.series_of(series).counts.add(counts)

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

    async def series(self, kind: SeriesKind, name: str, range_s: float) -> tuple[Grain, dict[int, SeriesSums]]:
        """The grain for a range up to now, and its slices by their beginning: those in which anything was counted."""
        grain, since = grain_for(range_s), self._wall() - range_s
        slices = dict(self._open[grain])  # one that is written meanwhile may not have been there for the read
        found = await asyncio.to_thread(self.file.read, grain, kind, name, grain.start_of(since))
        for start, held in slices.items():
            if start + grain.step_s > since and (kind, name) in held.series:
                found[start] = sum_into(SeriesSums(), [held.series[kind, name]])
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

    async def totals(self, kind: SeriesKind, range_s: float) -> dict[str, SeriesSums]:
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
                        found.setdefault(name, SeriesSums()).add(sums)
        if len(self._cache) >= _MOST_CACHED:
            self._cache.clear()
        self._cache[kind, range_s] = wall, found
        return found

    def _summed_file(
        self, grain: Grain, kind: SeriesKind, since: float, is_open: frozenset[int]
    ) -> dict[str, SeriesSums]:
        """Name -> sums of the file's slices, without open ones, which are whole in memory alone."""
        found: dict[str, SeriesSums] = {}
        for name, at, sums in self.file.read_all(grain, kind, since):
            if at not in is_open:
                found.setdefault(name, SeriesSums()).add(sums)
        return found


class ReportedWorker(Protocol):
    """A worker with its last report."""

    @property
    def report(self) -> Metadata: ...


def fleet_readings(
    workers: Mapping[str, ReportedWorker], routers: Iterable[RouterNow], states: Mapping[str, int]
) -> Iterator[Reading]:
    """Everything that is read every few seconds: load, slots and KV use of each worker, queues of the routers.

    routers  the live routers
    states   worker state -> number of workers
    """
    for worker_id, entry in workers.items():
        load, capacity = entry.report.load, entry.report.lora.capacity
        series: SeriesKey = ("worker", worker_id)
        for name, value in (
            ("running", load.running),
            ("waiting", load.waiting),
            ("waiting_for_slot", load.waiting_for_slot),
            ("kv_usage", load.kv_usage),
            ("loaded", capacity.loaded_count),
        ):
            yield series, name, float(value)
    now = routers_now(routers)
    fleet: SeriesKey = ("fleet", "")
    yield fleet, "in_flight", float(now.in_flight)
    yield fleet, "waiting", float(sum(now.waiting.values()))
    yield fleet, "held", float(sum(now.held.values()))
    for state, count in states.items():
        yield fleet, f"workers_{state}", float(count)
    for tenant, count in _added(now.waiting, now.held).items():
        yield ("tenant", tenant), "waiting", float(count)


def routers_now(routers: Iterable[RouterNow]) -> RouterNow:
    """All routers together: what they have and what waits in them, and the worst circuit of each worker."""
    in_flight, circuits = 0, dict[str, CircuitState]()
    waiting, held, paused = dict[str, int](), dict[str, int](), dict[str, int]()
    for router in routers:
        in_flight += router.in_flight
        waiting, held = _added(waiting, router.waiting), _added(held, router.held)
        paused = _added(paused, router.paused)
        for worker, state in router.circuits.items():
            circuits[worker] = "open" if "open" in (state, circuits.get(worker)) else state
    return RouterNow(in_flight=in_flight, waiting=waiting, held=held, paused=paused, circuits=circuits)


def _added(mine: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    """Counts by name, of both."""
    whole = dict(mine)
    for name, count in theirs.items():
        whole[name] = whole.get(name, 0) + count
    return whole
