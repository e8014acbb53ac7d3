"""The ledger: usage by tenant, key, adapter, version, base model and hour, in the store beside the history.

It is written around `IntentStore`, whose writes are changes of intent. Reports that come together are one transaction.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import structlog

from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable
from orchestrator.core.ledger import SpentSums, costs_by, grouped, router_batch
from orchestrator.model.ledger import PriceList, UsageBatch, UsageGroup, UsageKey, UsageQuery, UsageRows
from orchestrator.model.limits import PERIODS, PeriodSpan, span_at
from orchestrator.model.usage import AccountsSpent, CountBatch
from orchestrator.store.backend import StoreBackend

log = structlog.get_logger()

_APART_S = 0.05  # between two transactions, each of which waits for the disk
_ANSWER_S = 2.0  # a router must be heard more often than that, whatever the store does
_RETRY_S = 1.0
_PAGE_GROUPS = 20_000  # tenants and keys that are read at a time


@dataclass(slots=True)
class _PendingBatches:
    """Batches that wait for their transaction, until it has ended."""

    batches: Sequence[UsageBatch]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: OrchestratorError | None = None


class UsagePage(NamedTuple):
    """Some groups of rows, and what each costs. `last`: the last group, where there are more behind it."""

    rows: UsageRows
    costs: Mapping[UsageKey, float]
    last: UsageGroup | None = None


class Ledger:
    """Adds batches to the store's ledger, and reads it."""

    def __init__(self, backend: StoreBackend, *, wall: Callable[[], float] = time.time) -> None:
        self._backend = backend
        self._wall = wall
        self._pending: list[_PendingBatches] = []
        self._writing: asyncio.Task[None] | None = None
        # Of the term's epoch; the lock keeps what is written from what is read into them.
        self._spent = SpentSums()
        self._spent_epoch = -1
        self._spent_lock = asyncio.Lock()

    async def add_counts(self, boot_id: str, batches: Iterable[CountBatch]) -> None:
        """Add what a router has counted, as `add`."""
        now = self._wall()
        await self.add([router_batch(boot_id, batch, now) for batch in batches])

    async def add(self, batches: Sequence[UsageBatch]) -> None:
        """Add batches, each once, however often it comes; they are durable on return.

        Those of one source come in the order of their numbers. Raises OrchestratorError: the batches may be written or
        not, and must come again.
        """
        if not batches or not self._backend.has_ledger:
            return
        pending = _PendingBatches(batches)
        self._pending.append(pending)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending())
        try:
            async with asyncio.timeout(_ANSWER_S):
                await pending.over.wait()
        except TimeoutError:
            raise OrchestratorUnavailable(
                f"the store has not taken the report in {_ANSWER_S:g} s; send it again",
                code="store_unreachable",
                retry_after_s=_RETRY_S,
            ) from None
        if pending.error is not None:
            raise pending.error

    async def _write_pending(self) -> None:
        """Write what is pending, and what comes meanwhile."""
        try:
            while pending := self._pending:
                self._pending = []
                try:
                    await self._write([batch for each in pending for batch in each.batches])
                except OrchestratorError as exc:
                    self._end(pending, exc)
                except Exception as exc:
                    log.exception("usage not written")
                    self._end(pending, OrchestratorUnavailable(f"usage not written: {exc!r}", code="store_unreachable"))
                else:
                    self._end(pending, None)
                await asyncio.sleep(_APART_S)
        finally:
            self._writing = None

    async def _write(self, batches: Sequence[UsageBatch]) -> None:
        """Write batches, and add what is new to the sums that budgets need. Raises what the store does."""
        async with self._spent_lock:
            try:
                self._spent.add(await self._backend.add_usage(batches, self._wall()))
            except BaseException:
                self._spent = SpentSums()  # they may be written: the sums are read anew
                raise

    def _end(self, pending: Iterable[_PendingBatches], error: OrchestratorError | None) -> None:
        """Tell who waits for these batches how their transaction has ended."""
        for each in pending:
            each.error = error
            each.over.set()

    async def rows(self, query: UsageQuery) -> UsageRows:
        """The rows of a query. Raises OrchestratorError."""
        return await self._backend.usage(query)

    async def page(self, query: UsageQuery, limit: int, prices: PriceList | None) -> UsagePage:
        """The first groups of a query, with their costs if there are prices. Raises OrchestratorError."""
        found, last = await self.rows(replace(query, limit=limit + 1)), None
        if len(found) > limit:
            found.popitem()
            key = next(reversed(found))
            last = tuple(getattr(key, name) for name in query.group_by)
        if prices is None:
            return UsagePage(found, {}, last)
        if "base_model" not in query.group_by:  # each has prices of its own
            found = await self.rows(replace(query, up_to=last, group_by=(*query.group_by, "base_model")))
        return UsagePage(grouped(found, query.group_by), costs_by(found, query.group_by, prices), last)

    async def spent(self, budgets: Sequence[str], epoch: int) -> AccountsSpent | None:
        """What the accounts of these budgets have spent in the present day or month; None without budgets or ledger.

        budgets  each as "<day|month> <account>"; others count as nothing spent
        epoch    of our term: an earlier one's sums may lack what another leader has written since

        Holds all that `add` has returned for. Raises OrchestratorError.
        """
        if not budgets or not self._backend.has_ledger:
            return None
        at = self._wall()
        spans: dict[str, PeriodSpan] = {period: span_at(period, at) for period in PERIODS}
        found = {}
        async with self._spent_lock:
            if epoch != self._spent_epoch:
                self._spent, self._spent_epoch = SpentSums(), epoch
            for name in budgets:
                period, _, account = name.partition(" ")
                if (span := spans.get(period)) is None:
                    continue
                if span not in self._spent.by_span:
                    self._spent.begin(span, await self._rows_by_key(span), at)
                if (spent := self._spent.by_span[span].get(account)) is not None:
                    found[name] = spent
        return AccountsSpent(at=at, accounts=found)

    async def _rows_by_key(self, span: PeriodSpan) -> UsageRows:
        """What each tenant and key has used in a day or month. Raises OrchestratorError."""
        query = UsageQuery(since=span.began_at, until=span.ends_at, group_by=("tenant", "key"), limit=_PAGE_GROUPS)
        whole: UsageRows = {}
        while True:
            rows = await self.rows(query)
            whole |= rows
            if len(rows) < _PAGE_GROUPS:
                return whole
            last = next(reversed(rows))
            query = replace(query, after=(last.tenant, last.key))

    async def close(self) -> None:
        """Wait for the transaction under way."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
