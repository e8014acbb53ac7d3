"""Counts of ended requests for the console: kept for a few seconds, then reported once.

Batches are of the same five seconds by the wall clock everywhere, so that each is in one slice of the orchestrator's.
Each is repeated until the orchestrator has accepted it. While it is away, the oldest batches are merged, so that
memory is bounded by the adapters, workers and keys in use.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from lorafleet.service.numbered_log import NumberedLog
from lorafleet.telemetry.histogram import bucket_of
from orchestrator.model.usage import RouterNow, TrafficBatch, TrafficRow

BATCH_S = 5.0
_MOST_BATCHES = 60
_MOST_ROWS = 5000
"""Adapters x workers x keys in one batch; what comes beyond is counted without its adapter and key."""
_MOST_CODES = 50


_RowKey = tuple[str, str, str, str, str]


class TrafficCounts:
    """Counts of one row; the fields are those of wire.TrafficRow."""

    __slots__ = (
        "cached_tokens",
        "codes",
        "cold_s",
        "cold_starts",
        "compared_tokens",
        "decode_s",
        "decode_tokens",
        "first_token",
        "first_token_sum_s",
        "output_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "requests",
        "waited_s",
        "whole",
    )

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.output_tokens = self.cold_starts = 0
        self.predicted_tokens = self.cached_tokens = self.compared_tokens = 0
        self.waited_s = self.cold_s = self.first_token_sum_s = self.decode_s = 0.0
        self.decode_tokens = 0
        self.codes: dict[str, int] = {}
        self.first_token: dict[int, int] = {}
        self.whole: dict[int, int] = {}

    def add_error(self, code: str) -> None:
        """Count one request that ended in this error."""
        self.requests += 1
        known = code if code in self.codes or len(self.codes) < _MOST_CODES else "other"
        self.codes[known] = self.codes.get(known, 0) + 1

    def add_cold_start(self, cold_s: float) -> None:
        """Add a request's wait for its adapter."""
        self.cold_starts += 1
        self.cold_s += cold_s

    def add_tokens(self, prompt: int, output: int, predicted: int, cached: int | None) -> None:
        """Add a request's tokens; `cached` is None where the prediction was not compared."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        if cached is not None:
            self.predicted_tokens += predicted
            self.cached_tokens += cached
            self.compared_tokens += prompt

    def add_times(self, first_token_s: float | None, whole_s: float | None, *, decode_tokens: int) -> None:
        """Add the seconds from a request to its first token and to its whole answer; None: there was none."""
        if first_token_s is not None:
            bucket = bucket_of(first_token_s)
            self.first_token[bucket] = self.first_token.get(bucket, 0) + 1
            self.first_token_sum_s += first_token_s
            if whole_s is not None and decode_tokens:
                self.decode_s += max(0.0, whole_s - first_token_s)
                self.decode_tokens += decode_tokens
        if whole_s is not None:
            bucket = bucket_of(whole_s)
            self.whole[bucket] = self.whole.get(bucket, 0) + 1

    def merge(self, other: "TrafficCounts") -> None:
        """Add another row's counts to these."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for at, count in theirs.items():
                    mine[at] = mine.get(at, 0) + count
            else:
                setattr(self, name, mine + theirs)


@dataclass(slots=True)
class _Batch:
    """Counts of the time from `began_at` to `ended_at`."""

    number: int
    began_at: float
    ended_at: float
    rows: dict[_RowKey, TrafficCounts]

    def wire(self, now: float) -> TrafficBatch:
        """This batch as it is sent at `now`."""
        rows = (
            TrafficRow.model_construct(
                adapter=adapter,
                base_model=base_model,
                worker=worker,
                tenant=tenant,
                key=key,
                **{name: getattr(counts, name) for name in counts.__slots__},
            )
            for (adapter, base_model, worker, tenant, key), counts in self.rows.items()
        )
        middle = (self.began_at + self.ended_at) / 2
        return TrafficBatch.model_construct(number=self.number, age_s=max(0.0, now - middle), rows=tuple(rows))


@dataclass(slots=True)
class TrafficLog:
    """This router's traffic since the last accepted report.

    now_of    how the router is now, for each report
    offset_s  wall clock minus the clock of `now`
    """

    now_of: Callable[[], RouterNow | None] = lambda: None
    offset_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    _rows: dict[_RowKey, TrafficCounts] = field(default_factory=dict)
    _ends_at: float = inf
    _unaccepted: NumberedLog[_Batch] = field(default_factory=NumberedLog)

    def counts_of(
        self,
        now: float,
        *,
        adapter: str = "",
        base_model: str = "",
        worker: str = "",
        tenant: str = "",
        key: str = "",
    ) -> TrafficCounts:
        """The counts to which a request that ended just now is added: those of its row, in the present batch."""
        if now >= self._ends_at:
            self._close_batch()
        if not self._rows:
            self._ends_at = ((now + self.offset_s) // BATCH_S + 1) * BATCH_S - self.offset_s
        row = (adapter, base_model, worker, tenant, key)
        counts = self._rows.get(row)
        if counts is None:
            if len(self._rows) >= _MOST_ROWS:
                row = ("", base_model, worker, tenant, "")
                counts = self._rows.get(row)
            if counts is None:
                counts = self._rows[row] = TrafficCounts()
        return counts

    def batches(self, now: float, *, is_last: bool = False) -> tuple[TrafficBatch, ...]:
        """All batches that were not accepted yet, the oldest first; closes the present one when its time is over.

        is_last  the router stops: the present batch is closed before its time is over
        """
        if self._rows and (is_last or now >= self._ends_at):
            self._close_batch()
        return tuple(batch.wire(now) for batch in self._unaccepted.after(0))

    def _close_batch(self) -> None:
        """Close the present batch; merges the oldest ones where there are too many."""
        number = self._unaccepted.next_number
        self._unaccepted.add(_Batch(number, self._ends_at - BATCH_S, self._ends_at, self._rows))
        self._rows, self._ends_at = {}, inf
        while len(self._unaccepted) > _MOST_BATCHES:
            self._merge_oldest()

    def accept(self, batches: Iterable[TrafficBatch]) -> None:
        """Drop batches that the orchestrator has accepted, as `batches` returned them."""
        self._unaccepted.forget_up_to(max((batch.number for batch in batches), default=0))

    def _merge_oldest(self) -> None:
        """Merge the two oldest batches into one, under the number of the later one."""
        first = self._unaccepted.drop_oldest()
        (second,) = self._unaccepted.after(0, most=1)
        for key, counts in first.rows.items():
            known = second.rows.setdefault(key, TrafficCounts())
            known.merge(counts)
        second.began_at = first.began_at
