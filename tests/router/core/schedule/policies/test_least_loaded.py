"""`least_loaded`: the fewest sequences win, whoever sent them."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.schedule.load_snapshot import ReplicaLoad
from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import a_replica, choose

counts = st.integers(0, 5)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=6), st.integers(0, 99))
def test_the_chosen_replica_has_the_fewest_sequences(in_flight, seed):
    fleet = [a_replica(f"w{i}") for i in range(len(in_flight))]
    loads = {f"w{i}": ReplicaLoad(in_decode=own, others_in_flight=other) for i, (own, other) in enumerate(in_flight)}
    chosen = choose(RoutingRequest("m", "", 100), fleet, own=loads, policy="least_loaded", seed=seed)
    own, other = in_flight[int(chosen.replica.id[1:])]
    assert own + other == min(map(sum, in_flight))


def test_equally_loaded_replicas_share_at_random():
    fleet = [a_replica(f"w{i}") for i in range(3)]
    request = RoutingRequest("m", "", 100)
    chosen = {choose(request, fleet, policy="least_loaded", seed=seed).replica.id for seed in range(40)}
    assert chosen == {"w0", "w1", "w2"}
