"""Operations of an agent: cancelled until the engine is called, all of them when it stops; and the order of fetches."""

import asyncio

import pytest

from tests.patience import until, within
from workers.agent.operations import AgentOperations, FetchOrder
from workers.core.errors import AgentRequestError, EngineError


async def begun(operations, digest="d1", *, is_committed=False):
    """A running operation on `sql/v1`, and the event that lets it end."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def work():
        if is_committed:
            operations.commit("sql/v1")
        has_begun.set()
        await may_end.wait()
        return "loaded"

    task = asyncio.create_task(operations.run("sql/v1", digest, work()))
    async with within(5):
        await has_begun.wait()
    return task, may_end


async def test_a_cancelled_load_says_so_and_another_version_goes_on():
    operations = AgentOperations()
    first, _ = await begun(operations, "d1")
    second, may_end = await begun(operations, "d2")
    assert await operations.cancel("sql/v1", "d1")
    with pytest.raises(AgentRequestError, match="cancelled by an unload"):
        await first
    may_end.set()
    assert await second == "loaded"
    assert not await operations.cancel("sql/v1", None)


async def test_a_committed_load_is_not_cancelled():
    operations = AgentOperations()
    load, may_end = await begun(operations, is_committed=True)
    assert not await operations.cancel("sql/v1", None)
    operations.cancel_all()
    may_end.set()
    assert await load == "loaded"


async def test_a_stopping_agent_sends_its_loads_to_another():
    operations = AgentOperations()
    load, _ = await begun(operations)
    operations.cancel_all()
    with pytest.raises(EngineError, match="load on another one"):
        await load


async def test_fetches_ahead_of_loads_wait_for_those_of_loads_and_for_each_other():
    order, began, may_end = FetchOrder(), list[str](), asyncio.Event()

    async def ahead(name):
        async with order.ahead_of_load():
            began.append(name)
            await may_end.wait()

    with order.for_load():
        with order.for_load():
            tasks = [asyncio.create_task(ahead(name)) for name in "ab"]
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert began == [], "one load still fetches"
    await until(lambda: began == ["a"])
    with order.for_load():
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        await asyncio.sleep(0)
        assert began == ["a"], "a load that fetches goes before the next one"
    may_end.set()
    await tasks[1]
    assert began == ["a", "b"]
