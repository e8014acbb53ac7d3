"""Answer texts of the sim engine: equal for equal prompts, and cut at stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.sim.text import TextGenerator, top_logprobs


class WordTokenizer:
    """Every token below 50 is a word; 0 is the end token."""

    def decode(self, tokens):
        return "".join(f" {chr(97 + token // 26)}{chr(97 + token % 26)}" if token else "" for token in tokens)


def generator(*, seed=0, natural_tokens=0):
    return TextGenerator(WordTokenizer(), vocabulary=50, eos=0, seed=seed, natural_tokens=natural_tokens)


def reply(made, prompt=(1, 2), digest=b"", *, choice=0, max_tokens=20, ignore_eos=False, stops=()):
    return made.reply(digest, prompt, choice=choice, max_tokens=max_tokens, ignore_eos=ignore_eos, stops=stops)


prompts = st.lists(st.integers(0, 49), min_size=1, max_size=8)


@given(prompts, st.binary(max_size=4), st.integers(1, 30))
def test_equal_prompts_have_equal_answers_and_longer_ones_begin_alike(prompt, digest, max_tokens):
    one, again = (reply(generator(), prompt, digest, max_tokens=max_tokens) for _ in range(2))
    longer = reply(generator(), prompt, digest, max_tokens=max_tokens + 5)
    assert one == again
    assert longer.token_ids[:max_tokens] == one.token_ids
    assert len(one.token_ids) == len(one.pieces) == max_tokens


def test_another_adapter_choice_or_seed_has_another_answer():
    answers = [
        reply(generator()),
        reply(generator(), digest=b"sql"),
        reply(generator(), choice=1),
        reply(generator(seed=1)),
    ]
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


@pytest.mark.parametrize(("ignore_eos", "length", "ends"), [(False, 6, "stop"), (True, 20, "length")])
def test_an_answer_ends_itself_unless_the_client_ignores_that(ignore_eos, length, ends):
    answer = reply(generator(natural_tokens=6), ignore_eos=ignore_eos)
    assert (len(answer.token_ids), answer.finish_reason.value) == (length, ends)
    assert (answer.token_ids[-1] == 0) == (ends == "stop")


@given(prompts, st.data())
def test_an_answer_is_cut_before_the_first_of_its_stop_strings(prompt, data):
    whole = "".join(reply(generator(), prompt).pieces)
    start = data.draw(st.integers(0, len(whole) - 3))
    stop = whole[start : start + 3]
    answer = reply(generator(), prompt, stops=["not in it", stop])
    assert "".join(answer.pieces) == whole[: whole.index(stop)]
    assert (answer.finish_reason.value, answer.stop_reason) == ("stop", stop)


@given(prompts, prompts, st.integers(0, 5))
def test_the_answers_own_token_is_the_likeliest_at_its_place(prompt, tokens, count):
    places = top_logprobs(b"", prompt, tokens, count)
    assert [next(iter(place)) for place in places] == tokens
    for place in places:
        values = list(place.values())
        assert values == sorted(values, reverse=True)
        assert len(values) == max(1, count)
        assert all(value < 0 for value in values)
