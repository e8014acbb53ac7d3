"""The benchmarks' texts: the same in every run, of the length asked for, and of the script that their name says."""

import json

import pytest

from benchmarks.relay.prompts import of_length, of_script
from benchmarks.texts import SCRIPTS

ASCII = {"English", "code", "JSON"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_has_the_length_asked_for_and_is_the_same_every_time(script):
    text = SCRIPTS[script](5_000)
    assert len(text) == 5_000
    assert text == SCRIPTS[script](5_000)
    assert text.isascii() == (script in ASCII)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_does_not_repeat_itself(script):
    text = SCRIPTS[script](20_000)
    pieces = [text[start : start + 100] for start in range(0, len(text), 100)]
    assert len(set(pieces)) == len(pieces)


def test_one_curly_quote_is_all_that_is_not_ascii():
    text = SCRIPTS["English, one curly quote"](5_000)
    assert [character for character in text if not character.isascii()] == ["\u2019"]


def test_a_seen_prompt_begins_alike_in_every_request_and_a_new_one_does_not():
    seen, new = (of_length(33, is_new=is_new) for is_new in (False, True))
    one, other = (json.loads(seen.numbered("m", number))["messages"] for number in (10**9, 2 * 10**9))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]
    one, other = (json.loads(new.numbered("m", number))["messages"] for number in (10**9, 2 * 10**9))
    assert not any(first == second for first, second in zip(one, other, strict=True))
    assert sum(len(message["content"]) for message in one) == pytest.approx(33_000, rel=0.02)


def test_text_goes_out_without_escapes_as_clients_send_it():
    body = of_script("Chinese", 3_000).numbered("m", 10**9)
    assert "\\u" not in body
    assert len(body.encode()) > 9_000
