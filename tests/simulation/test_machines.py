"""Machines that lose power or have a full disk, and engines in trouble."""

import asyncio
import fcntl
import os

import httpx
import pytest

from tests.simulation.fleet import until
from tests.simulation.nodes import Node
from tests.simulation.programs import EngineTrouble


async def test_a_killed_process_leaves_files_alone_that_others_have_opened_since(simulation):
    path = simulation.folder / "lock"

    async def hold_locks(node):
        kept = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(kept, fcntl.LOCK_EX)
        released = os.open(simulation.folder / "other", os.O_CREAT | os.O_RDWR)
        fcntl.flock(released, fcntl.LOCK_EX)
        os.close(released)
        await node.stop.wait()

    node = Node(simulation.loop, "holder", "10.0.9.1")
    node.start(hold_locks)
    await asyncio.sleep(0.1)
    again, in_its_place = (os.open(name, os.O_RDWR) for name in (path, os.devnull))
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    node.kill()
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (again, in_its_place):
        os.close(descriptor)


async def test_what_was_registered_outlives_a_power_loss_of_the_orchestrators(simulation):
    fleet = await simulation.fleet(workers=1, orchestrators=2)
    fleet.processes.keep_journals()
    for number in range(5):
        await fleet.register(f"a/v{number}", simulation.adapter(f"v{number}", seed=number))
    fleet.processes.lose_power("orch0", away_s=1.0)
    await until(fleet.is_whole, what="the orchestrators are back")
    for number in range(5):
        assert await fleet.answered_by(f"a/v{number}") == f"a/v{number}"


async def test_worker_that_lost_its_power_serves_again(simulation):
    fleet = await simulation.fleet(workers=1)
    fleet.processes.keep_journals()
    await fleet.register("a", simulation.adapter("a"))
    assert await fleet.answered_by("a") == "a"
    fleet.processes.lose_power("w0", away_s=1.0)
    await asyncio.sleep(5)
    await until(fleet.is_whole, what="the worker is back")
    assert await fleet.answered_by("a") == "a"


async def test_router_that_had_no_room_for_its_catalog_starts_later_by_the_newest(simulation):
    fleet = await simulation.fleet(workers=1)
    await fleet.register("a", simulation.adapter("a"))
    fleet.processes.fill_disk("router0", for_s=10)
    await fleet.register("b", simulation.adapter("b", seed=1))
    assert await fleet.answered_by("b") == "b"
    await asyncio.sleep(60)  # room again, and the next try to save
    fleet.kill("orch0", away_s=None)
    fleet.kill("router0", away_s=1.0)
    await until(lambda: answers(fleet, "b"), what="the router goes by its saved catalog")


async def answers(fleet, name):
    try:
        return await fleet.answered_by(name) == name
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("how", ["hangs", "is late"])
async def test_request_to_an_engine_that_does_not_answer_yet_is_answered_then(simulation, how):
    fleet = await simulation.fleet(workers=1)
    await fleet.register("a", simulation.adapter("a"))
    assert await fleet.answered_by("a") == "a"
    trouble = fleet.processes.services.troubles["engine0"] = EngineTrouble(how, "/v1/completions")
    fleet.processes.after(4, trouble.end)
    began = simulation.loop.time()
    assert await fleet.answered_by("a") == "a"
    assert simulation.loop.time() - began >= 4
