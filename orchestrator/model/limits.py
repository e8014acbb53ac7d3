"""Limits and budgets of keys and tenants, as key files have them; the calendar of budgets.

Core reads this module: it needs the standard library alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple

from annotated_types import Ge, Le

from orchestrator.model.names import RESOURCE

MOST: Final = 2**53
"""The largest integer that floats represent exactly; token buckets use floats."""
Amount = Annotated[float, Ge(1), Le(MOST)]
_TENANT: Final = "tenant "
Period = Literal["day", "month"]
"""Of a budget: a day or a month of the calendar, in UTC."""
PERIODS: Final[tuple[Period, ...]] = ("day", "month")
BudgetUnit = Literal["tokens", "engine_seconds"]
SOFT: Final = "soft_"
"""Before the name of a budget: its soft line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """Limits of a key, or of all keys of a tenant together; None is no limit."""

    __pydantic_config__ = RESOURCE

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    """of prompts and answers"""
    bytes_per_minute: Amount | None = None
    """of bodies, as they are read"""
    concurrent_requests: Annotated[int, Ge(1), Le(MOST)] | None = None
    tokens_per_day: Amount | None = None
    """a budget's hard line: of prompts and answers, as the ledger counts them; further requests are refused"""
    tokens_per_month: Amount | None = None
    engine_seconds_per_day: Amount | None = None
    """seconds of engine work, prefill and decode"""
    engine_seconds_per_month: Amount | None = None
    soft_tokens_per_day: Amount | None = None
    """a budget's soft line: answers, a metric and a log line say that it is reached, and requests still run"""
    soft_tokens_per_month: Amount | None = None
    soft_engine_seconds_per_day: Amount | None = None
    soft_engine_seconds_per_month: Amount | None = None

    def budgets(self) -> Iterator["Budget"]:
        """The budgets among the limits."""
        for name, unit, period in BUDGETS:
            soft, hard = getattr(self, SOFT + name), getattr(self, name)
            if soft is not None or hard is not None:
                yield Budget(name, unit, period, soft, hard)


class Budget(NamedTuple):
    """What may be used in a period of the calendar.

    name  as limits have its hard line
    soft, hard  its lines; None: it has no such line
    """

    name: str
    unit: BudgetUnit
    period: Period
    soft: float | None
    hard: float | None


BUDGETS: Final[tuple[tuple[str, BudgetUnit, Period], ...]] = (
    ("tokens_per_day", "tokens", "day"),
    ("tokens_per_month", "tokens", "month"),
    ("engine_seconds_per_day", "engine_seconds", "day"),
    ("engine_seconds_per_month", "engine_seconds", "month"),
)


class PeriodSpan(NamedTuple):
    """One day or month of the calendar, in UTC: from `began_at` on and before `ends_at`, in Unix seconds."""

    period: Period
    began_at: float
    ends_at: float


def span_at(period: Period, at: float) -> PeriodSpan:
    """The day or month in which a Unix time lies."""
    began = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        ends = began + timedelta(days=1)
    else:
        began = began.replace(day=1)
        ends = (began + timedelta(days=31)).replace(day=1)
    return PeriodSpan(period, began.timestamp(), ends.timestamp())


class LimitedAccount(NamedTuple):
    """Whose limits a request counts against, and these.

    id  the key's id, or that of `tenant_account`
    """

    id: str
    limits: AccountLimits


def tenant_account(tenant: str) -> str:
    """The id of a tenant's account; no key has such an id."""
    return _TENANT + tenant


def accounts_of(tenant: str, key: str) -> tuple[str, ...]:
    """The accounts that a counted row is charged to: its key's and its tenant's, as far as it has them."""
    return (*((key,) if key else ()), *((tenant_account(tenant),) if tenant else ()))


def account_tenant(account: str) -> str | None:
    """The tenant whose account this is; None: it is a key's."""
    return account.removeprefix(_TENANT) if account.startswith(_TENANT) else None
