"""`prefix_hash`: one replica for one prefix, up to a quarter more than the average load."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from router.core.schedule.load_snapshot import ReplicaLoad
from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import a_replica, choose

FLEET = [a_replica(f"w{i}") for i in range(4)]


def chosen(first_blocks, counts=(0, 0, 0, 0), seed=0):
    loads = {replica.id: ReplicaLoad(in_decode=count) for replica, count in zip(FLEET, counts, strict=True)}
    request = RoutingRequest("m", "", 100, first_blocks=first_blocks)
    return choose(request, FLEET, own=loads, policy="prefix_hash", seed=seed).replica.id


def test_one_prefix_has_one_replica_and_prefixes_spread():
    homes = [{chosen(prefix, seed=seed) for seed in range(3)} for prefix in range(40)]
    assert all(len(found) == 1 for found in homes)
    assert set().union(*homes) == {"w0", "w1", "w2", "w3"}


@given(st.integers(0, 2**60), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_no_replica_takes_more_than_a_quarter_above_the_average(prefix, counts):
    count = counts[int(chosen(prefix, counts)[1:])]
    assert count + 1 <= ceil(1.25 * (sum(counts) + 1) / len(counts))
