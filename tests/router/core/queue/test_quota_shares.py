"""Limits over several routers: what they admit together is held against what one of them would."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.limit_leases import LimitLeases
from orchestrator.model.limits import AccountLimits
from orchestrator.model.usage import FIRST_SHARE, LimitShares, UsageReport
from router.core.errors import RateLimited
from router.core.queue.quota import Quotas
from tests.properties import examples
from tests.router.core.queue.limited import of_key, of_tenant

LIMITS = AccountLimits(requests_per_minute=600)
STEP_S = 0.25


class Routers:
    """Routers that report each second, one after another, and admit or refuse what comes."""

    def __init__(self, count, limits=LIMITS):
        self.leases, self.limits, self.now = LimitLeases(), limits, 0.0
        self.routers = [Quotas(shares=LimitShares(), group=f"r{number}") for number in range(count)]
        self.admitted, self.running = [], []
        self._seq = 0
        for _ in range(5):
            self.second([0] * count)

    def report(self, quotas):
        self._seq += 1
        report = UsageReport(
            router_id=quotas.group, boot_id="b", seq=self._seq, revision_seen=0, limits=quotas.uses(self.now)
        )
        quotas.set_shares(self.leases.record(report, self.now), self.now)

    def offer(self, quotas, tokens=0):
        try:
            granted = quotas.take(of_key("k", self.limits), self.now, tokens)
        except RateLimited as exc:
            return exc
        self.admitted.append((self.now, tokens))
        self.running.append((quotas, granted))
        return None

    def end_all(self):
        for quotas, granted in self.running:
            quotas.settle(granted, self.now)
        self.running.clear()

    def second(self, offered, tokens=0):
        """A second in which each router is offered so many requests, in four parts."""
        for part in range(4):
            for place, (quotas, count) in enumerate(zip(self.routers, offered, strict=True)):
                for _ in range((count + part) // 4):
                    self.offer(quotas, tokens)
                if part == place % 4:
                    self.report(quotas)
            self.now += STEP_S


def most_beyond(admitted, limit):
    """The most that any stretch of time has beyond a full bucket and what flows into it meanwhile."""
    worst = 0.0
    for place, (first, _) in enumerate(admitted):
        total = 0.0
        for at, amount in admitted[place:]:
            total += amount
            worst = max(worst, total - limit * (1 + (at - first) / 60))
    return worst


@pytest.mark.parametrize("offered", [[15, 15], [30, 0], [25, 5], [28, 1, 1]])
def test_three_times_the_limit_over_two_minutes_is_admitted_as_by_one_router(offered):
    fleet = Routers(len(offered))
    began_at, before = fleet.now, len(fleet.admitted)
    for _ in range(120):
        fleet.second(offered)
        fleet.end_all()
    admitted = [at for at, _ in fleet.admitted[before:]]
    assert len(admitted) <= (600 + 1200) * 1.03
    last_minute = [at for at in admitted if at >= began_at + 60]
    assert len(last_minute) == pytest.approx(600, rel=0.03)
    if len({*offered}) == 1:
        assert len(admitted) == pytest.approx(1800, rel=0.03)


def test_tokens_that_are_charged_at_one_router_are_refused_at_another():
    fleet = Routers(2, AccountLimits(tokens_per_minute=6000))
    for _ in range(180):
        fleet.second([12, 4], tokens=25)  # 24,000 a minute
        fleet.end_all()
    last = sum(tokens for at, tokens in fleet.admitted if at >= fleet.now - 60)
    assert last == pytest.approx(6000, rel=0.03)


def test_requests_at_once_hold_over_three_routers():
    fleet = Routers(3, AccountLimits(concurrent_requests=6))
    for offered in ([8, 0, 0], [0, 8, 0], [8, 8, 8]):
        for _ in range(15):
            fleet.second(offered)
            assert len(fleet.running) <= 6
        assert len(fleet.running) == 6
        fleet.end_all()


def test_a_limit_of_one_request_at_once_is_met_at_whichever_router_it_comes_and_holds_within_seconds():
    fleet = Routers(3, AccountLimits(concurrent_requests=1))
    for place in (1, 2):
        assert fleet.offer(fleet.routers[place]) is None
        for _ in range(5):
            fleet.second([0, 1, 1])
        fleet.end_all()
        for _ in range(10):
            fleet.second([1 - (place - 1), 0, place - 1])
            assert len(fleet.running) <= 1
        fleet.end_all()
        for _ in range(70):
            fleet.second([0, 0, 0])


def test_a_tenants_limit_holds_over_two_routers_and_many_keys():
    fleet, whole = Routers(2), AccountLimits(requests_per_minute=600)
    for second in range(180):
        for place, quotas in enumerate(fleet.routers):
            for number in range(12 if place else 20):
                with suppress(RateLimited):
                    fleet.running.append((quotas, quotas.take(of_tenant(f"k{number}", None, whole), fleet.now)))
                    fleet.admitted.append((fleet.now, 1))
        fleet.second([0, 0])
        fleet.end_all()
        if second == 120:
            fleet.admitted.clear()
    assert len(fleet.admitted) == pytest.approx(590, rel=0.03)


def test_a_router_without_an_answer_goes_on_with_its_last_share():
    fleet = Routers(2)
    fleet.routers, silent = fleet.routers[:1], fleet.routers[1]
    for _ in range(20):
        fleet.second([0])
    assert fleet.routers[0].shares.idle_share == 1.0
    assert silent.shares.idle_share == 0.5
    granted = sum(fleet.offer(silent) is None for _ in range(400))
    assert granted == 300


def test_a_router_that_was_never_answered_has_a_tenth():
    quotas = Quotas(shares=LimitShares(), group="r")
    for _ in range(int(600 * FIRST_SHARE)):
        quotas.take(of_key("k", LIMITS), 0.0)
    with pytest.raises(RateLimited) as refused:
        quotas.take(of_key("k", LIMITS), 0.0)
    assert refused.value.retry_after_s <= 1.0


def test_a_share_below_one_request_admits_one_and_tells_a_short_time():
    quotas = Quotas(shares=LimitShares(idle_share=0.01), group="r")
    limits = AccountLimits(requests_per_minute=6)
    quotas.take(of_key("k", limits), 0.0)
    with pytest.raises(RateLimited) as refused:
        quotas.take(of_key("k", limits), 0.0)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    assert refused.value.headers["x-ratelimit-limit-requests"] == "6"


def test_an_account_that_is_opened_late_holds_no_more_than_the_smallest_share_since():
    quotas = Quotas(shares=LimitShares(idle_share=0.5), group="r")
    for share in (0.01, 0.9):
        quotas.set_shares(LimitShares(idle_share=0.5, shares={"requests_per_minute k": share}), 0.0)
    for _ in range(6):
        quotas.take(of_key("k", LIMITS), 0.0)
    with pytest.raises(RateLimited):
        quotas.take(of_key("k", LIMITS), 0.0)


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.sampled_from([0, 0, 1, 4, 12]), min_size=3, max_size=3), min_size=1, max_size=25),
    st.sampled_from([6, 60, 120]),
)
def test_no_stretch_of_time_holds_more_than_one_router_would_admit_and_a_request_a_router(seconds, limit):
    fleet = Routers(3, AccountLimits(requests_per_minute=limit))
    for offered in seconds:
        for _ in range(3):
            fleet.second(offered)
            fleet.end_all()
    counted = [(at, 1) for at, _ in fleet.admitted]
    assert all(first[0] <= second[0] for first, second in pairwise(counted))
    assert most_beyond(counted, limit) <= len(fleet.routers) + 1e-6
