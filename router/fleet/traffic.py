"""Counts of ended requests: each once, in the row of its adapter, worker and key, reported until it is accepted.

A batch holds what was counted since the report before, and lies in one slice of five seconds by the wall clock, as in
every router. A batch that was sent keeps its number and its counts until it is accepted: it may have been counted, and
only its answer lost. While the orchestrator is away, batches that were never sent are merged, first those of one slice,
so that memory is bounded by the adapters, workers and keys in use.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from lorafleet.telemetry.histogram import bucket_of
from orchestrator.model.limits import accounts_of
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts, Spent
from router.protocols.usage import EngineUsage

SLICE_S = 5.0
_MOST_SENT = 30
"""Batches that were sent and are not accepted yet; further ones wait unsent, where they can be merged."""
_MOST_UNSENT = 30
_MOST_ROWS = 5000
"""Adapters x workers x keys in one batch; what comes beyond is counted without its adapter and key."""
MOST_SENT_ROWS = 20_000
"""Rows in one report, and at most one batch more: the orchestrator refuses a body of too many values."""
_FORGET_AFTER_S = 900.0
"""How long it is reported when an adapter was asked for last: a new orchestrator has to learn it."""
_FORGET_DELETED_AFTER_S = 30.0
"""The same of adapters that were deleted: a trainer's old versions would make each report longer."""
_NOTHING = Spent()


_RowKey = tuple[str, str, str, str, str, str]


@dataclass(slots=True)
class _Batch:
    """Counts of the time from `began_at` to `ended_at`, in the slice that begins at `slice_at`."""

    slice_at: float
    began_at: float
    ended_at: float
    rows: dict[_RowKey, RequestCounts]

    def report(self, number: int, now: float) -> CountBatch:
        """This batch as it is sent at `now`."""
        rows = (
            CountedRow(
                adapter=adapter,
                version=version,
                base_model=base_model,
                worker=worker,
                tenant=tenant,
                key=key,
                counts=counts,
            )
            for (adapter, version, base_model, worker, tenant, key), counts in self.rows.items()
        )
        middle = (self.began_at + self.ended_at) / 2
        return CountBatch(number=number, age_s=max(0.0, now - middle), rows=tuple(rows))

    def merge(self, later: "_Batch") -> None:
        """Add the counts of a later batch to these."""
        for key, counts in later.rows.items():
            _row_of(self.rows, key).add(counts)
        self.ended_at = later.ended_at


def _row_of(rows: dict[_RowKey, RequestCounts], key: _RowKey) -> RequestCounts:
    """The counts of a row, begun where there are none; in a batch with too many rows those without adapter and key."""
    counts = rows.get(key)
    if counts is None:
        if len(rows) >= _MOST_ROWS:
            _, _, base_model, worker, tenant, _ = key
            key = ("", "", base_model, worker, tenant, "")
        counts = rows.setdefault(key, RequestCounts())
    return counts


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
    _sent: dict[int, _Batch] = field(default_factory=dict)  # by their numbers, the oldest first
    _unsent: list[_Batch] = field(default_factory=list)
    _batch_numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _asked_at: dict[str, float] = field(default_factory=dict)

    def counts_of(
        self,
        now: float,
        *,
        adapter: str = "",
        version: str = "",
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
        row = (adapter, version, base_model, worker, tenant, key)
        counts = self._rows.get(row)
        return _row_of(self._rows, row) if counts is None else counts

    def batches(self, now: float) -> tuple[CountBatch, ...]:
        """The batches to send, the oldest first: those that were sent and not accepted, and then further ones.

        Closes the present one.
        """
        if self._rows:
            self._close_batch(min(now, self._ends_at))
        rows = sum(len(batch.rows) for batch in self._sent.values())
        while self._unsent and len(self._sent) < _MOST_SENT and rows < MOST_SENT_ROWS:
            rows += len(self._unsent[0].rows)
            self._sent[next(self._batch_numbers)] = self._unsent.pop(0)
        return tuple(batch.report(number, now) for number, batch in self._sent.items())

    def accept(self, batches: Iterable[CountBatch]) -> None:
        """Drop batches that the orchestrator has accepted, as `batches` returned them."""
        for batch in batches:
            self._sent.pop(batch.number, None)

    def spent_unaccepted(self, since: float, now: float) -> dict[str, Spent]:
        """Key's id or tenant's account -> what was counted of it from a time on, and is not accepted yet.

        A batch counts by its middle, as in the ledger.
        """
        present = _Batch(self._ends_at - SLICE_S, max(self._ends_at - SLICE_S, self._closed_at), now, self._rows)
        found: dict[str, Spent] = {}
        for batch in (*self._sent.values(), *self._unsent, present):
            if (batch.began_at + batch.ended_at) / 2 >= since:
                for (*_, tenant, key), counts in batch.rows.items():
                    spent = Spent(tokens=counts.prompt_tokens + counts.output_tokens, engine_s=counts.work_s)
                    for account in accounts_of(tenant, key):
                        found[account] = found.get(account, _NOTHING).plus(spent)
        return found

    def asked_ages_s(self, now: float, is_registered: Callable[[str], bool]) -> dict[str, float]:
        """lora_id -> seconds since a request for it was last counted, where that is of use to a new orchestrator."""
        for lora_id, at in list(self._asked_at.items()):
            if now - at > (_FORGET_AFTER_S if is_registered(lora_id) else _FORGET_DELETED_AFTER_S):
                del self._asked_at[lora_id]
        return {lora_id: round(now - at, 3) for lora_id, at in self._asked_at.items()}

    def _close_batch(self, ended_at: float) -> None:
        """Close the present batch; merges others where there are too many."""
        slice_at = self._ends_at - SLICE_S
        began_at = max(slice_at, self._closed_at)
        self._unsent.append(_Batch(slice_at, began_at, ended_at, self._rows))
        self._asked_at |= {adapter: ended_at for adapter, *_ in self._rows if adapter}
        self._rows, self._ends_at, self._closed_at = {}, inf, ended_at
        if len(self._unsent) > _MOST_UNSENT:
            self._merge_two()

    def _merge_two(self) -> None:
        """Merge the two oldest unsent batches of one slice, or the two oldest."""
        pairs = enumerate(itertools.pairwise(self._unsent))
        at = next((at for at, (first, second) in pairs if first.slice_at == second.slice_at), 0)
        self._unsent[at].merge(self._unsent.pop(at + 1))


def add_error(counts: RequestCounts, code: str) -> None:
    """Count one request that ended in this error."""
    counts.requests += 1
    counts.add_code(code)


def add_tokens(
    counts: RequestCounts, usage: EngineUsage | None, output: int, predicted: int, cached: int | None
) -> None:
    """Add a request's tokens; `cached` is None where the prediction was not compared."""
    prompt = 0
    if usage is not None:
        prompt = usage.prompt_tokens
        counts.prompt_tokens += prompt
        counts.prompt_cached_tokens += usage.cached_tokens or 0
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
