"""How long a failure counts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.failures import ANYWHERE, FailureBook
from orchestrator.core.state import Observed

PAIR = ("a", "w0")


def fail(book, now, pair=PAIR, *, first_s=60.0, most_s=3600.0, least_s=0.0, seed=0):
    more = {"first_s": first_s, "most_s": most_s, "least_s": least_s, "now": now, "rng": Random(seed)}
    return book.add(pair, "source_failed", "no", **more)


def test_each_failure_in_a_row_counts_twice_as_long_up_to_a_limit():
    book, now, lasted = FailureBook(), 0.0, []
    for _ in range(10):
        until = fail(book, now).until
        lasted.append(until - now)
        now = until
    assert lasted[:3] == pytest.approx([lasted[0], lasted[0] * 2, lasted[0] * 4])
    assert lasted[-1] == pytest.approx(lasted[0] * 60)


def test_a_success_and_a_long_peace_end_the_row():
    book = FailureBook()
    first = fail(book, 0.0).until
    fail(book, first)
    book.succeeded(PAIR)
    assert book.current == {}
    assert fail(book, 1000.0).until == 1000.0 + first
    book.expire(5000.0)
    assert fail(book, 5000.0).until == 5000.0 + first


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_chance_only_ever_shortens_and_by_no_more_than_a_quarter(seed, times):
    book, now = FailureBook(), 100.0
    for n in range(times):
        until = fail(book, now, seed=seed).until
        nominal = min(60.0 * 2**n, 3600.0)
        assert 0.75 * nominal <= until - now <= nominal
        now = until


def test_what_the_worker_itself_asks_for_is_waited_out():
    assert fail(FailureBook(), 0.0, least_s=500.0).until == 500.0


def test_a_failure_anywhere_counts_on_every_worker_and_forgetting_an_adapter_forgets_it():
    book = FailureBook()
    fail(book, 0.0, ("a", ANYWHERE))
    fail(book, 0.0, ("b", "w1"))
    seen = Observed(failures=book.current)
    assert seen.failed("a", "w7", 1.0) is not None
    assert seen.failed("b", "w7", 1.0) is None
    assert book.shared("a", 1.0) is not None
    assert book.shared("a", 100.0) is None
    book.forget("a")
    assert list(book.current) == [("b", "w1")]
    assert book.adapters == {"b"}
