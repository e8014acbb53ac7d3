"""The calendar of budgets, in UTC."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.model.limits import PERIODS, AccountLimits, Budget, span_at


def unix(text):
    return datetime.fromisoformat(f"{text}+00:00").timestamp()


@pytest.mark.parametrize(
    ("at", "period", "began", "ends"),
    [
        ("2026-11-29T00:00:00", "day", "2026-11-29", "2026-11-30"),
        ("2026-11-29T23:59:59.999", "day", "2026-11-29", "2026-11-30"),
        ("2026-11-30T23:59:59.999", "month", "2026-11-01", "2026-12-01"),
        ("2026-12-31T12:00:00", "month", "2026-12-01", "2027-01-01"),
        ("2026-12-31T12:00:00", "day", "2026-12-31", "2027-01-01"),
        ("2027-01-31T00:00:00", "month", "2027-01-01", "2027-02-01"),
        ("2027-02-28T23:59:59", "month", "2027-02-01", "2027-03-01"),
        ("2028-02-28T23:59:59", "day", "2028-02-28", "2028-02-29"),
        ("2028-02-29T00:00:00", "month", "2028-02-01", "2028-03-01"),
        ("2027-03-28T01:30:00", "day", "2027-03-28", "2027-03-29"),
    ],
)
def test_a_day_and_a_month_are_those_of_utc(at, period, began, ends):
    assert span_at(period, unix(at)) == (period, unix(began), unix(ends))


@given(st.floats(0, 2**33), st.sampled_from(PERIODS))
def test_days_and_months_follow_one_another_without_a_gap(at, period):
    span = span_at(period, at)
    assert span.began_at <= at < span.ends_at
    assert span_at(period, span.began_at) == span_at(period, span.ends_at - 0.001) == span
    assert span_at(period, span.ends_at).began_at == span.ends_at
    days = (span.ends_at - span.began_at) / 86_400
    assert days == 1 if period == "day" else days in {28, 29, 30, 31}


def test_budgets_are_the_limits_that_have_a_line():
    limits = AccountLimits(
        tokens_per_day=10, soft_tokens_per_day=5, soft_engine_seconds_per_month=7, tokens_per_minute=1
    )
    assert [*limits.budgets()] == [
        Budget("tokens_per_day", "tokens", "day", 5, 10),
        Budget("engine_seconds_per_month", "engine_seconds", "month", 7, None),
    ]
    assert not [*AccountLimits(tokens_per_minute=1).budgets()]
