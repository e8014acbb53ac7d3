"""The lease of a pause, and when it is in force, as pure functions of calls and times."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.pauses import (
    PAUSE_MODES,
    PauseProgress,
    PauseScope,
    expired_scopes,
    granted,
    pause_progress,
)
from orchestrator.core.routers import KnownRouter
from tests.orchestrator.reports import CountingRouter

SCOPES = [PauseScope(), PauseScope("acme"), PauseScope("acme", "run-1"), PauseScope(None, "run-1")]
# Seconds since the call before, and the lease that each call asks for.
CALLS = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 100), st.sampled_from(PAUSE_MODES)), min_size=1)


@given(CALLS)
def test_a_lease_lasts_until_the_latest_end_that_a_call_asked_for_and_begins_anew_after_that(calls):
    scope, now, lease = SCOPES[1], 1000.0, None
    latest, began_at = 0.0, 0.0
    for pause_s, lease_s, mode in calls:
        now += pause_s
        is_new = latest <= now
        began_at, latest = (now, now + lease_s) if is_new else (began_at, max(latest, now + lease_s))
        lease = granted(lease, scope, mode, "me", lease_s, now)
        assert (lease.began_at, lease.expires_at, lease.mode) == (began_at, latest, mode)
        assert (lease.renewals == 0) is is_new
        # A router that has just read this call holds until the lease's end, by its own clock.
        assert abs(lease.lease_s - (latest - now)) < 1e-6
        assert expired_scopes({scope.key: lease}, latest) == [scope.key]
        assert expired_scopes({scope.key: lease}, (now + latest) / 2) == []


def test_each_call_differs_from_those_before_so_that_a_router_knows_it_as_new():
    lease, seen = None, set()
    for now in (0.0, 1.0, 2.0, 90.0, 91.0):
        lease = granted(lease, SCOPES[0], "keep", "me", 60.0, now)
        assert (lease.began_at, lease.renewals) not in seen
        seen.add((lease.began_at, lease.renewals))


def test_every_scope_has_its_own_key_and_name():
    assert len({scope.key for scope in SCOPES}) == len({scope.text for scope in SCOPES}) == len(SCOPES)
    assert PauseScope('a", "b').key != PauseScope("a", "b").key


@given(st.lists(st.tuples(st.integers(8, 12), st.integers(0, 3))))
def test_a_pause_is_reached_once_every_router_holds_and_where_asked_nothing_runs(reports):
    routers = [
        KnownRouter(CountingRouter().report(revision, running_in_pause={"k": running}), 0.0)
        for revision, running in reports
    ]
    progress = pause_progress("k", 10, routers)
    holding = [running for revision, running in reports if revision >= 10]
    assert progress == PauseProgress(len(reports) - len(holding), sum(holding))
    assert progress.is_reached("keep") is (len(holding) == len(reports))
    assert progress.is_reached("wait") is progress.is_reached("abort")
    assert progress.is_reached("wait") is (len(holding) == len(reports) and not sum(holding))
