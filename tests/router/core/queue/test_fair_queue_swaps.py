"""One device swap serves many queued requests, and no adapter or tenant waits for more than a bounded share of work."""

from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet import ResidentAdapter, Roster
from router.core.queue.fair_queue import MAX_HELD_S
from tests.router.core.schedule.test_policy import a_replica
from tests.router.core.test_scheduler import SchedulerUnderTest

WORK_S = 0.02
NAMES = ("a@0", "b@0", "c@0", "d@0")


def a_fleet(locations, *, max_loras=1, is_held=True):
    """One replica with these adapters at these places, whose engine takes one small request at a time."""
    fleet = SchedulerUnderTest(late_binding_s=WORK_S / 2)
    held = {
        name: ResidentAdapter(name.split("@")[0], "a" * 64, name, place)
        for name, place in zip(NAMES, locations, strict=False)
    }
    replica = a_replica("w0", max_loras=max_loras, max_num_seqs=99, residents=MappingProxyType(held))
    fleet.roster = Roster((replica,))
    fleet.scheduler.load.apply_report(replica)
    if not is_held:
        fleet.scheduler.queue.move_s = lambda _: 0.0
    return fleet


def swaps(fleet) -> int:
    return sum(one.adapter != other.adapter for one, other in pairwise(fleet.sent))


def finish_all(fleet) -> None:
    while fleet.running:
        fleet.finish()


@pytest.mark.parametrize("tenants", [("t", "t"), ("t", "u")], ids=["adapters of one tenant", "tenants"])
def test_a_swap_serves_several_requests_in_a_row(tenants):
    def sent_by(fleet) -> int:
        for _ in range(60):
            for tenant, name in zip(tenants, NAMES, strict=False):
                fleet.ask(tenant, name, seconds=WORK_S)
        finish_all(fleet)
        assert len(fleet.sent) == 120
        return swaps(fleet)

    # Twice eight moves of 20 ms in work of 20 ms a request, after the first turn.
    assert sent_by(a_fleet(("device", "host"))) <= 120 / 8
    assert sent_by(a_fleet(("device", "host"), is_held=False)) > 100


def test_nothing_is_held_where_all_have_slots():
    held, plain = (a_fleet(("device",) * 3, max_loras=3, is_held=is_held) for is_held in (True, False))
    for fleet in (held, plain):
        for number in range(60):
            fleet.ask("t", NAMES[number % 3], seconds=WORK_S)
        finish_all(fleet)
    assert [queued.adapter for queued in held.sent] == [queued.adapter for queued in plain.sent]


PLACES = st.lists(st.sampled_from(("device", "host", "disk")), min_size=4, max_size=4)
REQUESTS = st.lists(
    st.tuples(st.sampled_from("tu"), st.sampled_from(NAMES), st.sampled_from((0.02, 0.1, 0.4))), min_size=2, max_size=80
)


@given(PLACES, REQUESTS, st.integers(1, 3))
def test_no_waiting_tenant_is_behind_another_by_more_than_the_bound(places, requests, max_loras):
    fleet = a_fleet(places, max_loras=max_loras)
    for tenant, name, seconds in requests:
        fleet.ask(tenant, name, seconds=seconds)
    queue, costs = fleet.scheduler.queue, fleet.scheduler.costs
    most_s = 0.4 + max(costs.load_s, costs.host_to_device_s)  # of one request, with its adapter
    while fleet.running:
        waiting = [name for name, flows in queue._tenants.items() if flows.waiting]
        served = [queue._tenants[name].served_s for name in waiting]
        if len(served) > 1:
            assert max(served) - min(served) <= MAX_HELD_S + 2 * most_s + 1e-6
        for name in waiting:
            flows = [flow.served_s for flow in queue._tenants[name].flows.values() if flow.requests]
            assert max(flows) - min(flows) <= MAX_HELD_S + 2 * most_s + 1e-6
        fleet.finish()
    assert len(fleet.sent) == len(requests)
