"""A bound on long prompts, and turns on the event loop."""

import asyncio
from contextlib import ExitStack
from itertools import pairwise

import pytest

from router.tokenizing.threads import SliceTurns, TokenizerThreads, TooManyLongPrompts


def admit_many(threads):
    with ExitStack() as prompts:
        for _ in range(1000):
            prompts.enter_context(threads.admit())


def test_prompts_beyond_the_bound_are_refused_until_one_is_done():
    threads = TokenizerThreads(1, "test")
    with ExitStack() as first:
        first.enter_context(threads.admit())
        with pytest.raises(TooManyLongPrompts):
            admit_many(threads)
        first.enter_context(threads.admit())
    threads.close()


async def test_between_two_steps_of_prompts_everything_that_is_ready_runs():
    turns, order = SliceTurns(), []

    async def prompt(name):
        for _ in range(2):
            await turns.wait()
            order.append(name)
            asyncio.get_running_loop().call_soon(order.append, "other work")

    await asyncio.gather(prompt("a"), prompt("b"))
    steps = [at for at, name in enumerate(order) if name != "other work"]
    assert len(steps) == 4
    assert all(later - earlier > 1 for earlier, later in pairwise(steps))
