"""`session`: a session stays on its replica for as long as that is there."""

from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import a_replica, choose

FLEET = [a_replica(f"w{i}") for i in range(4)]
SESSIONS = [f"session-{number}" for number in range(40)]


def home_of(session, fleet, seed=0):
    return choose(RoutingRequest("m", "", 100, session=session), fleet, policy="session", seed=seed).replica.id


def test_a_session_has_one_replica_and_sessions_spread():
    homes = {session: {home_of(session, FLEET, seed) for seed in range(3)} for session in SESSIONS}
    assert all(len(found) == 1 for found in homes.values())
    assert set().union(*homes.values()) == {"w0", "w1", "w2", "w3"}


def test_a_lost_replica_moves_its_own_sessions_alone():
    for session in SESSIONS:
        before, after = home_of(session, FLEET), home_of(session, FLEET[1:])
        assert before in (after, "w0")


def test_requests_without_a_session_are_sent_at_random():
    assert {home_of("", FLEET, seed) for seed in range(60)} == {"w0", "w1", "w2", "w3"}
