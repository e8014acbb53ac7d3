"""What goes into the ledger, and what its rows cost. Pure.

A batch counts once: its source's number is above the highest that the ledger has, and the number is stored with the
rows, in one transaction. So batches may come again after a lost answer, and from a leader to its successor.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.model.ledger import (
    HOUR_S,
    PriceList,
    Prices,
    UsageBatch,
    UsageField,
    UsageKey,
    UsageRows,
    UsageSums,
)
from orchestrator.model.limits import PeriodSpan, accounts_of
from orchestrator.model.usage import CountBatch, CountedRow, Spent

_MOST = 10**15
"""A source that counts more in one batch has miscounted: the sums of a store are 64 bits wide."""
_MILLION = 1e6
_EMPTY = UsageKey()._asdict()
_NOTHING = Spent()


class NewRows(NamedTuple):
    """Rows of batches that were not counted before, added up, and the highest number of each source."""

    rows: UsageRows
    numbers: Mapping[str, int]


def new_rows(batches: Iterable[UsageBatch], counted: Mapping[str, int]) -> NewRows:
    """The rows to add to the ledger.

    batches  those of one source in the order of their numbers
    counted  source -> highest number that the ledger has
    """
    rows: UsageRows = {}
    numbers = dict(counted)
    for batch in batches:
        if batch.number > numbers.get(batch.source, -1):
            numbers[batch.source] = batch.number
            for key, sums in batch.rows.items():
                rows.setdefault(key, UsageSums()).add(sums)
    return NewRows(rows, numbers)


def hour_of(at: float) -> int:
    """The beginning of the hour that a Unix time is in."""
    return int(at // HOUR_S) * HOUR_S


def router_batch(boot_id: str, batch: CountBatch, now: float) -> UsageBatch:
    """A router's batch as it goes into the ledger, in the hour of its middle.

    now  wall clock when the report came
    """
    hour = hour_of(now - batch.age_s)
    rows: UsageRows = {}
    for row in batch.rows:
        rows.setdefault(_key_of(row, hour), UsageSums()).add(_sums_of(row))
    return UsageBatch(source=boot_id, number=batch.number, rows=rows)


def _key_of(row: CountedRow, hour: int) -> UsageKey:
    """The ledger's row of a router's row."""
    names = (row.tenant, row.key, row.adapter, row.version, row.base_model)
    # PostgreSQL stores no NUL character, and a batch that no store takes would come for ever.
    return UsageKey(hour, *(name.replace("\0", "�") for name in names))


def _sums_of(row: CountedRow) -> UsageSums:
    """What the ledger keeps of a router's counts."""
    counts = row.counts
    refused, cancelled, not_whole = counts.refusals, counts.codes.get("499", 0), sum(counts.codes.values())
    return UsageSums(
        requests=min(counts.requests, _MOST),
        succeeded=min(max(0, counts.requests - not_whole), _MOST),
        refused=min(refused, _MOST),
        failed=min(not_whole - refused - cancelled, _MOST),
        cancelled=min(cancelled, _MOST),
        prompt_tokens=min(counts.prompt_tokens, _MOST),
        cached_tokens=min(counts.prompt_cached_tokens, _MOST),
        completion_tokens=min(counts.output_tokens, _MOST),
        prefill_s=max(0.0, counts.work_s - counts.decode_work_s),
        decode_s=counts.decode_work_s,
    )


def group_of(key: UsageKey, group_by: Collection[UsageField]) -> UsageKey:
    """The key with the fields of `group_by` alone; the others are empty."""
    return key._replace(**{name: empty for name, empty in _EMPTY.items() if name not in group_by})


def grouped(rows: Mapping[UsageKey, UsageSums], group_by: Collection[UsageField]) -> UsageRows:
    """The rows added up by some of their fields."""
    found: UsageRows = {}
    for key, sums in rows.items():
        found.setdefault(group_of(key, group_by), UsageSums()).add(sums)
    return found


def cost_of(sums: UsageSums, prices: Prices) -> float:
    """What these sums cost."""
    return (
        max(0, sums.prompt_tokens - sums.cached_tokens) * prices.per_million_prompt_tokens / _MILLION
        + sums.cached_tokens * prices.per_million_cached_tokens / _MILLION
        + sums.completion_tokens * prices.per_million_completion_tokens / _MILLION
        + sums.engine_s * prices.per_engine_second
        + sums.slot_s / HOUR_S * prices.per_slot_hour
    )


def costs_by(
    rows: Mapping[UsageKey, UsageSums], group_by: Collection[UsageField], prices: PriceList
) -> dict[UsageKey, float]:
    """The cost of each group of `grouped`. The rows are kept apart by base model: each has prices of its own."""
    found: dict[UsageKey, float] = {}
    for key, sums in rows.items():
        group = group_of(key, group_by)
        found[group] = found.get(group, 0.0) + cost_of(sums, prices.of(key.base_model))
    return found


@dataclass(slots=True)
class SpentSums:
    """What keys and tenants have spent in some days and months, as the ledger has it.

    by_span  of each day or month that was read from the ledger: account -> what it has spent
    """

    by_span: dict[PeriodSpan, dict[str, Spent]] = field(default_factory=dict)

    def begin(self, span: PeriodSpan, rows: Mapping[UsageKey, UsageSums], now: float) -> None:
        """Take over what the ledger has of a day or month, by tenant and key; forget those that are over."""
        for over in [each for each in self.by_span if each.ends_at <= now]:
            del self.by_span[over]
        accounts = self.by_span[span] = {}
        for key, sums in rows.items():
            _spend(accounts, key, sums)

    def add(self, rows: Mapping[UsageKey, UsageSums]) -> None:
        """Add rows that were added to the ledger."""
        for span, accounts in self.by_span.items():
            for key, sums in rows.items():
                if span.began_at <= key.hour < span.ends_at:
                    _spend(accounts, key, sums)


def _spend(accounts: dict[str, Spent], key: UsageKey, sums: UsageSums) -> None:
    """Add a row to what its key and its tenant have spent."""
    spent = Spent(tokens=sums.tokens, engine_s=sums.engine_s)
    if spent != _NOTHING:
        for account in accounts_of(key.tenant, key.key):
            accounts[account] = accounts.get(account, _NOTHING).plus(spent)
