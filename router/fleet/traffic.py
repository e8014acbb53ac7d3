"""Counts of ended requests: each once, in the row of its adapter, worker and key, reported until it is accepted.

A batch holds what was counted since the report before, and lies in one slice of five seconds by the wall clock, as in
every router. While the orchestrator is away, batches of a slice are merged, then the oldest ones, so that memory is
bounded by the adapters, workers and keys in use.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from lorafleet.service.numbered_log import NumberedLog
from lorafleet.telemetry.histogram import bucket_of
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts

SLICE_S = 5.0
_MOST_BATCHES = 60
_MOST_ROWS = 5000
"""Adapters x workers x keys in one batch; what comes beyond is counted without its adapter and key."""
_FORGET_AFTER_S = 900.0
"""How long it is reported when an adapter was asked for last: a new orchestrator has to learn it."""
_FORGET_DELETED_AFTER_S = 30.0
"""The same of adapters that were deleted: a trainer's old versions would make each report longer."""


_RowKey = tuple[str, str, str, str, str]


@dataclass(slots=True)
class _Batch:
    """Counts of the time from `began_at` to `ended_at`, in the slice that begins at `slice_at`."""

    number: int
    slice_at: float
    began_at: float
    ended_at: float
    rows: dict[_RowKey, RequestCounts]

    def report(self, now: float) -> CountBatch:
        """This batch as it is sent at `now`."""
        rows = (
            CountedRow(adapter=adapter, base_model=base_model, worker=worker, tenant=tenant, key=key, counts=counts)
            for (adapter, base_model, worker, tenant, key), counts in self.rows.items()
        )
        middle = (self.began_at + self.ended_at) / 2
        return CountBatch(number=self.number, age_s=max(0.0, now - middle), rows=tuple(rows))


@dataclass(slots=True)
class TrafficLog:
    """What this router has counted since the last accepted report.

    boot_id   of this process; `numbers`: of its reports
    offset_s  wall clock minus the clock of `now`
    """

    router_id: str
    offset_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _rows: dict[_RowKey, RequestCounts] = field(default_factory=dict)
    _ends_at: float = inf
    _closed_at: float = -inf
    _unaccepted: NumberedLog[_Batch] = field(default_factory=NumberedLog)
    _asked_at: dict[str, float] = field(default_factory=dict)

    def counts_of(
        self,
        now: float,
        *,
        adapter: str = "",
        base_model: str = "",
        worker: str = "",
        tenant: str = "",
        key: str = "",
    ) -> RequestCounts:
        """The counts to which a request that ended just now is added: those of its row, in the present batch."""
        if now >= self._ends_at:
            self._close_batch(self._ends_at)
        if not self._rows:
            self._ends_at = ((now + self.offset_s) // SLICE_S + 1) * SLICE_S - self.offset_s
        row = (adapter, base_model, worker, tenant, key)
        counts = self._rows.get(row)
        if counts is None:
            if len(self._rows) >= _MOST_ROWS:
                row = ("", base_model, worker, tenant, "")
            counts = self._rows.setdefault(row, RequestCounts())
        return counts

    def batches(self, now: float) -> tuple[CountBatch, ...]:
        """All batches that were not accepted yet, the oldest first; closes the present one."""
        if self._rows:
            self._close_batch(min(now, self._ends_at))
        return tuple(batch.report(now) for batch in self._unaccepted.after(0))

    def accept(self, batches: Iterable[CountBatch]) -> None:
        """Drop batches that the orchestrator has accepted, as `batches` returned them."""
        self._unaccepted.forget_up_to(max((batch.number for batch in batches), default=0))

    def asked_ages_s(self, now: float, is_registered: Callable[[str], bool]) -> dict[str, float]:
        """lora_id -> seconds since a request for it was last counted, where that is of use to a new orchestrator."""
        for lora_id, at in list(self._asked_at.items()):
            if now - at > (_FORGET_AFTER_S if is_registered(lora_id) else _FORGET_DELETED_AFTER_S):
                del self._asked_at[lora_id]
        return {lora_id: round(now - at, 3) for lora_id, at in self._asked_at.items()}

    def _close_batch(self, ended_at: float) -> None:
        """Close the present batch; merges others where there are too many."""
        slice_at, number = self._ends_at - SLICE_S, self._unaccepted.next_number
        began_at = max(slice_at, self._closed_at)
        self._unaccepted.add(_Batch(number, slice_at, began_at, ended_at, self._rows))
        self._asked_at |= {adapter: ended_at for adapter, *_ in self._rows if adapter}
        self._rows, self._ends_at, self._closed_at = {}, inf, ended_at
        if len(self._unaccepted) > _MOST_BATCHES:
            self._merge_two()

    def _merge_two(self) -> None:
        """Merge the two oldest batches of one slice, or the two oldest, under the number of the later one."""
        batches = self._unaccepted.after(0)
        pairs = enumerate(itertools.pairwise(batches))
        at = next((at for at, (first, second) in pairs if first.slice_at == second.slice_at), 0)
        first, second = batches[at], batches.pop(at + 1)
        for key, counts in second.rows.items():
            first.rows.setdefault(key, RequestCounts()).add(counts)
        first.number, first.ended_at = second.number, second.ended_at
        self._unaccepted.restart(0)
        for batch in batches:
            self._unaccepted.add(batch, batch.number)


def add_error(counts: RequestCounts, code: str) -> None:
    """Count one request that ended in this error."""
    counts.requests += 1
    counts.add_code(code)


def add_tokens(counts: RequestCounts, prompt: int, output: int, predicted: int, cached: int | None) -> None:
    """Add a request's tokens; `cached` is None where the prediction was not compared."""
    counts.prompt_tokens += prompt
    counts.output_tokens += output
    if cached is not None:
        counts.predicted_tokens += predicted
        counts.cached_tokens += cached
        counts.compared_tokens += prompt


def add_first_token(counts: RequestCounts, first_token_s: float, sent_s: float) -> None:
    """Add the seconds from a request, and from its dispatch (`sent_s`), to the first token of its stream."""
    bucket = bucket_of(first_token_s)
    counts.first_token[bucket] = counts.first_token.get(bucket, 0) + 1
    counts.first_token_sum_s += first_token_s
    counts.engine_first_token_s += sent_s


def add_whole(counts: RequestCounts, whole_s: float) -> None:
    """Add the seconds from a request to the end of its answer."""
    bucket = bucket_of(whole_s)
    counts.whole[bucket] = counts.whole.get(bucket, 0) + 1
