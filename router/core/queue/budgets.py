"""Budgets of keys and tenants: tokens or engine-seconds of a day or a month, in UTC, with a soft and a hard line.

Pure: time is an argument. What was spent is the ledger's sum, as the last answer to a usage report had it, and what
this router has counted since. Day and month are those of the orchestrator's clock, of which each answer tells the time.
Without an answer this router goes on by its own counts; a new day or month begins with nothing spent.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

from orchestrator.model.limits import (
    PERIODS,
    AccountLimits,
    Budget,
    LimitedAccount,
    Period,
    PeriodSpan,
    account_tenant,
    span_at,
)
from orchestrator.model.usage import AccountsSpent, Spent
from router.core.errors import BudgetExhausted
from router.core.queue.quota import TENANT_LIMIT, duration_text

MOST_ASKED = 2000
"""Budgets that one report asks for: first of accounts in use, then of others in turn."""
# An account that is in no key file, such as a token's subject, is forgotten so long after its last request, unless a
# budget of it is exhausted: what it has spent is asked for when it comes again.
_FORGET_AFTER_S = 3600.0
BUDGET_HEADER = "x-lorafleet-budget"
_UNITS = {"tokens": "tokens", "engine_seconds": "engine-seconds"}
_NOTHING = Spent()


class Spending(NamedTuple):
    """A budget, and what was spent of it in the present day or month."""

    budget: Budget
    spent: float
    ends_at: float

    @property
    def is_exhausted(self) -> bool:
        """Whether the hard line is reached."""
        return self.budget.hard is not None and self.spent >= self.budget.hard

    @property
    def line(self) -> str:
        """The highest line that is reached: `hard`, `soft`, or none."""
        if self.is_exhausted:
            return "hard"
        return "soft" if self.budget.soft is not None and self.spent >= self.budget.soft else ""


class ReachedLine(NamedTuple):
    """A line of a budget that an account has reached. `limit`: the budget's name; of a tenant with TENANT_LIMIT."""

    account: str
    limit: str
    line: str
    spending: Spending


@dataclass(slots=True)
class _SpanSpent:
    """What an account has spent in one day or month. told: by the ledger; own: counted here since."""

    span: PeriodSpan
    told: Spent = _NOTHING
    own: Spent = _NOTHING


@dataclass(slots=True)
class _BudgetAccount:
    """An account with budgets.

    used_at  of its last request, by the clock of `now`
    reached  (budget's name, line, end of its day or month) that were noted
    """

    limits: AccountLimits
    used_at: float
    by_period: dict[Period, _SpanSpent] = field(default_factory=dict)
    reached: set[tuple[str, str, float]] = field(default_factory=set)


@dataclass(slots=True)
class Budgets:
    """What accounts with budgets have spent. One writer: the event loop.

    offset_s    the orchestrator's wall clock minus the clock of `now`; this machine's until there was an answer
    has_ledger  whether the last answer told what was spent
    """

    offset_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    accounts: dict[str, _BudgetAccount] = field(default_factory=dict)
    has_ledger: bool = True
    _to_ask: set[str] = field(default_factory=set)  # used since the last report
    _to_note: set[str] = field(default_factory=set)  # used since reached lines were last noted

    def check(self, limited: Iterable[LimitedAccount], now: float) -> None:
        """Raise BudgetExhausted where a budget of these accounts has reached its hard line.

        limited  as the key files have them now
        """
        for account_id, limits in limited:
            if (account := self._account(account_id, limits, now)) is not None:
                self._use(account_id, account, now)
        self.check_again(limited, now)

    def check_again(self, limited: Iterable[LimitedAccount], now: float) -> None:
        """Raise BudgetExhausted as `check`, for a request that has waited: by the lines of the latest request."""
        for account_id, _ in limited:
            if spent := [each for each in self.spendings(account_id, now) if each.is_exhausted]:
                # Until the last of them is reset.
                raise _exhausted(account_id, max(spent, key=lambda each: each.ends_at), now + self.offset_s)

    def charge(self, limited: Iterable[LimitedAccount], spent: Spent, now: float) -> bool:
        """Add what a request has spent, as it is reported to the ledger; whether that has exhausted a budget."""
        has_exhausted = False
        for account_id, _ in limited:
            account = self.accounts.get(account_id)
            if account is None:
                continue
            before = self._is_exhausted(account_id, now)
            for period in account.by_period:
                each = self._span_spent(account, period, now)
                each.own = each.own.plus(spent)
            self._use(account_id, account, now)
            has_exhausted |= not before and self._is_exhausted(account_id, now)
        return has_exhausted

    def headers(self, limited: Iterable[LimitedAccount], now: float) -> dict[str, str]:
        """The header of an answer that tells the budget nearest to its end, of those that have reached a line."""
        found: list[tuple[float, str]] = []
        for account_id, _ in limited:
            for each in self.spendings(account_id, now):
                if each.line:
                    limit, most = _limit_name(account_id, each.budget), each.budget.hard or each.budget.soft or 1.0
                    lines = ", ".join(
                        f"{line}={value:g}"
                        for line, value in (("soft", each.budget.soft), ("hard", each.budget.hard))
                        if value is not None
                    )
                    text = f"{limit}; spent={each.spent:.0f}, {lines}, resets={_time_text(each.ends_at)}"
                    found.append((each.spent / most, text))
        return {BUDGET_HEADER: max(found)[1]} if found else {}

    def spendings(self, account_id: str, now: float) -> list[Spending]:
        """What was spent of each budget of an account; none of an account that has none."""
        found: list[Spending] = []
        if (account := self.accounts.get(account_id)) is None:
            return found
        for budget in account.limits.budgets():
            each = self._span_spent(account, budget.period, now)
            spent = each.told.plus(each.own)
            amount = spent.tokens if budget.unit == "tokens" else spent.engine_s
            found.append(Spending(budget, amount, each.span.ends_at))
        return found

    def follow(self, in_files: Mapping[str, AccountLimits], now: float) -> None:
        """Go by these accounts of the key files, and forget those that nobody uses any more."""
        for account_id, limits in in_files.items():
            self._account(account_id, limits, now)
        for account_id, account in list(self.accounts.items()):
            if account_id not in in_files and self._is_idle(account_id, account, now):
                del self.accounts[account_id]

    def asked(self) -> tuple[str, ...]:
        """The budgets whose spending the next report asks for, each as "<period> <account>"."""
        found: list[str] = []
        used, self._to_ask = self._to_ask, set()
        others = (account_id for account_id in self.accounts if account_id not in used)
        for account_id in islice((*used, *others), MOST_ASKED):
            account = self.accounts.get(account_id)
            if account is not None:
                found += [f"{period} {account_id}" for period in account.by_period]
        found = found[:MOST_ASKED]
        for name in found:  # the others have their turn next time
            account_id = name.partition(" ")[2]
            self.accounts[account_id] = self.accounts.pop(account_id)
        return tuple(found)

    def tell(
        self,
        asked: Iterable[str],
        answer: AccountsSpent,
        unaccepted: Callable[[float], Mapping[str, Spent]],
        now: float,
    ) -> bool:
        """Take over what the ledger has of these budgets; whether that has exhausted one.

        unaccepted  what this router has counted from a time on, by the clock of `now`, that the ledger lacks
        """
        self.offset_s, has_exhausted = answer.at - now, False
        spans: dict[str, PeriodSpan] = {period: span_at(period, answer.at) for period in PERIODS}
        own = {period: unaccepted(span.began_at - self.offset_s) for period, span in spans.items()}
        for name in asked:
            period, _, account_id = name.partition(" ")
            account, span = self.accounts.get(account_id), spans[period]
            if account is None or span.period not in account.by_period:
                continue
            before = self._is_exhausted(account_id, now)
            told = answer.accounts.get(name, _NOTHING)
            account.by_period[span.period] = _SpanSpent(span, told, own[period].get(account_id, _NOTHING))
            has_exhausted |= not before and self._is_exhausted(account_id, now)
        return has_exhausted

    def reached_lines(self, now: float) -> list[ReachedLine]:
        """The lines that accounts have reached since the last call, of those used since then: each once a period."""
        found = []
        used, self._to_note = self._to_note, set()
        for account_id in used:
            if (account := self.accounts.get(account_id)) is None:
                continue
            account.reached = {mark for mark in account.reached if mark[2] > now + self.offset_s}
            for each in self.spendings(account_id, now):
                for line, most in (("soft", each.budget.soft), ("hard", each.budget.hard)):
                    mark = (each.budget.name, line, each.ends_at)
                    if most is not None and each.spent >= most and mark not in account.reached:
                        account.reached.add(mark)
                        found.append(ReachedLine(account_id, _limit_name(account_id, each.budget), line, each))
        return found

    def _use(self, account_id: str, account: _BudgetAccount, now: float) -> None:
        """Note a use of the account."""
        account.used_at = now
        self._to_ask.add(account_id)
        self._to_note.add(account_id)

    def _account(self, account_id: str, limits: AccountLimits, now: float) -> _BudgetAccount | None:
        """The account, opened where there is none, with these limits from now on. None without budgets."""
        account = self.accounts.get(account_id)
        if account is not None and account.limits is limits:
            return account
        periods = {budget.period for budget in limits.budgets()}
        if not periods:
            self.accounts.pop(account_id, None)
            return None
        if account is None:
            self.accounts[account_id] = account = _BudgetAccount(limits, now)
        account.limits = limits
        at = now + self.offset_s
        account.by_period = {
            period: account.by_period.get(period) or _SpanSpent(span_at(period, at)) for period in sorted(periods)
        }
        return account

    def _span_spent(self, account: _BudgetAccount, period: Period, now: float) -> _SpanSpent:
        """What the account has spent in the present day or month; nothing yet in one that has just begun."""
        found, at = account.by_period[period], now + self.offset_s
        if at >= found.span.ends_at:
            account.by_period[period] = found = _SpanSpent(span_at(period, at))
        return found

    def _is_exhausted(self, account_id: str, now: float) -> bool:
        """Whether a budget of the account has reached its hard line."""
        return any(each.is_exhausted for each in self.spendings(account_id, now))

    def _is_idle(self, account_id: str, account: _BudgetAccount, now: float) -> bool:
        """Whether it may be forgotten: nobody has used it for long, and the next request would run."""
        return now - account.used_at >= _FORGET_AFTER_S and not self._is_exhausted(account_id, now)


def _limit_name(account_id: str, budget: Budget) -> str:
    """A budget's name in errors and counts."""
    return budget.name if account_tenant(account_id) is None else TENANT_LIMIT + budget.name


def _time_text(at: float) -> str:
    """Unix seconds as UTC text."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _exhausted(account_id: str, spending: Spending, at: float) -> BudgetExhausted:
    """The error for a budget that has reached its hard line."""
    budget, tenant = spending.budget, account_tenant(account_id)
    owner = "this API key has" if tenant is None else f"all keys of tenant {tenant} together have"
    retry_after_s = max(1.0, spending.ends_at - at)
    return BudgetExhausted(
        f"{owner} a budget of {budget.hard:.15g} {_UNITS[budget.unit]} a {budget.period}, of which {spending.spent:.0f}"
        f" are spent; it is reset at {_time_text(spending.ends_at)}, in {duration_text(retry_after_s)}",
        retry_after_s=retry_after_s,
        limit=_limit_name(account_id, budget),
    )
