"""The turns of `benchmarks.sessions`, and the figures of their answers."""

from itertools import pairwise

import pytest

from benchmarks.sessions import BLOCK, ENGINES, SESSIONS, SessionTurn, TurnAnswer, rows, turns
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer


def test_a_sessions_turns_begin_with_its_turn_before_and_the_sessions_alternate():
    found = turns(1)
    by_session: dict[str, list[SessionTurn]] = {}
    for turn in found:
        by_session.setdefault(turn.session, []).append(turn)
    assert len(by_session) == SESSIONS
    for of_session in by_session.values():
        assert all(after.prompt.startswith(before.prompt) for before, after in pairwise(of_session))
    assert sum(before.session != after.session for before, after in pairwise(found)) > 0.8 * len(found)
    assert turns(1) == found != turns(2)


def test_the_sessions_last_prompts_need_more_blocks_than_both_engines_have(tmp_path):
    tokenizer = ChatTokenizer.from_dir(make_model(tmp_path / "model"))
    for seed in (1, 2, 3):
        last = {turn.session: turn.prompt for turn in turns(seed)}
        tokens = [len(tokenizer.completion_ids(prompt)) for prompt in last.values()]
        assert sum(tokens) > 1.1 * ENGINES * 300 * BLOCK
        assert max(tokens) < 2000


def test_rows_are_shares_of_all_tokens_and_errors_of_the_measured():
    answers = [TurnAnswer(100, 0, 0.2, 0.1), TurnAnswer(300, 300, 0.1, 0.1)]
    found = {row.what.partition(", eviction")[0]: row.value for row in rows([answers], 1.0, "x")}
    assert found["cached prompt tokens"] == pytest.approx(75.0)
    assert found["first token, mean"] == pytest.approx(150.0)
    assert found["predicted first token off, median"] == pytest.approx(0.0)
    assert found["predicted first token off, p90"] == pytest.approx(50.0)
