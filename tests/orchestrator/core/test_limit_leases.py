"""Leases of limits: what all routers have together is held against one limit, whatever is lost on the way."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.limit_leases import LEASE_S, LISTEN_S, REST_S, LimitLeases, shares
from orchestrator.model.usage import FIRST_SHARE, LimitShares, LimitUse, LimitUses, UsageReport
from tests.properties import examples

LIMIT = "requests_per_minute k"
DEMANDS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 10), min_size=1)


@given(DEMANDS, st.floats(0.1, 1000))
def test_shares_add_up_to_the_limit_and_nobody_lacks_what_another_has_beyond_its_demand(demands, limit):
    found = shares(limit, demands)
    assert found.keys() == demands.keys()
    assert sum(found.values()) == pytest.approx(limit)
    even = limit / len(demands)
    for router, demand in demands.items():
        assert found[router] >= min(demand, even) - 1e-6
        if found[router] < demand - 1e-6:  # then nobody has more than it, and nobody more than it demands
            assert all(share <= found[router] + 1e-6 for share in found.values())


@given(DEMANDS, st.integers(1, 20))
def test_shares_in_units_are_whole_and_add_up(demands, most):
    found = shares(1.0, demands, unit=1 / most)
    counts = [share * most for share in found.values()]
    assert counts == pytest.approx([round(count) for count in counts])
    assert sum(counts) == pytest.approx(most)
    exact = shares(1.0, demands)
    assert all(abs(found[router] - exact[router]) < 1 / most + 1e-9 for router in demands)


@dataclass
class Lessee:
    """A router that reports and goes by the answers."""

    name: str
    began_at: float
    demand: float = 0.0
    has: LimitShares = field(default_factory=LimitShares)
    heard_at: float = -1e9
    is_leased: bool = False
    seq: int = 0

    def report(self, *, is_last=False):
        self.seq += 1
        share = self.has.of(LIMIT)
        uses = {}
        if LIMIT in self.has.shares or self.demand > share / 2:
            uses[LIMIT] = LimitUse(demand=self.demand, share=share)
        limits = LimitUses(group=self.name, idle_share=self.has.idle_share, uses=uses)
        return UsageReport(
            router_id=self.name, boot_id="b", seq=self.seq, revision_seen=0, is_last=is_last, limits=limits
        )

    def hear(self, answer, now):
        self.heard_at = now
        if answer is not None:
            self.has, self.is_leased = answer, True


def a_second(leases, routers, now, lost=()):
    """One report of each router and its answer, but for those whose answer is lost."""
    for router in routers:
        answer = leases.record(router.report(), now)
        if router.name not in lost:
            router.hear(answer, now)


def test_a_router_that_is_alone_has_the_whole_limit_once_a_new_leader_has_listened():
    leases, router = LimitLeases(), Lessee("a", 0.0)
    leases.begin_term(0.0)
    a_second(leases, [router], 0.0)
    assert router.has.of(LIMIT) == FIRST_SHARE
    a_second(leases, [router], LISTEN_S)
    assert router.has == LimitShares(idle_share=1.0)


def test_shares_follow_the_demand_within_three_reports_and_are_even_after_a_minute_of_rest():
    leases, first, second = LimitLeases(), Lessee("a", 0.0), Lessee("b", 0.0)
    for now in range(3):
        a_second(leases, [first, second], now)
    assert (first.has.of(LIMIT), second.has.of(LIMIT)) == (0.5, 0.5)
    first.demand = 3.0
    for now in range(3, 7):
        a_second(leases, [first, second], now)
    assert first.has.of(LIMIT) == pytest.approx(0.99)
    assert second.has.of(LIMIT) == pytest.approx(0.01)
    second.demand = 2.0
    for now in range(7, 10):
        a_second(leases, [first, second], now)
    assert (first.has.of(LIMIT), second.has.of(LIMIT)) == (pytest.approx(0.5), pytest.approx(0.5))
    first.demand, second.demand = 0.0, 0.7
    for now in range(10, 14):
        a_second(leases, [first, second], now)
    assert second.has.of(LIMIT) > 0.7
    second.demand = 0.0
    for now in range(14, 14 + int(REST_S) + 4):
        a_second(leases, [first, second], now)
    assert first.has == second.has == LimitShares(idle_share=0.5)


def test_few_requests_at_once_go_whole_to_the_routers_that_want_them():
    leases, limit = LimitLeases(), "concurrent_requests k"
    has = {"a": LimitShares(), "b": LimitShares(), "c": LimitShares()}
    wants = {"a": 0.0, "b": 1.5, "c": 0.5}
    for now in range(8):
        for name, mine in list(has.items()):
            use = LimitUse(demand=wants[name], share=mine.of(limit), unit=0.5)
            limits = LimitUses(group=name, idle_share=mine.idle_share, uses={limit: use})
            report = UsageReport(router_id=name, boot_id="b", seq=now, revision_seen=0, limits=limits)
            has[name] = leases.record(report, float(now))
    assert {name: round(2 * shares.of(limit), 6) for name, shares in has.items()} == {"a": 0, "b": 1, "c": 1}


def test_processes_on_one_port_have_one_share_together():
    leases, has = LimitLeases(), {}
    for now in range(4):
        for name, group in (("p0", "p"), ("p1", "p"), ("q", "q")):
            mine = has.get(name, LimitShares())
            limits = LimitUses(group=group, idle_share=mine.idle_share)
            report = UsageReport(router_id=name, boot_id="b", seq=now, revision_seen=0, limits=limits)
            has[name] = leases.record(report, float(now))
    assert {shares.idle_share for shares in has.values()} == {0.5}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["second", "second", "second", "new", "ends", "dies", "cut", "back", "leader"]),
        st.integers(0, 4),
        st.sampled_from([0.0, 0.1, 0.4, 1.0, 3.0]),
        st.sets(st.integers(0, 4)),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(STEPS)
def test_shares_of_routers_that_report_never_add_up_to_more_than_the_limit(steps):
    """Beyond it are at most the first shares of routers that have none yet, and those of routers that are cut off."""
    leases, routers, cut, now = LimitLeases(), [Lessee("r", 0.0)], {}, 0.0
    leases.begin_term(now)
    for step, number, demand, lost in steps:
        chosen = routers[number % len(routers)] if routers else None
        if step == "new" and len(routers) < 5:
            routers.append(Lessee(f"r{now}-{len(routers)}", now))
        elif step == "leader":
            leases = LimitLeases()
            leases.begin_term(now)
            for _ in range(int(LISTEN_S)):  # whom the new leader reaches has reported before it lets anything grow
                now += 1.0
                a_second(leases, routers, now - 0.5)
        elif step == "ends" and chosen:
            routers.remove(chosen)
            leases.record(chosen.report(is_last=True), now)
        elif step == "dies" and chosen:
            routers.remove(chosen)
        elif step == "cut" and chosen:
            routers.remove(chosen)
            cut[chosen.name] = chosen
        elif step == "back" and cut:
            routers.append(cut.popitem()[1])
        if chosen:
            chosen.demand = demand
        a_second(leases, routers, now, {router.name for at, router in enumerate(routers) if at in lost})
        now += 1.0
        first = sum(FIRST_SHARE for router in routers if not router.is_leased or router.has.idle_share == FIRST_SHARE)
        away = sum(router.has.of(LIMIT) for router in cut.values())
        returned = sum(router.has.of(LIMIT) for router in routers if now - router.heard_at > LEASE_S)
        for limit in (LIMIT, "any other"):
            assert sum(router.has.of(limit) for router in routers) <= 1 + first + away + returned + 1e-6
