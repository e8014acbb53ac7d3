"""The canary refuses only what is proved: answers equal to the base model's, whatever noise a busy engine adds."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine import canary
from lorafleet.engine.canary import (
    MOST_READINGS,
    PROMPTS,
    BaseReadings,
    CanaryResult,
    EngineSilent,
    Fingerprint,
    compare_readings,
    run_canary,
)

LOGPROBS = (-0.25, -1.5, -3.125, -4.0, -7.75)


class CountedEngine:
    """Answers with the base model's numbers, plus the adapter's shift, plus noise of at most this size."""

    def __init__(self, *, shift: float = 0.0, noise: float = 0.0, equal_share: float = 0.0, seed: int = 0) -> None:
        self.asked: list[str | None] = []
        self._shift, self._noise, self._equal_share, self._rng = shift, noise, equal_share, Random(seed)

    async def ask(self, adapter: str | None, prompt: Sequence[int]) -> Fingerprint | None:
        self.asked.append(adapter)
        shift = self._shift if adapter else 0.0
        noise = 0.0 if self._rng.random() < self._equal_share else self._rng.uniform(-self._noise, self._noise)
        return tuple(number * (1 + prompt[0] / 1000) + shift + noise for number in LOGPROBS)


async def run(engine: CountedEngine, readings: BaseReadings | None = None, timeout_s: float = 5.0) -> CanaryResult:
    return await run_canary(engine.ask, "a@1", readings=readings or BaseReadings(), timeout_s=timeout_s)


async def test_adapter_that_changes_nothing_is_found_by_three_prompts():
    result = await run(CountedEngine())
    assert (result.outcome, result.requests) == ("none", 2 * len(PROMPTS))
    assert "to the last bit" in result.found


async def test_adapter_with_an_effect_takes_three_requests_and_the_next_one_takes_one():
    engine, readings = CountedEngine(shift=-0.7), BaseReadings()
    assert await run(engine, readings) == CanaryResult("seen", "the engine's answers change with the adapter", 3)
    assert (await run(engine, readings)).requests == 1
    assert engine.asked.count(None) == 2


async def test_small_effect_takes_three_answers_of_each_model():
    result = await run(CountedEngine(shift=-1e-6))
    assert (result.outcome, result.requests) == ("seen", 6)


async def test_base_answers_of_an_earlier_start_are_not_compared():
    readings = BaseReadings("boot-1")
    await run(CountedEngine(), readings)
    assert readings.of_boot("boot-1") is readings
    assert not readings.of_boot("boot-2").by_prompt


@given(seed=st.integers(0, 10_000), noise=st.floats(1e-6, 0.1))
def test_adapter_without_effect_is_unknown_at_an_engine_that_gives_no_answer_twice(seed, noise):
    outcome = asyncio.run(run(CountedEngine(noise=noise, seed=seed))).outcome
    assert outcome != "none"


@given(seed=st.integers(0, 10_000), noise=st.floats(1e-6, 0.5), equal_share=st.floats(0, 1))
def test_no_adapter_with_an_effect_is_ever_refused(seed, noise, equal_share):
    engine = CountedEngine(shift=-0.37, noise=noise, equal_share=equal_share, seed=seed)
    assert asyncio.run(run(engine)).outcome in {"seen", "unknown"}


def test_noise_is_seldom_taken_for_an_effect():
    for equal_share, least_none in ((0.7, 50), (0.3, 5), (0.0, 0)):
        engines = [CountedEngine(noise=0.1, equal_share=equal_share, seed=seed) for seed in range(60)]
        outcomes = [asyncio.run(run(engine)).outcome for engine in engines]
        assert outcomes.count("none") >= least_none
        assert outcomes.count("seen") <= 4


@given(
    base=st.lists(st.sampled_from([(0.0, -1.0), (0.0, -1.5), (-0.5, -1.0)]), max_size=4),
    adapter=st.lists(st.sampled_from([(0.0, -1.0), (0.0, -9.0), (-5.0, -1.0)]), max_size=4),
)
def test_verdict_does_not_depend_on_the_order_of_answers(base, adapter):
    verdict = compare_readings(base, adapter)
    assert compare_readings(base[::-1], adapter[::-1]) == verdict
    assert (verdict == "equal") == bool(set(base) & set(adapter))
    assert verdict != "different" or len(base) >= 2


def test_one_answer_of_the_base_model_proves_no_difference():
    assert compare_readings([(0.0,)], [(-1.0,)]) == "unclear"
    assert compare_readings([(0.0,), (0.0,)], [(-1.0,)]) == "different"
    assert compare_readings([(0.0,), (-0.5,)], [(-1.0,)]) == "unclear"


def test_answers_that_are_no_numbers_are_no_evidence():
    nan = float("nan")
    assert compare_readings([(0.0,), (0.0,)], [(nan,)]) == "different"  # an adapter with NaN weights shows
    assert compare_readings([(nan,), (nan,)], [(nan,)]) == "unclear"


async def test_engine_that_is_silent_slow_or_gives_no_numbers_is_unknown():
    async def silent(_adapter: str | None, _prompt: Sequence[int]) -> Fingerprint | None:
        raise EngineSilent("HTTP 503")

    async def without_numbers(_adapter: str | None, _prompt: Sequence[int]) -> Fingerprint | None:
        return None

    async def hanging(_adapter: str | None, _prompt: Sequence[int]) -> Fingerprint | None:
        await asyncio.Event().wait()
        raise AssertionError

    found = [
        await run_canary(ask, "a", readings=BaseReadings(), timeout_s=0.01)
        for ask in (silent, without_numbers, hanging)
    ]
    assert [result.outcome for result in found] == ["unknown"] * 3
    assert [result.found for result in found] == [
        "HTTP 503",
        "the engine gives no log-probabilities, scores or embeddings",
        "the engine did not answer within 0.01 s",
    ]


async def test_requests_of_a_noisy_engine_are_bounded():
    engine = CountedEngine(noise=0.2)
    await run(engine)
    assert len(engine.asked) <= 2 * MOST_READINGS * len(PROMPTS)


def test_prompts_are_shorter_than_a_block_and_in_every_vocabulary():
    assert all(len(prompt) < 16 and set(prompt) <= set(range(256)) for prompt in PROMPTS)
    assert len({prompt[0] for prompt in PROMPTS}) == len(PROMPTS)


def test_numbers_are_read_from_the_answers_of_each_route():
    completion = {"choices": [{"logprobs": {"top_logprobs": [{"token_id:5": -2.0, "token_id:9": -0.5}]}}]}
    answers = {
        "/v1/completions": (completion, (-0.5, -2.0)),
        "/classify": ({"data": [{"label": "x", "probs": [0.25, 0.75], "num_classes": 2}]}, (0.25, 0.75)),
        "/v1/embeddings": ({"data": [{"embedding": [0.5, -0.5]}]}, (0.5, -0.5)),
        "/pooling": ({"data": [{"data": [[1.0], [2.0]]}]}, (1.0, 2.0)),
    }
    assert tuple(answers) == canary.VLLM_ROUTES
    for route, (answer, numbers) in answers.items():
        assert canary.vllm_fingerprint(route, answer) == numbers
        for broken in ({}, [], {"data": []}, {"choices": [{"logprobs": None}]}, {"data": [{"embedding": "AAAA"}]}):
            assert canary.vllm_fingerprint(route, broken) is None
    assert canary.sglang_fingerprint({"meta_info": {"output_top_logprobs": [[[-1.5, 7, None], [-0.5, 3, None]]]}}) == (
        -0.5,
        -1.5,
    )
    assert canary.sglang_fingerprint({"meta_info": {}}) is None


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_an_engine_that_fails_or_is_too_busy_is_silent(status):
    with pytest.raises(EngineSilent, match=f"http://e/v1/completions: HTTP {status}"):
        canary.answered_numbers("http://e/v1/completions", status, b"{}", lambda _: (1.0,))


@pytest.mark.parametrize(("status", "content"), [(400, b"{}"), (404, b"{}"), (200, b"no JSON"), (200, b"\xff")])
def test_a_refusal_and_an_answer_without_json_have_no_numbers(status, content):
    assert canary.answered_numbers("http://e/classify", status, content, lambda _: (1.0,)) is None
    assert canary.answered_numbers("http://e/classify", 200, b"{}", lambda _: (1.0,)) == (1.0,)


async def test_the_route_that_gave_numbers_is_the_only_one_that_is_asked_from_then_on():
    asked = []

    async def post(route, body, _read):
        asked.append((route, body["model"]))
        return (0.5,) if route == "/v1/embeddings" else None

    questions = canary.VllmQuestions()
    assert await questions.ask(post, "base", PROMPTS[0]) == (0.5,)
    assert await questions.ask(post, "a@1", PROMPTS[0]) == (0.5,)
    before = ["/v1/completions", "/classify", "/v1/embeddings"]
    assert asked == [*((route, "base") for route in before), ("/v1/embeddings", "a@1")]
