"""`round_robin`: every replica that can serve the request, in turn."""

from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import a_replica, choose


def test_each_able_replica_has_its_turn():
    fleet = [a_replica("w0"), a_replica("w1", state="draining"), a_replica("w2")]
    request = RoutingRequest("m", "", 100)
    chosen = [choose(request, fleet, policy="round_robin", turn=turn).replica.id for turn in range(5)]
    assert chosen == ["w0", "w2", "w0", "w2", "w0"]
