"""How long loads should take, of adapters of megabytes and of gigabytes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.placement.load_time import load_figures, load_s
from orchestrator.core.placement.victims import cheapest_victim
from orchestrator.core.placement.what_if import Hypothesis, what_if
from orchestrator.model.snapshot import LoadFigures
from tests.orchestrator.core.placement.test_what_if import NOW, adapter, scene, worker
from tests.properties import examples
from tests.registered import changed

MIB, GIB = 1 << 20, 1 << 30
SMALL, EXPERTS = 20 * MIB, 6 * GIB


def measured(small_s: float = 0.5, s_per_gib: float = 2.0) -> LoadFigures:
    """The figures after nine loads of an ordinary adapter, and two of gigabytes."""
    large = [(small_s + s_per_gib * gib, SMALL + int(gib * GIB)) for gib in (4, 6)]
    return load_figures([(small_s, SMALL)] * 9 + large)


def test_a_load_of_gigabytes_takes_its_bytes_at_the_speed_that_such_loads_had():
    figures = measured()
    assert load_s(SMALL, figures) == pytest.approx(0.5)
    assert load_s(SMALL + EXPERTS, figures) == pytest.approx(12.5)
    assert load_s(None, figures) == load_s(0, figures) == pytest.approx(0.5)


def test_without_a_large_load_its_bytes_take_a_network_disks_time_and_not_a_multiple_of_a_small_load():
    figures = load_figures([(0.5, SMALL)] * 9)
    assert load_s(SMALL, figures) == pytest.approx(0.5)
    assert 5 < load_s(EXPERTS, figures) < 10  # in proportion to the bytes it would be 154 s
    assert load_figures([]) == LoadFigures()
    assert 5 < load_s(EXPERTS, load_figures([(0.5, 0)] * 9)) < 10


@given(
    st.lists(st.tuples(st.floats(0, 600), st.integers(0, 8 * GIB)), max_size=30),
    st.integers(0, 64 * GIB),
    st.integers(0, 64 * GIB),
)
@settings(max_examples=examples(200))
def test_a_larger_adapter_never_loads_faster_and_never_below_the_median(loads, one, other):
    figures = load_figures(loads)
    small, large = sorted((one, other))
    assert figures.seconds <= load_s(small, figures) <= load_s(large, figures)


def test_a_plan_counts_the_seconds_and_bytes_of_each_adapter():
    adapters = [adapter("small", size_bytes=SMALL), adapter("experts", size_bytes=EXPERTS)]
    where = scene([worker("w0"), worker("w1")], [changed(each, min_replicas=1) for each in adapters])
    where = replace(where, observed=replace(where.observed, load_figures=measured()))
    outcome = what_if(where, Hypothesis(), passes=10)
    found = {step.action.lora_id: (round(step.seconds, 1), step.size_bytes) for step in outcome.steps}
    assert found == {"small": (0.5, SMALL), "experts": (12.5, EXPERTS)}
    assert outcome.seconds >= 12


def test_of_two_adapters_used_alike_the_one_that_loads_faster_makes_room():
    adapters = [adapter("experts", size_bytes=EXPERTS), adapter("small", size_bytes=SMALL), adapter("new")]
    inputs = scene([worker("w0", "experts", "small", slots=2)], adapters)
    demand = replace(
        inputs.demand,
        habits=dict.fromkeys(("experts", "small"), 0.1),
        last_request_at=dict.fromkeys(("experts", "small"), NOW - 90),
    )
    for figures in (measured(), LoadFigures()):
        observed = replace(inputs.observed, load_figures=figures)
        context = PlacementContext(inputs.intent, observed, demand, inputs.policy, NOW)
        found = cheapest_victim(context, adapters[2], observed.workers["w0"]).held
        assert found is not None
        assert found.lora_id == "small"
