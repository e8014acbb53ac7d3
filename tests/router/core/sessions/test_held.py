"""Whose blocks the next prompt pushes out of an engine's cache."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions.book import SessionBook
from router.core.sessions.held import HeldSessions
from router.core.sessions.session import Session

ENGINE_NAME = "sql/v1@0123456789ab"


class Engine:
    """The sessions of one engine with a cache of so many tokens."""

    def __init__(self, kv_tokens=1000, residents=(ENGINE_NAME,)):
        self.book = SessionBook()
        self.held = HeldSessions(kv_tokens, residents=residents)

    def turn(self, name, tokens, cached=0, now=0.0, engine_name=ENGINE_NAME, is_running=False, **more):
        state = self.book.begin_turn(Session(name, **more), (), 0, "", now)
        self.held.place(state, engine_name, tokens, tokens - cached)
        if not is_running:
            state.end_turn(now)
            self.held.end_turn(state)
        return state

    def tokens_lost(self, now=0.0):
        """What goes, in order, and whether anybody may miss it."""
        return [(tokens, chance > 0) for tokens, chance, _ in self.held.victims(now)]


def test_unused_blocks_go_first_and_then_the_session_used_least_lately():
    engine = Engine()
    for name, tokens in (("a", 300), ("b", 200), ("a", 400)):
        engine.turn(name, tokens)
    assert engine.tokens_lost() == [(400, False), (200, True), (400, True)]


def test_what_a_prompt_pushes_out_is_gone_and_is_not_lost_again():
    engine = Engine()
    for name, tokens in (("a", 600), ("b", 300), ("c", 400)):
        engine.turn(name, tokens)
    assert engine.tokens_lost() == [(0, False), (300, True), (300, True), (400, True)]


def test_what_sessions_share_is_counted_once():
    engine = Engine()
    engine.turn("a", 600)
    engine.turn("b", 700, cached=500)
    assert engine.tokens_lost() == [(200, False), (600, True), (200, True)]
    engine.turn("b", 800, cached=700)
    assert engine.tokens_lost() == [(100, False), (600, True), (300, True)]


def test_blocks_of_running_requests_cannot_go():
    engine = Engine()
    engine.turn("a", 300, is_running=True)
    engine.turn("b", 200)
    assert engine.tokens_lost() == [(500, False), (200, True)]


def test_kv_of_a_retired_version_or_of_a_program_that_is_over_is_missed_by_nobody():
    engine = Engine()
    engine.turn("old", 100, engine_name="sql/v1@ba9876543210")
    engine.turn("base", 110, engine_name="")
    engine.turn("helper", 120, parent="task")
    engine.turn("task", 130, is_over=True)
    assert engine.tokens_lost() == [(540, False), (100, False), (110, True), (120, False), (130, False)]


def test_the_chance_that_a_session_returns_falls_while_it_is_idle():
    engine = Engine()
    for n in range(40):
        engine.turn("a", 300, now=5.0 * n)
    (_, soon, _), (_, late, _) = engine.held.victims(196.0)[1], engine.held.victims(296.0)[1]
    assert soon > 2 * late > 0


def test_a_session_that_returned_is_no_victim_any_more():
    engine = Engine()
    engine.turn("a", 300)
    assert engine.tokens_lost() == [(700, False), (300, True)]
    engine.turn("a", 300, cached=299, is_running=True)
    assert engine.tokens_lost() == [(700, False)]


def test_nothing_is_known_to_be_lost_where_the_size_of_the_cache_is_not_known():
    engine = Engine(inf)
    engine.turn("a", 300)
    assert engine.held.victims(0.0) == ()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 700), st.floats(0, 1), st.booleans()), max_size=40),
    st.integers(1, 2000),
)
def test_sessions_never_hold_more_than_the_cache(turns, kv_tokens):
    engine = Engine(kv_tokens)
    for now, (number, tokens, share, is_running) in enumerate(turns):
        engine.turn(f"s{number}", tokens, int(share * tokens), now=float(now), is_running=is_running)
        held = [one.tokens for one in engine.held._order.values()]
        assert engine.held.tokens == pytest.approx(sum(held))
        assert engine.held.tokens <= kv_tokens
        assert all(tokens >= 0 for tokens in held)
