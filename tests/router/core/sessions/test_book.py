"""Which requests are turns of one session, and of which program."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions.book import ENDED_S, GIVEN_UP_S, SessionBook
from router.core.sessions.session import NO_SESSION, Session

SQL = "sql/v1"


def turn(book, session=NO_SESSION, chain=(), depth=0, now=0.0, took_s=0.0, **more):
    """A whole turn."""
    state = book.begin_turn(session, chain, depth, SQL, now, **more)
    if state is not None:
        state.end_turn(now + took_s)
    return state


def test_turns_with_one_name_are_one_session_whatever_their_prompts():
    book = SessionBook()
    first = turn(book, Session("a"), (1, 2))
    assert turn(book, Session("a"), (7,)) is first
    assert turn(book, Session("b"), (1, 2)) is not first
    assert len(book) == 2


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=40),
    st.integers(0, 3),
)
def test_a_conversation_without_a_name_is_found_by_the_prompt_that_it_repeats(turns, common):
    """Five conversations below one system prompt; each turn adds an answer and a message, and may be cached or not."""
    book, fresh = SessionBook(), iter(range(1, 1_000_000))
    system = tuple(next(fresh) for _ in range(common))
    chains, states = {}, {}
    for number, answered, said, is_cached in turns:
        before = chains.get(number, system)
        chain = (*before, *(next(fresh) for _ in range(answered + said)), next(fresh))
        # The engine has the prompt before and its answer, or it has lost all.
        state = turn(book, NO_SESSION, chain, len(before) + answered if is_cached and number in chains else 0)
        if number in chains:
            assert state is states[number]
        else:
            assert state not in states.values()
        chains[number], states[number] = chain, state
    assert len(book) == len(chains)


def test_a_prompt_that_only_begins_like_others_is_a_session_of_its_own():
    book, system = SessionBook(), tuple(range(200))
    states = {turn(book, NO_SESSION, (*system, 1000 + n), len(system)).key for n in range(9)}
    assert len(states) == 9


def test_tenants_that_send_one_prompt_have_a_session_each():
    book, chain = SessionBook(), (1, 2, 3)
    ours, theirs, open_ = (turn(book, Session(tenant=tenant), chain, 3) for tenant in ("lab", "shop", ""))
    assert len({id(state) for state in (ours, theirs, open_)}) == 3
    assert turn(book, Session(tenant="lab"), (*chain, 4, 5), 4) is ours
    assert turn(book, Session(tenant="shop"), (*chain, 4, 5), 4) is theirs


def test_a_prompt_of_less_than_a_block_has_no_session():
    assert turn(SessionBook(), NO_SESSION, ()) is None


def test_a_sub_agent_is_in_its_parents_program_and_so_is_its_own():
    book = SessionBook()
    parent = turn(book, Session("task"))
    child = turn(book, Session("helper", parent="task"))
    grandchild = turn(book, Session("helper's", parent="helper"))
    assert child.program is grandchild.program is parent.program
    assert turn(book, Session("other")).program is not parent.program


def test_a_program_that_is_named_holds_sessions_whose_parent_is_not_known():
    book = SessionBook()
    child = turn(book, Session("helper", parent="never seen", root="task"))
    assert turn(book, Session("task", root="task")).program is child.program


def test_the_last_request_of_a_program_ends_the_sessions_of_its_sub_agents():
    book = SessionBook()
    turn(book, Session("task"))
    child = turn(book, Session("helper", parent="task"))
    assert child.return_chance(1.0) > 0
    last = turn(book, Session("task", is_over=True))
    assert last.return_chance(1.0) == child.return_chance(1.0) == 0.0
    assert turn(book, Session("task")).return_chance(1.0) > 0  # it was not the last one


def test_a_session_with_a_request_under_way_returns_for_certain():
    state = SessionBook().begin_turn(Session("a"), (), 0, SQL, 0.0)
    assert state.return_chance(5000.0) == 1.0


def test_the_time_to_the_next_turn_is_learned_for_the_tenant_and_the_adapter():
    book = SessionBook()
    for n in range(50):
        turn(book, Session("a", tenant="lab"), now=60.0 * n, took_s=20.0)
    assert book.habits.habit("lab", SQL).usual_gap_s() == 64.0
    assert book.habits.habit("other", SQL).chance(0.0) == book.habits.habit("lab", "").chance(0.0) < 0.6


def test_neither_a_retry_nor_a_request_beside_another_is_a_return():
    book = SessionBook()
    state = turn(book, Session("a"))
    before = state.habit.gaps.copy()
    turn(book, Session("a"), is_again=True)
    assert state.habit.gaps == before
    book.begin_turn(Session("a"), (), 0, SQL, 1.0)
    after = state.habit.gaps.copy()
    book.begin_turn(Session("a"), (), 0, SQL, 1.0)
    assert state.habit.gaps == after != before


def test_a_session_that_was_idle_for_long_has_no_next_turn_until_that_comes():
    book = SessionBook()
    state = turn(book, Session("a"))
    turn(book, Session("b", is_over=True))  # its client has said so
    ended = state.habit.ended
    turn(book, Session("c"), now=GIVEN_UP_S)
    assert state.habit.ended == ended
    turn(book, Session("c"), now=GIVEN_UP_S + 1)
    assert state.habit.ended == ended + 1
    assert turn(book, Session("a"), now=GIVEN_UP_S + 5) is state
    assert state.habit.ended == ended
    assert state.habit.gaps[7] > 1  # 64 to 128 s


def test_a_session_that_was_idle_for_ten_minutes_is_forgotten():
    book = SessionBook()
    turn(book, Session("a"))
    running = book.begin_turn(Session("b"), (), 0, SQL, 0.0)
    turn(book, Session("c"), now=ENDED_S + 1)
    turn(book, Session("c"), now=ENDED_S + 2)
    assert len(book) == 2
    assert book.find(Session("b"), (), 0) is running


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.floats(0, 400), st.booleans()), max_size=80))
def test_what_is_remembered_is_bounded_however_many_sessions_come(turns):
    book, now = SessionBook(most_sessions=5), 0.0
    for number, is_named, passed_s, has_ended in turns:
        now += passed_s
        state = book.begin_turn(Session(f"s{number}") if is_named else NO_SESSION, (number + 1,), 0, SQL, now)
        if has_ended:
            state.end_turn(now)
        assert len(book) <= 5
        assert len(book._tails) <= len(book)
        assert book._expected.keys() <= book._sessions.keys()
        assert len(book._programs) <= 5
