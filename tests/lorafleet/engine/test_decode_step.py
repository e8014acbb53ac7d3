"""The step without prefill, fitted to made-up seconds of an engine whose step is known."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.decode_step import CONTEXT_TOKEN_SHARE, CalmSecond, DecodeStep, fit_decode_step
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.engine.rates import EngineRates

STEPS = st.builds(
    DecodeStep,
    token_s=st.floats(0.001, 0.2),
    sequence_s=st.floats(0, 0.01),
    context_token_s=st.floats(0, 1e-6),
)
BATCHES = st.tuples(st.integers(1, 256), st.floats(0, 2e6))


def second(step: DecodeStep, sequences: float, context_tokens: float) -> CalmSecond:
    return CalmSecond(step.seconds(sequences, context_tokens), sequences, context_tokens)


def test_batches_of_different_sizes_tell_the_three_parts_apart():
    step, rng = DecodeStep(0.02, 0.0008, 30e-9), Random(1)
    seen = [second(step, rng.randint(1, 60), rng.uniform(1000, 400_000)) for _ in range(40)]
    found = fit_decode_step(seen)
    for sequences, context in ((1, 1000), (60, 400_000), (100, 10_000), (5, 600_000)):
        assert found.seconds(sequences, context) == pytest.approx(step.seconds(sequences, context), rel=0.08)


@given(STEPS, BATCHES)
def test_a_single_batch_gives_its_own_step(step, batch):
    assert fit_decode_step([second(step, *batch)] * 3).seconds(*batch) == pytest.approx(step.seconds(*batch))


@given(st.lists(st.builds(CalmSecond, st.floats(1e-4, 10), st.floats(1, 500), st.floats(0, 1e7)), min_size=1))
def test_no_part_is_below_zero_and_the_step_is_within_what_was_seen(seen):
    found = fit_decode_step(seen)
    assert min(found.token_s, found.sequence_s, found.context_token_s) >= 0
    shares = [found.seconds(one.sequences, one.context_tokens) / one.step_s for one in seen]
    assert min(shares) <= 1.0001, "it is nowhere longer than seen in all seconds"


def test_a_second_that_hides_a_prefill_is_left_out():
    step = DecodeStep(0.02, 0.0002, 0.02 * CONTEXT_TOKEN_SHARE)
    seen = [second(step, 4, 8000)] * 9
    hidden = CalmSecond(0.5, 4, 8000)
    assert fit_decode_step([*seen, hidden, hidden]) == fit_decode_step(seen)


def reading(at_s: float, *, running: int, steps: float, gaps: float, gap_s: float, computed: float = 0.0):
    return EngineMetrics(
        at_s=at_s, running=running, steps=steps, token_gaps=gaps, gap_seconds=gap_s, computed_tokens=computed,
        kv_usage=0.5, total_kv_blocks=1000, block_size=16, first_tokens=running,
    )  # fmt: skip


def test_counters_of_calm_seconds_give_the_step_of_their_batch():
    rates = EngineRates()
    for n in range(8):  # four sequences, 40 steps of 25 ms a second
        rates.add(reading(float(n), running=4, steps=40.0 * n, gaps=160.0 * n, gap_s=4.0 * n))
    assert rates.decode_step.seconds(4, 8000) == pytest.approx(0.025)
    assert 0.02 < 1 / rates.decode_tokens_per_s < 0.025


def test_seconds_in_which_a_sequence_runs_without_tokens_say_nothing_of_the_step():
    rates = EngineRates()
    for n in range(8):  # a fifth one is in its prefill: two steps of half a second
        rates.add(reading(float(n), running=5, steps=2.0 * n, gaps=8.0 * n, gap_s=4.0 * n))
    for n in range(8, 16):
        rates.add(reading(float(n), running=4, steps=16 + 40.0 * (n - 8), gaps=64 + 160.0 * (n - 8), gap_s=4.0 * n))
    assert rates.decode_step.seconds(4, 8000) == pytest.approx(0.025)
