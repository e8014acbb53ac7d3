"""The format of acceptance files, and the rule that compares an engine with a trainer."""

import json
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.acceptance import (
    FLOOR,
    MOST_BYTES,
    MOST_TOKENS,
    AcceptanceError,
    AcceptanceFile,
    CertifiedPrompt,
    Trainer,
    acceptance_content,
    compare_logprobs,
    parse_acceptance,
    sglang_prompt_logprobs,
    vllm_prompt_logprobs,
)
from orchestrator.model.acceptance import AdapterAcceptance

TOKENS = 64
HEAD = '{"format": "lorafleet-acceptance/1"}'


def line(tokens: int = 8, **changes: object) -> str:
    numbers = [-1.0] * (tokens - 1)
    return json.dumps({"prompt": list(range(tokens)), "logprobs": numbers, "base_logprobs": numbers} | changes)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "has 0 lines; expected 2 to 4"),
        (HEAD, "has 1 lines; expected 2 to 4"),
        ("\n".join([HEAD, *[line()] * 4]), "has 5 lines"),
        (HEAD + "\nnope", "line 2"),
        ('{"format": "other/1"}\n' + line(), "line 1: format is 'other/1'; accepted is 'lorafleet-acceptance/1'"),
        ('{"formt": ""}\n' + line(), "line 1: Object contains unknown field `formt`"),
        (HEAD + "\n" + line(more=1), "unknown field `more`"),
        (HEAD + "\n" + line(7), "prompt has 7 tokens; accepted are 8 to 256"),
        (HEAD + "\n" + line(MOST_TOKENS + 1), "prompt has 257 tokens"),
        (HEAD + "\n" + line(logprobs=[-1.0] * 8), "logprobs has 8 numbers; expected 7"),
        (HEAD + "\n" + line(base_logprobs=[]), "base_logprobs has 0 numbers"),
        (HEAD + "\n" + line(logprobs=[0.5] * 7), "line 2: Expected `float` <= 0.001"),
        (HEAD + "\n" + line().replace("-1.0", "NaN"), "line 2"),
        (HEAD + "\n" + line(prompt=[-1] * 8), "line 2: Expected `int` >= 0"),
        (HEAD + "\n" + "x" * MOST_BYTES, "accepted are at most"),
        ("[" * 5000 + "\n" + line(), "line 1"),
    ],
)
def test_broken_file_is_refused_by_the_line_and_the_rule(content, named):
    with pytest.raises(AcceptanceError, match=r"acceptance\.jsonl") as refused:
        parse_acceptance(content.encode())
    assert named in str(refused.value)


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_no_bytes_raise_anything_else(content):
    with suppress(AcceptanceError):
        parse_acceptance(content)


def file_of(base: list[float], change: list[float], dtype: str = "bfloat16") -> AcceptanceFile:
    """A file with one prompt whose base numbers the adapter changes."""
    trained = tuple(min(0.0, a + b) for a, b in zip(base, change, strict=True))
    prompt = CertifiedPrompt(prompt=tuple(range(len(base) + 1)), logprobs=trained, base_logprobs=tuple(base))
    trainer = Trainer(model="org/base", dtype=dtype, libraries={"peft": "0.19"})
    return parse_acceptance(acceptance_content(trainer, [prompt]))


def drawn(seed: int, size: float, tokens: int = TOKENS) -> list[float]:
    rng = Random(seed)
    return [rng.gauss(0, size) for _ in range(tokens)]


def moved(row: list[float] | tuple[float, ...], by: list[float], scale: float = 1.0) -> list[float]:
    return [a + scale * b for a, b in zip(row, by, strict=True)]


seeds = st.integers(0, 10**6)
NOISES = st.sampled_from([1e-6, 1e-4, 1e-3, 0.01, 0.03])


@given(seeds, NOISES)
def test_engine_with_the_trainers_numbers_and_noise_is_equal(seed, noise):
    base = [-5 + each for each in drawn(seed, 1.0)]
    file = file_of(base, drawn(seed + 1, max(0.1, 8 * noise)))
    (prompt,) = file.prompts
    served = moved(prompt.logprobs, drawn(seed + 2, noise))
    found = compare_logprobs(file, [served], [moved(base, drawn(seed + 3, noise))])
    assert found.result == "equal", found


@given(seeds, NOISES, st.sampled_from([0.0, 0.5, 2.0, -1.0]))
def test_engine_at_another_scale_differs_and_is_named(seed, noise, scale):
    base = [-9 + each for each in drawn(seed, 1.0)]
    change = drawn(seed + 1, max(0.2, 12 * noise))
    file = file_of(base, change)
    served = moved(moved(base, change, scale), drawn(seed + 2, noise))
    found = compare_logprobs(file, [served], [moved(base, drawn(seed + 3, noise))])
    assert found.result == "differs", found
    assert found.looks_like == {0.0: "base", -1.0: "other"}.get(scale, "scaled")
    assert found.scale == pytest.approx(scale, abs=0.25)


@given(seeds, NOISES)
def test_another_adapter_is_named_as_such(seed, noise):
    base = [-9 + each for each in drawn(seed, 1.0, 128)]
    file = file_of(base, drawn(seed + 1, max(0.2, 12 * noise), 128))
    served = moved(base, drawn(seed + 2, max(0.2, 12 * noise), 128))
    found = compare_logprobs(file, [served], [base])
    assert (found.result, found.looks_like) == ("differs", "other")


@given(seeds, NOISES)
def test_effect_below_the_noise_proves_nothing(seed, noise):
    base = [-5 + each for each in drawn(seed, 1.0)]
    file = file_of(base, drawn(seed + 1, 0.3 * noise))
    found = compare_logprobs(file, [base], [moved(base, [noise] * TOKENS)])
    assert found.result == "unknown"
    assert "certify it with prompts of its training" in found.why


def test_other_base_model_is_told_from_the_adapter():
    base = [-5 + each for each in drawn(1, 1.0)]
    file = file_of(base, drawn(2, 1.0))
    found = compare_logprobs(file, [file.prompts[0].logprobs], [moved(base, drawn(3, 0.5))])
    assert (found.result, found.looks_like) == ("differs", "other_base")


@pytest.mark.parametrize("broken", [[], [-1.0], [float("nan")] * TOKENS, [float("-inf")] * TOKENS])
def test_answer_without_a_number_for_each_token_is_unknown(broken):
    base = [-5 + each for each in drawn(1, 1.0)]
    found: AdapterAcceptance = compare_logprobs(file_of(base, drawn(2, 1.0)), [broken], [base])
    assert (found.result, found.distance, found.is_unanswered) == ("unknown", None, False)


def test_two_float32_sides_allow_no_other_weights():
    base = [-5 + each for each in drawn(1, 1.0)]
    file = file_of(base, drawn(2, 1.0), dtype="float32")
    (prompt,) = file.prompts
    noise = drawn(3, 0.03)
    answers = [moved(prompt.logprobs, noise)], [moved(base, noise)]
    assert compare_logprobs(file, *answers).result == "equal"
    found = compare_logprobs(file, *answers, engine_dtype="float32")
    assert (found.result, found.looks_like) == ("differs", "other_base")


def test_strong_adapter_that_multiplies_the_noise_is_unknown_and_not_refused():
    base = [-9 + each for each in drawn(1, 1.0)]
    file = file_of(base, drawn(2, 3.0))
    (prompt,), noisy = file.prompts, moved(base, drawn(4, 0.02))
    found = [compare_logprobs(file, [moved(prompt.logprobs, drawn(5, size))], [noisy]) for size in (0.1, 0.9, 5.0)]
    assert [each.result for each in found] == ["equal", "unknown", "differs"]
    assert "multiplies the noise" in found[1].why
    too_strong = file_of(base, drawn(2, 9.0))
    found = compare_logprobs(too_strong, [too_strong.prompts[0].logprobs], [moved(base, drawn(4, 0.1))])
    assert (found.result, "certify it in float32" in found.why) == ("unknown", True), found


@given(seeds, st.floats(0, 0.9))
def test_less_than_the_floor_is_no_difference(seed, part):
    base = [-5 + each for each in drawn(seed, 1.0)]
    file = file_of(base, drawn(seed + 1, 1.0))
    served = moved(file.prompts[0].logprobs, [part * FLOOR] * TOKENS)
    assert compare_logprobs(file, [served], [base]).result == "equal"


def test_numbers_are_read_from_engines_answers_in_the_order_of_the_prompts():
    prompts = [(5, 6, 7), (8, 9, 4)]
    rows = [
        [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}}],
        [None, {"9": {"logprob": -3.0}}, {"4": {"logprob": -4.0}}],
    ]
    choices = [{"index": 1, "prompt_logprobs": rows[1]}, {"index": 0, "prompt_logprobs": rows[0]}]
    assert vllm_prompt_logprobs(prompts, {"choices": choices}) == [[-1.0, -2.0], [-3.0, -4.0]]
    assert vllm_prompt_logprobs(prompts, {"choices": choices[:1]}) is None
    assert vllm_prompt_logprobs(prompts, {"choices": [{"index": 0, "prompt_logprobs": None}] * 2}) is None
    found = [
        {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]}},
        {"meta_info": {"input_token_logprobs": [[None, 8, None], [-3.0, 9, None], [-4.0, 4, None]]}},
    ]
    assert sglang_prompt_logprobs(prompts, found) == [[-1.0, -2.0], [-3.0, -4.0]]
    assert sglang_prompt_logprobs([prompts[1], prompts[0]], found) is None
    assert sglang_prompt_logprobs(prompts, {"error": {}}) is None
