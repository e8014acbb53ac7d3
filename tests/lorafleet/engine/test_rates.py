"""Rates measured from an engine's counters, compared with the simulated engine's true rates."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.engine.agentless import EngineLoad
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.engine.rates import COUNTERS, USUAL_PREFILL_TOKENS_PER_S, EngineRates
from router.core.schedule.cost_settings import CostSettings
from tests.properties import examples, sample
from tests.simulated import SimulatedEngine

Lengths = Callable[[Random], float]


def short_length(rng: Random) -> float:
    return min(2_000, rng.lognormvariate(5.3, 0.6))


def long_length(rng: Random) -> float:
    return min(30_000, rng.lognormvariate(8.7, 0.7))


def mixed_length(rng: Random) -> float:
    return short_length(rng) if rng.random() < 0.7 else long_length(rng)


def answer_length(rng: Random) -> float:
    return min(1_000, rng.lognormvariate(4.8, 0.7))


class SteadyLoad:
    """Requests that arrive at a steady rate, independent of earlier ones."""

    def __init__(self, *, prefill: float, token_s: float, seed: int) -> None:
        self.engine = SimulatedEngine(prefill=prefill, token_s=token_s)
        self.rng = Random(seed)

    def readings(self, prompts: Lengths, per_s: float, seconds: float) -> Iterator[EngineMetrics]:
        """One reading per second, while requests arrive at `per_s`."""
        engine = self.engine
        end, arrival = engine.now + seconds, engine.now + self.rng.expovariate(per_s)
        while engine.now < end:
            readings, _ = engine.advance(arrival)
            yield from readings
            while arrival <= engine.now:
                engine.ask(max(1, int(prompts(self.rng))), max(1, int(answer_length(self.rng))))
                arrival += self.rng.expovariate(per_s)


def relative_errors(rates: EngineRates, load: SteadyLoad) -> tuple[float, float]:
    """Relative errors of the prefill rate and of one token's time."""
    pace = load.engine.batch.pace
    return (
        rates.prefill_tokens_per_s / pace.prefill_tokens_per_s - 1,
        pace.decode_tokens_per_s / rates.decode_tokens_per_s - 1,
    )


SPEEDS = [(20_000, 0.02), (16_000, 0.024)]
LEVELS = {
    "short, light": (short_length, 0.3),
    "short, medium": (short_length, 8.0),
    "short, saturated": (short_length, 60.0),
    "long, light": (long_length, 0.15),
    "long, medium": (long_length, 1.0),
    "mixed, light": (mixed_length, 0.3),
    "mixed, medium": (mixed_length, 3.0),
    "mixed, saturated": (mixed_length, 5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("level", sample(list(LEVELS), 5))
@pytest.mark.parametrize(("prefill", "token_s"), sample(SPEEDS, 1))
def test_two_minutes_of_load_give_both_rates_within_ten_percent(level, prefill, token_s):
    prompts, per_s = LEVELS[level]
    load, rates = SteadyLoad(prefill=prefill, token_s=token_s, seed=3), EngineRates()
    for reading in load.readings(prompts, per_s, 150):
        rates.add(reading)
    prefill_off, token_off = relative_errors(rates, load)
    assert abs(prefill_off) < 0.10
    assert abs(token_off) < 0.10


def test_rates_stay_right_under_long_prompts_after_a_calm_moment():
    load, rates = SteadyLoad(prefill=20_000, token_s=0.02, seed=1), EngineRates()
    for per_s, seconds in ((0.15, 60), (2.6, 120)):
        for reading in load.readings(long_length, per_s, seconds):
            rates.add(reading)
    prefill_off, token_off = relative_errors(rates, load)
    assert abs(prefill_off) < 0.10
    assert abs(token_off) < 0.10
    assert rates.inter_token_s > 0.08


def test_rate_without_a_calm_moment_is_low_by_the_decode_share():
    load, rates = SteadyLoad(prefill=20_000, token_s=0.02, seed=1), EngineRates()
    for reading in load.readings(long_length, 2.6, 120):
        rates.add(reading)
    prefill_off, _ = relative_errors(rates, load)
    assert -0.20 < prefill_off < 0.05


def test_inter_token_time_and_request_size_follow_recent_requests():
    load, rates = SteadyLoad(prefill=20_000, token_s=0.02, seed=2), EngineRates()
    for reading in load.readings(short_length, 8.0, 90):
        rates.add(reading)
    totals = load.engine.totals
    assert rates.inter_token_s == pytest.approx(totals["gap_seconds"] / totals["token_gaps"], rel=0.15)
    assert rates.mean_output_tokens == pytest.approx(totals["ended_output_tokens"] / totals["ended"], rel=0.15)
    assert rates.mean_request_s == pytest.approx(totals["ended_seconds"] / totals["ended"], rel=0.15)


def test_rates_are_zero_until_measured():
    rates = EngineRates()
    for second in range(60):
        rates.add(EngineMetrics(at_s=float(second), running=second % 2))
    figures = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s, rates.inter_token_s)
    assert (*figures, rates.mean_output_tokens, rates.mean_request_s) == (0.0,) * 5


def test_first_request_alone_gives_a_rate():
    rates = EngineRates()
    rates.add(EngineMetrics(at_s=0.0, running=0))
    rates.add(EngineMetrics(at_s=1.0, running=0, computed_tokens=900, steps=11, ended=1, ended_prefill_tokens=900,
                      ended_prefill_seconds=0.09, ended_output_tokens=11, ended_seconds=0.29,
                      first_tokens=1, token_gaps=10, gap_seconds=0.2))  # fmt: skip
    assert rates.prefill_tokens_per_s == pytest.approx(10_000, rel=0.1)


def rates_after(lengths: Sequence[tuple[int, int]], *, prefill: float, token_s: float, users: int = 1) -> EngineRates:
    """The rates measured from requests of (prompt, answer) tokens, where each user waits for an answer first."""
    engine, rates, left = SimulatedEngine(prefill=prefill, token_s=token_s), EngineRates(), list(lengths)
    for _ in range(min(users, len(left))):
        engine.ask(*left.pop(0))
    while engine.batch.has_work:
        readings, jobs = engine.advance(math.inf)
        for reading in readings:
            rates.add(reading)
        for job in jobs:
            if job.finish_reason is not None and left:
                engine.ask(*left.pop(0))
    for reading in engine.advance(engine.now + 2.0)[0]:
        rates.add(reading)
    return rates


TWENTY = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 60), st.integers(60, 600), st.integers(600, 8_000)),
        st.one_of(st.integers(1, 4), st.integers(5, 60), st.integers(60, 400)),
    ),
    min_size=20,
    max_size=20,
)
PREFILL = st.floats(1_000, 40_000)
TOKEN_S = st.floats(0.004, 0.05)


def has_telling_prefill(prompt: int, answer_: int, prefill: float, token_s: float) -> bool:
    """Whether a prefill is long enough to give a rate, despite other costs of a step."""
    return answer_ > 1 and prompt >= 64 and prompt / prefill >= max(0.01, 2 * token_s)


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(TWENTY, PREFILL, TOKEN_S)
def test_twenty_requests_give_a_right_rate_or_none(lengths, prefill, token_s):
    rate = rates_after(lengths, prefill=prefill, token_s=token_s).prefill_tokens_per_s
    if sum(prompt for prompt, answer_ in lengths if has_telling_prefill(prompt, answer_, prefill, token_s)) >= 512:
        assert rate > 0
    assert rate == 0.0 or prefill / 1.5 <= rate <= 1.5 * prefill


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(TWENTY, PREFILL, TOKEN_S, st.integers(2, 20))
def test_concurrent_requests_never_give_a_wrong_rate(lengths, prefill, token_s, users):
    rate = rates_after(lengths, prefill=prefill, token_s=token_s, users=users).prefill_tokens_per_s
    # Above the usual rate the fastest prefill is nearer to the true rate.
    assert rate == 0.0 or min(prefill / 2, USUAL_PREFILL_TOKENS_PER_S) <= rate <= 1.5 * prefill


@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("prompt", [1, 30])
def test_short_chats_give_no_prefill_rate(prompt, users):
    rates = rates_after([(prompt, 400)] * 20, prefill=7_837, token_s=0.02, users=users)
    assert rates.prefill_tokens_per_s == 0.0
    assert rates.decode_tokens_per_s == pytest.approx(50, rel=0.1)


def test_short_chats_keep_the_rate_of_a_long_prompt():
    rates = rates_after([*[(30, 40)] * 5, (4_000, 10), *[(30, 40)] * 50], prefill=8_000, token_s=0.02)
    assert rates.prefill_tokens_per_s == pytest.approx(8_000, rel=0.1)


def test_first_prompt_of_a_warming_engine_gives_no_rate():
    rates = EngineRates()
    rates.add(EngineMetrics(at_s=0.0, running=0))
    rates.add(EngineMetrics(at_s=4.0, running=0, computed_tokens=70, steps=400, ended=1, ended_prefill_tokens=70,
                      ended_prefill_seconds=0.08, ended_output_tokens=400, ended_seconds=4.0, first_tokens=1,
                      token_gaps=399, gap_seconds=3.9))  # fmt: skip
    assert rates.prefill_tokens_per_s == 0.0


def test_prefill_seconds_counted_by_the_engine_are_used():
    rates = EngineRates()
    for second in range(5):
        rates.add(EngineMetrics(at_s=second, running=3, computed_tokens=3_000 * second, prefill_seconds=0.3 * second))
    assert rates.prefill_tokens_per_s == pytest.approx(10_000)


def test_engine_restart_does_not_spoil_the_rates():
    load, rates = SteadyLoad(prefill=20_000, token_s=0.02, seed=4), EngineRates()
    for reading in load.readings(mixed_length, 3.0, 100):
        rates.add(reading)
    learned, at_s = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s), load.engine.read_at
    again = SteadyLoad(prefill=20_000, token_s=0.02, seed=5)
    for number, reading in enumerate(again.readings(mixed_length, 3.0, 30)):
        rates.add(replace(reading, at_s=at_s + reading.at_s))
        if number == 0:
            assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s) == learned
        assert math.isfinite(rates.prefill_tokens_per_s)
        assert 0.9 * learned[0] < rates.prefill_tokens_per_s < 1.1 * learned[0]


def test_any_counters_give_finite_figures():
    rng, rates, totals = Random(7), EngineRates(), [0.0] * 11
    for second in range(400):
        totals = [
            max(0.0, total + rng.choice([0, 0, 1, 50, 4_000, -1_000 * (rng.random() < 0.02)])) for total in totals
        ]
        rates.add(
            EngineMetrics(
                at_s=second + rng.random(), running=rng.randrange(3), **dict(zip(COUNTERS, totals, strict=False))
            )
        )
        for figure in (rates.prefill_tokens_per_s, rates.decode_tokens_per_s, rates.inter_token_s):
            assert math.isfinite(figure)
            assert figure >= 0.0


def test_usual_rate_equals_the_routers_prior():
    assert CostSettings().prefill_tokens_per_s == USUAL_PREFILL_TOKENS_PER_S


def test_reading_reports_how_long_no_counter_has_moved():
    load = EngineLoad()
    assert load.current(0.0).still_s is None
    for at_s, scrape, still_s in [
        (1.0, EngineMetrics(running=1), None),
        (2.0, EngineMetrics(running=1), None),  # it may have no counters
        (5.0, EngineMetrics(running=1, kv_usage=0.1), 0.0),
        (6.0, EngineMetrics(running=1, kv_usage=0.1), 1.0),
        (8.0, EngineMetrics(running=1, kv_usage=0.1), 3.0),
        (9.0, EngineMetrics(), 0.0),
    ]:
        load.add(scrape, at_s)
        assert load.current(at_s + 9.0).still_s == still_s
    load.forget_reading()
    assert load.current(9.0).still_s is None
