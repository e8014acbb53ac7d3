"""The state machine of a rollout."""

import json
from dataclasses import replace
from math import hypot, sqrt
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.core.rollout import (
    RolloutObservation,
    aborted_rollout,
    advance,
    current_targets,
    missing_by_adapter,
    paused_rollout,
    regression_reason,
    regression_so_far,
    replica_floors,
    resumed_rollout,
    targets_at,
    with_last_step,
)
from orchestrator.model.served_names import (
    AliasTarget,
    RequestTally,
    Rollout,
    RolloutSpec,
    RolloutStep,
    ServedName,
    weight_pairs,
)
from orchestrator.store.tables import NAMES
from tests.properties import examples

OLD, NEW = "sql/v1", "sql/v2"
GUARD = RolloutSpec(to=NEW, max_error_rate_increase=0.02, max_first_token_ratio=1.5, min_requests=50)
GOOD = RequestTally(100, 0, 100, 10.0)
BAD = RequestTally(100, 30, 100, 10.0)
SLOW = RequestTally(100, 0, 100, 40.0)
BOTH = frozenset({OLD, NEW})


def whole(*steps):
    """The steps, and the last one."""
    return with_last_step(replace(GUARD, steps=steps)).steps


def a_rollout(*steps, is_watched=True, **more):
    spec = with_last_step(replace(GUARD, steps=steps or (RolloutStep(0.1, 60), RolloutStep(0.5, 60))))
    return Rollout(
        before=(AliasTarget(OLD, 1.0),),
        after=(AliasTarget(NEW, 1.0),),
        spec=spec if is_watched else None,
        began_at=0.0,
        since=0.0,
        **more,
    )


def weights(targets):
    return dict(weight_pairs(targets))


def seen(old=4, new=0, *, tally=GOOD, **more):
    return RolloutObservation(ready={OLD: old, NEW: new}, known=BOTH, old=GOOD, new=tally, **more)


def walked(rollout, looks):
    """(rollout, all targets of the alias) after these (now, observation)."""
    said = []
    for now, look in looks:
        for turn in range(10):
            rollout, targets = advance(
                rollout, replace(look, old=RequestTally(), new=RequestTally()) if turn else look, now
            )
            said += [weights(targets)] if targets is not None else []
    return rollout, said


def test_each_step_waits_for_its_share_of_replicas():
    rollout, said = walked(a_rollout(), [(0, seen(4, 0))])
    assert (rollout.phase, said, replica_floors(rollout)) == ("placing", [], {OLD: 4, NEW: 1})
    rollout, said = walked(rollout, [(5, seen(4, 1))])
    assert (rollout.phase, said) == ("watching", [{OLD: 0.9, NEW: 0.1}])
    rollout, said = walked(rollout, [(66, seen(4, 1))])
    assert (rollout.phase, rollout.step, said, replica_floors(rollout)) == ("placing", 1, [], {OLD: 4, NEW: 2})
    rollout, said = walked(rollout, [(70, seen(4, 2)), (131, seen(4, 2)), (140, seen(4, 3))])
    assert (rollout.phase, rollout.step, said) == ("placing", 2, [{OLD: 0.5, NEW: 0.5}])
    rollout, said = walked(rollout, [(150, seen(4, 4))])
    assert (rollout.phase, said, replica_floors(rollout)) == ("done", [{NEW: 1.0}], {})


@pytest.mark.parametrize(("bad", "why"), [(BAD, "error rate 30.0%"), (SLOW, "first token after 0.4 s")])
def test_a_worse_version_is_rolled_back_at_once(bad, why):
    rollout, _ = walked(a_rollout(), [(0, seen(4, 4))])
    rollout, said = walked(rollout, [(3, seen(4, 4, tally=bad))])
    assert (rollout.phase, said) == ("rolled_back", [{OLD: 1.0}])
    assert why in rollout.reason
    assert walked(rollout, [(9, seen(4, 4))]) == (rollout, [])


def test_a_paused_rollout_stays_where_it_is_and_still_goes_back():
    rollout, _ = walked(a_rollout(), [(0, seen(4, 4))])
    rollout = paused_rollout(rollout, 10.0)
    assert walked(rollout, [(1000, seen(4, 4))])[1] == []
    assert walked(rollout, [(1000, seen(4, 4, tally=BAD))])[1] == [{OLD: 1.0}]
    rollout = resumed_rollout(rollout, 1000.0)
    # Of its 60 s ten had passed.
    assert walked(rollout, [(1049, seen(4, 4))])[1] == []
    assert walked(rollout, [(1051, seen(4, 4))])[1] == [{OLD: 0.5, NEW: 0.5}]


def test_a_clock_that_is_set_back_begins_the_time_of_a_step_anew():
    rollout, _ = walked(a_rollout(), [(5000, seen(4, 4))])
    rollout, said = walked(rollout, [(1400, seen(4, 4)), (1459, seen(4, 4))])
    assert (rollout.phase, said) == ("watching", [])
    assert walked(rollout, [(1461, seen(4, 4))])[1] == [{OLD: 0.5, NEW: 0.5}]
    rollout, _ = walked(paused_rollout(rollout, 1459.0), [(100, seen(4, 4))])
    rollout = resumed_rollout(rollout, 900.0)
    assert walked(rollout, [(959, seen(4, 4))])[1] == []
    assert walked(rollout, [(961, seen(4, 4))])[1] == [{OLD: 0.5, NEW: 0.5}]


def test_a_step_lasts_until_it_has_enough_requests():
    few = RequestTally(10, 0, 10, 1.0)
    rollout, _ = walked(a_rollout(), [(0, seen(4, 4, tally=few))])
    rollout, said = walked(rollout, [(1000, seen(4, 4, tally=few))])
    assert (rollout.phase, said) == ("watching", [])
    rollout, said = walked(rollout, [(1001, seen(4, 4, tally=RequestTally(40, 0, 40, 4.0)))])
    assert said == [{OLD: 0.5, NEW: 0.5}]


def test_an_unplaceable_version_fails_with_a_reason():
    look = seen(4, 1, unplaced={NEW: "no free slot on 3 workers"})
    rollout, said = walked(a_rollout(RolloutStep(1.0, 0)), [(0, look), (299, look)])
    assert (rollout.phase, said) == ("placing", [])
    rollout, said = walked(rollout, [(300, look)])
    assert (rollout.phase, said) == ("failed", [])
    assert rollout.reason == "not placed within 300 s: sql/v2: 1 of 4 replicas ready (no free slot on 3 workers)"
    look = seen(4, 4, unusable={NEW: "rank 512 is over 64"})
    rollout, said = walked(a_rollout(), [(0, look)])
    assert (rollout.phase, said) == ("failed", [])
    assert "rank 512" in rollout.reason


def test_an_unplaceable_later_step_is_rolled_back():
    rollout, _ = walked(a_rollout(), [(0, seen(4, 1)), (61, seen(4, 1))])
    assert (rollout.phase, rollout.step) == ("placing", 1)
    rollout, said = walked(rollout, [(400, seen(4, 1))])
    assert (rollout.phase, said) == ("rolled_back", [{OLD: 1.0}])


def test_an_unusable_version_is_rolled_back_without_enough_requests():
    rollout, said = walked(a_rollout(), [(0, seen(4, 4)), (10, seen(4, 4, tally=RequestTally()))])
    assert (rollout.phase, said) == ("watching", [{OLD: 0.9, NEW: 0.1}])
    look = seen(4, 4, tally=RequestTally(), unusable={NEW: "adapter_refused: the engine says no"})
    for now_paused in (rollout, paused_rollout(rollout, 15)):
        ended, said = walked(now_paused, [(20, look)])
        assert (ended.phase, said) == ("rolled_back", [{OLD: 1.0}])
        assert ended.reason == "sql/v2 cannot be used: adapter_refused: the engine says no"


def test_an_unplaced_old_version_needs_no_replicas_of_the_new():
    assert walked(a_rollout(RolloutStep(1.0, 0)), [(0, seen(0, 0))])[1] == [{NEW: 1.0}]
    look = RolloutObservation(known=frozenset({OLD}))
    assert missing_by_adapter(a_rollout(RolloutStep(1.0, 0)), look) == {NEW: "not inspected yet"}
    assert missing_by_adapter(a_rollout(RolloutStep(1.0, 0)), RolloutObservation()) == {}


def test_max_replicas_of_the_policy_are_enough_to_shift():
    assert walked(a_rollout(RolloutStep(1.0, 0)), [(0, seen(4, 2, most={NEW: 2}))])[1] == [{NEW: 1.0}]


def canary(*steps, **more):
    return replace(a_rollout(*steps, **more), before=(AliasTarget(OLD, 9.0), AliasTarget(NEW, 1.0)))


@pytest.mark.parametrize("weight", [0.3, 0.5, 0.95])
def test_a_canary_gets_exactly_the_steps_share(weight):
    rollout = canary(RolloutStep(weight, 60))
    assert weights(targets_at(rollout, 0)) == pytest.approx({OLD: 1 - weight, NEW: weight})
    assert weights(targets_at(rollout, 1)) == {NEW: 1.0}


def test_a_canary_keeps_a_larger_share_it_already_has():
    assert weights(targets_at(canary(RolloutStep(0.05, 60)), 0)) == pytest.approx({OLD: 0.9, NEW: 0.1})


@pytest.mark.parametrize(("old", "new", "whole"), [(1, 1, 1), (4, 1, 4), (9, 1, 10), (3, 0, 3), (0, 0, 0)])
def test_a_rollout_from_a_canary_needs_replicas_for_all_traffic(old, new, whole):
    looks = [(0, seen(old, new)), (61, seen(old, whole)), (122, seen(old, whole))]
    rollout, said = walked(canary(RolloutStep(0.5, 60)), looks)
    assert (rollout.phase, said[-1], rollout.scale) == ("done", {NEW: 1.0}, whole)


def test_a_version_waits_for_at_most_as_many_replicas_as_fit():
    look = seen(5, 2, room={NEW: 2})
    assert walked(a_rollout(RolloutStep(1.0, 0)), [(0, look)])[1] == [{NEW: 1.0}]
    assert missing_by_adapter(replace(a_rollout(), scale=4), seen(4, 0, room={NEW: 0})) == {
        NEW: "0 of 1 replicas ready"
    }


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_a_sound_version_completes_from_any_former_targets(old, target, workers, rising):
    """Old targets with weights and replicas, at most as many as workers."""
    names = [f"sql/v{number}" for number in range(len(old))]
    to = f"sql/v{target}"
    before = tuple(AliasTarget(name, float(weight)) for name, (weight, _) in zip(names, old, strict=True))
    assume([target.lora_id for target in before] != [to])
    ready = {name: min(count, workers) for name, (_, count) in zip(names, old, strict=True)}
    steps = whole(*(RolloutStep(weight, 60.0) for weight in rising))
    spec = replace(GUARD, to=to, steps=steps)
    rollout = Rollout(before=before, after=(AliasTarget(to, 1.0),), spec=spec, began_at=0.0, since=0.0)
    room, known = dict.fromkeys([*names, to], workers), frozenset([*names, to])
    for look in range(3 * len(steps) + 3):
        least = replica_floors(rollout)
        ready |= {name: max(ready.get(name, 0), min(least.get(name, 0), workers)) for name in room}
        share = weights(current_targets(rollout)).get(to, 0.0) / sum(weights(current_targets(rollout)).values())
        rollout, targets = advance(
            rollout, RolloutObservation(ready=dict(ready), room=room, known=known, new=GOOD), 61.0 * look
        )
        if targets is not None and rollout.phase == "watching":
            asked = rollout.steps[rollout.step].weight
            assert weights(targets)[to] == pytest.approx(max(asked, share))
    assert rollout.phase == "done"


def test_an_abort_restores_the_old_targets_only_while_active():
    rollout, _ = walked(a_rollout(), [(0, seen(4, 4))])
    rollout, targets = aborted_rollout(rollout, 5.0)
    assert (rollout.phase, targets) == ("aborted", (AliasTarget(OLD, 1.0),))
    assert aborted_rollout(rollout, 6.0) == (rollout, None)


def stored_name(rollout):
    """A name with this rollout, as the store has it."""
    return json.loads(NAMES.encode(ServedName(name="sql", rollout=rollout)))


def read_rollout(body):
    """The rollout of a name, as the store reads it."""
    return NAMES.decode(json.dumps(body), "sql").rollout


def test_unknown_fields_of_a_newer_version_are_ignored():
    rollout = a_rollout(scale=3)
    body = stored_name(rollout) | {"later": 1}
    body["rollout"] |= {"later": 1}
    steps = [dict(step) | {"later": 1} for step in body["rollout"]["spec"]["steps"]]
    body["rollout"]["spec"] |= {"later": 1, "steps": steps}
    assert read_rollout(body) == rollout
    with pytest.raises(ValueError, match="missing required field"):
        read_rollout({"name": "sql", "rollout": {}})


def test_equal_versions_are_not_told_apart_by_chance():
    """200 rollouts of a sound version with 5 % errors of both versions, compared every 20 requests."""
    rng, rolled_back = Random(7), 0
    for _ in range(200):
        old = new = RequestTally()
        for _ in range(50):
            old += RequestTally(20, sum(rng.random() < 0.05 for _ in range(20)))
            new += RequestTally(20, sum(rng.random() < 0.05 for _ in range(20)))
            if regression_reason(GUARD, old, new) is not None:
                rolled_back += 1
                break
    assert rolled_back < 10


def bounds(tally):
    """Wilson's interval by its definition: the rates that lie within 2.576 of their own deviations of what was seen."""

    def edge(seen, end):
        near, far = seen, end
        for _ in range(100):
            middle = (near + far) / 2
            is_in = abs(seen - middle) <= 2.576 * sqrt(middle * (1 - middle) / tally.requests)
            near, far = (middle, far) if is_in else (near, middle)
        return near

    return edge(tally.error_rate, 0.0), edge(tally.error_rate, 1.0)


COUNTS = st.integers(10, 2000).flatmap(lambda n: st.builds(RequestTally, st.just(n), st.integers(0, n)))


@given(COUNTS, COUNTS)
def test_a_version_is_worse_when_newcombes_interval_is_above_zero(old, new):
    increase = new.error_rate - old.error_rate
    spread = hypot(new.error_rate - bounds(new)[0], bounds(old)[1] - old.error_rate)
    assume(abs(increase - spread) > 1e-9)
    guard = RolloutSpec(to=NEW, max_error_rate_increase=0.0, min_requests=10)
    assert (regression_reason(guard, old, new) is not None) == (increase > max(0.0, spread))


def test_first_tokens_are_compared_once_there_are_enough_of_both():
    assert (
        regression_reason(GUARD, RequestTally(100, 0, 50, 5.0), RequestTally(100, 0, 50, 7.6))
        == "first token after 0.152 s on average, against 0.1 s"
    )
    assert regression_reason(GUARD, RequestTally(100, 0, 50, 5.0), RequestTally(100, 0, 50, 7.4)) is None
    assert regression_reason(GUARD, RequestTally(100, 0, 49, 4.9), RequestTally(100, 0, 50, 50.0)) is None
    assert regression_reason(GUARD, RequestTally(100, 0, 50, 5.0), RequestTally(100, 0, 49, 49.0)) is None


def test_a_version_is_worse_so_far_before_its_step_has_all_requests():
    new = RequestTally(20, 0, 20, 8.0)
    rollout = replace(a_rollout(), old=GOOD, new=new)
    assert regression_reason(GUARD, GOOD, new) is None
    assert regression_so_far(rollout) == "first token after 0.4 s on average, against 0.1 s"
    assert regression_so_far(replace(rollout, new=RequestTally(20, 0, 20, 2.0))) is None
    assert regression_so_far(replace(rollout, spec=None)) is None


def test_a_tenth_more_errors_is_detected_within_a_few_hundred_requests():
    rng = Random(7)
    for _ in range(50):
        old, new = RequestTally(1000, 10), RequestTally()
        while regression_reason(GUARD, old, new) is None:
            new += RequestTally(20, sum(rng.random() < 0.11 for _ in range(20)))
        assert new.requests <= 400


def test_few_requests_tell_nothing_and_without_first_tokens_only_errors_count():
    assert regression_reason(GUARD, GOOD, RequestTally(49, 49)) is None
    assert regression_reason(RolloutSpec(to=NEW, min_requests=0), GOOD, RequestTally(9, 9)) is None
    assert regression_reason(GUARD, RequestTally(100, 0), RequestTally(100, 0, 100, 99.0)) is None
    assert regression_reason(RolloutSpec(to=NEW, max_first_token_ratio=None), GOOD, SLOW) is None


TALLIES = st.builds(
    lambda requests, errors, first_s: RequestTally(requests, min(errors, requests), requests, requests * first_s),
    st.sampled_from([0, 3, 60, 500]),
    st.sampled_from([0, 0, 0, 1, 40]),
    st.sampled_from([0.1, 0.1, 0.11, 0.9]),
)
LOOKS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 30.0, 400.0]), st.integers(0, 5), st.integers(0, 5), TALLIES, TALLIES),
    max_size=25,
)
WAYS = st.lists(
    st.tuples(st.sampled_from([0.05, 0.25, 0.5, 0.75, 1.0]), st.sampled_from([0.0, 10.0, 60.0])), min_size=1, max_size=4
).map(lambda pairs: whole(*(RolloutStep(*pair) for pair in sorted(dict(pairs).items()))))


@settings(max_examples=examples(200))
@given(WAYS, LOOKS, st.booleans())
def test_a_rollout_shifts_only_to_ready_targets_or_fully_back(steps, looks, watched):
    rollout = a_rollout(*steps, is_watched=watched)
    points_at, share, now = rollout.before, 0.0, 0.0
    for after_s, old, new, old_tally, new_tally in looks:
        now += after_s
        look = RolloutObservation(ready={OLD: old, NEW: new}, known=BOTH, old=old_tally, new=new_tally)
        previous = rollout
        rollout, targets = advance(rollout, look, now)
        assert read_rollout(stored_name(rollout)) == rollout
        if targets is not None:
            points_at = targets
            assert sum(weights(targets).values()) == pytest.approx(1.0)
            gained = weights(targets).get(NEW, 0.0)
            if rollout.phase == "rolled_back":
                assert targets == rollout.before
            else:
                assert gained > share
                assert new >= replica_floors(rollout).get(NEW, 0)
                assert targets == targets_at(rollout, rollout.step)
            share = gained
        if not previous.is_active:
            assert (rollout, targets) == (previous, None)
        assert points_at == current_targets(rollout)
    if not rollout.is_active:
        assert points_at == (rollout.after if rollout.phase == "done" else rollout.before)


@settings(max_examples=examples(50))
@given(WAYS)
def test_an_equally_good_version_completes(steps):
    rollout, said = walked(a_rollout(*steps), [(100.0 * look, seen(3, 3)) for look in range(3 * len(steps))])
    assert (rollout.phase, said[-1]) == ("done", {NEW: 1.0})
    assert len(said) == len(steps)


@settings(max_examples=examples(50))
@given(WAYS)
def test_a_failing_version_never_completes_under_a_guard(steps):
    steps = tuple(RolloutStep(step.weight, max(1.0, step.for_s)) for step in steps)
    rollout, said = walked(a_rollout(*steps), [(100.0 * look, seen(3, 3, tally=BAD)) for look in range(9)])
    assert (rollout.phase, said[-1]) == ("rolled_back", {OLD: 1.0})
    assert len(said) == 2
