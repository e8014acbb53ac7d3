"""Acceptance files from a trainer's own numbers."""

import hashlib
import sys

import pytest

from lorafleet.client import FleetError
from lorafleet.client.certify import certify_folder, write_acceptance
from lorafleet.engine.acceptance import FILE_NAME, MOST_TOKENS, read_acceptance
from tests.lorafleet.client.test_fleet import folder_with

PROMPTS = [list(range(start, start + 20)) for start in range(5)]


def numbers(prompt: list[int]) -> list[float]:
    return [-token / 100 for token in prompt[1:]]


def test_functions_and_lists_give_the_same_file_of_the_first_three_prompts(tmp_path):
    one, other = folder_with(tmp_path / "one"), folder_with(tmp_path / "other")
    write_acceptance(one, PROMPTS, numbers, numbers, model="org/base", dtype="torch.bfloat16", libraries={})
    rows = [numbers(prompt) for prompt in PROMPTS]
    write_acceptance(other, PROMPTS, rows, rows, model="org/base", dtype="bfloat16", libraries={})
    assert (one / FILE_NAME).read_bytes() == (other / FILE_NAME).read_bytes()
    file = read_acceptance(one)
    assert [list(each.prompt) for each in file.prompts] == PROMPTS[:3]
    assert list(file.prompts[0].logprobs) == numbers(PROMPTS[0])
    assert (file.trainer.dtype, len(file.trainer.adapter)) == ("bfloat16", 64)


def test_long_prompt_is_cut_with_its_numbers_and_a_chat_template_is_hashed(tmp_path):
    prompt = list(range(MOST_TOKENS + 50))
    write_acceptance(tmp_path, [prompt], numbers, [numbers(prompt)], chat_template=" {{ x }}\n")
    file = read_acceptance(tmp_path)
    assert len(file.prompts[0].prompt) == MOST_TOKENS
    assert len(file.prompts[0].base_logprobs) == MOST_TOKENS - 1
    assert file.trainer.chat_template == hashlib.sha256(b"{{ x }}").hexdigest()
    assert not file.trainer.adapter


@pytest.mark.parametrize(
    ("prompts", "rows", "said"),
    [
        ([], [], "has 1 lines; expected 2 to 4"),
        ([[1, 2, 3]], [[-1.0, -1.0]], "prompt has 3 tokens; accepted are 8 to 256"),
        (PROMPTS[:1], [], "log-probabilities of 0 prompts; expected 1"),
        (PROMPTS[:1], [[-1.0]], "logprobs has 1 numbers; expected 19"),
        (PROMPTS[:1], [[float("nan")] * 19], "line 2"),
    ],
)
def test_numbers_that_break_the_format_are_refused_and_write_nothing(tmp_path, prompts, rows, said):
    with pytest.raises(FleetError, match=said):
        write_acceptance(tmp_path, prompts, rows, rows)
    assert list(tmp_path.iterdir()) == []


def test_certifying_without_peft_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FleetError, match=r"lorafleet\[reference\]"):
        certify_folder(tmp_path, "base")
