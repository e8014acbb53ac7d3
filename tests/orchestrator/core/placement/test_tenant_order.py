"""The fair order between tenants in which cold adapters are loaded."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.demand import DemandBook
from orchestrator.core.placement.place import place
from orchestrator.core.placement.tenant_order import wait_bucket_s
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, LoadFigures, WantedReplicas
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, intent, worker
from tests.properties import examples

RULES = PlacementPolicy()
WAIT_BUCKET_S = wait_bucket_s(LoadFigures())
TENANTS = ("", "acme", "bolt", "core")
WIDE = fleet(*(worker(f"w{number:02}", slots=1) for number in range(12)))
"""Room for all at once, so that only the order matters."""


def order_of(wants, *, fits=lambda name: True, priority=lambda name: 0, observed=WIDE, **demand):
    """Names in the order of a pass's loads. `fits`: adapters with a served base model."""
    known = [adapter(name, base_model="qwen" if fits(name) else "llama", priority=priority(name)) for name in wants]
    desired = place(intent(*known), observed, DemandSnapshot(wants=wants, **demand), RULES, NOW)
    return [load.lora_id for load in desired.loads]


def waits(since=NOW, *tenants, **more):
    return WantedReplicas(replicas=1, since=since, tenants=frozenset(tenants), **more)


def naive(wants, rates, turns, stuck):
    """One after the other, each the best of those left."""
    left, had, found = {name: want for name, want in wants.items() if name not in stuck}, Counter(), []

    def best(name):
        want = left[name]
        stretch = want.since // WAIT_BUCKET_S * WAIT_BUCKET_S
        shares = [(had[tenant], max(stretch, turns.get(tenant, 0.0))) for tenant in want.tenants]
        return min(shares, default=(0, stretch)), stretch, -rates.get(name, 0.0), name

    while left:
        # Of those whose tenants are the same only the first by age and heat may come.
        first = {}
        for name in sorted(left, key=lambda name: best(name)[1:]):
            first.setdefault(left[name].tenants or name, name)
        name = min(first.values(), key=lambda name: (best(name)[0], best(name)[2:]))
        had.update(left.pop(name).tenants)
        found.append(name)
    return found


@st.composite
def crowds(draw):
    names = [f"a{number}" for number in range(draw(st.integers(1, 12)))]
    times = st.sampled_from([NOW - 25, NOW - 15, NOW - 12, NOW - 3, NOW])
    who = st.lists(st.sampled_from(TENANTS), max_size=3)
    wants = {name: waits(draw(times), *draw(who)) for name in names}
    rates = {name: draw(st.sampled_from([0.0, 1.0, 9.0])) for name in names}
    turns = {tenant: draw(st.sampled_from([NOW - 100, NOW - 12, NOW - 2])) for tenant in draw(who)}
    return wants, rates, turns, set(draw(st.lists(st.sampled_from(names), max_size=3)))


@settings(max_examples=examples(400))
@given(crowds())
def test_a_pass_orders_loads_as_if_it_compared_all_before_each(case):
    wants, rates, turns, stuck = case
    found = order_of(wants, fits=lambda name: name not in stuck, rates=rates, last_load_at=turns)
    assert found == naive(wants, rates, turns, stuck)


@settings(max_examples=examples(200))
@given(crowds())
def test_within_one_tenant_earlier_and_then_hotter_adapters_come_first(case):
    wants, rates, turns, _ = case
    unsaid = {name: replace(want, tenants=frozenset()) for name, want in wants.items()}
    alone = {name: replace(want, tenants=frozenset({"acme"})) for name, want in wants.items()}
    expected = sorted(wants, key=lambda name: (wants[name].since // WAIT_BUCKET_S, -rates[name], name))
    assert (
        order_of(unsaid, rates=rates, last_load_at=turns)
        == order_of(alone, rates=rates, last_load_at=turns)
        == expected
    )


@pytest.mark.parametrize(("load_s", "comes_first"), [(0.03, "early"), (3.0, "hot")])
def test_waits_that_differ_by_more_than_a_few_loads_keep_their_order(load_s, comes_first):
    wants = {"early": waits(NOW), "hot": waits(NOW + 1)}
    known = [adapter(name) for name in wants]
    observed = fleet(worker("w0", slots=1), load_figures=LoadFigures(seconds=load_s))
    demand = DemandSnapshot(wants=wants, rates={"hot": 9.0})
    assert [load.lora_id for load in place(intent(*known), observed, demand, RULES, NOW + 2).loads] == [comes_first]


@st.composite
def arrivals(draw):
    """(time, tenant, rate) of requests for one adapter each, and the loads of each pass."""
    asks = st.tuples(st.integers(0, 40), st.sampled_from(TENANTS), st.sampled_from([0.0, 1.0, 9.0]))
    return draw(st.lists(asks, min_size=1, max_size=40)), draw(st.lists(st.integers(0, 3), min_size=20, max_size=60))


@settings(max_examples=examples(200))
@given(arrivals())
def test_while_a_tenant_waits_no_other_has_more_than_two_loads(case):
    asks, room = case
    named = {f"a{number}": ask for number, ask in enumerate(asks)}
    every, book = intent(*map(adapter, named)), DemandBook()
    left, others = dict(named), defaultdict(Counter)  # tenant -> loads of others since it waits, or had one
    for second, count in enumerate([*room, *([1] * len(asks))]):
        now = NOW + second
        for name, (at, tenant, _) in left.items():
            if at <= second:
                book.add_want(name, waits(now, tenant), now + 60)
        waiting = {tenant for at, tenant, _ in left.values() if at <= second}
        empty = fleet(*(worker(f"w{number}", slots=1) for number in range(count)))
        demand = replace(book.snapshot(now), rates={name: heat for name, (_, _, heat) in named.items()})
        for load in place(every, empty, demand, RULES, now).loads:
            book.record_load_started(load.lora_id, now)
            book.drop_want(load.lora_id)
            _, tenant, _ = left.pop(load.lora_id)
            others.pop(tenant, None)
            for other in waiting - {tenant}:
                others[other][tenant] += 1
                assert others[other][tenant] <= 2, (other, tenant)
        for tenant in waiting - {tenant for at, tenant, _ in left.values() if at <= second}:
            others.pop(tenant, None)
    assert not [name for name, (at, _, _) in left.items() if at < len(room)]


def test_a_tenant_with_many_wants_does_not_delay_another():
    wants = {f"a{number}": waits(NOW - 30, "acme") for number in range(9)} | {"b": waits(NOW - 5, "bolt")}
    rates = dict.fromkeys(wants.keys() - {"b"}, 9.0)
    assert order_of(wants, rates=rates)[:3] == ["a0", "b", "a1"]
    # Nor where only one load can begin at a time: a tenant waits since it had one.
    assert order_of(wants, rates=rates, last_load_at={"acme": NOW - 6})[:2] == ["b", "a0"]
    assert order_of(wants, rates=rates, last_load_at={"acme": NOW - 6, "bolt": NOW - 3})[:2] == ["a0", "b"]


def test_an_adapter_that_cannot_load_costs_no_turn():
    wants = {"a0": waits(NOW - 60, "acme"), "a1": waits(NOW - 30, "acme"), "b": waits(NOW, "bolt")}
    assert order_of(wants, fits=lambda name: name != "a0") == ["a1", "b"]


def test_a_shared_adapter_uses_the_first_turn_and_counts_for_all():
    wants = {
        "a0": waits(NOW - 30, "acme"),
        "a1": waits(NOW - 20, "acme"),
        "shared": waits(NOW, "acme", "bolt"),
        "b": waits(NOW, "bolt"),
        "c": waits(NOW, "core"),
    }
    assert order_of(wants, rates={"shared": 1.0}) == ["a0", "shared", "c", "b", "a1"]


def test_a_higher_priority_comes_before_every_turn_and_counts_as_one():
    wants = {"a0": waits(NOW, "acme"), "a1": waits(NOW - 30, "acme"), "b": waits(NOW, "bolt")}
    assert order_of(wants, priority=lambda name: int(name == "a0")) == ["a0", "b", "a1"]
