from math import e
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.kv.index import WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy, hit_tokens

W, OTHER = WorkerId("w0"), WorkerId("w1")


def opened(mode="exact"):
    trust = PredictionAccuracy()
    trust.record_feed_start(W, mode)
    return trust


def until_state(trust, state, predicted, cached, most=1000):
    """How many such comparisons it takes to reach a state."""
    for count in range(1, most + 1):
        trust.record_comparison(W, predicted, cached, 1000, now=float(count))
        if trust.state(W) == state:
            return count
    return None


def test_a_worker_is_what_its_feed_is_until_answers_say_otherwise():
    assert opened().state(W) == "exact"
    assert opened("estimate").state(W) == "estimate"
    assert opened().state(OTHER) == "estimate"


@pytest.mark.parametrize(("predicted", "cached"), [(900, 0), (0, 900), (900, 500), (500, 900)])
def test_persistent_disagreement_degrades_whichever_side_is_too_high(predicted, cached):
    trust = opened()
    for now in range(5):
        trust.record_comparison(W, predicted, cached, 1000, float(now))
    assert trust.state(W) == "exact"
    trust.record_comparison(W, predicted, cached, 1000, 5.0)
    assert trust.state(W) == "degraded"


def test_a_gap_degrades_at_once_and_eighteen_agreements_in_a_row_heal():
    trust = opened()
    trust.record_lost_events(W)
    assert trust.state(W) == "degraded"
    assert until_state(trust, "exact", 900, 900) == 18


def test_gap_on_a_degraded_worker_restarts_its_healing():
    trust = opened()
    trust.record_lost_events(W)
    for now in range(17):
        trust.record_comparison(W, 900, 900, 1000, float(now))
    trust.record_lost_events(W)
    assert until_state(trust, "exact", 900, 900) == 18


def test_a_gap_means_nothing_to_a_worker_whose_holdings_are_guessed():
    trust = opened("estimate")
    trust.record_lost_events(W)
    assert until_state(trust, "degraded", 900, 0) is None
    assert trust.state(W) == "estimate"


def test_agreement_on_prompts_that_nobody_has_cached_neither_heals_nor_hides():
    trust = opened()
    trust.record_lost_events(W)
    assert until_state(trust, "exact", 0, 0) is None
    trust.record_feed_start(W, "exact")
    for now in range(6):  # an index that hears nothing: right on every new prompt, wrong on every known one
        trust.record_comparison(W, 0, 900, 1000, float(now))
        for _ in range(50):
            trust.record_comparison(W, 0, 0, 1000, float(now))
    assert trust.state(W) == "degraded"


def test_one_block_off_in_a_long_prompt_is_no_disagreement():
    trust = opened()
    assert until_state(trust, "degraded", 900, 1000) is None
    assert until_state(trust, "degraded", 900, 899) is None


def test_a_new_boot_starts_without_the_old_ones_doubt_and_error():
    trust = opened()
    assert until_state(trust, "degraded", 900, 0)
    trust.record_feed_start(W, "exact")
    assert (trust.state(W), trust.error_share(W)) == ("exact", 0.0)
    assert until_state(trust, "degraded", 900, 0) == 6


def test_what_comes_after_forget_leaves_nothing_behind():
    trust = opened()
    trust.record_comparison(W, 900, 0, 1000, 1.0)
    trust.forget(W)
    trust.forget(W)
    trust.record_lost_events(W)
    trust.record_comparison(W, 900, 0, 1000, 2.0)
    assert (trust.state(W), trust.error_share(W), len(trust)) == ("estimate", 0.0, 0)


def test_the_error_is_tokens_off_per_prompt_token_and_the_past_fades():
    trust = opened()
    assert trust.error_share(W) == 0.0
    assert not dict(trust.error_shares())
    trust.record_comparison(W, 500, 0, 1000, 0.0)
    trust.record_comparison(W, 0, 100, 1000, 0.0)
    assert trust.error_share(W) == pytest.approx(0.3)
    trust.record_comparison(W, 500, 500, 1000, 300.0)
    assert trust.error_share(W) == pytest.approx(600 / e / (2000 / e + 1000))
    assert dict(trust.error_shares()) == {W: trust.error_share(W)}
    trust.record_comparison(W, 500, 500, 1000, 3000.0)
    assert trust.error_share(W) < 0.001
    trust.record_comparison(W, 10, 0, 0, 3000.0)  # no prompt tokens: nothing to compare with
    assert trust.error_share(W) < 0.001


def test_an_estimates_error_is_measured_too():
    trust = opened("estimate")
    trust.record_comparison(W, 500, 0, 1000, 0.0)
    assert trust.error_share(W) == 0.5


@pytest.mark.parametrize(
    ("disagree", "least", "most"),
    [(0.1, 5_000, None), (0.5, 6, 60), (0.8, 6, 20)],
)
def test_noise_is_borne_and_a_broken_index_is_not(disagree, least, most):
    """Median comparisons to the first `degraded` over 200 runs."""

    def first(seed):
        rng, trust = Random(seed), opened()
        for count in range(1, 5_001):
            trust.record_comparison(W, 900, 0 if rng.random() < disagree else 900, 1000, float(count))
            if trust.state(W) == "degraded":
                return count
        return 10_000

    middle = median(first(seed) for seed in range(200))
    assert least <= middle
    assert most is None or middle <= most


def test_a_degraded_worker_heals_under_ordinary_noise():
    def healed(seed):
        rng, trust = Random(seed), opened()
        trust.record_lost_events(W)
        for count in range(1, 1_001):
            trust.record_comparison(W, 900, 0 if rng.random() < 0.1 else 900, 1000, float(count))
            if trust.state(W) == "exact":
                return count
        return 10_000

    assert median(healed(seed) for seed in range(200)) < 50


@pytest.mark.parametrize(
    ("depth_blocks", "prompt_tokens", "expected"),
    [(0, 64, 0), (2, 64, 32), (2, 65, 64), (1, 32, 0), (1, 33, 32), (0, 0, 0)],
)
def test_hit_never_includes_the_block_of_the_last_token(depth_blocks, prompt_tokens, expected):
    assert hit_tokens(depth_blocks, 32, prompt_tokens) == expected


STEPS = st.one_of(
    st.tuples(st.just("record_feed_start"), st.sampled_from(["exact", "estimate"])),
    st.tuples(st.just("record_lost_events")),
    st.tuples(st.just("forget")),
    st.tuples(
        st.just("record_comparison"),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.floats(0, 1e6),
    ),
)


@given(st.lists(STEPS, max_size=80))
def test_accuracy_stays_in_range_and_workers_are_independent(steps):
    trust = PredictionAccuracy()
    trust.record_feed_start(OTHER, "exact")
    is_open = None
    for name, *arguments in steps:
        getattr(trust, name)(W, *arguments)
        is_open = arguments[0] if name == "record_feed_start" else None if name == "forget" else is_open
        if is_open == "exact":
            assert trust.state(W) in {"exact", "degraded"}
            assert trust.state(W) == "degraded" or name != "record_lost_events"
        else:
            assert trust.state(W) == "estimate"
        assert trust.error_share(W) >= 0
        assert (trust.state(OTHER), trust.error_share(OTHER)) == ("exact", 0.0)
