"""Budgets: what was spent is the ledger's word and the router's own counts since, whatever the order of reports."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.ledger import SpentSums, new_rows, router_batch
from orchestrator.model.ledger import UsageSums
from orchestrator.model.limits import AccountLimits, span_at, tenant_account
from orchestrator.model.usage import AccountsSpent, Spent
from router.core.errors import BudgetExhausted, RateLimited
from router.core.queue import budgets as budgets_module
from router.core.queue.budgets import BUDGET_HEADER, Budgets
from router.fleet.traffic import TrafficLog
from tests.properties import examples
from tests.router.core.queue.limited import of_key, of_tenant

NOON = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
HOUR_S, DAY_S = 3600.0, 86_400.0


def spend(budgets, limited, tokens=0, engine_s=0.0, now=NOON):
    return budgets.charge(limited, Spent(tokens=tokens, engine_s=engine_s), now)


def tell(budgets, now=NOON, own=None, **spent):
    """Tell what was spent: {"day_k": 5} -> of the day, 5 tokens."""
    accounts = {name.replace("_", " ", 1): Spent(tokens=tokens) for name, tokens in spent.items()}
    answer = AccountsSpent(at=now, accounts=accounts)
    return budgets.tell(budgets.asked(), answer, lambda _: own or {}, now)


def refused(budgets, limited, now=NOON):
    with pytest.raises(BudgetExhausted) as caught:
        budgets.check(limited, now)
    return caught.value


def test_requests_run_up_to_the_hard_line_and_the_error_tells_budget_spent_and_reset():
    budgets, key = Budgets(offset_s=0.0), of_key("k", AccountLimits(tokens_per_day=100, engine_seconds_per_month=5))
    for _ in range(2):
        budgets.check(key, NOON)
        assert not spend(budgets, key, 49)
    budgets.check(key, NOON)
    assert spend(budgets, key, 52)
    error = refused(budgets, key)
    assert isinstance(error, RateLimited)
    assert (error.status, error.code, error.limit, error.retry_after_s) == (
        429,
        "budget_exhausted",
        "tokens_per_day",
        12 * HOUR_S,
    )
    assert str(error) == (
        "this API key has a budget of 100 tokens a day, of which 150 are spent; it is reset at 2027-01-01T00:00:00Z,"
        " in 12h0m0s"
    )
    budgets.check(key, NOON + 12 * HOUR_S)
    spend(budgets, key, 0, 5.0, NOON + 12 * HOUR_S)
    error = refused(budgets, key, NOON + 13 * HOUR_S)
    assert "5 engine-seconds a month, of which 5 are spent; it is reset at 2027-02-01T00:00:00Z" in str(error)


def test_a_tenants_budget_is_that_of_all_its_keys():
    budgets, whole = Budgets(offset_s=0.0), AccountLimits(tokens_per_month=10)
    first, second = (of_tenant(key, AccountLimits(tokens_per_day=1000), whole) for key in "ab")
    budgets.check(first, NOON)
    spend(budgets, first, 10)
    error = refused(budgets, second)
    assert error.limit == "tenant_tokens_per_month"
    assert str(error).startswith("all keys of tenant acme together have a budget of 10 tokens a month")


def test_a_budget_that_is_raised_opens_at_once_also_for_what_waits():
    budgets, low, high = (
        Budgets(offset_s=0.0),
        of_key("k", AccountLimits(tokens_per_day=10)),
        of_key("k", AccountLimits(tokens_per_day=11)),
    )
    budgets.check(low, NOON)
    assert spend(budgets, low, 10)
    with pytest.raises(BudgetExhausted):
        budgets.check_again(low, NOON)
    budgets.check(high, NOON)
    budgets.check_again(low, NOON)  # it came before the change
    assert spend(budgets, low, 1)
    refused(budgets, high)
    budgets.check(of_key("k", AccountLimits(requests_per_minute=1)), NOON)
    assert not budgets.accounts


def test_the_ledgers_word_replaces_the_last_one_and_what_it_lacks_is_added():
    budgets, key = Budgets(offset_s=0.0), of_key("k", AccountLimits(tokens_per_day=100, tokens_per_month=1000))
    budgets.check(key, NOON)
    spend(budgets, key, 60)
    assert not tell(budgets, day_k=70, month_k=900)
    assert [each.spent for each in budgets.spendings("k", NOON)] == [70, 900]
    assert tell(budgets, day_k=70, month_k=900, own={"k": Spent(tokens=30)})
    refused(budgets, key)
    tell(budgets)
    budgets.check(key, NOON)


def test_without_an_answer_the_last_word_stands_until_its_day_is_over():
    budgets, key = Budgets(offset_s=0.0), of_key("k", AccountLimits(tokens_per_day=100, tokens_per_month=150))
    budgets.check(key, NOON)
    tell(budgets, day_k=90, month_k=90)
    spend(budgets, key, 10, now=NOON + 12 * HOUR_S - 1)
    refused(budgets, key, NOON + 12 * HOUR_S - 1)
    # A new year: both begin anew, by the calendar.
    budgets.check(key, NOON + 12 * HOUR_S)
    spend(budgets, key, 100, now=NOON + 13 * HOUR_S)
    refused(budgets, key, NOON + 13 * HOUR_S)
    budgets.check(key, NOON + 36 * HOUR_S)
    spend(budgets, key, 50, now=NOON + 37 * HOUR_S)
    assert refused(budgets, key, NOON + 37 * HOUR_S).limit == "tokens_per_month"


@pytest.mark.parametrize("skew_s", [-400 * DAY_S, -3.0, 5.0, 40 * DAY_S])
def test_day_and_month_are_those_of_the_orchestrators_clock(skew_s):
    budgets, key = Budgets(offset_s=skew_s), of_key("k", AccountLimits(tokens_per_day=100))
    budgets.check(key, NOON)
    spend(budgets, key, 1)
    tell(budgets, day_k=100)
    assert refused(budgets, key).retry_after_s == 12 * HOUR_S
    budgets.check(key, NOON + 12 * HOUR_S)


def test_answers_tell_the_budget_nearest_to_its_end_once_a_line_is_reached():
    limits = AccountLimits(soft_tokens_per_day=10, tokens_per_day=100, soft_engine_seconds_per_day=2)
    budgets, key = Budgets(offset_s=0.0), of_key("k", limits)
    budgets.check(key, NOON)
    spend(budgets, key, 9, 1.9)
    assert budgets.headers(key, NOON) == {}
    spend(budgets, key, 1)
    text = "tokens_per_day; spent=10, soft=10, hard=100, resets=2027-01-01T00:00:00Z"
    assert budgets.headers(key, NOON) == {BUDGET_HEADER: text}
    spend(budgets, key, 0, 1.1)
    assert budgets.headers(key, NOON)[BUDGET_HEADER].startswith("engine_seconds_per_day; spent=3, soft=2, resets=")
    budgets.check(key, NOON)


def test_each_line_is_noted_once_a_day():
    budgets, key = Budgets(offset_s=0.0), of_key("k", AccountLimits(soft_tokens_per_day=10, tokens_per_day=20))

    def noted(now=NOON):
        return [(each.account, each.limit, each.line) for each in budgets.reached_lines(now)]

    budgets.check(key, NOON)
    for tokens, lines in ((9, []), (1, ["soft"]), (1, []), (9, ["hard"]), (9, [])):
        spend(budgets, key, tokens)
        assert noted() == [("k", "tokens_per_day", line) for line in lines]
    tomorrow = NOON + DAY_S
    spend(budgets, key, 20, now=tomorrow)
    assert [line for _, _, line in noted(tomorrow)] == ["soft", "hard"]
    assert len(budgets.accounts["k"].reached) == 2


def test_an_account_is_forgotten_when_nobody_uses_it_and_never_while_it_is_exhausted():
    budgets, limits = Budgets(offset_s=0.0), AccountLimits(tokens_per_day=10)
    for name in ("spent", "open"):
        budgets.check(of_key(name, limits), NOON)
    spend(budgets, of_key("spent", limits), 10)
    budgets.follow({"of the files": limits}, NOON + 3599)
    assert [*budgets.accounts] == ["spent", "open", "of the files"]
    budgets.follow({"of the files": limits}, NOON + 4 * HOUR_S)
    assert [*budgets.accounts] == ["spent", "of the files"]
    refused(budgets, of_key("spent", limits), NOON + 11 * HOUR_S)
    budgets.follow({}, NOON + 13 * HOUR_S)
    assert not budgets.accounts


def test_a_report_asks_for_what_is_in_use_and_for_others_in_turn(monkeypatch):
    monkeypatch.setattr(budgets_module, "MOST_ASKED", 3)
    budgets, limits = Budgets(offset_s=0.0), AccountLimits(tokens_per_day=10)
    budgets.follow(dict.fromkeys("abcde", limits) | {"x": AccountLimits(tokens_per_minute=1)}, NOON)
    asked = []
    for _ in range(4):
        budgets.check(of_key("c", limits), NOON)
        found = budgets.asked()
        assert found[0] == "day c"
        asked += found[1:]
    assert {*asked} == {"day a", "day b", "day d", "day e"}
    assert len(asked) == 8


# --- any order of reports ------------------------------------------------------------------------------------------

HARD = 100
KEY = of_key("k", AccountLimits(tokens_per_day=HARD, tokens_per_month=3 * HARD))


@dataclass
class Counted:
    """Tokens that a router has counted. written_at: the step at which they came into the ledger."""

    router: "Router"
    at: float
    tokens: int
    written_at: float = float("inf")


@dataclass
class Router:
    told_at: float = -1.0
    budgets: Budgets = field(default_factory=lambda: Budgets(offset_s=0.0))
    log: TrafficLog = field(default_factory=lambda: TrafficLog("r", offset_s=0.0))
    running: list[int] = field(default_factory=list)


class ReportingRouters:
    """Routers and a leader, with reports that arrive, or get lost on their way or back."""

    def __init__(self, count, began_at):
        self.now, self.step = began_at, 0
        self.routers = [Router() for _ in range(count)]
        self.rows, self.numbers, self.sums = {}, {}, SpentSums()
        self.counted, self.bounds = [], {}
        for router in self.routers:
            self.report(router, "answered")

    def report(self, router, how, ends_meanwhile=False):
        budgets, log = router.budgets, router.log
        budgets.follow({"k": KEY[0].limits}, self.now)
        batches, asked = log.batches(self.now), budgets.asked()
        if how == "lost":
            return
        found = new_rows([router_batch(log.boot_id, batch, self.now) for batch in batches], self.numbers)
        self.numbers = dict(found.numbers)
        for key, sums in found.rows.items():
            self.rows.setdefault(key, UsageSums()).add(sums)
        self.sums.add(found.rows)
        for each in self.counted:
            if each.router is router:
                each.written_at = min(each.written_at, self.step)
        accounts = {}
        for name in asked:
            span = span_at(name.partition(" ")[0], self.now)
            if span not in self.sums.by_span:
                within = {key: sums for key, sums in self.rows.items() if span.began_at <= key.hour < span.ends_at}
                self.sums.begin(span, within, self.now)
            if "k" in self.sums.by_span[span]:
                accounts[name] = self.sums.by_span[span]["k"]
        if ends_meanwhile:
            self.end(router)
        if how == "answered":
            log.accept(batches)
            budgets.tell(
                asked,
                AccountsSpent(at=self.now, accounts=accounts),
                lambda since: log.spent_unaccepted(since, self.now),
                self.now,
            )
            router.told_at = self.step

    def begin(self, router, tokens):
        try:
            router.budgets.check(KEY, self.now)
        except BudgetExhausted:
            return
        router.running.append(tokens)
        for period, most in (("day", HARD), ("month", 3 * HARD)):
            span = span_at(period, self.now)
            elsewhere = sum(
                each.tokens
                for each in self.counted
                if each.router is not router and each.written_at > router.told_at and each.at >= span.began_at
            )
            under_way = sum(sum(each.running) for each in self.routers)
            self.bounds[span] = most + elsewhere + under_way

    def spend(self, router, tokens):
        self.begin(router, tokens)
        self.end(router)

    def end(self, router):
        if router.running:
            tokens = router.running.pop()
            router.log.counts_of(self.now, tenant="acme", key="k").output_tokens += tokens
            router.budgets.charge(KEY, Spent(tokens=tokens), self.now)
            self.counted.append(Counted(router, self.now, tokens))

    def check(self):
        """Each router knows exactly what it was told and has counted; and no more was spent than may be."""
        for router in self.routers:
            for each in router.budgets.spendings("k", self.now):
                span = span_at(each.budget.period, self.now)
                assert each.spent == sum(
                    one.tokens
                    for one in self.counted
                    if one.at >= span.began_at and (one.router is router or one.written_at <= router.told_at)
                )
        for span, bound in self.bounds.items():
            assert sum(each.tokens for each in self.counted if span.began_at <= each.at < span.ends_at) < bound


ROUTER, TOKENS = st.integers(0, 2), st.integers(1, 40)
HOW = st.sampled_from(["answered", "answered", "unanswered", "lost"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), ROUTER, TOKENS),
        st.tuples(st.just("spend"), ROUTER, TOKENS),
        st.tuples(st.just("spend"), ROUTER, TOKENS),
        st.tuples(st.just("end"), ROUTER),
        st.tuples(st.just("report"), ROUTER, HOW, st.booleans()),
        st.tuples(st.just("report"), ROUTER, HOW, st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from([0.25, 7.0, 40_000.0])),
        st.tuples(st.just("new leader")),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=examples(500), deadline=None)
@given(STEPS, st.sampled_from([-50_000.0, -10.0, -2.0, 11 * HOUR_S]), st.integers(1, 3))
def test_no_more_is_spent_than_the_hard_line_what_runs_and_what_other_routers_have_not_told(steps, before_s, count):
    new_year = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    fleet = ReportingRouters(count, new_year + before_s + 0.125)
    for name, *arguments in steps:
        fleet.step += 1
        if name == "pass":
            fleet.now += arguments[0]
        elif name == "new leader":
            fleet.sums = SpentSums()
        else:
            router = fleet.routers[arguments[0] % count]
            getattr(fleet, name)(router, *arguments[1:])
        fleet.check()


def test_a_tenants_spending_is_that_of_all_rows_with_its_name():
    log = TrafficLog("r", offset_s=0.0)
    log.counts_of(NOON, tenant="acme", key="a").prompt_tokens = 5
    log.counts_of(NOON, tenant="acme", key="b").work_s = 2.0
    log.counts_of(NOON, key="c").output_tokens = 3
    log.counts_of(NOON).output_tokens = 3
    found = log.spent_unaccepted(NOON - 10, NOON)
    assert found == {
        "a": Spent(tokens=5),
        "b": Spent(engine_s=2.0),
        "c": Spent(tokens=3),
        tenant_account("acme"): Spent(tokens=5, engine_s=2.0),
    }
    batches = log.batches(NOON + 1)
    assert log.spent_unaccepted(NOON - 10, NOON + 1) == found
    assert log.spent_unaccepted(NOON + 10, NOON + 1) == {}
    log.accept(batches)
    assert log.spent_unaccepted(NOON - 10, NOON + 1) == {}
