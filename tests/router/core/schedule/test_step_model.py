"""The model of an engine's step, and the costs that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet import EngineReport, Roster
from router.core.schedule.cost import replica_score
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import FleetLoad, ReplicaLoad
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot
from router.core.schedule.step_model import StepModel, batch_s, running_step_s, step_model
from tests.router.core.schedule.test_policy import a_replica

STEPS = st.builds(StepModel, st.floats(0, 0.2), st.floats(0, 0.01), st.floats(0, 1e-6), st.floats(1e-6, 1e-2))
BATCHES = st.tuples(st.integers(0, 200), st.integers(0, 100_000))


def a_load(sequences: int, context_tokens: float) -> ReplicaLoad:
    return ReplicaLoad(in_decode=sequences, kv_tokens=1e8, kv_free_tokens=1e8 - context_tokens)


@given(STEPS, BATCHES, st.integers(0, 100_000))
def test_a_batch_costs_what_one_sequence_more_adds_to_all_steps_together(step, batch, prompt):
    # n sequences a step of s(n): what all of them wait for, n * s(n), with the new one less what each waits for alone.
    sequences, context = batch[0], batch[0] * batch[1]
    before = sequences * step.decode_s(sequences, context)
    after = (sequences + 1) * step.decode_s(sequences + 1, context + prompt)
    added = after - before - step.decode_s(1, prompt)
    assert batch_s(step, a_load(sequences, context), prompt) == pytest.approx(added, rel=1e-6, abs=1e-6)


@given(STEPS, BATCHES)
def test_nothing_is_waited_for_where_nothing_decodes(step, batch):
    assert running_step_s(step, a_load(0, batch[1])) == 0.0
    assert running_step_s(step, a_load(1 + batch[0], batch[1])) == step.decode_s(1 + batch[0], batch[1])


def test_a_replica_without_a_step_of_its_own_has_the_fleets():
    known = a_replica("w0", report=EngineReport(token_s=0.02, sequence_s=0.001, context_token_s=1e-7))
    unknown = a_replica("w1")
    middle, costs = Roster((known, unknown)).middle, CostSettings()
    assert step_model(unknown, middle, costs) == step_model(known, middle, costs)
    assert step_model(unknown, Roster((unknown,)).middle, costs)[:3] == (0.0, 0.0, 0.0)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 100_000))
def test_a_larger_batch_is_never_cheaper_to_join(some, more, prompt):
    report = EngineReport(token_s=0.02, sequence_s=0.001, context_token_s=1e-7, output_tokens=200.0)
    replicas = (a_replica("w0", report=report), a_replica("w1", report=report))
    loads = FleetLoad.of([a_load(some, some * 1000), a_load(some + more, (some + more) * 1000)])
    snapshot = FleetSnapshot(roster=Roster(replicas), loads=loads, depths={})
    small, large = (replica_score(RoutingRequest("m", "", prompt), snapshot, n) for n in (0, 1))
    assert large.harm_s >= small.harm_s
    assert large.step_s >= small.step_s
    assert large.cost_s >= small.cost_s
