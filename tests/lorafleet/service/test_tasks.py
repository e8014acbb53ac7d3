"""Background tasks, and work that outlives a cancellation."""

import asyncio

import pytest

from lorafleet.service.tasks import BackgroundTasks, finish_even_if_cancelled
from tests.patience import within


async def test_tasks_that_begin_meanwhile_are_waited_for_too():
    tasks, done = BackgroundTasks(), []

    async def second():
        done.append(2)

    async def first():
        await asyncio.sleep(0)
        tasks.spawn(second())
        done.append(1)

    tasks.spawn(first())
    async with within(5):
        await tasks.wait_all()
    assert done == [1, 2]


async def test_a_cancelled_task_runs_its_finally_even_in_the_tick_that_made_it():
    tasks, ended = BackgroundTasks(), []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    tasks.spawn(work())
    tasks.cancel_all()
    async with within(5):
        await tasks.wait_all()
    assert ended == [True]


async def test_work_ends_before_the_cancellation_of_its_caller_is_raised():
    may_end, done, cancelled = asyncio.Event(), [], []

    async def work():
        await may_end.wait()
        done.append(True)

    caller = asyncio.create_task(finish_even_if_cancelled(work(), on_cancel=lambda: cancelled.append(True)))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    async with within(5):
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert (done, cancelled) == ([True], [True])
