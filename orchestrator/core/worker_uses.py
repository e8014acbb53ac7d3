"""Requests that routers have sent to each worker, by adapter: kept until the worker has confirmed them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.model.usage import CountBatch

MOST_WORKERS = 10_000
MOST_ADAPTERS = 10_000
"""Adapters of a worker that does not confirm; requests for further ones are not told to it."""


@dataclass(slots=True)
class _Untold:
    """One worker's counts. `told` have been sent under `number` and are not confirmed, `fresh` came after that."""

    number: int = 0
    told: Counter[str] = field(default_factory=Counter)
    fresh: Counter[str] = field(default_factory=Counter)


class WorkerUses:
    """The counts that workers have not confirmed, of workers that have asked for them. One writer: the event loop."""

    def __init__(self) -> None:
        self._untold: dict[str, _Untold] = {}

    def add(self, batches: Iterable[CountBatch]) -> None:
        """Add what a router has counted since its last report."""
        for row in (row for batch in batches for row in batch.rows):
            counts = self._untold.get(row.worker)
            if counts is None or not row.adapter or not row.counts.sent:
                continue
            if row.adapter in counts.fresh or len(counts.fresh) < MOST_ADAPTERS:
                counts.fresh[row.adapter] += row.counts.sent

    def untold(self, worker_id: str, seen: int) -> tuple[int, Mapping[str, int]]:
        """A number, and the requests by adapter that the worker has under no number up to `seen`, its last one."""
        counts = self._untold.pop(worker_id, None) or _Untold()
        self._untold[worker_id] = counts  # the worker that asked longest ago comes first
        if len(self._untold) > MOST_WORKERS:
            self._untold.pop(next(iter(self._untold)))
        if seen == counts.number:
            counts.told.clear()
        if counts.fresh:
            counts.told += counts.fresh
            counts.fresh.clear()
            counts.number += 1
        return counts.number, dict(counts.told)
