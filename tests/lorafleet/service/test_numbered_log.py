"""A bounded log of numbered entries against a plain list of all that was ever added."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.service.numbered_log import NumberedLog
from tests.patience import within

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.just("forget"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 30)),
    ),
    max_size=40,
)


@given(STEPS, st.one_of(st.none(), st.integers(1, 6)), st.integers(-1, 5))
def test_a_log_has_the_newest_entries_and_says_from_which_number_on_none_is_missing(steps, most, first):
    log = NumberedLog(most, last=first)
    kept, last, oldest = [], first, first
    for step, number in steps:
        if step == "add":
            last += number
            assert log.add(f"entry {last}", last) == last
            kept.append(last)
            if most is not None and len(kept) > most:
                oldest = kept.pop(0)
        elif step == "forget":
            oldest = max([oldest, *(each for each in kept if each <= number)])
            kept = [each for each in kept if each > number]
            log.forget_up_to(number)
        elif step == "drop" and kept:
            oldest = kept.pop(0)
            assert log.drop_oldest() == f"entry {oldest}"
        elif step == "restart":
            kept, last, oldest = [], number, number
            log.restart(number)
        assert (log.last, log.oldest, len(log)) == (last, oldest, len(kept))
        for after in range(-2, last + 3):
            newer = [f"entry {each}" for each in kept if each > after]
            assert log.after(after) == newer
            assert log.after(after, most=2) == newer[:2]
            assert log.has_all_after(after) == (oldest <= after <= last)


def test_entries_without_a_number_get_the_next_one_and_a_number_cannot_come_twice():
    log = NumberedLog(5, last=7)
    assert (log.next_number, log.add("a"), log.add("b", 12), log.add("c")) == (8, 8, 12, 13)
    with pytest.raises(AssertionError):
        log.add("d", 13)
    assert log.after(0) == ["a", "b", "c"]


async def test_a_follower_gets_every_entry_in_order_and_ends_when_the_log_is_over():
    log, over = NumberedLog(100), []
    log.add(0)
    found = []

    async def follow():
        async for entries in log.follow(0, idle_s=60, is_over=lambda: bool(over)):
            found.extend(entries)

    following = asyncio.create_task(follow())
    for number in range(1, 50):
        log.add(number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    over.append(True)
    log.changed.notify()
    async with within(10):
        await following
    assert found == list(range(50))


async def test_a_follower_that_falls_behind_ends_without_a_gap():
    log = NumberedLog(2)
    following = log.follow(0, idle_s=60)
    log.add("a")
    assert await anext(following) == ["a"]
    for entry in "bcd":
        log.add(entry)
    assert [entries async for entries in following] == []


async def test_a_follower_of_a_quiet_log_gets_empty_lists():
    following = NumberedLog(2).follow(0, idle_s=0.001)
    assert [await anext(following), await anext(following)] == [[], []]
    await following.aclose()
