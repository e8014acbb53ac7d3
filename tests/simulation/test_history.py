"""The search for an order of a history, compared with trying every order."""

from itertools import permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.history import Operation, Outcome, Register


def operation(kind, invoked_at, returned_at, value, outcome=Outcome.OK, *, is_final=False):
    return Operation(kind, "name", invoked_at, "client", value, returned_at, outcome, is_final)


def is_explained_by(order, operations):
    """Whether these operations explain every read, in this order. None may follow one that began after its end."""
    for place, each in enumerate(order):
        if any(later.outcome is Outcome.OK and later.returned_at < each.invoked_at for later in order[place:]):
            return False
    value = None
    for each in order:
        if each.kind == "ask":
            if each.value != value:
                return False
        else:
            value = each.value
    return True


def has_order(operations):
    must = [each for each in operations if each.outcome is Outcome.OK]
    may = [each for each in operations if each.outcome is Outcome.UNKNOWN]
    chosen = [must + [each for bit, each in enumerate(may) if subset >> bit & 1] for subset in range(1 << len(may))]
    return any(is_explained_by(order, operations) for some in chosen for order in permutations(some))


@st.composite
def histories(draw):
    operations = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["ask", "ask", "write", "delete"]))
        began = draw(st.integers(0, 8))
        outcome = Outcome.OK if kind == "ask" else draw(st.sampled_from([Outcome.OK, Outcome.OK, Outcome.UNKNOWN]))
        value = None if kind == "delete" else draw(st.integers(0, 2))
        ended = inf if outcome is Outcome.UNKNOWN and draw(st.booleans()) else began + draw(st.integers(0, 4)) + 0.5
        operations.append(operation(kind, began, ended, value, outcome))
    return operations


@given(histories())
def test_history_has_an_explanation_where_some_order_of_it_is_one(operations):
    found = Register.of(operations).explanation()
    assert (found is not None) == has_order(operations)
    if found is not None:
        assert is_explained_by(found, operations)


def test_answer_of_a_former_version_after_a_publish_has_no_explanation():
    writes = [operation("write", 0, 1, 1), operation("write", 2, 3, 2)]
    assert Register.of([*writes, operation("ask", 2.5, 4, 1)]).explanation() is not None
    assert Register.of([*writes, operation("ask", 3.5, 4, 1)]).explanation() is None


def test_answer_after_a_deletion_has_no_explanation_unless_a_write_may_still_come():
    gone = [operation("write", 0, 1, 1), operation("delete", 2, 3, None)]
    late = operation("ask", 4, 5, 1)
    assert Register.of([*gone, late]).explanation() is None
    assert Register.of([operation("write", 0, 9, 1, Outcome.UNKNOWN), gone[0], gone[1], late]).explanation() is not None


@pytest.mark.parametrize(("is_final", "is_explained"), [(False, True), (True, False)])
def test_name_without_an_answer_counts_only_at_the_end(is_final, is_explained):
    history = [operation("write", 0, 1, 1), operation("ask", 2, 3, None, is_final=is_final)]
    assert (Register.of(history).explanation() is not None) == is_explained


def test_refused_write_has_no_effect():
    history = [operation("write", 0, 1, 1), operation("write", 2, 3, 2, Outcome.REFUSED)]
    assert Register.of([*history, operation("ask", 4, 5, 1)]).explanation() is not None
    assert Register.of([*history, operation("ask", 4, 5, 2)]).explanation() is None
